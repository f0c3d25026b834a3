"""Proven lower bounds on the time of any plan, from cheap to dear, and proofs that no plan fits in memory.

Bounds by weights say how full a rank can be where tables cannot be divided at will, as the fractional relaxation
(`relax.py`) divides them. For a target of z milliseconds give every piece of every choice a weight, so that pieces that
one rank can do within z never weigh more than 1. W ranks then hold a weight of W at most; if whatever is chosen weighs
more, no plan reaches z. Weights of a fixed form are tried first: those that say how many pieces longer than z / (k + 1)
a rank can have, and those that ignore short pieces and count long ones whole. The best weights solve a linear program
(the dual of bin packing by configurations): the heaviest packing of a rank, found by a knapsack over times rounded down
to a grid, is added as a constraint until none weighs more than 1. What is proven rests on that knapsack alone, not on
the solver.

Letters: I items, C most choices of an item, N pieces, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from .exact import affordable, kept_choices, solve_exactly
from .problem import Floats, Ints, Problem
from .relax import Bools, Relaxed, relax

# units that the time of a rank is divided into; times are rounded down to them
GRID = 1000
# weights and times are compared with this much to spare
SPARE = 1e-9
# packings without a piece in common that each round of the program learns
OTHERS = 3
# the k of the weights of fixed form
LONGER_THAN = range(1, 25)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces that choices put on single ranks; equal ones of a choice are one piece.

    Args:
        ms: time [N].
        total: how many there are of it in its choice [N].
        most: how many of them one rank can have [N].
        items: item of each [N].
        choices: choice of each [N].
    """

    ms: Floats
    total: Ints
    most: Ints
    items: Ints
    choices: Ints

    def of(self, kept: Bools) -> Pieces:
        """Those of the choices kept [I, C]."""
        return self.at(self.alive(kept))

    def alive(self, kept: Bools) -> Ints:
        """Numbers of those of the choices kept [I, C]."""
        return np.flatnonzero(kept[self.items, self.choices])

    def at(self, numbers: Ints) -> Pieces:
        """Those of these numbers."""
        total, most, items, choices = (a[numbers] for a in (self.total, self.most, self.items, self.choices))
        return Pieces(self.ms[numbers], total, most, items, choices)


@dataclass(frozen=True, eq=False)
class Packed:
    """A number of each of some pieces that fit on a rank together."""

    pieces: Ints
    counts: Ints


def pieces_of(problem: Problem, kept: Bools, what: str = "time_ms") -> Pieces:
    """The pieces of the choices kept [I, C]; `what` they are measured by: `time_ms`, `hbm` or `ddr`."""
    rows: list[tuple[float, int, int, int, int]] = []
    for i, c in zip(*np.nonzero(kept), strict=True):
        choice = problem.items[i].choices[c]
        sizes = getattr(choice, what)
        stacked = choice.span == problem.world_size
        if stacked:
            sizes = sizes.sum(axis=0)
        values, counts = np.unique(sizes, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            # of each block only one place lies on a rank
            most = 1 if stacked else min(count, choice.blocks)
            rows.append((value, count, most, int(i), int(c)))
    table = np.array(rows, np.float64).reshape(-1, 5).T  # [5, N]
    total, most, items, choices = table[1:].astype(np.int64)
    return Pieces(table[0], total, most, items, choices)


def fixed_weights_refute(pieces: Pieces, room: float, ranks: int, shape: tuple[int, int]) -> str | None:
    """Whether weights of fixed form show that `ranks` ranks of this room cannot hold the pieces, and which."""
    if room <= 0:
        return None
    share = pieces.ms / room * (1 - SPARE)
    for k in LONGER_THAN:
        # a piece counts 1/k for every 1/(k + 1) of the room that it is longer than
        if least_weight(pieces, np.floor((k + 1) * share) / k, shape) > ranks * (1 + SPARE):
            return f"no more than {k} pieces larger than 1/{k + 1} of a rank fit on one"
    for short in np.unique(np.round(share[(share > 0) & (share < 0.5)], 3))[:50]:
        weight = np.where(share > 1 - short, 1.0, np.where(share < short, 0.0, share))
        if least_weight(pieces, weight, shape) > ranks * (1 + SPARE):
            return "large pieces leave no room for others on their rank"
    return None


def least_weight(pieces: Pieces, weights: Floats, shape: tuple[int, int]) -> float:
    """Weight of the lightest choice of each item, summed; `shape` is [I, C]."""
    where = pieces.items * shape[1] + pieces.choices  # [N] in a flat [I, C]
    sums = np.full(shape[0] * shape[1], np.inf)
    sums[where] = 0
    sums += np.bincount(where, weights * pieces.total, sums.size)
    return float(sums.reshape(shape).min(axis=1).sum())


def heaviest(pieces: Pieces, sizes: Ints, weights: Floats, room: int) -> tuple[float, Packed]:
    """The heaviest pieces that fit into the room together, of one choice an item; `sizes` [N] are whole numbers."""
    best = np.zeros(room + 1)  # [room + 1] weight by room
    trail: list[tuple[Ints, list[list[tuple[int, Ints]]]]] = []
    worth = np.flatnonzero((weights > 0) & (sizes <= room))
    begins = np.flatnonzero(np.diff(pieces.items[worth], prepend=-1))  # of each item's pieces
    for group in np.split(worth, begins[1:]):
        options, counts = [best], list[list[tuple[int, Ints]]]([[]])
        for choice in np.unique(pieces.choices[group]):
            value, taken = best, []
            for n in group[pieces.choices[group] == choice]:
                value, number = _with_piece(value, int(sizes[n]), float(weights[n]), int(pieces.most[n]))
                taken.append((int(n), number))
            options.append(value)
            counts.append(taken)
        stacked = np.stack(options)
        picked = stacked.argmax(axis=0)  # [room + 1] option
        best = stacked[picked, np.arange(room + 1)]
        trail.append((picked, counts))
    left, amounts = room, dict[int, int]()
    for picked, counts in reversed(trail):
        for n, number in reversed(counts[picked[left]]):
            if number[left]:
                amounts[n] = int(number[left])
                left -= amounts[n] * int(sizes[n])
    return float(best[room]), Packed(np.array(list(amounts), np.int64), np.array(list(amounts.values()), np.int64))


def _with_piece(value: Floats, size: int, weight: float, most: int) -> tuple[Floats, Ints]:
    """Best values by room [room + 1] when up to `most` of a piece may be added, and how many of it were."""
    best, number = value, np.zeros(value.size, np.int64)
    if size == 0:
        return value + most * weight, np.full(value.size, most)
    for count in range(1, min(most, (value.size - 1) // size) + 1):
        more = np.full(value.size, -np.inf)
        more[count * size :] = value[: -count * size] + count * weight
        better = more > best
        best, number = np.where(better, more, best), np.where(better, count, number)
    return best, number


class Weighing:
    """The linear program over weights; packings that were found stay for later targets and other choices.

    `work` is what is left of it: a round of the program costs about a unit where a hundred pieces are alive.
    """

    def __init__(self, pieces: Pieces, ranks: int, shape: tuple[int, int], work: float) -> None:
        self.pieces, self.ranks, self.shape, self.work = pieces, ranks, shape, work
        self.packings: list[Packed] = []

    def refute(self, kept: Bools, room_ms: float, rounds: int = 100) -> tuple[bool, Floats]:
        """Whether no plan of the choices kept [I, C] has all ranks done within `room_ms`.

        Pieces must not be longer than the room. Also the share of each choice [I, C] in the program's optimum, for
        whoever wants to branch on them.
        """
        from scipy.optimize import linprog

        alive = self.pieces.alive(kept)
        pieces = self.pieces.at(alive)
        sizes = np.minimum(np.floor(pieces.ms / room_ms * GRID * (1 - SPARE)), GRID).astype(np.int64)
        packings = self._known(alive, sizes)
        cost = np.concatenate([np.full(self.shape[0], -1.0), np.zeros(alive.size)])
        shares, best, most = np.zeros(self.shape), None, 0.0
        for _ in range(rounds):
            self.work -= 0.3 + (alive.size / 100) ** 1.5
            matrix, right, pairs = _program(pieces, packings, self.shape)
            result = linprog(cost, matrix, right, bounds=(0, None), method="highs")
            if result.status != 0:
                break
            shares[pairs[:, 0], pairs[:, 1]] = -result.ineqlin.marginals[: len(pairs)]
            if -result.fun <= self.ranks * (1 + SPARE):
                break
            weights = np.maximum(result.x[self.shape[0] :], 0)
            # the program jumps between extremes; halfway to the best weights so far, packings teach more
            asked = weights if best is None else (weights + best) / 2
            value, packed = heaviest(pieces, sizes, asked, GRID)
            # weights divided by that value are valid, whatever the solver thinks
            proven = least_weight(pieces, asked, self.shape) / value
            if proven > self.ranks * (1 + SPARE):
                return True, shares
            if proven > most:
                best, most = asked / value, proven
            asked = asked.copy()
            for n in range(OTHERS):
                if n:
                    _, packed = heaviest(pieces, sizes, asked, GRID)
                packings.append(packed)
                self.packings.append(Packed(alive[packed.pieces], packed.counts))
                asked[packed.pieces] = 0
        return False, shares

    def _known(self, alive: Ints, sizes: Ints) -> list[Packed]:
        """Packings of pieces that are alive, single pieces and those found before that still fit."""
        number = np.full(self.pieces.ms.size, -1)
        number[alive] = np.arange(alive.size)
        most = np.minimum(self.pieces.most[alive], GRID // np.maximum(sizes, 1))
        packings = [Packed(np.array([n]), most[n : n + 1]) for n in range(alive.size)]
        for packed in self.packings:
            here = number[packed.pieces]
            left = Packed(here[here >= 0], packed.counts[here >= 0])
            if len(left.pieces) > 1 and sizes[left.pieces] @ left.counts <= GRID:
                packings.append(left)
        return packings


def _program(pieces: Pieces, packings: list[Packed], shape: tuple[int, int]) -> tuple[object, Floats, Ints]:
    """Matrix and right side: items weigh what their lightest choice does, packings at most 1.

    Variables are the weight of each item, then of each piece. Also the (item, choice) [., 2] of the first rows.
    """
    from scipy import sparse

    pairs, row = np.unique(np.stack([pieces.items, pieces.choices], axis=1), axis=0, return_inverse=True)  # [., 2], [N]
    lengths = np.array([len(packed.pieces) for packed in packings])
    rows = [np.arange(len(pairs)), row.reshape(-1), len(pairs) + np.repeat(np.arange(len(packings)), lengths)]
    columns = [pairs[:, 0], shape[0] + np.arange(pieces.ms.size), *(shape[0] + packed.pieces for packed in packings)]
    values = [np.ones(len(pairs)), -pieces.total.astype(float), *(packed.counts for packed in packings)]
    size = len(pairs) + len(packings), shape[0] + pieces.ms.size
    matrix = sparse.csr_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=size)
    return matrix, np.concatenate([np.zeros(len(pairs)), np.ones(len(packings))]), pairs


# of more pieces than these each is so small that the fractional relaxation is as good
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
    exact = solve_exactly(problem, relaxed=relaxed, nodes=nodes)
    return "every way to place the tables was searched" if np.isinf(exact.bound_ms) else None
