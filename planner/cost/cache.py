"""What a cache of a table's rows costs: misses by slots, and of them bytes of every memory and milliseconds.

A `MissCurve` has numbers alone: from a trace (`shardwise cache`), TorchRec's `CacheStatistics`, or how ids are drawn.
Per step, for a shard of w columns and R rows with s of them on the device, U rows wanted and M(s) missing, of
records of rec bytes (row and states, padded), links in GB/s:

    device      s (w e + q + SLOT) + R ROW       below     R rec in host memory, or on disk
    prefetch    M(s) (rec / link_gb_s + miss_ns) + U find_ns + batch_us
                                                     (a file: max(F max(rec, 4096) / disk_gb_s, F / iops) more)

F are the misses of a cache of as many rows as are in host memory before a file. Rows come and go at once, in both
directions of the link, and of a cache that is full as many go as come. A shard of a part of the rows has that part of
the slots, of the rows wanted and of the misses; column shards miss alike.

Curves are convex and piecewise linear: memory is bought in pieces, each worth less than the one before. So the best use
of some memory is to buy the piece that saves most per byte, next (`share_slots`), and what that leaves to be gained by
cutting a piece is a bound on how far it is from the best.

Without a trace, LRU's misses are by Che's approximation (Che, Tung, Wang, Hierarchical Web caching systems, 2002):
there is a time T after which a row that nobody wanted is out of the cache, the same for all rows; a row in a share q of
all batches is then missing in q (1 - q)^T of them, and the rows that are there are sum 1 - (1 - q)^T = s. Real ids are
not drawn independently: it is an approximation, and is named so.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..search.problem import Floats
from ..tables import STATES, Skew, Table
from .draws import blocks, seen

# bytes beside a row on the device (which row it is, leases, score, key), and of each row of the table (its slot)
SLOT_BYTES, ROW_BYTES = 26, 4
_PAD, _ALIGN, _PAGE = 64, 16, 4096


@dataclass(frozen=True)
class MissCurve:
    """Misses of a table's cache by its slots, for a whole step of all ranks: convex, falling, piecewise linear.

    Args:
        slots: ascending [P]; below the first the cache cannot be, beyond the last nothing more is gained.
        misses, saves: rows a step that come from below, and that go there [P].
        wanted: distinct rows of a step.
        source: where the numbers come from, in words.

    Raises:
        ValueError: lengths differ, slots do not ascend, or misses rise.
    """

    slots: tuple[float, ...]
    misses: tuple[float, ...]
    saves: tuple[float, ...]
    wanted: float
    source: str

    def __post_init__(self) -> None:
        if not self.slots or not len(self.slots) == len(self.misses) == len(self.saves):
            raise ValueError(f"MissCurve: {len(self.slots)} slots, {len(self.misses)} misses, {len(self.saves)} saves")
        if any(b <= a for a, b in zip(self.slots, self.slots[1:], strict=False)):
            raise ValueError("MissCurve: slots must ascend")
        if any(b > a * (1 + 1e-9) + 1e-9 for a, b in zip(self.misses, self.misses[1:], strict=False)):
            raise ValueError("MissCurve: misses must not rise with slots")

    @classmethod
    def of_points(
        cls, slots: Sequence[float], misses: Sequence[float], saves: Sequence[float], wanted: float, source: str
    ) -> MissCurve:
        """The largest convex curve below these points, at those of them that it goes through."""
        kept = _hull(slots, misses)
        of_slots, of_misses, of_saves = (tuple(float(v[k]) for k in kept) for v in (slots, misses, saves))
        return cls(of_slots, of_misses, of_saves, float(wanted), source)

    @classmethod
    def of_statistics(cls, statistics: Any, rows: int, points: int = 129) -> MissCurve:
        """Of TorchRec's `CacheStatistics`: `expected_lookups` and `expected_miss_rate(load factor)` of a table."""
        wanted = float(statistics.expected_lookups)
        # a cache of fewer slots than a step wants cannot be
        least = min(1.0, max(wanted, 1.0) / rows)
        factors = np.unique(np.concatenate([np.linspace(least, 1, points), np.geomspace(least, 1, points)]))
        edges = getattr(statistics, "bins", None)
        if edges is not None:
            # of a histogram, where its steps are: a cache of k rows hits up to a distance of k - 1
            steps = (np.ceil(np.asarray(edges, np.float64)) + 1) / rows
            factors = np.unique(np.concatenate([factors, steps[(steps > least) & (steps < 1)]]))
        misses = np.minimum.accumulate([wanted * float(statistics.expected_miss_rate(float(f))) for f in factors])
        misses[-1] = 0.0
        of_each = misses.tolist()
        return cls.of_points((factors * rows).tolist(), of_each, of_each, wanted, "cache statistics")

    @classmethod
    def of_skew(cls, rows: int, ids: float, skew: Skew, points: int = 97) -> MissCurve:
        """LRU's by Che's approximation, of a table whose steps bring `ids` ids drawn by `skew`."""
        counts, mass = (
            (np.array([float(rows)]), np.array([1.0])) if skew.alpha == 0 else blocks(rows, skew)
        )  # rows that are alike, and what all of them are drawn with
        wanted_share = seen(mass / counts, ids)  # of a row: the share of batches that want it
        wanted = float((counts * wanted_share).sum())
        slots = np.unique(np.geomspace(min(max(wanted, 1.0), rows), rows, points))
        misses = np.array([float((counts * wanted_share * _absent(counts, wanted_share, s)).sum()) for s in slots])
        misses[-1] = 0.0
        of_each = np.minimum.accumulate(misses).tolist()
        return cls.of_points(
            slots.tolist(), of_each, of_each, wanted, "Che's approximation of ids drawn by a power law"
        )

    def misses_at(self, slots: float) -> float:
        """Rows a step that come from below."""
        return float(np.interp(slots, self.slots, self.misses))

    def saves_at(self, slots: float) -> float:
        """Rows a step that go there."""
        return float(np.interp(slots, self.slots, self.saves))

    def hit_rate_at(self, slots: float) -> float:
        """The share of the rows wanted that are on the device."""
        return 1 - self.misses_at(slots) / self.wanted if self.wanted else 1.0

    def slots_for(self, misses: float) -> float:
        """The fewest slots with no more misses than these; infinite where there are none."""
        if misses < self.misses[-1]:
            return math.inf
        # np.interp wants what it looks up in ascending order
        return float(np.interp(-misses, [-m for m in self.misses], self.slots))


def _absent(counts: Floats, wanted: Floats, slots: float) -> Floats:
    """The chance that a row is not in a cache of so many slots when it is wanted."""
    with np.errstate(divide="ignore"):
        decay = np.log1p(-np.minimum(wanted, 1 - 1e-15))
    low, high = 0.0, 1.0
    if slots >= counts.sum():
        return np.zeros_like(wanted)
    while float((counts * -np.expm1(high * decay)).sum()) < slots and high < 1e18:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float((counts * -np.expm1(middle * decay)).sum()) < slots else (low, middle)
    absent: Floats = np.exp(high * decay)
    return absent


def _hull(slots: Sequence[float], misses: Sequence[float]) -> list[int]:
    """The points of the lower convex hull, from the left, without those that gain nothing."""
    kept: list[int] = []
    for k in range(len(slots)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (misses[b] - misses[a]) * (slots[k] - slots[a]) < (misses[k] - misses[a]) * (slots[b] - slots[a]):
                break
            kept.pop()
        kept.append(k)
    while len(kept) > 1 and misses[kept[-1]] >= misses[kept[-2]]:
        kept.pop()
    return kept


def record_bytes(table: Table, width: int) -> int:
    """Bytes of a row of `width` columns and its optimizer states, as it lies below the device."""
    of_element, of_row = STATES.get(table.optimizer or "SGD", (2, 0))
    parts = [math.ceil(width * table.element_bytes), *[4 * width] * of_element]
    return -(-(sum(-(-part // _ALIGN) * _ALIGN for part in parts) + 4 * of_row) // _PAD) * _PAD


def slot_bytes(table: Table, width: int) -> float:
    """Bytes of a row of `width` columns on the device, with its states and what is known of its slot."""
    of_element, of_row = STATES.get(table.optimizer or "SGD", (2, 0))
    return width * table.element_bytes + 4 * (of_element * width + of_row) + SLOT_BYTES


@dataclass(frozen=True)
class Links:
    """How fast rows come and go.

    Args:
        link_gb_s, disk_gb_s: of a link each way, and of a disk.
        disk_iops: operations a second of a disk.
        find_ns: a wanted row, that has a slot or not.
        miss_ns: a row that comes besides its bytes: a victim is found, maps change.
        batch_us: a batch besides its rows.
    """

    link_gb_s: float = 32.0
    disk_gb_s: float = 3.0
    disk_iops: float = 5e5
    find_ns: float = 5.0
    miss_ns: float = 0.0
    batch_us: float = 0.0

    def prefetch_ms(self, misses: float, wanted: float, record: int, *, from_disk: float = 0.0) -> float:
        """Milliseconds to bring a step's missing rows of `record` bytes, so many of them from a disk."""
        link = misses * record / self.link_gb_s * 1e-6
        # a disk reads pages
        disk = max(from_disk * max(record, _PAGE) / self.disk_gb_s * 1e-6, from_disk / self.disk_iops * 1e3)
        each = wanted * self.find_ns + misses * self.miss_ns
        return link + disk + each * 1e-6 + self.batch_us * 1e-3


@dataclass(frozen=True)
class Demand:
    """A table that shares memory with others.

    Args:
        curve: its misses.
        bytes_per_slot: of the memory that is shared.
        ms_per_miss: that a missing row takes.
        fixed_bytes: that it takes whatever its slots.
        least, most: slots; None are those of the curve.
    """

    name: str
    curve: MissCurve
    bytes_per_slot: float
    ms_per_miss: float
    fixed_bytes: float = 0.0
    least: float | None = None
    most: float | None = None

    @property
    def range(self) -> tuple[float, float]:
        """Fewest and most slots that make sense."""
        least = max(self.curve.slots[0], self.least or 0.0)
        return least, max(least, min(self.curve.slots[-1], self.most or math.inf))

    def pieces(self) -> list[tuple[float, float, float]]:
        """Slots (from, to) and the milliseconds that a byte of them saves, most first."""
        low, high = self.range
        inner = [s for s in self.curve.slots if low < s < high]
        edges = [low, *inner, high]
        found = []
        for a, b in zip(edges, edges[1:], strict=False):
            gained = (self.curve.misses_at(a) - self.curve.misses_at(b)) * self.ms_per_miss
            if b > a and gained > 0:
                found.append((a, b, gained / ((b - a) * self.bytes_per_slot)))
        return found


@dataclass(frozen=True)
class SharedSlots:
    """Slots of each table, the milliseconds of all their misses, and a bound that no division of the memory beats."""

    slots: tuple[int, ...]
    ms: float
    bound_ms: float
    bytes: float

    @property
    def gap(self) -> float:
        """How much above the bound, as a share of it; 0 where both are 0."""
        return self.ms / self.bound_ms - 1 if self.bound_ms > 0 else 0.0


class TooLittleMemory(ValueError):
    """The smallest caches do not fit; `missing_bytes` says what would do."""

    def __init__(self, message: str, missing_bytes: float) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


def share_slots(demands: Sequence[Demand], memory_bytes: float) -> SharedSlots:
    """The slots of tables that share some memory, so that their misses take least time together.

    Pieces of curves are bought by what a byte of them saves, the last one in part: for convex curves that is the
    optimum, but for slots being whole numbers.

    Raises:
        TooLittleMemory: not even the smallest caches fit.
    """
    slots = [demand.range[0] for demand in demands]
    left = memory_bytes - sum(
        d.fixed_bytes + math.ceil(s) * d.bytes_per_slot for d, s in zip(demands, slots, strict=True)
    )
    if left < 0:
        raise TooLittleMemory(
            f"the smallest caches of {len(demands)} tables need {(memory_bytes - left) / 2**30:.3g} GiB of the"
            f" {memory_bytes / 2**30:.3g} that there are",
            -left,
        )
    slots = [float(math.ceil(s)) for s in slots]
    exact = [*slots]
    # pieces of one table come in the order of their slots, for each saves less than the one before
    heap = [(-worth, t, a, b) for t, demand in enumerate(demands) for a, b, worth in demand.pieces()]
    heapq.heapify(heap)
    while heap and left > 0:
        _, t, _, b = heapq.heappop(heap)
        wanted = max(0.0, b - exact[t]) * demands[t].bytes_per_slot
        taken = min(wanted, left)
        exact[t] += taken / demands[t].bytes_per_slot
        left -= taken
    whole = tuple(math.floor(s + 1e-9) for s in exact)
    ms = [sum(d.curve.misses_at(s) * d.ms_per_miss for d, s in zip(demands, n, strict=True)) for n in (whole, exact)]
    used = sum(d.fixed_bytes + s * d.bytes_per_slot for d, s in zip(demands, whole, strict=True))
    return SharedSlots(whole, ms[0], min(ms), used)


def of_shard(curve: MissCurve, share: float) -> MissCurve:
    """The curve of a shard of a share of the rows."""
    return MissCurve(
        tuple(s * share for s in curve.slots), tuple(m * share for m in curve.misses),
        tuple(m * share for m in curve.saves), curve.wanted * share, curve.source,
    )  # fmt: skip


# batches whose rows are on the device at once, with one that is fetched ahead
IN_FLIGHT = 2
# sizes of a cache that a search chooses from, before it looks between them; then so many bends of the curve on each
# side of where it looks are sizes too, as misses between two sizes are counted on a line above the curve
_SIZES, _NEAR = 14, 6


def smallest(curve: MissCurve, rows: int) -> int:
    """The fewest slots that hold the batches in flight."""
    return max(1, min(rows, math.ceil(IN_FLIGHT * curve.wanted)))


@dataclass(frozen=True)
class Caches:
    """What is known of caches beside how ids are drawn.

    Args:
        curves: misses by name of table, of a step of all ranks.
        statistics: TorchRec's `CacheStatistics` by name of table, "*" for all others.
        links: how fast rows come and go.
        slots: about which the search may choose further sizes, by name of table.
    """

    curves: Mapping[str, MissCurve] = field(default_factory=dict)
    statistics: Mapping[str, Any] = field(default_factory=dict)
    links: Links = Links()
    slots: Mapping[str, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.curves)), tuple(sorted(self.slots.items())), self.links))

    def curve(self, table: Table, ids: float) -> MissCurve:
        """The misses of a table whose steps bring so many ids."""
        return curve_of(table, ids, self.curves, self.statistics.get(table.name, self.statistics.get("*")))

    def sizes(self, table: Table, curve: MissCurve) -> list[int]:
        """Numbers of slots to choose from: where the curve bends most, and those that were asked for."""
        least = smallest(curve, table.num_embeddings)
        most = max(least, min(table.num_embeddings, math.ceil(curve.slots[-1])))
        inner = [s for s in curve.slots if least < s < most]
        if len(inner) > _SIZES - 2:
            # of as many sizes those that divide the misses best: as far apart in the logarithm of what is missed
            missed = np.log(np.maximum([curve.misses_at(s) for s in inner], 1e-3 * max(curve.wanted, 1e-9)))
            marks = np.linspace(missed[0], missed[-1], _SIZES - 2)
            inner = [inner[int(np.abs(missed - mark).argmin())] for mark in marks]
        asked: list[int] = []
        if table.name in self.slots:
            at = min(max(self.slots[table.name], least), most)
            bends = [s for s in curve.slots if least < s < most]
            place = bisect.bisect_left(bends, at)
            asked = [at, *(math.ceil(s) for s in bends[max(0, place - _NEAR) : place + _NEAR])]
        return sorted({least, *(math.ceil(s) for s in inner), most, *asked})


def curve_of(table: Table, ids: float, curves: Mapping[str, MissCurve], statistics: Any = None) -> MissCurve:
    """The curve of a table: what is given by its name, else of its cache statistics, else by how its ids are drawn."""
    if table.name in curves:
        return curves[table.name]
    if statistics is not None:
        return MissCurve.of_statistics(statistics, table.num_embeddings)
    return _curve_of_skew(table.num_embeddings, ids, table.skew)


# of every way the same
_curve_of_skew = lru_cache(maxsize=4096)(MissCurve.of_skew)


def caches_to(caches: Caches, used: Mapping[str, MissCurve]) -> dict[str, Any]:
    """What a plan's file says of caches, with the curves that were used."""
    return {
        "curves": {name: asdict(curve) for name, curve in used.items()},
        "links": asdict(caches.links),
        "slots": dict(caches.slots),
    }


def caches_from(plain: Mapping[str, Any]) -> Caches:
    """What `caches_to` made.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    curves = {}
    for name, plain_curve in plain["curves"].items():
        slots, misses, saves = (tuple(float(n) for n in plain_curve[part]) for part in ("slots", "misses", "saves"))
        curves[name] = MissCurve(slots, misses, saves, float(plain_curve["wanted"]), str(plain_curve["source"]))
    sizes = {name: int(count) for name, count in plain["slots"].items()}
    return Caches(curves, links=Links(**plain["links"]), slots=sizes)
