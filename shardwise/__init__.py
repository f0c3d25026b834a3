"""shardwise: sharded embedding tables for PyTorch recommender models. This file is the whole public API.

Each name is loaded at first use (PEP 562), so `import shardwise` costs nothing beyond Python itself.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

from ._version import __version__

# The sub-packages are folders beside this one, linked here. A checkout without symlinks finds them through the root.
_ROOT = _Path(__file__).resolve().parents[1]
if not (_Path(__file__).parent / "kernels").is_dir() and (_ROOT / "kernels" / "_op.py").is_file():
    __path__.append(str(_ROOT))

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
        FusedEmbeddingBagCollection,
        FusedEmbeddingCollection,
        FusedOptimizer,
        GradientCheckMode,
        KeyedOptimizer,
        KeyedOptimizerWrapper,
        LarsSGD,
        LookupPolicy,
        PartialRowWiseAdam,
        PartialRowWiseLAMB,
        PoolingType,
        RowWiseAdagrad,
        RuleOptimizer,
        WeightDecayMode,
        apply_optimizer_in_backward,
        define_optimizer,
        fuse_embedding_optimizer,
        in_backward_optimizer_filter,
    )
    from .jagged import (
        JaggedTensor,
        KeyedJaggedTensor,
        KeyedTensor,
    )
    from .kernels import (
        BoundsCheckMode,
    )
    from .models import (
        DLRM,
        DLRMTrain,
    )
    from .sharding import (
        DistributedModelParallel,
        EmbeddingComputeKernel,
        EmbeddingModuleShardingPlan,
        ParameterSharding,
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
        ShardingEnv,
        ShardingPlan,
        ShardingType,
        construct_module_sharding_plan,
    )

__all__ = [
    "DLRM",
    "FTRL",
    "LAMB",
    "BaseEmbeddingConfig",
    "Batch",
    "BoundsCheckMode",
    "CombinedOptimizer",
    "DLRMTrain",
    "DataType",
    "DistributedModelParallel",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingComputeKernel",
    "EmbeddingConfig",
    "EmbeddingModuleShardingPlan",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "FusedOptimizer",
    "GradientCheckMode",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "KeyedTensor",
    "LarsSGD",
    "LookupPolicy",
    "ParameterSharding",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "PoolingType",
    "RowWiseAdagrad",
    "RuleOptimizer",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "WeightDecayMode",
    "__version__",
    "apply_optimizer_in_backward",
    "construct_module_sharding_plan",
    "define_optimizer",
    "fuse_embedding_optimizer",
    "in_backward_optimizer_filter",
]

# name -> the module that defines it; a test keeps this, __all__ and the imports above in step
_HOME = {
    "BaseEmbeddingConfig": "embeddings",
    "Batch": "data",
    "BoundsCheckMode": "kernels",
    "CombinedOptimizer": "embeddings",
    "DLRM": "models",
    "DLRMTrain": "models",
    "DataType": "embeddings",
    "DistributedModelParallel": "sharding",
    "EmbeddingBagCollection": "embeddings",
    "EmbeddingBagConfig": "embeddings",
    "EmbeddingCollection": "embeddings",
    "EmbeddingComputeKernel": "sharding",
    "EmbeddingConfig": "embeddings",
    "EmbeddingModuleShardingPlan": "sharding",
    "FTRL": "embeddings",
    "FusedEmbeddingBagCollection": "embeddings",
    "FusedEmbeddingCollection": "embeddings",
    "FusedOptimizer": "embeddings",
    "GradientCheckMode": "embeddings",
    "JaggedTensor": "jagged",
    "KeyedJaggedTensor": "jagged",
    "KeyedOptimizer": "embeddings",
    "KeyedOptimizerWrapper": "embeddings",
    "KeyedTensor": "jagged",
    "LAMB": "embeddings",
    "LarsSGD": "embeddings",
    "LookupPolicy": "embeddings",
    "ParameterSharding": "sharding",
    "PartialRowWiseAdam": "embeddings",
    "PartialRowWiseLAMB": "embeddings",
    "PoolingType": "embeddings",
    "RowWiseAdagrad": "embeddings",
    "RuleOptimizer": "embeddings",
    "ShardedEmbeddingBagCollection": "sharding",
    "ShardedEmbeddingCollection": "sharding",
    "ShardingEnv": "sharding",
    "ShardingPlan": "sharding",
    "ShardingType": "sharding",
    "WeightDecayMode": "embeddings",
    "apply_optimizer_in_backward": "embeddings",
    "construct_module_sharding_plan": "sharding",
    "define_optimizer": "embeddings",
    "fuse_embedding_optimizer": "embeddings",
    "in_backward_optimizer_filter": "embeddings",
}
_FOLDERS = ("data", "embeddings", "jagged", "kernels", "models", "perf", "planner", "sharding", "torchrec")


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
