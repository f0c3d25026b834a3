"""Shared memory of one CTA: its bytes, what has a value, who touched it, and copies that are under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .races import Clock, Report, Tracker
from .rounding import Array

# where shared memory begins: address zero is outside, swizzled tiles of 1024 bytes stay aligned
BASE = 1024
_DTYPES: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass
class Copy:
    """A cp.async that has not been waited for: what each thread will find where, and in which of its groups."""

    threads: Array
    offsets: Array
    data: Array
    groups: Array
    # addresses that it reads, 0 where it fills with zeros
    sources: Array


class Shared:
    """`size` bytes, followed in pieces of `piece` bytes, no larger than the kernel's smallest access."""

    def __init__(self, size: int, piece: int, clock: Clock, threads: int) -> None:
        self.size, self.piece = size, piece
        self.bytes = np.zeros(-(-size // 16) * 16, np.uint8)
        self.views = {n: self.bytes.view(dtype) for n, dtype in _DTYPES.items()}
        count = len(self.bytes) // piece
        self.tracker = Tracker("shared memory", count, clock)
        self.written, self.pending, self.unfenced = (np.zeros(count, np.bool_) for _ in range(3))
        self.copies: list[Copy] = []
        self.committed = np.zeros(threads, np.int64)
        # told which threads touched which pieces, where somebody wants to know
        self.touched: Callable[[Array, Array], None] | None = None
        # and which threads waited for copies of so many bytes from where
        self.copied: Callable[[Array, Array, int], None] | None = None

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
        indices, view = self._indices(offsets, size, count), self.views[size]
        self._note_write(threads, self._places(offsets, size * count), report)
        view[indices] = data
        differs = (view[indices] != data).any(axis=1)
        if differs.any():
            report("race", "two threads write different values to shared memory at once", int(differs.argmax()))

    def atomic(self, threads: Array, offsets: Array, size: int, report: Report) -> Array:
        """Memory as integers of `size` bytes, for an atomic access to these offsets."""
        places = self._places(offsets, size)
        self._check_written(places, report)
        self._note_write(threads, places, report, atomic=True)
        view: Array = self.views[size]
        return view

    def note_read(self, threads: Array, offsets: Array, size: int, report: Report) -> None:
        """A read of `size` bytes by each thread."""
        places = self._places(offsets, size)
        self._check_written(places, report)
        self._check_pending(places, "read", report)
        if self.touched:
            self.touched(threads, places)
        self.tracker.read(threads, places, report)

    def note_write(self, threads: Array, offsets: Array, size: int, report: Report) -> None:
        """A write of `size` bytes by each thread."""
        self._note_write(threads, self._places(offsets, size), report)

    def _note_write(self, threads: Array, places: Array, report: Report, atomic: bool = False) -> None:
        self._check_pending(places, "written", report)
        if self.touched:
            self.touched(threads, places)
        self.tracker.write(threads, places, report, atomic)
        self.written[places] = self.unfenced[places] = True

    def _check_written(self, places: Array, report: Report) -> None:
        lacking = ~self.written[places]
        if lacking.any():
            report("unwritten", "shared memory is read that nobody wrote", int(lacking.any(axis=1).argmax()))

    def _check_pending(self, places: Array, how: str, report: Report) -> None:
        pending = self.pending[places]
        if pending.any():
            text = f"shared memory is {how} before the copy to it was waited for"
            report("in flight", text, int(pending.any(axis=1).argmax()))

    def _indices(self, offsets: Array, size: int, count: int) -> Array:
        first: Array = offsets // size
        return first[:, None] + np.arange(count)

    def _places(self, offsets: Array, size: int) -> Array:
        first: Array = offsets // self.piece
        return first[:, None] + np.arange(max(size // self.piece, 1))

    # --- copies from global memory that go on while the threads do
    def begin_copy(self, threads: Array, offsets: Array, data: Array, sources: Array, report: Report) -> None:
        """cp.async of [threads, bytes]."""
        places = self._places(offsets, data.shape[1])
        self._note_write(threads, places, report)
        self.pending[places] = True
        self.copies.append(Copy(threads, offsets, data, self.committed[threads], sources))

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
                self.tracker.mark_written(copy.threads[done][:, None], places)
                if self.touched:
                    self.touched(copy.threads[done], places)
                if self.copied:
                    self.copied(copy.threads[done], copy.sources[done], size)
            if not done.all():
                parts = (copy.threads, copy.offsets, copy.data, copy.groups, copy.sources)
                left.append(Copy(*(part[~done] for part in parts)))
        self.copies = left

    def fence(self, threads: Array) -> None:
        """fence.proxy.async: what these threads wrote may be read by wgmma."""
        self.unfenced &= ~np.isin(self.tracker.writer, threads)
