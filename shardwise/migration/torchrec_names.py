"""Table of TorchRec's names and where ours are: read by `shardwise.torchrec` and by `shardwise migrate`.

A name stands at the module of TorchRec that defines it; modules that only pass it on point to that one.
"""

from __future__ import annotations

from collections.abc import Mapping

from .torchrec_distributed_names import DISTRIBUTED

__all__ = ["TABLE", "table"]

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
        "shardwise.data.criteo_arrays": "BinaryCriteoUtils InMemoryBinaryCriteoIterDataPipe",
        "shardwise.data.torchrec.criteo_lines": (
            "COLUMN_TYPE_CASTERS CriteoIterDataPipe criteo_kaggle criteo_terabyte"
        ),
        "torchrec.datasets.utils": "Batch LoadFiles PATH_MANAGER_KEY ReadLinesFromCSV safe_cast",
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
        "shardwise.data.torchrec.movielens_lines": "COLUMN_TYPE_CASTERS movielens_20m movielens_25m",
    },
    "torchrec.datasets.random": {
        "shardwise.data": "RandomRecDataset",
        "shardwise.data.random_batches": "_RandomRecBatch=RandomBatches",
    },
    "torchrec.datasets.scripts.contiguous_preproc_criteo": {
        "shardwise.data.torchrec.criteo_scripts": "main=contiguous_main",
    },
    "torchrec.datasets.scripts.npy_preproc_criteo": {
        "shardwise.data.torchrec.criteo_scripts": "main=npy_main",
    },
    "torchrec.datasets.scripts.shuffle_preproc_criteo": {
        "shardwise.data.torchrec.criteo_scripts": "main=shuffle_main",
    },
    "torchrec.datasets.utils": {
        "shardwise.data": "Batch idx_split_train_val rand_split_train_val",
        "shardwise.data.paths": "PATH_MANAGER_KEY",
        "shardwise.data.splits": "train_filter val_filter",
        "shardwise.data.torchrec.pipes": "Limit LoadFiles ParallelReadConcat ReadLinesFromCSV safe_cast",
    },
    "torchrec.fx": {
        "torchrec.fx.tracer": "Tracer symbolic_trace",
    },
    "torchrec.fx.tracer": {
        "shardwise.sharding.dmp.tracing": "Tracer is_fx_tracing symbolic_trace",
    },
    "torchrec.fx.utils": {
        "shardwise.sharding.dmp.fx_parts": ("assert_fx_safe dmp_fx_trace_forward fake_range fx_marker is_marker_node"),
    },
    "torchrec.inference.model_packager": {
        "shardwise.inference.packages": (
            "CONFIG_MODULE LOADER_CODE LOADER_FACTORY LOADER_MODULE PredictFactoryPackager load_config_text "
            "load_pickle_config"
        ),
    },
    "torchrec.inference.modules": {
        "shardwise.inference.quantize": (
            "quantize_embeddings quantize_feature quantize_inference_model set_pruning_data "
            "trim_torch_package_prefix_from_typename DEFAULT_QUANTIZATION_DTYPE DEFAULT_QUANT_MAPPING"
        ),
        "shardwise.inference.weights": "assign_weights_to_tbe get_table_to_weights_from_tbe",
        "shardwise.inference": "BatchingMetadata PredictFactory PredictModule QualNameMetadata quantize_dense",
        "shardwise.inference.sharded": "shard_quant_model DEFAULT_FUSED_PARAMS DEFAULT_SHARDERS",
    },
    "torchrec.inference.state_dict_transform": {
        "shardwise.sharding.torchrec.state_dict_transform": (
            "state_dict_all_gather_keys state_dict_gather state_dict_to_device"
        ),
    },
    "torchrec.models.cuda_graph_utils": {
        "shardwise.models.cuda_graphs": "build_dlrm build_ebc collect_outputs generate_batch",
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
    "torchrec.models.experimental.transformerdlrm": {
        "shardwise.models": "DLRM_Transformer InteractionTransformerArch",
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
        "shardwise.embeddings.config": "DATA_TYPE_NUM_BITS EmbeddingTableConfig",
        "shardwise.embeddings.optim.fbgemm_types": (
            "data_type_to_sparse_type pooling_type_to_pooling_mode pooling_type_to_str"
        ),
        "shardwise.sharding.plan.plan": "ShardingType",
    },
    "torchrec.modules.embedding_modules": {
        "shardwise.embeddings": (
            "EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingCollection EmbeddingCollectionInterface "
            "get_embedding_names_by_table=embedding_names_by_table"
        ),
        "shardwise.embeddings.torchrec.pooled_outputs": "process_pooled_embeddings reorder_inverse_indices",
    },
    "torchrec.modules.embedding_tower": {
        "shardwise.embeddings": "EmbeddingTower EmbeddingTowerCollection tower_input_params",
    },
    "torchrec.modules.feature_processor": {
        "shardwise.embeddings.collections.position_weights": (
            "BaseFeatureProcessor BaseGroupedFeatureProcessor PositionWeightedModule"
        ),
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
    "torchrec.modules.itep_embedding_modules": {
        "shardwise.embeddings.pruning": "ITEPEmbeddingBagCollection ITEPEmbeddingCollection",
    },
    "torchrec.modules.itep_modules": {
        "shardwise.embeddings.pruning": "GenericITEPModule",
    },
    "torchrec.modules.keyed_jagged_tensor_pool": {
        "shardwise.embeddings.pools": "KeyedJaggedTensorPool",
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
    "torchrec.modules.object_pool": {
        "shardwise.embeddings.pools": "ObjectPool",
    },
    "torchrec.modules.object_pool_lookups": {
        "shardwise.embeddings.pools": (
            "KeyedJaggedTensorPoolLookup TensorJaggedIndexSelectLookup TensorLookup TensorPoolLookup"
        ),
    },
    "torchrec.modules.pruning_logger": {
        "shardwise.embeddings.pruning": "PruningLogBase PruningLogger PruningLoggerDefault",
    },
    "torchrec.modules.regroup": {
        "shardwise.jagged": "KTRegroupAsDict",
        "shardwise.fbgemm.regroup_module": "PermuteMultiEmbedding",
    },
    "torchrec.modules.tensor_pool": {
        "shardwise.embeddings.pools": "TensorPool",
    },
    "torchrec.modules.utils": {
        "shardwise.embeddings.pools": "deterministic_dedup",
        "shardwise.embeddings.torchrec.dense_modules": (
            "check_module_output_dimension construct_modulelist_from_single_module "
            "convert_list_of_modules_to_modulelist extract_module_or_tensor_callable get_module_output_dimension "
            "init_mlp_weights_xavier_uniform"
        ),
        "shardwise.embeddings.torchrec.jagged_outputs": (
            "SequenceVBEContext construct_jagged_tensors construct_jagged_tensors_inference "
            "jagged_index_select_with_empty reset_module_states_post_sharding"
        ),
    },
    "torchrec.modules.sorted_index_select": {
        "shardwise.embeddings.collections.sorted_select": "maybe_sorted_index_select sorted_index_select",
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
    "torchrec.pt2.checks": {
        "shardwise.jagged.compiled.checks": (
            "get_use_torchdynamo_compiling_path is_compiler_compiling is_non_strict_exporting is_pt2_compiling "
            "is_torchdynamo_compiling pt2_check_size_nonzero pt2_checks_all_is_size pt2_checks_tensor_slice "
            "pt2_guard_or_false pt2_guard_or_true set_use_torchdynamo_compiling_path"
        ),
    },
    "torchrec.pt2.utils": {
        "shardwise.jagged.compiled.batches": "default_pipeline_input_transformer kjt_for_pt2_tracing",
        "shardwise.jagged.compiled.fake_classes": "deregister_fake_classes register_fake_classes",
        "shardwise.jagged.compiled.methods": "pt2_compile_callable",
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
        "shardwise.sharding.quant.inspect": "populate_fx_names recursive_populate_fx_names",
    },
    "torchrec.sparse.jagged_tensor": {
        "shardwise.jagged.tracing": "JaggedTensorMeta",
        "shardwise.jagged": (
            "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor KeyedJaggedTensor KeyedTensor flatten_kjt_list "
            "jt_is_equal kjt_is_equal permute_multi_embedding regroup_kts unflatten_kjt_list"
        ),
    },
    "torchrec.schema.utils": {
        "shardwise.migration.signatures": "is_signature_compatible",
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
    "torchrec.test_utils": {
        "shardwise.sharding.testing.environment": (
            "assert_state_buffers_parameters_equal cuda_device_count get_free_port get_state_buffers_parameters "
            "init_distributed_single_host is_asan is_asan_or_tsan is_tsan seed_and_log skip_if_asan skip_if_asan_class"
        ),
    },
    "torchrec.types": {
        "shardwise.embeddings": "DataType",
        "shardwise.sharding.dmp.unwrap": "CopyMixIn ModuleCopyMixin ModuleNoCopyMixin",
        "shardwise.jagged.modules": "CacheMixin",
    },
}


def table(names: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """`names` with one entry a name, and each pointer to another module of TorchRec followed."""
    resolved_names: dict[str, dict[str, str]] = {}

    def entries(path: str) -> dict[str, str]:
        if path not in resolved_names:
            resolved = resolved_names[path] = {}
            for source, group in names[path].items():
                for torchrec_name, _, shardwise_name in (entry.partition("=") for entry in group.split()):
                    passed_on = source in names
                    resolved[torchrec_name] = (
                        entries(source)[shardwise_name or torchrec_name]
                        if passed_on
                        else f"{source}:{shardwise_name or torchrec_name}"
                    )
        return resolved_names[path]

    return {path: entries(path) for path in names}


TABLE: Mapping[str, Mapping[str, str]] = table(NAMES)
"""TorchRec's module -> its name -> where ours is, as `module:name`."""
