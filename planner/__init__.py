"""Where tables should go. Pure Python: no tensors, no processes; `sharding.planning` plans models with it.

Names load at first use. TorchRec's names are also in modules of TorchRec's names: `planner.types`, `planner.proposers`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .advice import (
        NoRoomError,
        Suggestion,
    )
    from .components import (
        Enumerator,
        Partitioner,
        PerfModel,
        PlanLoader,
        Proposer,
        ShardEstimator,
        Stats,
        StorageReservation,
    )
    from .constraints import (
        ParameterConstraints,
    )
    from .cost import (
        ShardwiseCost,
    )
    from .cost_model import (
        CostModel,
    )
    from .cost_torchrec import (
        TorchRecCost,
    )
    from .difference import (
        diff,
    )
    from .enumerators import (
        EmbeddingEnumerator,
    )
    from .errors import (
        PlannerError,
        PlannerErrorType,
    )
    from .explanation import (
        explain,
    )
    from .files import (
        read_constraints,
        read_tables,
    )
    from .files_plan import (
        load_planned,
        save_planned,
    )
    from .hardware import (
        CustomTopologyData,
        Perf,
        Storage,
    )
    from .partitioners import (
        GreedyPerfPartitioner,
        MemoryBalancedPartitioner,
        SortBy,
    )
    from .perf_models import (
        NoopPerfModel,
        NoopStorageModel,
    )
    from .planned import (
        Planned,
    )
    from .planning import (
        plan_tables,
    )
    from .proposers import (
        DynamicProgrammingProposer,
        EmbeddingOffloadScaleupProposer,
        GreedyProposer,
        GridSearchProposer,
        UniformProposer,
    )
    from .report_page import (
        report,
    )
    from .shard_estimators import (
        EmbeddingOffloadStats,
        EmbeddingPerfEstimator,
        EmbeddingStorageEstimator,
    )
    from .sharding_option import (
        PartitionByType,
        PipelineType,
        Shard,
        ShardingOption,
    )
    from .stats import (
        EmbeddingStats,
        NoopEmbeddingStats,
    )
    from .storage_reservations import (
        FixedAbsoluteStorageReservation,
        FixedPercentageStorageReservation,
        HeuristicalStorageReservation,
        InferenceStorageReservation,
        ModelStorageReservation,
    )
    from .tables import (
        Feature,
        Skew,
        Table,
    )
    from .topology import (
        Topology,
    )
    from .topology_factory import (
        TopologyFactory,
    )

__all__ = [
    "CostModel",
    "CustomTopologyData",
    "DynamicProgrammingProposer",
    "EmbeddingEnumerator",
    "EmbeddingOffloadScaleupProposer",
    "EmbeddingOffloadStats",
    "EmbeddingPerfEstimator",
    "EmbeddingStats",
    "EmbeddingStorageEstimator",
    "Enumerator",
    "Feature",
    "FixedAbsoluteStorageReservation",
    "FixedPercentageStorageReservation",
    "GreedyPerfPartitioner",
    "GreedyProposer",
    "GridSearchProposer",
    "HeuristicalStorageReservation",
    "InferenceStorageReservation",
    "MemoryBalancedPartitioner",
    "ModelStorageReservation",
    "NoRoomError",
    "NoopEmbeddingStats",
    "NoopPerfModel",
    "NoopStorageModel",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PipelineType",
    "PlanLoader",
    "Planned",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "ShardingOption",
    "ShardwiseCost",
    "Skew",
    "SortBy",
    "Stats",
    "Storage",
    "StorageReservation",
    "Suggestion",
    "Table",
    "Topology",
    "TopologyFactory",
    "TorchRecCost",
    "UniformProposer",
    "diff",
    "explain",
    "load_planned",
    "plan_tables",
    "read_constraints",
    "read_tables",
    "report",
    "save_planned",
]

_HOME = {
    "CostModel": "cost_model",
    "CustomTopologyData": "hardware",
    "DynamicProgrammingProposer": "proposers",
    "EmbeddingEnumerator": "enumerators",
    "EmbeddingOffloadScaleupProposer": "proposers",
    "EmbeddingOffloadStats": "shard_estimators",
    "EmbeddingPerfEstimator": "shard_estimators",
    "EmbeddingStats": "stats",
    "EmbeddingStorageEstimator": "shard_estimators",
    "Enumerator": "components",
    "Feature": "tables",
    "FixedAbsoluteStorageReservation": "storage_reservations",
    "FixedPercentageStorageReservation": "storage_reservations",
    "GreedyPerfPartitioner": "partitioners",
    "GreedyProposer": "proposers",
    "GridSearchProposer": "proposers",
    "HeuristicalStorageReservation": "storage_reservations",
    "InferenceStorageReservation": "storage_reservations",
    "MemoryBalancedPartitioner": "partitioners",
    "ModelStorageReservation": "storage_reservations",
    "NoRoomError": "advice",
    "NoopEmbeddingStats": "stats",
    "NoopPerfModel": "perf_models",
    "NoopStorageModel": "perf_models",
    "ParameterConstraints": "constraints",
    "PartitionByType": "sharding_option",
    "Partitioner": "components",
    "Perf": "hardware",
    "PerfModel": "components",
    "PipelineType": "sharding_option",
    "PlanLoader": "components",
    "Planned": "planned",
    "PlannerError": "errors",
    "PlannerErrorType": "errors",
    "Proposer": "components",
    "Shard": "sharding_option",
    "ShardEstimator": "components",
    "ShardingOption": "sharding_option",
    "ShardwiseCost": "cost",
    "Skew": "tables",
    "SortBy": "partitioners",
    "Stats": "components",
    "Storage": "hardware",
    "StorageReservation": "components",
    "Suggestion": "advice",
    "Table": "tables",
    "Topology": "topology",
    "TopologyFactory": "topology_factory",
    "TorchRecCost": "cost_torchrec",
    "UniformProposer": "proposers",
    "diff": "difference",
    "explain": "explanation",
    "load_planned": "files_plan",
    "plan_tables": "planning",
    "read_constraints": "files",
    "read_tables": "files",
    "report": "report_page",
    "save_planned": "files_plan",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
