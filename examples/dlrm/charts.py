"""Line charts as SVG that a page of any width shows: they scale with it, and read without colours and scripts.

All measures are of the viewBox, `WIDTH` by `HEIGHT`. Colours come from the page's style sheet, by the class of a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 230, 54, 16, 18, 30
# of a line with at most so many points each is a dot
DOTTED = 40


@dataclass(frozen=True)
class Line:
    """Points (x, y) in the order of x, a class of the style sheet, and a name."""

    name: str
    look: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axes:
    """What a chart shows besides its lines.

    Args:
        title: for those who do not see it.
        say: a value in words.
        level: a value that is drawn across, and what it is.
        best: the point of the best epoch.
        zero: whether the axis begins at 0.
    """

    title: str
    say: Callable[[float], str]
    level: tuple[float, str] | None = None
    best: tuple[float, float] | None = None
    zero: bool = False


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round values, at most so many, the first at or below `low` and the last at or above `high`."""
    rough = max(high - low, 1e-12) / (most - 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    for step in (unit, 2 * unit, 2.5 * unit, 5 * unit, 10 * unit, 20 * unit):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def draw(lines: Sequence[Line], axes: Axes) -> str:
    """The chart as an SVG element; without a point, nothing but its axes."""
    points = [point for line in lines for point in line.points if math.isfinite(point[1])]
    values = [y for _, y in points] + ([axes.level[0]] if axes.level is not None else []) + ([0.0] if axes.zero else [])
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high == low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    marks = ticks(low, high)
    last_x = max([x for x, _ in points], default=1.0) or 1.0
    base = HEIGHT - BOTTOM

    def x_of(x: float) -> float:
        return LEFT + x / last_x * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return base - (y - marks[0]) / (marks[-1] - marks[0]) * (base - TOP)

    shapes = [
        f'<path class="grid" d="M{LEFT} {y_of(mark):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="end" x="{LEFT - 7}" y="{y_of(mark) + 4:.1f}">{escape(axes.say(mark))}</text>'
        for mark in marks
    ]
    steps = [mark for mark in ticks(0.0, last_x) if mark <= last_x * 1.001]
    shapes += [f'<text class="mid" x="{x_of(mark):.1f}" y="{base + 16}">{mark:,.0f}</text>' for mark in steps]
    shapes.append(f'<text class="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 3}">steps</text>')
    if axes.level is not None:
        y = y_of(axes.level[0])
        shapes.append(f'<path class="level" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        shapes.append(f'<text class="end strong" x="{WIDTH - RIGHT}" y="{y - 5:.1f}">{escape(axes.level[1])}</text>')
    for line in lines:
        shapes.append(_line(line, x_of, y_of, axes))
    if axes.best is not None and math.isfinite(axes.best[1]):
        x, y = x_of(axes.best[0]), y_of(axes.best[1])
        # the last point has no room to its right
        end = x > WIDTH - RIGHT - 60
        look, beside = ("strong end", x - 9) if end else ("strong", x + 9)
        shapes.append(f'<circle class="best" cx="{x:.1f}" cy="{y:.1f}" r="6.5"/>')
        shapes.append(f'<text class="{look}" x="{beside:.1f}" y="{_beside(y)}">best</text>')
    return (
        f'<svg class="lines" role="img" viewBox="0 0 {WIDTH} {HEIGHT}"><title>{escape(axes.title)}</title>'
        f"{''.join(shapes)}</svg>"
    )


def _beside(y: float) -> str:
    """Where the text of a point stands: below it where there is room, else above."""
    return f"{y + 19:.1f}" if y < HEIGHT - BOTTOM - 30 else f"{y - 9:.1f}"


def _line(line: Line, x_of: Callable[[float], float], y_of: Callable[[float], float], axes: Axes) -> str:
    at = [(x_of(x), y_of(y), x, y) for x, y in line.points if math.isfinite(y)]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in at)
    shape = f'<path class="line-of {line.look}" d="M{path}"/>' if len(at) > 1 else ""
    # dots of a long line are there to be hovered alone
    dot = f"dot {line.look}" if len(at) <= DOTTED else "hover"
    return shape + "".join(
        f'<circle class="{dot}" cx="{x:.1f}" cy="{y:.1f}" r="{3 if len(at) <= DOTTED else 5}"><title>'
        f"{escape(f'{line.name}: {axes.say(value)}, step {step:,.0f}')}</title></circle>"
        for x, y, step, value in at
    )
