"""Tables over several processes: layout, routing, exchange, sharded collections, `DistributedModelParallel`.

Names load at first use: the planner reads `sharding.layout`, and `sharding.dmp` calls the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dmp import DistributedModelParallel
    from .env import ShardingEnv
    from .layout import Shard
    from .modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
    from .plan import (
        EmbeddingComputeKernel,
        EmbeddingModuleShardingPlan,
        ParameterSharding,
        ShardingPlan,
        ShardingType,
        construct_module_sharding_plan,
        data_parallel,
        table_wise,
    )

__all__ = [
    "DistributedModelParallel",
    "EmbeddingComputeKernel",
    "EmbeddingModuleShardingPlan",
    "ParameterSharding",
    "Shard",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "construct_module_sharding_plan",
    "data_parallel",
    "table_wise",
]

_HOME = {
    "DistributedModelParallel": "dmp",
    "Shard": "layout",
    "ShardedEmbeddingBagCollection": "modules",
    "ShardedEmbeddingCollection": "modules",
    "ShardingEnv": "env",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME.get(name, 'plan')}", __name__), name)
