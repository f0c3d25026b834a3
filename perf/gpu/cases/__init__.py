"""Cases of the executor: every op of the library on its smallest interesting inputs, held to its reference."""

from __future__ import annotations

from itertools import chain

from shardwise.perf.selftest.tolerances import TOLERANCES

from . import ids, jagged, lookup, quantized, served, update
from .case import Case, Result, run_case

CASES: tuple[Case, ...] = tuple(
    chain(lookup.cases(), update.cases(), jagged.cases(), ids.cases(), quantized.cases(), served.cases()),
)

__all__ = ["CASES", "TOLERANCES", "Case", "Result", "run_case"]
