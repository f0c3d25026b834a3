"""The search's packing: which blocks lie on which ranks, and how much each change would help.

The search aims at a target time. The pressure of a rank is the square of the time it is over the target, in shares of
the target, plus what it is over its memory, at a weight that nothing outweighs. A packing of pressure 0 meets the
target; the pressure says which ranks are far from it, and every move is judged by what it does to the sum.

Letters: as `search_space`; B blocks on one rank (span 1), with room for those of any choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .problem import Assignment, Floats, Ints
from .space import (
    Bools,
    Group,
    Space,
    hosts,
)

# being over memory by one hundredth of it weighs as much as being ten times over the target
MEMORY_WEIGHT = 1e4
# work that no rank feels counts a little: it leaves less room for what follows
WORK_WEIGHT = 2e-3
# of places that are equally good the less busy
BUSY_WEIGHT = 1e-6


@dataclass(frozen=True)
class Snapshot:
    """A packing to come back to."""

    target: float
    room: Floats
    at: Ints
    use: Floats
    bound: Bools
    spans: Ints
    chosen: list[int]
    starts: list[tuple[int, ...]]


class Packing:
    """Blocks on ranks; items may be missing.

    Args:
        target_ms: the time of a rank that the search aims at.
        prices: work of a byte of each memory [R - 1], by which choices are preferred where no rank feels them.
    """

    def __init__(self, space: Space, target_ms: float, prices: Floats) -> None:
        self.space, self.prices = space, prices
        items = len(space.groups)
        self.chosen = [-1] * items
        self.starts: list[tuple[int, ...]] = [()] * items
        # span of the choice of each item, 0 if it is missing
        self.spans = np.zeros(items, np.int64)
        self.room = -space.limits  # [R, W] use less limit
        most = [max((b.shape[1] for b in choices if b is not None and b.shape[2] == 1), default=0)
                for choices in space.blocks]  # fmt: skip
        self.first = np.concatenate([[0], np.cumsum(most)]).astype(np.int64)
        self.owner = np.repeat(np.arange(items), most)  # item of each block
        # rank of each block on one rank, -1 where there is none; its use
        self.at = np.full(int(self.first[-1]), -1, np.int64)
        self.use = np.zeros((len(space.limits), int(self.first[-1])))  # [R, blocks]
        # blocks whose rank may not be changed alone
        self.bound = np.zeros(len(self.at), bool)
        scale = np.maximum(space.limits[1:].max(axis=1), 1)
        self.weights = MEMORY_WEIGHT / scale  # [R - 1]
        closed = [next((g.closed for g in groups if g.span == 1), None) for groups in space.groups]
        self.closed = None
        if any(c is not None for c in closed):
            none = np.zeros(space.ranks, bool)
            self.closed = np.stack([none if c is None else c for c in closed])  # [N, W]
        self.target = 0.0
        self.set_target(target_ms)

    def set_target(self, target_ms: float) -> None:
        """Change the target."""
        self.room[0] += self.target - target_ms
        self.target = target_ms
        self.update_pressure()

    def update_pressure(self) -> None:
        self.here = self._pressure(np.maximum(self.room, 0))  # [W]
        self.total = float(self.here.sum())
        busy = self.room[0] * (BUSY_WEIGHT / max(self.target, 1e-300))
        self.busy = busy - busy.min()  # [W]

    def _pressure(self, over: Floats) -> Floats:
        """Pressure of ranks over their limits by `over` [R, ...]."""
        share = over[0] * (1 / max(self.target, 1e-300))  # [...] of the target
        total: Floats = share * share
        for amount, weight in zip(over[1:], self.weights, strict=True):
            total += amount * weight
        return total

    @property
    def time_ms(self) -> float:
        """Of the slowest rank."""
        return float(self.room[0].max()) + self.target

    @property
    def fits(self) -> bool:
        """No rank is over its memory."""
        return bool((self.room[1:] <= 0).all())

    def delta(self, use: Floats, span: int) -> Floats:
        """How much the pressure would rise by blocks `use` [R, Q, S] in each slot: [Q, n]."""
        if span == 1:
            over = self.room[:, None, :] + use  # [R, Q, W]
            return self._pressure(np.maximum(over, 0, out=over)) - self.here
        n = self.space.ranks // span
        over = self.room[:, None, : n * span].reshape(-1, 1, n, span) + use[:, :, None, :]
        there = self._pressure(np.maximum(over, 0, out=over)).sum(axis=-1)
        deltas: Floats = there - self.here[: n * span].reshape(n, span).sum(axis=-1)
        return deltas

    def evaluate(self, i: int) -> tuple[float, int]:
        """The least rise of pressure by placing a missing item, and the number of the choice that brings it."""
        best, number = np.inf, -1
        for group in self.space.groups[i]:
            deltas = self.delta(group.use, group.span)
            if group.closed is not None:
                deltas[:, group.closed] = np.inf
            least = _least(deltas, group, self.space)  # [Q]
            if group.span > 1 and int(group.counts.max()) > 1:
                # few places: all blocks on the same ranks may be the only way
                deltas = self.delta(group.use * group.counts[:, None], group.span)
                if group.closed is not None:
                    deltas[:, group.closed] = np.inf
                least = np.minimum(least, deltas.min(axis=1))
            least += self.cost(i)[group.numbers]
            row = int(least.argmin())
            if least[row] < best or number < 0:
                best, number = float(least[row]), int(group.numbers[row])
        return best, number

    def cost(self, i: int) -> Floats:
        """The cost of an item's choices apart from pressure [C]."""
        costs: Floats = self.space.work[i] + self.prices @ self.space.memory[:, i]
        return costs * (WORK_WEIGHT / max(self.target, 1e-300))

    def insert(self, i: int, number: int) -> None:
        """Place a missing item by a choice, every block where the pressure rises least, the largest first."""
        blocks = self.space.of(i, number)  # [R, K, S]
        group = next(g for g in self.space.groups[i] if number in g.numbers)
        choice = self.space.problem.items[i].choices[number]
        uniform = blocks.shape[1] == 1 or bool((blocks == blocks[:, :1]).all())
        single = blocks.shape[1] == 1 or (group.span == 1 and blocks.shape[1] <= self.space.ranks)
        if uniform and single and not choice.one_host:
            deltas = self.delta(blocks[:, :1], group.span)[0] + self._busy(group.span)
            if group.closed is not None:
                deltas[group.closed] = np.inf
            count = blocks.shape[1]
            where = (
                [int(deltas.argmin())] if count == 1 else np.sort(np.argpartition(deltas, count - 1)[:count]).tolist()
            )
            if np.isfinite(deltas[where]).all():
                self.place(i, number, tuple(slot * group.span for slot in where))
                return
        host = hosts(group.span, self.space.problem)
        best = np.inf
        starts: list[int] = []
        kept, here, busy = self.room.copy(), self.here, self.busy
        for h in range(int(host[-1]) + 1) if choice.one_host else (-1,):
            shut = np.zeros(len(host), bool) if group.closed is None else group.closed.copy()
            if h >= 0:
                shut |= host != h
            if shut.all():
                continue
            self.room[:] = kept
            self.here, self.busy = here, busy
            risen, trial = 0.0, [0] * blocks.shape[1]
            for k in np.argsort(-blocks[0].max(axis=-1), kind="stable"):
                deltas = self.delta(blocks[:, k : k + 1], group.span)[0]
                deltas[shut] = np.inf
                slot = int((deltas + self._busy(group.span)).argmin())
                risen += float(deltas[slot])
                trial[k] = slot * group.span
                self.room[:, trial[k] : trial[k] + group.span] += blocks[:, k]
                self.update_pressure()
            if risen < best or not starts:
                best, starts = risen, trial
        self.room[:] = kept
        self.update_pressure()
        self.place(i, number, tuple(starts))

    def _busy(self, span: int) -> Floats:
        n = self.space.ranks // span
        return np.asarray(self.busy[: n * span].reshape(n, span).sum(axis=1))

    def place(self, i: int, number: int, starts: tuple[int, ...]) -> None:
        """Place a missing item so."""
        blocks = self.space.of(i, number)  # [R, K, S]
        self._add(blocks, starts, 1)
        self.chosen[i], self.starts[i], self.spans[i] = number, starts, blocks.shape[2]
        if blocks.shape[2] == 1:
            where = slice(int(self.first[i]), int(self.first[i]) + len(starts))
            self.at[where] = starts
            self.use[:, where] = blocks[:, :, 0]
            self.bound[where] = self.space.problem.items[i].choices[number].one_host
        self.update_pressure()

    def remove(self, i: int) -> None:
        """Remove an item."""
        number = self.chosen[i]
        blocks = self.space.of(i, number)
        self._add(blocks, self.starts[i], -1)
        if blocks.shape[2] == 1:
            self.at[self.first[i] : self.first[i + 1]] = -1
        self.chosen[i], self.starts[i], self.spans[i] = -1, (), 0
        self.update_pressure()

    def _add(self, blocks: Floats, starts: tuple[int, ...], sign: int) -> None:
        for k, start in enumerate(starts):
            self.room[:, start : start + blocks.shape[2]] += sign * blocks[:, k]

    def shift(self, block: int, rank: int) -> None:
        """Move one block that lies on one rank."""
        i = int(self.owner[block])
        k = block - int(self.first[i])
        self.room[:, self.at[block]] -= self.use[:, block]
        self.room[:, rank] += self.use[:, block]
        self.at[block] = rank
        self.starts[i] = (*self.starts[i][:k], rank, *self.starts[i][k + 1 :])

    def best_shift(self, rank: int) -> tuple[float, int, int]:
        """The move of a block from `rank` that lowers pressure most: by how much it rises, block, rank."""
        blocks = np.flatnonzero((self.at == rank) & ~self.bound)  # [B] numbers of blocks
        if not len(blocks):
            return 0.0, -1, -1
        use = self.use[:, blocks]  # [R, B]
        gains = self.here[rank] - self._pressure(np.maximum(self.room[:, rank, None] - use, 0))  # [B]
        deltas = self.delta(use[:, :, None], 1) - gains[:, None]  # [B, W]
        deltas[:, rank] = np.inf
        if self.closed is not None:
            deltas[self.closed[self.owner[blocks]]] = np.inf
        best = int(deltas.argmin())
        row, there = divmod(best, self.space.ranks)
        return float(deltas[row, there]), int(blocks[row]), there

    def best_swap(self, rank: int) -> tuple[float, int, int]:
        """The swap of a block on `rank` with one elsewhere that lowers pressure most: rise, block, block."""
        blocks = np.flatnonzero((self.at == rank) & ~self.bound)  # [B]
        others = np.flatnonzero((self.at >= 0) & (self.at != rank) & ~self.bound)  # [E]
        if not len(blocks) or not len(others):
            return 0.0, -1, -1
        there = self.at[others]
        more = self.use[:, None, others] - self.use[:, blocks, None]  # [R, B, E]
        over = self.room[:, rank, None, None] + more  # [R, B, E]
        deltas = self._pressure(np.maximum(over, 0, out=over))  # [B, E]
        over = self.room[:, None, there] - more  # [R, B, E]
        deltas += self._pressure(np.maximum(over, 0, out=over))
        deltas -= self.here[there] + self.here[rank]
        if self.closed is not None:
            deltas[self.closed[self.owner[blocks]][:, there]] = np.inf
            deltas[:, self.closed[self.owner[others], rank]] = np.inf
        best = int(deltas.argmin())
        row, column = divmod(best, len(others))
        return float(deltas[row, column]), int(blocks[row]), int(others[column])

    def items_on(self, rank: int) -> list[int]:
        """Items of which a block lies on `rank`, but not on all ranks."""
        items = dict.fromkeys(self.owner[self.at == rank].tolist())
        for i in np.flatnonzero((self.spans > 1) & (self.spans < self.space.ranks)).tolist():
            if any(start <= rank < start + self.spans[i] for start in self.starts[i]):
                items[i] = None
        return list(items)

    def snapshot(self) -> Snapshot:
        """To come back to."""
        arrays = (self.room.copy(), self.at.copy(), self.use.copy(), self.bound.copy(), self.spans.copy())
        return Snapshot(self.target, *arrays, self.chosen.copy(), self.starts.copy())

    def restore(self, kept: Snapshot) -> None:
        """Come back to a snapshot taken at any target."""
        self.room[:], self.at[:], self.use[:], self.bound[:] = kept.room, kept.at, kept.use, kept.bound
        self.room[0] += kept.target - self.target
        self.spans[:], self.chosen[:], self.starts[:] = kept.spans, kept.chosen, kept.starts
        self.update_pressure()

    def assignment(self) -> Assignment:
        """Of all items."""
        assert min(self.chosen, default=0) >= 0
        return Assignment(tuple(self.chosen), tuple(self.starts))


def _least(deltas: Floats, group: Group, space: Space) -> Floats:
    """The sum of the least rises of as many slots as each choice takes [Q]."""
    if int(group.counts.max()) == 1:
        least: Floats = deltas.min(axis=1)
        return least
    rows = np.arange(len(deltas))
    least = np.sort(deltas, axis=1).cumsum(axis=1)[rows, group.counts - 1]
    if group.one_host:
        host = hosts(group.span, space.problem)
        for row in group.one_host:
            by_host = [np.sort(deltas[row, host == h])[: group.counts[row]].sum() for h in range(int(host[-1]) + 1)]
            least[row] = min(by_host)
    return least
