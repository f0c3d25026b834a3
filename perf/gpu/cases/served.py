"""Cases of the ops that FBGEMM's names ask for beside the modules, and of those of rows: the self-test's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from shardwise.perf.selftest.rows_checks import ROWS
from shardwise.perf.selftest.served_checks import SERVED, Served
from shardwise.perf.selftest.tolerances import SAME

from .case import Case


def cases() -> Iterator[Case]:
    """Each call; the first of an op is quick."""
    before: set[str] = set()
    for each in (*SERVED, *ROWS):
        yield Case(
            f"{each.op}, {each.words}", tuple(each.kernels.split()), partial(_results, each, each.call), SAME,
            quick=each.op not in before, reference=partial(_results, each, each.call_reference),
        )  # fmt: skip
        before.add(each.op)


def _results(served: Served, call: Callable[..., Any]) -> Sequence[Any]:
    result = call(*served.inputs())
    return result if isinstance(result, (tuple, list)) else [result]
