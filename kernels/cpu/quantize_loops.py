"""Loops that quantize fp32 rows, compiled by numba when they are first called.

Tensors come as addresses of contiguous memory; `half` says that scales are fp16. A row is read once for its ends and
once more, from the cache, for its numbers; each step rounds by itself, as quantized/rows.py has it: the reference's
bits. Loops release the GIL and never raise. Letters as in quantized/rows.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64
from numba.core import cgutils, types as numba_types
from numba.extending import intrinsic

from .njit import (
    bits_of,
    compiled,
    f4,
    float_of,
    half_value,
    i4,
    prefetch,
    u1,
)
from .vectors import shuffled, spread_lanes, zeros_of

# to type checkers these are functions of fewer arguments
_intrinsic: Any = intrinsic
_types: Any = numba_types
_ir: Any = cgutils.ir

INT8, INT4, INT2, FP8 = range(4)

# of fp32: all but the sign, an infinity, and a NaN
_MAGNITUDE, _INFINITY, _NAN = 0x7FFFFFFF, 0x7F800000, 0x7FC00000
# a sum with it leaves no room for a fraction, and rounds to nearest even
_WHOLE = np.float32(8388608.0)
# columns of a vector, and of two that a loop takes at once
_LANES, _WIDE = 16, 32
# bytes of a line of the cache, and bytes between numbers that are made and rows that memory is asked for meanwhile
_LINE, _AHEAD = 64, 24 << 10
# rows whose scales are made side by side, and columns of theirs that the cache shall keep meanwhile
_ROWS, _COLUMNS = 32, 1 << 13
_zeros32, _zeros16 = zeros_of(_WIDE), zeros_of(_LANES)


@_intrinsic
def _loaded(typing: Any, like: Any, address: Any) -> Any:
    """As many numbers as `like` has, from an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[1], args[0].type.as_pointer()), align=4)

    return like(like, _types.int64), generate


def _lanewise(operation: str) -> Any:
    """The lesser or the greater of two numbers in each lane, the second where one is NaN, or their sum."""

    @_intrinsic
    def apply(typing: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _applied(builder, operation, *args)

        return x(x, y), generate

    return apply


def _applied(builder: Any, operation: str, x: Any, y: Any) -> Any:
    if operation == "+":
        return builder.fadd(x, y)
    return builder.select(builder.fcmp_ordered(operation, x, y), x, y)


_lesser, _greater, _sum = map(_lanewise, "<>+")


def _across(operation: str) -> Any:
    """The least, the greatest or the sum of all lanes."""

    @_intrinsic
    def fold(typing: Any, lanes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            (x,), count = args, lanes.count
            while count > 1:
                count //= 2
                x = _applied(builder, operation, *(shuffled(builder, x, range(at, at + count)) for at in (0, count)))
            return builder.extract_element(x, _ir.Constant(_ir.IntType(32), 0))

        return _types.float32(lanes), generate

    return fold


_least, _most, _total = map(_across, "<>+")


def _packers(count: int, bits: int) -> Any:
    """Numbers of so many values at an address, as bytes at another one: `_number` and `_integers` in vectors."""

    @_intrinsic
    def pack(typing: Any, address: Any, to: Any, bias: Any, inverse: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, whole = _ir.VectorType(_ir.FloatType(), count), _ir.VectorType(_ir.IntType(32), count)
            bias, inverse, room = (
                spread_lanes(builder, count, x) for x in (args[2], args[3], _ir.Constant(_ir.FloatType(), 8388608.0))
            )
            x = builder.load(builder.inttoptr(args[0], values.as_pointer()), align=4)
            n = builder.fmul(builder.fsub(x, bias), inverse)
            zero, levels = _ir.Constant(whole, None), _ir.Constant(whole, [(1 << bits) - 1] * count)
            # no number is NaN here, and one that is cut off, beyond the sum's room too, remains outside as an integer
            n = builder.sub(builder.bitcast(builder.fadd(n, room), whole), builder.bitcast(room, whole))
            n = builder.select(builder.icmp_signed(">", n, zero), n, zero)
            n = builder.select(builder.icmp_signed("<", n, levels), n, levels)
            numbers = builder.trunc(n, _ir.VectorType(_ir.IntType(8), count))
            each = 8 // bits
            packed = shuffled(builder, numbers, range(0, count, each))
            for place in range(1, each):
                shift = _ir.Constant(packed.type, [place * bits] * (count // each))
                packed = builder.or_(packed, builder.shl(shuffled(builder, numbers, range(place, count, each)), shift))
            builder.store(packed, builder.inttoptr(args[1], packed.type.as_pointer()), align=1)
            return context.get_dummy_value()

        return _types.void(_types.int64, _types.int64, _types.float32, _types.float32), generate

    return pack


_wide8, _lanes8, _wide4, _lanes4, _wide2, _lanes2 = (
    _packers(count, bits) for bits in (8, 4, 2) for count in (_WIDE, _LANES)
)


@compiled(inline=True)
def _ordered(bits: int) -> Any:
    """Bits as an integer that is larger where the number is, -0 being less than 0 and a NaN beyond an infinity; these
    compare in vectors, as floats that may be NaN do not. It is its own inverse."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(_MAGNITUDE))


@compiled()
def _exact_ends(row: int, D: int) -> Any:
    """The least and the greatest number of a row; NaN both where one is. Of zeros the first one counts."""
    x = i4(row, D)
    low, high = np.int32(_MAGNITUDE), np.int32(-_MAGNITUDE - 1)
    for d in range(np.uint64(D)):
        key = _ordered(x[d])
        low, high = min(low, key), max(high, key)
    if high > _INFINITY or low < -_INFINITY - 1:
        return float_of(np.int32(_NAN)), float_of(np.int32(_NAN))
    least = float_of(np.int32(_ordered(low)))
    if least == 0:
        for d in range(np.uint64(D)):
            if x[d] & np.int32(_MAGNITUDE) == 0:
                least = float_of(x[d])
                break
    return least, float_of(np.int32(_ordered(high)))


@compiled(inline=True)
def _signed(magnitude: int, like: int) -> Any:
    return float_of(magnitude | (like & np.int32(-_MAGNITUDE - 1)))


@compiled(inline=True)
def _as_half(x: float) -> Any:
    """x rounded to fp16."""
    bits = bits_of(x)
    magnitude = bits & np.int32(_MAGNITUDE)
    # a sum with 2**13 times its power of two, of 2**-14 at least, leaves no room for more bits than fp16 has
    room = float_of(max(magnitude & np.int32(_INFINITY), np.int32(0x38800000)) + np.int32(13 << 23))
    rounded = bits_of((float_of(magnitude) + room) - room)
    # 65520 and more; NaN stays
    rounded = rounded if magnitude < np.int32(0x477FF000) else np.int32(_INFINITY)
    rounded = magnitude if magnitude > np.int32(_INFINITY) else rounded
    return _signed(rounded, bits)


@compiled(inline=True)
def _half_bits(x: float) -> Any:
    """The bits of an fp16 number, as int32."""
    bits = bits_of(x)
    magnitude = bits & np.int32(_MAGNITUDE)
    half = (magnitude >> np.int32(13)) - np.int32(112 << 10)
    # below 2**-14 the steps are those of 0.5
    small = bits_of(float_of(magnitude) + np.float32(0.5)) - np.int32(0x3F000000)
    half = small if magnitude < np.int32(0x38800000) else half
    half = half if magnitude < np.int32(_INFINITY) else np.int32(0x7C00)
    half = np.int32(0x7E00) if magnitude > np.int32(_INFINITY) else half
    return half | ((bits >> np.int32(16)) & np.int32(0x8000))


@compiled(inline=True)
def _below(x: float) -> Any:
    """The fp16 number next to x that is not above it, as fp32."""
    nearest = _as_half(x)
    if nearest > x:
        half = _half_bits(nearest)
        return half_value(half + 1 if half & 0x8000 else half - 1)
    return nearest


@compiled(inline=True)
def _number(x: Any, bias: Any, inverse: Any, levels: Any) -> Any:
    """The number of a value, cut to what there are; 0 for a NaN."""
    n = (x - bias) * inverse
    n = n if n > np.float32(0) else np.float32(0)
    n = n if n < levels else levels
    return bits_of(n + _WHOLE) & np.int32(0xFF)


@compiled(inline=True)
def _e4m3(x: float) -> Any:
    """The code of an fp32 number, to nearest even; that of NaN from 480 on, between 448 and which it rounds down."""
    bits = bits_of(x)
    magnitude = bits & np.int32(_MAGNITUDE)
    # the 20 bits that go decide by a sum; the exponent then counts from 120 less
    odd = (magnitude >> np.int32(20)) & np.int32(1)
    code = ((magnitude + np.int32(0x7FFFF) + odd) >> np.int32(20)) - np.int32(120 << 3)
    # below 2**-6 a code is a number of steps of 2**-9, which 2**14 has room for
    few = bits_of(float_of(magnitude) + np.float32(16384)) - np.int32(0x46800000)
    code = few if magnitude < 0x3C800000 else code
    code = np.int32(0x7F) if magnitude >= 0x43F00000 else code
    return code | ((bits >> np.int32(24)) & np.int32(0x80))


@compiled(inline=True)
def _pack(bits: int, wide: bool, row: int, q: int, bias: float, inverse: float) -> None:
    if bits == 8:
        if wide:
            _wide8(row, q, bias, inverse)
        else:
            _lanes8(row, q, bias, inverse)
    elif bits == 4:
        if wide:
            _wide4(row, q, bias, inverse)
        else:
            _lanes4(row, q, bias, inverse)
    elif wide:
        _wide2(row, q, bias, inverse)
    else:
        _lanes2(row, q, bias, inverse)


@compiled()
def _rest(bits: int, row: int, D: int, q: int, bias: float, inverse: float) -> None:
    """As `_integers`, one after another."""
    per_byte = 8 // bits
    x, y, levels = f4(row, D), u1(q, (D + per_byte - 1) // per_byte), np.float32((1 << bits) - 1)
    for i in range(y.shape[0]):
        byte = np.int32(0)
        for d in range(i * per_byte, min((i + 1) * per_byte, D)):
            byte |= _number(x[d], bias, inverse, levels) << np.int32((d - i * per_byte) * bits)
        y[i] = byte


@compiled(inline=True)
def _integers(bits: int, row: int, D: int, q: int, bias: float, inverse: float) -> None:
    """The numbers of a row, 8 // bits of them in a byte."""
    per_byte, d = 8 // bits, 0
    while d + _WIDE <= D:
        _pack(bits, True, row + 4 * d, q + d // per_byte, bias, inverse)
        d += _WIDE
    if D >= _LANES and D % per_byte == 0:
        # the last vectors overlap those before
        if d + _LANES < D:
            _pack(bits, False, row + 4 * d, q + d // per_byte, bias, inverse)
        if d < D:
            _pack(bits, False, row + 4 * (D - _LANES), q + (D - _LANES) // per_byte, bias, inverse)
        return
    if d < D:
        _rest(bits, row + 4 * d, D - d, q + d // per_byte, bias, inverse)


@compiled(inline=True)
def _vector_ends(first: Any, width: int, row: int, D: int) -> Any:
    """As `_exact_ends`, begun with the first vector of the row."""
    low, high, total, d = first, first, first, width
    while d < D:
        # the last vector overlaps the one before
        d = min(d + width, D)
        x = _loaded(first, row + 4 * (d - width))
        low, high, total = _lesser(x, low), _greater(x, high), _sum(x, total)
    least, together = _least(low), _total(total)
    if least == 0 or together != together:
        return _exact_ends(row, D)
    return least, _most(high)


@compiled(inline=True)
def _ends(row: int, D: int) -> Any:
    if D >= _WIDE:
        return _vector_ends(_loaded(_zeros32(), row), _WIDE, row, D)
    if D >= _LANES:
        return _vector_ends(_loaded(_zeros16(), row), _LANES, row, D)
    return _exact_ends(row, D)


@compiled(inline=True)
def _fused_scales(low: Any, high: Any, scale: Any, inverse: Any, S: int, n: int) -> Any:
    """As `_packed_scales`, for int8 with fp32 scales: FBGEMM's fused 8-bit rows, with its epsilon."""
    for i in range(np.uint64(_ROWS)):
        span = high[i] - low[i]
        scale[i], inverse[i] = span / np.float32(255), np.float32(255) / (span + np.float32(1e-8))
    return _keep(0, scale, low, S, n)


@compiled(inline=True)
def _packed_scales(levels: float, half: int, bias: Any, high: Any, scale: Any, inverse: Any, S: int, n: int) -> Any:
    """Scales and inverses of n rows, whose least numbers become their biases: no branch, so that it vectorises.

    Returns whether one is not finite.
    """
    short = np.int32(0)
    for i in range(np.uint64(_ROWS)):
        low = bias[i]
        inverse[i] = low
        bias[i] = _as_half(low) if half else low
        step = (high[i] - bias[i]) / levels
        scale[i] = _as_half(step) if half else step
        least, most = bias[i] - np.float32(0.5) * scale[i], bias[i] + (levels + np.float32(0.5)) * scale[i]
        short |= np.int32(0) if (low >= least) & (high[i] <= most) else np.int32(1)
    if short and half and levels == 255:
        for i in range(np.uint64(_ROWS)):
            low = inverse[i]
            least, most = bias[i] - np.float32(0.5) * scale[i], bias[i] + (levels + np.float32(0.5)) * scale[i]
            if not (low >= least and high[i] <= most):
                bias[i] = _below(low)
                scale[i] = -_below(-((high[i] - bias[i]) / levels))
    for i in range(np.uint64(_ROWS)):
        back = np.float32(1) / scale[i]
        # 2**-128: inverses of such scales are infinite
        useless = abs(scale[i]) <= np.float32(2.938735877055719e-39)
        inverse[i] = np.float32(1) if useless else back
        scale[i] = np.float32(1) if useless else scale[i]
    return _keep(half, scale, bias, S, n)


@compiled()
def _keep(half: int, scale: Any, bias: Any, S: int, n: int) -> Any:
    """Write scales and biases of n rows, which fit their dtype; whether one is not finite."""
    bad = np.int32(0)
    for i in range(np.uint64(_ROWS)):
        largest = max(bits_of(scale[i]) & np.int32(_MAGNITUDE), bits_of(bias[i]) & np.int32(_MAGNITUDE))
        bad |= np.int32(0) if largest < np.int32(_INFINITY) else np.int32(1)
    if half:
        pairs = i4(S, n)
        for i in range(np.uint64(n)):
            pairs[i] = _half_bits(scale[i]) | (_half_bits(bias[i]) << np.int32(16))
    else:
        kept = f4(S, 2 * n)
        for i in range(np.uint64(n)):
            kept[np.uint64(2) * i], kept[np.uint64(2) * i + np.uint64(1)] = scale[i], bias[i]
    return bad


@compiled(inline=True)
def _ask(row: int, D: int) -> None:
    for ahead in range(_AHEAD, _AHEAD + 4 * D, _LINE):
        prefetch(row + ahead)


@compiled(inline=True)
def _fp8_row(row: int, D: int, q: int, S: int, r: int) -> Any:
    """Returns whether the scale is not finite."""
    x, most = i4(row, D), np.int32(0)
    for d in range(np.uint64(D)):
        most = max(most, x[d] & np.int32(_MAGNITUDE))
    # the largest number of e4m3
    scale = float_of(most) / np.float32(448)
    # 2**-140
    scale = np.float32(1) if scale < np.float32(7.174648137343064e-43) else scale
    f4(S + 4 * r, 1)[0] = scale
    v, y = f4(row, D), u1(q, D)
    for d in range(np.uint64(D)):
        y[d] = _e4m3(v[d] / scale)
    return np.int32(0) if most < np.int32(_INFINITY) else np.int32(1)


@compiled(int64(*[int64] * 8))
def quantize(kind: int, W: int, D: int, Q: int, S: int, half: int, low: int, high: int) -> Any:
    """Rows low ... high - 1 of W [R, D] fp32 to payload and scales; whether one of the scales is not finite."""
    bad = np.int32(0)
    if kind == FP8:
        for r in range(low, high):
            _ask(W + 4 * D * r, D)
            bad |= _fp8_row(W + 4 * D * r, D, Q + D * r, S, r)
        return bad
    bits = 8 if kind == INT8 else 4 if kind == INT4 else 2
    levels = np.float32((1 << bits) - 1)
    # of a block of rows; all places are computed with, also where the last block has fewer rows
    bias, most = np.zeros(_ROWS, np.float32), np.zeros(_ROWS, np.float32)
    scale, inverse = np.zeros(_ROWS, np.float32), np.zeros(_ROWS, np.float32)
    rows = min(max(_COLUMNS // D, 1), _ROWS)
    for first in range(low, high, rows):
        count = min(rows, high - first)
        for i in range(np.uint64(count)):
            bias[i], most[i] = _ends(W + 4 * D * (first + i), D)
        # each step of a row's scales waits for the one before: those of several rows are made meanwhile
        kept = S + (4 if half else 8) * first
        if kind == INT8 and not half:
            wrong = _fused_scales(bias, most, scale, inverse, kept, count)
        else:
            wrong = _packed_scales(levels, half, bias, most, scale, inverse, kept, count)
        bad |= wrong
        for i in range(np.uint64(count)):
            r = first + i
            row = W + 4 * D * r
            _ask(row, D)
            if wrong:
                # numbers that are NaN are 0
                _rest(bits, row, D, Q + (D * bits + 7) // 8 * r, bias[i], inverse[i])
            elif kind == INT8:
                _integers(8, row, D, Q + D * r, bias[i], inverse[i])
            elif kind == INT4:
                _integers(4, row, D, Q + (D + 1) // 2 * r, bias[i], inverse[i])
            else:
                _integers(2, row, D, Q + (D + 3) // 4 * r, bias[i], inverse[i])
    return bad
