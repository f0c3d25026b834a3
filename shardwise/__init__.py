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
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
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
    "KTRegroupAsDict",
    "KeyedJaggedTensor",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "KeyedTensor",
    "LarsSGD",
    "LookupPolicy",
    "Multistreamable",
    "ParameterSharding",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "Pipelineable",
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
    "flatten_kjt_list",
    "fuse_embedding_optimizer",
    "in_backward_optimizer_filter",
    "jt_is_equal",
    "kjt_is_equal",
    "maybe_td_to_kjt",
    "permute_multi_embedding",
    "regroup_kts",
    "unflatten_kjt_list",
    "validate_keyed_jagged_tensor",
]

# name -> the module that defines it; a test keeps this, __all__ and the imports above in step
_HOME = {
    "BaseEmbeddingConfig": "embeddings",
    "Batch": "data",
    "BoundsCheckMode": "kernels",
    "CombinedOptimizer": "embeddings",
    "ComputeJTDictToKJT": "jagged",
    "ComputeKJTToJTDict": "jagged",
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
    "KTRegroupAsDict": "jagged",
    "KeyedJaggedTensor": "jagged",
    "KeyedOptimizer": "embeddings",
    "KeyedOptimizerWrapper": "embeddings",
    "KeyedTensor": "jagged",
    "LAMB": "embeddings",
    "LarsSGD": "embeddings",
    "LookupPolicy": "embeddings",
    "Multistreamable": "jagged",
    "ParameterSharding": "sharding",
    "PartialRowWiseAdam": "embeddings",
    "PartialRowWiseLAMB": "embeddings",
    "Pipelineable": "jagged",
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
    "flatten_kjt_list": "jagged",
    "fuse_embedding_optimizer": "embeddings",
    "in_backward_optimizer_filter": "embeddings",
    "jt_is_equal": "jagged",
    "kjt_is_equal": "jagged",
    "maybe_td_to_kjt": "jagged",
    "permute_multi_embedding": "jagged",
    "regroup_kts": "jagged",
    "unflatten_kjt_list": "jagged",
    "validate_keyed_jagged_tensor": "jagged",
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
