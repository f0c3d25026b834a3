"""Optimal plans of small problems, proven: mixed-integer programming with HiGHS, which comes with scipy.

What HiGHS says is trusted up to `MARGIN`: it solves linear programs to absolute tolerances of 1e-6 and 1e-7, where the
target is scaled to 1000, and bounds are lowered by far more than that. A plan that it finds is checked as any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .exact_model import SCALE, Model, build_model, kept_choices, read_assignment
from .problem import Assignment, Problem, faults, loads
from .relax import Relaxed, relax

# share that a bound from HiGHS is lowered by
MARGIN = 3e-7
# plans are looked for that are better than the one known by this share, to prove that there is none; if that is not
# settled, plans up to so much slower are allowed, because HiGHS bounds worse where there is nothing to find
BETTER, SLOWER = 5e-7, 1e-3


@dataclass(frozen=True)
class Exact:
    """What is known after the search.

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
    lower, found = SCALE * relaxed.bound_ms / unit_ms, None
    for share, most in ((1 - BETTER, nodes), (1 + SLOWER, nodes // 4)):
        model.upper[0] = SCALE * share * upper_ms / unit_ms
        found = _minimise(model, lower, most, None if seconds is None else seconds / 2)
        if found is not None or hint is None:
            break
    if found is None:
        return known
    bound_ms = max(relaxed.bound_ms, found.bound * unit_ms / SCALE * (1 - MARGIN))
    best, best_ms = hint, upper_ms
    if found.values is not None:
        made = read_assignment(problem, model, found.values)
        made_ms = float(loads(problem, made).time_ms.max())
        if made_ms < best_ms and not faults(problem, made):
            best, best_ms = made, made_ms
    proven = best_ms <= bound_ms * (1 + 1e-6)
    return Exact(best, min(bound_ms, best_ms) if best is not None else bound_ms, proven, found.nodes)


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
