"""shardwise: sharded embedding tables for PyTorch recommender models. This file is the whole public API.

Each name is loaded at first use (PEP 562), so `import shardwise` costs nothing beyond Python itself.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

from ._version import __version__

# The sub-packages are folders beside this one, linked here.
_SUB_PACKAGES = (
    *("data", "embeddings", "fbgemm", "inference", "jagged", "kernels", "models", "perf"),
    *("planner", "sharding"),
)
_HERE = _Path(__file__).parent
_ROOT = _HERE.resolve().parent
if not all((_HERE / name).is_dir() for name in _SUB_PACKAGES) and (_ROOT / "kernels" / "_op.py").is_file():
    import importlib.machinery as _machinery
    import sys as _sys

    class _Beside:
        """Finds them in a checkout without links, by name: with the root on __path__ all in it would be ours."""

        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> _machinery.ModuleSpec | None:
            package, _, folder = name.rpartition(".")
            is_sub_package = package == __name__ and folder in _SUB_PACKAGES
            return _machinery.PathFinder.find_spec(name, [str(_ROOT)]) if is_sub_package else None

    # before the finder of an editable install, which may be of another checkout
    _sys.meta_path.insert(0, _Beside)

if TYPE_CHECKING:
    from .data import (
        Batch,
    )
    from .embeddings import (
        FTRL,
        LAMB,
        BaseEmbeddingConfig,
        CombinedOptimizer,
        DataType,
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        EmbeddingTower,
        EmbeddingTowerCollection,
        FeatureProcessedEmbeddingBagCollection,
        FusedEmbeddingBagCollection,
        FusedEmbeddingCollection,
        FusedOptimizer,
        GradientCheckMode,
        GradientClipping,
        GradientClippingOptimizer,
        KeyedOptimizer,
        KeyedOptimizerWrapper,
        LarsSGD,
        LookupPolicy,
        PartialRowWiseAdam,
        PartialRowWiseLAMB,
        PoolingType,
        PositionWeightedModuleCollection,
        RowWiseAdagrad,
        RuleOptimizer,
        WarmupOptimizer,
        WarmupPolicy,
        WarmupStage,
        WeightDecayMode,
        apply_optimizer_in_backward,
        define_optimizer,
        fuse_embedding_optimizer,
        in_backward_optimizer_filter,
    )
    from .jagged import (
        ComputeJTDictToKJT,
        ComputeKJTToJTDict,
        JaggedTensor,
        KeyedJaggedTensor,
        KeyedTensor,
        KTRegroupAsDict,
        Multistreamable,
        Pipelineable,
        flatten_kjt_list,
        jt_is_equal,
        kjt_is_equal,
        maybe_td_to_kjt,
        permute_multi_embedding,
        regroup_kts,
        unflatten_kjt_list,
        validate_keyed_jagged_tensor,
    )
    from .kernels import (
        BoundsCheckMode,
    )
    from .migration.canary import (
        canary,
    )
    from .models import (
        DLRM,
        DLRMTrain,
    )
    from .planner import (
        ParameterConstraints,
        PlannerError,
        Topology,
    )
    from .sharding import (
        CommType,
        DataLoadingThread,
        DefaultDataParallelWrapper,
        DistributedModelParallel,
        DMPCollection,
        EmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder,
        EmbeddingComputeKernel,
        EmbeddingModuleShardingPlan,
        EmbeddingShardingPlanner,
        EmbeddingTowerCollectionSharder,
        EvalPipelineSparseDist,
        GradientAccumulationConfig,
        GradientAccumulationWrapper,
        LazyAwaitable,
        ModuleSharder,
        ParameterSharding,
        PipelineStage,
        PrefetchTrainPipelineSparseDist,
        QCommsConfig,
        RankFailure,
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
        ShardedModule,
        ShardingEnv,
        ShardingPlan,
        ShardingType,
        SparseDataDistUtil,
        StagedTrainPipeline,
        TrainPipelineBase,
        TrainPipelineSparseDist,
        accumulate,
        construct_module_sharding_plan,
        get_default_sharders,
        get_qcomm_codecs_registry,
        shard,
        shard_modules,
    )

__all__ = [
    "DLRM",
    "FTRL",
    "LAMB",
    "BaseEmbeddingConfig",
    "Batch",
    "BoundsCheckMode",
    "CombinedOptimizer",
    "CommType",
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "DLRMTrain",
    "DMPCollection",
    "DataLoadingThread",
    "DataType",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "EmbeddingConfig",
    "EmbeddingModuleShardingPlan",
    "EmbeddingShardingPlanner",
    "EmbeddingTower",
    "EmbeddingTowerCollection",
    "EmbeddingTowerCollectionSharder",
    "EvalPipelineSparseDist",
    "FeatureProcessedEmbeddingBagCollection",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "FusedOptimizer",
    "GradientAccumulationConfig",
    "GradientAccumulationWrapper",
    "GradientCheckMode",
    "GradientClipping",
    "GradientClippingOptimizer",
    "JaggedTensor",
    "KTRegroupAsDict",
    "KeyedJaggedTensor",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "KeyedTensor",
    "LarsSGD",
    "LazyAwaitable",
    "LookupPolicy",
    "ModuleSharder",
    "Multistreamable",
    "ParameterConstraints",
    "ParameterSharding",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "PipelineStage",
    "Pipelineable",
    "PlannerError",
    "PoolingType",
    "PositionWeightedModuleCollection",
    "PrefetchTrainPipelineSparseDist",
    "QCommsConfig",
    "RankFailure",
    "RowWiseAdagrad",
    "RuleOptimizer",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedModule",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "Topology",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "WeightDecayMode",
    "__version__",
    "accumulate",
    "apply_optimizer_in_backward",
    "canary",
    "construct_module_sharding_plan",
    "define_optimizer",
    "flatten_kjt_list",
    "fuse_embedding_optimizer",
    "get_default_sharders",
    "get_qcomm_codecs_registry",
    "in_backward_optimizer_filter",
    "jt_is_equal",
    "kjt_is_equal",
    "maybe_td_to_kjt",
    "permute_multi_embedding",
    "regroup_kts",
    "shard",
    "shard_modules",
    "unflatten_kjt_list",
    "validate_keyed_jagged_tensor",
]

# name -> the module that defines it; a test keeps this, __all__ and the imports above in step
_HOME = {
    "BaseEmbeddingConfig": "embeddings",
    "Batch": "data",
    "BoundsCheckMode": "kernels",
    "CombinedOptimizer": "embeddings",
    "CommType": "sharding",
    "ComputeJTDictToKJT": "jagged",
    "ComputeKJTToJTDict": "jagged",
    "DLRM": "models",
    "DLRMTrain": "models",
    "DMPCollection": "sharding",
    "DataLoadingThread": "sharding",
    "DataType": "embeddings",
    "DefaultDataParallelWrapper": "sharding",
    "DistributedModelParallel": "sharding",
    "EmbeddingBagCollection": "embeddings",
    "EmbeddingBagCollectionSharder": "sharding",
    "EmbeddingBagConfig": "embeddings",
    "EmbeddingCollection": "embeddings",
    "EmbeddingCollectionSharder": "sharding",
    "EmbeddingComputeKernel": "sharding",
    "EmbeddingConfig": "embeddings",
    "EmbeddingModuleShardingPlan": "sharding",
    "EmbeddingShardingPlanner": "sharding",
    "EmbeddingTower": "embeddings",
    "EmbeddingTowerCollection": "embeddings",
    "EmbeddingTowerCollectionSharder": "sharding",
    "EvalPipelineSparseDist": "sharding",
    "FTRL": "embeddings",
    "FeatureProcessedEmbeddingBagCollection": "embeddings",
    "FusedEmbeddingBagCollection": "embeddings",
    "FusedEmbeddingCollection": "embeddings",
    "FusedOptimizer": "embeddings",
    "GradientAccumulationConfig": "sharding",
    "GradientAccumulationWrapper": "sharding",
    "GradientCheckMode": "embeddings",
    "GradientClipping": "embeddings",
    "GradientClippingOptimizer": "embeddings",
    "JaggedTensor": "jagged",
    "KTRegroupAsDict": "jagged",
    "KeyedJaggedTensor": "jagged",
    "KeyedOptimizer": "embeddings",
    "KeyedOptimizerWrapper": "embeddings",
    "KeyedTensor": "jagged",
    "LAMB": "embeddings",
    "LarsSGD": "embeddings",
    "LazyAwaitable": "sharding",
    "LookupPolicy": "embeddings",
    "ModuleSharder": "sharding",
    "Multistreamable": "jagged",
    "ParameterConstraints": "planner",
    "ParameterSharding": "sharding",
    "PartialRowWiseAdam": "embeddings",
    "PartialRowWiseLAMB": "embeddings",
    "PipelineStage": "sharding",
    "Pipelineable": "jagged",
    "PlannerError": "planner",
    "PoolingType": "embeddings",
    "PositionWeightedModuleCollection": "embeddings",
    "PrefetchTrainPipelineSparseDist": "sharding",
    "QCommsConfig": "sharding",
    "RankFailure": "sharding",
    "RowWiseAdagrad": "embeddings",
    "RuleOptimizer": "embeddings",
    "ShardedEmbeddingBagCollection": "sharding",
    "ShardedEmbeddingCollection": "sharding",
    "ShardedModule": "sharding",
    "ShardingEnv": "sharding",
    "ShardingPlan": "sharding",
    "ShardingType": "sharding",
    "SparseDataDistUtil": "sharding",
    "StagedTrainPipeline": "sharding",
    "Topology": "planner",
    "TrainPipelineBase": "sharding",
    "TrainPipelineSparseDist": "sharding",
    "WarmupOptimizer": "embeddings",
    "WarmupPolicy": "embeddings",
    "WarmupStage": "embeddings",
    "WeightDecayMode": "embeddings",
    "accumulate": "sharding",
    "apply_optimizer_in_backward": "embeddings",
    "canary": "migration.canary",
    "construct_module_sharding_plan": "sharding",
    "define_optimizer": "embeddings",
    "flatten_kjt_list": "jagged",
    "fuse_embedding_optimizer": "embeddings",
    "get_default_sharders": "sharding",
    "get_qcomm_codecs_registry": "sharding",
    "in_backward_optimizer_filter": "embeddings",
    "jt_is_equal": "jagged",
    "kjt_is_equal": "jagged",
    "maybe_td_to_kjt": "jagged",
    "permute_multi_embedding": "jagged",
    "regroup_kts": "jagged",
    "shard": "sharding",
    "shard_modules": "sharding",
    "unflatten_kjt_list": "jagged",
    "validate_keyed_jagged_tensor": "jagged",
}
_FOLDERS = ("checkpoint", "quant", "torchrec", *_SUB_PACKAGES)


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(_import_module(f".{_HOME[name]}", __name__), name)
    elif name in _FOLDERS:
        value = _import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FOLDERS})
