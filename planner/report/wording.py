"""How people read the numbers of a plan: milliseconds, bytes, ranks, tables and choices in a few words each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..plan.alternatives import Alternative
from ..search.problem import (
    PARTS,
    Choice,
    Item,
    chosen,
)
from ..tables import Table
from ..topology import GIB

if TYPE_CHECKING:
    from ..plan.planned import Planned

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
    """ "rank 3", "ranks 0-3, 7", "all ranks"; a rank that comes several times is told once, with how often."""
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
    told = []
    for run in runs:
        often = times[run[0]]
        note = "" if often == 1 else f" ({often} each)" if len(run) > 1 else f" ({often} blocks)"
        told += [f"{run[0]}-{run[-1]}{note}"] if len(run) > 2 else [f"{rank}{note}" for rank in run]
    return f"rank{'s' if len(times) > 1 else ''} {', '.join(told)}"


def shape(table: Table) -> str:
    """Rows, columns and type of a table."""
    return f"{table.num_embeddings:,} x {table.embedding_dim} {table.data_type.value.lower()}"


def lookups(table: Table) -> str:
    """Ids of a sample."""
    ids = sum(f.pooling_factor * f.num_poolings for f in table.features)
    return f"{ids:g} {'id' if ids == 1 else 'ids'} a sample"


def way(choice: Choice) -> str:
    """Strategy and kernel, and how the columns are cut where they are."""
    return f"{choice.sharding_type} {choice.compute_kernel}{cut(choice)}"


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
    """What a choice takes of all memories."""
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
    found = [
        Row(index, item, tuple(by_path[name] for name in item.names), choice, starts)
        for index, (item, choice, starts) in enumerate(chosen(planned.problem, planned.solution.assignment))
    ]
    return sorted(found, key=lambda row: (-row.choice.work_ms, row.index))


def best_of_each(item: Item, ways: Sequence[Alternative], chosen: int) -> list[Alternative]:
    """Of the choices not chosen the best for each strategy and kernel, best first; what does not fit comes last."""
    order = sorted(
        (one for one in ways if one.number != chosen),
        key=lambda one: (one.over_bytes, round(one.slower_ms / SAME_MS), one.more_work_ms, one.number),
    )
    best: dict[tuple[str, str], Alternative] = {}
    for one in order:
        choice = item.choices[one.number]
        best.setdefault((choice.sharding_type, choice.compute_kernel), one)
    return list(best.values())


def verdict(one: Alternative) -> str:
    """What would become of the step, as the end of a sentence about a choice."""
    if not one.fits:
        return f"does not fit ({size(one.over_bytes)} of {one.over_in.upper()} too much)"
    if one.slower_ms >= SAME_MS:
        return f"would be {ms(one.slower_ms)} ms slower"
    if one.slower_ms <= -SAME_MS:
        return f"would be {ms(-one.slower_ms)} ms faster"
    if abs(one.more_work_ms) < SAME_MS:
        return "would be as fast"
    more = "more" if one.more_work_ms > 0 else "less"
    return f"would be as fast with {ms(abs(one.more_work_ms))} ms {more} work"


def why(item: Item, ways: Sequence[Alternative], chosen: int, told: int = 6) -> str:
    """Why not the next best: the alternatives that fit, best first, and those that do not, in one sentence."""
    others = best_of_each(item, ways, chosen)
    if not others:
        return "Nothing else is allowed."
    current = item.choices[chosen]
    kernels = {(item.choices[one.number].sharding_type, item.choices[one.number].compute_kernel) for one in others}
    kernels.add((current.sharding_type, current.compute_kernel))
    ambiguous = Counter(strategy for strategy, _ in kernels)
    fit = [one for one in others if one.fits]
    said: dict[str, list[Alternative]] = {}
    for one in fit[:told]:
        said.setdefault(verdict(one), []).append(one)
    phrases: list[str] = []
    for end, alike in said.items():
        choices = [item.choices[one.number] for one in alike]
        kernel = [f" {choice.compute_kernel}" if ambiguous[choice.sharding_type] > 1 else "" for choice in choices]
        names = [f"{choice.sharding_type}{text}{cut(choice)}" for choice, text in zip(choices, kernel, strict=True)]
        # where the difference comes from, of the best alone
        alone = not phrases and len(alike) == 1 and abs(alike[0].slower_ms) >= SAME_MS
        phrases.append(f"{listed(names)} {end}" + (f" ({_split(choices[0], current)})" if alone else ""))
    if len(fit) > told:
        phrases.append(f"{counted(len(fit) - told, 'other')} no better")
    unfit = [one for one in others if not one.fits]
    lacking = [f"{size(one.over_bytes)} of {one.over_in.upper()} too much" for one in unfit]
    named = [item.choices[one.number].sharding_type for one in unfit]
    if len(unfit) == 1:
        phrases.append(f"{named[0]} does not fit ({lacking[0]})")
    elif unfit:
        phrases.append(f"{listed([f'{name} ({lack})' for name, lack in zip(named, lacking, strict=True)])} do not fit")
    return f"Instead, {'; '.join(phrases)}."


def _split(choice: Choice, current: Choice) -> str:
    """Where the difference comes from, on all ranks together."""
    comms = comms_ms(choice) - comms_ms(current)
    compute = choice.work_ms - current.work_ms - comms
    told = [
        f"{ms(abs(value))} ms {'more' if value > 0 else 'less'} {name}"
        for name, value in (("exchange", comms), ("compute", compute))
        if abs(value) >= SAME_MS
    ]
    return f"{listed(told)} over all ranks" if told else "the same work, elsewhere"
