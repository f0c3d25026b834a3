"""What the executor runs: every op of the library on its smallest interesting inputs, held to its reference."""

from __future__ import annotations

from itertools import chain

from . import ids, jagged, lookup, quantized, update
from .case import Case, Result, run_case
from .tolerances import TOLERANCES

CASES: tuple[Case, ...] = tuple(
    chain(lookup.cases(), update.cases(), jagged.cases(), ids.cases(), quantized.cases()),
)

__all__ = ["CASES", "TOLERANCES", "Case", "Result", "run_case"]
