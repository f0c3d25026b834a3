"""A clock for pytest-benchmark: tells the time of a call of which a turn makes several, or what others measured."""

from __future__ import annotations

import time
from collections.abc import Sequence


class Clock:
    """Called before and after a turn; their difference is what the benchmark stores."""

    # what pytest-benchmark writes of it
    __name__ = "perf_counter"

    def __init__(self) -> None:
        self._calls = 1
        self._told: list[float] = []

    def of_turns(self, calls: int) -> None:
        """From now on a turn makes so many calls, and the time of one counts."""
        self._calls = calls

    def replay(self, seconds: Sequence[float]) -> None:
        """The next turns, one for each, took so long."""
        self._told = [reading for elapsed in reversed(seconds) for reading in (elapsed, 0.0)]

    def __call__(self) -> float:
        return self._told.pop() if self._told else time.perf_counter() / self._calls
