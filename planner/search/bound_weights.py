"""Bounds by weights: how full a rank can be when tables are not sand.

For a target of z milliseconds give every piece of every choice a weight, so that pieces that one rank can do within z
never weigh more than 1. W ranks then hold a weight of W at most; if whatever is chosen weighs more, no plan reaches z.
Weights of a fixed form are tried first: those that say how many pieces longer than z / (k + 1) a rank can have, and
those that ignore short pieces and count long ones whole. The best weights solve a linear program (the dual of bin
packing by configurations): the heaviest packing of a rank, found by a knapsack over times rounded down to a grid, is
added as a constraint until none weighs more than 1. What is proven rests on that knapsack alone, not on the solver.

Letters: I items, C most choices of an item, N pieces, W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Floats, Ints, Problem
from .relax import Bools

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
    """What choices put on single ranks; equal ones of a choice are one piece.

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
    table = np.array(rows, np.float64).reshape(-1, 5).T
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
    where = pieces.items * shape[1] + pieces.choices
    sums = np.full(shape[0] * shape[1], np.inf)
    sums[where] = 0
    sums += np.bincount(where, weights * pieces.total, sums.size)
    return float(sums.reshape(shape).min(axis=1).sum())


def heaviest(pieces: Pieces, sizes: Ints, weights: Floats, room: int) -> tuple[float, Packed]:
    """The heaviest pieces that fit into the room together, of one choice an item; `sizes` [N] are whole numbers."""
    best = np.zeros(room + 1)
    trail: list[tuple[Ints, list[list[tuple[int, Ints]]]]] = []
    worth = np.flatnonzero((weights > 0) & (sizes <= room))
    begins = np.flatnonzero(np.diff(pieces.items[worth], prepend=-1))
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
        picked = stacked.argmax(axis=0)
        best = stacked[picked, np.arange(room + 1)]
        trail.append((picked, counts))
    left, found = room, dict[int, int]()
    for picked, counts in reversed(trail):
        for n, number in reversed(counts[picked[left]]):
            if number[left]:
                found[n] = int(number[left])
                left -= found[n] * int(sizes[n])
    return float(best[room]), Packed(np.array(list(found), np.int64), np.array(list(found.values()), np.int64))


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

    pairs, row = np.unique(np.stack([pieces.items, pieces.choices], axis=1), axis=0, return_inverse=True)
    lengths = np.array([len(packed.pieces) for packed in packings])
    rows = [np.arange(len(pairs)), row.reshape(-1), len(pairs) + np.repeat(np.arange(len(packings)), lengths)]
    columns = [pairs[:, 0], shape[0] + np.arange(pieces.ms.size), *(shape[0] + packed.pieces for packed in packings)]
    values = [np.ones(len(pairs)), -pieces.total.astype(float), *(packed.counts for packed in packings)]
    size = len(pairs) + len(packings), shape[0] + pieces.ms.size
    matrix = sparse.csr_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=size)
    return matrix, np.concatenate([np.zeros(len(pairs)), np.ones(len(packings))]), pairs
