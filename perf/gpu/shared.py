"""Shared memory of one CTA: its bytes, who touched them since the last barrier, and copies that are under way.

Two threads that touch the same piece, one of them writing, need something between that both took part in: a barrier
of the CTA, or for two lanes of one warp `bar.warp.sync`. Shuffles and other instructions of a whole warp order no
memory. Lanes may write one value to one place with one instruction, no more: that a second write finds the same value
there is chance. A piece is as small as the kernel's smallest access.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .rounding import Array

# where shared memory begins: address zero is outside, swizzled tiles of 1024 bytes stay aligned
BASE = 1024
_DTYPES: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# kind, what, place in the arrays of threads and offsets
Report = Callable[[str, str, int], None]


@dataclass
class Copy:
    """A cp.async that has not been waited for: what each thread will find where, and in which of its groups."""

    threads: Array
    offsets: Array
    data: Array
    groups: Array


class Shared:
    """`size` bytes, followed in pieces of `piece` bytes, for a CTA of `threads`."""

    def __init__(self, size: int, piece: int, threads: int) -> None:
        self.size, self.piece = size, piece
        self.bytes = np.zeros(-(-size // 16) * 16, np.uint8)
        self.views = {n: self.bytes.view(dtype) for n, dtype in _DTYPES.items()}
        count = len(self.bytes) // piece
        # thread that wrote last; that read, -1 several threads of a warp, -2 of several warps
        self.writer, self.reader = np.full(count, -1, np.int32), np.full(count, -3, np.int32)
        self.reader_warp = np.full(count, -1, np.int32)
        self.write_time, self.read_time = np.full(count, -1, np.int32), np.full(count, -1, np.int32)
        self.written, self.pending, self.unfenced, self.atomic = (np.zeros(count, np.bool_) for _ in range(4))
        # a barrier begins a time; since when a warp, and the CTA, know what others did
        self.time = 0
        self.cta_since = 0
        self.warp_since = np.zeros(threads // 32, np.int32)
        self.copies: list[Copy] = []
        self.committed = np.zeros(threads, np.int64)

    def barrier(self) -> None:
        """All threads of the CTA met."""
        self.time += 1
        self.cta_since = self.time
        self.warp_since[:] = self.time

    def warp_barrier(self, warps: Array) -> None:
        """All threads of each of these warps met."""
        self.time += 1
        self.warp_since[warps] = self.time

    def outside(self, offsets: Array, size: int) -> Array:
        outside: Array = (offsets < 0) | (offsets + size > self.size)
        return outside

    def load(self, threads: Array, offsets: Array, size: int, count: int, report: Report) -> Array:
        """[threads, count] values of `size` bytes, one after another at each offset."""
        self.note_read(threads, offsets, size * count, report)
        values: Array = self.views[size][self._indices(offsets, size, count)]
        return values

    def store(self, threads: Array, offsets: Array, size: int, data: Array, report: Report) -> None:
        """Write [threads, count] values of `size` bytes."""
        count = data.shape[1]
        indices = self._indices(offsets, size, count)
        places = self._places(offsets, size * count)
        view = self.views[size]
        self.note_write(threads, places, report)
        view[indices] = data
        differs = (view[indices] != data).any(axis=1)
        if differs.any():
            report("race", "two lanes write different values to the same shared memory at once", int(differs.argmax()))

    def _indices(self, offsets: Array, size: int, count: int) -> Array:
        first: Array = offsets // size
        return first[:, None] + np.arange(count)

    def _places(self, offsets: Array, size: int) -> Array:
        first: Array = offsets // self.piece
        return first[:, None] + np.arange(max(size // self.piece, 1))

    def note_read(self, threads: Array, offsets: Array, size: int, report: Report) -> None:
        places = self._places(offsets, size)
        self._check(
            ~self.written[places] & ~self.pending[places],
            "unwritten",
            "shared memory is read that nobody wrote",
            report,
        )
        self._check(
            self.pending[places], "in flight", "shared memory is read before the copy to it was waited for", report
        )
        owner, warp = threads[:, None].astype(np.int32), (threads[:, None] // 32).astype(np.int32)
        self._check(
            self._races_with_write(places, owner, warp),
            "race",
            "shared memory is read that another thread wrote since the last barrier",
            report,
        )
        reader, reader_warp, before = self.reader[places], self.reader_warp[places], self.read_time[places]
        # earlier reads do not matter that a barrier lies behind
        fresh = (before < self.cta_since) | ((reader_warp == warp) & (before < self.warp_since[warp]))
        together = (reader == owner) | fresh
        alone = (reader_warp == warp) | fresh
        self.reader[places] = np.where(together, owner, -1)
        self.reader_warp[places] = np.where(alone, warp, -2)
        # of several readers in this very access
        lost = self.reader[places] != owner
        if lost.any():
            others = self.reader_warp[places] != warp
            self.reader[places[lost]] = -1
            self.reader_warp[places[others]] = -2
        self.read_time[places] = self.time

    def _races_with_write(self, places: Array, owner: Array, warp: Array) -> Array:
        writer, when = self.writer[places], self.write_time[places]
        since = np.where(writer // 32 == warp, self.warp_since[warp], self.cta_since)
        races: Array = (writer != owner) & (when >= since)
        return races

    def note_write(self, threads: Array, places: Array, report: Report, allowed: Array | None = None) -> None:
        owner, warp = threads[:, None].astype(np.int32), (threads[:, None] // 32).astype(np.int32)
        self._check(
            self.pending[places], "in flight", "shared memory is written before the copy to it was waited for", report
        )
        races = self._races_with_write(places, owner, warp)
        if races.any():
            races = races if allowed is None else races & ~allowed
            self._check(
                races, "race", "shared memory is written that another thread wrote since the last barrier", report
            )
        reader, reader_warp = self.reader[places], self.reader_warp[places]
        since = np.where(reader_warp == warp, self.warp_since[warp], self.cta_since)
        races = (reader != owner) & (self.read_time[places] >= since)
        if races.any():
            races = races if allowed is None else races & ~allowed
            self._check(
                races, "race", "shared memory is written that another thread read since the last barrier", report
            )
        self._mark_written(places, owner)

    def _mark_written(self, places: Array, owner: Array) -> None:
        self.writer[places] = owner
        self.write_time[places] = self.time
        self.written[places] = True
        self.unfenced[places] = True
        self.atomic[places] = False

    def note_atomic(self, threads: Array, offsets: Array, size: int, report: Report) -> None:
        """An atomic access: it races with plain ones, not with others of its kind."""
        places = self._places(offsets, size)
        self._check(~self.written[places], "unwritten", "shared memory is read that nobody wrote", report)
        self.note_write(threads, places, report, self.atomic[places] & (self.write_time[places] >= 0))
        self.atomic[places] = True

    def _check(self, wrong: Array, kind: str, what: str, report: Report) -> None:
        if wrong.any():
            report(kind, what, int(wrong.any(axis=1).argmax()))

    # --- copies from global memory that go on while the threads do
    def begin_copy(self, threads: Array, offsets: Array, data: Array, report: Report) -> None:
        """cp.async of [threads, bytes]."""
        places = self._places(offsets, data.shape[1])
        self.note_write(threads, places, report)
        self.pending[places] = True
        self.copies.append(Copy(threads, offsets, data, self.committed[threads]))

    def commit(self, threads: Array) -> None:
        """cp.async.commit_group."""
        self.committed[threads] += 1

    def wait(self, threads: Array, newest: int) -> None:
        """cp.async.wait_group: of each thread all groups but the newest are done; -1 also those not committed."""
        waits = np.zeros(len(self.committed), np.bool_)
        waits[threads] = True
        left = []
        for copy in self.copies:
            done = waits[copy.threads] & (copy.groups < self.committed[copy.threads] - newest)
            if done.any():
                offsets, size = copy.offsets[done], copy.data.shape[1]
                places = self._places(offsets, size)
                self.pending[places] = False
                self.bytes[offsets[:, None] + np.arange(size)] = copy.data[done]
                # from now on it is a write by the thread that waited; collisions were seen when it began
                self._mark_written(places, copy.threads[done][:, None])
            if not done.all():
                left.append(Copy(copy.threads[~done], copy.offsets[~done], copy.data[~done], copy.groups[~done]))
        self.copies = left

    def fence(self, threads: Array) -> None:
        """fence.proxy.async: what these threads wrote may be read by wgmma."""
        self.unfenced &= ~np.isin(self.writer, threads)
