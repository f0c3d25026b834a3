"""First packings: a choice for each item by what work and memory are worth, then item after item, largest first.

A choice with long blocks does least work and packs worst; so the choices of several longest blocks are tried, and
several rules for where a block goes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .packing import Packing
from .problem import Floats, Ints
from .space import Space

# blocks at most, as shares of the target and of a rank's memory
LARGEST = tuple((time, memory) for time in (1.0, 0.7, 0.5, 0.35, 0.25, 0.15) for memory in (1.0, time))
# where blocks go: where time and memory are both least used, where time is, where memory is just enough
RULES = ("balance", "time", "fill")
# blocks are alike if their sizes differ by no larger share
ALIKE = 0.05
# times that a packing under a target is made, with what did not fit the time before in another way
PASSES = 3


def construct(space: Space, target_ms: float, prices: Floats) -> Iterator[Packing]:
    """Packings of all items, which may be over limits.

    Args:
        target_ms: that ranks should stay under.
        prices: milliseconds that a byte of each memory is worth [R - 1].
    """
    base = -float(space.limits[0].max())
    most = np.concatenate([[target_ms - base], space.limits[1:].max(axis=1)])
    wanted = [choose(space, most * [time, *[memory] * len(prices)], prices) for time, memory in LARGEST]
    different = {chosen.tobytes(): chosen for chosen in wanted}
    fits = False
    for rule in RULES:
        if rule == "fill" and fits:
            return
        for chosen in different.values():
            packing = Packing(space, target_ms, prices)
            fill(packing, chosen, rule)
            fits = fits or packing.fits
            yield packing


def choose(space: Space, largest: Floats, prices: Floats) -> Ints:
    """The choice of each item [N] with the least work and priced memory, of those with no larger block than `largest`.

    Args:
        largest: milliseconds and bytes [R]. An item whose blocks are all larger gets the least large.
    """
    if not space.groups:
        return np.zeros(0, np.int64)
    cost = space.work + np.tensordot(prices, space.memory, axes=1)
    large = (space.biggest / np.maximum(largest, 1e-300)[:, None, None]).max(axis=0)
    large[np.isinf(space.work)] = np.inf
    cost[large > np.maximum(large.min(axis=1, keepdims=True), 1)] = np.inf
    found: Ints = cost.argmin(axis=1)
    return found


def repack(space: Space, target_ms: float, prices: Floats) -> Iterator[Packing]:
    """Packings whose blocks stay under the target where they can; items that do not fit get another choice.

    Those are placed first the next time, since they mostly lie on many ranks then; ends when the choices settle.
    """
    base = -float(space.limits[0].max())
    chosen = choose(space, np.concatenate([[target_ms - base], space.limits[1:].max(axis=1)]), prices)
    for _ in range(PASSES):
        packing = Packing(space, target_ms, prices)
        fill(packing, chosen, "under")
        yield packing
        if packing.chosen == chosen.tolist() or packing.total <= 0:
            return
        chosen = np.array(packing.chosen)


def fill(packing: Packing, chosen: Ints, rule: str) -> None:
    """Fill an empty packing: first blocks of many ranks, which have few places, then large before small.

    Of blocks of one size those come last that another choice would suit as well.
    """
    space = packing.space
    most = np.maximum(space.limits.max(axis=1), 1e-300)
    most[0] = max(packing.target, 1e-300)
    rows = np.arange(len(chosen))
    shares = space.biggest[:, rows, chosen] / most[:, None]
    sizes = shares[0] if rule == "time" else shares.max(axis=0)
    spans = np.array([space.of(i, number).shape[2] for i, number in enumerate(chosen.tolist())])
    costs = space.work + np.tensordot(packing.prices, space.memory, axes=1)
    regrets = np.where(space.biggest[0] < space.biggest[0, rows, chosen][:, None], costs, np.inf).min(axis=1)
    regrets = regrets - costs[rows, chosen]
    sizes = np.ceil(np.log(np.maximum(sizes, 1e-300)) / np.log1p(ALIKE)) if rule == "under" else sizes
    for i in np.lexsort((-regrets, -sizes, -spans)).tolist():
        number = int(chosen[i])
        if spans[i] > 1 or not _lay(packing, i, number, rule):
            packing.put(i, number if spans[i] > 1 else packing.weigh(i)[1])


def _lay(packing: Packing, i: int, number: int, rule: str) -> bool:
    """Place blocks of one rank each by the rule; False if there is no room or they must share a rank or a host."""
    space = packing.space
    blocks = space.of(i, number)
    count = blocks.shape[1]
    if count > space.ranks or space.problem.items[i].choices[number].one_host:
        return False
    after = packing.room + blocks[:, :, 0].max(axis=1)[:, None]
    score = after[0] / max(packing.target, 1e-300)
    if rule != "time":
        shares = after[1:] / np.maximum(space.limits[1:], 1)
        score = -shares.sum(axis=0) if rule == "fill" else np.maximum(score, shares.max(axis=0, initial=-1))
    score[(after[0 if rule == "under" else 1 :] > 0).any(axis=0)] = np.inf
    if packing.closed is not None:
        score[packing.closed[i]] = np.inf
    where = np.argpartition(score, count - 1)[:count] if count > 1 else score.argmin(keepdims=True)
    if not np.isfinite(score[where]).all():
        return False
    packing.lay(i, number, tuple(where.tolist()))
    return True
