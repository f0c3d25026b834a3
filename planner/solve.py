"""From a problem to the best assignment that can be found, and a proof of how good it is.

Relax, search, bound, and for small problems solve exactly; each only where the gap is still open.
"""

from __future__ import annotations

import time

import numpy as np

from .bound import lower_bound
from .problem import Assignment, DoesNotFitError, Floats, Problem, Solution, faults, loads
from .relax import Relaxed, relax
from .search import Search
from .search_space import Space, read

# a plan so little slower than a bound is as good as optimal: the model that prices it is not that exact
ENOUGH = 1e-3
# what counts as proven optimal
EXACT = 1e-6
# steps of the search before and after the dearer bound, for a problem of up to so many items times ranks
STEPS = (100, 1000)
SIZE = 250_000


def solve(problem: Problem, *, seconds: float | None = None) -> Solution:
    """The best assignment found, the same for the same problem.

    Args:
        seconds: stop then and return the best so far, or go on until then while the gap is open; by default a fixed
            amount of work, some seconds at most.

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
    search = Search(space, relaxed.bound_ms, _prices(space, relaxed))
    search.begin(deadline)
    effort = min(1.0, SIZE / max(1, len(problem.items) * problem.world_size))
    search.go_on(STEPS[0], relaxed.bound_ms * (1 + ENOUGH), deadline)
    bound = lower_bound(problem, upper_ms=search.time_ms, relaxed=relaxed, gap=EXACT)
    close = EXACT if deadline is not None else ENOUGH
    search.go_on(None if deadline is not None else int(STEPS[1] * effort), bound.ms * (1 + close), deadline)
    assert search.best is not None
    if not search.fits:
        raise _error(problem, search.best, proven=False)
    found = faults(problem, search.best)
    assert not found, found
    time_ms = float(loads(problem, search.best).time_ms.max())
    bound_ms = min(bound.ms, time_ms)
    proven = time_ms <= bound_ms * (1 + EXACT)
    return Solution(search.best, time_ms, bound_ms, bound.reason, proven, search.steps)


def _prices(space: Space, relaxed: Relaxed) -> Floats:
    named = {"hbm": relaxed.ms_per_hbm_byte, "ddr": relaxed.ms_per_ddr_byte}
    return np.array([named[memory] for memory in space.memories])


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
