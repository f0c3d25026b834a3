"""What the launches of the jagged ops ask of the compiler; launched.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = ()

# a run, its label, and what rows it reads where the order of a sum over a row is promised ("" where it is not)
Launch = tuple[Callable[[], None], str, str]


def launches() -> Iterator[Launch]:
    """Runs of every jagged op."""
    yield from _segments()
    yield from _buckets()
    yield from _dense()
    yield from _select()


def _segments() -> Iterator[Launch]:
    yield from ()


def _buckets() -> Iterator[Launch]:
    yield from ()


def _dense() -> Iterator[Launch]:
    yield from ()


def _select() -> Iterator[Launch]:
    yield from ()
