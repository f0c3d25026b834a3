"""A plan in words, for a terminal: how fast and how far from the best, what each rank does, why each table is where
it is.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..plan.alternatives import (
    Piece,
    alternatives,
    pieces,
    slowest_ranks,
)
from ..plan.planned import Planned
from ..search.problem import PARTS, Loads
from .wording import (
    PART_NAMES,
    STRATEGIES,
    Row,
    bytes_of,
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
    where,
    why,
)  # fmt: skip

# so many lines of ranks and of tables are shown in full; of more, the ones that matter
RANKS, TABLES = 16, 40


def explain(planned: Planned, *, tables: int | None = None, width: int = 120) -> str:
    """The plan in plain text, the same for the same plan.

    Args:
        tables: tell so many tables one by one, those with most work; by default all of up to 40, else 20.
        width: columns of the terminal; sentences are wrapped to it, tables of numbers are as wide as they are.
    """
    told = rows(planned)
    groups = _groups(told)
    shown = len(groups) if tables is None and len(groups) <= TABLES else 20 if tables is None else max(0, tables)
    chapters = [
        _header(planned, width),
        _slowest(planned, told, width),
        _ranks(planned),
        _tables(planned, groups, shown, width),
    ]
    return "\n\n".join("\n".join(lines) for lines in chapters if lines)


def headline(planned: Planned) -> str:
    """How many tables on what ranks."""
    topology = planned.topology
    hosts = topology.world_size // planned.problem.local_size
    on = counted(topology.world_size, "rank")
    spread = f" ({counted(hosts, 'host')} of {planned.problem.local_size})" if hosts > 1 else ""
    return f"{counted(len(planned.tables), 'table')} on {on}{spread}"


def facts(planned: Planned) -> dict[str, str]:
    """What is known of the plan as a whole, by short names, each in a sentence or less."""
    solution, problem = planned.certified, planned.problem
    time = planned.loads.time_ms
    slowest = slowest_ranks(planned)
    bound = f"{ms(solution.bound_ms)} ms: no plan within the limits is faster ({solution.bound_from})"
    gap = f"{share(solution.gap)}: " + (
        "this plan is proven to be optimal" if solution.proven else "no plan can be faster by more than that"
    )
    return {
        "step": f"{ms(float(time.max()))} ms on the slowest rank ({ranks(slowest[:1], problem.world_size)}), predicted;"
        f" {ms(float(time.mean()))} ms on average",
        "bound": bound if solution.bound_ms > 0 else "none was found",
        "gap": gap if solution.bound_ms > 0 or solution.proven else "not known",
        "planned in": f"{planned.seconds:.2f} s",
        "cost model": planned.cost,
        "batch": f"{planned.batch_size:,} samples a rank",
        "topology": _topology(planned),
        "choices": _choices(planned),
        **planned.settings,
    }


def _topology(planned: Planned) -> str:
    topology, problem = planned.topology, planned.problem
    device = topology.compute_device if topology.card is None else f"{topology.compute_device} {topology.card}"
    parts = [headline(planned).partition(" on ")[2], device]
    held = planned.loads
    for name, caps, values in (("HBM", problem.hbm, held.hbm), ("DDR", problem.ddr, held.ddr)):
        low, high = int(caps.min()), int(caps.max())
        if high and values.any():
            parts.append(f"{gib(low) if low == high else f'{gib(low)} to {gib(high)}'} GiB of {name} a rank for tables")
    return ", ".join(parts)


def _choices(planned: Planned) -> str:
    """What the search could choose from."""
    every = [choice for item in planned.problem.items for choice in item.choices]
    kinds = {choice.sharding_type for choice in every}
    kernels = listed(sorted({choice.compute_kernel for choice in every})) if every else "none"
    order = [*(name for name in STRATEGIES if name in kinds), *sorted(kinds - set(STRATEGIES))]
    fixed = sum(len(item.names) for item in planned.problem.items if len(item.choices) == 1)
    told = f"{counted(len(every), 'way')} to place the tables: {listed(order)}; kernels {kernels}" if every else "none"
    return told + (f"; {counted(fixed, 'table')} with one way only" if fixed else "")


def _header(planned: Planned, width: int) -> list[str]:
    said = facts(planned)
    margin = max(map(len, said)) + 4
    lines = [f"Plan: {headline(planned)}"]
    for name, text in said.items():
        indent = " " * margin
        first = f"  {name}".ljust(margin)
        lines += textwrap.wrap(text, max(40, width), initial_indent=first, subsequent_indent=indent) or [first.rstrip()]
    return lines


def _slowest(planned: Planned, told: Sequence[Row], width: int) -> list[str]:
    """What decides the step."""
    near = slowest_ranks(planned)
    first = near[0]
    world = planned.problem.world_size
    names = {row.index: row.name for row in told}
    here = sorted(pieces(planned)[first], key=lambda piece: (-piece.time_ms, piece.item))
    if not here:
        return []
    parts = planned.loads.parts_ms[:, first]
    comms = sum(float(parts[PARTS.index(part)]) for part in PARTS if part.endswith("comms"))
    exchanged = comms / float(parts.sum()) if parts.sum() else 0.0
    longest = listed([f"{names[piece.item]} ({ms(piece.time_ms)} ms)" for piece in here[:5]])
    others = f" and {counted(len(here) - 5, 'other')}" if len(here) > 5 else ""
    text = (
        f"Rank {first} is the slowest: {ms(float(parts.sum()))} ms, {exchanged:.0%} of it exchange. It holds {longest}"
    )
    text += f"{others}."
    if len(near) > 1:
        many = ranks(near[1:], world) if len(near) <= 9 else counted(len(near) - 1, "rank")
        text += f" Within 0.1% of it: {many}."
    return textwrap.wrap(text, max(40, width))


def _ranks(planned: Planned) -> list[str]:
    held, found = planned.loads, pieces(planned)
    order = list(range(planned.problem.world_size))
    if len(order) > RANKS:
        order = sorted(order, key=lambda rank: (-held.time_ms[rank], rank))
        order = [*order[: RANKS - 4], *order[-2:]]
    used = [n for n, part in enumerate(PARTS) if held.parts_ms[n].any() or part != "prefetch"]
    memories = [
        (name, values, limits)
        for name, values, limits in (
            ("HBM", held.hbm, planned.problem.hbm),
            ("DDR", held.ddr, planned.problem.ddr),
        )
        if values.any()
    ]
    names = ["rank", "step ms", *(PART_NAMES[PARTS[n]] for n in used)]
    names += [f"{name} GiB" for name, _, _ in memories] + ["blocks by strategy"]
    lines = []
    for rank in order:
        cells = [str(rank), ms(float(held.time_ms[rank])), *(ms(float(held.parts_ms[n, rank])) for n in used)]
        cells += [f"{gib(int(values[rank]))} of {gib(int(limits[rank]))}" for _, values, limits in memories]
        lines.append([*cells, _by_strategy(planned, found[rank])])
    text = _columns(names, lines)
    if len(order) < planned.problem.world_size:
        text.insert(-2, _rest(held, order))
    return text


def _rest(held: Loads, order: Sequence[int]) -> str:
    others = np.setdiff1d(np.arange(held.time_ms.size), order)
    time = held.time_ms[others]
    return f"  ... {counted(others.size, 'rank')} more, from {ms(float(time.max()))} to {ms(float(time.min()))} ms"


def _by_strategy(planned: Planned, mine: Sequence[Piece]) -> str:
    """ "3 TW, 2 CW"."""
    assignment, items = planned.solution.assignment, planned.problem.items
    count: Counter[str] = Counter()
    for piece in mine:
        count[items[piece.item].choices[assignment.choices[piece.item]].sharding_type] += piece.blocks
    order = [*STRATEGIES, *sorted(set(count) - set(STRATEGIES))]
    return ", ".join(f"{count[name]} {STRATEGIES.get(name, name)}" for name in order if count[name]) or "nothing"


def _groups(told: Sequence[Row]) -> list[list[Row]]:
    """Rows of equal tables that are cut the same way, in the order of their first."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in told:
        alike = [
            (shape(t), lookups(t), t.pooled, t.weighted, t.optimizer, t.module, t.skew, len(t.features))
            for t in row.tables
        ]
        choice = row.choice
        key = (*alike, choice.sharding_type, choice.compute_kernel, choice.widths, row.item.ranks, choice.work_ms)
        found.setdefault(key, []).append(row)
    return list(found.values())


def _tables(planned: Planned, groups: Sequence[Sequence[Row]], shown: int, width: int) -> list[str]:
    chosen = planned.solution.assignment.choices
    world = planned.problem.world_size
    told = groups[:shown]
    ways = alternatives(planned, [group[0].index for group in told])
    lines = ["Tables, most work first (ms of a step, all ranks together):"]
    for group in told:
        row, choice = group[0], group[0].choice
        name = row.name if len(group) == 1 else f"{row.name} and {len(group) - 1} equal"
        sizes = "; ".join(dict.fromkeys(f"{shape(table)}, {lookups(table)}" for table in row.tables))
        together = " on the same rank" if len(row.tables) > 1 else ""
        starts = [start for one in group for start in one.starts]
        spread = f"{where(choice, starts, world)}{together}"
        each = " each" if len(group) > 1 else ""
        lines.append(f"  {name}: {sizes}")
        text = (
            f"{choice.sharding_type} {choice.compute_kernel}{cut(choice)} on {spread}: {ms(choice.work_ms)} ms,"
            f" {gib(bytes_of(choice))} GiB{each}."
        )
        reason = why(row.item, ways[row.index], chosen[row.index])
        text += f" {row.name}: {reason}" if len(group) > 1 else f" {reason}"
        indent = " " * 6
        lines += textwrap.wrap(text, max(40, width), initial_indent=indent, subsequent_indent=indent)
    rest = [row for group in groups[shown:] for row in group]
    if rest:
        lines += textwrap.wrap(_others(rest), max(40, width), initial_indent="  ", subsequent_indent="  ")
    return lines


def _others(rest: Sequence[Row]) -> str:
    count = Counter(row.choice.sharding_type for row in rest)
    tables = sum(len(row.tables) for row in rest)
    kinds = listed([f"{count[name]} {name}" for name in sorted(count, key=lambda name: (-count[name], name))])
    work, held = sum(row.choice.work_ms for row in rest), sum(bytes_of(row.choice) for row in rest)
    return f"... and {counted(tables, 'table')} with less work: {kinds}; together {ms(work)} ms and {gib(held)} GiB."


def _columns(names: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Numbers to the right under their names of a word a line, the last column to the left."""
    words = [name.rsplit(" ", 1) for name in names]
    above = [word[0] if len(word) > 1 else "" for word in words]
    titles = [[*above[:-1], ""], [*(word[-1] for word in words[:-1]), names[-1]]]
    widths = [max(map(len, column)) for column in zip(*titles, *lines, strict=True)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=False)), line[-1]]).rstrip()
        for line in [*titles, *lines]
    ]
