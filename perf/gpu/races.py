"""Who touched each piece of a memory since the last barrier, and so which accesses nothing orders.

Two threads of a CTA that touch the same piece, one of them writing, need something between that both took part in: a
barrier of the CTA, or for two lanes of one warp `bar.warp.sync`. Shuffles and other instructions of a whole warp order
no memory. Lanes may write one value to one place with one instruction, no more: that a second write finds the same
value there is chance.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .rounding import Array

# kind, what, place in the arrays of threads and addresses of an access
Report = Callable[[str, str, int], None]
_NOBODY, _LANES, _WARPS = -1, -2, -3


class Clock:
    """Barriers of one CTA: each begins a time; since when a warp, and the CTA, know what others did."""

    def __init__(self, threads: int, start: int = 0) -> None:
        self.time = self.cta_since = start
        self.warp_since = np.full(threads // 32, start, np.int64)

    def barrier(self) -> None:
        """All threads of the CTA met."""
        self.time += 1
        self.cta_since = self.time
        self.warp_since[:] = self.time

    def warp_barrier(self, warps: Array) -> None:
        """All threads of each of these warps met."""
        self.time += 1
        self.warp_since[warps] = self.time


class Tracker:
    """The last accesses to each of `count` pieces of `name`."""

    def __init__(self, name: str, count: int, clock: Clock) -> None:
        self.name, self.clock = name, clock
        # thread that wrote last; thread and warp that read since, or several
        self.writer, self.reader, self.reader_warp = (np.full(count, _NOBODY, np.int32) for _ in range(3))
        self.write_time, self.read_time = (np.full(count, -1, np.int64) for _ in range(2))
        self.atomic = np.zeros(count, np.bool_)

    def read(self, threads: Array, places: Array, report: Report) -> None:
        """Note that `threads` read `places` [threads, pieces]."""
        clock, owner = self.clock, threads[:, None].astype(np.int32)
        warp = owner // 32
        self._check(self._after_write(places, owner, warp), "read", "wrote", report)
        reader, reader_warp, before = self.reader[places], self.reader_warp[places], self.read_time[places]
        # earlier reads do not matter that a barrier lies behind
        fresh = (before < clock.cta_since) | ((reader_warp == warp) & (before < clock.warp_since[warp]))
        self.reader[places] = np.where((reader == owner) | fresh, owner, _LANES)
        self.reader_warp[places] = np.where((reader_warp == warp) | fresh, warp, _WARPS)
        # of several readers in this very access the last one stands there
        lost = self.reader[places] != owner
        if lost.any():
            others = self.reader_warp[places] != warp
            self.reader[places[lost]] = _LANES
            self.reader_warp[places[others]] = _WARPS
        self.read_time[places] = clock.time

    def write(self, threads: Array, places: Array, report: Report, atomic: bool = False) -> None:
        """Note that `threads` write `places`, or change them atomically, which atomic accesses do not mind."""
        owner = threads[:, None].astype(np.int32)
        warp = owner // 32
        wrong = self._after_write(places, owner, warp)
        self._check(wrong & ~self.atomic[places] if atomic else wrong, "written", "wrote", report)
        reader_warp = self.reader_warp[places]
        since = np.where(reader_warp == warp, self.clock.warp_since[warp], self.clock.cta_since)
        wrong = (self.reader[places] != owner) & (self.read_time[places] >= since)
        self._check(wrong, "written", "read", report)
        self.mark_written(owner, places)
        self.atomic[places] = atomic

    def mark_written(self, owner: Array, places: Array) -> None:
        """Note a write whose order needs no check."""
        self.writer[places] = owner
        self.write_time[places] = self.clock.time
        self.atomic[places] = False

    def _after_write(self, places: Array, owner: Array, warp: Array) -> Array:
        writer = self.writer[places]
        since = np.where(writer // 32 == warp, self.clock.warp_since[warp], self.clock.cta_since)
        wrong: Array = (writer != owner) & (self.write_time[places] >= since)
        return wrong

    def _check(self, wrong: Array, now: str, before: str, report: Report) -> None:
        if wrong.any():
            text = f"{self.name} is {now} that another thread {before} since the last barrier"
            report("race", text, int(wrong.any(axis=1).argmax()))
