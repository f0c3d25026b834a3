"""`EmbeddingShardingPlanner`: where the tables of a model should go, by our search or by parts of a TorchRec planner.

Our search runs unless a proposer, a partitioner or a performance model is given: then TorchRec's loop runs with these.
Under our search a custom enumerator's options are what is searched.
"""

from __future__ import annotations

import logging
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.planner.constants import BATCH_SIZE
from shardwise.planner.constraints import ANY, ParameterConstraints, check_settings_of, constraint_of, nearest
from shardwise.planner.cost.model import CostModel, cost_model
from shardwise.planner.errors import PlannerError, PlannerErrorType
from shardwise.planner.plan.explanation import explain
from shardwise.planner.plan.plan_files import planned_to_json
from shardwise.planner.plan.planned import Planned, Request
from shardwise.planner.plan.planning import plan_or_advise
from shardwise.planner.search.problem import DoesNotFitError
from shardwise.planner.search.solve import solve
from shardwise.planner.topology import Topology
from shardwise.planner.torchrec.enumerators import EmbeddingEnumerator
from shardwise.planner.torchrec.options import (
    no_plan_error,
    placed_options,
    problem_of,
    propose_plans,
)
from shardwise.planner.torchrec.partitioners import GreedyPerfPartitioner
from shardwise.planner.torchrec.perf_models import NoopPerfModel
from shardwise.planner.torchrec.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from shardwise.planner.torchrec.reservations import HeuristicalStorageReservation, ModelStorageReservation
from shardwise.planner.torchrec.sharding_option import ShardingOption
from shardwise.planner.torchrec.stats import EmbeddingStats
from shardwise.planner.torchrec.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanDebugStats,
    PlanLoader,
    Proposer,
    Stats,
    StorageReservation,
    hash_planner_context_inputs,
    hash_planner_context_inputs_str,
)

from ...planner.layout import SERVED_SETTINGS, TRAINED_SETTINGS, check_settings
from ..comms.env import ShardingEnv
from ..modules.default_sharders import get_default_sharders
from ..plan.module_sharder import ModuleSharder
from ..plan.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from ..quant.fused_params import bounds_check_mode
from .leader import plan_on_leader
from .machines import topology_here
from .options import (
    load_options,
    options_of,
    to_sharding_plan,
    validate_compute_kernels,
    validate_modules_inclusion_in_sharding_plan,
    validate_rank_assignment,
)
from .tables import DATA_PARALLEL, ModelTables, OfModel, tables_of_model

Callback = Callable[[list[ShardingOption]], list[ShardingOption]]
_logger = logging.getLogger(__name__)
# our search has ended long before by itself
_LONG_S = 30.0


@dataclass(frozen=True)
class Explanation:
    """Why a plan is as it is: prints as `shardwise plan explain` tells it. `planned` has the numbers.

    Printing asks for the best bound, which takes longer than the plan did.
    """

    planned: Planned

    def __str__(self) -> str:
        return explain(self.planned)

    def at_once(self) -> str:
        """The same with the bound that the search knew, which holds too."""
        known = replace(self.planned.solution, certified=True)
        return explain(replace(self.planned, solution=known))

    def about(self) -> dict[str, Any]:
        """The "about" part of the file of a plan."""
        about: dict[str, Any] = planned_to_json(self.planned)["about"]
        return about


class EmbeddingPlannerBase(ABC):
    """The base of planners: the machines, the batch, what tables may do, and that one rank plans for all.

    Args:
        topology: the machines; by default those of this process and its process group.
        batch_size: samples of one rank, by default 512.
        enumerator: lists what may be done with each table; by default `EmbeddingEnumerator`.
        storage_reservation: what is kept from tables; by default `HeuristicalStorageReservation`.
        stats: what tells about a plan, one or several.
        constraints: by table name, in every module alike.
        debug: stats tell more.
        callbacks: each may change the best plan, a list of sharding options, before it becomes a `ShardingPlan`.
        timeout_seconds: for a search.
        heuristical_storage_reservation_percentage: of the default reservation.

    Raises:
        RuntimeError: no topology is given, and nobody says how many ranks there are.
        ValueError: `batch_size` or `timeout_seconds` is not positive.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callback] | None = None,
        timeout_seconds: int | None = None,
        heuristical_storage_reservation_percentage: float = 0.15,
    ) -> None:
        for what, value in (("batch_size", batch_size), ("timeout_seconds", timeout_seconds)):
            if value is not None and value <= 0:
                raise ValueError(f"{what} must be positive, got {value}")
        self._topology = topology_here() if topology is None else topology
        self._batch_size = batch_size or BATCH_SIZE
        self._constraints = constraints
        self._enumerator: Enumerator = enumerator or EmbeddingEnumerator(self._topology, self._batch_size, constraints)
        self._storage_reservation = storage_reservation or HeuristicalStorageReservation(
            heuristical_storage_reservation_percentage
        )
        self._stats: list[Stats] = stats if isinstance(stats, list) else [] if stats is None else [stats]
        self._debug, self._callbacks, self._timeout_seconds = debug, list(callbacks or []), timeout_seconds
        # what was planned last, if the enumerator has not seen it
        self._planned: tuple[nn.Module, list[ModuleSharder[Any]]] | None = None

    @abstractmethod
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        """A plan for a module's tables."""

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """`plan` on rank 0 of a process group, and the result on all of its ranks; all call this together.

        Args:
            sharders: by default `get_default_sharders()`.
            pg: by default all ranks.

        Raises:
            RuntimeError: there is no process group.
            PlannerError, ValueError: as `plan` does, on all ranks.
        """
        group = pg or (dist.group.WORLD if dist.is_initialized() else None)
        if group is None:
            raise RuntimeError(
                "no process group: call torch.distributed.init_process_group first, or plan(module, sharders) in one"
                " process"
            )
        used = get_default_sharders() if sharders is None else sharders
        plan = plan_on_leader(group, lambda: self.plan(module, used))
        for of_module in plan.plan.values():
            for name, sharding in of_module.items():
                # what does not travel as text, and every rank was given
                constraint: Any = constraint_of(self._constraints or {}, name) or ParameterConstraints()
                sharding.cache_params, sharding.key_value_params = constraint.cache_params, constraint.key_value_params
                if (tier := sharding.tier) is not None and constraint.tier is not None:
                    chosen = {what: getattr(tier, what) for what in ("slots", "max_slots", "ram_rows")}
                    sharding.tier = replace(constraint.tier, **chosen)
        return plan

    def hash_planner_context_inputs(self) -> int:
        """A number that stands for topology, batch size, enumerator, reservation and constraints, after `plan`.

        Equal in all processes that planned the same.

        Raises:
            ValueError: nothing was planned yet.
        """
        self._enumerate_planned()
        return hash_planner_context_inputs(
            self._topology, self._batch_size, self._enumerator, self._storage_reservation, self._constraints
        )

    def hash_planner_context_inputs_str(self) -> str:
        """As `hash_planner_context_inputs`, as text."""
        self._enumerate_planned()
        return hash_planner_context_inputs_str(
            self._topology, self._batch_size, self._enumerator, self._storage_reservation, self._constraints
        )

    def _enumerate_planned(self) -> None:
        """Have the enumerator list what may be done with the module that was planned, if the plan did without it."""
        if self._planned is not None:
            module, sharders = self._planned
            self._enumerator.enumerate(module=module, sharders=sharders)
            self._planned = None


class EmbeddingShardingPlanner(EmbeddingPlannerBase):
    """Finds the plan whose slowest rank is fastest, within memory; says how far from the best it may be, and why.

    The plan prints with an explanation, which `last_plan` has as numbers.

    Args:
        topology, batch_size, enumerator, storage_reservation, stats, constraints, debug, callbacks, timeout_seconds: as
            `EmbeddingPlannerBase`. The default reservation under our search is `ModelStorageReservation`.
        proposer, partitioner, performance_model: of TorchRec's search, which runs if one of them is given; the others
            have its defaults.
        plan_loader: a plan that it has for these tables and machines is taken.
        cost: "shardwise", "torchrec" (TorchRec's formulas), or a cost model of yours.
        seconds: stop our search then; by default it does a fixed amount of work, which gives the same plan every time.

    Raises:
        RuntimeError, ValueError: as `EmbeddingPlannerBase`.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> planner = EmbeddingShardingPlanner(Topology(world_size=2, compute_device="cpu"), batch_size=64)
        >>> plan = planner.plan(tables, get_default_sharders())
        >>> list(plan.plan[""])
        ['item']
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callback] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        *,
        cost: str | CostModel = "shardwise",
        seconds: float | None = None,
    ) -> None:
        self._is_ours = proposer is None and partitioner is None and performance_model is None
        if storage_reservation is None and self._is_ours:
            storage_reservation = ModelStorageReservation()
        if stats is None and not self._is_ours:
            stats = EmbeddingStats()
        super().__init__(
            topology, batch_size, enumerator, storage_reservation, stats, constraints, debug, callbacks, timeout_seconds
        )
        given = proposer if isinstance(proposer, list) else [proposer] if proposer is not None else None
        self._proposers: list[Proposer] = given or [
            GridSearchProposer(), GreedyProposer(), GreedyProposer(use_depth=False), UniformProposer(),
        ]  # fmt: skip
        self._partitioner = partitioner or GreedyPerfPartitioner()
        self._perf_model = performance_model or NoopPerfModel(self._topology)
        self.plan_loader = plan_loader
        self._cost, self._seconds = cost, seconds
        self._is_default_batch, self._is_custom_enumerator = batch_size is None, enumerator is not None
        if not self._is_ours or self._is_custom_enumerator:
            self._require_known(cost)
        self._num_proposals = self._num_plans = 0
        self._best_plan: list[ShardingOption] | None = None
        self._last_plan: Planned | None = None
        # what is said of a plan that our search made of a custom enumerator's options
        self._summary: str | None = None

    def _require_known(self, cost: str | CostModel) -> None:
        """Refuse what only our search over our own options knows."""
        if cost != "shardwise":
            raise ValueError(
                f"cost={cost!r} has no effect here: options of an enumerator have its estimators' costs; leave it out,"
                " or leave enumerator, proposer, partitioner and performance_model to the planner"
            )
        for name, constraint in (self._constraints or {}).items():
            if name == ANY:
                raise ValueError(
                    "the constraint of '*' has no effect with an enumerator, proposer, partitioner or performance_model"
                    " of your own, which know tables by their names: leave it out, or these"
                )
            for what in ("ranks", "not_on", "same_rank", "skew"):
                if getattr(constraint, what):
                    raise ValueError(
                        f"table {name!r}: the constraint {what}={getattr(constraint, what)!r} has no effect with an"
                        " enumerator, proposer, partitioner or performance_model of your own: leave it out, or these"
                    )

    @property
    def last_plan(self) -> Planned | None:
        """All that is known of the last plan that our search made; None without one."""
        return self._last_plan

    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        """The best plan that is found for the tables of a module; an empty one if it has none.

        Raises:
            PlannerError: no plan stays within memory and constraints; says which ranks lack how much and what would
                help. Or constraints name types or ranks that there are not, or a setting that sharding would refuse, or
                the loaded plan is for something else.

        A constraint for a table that the model does not have is passed over, with a warning, as is a setting of no
        effect.
        """
        begin = time.perf_counter()
        self._num_proposals = self._num_plans = 0
        self._best_plan = self._last_plan = self._summary = None
        may_replicate = [name for name, given in (self._constraints or {}).items() if _asks_for_replicas(given)]
        model = tables_of_model(module, sharders, self._topology.compute_device, may_replicate)
        if not model.modules:
            return to_sharding_plan([], self._topology)
        reserved = self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )
        constraints = _of_tables(self._constraints or {}, [table.name for table in model.tables])
        check_settings_of(
            constraints, [table for table in model.tables if table.is_ours], self._topology.compute_device
        )
        options = self._by_options(module, sharders, reserved)
        self._planned = None
        if self._is_ours and not self._is_custom_enumerator and self.plan_loader is None:
            self._planned = module, sharders
        if options is None:
            options = self._by_tables(model, reserved, constraints)
        for callback in self._callbacks:
            options = callback(options)
        self._best_plan = options
        plan = to_sharding_plan(options, self._topology)
        _add_rest(plan, model)
        _require_settings(plan, model)
        self._log_stats(plan, options, sharders, time.perf_counter() - begin)
        if not any(constraint.device_group for constraint in (self._constraints or {}).values()):
            validate_modules_inclusion_in_sharding_plan(plan, module, sharders)
        validate_rank_assignment(plan, self._topology)
        validate_compute_kernels(options)
        if not self._callbacks:
            # a callback may have changed what would be explained
            plan.explanation = self._summary if self._last_plan is None else Explanation(self._last_plan)
        if _logger.isEnabledFor(logging.INFO) and plan.explanation is not None:
            _logger.info("%s", plan.explanation)
        return plan

    def _by_tables(
        self, model: ModelTables, reserved: Topology, constraints: Mapping[str, ParameterConstraints]
    ) -> list[ShardingOption]:
        """Our search over what our engine can do."""
        if not model.tables:
            return []
        cost = cost_model(self._cost, reserved, self._batch_size, constraints=constraints)
        request = Request(
            model.tables, reserved, self._batch_size, OfModel(cost), constraints,
            tuple(_taken(self._topology, reserved)), self._settings([table.name for table in model.tables]),
        )  # fmt: skip
        self._last_plan = plan_or_advise(request, seconds=self._limit())
        self._num_proposals = self._num_plans = 1
        return options_of(self._last_plan, model.modules, model.parameters, self._constraints or {})

    def _by_options(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]], reserved: Topology
    ) -> list[ShardingOption] | None:
        """A loaded plan, TorchRec's search, or ours over what a custom enumerator lists; None for none of them."""
        if self._is_ours and not self._is_custom_enumerator and self.plan_loader is None:
            return None
        search_space = self._enumerator.enumerate(module=module, sharders=sharders)
        if self.plan_loader is not None:
            loaded = load_options(self.plan_loader, search_space, self.hash_planner_context_inputs_str())
            if loaded:
                return loaded
        if self._is_ours:
            return self._search(search_space, reserved) if self._is_custom_enumerator else None
        proposed = propose_plans(
            search_space, self._enumerator, reserved, self._proposers, self._partitioner, self._perf_model,
            timeout_seconds=self._timeout_seconds,
        )  # fmt: skip
        self._num_proposals, self._num_plans = proposed.proposals, proposed.plans
        if proposed.best is None:
            raise no_plan_error(proposed, self._topology, reserved, self._storage_reservation, self._batch_size)
        return proposed.best

    def _search(self, search_space: list[ShardingOption], reserved: Topology) -> list[ShardingOption]:
        """Our search over options that a custom enumerator listed and priced."""
        problem, options = problem_of(search_space, reserved)
        try:
            solution = solve(problem, seconds=self._limit())
        except DoesNotFitError as error:
            raise PlannerError(
                f"no plan of {len(options)} tables stays within memory: {error}. Reduce the tables or the batch, allow"
                " more sharding types, or take more devices",
                PlannerErrorType.INSUFFICIENT_STORAGE,
            ) from error
        self._num_proposals = self._num_plans = 1
        self._summary = (
            f"Plan: {len(options)} tables, {len(search_space)} options of {type(self._enumerator).__name__}. Slowest"
            f" rank {solution.time_ms:.4g} ms by its estimates; no plan of them is faster than {solution.bound_ms:.4g}"
            f" ms ({solution.bound_from}), so this one is within {solution.gap:.2%} of the best."
        )
        return placed_options(problem, options, solution.assignment)

    def _limit(self) -> float | None:
        """Seconds for our search, which ends by itself before long timeouts."""
        if self._seconds is not None or self._timeout_seconds is None:
            return self._seconds
        return self._timeout_seconds if self._timeout_seconds < _LONG_S else None

    def _settings(self, tables: Sequence[str]) -> dict[str, str]:
        """Settings that decided the plan besides tables and machines, and those assumed because nobody gave them."""
        settings = {}
        if self._is_default_batch:
            settings["batch size"] = f"{self._batch_size} is the default: batch_size says another"
        known = self._constraints or {}
        assumed = 0 if ANY in known else sum(name not in known for name in tables)
        if assumed:
            which = "all tables" if assumed == len(tables) else f"{assumed} of {len(tables)} tables"
            settings["ids"] = f"1 id a sample is assumed for {which}: pooling_factors in constraints says another"
        return {**settings, "reservation": str(self._storage_reservation)}

    def _log_stats(
        self, plan: ShardingPlan, options: list[ShardingOption], sharders: list[ModuleSharder[Any]], seconds: float
    ) -> None:
        for stats in self._stats:
            stats.log(
                sharding_plan=plan,
                topology=self._topology,
                batch_size=self._batch_size,
                storage_reservation=self._storage_reservation,
                num_proposals=self._num_proposals,
                num_plans=self._num_plans,
                run_time=seconds,
                best_plan=options,
                constraints=self._constraints,
                sharders=sharders,
                enumerator=self._enumerator,
                debug=self._debug,
                debug_stats=PlanDebugStats(type(self).__name__, self._timeout_seconds),
            )


def plan_for(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], env: ShardingEnv, device: torch.device
) -> ShardingPlan:
    """The plan that a model gets where none is given, the same on all ranks, which call this together.

    Raises:
        PlannerError: as `EmbeddingShardingPlanner.plan`, on all ranks.
    """

    def make() -> ShardingPlan:
        here = topology_here(device.type, world_size=env.world_size, local_world_size=env.local_world_size)
        with warnings.catch_warnings():
            # who shards the model said so already
            warnings.filterwarnings("ignore", message=".*; it is not sharded")
            return EmbeddingShardingPlanner(here).plan(module, list(sharders))

    return plan_on_leader(env.process_group, make)


def _asks_for_replicas(given: ParameterConstraints) -> bool:
    """Whether a constraint names data_parallel, or by the kernel "dense" alone leaves nothing else."""
    if given.sharding_types is None:
        return bool(given.compute_kernels) and set(given.compute_kernels or ()) <= {"dense", "batched_dense"}
    return DATA_PARALLEL in given.sharding_types


def _of_tables(
    constraints: Mapping[str, ParameterConstraints], names: Sequence[str]
) -> dict[str, ParameterConstraints]:
    """Those that speak of tables of the model. TorchRec's programs share one dict between models.

    An empty list of types or kernels allows all of them, as in TorchRec.
    """
    known = {*names, ANY}
    strange = [name for name in constraints if name not in known]
    if strange:
        named = ", ".join(f"{name!r}{nearest(name, names)}" for name in strange)
        warnings.warn(f"constraints name tables that the model does not have: {named}", stacklevel=4)
    return {
        name: replace(
            constraint,
            sharding_types=constraint.sharding_types or None,
            compute_kernels=constraint.compute_kernels or None,
        )
        for name, constraint in constraints.items()
        if name in known
    }


def _require_settings(plan: ShardingPlan, model: ModelTables) -> None:
    """Check what an enumerator, a loader or a callback wrote into a plan of ours, as constraints are checked."""
    for table in model.tables:
        sharding = plan.plan.get(table.module, EmbeddingModuleShardingPlan()).get(table.name)
        if sharding is not None and table.is_ours:
            try:
                check_settings(table.name, sharding, SERVED_SETTINGS if table.served else TRAINED_SETTINGS)
                if sharding.bounds_check_mode is not None:
                    bounds_check_mode(sharding.bounds_check_mode)
            except ValueError as error:
                raise PlannerError(str(error), PlannerErrorType.INPUT_VALIDATION) from error


def _taken(whole: Topology, reserved: Topology) -> list[int]:
    """Bytes of device memory that a reservation took from each rank; none where there is no such memory."""
    taken = [before - after for before, after in zip(whole.hbm, reserved.hbm, strict=True)]
    return taken if any(taken) else []


def _add_rest(plan: ShardingPlan, model: ModelTables) -> None:
    """Place what can only be on every rank, and modules with no tables at all."""
    assert plan.world_size is not None
    for path, name in model.replicated:
        of_module = plan.plan.setdefault(path, EmbeddingModuleShardingPlan())
        of_module[name] = ParameterSharding(DATA_PARALLEL, "dense", list(range(plan.world_size)))
    full = {path for path, _ in model.replicated} | {table.module for table in model.tables}
    for path in model.modules:
        if path not in full:
            plan.plan[path] = EmbeddingModuleShardingPlan()
