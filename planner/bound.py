"""Proven lower bounds on the time of any plan, from cheap to dear, and proofs that no plan fits in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Problem
from .relax import Relaxed, relax


@dataclass(frozen=True)
class Bound:
    """No assignment within the limits of memory takes less than `ms`; `reason` says why, in words."""

    ms: float
    reason: str


def lower_bound(
    problem: Problem, *, upper_ms: float = np.inf, relaxed: Relaxed | None = None, gap: float = 0.0, work: int = 100
) -> Bound:
    """The best bound found before it comes within `gap` of `upper_ms` or the work is spent.

    Args:
        upper_ms: time of a plan that is known.
        relaxed: from `relax`, if it is there.
        gap: as a share of the bound.
        work: a count that grows with the time taken and does not depend on the machine.
    """
    relaxed = relax(problem) if relaxed is None else relaxed
    return Bound(relaxed.bound_ms, relaxed.reason)


def prove_infeasible(problem: Problem) -> str | None:
    """Why no assignment fits in memory, in words; None if that is not proven."""
    relaxed = relax(problem)
    return relaxed.reason if np.isinf(relaxed.bound_ms) else None
