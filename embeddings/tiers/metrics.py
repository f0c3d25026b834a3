"""What cached tables did, by table, as numbers that a log, a progress bar or a module's print takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .backing import Backing, HostRecords
from .cached_rows import CachedRows
from .counts import RowCounts
from .files import FileRecords
from .ram_cache import RamOverFile

# what adds up, over shards and over time
_COUNTS = ("wanted", "hits", "fresh", "saves", "stalls", "grown", "bytes_moved")
_NAMES: dict[type, str] = {HostRecords: "ram", FileRecords: "file", RamOverFile: "ram over file"}


@dataclass(frozen=True)
class CacheMetrics(RowCounts):
    """What the cache of a table did, all its shards of a rank together. Rows are distinct ones of a batch.

    Attributes:
        below: where rows without a slot are: "ram", "file", "ram over file", or the class of a backing of one's own.
        rows, slots: of the table, and how many of them can be on the device now.
        batches: that looked something up.
        wanted, hits: rows that batches wanted, and those of them that had a slot.
        fresh: rows that came into being, and were not read from below.
        saves: rows that were written below.
        stalls: prefetches that had no room, and waited for the batch before.
        grown: times that the table got more slots.
        bytes_moved: that came from below, and went there.
    """

    below: str
    rows: int = 0
    slots: int = 0
    batches: int = 0
    wanted: int = 0
    hits: int = 0
    fresh: int = 0
    saves: int = 0
    stalls: int = 0
    grown: int = 0
    bytes_moved: int = 0

    def since(self, before: CacheMetrics) -> CacheMetrics:
        """What happened after `before`; rows and slots are those of now."""
        names = ("batches", *_COUNTS)
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in names})

    def as_dict(self) -> dict[str, int | float]:
        """All numbers by name, for a log."""
        names = ("rows", "slots", "batches", *_COUNTS, "misses", "loads", "hit_rate")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        asked = f", hit rate {self.hit_rate:.1%} of {self.wanted:,} rows" if self.wanted else ""
        return f"{self.slots:,} slots of {self.rows:,} rows over {self.below}{asked}"


def metrics_of(stores: Iterable[CachedRows]) -> dict[str, CacheMetrics]:
    """By table; shards add up, those of the same rows too."""
    tables: dict[str, CacheMetrics] = {}
    for store in stores:
        assert store.group is not None
        for shape, counts, below in zip(store.group.tables, store.counts, store.below, strict=True):
            if not shape.rows:
                # a shard without rows has nothing below
                continue
            before = tables.get(shape.name, CacheMetrics(_name_of(below)))
            sums = {name: getattr(before, name) + getattr(counts, name) for name in _COUNTS}
            tables[shape.name] = replace(
                before,
                rows=before.rows + shape.rows,
                slots=before.slots + shape.resident,
                batches=max(before.batches, counts.batches),
                **sums,
            )
    return tables


def _name_of(below: Backing) -> str:
    return _NAMES.get(type(below), type(below).__name__)
