"""Loops that look rows of quantized tables up, compiled by numba when they are first called.

Tensors come as addresses of contiguous memory; `of` and `ends_of` are bytes of an id and of an offset, `half` says that
scales are fp16. A row goes straight from its payload into the sums of its bag, row after row in their order, each
product and each sum rounded by itself: the bits of the reference. Loops release the GIL and never raise.
Letters as in quantized/pooled_lookup.py. Rows that hold their scales themselves, of any formats in one call, are those
of quantized/fused_lookup.py; their loops give the position of the first id that is outside its table and not -1, or -1.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int64, void

from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    FIRST_ROW,
    HEAD,
    KIND,
    MEAN,
    ROWS,
    STRIDE,
)
from .njit import (
    compiled,
    f4,
    float_of,
    half_value,
    i4,
    i8,
    pointer,
    prefetch,
    u1,
)

# to type checkers a function of fewer arguments
_carray: Any = numba.carray

INT8, INT4, INT2, FP8, FP16, BF16, FP32 = range(7)
# of fused rows also: 8-bit floats by a table of their 256 values, and tables of another buffer, which are left out
MINIFLOAT, ELSEWHERE = 7, 8

# ids ahead of the one that is added, whose row is asked for; bytes of a line of the cache
_AHEAD, _LINE = 8, 64


@compiled(inline=True)
def _e4m3(bits: int) -> Any:
    """The value of an e4m3 number."""
    value = float_of(np.int32((bits & 0x7F) << 20)) * np.float32(1.3292279957849159e36)
    value = float_of(np.int32(0x7FC00000)) if (bits & 0x7F) == 0x7F else value
    return -value if bits & 0x80 else value


@compiled(inline=True)
def _number(bits: int) -> Any:
    return np.float32(np.int32(bits))


@compiled(inline=True)
def _u2(address: int, n: int) -> Any:
    return _carray(pointer(address), (n,), np.uint16)


@compiled(inline=True)
def _sum(y: Any, d: int, value: Any, adds: bool) -> None:
    y[d] = y[d] + value if adds else value


@compiled(inline=True)
def _int8(to: int, q: int, dim: int, scale: float, bias: float, weight: float, adds: bool) -> None:
    y, x = f4(to, dim), u1(q, dim)
    for d in range(dim):
        _sum(y, d, (_number(x[d]) * scale + bias) * weight, adds)


@compiled(inline=True)
def _int4(to: int, q: int, dim: int, scale: float, bias: float, weight: float, adds: bool) -> None:
    y, x = f4(to, dim), u1(q, (dim + 1) // 2)
    for i in range(dim // 2):
        bits = np.int32(x[i])
        _sum(y, 2 * i, (_number(bits & 15) * scale + bias) * weight, adds)
        _sum(y, 2 * i + 1, (_number(bits >> 4) * scale + bias) * weight, adds)
    if dim % 2:
        _sum(y, dim - 1, (_number(x[dim // 2] & 15) * scale + bias) * weight, adds)


@compiled(inline=True)
def _int2(to: int, q: int, dim: int, scale: float, bias: float, weight: float, adds: bool) -> None:
    y, x = f4(to, dim), u1(q, (dim + 3) // 4)
    for i in range(dim // 4):
        bits = np.int32(x[i])
        _sum(y, 4 * i, (_number(bits & 3) * scale + bias) * weight, adds)
        _sum(y, 4 * i + 1, (_number((bits >> 2) & 3) * scale + bias) * weight, adds)
        _sum(y, 4 * i + 2, (_number((bits >> 4) & 3) * scale + bias) * weight, adds)
        _sum(y, 4 * i + 3, (_number(bits >> 6) * scale + bias) * weight, adds)
    for d in range(dim // 4 * 4, dim):
        _sum(y, d, (_number((x[d // 4] >> (d % 4 * 2)) & 3) * scale + bias) * weight, adds)


@compiled(inline=True)
def _fp8(to: int, q: int, dim: int, scale: float, weight: float, adds: bool) -> None:
    y, x = f4(to, dim), u1(q, dim)
    for d in range(dim):
        _sum(y, d, _e4m3(x[d]) * scale * weight, adds)


@compiled(inline=True)
def _fp16(to: int, q: int, dim: int, weight: float, adds: bool) -> None:
    y, x = f4(to, dim), _u2(q, dim)
    for d in range(dim):
        _sum(y, d, half_value(x[d]) * weight, adds)


@compiled(inline=True)
def _bf16(to: int, q: int, dim: int, weight: float, adds: bool) -> None:
    y, x = f4(to, dim), _u2(q, dim)
    for d in range(dim):
        _sum(y, d, float_of(np.int32(np.int32(x[d]) << 16)) * weight, adds)


@compiled(inline=True)
def _fp32(to: int, q: int, dim: int, weight: float, adds: bool) -> None:
    y, x = f4(to, dim), f4(q, dim)
    for d in range(dim):
        _sum(y, d, x[d] * weight, adds)


@compiled(inline=True)
def _at(address: int, of: int, i: int) -> Any:
    """Integer i of those of `of` bytes."""
    if of == 8:
        return i8(address + 8 * i, 1)[0]
    return np.int64(i4(address + 4 * i, 1)[0])


@compiled(inline=True)
def _row(scales: int, half: int, parts: int, row: int) -> Any:
    """Scale and bias of a row."""
    if parts == 0:
        return np.float32(0), np.float32(0)
    if half:
        two = _u2(scales + 2 * parts * row, parts)
        return half_value(two[0]), half_value(two[parts - 1])
    pair = f4(scales + 4 * parts * row, parts)
    return pair[0], pair[parts - 1]


@compiled(inline=True)
def _take(kind: int, to: int, q: int, dim: int, scale: float, bias: float, weight: float, adds: bool) -> None:
    """A row of payload at `q` times a weight, added to the fp32 row at `to` or put there."""
    if kind == INT8:
        _int8(to, q, dim, scale, bias, weight, adds)
    elif kind == INT4:
        _int4(to, q, dim, scale, bias, weight, adds)
    elif kind == INT2:
        _int2(to, q, dim, scale, bias, weight, adds)
    elif kind == FP8:
        _fp8(to, q, dim, scale, weight, adds)
    elif kind == FP16:
        _fp16(to, q, dim, weight, adds)
    elif kind == BF16:
        _bf16(to, q, dim, weight, adds)
    else:
        _fp32(to, q, dim, weight, adds)


@compiled(void(*[int64] * 18))
def pool(
    kind: int,
    bits: int,
    parts: int,
    payload: int,
    scales: int,
    half: int,
    ids: int,
    of: int,
    n: int,
    ends: int,
    ends_of: int,
    weights: int,
    ft: int,
    batch: int,
    out: int,
    stride: int,
    low: int,
    high: int,
) -> None:
    """Bags low ... high - 1 of the F * B, those of a feature in its columns of rows of `stride`."""
    size = parts * (2 if half else 4)
    for bag in range(low, high):
        feature = i8(ft + 8 * FIELDS * (bag // batch), FIELDS)
        dim, rows, first = feature[DIM], feature[ROWS], feature[FIRST_ROW]
        width, table = (dim * bits + 7) // 8, payload + feature[BASE]
        to = out + 4 * ((bag % batch) * stride + feature[COLUMN])
        y = f4(to, dim)
        for d in range(dim):
            y[d] = np.float32(0)
        begin, end = _at(ends, ends_of, bag), _at(ends, ends_of, bag + 1)
        for i in range(max(begin, 0), min(end, n)):
            # perhaps an id of another table: asking for a line that is not there does no harm
            ahead = _at(ids, of, min(i + _AHEAD, n - 1))
            for line in range(0, width, _LINE):
                prefetch(table + ahead * width + line)
            prefetch(scales + (first + ahead) * size)
            row = _at(ids, of, i)
            if 0 <= row < rows:
                scale, bias = _row(scales, half, parts, first + row)
                weight = f4(weights + 4 * i, 1)[0] if weights else np.float32(1)
                _take(kind, to, table + row * width, dim, scale, bias, weight, True)
        if feature[MEAN]:
            count = np.float32(max(end - begin, 1))
            for d in range(dim):
                y[d] = y[d] / count


@compiled(void(*[int64] * 18))
def gather(
    kind: int,
    bits: int,
    parts: int,
    payload: int,
    scales: int,
    half: int,
    ids: int,
    of: int,
    n: int,
    ends: int,
    ends_of: int,
    ft: int,
    features: int,
    batch: int,
    out: int,
    dim: int,
    low: int,
    high: int,
) -> None:
    """Rows of ids low ... high - 1, zeros for those that have none."""
    width, f = (dim * bits + 7) // 8, 0
    for i in range(low, high):
        while f < features and i >= _at(ends, ends_of, (f + 1) * batch):
            f += 1
        feature = i8(ft + 8 * FIELDS * min(f, features - 1), FIELDS)
        row, to = _at(ids, of, i), out + 4 * i * dim
        if f < features and 0 <= row < feature[ROWS]:
            scale, bias = _row(scales, half, parts, feature[FIRST_ROW] + row)
            _take(kind, to, payload + feature[BASE] + row * width, dim, scale, bias, np.float32(1), False)
        else:
            y = f4(to, dim)
            for d in range(dim):
                y[d] = np.float32(0)


@compiled(void(*[int64] * 10))
def dequantize(
    kind: int, bits: int, parts: int, payload: int, scales: int, half: int, out: int, dim: int, low: int, high: int
) -> None:
    """Rows low ... high - 1 of a payload to their values [R, D] fp32."""
    width = (dim * bits + 7) // 8
    for row in range(low, high):
        scale, bias = _row(scales, half, parts, row)
        _take(kind, out + 4 * row * dim, payload + row * width, dim, scale, bias, np.float32(1), False)


@compiled(inline=True)
def _minifloats(to: int, q: int, dim: int, values: int, weight: float, adds: bool) -> None:
    y, x, value = f4(to, dim), u1(q, dim), f4(values, 256)
    for d in range(dim):
        product = value[x[d]] * weight
        y[d] = y[d] + product if adds else product


@compiled(inline=True)
def _take_fused(kind: int, to: int, row: int, head: int, dim: int, values: int, weight: float, adds: bool) -> None:
    """The fused row at `row` times a weight, added to the fp32 row at `to` or put there."""
    if kind == MINIFLOAT:
        _minifloats(to, row, dim, values, weight, adds)
    else:
        scale, bias = np.float32(0), np.float32(0)
        if head:
            two = _u2(row, 2)
            scale, bias = half_value(two[0]), half_value(two[1])
        _take(kind, to, row + head, dim, scale, bias, weight, adds)


@compiled(int64(*[int64] * 15))
def pool_fused(
    fused: int,
    ids: int,
    of: int,
    n: int,
    ends: int,
    ends_of: int,
    weights: int,
    ft: int,
    values: int,
    batch: int,
    out: int,
    stride: int,
    mean: int,
    low: int,
    high: int,
) -> int:
    """Bags low ... high - 1 of the F * B, those of a feature in its columns of rows of `stride`."""
    bad = -1
    for bag in range(low, high):
        feature = i8(ft + 8 * FIELDS * (bag // batch), FIELDS)
        dim, rows, kind, width, head = feature[DIM], feature[ROWS], feature[KIND], feature[STRIDE], feature[HEAD]
        table = fused + feature[BASE]
        to = out + 4 * ((bag % batch) * stride + feature[COLUMN])
        y = f4(to, dim)
        for d in range(dim):
            y[d] = np.float32(0)
        begin, end = _at(ends, ends_of, bag), _at(ends, ends_of, bag + 1)
        if kind == ELSEWHERE:
            continue
        for i in range(max(begin, 0), min(end, n)):
            # perhaps an id of another table: asking for a line that is not there does no harm
            ahead = table + _at(ids, of, min(i + _AHEAD, n - 1)) * width
            for line in range(0, width, _LINE):
                prefetch(ahead + line)
            row = _at(ids, of, i)
            if 0 <= row < rows:
                weight = f4(weights + 4 * i, 1)[0] if weights else np.float32(1)
                _take_fused(kind, to, table + row * width, head, dim, values, weight, True)
            elif row != -1 and (bad < 0 or i < bad):
                bad = i
        if mean:
            count = np.float32(max(end - begin, 1))
            for d in range(dim):
                y[d] = y[d] / count
    return bad


@compiled(int64(*[int64] * 14))
def gather_fused(
    fused: int,
    ids: int,
    of: int,
    n: int,
    ends: int,
    ends_of: int,
    ft: int,
    features: int,
    values: int,
    batch: int,
    out: int,
    dim: int,
    low: int,
    high: int,
) -> int:
    """Rows of ids low ... high - 1, zeros for those that have none."""
    f, bad = 0, -1
    for i in range(low, high):
        while f < features and i >= _at(ends, ends_of, (f + 1) * batch):
            f += 1
        feature = i8(ft + 8 * FIELDS * min(f, features - 1), FIELDS)
        row, to, kind = _at(ids, of, i), out + 4 * i * dim, feature[KIND]
        if f < features and kind != ELSEWHERE and 0 <= row < feature[ROWS]:
            source = fused + feature[BASE] + row * feature[STRIDE]
            _take_fused(kind, to, source, feature[HEAD], dim, values, np.float32(1), False)
        else:
            y = f4(to, dim)
            for d in range(dim):
                y[d] = np.float32(0)
            if f < features and kind != ELSEWHERE and row != -1 and bad < 0:
                bad = i
    return bad
