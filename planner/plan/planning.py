"""Planning: price every way to cut each table, search, and keep all that is known about the result."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shardwise.planner.layout import CAPABILITIES, SERVING

from ..constraints import (
    Group,
    ParameterConstraints,
    allowed_ranks,
    as_given,
    check_constraints,
    check_settings_of,
    constraint_of,
    described,
    groups,
)
from ..cost.cache import MissCurve
from ..cost.model import CostModel, cost_model
from ..errors import PlannerError, PlannerErrorType
from ..search.problem import (
    Assignment,
    Choice,
    DoesNotFitError,
    Item,
    Problem,
    Solution,
    loads,
)
from ..search.relax import relax
from ..search.solve import Tell, solve
from ..tables import Table
from ..topology import Topology
from .advice import no_room
from .planned import Planned, Request
from .slots import bounded, has_sizes, reassigned, refined, refuse_thrashing, with_reach
from .whatif import without_constraints

TABLE_WISE = "table_wise"
# in which slots are looked for between sizes that were tried
_ROUNDS = 5


def plan_tables(
    tables: Sequence[Table],
    topology: Topology,
    batch_size: int,
    *,
    cost: str | CostModel = "shardwise",
    constraints: Mapping[str, ParameterConstraints] | None = None,
    reserved: Sequence[int] = (),
    seconds: float | None = None,
    settings: Mapping[str, str] | None = None,
    curves: Mapping[str, MissCurve] | None = None,
) -> Planned:
    """The best plan that the search finds, the same for the same arguments.

    Args:
        topology: with the memory that tables may use.
        batch_size: samples of one rank.
        cost: "shardwise" or "torchrec", or a model that prices for this topology and batch size.
        constraints: by table name; "*" for all tables without their own. A table whose `device_group` is not the
            topology's compute device is left out of the plan, as another plan places it.
        reserved: bytes [W] of device memory that a reservation took from `topology`, for advice to give some back.
        seconds: as `solve`.
        curves: misses of tables' caches by name of table, of a step of all ranks; by default of cache statistics, or
            of how ids are drawn.

    Raises:
        ThrashError: a cache whose slots were to be chosen would miss nearly always, or take far longer than a step.
        NoRoomError: no plan stays within memory, or none was found; says what would help.
        PlannerError: constraints name what there is not, leave a table no choice, contradict each other, or have a
            setting that sharding would refuse. One that has no effect is named in a warning.
    """
    check_settings_of(constraints or {}, tables, topology.compute_device)
    model = cost_model(cost, topology, batch_size, constraints=constraints, curves=curves)
    request = Request(
        tuple(tables), topology, batch_size, model, dict(constraints or {}), tuple(reserved), dict(settings or {})
    )
    planned = plan_or_advise(request, seconds=seconds)
    warn_of_kernels(planned)
    return planned


def warn_of_kernels(planned: Planned) -> None:
    """Name the tables whose compute kernel sharding refuses: TorchRec's formulas price more than our engine runs."""
    machines = {True: SERVING, False: CAPABILITIES}
    by_kernel: dict[str, list[str]] = {}
    for table, choice, _ in planned.placed():
        known = machines[table.served].get(planned.topology.compute_device, {})
        if choice.compute_kernel not in known.get(choice.sharding_type, ()):
            by_kernel.setdefault(choice.compute_kernel, []).append(table.name)
    for kernel, names in by_kernel.items():
        shown = f"{', '.join(map(repr, names[:8]))}{', ...' if len(names) > 8 else ''}"
        warnings.warn(
            f"tables {shown} have compute_kernel {kernel!r}, which is planned for comparison and which sharding refuses"
            " by name: a constraint compute_kernels leaves it out",
            stacklevel=3,
        )


def plan_or_advise(request: Request, *, seconds: float | None = None, tell: Tell | None = None) -> Planned:
    """The plan for a request; `tell` as `solve`. Raises as `plan_tables`."""
    try:
        return plan_request(request, seconds=seconds, tell=tell)
    except DoesNotFitError as error:
        if tell is not None:
            tell("no plan fits; trying what would", np.inf, np.inf)
        free, _ = problem_of(without_constraints(request))
        raise no_room(request, error, free, has_plan) from error


def plan_request(request: Request, *, seconds: float | None = None, tell: Tell | None = None) -> Planned:
    """As `plan_tables`, without advice.

    Raises:
        DoesNotFitError: no plan stays within memory, or none was found.
        PlannerError: as `plan_tables`.
    """
    begin = time.perf_counter()
    problem, here = problem_of(request)
    solution = solve(problem, seconds=seconds, tell=tell) if problem.items else _nothing(problem)
    if has_sizes(problem):
        request, problem, solution = _with_slots(request, problem, solution)
    taken = time.perf_counter() - begin
    planned = Planned(
        here, request.topology, request.batch_size, request.cost.name, problem, solution, dict(request.settings), taken,
        request,
    )  # fmt: skip
    for text in refuse_thrashing(planned):
        warnings.warn(f"a cache would thrash: {text}", stacklevel=3)
    return planned


def _with_slots(request: Request, problem: Problem, solution: Solution) -> tuple[Request, Problem, Solution]:
    """The slots that are best where tables lie, and the bound for slots of any number."""
    best, time_ms = solution.assignment, solution.time_ms
    by_name = {table.path: table.name for table in request.tables}
    with_slots: Any = getattr(request.cost, "with_slots", None)
    # misses between two sizes are on a line above their curve, but for the sizes about those of the round before
    for _ in range(_ROUNDS):
        slots = refined(problem, best) if with_slots is not None else {}
        if with_slots is None or not slots:
            break
        finer = replace(request, cost=with_slots({by_name[path]: count for path, count in slots.items()}))
        refined_problem, _ = problem_of(finer)
        again = reassigned(refined_problem, problem, best, slots)
        now = math.inf if again is None else float(loads(refined_problem, again).time_ms.max())
        if again is None or now > time_ms * (1 + 1e-9):
            break
        request, problem, best, gained, time_ms = finer, refined_problem, again, time_ms - now, now
        if gained < 1e-9 * now:
            break
    return request, problem, bounded(problem, best, solution.steps)


def _nothing(problem: Problem) -> Solution:
    """The plan for no tables."""
    anyway = float(problem.base_ms.max())
    return Solution(Assignment((), ()), anyway, anyway, "there is nothing to place", True)


def has_plan(request: Request) -> bool:
    """Whether a short search finds a plan; what a bound rules out is not searched.

    Raises:
        PlannerError: as `plan_tables`.
    """
    problem, _ = problem_of(request)
    if np.isinf(relax(problem).bound_ms):
        return False
    try:
        solve(problem, seconds=0.0)
    except DoesNotFitError:
        return False
    return True


def problem_of(request: Request) -> tuple[Problem, tuple[Table, ...]]:
    """The problem that a request poses, and its tables as constraints describe them, without those left out.

    Raises:
        PlannerError: as `plan_tables`.
    """
    rules, topology = request.constraints, request.topology
    check_constraints(rules, (table.name for table in request.tables), topology.world_size)
    here, _ = of_device(request.tables, topology.compute_device, rules)
    return build_problem(here, topology, request.cost, rules), tuple(here)


def of_device(
    tables: Iterable[Table], compute_device: str, constraints: Mapping[str, ParameterConstraints]
) -> tuple[list[Table], list[Table]]:
    """The tables to place on this kind of device, their ids as constraints describe them, and the others."""
    here: list[Table] = []
    elsewhere: list[Table] = []
    for table in tables:
        constraint = constraint_of(constraints, table.name)
        group = None if constraint is None else constraint.device_group
        (here if group in (None, compute_device) else elsewhere).append(described(table, constraint))
    return here, elsewhere


def build_problem(
    tables: Sequence[Table],
    topology: Topology,
    cost: CostModel,
    constraints: Mapping[str, ParameterConstraints],
) -> Problem:
    """The choices that constraints leave, priced. Tables that differ in names alone are priced once.

    Raises:
        PlannerError: as `plan_tables`.
    """
    price = _Prices(cost, constraints)
    items = [
        _alone(group.tables[0], price, topology, constraints)
        if group.label is None
        else _together(group, price, topology, constraints)
        for group in groups(tables, constraints)
    ]
    return Problem(
        tuple(items),
        topology.local_world_size,
        np.array(topology.hbm, np.int64),
        np.array(topology.ddr, np.int64),
        np.full(topology.world_size, cost.base_ms(tables)),
    )


class _Prices:
    """The choices of tables; the same tuple for tables of which a cost model cannot tell one from the other."""

    def __init__(self, cost: CostModel, constraints: Mapping[str, ParameterConstraints]) -> None:
        self.cost, self.constraints = cost, constraints
        self._known: dict[tuple[Table, int], tuple[Choice, ...]] = {}

    def __call__(self, table: Table) -> tuple[Choice, ...]:
        constraint = constraint_of(self.constraints, table.name)
        nameless = replace(
            table, name="", module="", features=tuple(replace(feature, name="") for feature in table.features)
        )
        if constraint is not None and constraint.tier is not None:
            # misses may be known by the table's name
            nameless = replace(nameless, name=table.name)
        # many tables share one constraint; equal ones that are two objects are only priced twice
        key = nameless, id(constraint)
        choices = self._known.get(key)
        if choices is None:
            ways = self.cost.ways(table, constraint)
            choices = self._known[key] = with_reach([self.cost.price(table, way) for way in ways])
        if not choices:
            raise _no_way(table, constraint, self.cost)
        return choices


def _alone(table: Table, price: _Prices, topology: Topology, constraints: Mapping[str, ParameterConstraints]) -> Item:
    """A table that goes where it likes."""
    constraint = constraint_of(constraints, table.name)
    choices, ranks = price(table), allowed_ranks(table.name, constraint, topology.world_size)
    if ranks is None or constraint is None:
        return Item((table.path,), choices)
    left = tuple(choice for choice in choices if _has_place(choice, ranks))
    if not left:
        cuts = ", ".join(dict.fromkeys(choice.sharding_type for choice in choices))
        raise _strict(
            f"table {table.name!r}: {as_given(constraint, 'ranks', 'not_on')} leaves ranks {list(ranks)}, and"
            f" {as_given(constraint, 'sharding_types', 'compute_kernels', 'min_partition') or 'the cost model'} leaves"
            f" {cuts}, which needs others too: allow 'table_wise', or more ranks"
        )
    return Item((table.path,), left, ranks)


def _has_place(choice: Choice, ranks: Iterable[int]) -> bool:
    """Whether a block of the choice finds all its ranks among these; what one block finds, all do."""
    ranks_of_block: dict[int, int] = {}
    for rank in ranks:
        ranks_of_block[rank // choice.span] = ranks_of_block.get(rank // choice.span, 0) + 1
    return choice.span in ranks_of_block.values()


def _together(
    group: Group, price: _Prices, topology: Topology, constraints: Mapping[str, ParameterConstraints]
) -> Item:
    """Tables that share a rank: a choice for each kernel in which all of them can lie whole on one."""
    by_kernel: list[dict[str, Choice]] = []
    ranks = set(range(topology.world_size))
    for table in group.tables:
        whole = {choice.compute_kernel: choice for choice in price(table) if choice.sharding_type == TABLE_WISE}
        constraint = constraint_of(constraints, table.name)
        if any(choice.cached is not None and choice.cached.chosen for choice in whole.values()):
            raise _strict(
                f"table {table.name!r} has same_rank={group.label!r} and a Tier without slots: give it a number of"
                " slots, as they are chosen only for tables that go where they like"
            )
        if not whole:
            given = as_given(constraint, "sharding_types", "compute_kernels") if constraint else ""
            raise _strict(
                f"table {table.name!r} has same_rank={group.label!r}, so it lies whole on one rank, but it may not be"
                f" table_wise{f' ({given})' if given else ''}: allow 'table_wise', or leave it out of the group"
            )
        by_kernel.append(whole)
        allowed = allowed_ranks(table.name, constraint, topology.world_size)
        if allowed is not None:
            ranks &= set(allowed)
    names = ", ".join(repr(table.name) for table in group.tables)
    if not ranks:
        raise _strict(f"tables {names} have same_rank={group.label!r}, and their ranks and not_on leave none in common")
    shared = [kernel for kernel in by_kernel[0] if all(kernel in of_table for of_table in by_kernel)]
    if not shared:
        raise _strict(
            f"tables {names} have same_rank={group.label!r}, and no compute kernel is allowed for all of them"
        )
    choices = tuple(_sum([of_table[kernel] for of_table in by_kernel]) for kernel in shared)
    limited = None if len(ranks) == topology.world_size else tuple(sorted(ranks))
    return Item(tuple(table.path for table in group.tables), choices, limited)


def _sum(choices: Sequence[Choice]) -> Choice:
    """Several whole tables as one block."""
    return Choice(
        TABLE_WISE,
        choices[0].compute_kernel,
        (sum(sum(choice.widths) for choice in choices),),
        np.sum([choice.parts_ms for choice in choices], axis=0),
        np.sum([choice.hbm for choice in choices], axis=0),
        np.sum([choice.ddr for choice in choices], axis=0),
    )


def _no_way(table: Table, constraint: ParameterConstraints | None, cost: CostModel) -> PlannerError:
    """That a table cannot be placed, and which field of its constraint is to blame."""
    if constraint is None:
        return _strict(f"table {table.name!r}: cost {cost.name!r} knows no way to place it on these devices")
    limits = ("sharding_types", "compute_kernels", "min_partition")
    blamed = []
    for field in limits:
        laxer: Any = {field: None}
        ways = cost.ways(table, replace(constraint, **laxer))
        if ways and getattr(constraint, field) is not None:
            what = dict.fromkeys(f"{way.sharding_type} ({way.compute_kernel})" for way in ways)
            blamed.append(f"without {field} there would be {', '.join(what)}")
    return _strict(
        f"table {table.name!r}: {as_given(constraint, *limits) or as_given(constraint)} leaves no way to place it"
        f"{': ' + '; '.join(blamed) if blamed else ''}"
    )


def _strict(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.STRICT_CONSTRAINTS)
