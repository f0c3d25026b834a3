"""Better packings from a packing: moves of the busiest ranks, then removing a few items and placing them anew.

Work is counted in steps: one looks at a rank or places an item. No clock is read here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .packing import Packing, Snapshot

# ranks that are looked at before a packing counts as one that no single move improves
RANKS_TRIED = 4
# items removed at a time
REMOVED = 8
# how much worse than the best a packing may be to go on from, as a share
WORSE = 0.02
LEAST = 1e-12


def improve(packing: Packing, generator: np.random.Generator) -> Iterator[int]:
    """Lower the pressure for as long as the caller goes on; yields the steps spent after each change or try.

    The packing is consistent whenever this yields; the caller keeps those that it likes and may change the target.
    """
    steps = 0
    for spent in descend(packing):
        steps += spent
        yield steps
    best, kept = packing.total, packing.keep()
    target = packing.target
    while True:
        if packing.target != target:
            target, best, kept = packing.target, packing.total, packing.keep()
        removed = _pick(packing, generator)
        for i in removed:
            packing.take(i)
        sizes = np.array([float(packing.space.biggest[i].min()) for i in removed])
        order = np.argsort(-sizes * generator.uniform(0.5, 1.5, len(removed)))
        for i in order.tolist():
            packing.put(removed[i], packing.weigh(removed[i])[1])
        steps += len(removed)
        for spent in descend(packing):
            steps += spent
        if packing.total <= best * (1 + WORSE * generator.random() ** 4):
            # a snapshot is kept even if a little worse, so that plateaus are crossed
            best, kept = packing.total, packing.keep()
        else:
            packing.restore(kept)
        yield steps


def descend(packing: Packing) -> Iterator[int]:
    """Moves that lower the pressure, of the ranks under most pressure, until there is none; yields steps."""
    while True:
        order = np.argsort(-packing.here, kind="stable")[:RANKS_TRIED]
        for rank in order.tolist():
            if packing.here[rank] <= 0:
                return
            yield 1
            if _shift_or_swap(packing, rank) or _choose_anew(packing, rank):
                break
        else:
            return


def _shift_or_swap(packing: Packing, rank: int) -> bool:
    shift, block, there = packing.best_shift(rank)
    swap, mine, other = packing.best_swap(rank)
    least = -max(LEAST, 1e-6 * packing.total)
    if min(shift, swap) >= least:
        return False
    if shift <= swap:
        packing.shift(block, there)
    else:
        rank, there = int(packing.at[mine]), int(packing.at[other])
        packing.shift(mine, there)
        packing.shift(other, rank)
    packing.weigh_all()
    return True


def _choose_anew(packing: Packing, rank: int) -> bool:
    """Place one item of `rank` anew, by any choice, if that lowers the pressure."""
    before = packing.total
    for i in packing.items_on(rank):
        number, starts = packing.chosen[i], packing.starts[i]
        cost = float(packing.cost(i)[number])
        packing.take(i)
        rise, other = packing.weigh(i)
        if packing.total + rise < before + cost - max(LEAST, 1e-6 * before):
            packing.put(i, other)
            if packing.total < before - LEAST:
                return True
            packing.take(i)
        packing.lay(i, number, starts)
    return False


def _pick(packing: Packing, generator: np.random.Generator) -> list[int]:
    """Items to remove: some of the rank under most pressure, some of others, some that lie on many ranks."""
    ranks = [int(packing.here.argmax())]
    world = packing.space.ranks
    ranks += generator.integers(world, size=int(generator.integers(1, 4))).tolist()
    found: dict[int, None] = {}
    for rank in ranks:
        mine = packing.items_on(rank)
        if mine:
            count = min(len(mine), 1 + REMOVED // len(ranks))
            found.update(dict.fromkeys(np.array(mine)[generator.permutation(len(mine))[:count]].tolist()))
    everything = len(packing.chosen)
    if generator.random() < 0.5:
        found[int(generator.integers(everything))] = None
    return list(found)
