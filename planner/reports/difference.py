"""Two plans compared: which tables are placed otherwise, and what that does to time and memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..plan.explanation import (
    counted,
    gib,
    ms,
    ranks,
)
from ..plan.planned import Planned
from ..plan.slots import placed_tier
from ..search.problem import Choice
from ..tables import Table
from ..tiers import plain_tier, plain_tier_text

# steps and memories nearer than this share are the same
SAME = 1e-9


@dataclass(frozen=True)
class Placement:
    """Where and how a table is placed: `widths` of its blocks of columns, and the ranks that hold each block.

    `slots` are its rows on the device, None for all; `tier` says where the others lie, as code has it.
    """

    sharding_type: str
    compute_kernel: str
    widths: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    work_ms: float
    memory_bytes: int
    slots: int | None = None
    tier: str | None = None

    def __str__(self) -> str:
        text = f"{self.sharding_type} {self.compute_kernel}"
        if len(self.widths) > 1:
            text += (
                f" ({' + '.join(map(str, self.widths))} columns)"
                if len(self.widths) <= 4
                else (f" ({len(self.widths)} blocks of {min(self.widths)} to {max(self.widths)} columns)")
            )
        on = [rank for block in self.ranks for rank in block]
        slots = "" if self.slots is None else f", {self.slots:,} slots"
        return f"{text} on {ranks(on)}{slots}{f' by {self.tier}' if self.tier else ''}"


@dataclass(frozen=True)
class Change:
    """A table that two plans place otherwise; None in the plan that does not have it."""

    table: str
    before: Placement | None
    after: Placement | None


@dataclass(frozen=True)
class RankChange:
    """Time and memory of a rank before and after; None in the plan that does not have the rank."""

    rank: int
    before_ms: float | None
    after_ms: float | None
    before_hbm: int | None
    after_hbm: int | None
    before_ddr: int | None
    after_ddr: int | None


@dataclass(frozen=True)
class Difference:
    """All in which two plans differ; false if they do not.

    Args:
        step_ms, bound_ms: of both plans.
        tables: placed otherwise or only in one plan, in the order of the first plan, then of the second.
        same_tables: how many are placed alike.
        ranks: all of them, if a table or the step differs.
        settings: what decided the plans, where it differs: name -> (before, after).
    """

    step_ms: tuple[float, float]
    bound_ms: tuple[float, float]
    tables: tuple[Change, ...]
    same_tables: int
    ranks: tuple[RankChange, ...]
    settings: dict[str, tuple[str, str]]

    def __bool__(self) -> bool:
        return bool(self.tables or self.ranks)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def as_dict(self) -> dict[str, Any]:
        """Plain data that json can write."""
        return asdict(self)


def diff(a: Planned, b: Planned) -> Difference:
    """The changes from plan `a` to plan `b`: the places of tables, and the time and memory of ranks."""
    before, after = _placements(a), _placements(b)
    names = list(dict.fromkeys([*before, *after]))
    changes = [
        Change(name, before.get(name), after.get(name))
        for name in names
        if _where(before.get(name)) != _where(after.get(name))
    ]
    ranks_a, ranks_b = _ranks(a), _ranks(b)
    empty = (None, None, None)
    per_rank = []
    for rank in range(max(len(ranks_a), len(ranks_b))):
        first = ranks_a[rank] if rank < len(ranks_a) else empty
        second = ranks_b[rank] if rank < len(ranks_b) else empty
        per_rank.append(RankChange(rank, first[0], second[0], first[1], second[1], first[2], second[2]))
    same_loads = len(ranks_a) == len(ranks_b) and all(_alike(row) for row in per_rank)
    decided = (_decided(a), _decided(b))
    settings = {
        name: (decided[0].get(name, ""), decided[1].get(name, ""))
        for name in dict.fromkeys([*decided[0], *decided[1]])
        if decided[0].get(name, "") != decided[1].get(name, "")
    }
    return Difference(
        (a.solution.time_ms, b.solution.time_ms),
        (a.certified.bound_ms, b.certified.bound_ms),
        tuple(changes),
        len(names) - len(changes),
        () if same_loads and not changes else tuple(per_rank),
        settings,
    )


def _placements(planned: Planned) -> dict[str, Placement]:
    return {table.path: _placement(planned, table, choice, starts) for table, choice, starts in planned.placed()}


def _placement(planned: Planned, table: Table, choice: Choice, starts: tuple[int, ...]) -> Placement:
    tier = placed_tier(planned, table, choice)
    # blocks of a width may change places without a difference
    order = sorted(zip(choice.widths, starts, strict=True), key=lambda block: (-block[0], block[1]))
    return Placement(
        choice.sharding_type,
        choice.compute_kernel,
        tuple(width for width, _ in order),
        tuple(tuple(range(start, start + choice.span)) for _, start in order),
        choice.work_ms,
        int(choice.hbm.sum() + choice.ddr.sum()),
        None if choice.cached is None else choice.cached.slots,
        None if tier is None else plain_tier_text(plain_tier(tier) or {}),
    )


def _where(place: Placement | None) -> tuple[object, ...] | None:
    if place is None:
        return None
    return place.sharding_type, place.compute_kernel, place.widths, place.ranks, place.slots, place.tier


def _ranks(planned: Planned) -> list[tuple[float, int, int]]:
    held = planned.loads
    return list(zip(held.time_ms.tolist(), held.hbm.tolist(), held.ddr.tolist(), strict=True))


def _alike(row: RankChange) -> bool:
    pairs = ((row.before_ms, row.after_ms), (row.before_hbm, row.after_hbm), (row.before_ddr, row.after_ddr))
    return all(
        before is not None and after is not None and abs(before - after) <= SAME * abs(before)
        for before, after in pairs
    )


def _decided(planned: Planned) -> dict[str, str]:
    topology = planned.topology
    return {
        "cost model": planned.cost,
        "batch size": str(planned.batch_size),
        "ranks": f"{topology.world_size}, {planned.problem.local_size} to a host",
        **planned.settings,
    }


def _lines(difference: Difference) -> list[str]:
    lines = [
        f"{name}: {before or 'not said'} -> {after or 'not said'}"
        for name, (before, after) in difference.settings.items()
    ]
    if not difference:
        return [f"no difference: {counted(difference.same_tables, 'table')} placed alike", *lines]
    before, after = difference.step_ms
    change = f" ({after / before - 1:+.1%})" if before > 0 else ""
    lines.append(
        f"step: {ms(before)} -> {ms(after)} ms{change}; bound: {' -> '.join(ms(b) for b in difference.bound_ms)} ms"
    )
    lines.append(f"{counted(len(difference.tables), 'table')} placed otherwise, {difference.same_tables:,} alike")
    for change_of in difference.tables:
        lines.append(f"  {change_of.table}:")
        for sign, place in (("-", change_of.before), ("+", change_of.after)):
            if place is None:
                lines.append(f"    {sign} not in this plan")
            else:
                lines.append(f"    {sign} {place}: {ms(place.work_ms)} ms of all ranks, {gib(place.memory_bytes)} GiB")
    moved = [row for row in difference.ranks if not _alike(row)]
    lines.append(f"{counted(len(moved), 'rank')} of {len(difference.ranks)} with other time or memory")
    for row in moved:
        times = f"{_or_none(row.before_ms)} -> {_or_none(row.after_ms)} ms"
        memories = [
            f"{name} {_gib_or_none(was)} -> {_gib_or_none(now)} GiB"
            for name, was, now in (("HBM", row.before_hbm, row.after_hbm), ("DDR", row.before_ddr, row.after_ddr))
            if was or now
        ]
        lines.append(f"  rank {row.rank}: {', '.join([times, *memories])}")
    return lines


def _or_none(value: float | None) -> str:
    return "no such rank" if value is None else ms(value)


def _gib_or_none(value: int | None) -> str:
    return "none" if value is None else gib(value)
