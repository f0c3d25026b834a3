"""Alternatives to a plan: the cost of every other choice of an item, with all the others where they are.

Letters as in search/problem.py: W ranks, K blocks of a choice, S span; N places, the ranks at which a block may begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..search.problem import (
    Choice,
    Floats,
    Ints,
    chosen,
)

if TYPE_CHECKING:
    from .planned import Planned


@dataclass(frozen=True)
class Alternative:
    """One choice for an item, where it is best for that choice while everything else stays.

    Blocks that cost the same are placed as well as can be; unequal ones one by one, the slowest first.

    Args:
        number: of the choice in the item's `choices`.
        starts: the first rank of each block.
        step_ms: the slowest rank's time then.
        slower_ms: how much more that is than in the plan; negative where it would be faster.
        work_ms: of the item on all ranks together.
        more_work_ms: how much more that is than in the plan.
        over_bytes: what the rank that lacks most has too little; 0 where the choice fits.
        over_in: the memory that lacks it, "hbm" or "ddr".
    """

    number: int
    starts: tuple[int, ...]
    step_ms: float
    slower_ms: float
    work_ms: float
    more_work_ms: float
    over_bytes: int = 0
    over_in: str = "hbm"

    @property
    def fits(self) -> bool:
        """No rank would lack memory."""
        return self.over_bytes == 0


@dataclass(frozen=True, eq=False)
class _Rest:
    """The ranks without an item: time, and the bytes [W] that the others leave; `allowed` ranks may hold the item."""

    time_ms: Floats
    hbm: Ints
    ddr: Ints
    allowed: list[bool] | None
    local_size: int


def alternatives(planned: Planned, items: Iterable[int] | None = None) -> dict[int, list[Alternative]]:
    """For each of `items` (indices in the problem, all by default) every choice it has, the chosen one as it stands."""
    problem, assignment = planned.problem, planned.solution.assignment
    now = planned.loads
    step = float(now.time_ms.max())
    by_item = {}
    for index in range(len(problem.items)) if items is None else items:
        item, chosen, starts = problem.items[index], assignment.choices[index], assignment.starts[index]
        current = item.choices[chosen]
        time, hbm, ddr = now.time_ms.copy(), problem.hbm - now.hbm, problem.ddr - now.ddr  # [W]
        for block, start in enumerate(starts):
            where = slice(start, start + current.span)
            time[where] -= current.time_ms[block]
            hbm[where] += current.hbm[block]
            ddr[where] += current.ddr[block]
        allowed = None if item.ranks is None else np.isin(np.arange(problem.world_size), item.ranks).tolist()
        rest = _Rest(time, hbm, ddr, allowed, problem.local_size)
        ways = []
        for number, choice in enumerate(item.choices):
            if number == chosen:
                ways.append(Alternative(number, starts, step, 0.0, choice.work_ms, 0.0))
                continue
            places, over = _best_places(choice, rest)
            if places is None:
                continue
            slowest = _slowest(choice, places, rest)
            more = choice.work_ms - current.work_ms
            ways.append(Alternative(number, places, slowest, slowest - step, choice.work_ms, more, *over))
        by_item[index] = ways
    return by_item


def slowest_ranks(planned: Planned, within: float = 1e-3) -> list[int]:
    """The ranks whose time is that of the slowest, up to a share `within` of it; the slowest first."""
    time = planned.loads.time_ms
    near = np.flatnonzero(time >= time.max() * (1 - within))
    return sorted(near.tolist(), key=lambda rank: (-time[rank], rank))


@dataclass(frozen=True)
class Piece:
    """One item's part on one rank: `blocks` of its choice, their milliseconds and bytes."""

    item: int
    blocks: int
    time_ms: float
    hbm: int
    ddr: int


def pieces(planned: Planned) -> list[list[Piece]]:
    """The pieces on each rank, by item."""
    problem, assignment = planned.problem, planned.solution.assignment
    by_rank: list[list[Piece]] = [[] for _ in range(problem.world_size)]
    for index, (_, choice, starts) in enumerate(chosen(problem, assignment)):
        here: dict[int, list[tuple[float, int, int]]] = {}
        columns = [array.tolist() for array in (choice.time_ms, choice.hbm, choice.ddr)]
        for block, start in enumerate(starts):
            for place, amounts in enumerate(zip(*(column[block] for column in columns), strict=True)):
                here.setdefault(start + place, []).append(amounts)
        for rank in sorted(here):
            time, hbm, ddr = (sum(amounts) for amounts in zip(*here[rank], strict=True))
            by_rank[rank].append(Piece(index, len(here[rank]), time, hbm, ddr))
    return by_rank


def _slowest(choice: Choice, starts: tuple[int, ...], rest: _Rest) -> float:
    if choice.span == 1 and len(starts) == 1:
        return max(float(rest.time_ms.max()), float(rest.time_ms[starts[0]] + choice.time_ms[0, 0]))
    time = rest.time_ms.copy()
    for block, start in enumerate(starts):
        time[start : start + choice.span] += choice.time_ms[block]
    return float(time.max())


def _best_places(choice: Choice, rest: _Rest) -> tuple[tuple[int, ...] | None, tuple[int, str]]:
    """The places for all blocks that make the slowest rank fastest, else those that lack least; and what they lack."""
    equal = choice.blocks == 1 or all((array == array[0]).all() for array in (choice.time_ms, choice.hbm, choice.ddr))
    groups = rest.time_ms.size // rest.local_size if choice.one_host else 1
    place = _place_equal if equal else _place_each
    for within_memory in (True, False):
        starts = place(choice, rest, groups, within_memory)
        if starts is not None:
            return starts, (0, "hbm") if within_memory else _lacks(choice, starts, rest)
    return None, (0, "hbm")


def _place_equal(choice: Choice, rest: _Rest, groups: int, within_memory: bool) -> tuple[int, ...] | None:
    """K equal blocks, all in one of `groups` equal groups of ranks; None if they cannot be there.

    The value of (place, k) is what the place is like with k of the blocks. It grows with k, so that the K smallest
    values of a group name a best way to spread the blocks, and the largest of them says how good it is.
    """
    shape = (-1, choice.span, 1)
    count = np.arange(1, choice.blocks + 1)  # [K]
    hbm = rest.hbm.reshape(shape) - choice.hbm[0][:, None] * count  # [places, S, K]
    ddr = rest.ddr.reshape(shape) - choice.ddr[0][:, None] * count
    room = np.minimum(hbm, ddr).min(axis=1)  # [places, K]
    if within_memory:
        value = (rest.time_ms.reshape(shape) + choice.time_ms[0][:, None] * count).max(axis=1)
        value[room < 0] = np.inf
    else:
        value = np.maximum(-room, 0).astype(np.float64)
    if rest.allowed is not None:
        value[~np.array(rest.allowed).reshape(-1, choice.span).all(axis=1)] = np.inf
    # [groups, K * places], one block everywhere before two anywhere, so that ties spread
    flat = value.reshape(groups, -1, choice.blocks).swapaxes(1, 2).reshape(groups, -1)
    last = np.partition(flat, choice.blocks - 1, axis=1)[:, choice.blocks - 1]  # [groups]
    group = int(last.argmin())
    if not np.isfinite(last[group]):
        return None
    places = flat.shape[1] // choice.blocks
    below = np.flatnonzero(flat[group] < last[group])
    ties = np.flatnonzero(flat[group] == last[group])[: choice.blocks - below.size]
    chosen = np.sort(np.concatenate([below, ties]) % places)
    return tuple(((group * places + chosen) * choice.span).tolist())


def _place_each(choice: Choice, rest: _Rest, groups: int, within_memory: bool) -> tuple[int, ...] | None:
    """Unequal blocks one by one, the slowest first, in the group of ranks where that ends best."""
    order = sorted(range(choice.blocks), key=lambda k: (-float(choice.time_ms[k].max()), k))
    size = rest.time_ms.size // groups
    best: tuple[float, tuple[int, ...]] | None = None
    for group in range(groups):
        ranks = slice(group * size, (group + 1) * size)
        allowed = None if rest.allowed is None else rest.allowed[ranks]
        left = _Rest(
            rest.time_ms[ranks].copy(), rest.hbm[ranks].copy(), rest.ddr[ranks].copy(), allowed, rest.local_size
        )
        starts = [0] * choice.blocks
        for block in order:
            single = Choice(
                choice.sharding_type, choice.compute_kernel, choice.widths[block : block + 1],
                choice.parts_ms[:, block : block + 1], choice.hbm[block : block + 1], choice.ddr[block : block + 1],
            )  # fmt: skip
            place = _place_equal(single, left, 1, within_memory)
            if place is None:
                break
            where = slice(place[0], place[0] + choice.span)
            left.time_ms[where] += choice.time_ms[block]
            left.hbm[where] -= choice.hbm[block]
            left.ddr[where] -= choice.ddr[block]
            starts[block] = place[0] + group * size
        else:
            worst = left.time_ms.max() if within_memory else max(0, -left.hbm.min(), -left.ddr.min())
            if best is None or float(worst) < best[0]:
                best = float(worst), tuple(starts)
    return None if best is None else best[1]


def _lacks(choice: Choice, starts: tuple[int, ...], rest: _Rest) -> tuple[int, str]:
    hbm, ddr = rest.hbm.copy(), rest.ddr.copy()
    for block, start in enumerate(starts):
        hbm[start : start + choice.span] -= choice.hbm[block]
        ddr[start : start + choice.span] -= choice.ddr[block]
    return max((int(-hbm.min()), "hbm"), (int(-ddr.min()), "ddr"), key=lambda lack: lack[0])
