"""Tables over several processes: layout, routing, exchange, sharded collections, `DistributedModelParallel`.

Names load at first use: the planner reads `sharding.layout`, and `sharding.dmp` calls the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .accumulation import (
        GradientAccumulationConfig,
        GradientAccumulationWrapper,
        accumulate,
    )
    from .awaitable import (
        Awaitable,
        LazyAwaitable,
        NoWait,
    )
    from .composable import (
        shard,
        shard_modules,
    )
    from .data_parallel_wrapper import (
        DataParallelWrapper,
        DefaultDataParallelWrapper,
    )
    from .dmp import (
        DistributedModelParallel,
    )
    from .dmp_collection import (
        DMPCollection,
        DMPCollectionConfig,
    )
    from .env import (
        ShardingEnv,
        ShardingEnv2D,
        ShardingStrategy,
    )
    from .failures import (
        RankFailure,
    )
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
    from .id_map import (
        IdMap,
    )
    from .layout import (
        Shard,
        TableOptions,
    )
    from .modules import (
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
    )
    from .nested import (
        EmbeddingTowerCollectionSharder,
        EmbeddingTowerSharder,
        FeatureProcessedEmbeddingBagCollectionSharder,
    )
    from .pipeline import (
        DataLoadingThread,
        EvalPipelineSparseDist,
        PipelineStage,
        PrefetchTrainPipelineSparseDist,
        SparseDataDistUtil,
        StagedTrainPipeline,
        TrainPipeline,
        TrainPipelineBase,
        TrainPipelineSparseDist,
    )
    from .plan import (
        CacheParams,
        EmbeddingComputeKernel,
        EmbeddingModuleShardingPlan,
        ParameterSharding,
        ShardingPlan,
        ShardingType,
    )
    from .planning.options import (
        extract_plan,
        to_sharding_plan,
    )
    from .planning.planners import (
        EmbeddingPlannerBase,
        EmbeddingShardingPlanner,
    )
    from .qcomms import (
        CommOp,
        CommType,
        NoOpQuantizedCommCodec,
        QCommsConfig,
        QuantizedCommCodec,
        QuantizedCommCodecs,
        get_qcomm_codecs,
        get_qcomm_codecs_registry,
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
    "Awaitable",
    "BaseEmbeddingSharder",
    "CacheParams",
    "CommOp",
    "CommType",
    "DMPCollection",
    "DMPCollectionConfig",
    "DataLoadingThread",
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "EmbeddingModuleShardingPlan",
    "EmbeddingPlannerBase",
    "EmbeddingShardingPlanner",
    "EmbeddingTowerCollectionSharder",
    "EmbeddingTowerSharder",
    "EvalPipelineSparseDist",
    "FeatureProcessedEmbeddingBagCollectionSharder",
    "FusedEmbeddingBagCollectionSharder",
    "FusedEmbeddingCollectionSharder",
    "GradientAccumulationConfig",
    "GradientAccumulationWrapper",
    "IdMap",
    "LazyAwaitable",
    "ModuleSharder",
    "NoOpQuantizedCommCodec",
    "NoWait",
    "ParameterSharding",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "QCommsConfig",
    "QuantizedCommCodec",
    "QuantizedCommCodecs",
    "RankFailure",
    "Shard",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingEnv2D",
    "ShardingPlan",
    "ShardingStrategy",
    "ShardingType",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TableOptions",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "accumulate",
    "apply_to_all",
    "calculate_shard_sizes_and_offsets",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "extract_plan",
    "get_default_sharders",
    "get_module_to_default_sharders",
    "get_qcomm_codecs",
    "get_qcomm_codecs_registry",
    "get_sharding_constructor_from_type",
    "grid_shard",
    "placement",
    "placement_helper",
    "row_wise",
    "shard",
    "shard_modules",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
    "to_sharding_plan",
]

_HOME = {
    "Awaitable": "awaitable",
    "BaseEmbeddingSharder": "sharders",
    "CacheParams": "plan",
    "CommOp": "qcomms",
    "CommType": "qcomms",
    "DMPCollection": "dmp_collection",
    "DMPCollectionConfig": "dmp_collection",
    "DataLoadingThread": "pipeline",
    "DataParallelWrapper": "data_parallel_wrapper",
    "DefaultDataParallelWrapper": "data_parallel_wrapper",
    "DistributedModelParallel": "dmp",
    "EmbeddingBagCollectionSharder": "sharders",
    "EmbeddingCollectionSharder": "sharders",
    "EmbeddingComputeKernel": "plan",
    "EmbeddingModuleShardingPlan": "plan",
    "EmbeddingPlannerBase": "planning.planners",
    "EmbeddingShardingPlanner": "planning.planners",
    "EmbeddingTowerCollectionSharder": "nested",
    "EmbeddingTowerSharder": "nested",
    "EvalPipelineSparseDist": "pipeline",
    "FeatureProcessedEmbeddingBagCollectionSharder": "nested",
    "FusedEmbeddingBagCollectionSharder": "sharders",
    "FusedEmbeddingCollectionSharder": "sharders",
    "GradientAccumulationConfig": "accumulation",
    "GradientAccumulationWrapper": "accumulation",
    "IdMap": "id_map",
    "LazyAwaitable": "awaitable",
    "ModuleSharder": "sharders",
    "NoOpQuantizedCommCodec": "qcomms",
    "NoWait": "awaitable",
    "ParameterSharding": "plan",
    "PipelineStage": "pipeline",
    "PrefetchTrainPipelineSparseDist": "pipeline",
    "QCommsConfig": "qcomms",
    "RankFailure": "failures",
    "QuantizedCommCodec": "qcomms",
    "QuantizedCommCodecs": "qcomms",
    "Shard": "layout",
    "ShardedEmbeddingBagCollection": "modules",
    "ShardedEmbeddingCollection": "modules",
    "ShardingEnv": "env",
    "ShardingEnv2D": "env",
    "ShardingPlan": "plan",
    "ShardingStrategy": "env",
    "ShardingType": "plan",
    "SparseDataDistUtil": "pipeline",
    "StagedTrainPipeline": "pipeline",
    "TableOptions": "layout",
    "TrainPipeline": "pipeline",
    "TrainPipelineBase": "pipeline",
    "TrainPipelineSparseDist": "pipeline",
    "accumulate": "accumulation",
    "apply_to_all": "generators",
    "calculate_shard_sizes_and_offsets": "generators",
    "column_wise": "generators",
    "construct_module_sharding_plan": "generators",
    "data_parallel": "generators",
    "extract_plan": "planning.options",
    "get_default_sharders": "sharders",
    "get_module_to_default_sharders": "generators",
    "get_qcomm_codecs": "qcomms",
    "get_qcomm_codecs_registry": "qcomms",
    "get_sharding_constructor_from_type": "generators",
    "grid_shard": "generators",
    "placement": "generators",
    "placement_helper": "generators",
    "row_wise": "generators",
    "shard": "composable",
    "shard_modules": "composable",
    "table_column_wise": "generators",
    "table_row_wise": "generators",
    "table_wise": "generators",
    "to_sharding_plan": "planning.options",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
