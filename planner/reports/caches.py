"""What a simulation of caches found, as one page of HTML: what each cache did, and curves of hits by slots.

The numbers come from `shardwise cache simulate` and are only shown here. The page has no scripts and fetches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from ..plan.explanation import counted, ms, size
from .figures import short
from .style import document, numbers, soft, style_sheet

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 520, 220, 46, 18, 12, 38
# lines of a figure: class, what it is
_LINES = {"lru": "LRU", "best": "Belady, which no cache beats", "estimate": "Che's approximation of LRU"}


@dataclass(frozen=True)
class HitCurve:
    """Hit rates, from 0 to 1, of caches of these slots; an empty list was not asked for."""

    slots: Sequence[int]
    lru: Sequence[float] = ()
    best: Sequence[float] = ()
    estimate: Sequence[float] = ()


@dataclass(frozen=True)
class CacheRun:
    """What the cache of a shard did. Rows are those of the counted batches.

    Args:
        table: name; `rows` of it in the shard, [begin, end) of the table, and `cols` columns.
        ranks: those that hold this range of rows, each with its columns.
        record_bytes: of a row with its states, of one rank's columns.
        slots: rows on the device in the end; `grown` tells how often they became more.
        wanted, hits, misses, fresh, saves: rows; `fresh` are misses of rows that never came before.
        stalls: prefetches that had no room.
        bytes_moved: up and down, misses and saves.
        prefetch_ms: of a step, mean and most.
        lru_hits, best_hits: of a cache of as many slots by LRU (of ties the batch's first row goes) and by Belady's
            rule; None where a batch alone had more rows than slots at first.
    """

    table: str
    begin: int
    end: int
    cols: int
    ranks: tuple[int, ...]
    record_bytes: int
    slots: int
    grown: int
    wanted: int
    hits: int
    misses: int
    fresh: int
    saves: int
    stalls: int
    bytes_moved: int
    prefetch_ms: tuple[float, float]
    lru_hits: int | None
    best_hits: int | None
    curve: HitCurve

    @property
    def hit_rate(self) -> float:
        """Of the rows that were wanted; 1 where none were."""
        return self.hits / self.wanted if self.wanted else 1.0

    @property
    def regret(self) -> float | None:
        """The share of wanted rows that missed and that Belady's rule would have had."""
        return None if self.best_hits is None else (self.best_hits - self.hits) / max(1, self.wanted)

    @property
    def name(self) -> str:
        """The table, and which rows of it where it is cut."""
        return self.table if len(self.ranks) < 2 and not self.begin else f"{self.table} [{self.begin:,}, {self.end:,})"


@dataclass(frozen=True)
class RankTime:
    """A step of a rank, milliseconds: means over the counted batches.

    Args:
        rest_ms: of the step beside bringing rows, by the plan; None without one.
        prefetch_ms: to bring all its tables' rows.
        step_ms: the step; with a prefetch the longer of both, else their sum; None without a plan.
        late: batches whose rows took longer than the rest of a step.
    """

    rank: int
    rest_ms: float | None
    prefetch_ms: float
    step_ms: float | None
    late: int


@dataclass(frozen=True)
class CacheReport:
    """All of a simulation: counted `batches`, after `skipped` ones; `settings` in words."""

    batches: int
    skipped: int
    runs: tuple[CacheRun, ...]
    ranks: tuple[RankTime, ...]
    settings: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data that json can write; keys stay as they are."""
        runs = [
            {**asdict(run), "hit_rate": run.hit_rate, "regret": run.regret, "prefetch_ms": run.prefetch_ms[0],
             "most_prefetch_ms": run.prefetch_ms[1]}
            for run in self.runs
        ]  # fmt: skip
        return {
            "batches": self.batches, "skipped": self.skipped, "tables": runs,
            "ranks": [asdict(rank) for rank in self.ranks], "settings": dict(self.settings),
        }  # fmt: skip


def cache_page(report: CacheReport) -> str:
    """The page, the same bytes for the same report."""
    title = f"Caches: {counted(len(report.runs), 'shard')} over {counted(report.batches, 'batch')}"
    body = [
        f"<h1>{escape(title)}</h1>",
        *_summary(report),
        *_table(report),
        *_ranks(report),
        *_curves(report),
        "<h2>How this was made</h2>",
        f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in report.settings.items())}</dl>",
    ]
    return document(title, style_sheet() + _STYLE, body)


def percent(value: float | None) -> str:
    """A share as people read it; nothing of None."""
    return "" if value is None else f"{100 * value:.1f}%"


def _summary(report: CacheReport) -> list[str]:
    wanted, hits = (sum(getattr(run, what) for run in report.runs) for what in ("wanted", "hits"))
    moved = sum(run.bytes_moved * len(run.ranks) for run in report.runs)
    facts = [
        (percent(hits / wanted if wanted else 1.0), "of wanted rows were on the device"),
        (size(moved / max(1, report.batches)), "moved in a step, up and down, all ranks"),
    ]
    known = [run for run in report.runs if run.best_hits is not None]
    if known:
        lacking = sum((run.best_hits or 0) - run.hits for run in known) / max(1, sum(run.wanted for run in known))
        facts.append((f"{100 * lacking:.1f} points", "regret: more hits had Belady's rule with as many slots"))
    times = [rank.step_ms for rank in report.ranks if rank.step_ms is not None]
    if times:
        facts.append((f"{ms(max(times))} ms", "a step, on the slowest rank"))
    items = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in facts)
    return [f'<div class="facts">{items}</div>']


def _table(report: CacheReport) -> list[str]:
    heads = ("rows", "slots", "wanted", "hits", "misses", "saves", "stalls", "moved", "ms a step", "Belady", "regret")
    lines = [
        f'<tr><th scope="row">{escape(run.name)}</th>'
        + numbers([
            f"{run.end - run.begin:,}", f"{run.slots:,}", f"{run.wanted:,}", percent(run.hit_rate), f"{run.misses:,}",
            f"{run.saves:,}", f"{run.stalls:,}", size(run.bytes_moved), ms(run.prefetch_ms[0]),
            percent(None if run.best_hits is None else run.best_hits / max(1, run.wanted)), percent(run.regret),
        ])
        + "</tr>"
        for run in report.runs
    ]  # fmt: skip
    head = "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in heads)
    return [
        "<h2>Caches</h2>",
        soft(f"Of {counted(report.batches, 'batch')}, after {report.skipped:,} that filled the caches."),
        f'<div class="scroll"><table><thead><tr><th scope="col">table</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>",
    ]


def _ranks(report: CacheReport) -> list[str]:
    if len(report.ranks) < 2 and all(rank.step_ms is None for rank in report.ranks):
        return []
    lines = [
        f'<tr><th scope="row">rank {rank.rank}</th>'
        + numbers([ms(v) if v is not None else "" for v in (rank.rest_ms, rank.prefetch_ms, rank.step_ms)])
        + numbers([f"{rank.late:,}"])
        + "</tr>"
        for rank in report.ranks
    ]
    heads = ("rest, ms", "prefetch, ms", "step, ms", "late batches")
    head = "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in heads)
    return [
        "<h2>Ranks</h2>",
        soft("The rest of a step is the plan's prediction; late are batches whose rows take longer to come than that."),
        f'<div class="scroll"><table><thead><tr><th scope="col"></th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>",
    ]


def _curves(report: CacheReport) -> list[str]:
    drawn = [run for run in report.runs if len(run.curve.slots) > 1]
    if not drawn:
        return []
    used = [kind for kind in _LINES if any(getattr(run.curve, kind) for run in drawn)]
    legend = "".join(
        f'<li><svg width="22" height="12" aria-hidden="true"><path class="{kind}" d="M1 6H21"/></svg>'
        f"{escape(_LINES[kind])}</li>"
        for kind in used
    )
    dot = (
        '<li><svg width="12" height="12" aria-hidden="true"><circle class="here" cx="6" cy="6" r="4.5"/></svg>'
        "the cache that was simulated</li>"
    )
    figures = "".join(
        f"<figure><figcaption><b>{escape(run.name)}</b></figcaption>{curve_figure(run)}</figure>" for run in drawn
    )
    return [
        "<h2>Hits by slots</h2>",
        f'<ul class="legend">{legend}{dot}</ul>',
        f'<div class="curves">{figures}</div>',
    ]


def curve_figure(run: CacheRun) -> str:
    """Hit rates over slots, on a logarithmic axis, as an SVG element."""
    curve = run.curve
    low, high = math.log(max(1, min(*curve.slots, run.slots))), math.log(max(2, *curve.slots, run.slots))
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BELOW

    def place(slots: float, rate: float) -> tuple[float, float]:
        return LEFT + wide * (math.log(max(1, slots)) - low) / max(high - low, 1e-9), TOP + tall * (1 - rate)

    shapes = []
    for tenth in (0, 25, 50, 75, 100):
        y = TOP + tall * (1 - tenth / 100)
        shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        shapes.append(f'<text class="end" x="{LEFT - 7}" y="{y + 4:.1f}">{tenth}%</text>')
    for power in range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1):
        x, _ = place(10.0**power, 0)
        if LEFT - 1 <= x <= WIDTH - RIGHT + 1:
            shapes.append(f'<path class="grid" d="M{x:.1f} {TOP}V{TOP + tall}"/>')
            shapes.append(f'<text class="mid" x="{x:.1f}" y="{HEIGHT - 22}">{escape(_slots(10**power))}</text>')
    shapes.append(f'<text class="mid" x="{LEFT + wide / 2:.0f}" y="{HEIGHT - 6}">slots</text>')
    for kind in _LINES:
        rates = getattr(curve, kind)
        if rates:
            points = [place(*pair) for pair in zip(curve.slots, rates, strict=True)]
            shapes.append(f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
    x, y = place(run.slots, run.hit_rate)
    says = f"{run.slots:,} slots: {percent(run.hit_rate)} hits"
    shapes.append(f'<circle class="here" cx="{x:.1f}" cy="{y:.1f}" r="4.5"><title>{escape(says)}</title></circle>')
    description = f"{run.name}: hit rates of caches from {min(curve.slots):,} to {max(curve.slots):,} slots; {says}"
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">'
        f"<title>Hits by slots</title><desc>{escape(description)}</desc>{''.join(shapes)}</svg>"
    )


def _slots(value: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{short(value / unit)}{name}"
    return short(value)


_STYLE = """
.curves{display:flex;flex-wrap:wrap;gap:8px 28px}
.lru,.best,.estimate{fill:none;stroke-width:2;stroke-linejoin:round}
.lru{stroke:var(--s-table_wise)}.best{stroke:var(--s-column_wise);stroke-dasharray:7 4}
.estimate{stroke:var(--s-row_wise);stroke-dasharray:2 4}
.here{fill:var(--mark);stroke:var(--page);stroke-width:1.5}
"""
