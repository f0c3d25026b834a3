"""Which tests a run is about: a phase is a way to run the kernels, a tier says how much of the suite.

pytest                             the torch path, all of it but `long`
pytest --tier quick                what starts no process and is not marked `full`
pytest --tier test                 what is not marked `full`, and one case in n of what is marked `sampled(n)`
pytest -m interpreted|compiled|executed      the other phases, each in its folders alone
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

TIERS = ("quick", "test", "all")

# the folders in tests/ that have tests of a phase; the torch path is in all
FOLDERS: dict[str, tuple[str, ...]] = {
    "interpreted": (
        "kernels", "bad_input", "embeddings/collections", "embeddings/tiers", "fbgemm", "perf/compile",
        "perf/gpu_scripts", "perf/tune",
    ),
    "compiled": ("perf/compile", "perf/gpu", "perf/gpu_scripts"),
    "executed": ("perf/gpu",),
}  # fmt: skip

# names by which a function starts processes
STARTERS = frozenset(
    (
        "run_ranks",
        "run_python",
        "run_process",
        "run_in_tree",
        "build_tree",
        "Trees",
        "lone_ranks",
        "start_lone_ranks",
        "subprocess",
        "create_subprocess_exec",
        "Popen",
        "fork",
    )
)


def phase_of(config: pytest.Config) -> str:
    """The phase that `-m` asks for: "torch", or a key of FOLDERS."""
    asked = str(config.getoption("markexpr", "")).strip()
    return asked if asked in FOLDERS else "torch"


def tier_of(item: pytest.Item) -> str:
    """The smallest tier that has this test."""
    if item.get_closest_marker("full") or not _is_drawn(item):
        return "all"
    if item.get_closest_marker("ranks") or any(starts_processes(function) for function in _functions(item)):
        return "test"
    return "quick"


def _is_drawn(item: pytest.Item) -> bool:
    """Whether the smaller tiers have this case of a test that is marked `sampled(n)`: its name decides."""
    sampled = item.get_closest_marker("sampled")
    return sampled is None or zlib.crc32(item.nodeid.encode()) % int(sampled.args[0]) == 0


def starts_processes(function: Callable[..., object], seen: set[object] | None = None) -> bool:
    """Whether a function, or one of its own module that it calls, names something that starts processes."""
    seen = set() if seen is None else seen
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    named = {*_names(function.__code__)}
    if not named.isdisjoint(STARTERS):
        return True
    beside = [function.__globals__.get(name) for name in named]
    own = [helper for helper in beside if isinstance(helper, FunctionType) and helper.__module__ == function.__module__]
    return any(starts_processes(helper, seen) for helper in own)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _functions(item: pytest.Item) -> Iterator[Any]:
    """A test's function and those of its fixtures."""
    yield getattr(item, "function", None)
    fixtures: Any = getattr(item, "_fixtureinfo", None)
    for definitions in fixtures.name2fixturedefs.values() if fixtures else ():
        yield from (getattr(definition.func, "__func__", definition.func) for definition in definitions)
