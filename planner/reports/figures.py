"""The figures of the report: a column for each rank, stacked of blocks. All measures are pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ..plan.explanation import counted, ms
from ..search.problem import Floats

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 1030, 250, 46, 84, 26
# below the columns, with and without the names of hosts
HOSTS, RANKS = 38, 20
# below these a block is drawn with its like, or has no name in it
THIN, TALL_NAME, WIDE_NAME = 3.0, 13.0, 34.0
# a rank shows so many blocks, fewer where there are many ranks
BLOCKS, ALL_BLOCKS = 40, 3000
LETTER = 6.4


@dataclass(frozen=True)
class Block:
    """A part of a column: how much, its class in the style sheet, a name if it has one, and what hovering tells."""

    value: float
    look: str
    name: str
    detail: str


@dataclass(frozen=True)
class Chart:
    """A figure's frame: all it shows besides its blocks.

    Args:
        title, description: for those who do not see it.
        say: a value in words, unit included.
        axis: what an axis label says of a value.
        local_size: ranks of a host.
        bound: a value that no column can be below, drawn across.
        limits: what each column may hold.
        mark: the column that has its value above it.
        widest: what a column takes at most, where the figure need not be as wide as a page.
    """

    title: str
    description: str
    say: Callable[[float], str]
    axis: Callable[[float], str]
    local_size: int
    bound: float | None = None
    limits: Floats | None = None
    mark: int | None = None
    widest: float = math.inf


def draw(stacks: Sequence[Sequence[Block]], chart: Chart) -> str:
    """The figure as an SVG element; blocks stand in their order, the first at the bottom."""
    heights = [sum(block.value for block in stack) for stack in stacks]
    most = max([*heights, chart.bound or 0.0, 1e-12])
    if chart.limits is not None and shows_limits(max(heights), chart.limits):
        most = max(most, float(chart.limits.max()))
    step = _tick(most)
    scale = HEIGHT / (most * 1.02)
    world = len(stacks)
    pitch = min(chart.widest, max(4.0, (WIDTH - LEFT - RIGHT) / world))
    wide = LEFT + RIGHT + pitch * world
    gap = min(14.0, pitch * 0.16) if pitch > 6 else 0.6
    base = TOP + HEIGHT
    shapes, marks = [], []
    for number in range(math.floor(most * 1.02 / step) + 1):
        y = base - number * step * scale
        shapes.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{wide - RIGHT:.1f}"/>')
        shapes.append(f'<text class="end" x="{LEFT - 7}" y="{y + 4:.1f}">{chart.axis(number * step)}</text>')
    for rank, stack in enumerate(stacks):
        x, width = LEFT + rank * pitch + gap / 2, pitch - gap
        if chart.limits is not None:
            shapes.append(_limit(x, width, base, float(chart.limits[rank]) * scale, most * 1.02 * scale))
        y = base
        for block in merged(stack, THIN / scale, max(6, min(BLOCKS, ALL_BLOCKS // world)), chart.say):
            tall = block.value * scale
            y -= tall
            shapes.append(_block(block, x, y, width, tall))
        if rank == chart.mark:
            # the outermost columns have no room for a centred text beside them
            at = min(max(x + width / 2, LEFT + 30), wide - RIGHT - 30)
            marks.append(f'<text class="strong mid" x="{at:.1f}" y="{y - 6:.1f}">{chart.say(heights[rank])}</text>')
    if chart.bound is not None:
        y = base - chart.bound * scale
        shapes.append(f'<path class="bound" d="M{LEFT} {y:.1f}H{wide - RIGHT + 6:.1f}"/>')
        shapes.append(f'<text class="mark" x="{wide - RIGHT + 10:.1f}" y="{y + 1:.1f}">bound</text>')
        shapes.append(
            f'<text class="mark" x="{wide - RIGHT + 10:.1f}" y="{y + 14:.1f}">{chart.say(chart.bound)}</text>'
        )
    shapes += [*marks, *_rank_names(world, pitch, base, chart.local_size)]
    high = base + (HOSTS if chart.local_size < world else RANKS)
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {wide:.0f} {high}" width="{wide:.0f}" height="{high}">'
        f"<title>{escape(chart.title)}</title><desc>{escape(chart.description)}</desc>" + "".join(shapes) + "</svg>"
    )


def shows_limits(most: float, limits: Floats) -> bool:
    """Limits are in the picture unless the columns would be low then."""
    return most > 0.35 * float(limits.max())


def merged(stack: Sequence[Block], thin: float, most: int, say: Callable[[float], str]) -> list[Block]:
    """The blocks, of which thin ones and those past the `most` largest are drawn as one for each look."""
    sizes = sorted((block.value for block in stack), reverse=True)
    least = max(thin, sizes[most - 1] if len(sizes) > most else 0.0)
    small: dict[str, list[Block]] = {}
    for block in stack:
        if block.value < least:
            small.setdefault(block.look, []).append(block)
    blocks: list[Block] = []
    for block in stack:
        if block.value >= least or len(small[block.look]) == 1:
            blocks.append(block)
        elif block is small[block.look][-1]:
            together = small[block.look]
            total = sum(member.value for member in together)
            blocks.append(
                Block(total, block.look, "", f"{counted(len(together), 'small block')}, {say(total)} together")
            )
    return [block for block in blocks if block.value > 0]


def _block(block: Block, x: float, y: float, width: float, tall: float) -> str:
    shape = (
        f'<rect class="b {block.look}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{tall:.1f}">'
        f"<title>{escape(block.detail)}</title></rect>"
    )
    room = int((width - 8) / LETTER)
    if block.name and tall >= TALL_NAME and width >= WIDE_NAME and room >= 3:
        name = block.name if len(block.name) <= room else block.name[: room - 1] + "…"
        shape += f'<text class="in mid" x="{x + width / 2:.1f}" y="{y + tall / 2 + 4:.1f}">{escape(name)}</text>'
    return shape


def _limit(x: float, width: float, base: float, limit: float, room: float) -> str:
    """The well that a column may fill, and a line at its rim if that is in the picture."""
    tall = min(limit, room)
    well = f'<rect class="well" x="{x:.1f}" y="{base - tall:.1f}" width="{width:.1f}" height="{tall:.1f}"/>'
    return well + (f'<path class="limit" d="M{x:.1f} {base - tall:.1f}h{width:.1f}"/>' if limit <= room else "")


def _rank_names(world: int, pitch: float, base: float, local_size: int) -> list[str]:
    every = 1 if pitch >= 20 else next((n for n in (2, 4, 8, 16, 32, 64) if n * pitch >= 30), 128)
    shapes = [
        f'<text class="mid" x="{LEFT + (rank + 0.5) * pitch:.1f}" y="{base + 15}">{rank}</text>'
        for rank in range(0, world, every)
    ]
    shapes.append(f'<text class="end" x="{LEFT - 7}" y="{base + 15}">rank</text>')
    if local_size < world:
        wide = local_size * pitch
        for host in range(world // local_size):
            x = LEFT + host * wide
            shapes.append(f'<path class="grid" d="M{x + 2:.1f} {base + 21}h{wide - 4:.1f}"/>')
            if wide >= 46:
                shapes.append(f'<text class="mid" x="{x + wide / 2:.1f}" y="{base + 34}">host {host}</text>')
    return shapes


def _tick(most: float) -> float:
    """A round step of which four to eight make `most`."""
    rough = most / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough * 0.999)


def short(value: float) -> str:
    """An axis label without needless zeros."""
    return f"{value:.6g}"


def milliseconds(value: float) -> str:
    """A value of the time axis in words."""
    return f"{ms(value)} ms"
