"""The types of TorchRec's planner under the module name that its users import from; they are defined next door."""

from __future__ import annotations

from ..constraints import ParameterConstraints
from ..errors import PlannerError, PlannerErrorType
from ..hardware import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    DeviceHardware,
    GeneralizedCommsBandwidth,
    Perf,
    Storage,
)
from ..hashes import (
    hash_planner_context_inputs,
    hash_planner_context_inputs_str,
    hash_sha256_str,
    hash_sha256_to_int,
    round_to_nearest,
)
from ..topology import Topology
from .components import (
    CriticalPathEstimate,
    Enumerator,
    Partitioner,
    PerfModel,
    PlanDebugStats,
    PlanLoader,
    Proposer,
    ShardEstimator,
    Stats,
    StorageReservation,
)
from .sharding_option import (
    CacheStatistics,
    PartitionByType,
    PipelineType,
    Shard,
    SharderData,
    SharderDataMap,
    ShardingOption,
    StorageUsageType,
)
from .topology_factory import HardwareConfig, KernelConfig, TopologyConfigBase, TopologyFactory, TrainerConfig

__all__ = [
    "BasicCommsBandwidths",
    "CacheStatistics",
    "CollectiveType",
    "CriticalPathEstimate",
    "CustomTopologyData",
    "DeviceHardware",
    "Enumerator",
    "GeneralizedCommsBandwidth",
    "HardwareConfig",
    "KernelConfig",
    "ParameterConstraints",
    "PartitionByType",
    "Partitioner",
    "Perf",
    "PerfModel",
    "PipelineType",
    "PlanDebugStats",
    "PlanLoader",
    "PlannerError",
    "PlannerErrorType",
    "Proposer",
    "Shard",
    "ShardEstimator",
    "SharderData",
    "SharderDataMap",
    "ShardingOption",
    "Stats",
    "Storage",
    "StorageReservation",
    "StorageUsageType",
    "Topology",
    "TopologyConfigBase",
    "TopologyFactory",
    "TrainerConfig",
    "hash_planner_context_inputs",
    "hash_planner_context_inputs_str",
    "hash_sha256_str",
    "hash_sha256_to_int",
    "round_to_nearest",
]
