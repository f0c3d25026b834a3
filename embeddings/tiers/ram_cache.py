"""Some rows in memory, all of them below it, on a disk as a rule: `RamOverFile`.

Shapes: R rows of the table, M places in memory.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from .backing import Backing, HostRecords, put_rows, require_growth, require_rows, take_rows

# bytes that a flush moves at once
_PIECE = 1 << 26


class RamOverFile:
    """A backing whose rows lie in another one; the `ram_rows` that were read or written last lie in memory as well.

    What was written goes below when its place is needed. The rows that go first are those whose last call is longest
    ago, of one call the first rows. So the same calls leave the same rows in memory, in every run.

    Attributes:
        hits, misses: rows that were found in memory and that were not, of all calls.
        saves: rows that were written below.

    Raises:
        MemoryError: there is no memory for [ram_rows, record_bytes].
    """

    def __init__(self, below: Backing, rows: int, record_bytes: int, *, ram_rows: int, pinned: bool = False) -> None:
        M = min(ram_rows, rows)
        self._below, self._shape = below, (rows, record_bytes)
        self._memory = HostRecords(M, record_bytes, pinned=pinned)
        self._place_of = torch.full((rows,), -1, dtype=torch.int32, device="cpu")
        self._row_of = torch.full((M,), -1, dtype=torch.int64, device="cpu")
        self._dirty = torch.zeros(M, dtype=torch.bool, device="cpu")
        self._last_call = torch.zeros(M, dtype=torch.int64, device="cpu")
        # the places that each call touched, oldest first; one that was touched again later counts there alone
        self._touched: deque[tuple[int, Tensor]] = deque()
        self._touches = self._calls = self._filled = 0
        self.hits = self.misses = self.saves = 0

    def read(self, rows: Tensor, out: Tensor) -> None:
        """As `Backing` says."""
        require_rows(rows, out, self._shape)
        places, found, missed = self._find(rows)
        if not missed.numel():
            take_rows(self._memory.records, places, out)
            return
        if not found.numel():
            self._below.read(rows, out)
            self._keep(rows, out, dirty=False)
            return
        records = torch.empty((missed.numel(), self._shape[1]), dtype=torch.uint8, device="cpu")
        wanted = rows[missed]
        self._below.read(wanted, records)
        put_rows(out, missed, records)
        put_rows(out, found, _taken(self._memory.records, places[found]))
        self._keep(wanted, records, dirty=False)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """As `Backing` says."""
        require_rows(rows, records, self._shape)
        places, found, missed = self._find(rows)
        if not missed.numel():
            put_rows(self._memory.records, places, records)
            self._dirty[places] = True
            return
        if found.numel():
            put_rows(self._memory.records, places[found], _taken(records, found))
            self._dirty[places[found]] = True
            rows, records = rows[missed], _taken(records, missed)
        self._keep(rows, records, dirty=True)

    def flush(self) -> None:
        """Write below what is in memory alone."""
        if not self._dirty.any():
            return
        rows, order = self._row_of[self._dirty].sort()
        places = torch.nonzero(self._dirty)[:, 0][order]
        most = max(1, _PIECE // self._shape[1])
        for some_rows, some in zip(torch.split(rows, most), torch.split(places, most), strict=True):
            self._below.write(some_rows, _taken(self._memory.records, some))
            self._dirty[some] = False
            self.saves += some.numel()

    def grow(self, rows: int) -> None:
        """As `Backing` says; memory keeps its number of rows."""
        require_growth(rows, self._shape[0])
        self._below.grow(rows)
        added = torch.full((rows - self._shape[0],), -1, dtype=torch.int32, device="cpu")
        self._place_of, self._shape = torch.cat((self._place_of, added)), (rows, self._shape[1])

    def close(self) -> None:
        """As `Backing` says; what is in memory alone is lost, as all that a backing holds."""
        self._memory.close()
        self._below.close()

    def _find(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Places of rows in memory (-1: none), and which of the rows are there and which are not; counts a call."""
        places = self._place_of[rows].long()
        there = places >= 0
        found, missed = torch.nonzero(there)[:, 0], torch.nonzero(~there)[:, 0]
        self.hits, self.misses = self.hits + found.numel(), self.misses + missed.numel()
        self._calls += 1
        self._touch(places[found])
        return places, found, missed

    def _keep(self, rows: Tensor, records: Tensor, *, dirty: bool) -> None:
        """Give rows that have no place one each, with these records; of too many the last ones."""
        excess = max(0, rows.numel() - self._row_of.numel())
        if excess and dirty:
            self._below.write(rows[:excess], records[:excess])
            self.saves += excess
        rows, records = rows[excess:], records[excess:]
        places = self._take_places(rows.numel())
        self._place_of[rows] = places.int()
        self._row_of[places], self._dirty[places] = rows, dirty
        put_rows(self._memory.records, places, records)
        self._touch(places)

    def _take_places(self, n: int) -> Tensor:
        """n places that nobody has: those that are free, then those of the oldest rows, which go below if need be."""
        free = min(n, self._row_of.numel() - self._filled)
        places = torch.arange(self._filled, self._filled + free)
        self._filled += free
        if free == n:
            return places
        victims = self._oldest(n - free)
        try:
            self._save(victims)
        except BaseException:
            # they stay where they are, and go first once more
            self._touched.appendleft((0, victims))
            self._last_call[victims] = 0
            raise
        self._place_of[self._row_of[victims]] = -1
        return torch.cat((places, victims))

    def _save(self, places: Tensor) -> None:
        changed = places[self._dirty[places]]
        if changed.numel():
            rows, order = self._row_of[changed].sort()
            self._below.write(rows, _taken(self._memory.records, changed[order]))
            self.saves += changed.numel()

    def _touch(self, places: Tensor) -> None:
        if not places.numel():
            return
        self._last_call[places] = self._calls
        self._touched.append((self._calls, places))
        self._touches += places.numel()
        if self._touches > 4 * self._row_of.numel() + places.numel():
            # what was touched again since is dead weight, most of it where most rows are found
            alive = [(call, some[self._last_call[some] == call]) for call, some in self._touched]
            self._touched = deque((call, some) for call, some in alive if some.numel())
            self._touches = sum(some.numel() for _, some in self._touched)

    def _oldest(self, n: int) -> Tensor:
        """The n places that were touched longest ago; they are not in the queue any more."""
        taken: list[Tensor] = []
        while n:
            call, places = self._touched.popleft()
            self._touches -= places.numel()
            alive = places[self._last_call[places] == call]
            if alive.numel() > n:
                self._touched.appendleft((call, alive[n:]))
                self._touches += alive.numel() - n
            taken.append(alive[:n])
            n -= taken[-1].numel()
        return torch.cat(taken)


def _taken(source: Tensor, rows: Tensor) -> Tensor:
    records = torch.empty((rows.numel(), source.shape[1]), dtype=torch.uint8, device="cpu")
    take_rows(source, rows, records)
    return records
