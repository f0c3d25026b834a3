"""What caches of all sizes make of a trace: hits of LRU in one pass, and of Belady's rule, which no cache can beat.

A trace is the distinct rows of each batch of one table, as an owner of rows sees them. Rows of a batch are wanted
together: a row is a hit if it is in the cache before its batch, and none of its batch is a victim. A cache of fewer
slots than the largest batch has rows cannot be.

LRU's victims are the rows that were wanted longest ago; of rows last wanted in the same batch the first in the batch's
order. `simulate.py` has the numbers of the policies that run, at one size. Belady's victims are the rows that are
wanted again last, or never (Belady, A study of replacement algorithms for a virtual-storage computer, 1966). Rows that
are wanted again in the same batch are alike: which of them goes changes nothing, so counts by batch are all it needs.

Every row of a batch is updated, so what leaves a cache is written below: saves are evictions.

Letters: R rows, N rows of a batch, B batches, S sizes of caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels import ReuseStack

# depths that wait to be counted
_GATHERED = 1 << 20


@dataclass(frozen=True, eq=False)
class Counts:
    """Rows of the counted batches that hit, missed and were saved, at some numbers of slots: [S] int64 each."""

    slots: Tensor
    hits: Tensor
    misses: Tensor
    saves: Tensor


class TraceCurves:
    """Gathers a trace, batch by batch, in memory that does not grow with the rows of batches.

    Args:
        rows: R, of the table.
        first: batches before this one fill the cache and are not counted.

    Raises:
        ValueError: R is not positive, or `first` negative.
    """

    def __init__(self, rows: int, first: int = 0) -> None:
        if first < 0:
            raise ValueError(f"TraceCurves: first must be 0 or more, got {first}")
        self.rows, self.first = rows, first
        # rows of the largest batch, of all counted batches, different rows before the counted ones and in all
        self.largest, self.counted, self.before = 0, 0, 0
        self._stack = ReuseStack(rows)
        self._batch_of = torch.full((rows,), -1, dtype=torch.int32)
        self._sizes: list[int] = []
        # of the batches before `first` and of those from it on
        self._depths = [_Histogram(), _Histogram()]
        # of each batch: earlier batches, and how many of its rows were last wanted there
        self._returns: list[tuple[Tensor, Tensor]] = []

    @property
    def batches(self) -> int:
        """B, gathered so far."""
        return len(self._sizes)

    @property
    def wanted(self) -> int:
        """Different rows so far."""
        return self._stack.wanted

    def add(self, rows: Tensor) -> None:
        """The next batch: its distinct rows [N] int64. Raises as `ReuseStack.touch`."""
        number, is_counted = self.batches, self.batches >= self.first
        depths = self._stack.touch(rows)
        self._depths[is_counted].add(depths[depths >= 0])
        last = self._batch_of[rows]
        self._batch_of[rows] = number
        by_batch = torch.bincount(last[last >= 0])
        earlier = torch.nonzero(by_batch).flatten()
        self._returns.append((earlier, by_batch[earlier]))
        self._sizes.append(rows.numel())
        self.largest = max(self.largest, rows.numel())
        if is_counted:
            self.counted += rows.numel()
        else:
            self.before = self._stack.wanted

    def lru(self, slots: Iterable[int] | None = None) -> Counts:
        """LRU at these numbers of slots, by default at all from the largest batch to the different rows wanted.

        Raises:
            ValueError: a number of slots does not hold the largest batch.
        """
        wanted = self._stack.wanted
        every = torch.arange(self.largest, max(wanted, self.largest) + 1) if slots is None else self._sizes_of(slots)
        warm, counted = (depths.sums() for depths in self._depths)
        hits = counted[every.clamp_max(counted.numel() - 1)]
        warm_hits = warm[every.clamp_max(warm.numel() - 1)]
        warm_misses = sum(self._sizes[: self.first]) - warm_hits
        misses = self.counted - hits
        # what was loaded and is not there any more was saved
        before = (warm_misses - every).clamp_min(0)
        return Counts(every, hits, misses, (warm_misses + misses - every).clamp_min(0) - before)

    def belady(self, slots: Iterable[int]) -> Counts:
        """Belady's rule at these numbers of slots: no cache has more hits.

        Takes time in proportion to S B^2. Raises as `lru`.
        """
        sizes, batches = self._sizes_of(slots), self.batches
        again = self._next_uses()
        # rows in the cache by the batch that wants them next; the last column is for rows that none does
        held = torch.zeros(sizes.numel(), batches + 1, dtype=torch.int64)  # [S, B + 1]
        total = torch.zeros_like(sizes)
        hits, saves = torch.zeros_like(sizes), torch.zeros_like(sizes)
        for number, rows in enumerate(self._sizes):
            found = held[:, number].clone()
            held[:, number] = 0
            excess = (total + rows - found - sizes).clamp_min(0)
            _take_furthest(held[:, number + 1 :], excess)
            total += rows - found - excess
            later, counts = again[number]
            held[:, later] += counts
            held[:, batches] += rows - int(counts.sum())
            if number >= self.first:
                hits += found
                saves += excess
        return Counts(sizes, hits, self.counted - hits, saves)

    def _sizes_of(self, slots: Iterable[int]) -> Tensor:
        sizes = torch.tensor([*slots], dtype=torch.int64)
        if sizes.numel() and int(sizes.min()) < self.largest:
            raise ValueError(
                f"a cache of {int(sizes.min()):,} slots does not hold the largest batch, of {self.largest:,} rows"
            )
        return sizes

    def _next_uses(self) -> list[tuple[Tensor, Tensor]]:
        """Of each batch: later batches, and how many of its rows are wanted next there."""
        numbers = [torch.full_like(earlier, number) for number, (earlier, _) in enumerate(self._returns)]
        if not numbers:
            return []
        earlier, counts = (torch.cat(parts) for parts in zip(*self._returns, strict=True))
        order = earlier.argsort(stable=True)
        of_each = torch.bincount(earlier, minlength=self.batches).tolist()
        return [*zip(torch.split(torch.cat(numbers)[order], of_each), torch.split(counts[order], of_each), strict=True)]


class _Histogram:
    """Counts of numbers from 0 on, which are gathered first: a histogram may be much longer than a batch."""

    def __init__(self) -> None:
        self._counts = torch.zeros(1, dtype=torch.int64)
        self._gathered: list[Tensor] = []
        self._waiting = 0

    def add(self, numbers: Tensor) -> None:
        self._gathered.append(numbers)
        self._waiting += numbers.numel()
        if self._waiting > max(_GATHERED, self._counts.numel()):
            self._count()

    def _count(self) -> None:
        more = torch.bincount(torch.cat(self._gathered)) if self._gathered else self._counts[:0]
        longer, shorter = (more, self._counts) if more.numel() > self._counts.numel() else (self._counts, more)
        longer[: shorter.numel()] += shorter
        self._counts, self._gathered, self._waiting = longer, [], 0

    def sums(self) -> Tensor:
        """How many numbers were below 0, 1, 2, ... up to one more than the largest."""
        self._count()
        return torch.cat([torch.zeros(1, dtype=torch.int64), self._counts]).cumsum(0)


def _take_furthest(held: Tensor, excess: Tensor) -> None:
    """Take `excess` [S] rows from `held` [S, columns], from the last column on, in place."""
    if not excess.any():
        return
    furthest = held.flip(1)
    before = furthest.cumsum(1) - furthest
    held -= torch.minimum((excess[:, None] - before).clamp_min(0), furthest).flip(1)


def sizes_between(least: int, most: int, count: int = 32) -> list[int]:
    """About `count` numbers of slots from `least` to `most`, each larger than the one before by the same factor."""
    if most <= least or count < 2:
        return [least]
    steps, first = torch.linspace(0, 1, count, dtype=torch.float64).tolist(), max(least, 1)
    return sorted({round(first * (most / first) ** step) for step in steps} | {first, most})


def regret(hits: Sequence[int] | Tensor, best: Sequence[int] | Tensor, counted: int) -> list[float]:
    """The share of rows that were misses and that Belady's rule would have had, at each size; hits and best [S]."""
    pairs = zip(torch.as_tensor(hits).tolist(), torch.as_tensor(best).tolist(), strict=True)
    return [(most - had) / max(1, counted) for had, most in pairs]
