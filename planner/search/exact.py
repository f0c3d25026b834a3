"""Optimal plans of small problems, proven: mixed-integer programming with HiGHS, which comes with scipy.

What HiGHS says is trusted up to `MARGIN`: it solves linear programs to absolute tolerances of 1e-6 and 1e-7, where the
target is scaled to 1000, and bounds are lowered by far more than that. A plan that it finds is checked as any other.

The program has one binary for each choice, and one integer for each group of equal blocks and place: how many of them
lie there. Blocks over all ranks need no place. Choices that no better plan can contain are left out first. Time and
memory are scaled so that their limits are `SCALE`: HiGHS works with absolute tolerances of 1e-6.

Letters: I items, C most choices of an item, W ranks, V variables, K blocks, S span.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .problem import Assignment, Choice, Floats, Problem, faults, loads
from .relax import Bools, Relaxed, relax

SCALE = 1000.0


@dataclass(frozen=True)
class Group:
    """Equal blocks of a choice, by number, and for every place where they may begin the variable that counts them."""

    blocks: tuple[int, ...]
    places: dict[int, int]


@dataclass(eq=False)
class Model:
    """Minimise variable 0, the time of the slowest rank, over integers `0 <= v <= upper`.

    Args:
        upper: of each variable [V].
        equal: rows of (variable, factor) that sum to a number.
        most: likewise, the number is a limit.
        chosen: the variable of (item, choice).
        groups: of (item, choice), where blocks do not lie on all ranks.
    """

    upper: list[float]
    equal: list[tuple[list[tuple[int, float]], float]] = field(default_factory=list)
    most: list[tuple[list[tuple[int, float]], float]] = field(default_factory=list)
    chosen: dict[tuple[int, int], int] = field(default_factory=dict)
    groups: dict[tuple[int, int], list[Group]] = field(default_factory=dict)

    def variable(self, upper: float) -> int:
        """A new one."""
        self.upper.append(upper)
        return len(self.upper) - 1


def kept_choices(problem: Problem, relaxed: Relaxed, upper_ms: float) -> Bools:
    """Which choices [I, C] a plan no slower than `upper_ms` may contain, or one as good: a superset."""
    kept = affordable(problem, relaxed, upper_ms)
    for i, item in enumerate(problem.items):
        better: list[Choice] = []
        for c in np.flatnonzero(kept[i]):
            choice = item.choices[c]
            if any(dominates(other, choice, problem) for other in better):
                kept[i, c] = False
            else:
                better.append(choice)
    return kept


def affordable(problem: Problem, relaxed: Relaxed, upper_ms: float) -> Bools:
    """The choices [I, C] whose blocks fit under a target, and whose work leaves enough time for all others.

    Work is that of the relaxation, memory paid for at its prices; none is kept if the target is below its bound.
    """
    options, hbm, ddr = relaxed.options, relaxed.ms_per_hbm_byte, relaxed.ms_per_ddr_byte
    priced = options.work_ms + hbm * options.hbm + ddr * options.ddr  # [I, C]
    priced = np.where(np.isfinite(options.need_ms) & (options.need_ms <= upper_ms), priced, np.inf)
    least = priced.min(axis=1, keepdims=True)  # [I, 1]
    if not np.isfinite(least).all():
        return np.zeros(priced.shape, bool)
    spare = problem.world_size * upper_ms - problem.base_ms.sum() - least.sum()
    spare += hbm * problem.hbm.sum() + ddr * problem.ddr.sum()
    kept: Bools = np.isfinite(priced) & (priced - least <= spare * (1 + 1e-9) + 1e-9 * abs(least).sum())
    return kept


def dominates(choice: Choice, other: Choice, problem: Problem) -> bool:
    """Whether `choice` can lie wherever `other` can, and takes no more of anything."""
    if choice.hbm.shape != other.hbm.shape:
        return False
    if choice.one_host and not other.one_host and problem.local_size < problem.world_size:
        return False
    return bool(
        (choice.time_ms <= other.time_ms).all() and (choice.hbm <= other.hbm).all() and (choice.ddr <= other.ddr).all()
    )


def build_model(problem: Problem, kept: Bools, unit_ms: float, memory: bool = True) -> Model:
    """The model of the choices kept, with times in `unit_ms` / SCALE.

    Args:
        memory: respect the limits of memory; without them it is a relaxation.
    """
    world = problem.world_size
    model = Model([np.inf])
    limits: list[tuple[Floats, Floats]] = [(np.full(world, unit_ms), -problem.base_ms)]
    limits += [(np.maximum(limit, 1.0), limit.astype(np.float64)) for limit in (problem.hbm, problem.ddr)]
    loads: list[list[list[tuple[int, float]]]] = [[[] for _ in range(world)] for _ in limits]
    for row in loads[0]:
        row.append((0, -1.0))
    for i in range(len(problem.items)):
        variables = []
        for c in np.flatnonzero(kept[i]):
            variables.append(model.variable(1.0))
            model.chosen[i, int(c)] = variables[-1]
            for variable, rank, amounts in _add_choice(model, problem, i, int(c)):
                for what, amount in enumerate(amounts):
                    if amount:
                        loads[what][rank].append((variable, SCALE * amount / float(limits[what][0][rank])))
        model.equal.append(([(variable, 1.0) for variable in variables], 1.0))
    for what, (units, limit) in enumerate(limits):
        for rank, row in enumerate(loads[what]):
            number = SCALE * float(limit[rank]) / float(units[rank])
            # a limit that even all together do not reach is no limit
            if what == 0 or (memory and sum(factor * model.upper[v] for v, factor in row) > number):
                model.most.append((row, number))
    if _ranks_are_alike(problem, kept):
        _break_symmetry(model, problem, kept)
    return model


def _ranks_are_alike(problem: Problem, kept: Bools) -> bool:
    """Any two ranks could change their numbers, for all that the choices kept [I, C] know."""
    limits = (problem.hbm, problem.ddr, problem.base_ms)
    if any((limit != limit[0]).any() for limit in limits) or any(item.ranks is not None for item in problem.items):
        return False
    world, hosts = problem.world_size, problem.local_size < problem.world_size
    choices = [problem.items[i].choices[c] for i, c in zip(*np.nonzero(kept), strict=True)]
    arrays = ((choice.time_ms, choice.hbm, choice.ddr) for choice in choices)
    even = [all((array == array[:, :1]).all() for array in three) for three in arrays]
    whole = all(c.span == 1 or (c.span == world and same) for c, same in zip(choices, even, strict=True))
    return whole and not any(choice.one_host and hosts for choice in choices)


def _break_symmetry(model: Model, problem: Problem, kept: Bools) -> None:
    """Ranks are numbered in the order in which items, those with most work first, use them."""
    work = [max(problem.items[i].choices[c].work_ms for c in np.flatnonzero(row)) for i, row in enumerate(kept)]
    used = 0
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        blocks = {int(c): problem.items[i].choices[c].blocks for c in np.flatnonzero(kept[i])}
        for c, count in blocks.items():
            for group in model.groups.get((i, c), []):
                for start, variable in group.places.items():
                    if start >= used + count:
                        model.upper[variable] = 0.0
        used += max((count for c, count in blocks.items() if (i, c) in model.groups), default=0)


def _add_choice(model: Model, problem: Problem, i: int, c: int) -> Iterator[tuple[int, int, tuple[float, ...]]]:
    """Adds the variables of a choice; yields what one unit of a variable puts on a rank: ms, hbm, ddr."""
    world, item, chosen = problem.world_size, problem.items[i], model.chosen[i, c]
    choice = item.choices[c]
    arrays = choice.time_ms, choice.hbm, choice.ddr
    if choice.span == world:
        for rank in range(world):
            yield chosen, rank, tuple(float(array[:, rank].sum()) for array in arrays)
        return
    allowed = set(range(world) if item.ranks is None else item.ranks)
    starts = [s for s in range(0, world, choice.span) if allowed.issuperset(range(s, s + choice.span))]
    hosts = sorted({start // problem.local_size for start in starts})
    on_host = {}
    if choice.one_host and len(hosts) > 1:
        on_host = {host: model.variable(1.0) for host in hosts}
        model.equal.append(([(chosen, -1.0), *((variable, 1.0) for variable in on_host.values())], 0.0))
    groups = model.groups.setdefault((i, c), [])
    for blocks in _equal_blocks(choice):
        count = float(len(blocks))
        places = {start: model.variable(count) for start in starts}
        groups.append(Group(blocks, places))
        model.equal.append(([(chosen, -count), *((variable, 1.0) for variable in places.values())], 0.0))
        for host, variable in on_host.items():
            here = [(v, 1.0) for start, v in places.items() if start // problem.local_size == host]
            model.equal.append(([(variable, -count), *here], 0.0))
        for start, variable in places.items():
            for place in range(choice.span):
                yield variable, start + place, tuple(float(array[blocks[0], place]) for array in arrays)


def _equal_blocks(choice: Choice) -> list[tuple[int, ...]]:
    """Numbers of the blocks that cost the same, together."""
    groups: dict[bytes, list[int]] = {}
    for k in range(choice.blocks):
        key = b"".join(array[k].tobytes() for array in (choice.time_ms, choice.hbm, choice.ddr))
        groups.setdefault(key, []).append(k)
    return [tuple(blocks) for blocks in groups.values()]


def read_assignment(problem: Problem, model: Model, values: Floats) -> Assignment:
    """The assignment that values [V] of the variables stand for."""
    choices, starts = [0] * len(problem.items), [()] * len(problem.items)
    placed: dict[int, tuple[int, ...]] = dict(enumerate(starts))
    for (i, c), variable in model.chosen.items():
        if values[variable] < 0.5:
            continue
        choices[i] = c
        where = [0] * problem.items[i].choices[c].blocks
        for group in model.groups.get((i, c), []):
            begins = [s for s, v in group.places.items() for _ in range(round(values[v]))]
            for block, start in zip(group.blocks, begins, strict=True):
                where[block] = start
        placed[i] = tuple(where)
    return Assignment(tuple(choices), tuple(placed[i] for i in range(len(problem.items))))


# share that a bound from HiGHS is lowered by
MARGIN = 3e-7
# plans are looked for that are better than the one known by this share, to prove that there is none; if that is not
# settled, plans up to so much slower are allowed, because HiGHS bounds worse where there is nothing to find
BETTER, SLOWER = 5e-7, 1e-3


@dataclass(frozen=True)
class Exact:
    """The exact search's result.

    Args:
        assignment: the best one, the hint if nothing better was found; None if there is none.
        bound_ms: no assignment is faster; infinite if none fits in memory.
        proven: within a relative 1e-6 of the bound, or proven not to exist.
        nodes: of the search tree.
    """

    assignment: Assignment | None
    bound_ms: float
    proven: bool
    nodes: int = 0


def solve_exactly(
    problem: Problem,
    *,
    hint: Assignment | None = None,
    relaxed: Relaxed | None = None,
    variables: int = 5000,
    nodes: int = 2000,
    seconds: float | None = None,
) -> Exact:
    """The optimal assignment, or the best found and a bound. Without scipy only what the relaxation says.

    Args:
        hint: a plan within the limits of memory; only better ones are looked for.
        relaxed: from `relax`, if it is there.
        variables: a model with more of them is not tried.
        nodes: most nodes of the search tree.
        seconds: stop then; makes the result depend on the machine.
    """
    relaxed = relax(problem) if relaxed is None else relaxed
    upper_ms = np.inf if hint is None else float(loads(problem, hint).time_ms.max())
    known = Exact(hint, relaxed.bound_ms, upper_ms <= relaxed.bound_ms * (1 + 1e-6) or np.isinf(relaxed.bound_ms))
    if known.proven or not problem.items:
        return known
    unit_ms = upper_ms if hint is not None else relaxed.bound_ms or 1.0
    kept = kept_choices(problem, relaxed, upper_ms)
    if not kept.any(axis=1).all():
        # every plan that is better needs a choice that it cannot contain
        return Exact(hint, upper_ms, True)
    model = build_model(problem, kept, unit_ms)
    if len(model.upper) > variables:
        return known
    lower, minimum = SCALE * relaxed.bound_ms / unit_ms, None
    for share, most in ((1 - BETTER, nodes), (1 + SLOWER, nodes // 4)):
        model.upper[0] = SCALE * share * upper_ms / unit_ms
        minimum = _minimise(model, lower, most, None if seconds is None else seconds / 2)
        if minimum is not None or hint is None:
            break
    if minimum is None:
        return known
    bound_ms = max(relaxed.bound_ms, minimum.bound * unit_ms / SCALE * (1 - MARGIN))
    best, best_ms = hint, upper_ms
    if minimum.values is not None:
        made = read_assignment(problem, model, minimum.values)
        made_ms = float(loads(problem, made).time_ms.max())
        if made_ms < best_ms and not faults(problem, made):
            best, best_ms = made, made_ms
    proven = best_ms <= bound_ms * (1 + 1e-6)
    return Exact(best, min(bound_ms, best_ms) if best is not None else bound_ms, proven, minimum.nodes)


@dataclass(frozen=True, eq=False)
class Found:
    """Values of the variables of the best solution, a bound in units of the model (infinite: none exists), nodes."""

    values: np.ndarray | None
    bound: float
    nodes: int


def _minimise(model: Model, lower: float, nodes: int, seconds: float | None) -> Found | None:
    """Runs HiGHS; None without scipy, or if HiGHS gives up."""
    try:
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        return None
    size = len(model.upper)
    constraints = []
    for rows, exact in ((model.equal, True), (model.most, False)):
        entries = [(factor, row, variable) for row, (terms, _) in enumerate(rows) for variable, factor in terms]
        factors, row_numbers, columns = (np.array(column) for column in zip(*entries, strict=True))
        matrix = sparse.csr_array((factors, (row_numbers, columns)), shape=(len(rows), size))
        right: Any = np.array([number for _, number in rows])
        constraints.append(LinearConstraint(matrix, right if exact else -np.inf, right))
    largest: Any = np.array(model.upper)
    smallest: Any = np.zeros(size)
    integral, cost = np.ones(size), np.zeros(size)
    smallest[0], integral[0], cost[0] = min(lower, model.upper[0]), 0, 1
    options: dict[str, float] = {"node_limit": nodes, "mip_rel_gap": 1e-7}
    if seconds is not None:
        options["time_limit"] = seconds
    with _quiet():
        result = milp(
            cost,
            constraints=constraints,
            bounds=Bounds(smallest, largest),
            integrality=integral,
            options=options,
        )
    count = int(getattr(result, "mip_node_count", 0) or 0)
    if result.status == 2:
        return Found(None, model.upper[0], count)
    bound = getattr(result, "mip_dual_bound", None)
    if bound is None or not np.isfinite(bound):
        return None
    return Found(result.x, float(bound), count)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Some versions of HiGHS print a stray line to the standard output of the process, where plans may be printed."""
    sys.stdout.flush()
    saved = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, TypeError, AttributeError):
            # what C has buffered must not come out later
            ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
