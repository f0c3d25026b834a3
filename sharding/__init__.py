"""Tables over several processes: layout, routing, exchange, sharded collections, `DistributedModelParallel`.

Names load at first use: the planner reads `sharding.layout`, and `sharding.dmp` calls the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dmp import DistributedModelParallel
    from .env import ShardingEnv
    from .generators import (
        apply_to_all,
        calculate_shard_sizes_and_offsets,
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        get_module_to_default_sharders,
        get_sharding_constructor_from_type,
        grid_shard,
        placement,
        placement_helper,
        row_wise,
        table_column_wise,
        table_row_wise,
        table_wise,
    )
    from .layout import Shard, TableOptions
    from .modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
    from .plan import (
        CacheParams,
        EmbeddingComputeKernel,
        EmbeddingModuleShardingPlan,
        ParameterSharding,
        ShardingPlan,
        ShardingType,
    )
    from .sharders import (
        BaseEmbeddingSharder,
        EmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder,
        FusedEmbeddingBagCollectionSharder,
        FusedEmbeddingCollectionSharder,
        ModuleSharder,
        get_default_sharders,
    )

__all__ = [
    "BaseEmbeddingSharder",
    "CacheParams",
    "DistributedModelParallel",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "EmbeddingModuleShardingPlan",
    "FusedEmbeddingBagCollectionSharder",
    "FusedEmbeddingCollectionSharder",
    "ModuleSharder",
    "ParameterSharding",
    "Shard",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "TableOptions",
    "apply_to_all",
    "calculate_shard_sizes_and_offsets",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "get_default_sharders",
    "get_module_to_default_sharders",
    "get_sharding_constructor_from_type",
    "grid_shard",
    "placement",
    "placement_helper",
    "row_wise",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
]

_PLAN = (
    *("CacheParams", "EmbeddingComputeKernel", "EmbeddingModuleShardingPlan", "ParameterSharding", "ShardingPlan"),
    "ShardingType",
)
_SHARDERS = (
    *("BaseEmbeddingSharder", "EmbeddingBagCollectionSharder", "EmbeddingCollectionSharder", "ModuleSharder"),
    *("FusedEmbeddingBagCollectionSharder", "FusedEmbeddingCollectionSharder", "get_default_sharders"),
)
# all other names are generators
_HOME = {
    "DistributedModelParallel": "dmp",
    "Shard": "layout",
    "ShardedEmbeddingBagCollection": "modules",
    "ShardedEmbeddingCollection": "modules",
    "ShardingEnv": "env",
    "TableOptions": "layout",
    **dict.fromkeys(_PLAN, "plan"),
    **dict.fromkeys(_SHARDERS, "sharders"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME.get(name, 'generators')}", __name__), name)
