"""Slots of caches in a plan: chosen by the search, refined between its sizes, and refused where a cache would thrash.

A table with `Tier(slots=None)` has every way with several sizes of its cache, as choices of their own. Misses are
convex in slots, so the relaxation may mix two sizes for any between them: its bound holds for slots of any number, not
of these sizes alone. Where tables lie is the search's to find; for that placement the best slots are a linear program,
whose pieces of memory are the steps from size to size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..constraints import constraint_of
from ..errors import PlannerError, PlannerErrorType
from ..layout import Tier
from ..search.problem import PARTS, Assignment, Choice, Floats, Problem, Solution, chosen, faults, loads
from ..search.relax import relax
from ..tiers import without_functions
from ..topology import GIB

if TYPE_CHECKING:
    from ..tables import Table
    from .planned import Planned

PREFETCH = PARTS.index("prefetch")
# a cache that misses more often, and rows that take so many times as long to come as all else of a step
LEAST_HITS, MOST_PREFETCH = 0.1, 3.0
# of the time of all ranks together beside that of the slowest, when slots are refined: memory that helps none of the
# slowest still helps others
_OTHERS = 1e-3


def has_sizes(problem: Problem) -> bool:
    """Whether the search chooses slots."""
    return any(c.cached is not None and c.cached.chosen for item in problem.items for c in item.choices)


def with_reach(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices, those that are sizes of one cache with the least that sizes up to their neighbours take."""
    rows: dict[Any, list[int]] = {}
    for number, choice in enumerate(choices):
        if choice.cached is not None and choice.cached.chosen:
            rows.setdefault(_way(choice), []).append(number)
    made = list(choices)
    for numbers in rows.values():
        numbers.sort(key=lambda n: _slots(choices[n]))
        for place, number in enumerate(numbers):
            near = [choices[n] for n in numbers[max(0, place - 1) : place + 2]]
            reach = (
                np.min([c.time_ms for c in near], axis=0),
                np.min([c.hbm for c in near], axis=0),
                np.min([c.ddr for c in near], axis=0),
            )
            made[number] = replace(choices[number], reach=reach)
    return tuple(made)


def is_other_size(choice: Choice, other: Choice) -> bool:
    """Whether two choices are one way with other slots."""
    return choice.cached is not None and choice.cached.chosen and _way(choice) == _way(other)


def _way(choice: Choice) -> tuple[Any, ...]:
    """What the sizes of one cache have in common."""
    return choice.sharding_type, choice.compute_kernel, choice.widths, choice.one_host, choice.span


def _slots(choice: Choice) -> int:
    return 0 if choice.cached is None else choice.cached.slots


@dataclass(frozen=True)
class _Sized:
    """A table whose slots are refined: its name, first ranks, and its choices by slots."""

    name: str
    starts: tuple[int, ...]
    choices: tuple[Choice, ...]


def refined(problem: Problem, assignment: Assignment) -> dict[str, int]:
    """The slots by path of table that are best where the tables lie; {} where nothing is gained or scipy is missing."""
    try:
        from scipy.optimize import linprog
    except ImportError:
        return {}
    sized, fixed = [], []
    for item, choice, starts in chosen(problem, assignment):
        if choice.cached is None or not choice.cached.chosen:
            fixed.append((choice, starts))
            continue
        alike = [c for c in item.choices if c.cached is not None and c.cached.chosen and _way(c) == _way(choice)]
        sized.append(_Sized(item.names[0], starts, tuple(sorted(alike, key=_slots))))
    if not sized:
        return {}
    ranks = problem.world_size
    scale = max(float(loads(problem, assignment).time_ms.max()), 1e-12)
    limits = np.maximum(np.stack([problem.hbm, problem.ddr]).astype(np.float64), 1.0)
    # use of each rank: time, hbm, ddr [3, W]; all scaled to about 1
    units = np.concatenate([np.full((1, ranks), scale), limits])
    base = np.concatenate([problem.base_ms[None] / scale, np.zeros((2, ranks))])
    for choice, starts in fixed:
        base += _use(choice, starts, ranks) / units
    steps, owners = [], []
    for each in sized:
        uses = [_use(choice, each.starts, ranks) / units for choice in each.choices]
        base += uses[0]
        for a, b in zip(uses, uses[1:], strict=False):
            steps.append(b - a)
            owners.append(each.name)
    if not steps:
        return {}
    change = np.stack(steps, axis=-1)  # [3, W, pieces]
    cost = np.concatenate([[1.0], _OTHERS / ranks * change[0].sum(axis=0)])
    most = np.concatenate([np.concatenate([-np.ones((ranks, 1)), change[0]], axis=1)])
    rows = [most, *(np.concatenate([np.zeros((ranks, 1)), change[n]], axis=1) for n in (1, 2))]
    room = [-base[0], 1 - base[1], 1 - base[2]]
    found = linprog(
        cost, A_ub=np.concatenate(rows), b_ub=np.concatenate(room), bounds=[(0, None), *[(0, 1)] * len(steps)]
    )
    if found.x is None:
        return {}
    bought: dict[str, list[float]] = {}
    for name, part in zip(owners, found.x[1:].tolist(), strict=True):
        bought.setdefault(name, []).append(part)
    slots = {}
    for each in sized:
        sizes = [_slots(choice) for choice in each.choices]
        parts = bought.get(each.name, [])
        exact = sizes[0] + sum(p * (b - a) for p, a, b in zip(parts, sizes, sizes[1:], strict=False))
        # shards have whole rows, which is up to one more each
        whole = exact >= sizes[-1] - 1e-6 * sizes[-1]
        slots[each.name] = sizes[-1] if whole else max(sizes[0], math.floor(exact) - each.choices[0].span)
    return slots


def _use(choice: Choice, starts: Sequence[int], ranks: int) -> Floats:
    """Milliseconds, hbm and ddr that a choice takes of each rank [3, W]."""
    use = np.zeros((3, ranks))
    for block, start in enumerate(starts):
        where = slice(start, start + choice.span)
        for row, amount in enumerate((choice.time_ms, choice.hbm, choice.ddr)):
            use[row, where] += amount[block]
    return use


def reassigned(problem: Problem, before: Problem, assignment: Assignment, slots: dict[str, int]) -> Assignment | None:
    """The assignment in a problem that has these slots among its sizes; None where it would not fit."""
    numbers = []
    for item, (old, choice, _) in zip(problem.items, chosen(before, assignment), strict=True):
        wanted = slots.get(old.names[0], _slots(choice))
        matching = [n for n, c in enumerate(item.choices) if _way(c) == _way(choice) and _slots(c) == wanted]
        if not matching:
            return None
        numbers.append(matching[0])
    made = Assignment(tuple(numbers), assignment.starts)
    return None if faults(problem, made) else made


def bounded(problem: Problem, assignment: Assignment, steps: int) -> Solution:
    """What is known of a plan with slots that were chosen: the relaxation's bound, which holds for any slots."""
    relaxed = relax(problem)
    time_ms = float(loads(problem, assignment).time_ms.max())
    bound_ms = min(relaxed.bound_ms, time_ms)
    proven = time_ms <= bound_ms * (1 + 1e-6)
    return Solution(assignment, time_ms, bound_ms, f"{relaxed.reason}, slots of any number", proven, steps)


def chosen_tier(tier: Tier | None, choice: Choice) -> Tier | None:
    """The tier of a constraint with the slots that the search chose, which grow where a batch needs more."""
    if tier is None or choice.cached is None or not choice.cached.chosen:
        return tier
    return replace(tier, slots=choice.cached.slots, max_slots=1.0 if tier.max_slots is None else tier.max_slots)


def placed_tier(planned: Planned, table: Table, choice: Choice) -> Tier | None:
    """The tier that a plan gives a table, with names in the place of functions."""
    constraint = constraint_of(planned.request.constraints if planned.request else {}, table.name)
    tier = None if constraint is None or table.served else chosen_tier(constraint.tier, choice)
    return None if tier is None else without_functions(tier)


def in_words(planned: Planned) -> dict[str, str]:
    """What caches do in a plan, in a sentence as "tiers"; nothing of a plan without them."""
    caches = [choice.cached for _, choice, _ in planned.placed() if choice.cached is not None]
    if not caches:
        return {}
    parts = planned.loads.parts_ms
    prefetch, rest = parts[PREFETCH], parts.sum(axis=0) - parts[PREFETCH]
    slowest = int(prefetch.argmax())
    wanted = sum(cached.wanted for cached in caches)
    hits = 1 - sum(cached.misses for cached in caches) / wanted if wanted else 1.0
    hidden = float(np.maximum(prefetch, rest).max())
    return {
        "tiers": f"{len(caches):,} table{'s' * (len(caches) > 1)} below the device, {hits:.1%} of wanted rows on it;"
        f" others take {prefetch[slowest]:.3g} ms of the link to rank {slowest}, all of it counted in a step, which"
        f" with a prefetch behind the rest would take {hidden:.3g} ms"
    }


# ---- plans that would thrash


class ThrashError(PlannerError):
    """A cache would miss nearly always, or its rows would take far longer to come than a step; says what would do.

    Attributes:
        more_bytes: of device memory, by table, on all ranks together.
    """

    def __init__(self, message: str, more_bytes: dict[str, float]) -> None:
        super().__init__(message, PlannerErrorType.INSUFFICIENT_STORAGE)
        self.more_bytes = more_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain data that json can write."""
        return {"error": str(self), "error_type": self.error_type.value, "more_bytes": self.more_bytes}


def faults_of_caches(planned: Planned) -> Iterator[tuple[str, float, bool, str]]:
    """Caches that thrash: table, bytes of device memory that would do, whether the search chose its slots, and why."""
    parts, curves = planned.loads.parts_ms, getattr(planned.request and planned.request.cost, "curve", None)
    prefetch = parts[PREFETCH]
    rest = parts.sum(axis=0) - prefetch
    placed = [entry for entry in planned.placed() if entry[1].cached is not None]
    named = set()
    for table, choice, _ in placed:
        cached = choice.cached
        assert cached is not None
        if cached.wanted >= 1 and cached.hit_rate < LEAST_HITS:
            enough = curves(table).slots_for((1 - LEAST_HITS) * cached.wanted) if curves else math.inf
            enough = min(enough, table.num_embeddings)
            named.add(table.path)
            text = (
                f"{cached.hit_rate:.1%} of the rows that table {table.name!r} wants would be on the device, with"
                f" {cached.slots:,} of its {table.num_embeddings:,} ({cached.source})"
            )
            yield table.name, max(0.0, (enough - cached.slots) * cached.slot_bytes), cached.chosen, text
    slowest = int((prefetch - MOST_PREFETCH * rest).argmax())
    over = float(prefetch[slowest] - MOST_PREFETCH * rest[slowest])
    if over <= 0:
        return
    here = [(_prefetch_ms(choice, starts, slowest), table, choice) for table, choice, starts in placed]
    time, table, choice = max(here, key=lambda entry: entry[0])
    cached = choice.cached
    assert cached is not None
    if table.path in named:
        return
    # of the table that takes most: as many misses fewer as the time is too long, or all of them
    fewer = min(1.0, over / max(time, 1e-12)) * cached.misses
    enough = curves(table).slots_for(cached.misses - fewer) if curves else math.inf
    times = prefetch[slowest] / max(rest[slowest], 1e-12)
    text = (
        f"rows would take {prefetch[slowest]:.3g} ms to come to rank {slowest}, {times:.1f} times the"
        f" {rest[slowest]:.3g} ms of all else in a step; table {table.name!r} takes most of it"
    )
    more = (min(enough, table.num_embeddings) - cached.slots) * cached.slot_bytes
    yield table.name, max(0.0, more), cached.chosen, text


def _prefetch_ms(choice: Choice, starts: Sequence[int], rank: int) -> float:
    """What the rows of a table take to come to one rank."""
    here = [(k, rank - start) for k, start in enumerate(starts) if 0 <= rank - start < choice.span]
    return sum(float(choice.parts_ms[PREFETCH, k, place]) for k, place in here)


def refuse_thrashing(planned: Planned) -> list[str]:
    """Words about caches that thrash with the slots that they were given.

    Raises:
        ThrashError: of those whose slots the search chose.
    """
    found = [*faults_of_caches(planned)]
    refused = [(name, more, text) for name, more, is_chosen, text in found if is_chosen]
    if refused:
        fixes = ", ".join(f"{more / GIB:.3g} GiB more for table {name!r}" for name, more, _ in refused)
        raise ThrashError(
            f"a plan would thrash: {'; '.join(text for _, _, text in refused)}. The smallest fix: {fixes}, of device"
            " memory on all ranks together. Where ids repeat more than this says, give a trace's curves or a skew; or"
            " give slots by Tier(slots=...), which are not refused",
            {name: more for name, more, _ in refused},
        )
    return [f"{text}: {more / GIB:.3g} GiB more would do" for _, more, _, text in found]
