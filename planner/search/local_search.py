"""Better packings from a packing: moves of the busiest ranks, then removing a few items and placing them anew.

Work is counted in steps: one looks at a rank or places an item. No clock is read here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .packing import Packing

# ranks that are looked at before a packing counts as one that no single move improves
RANKS_TRIED = 4
# items removed at a time
REMOVED = 8
# how much worse than the best a packing may be to go on from, as a share
WORSE = 0.02
# how often an item gets a choice that is not the best for it
FORCED = 0.25
# how often two items change roles
TRADED = 0.25
LEAST = 1e-12


def improve(packing: Packing, generator: np.random.Generator) -> Iterator[int]:
    """Lower the pressure for as long as the caller goes on; yields the steps spent since it last did.

    The packing is consistent whenever this yields; the caller keeps those that it likes and may change the target.
    """
    yield from descend(packing)
    best, kept, target = packing.total, packing.keep(), packing.target
    while packing.chosen:
        if packing.target != target:
            best, kept, target = packing.total, packing.keep(), packing.target
        disturbed = _disturb(packing, generator)
        for i, number in disturbed:
            packing.put(i, packing.weigh(i)[1] if number < 0 else number)
        steps = len(disturbed) + sum(descend(packing))
        if packing.total <= best * (1 + WORSE * generator.random() ** 4):
            # one that is a little worse is kept too, so that plateaus are crossed
            best, kept = packing.total, packing.keep()
        else:
            packing.restore(kept)
        yield steps


def _disturb(packing: Packing, generator: np.random.Generator) -> list[tuple[int, int]]:
    """Remove some items; returns them in the order in which to place them again, with a choice or -1 for any."""
    removed = _pick(packing, generator)
    kind = generator.random()
    first = forced = -1
    if kind < TRADED:
        # one that lies on many ranks and one that does not change roles
        wide = np.flatnonzero(packing.spans > 1)
        if len(wide):
            i, first = int(wide[generator.integers(len(wide))]), removed[0]
            same = packing.spans[i]
            removed = list(dict.fromkeys([first, i, *removed[: int(generator.integers(3))]]))
            forced = next((int(g.numbers[packing.cost(first)[g.numbers].argmin()])
                           for g in packing.space.groups[first] if g.span == same), -1)  # fmt: skip
    elif kind < TRADED + FORCED:
        # another choice for one, so that the others find another place
        first = removed[-1]
        costs = packing.cost(first)
        usable = np.flatnonzero(np.isfinite(costs) & (np.arange(len(costs)) != packing.chosen[first]))
        if len(usable):
            others = usable[np.argsort(costs[usable], kind="stable")]
            forced = int(others[int(len(others) * generator.random() ** 2)])
    for i in removed:
        packing.take(i)
    sizes = np.array([packing.cost(i).min() for i in removed]) * generator.uniform(0.5, 1.5, len(removed))
    order = [removed[n] for n in np.argsort(-sizes, kind="stable")]
    if forced < 0:
        return [(i, -1) for i in order]
    return [(first, forced), *((i, -1) for i in order if i != first)]


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
    """Items to remove: some of the rank under most pressure, some of other ranks, and sometimes any item."""
    ranks = [int(packing.here.argmax())]
    ranks += generator.integers(packing.space.ranks, size=int(generator.integers(1, 4))).tolist()
    if generator.random() < 0.25:
        # a rank that has least to do may be full of memory
        ranks.append(int(packing.room[0].argmin()))
    found: dict[int, None] = {}
    for rank in ranks:
        mine = packing.items_on(rank)
        count = min(len(mine), 1 + REMOVED // len(ranks))
        found.update(dict.fromkeys(mine[n] for n in generator.permutation(len(mine))[:count]))
    if not found or generator.random() < 0.5:
        found[int(generator.integers(len(packing.chosen)))] = None
    return list(found)
