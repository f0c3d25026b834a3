"""Tables over several processes: layout, routing, exchange, sharded collections, `DistributedModelParallel`.

Names load at first use: the planner reads `planner.layout`, and `sharding.dmp.dmp` calls the planner.
"""

from __future__ import annotations

if __name__ == "sharding":
    raise ImportError("import shardwise.sharding: 'sharding' alone would be a second copy of it")

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..planner.layout import Shard, TableOptions, Tier
    from .comms.awaitable import Awaitable, LazyAwaitable, NoWait
    from .comms.env import ShardingEnv, ShardingEnv2D, ShardingStrategy
    from .comms.failures import RankFailure
    from .comms.metrics import reduce_metrics
    from .comms.qcomms import (
        CommOp,
        CommType,
        NoOpQuantizedCommCodec,
        QCommsConfig,
        QuantizedCommCodec,
        QuantizedCommCodecs,
        get_qcomm_codecs,
        get_qcomm_codecs_registry,
    )
    from .dmp.composable import shard, shard_modules
    from .dmp.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
    from .dmp.dmp import DistributedModelParallel
    from .dmp.dmp_collection import DMPCollection, DMPCollectionConfig
    from .dmp.tiered import cache_metrics, cache_regret, tiered, trace_caches
    from .engine.id_map import IdMap
    from .modules.default_sharders import get_default_sharders
    from .modules.generators import (
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
    from .modules.nested import (
        EmbeddingTowerCollectionSharder,
        EmbeddingTowerSharder,
        FeatureProcessedEmbeddingBagCollectionSharder,
    )
    from .modules.sharded_collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
    from .modules.sharders import (
        BaseEmbeddingSharder,
        EmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder,
        FusedEmbeddingBagCollectionSharder,
        FusedEmbeddingCollectionSharder,
    )
    from .pipeline import (
        DataLoadingThread,
        EvalPipelineFusedSparseDist,
        EvalPipelineSparseDist,
        PipelineStage,
        PrefetchTrainPipelineSparseDist,
        SparseDataDistUtil,
        StagedTrainPipeline,
        TorchCompileConfig,
        TrainPipeline,
        TrainPipelineBase,
        TrainPipelineFusedSparseDist,
        TrainPipelinePT2,
        TrainPipelineSemiSync,
        TrainPipelineSparseDist,
        TrainPipelineSparseDistCompAutograd,
        TrainPipelineSparseDistLite,
    )
    from .pipeline.accumulation import GradientAccumulationConfig, GradientAccumulationWrapper, accumulate
    from .plan.module_sharder import ModuleSharder
    from .plan.plan import (
        CacheParams,
        EmbeddingComputeKernel,
        EmbeddingModuleShardingPlan,
        ParameterSharding,
        ShardingPlan,
        ShardingType,
    )
    from .plan.sharded_module import ShardedModule
    from .planning.options import (
        extract_plan,
        to_sharding_plan,
    )
    from .planning.planners import (
        EmbeddingPlannerBase,
        EmbeddingShardingPlanner,
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
    "EvalPipelineFusedSparseDist",
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
    "ShardedModule",
    "ShardingEnv",
    "ShardingEnv2D",
    "ShardingPlan",
    "ShardingStrategy",
    "ShardingType",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TableOptions",
    "Tier",
    "TorchCompileConfig",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePT2",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistCompAutograd",
    "TrainPipelineSparseDistLite",
    "accumulate",
    "apply_to_all",
    "cache_metrics",
    "cache_regret",
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
    "reduce_metrics",
    "row_wise",
    "shard",
    "shard_modules",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
    "tiered",
    "to_sharding_plan",
    "trace_caches",
]

_HOME = {
    "Awaitable": "comms.awaitable",
    "BaseEmbeddingSharder": "modules.sharders",
    "CacheParams": "plan.plan",
    "CommOp": "comms.qcomms",
    "CommType": "comms.qcomms",
    "DMPCollection": "dmp.dmp_collection",
    "DMPCollectionConfig": "dmp.dmp_collection",
    "DataLoadingThread": "pipeline",
    "DataParallelWrapper": "dmp.data_parallel",
    "DefaultDataParallelWrapper": "dmp.data_parallel",
    "DistributedModelParallel": "dmp.dmp",
    "EmbeddingBagCollectionSharder": "modules.sharders",
    "EmbeddingCollectionSharder": "modules.sharders",
    "EmbeddingComputeKernel": "plan.plan",
    "EmbeddingModuleShardingPlan": "plan.plan",
    "EmbeddingPlannerBase": "planning.planners",
    "EmbeddingShardingPlanner": "planning.planners",
    "EmbeddingTowerCollectionSharder": "modules.nested",
    "EmbeddingTowerSharder": "modules.nested",
    "EvalPipelineFusedSparseDist": "pipeline",
    "EvalPipelineSparseDist": "pipeline",
    "FeatureProcessedEmbeddingBagCollectionSharder": "modules.nested",
    "FusedEmbeddingBagCollectionSharder": "modules.sharders",
    "FusedEmbeddingCollectionSharder": "modules.sharders",
    "GradientAccumulationConfig": "pipeline.accumulation",
    "GradientAccumulationWrapper": "pipeline.accumulation",
    "IdMap": "engine.id_map",
    "LazyAwaitable": "comms.awaitable",
    "ModuleSharder": "plan.module_sharder",
    "NoOpQuantizedCommCodec": "comms.qcomms",
    "NoWait": "comms.awaitable",
    "ParameterSharding": "plan.plan",
    "PipelineStage": "pipeline",
    "PrefetchTrainPipelineSparseDist": "pipeline",
    "QCommsConfig": "comms.qcomms",
    "QuantizedCommCodec": "comms.qcomms",
    "QuantizedCommCodecs": "comms.qcomms",
    "RankFailure": "comms.failures",
    "Shard": ".planner.layout",
    "ShardedEmbeddingBagCollection": "modules.sharded_collections",
    "ShardedEmbeddingCollection": "modules.sharded_collections",
    "ShardedModule": "plan.sharded_module",
    "ShardingEnv": "comms.env",
    "ShardingEnv2D": "comms.env",
    "ShardingPlan": "plan.plan",
    "ShardingStrategy": "comms.env",
    "ShardingType": "plan.plan",
    "SparseDataDistUtil": "pipeline",
    "StagedTrainPipeline": "pipeline",
    "TableOptions": ".planner.layout",
    "Tier": ".planner.layout",
    "TorchCompileConfig": "pipeline",
    "TrainPipeline": "pipeline",
    "TrainPipelineBase": "pipeline",
    "TrainPipelineFusedSparseDist": "pipeline",
    "TrainPipelinePT2": "pipeline",
    "TrainPipelineSemiSync": "pipeline",
    "TrainPipelineSparseDist": "pipeline",
    "TrainPipelineSparseDistCompAutograd": "pipeline",
    "TrainPipelineSparseDistLite": "pipeline",
    "accumulate": "pipeline.accumulation",
    "apply_to_all": "modules.generators",
    "cache_metrics": "dmp.tiered",
    "cache_regret": "dmp.tiered",
    "calculate_shard_sizes_and_offsets": "modules.generators",
    "column_wise": "modules.generators",
    "construct_module_sharding_plan": "modules.generators",
    "data_parallel": "modules.generators",
    "extract_plan": "planning.options",
    "get_default_sharders": "modules.default_sharders",
    "get_module_to_default_sharders": "modules.generators",
    "get_qcomm_codecs": "comms.qcomms",
    "get_qcomm_codecs_registry": "comms.qcomms",
    "get_sharding_constructor_from_type": "modules.generators",
    "grid_shard": "modules.generators",
    "placement": "modules.generators",
    "placement_helper": "modules.generators",
    "reduce_metrics": "comms.metrics",
    "row_wise": "modules.generators",
    "shard": "dmp.composable",
    "shard_modules": "dmp.composable",
    "table_column_wise": "modules.generators",
    "table_row_wise": "modules.generators",
    "table_wise": "modules.generators",
    "tiered": "dmp.tiered",
    "to_sharding_plan": "planning.options",
    "trace_caches": "dmp.tiered",
}


def __getattr__(name: str) -> object:
    if name == "layout":
        # the strategies, which lie with the planner
        return import_module("..planner.layout", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
