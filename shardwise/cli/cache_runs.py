"""What `shardwise cache` runs: loaders recorded, and traces simulated by the shards of a plan, batch by batch.

A trace is read once, whatever its length: each range of rows has one cache that is simulated and one set of curves.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._names import did_you_mean
from .factory import factory_named, failed

if TYPE_CHECKING:
    from ..data import LookedUp, Trace, TracedTable
    from ..embeddings.tiers.curves import TraceCurves
    from ..embeddings.tiers.simulate import Simulation
    from ..planner.cost.cache import Links, MissCurve
    from ..planner.layout import Shard
    from ..planner.plan.planned import Planned
    from ..planner.reports.caches import CacheReport, CacheRun, HitCurve, RankTime
    from ..planner.tables import Table

# sizes of caches whose misses a plan knows
_POINTS = 128
# sizes of caches that a curve shows; Belady's rule takes time with the square of the batches, so fewer of long traces
_SIZES, _FEW_SIZES, _LONG = 40, 8, 4000


@dataclass(frozen=True)
class Asked:
    """How caches are simulated; slots by table, "*" for all others, a number of rows or as a float a share of them."""

    slots: Mapping[str, int | float] = field(default_factory=dict)
    policy: str | None = None
    half_life: int | None = None
    ahead: int = 0
    prefetch: int = 1
    skip: int = 0
    only: tuple[str, ...] = ()
    curves: bool = True


@dataclass(frozen=True)
class Placed:
    """A table's shards, with what a plan says of its cache."""

    shards: tuple[Shard, ...]
    slots: int | float | None = None
    max_slots: int | float | None = None
    policy: str | None = None
    half_life: int | None = None
    on_disk: bool = False


# ---- recording


def batches_of(loader: str) -> Iterable[Any]:
    """What the function that --loader names gives.

    Raises:
        ValueError: there is no such function, it fails, or what it gives cannot be iterated.
    """
    with redirect_stdout(sys.stderr):
        function = factory_named(loader, "--loader")
        try:
            given = function()
        except (Exception, SystemExit) as error:
            raise failed(loader, error, "--loader") from error
    if not hasattr(given, "__iter__"):
        raise ValueError(
            f"--loader {loader} returned {type(given).__name__}: it must return batches, one after another"
        )
    return given  # type: ignore[no-any-return]


def guarded(batches: Iterable[Any], loader: str, tell: Callable[[int], None]) -> Iterator[Any]:
    """The batches, whose loader's own errors are told as such; `tell` hears how many there were."""
    iterator = iter(batches)
    for count in itertools.count(1):
        try:
            # what a user's loader prints is no part of the output
            with redirect_stdout(sys.stderr):
                batch = next(iterator)
        except StopIteration:
            return
        except (Exception, SystemExit) as error:
            raise failed(loader, error, "--loader") from error
        tell(count)
        yield batch


def traced_tables(tables: Sequence[Table], only: Sequence[str]) -> list[LookedUp]:
    """What a trace says of tables as the planner knows them.

    Raises:
        ValueError: `only` names a table that is not there.
    """
    from ..data import LookedUp, TracedTable
    from ..planner.cost.cache import record_bytes

    _require_known(only, [table.name for table in tables], "--table")
    return [
        LookedUp(
            TracedTable(
                table.name, table.num_embeddings, table.embedding_dim, table.data_type.value,
                record_bytes(table, table.embedding_dim),
            ),
            tuple(feature.name for feature in table.features),
        )
        for table in tables
        if not only or table.name in only
    ]  # fmt: skip


def _require_known(names: Iterable[str], known: Sequence[str], option: str) -> None:
    for name in names:
        if name not in known:
            near = did_you_mean(name, known) or f": there are {', '.join(known[:12])}"
            raise ValueError(f"{option} names {name!r}, which is no table here{near}")


# ---- plans


def placed_by(data: Mapping[str, Any], where: str) -> dict[str, Placed]:
    """The shards of each table of a plan's file, and its tier.

    Raises:
        ValueError: two modules have a table of one name, or a shard is none.
    """
    from ..planner.layout import Shard

    placed: dict[str, Placed] = {}
    for of_module in data["plan"].values():
        for name, entry in of_module.items():
            if name in placed:
                raise ValueError(f"{where}: two modules have a table {name!r}, and a trace knows one")
            try:
                shards = tuple(
                    Shard(name, rank, (s["shard_offsets"][0], s["shard_offsets"][0] + s["shard_sizes"][0]),
                          (s["shard_offsets"][1], s["shard_offsets"][1] + s["shard_sizes"][1]))
                    for rank, s in zip(entry["ranks"], entry["shards"], strict=False)
                )  # fmt: skip
                tier = entry.get("tier") or {}
                placed[name] = Placed(
                    shards, tier.get("slots"), tier.get("max_slots"), tier.get("policy"), tier.get("half_life"),
                    tier.get("below") == "file",
                )  # fmt: skip
            except (KeyError, TypeError, IndexError) as error:
                raise ValueError(f"{where}: table {name!r} has no shards that can be read: {error!r}") from error
    return placed


def rest_of(planned: Planned | None) -> list[float] | None:
    """Milliseconds of each rank's step beside bringing rows, as the plan predicts them."""
    if planned is None:
        return None
    from ..planner.search.problem import PARTS

    parts = planned.loads.parts_ms
    rest: list[float] = (parts.sum(axis=0) - parts[PARTS.index("prefetch")]).tolist()
    return rest


# ---- simulation


@dataclass
class _Range:
    """Rows [begin, end) of a table on some ranks, the cache that is simulated and the curves."""

    table: TracedTable
    begin: int
    end: int
    shards: list[Shard]
    on_disk: bool
    simulation: Simulation
    curves: TraceCurves | None

    @property
    def record_bytes(self) -> int:
        """Of a row of the widest shard; column shards have a part of its bytes, but for padding."""
        whole, cols = self.table.record_bytes or 4 * self.table.dim, max(s.cols[1] - s.cols[0] for s in self.shards)
        return whole if cols == self.table.dim else -(-whole * cols // self.table.dim // 64) * 64


def simulate_trace(
    trace: Trace,
    asked: Asked,
    *,
    links: Links,
    placed: Mapping[str, Placed] | None = None,
    rest_ms: Sequence[float] | None = None,
    settings: Mapping[str, str] | None = None,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> CacheReport:
    """Run the caches of all tables over a trace.

    Args:
        placed: shards and tiers by table, from a plan; without it every table is whole on rank 0.
        rest_ms: of each rank's step, beside bringing rows.
        settings: what else is said of how it was made.
        tell: hears how many batches are done.

    Raises:
        ValueError: a table is not there; caches that are skipped over have no counted batches; a trace is damaged.
    """
    from ..planner.reports.caches import CacheReport

    names = [table.name for table in trace.tables]
    _require_known(asked.only, names, "--table")
    _require_known((name for name in asked.slots if name != "*"), names, "--slots")
    if asked.skip >= max(1, trace.batches):
        raise ValueError(f"--skip {asked.skip} leaves none of the {trace.batches} batches of {trace.path}")
    ranges = [r for t in trace.tables if not asked.only or t.name in asked.only for r in _ranges(t, asked, placed)]
    if not ranges:
        raise ValueError(f"{trace.path}: none of its tables {', '.join(names)} is in the plan")
    from ..embeddings.tiers.simulate import rows_of_shard

    for number, batch in enumerate(trace):
        for each in ranges:
            rows = rows_of_shard(batch.rows[each.table.name], each.begin, each.end)
            each.simulation.add(rows)
            if each.curves is not None:
                each.curves.add(rows)
        tell(number + 1, trace.batches)
    runs = [_run(each, asked, links) for each in ranges]
    ranks = _ranks(ranges, runs, asked, links, rest_ms)
    return CacheReport(trace.batches - asked.skip, asked.skip, tuple(runs), ranks, dict(settings or {}))


def _ranges(table: TracedTable, asked: Asked, placed: Mapping[str, Placed] | None) -> list[_Range]:
    """The ranges of rows of a table that have caches of their own."""
    from ..embeddings.tiers.curves import TraceCurves
    from ..embeddings.tiers.simulate import CacheSetting, Simulation
    from ..planner.layout import Shard

    if placed is not None and table.name not in placed:
        return []
    whole = Placed((Shard(table.name, 0, (0, table.rows), (0, table.dim)),))
    of_plan = whole if placed is None else placed[table.name]
    if not of_plan.shards:
        # replicas: one stands for all
        of_plan = replace(of_plan, shards=whole.shards)
    given = asked.slots.get(table.name, asked.slots.get("*", of_plan.slots))
    ranges: dict[tuple[int, int], list[Shard]] = {}
    for shard in of_plan.shards:
        if shard.rows[0] < shard.rows[1]:
            ranges.setdefault(shard.rows, []).append(shard)
    found = []
    for (begin, end), shards in sorted(ranges.items()):
        if end > table.rows:
            raise ValueError(f"table {table.name!r}: the plan has rows up to {end:,}, the trace's table {table.rows:,}")
        rows = end - begin
        slots = _slots_of(0.1 if given is None else given, rows, rows / table.rows)
        setting = CacheSetting(
            rows, slots, rows, asked.policy or of_plan.policy or "aged_lfu",
            asked.half_life or of_plan.half_life or 64, asked.ahead, asked.prefetch, of_plan.max_slots is None,
        )  # fmt: skip
        curves = TraceCurves(rows, asked.skip) if asked.curves else None
        found.append(_Range(table, begin, end, shards, of_plan.on_disk, Simulation(setting), curves))
    return found


def _run(each: _Range, asked: Asked, links: Links) -> CacheRun:
    """What came of one cache."""
    from ..planner.reports.caches import CacheRun

    done = each.simulation.finish()
    counted = done.after(asked.skip)
    batches = max(1, len(counted.by_batch))
    record = each.record_bytes
    times = _times(counted.by_batch, record, each.on_disk, links)
    curve, lru, best = _curve(each, done.slots)
    return CacheRun(
        each.table.name, each.begin, each.end, max(s.cols[1] - s.cols[0] for s in each.shards),
        tuple(shard.rank for shard in each.shards), record, done.slots, done.grown, counted.wanted, counted.hits,
        counted.misses, done.fresh, counted.saves, done.stalls, (counted.misses + counted.saves) * record,
        (sum(times) / batches, max(times, default=0.0)), lru, best, curve,
    )  # fmt: skip


def _times(batches: Iterable[tuple[int, int, int]], record: int, on_disk: bool, links: Links) -> list[float]:
    """Milliseconds to bring the rows of each batch, of which there are wanted, missed and saved ones."""
    moved = [(max(missed, saved), wanted) for wanted, missed, saved in batches]
    return [links.prefetch_ms(rows, wanted, record, from_disk=rows * on_disk) for rows, wanted in moved]


def _curve(each: _Range, slots: int) -> tuple[HitCurve, int | None, int | None]:
    """Hit rates by slots, and the hits of LRU and of Belady's rule with as many slots as the cache has."""
    from ..embeddings.tiers.curves import sizes_between
    from ..planner.reports.caches import HitCurve

    curves = each.curves
    if curves is None or not curves.largest:
        return HitCurve(()), None, None
    sizes = sizes_between(curves.largest, max(curves.largest, curves.wanted), _SIZES)
    few = sizes if curves.batches <= _LONG else sizes_between(sizes[0], sizes[-1], _FEW_SIZES)
    # the cache's own size, where it holds all batches
    own = [slots] * (slots >= curves.largest)
    lru, best = curves.lru([*few, *own]).hits.tolist(), curves.belady([*few, *own]).hits.tolist()
    total = max(1, curves.counted)
    rates = [[hits / total for hits in found[: len(few)]] for found in (lru, best)]
    return HitCurve(few, *rates), lru[-1] if own else None, best[-1] if own else None


def _ranks(
    ranges: Sequence[_Range], runs: Sequence[CacheRun], asked: Asked, links: Links, rest_ms: Sequence[float] | None
) -> tuple[RankTime, ...]:
    """A step of every rank that has a shard, from what each batch moved."""
    from ..planner.reports.caches import RankTime

    by_rank: dict[int, list[float]] = {}
    for each, run in zip(ranges, runs, strict=True):
        moved = each.simulation.counts.by_batch[asked.skip :]
        times = _times(moved, run.record_bytes, each.on_disk, links)
        for rank in run.ranks:
            before = by_rank.get(rank, [0.0] * len(times))
            by_rank[rank] = [a + b for a, b in zip(before, times, strict=True)]
    found = []
    for rank, times in sorted(by_rank.items()):
        mean = sum(times) / max(1, len(times))
        rest = None if rest_ms is None or rank >= len(rest_ms) else rest_ms[rank]
        if rest is None:
            found.append(RankTime(rank, None, mean, None, 0))
            continue
        steps = [max(rest, time) if asked.prefetch else rest + time for time in times]
        late = sum(time > rest for time in times)
        found.append(RankTime(rank, rest, mean, sum(steps) / max(1, len(steps)), late))
    return tuple(found)


def curves_of_trace(path: Path, names: Sequence[str]) -> dict[str, MissCurve]:
    """LRU's misses of the tables of a trace, of its second half: the first fills the caches.

    Raises:
        ValueError: the trace has none of the tables, or is none.
    """
    from ..data import Trace
    from ..embeddings.tiers import TraceCurves, sizes_between
    from ..planner.cost.cache import MissCurve

    trace = Trace(path)
    found = [table for table in trace.tables if table.name in names]
    if not found:
        there = ", ".join(table.name for table in trace.tables)
        raise ValueError(f"{path}: of its tables {there} none has a tier in the constraints")
    first = trace.batches // 2
    gathered = {table.name: TraceCurves(table.rows, first) for table in found}
    for batch in trace:
        for name, curves in gathered.items():
            curves.add(batch.rows[name])
    made = {}
    for name, curves in gathered.items():
        counts = curves.lru(sizes_between(max(1, curves.largest), max(1, curves.largest, curves.wanted), _POINTS))
        steps = max(1, trace.batches - first)
        misses, saves = ([n / steps for n in each.tolist()] for each in (counts.misses, counts.saves))
        made[name] = MissCurve.of_points(
            counts.slots.tolist(), misses, saves, curves.counted / steps, f"LRU of {path.name}"
        )  # fmt: skip
    return made


def estimate(
    tables: Sequence[Table], ids: Mapping[str, float], asked: Asked, links: Links, settings: Mapping[str, str]
) -> CacheReport:
    """What caches would do by how ids are drawn, without a trace: Che's approximation of LRU, one step.

    Args:
        ids: of each table's step, all ranks together.

    Raises:
        ValueError: a table is not there.
    """
    from ..embeddings.tiers.curves import sizes_between
    from ..planner.cost.cache import MissCurve, record_bytes
    from ..planner.reports.caches import CacheReport, CacheRun, HitCurve, RankTime

    names = [table.name for table in tables]
    _require_known((*asked.only, *(name for name in asked.slots if name != "*")), names, "--table or --slots")
    runs = []
    for table in tables:
        if asked.only and table.name not in asked.only:
            continue
        rows = table.num_embeddings
        curve = MissCurve.of_skew(rows, ids[table.name], table.skew)
        given = asked.slots.get(table.name, asked.slots.get("*", 0.1))
        slots = max(_slots_of(given, rows, 1.0), round(curve.slots[0]))
        record = record_bytes(table, table.embedding_dim)
        wanted, misses, saves = curve.wanted, curve.misses_at(slots), curve.saves_at(slots)
        sizes = sizes_between(max(1, round(curve.slots[0])), rows, _SIZES)
        time = links.prefetch_ms(max(misses, saves), wanted, record)
        runs.append(
            CacheRun(
                table.name,
                0,
                rows,
                table.embedding_dim,
                (0,),
                record,
                slots,
                0,
                round(wanted),
                round(wanted) - round(misses),
                round(misses),
                0,
                round(saves),
                0,
                round((misses + saves) * record),
                (time, time),
                None,
                None,
                HitCurve(sizes, estimate=[curve.hit_rate_at(s) for s in sizes]),
            )  # fmt: skip
        )
    total = sum(run.prefetch_ms[0] for run in runs)
    return CacheReport(1, 0, tuple(runs), (RankTime(0, None, total, None, 0),), settings)


def _slots_of(given: int | float, rows: int, share: float) -> int:
    """`Tier.slots` of a shard with `rows` rows, which is `share` of its table's rows."""
    wanted = math.ceil(given * rows) if isinstance(given, float) else math.ceil(given * share)
    return min(max(1, wanted), rows)


def slots_from(texts: Sequence[str]) -> dict[str, int | float]:
    """`--slots` of all tables ("10%", "20000") and of single ones ("item=5%").

    Raises:
        ValueError: one is neither.
    """
    found: dict[str, int | float] = {}
    for text in texts:
        name, _, amount = text.rpartition("=")
        amount = amount.strip()
        try:
            value: int | float = float(amount[:-1]) / 100 if amount.endswith("%") else _rows(amount)
        except ValueError:
            value = 0
        if not value > 0 or (isinstance(value, float) and value > 1):
            raise ValueError(f"--slots {text}: write 10% (of the rows), 0.1 or 20000, or TABLE=10% for one table")
        found[name or "*"] = value
    return found


def _rows(text: str) -> int | float:
    return int(text) if text.isdecimal() else float(text)


def writable_trace(path: Path) -> None:
    """Raises ValueError for a file that could not become a trace, before a loader runs for an hour."""
    if path.suffix not in (".npz", ".parquet"):
        raise ValueError(f"{path}: a trace is a file .npz or .parquet")
