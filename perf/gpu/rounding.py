"""Floating-point formats of PTX and the roundings between them, exact, on numpy arrays.

float64 values that stand for a result before its only rounding are "odd": where the exact result lies between two
float64, the one whose last bit is set. Such a value rounds to any format of at most 51 bits as the exact result does.
bf16 is kept as uint16, tf32 as float32 with 13 zero bits, the 8-bit formats as uint8.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MODES = ("rn", "rz", "rm", "rp")
# codes that are finite, in the order of their values, from zero up
_FINITE_CODES = {"e4m3": 0x7F, "e5m2": 0x7C}


def flush(x: Array) -> Array:
    """Subnormal float32 or float16 as zero of the same sign, as `.ftz` does."""
    tiny = np.finfo(x.dtype).tiny
    small: Array = np.abs(x) < tiny
    return np.where(small, np.copysign(x.dtype.type(0), x), x) if small.any() else x


def widen_bf16(x: Array) -> Array:
    """bf16 as float32."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array, mode: str = "rn") -> Array:
    """float32 or float64 (odd) as bf16."""
    return (_kept_bits(to_f32(x, "odd"), mode, 16) >> np.uint32(16)).astype(np.uint16)


def to_tf32(x: Array, mode: str) -> Array:
    """float32 with 10 bits of mantissa: `rn`, `rz` or `rna`, ties away from zero."""
    return _kept_bits(x, mode, 13).view(np.float32)


def _kept_bits(x: Array, mode: str, low: int) -> Array:
    """Bits of float32 rounded to have `low` zero bits; numbers past the largest become infinite."""
    bits: Array = np.ascontiguousarray(x).view(np.uint32)
    unit, mask = np.uint32(1 << low), np.uint32((1 << low) - 1)
    negative = bits >> np.uint32(31) != 0
    half = np.uint32(1 << (low - 1))
    if mode == "rn":
        added = half - np.uint32(1) + ((bits >> np.uint32(low)) & np.uint32(1))
    elif mode == "rna":
        added = np.broadcast_to(half, bits.shape)
    else:
        away = {"rz": np.zeros_like(negative), "rm": negative, "rp": ~negative}[mode]
        added = np.where(away, mask, np.uint32(0))
    rounded = (bits + added) & ~mask
    infinite = (bits & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F800000)
    # an infinity or a NaN keeps what it is; a NaN keeps a bit of its mantissa
    kept = (bits & ~mask) | np.where(np.isnan(x), unit << np.uint32(22 - low), np.uint32(0)).astype(np.uint32)
    return np.where(infinite, kept, rounded).astype(np.uint32)


def to_f32(x: Array, mode: str = "rn") -> Array:
    """float64 (odd) or float32 as float32; mode "odd" leaves it to be rounded once more."""
    return _narrowed(x, np.float32, mode)


def to_f16(x: Array, mode: str = "rn") -> Array:
    """float64 (odd) or float32 as float16."""
    return _narrowed(x, np.float16, mode)


def _narrowed(x: Array, dtype: type[np.floating[Any]], mode: str) -> Array:
    if x.dtype == dtype:
        return x
    nearest: Array = x.astype(dtype)
    if mode == "rn":
        return nearest
    back = nearest.astype(x.dtype)
    zero, infinity = dtype(0), dtype(np.inf)
    if mode == "odd":
        bits = np.ascontiguousarray(nearest).view({4: np.uint32, 2: np.uint16}[nearest.dtype.itemsize])
        # of the two neighbours the odd one
        other = np.nextafter(nearest, np.where(back > x, -infinity, infinity).astype(dtype))
        return np.where((back != x) & (bits & 1 == 0) & np.isfinite(x), other, nearest)
    too_high, too_low = back > x, back < x
    down = too_high if mode == "rm" else too_high & (x > 0) if mode == "rz" else np.zeros_like(too_high)
    up = too_low if mode == "rp" else too_low & (x < 0) if mode == "rz" else np.zeros_like(too_low)
    toward = np.where(down, -infinity, np.where(up, infinity, zero)).astype(dtype)
    moved = np.where(down | up, np.nextafter(nearest, toward), nearest)
    # what is moved onto zero keeps its sign
    return np.where(moved == 0, np.copysign(moved, x.astype(dtype)), moved).astype(dtype)


def odd_sum(a: Array, b: Array) -> Array:
    """a + b in float64, odd. Both must be far from float64's limits, as sums and products of float32 are."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.view(np.int64)
    fix = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    if not fix.any():
        return total
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(fix, bits + step, bits).view(np.float64)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32, rounded once."""
    product = a.astype(np.float64) * b
    total = product + c
    # two roundings differ from one only where the first lands between two float32
    between = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    if between.any() or (np.abs(total) < 2.0**-125).any():
        total = odd_sum(product, c.astype(np.float64))
    return total.astype(np.float32)


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float64, rounded once."""
    low, high = 2.0**-300, 2.0**300
    sizes = [np.abs(x) for x in (a, b, c)]
    easy = np.logical_and.reduce([(x == 0) | ((x > low) & (x < high)) for x in sizes])
    # the product and its error, the two sums and their errors, then the small parts odd
    product, error = _product(np.where(easy, a, 0.0), np.where(easy, b, 0.0))
    added = np.where(easy, c, 0.0)
    inner, inner_error = _sum(added, error)
    outer, outer_error = _sum(product, inner)
    result = outer + odd_sum(inner_error, outer_error)
    # zeros have the sign that an ordinary sum gives them
    result = np.where(result == 0, a * b + c, result)
    hard = ~easy & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    result = np.where(easy, result, a * b + c)
    for i in np.flatnonzero(hard):
        result[i] = _exact(float(a[i]), float(b[i]), float(c[i]))
    return result


def _exact(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact) if exact else a * b + c
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


def _sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _product(a: Array, b: Array) -> tuple[Array, Array]:
    product = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _halves(x: Array) -> tuple[Array, Array]:
    big = 134217729.0 * x
    high = big - (big - x)
    return high, x - high


def _table(kind: str) -> Array:
    exponent, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[kind]
    values = np.empty(256, np.float32)
    for code in range(256):
        mantissa, power = code & ((1 << exponent) - 1), (code & 0x7F) >> exponent
        size = mantissa * 2.0 ** (1 - bias - exponent)
        if power:
            size = (1 + mantissa * 2.0**-exponent) * 2.0 ** (power - bias)
        if (code & 0x7F) >= _FINITE_CODES[kind]:
            size = np.inf if kind == "e5m2" and code & 0x7F == 0x7C else np.nan
        values[code] = -size if code & 0x80 else size
    return values


_VALUES = {kind: _table(kind) for kind in _FINITE_CODES}


def from_fp8(codes: Array, kind: str) -> Array:
    """8-bit floats of kind "e4m3" or "e5m2" as float32."""
    return _VALUES[kind][codes]


def to_fp8(x: Array, kind: str) -> Array:
    """float32 to the nearest 8-bit float, even on ties, the largest finite one past that; NaN is 0x7F."""
    values = _VALUES[kind][: _FINITE_CODES[kind]].astype(np.float64)
    size = np.abs(x).astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    above = np.searchsorted(middles, size, side="left")
    # on a middle the even one of the two codes
    tie = (above < len(middles)) & (middles[np.minimum(above, len(middles) - 1)] == size) & (above % 2 == 1)
    codes = np.minimum(above + tie, len(values) - 1) | np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(x), 0x7F, codes).astype(np.uint8)


NARROW: dict[str, Callable[[Array, str], Array]] = {"f32": to_f32, "f16": to_f16, "bf16": to_bf16}
