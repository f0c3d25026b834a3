"""Cases that the tests of the suite measure, quick and of every kind; as a plugin of pytest they replace the suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardwise.perf.suite.cases as suite
from shardwise.perf.suite.case import (
    OURS,
    Case,
    Ready,
    Setting,
)

# who was called, with which input, in order
LOG: list[tuple[str, int]] = []


def logged(who: str, inputs: int) -> list[Callable[[], object]]:
    return [lambda number=number: LOG.append((who, number)) for number in range(inputs)]


def wrong() -> None:
    raise AssertionError("ours gives 2, the reference 3")


def _logs(setting: Setting) -> Ready:
    return Ready(
        calls=logged(OURS, 3), peers={"torch": logged("torch", 3)}, bytes_moved=3e6, floor="ids",
        notes={"cut": 2, "dtype": object},
    )  # fmt: skip


def _wrong(setting: Setting) -> Ready:
    return Ready(calls=logged("wrong", 1), check=wrong)


def _raises(setting: Setting) -> Ready:
    raise RuntimeError(f"no room for {setting.memory_bytes} bytes")


def _rounds(setting: Setting) -> Ready:
    return Ready(rounds=lambda rounds: {OURS: [0.5 + 0.01 * n for n in range(rounds)], "torch": [1.0] * rounds})


def _size(setting: Setting) -> Ready:
    return Ready(rounds=lambda rounds: {OURS: [465.0] * rounds})


def case(name: str, make: Callable[[Setting], Ready], **options: Any) -> Case:
    return Case(name, options.pop("group", "lookup"), make, **options)


CASES = (
    case("logs, of three inputs", _logs),
    case("wrong", _wrong, group="update"),
    case("raises", _raises),
    case("own rounds", _rounds, group="package", slow=True),
    case("size", _size, group="package", unit="bytes"),
    case("full only", _logs, suites=frozenset({"full"})),
)


def pytest_addoption() -> None:
    """The first that pytest calls: perf/conftest.py is imported after it."""
    suite.CASES = CASES
