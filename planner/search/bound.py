"""Proven lower bounds on the time of any plan, from cheap to dear, and proofs that no plan fits in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from .bound_weights import SPARE, Weighing, fixed_weights_refute, pieces_of
from .exact import solve_exactly
from .exact_model import affordable, kept_choices
from .problem import Floats, Problem
from .relax import Bools, Relaxed, relax

# more pieces than these are like sand, and the relaxation is as good
MOST_PIECES = 3000
# beyond these the best weights take long to find and say no more than those of fixed form
MOST_PACKED = 600
# how often the interval that is left is halved, by weights of fixed form and by the best weights
HALVINGS = 14
TRIALS = 7
# a reason for a bound
BESIDE = "blocks beside what lies on all ranks"


@dataclass(frozen=True)
class Bound:
    """No assignment within the limits of memory takes less than `ms`; `reason` says why, in words."""

    ms: float
    reason: str


def lower_bound(
    problem: Problem, *, upper_ms: float = np.inf, relaxed: Relaxed | None = None, gap: float = 0.0, work: float = 150
) -> Bound:
    """The best bound found before it comes within `gap` of `upper_ms` or the work is spent.

    Args:
        upper_ms: time of a plan that is known.
        relaxed: from `relax`, if it is there.
        gap: as a share of the bound.
        work: rounds of linear programs and knapsacks over a hundred pieces, some 15 ms each.
    """
    relaxed = relax(problem) if relaxed is None else relaxed
    best = Bound(relaxed.bound_ms, relaxed.reason)
    if not problem.items or upper_ms <= best.ms * (1 + gap) or not np.isfinite(best.ms):
        return best
    # without a plan, twice the bound is as far as it is worth to look
    high = min(upper_ms, 2 * best.ms)
    targets = _Targets(problem, relaxed, high, work)
    if targets.pieces.ms.size > MOST_PIECES:
        return best
    best = _halve(best, high, gap, HALVINGS, targets.refute_cheaply)
    if targets.pieces.ms.size <= MOST_PACKED and np.isfinite(upper_ms) and find_spec("scipy"):
        best = _halve(best, upper_ms, gap, TRIALS, targets.refute_by_branching)
    return best


def _halve(best: Bound, high: float, gap: float, times: int, refute: Callable[[float], str | None]) -> Bound:
    """Raises a bound by asking for targets between it and `high`."""
    upper = high
    for _ in range(times):
        if upper <= best.ms * (1 + gap):
            break
        target = (best.ms + high) / 2
        reason = refute(target)
        if reason is None:
            high = target
        else:
            best = Bound(target, reason)
    return best


class _Targets:
    """Asks whether a target can be reached; what was learned of one serves the next."""

    def __init__(self, problem: Problem, relaxed: Relaxed, upper_ms: float, work: float) -> None:
        self.problem, self.relaxed, self.options = problem, relaxed, relaxed.options
        self.shape = self.options.need_ms.shape
        self.kept = kept_choices(problem, relaxed, upper_ms * (1 + SPARE))
        self.pieces = pieces_of(problem, self.kept)
        self.weighing = Weighing(self.pieces, problem.world_size, self.shape, work)
        self.priced_ms = self.options.work_ms + relaxed.ms_per_hbm_byte * self.options.hbm
        self.priced_ms += relaxed.ms_per_ddr_byte * self.options.ddr
        # what choices add to every rank [I, C]
        self.everywhere_ms = np.zeros(self.shape)
        for i, item in enumerate(problem.items):
            for c, choice in enumerate(item.choices):
                if choice.span == problem.world_size:
                    self.everywhere_ms[i, c] = choice.time_ms.sum(axis=0).min()

    def refute_cheaply(self, target_ms: float) -> str | None:
        """Why the target cannot be reached; without linear programs."""
        kept = self._usable(self.kept & affordable(self.problem, self.relaxed, target_ms * (1 + SPARE)), target_ms)
        if kept is None:
            return BESIDE
        pieces = self.pieces.of(kept)
        return fixed_weights_refute(pieces, self._room(target_ms), self.problem.world_size, self.shape)

    def refute_by_branching(self, target_ms: float) -> str | None:
        """Likewise, with the best weights, and one choice after the other decided where weights are not enough."""
        stack = [self.kept & affordable(self.problem, self.relaxed, target_ms * (1 + SPARE))]
        reason = BESIDE
        while stack:
            kept = self._usable(stack.pop(), target_ms)
            if kept is None:
                continue
            if self.weighing.work <= 0:
                return None
            reason = "packings of a rank, and branching over choices"
            refuted, shares = self.weighing.refute(kept, self._room(target_ms))
            if refuted:
                continue
            branches = self._branch(kept, shares)
            if branches is None:
                return None
            stack += branches
        return reason

    def _room(self, target_ms: float) -> float:
        """Milliseconds of a rank for tables."""
        return float(target_ms - self.problem.base_ms.min())

    def _usable(self, kept: Bools, target_ms: float) -> Bools | None:
        """The choices of those kept that fit beside what lies on all ranks in any case; None if an item has none."""
        while kept.any(axis=1).all():
            least = np.where(kept, self.everywhere_ms, np.inf).min(axis=1)
            beside = (least.sum() - least)[:, None]
            fewer = kept & (self.options.need_ms + beside <= target_ms * (1 + SPARE))
            if (fewer == kept).all():
                return kept if self._work_ms(kept) <= self._capacity_ms(target_ms) * (1 + SPARE) else None
            kept = fewer
        return None

    def _work_ms(self, kept: Bools) -> float:
        """Least work of the choices kept, memory paid for at the prices of the relaxation."""
        return float(np.where(kept, self.priced_ms, np.inf).min(axis=1).sum())

    def _capacity_ms(self, target_ms: float) -> float:
        """Time of all ranks, and what all memory is worth."""
        problem, relaxed = self.problem, self.relaxed
        worth = relaxed.ms_per_hbm_byte * problem.hbm.sum() + relaxed.ms_per_ddr_byte * problem.ddr.sum()
        return float((target_ms - problem.base_ms).sum() + worth)

    def _branch(self, kept: Bools, shares: Floats) -> tuple[Bools, Bools] | None:
        """The choice that is most in doubt: without it, and only it; None where nothing is in doubt."""
        shares = np.where(kept, shares, 0)
        doubt = np.where(kept.sum(axis=1) > 1, shares.max(axis=1), 1)
        i = int(doubt.argmin())
        if doubt[i] > 1 - 1e-6:
            return None
        c = int(shares[i].argmax())
        without, only = kept.copy(), kept.copy()
        without[i, c] = False
        only[i] = False
        only[i, c] = True
        return without, only


def prove_infeasible(problem: Problem, *, nodes: int = 500) -> str | None:
    """Why no assignment fits in memory, in words; None if that is not proven.

    Args:
        nodes: of the search tree, if all else fails.
    """
    relaxed = relax(problem)
    if np.isinf(relaxed.bound_ms):
        return relaxed.reason
    options = relaxed.options
    for what, limit in (("hbm", problem.hbm), ("ddr", problem.ddr)):
        pieces = pieces_of(problem, np.isfinite(options.need_ms), what)
        reason = fixed_weights_refute(pieces, float(limit.max()), problem.world_size, options.need_ms.shape)
        if reason is not None:
            return f"{reason}, in bytes of {what}"
    found = solve_exactly(problem, relaxed=relaxed, nodes=nodes)
    return "every way to place the tables was searched" if np.isinf(found.bound_ms) else None
