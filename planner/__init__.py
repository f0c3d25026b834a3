"""The planner: where tables should go. No tensors, no processes; `sharding.planning` plans models with it.

Names load at first use. TorchRec's names are also in modules of TorchRec's names: `planner.torchrec.types`,
`planner.torchrec.proposers`.
"""

from __future__ import annotations

if __name__ == "planner":
    raise ImportError("import shardwise.planner: 'planner' alone would be a second copy of it")

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .constraints import (
        ParameterConstraints,
    )
    from .cost.model import CostModel
    from .cost.shardwise import ShardwiseCost
    from .cost.torchrec import TorchRecCost
    from .errors import (
        PlannerError,
        PlannerErrorType,
    )
    from .layout import Tier
    from .plan.advice import NoRoomError, Suggestion
    from .plan.explanation import explain
    from .plan.files import read_constraints, read_tables
    from .plan.plan_files import load_planned, save_planned
    from .plan.planned import Planned
    from .plan.planning import plan_tables
    from .reports.difference import diff
    from .reports.page import report
    from .tables import (
        Feature,
        Skew,
        Table,
    )
    from .topology import (
        CustomTopologyData,
        Perf,
        Storage,
        Topology,
    )
    from .torchrec.enumerators import EmbeddingEnumerator
    from .torchrec.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner, SortBy
    from .torchrec.perf_estimators import EmbeddingPerfEstimator
    from .torchrec.perf_models import NoopPerfModel, NoopStorageModel
    from .torchrec.proposers import (
        DynamicProgrammingProposer,
        EmbeddingOffloadScaleupProposer,
        GreedyProposer,
        GridSearchProposer,
        UniformProposer,
    )
    from .torchrec.reservations import (
        FixedAbsoluteStorageReservation,
        FixedPercentageStorageReservation,
        HeuristicalStorageReservation,
        InferenceStorageReservation,
        ModelStorageReservation,
    )
    from .torchrec.sharding_option import (
        PartitionByType,
        PipelineType,
        Shard,
        ShardingOption,
    )
    from .torchrec.stats import EmbeddingStats, NoopEmbeddingStats
    from .torchrec.storage_estimators import EmbeddingOffloadStats, EmbeddingStorageEstimator
    from .torchrec.topology_factory import TopologyFactory
    from .torchrec.types import (
        Enumerator,
        Partitioner,
        PerfModel,
        PlanLoader,
        Proposer,
        ShardEstimator,
        Stats,
        StorageReservation,
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
    "Tier",
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
    "CostModel": "cost.model",
    "CustomTopologyData": "topology",
    "DynamicProgrammingProposer": "torchrec.proposers",
    "EmbeddingEnumerator": "torchrec.enumerators",
    "EmbeddingOffloadScaleupProposer": "torchrec.proposers",
    "EmbeddingOffloadStats": "torchrec.storage_estimators",
    "EmbeddingPerfEstimator": "torchrec.perf_estimators",
    "EmbeddingStats": "torchrec.stats",
    "EmbeddingStorageEstimator": "torchrec.storage_estimators",
    "Enumerator": "torchrec.types",
    "Feature": "tables",
    "FixedAbsoluteStorageReservation": "torchrec.reservations",
    "FixedPercentageStorageReservation": "torchrec.reservations",
    "GreedyPerfPartitioner": "torchrec.partitioners",
    "GreedyProposer": "torchrec.proposers",
    "GridSearchProposer": "torchrec.proposers",
    "HeuristicalStorageReservation": "torchrec.reservations",
    "InferenceStorageReservation": "torchrec.reservations",
    "MemoryBalancedPartitioner": "torchrec.partitioners",
    "ModelStorageReservation": "torchrec.reservations",
    "NoRoomError": "plan.advice",
    "NoopEmbeddingStats": "torchrec.stats",
    "NoopPerfModel": "torchrec.perf_models",
    "NoopStorageModel": "torchrec.perf_models",
    "ParameterConstraints": "constraints",
    "PartitionByType": "torchrec.sharding_option",
    "Partitioner": "torchrec.types",
    "Perf": "topology",
    "PerfModel": "torchrec.types",
    "PipelineType": "torchrec.sharding_option",
    "PlanLoader": "torchrec.types",
    "Planned": "plan.planned",
    "PlannerError": "errors",
    "PlannerErrorType": "errors",
    "Proposer": "torchrec.types",
    "Shard": "torchrec.sharding_option",
    "ShardEstimator": "torchrec.types",
    "ShardingOption": "torchrec.sharding_option",
    "ShardwiseCost": "cost.shardwise",
    "Skew": "tables",
    "SortBy": "torchrec.partitioners",
    "Stats": "torchrec.types",
    "Storage": "topology",
    "StorageReservation": "torchrec.types",
    "Suggestion": "plan.advice",
    "Table": "tables",
    "Tier": "layout",
    "Topology": "topology",
    "TopologyFactory": "torchrec.topology_factory",
    "TorchRecCost": "cost.torchrec",
    "UniformProposer": "torchrec.proposers",
    "diff": "reports.difference",
    "explain": "plan.explanation",
    "load_planned": "plan.plan_files",
    "plan_tables": "plan.planning",
    "read_constraints": "plan.files",
    "read_tables": "plan.files",
    "report": "reports.page",
    "save_planned": "plan.plan_files",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
