"""The solver: search and bounds in turn, from a problem to the best assignment found and a proof of how good it is.

`solve` relaxes, searches, and asks what is cheap or finds faster plans; `certify` asks the dearer bounds, which only
say how good the plan is and take most of the time. Each only where the gap is still open, in a fixed amount of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .bound import lower_bound, prove_infeasible
from .exact import solve_exactly
from .problem import Assignment, DoesNotFitError, Problem, Solution, faults, loads
from .relax import Relaxed, relax
from .search import Search, late
from .space import read

# a plan so little slower than a bound is as good as optimal: the model that prices it is not that exact
ENOUGH = 1e-3
# what counts as proven optimal
EXACT = 1e-6
# steps of the search before and after the dearer bounds, of a problem of SIZE items times ranks and DENSE items a rank;
# a step takes longer where either is larger, and smaller problems get up to MORE times as many
STEPS = (200, 1000)
SIZE = 250_000
DENSE = 12
MORE = 3
# a mixed-integer program of up to so many variables; nodes of its tree before other bounds are tried, for a plan alone,
# and after
VARIABLES = 600
FIRST_NODES = 20
ROOT = 1
NODES = 500
# before the search goes on a program of so few variables is solved, and of so many the root of its tree
FEW_VARIABLES, SOME_VARIABLES = 100, 250
# a gap so wide may hide a faster plan, which the root has more often than the search
FAR = 3e-3
# items times ranks beyond which no program is that small
PROGRAM = 2000


# what is being done, milliseconds of the best plan so far (inf without one) and its bound
Tell = Callable[[str, float, float], None]


def solve(problem: Problem, *, seconds: float | None = None, tell: Tell | None = None) -> Solution:
    """The best assignment found, the same for the same problem.

    Args:
        seconds: stop then and return the best so far with all bounds that there was time for, or go on until then while
            the gap is open; by default a fixed amount of work, a second or less, and `certify` has the dearer bounds.
        tell: called now and then, to show how far it is.

    Raises:
        DoesNotFitError: no assignment stays within memory, or none was found.
    """
    deadline = None if seconds is None else time.perf_counter() + seconds
    if not problem.items:
        idle = float(problem.base_ms.max())
        return Solution(Assignment((), ()), idle, idle, "nothing to place", proven=True)
    relaxed = relax(problem)
    if np.isinf(relaxed.bound_ms):
        raise _does_not_fit(problem, relaxed)
    space = read(problem)
    worth = {"hbm": relaxed.ms_per_hbm_byte, "ddr": relaxed.ms_per_ddr_byte}
    search = Search(space, relaxed.bound_ms, np.array([worth[memory] for memory in space.memories]))
    if tell is not None:
        tell("searching", np.inf, relaxed.bound_ms)
        search.tell = lambda time_ms: tell("searching", time_ms, relaxed.bound_ms)
    search.begin(deadline)
    search.go_on(STEPS[0], relaxed.bound_ms * (1 + ENOUGH), deadline)
    at_once = deadline is None and search.fits
    known = _quickly(problem, search, relaxed) if at_once else _known(problem, search, relaxed, deadline)
    if _is_open(known, deadline):
        if tell is not None:
            bound_ms = known.bound_ms
            tell("searching on", known.time_ms, bound_ms)
            search.tell = lambda time_ms: tell("searching on", min(time_ms, known.time_ms), bound_ms)
        enough_ms = _enough_ms(known, deadline)
        items, ranks = len(problem.items), problem.world_size
        effort = min(MORE, SIZE / (items * ranks), DENSE * ranks / items)
        search.go_on(int(STEPS[1] * effort) if deadline is None else None, enough_ms, deadline)
    if search.fits and search.time_ms < known.time_ms:
        known = replace(known, assignment=search.best, time_ms=search.time_ms)
    # without a plan the program was asked all that it can say; the better a plan is, the fewer choices it leaves
    if not at_once and known.assignment is not None and _is_open(known, deadline):
        known = _exactly(problem, known, relaxed, deadline, NODES)
    best = known.assignment
    if best is None:
        assert search.best is not None
        raise _error(problem, search.best, proven=known.proven)
    wrong = faults(problem, best)
    assert not wrong, wrong
    time_ms = float(loads(problem, best).time_ms.max())
    bound_ms = min(known.bound_ms, time_ms)
    proven = time_ms <= bound_ms * (1 + EXACT)
    return Solution(best, time_ms, bound_ms, known.bound_from, proven, search.steps, proven or not at_once)


def certify(problem: Problem, solution: Solution) -> Solution:
    """The same assignment with the best bound that a fixed amount of work proves, some seconds at most.

    A plan that is faster and comes up on the way is not taken: the plan of a problem is that of `solve`.
    """
    if solution.certified:
        return solution
    relaxed = relax(problem)
    known = Known(
        solution.assignment, solution.time_ms, solution.bound_ms, solution.bound_from, solution.proven
    )  # fmt: skip
    if _is_open(known, None):
        known = _bounded(problem, known, relaxed, FIRST_NODES)
    if _is_open(known, None):
        known = _by_weights(problem, known, relaxed)
    if _is_open(known, None):
        known = _bounded(problem, known, relaxed, NODES)
    bound_ms = min(known.bound_ms, solution.time_ms)
    proven = solution.time_ms <= bound_ms * (1 + EXACT)
    return replace(solution, bound_ms=bound_ms, bound_from=known.bound_from, proven=proven, certified=True)


@dataclass(frozen=True)
class Known:
    """The best assignment that is within memory, if there is one, and what is proven."""

    assignment: Assignment | None
    time_ms: float
    bound_ms: float
    bound_from: str
    proven: bool


def _quickly(problem: Problem, search: Search, relaxed: Relaxed) -> Known:
    """The plan and bounds that cost nothing beside the search; for small problems exact ones."""
    time_ms = search.time_ms
    known = Known(
        search.best, time_ms, relaxed.bound_ms, relaxed.reason, time_ms <= relaxed.bound_ms * (1 + EXACT)
    )  # fmt: skip
    if not _is_open(known, None):
        return known
    known = _by_weights(problem, known, relaxed, work=0)
    for nodes, variables in ((NODES, FEW_VARIABLES), (ROOT, SOME_VARIABLES)):
        if _is_open(known, None):
            known = _exactly(problem, known, relaxed, None, nodes, variables)
    if known.time_ms > known.bound_ms * (1 + FAR):
        known = _exactly(problem, known, relaxed, None, ROOT)
    return known


def _bounded(problem: Problem, known: Known, relaxed: Relaxed, nodes: int) -> Known:
    """The bound of a mixed-integer program for a plan that stays as it is."""
    bounded = _exactly(problem, known, relaxed, None, nodes)
    return replace(known, bound_ms=bounded.bound_ms, bound_from=bounded.bound_from)


def _known(problem: Problem, search: Search, relaxed: Relaxed, deadline: float | None) -> Known:
    """The dearer bounds and, where the problem is small, the exact solution; only while the gap is open."""
    best, time_ms = (search.best, search.time_ms) if search.fits else (None, np.inf)
    known = Known(best, time_ms, relaxed.bound_ms, relaxed.reason, time_ms <= relaxed.bound_ms * (1 + EXACT))
    if known.proven or late(deadline):
        return known
    known = _exactly(problem, known, relaxed, deadline, FIRST_NODES if search.fits else NODES)
    best, time_ms = known.assignment, known.time_ms
    if known.proven or late(deadline):
        return known
    if best is None:
        return replace(known, proven=prove_infeasible(problem) is not None)
    known = _by_weights(problem, known, relaxed)
    return replace(known, proven=time_ms <= known.bound_ms * (1 + EXACT))


def _by_weights(problem: Problem, known: Known, relaxed: Relaxed, work: float = 150) -> Known:
    """`known` after the bounds by weights."""
    bound = lower_bound(problem, upper_ms=known.time_ms, relaxed=relaxed, gap=ENOUGH, work=work)
    return replace(known, bound_ms=bound.ms, bound_from=bound.reason) if bound.ms > known.bound_ms else known


def _enough_ms(known: Known, deadline: float | None) -> float:
    """A plan as fast as this needs no more search; who gives seconds wants them used."""
    return known.bound_ms * (1 + (ENOUGH if deadline is None else EXACT))


def _is_open(known: Known, deadline: float | None) -> bool:
    """Whether there is a gap to work on, and time."""
    return not (known.proven or known.time_ms <= _enough_ms(known, deadline) or late(deadline))


def _exactly(
    problem: Problem,
    known: Known,
    relaxed: Relaxed,
    deadline: float | None,
    nodes: int,
    variables: int = VARIABLES,
) -> Known:
    """`known` after a mixed-integer program; the same where that would be too large."""
    if len(problem.items) * problem.world_size > PROGRAM:
        return known
    left = None if deadline is None else deadline - time.perf_counter()
    hint = known.assignment
    exact = solve_exactly(problem, hint=hint, relaxed=relaxed, variables=variables, nodes=nodes, seconds=left)
    best, time_ms = hint, known.time_ms
    if exact.assignment is not None and exact.assignment is not hint:
        best, time_ms = exact.assignment, float(loads(problem, exact.assignment).time_ms.max())
    if exact.bound_ms > known.bound_ms:
        return Known(best, time_ms, exact.bound_ms, "mixed-integer program", exact.proven)
    return replace(known, assignment=best, time_ms=time_ms, proven=exact.proven)


def _does_not_fit(problem: Problem, relaxed: Relaxed) -> DoesNotFitError:
    """The error for a problem that cannot fit, with the assignment that comes nearest."""
    space = read(problem, limited=False)
    lost = [i for i, work in enumerate(space.work) if not np.isfinite(work).any()]
    if lost:
        names = ", ".join(problem.items[lost[0]].names)
        return DoesNotFitError(f"{names}: no choice has a place on the ranks that it may use", None, None, proven=True)
    # memory is all that counts: the least time that it could be priced against is as good as any
    scale = space.work[np.isfinite(space.work)].sum() / np.maximum(space.limits[1:].sum(axis=1), 1)
    search = Search(space, float(space.work.min(axis=1).sum()) / space.ranks, 1e3 * scale)
    search.begin()
    search.go_on(STEPS[0], enough_ms=np.inf)
    assert search.best is not None
    return _error(problem, search.best, proven=True)


def _error(problem: Problem, nearest: Assignment, proven: bool) -> DoesNotFitError:
    """Says how many bytes are missing, and where."""
    held = loads(problem, nearest)
    over = np.maximum(held.hbm - problem.hbm, 0), np.maximum(held.ddr - problem.ddr, 0)
    parts = []
    for memory, amount in zip(("hbm", "ddr"), over, strict=True):
        if amount.any():
            rank = int(amount.argmax())
            parts.append(
                f"{amount.sum() / 2**30:.2f} GiB of {memory} are missing, "
                f"most on rank {rank} ({amount[rank] / 2**30:.2f} GiB)"
            )
    what = "no assignment fits in memory" if proven else "no assignment was found that fits in memory"
    return DoesNotFitError(f"{what}: {'; '.join(parts)}", nearest, over, proven)
