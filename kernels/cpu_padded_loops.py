"""Loops that move bags between jagged values and a padded dense, compiled by numba when first called for a type.

All arrays are flat and contiguous. Leaf r of the dense has `most` places of `width` elements each and holds the values
begins[r] ... ends[r] - 1 (letters as in padded.py). A loop does leaves low ... high - 1 and returns -1, or the first
leaf whose bounds leave the values, before it touches it. Loops release the GIL and never raise. Elements are counted
without a sign: numba looks at each signed index for whether it counts from the end, and then moves them one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import uint64


def _compiled(function: Callable[..., int]) -> Callable[..., int]:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        found: Callable[..., int] = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # no place to keep it: neither beside this file nor in the home of the user can anything be written
        found = numba.njit(**options)(function)
    return found


@_compiled
def to_padded(
    values: Any, begins: Any, ends: Any, total: int, fill: int, out: Any, most: int, width: int, low: int, high: int
) -> int:
    """Write leaves of the dense `out`: values, and then `fill`."""
    for leaf in range(low, high):
        begin, end = begins[leaf], ends[leaf]
        if begin < 0 or end < begin or end > total:
            return leaf
        source, target = uint64(begin * width), uint64(leaf * most * width)
        held, rest = uint64(min(end - begin, most) * width), uint64(max(most - end + begin, 0) * width)
        for e in range(held):
            out[target + e] = values[source + e]
        target += held
        for e in range(rest):
            out[target + e] = fill
    return -1


@_compiled
def to_jagged(
    dense: Any, begins: Any, ends: Any, total: int, fill: int, out: Any, most: int, width: int, low: int, high: int
) -> int:
    """Write the values `out` of leaves: what the dense holds for them, and then `fill`."""
    for leaf in range(low, high):
        begin, end = begins[leaf], ends[leaf]
        if begin < 0 or end < begin or end > total:
            return leaf
        source, target = uint64(leaf * most * width), uint64(begin * width)
        held, rest = uint64(min(end - begin, most) * width), uint64(max(end - begin - most, 0) * width)
        for e in range(held):
            out[target + e] = dense[source + e]
        target += held
        for e in range(rest):
            out[target + e] = fill
    return -1


@_compiled
def multiply(
    dense: Any, values: Any, begins: Any, ends: Any, total: int, out: Any, most: int, width: int, low: int, high: int
) -> int:
    """Values times what the dense holds for them, 0 where it holds nothing."""
    for leaf in range(low, high):
        begin, end = begins[leaf], ends[leaf]
        if begin < 0 or end < begin or end > total:
            return leaf
        source, target = uint64(leaf * most * width), uint64(begin * width)
        held, rest = uint64(min(end - begin, most) * width), uint64(max(end - begin - most, 0) * width)
        for e in range(held):
            out[target + e] = dense[source + e] * values[target + e]
        target += held
        for e in range(rest):
            out[target + e] = 0
    return -1


@_compiled
def add(
    dense: Any, values: Any, begins: Any, ends: Any, total: int, out: Any, most: int, width: int, low: int, high: int
) -> int:
    """Values plus what the dense holds for them."""
    for leaf in range(low, high):
        begin, end = begins[leaf], ends[leaf]
        if begin < 0 or end < begin or end > total:
            return leaf
        source, target = uint64(leaf * most * width), uint64(begin * width)
        held, rest = uint64(min(end - begin, most) * width), uint64(max(end - begin - most, 0) * width)
        for e in range(held):
            out[target + e] = dense[source + e] + values[target + e]
        target += held
        for e in range(rest):
            out[target + e] = values[target + e]
    return -1
