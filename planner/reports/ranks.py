"""The part of the report that is about ranks: columns of time and of memory, and the same in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..plan.alternatives import Piece, pieces
from ..plan.explanation import (
    PART_NAMES,
    STRATEGIES,
    Row,
    counted,
    gib,
    ms,
    size,
)
from ..plan.planned import Planned
from ..search.problem import PARTS, Floats
from ..topology import GIB
from .figures import (
    Block,
    Chart,
    draw,
    milliseconds,
    short,
    shows_limits,
)
from .style import (
    figure,
    look,
    numbers,
    soft,
)

# at the bottom of a column stand the tables that are on all ranks, so that they make level bands
FROM_BELOW = (
    "data_parallel", "row_wise", "table_row_wise", "grid_shard", "table_column_wise", "column_wise", "table_wise",
)  # fmt: skip


def time_by_part(planned: Planned) -> list[str]:
    """Each rank's step as a column, stacked of its parts."""
    held = planned.loads
    used = [n for n in range(len(PARTS)) if held.parts_ms[n].any()]
    stacks = [
        [
            Block(
                float(held.parts_ms[n, rank]), f"p-{PARTS[n]}", "",
                f"rank {rank}, {PART_NAMES[PARTS[n]]}: {milliseconds(float(held.parts_ms[n, rank]))}",
            )
            for n in used
        ]
        for rank in range(planned.problem.world_size)
    ]  # fmt: skip
    comms = [n for n in used if PARTS[n].endswith("comms")]
    exchanged = float(held.parts_ms[comms].sum() / held.parts_ms.sum()) if used else 0.0
    chart = _time_chart(planned, "Time of each rank by part of the step")
    return [
        "<h2>What each rank does in a step</h2>",
        soft(f"Milliseconds. {exchanged:.0%} of the time of all ranks is exchange between them (hatched)."),
        figure(draw(stacks, chart), [(f"p-{PARTS[n]}", PART_NAMES[PARTS[n]]) for n in used]),
    ]


def _time_chart(planned: Planned, title: str) -> Chart:
    time = planned.loads.time_ms
    slowest = int(time.argmax())
    description = (
        f"A column for each of {time.size} ranks. Rank {slowest} is the slowest with {milliseconds(float(time.max()))},"
        f" rank {int(time.argmin())} the fastest with {milliseconds(float(time.min()))}."
    )
    bound = planned.certified.bound_ms or None
    return Chart(title, description, milliseconds, short, planned.problem.local_size, bound=bound, mark=slowest)


def by_table(planned: Planned, all_rows: Sequence[Row]) -> list[str]:
    """Each rank's step, and its memories, as columns stacked of tables."""
    problem, loads, by_rank = planned.problem, planned.loads, pieces(planned)
    by_index = {row.index: row for row in all_rows}
    used = {row.choice.sharding_type for row in by_index.values()}
    legend = [(look(name), name) for name in [*STRATEGIES, *sorted(used - set(STRATEGIES))] if name in used]
    anyway = [("p-overhead", "in every step, whatever the plan")] if problem.base_ms.any() else []
    times = [[p.time_ms for p in on_rank] for on_rank in by_rank]
    stacks = [
        [
            *([Block(base, "p-overhead", "", f"rank {rank}, whatever the plan: {milliseconds(base)}")] if base else []),
            *_blocks(rank, by_index, by_rank[rank], times[rank], milliseconds),
        ]
        for rank, base in enumerate(problem.base_ms.tolist())
    ]
    lines = [
        "<h2>Which tables the time goes to</h2>",
        soft("Milliseconds. The same columns, as tables instead of parts; hover a block for its table."),
        figure(draw(stacks, _time_chart(planned, "Time of each rank by table")), legend + anyway),
    ]
    memories = (
        ("HBM", "memory of the devices", loads.hbm, problem.hbm, [[p.hbm for p in on_rank] for on_rank in by_rank]),
        ("DDR", "memory of the hosts", loads.ddr, problem.ddr, [[p.ddr for p in on_rank] for on_rank in by_rank]),
    )
    for name, what, total, limit, amounts in memories:
        if not total.any():
            continue
        stacks = [
            _blocks(rank, by_index, by_rank[rank], [value / GIB for value in amounts[rank]], lambda v: size(v * GIB))
            for rank in range(problem.world_size)
        ]
        lines += _memory(planned, name, what, total / GIB, limit / GIB, stacks, legend)
    return lines


def _memory(
    planned: Planned,
    name: str,
    what: str,
    used: Floats,
    limit: Floats,
    stacks: Sequence[Sequence[Block]],
    legend: Sequence[tuple[str, str]],
) -> list[str]:
    fullest = int((used / np.maximum(limit, 1e-9)).argmax())
    sentence = f"rank {fullest} is the fullest with {gib(used[fullest] * GIB)} of {gib(limit[fullest] * GIB)} GiB"
    rim = "The red rim of a column is what tables may use"
    if not shows_limits(float(used.max()), limit):
        rim = f"The limit of {gib(limit.max() * GIB)} GiB is above the picture"
    chart = Chart(
        f"{name} of each rank by table",
        f"A column for each of {planned.problem.world_size} ranks; {sentence}.",
        lambda value: size(value * GIB),
        short,
        planned.problem.local_size,
        limits=limit,
        mark=fullest,
    )
    return [
        f"<h2>What lies in the {what}</h2>",
        soft(f"GiB of {name}; {sentence}. {rim}."),
        figure(draw(stacks, chart), legend),
    ]


def _blocks(
    rank: int, by_index: dict[int, Row], on_rank: Sequence[Piece], values: Sequence[float], say: Callable[[float], str]
) -> list[Block]:
    keyed = []
    for piece, value in zip(on_rank, values, strict=True):
        row = by_index[piece.item]
        kind = row.choice.sharding_type
        level = FROM_BELOW.index(kind) if kind in FROM_BELOW else len(FROM_BELOW)
        part = "" if row.choice.blocks == 1 else f", {piece.blocks} of {counted(row.choice.blocks, 'block')} of columns"
        detail = f"rank {rank}, {row.name}: {say(value)}, {kind} {row.choice.compute_kernel}{part}"
        keyed.append(((level, -value, piece.item), Block(value, look(kind), row.name, detail)))
    return [block for _, block in sorted(keyed, key=lambda pair: pair[0])]


def rank_numbers(planned: Planned) -> list[str]:
    """The figures as a table, to be opened."""
    loads, problem, by_rank = planned.loads, planned.problem, pieces(planned)
    used = [n for n in range(len(PARTS)) if loads.parts_ms[n].any()]
    names = ["step ms", *(f"{PART_NAMES[PARTS[n]]} ms" for n in used), "HBM GiB", "of", "DDR GiB", "of", "blocks"]
    lines = []
    for rank in range(problem.world_size):
        cells = [ms(float(loads.time_ms[rank])), *(ms(float(loads.parts_ms[n, rank])) for n in used)]
        cells += [gib(int(array[rank])) for array in (loads.hbm, problem.hbm, loads.ddr, problem.ddr)]
        cells.append(str(sum(piece.blocks for piece in by_rank[rank])))
        lines.append(f'<tr><th scope="row">{rank}</th>{numbers(cells)}</tr>')
    heads = "".join(f'<th scope="col" class="n">{name}</th>' for name in names)
    return [
        '<details class="block"><summary>These figures in numbers, rank by rank</summary><div class="scroll">'
        f'<table><thead><tr><th scope="col">rank</th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        "</div></details>"
    ]
