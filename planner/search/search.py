"""The search for a fast assignment: first packings by several rules, moves, then removing and placing anew.

First packings: a choice for each item by what work and memory are worth, then item after item, largest first. A choice
with long blocks does least work and packs worst; so the choices of several longest blocks are tried, and several rules
for where a block goes. Better packings from a packing: moves of the busiest ranks, then removing a few items and
placing them anew.

Work is counted in steps, not timed, unless the caller gives a deadline: a step looks at a rank or places an item.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from .packing import Packing
from .problem import Assignment, Floats, Ints
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
    cost = space.work + np.tensordot(prices, space.memory, axes=1)  # [N, C]
    large = (space.biggest / np.maximum(largest, 1e-300)[:, None, None]).max(axis=0)
    large[np.isinf(space.work)] = np.inf
    cost[large > np.maximum(large.min(axis=1, keepdims=True), 1)] = np.inf
    choices: Ints = cost.argmin(axis=1)
    return choices


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
        if spans[i] > 1 or not _place_by_rule(packing, i, number, rule):
            packing.insert(i, number if spans[i] > 1 else packing.evaluate(i)[1])


def _place_by_rule(packing: Packing, i: int, number: int, rule: str) -> bool:
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
    packing.place(i, number, tuple(where.tolist()))
    return True


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
    best, kept, target = packing.total, packing.snapshot(), packing.target
    while packing.chosen:
        if packing.target != target:
            best, kept, target = packing.total, packing.snapshot(), packing.target
        disturbed = _disturb(packing, generator)
        for i, number in disturbed:
            packing.insert(i, packing.evaluate(i)[1] if number < 0 else number)
        steps = len(disturbed) + sum(descend(packing))
        if packing.total <= best * (1 + WORSE * generator.random() ** 4):
            # one that is a little worse is kept too, so that plateaus are crossed
            best, kept = packing.total, packing.snapshot()
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
        packing.remove(i)
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
    swap, own, other = packing.best_swap(rank)
    least = -max(LEAST, 1e-6 * packing.total)
    if min(shift, swap) >= least:
        return False
    if shift <= swap:
        packing.shift(block, there)
    else:
        rank, there = int(packing.at[own]), int(packing.at[other])
        packing.shift(own, there)
        packing.shift(other, rank)
    packing.update_pressure()
    return True


def _choose_anew(packing: Packing, rank: int) -> bool:
    """Place one item of `rank` anew, by any choice, if that lowers the pressure."""
    before = packing.total
    for i in packing.items_on(rank):
        number, starts = packing.chosen[i], packing.starts[i]
        cost = float(packing.cost(i)[number])
        packing.remove(i)
        rise, other = packing.evaluate(i)
        if packing.total + rise < before + cost - max(LEAST, 1e-6 * before):
            packing.insert(i, other)
            if packing.total < before - LEAST:
                return True
            packing.remove(i)
        packing.place(i, number, starts)
    return False


def _pick(packing: Packing, generator: np.random.Generator) -> list[int]:
    """Items to remove: some of the rank under most pressure, some of other ranks, and sometimes any item."""
    ranks = [int(packing.here.argmax())]
    ranks += generator.integers(packing.space.ranks, size=int(generator.integers(1, 4))).tolist()
    if generator.random() < 0.25:
        # a rank that has least to do may be full of memory
        ranks.append(int(packing.room[0].argmin()))
    removed: dict[int, None] = {}
    for rank in ranks:
        items = packing.items_on(rank)
        count = min(len(items), 1 + REMOVED // len(ranks))
        removed.update(dict.fromkeys(items[n] for n in generator.permutation(len(items))[:count]))
    if not removed or generator.random() < 0.5:
        removed[int(generator.integers(len(packing.chosen)))] = None
    return list(removed)


# first packings that moves are tried on
FIRST = 3
# packings under a target that moves are tried on, and how many moves
SECOND = 2
MOVES = 300
# a first gap so small is left to moves
CLOSE = 3e-3
# the search aims a little above the bound: that is as good, and leaves pressure on ranks that are truly late
AIM = 1 + 1e-5
# targets tried between the bound and the best
BISECTIONS = 4
# the search aims at the bound, where every rank counts, and at times near the best, where only the slowest do; so long
SHARES = (0.0, 0.5, 0.9)
ROUND = 25
SEED = 7


class Search:
    """A search that can go on: the best assignment so far, and the packing from which it goes on.

    Args:
        bound_ms: of a relaxation; the target.
        prices: milliseconds that a byte of each memory is worth [R - 1].

    Attributes:
        best, time_ms, fits: the best assignment so far; while none fits in memory, the one that comes nearest.
        steps: spent so far.
        tell: called with the time of each plan that fits and is the best so far.
    """

    def __init__(self, space: Space, bound_ms: float, prices: Floats) -> None:
        self.space, self.prices = space, prices
        # a target of 0 would make every pressure infinite
        self.target_ms = max(bound_ms, 1e-6 * float(space.biggest[0].max(initial=0)), 1e-12) * AIM
        self.best: Assignment | None = None
        self.time_ms = self.pressure = np.inf
        self.fits = False
        self.steps = 0
        self.tell: Callable[[float], None] = lambda _: None
        self._tries = 0
        self._moves: Iterator[int] | None = None
        self._packing: Packing | None = None

    def begin(self, deadline: float | None = None) -> None:
        """First packings, and moves on the most promising."""
        packings: list[Packing] = []
        for packing in construct(self.space, self.target_ms, self.prices):
            self.steps += 1
            self._see(packing)
            packings = sorted([*packings, packing], key=lambda p: p.total)[:FIRST]
            if late(deadline):
                break
        for packing in packings:
            self._settle(packing, deadline)
        low, high = self.target_ms, self.time_ms
        wide = self.fits and high > low * (1 + CLOSE)
        for _ in range(BISECTIONS if wide else 0):
            # ranks that all stay under a target somewhat above the bound are what is needed
            middle = (low + high) / 2
            packing = self._under(middle, deadline)
            low, high = (low, middle) if packing.total <= 0 else (middle, high)
            packing.set_target(self.target_ms)
            packings.append(packing)
        for packing in sorted(packings[FIRST:], key=lambda p: p.total)[:SECOND]:
            self._settle(packing, deadline)
        self._packing = min(packings, key=lambda p: p.total)

    def go_on(self, steps: int | None, enough_ms: float, deadline: float | None = None) -> None:
        """Search until `steps` more are spent or the deadline is over, or nothing faster than `enough_ms` is needed."""
        assert self._packing is not None
        if self._moves is None:
            self._moves = improve(self._packing, np.random.default_rng(SEED))
        end = np.inf if steps is None else self.steps + steps
        while self.steps < end and not late(deadline) and not (self.fits and self.time_ms <= enough_ms):
            if self._tries % ROUND == 0 or self._packing.total <= 0:
                share = SHARES[self._tries // ROUND % len(SHARES)] if self.fits else 0.0
                self._packing.set_target(self.target_ms + share * (self.time_ms - self.target_ms))
            self._tries += 1
            self.steps += next(self._moves)
            self._see(self._packing)

    def _under(self, target_ms: float, deadline: float | None) -> Packing:
        """The last of the packings under a target, which meets it if one does."""
        packing = None
        for packing in repack(self.space, target_ms, self.prices):
            self.steps += 1
            self._see(packing)
            if packing.total <= 0 or late(deadline):
                break
        assert packing is not None
        return packing

    def _settle(self, packing: Packing, deadline: float | None) -> None:
        """Moves that help, up to `MOVES` of them."""
        for spent in islice(descend(packing), MOVES):
            self.steps += spent
            if late(deadline):
                break
        self._see(packing)

    def _see(self, packing: Packing) -> None:
        fits = packing.fits
        if fits and self.fits:
            better = packing.time_ms < self.time_ms * (1 - 1e-9)
        else:
            better = fits or (not self.fits and packing.total < self.pressure)
        if better:
            self.best, self.time_ms = packing.assignment(), packing.time_ms
            self.pressure, self.fits = packing.total, fits
            if fits:
                self.tell(self.time_ms)


def late(deadline: float | None) -> bool:
    """Whether there is a deadline, and it is over."""
    return deadline is not None and time.perf_counter() >= deadline
