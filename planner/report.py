"""A plan as one page of HTML: ranks as columns of time and memory, tables as blocks, and why each is where it is.

The page has no scripts and fetches nothing; details open by `<details>`, hovering a block tells what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

import numpy as np

from .alternatives import Alternative, Piece, alternatives, pieces, slowest_ranks
from .explain import facts, headline
from .planned import Planned
from .problem import PARTS, Choice, Floats
from .report_figures import Block, Chart, draw, milliseconds, short, swatch
from .report_style import COLOURS, patterns, style_sheet
from .topology import GIB
from .wording import (
    PART_NAMES,
    STRATEGIES,
    Row,
    best_of_each,
    bytes_of,
    comms_ms,
    counted,
    cut,
    gib,
    listed,
    lookups,
    ms,
    ranks,
    rows,
    shape,
    share,
    size,
    verdict,
    way,
    where,
)

# at the bottom of a column stand the tables that are on all ranks, so that they make level bands
FROM_BELOW = (
    "data_parallel", "row_wise", "table_row_wise", "grid_shard", "table_column_wise", "column_wise", "table_wise",
)  # fmt: skip
# of more items than this, those with least work are told without their alternatives
DETAILED = 600


def report(planned: Planned) -> str:
    """The page, the same bytes for the same plan."""
    told = rows(planned)
    by_index = {row.index: row for row in told}
    found = pieces(planned)
    title = f"Plan: {headline(planned)}"
    body = [
        patterns(),
        f"<h1>{escape(title)}</h1>",
        *_summary(planned),
        *_time_by_part(planned),
        *_by_table(planned, by_index, found),
        *_rank_numbers(planned, found),
        *_tables(planned, told),
        *_settings(planned),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style_sheet()}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _summary(planned: Planned) -> list[str]:
    solution, held = planned.solution, planned.loads
    time = held.time_ms
    slowest = slowest_ranks(planned)[0]
    bounded = solution.bound_ms > 0
    if solution.proven:
        lead = "This plan is proven to be optimal: no other within the limits is faster."
    elif bounded:
        lead = f"No plan within the limits is faster than the bound; this one is {share(solution.gap)} above it."
    else:
        lead = "How far the plan is from the best is not known."
    numbers = [
        (f"{ms(float(time.max()))} ms", f"a step, predicted; rank {slowest} is the slowest"),
        (f"{ms(solution.bound_ms)} ms" if bounded else "none", "bound: no plan is faster"),
        (share(solution.gap) if bounded or solution.proven else "unknown", "gap between them"),
    ]
    for name, used, limit in (("HBM", held.hbm, planned.problem.hbm), ("DDR", held.ddr, planned.problem.ddr)):
        if used.any():
            full = used / np.maximum(limit, 1)
            numbers.append((f"{float(full.max()):.0%}", f"of its {name}, rank {int(full.argmax())}, the fullest"))
    numbers.append((f"{planned.seconds:.2f} s", "to plan"))
    facts_of_it = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in numbers)
    return [f"<p>{escape(lead)}</p>", f'<div class="facts">{facts_of_it}</div>']


def _time_by_part(planned: Planned) -> list[str]:
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
        _soft(f"Milliseconds. {exchanged:.0%} of the time of all ranks is exchange between them (hatched)."),
        _figure(draw(stacks, chart), [(f"p-{PARTS[n]}", PART_NAMES[PARTS[n]]) for n in used]),
    ]


def _time_chart(planned: Planned, title: str) -> Chart:
    time = planned.loads.time_ms
    slowest = int(time.argmax())
    description = (
        f"A column for each of {time.size} ranks. Rank {slowest} is the slowest with {milliseconds(float(time.max()))},"
        f" rank {int(time.argmin())} the fastest with {milliseconds(float(time.min()))}."
    )
    bound = planned.solution.bound_ms or None
    return Chart(title, description, milliseconds, short, planned.problem.local_size, bound=bound, mark=slowest)


def _by_table(planned: Planned, by_index: dict[int, Row], found: Sequence[Sequence[Piece]]) -> list[str]:
    problem, held = planned.problem, planned.loads
    used = {row.choice.sharding_type for row in by_index.values()}
    legend = [(_look(name), name) for name in [*STRATEGIES, *sorted(used - set(STRATEGIES))] if name in used]
    anyway = [("p-overhead", "in every step, whatever the plan")] if problem.base_ms.any() else []
    times = [[piece.time_ms for piece in mine] for mine in found]
    stacks = [
        [
            *([Block(base, "p-overhead", "", f"rank {rank}, whatever the plan: {milliseconds(base)}")] if base else []),
            *_blocks(rank, by_index, found[rank], times[rank], milliseconds),
        ]
        for rank, base in enumerate(problem.base_ms.tolist())
    ]
    lines = [
        "<h2>Which tables the time goes to</h2>",
        _soft("Milliseconds. The same columns, as tables instead of parts; hover a block for its table."),
        _figure(draw(stacks, _time_chart(planned, "Time of each rank by table")), legend + anyway),
    ]
    memories = (
        ("HBM", "memory of the devices", held.hbm, problem.hbm, [[piece.hbm for piece in mine] for mine in found]),
        ("DDR", "memory of the hosts", held.ddr, problem.ddr, [[piece.ddr for piece in mine] for mine in found]),
    )
    for name, what, total, limit, amounts in memories:
        if not total.any():
            continue
        stacks = [
            _blocks(rank, by_index, found[rank], [value / GIB for value in amounts[rank]], lambda v: size(v * GIB))
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
    told = f"rank {fullest} is the fullest with {gib(used[fullest] * GIB)} of {gib(limit[fullest] * GIB)} GiB"
    rim = "The red rim of a column is what tables may use"
    if used.max() <= 0.35 * limit.max():
        rim = f"The limit of {gib(limit.max() * GIB)} GiB is above the picture"
    chart = Chart(
        f"{name} of each rank by table",
        f"A column for each of {planned.problem.world_size} ranks; {told}.",
        lambda value: size(value * GIB),
        short,
        planned.problem.local_size,
        limits=limit,
        mark=fullest,
    )
    return [
        f"<h2>What lies in the {what}</h2>",
        _soft(f"GiB of {name}; {told}. {rim}."),
        _figure(draw(stacks, chart), legend),
    ]


def _blocks(
    rank: int, by_index: dict[int, Row], mine: Sequence[Piece], values: Sequence[float], say: Callable[[float], str]
) -> list[Block]:
    found = []
    for piece, value in zip(mine, values, strict=True):
        row = by_index[piece.item]
        kind = row.choice.sharding_type
        level = FROM_BELOW.index(kind) if kind in FROM_BELOW else len(FROM_BELOW)
        part = "" if row.choice.blocks == 1 else f", {piece.blocks} of {counted(row.choice.blocks, 'block')} of columns"
        detail = f"rank {rank}, {row.name}: {say(value)}, {kind} {row.choice.compute_kernel}{part}"
        found.append(((level, -value, piece.item), Block(value, _look(kind), row.name, detail)))
    return [block for _, block in sorted(found, key=lambda pair: pair[0])]


def _look(strategy: str) -> str:
    return f"s-{strategy}" if f"s-{strategy}" in COLOURS else "s-other"


def _soft(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def _figure(svg: str, legend: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<li>{swatch(look)}{escape(name)}</li>" for look, name in legend)
    return f'<figure><div class="scroll">{svg}</div><figcaption><ul class="legend">{items}</ul></figcaption></figure>'


def _rank_numbers(planned: Planned, found: Sequence[Sequence[Piece]]) -> list[str]:
    held, problem = planned.loads, planned.problem
    used = [n for n in range(len(PARTS)) if held.parts_ms[n].any()]
    names = ["step ms", *(f"{PART_NAMES[PARTS[n]]} ms" for n in used), "HBM GiB", "of", "DDR GiB", "of", "blocks"]
    lines = []
    for rank in range(problem.world_size):
        cells = [ms(float(held.time_ms[rank])), *(ms(float(held.parts_ms[n, rank])) for n in used)]
        cells += [gib(int(array[rank])) for array in (held.hbm, problem.hbm, held.ddr, problem.ddr)]
        cells.append(str(sum(piece.blocks for piece in found[rank])))
        lines.append(f'<tr><th scope="row">{rank}</th>{_numbers(cells)}</tr>')
    heads = "".join(f'<th scope="col" class="n">{name}</th>' for name in names)
    return [
        '<details class="block"><summary>These figures in numbers, rank by rank</summary><div class="scroll">'
        f'<table><thead><tr><th scope="col">rank</th>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        "</div></details>"
    ]


def _numbers(cells: Iterable[str]) -> str:
    return "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)


def _tables(planned: Planned, told: Sequence[Row]) -> list[str]:
    chosen = planned.solution.assignment.choices
    ways = alternatives(planned, [row.index for row in told[:DETAILED]])
    lines = []
    for row in told:
        sizes = "; ".join(dict.fromkeys(f"{shape(table)}, {lookups(table)}" for table in row.tables))
        spread = where(row.choice, row.starts, planned.problem.world_size)
        others = _others(row, ways[row.index], chosen[row.index]) if row.index in ways else ""
        lines.append(
            f'<tr class="top"><th scope="row">{escape(row.name)}<br><span class="soft">{escape(sizes)}</span></th>'
            f"<td>{swatch(_look(row.choice.sharding_type))}</td>"
            f'<td>{escape(way(row.choice))}<br><span class="soft">{escape(spread)}</span></td>'
            f"{_numbers([ms(row.choice.work_ms), gib(bytes_of(row.choice))])}</tr>"
            f'<tr><td colspan="5" class="why">{others}</td></tr>'
        )
    heads = (
        '<th scope="col" style="width:36%">table</th><th style="width:3%"></th><th scope="col" style="width:39%">placed'
        '</th><th scope="col" class="n" style="width:13%">ms on all ranks</th><th scope="col" class="n">GiB</th>'
    )
    rest = f" Of {len(told):,}, the {DETAILED} with most work have them." if len(told) > DETAILED else ""
    return [
        "<h2>Tables</h2>",
        _soft(
            "The most work first. A row opens to what each other choice would make of the step if this table alone took"
            f" it, at its best place, and all others stayed.{rest}"
        ),
        f'<div class="scroll"><table class="tables"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>",
    ]


def _others(row: Row, ways: Sequence[Alternative], chosen: int) -> str:
    best = best_of_each(row.item, ways, chosen)
    if not best:
        return "Nothing else is allowed."
    lines = [_line(row.choice, "", "this plan", ' class="now"')]
    for one in best:
        lacks = "" if one.fits else f"{size(one.over_bytes)} of {one.over_in.upper()} too much"
        lines.append(_line(row.item.choices[one.number], f"{one.slower_ms:+.3f}" if one.fits else "", lacks))
    first = row.item.choices[best[0].number]
    return (
        f"<details><summary>Next best: {escape(f'{first.sharding_type}{cut(first)} {verdict(best[0])}')}</summary>"
        '<table class="ways"><thead><tr>'
        '<th scope="col">choice</th><th scope="col" class="n">step, ms</th><th scope="col" class="n">exchange, ms</th>'
        '<th scope="col" class="n">compute, ms</th><th scope="col" class="n">GiB</th><th scope="col"></th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></details>"
    )


def _line(choice: Choice, change: str, says: str, attributes: str = "") -> str:
    comms = comms_ms(choice)
    cells = _numbers([change, ms(comms), ms(choice.work_ms - comms), gib(bytes_of(choice))])
    return f"<tr{attributes}><td>{escape(way(choice))}</td>{cells}<td>{escape(says)}</td></tr>"


def _settings(planned: Planned) -> list[str]:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(planned).items())
    near = slowest_ranks(planned)
    slow = f"<dt>slowest ranks</dt><dd>{listed([ranks(near, planned.problem.world_size)])}, within 0.1%</dd>"
    return ["<h2>How this plan was made</h2>", f"<dl>{lines}{slow}</dl>"]
