"""The types of TorchRec's planner under the module name that its users import from.

The parts that a planner is made of, as abstract classes to derive from, and the hashes of what a planner was given are
defined here; what planning with our own search needs too has its home in modules of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..constants import BATCH_SIZE, HUNDRED_GB
from ..constraints import ParameterConstraints
from ..errors import PlannerError, PlannerErrorType
from ..hashes import hash_sha256_str, hash_sha256_to_int, text_of
from ..topology import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    DeviceHardware,
    GeneralizedCommsBandwidth,
    Perf,
    Storage,
    Topology,
    round_to_nearest,
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


Constraints = dict[str, ParameterConstraints]


class StorageReservation(ABC):
    """Takes from the storage of every rank what is not for tables."""

    @abstractmethod
    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: Any,
        sharders: list[Any],
        constraints: Constraints | None = None,
    ) -> Topology:
        """A copy of the topology with what is left."""

    @property
    @abstractmethod
    def last_reserved_topology(self) -> Topology | None:
        """The topology that `reserve` returned last."""


class PerfModel(ABC):
    """Rates plans."""

    @abstractmethod
    def rate(self, plan: list[ShardingOption]) -> float:
        """Less is better."""


class ShardEstimator(ABC):
    """Says what shards cost: their time or their storage."""

    @abstractmethod
    def __init__(self, topology: Topology, constraints: Constraints | None = None) -> None: ...

    @abstractmethod
    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Writes into the shards of the options."""


class Enumerator(ABC):
    """Lists the options of every table."""

    @abstractmethod
    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: Constraints | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
    ) -> None: ...

    @abstractmethod
    def enumerate(self, module: Any, sharders: list[Any]) -> list[ShardingOption]:
        """The options of every table that a sharder knows, with their estimates."""

    @abstractmethod
    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Writes estimates into the options."""


class Proposer(ABC):
    """Proposes an option for each table, and gets feedback on how it went."""

    @abstractmethod
    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Takes all options."""

    @abstractmethod
    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Hears whether the last proposal could be placed, and how it was rated."""

    @abstractmethod
    def propose(self) -> list[ShardingOption] | None:
        """The next proposal, None when there is none."""


class Partitioner(ABC):
    """Gives ranks to the shards of a proposal."""

    @abstractmethod
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """The proposal with ranks.

        Raises:
            PlannerError: it does not fit.
        """


@dataclass
class PlanDebugStats:
    """For a log of planning."""

    planner_type: str
    timeout_seconds: int | None


class Stats(ABC):
    """Tells people about a plan."""

    @abstractmethod
    def log(
        self,
        sharding_plan: Any,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: Constraints | None = None,
        sharders: list[Any] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = False,
        debug_stats: PlanDebugStats | None = None,
    ) -> None:
        """Tells it."""


class PlanLoader(ABC):
    """Finds a plan that was made before."""

    @abstractmethod
    def load(self) -> dict[int, ShardingOption] | None:
        """Its options by `ShardingOption.storage_hash`, None if there is none."""

    @abstractmethod
    def plan_context_hash(self) -> str | None:
        """`hash_planner_context_inputs_str` of what it was made for."""


@dataclass
class CriticalPathEstimate:
    """Milliseconds of the slowest path of a plan."""

    comms_estimate: float
    comp_estimate: float

    def total(self) -> float:
        """Both."""
        return self.comms_estimate + self.comp_estimate


def hash_planner_context_inputs(
    topology: Topology,
    batch_size: int,
    enumerator: Enumerator,
    storage_reservation: StorageReservation,
    constraints: Mapping[str, ParameterConstraints] | None,
    hash_function: Callable[[list[Any]], int] = hash_sha256_to_int,
) -> int:
    """A number that stands for all that a planner was given; storage counts to the nearest 100 GB.

    The same in every process. TorchRec 1.8 has the same number where its enumerator, which goes through sets, happened
    to list options in our order, and no field of ours is set.

    Raises:
        ValueError: nothing was enumerated or reserved yet.
    """
    return hash_function(_context(topology, batch_size, enumerator, storage_reservation, constraints))


def hash_planner_context_inputs_str(
    topology: Topology,
    batch_size: int,
    enumerator: Enumerator,
    storage_reservation: StorageReservation,
    constraints: Mapping[str, ParameterConstraints] | None,
    hash_function: Callable[[list[Any]], str] = hash_sha256_str,
) -> str:
    """As `hash_planner_context_inputs`, as text."""
    return hash_function(_context(topology, batch_size, enumerator, storage_reservation, constraints))


def _context(
    topology: Topology,
    batch_size: int,
    enumerator: Enumerator,
    storage_reservation: StorageReservation,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> list[Any]:
    options = getattr(enumerator, "last_stored_search_space", None)
    if options is None:
        raise ValueError("there is nothing to hash before the enumerator has enumerated a module")
    reserved = storage_reservation.last_reserved_topology
    if reserved is None:
        raise ValueError("there is nothing to hash before the storage reservation has reserved")
    return [
        _machines(topology),
        batch_size,
        [
            [option.fqn, option.sharding_type, option.compute_kernel, tuple(map(_cut, option.shards)),
             text_of(option.cache_params)]
            for option in options
        ],
        type(storage_reservation).__name__,
        _machines(reserved),
        # the whole number, of which hash() has a part
        tuple((name, constraint.__hash__()) for name, constraint in sorted(constraints.items()))
        if constraints
        else None,
    ]  # fmt: skip


def _cut(shard: Shard) -> tuple[Any, ...]:
    storage = shard.storage and (shard.storage.hbm, shard.storage.ddr, shard.storage.ssd)
    return tuple(shard.size), tuple(shard.offset), shard.rank, storage


def _machines(topology: Topology) -> int:
    def rounded(size: int) -> int:
        return round_to_nearest(size, HUNDRED_GB)

    devices = [
        (d.rank, rounded(d.storage.hbm), rounded(d.storage.ddr), rounded(d.storage.ssd)) for d in topology.devices
    ]
    return hash_sha256_to_int(topology._facts(devices))
