"""From a problem to the best assignment that can be found, and a proof of how good it is."""

from __future__ import annotations

import numpy as np

from .problem import Assignment, DoesNotFitError, Problem, Solution, loads


def solve(problem: Problem, *, seconds: float | None = None) -> Solution:
    """The best assignment found, the same for the same problem.

    Args:
        seconds: stop then and return the best so far; by default a fixed amount of work, some seconds at most.

    Raises:
        DoesNotFitError: no assignment stays within memory, or none was found.
    """
    time = problem.base_ms.copy()
    hbm, ddr = np.zeros_like(problem.hbm), np.zeros_like(problem.ddr)
    chosen = [0] * len(problem.items)
    starts: list[tuple[int, ...]] = [()] * len(problem.items)
    order = sorted(range(len(problem.items)), key=lambda i: -min(c.work_ms for c in problem.items[i].choices))
    for i in order:
        item = problem.items[i]
        number = min(range(len(item.choices)), key=lambda n: item.choices[n].work_ms)
        choice = item.choices[number]
        places = []
        for block in range(choice.blocks):
            options = range(0, problem.world_size, choice.span)
            start = min(options, key=lambda s: float(time[s : s + choice.span].max()))
            where = slice(start, start + choice.span)
            time[where] += choice.time_ms[block]
            hbm[where] += choice.hbm[block]
            ddr[where] += choice.ddr[block]
            places.append(start)
        chosen[i], starts[i] = number, tuple(places)
    made = Assignment(tuple(chosen), tuple(starts))
    over = np.maximum(hbm - problem.hbm, 0), np.maximum(ddr - problem.ddr, 0)
    if any(amount.any() for amount in over):
        raise DoesNotFitError("memory", made, over, proven=False)
    work = problem.base_ms.sum() + sum(min(c.work_ms for c in item.choices) for item in problem.items)
    return Solution(
        made, float(loads(problem, made).time_ms.max()), float(work / problem.world_size), "mean of all ranks", False
    )
