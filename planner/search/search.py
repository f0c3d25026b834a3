"""The search for a fast assignment: first packings by several rules, moves, then removing and placing anew.

Work is counted, not timed, unless the caller gives a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import numpy as np

from .construct import construct, repack
from .local_search import descend, improve
from .packing import Packing
from .problem import Assignment, Floats
from .space import Space

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
    """

    def __init__(self, space: Space, bound_ms: float, prices: Floats) -> None:
        self.space, self.prices = space, prices
        # a target of 0 would make every pressure infinite
        self.target_ms = max(bound_ms, 1e-6 * float(space.biggest[0].max(initial=0)), 1e-12) * AIM
        self.best: Assignment | None = None
        self.time_ms = self.pressure = np.inf
        self.fits = False
        self.steps = 0
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
            packing.aim(self.target_ms)
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
                self._packing.aim(self.target_ms + share * (self.time_ms - self.target_ms))
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


def late(deadline: float | None) -> bool:
    """Whether there is a deadline, and it is over."""
    return deadline is not None and time.perf_counter() >= deadline
