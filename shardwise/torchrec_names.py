"""Where ours is for each name of TorchRec that we have: data, read by `shardwise.torchrec` and by `shardwise migrate`.

A name stands at the module of TorchRec that defines it; modules that only pass it on point to that one.
"""

from __future__ import annotations

from collections.abc import Mapping

from .torchrec_names_distributed import DISTRIBUTED

__all__ = ["TABLE"]

# our module, or the module of TorchRec that defines the names: `theirs=ours` where ours has another
NAMES: Mapping[str, Mapping[str, str]] = {
    **DISTRIBUTED,
    "torchrec": {
        "torchrec.sparse.jagged_tensor": "JaggedTensor KeyedJaggedTensor KeyedTensor",
        "torchrec.streamable": "Multistreamable Pipelineable",
        "torchrec.types": "DataType",
        "torchrec.modules.embedding_configs": "EmbeddingBagConfig EmbeddingConfig PoolingType",
        "torchrec.modules.embedding_modules": "EmbeddingBagCollection EmbeddingCollection",
    },
    "torchrec.datasets.utils": {
        "shardwise.data": "Batch",
    },
    "torchrec.models.dlrm": {
        "shardwise.models": "DLRMTrain DenseArch InteractionArch OverArch SparseArch DLRM",
    },
    "torchrec.modules.activation": {
        "shardwise.models": "SwishLayerNorm",
    },
    "torchrec.modules.embedding_configs": {
        "torchrec.types": "DataType",
        "shardwise.embeddings": (
            "BaseEmbeddingConfig EmbeddingBagConfig EmbeddingConfig PoolingType data_type_to_dtype dtype_to_data_type"
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
    "torchrec.sparse.jagged_tensor": {
        "shardwise.jagged": (
            "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor KeyedJaggedTensor KeyedTensor "
            "flatten_kjt_list jt_is_equal kjt_is_equal permute_multi_embedding regroup_kts "
            "unflatten_kjt_list"
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
