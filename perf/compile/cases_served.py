"""Cases for the compiler: launches of the ops that FBGEMM's names ask for, and of rows; cases.py reads these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

from ...kernels import hashes, pieces
from ...kernels.jagged import requests
from ...kernels.lookup import bound_ids, pruned
from ...kernels.quantized import fp8_rows, fused_rows, small_floats
from ...kernels.rows import first_rows, initial_rows, lowest, move_rows, slots, wanted
from ..selftest.rows_checks import ROWS
from ..selftest.served_checks import SERVED, Served

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (
    bound_ids,
    first_rows,
    fp8_rows,
    fused_rows,
    hashes,
    initial_rows,
    lowest,
    move_rows,
    pieces,
    pruned,
    requests,
    slots,
    small_floats,
    wanted,
)

# a run, its label, and what rows it reads where the order of a sum over a row is promised (nowhere)
Launch = tuple[Callable[[], object], str, str]


def launches() -> Iterator[Launch]:
    """Every call of the self-test's tables."""
    for each in (*SERVED, *ROWS):
        yield partial(_run, each), each.words.replace(",", ""), ""


def _run(served: Served) -> object:
    return served.call(*served.inputs())
