"""Plans and differences of plans in 30 lines, whatever the number of tables and ranks, as wide as the terminal.

Every line fits: what is too long for its column loses its middle. `explain` of the planner has the rest.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .output import console

if TYPE_CHECKING:
    from rich.text import Text

    from ..planner.plan.explanation import Row
    from ..planner.plan.plan_files import CutDifference
    from ..planner.plan.planned import Planned
    from ..planner.reports.difference import Difference, Placement
    from ..planner.search.problem import Cached

LINES = 30
# gaps from which a plan is no longer as good as proven, and from which it may be worth more time
CLOSE, FAR = 0.01, 0.05
# what is not in PARTS by itself: the parts of a step as people weigh them, with the marks of bars and their colours
_WEIGHED = {
    "overhead": (("overhead", "prefetch"), "░", ".", "bright_black"),
    "exchange": (("input_comms", "fwd_comms", "bwd_comms"), "▒", "=", "yellow"),
    "compute": (("fwd_compute", "bwd_compute"), "█", "#", "green"),
}


class _Column(NamedTuple):
    """A column of lines.

    Args:
        share: of the width that the others leave, where cells are too wide; 0 for a column that stays whole.
        short: cells instead, where the line would be too wide.
    """

    name: str
    cells: Sequence[str | Text]
    right: bool = False
    share: int = 0
    short: Sequence[str] = ()


def columns() -> int:
    """Of the terminal, those that texts use."""
    return console().width


def folded(text: str, width: int | None = None) -> str:
    """Lines that are too long folded below themselves, a little further in."""
    room = width or columns()
    lines: list[str] = []
    for line in text.splitlines():
        margin = " " * (len(line) - len(line.lstrip()) + 4)
        lines += [line] if len(line) <= room else textwrap.wrap(line, room, subsequent_indent=margin)
    return "\n".join(lines)


def print_text(text: str) -> None:
    """A text of many lines, folded."""
    _print([_printable(line) for line in folded(text).splitlines()])


def print_plan(planned: Planned, path: Path | None = None, warned: int = 0) -> None:
    """The plan in 30 lines.

    Args:
        path: of the file that it was written to.
        warned: warnings on stderr, which count too.
    """
    from ..planner.plan.explanation import groups_alike, rows

    width, groups = columns(), groups_alike(rows(planned))
    above = [_title(planned), *_facts(planned, width)]
    below = _hints(path, width)
    # a blank line and a heading for ranks and tables, a blank line before the last words
    room = LINES - len(above) - len(below) - 5 - min(4, warned)
    world = planned.topology.world_size
    of_tables = min(len(groups), max(room // 2, room - world))
    _print(above)
    _print(["", *_ranks(planned, max(3, min(world, room - of_tables)), width)])
    if groups:
        _print(["", *_tables(planned, groups, of_tables, width)])
    _print(["", *below])


def _title(planned: Planned) -> Text:
    from rich.text import Text

    from ..planner.plan.explanation import headline

    topology = planned.topology
    device = topology.compute_device if topology.card is None else topology.card
    text = Text(f"Plan: {headline(planned)}", style="bold")
    return text.append(f", {device}, {planned.batch_size:,} samples a rank", style="not bold")


def _facts(planned: Planned, width: int) -> list[Text]:
    """How fast, how far from the best, and what it is made of: a name and some words each."""
    from ..planner.plan.alternatives import slowest_ranks
    from ..planner.plan.explanation import STRATEGIES, gib, ms, share
    from ..planner.plan.slots import in_words

    solution, loads = planned.certified, planned.loads
    slowest = slowest_ranks(planned)[0]
    mean, most = float(loads.time_ms.mean()), float(loads.time_ms.max())
    facts: dict[str, tuple[str, str]] = {
        "step": (f"{ms(most)} ms predicted, on the slowest rank (rank {slowest}); {ms(mean)} ms on average", "bold")
    }
    if solution.proven:
        facts["best"] = "no plan is faster: proven", "green"
    elif solution.bound_ms > 0:
        colour = "green" if solution.gap < CLOSE else "yellow" if solution.gap > FAR else ""
        bound = f"no plan is faster than {ms(solution.bound_ms)} ms"
        facts["best"] = f"{bound}: this one is at most {share(solution.gap)} slower", colour
    else:
        facts["best"] = "not known: no bound was found", ""
    weighed = {name: _weight(planned, name, slowest) for name in _WEIGHED}
    parts = [f"{value / most:.0%} {name}" for name, value in weighed.items() if most]
    facts["time"] = f"{', '.join(parts) or 'none'}, on the slowest rank", ""
    for name, values, limits in _memories(planned):
        full, empty = int((values / limits.clip(1)).argmax()), int(values.argmin())
        text = f"{gib(int(values[full]))} of {gib(int(limits[full]))} GiB"
        same = values[empty] == values[full]
        text += (
            " on every rank" if same else f" on rank {full}, the fullest; {gib(int(values[empty]))} GiB on rank {empty}"
        )
        facts[name] = text, "yellow" if values[full] > 0.98 * limits[full] else ""
    count = Counter(choice.sharding_type for _, choice, _ in planned.placed())
    kinds = [f"{count[kind]:,} {kind} ({STRATEGIES.get(kind, kind)})" for kind in [*STRATEGIES] if count[kind]]
    kinds += [f"{number:,} {kind}" for kind, number in count.items() if kind not in STRATEGIES]
    facts["tables"] = ", ".join(kinds) or "none", ""
    facts |= {name: (text, "") for name, text in in_words(planned).items()}
    if "what if" in planned.settings:
        facts["what if"] = planned.settings["what if"], ""
    constants = planned.settings.get("constants", "")
    if constants and "nothing was measured" in constants:
        source = constants.partition(": ")[2].partition(" data sheet")[0]
        facts["prices"] = f"data sheet of {source}: nothing was measured", ""
    elif constants:
        facts["prices"] = constants, ""
    return _labelled(facts, width)


def _labelled(facts: Mapping[str, tuple[str, str]], width: int) -> list[Text]:
    """A name and what is said of it on a line, or more where they must."""
    from rich.text import Text

    margin = max(map(len, facts)) + 4
    lines: list[Text] = []
    for name, (text, style) in facts.items():
        label = Text(f"  {name}".ljust(margin), style="cyan")
        for part in textwrap.wrap(_printable(text), width - margin) or [""]:
            lines.append(label + Text(part, style=style))
            label = Text(" " * margin)
    return lines


def _hints(path: Path | None, width: int) -> list[str]:
    if path is not None:
        written = f"Written for training, ShardingPlan.load reads it: {path}"
        return [_middled(_printable(written), width), "--verbose tells why each table lies where it does"]
    return ["--verbose tells why each table lies where it does, --out FILE keeps the plan"]


def _weight(planned: Planned, name: str, rank: int) -> float:
    from ..planner.search.problem import PARTS

    return float(sum(planned.loads.parts_ms[PARTS.index(part), rank] for part in _WEIGHED[name][0]))


def _memories(planned: Planned) -> list[tuple[str, Any, Any]]:
    """Name, bytes held [W] and limits [W] of the memories that tables are in."""
    loads, problem = planned.loads, planned.problem
    every = (("HBM", loads.hbm, problem.hbm), ("DDR", loads.ddr, problem.ddr))
    return [memory for memory in every if memory[1].any()]


def _ranks(planned: Planned, count: int, width: int) -> list[Text]:
    """A line for each rank: its time as a bar of what it is made of, its memory, how many blocks lie there."""
    from rich.text import Text

    from ..planner.plan.alternatives import pieces
    from ..planner.plan.explanation import BLOCKS, by_strategy, gib, ms

    loads, here = planned.loads, pieces(planned)
    world = planned.problem.world_size
    order = list(range(world))
    cut = 0
    if world > count:
        # the slowest and the fastest, and a line for those between
        order = sorted(order, key=lambda rank: (-loads.time_ms[rank], rank))
        last = max(1, (count - 1) // 3)
        cut = count - 1 - last
        order = [*order[:cut], *order[-last:]]
    memories = _memories(planned)
    most = float(loads.time_ms.max()) or 1.0
    blocks = [by_strategy(planned, here[rank]) for rank in order]
    taken = 4 + 2 + 8 + 2 + 14 * len(memories) + min(24, max([len(BLOCKS), *map(len, blocks)])) + 2
    room = max(8, min(48, width - taken))
    unicode = _is_unicode()
    bars = []
    for rank in order:
        bar, begun, done = Text(), 0, 0.0
        for name, (_, mark, plain, colour) in _WEIGHED.items():
            done += _weight(planned, name, rank)
            until = round(room * done / most)
            bar.append((mark if unicode else plain) * (until - begun), style=colour)
            begun = until
        bars.append(bar)
    legend = Text()
    for name, (_, mark, plain, colour) in _WEIGHED.items():
        legend.append(f"{mark if unicode else plain} ", style=colour).append(f"{name} ")
    legend.rstrip()
    made = [
        _Column("rank", [str(rank) for rank in order], right=True),
        _Column("step ms", [ms(float(loads.time_ms[rank])) for rank in order], right=True),
        _Column("", [_filled(bar, room) for bar in bars]),
        *(
            _Column(f"{name} GiB", [gib(int(values[rank])) for rank in order], right=True)
            for name, values, _ in memories
        ),
        _Column(BLOCKS, blocks, share=1),
    ]
    lines = _lines(made, width, over={2: legend})
    if cut:
        between = loads.time_ms[sorted(set(range(world)) - set(order))]
        text = f"{len(between):,} ranks between, from {ms(float(between.max()))} to {ms(float(between.min()))} ms"
        lines.insert(cut + 1, Text(f" {_dots()}  {text}", style="bright_black"))
    return lines


def _tables(planned: Planned, groups: Sequence[Sequence[Row]], count: int, width: int) -> list[Text]:
    """The tables with most work, equal ones together: where they lie, and what each costs."""
    from rich.text import Text

    from ..planner.plan.explanation import bytes_of, counted, cut, gib, ms, shape, where

    world = planned.problem.world_size
    # the line for the others takes one of theirs
    shown = groups if len(groups) <= count else groups[: count - 1]
    ways = [group[0].choice for group in shown]
    starts = [[start for row in group for start in row.starts] for group in shown]
    placed = [f"{way.sharding_type}{cut(way)}, {where(way, at, world)}" for way, at in zip(ways, starts, strict=True)]
    equal = [f"x {len(group):,}" if len(group) > 1 else "" for group in shown]
    made = [
        _Column("most work first", [group[0].name for group in shown], share=3),
        *([_Column("equal", equal, right=True)] if any(equal) else ()),
        _Column("rows x columns", [shape(group[0].tables[0]) for group in shown], right=True),
        _Column("placed", placed, share=4, short=[*map(_abbreviated, placed)]),
        *_caches([way.cached for way in ways]),
        _Column("ms each", [ms(way.work_ms) for way in ways], right=True),
        _Column("GiB each", [gib(bytes_of(way)) for way in ways], right=True),
    ]
    lines = _lines(made, width)
    rest = [row for group in groups[len(shown) :] for row in group]
    if rest:
        work, size = sum(row.choice.work_ms for row in rest), sum(bytes_of(row.choice) for row in rest)
        number = sum(len(row.tables) for row in rest)
        text = f"and {counted(number, 'table')} with less work: {ms(work)} ms and {gib(size)} GiB together"
        lines.append(Text(f"{_dots()} {text}", style="bright_black"))
    return lines


def _caches(caches: Sequence[Cached | None]) -> list[_Column]:
    """How much of tables is on the device, where some have rows below it."""
    if not any(caches):
        return []
    slots = ["" if cached is None else f"{cached.slots:,}" for cached in caches]
    hits = ["" if cached is None else f"{cached.hit_rate:.1%}" for cached in caches]
    return [_Column("slots", slots, right=True), _Column("hits", hits, right=True)]


def print_difference(difference: Difference | CutDifference, verbose: bool, lines: int = LINES) -> None:
    """What differs between two plans."""
    from ..planner.reports.difference import Difference

    width = columns()
    if verbose or not difference:
        print_text(str(difference))
    elif isinstance(difference, Difference):
        _print(_differences(difference, lines, width))
    else:
        names = [*difference.tables]
        shown = names if len(names) <= lines - 3 else names[: lines - 4]
        there = [tuple(placement or "is not there" for placement in difference.tables[name]) for name in shown]
        made = [
            _Column("table", shown, share=3),
            _Column("before", [pair[0] for pair in there], share=4),
            _Column("after", [pair[1] for pair in there], share=4),
        ]
        _print(_worlds(difference.world_sizes))
        _print([*(_lines(made, width) if shown else ()), *_more(len(names) - len(shown), "table")])


def _worlds(sizes: tuple[int, int]) -> list[str]:
    return [] if sizes[0] == sizes[1] else [f"{sizes[0]} ranks -> {sizes[1]} ranks"]


def _differences(difference: Difference, lines: int, width: int) -> list[str | Text]:
    from ..planner.plan.explanation import counted, ms

    settings = [
        _middled(f"{name}: {before or 'not said'} -> {after or 'not said'}", width)
        for name, (before, after) in difference.settings.items()
    ]
    before, after = difference.step_ms
    change = f" ({after / before - 1:+.1%})" if before > 0 else ""
    bounds = " -> ".join(ms(bound) for bound in difference.bound_ms)
    alike = f"{counted(len(difference.tables), 'table')} placed otherwise, {difference.same_tables:,} alike"
    above: list[str | Text] = [
        *settings[:8], *_more(len(settings) - 8, "setting"),
        f"step: {ms(before)} -> {ms(after)} ms{change}; bound: {bounds} ms", alike,
    ]  # fmt: skip
    moved = [row for row in difference.ranks if (row.before_ms, row.before_hbm) != (row.after_ms, row.after_hbm)]
    last = [f"{counted(len(moved), 'rank')} of {len(difference.ranks)} with other time or memory"]
    room = max(3, lines - len(above) - len(last) - 3)
    # the largest changes first
    order = sorted(difference.tables, key=lambda row: -max(_work(row.before), _work(row.after)))
    shown = order if len(order) <= room else order[: room - 1]
    old, new = (
        [_placement(placement) for placement in side]
        for side in ([row.before for row in shown], [row.after for row in shown])
    )
    made = [
        _Column("table", [row.table for row in shown], share=3),
        _Column("before", old, share=4, short=[*map(_abbreviated, old)]),
        _Column("after", new, share=4, short=[*map(_abbreviated, new)]),
        _Column("work ms", [f"{ms(_work(row.before))} -> {ms(_work(row.after))}" for row in shown], right=True),
    ]
    listed: list[str | Text] = ["", *_lines(made, width), *_more(len(order) - len(shown), "table"), ""] if shown else []
    return [*above, *listed, *last]


def _work(placement: Placement | None) -> float:
    return 0.0 if placement is None else placement.work_ms


def _placement(placement: Placement | None) -> str:
    return "not there" if placement is None else str(placement)


def _more(number: int, noun: str) -> list[str]:
    from ..planner.plan.explanation import counted

    return [f"{_dots()} and {counted(number, noun)} more: --verbose"] if number > 0 else []


def numbers(planned: Planned) -> dict[str, Any]:
    """The numbers of a plan that people compare."""
    loads, solution = planned.loads, planned.certified
    return {
        "ranks": planned.topology.world_size, "hosts": planned.topology.hosts, "batch_size": planned.batch_size,
        "step_ms": solution.time_ms, "bound_ms": solution.bound_ms, "gap": solution.gap,
        "samples_per_second": 1000 * planned.batch_size * planned.topology.world_size / solution.time_ms,
        "most_hbm_gib": float(loads.hbm.max()) / 2**30, "most_ddr_gib": float(loads.ddr.max()) / 2**30,
    }  # fmt: skip


def print_beside(before: Planned, after: Planned, difference: Difference, verbose: bool) -> None:
    """Two plans' numbers in columns, and what differs."""
    names = {
        "ranks": "ranks", "hosts": "hosts", "batch_size": "samples of a rank", "step_ms": "step ms",
        "bound_ms": "bound ms", "gap": "gap", "samples_per_second": "samples a second",
        "most_hbm_gib": "most HBM of a rank, GiB", "most_ddr_gib": "most DDR of a rank, GiB",
    }  # fmt: skip
    old, new = numbers(before), numbers(after)
    lines = [f"{'':26}{'before':>14}{'after':>14}"]
    lines += [f"{label:26}{_number(name, old):>14}{_number(name, new):>14}" for name, label in names.items()]
    _print([*lines, ""])
    print_difference(difference, verbose, LINES - len(lines) - 1)


def _number(name: str, of: Mapping[str, Any]) -> str:
    value = of[name]
    if name == "gap":
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1e4 else f"{value:,.3f}"


def _lines(made: Sequence[_Column], width: int, over: Mapping[int, Text] | None = None) -> list[Text]:
    """A heading, and a line for each cell of the columns, which share what is left of the width.

    Args:
        over: headings that are no names, by column.
    """
    from rich.text import Text

    texts = [[_text(cell) for cell in column.cells] for column in made]
    heads = [(over or {}).get(number, Text(column.name)) for number, column in enumerate(made)]
    room_of_all = width - 2 * (len(made) - 1)
    if sum(_widths(heads, texts)) > room_of_all:
        texts = [[_text(cell) for cell in column.short] or whole for column, whole in zip(made, texts, strict=True)]
    rooms = _rooms(_widths(heads, texts), [column.share for column in made], room_of_all)
    lines = []
    for number in range(-1, len(made[0].cells)):
        line = Text(style="bright_black" if number < 0 else "")
        for column, head, cells, room in zip(made, heads, texts, rooms, strict=True):
            cell = (head if number < 0 else cells[number]).copy()
            if cell.cell_len > room:
                cell = Text(_middled(cell.plain, room), style=cell.style)
            line.append_text(cell) if not column.right else line.append(" " * (room - cell.cell_len)).append_text(cell)
            line.append(" " * (0 if column.right else room - cell.cell_len) + "  ")
        line.rstrip()
        lines.append(line)
    return lines


def _widths(heads: Sequence[Text], texts: Sequence[Sequence[Text]]) -> list[int]:
    return [max(cell.cell_len for cell in (head, *cells)) for head, cells in zip(heads, texts, strict=True)]


def _abbreviated(placed: str) -> str:
    """TWRW for table_row_wise, and without the kernel that nearly all have."""
    from ..planner.plan.explanation import STRATEGIES

    kind, _, rest = placed.partition(" ")
    return f"{STRATEGIES.get(kind.rstrip(','), kind.rstrip(','))} {rest.removeprefix('fused ').removeprefix('on ')}"


def _rooms(wanted: Sequence[int], shares: Sequence[int], width: int) -> list[int]:
    """Widths of columns: what they want, and where that is too much, those that have a share by their shares."""
    rooms = list(wanted)
    left = width - sum(room for room, share in zip(rooms, shares, strict=True) if not share)
    open_ = [number for number, share in enumerate(shares) if share]
    # a column that wants less than its part leaves the rest to the others
    while open_ and sum(rooms[number] for number in open_) > left:
        total = sum(shares[number] for number in open_)
        modest = [number for number in open_ if wanted[number] <= left * shares[number] // total]
        if not modest:
            for number in open_:
                rooms[number] = max(1, left * shares[number] // total)
            break
        for number in modest:
            open_.remove(number)
            left -= wanted[number]
    return rooms


def _text(cell: str | Text) -> Text:
    from rich.text import Text

    return Text(_printable(cell)) if isinstance(cell, str) else cell


def _filled(bar: Text, room: int) -> Text:
    bar.append(" " * (room - bar.cell_len))
    return bar


def _middled(text: str, room: int) -> str:
    """A text of so many columns at most: one that is longer loses its middle, where names differ least."""
    from rich.cells import cell_len

    if cell_len(text) <= room:
        return text
    dots = _dots()
    keep = max(0, room - len(dots))
    head, tail = _begin(text, (keep + 1) // 2), _begin(text[::-1], keep // 2)[::-1]
    return (head + dots + tail)[:room]


def _begin(text: str, room: int) -> str:
    """As many letters as fit."""
    from rich.cells import cell_len

    end = room
    while cell_len(text[:end]) > room:
        end -= 1
    return text[:end]


def _printable(text: str) -> str:
    """Names of files and tables are other people's: what moves the cursor or changes colours becomes a mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _is_unicode() -> bool:
    return console().encoding.lower().startswith("utf")


def _dots() -> str:
    return "…" if _is_unicode() else "..."


def _print(lines: Iterable[str | Text]) -> None:
    to = console()
    for line in lines:
        if isinstance(line, str):
            click.echo(line)
        else:
            # not folded: every line was made to fit
            to.print(line, soft_wrap=True)
