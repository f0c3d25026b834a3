"""Measurements as one page of HTML: the table, bytes against time with the line of a copy, ratios to peers.

The page has no scripts and fetches nothing; hovering a point or a bar tells what it is. All measures are pixels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from shardwise.perf.suite import record
from shardwise.perf.suite.case import PEERS
from shardwise.perf.suite.report import (
    columns,
    duration,
    heading,
    remarks,
    rows,
    size,
    times,
)
from shardwise.perf.suite.storage import Stored
from shardwise.planner.reports.style import PAGE, document, soft

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 420, 70, 24, 14, 44
# of the chart of ratios: a bar, the gap between cases, the column of names
BAR, GAP, NAMES = 11, 7, 400
# class of a colour -> (light, dark), in the order in which groups take them
COLOURS = {
    "c0": ("#4a7fb5", "#6ba0d6"), "c1": ("#d98b3a", "#e0a15a"), "c2": ("#4f9b77", "#69b892"),
    "c3": ("#8f77b5", "#ab94d1"), "c4": ("#c0697f", "#d88aa0"), "c5": ("#8b7a5e", "#b09d7e"),
    "c6": ("#5f9ea0", "#7fbdbf"), "c7": ("#a9a13a", "#c9c15f"), "c8": ("#8a929c", "#9aa3ae"),
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A case in the roofline plot."""

    name: str
    group: str
    bytes_moved: float
    seconds: float


@dataclass(frozen=True)
class Bar:
    """Ours over a peer's time for one case: quartiles."""

    case: str
    peer: str
    first: float
    middle: float
    third: float


def colour(places: Sequence[str], name: str) -> str:
    """The class of one of some names."""
    return f"c{list(places).index(name) % len(COLOURS)}"


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def roofline(points: Sequence[Point], copy_gb_s: float, groups: Sequence[str], title: str) -> str:
    """Declared bytes (x) against time (y), both logarithmic: nothing that moves its bytes once is below the line."""
    left, right = _decades([point.bytes_moved for point in points])
    line = [10.0**decade / copy_gb_s / 1e9 for decade in (left, right)]
    low, high = _decades([*(point.seconds for point in points), *line])

    def x(nbytes: float) -> float:
        return LEFT + (math.log10(nbytes) - left) / (right - left) * (WIDTH - LEFT - RIGHT)

    def y(seconds: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(seconds) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    shapes = [
        *(
            f'<path class="grid" d="M{x(10.0**decade):.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
            f'<text class="mid" x="{x(10.0**decade):.1f}" y="{HEIGHT - BOTTOM + 18}">{size(10.0**decade)}</text>'
            for decade in range(left, right + 1)
        ),
        *(
            f'<path class="grid" d="M{LEFT} {y(10.0**decade):.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="end" x="{LEFT - 8}" y="{y(10.0**decade) + 4:.1f}">{duration(10.0**decade)}</text>'
            for decade in range(low, high + 1)
        ),
        f'<path class="bound" d="M{x(10.0**left):.1f} {y(line[0]):.1f}L{x(10.0**right):.1f} {y(line[1]):.1f}">'
        f"<title>a copy: {copy_gb_s:.4g} GB/s</title></path>",
    ]
    for point in points:
        share = 100 * point.bytes_moved / point.seconds / 1e9 / copy_gb_s
        moved = f"{size(point.bytes_moved)} in {duration(point.seconds)}, {share:.0f} % of copy"
        tooltip = f"{point.group}: {point.name}\n{moved}"
        shapes.append(
            f'<circle class="b {colour(groups, point.group)}" cx="{x(point.bytes_moved):.1f}"'
            f' cy="{y(point.seconds):.1f}" r="5"><title>{escape(tooltip)}</title></circle>'
        )
    shapes.append(f'<text class="mid" x="{WIDTH / 2}" y="{HEIGHT - 6}">bytes that a call declares</text>')
    return svg(WIDTH, HEIGHT, title, shapes)


def bars(all_bars: Sequence[Bar], peers: Sequence[str], title: str) -> str:
    """Ratios to peers, logarithmic: to the left of the line ours takes less time."""
    names = list(dict.fromkeys(bar.case for bar in all_bars))
    least = min(-0.5, *(math.log10(bar.first) for bar in all_bars))
    most = max(0.5, *(math.log10(bar.third) for bar in all_bars))

    def x(ratio: float) -> float:
        return NAMES + (math.log10(ratio) - least) / (most - least) * (WIDTH - NAMES - 60)

    shapes, top = [], TOP + 14
    for case in names:
        bars_of_case = [bar for bar in all_bars if bar.case == case]
        middle = top + BAR * len(bars_of_case) / 2 + 4
        shapes.append(f'<text class="end" x="{NAMES - 12}" y="{middle:.1f}">{escape(_cut(case))}</text>')
        for bar in bars_of_case:
            begin, end = sorted((x(1.0), x(bar.middle)))
            tooltip = f"{case}\n{times(bar.middle)} of {bar.peer}'s time (quartiles {bar.first:.3g} to {bar.third:.3g})"
            shapes.append(
                f'<rect class="b {colour(peers, bar.peer)}" x="{begin:.1f}" y="{top:.1f}"'
                f' width="{max(end - begin, 1):.1f}" height="{BAR - 1}"><title>{escape(tooltip)}</title></rect>'
                f'<path class="whisker" d="M{x(bar.first):.1f} {top + BAR / 2:.1f}H{x(bar.third):.1f}"/>'
                f'<text x="{max(end, x(bar.third)) + 4:.1f}" y="{top + BAR - 1:.1f}">{times(bar.middle)}</text>'
            )
            top += BAR
        top += GAP
    ticks = [
        ratio for ratio in (0.001, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 1000) if least <= math.log10(ratio) <= most
    ]
    axis = [
        f'<path class="{"bound" if ratio == 1 else "grid"}" d="M{x(ratio):.1f} {TOP + 8}V{top}"/>'
        f'<text class="mid" x="{x(ratio):.1f}" y="{TOP + 4}">{ratio:g}x</text>'
        for ratio in ticks
    ]
    return svg(WIDTH, top + 4, title, [*axis, *shapes])


def _cut(name: str) -> str:
    return name if len(name) <= 62 else f"{name[:60]}..."


def svg(wide: float, high: float, title: str, shapes: Sequence[str]) -> str:
    """A chart of these shapes."""
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" height="{high:.0f}">'
        f"<title>{escape(title)}</title>{''.join(shapes)}</svg>"
    )


MORE = """
body{max-width:1180px}.whisker{stroke:var(--ink);stroke-width:1.2;fill:none}
.chip{display:inline-block;width:11px;height:11px;border-radius:2px}
td.bad{color:var(--mark);font-weight:600}tbody tr:hover td{background:var(--well)}
"""


def page(stored: Sequence[Stored]) -> str:
    """The page, the same bytes for the same files."""
    title = "shardwise: measured" if len(stored) == 1 else f"shardwise: {len(stored)} runs"
    body = [f"<h1>{escape(title)}</h1>"]
    for place, run in enumerate(stored, 1):
        label = "" if len(stored) == 1 else f"[{place}] {run.path}: "
        body.append(soft(f"{label}{heading(run)}"))
        body += [f'<p class="soft">{escape(remark)}</p>' for remark in remarks(run)]
    groups = list(dict.fromkeys(row.group for row in rows(stored) if row.group))
    for run in stored:
        body += _figures(run, groups)
    body += ["<h2>Cases</h2>", *_table(stored), *_versions(stored)]
    return document(title, style_sheet(), body)


def style_sheet() -> str:
    """The CSS of a page of measurements."""
    light, dark = ("".join(f"--{name}:{both[dim]};" for name, both in COLOURS.items()) for dim in (0, 1))
    fills = "".join(f".{name}{{fill:var(--{name});background:var(--{name})}}" for name in COLOURS)
    return PAGE.replace("LIGHT", light).replace("DARK", dark) + MORE + fills


def _figures(run: Stored, groups: Sequence[str]) -> Iterator[str]:
    where = f"{run.machine.get('device_name')} ({run.machine.get('device')})"
    records = [each for each in record.split(run.measured.records) if each.unit == "s"]
    points = [
        Point(each.name, each.group, each.bytes_moved, record.best_median(each))
        for each in records
        if each.bytes_moved and record.copy_gb_s(each)
    ]
    copies = [copy for each in records if (copy := record.copy_gb_s(each))]
    if points:
        copy = statistics.median(copies)
        yield f"<h2>Bytes and time on {escape(where)}</h2>"
        yield soft(
            f"The dashed line is a copy, measured in the same run: {copy:.4g} GB/s of reads and writes. Nothing that"
            " moves its bytes through memory is below it; what lies in a cache can be."
        )
        yield _figure(roofline(points, copy, groups, f"Bytes against time on {where}"), groups)
    ratio_bars = [
        Bar(each.name, peer, *quartiles)
        for each in records
        for peer in record.peers(each)
        if (quartiles := record.ratio(each, peer))
    ]
    peers = [peer for peer in PEERS if any(bar.peer == peer for bar in ratio_bars)]
    if ratio_bars:
        yield f"<h2>Time over that of peers on {escape(where)}</h2>"
        yield soft(
            "Medians of the ratios within a round; thin lines reach from quartile to quartile. Below 1x ours is faster."
        )
        yield _figure(bars(ratio_bars, peers, f"Ratios to peers on {where}"), peers)


def _figure(chart: str, names: Sequence[str]) -> str:
    items = "".join(f'<li><span class="chip {colour(names, name)}"></span>{escape(name)}</li>' for name in names)
    scrolled = f'<div class="scroll" tabindex="0">{chart}</div>'
    return f'<figure>{scrolled}<figcaption><ul class="legend">{items}</ul></figcaption></figure>'


def _table(stored: Sequence[Stored]) -> Iterator[str]:
    names = columns(stored)
    heads = "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in names)
    yield f'<div class="scroll"><table><thead><tr><th>group</th><th scope="col">case</th>{heads}</tr></thead><tbody>'
    for row in rows(stored):
        cells = [row.cells.get(name, "") for name in names]
        cells_html = "".join(
            f'<td class="n{" bad" if cell in ("failed", "not run") else ""}">{escape(cell)}</td>' for cell in cells
        )
        yield f'<tr><td>{escape(row.group)}</td><th scope="row">{escape(row.name)}</th>{cells_html}</tr>'
    yield "</tbody></table></div>"


def _versions(stored: Sequence[Stored]) -> Iterator[str]:
    yield "<h2>Versions</h2>"
    names = list(dict.fromkeys(name for run in stored for name in run.machine.get("versions", {})))
    heads = "".join(f"<th>{escape(run.path)}</th>" for run in stored)
    lines = [
        (name, [str(run.machine.get("versions", {}).get(name) or "not installed") for run in stored]) for name in names
    ]
    lines += [(key, [str(run.machine.get(key, "")) for run in stored]) for key in ("device_name", "threads", "cores")]
    lines += [(key, [str(run.about.get(key, "")) for run in stored]) for key in ("commit", "dirty", "datetime", "load")]
    rows_html = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for name, cells in lines
    )
    yield f'<div class="scroll"><table class="ways"><thead><tr><th></th>{heads}</tr></thead>'
    yield f"<tbody>{rows_html}</tbody></table></div>"
