"""The fractional relaxation of a problem: a mix of choices for each item, wherever there is room.

It says how fast a plan could be if tables were sand, and is the cheapest bound. For a target of z milliseconds only
those choices are usable whose every block fits under z somewhere. Of these the least total work is taken, one choice or
a mix of choices for each item, within the memory of all ranks together. If even that is more than all ranks can do in
z, no plan reaches z. The smallest z that survives is a proven bound. With limits of memory the least work is a linear
program; its dual has a price for a byte of each memory, and any price gives a valid bound, so nothing here rests on a
solver's tolerance.

The same argument holds for any part of the ranks, with what an item must do inside that part; parts are worth asking
about where items may use some ranks only, or ranks differ in memory.

Letters: I items, C most choices of an item, W ranks, K blocks, S span, z a target in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .problem import Choice, Floats, Problem

Bools = npt.NDArray[np.bool_]

# sums of thousands of doubles differ by their order; bounds give this much away, a thousand times more than needed
ROUNDING = 1e-11
# of the price of a byte: more would change the last digits only
BISECTIONS = 45


@dataclass(frozen=True, eq=False)
class Options:
    """Every choice of every item as arrays [I, C]; rows are padded with choices that need an infinite target.

    Args:
        work_ms, hbm, ddr: least that a choice does and holds inside the part of the ranks that is looked at.
        need_ms: smallest target under which each of its blocks fits somewhere, infinite if memory forbids it.
    """

    work_ms: Floats
    hbm: Floats
    ddr: Floats
    need_ms: Floats


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The relaxation's result.

    Args:
        bound_ms: no plan is faster; infinite if memory allows no plan.
        reason: how it was found, in words.
        mix: share of each choice [I, C] in the relaxed optimum, rows sum to 1; at most a few items are truly mixed.
        options: all choices as arrays, for all ranks.
        ms_per_hbm_byte, ms_per_ddr_byte: what a byte is worth at the optimum, 0 where memory does not bind.
    """

    bound_ms: float
    reason: str
    mix: Floats
    options: Options
    ms_per_hbm_byte: float = 0.0
    ms_per_ddr_byte: float = 0.0


@dataclass(frozen=True, eq=False)
class Region:
    """Where the blocks of a choice may lie: the different places [N, S] of a block, and what the ranks sum up to.

    Args:
        hbm, ddr, base_ms, inside: limits, what ranks do anyway, and whether they belong to the part [N, S].
        hbm_sum, ddr_sum, mean_base_ms, ranks: of the ranks of the region.
    """

    hbm: Floats
    ddr: Floats
    base_ms: Floats
    inside: Floats
    hbm_sum: float
    ddr_sum: float
    mean_base_ms: float
    ranks: int


def relax(problem: Problem) -> Relaxed:
    """The strongest bound of this kind, over all ranks and over parts of them.

    `mix` and the prices are those of all ranks together.
    """
    best = _relax_part(problem, np.ones(problem.world_size, bool), "mean of all ranks")
    for part in parts_of(problem):
        of_part = _relax_part(problem, part, f"mean of ranks {_in_words(part)}")
        if of_part.bound_ms > best.bound_ms:
            best = replace(best, bound_ms=of_part.bound_ms, reason=of_part.reason)
    return best


def parts_of(problem: Problem, most: int = 16) -> list[Bools]:
    """Parts of the ranks that may be scarce: those that items name, and those with more memory than others."""
    world = problem.world_size
    named = dict.fromkeys(item.ranks for item in problem.items if item.ranks is not None)
    parts = [np.isin(np.arange(world), ranks) for ranks in named]
    for limit in (problem.hbm, problem.ddr):
        parts += [limit >= least for least in np.unique(limit)[1:]]
    different = {part.tobytes(): part for part in parts if 0 < part.sum() < world}
    return list(different.values())[:most]


def options_of(problem: Problem, part: Bools | None = None) -> Options:
    """All choices as arrays, for a part of the ranks (by default all)."""
    part = np.ones(problem.world_size, bool) if part is None else part
    shape = len(problem.items), max((len(item.choices) for item in problem.items), default=0)
    options = Options(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.full(shape, np.inf))
    regions: dict[tuple[int, bool, tuple[int, ...] | None], list[Region]] = {}
    for i, item in enumerate(problem.items):
        for c, choice in enumerate(item.choices):
            key = choice.span, choice.one_host, item.ranks
            if key not in regions:
                regions[key] = _regions(problem, *key, part)
            fits = [measured for region in regions[key] if (measured := _measure(choice, region)) is not None]
            if fits:
                least = np.min(fits, axis=0)
                options.need_ms[i, c], options.work_ms[i, c], options.hbm[i, c], options.ddr[i, c] = least
    return options


def _regions(problem: Problem, span: int, one_host: bool, ranks: tuple[int, ...] | None, part: Bools) -> list[Region]:
    """One region, or one for each host that differs from the others."""
    world, local = problem.world_size, problem.local_size
    allowed = np.ones(world, bool) if ranks is None else np.isin(np.arange(world), ranks)
    bounds = [(h, h + local) for h in range(0, world, local)] if one_host else [(0, world)]
    rows = [array.astype(np.float64) for array in (problem.hbm, problem.ddr, problem.base_ms, part, allowed)]
    regions: dict[bytes, Region] = {}
    for begin, end in bounds:
        here = np.stack([row[begin:end] for row in rows])  # [5, ranks]
        places = here.reshape(5, -1, span)  # [5, places, span]
        places = places[:, places[4].all(axis=1)]
        if here.tobytes() in regions or not places.shape[1]:
            continue
        _, index = np.unique(places.transpose(1, 0, 2).reshape(places.shape[1], -1), axis=0, return_index=True)
        used = here[:, here[4] > 0]
        hbm, ddr, base, inside, _ = places[:, index]
        sums = float(used[0].sum()), float(used[1].sum()), float(used[2].mean())
        regions[here.tobytes()] = Region(hbm, ddr, base, inside, *sums, used.shape[1])
    return list(regions.values())


def _measure(choice: Choice, region: Region) -> tuple[float, float, float, float] | None:
    """need_ms, work_ms, hbm and ddr of a choice in a region; None where it does not fit."""
    time, hbm, ddr = choice.time_ms, choice.hbm, choice.ddr
    # what decides whether it may be used; a mix with a neighbour takes less than itself where it has one
    least = (time, hbm, ddr) if choice.reach is None else choice.reach
    if choice.span == region.ranks:
        # blocks over all ranks lie on top of each other
        time, hbm, ddr = (array.sum(axis=0, keepdims=True) for array in (time, hbm, ddr))
        least = (least[0].sum(0, keepdims=True), least[1].sum(0, keepdims=True), least[2].sum(0, keepdims=True))
    elif least[1].sum() > region.hbm_sum or least[2].sum() > region.ddr_sum:
        return None
    # [K, N, S], and [K, N] once the places of the span are summed up
    fits = ((least[1][:, None] <= region.hbm) & (least[2][:, None] <= region.ddr)).all(axis=2)
    needs = np.where(fits, (least[0][:, None] + region.base_ms).max(axis=2), np.inf).min(axis=1)
    if not np.isfinite(needs).all():
        return None
    inside = [np.where(fits, array @ region.inside.T, np.inf).min(axis=1).sum() for array in (time, hbm, ddr)]
    need = max(needs.max(), least[0].sum() / region.ranks + region.mean_base_ms)
    return float(need), float(inside[0]), float(inside[1]), float(inside[2])


def _relax_part(problem: Problem, part: Bools, reason: str) -> Relaxed:
    """The bound that a part of the ranks gives: binary search over the targets at which choices become usable."""
    options = options_of(problem, part)
    limits = float(problem.hbm[part].sum()), float(problem.ddr[part].sum())
    base, ranks = float(problem.base_ms[part].sum()), int(part.sum())
    least = max(float(options.need_ms.min(axis=1, initial=np.inf).max(initial=0.0)), float(problem.base_ms.max()))
    if not np.isfinite(least):
        nowhere = options.need_ms.min(axis=1, initial=np.inf).argmax()
        names = ", ".join(problem.items[nowhere].names)
        return Relaxed(
            np.inf, f"{names}: no choice fits on the ranks that it may use", np.zeros_like(options.work_ms), options
        )
    steps = np.unique(options.need_ms[np.isfinite(options.need_ms) & (options.need_ms > least)])
    targets = np.concatenate([[least], steps])
    at_target: dict[int, tuple[float, Cheapest]] = {}

    def reached(n: int) -> float:
        """The target that the choices usable at `targets[n]` allow."""
        score = np.where(options.need_ms <= targets[n], options.work_ms, np.inf)
        cheapest = least_work(score, ((options.hbm, limits[0]), (options.ddr, limits[1])))
        at_target[n] = max(float(targets[n]), (cheapest.value_ms + base) / ranks), cheapest
        return at_target[n][0]

    low, high = 0, len(targets) - 1
    while low < high:
        middle = (low + high) // 2
        if reached(middle) < targets[middle + 1]:
            high = middle
        else:
            low = middle + 1
    # below targets[low] the choices that are usable there do not reach it: that was seen on the way
    bound = reached(low)
    cheapest = at_target[low][1]
    if np.isinf(bound):
        return Relaxed(np.inf, "all tables together need more memory than there is", cheapest.mix, options)
    if bound == least and len(problem.items):
        reason = "largest block of a table"
    return Relaxed(bound * (1 - ROUNDING), reason, cheapest.mix, options, *cheapest.prices)


@dataclass(frozen=True, eq=False)
class Cheapest:
    """Least work within limits: a lower bound of it, the mix [I, C] that has it, and the price of each limit."""

    value_ms: float
    mix: Floats
    prices: tuple[float, ...]


def least_work(score: Floats, limits: Sequence[tuple[Floats, float]]) -> Cheapest:
    """Minimum of the sum over items of a mix of `score` [I, C], keeping sums of amounts [I, C] within limits.

    By Lagrange prices, bisected one inside the other; scores may be infinite. The value is infinite if even the least
    amounts exceed a limit.
    """
    for amount, limit in limits:
        if np.where(np.isfinite(score), amount, np.inf).min(axis=1).sum() > limit:
            return Cheapest(np.inf, np.zeros_like(score), (0.0,) * len(limits))
    mix, prices = _priced(score, limits)
    priced = score + sum(price * amount for price, (amount, _) in zip(prices, limits, strict=True))  # [I, C]
    value = priced.min(axis=1).sum() - sum(price * limit for price, (_, limit) in zip(prices, limits, strict=True))
    return Cheapest(float(value), mix, prices)


def _priced(score: Floats, limits: Sequence[tuple[Floats, float]]) -> tuple[Floats, tuple[float, ...]]:
    """The mix and the prices at the maximum of the dual."""
    if not limits:
        mix = np.zeros_like(score)
        mix[np.arange(len(score)), score.argmin(axis=1)] = 1
        return mix, ()
    amount, limit = limits[-1]

    def at(price: float) -> tuple[Floats, tuple[float, ...], float]:
        mix, inner = _priced(score + price * amount, limits[:-1])
        return mix, (*inner, price), float((mix * amount).sum())

    low, high = at(0.0), None
    if low[2] <= limit:
        return low[0], low[1]
    # a price at which the amount is below the limit: finite, because the least amount is
    price = float(np.where(np.isfinite(score), score, 0).sum()) / limit + np.finfo(float).tiny
    for _ in range(200):
        high = at(price)
        if high[2] <= limit:
            break
        low, price = high, price * 8
    assert high is not None
    for _ in range(BISECTIONS):
        middle = at((low[1][-1] + high[1][-1]) / 2)
        if middle[2] > limit:
            low = middle
        else:
            high = middle
    share = (limit - high[2]) / (low[2] - high[2]) if low[2] > high[2] else 0.0
    return share * low[0] + (1 - share) * high[0], high[1]


def _in_words(part: Bools) -> str:
    """1-3, 5."""
    ranks = np.flatnonzero(part)
    runs = np.split(ranks, np.flatnonzero(np.diff(ranks) > 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
