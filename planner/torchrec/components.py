"""The parts that a TorchRec planner is made of, as abstract classes to derive from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ..constraints import ParameterConstraints
from ..topology import Topology
from .constants import BATCH_SIZE
from .sharding_option import SharderDataMap, ShardingOption

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
        """What `reserve` returned last."""


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
    """Proposes an option for each table, and hears how it went."""

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
