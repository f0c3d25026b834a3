"""First packings: a choice for each item by what work and memory are worth, then block after block, largest first."""

from __future__ import annotations

import numpy as np

from .packing import Packing
from .problem import Floats, Ints
from .search_space import Space


def choose(space: Space, longest_ms: float, prices: Floats) -> Ints:
    """The choice of each item [N] with the least work and priced memory among those of blocks up to `longest_ms`.

    An item whose blocks are all longer gets the choice with the shortest.
    """
    if not len(space.groups):
        return np.zeros(0, np.int64)
    cost = space.work + np.tensordot(prices, space.memory, axes=1)
    least = space.biggest.min(axis=1, keepdims=True)
    cost[space.biggest > np.maximum(longest_ms, least)] = np.inf
    return cost.argmin(axis=1)


def relaxed(space: Space) -> tuple[float, Floats]:
    """A time that no rank can stay under if blocks could be divided at will, and the work that a byte is worth [R - 1].

    Bisection on the time and on one price for each memory.
    """
    base = -space.limits[0]
    kinds = len(space.limits) - 1
    prices = np.zeros(kinds)
    if not len(space.groups):
        return float(base.max()), prices
    have = space.limits[1:].sum(axis=1)
    low = max(float((space.biggest.min(axis=1)).max() + base.min()), float(base.max()))
    high = max(low, float(base.max() + space.work.min(axis=1).sum())) * (1 + 1e-9)
    rows = np.arange(len(space.groups))
    for _ in range(40):
        middle = (low + high) / 2 if high > 2 * low or low <= 0 else (low + high) / 2
        longest = middle - float(base.min())
        prices = _prices(space, longest, have)
        chosen = choose(space, longest, prices)
        work = space.work[rows, chosen].sum()
        used = space.memory[:, rows, chosen].sum(axis=1)
        bound = work + float(prices @ (used - have))
        if bound + base.sum() > middle * space.ranks:
            low = middle
        else:
            high = middle
        if high - low <= 1e-6 * high:
            break
    return high, prices


def _prices(space: Space, longest_ms: float, have: Floats) -> Floats:
    """What a byte of each memory is worth, so that the cheapest choices just fit all ranks together."""
    prices = np.zeros(len(have))
    rows = np.arange(len(space.groups))
    scale = float(space.work[np.isfinite(space.work)].sum())
    for _ in range(2 if len(have) > 1 else 1):
        for m in range(len(have)):
            prices[m] = 0.0
            if space.memory[m, rows, choose(space, longest_ms, prices)].sum() <= have[m]:
                continue
            low, high = 0.0, 1e3 * scale / max(have[m], 1.0)
            for _ in range(40):
                middle = np.sqrt(low * high) if low > 0 else high * 1e-9
                prices[m] = middle
                over = space.memory[m, rows, choose(space, longest_ms, prices)].sum() > have[m]
                low, high = (middle, high) if over else (low, middle)
                if high < 1.01 * low:
                    break
            prices[m] = high
    return prices


def construct(packing: Packing, chosen: Ints, rule: str) -> None:
    """Fill an empty packing: each item by its choice, the largest blocks first.

    Args:
        rule: "balance" puts a block where time and memory are both least used; "time" where time is, if memory allows.
    """
    space = packing.space
    spans = np.array([space.blocks[i][n].shape[2] for i, n in enumerate(chosen)])
    room = np.maximum(space.limits, 0)
    room[0] = max(packing.target, 1e-300)
    share = np.zeros(len(chosen))
    for i, n in enumerate(chosen):
        block = space.blocks[i][n]
        size = (block.max(axis=(1, 2)) / np.maximum(room.max(axis=1), 1e-300))
        share[i] = size.max() if rule == "balance" else size[0]
    for i in np.lexsort((np.arange(len(chosen)), -share, -spans)).tolist():
        number = int(chosen[i])
        if spans[i] == 1:
            _lay_least(packing, i, number, rule)
        else:
            packing.put(i, number)


def _lay_least(packing: Packing, i: int, number: int, rule: str) -> None:
    space = packing.space
    blocks = space.blocks[i][number]
    group = next(g for g in space.groups[i] if g.span == 1)
    biggest = blocks.max(axis=1)
    after = packing.room + biggest
    over = (after[1:] > 0).any(axis=0)
    score = after[0] / max(packing.target, 1e-300) + 1
    if rule == "balance":
        for d in range(1, len(after)):
            score = np.maximum(score, after[d] / np.maximum(space.limits[d], 1) + 1)
    score[over] = np.inf
    if group.closed is not None:
        score[group.closed] = np.inf
    count = blocks.shape[1]
    if count == 1:
        where = np.array([score.argmin()])
    elif count <= len(score) and not packing.space.problem.items[i].choices[number].one_host:
        where = np.argpartition(score, count - 1)[:count]
    else:
        where = None
    if where is not None and np.isfinite(score[where]).all():
        packing.lay(i, number, tuple(int(w) for w in where))
        return
    # memory is short: any choice, wherever it does least harm
    packing.put(i, packing.weigh(i)[1])
