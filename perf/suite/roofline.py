"""The figures of the page: bytes against time with the line of a copy, and ratios to peers. All measures are pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shardwise.perf.suite.report import duration, size, times

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

    shapes = []
    for decade in range(left, right + 1):
        at = x(10.0**decade)
        shapes.append(f'<path class="grid" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        shapes.append(f'<text class="mid" x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}">{size(10.0**decade)}</text>')
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        shapes.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        shapes.append(f'<text class="end" x="{LEFT - 8}" y="{at + 4:.1f}">{duration(10.0**decade)}</text>')
    shapes.append(
        f'<path class="bound" d="M{x(10.0**left):.1f} {y(line[0]):.1f}L{x(10.0**right):.1f} {y(line[1]):.1f}">'
        f"<title>a copy: {copy_gb_s:.4g} GB/s</title></path>"
    )
    for point in points:
        share = 100 * point.bytes_moved / point.seconds / 1e9 / copy_gb_s
        moved = f"{size(point.bytes_moved)} in {duration(point.seconds)}, {share:.0f} % of copy"
        told = f"{point.group}: {point.name}\n{moved}"
        shapes.append(
            f'<circle class="b {colour(groups, point.group)}" cx="{x(point.bytes_moved):.1f}"'
            f' cy="{y(point.seconds):.1f}" r="5"><title>{escape(told)}</title></circle>'
        )
    shapes.append(f'<text class="mid" x="{WIDTH / 2}" y="{HEIGHT - 6}">bytes that a call declares</text>')
    return _svg(WIDTH, HEIGHT, title, shapes)


def bars(found: Sequence[Bar], peers: Sequence[str], title: str) -> str:
    """Ratios to peers, logarithmic: to the left of the line ours takes less time."""
    names = list(dict.fromkeys(bar.case for bar in found))
    least = min(-0.5, *(math.log10(bar.first) for bar in found))
    most = max(0.5, *(math.log10(bar.third) for bar in found))

    def x(ratio: float) -> float:
        return NAMES + (math.log10(ratio) - least) / (most - least) * (WIDTH - NAMES - 60)

    shapes, top = [], TOP + 14
    for case in names:
        mine = [bar for bar in found if bar.case == case]
        middle = top + BAR * len(mine) / 2 + 4
        shapes.append(f'<text class="end" x="{NAMES - 12}" y="{middle:.1f}">{escape(_cut(case))}</text>')
        for bar in mine:
            begin, end = sorted((x(1.0), x(bar.middle)))
            told = f"{case}\n{times(bar.middle)} of {bar.peer}'s time (quartiles {bar.first:.3g} to {bar.third:.3g})"
            shapes.append(
                f'<rect class="b {colour(peers, bar.peer)}" x="{begin:.1f}" y="{top:.1f}"'
                f' width="{max(end - begin, 1):.1f}" height="{BAR - 1}"><title>{escape(told)}</title></rect>'
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
    return _svg(WIDTH, top + 4, title, [*axis, *shapes])


def _cut(name: str) -> str:
    return name if len(name) <= 62 else f"{name[:60]}..."


def _svg(wide: float, high: float, title: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {wide:.0f} {high:.0f}" width="{wide:.0f}" height="{high:.0f}">'
        f"<title>{escape(title)}</title>{''.join(shapes)}</svg>"
    )
