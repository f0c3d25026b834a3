"""Draws the pictures of docs/{sharding,engine,tiers}.md: `python docs/pictures/sharding_pictures.py [folder]`.

A picture shows a table as rows and columns, cut as a strategy cuts it, and beside it what each rank of two hosts holds.
A colour is a rank, or white where every rank holds the same. All measures are pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from shardwise.planner import layout
from shardwise.planner.layout import Shard, Span
from shardwise.sharding import ShardedEmbeddingBagCollection
from shardwise.sharding.engine import step as phases_of_step
from shardwise.sharding.engine.collection import ExchangedLookup, ShardedCollection
from shardwise.sharding.engine.shards import LocalShards

ROWS, DIM, LOCAL_SIZE, WORLD_SIZE = 7, 8, 2, 4
HOSTS = [list(layout.ranks_of(host, LOCAL_SIZE)) for host in range(WORLD_SIZE // LOCAL_SIZE)]
# of the cut table, and of what a rank holds
CELL, SMALL = 22, 9
LEFT, TOP, MARGIN, GAP = 70, 46, 16, 20
COLOURS = ("#cfe2ff", "#ffe0b3", "#d3f0d0", "#eed7f5")
STYLE = (
    "text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#1f2328;text-anchor:middle}"
    ".r{text-anchor:end}.l{text-anchor:start}.s{fill:#59636e}.b{font-weight:bold}"
    "rect{stroke:#59636e}.h{fill:none;stroke-dasharray:4 3}path{stroke:#59636e;fill:none}"
    ".halo{stroke:#fff;stroke-width:6px;paint-order:stroke}"
)


def text(x: float, y: float, words: object, kind: str = "") -> str:
    """Words centred on x, or for kind "l" and "r" beginning and ending there; y is their base line."""
    return f'<text x="{x:g}" y="{y:g}"' + (f' class="{kind}">' if kind else ">") + f"{words}</text>"


def rect(x: float, y: float, width: float, height: float, look: str) -> str:
    """A rectangle with a class or a colour."""
    colour = f'fill="{look}"' if look.startswith("#") else f'class="{look}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {colour}/>'


def cells(x: float, y: float, cell: float, rows: Span, cols: Span, colour: str) -> str:
    """Rows and columns of a table whose first cell is at (x, y)."""
    height, width = rows[1] - rows[0], cols[1] - cols[0]
    return rect(x + cols[0] * cell, y + rows[0] * cell, width * cell, height * cell, colour)


def svg(title: str, width: float, height: float, shapes: Sequence[str]) -> str:
    """A file with its own background, so that it reads the same on light and dark pages."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">',
            f"<title>{title}</title><style>{STYLE}</style>",
            f'<rect width="{width:g}" height="{height:g}" rx="8" style="fill:#fff;stroke:#d1d9e0"/>',
            *shapes,
            "</svg>\n",
        ]
    )


def colour_of(shard: Shard) -> str:
    """The colour of a shard's rank, white for a replica."""
    return "#ffffff" if shard.replica else COLOURS[shard.rank]


def draw(title: str, shards: Sequence[Shard]) -> str:
    """The cut table with the edges of its shards in numbers, and what each rank holds."""
    layout.validate(shards, {"t": (ROWS, DIM)}, WORLD_SIZE)
    shapes = [
        text(LEFT - 26, TOP + ROWS * CELL / 2 + 4, "rows", "r s"),
        text(LEFT + DIM * CELL + 8, TOP - 8, "columns", "l s"),
    ]
    for edge in sorted({edge for shard in shards for edge in shard.rows}):
        shapes.append(text(LEFT - 8, TOP + edge * CELL + 4, edge, "r"))
    for edge in sorted({edge for shard in shards for edge in shard.cols}):
        shapes.append(text(LEFT + edge * CELL, TOP - 8, edge))
    for shard in shards[:1] if shards[0].replica else shards:
        shapes.append(cells(LEFT, TOP, CELL, shard.rows, shard.cols, colour_of(shard)))
        middle = LEFT + sum(shard.cols) / 2 * CELL, TOP + sum(shard.rows) / 2 * CELL + 4
        wide = shard.cols[1] - shard.cols[0] > 2
        shapes.append(text(*middle, "every rank" if shard.replica else f"rank {shard.rank}" if wide else shard.rank))
    x: float = LEFT + DIM * CELL + 90
    for host, ranks in enumerate(HOSTS):
        begin = x
        for rank in ranks:
            mine = [shard for shard in shards if shard.rank == rank]
            shapes.append(text(x + DIM * SMALL / 2, TOP + 24, f"rank {rank}"))
            shapes.append(rect(x, TOP + 34, DIM * SMALL, ROWS * SMALL, "h"))
            shapes += [cells(x, TOP + 34, SMALL, s.rows, s.cols, COLOURS[rank]) for s in mine]
            held = sum((s.rows[1] - s.rows[0]) * (s.cols[1] - s.cols[0]) for s in mine)
            shapes.append(text(x + DIM * SMALL / 2, TOP + 34 + ROWS * SMALL + 18, f"{held} cells", "s"))
            x += DIM * SMALL + GAP
        shapes.append(rect(begin - 12, TOP, x - begin + 4, ROWS * CELL - 22, "h"))
        shapes.append(text((begin + x - GAP) / 2, TOP - 8, f"host {host}", "b"))
        x += GAP
    return svg(title, x - GAP + 8, TOP + ROWS * CELL + MARGIN, shapes)


# strategy -> what it says of the table "t", in two hosts of two ranks
STRATEGIES: dict[str, tuple[str, list[Shard]]] = {
    "data_parallel": ("every rank holds the whole table", layout.data_parallel("t", ROWS, DIM, WORLD_SIZE)),
    "table_wise": ("one rank holds the whole table", layout.table_wise("t", ROWS, DIM, 1)),
    "row_wise": ("a block of rows on each rank", layout.row_wise("t", ROWS, DIM, range(WORLD_SIZE))),
    "column_wise": ("a block of columns on each rank", layout.column_wise("t", ROWS, DIM, range(WORLD_SIZE))),
    "table_row_wise": ("a block of rows on each rank of a host", layout.table_row_wise("t", ROWS, DIM, HOSTS[1])),
    "table_column_wise": (
        "a block of columns on each rank of a host",
        layout.table_column_wise("t", ROWS, DIM, HOSTS[1]),
    ),
    "grid_shard": (
        "a block of columns on each host, a block of its rows on each rank",
        layout.grid("t", ROWS, DIM, HOSTS),
    ),
}


def step() -> str:
    """The exchanges of a step between one rank and all others, in order."""
    stages = [
        ("headers", "sizes, plan, status", 1),
        ("ids", "lengths, ids, weights", 1),
        ("rows", "of bags or ids", -1),
        ("gradient rows", "in the backward", 1),
    ]
    high, pitch, top = 34, 186, 30
    x, y = LEFT + 80, {1: top, -1: top + 104}
    shapes = [text(x - 20, y[side] + 22, who, "r") for side, who in ((1, "asks"), (-1, "holds rows"))]
    end = x + pitch * len(stages) + 20
    for side in (1, -1):
        shapes.append(rect(x - 12, y[side], end - x, high, COLOURS[0] if side == 1 else COLOURS[2]))
    for n, (name, what, down) in enumerate(stages):
        middle = x + pitch * n + 12
        first, last = (y[1] + high, y[-1]) if down == 1 else (y[-1], y[1] + high)
        shapes.append(f'<path d="M{middle:g} {first:g}V{last:g}m-5 {-8 * down}l5 {8 * down}l5 {-8 * down}"/>')
        shapes += [text(middle + 10, top + 64, name, "l b"), text(middle + 10, top + 82, what, "l s")]
    shapes.append(text(x + pitch * 1.5 + 12, y[-1] + 22, "lookup"))
    shapes.append(text(x + pitch * 2.5 + 12, y[1] + 22, "dense layers, loss"))
    shapes.append(text(x + pitch * 3.5 + 12, y[-1] + 22, "fused update"))
    return svg("The exchanges of a step", end + MARGIN, y[-1] + high + MARGIN, shapes)


def hierarchical() -> str:
    """Rows of table-row-wise shards: partial sums are added inside the host before they leave it."""
    x, top, wide, high, down = LEFT + 90, 40, 110, 30, 70
    places = [x + n * (wide + GAP) + (n // LOCAL_SIZE) * 40 for n in range(WORLD_SIZE)]
    shapes = []
    for host, ranks in enumerate(HOSTS):
        begin, end = places[ranks[0]] - 10, places[ranks[-1]] + wide + 10
        shapes.append(rect(begin, top - 8, end - begin, 2 * down + high + 16, "h"))
        shapes.append(text((begin + end) / 2, top - 16, f"host {host}", "b"))
    for n, words in enumerate(("lookup", "in the host", "between hosts")):
        shapes.append(text(x - 24, top + n * down + 20, words, "r s"))
    # the table is on host 1; rank r of it adds what is for rank r of every host
    owners = HOSTS[1]
    for place, rank in enumerate(owners):
        shapes.append(rect(places[rank], top, wide, high, COLOURS[rank]))
        shapes.append(text(places[rank] + wide / 2, top + 20, "partial sums"))
        shapes.append(rect(places[rank], top + down, wide, high, COLOURS[rank]))
        shapes.append(text(places[rank] + wide / 2, top + down + 20, "sums"))
        for other in owners:
            shapes.append(_arrow(places[other] + wide / 2, top + high, places[rank] + wide / 2, top + down))
        for ranks in HOSTS:
            to = places[ranks[place]] + wide / 2
            shapes.append(_arrow(places[rank] + wide / 2, top + down + high, to, top + 2 * down))
    for rank, at in enumerate(places):
        shapes.append(rect(at, top + 2 * down, wide, high, "#ffffff"))
        shapes.append(text(at + wide / 2, top + 2 * down + 20, f"rank {rank}"))
    return svg(
        "Partial sums are added inside the host first",
        places[-1] + wide + 10 + MARGIN,
        top + 2 * down + high + 32,
        shapes,
    )


def engine() -> str:
    """A step over ranks and time: what a rank does, by the engine's own names, and the messages between two ranks."""
    calls = [
        (ShardedCollection.start, "route, check"),
        (ShardedCollection.send_ids, "sizes are known"),
        (ShardedCollection.receive_ids, "ids in order"),
        (ShardedCollection.look_up, "kernel"),
        (ShardedEmbeddingBagCollection.finish, "assemble"),
        (ExchangedLookup.backward, "divide, check"),
        (LocalShards.update, "kernel"),
    ]
    # a step has each phase from the call of this number on
    phases = {"STARTED": 0, "IDS_SENT": 1, "IDS_RECEIVED": 2, "LOOKED_UP": 3}
    assert [name for name in vars(phases_of_step) if name in phases] == list(phases)
    messages = ["headers", "ids", "rows", "row gradients"]
    wide, high, pitch, top = 124, 44, 178, 62
    lanes = top, top + 120
    ends = [LEFT + 16 + pitch * n for n in range(len(calls))]
    right = ends[-1] + wide
    shapes = [text(LEFT - 12, y + 27, f"rank {rank}", "r") for rank, y in enumerate(lanes)]
    for name, n in phases.items():
        shapes.append(text(ends[n] + wide / 2, top - 28, name, "b"))
        shapes.append(f'<path class="h" d="M{ends[n] - 9:g} {top - 40:g}V{lanes[1] + high + 14:g}"/>')
    for n, (call, what) in enumerate(calls):
        for rank, y in enumerate(lanes):
            shapes.append(rect(ends[n], y, wide, high, COLOURS[rank]))
            shapes.append(text(ends[n] + wide / 2, y + 18, call.__name__))
            shapes.append(text(ends[n] + wide / 2, y + 35, what, "s"))
    # sent at the end of a call, and taken by the one after it
    for n, name in zip((0, 1, 3, 5), messages, strict=True):
        x, to = ends[n] + wide, ends[n] + pitch
        shapes.append(f'<path d="M{x:g} {lanes[0] + high:g}L{to:g} {lanes[1]:g}m-9 -5l9 5l-2 -10"/>')
        shapes.append(f'<path d="M{x:g} {lanes[1]:g}L{to:g} {lanes[0] + high:g}m-9 5l9 -5l-2 10"/>')
        shapes.append(text((x + to) / 2, lanes[0] + high + 42, name, "s halo"))
    time = lanes[1] + high + 34
    shapes.append(f'<path d="M{ends[0]:g} {time:g}H{right:g}m-8 -5l8 5l-8 5"/>')
    shapes.append(text((ends[0] + right) / 2, time + 4, "time", "s halo"))
    return svg("A step over two ranks and time", right + MARGIN, time + 20, shapes)


def tiers() -> str:
    """A rank's steps with a cache: ids that are known ahead, rows that come and go while another batch trains."""
    lanes = {"ids": 62, "rows": 142, "training": 222, "below": 302}
    wide, high, pitch = 150, 44, 190
    at = [LEFT + 46 + pitch * n for n in range(4)]
    shapes = [text(LEFT + 34, y + 27, name, "r") for name, y in lanes.items()]
    boxes = [
        ("ids", 0, LocalShards.announce.__name__, "b+W: next uses", 0),
        ("rows", 0, LocalShards.prefetch.__name__, "slots for b+1", 1),
        ("training", 0, LocalShards.look_up.__name__, "b, in its slots", 2),
        ("training", 1, LocalShards.update.__name__, "b; then release", 2),
        ("training", 2, LocalShards.look_up.__name__, "b+1", 2),
        ("ids", 2, LocalShards.announce.__name__, "b+1+W", 0),
        ("rows", 2, LocalShards.prefetch.__name__, "slots for b+2", 1),
        ("training", 3, LocalShards.update.__name__, "b+1; then release", 2),
        ("below", 0, "write", "rows that leave", 3),
        ("below", 1, "read", "rows that come", 3),
    ]
    for lane, n, what, of, colour in boxes:
        shapes.append(rect(at[n], lanes[lane], wide, high, COLOURS[colour]))
        shapes += [text(at[n] + wide / 2, lanes[lane] + 18, what), text(at[n] + wide / 2, lanes[lane] + 35, of, "s")]
    # what waits for what
    low = {name: y + high for name, y in lanes.items()}
    shapes.append(_arrow(at[0] + wide - 20, low["ids"], at[0] + wide - 20, lanes["rows"]))
    shapes.append(f'<path d="M{at[0] + 20:g} {low["rows"]:g}V{lanes["below"]:g}m-5 -7l5 7l5 -7"/>')
    shapes.append(text(at[0] + 20, lanes["training"] - 14, "victims", "s halo"))
    y = lanes["below"] + high / 2
    shapes.append(f'<path d="M{at[0] + wide:g} {y:g}H{at[1]:g}m-8 -5l8 5l-8 5"/>')
    shapes.append(f'<path d="M{at[1] + wide:g} {lanes["below"]:g}L{at[2] + 20:g} {low["training"]:g}m-9 2l9 -2l-2 9"/>')
    shapes.append(text(at[1] + wide + 30, lanes["below"] - 14, "before its lookup", "s halo"))
    shapes.append(f'<path d="M{at[1] + wide:g} {lanes["training"]:g}L{at[2]:g} {low["rows"]:g}m-9 3l9 -3l-3 9"/>')
    shapes.append(text(at[1] + wide - 4, lanes["training"] - 14, "slots are free", "s halo"))
    time, right = lanes["below"] + high + 24, at[3] + wide
    shapes.append(f'<path d="M{at[0]:g} {time:g}H{right:g}m-8 -5l8 5l-8 5"/>')
    shapes.append(text((at[0] + right) / 2, time + 4, "time", "s halo"))
    return svg("Two steps of a rank with a cache", right + MARGIN, time + 20, shapes)


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}m-5 -7l5 7l5 -7"/>'


PICTURES: dict[str, Callable[[], str]] = {
    "engine_step.svg": engine,
    **{f"sharding_{name}.svg": partial(draw, *what) for name, what in STRATEGIES.items()},
    "sharding_step.svg": step,
    "tiers_step.svg": tiers,
    "sharding_hierarchical.svg": hierarchical,
}


def write(folder: Path) -> None:
    """Every picture, as a file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PICTURES.items():
        (folder / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
