"""Where ours is for each name of TorchRec that we have: data, read by `shardwise.torchrec` and by `shardwise migrate`.

A name stands at the module of TorchRec that defines it; modules that only pass it on point to that one.
"""

from __future__ import annotations

from collections.abc import Mapping

from .torchrec_names_distributed import DISTRIBUTED

__all__ = ["FBGEMM", "TABLE"]

# our module, or the module of TorchRec that defines the names: `theirs=ours` where ours has another
NAMES: Mapping[str, Mapping[str, str]] = {
    **DISTRIBUTED,
    "torchrec": {
        "torchrec.sparse.jagged_tensor": "JaggedTensor KeyedJaggedTensor KeyedTensor",
        "torchrec.streamable": "Multistreamable Pipelineable",
        "torchrec.types": "DataType",
        "torchrec.modules.embedding_configs": "EmbeddingBagConfig EmbeddingConfig PoolingType",
        "torchrec.modules.embedding_modules": (
            "EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingCollection"
        ),
    },
    "torchrec.datasets.criteo": {
        "shardwise.data.criteo": (
            "CAT_FEATURE_COUNT DAYS DEFAULT_CAT_NAMES DEFAULT_COLUMN_NAMES DEFAULT_INT_NAMES DEFAULT_LABEL_NAME "
            "FREQUENCY_THRESHOLD INT_FEATURE_COUNT TOTAL_TRAINING_SAMPLES"
        ),
    },
    "torchrec.datasets.movielens": {
        "shardwise.data.movielens": (
            "DEFAULT_COLUMN_NAMES DEFAULT_MOVIES_COLUMN_NAMES DEFAULT_RATINGS_COLUMN_NAMES MOVIES_FILENAME "
            "RATINGS_FILENAME"
        ),
    },
    "torchrec.datasets.random": {
        "shardwise.data": "RandomRecDataset",
    },
    "torchrec.datasets.utils": {
        "shardwise.data": "Batch idx_split_train_val rand_split_train_val",
    },
    "torchrec.fx": {
        "torchrec.fx.tracer": "Tracer symbolic_trace",
    },
    "torchrec.fx.tracer": {
        "shardwise.sharding.dmp.tracing": "Tracer symbolic_trace",
    },
    "torchrec.inference.modules": {
        "shardwise.inference.quantize": (
            "quantize_embeddings quantize_feature quantize_inference_model set_pruning_data "
            "trim_torch_package_prefix_from_typename DEFAULT_QUANTIZATION_DTYPE DEFAULT_QUANT_MAPPING"
        ),
        "shardwise.inference.tables": "assign_weights_to_tbe get_table_to_weights_from_tbe",
        "shardwise.inference": "BatchingMetadata PredictFactory PredictModule QualNameMetadata quantize_dense",
        "shardwise.inference.sharded": "shard_quant_model DEFAULT_FUSED_PARAMS DEFAULT_SHARDERS",
    },
    "torchrec.inference.state_dict_transform": {
        "shardwise.sharding.torchrec.state_dict_transform": (
            "state_dict_all_gather_keys state_dict_gather state_dict_to_device"
        ),
    },
    "torchrec.models.deepfm": {
        "shardwise.models.deepfm": "DenseArch OverArch SparseArch",
        "shardwise.models": "FMInteractionArch SimpleDeepFMNN SimpleDeepFMNNWrapper",
    },
    "torchrec.models.dlrm": {
        "shardwise.models": (
            "DLRMTrain DLRMWrapper DLRM_Projection DenseArch InteractionArch InteractionDCNArch "
            "InteractionProjectionArch OverArch SparseArch choose DLRM DLRM_DCN"
        ),
    },
    "torchrec.modules.activation": {
        "shardwise.models": "SwishLayerNorm",
    },
    "torchrec.modules.crossnet": {
        "shardwise.models": "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet",
    },
    "torchrec.modules.deepfm": {
        "shardwise.models": "DeepFM FactorizationMachine",
    },
    "torchrec.modules.embedding_configs": {
        "torchrec.types": "DataType",
        "shardwise.embeddings": (
            "BaseEmbeddingConfig EmbeddingBagConfig EmbeddingConfig PoolingType data_type_to_dtype dtype_to_data_type"
        ),
        "shardwise.quant": "QuantConfig",
        "shardwise.embeddings.config": "EmbeddingTableConfig",
        "shardwise.embeddings.optim.fbgemm_types": (
            "data_type_to_sparse_type pooling_type_to_pooling_mode pooling_type_to_str"
        ),
    },
    "torchrec.modules.embedding_modules": {
        "shardwise.embeddings": (
            "EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingCollection EmbeddingCollectionInterface"
        ),
    },
    "torchrec.modules.embedding_tower": {
        "shardwise.embeddings": "EmbeddingTower EmbeddingTowerCollection tower_input_params",
    },
    "torchrec.modules.feature_processor": {
        "shardwise.embeddings.collections.position_weights": "PositionWeightedModule",
        "shardwise.embeddings": "PositionWeightedProcessor",
    },
    "torchrec.modules.feature_processor_": {
        "shardwise.embeddings": (
            "FeatureProcessor FeatureProcessorsCollection PositionWeightedModule PositionWeightedModuleCollection"
        ),
    },
    "torchrec.modules.fp_embedding_modules": {
        "shardwise.embeddings": "FeatureProcessedEmbeddingBagCollection FeatureProcessorDictWrapper",
    },
    "torchrec.modules.fused_embedding_modules": {
        "shardwise.embeddings": "FusedEmbeddingBagCollection FusedEmbeddingCollection fuse_embedding_optimizer",
    },
    "torchrec.modules.lazy_extension": {
        "shardwise.models": "LazyModuleExtensionMixin lazy_apply",
    },
    "torchrec.modules.mc_embedding_modules": {
        "shardwise.embeddings.managed_collision": (
            "BaseManagedCollisionEmbeddingCollection ManagedCollisionEmbeddingBagCollection "
            "ManagedCollisionEmbeddingCollection"
        ),
        "torchrec.modules.mc_modules": "ManagedCollisionCollection",
    },
    "torchrec.modules.mc_modules": {
        "shardwise.embeddings.managed_collision": (
            "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy MCHEvictionPolicy "
            "MCHEvictionPolicyMetadataInfo MCHManagedCollisionModule ManagedCollisionCollection "
            "ManagedCollisionModule apply_mc_method_to_jt_dict average_threshold_filter dynamic_threshold_filter "
            "probabilistic_threshold_filter"
        ),
    },
    "torchrec.modules.mlp": {
        "shardwise.models": "Perceptron MLP",
    },
    "torchrec.modules.regroup": {
        "shardwise.jagged": "KTRegroupAsDict",
    },
    "torchrec.optim": {
        "torchrec.optim.apply_optimizer_in_backward": "apply_optimizer_in_backward",
        "torchrec.optim.keyed": "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper",
        "torchrec.optim.rowwise_adagrad": "RowWiseAdagrad",
        "torchrec.optim.optimizers": "Adagrad Adam LarsSGD PartialRowWiseAdam PartialRowWiseLAMB LAMB SGD",
        "torchrec.optim.warmup": "WarmupOptimizer WarmupPolicy WarmupStage",
        "torchrec.optim.clipping": "GradientClipping GradientClippingOptimizer",
        "shardwise.embeddings": "EmptyFusedOptimizer",
        "torchrec.optim.fused": "FusedOptimizer FusedOptimizerModule",
    },
    "torchrec.optim.apply_optimizer_in_backward": {
        "shardwise.embeddings": "apply_optimizer_in_backward",
    },
    "torchrec.optim.clipping": {
        "shardwise.embeddings": "GradientClipping GradientClippingOptimizer",
    },
    "torchrec.optim.fused": {
        "shardwise.embeddings": "EmptyFusedOptimizer FusedOptimizer FusedOptimizerModule",
    },
    "torchrec.optim.keyed": {
        "shardwise.embeddings": "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper",
    },
    "torchrec.optim.optimizers": {
        "torch.optim": "Adagrad Adam SGD",
        "shardwise.embeddings": "LarsSGD PartialRowWiseAdam PartialRowWiseLAMB in_backward_optimizer_filter LAMB",
    },
    "torchrec.optim.rowwise_adagrad": {
        "shardwise.embeddings": "RowWiseAdagrad",
    },
    "torchrec.optim.semi_sync": {
        "shardwise.embeddings": "SemisyncOptimizer",
    },
    "torchrec.optim.warmup": {
        "shardwise.embeddings": "WarmupOptimizer WarmupPolicy WarmupStage",
    },
    "torchrec.quant": {
        "torchrec.quant.embedding_modules": "EmbeddingBagCollection",
    },
    "torchrec.quant.embedding_modules": {
        "shardwise.quant": (
            "EmbeddingBagCollection EmbeddingCollection FeatureProcessedEmbeddingBagCollection "
            "for_each_module_of_type_do quant_prep_customize_row_alignment quant_prep_enable_cache_features_order "
            "quant_prep_enable_quant_state_dict_split_scale_bias "
            "quant_prep_enable_quant_state_dict_split_scale_bias_for_types quant_prep_enable_register_tbes "
            "quantize_state_dict"
        ),
        "shardwise.embeddings.quant": (
            "QuantManagedCollisionEmbeddingBagCollection QuantManagedCollisionEmbeddingCollection"
        ),
    },
    "torchrec.quant.utils": {
        "shardwise.quant": "meta_to_cpu_placement",
    },
    "torchrec.sparse.jagged_tensor": {
        "shardwise.jagged": (
            "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor KeyedJaggedTensor KeyedTensor flatten_kjt_list "
            "jt_is_equal kjt_is_equal permute_multi_embedding regroup_kts unflatten_kjt_list"
        ),
    },
    "torchrec.sparse.jagged_tensor_validator": {
        "shardwise.jagged": "validate_keyed_jagged_tensor",
    },
    "torchrec.sparse.tensor_dict": {
        "shardwise.jagged": "maybe_td_to_kjt",
    },
    "torchrec.streamable": {
        "shardwise.jagged": "Multistreamable Pipelineable",
    },
    "torchrec.types": {
        "shardwise.embeddings": "DataType",
    },
}

# of FBGEMM what TorchRec's programs import, for machines without it
FBGEMM_NAMES: Mapping[str, Mapping[str, str]] = {
    "fbgemm_gpu.split_embedding_configs": {
        "shardwise.embeddings.optim.fbgemm_types": "EmbOptimType SparseType",
    },
    "fbgemm_gpu.split_table_batched_embeddings_ops_common": {
        "shardwise.embeddings.optim.fbgemm_types": "CacheAlgorithm EmbeddingLocation MultiPassPrefetchConfig PoolingMode",
        "shardwise.kernels.lookup.bounds": "BoundsCheckMode",
    },
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": {
        "fbgemm_gpu.split_embedding_configs": "SparseType OptimType=EmbOptimType",
        "fbgemm_gpu.split_table_batched_embeddings_ops_common": (
            "BoundsCheckMode CacheAlgorithm EmbeddingLocation MultiPassPrefetchConfig PoolingMode"
        ),
        "shardwise.embeddings": "WeightDecayMode",
    },
}


def _table(names: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """`names` with one entry a name, and each pointer to another module of TorchRec followed."""
    table: dict[str, dict[str, str]] = {}

    def entries(path: str) -> dict[str, str]:
        if path not in table:
            found = table[path] = {}
            for source, group in names[path].items():
                for theirs, _, ours in (entry.partition("=") for entry in group.split()):
                    passed_on = source in names
                    found[theirs] = entries(source)[ours or theirs] if passed_on else f"{source}:{ours or theirs}"
        return table[path]

    return {path: entries(path) for path in names}


# TorchRec's module -> its name -> where ours is, as module:name
TABLE: Mapping[str, Mapping[str, str]] = _table(NAMES)
FBGEMM: Mapping[str, Mapping[str, str]] = _table(FBGEMM_NAMES)
