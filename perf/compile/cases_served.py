"""Cases for the compiler: launches of the ops that FBGEMM's names ask for; cases.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

from ...kernels import hashes, pieces
from ...kernels.jagged import requests
from ...kernels.lookup import bound_ids, pruned
from ...kernels.quantized import fp8_rows, fused_rows, small_floats
from ..selftest.served_checks import SERVED, Served

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (
    bound_ids,
    fp8_rows,
    fused_rows,
    hashes,
    pieces,
    pruned,
    requests,
    small_floats,
)

# a run, its label, and what rows it reads where the order of a sum over a row is promised (nowhere)
Launch = tuple[Callable[[], object], str, str]


def launches() -> Iterator[Launch]:
    """Every call of the self-test's table."""
    for each in SERVED:
        yield partial(_run, each), each.words.replace(",", ""), ""


def _run(served: Served) -> object:
    return served.call(*served.inputs())
