"""Conversions of `cvt`: between integers, floats, and the packed types of 16 and 8 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .rounding import MODES, NARROW, Array, flush, from_fp8, to_fp8, to_tf32, widen_bf16
from .types import DTYPES, FLOATS, Operation

_TO_INTEGER: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_FP8 = ("e4m3x2", "e5m2x2")


def conversion(opcode: str) -> Operation:
    """The operation of a `cvt`; of two operands that are packed the first is the upper one."""
    *modifiers, target, source = opcode.split(".")[1:]
    if target not in DTYPES or source not in DTYPES:
        raise ValueError("types of this conversion are not supported")
    mode = next((m for m in modifiers if m in MODES or m == "rna"), "rn")
    ftz, saturates = "ftz" in modifiers, "sat" in modifiers or "satfinite" in modifiers
    if unknown := set(modifiers) - {*MODES, *_TO_INTEGER, "rna", "ftz", "sat", "satfinite", "relu"}:
        raise ValueError(f"cvt with .{' .'.join(sorted(unknown))} is not supported")
    if target in _FP8 or source in _FP8:
        return _of_fp8(target, source, "relu" in modifiers)
    if target.endswith("x2"):
        function = _float_to_float(target[:-2], source, mode, ftz, saturates, "relu" in modifiers)

        def packed(high: Array, low: Array) -> Array:
            upper, lower = (np.ascontiguousarray(function(x)).view(np.uint16).astype(np.uint32) for x in (high, low))
            return (upper << np.uint32(16)) | lower

        return Operation(packed, (source, source), (target,))
    integer = next((_TO_INTEGER[m] for m in modifiers if m in _TO_INTEGER), None)
    if (source in FLOATS and target in FLOATS) or target == "tf32":
        convert = _float_to_float(target, source, mode, ftz, saturates, "relu" in modifiers)
        if integer is not None:
            rounds = integer
            return Operation(lambda x: convert(rounds(flush(x) if ftz else x)), (source,), (target,))
        return Operation(convert, (source,), (target,))
    if source in FLOATS:
        if integer is None:
            raise ValueError("a conversion of a float to an integer needs a rounding")
        return Operation(_float_to_integer(target, source, integer, ftz), (source,), (target,))
    if target in FLOATS:
        return Operation(_integer_to_float(target, mode), (source,), (target,))
    return Operation(_integer_to_integer(target, saturates), (source,), (target,))


def _widened(x: Array, kind: str) -> Array:
    return widen_bf16(x) if kind == "bf16" else x


def _float_to_float(
    target: str, source: str, mode: str, ftz: bool, saturates: bool, relu: bool
) -> Callable[[Array], Array]:
    def convert(x: Array) -> Array:
        value = _widened(x, source)
        if ftz and source == "f32":
            value = flush(value)
        if relu:
            value = np.where(value > 0, value, np.where(np.isnan(value), value, value.dtype.type(0)))
        if saturates and target != "tf32":
            value = np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))
        if target == "tf32":
            rounded = to_tf32(value, mode)
            largest = np.uint32(0x7F7FE000).view(np.float32)
            return np.where(np.isinf(rounded) & saturates, np.copysign(largest, rounded), rounded)
        if target == "f64":
            return value.astype(np.float64)
        if target == "f32" and source in ("f16", "bf16", "f32"):
            return value.astype(np.float32)
        narrow = NARROW[target](value, mode)
        return flush(narrow) if ftz and target == "f32" else narrow

    return convert


def _float_to_integer(
    target: str, source: str, integer: Callable[[Array], Array], ftz: bool
) -> Callable[[Array], Array]:
    dtype = DTYPES[target]
    limits = np.iinfo(dtype)
    # what a NaN becomes depends on the widths
    unsure = dtype(0) if source != "f64" and limits.bits < 64 else dtype(limits.min or 1 << (limits.bits - 1))

    def convert(x: Array) -> Array:
        value = _widened(x, source)
        value = integer((flush(value) if ftz and source == "f32" else value).astype(np.float64))
        # the largest 64-bit integers are no float64; the power of two above them is
        high, low = value >= float(limits.max + 1), value <= float(limits.min)
        inside = np.where(high | low | np.isnan(value), 0.0, value).astype(dtype)
        result = np.where(high, dtype(limits.max), np.where(low, dtype(limits.min), inside))
        return np.where(np.isnan(value), unsure, result).astype(dtype)

    return convert


def _integer_to_float(target: str, mode: str) -> Callable[[Array], Array]:
    def convert(x: Array) -> Array:
        if mode == "rn" and target in ("f32", "f64"):
            return x.astype(DTYPES[target])
        value = x.astype(np.float64)
        if x.dtype.itemsize == 8:
            # the float64 beside the integer that is odd, where none is the integer
            back = np.where(np.abs(value) < 2.0**63, value, 0.0).astype(x.dtype)
            bits = value.view(np.int64)
            inexact = (np.abs(value) >= 2.0**53) & ((back != x) | (np.abs(value) >= 2.0**63)) & (bits & 1 == 0)
            step = np.where((x > back) == (value > 0), 1, -1)
            step = np.where(np.abs(value) >= 2.0**63, np.where(value > 0, -1, 0), step)
            value = np.where(inexact, bits + step, bits).view(np.float64)
        if target == "f64":
            raise ValueError("integers to f64 are rounded to the nearest only")
        return NARROW[target](value, mode)

    return convert


def _integer_to_integer(target: str, saturates: bool) -> Callable[[Array], Array]:
    dtype = DTYPES[target]
    limits = np.iinfo(dtype)

    def convert(x: Array) -> Array:
        if not saturates:
            return x.astype(dtype)
        own = np.iinfo(x.dtype)
        low, high = x.dtype.type(max(limits.min, own.min)), x.dtype.type(min(limits.max, own.max))
        return np.clip(x, low, high).astype(dtype)

    return convert


def _of_fp8(target: str, source: str, relu: bool) -> Operation:
    if source in _FP8:
        if target != "f16x2":
            raise ValueError("8-bit floats convert to f16x2 alone")

        def unpack(x: Array) -> Array:
            return from_fp8(np.ascontiguousarray(x).view(np.uint8), source[:4]).astype(np.float16).view(np.uint32)

        return Operation(unpack, (source,), (target,))

    def encode(x: Array) -> Array:
        value = np.where(np.isnan(x) | (x > 0) | ~np.bool_(relu), x, np.float32(0))
        return to_fp8(value, target[:4]).astype(np.uint16)

    if source == "f32":
        return Operation(lambda high, low: (encode(high) << 8) | encode(low), ("f32", "f32"), (target,))
    if source != "f16x2":
        raise ValueError("8-bit floats are made of f32 and f16x2 alone")

    def pack(x: Array) -> Array:
        halves = np.ascontiguousarray(x).view(np.float16).astype(np.float32)
        return encode(halves).astype(np.uint8).view(np.uint16)

    return Operation(pack, (source,), (target,))
