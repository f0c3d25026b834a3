"""The loop of cpu_select.py, compiled by numba when this file is imported; it releases the GIL and never raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import float32, int64, void

F2, I2 = float32[:, ::1], int64[:, ::1]


def compiled(signature: Any) -> Callable[[Any], Any]:
    """numba.njit without the GIL, compiled at once and kept on disk where something can be written."""

    def decorate(function: Any) -> Any:
        try:
            return numba.njit(signature, nogil=True, error_model="numpy", cache=True)(function)
        except RuntimeError:
            return numba.njit(signature, nogil=True, error_model="numpy")(function)

    return decorate


@compiled(void(F2, F2, I2, int64, int64))
def move_columns(source: Any, target: Any, runs: Any, low: int, high: int) -> None:
    """Copy runs [P, 3] (column of target, columns, column of source) of rows low ... high - 1."""
    for b in range(low, high):
        for p in range(runs.shape[0]):
            to, columns, begin = runs[p, 0], runs[p, 1], runs[p, 2]
            for c in range(columns):
                target[b, to + c] = source[b, begin + c]
