"""A plan in words, for a terminal: how fast, how far from the best, what each rank does, why each table is where it is.

First how people read the numbers of a plan: milliseconds, bytes, ranks, tables and choices in a few words each.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..search.problem import (
    PARTS,
    Choice,
    Item,
    chosen,
)
from ..tables import Table
from ..topology import GIB
from .alternatives import (
    Alternative,
    Piece,
    alternatives,
    pieces,
    slowest_ranks,
)
from .slots import in_words, is_other_size

if TYPE_CHECKING:
    from .planned import Planned

# the parts of a step as people call them, in the order in which they happen
PART_NAMES = {
    "input_comms": "input comms",
    "prefetch": "prefetch",
    "fwd_compute": "forward compute",
    "fwd_comms": "forward comms",
    "bwd_compute": "backward compute",
    "bwd_comms": "backward comms",
    "overhead": "overhead",
}
COMMS = ("input_comms", "fwd_comms", "bwd_comms")
# strategies in the order in which legends name them
STRATEGIES = {
    "table_wise": "TW",
    "column_wise": "CW",
    "row_wise": "RW",
    "table_row_wise": "TWRW",
    "table_column_wise": "TWCW",
    "grid_shard": "GRID",
    "data_parallel": "DP",
}
# differences below this are the same to a reader
SAME_MS = 5e-4


def ms(value: float) -> str:
    """Milliseconds in four digits or so: "0.312", "12.05"."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.{1 if size >= 100 else 2 if size >= 10 else 3}f}"


def gib(value: float) -> str:
    """Bytes as GiB: "12.3", "0.04"; "<0.01" rather than nothing."""
    amount = value / GIB
    return "0" if not value else "<0.01" if abs(amount) < 0.005 else f"{amount:.{1 if abs(amount) >= 10 else 2}f}"


def size(value: float) -> str:
    """Bytes in the unit that suits them: "12.3 GiB", "340 MiB", "12 KiB"."""
    for unit, name in ((GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if value >= unit * 0.995:
            return f"{value / unit:,.{1 if value < 99.5 * unit else 0}f} {name}"
    return f"{value:.0f} bytes"


def share(value: float) -> str:
    """A gap in percent: "1.12%"; "<0.01%" rather than nothing."""
    return "<0.01%" if 0 < value < 5e-5 else f"{value:.2%}"


def counted(number: int, what: str) -> str:
    """ "1 rank", "3 ranks"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}{'es' if what.endswith('x') else 's'}"


def listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def ranks(numbers: Iterable[int], world_size: int = 0) -> str:
    """ "rank 3", "ranks 0-3, 7", "all ranks"; a rank that comes several times is named once, with how often."""
    times = Counter(numbers)
    if len(times) == world_size > 1 and len(set(times.values())) == 1:
        each = next(iter(times.values()))
        return "all ranks" if each == 1 else f"all ranks ({each} each)"
    runs: list[list[int]] = []
    for rank in sorted(times):
        if runs and rank == runs[-1][-1] + 1 and times[rank] == times[runs[-1][-1]]:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    phrases = []
    for run in runs:
        often = times[run[0]]
        note = "" if often == 1 else f" ({often} each)" if len(run) > 1 else f" ({often} blocks)"
        phrases += [f"{run[0]}-{run[-1]}{note}"] if len(run) > 2 else [f"{rank}{note}" for rank in run]
    return f"rank{'s' if len(times) > 1 else ''} {', '.join(phrases)}"


def shape(table: Table) -> str:
    """Rows, columns and type of a table."""
    return f"{table.num_embeddings:,} x {table.embedding_dim} {table.data_type.value.lower()}"


def lookups(table: Table) -> str:
    """Ids of a sample."""
    ids = sum(f.pooling_factor * f.num_poolings for f in table.features)
    return f"{ids:g} {'id' if ids == 1 else 'ids'} a sample"


def way(choice: Choice) -> str:
    """Strategy and kernel, how the columns are cut where they are, and how much is on the device where not all is."""
    cached = choice.cached
    slots = "" if cached is None else f" ({cached.slots:,} slots, {cached.hit_rate:.1%} hits)"
    return f"{choice.sharding_type} {choice.compute_kernel}{cut(choice)}{slots}"


def cut(choice: Choice) -> str:
    """ " (4 x 32 columns)", or nothing where columns stay together."""
    if choice.blocks == 1:
        return ""
    widths = Counter(choice.widths)
    return f" ({' + '.join(f'{times} x {width}' for width, times in widths.items())} columns)"


def where(choice: Choice, starts: Sequence[int], world_size: int) -> str:
    """The ranks that hold a block."""
    return ranks([start + place for start in starts for place in range(choice.span)], world_size)


def bytes_of(choice: Choice) -> int:
    """The bytes of a choice in all memories."""
    return int(choice.hbm.sum() + choice.ddr.sum())


def comms_ms(choice: Choice) -> float:
    """Milliseconds of all ranks spent on sending and receiving."""
    return float(sum(choice.parts_ms[PARTS.index(part)].sum() for part in COMMS))


@dataclass(frozen=True, eq=False)
class Row:
    """An item of a plan as tables show it."""

    index: int
    item: Item
    tables: tuple[Table, ...]
    choice: Choice
    starts: tuple[int, ...]

    @property
    def name(self) -> str:
        """The tables' names; several where they share a rank."""
        return " + ".join(self.item.names)


def rows(planned: Planned) -> list[Row]:
    """Every item, the one with most work first."""
    by_path = {table.path: table for table in planned.tables}
    every = [
        Row(index, item, tuple(by_path[name] for name in item.names), choice, starts)
        for index, (item, choice, starts) in enumerate(chosen(planned.problem, planned.solution.assignment))
    ]
    return sorted(every, key=lambda row: (-row.choice.work_ms, row.index))


def best_of_each(item: Item, ways: Sequence[Alternative], chosen: int) -> list[Alternative]:
    """Of the choices not chosen the best for each strategy and kernel, best first; what does not fit comes last."""
    order = sorted(
        (
            other
            for other in ways
            if other.number != chosen and not is_other_size(item.choices[chosen], item.choices[other.number])
        ),
        key=lambda other: (other.over_bytes, round(other.slower_ms / SAME_MS), other.more_work_ms, other.number),
    )
    best: dict[tuple[str, str], Alternative] = {}
    for other in order:
        choice = item.choices[other.number]
        best.setdefault((choice.sharding_type, choice.compute_kernel), other)
    return list(best.values())


def outcome(alternative: Alternative) -> str:
    """The step with this alternative, as the end of a sentence about a choice."""
    if not alternative.fits:
        return f"does not fit ({size(alternative.over_bytes)} of {alternative.over_in.upper()} too much)"
    if alternative.slower_ms >= SAME_MS:
        return f"would be {ms(alternative.slower_ms)} ms slower"
    if alternative.slower_ms <= -SAME_MS:
        return f"would be {ms(-alternative.slower_ms)} ms faster"
    if abs(alternative.more_work_ms) < SAME_MS:
        return "would be as fast"
    more = "more" if alternative.more_work_ms > 0 else "less"
    return f"would be as fast with {ms(abs(alternative.more_work_ms))} ms {more} work"


def why(item: Item, ways: Sequence[Alternative], chosen: int, most: int = 6) -> str:
    """Why not the next best: the alternatives that fit, best first, and those that do not, in one sentence."""
    others = best_of_each(item, ways, chosen)
    if not others:
        return "Nothing else is allowed."
    current = item.choices[chosen]
    kernels = {
        (item.choices[other.number].sharding_type, item.choices[other.number].compute_kernel) for other in others
    }
    kernels.add((current.sharding_type, current.compute_kernel))
    ambiguous = Counter(strategy for strategy, _ in kernels)
    fit = [other for other in others if other.fits]
    by_outcome: dict[str, list[Alternative]] = {}
    for other in fit[:most]:
        by_outcome.setdefault(outcome(other), []).append(other)
    phrases: list[str] = []
    for end, alike in by_outcome.items():
        choices = [item.choices[other.number] for other in alike]
        kernel = [f" {choice.compute_kernel}" if ambiguous[choice.sharding_type] > 1 else "" for choice in choices]
        names = [f"{choice.sharding_type}{text}{cut(choice)}" for choice, text in zip(choices, kernel, strict=True)]
        # where the difference comes from, of the best alone
        alone = not phrases and len(alike) == 1 and abs(alike[0].slower_ms) >= SAME_MS
        phrases.append(f"{listed(names)} {end}" + (f" ({_split(choices[0], current)})" if alone else ""))
    if len(fit) > most:
        phrases.append(f"{counted(len(fit) - most, 'other')} no better")
    unfit = [other for other in others if not other.fits]
    lacking = [f"{size(other.over_bytes)} of {other.over_in.upper()} too much" for other in unfit]
    named = [item.choices[other.number].sharding_type for other in unfit]
    if len(unfit) == 1:
        phrases.append(f"{named[0]} does not fit ({lacking[0]})")
    elif unfit:
        phrases.append(f"{listed([f'{name} ({lack})' for name, lack in zip(named, lacking, strict=True)])} do not fit")
    return f"Instead, {'; '.join(phrases)}."


def _split(choice: Choice, current: Choice) -> str:
    """Where the difference comes from, on all ranks together."""
    comms = comms_ms(choice) - comms_ms(current)
    compute = choice.work_ms - current.work_ms - comms
    differences = [
        f"{ms(abs(value))} ms {'more' if value > 0 else 'less'} {name}"
        for name, value in (("exchange", comms), ("compute", compute))
        if abs(value) >= SAME_MS
    ]
    return f"{listed(differences)} over all ranks" if differences else "the same work, elsewhere"


# so many lines of ranks and of tables are shown in full; of more, the ones that matter
RANKS, TABLES = 16, 40
# the column of ranks that has words
BLOCKS = "blocks by strategy"


def explain(planned: Planned, *, tables: int | None = None, width: int = 120) -> str:
    """The plan in plain text, the same for the same plan.

    Args:
        tables: how many are described one by one, those with most work; by default all of up to 40, else 20.
        width: columns of the terminal, 80 or more.
    """
    all_rows = rows(planned)
    groups = groups_alike(all_rows)
    shown = len(groups) if tables is None and len(groups) <= TABLES else 20 if tables is None else max(0, tables)
    chapters = [
        _header(planned, width),
        _slowest(planned, all_rows, width),
        _ranks(planned, width),
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
    """Facts about the plan as a whole, by short names, each in a sentence or less."""
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
        **in_words(planned),
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
    """The choices of the search, counted and named."""
    every = [choice for item in planned.problem.items for choice in item.choices]
    kinds = {choice.sharding_type for choice in every}
    kernels = listed(sorted({choice.compute_kernel for choice in every})) if every else "none"
    order = [*(name for name in STRATEGIES if name in kinds), *sorted(kinds - set(STRATEGIES))]
    fixed = sum(len(item.names) for item in planned.problem.items if len(item.choices) == 1)
    text = f"{counted(len(every), 'way')} to place the tables: {listed(order)}; kernels {kernels}" if every else "none"
    return text + (f"; {counted(fixed, 'table')} with one way only" if fixed else "")


def _header(planned: Planned, width: int) -> list[str]:
    entries = facts(planned)
    margin = max(map(len, entries)) + 4
    lines = [f"Plan: {headline(planned)}"]
    for name, text in entries.items():
        indent = " " * margin
        first = f"  {name}".ljust(margin)
        lines += textwrap.wrap(text, max(40, width), initial_indent=first, subsequent_indent=indent) or [first.rstrip()]
    return lines


def _slowest(planned: Planned, all_rows: Sequence[Row], width: int) -> list[str]:
    """The slowest rank, and the tables that make it so."""
    near = slowest_ranks(planned)
    first = near[0]
    world = planned.problem.world_size
    names = {row.index: row.name for row in all_rows}
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


def _ranks(planned: Planned, width: int) -> list[str]:
    loads, by_rank = planned.loads, pieces(planned)
    order = list(range(planned.problem.world_size))
    if len(order) > RANKS:
        order = sorted(order, key=lambda rank: (-loads.time_ms[rank], rank))
        order = [*order[: RANKS - 4], *order[-2:]]
    used = [n for n, part in enumerate(PARTS) if loads.parts_ms[n].any() or part != "prefetch"]
    memories = [
        (name, values, limits)
        for name, values, limits in (
            ("HBM", loads.hbm, planned.problem.hbm),
            ("DDR", loads.ddr, planned.problem.ddr),
        )
        if values.any()
    ]
    times = ["step ms", *(PART_NAMES[PARTS[n]] for n in used)]
    contents = [*(f"{name} GiB" for name, _, _ in memories), BLOCKS]
    lines: list[tuple[str, list[str], list[str]]] = []
    for rank in order:
        of_time = [ms(float(loads.time_ms[rank])), *(ms(float(loads.parts_ms[n, rank])) for n in used)]
        of_memory = [f"{gib(int(values[rank]))} of {gib(int(limits[rank]))}" for _, values, limits in memories]
        lines.append((str(rank), of_time, [*of_memory, by_strategy(planned, by_rank[rank])]))
    left = ""
    if len(order) < planned.problem.world_size:
        time = loads.time_ms[np.setdiff1d(np.arange(loads.time_ms.size), order)]
        left = f"  ... {counted(time.size, 'rank')} more, from {ms(float(time.max()))} to {ms(float(time.min()))} ms"
    whole = _columns(["rank", *times, *contents], [[rank, *first, *then] for rank, first, then in lines], left)
    if max(map(len, whole)) <= width:
        return whole
    # times above, what lies there below
    above = _columns(["rank", *times], [[rank, *first] for rank, first, _ in lines], left)
    below = _columns(["rank", *contents], [[rank, *then] for rank, _, then in lines], left)
    return [*above, "", *(part for line in below for part in _hung(line, width))]


def _hung(line: str, width: int) -> list[str]:
    """A line of columns that is too long, its last column folded below itself."""
    if len(line) <= width:
        return [line]
    margin = line.rfind("  ") + 2
    return textwrap.wrap(line[margin:], width, initial_indent=line[:margin], subsequent_indent=" " * margin)


def by_strategy(planned: Planned, rank_pieces: Sequence[Piece]) -> str:
    """ "3 TW, 2 CW"."""
    assignment, items = planned.solution.assignment, planned.problem.items
    count: Counter[str] = Counter()
    for piece in rank_pieces:
        count[items[piece.item].choices[assignment.choices[piece.item]].sharding_type] += piece.blocks
    order = [*STRATEGIES, *sorted(set(count) - set(STRATEGIES))]
    return ", ".join(f"{count[name]} {STRATEGIES.get(name, name)}" for name in order if count[name]) or "nothing"


def groups_alike(all_rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of equal tables that are cut the same way, in the order of their first."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in all_rows:
        alike = [
            (shape(t), lookups(t), t.pooled, t.weighted, t.optimizer, t.module, t.skew, len(t.features))
            for t in row.tables
        ]
        choice = row.choice
        key = (*alike, choice.sharding_type, choice.compute_kernel, choice.widths, row.item.ranks, choice.work_ms)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _tables(planned: Planned, groups: Sequence[Sequence[Row]], shown: int, width: int) -> list[str]:
    chosen = planned.solution.assignment.choices
    world = planned.problem.world_size
    detailed = groups[:shown]
    ways = alternatives(planned, [group[0].index for group in detailed])
    lines = ["Tables, most work first (ms of a step, all ranks together):"]
    for group in detailed:
        row, choice = group[0], group[0].choice
        name = row.name if len(group) == 1 else f"{row.name} and {len(group) - 1} equal"
        sizes = "; ".join(dict.fromkeys(f"{shape(table)}, {lookups(table)}" for table in row.tables))
        together = " on the same rank" if len(row.tables) > 1 else ""
        starts = [start for member in group for start in member.starts]
        spread = f"{where(choice, starts, world)}{together}"
        each = " each" if len(group) > 1 else ""
        lines += textwrap.wrap(f"{name}: {sizes}", max(40, width), initial_indent="  ", subsequent_indent="    ")
        text = f"{way(choice)} on {spread}: {ms(choice.work_ms)} ms, {gib(bytes_of(choice))} GiB{each}."
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


def _columns(names: Sequence[str], lines: Sequence[Sequence[str]], left: str) -> list[str]:
    """Numbers to the right under their names of a word a line, blocks to the left; `left` comes before the last two."""
    words = [name.rsplit(" ", 1) for name in names]
    above = [word[0] if len(word) > 1 else "" for word in words]
    titles = [[*above[:-1], ""], [*(word[-1] for word in words[:-1]), names[-1]]]
    widths = [max(map(len, column)) for column in zip(*titles, *lines, strict=True)]
    if names[-1] == BLOCKS:
        widths[-1] = 0
    text = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [*titles, *lines]
    ]
    return [*text[:-2], left, *text[-2:]] if left else text
