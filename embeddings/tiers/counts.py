"""Rows that a cache was asked for and moved, and what follows from them: the running counts of a cached table."""

from __future__ import annotations

from dataclasses import dataclass


class RowCounts:
    """Rows that batches wanted, that had a slot, that came into being, and that were written below."""

    wanted: int
    hits: int
    fresh: int
    saves: int

    @property
    def misses(self) -> int:
        """Rows that had no slot when they were wanted, fresh ones among them."""
        return self.wanted - self.hits

    @property
    def loads(self) -> int:
        """Rows that came from below."""
        return self.misses - self.fresh

    @property
    def hit_rate(self) -> float:
        """Wanted rows that had a slot, of all; 1 where none were wanted."""
        return self.hits / self.wanted if self.wanted else 1.0


@dataclass
class CacheCounts(RowCounts):
    """What a cached table did so far, in rows."""

    wanted: int = 0
    hits: int = 0
    fresh: int = 0
    saves: int = 0
    batches: int = 0
    grown: int = 0
    # prefetches that had no room
    stalls: int = 0
    record_bytes: int = 0

    @property
    def bytes_moved(self) -> int:
        """Bytes that came from below and went there."""
        return (self.loads + self.saves) * self.record_bytes
