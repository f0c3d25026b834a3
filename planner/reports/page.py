"""A plan as one page of HTML: ranks as columns of time and memory, tables as blocks, and why each is where it is.

The page has no scripts and fetches nothing; details open by `<details>`, hovering a block tells what it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

import numpy as np

from ..plan.alternatives import Alternative, alternatives, slowest_ranks
from ..plan.explanation import (
    Row,
    best_of_each,
    bytes_of,
    comms_ms,
    cut,
    facts,
    gib,
    headline,
    listed,
    lookups,
    ms,
    outcome,
    ranks,
    rows,
    shape,
    share,
    size,
    way,
    where,
)
from ..plan.planned import Planned
from ..search.problem import Choice
from .ranks import by_table, rank_numbers, time_by_part
from .style import (
    document,
    look,
    numbers,
    patterns,
    soft,
    style_sheet,
    swatch,
)

# of more items than this, those with least work come without their alternatives
DETAILED = 600


def report(planned: Planned) -> str:
    """The page, the same bytes for the same plan."""
    all_rows = rows(planned)
    title = f"Plan: {headline(planned)}"
    body = [
        patterns(),
        f"<h1>{escape(title)}</h1>",
        *_summary(planned),
        *time_by_part(planned),
        *by_table(planned, all_rows),
        *rank_numbers(planned),
        *_tables(planned, all_rows),
        *_settings(planned),
    ]
    return document(title, style_sheet(), body)


def picture(planned: Planned) -> str:
    """Each rank's time by table as an SVG that stands alone, for a notebook or a slide, in light colours."""
    charts: list[str] = re.findall(r'<svg class="chart".*?</svg>', "".join(by_table(planned, rows(planned))), re.DOTALL)
    lasting = re.sub(r"@media[^{]*\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}", "", style_sheet())
    # rules of a page would have their way with what is around the picture
    kept = (":root", "svg text", ".well", ".grid", ".line", ".bound", ".b", ".end", ".mid", ".s-", ".p-", ".f-")
    rules = [(name.strip(), what) for name, what in re.findall(r"([^{}]+)\{([^{}]*)\}", lasting)]
    style = "".join(f"{name}{{{what}}}" for name, what in rules if name.startswith(kept))
    (shapes,) = re.findall(r"<defs>.*</defs>", patterns(), re.DOTALL)
    begin = '<svg xmlns="http://www.w3.org/2000/svg" style="background:#fcfcfa" '
    return charts[0].replace("<svg ", begin, 1).replace(">", f"><style>{style}</style>{shapes}", 1)


def _summary(planned: Planned) -> list[str]:
    solution, loads = planned.certified, planned.loads
    time = loads.time_ms
    slowest = slowest_ranks(planned)[0]
    bounded = solution.bound_ms > 0
    if solution.proven:
        lead = "This plan is proven to be optimal: no other within the limits is faster."
    elif bounded:
        lead = f"No plan within the limits is faster than the bound; this one is {share(solution.gap)} above it."
    else:
        lead = "How far the plan is from the best is not known."
    figures = [
        (f"{ms(float(time.max()))} ms", f"a step, predicted; rank {slowest} is the slowest"),
        (f"{ms(solution.bound_ms)} ms" if bounded else "none", "bound: no plan is faster"),
        (share(solution.gap) if bounded or solution.proven else "unknown", "gap between them"),
    ]
    for name, used, limit in (("HBM", loads.hbm, planned.problem.hbm), ("DDR", loads.ddr, planned.problem.ddr)):
        if used.any():
            full = used / np.maximum(limit, 1)
            figures.append((f"{float(full.max()):.0%}", f"of its {name}, rank {int(full.argmax())}, the fullest"))
    figures.append((f"{planned.seconds:.2f} s", "to plan"))
    facts_of_it = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in figures)
    return [f"<p>{escape(lead)}</p>", f'<div class="facts">{facts_of_it}</div>']


def _tables(planned: Planned, all_rows: Sequence[Row]) -> list[str]:
    chosen = planned.solution.assignment.choices
    ways = alternatives(planned, [row.index for row in all_rows[:DETAILED]])
    lines = []
    for row in all_rows:
        sizes = "; ".join(dict.fromkeys(f"{shape(table)}, {lookups(table)}" for table in row.tables))
        spread = where(row.choice, row.starts, planned.problem.world_size)
        others = _others(row, ways[row.index], chosen[row.index]) if row.index in ways else ""
        lines.append(
            f'<tr class="top"><th scope="row">{escape(row.name)}<br><span class="soft">{escape(sizes)}</span></th>'
            f"<td>{swatch(look(row.choice.sharding_type))}</td>"
            f'<td>{escape(way(row.choice))}<br><span class="soft">{escape(spread)}</span></td>'
            f"{numbers([ms(row.choice.work_ms), gib(bytes_of(row.choice))])}</tr>"
            f'<tr><td colspan="5" class="why">{others}</td></tr>'
        )
    heads = (
        '<th scope="col" style="width:36%">table</th><th style="width:3%"></th><th scope="col" style="width:39%">placed'
        '</th><th scope="col" class="n" style="width:13%">ms on all ranks</th><th scope="col" class="n">GiB</th>'
    )
    rest = f" Of {len(all_rows):,}, the {DETAILED} with most work have them." if len(all_rows) > DETAILED else ""
    return [
        "<h2>Tables</h2>",
        soft(
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
    for other in best:
        lacks = "" if other.fits else f"{size(other.over_bytes)} of {other.over_in.upper()} too much"
        lines.append(_line(row.item.choices[other.number], f"{other.slower_ms:+.3f}" if other.fits else "", lacks))
    first = row.item.choices[best[0].number]
    return (
        f"<details><summary>Next best: {escape(f'{first.sharding_type}{cut(first)} {outcome(best[0])}')}</summary>"
        '<table class="ways"><thead><tr>'
        '<th scope="col">choice</th><th scope="col" class="n">step, ms</th><th scope="col" class="n">exchange, ms</th>'
        '<th scope="col" class="n">compute, ms</th><th scope="col" class="n">GiB</th><th scope="col"></th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></details>"
    )


def _line(choice: Choice, change: str, says: str, attributes: str = "") -> str:
    comms = comms_ms(choice)
    cells = numbers([change, ms(comms), ms(choice.work_ms - comms), gib(bytes_of(choice))])
    return f"<tr{attributes}><td>{escape(way(choice))}</td>{cells}<td>{escape(says)}</td></tr>"


def _settings(planned: Planned) -> list[str]:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(planned).items())
    near = slowest_ranks(planned)
    slow = f"<dt>slowest ranks</dt><dd>{listed([ranks(near, planned.problem.world_size)])}, within 0.1%</dd>"
    return ["<h2>How this plan was made</h2>", f"<dl>{lines}{slow}</dl>"]
