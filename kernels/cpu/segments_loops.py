"""The CPU's loops over segments, compiled by numba when this file is imported (segments.py, at the first call).

Tensors come as addresses of contiguous memory, with bytes an element where the type may vary: an address costs a call
a tenth of what an array does. Nothing here checks an address; what is in the tensors is checked here.

A plan of moves is starts [S], outs [S + 1]: output positions outs[s] ... outs[s + 1] - 1 come from starts[s] onwards.
Loops release the GIL and never raise: what is wrong is returned as a negative number.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int64
from numba.core import cgutils, types as numba_types
from numba.extending import intrinsic

from .njit import (
    compiled,
    i4,
    i8,
    memcpy,
    pointer,
)

# to type checkers this is a function of fewer arguments, and types without voidptr
_intrinsic: Any = intrinsic
types: Any = numba_types
_carray: Any = numba.carray

# bytes that are copied at once, and up to which that is faster than a call of memcpy
_CHUNK, _FEW = 64, 512
# numbers from which a loop over all of them is as wide as registers are
_MANY = 32
# segments whose memory is asked for before they are needed
_AHEAD = 16

FLOAT32, FLOAT64, INT64 = 0, 1, 2
# what `plan` finds wrong
BAD_ORDER, BAD_SIZE, BAD_TOTAL = 1, 2, 3


@_intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir = cgutils.ir
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        call = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        # to read, to keep in all caches, data
        builder.call(call, [builder.inttoptr(args[0], byte), *(ir.Constant(number, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled()
def _plan(order: Any, sizes: Any, values: int, starts: Any, outs: Any, moved: Any) -> Any:
    S, T = order.shape[0], sizes.shape[0]
    begins = np.empty(T + 1, np.int64)  # of the source's segments
    begin, beyond = np.int64(0), np.int64(0)
    for t in range(T):
        size = np.int64(sizes[t])
        begins[t] = begin
        begin += size
        # sums that pass 2**63 come back too small, or negative
        beyond |= size | (values - begin)
    begins[T] = begin
    if beyond < 0:
        for t in range(T):
            if sizes[t] < 0:
                return -(4 * t + BAD_SIZE)
    if beyond < 0 or begin != values:
        return -BAD_TOTAL
    out = np.int64(0)
    for s in range(S):
        p = np.int64(order[s])
        if p < 0 or p >= T:
            return -(4 * s + BAD_ORDER)
        starts[s] = begins[p]
        outs[s] = out
        out += begins[p + 1] - begins[p]
        if moved.shape[0]:
            moved[s] = sizes[p]
    outs[S] = out
    return out


@compiled(int64(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def plan(
    order: int, order_item: int, S: int, sizes: int, size_item: int, T: int, values: int, room: int, moved: int
) -> Any:
    """Fill the plan, starts and then outs at `room`, of segments order [S] of sizes [T], and their sizes at `moved`.

    Returns how many values they have, or what is wrong: -(4 s + BAD_ORDER) where order[s] is no segment,
    -(4 t + BAD_SIZE) where sizes[t] is negative, -BAD_TOTAL where sizes do not add up to `values`. No sizes where
    `moved` is 0.
    """
    starts, outs = i8(room, S), i8(room + 8 * S, S + 1)
    n = S if moved else 0
    if order_item == 8:
        if size_item == 8:
            return _plan(i8(order, S), i8(sizes, T), values, starts, outs, i8(moved, n))
        return _plan(i8(order, S), i4(sizes, T), values, starts, outs, i4(moved, n))
    if size_item == 8:
        return _plan(i4(order, S), i8(sizes, T), values, starts, outs, i8(moved, n))
    return _plan(i4(order, S), i4(sizes, T), values, starts, outs, i4(moved, n))


@compiled()
def _row_sums(lengths: Any, B: int, sums: Any, lo: int, hi: int) -> Any:
    for t in range(lo, hi):
        total, below = np.int64(0), np.int64(0)
        for i in range(t * B, (t + 1) * B):
            total += lengths[i]
            below |= lengths[i]
        sums[t] = total
        if below < 0:
            for i in range(t * B, (t + 1) * B):
                if lengths[i] < 0:
                    return -i - 1
    return 0


@compiled(int64(int64, int64, int64, int64, int64, int64))
def row_sums(lengths: int, item: int, B: int, sums: int, lo: int, hi: int) -> Any:
    """Sums of rows lo ... hi - 1 of lengths [T, B]; -1 - i if length i is negative, else 0."""
    if item == 8:
        return _row_sums(i8(lengths, hi * B), B, i8(sums, hi), lo, hi)
    return _row_sums(i4(lengths, hi * B), B, i8(sums, hi), lo, hi)


@compiled()
def _first(outs: Any, position: int) -> Any:
    """The last segment that begins at or before `position`."""
    low, high = 0, outs.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if outs[middle] <= position:
            low = middle
        else:
            high = middle
    return low


@compiled(types.void(int64, int64, int64, int64, int64, int64, int64, int64))
def move(room: int, S: int, source: int, values: int, out: int, item: int, lo: int, hi: int) -> None:
    """Output positions lo ... hi - 1 of a plan at `room` by `plan`; source [values] and out have `item` bytes each."""
    starts, outs = i8(room, S), i8(room + 8 * S, S + 1)
    if S == 0 or hi <= lo:
        return
    last_to, last_from = out + hi * item - _CHUNK, source + values * item - _CHUNK
    s = _first(outs, lo)
    while s < S and outs[s] < hi:
        begin, end = max(outs[s], lo), min(outs[s + 1], hi)
        back = starts[s] - outs[s]
        _prefetch(source + starts[min(s + _AHEAD, S - 1)] * item)
        s += 1
        # segments that follow each other in the source too move as one
        while s < S and starts[s] - outs[s] == back and end < hi:
            end = min(outs[s + 1], hi)
            s += 1
        to, left = out + begin * item, (end - begin) * item
        ahead = source + back * item - out
        if left <= _FEW:
            # a chunk too long costs less than a branch on its length; the next segment overwrites what is too much
            while left > 0 and to <= last_to and to + ahead <= last_from:
                memcpy(to, to + ahead, _CHUNK)
                to += _CHUNK
                left -= _CHUNK
        if left > 0:
            memcpy(to, to + ahead, left)


@compiled(inline=True)
def _copy(to: int, source: int, left: int, last_to: int, last_from: int) -> None:
    """`left` bytes, by chunks while no chunk begins behind the last places: the first one even where nothing is left.

    What is too much the next segment overwrites: that costs less than a branch on the length.
    """
    if to <= last_to and source <= last_from:
        memcpy(to, source, _CHUNK)
        if left <= _CHUNK:
            return
        to, source, left = to + _CHUNK, source + _CHUNK, left - _CHUNK
        if left <= _FEW:
            while left > 0 and to <= last_to and source <= last_from:
                memcpy(to, source, _CHUNK)
                to, source, left = to + _CHUNK, source + _CHUNK, left - _CHUNK
    if left > 0:
        memcpy(to, source, left)


@compiled()
def _reorder(
    order: Any,
    sizes: Any,
    moved: Any,
    values: int,
    source: int,
    item: int,
    out: int,
    source2: int,
    item2: int,
    out2: int,
) -> Any:
    S, T = order.shape[0], sizes.shape[0]
    begins = np.empty(T + 1, np.int64)
    begin, beyond = np.int64(0), np.int64(0)
    for t in range(T):
        size = np.int64(sizes[t])
        begins[t] = begin
        begin += size
        # sums that pass 2**63 come back too small, or negative
        beyond |= size | (values - begin)
    begins[T] = begin
    for s in range(S):
        beyond |= np.int64(order[s]) | (T - 1 - np.int64(order[s]))
    if beyond < 0 or begin != values:
        return -1
    last_to, last_from = out + values * item - _CHUNK, source + values * item - _CHUNK
    last_to2, last_from2 = out2 + values * item2 - _CHUNK, source2 + values * item2 - _CHUNK
    place = np.int64(0)
    for s in range(S):
        p, ahead = np.uint64(order[s]), begins[np.uint64(order[min(s + _AHEAD, S - 1)])]
        _prefetch(source + ahead * item)
        begin = begins[p]
        size = begins[p + np.uint64(1)] - begin
        if size > values - place:
            # more than there is room for: repeats
            return -1
        moved[s] = size
        _copy(out + place * item, source + begin * item, size * item, last_to, last_from)
        if item2:
            _copy(out2 + place * item2, source2 + begin * item2, size * item2, last_to2, last_from2)
        place += size
    return place


@compiled(int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64))
def reorder(
    order: int,
    order_item: int,
    S: int,
    sizes: int,
    size_item: int,
    T: int,
    moved: int,
    values: int,
    source: int,
    item: int,
    out: int,
    source2: int,
    item2: int,
    out2: int,
) -> Any:
    """Plan and move in one: segments order [S] of sizes [T] of `values` values come to out, their sizes to `moved` [S].

    Source and out have `item` bytes a value and room for `values`, and so have source2 and out2, unless item2 is 0.
    Returns how many values came, or -1 where something is wrong or they are more than there is room for.
    """
    if order_item == 8:
        if size_item == 8:
            return _reorder(i8(order, S), i8(sizes, T), i8(moved, S), values, source, item, out, source2, item2, out2)
        return _reorder(i8(order, S), i4(sizes, T), i4(moved, S), values, source, item, out, source2, item2, out2)
    if size_item == 8:
        return _reorder(i4(order, S), i8(sizes, T), i8(moved, S), values, source, item, out, source2, item2, out2)
    return _reorder(i4(order, S), i4(sizes, T), i4(moved, S), values, source, item, out, source2, item2, out2)


@compiled()
def _collect(starts: Any, outs: Any, grad: int, out: int, item: int, D: int, kind: Any, lo: int, hi: int) -> None:
    target = _carray(pointer(out + lo * D * item), ((hi - lo) * D,), kind)
    for i in range((hi - lo) * D):
        target[i] = 0
    for s in range(starts.shape[0]):
        begin, end = max(starts[s], lo), min(starts[s] + outs[s + 1] - outs[s], hi)
        if begin < end:
            n = (end - begin) * D
            # arrays that begin where a loop does: no index may be negative, so none is looked at
            total = _carray(pointer(out + begin * D * item), (n,), kind)
            moved = _carray(pointer(grad + (begin + outs[s] - starts[s]) * D * item), (n,), kind)
            for i in range(n):
                total[i] += moved[i]


@compiled(types.void(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def collect(room: int, S: int, grad: int, out: int, values: int, D: int, kind: int, lo: int, hi: int) -> None:
    """out [values, D], rows lo ... hi - 1: the sum of the rows of grad that a plan moved them to, in their order."""
    starts, outs = i8(room, S), i8(room + 8 * S, S + 1)
    if kind == FLOAT32:
        _collect(starts, outs, grad, out, 4, D, np.float32, lo, hi)
    else:
        _collect(starts, outs, grad, out, 8, D, np.float64, lo, hi)


@compiled(inline=True)
def _count_up(out: int, item: int, kind: Any, begin: int, end: int, last: int, first: int) -> None:
    """Elements begin ... end - 1 are first, first + 1, ...: a few eight at a time, the next call overwrites too many.

    None from `last` on is written.
    """
    i = begin
    while i < end and i + 8 <= last and end - begin <= _MANY:
        eight = _carray(pointer(out + i * item), (8,), kind)
        for j in range(8):
            eight[j] = first + (i - begin) + j
        i += 8
    if i < end:
        rest = _carray(pointer(out + i * item), (end - i,), kind)
        for j in range(end - i):
            rest[j] = first + (i - begin) + j


@compiled()
def _expand(order: Any, begins: Any, ends: Any, out: int, item: int, kind: Any, total: int) -> Any:
    S, T = order.shape[0], begins.shape[0] - 1
    if ends[0] != 0 or ends[S] != total:
        return -BAD_TOTAL
    end = np.int64(0)
    for s in range(S):
        p, begin = np.int64(order[s]), end
        if p < 0 or p >= T:
            return -(4 * s + BAD_ORDER)
        end = np.int64(ends[s + 1])
        if end < begin or end > total:
            return -(4 * s + BAD_SIZE)
        _count_up(out, item, kind, begin, end, total, np.int64(begins[p]))
    return 0


@compiled(int64(int64, int64, int64, int64, int64, int64, int64, int64))
def expand(order: int, item: int, S: int, begins: int, T: int, ends: int, out: int, total: int) -> Any:
    """Source position of each output position: 0, or what is wrong as `plan` has it (ends: output offsets [S + 1])."""
    if item == 8:
        return _expand(i8(order, S), i8(begins, T + 1), i8(ends, S + 1), out, 8, np.int64, total)
    return _expand(i4(order, S), i4(begins, T + 1), i4(ends, S + 1), out, 4, np.int32, total)


@compiled()
def _places(offsets: Any, out: int, item: int, kind: Any, N: int) -> Any:
    B = offsets.shape[0]
    if B == 0 or offsets[0] != 0:
        return -1 if N or B else 0
    begin = np.int64(0)
    for b in range(B):
        end = np.int64(offsets[b + 1]) if b + 1 < B else np.int64(N)
        if end < begin or end > N:
            return -b - 2
        _count_up(out, item, kind, begin, end, N, 0)
        begin = end
    return 0


@compiled(int64(int64, int64, int64, int64, int64))
def places(offsets: int, item: int, B: int, out: int, N: int) -> Any:
    """Place of each of N positions in its bag: 0; -1 where offsets do not begin with 0, -2 - b where bag b is wrong."""
    if item == 8:
        return _places(i8(offsets, B), out, 8, np.int64, N)
    return _places(i4(offsets, B), out, 4, np.int32, N)


@compiled()
def _invert(order: Any, out: Any) -> Any:
    n, beyond = order.shape[0], np.int64(0)
    for i in range(np.uint64(n)):
        p = np.int64(order[i])
        out[i] = -1
        beyond |= p | (n - 1 - p)
    if beyond < 0:
        for i in range(n):
            if order[i] < 0 or order[i] >= n:
                return -i - 1
    for i in range(np.uint64(n)):
        out[np.uint64(order[i])] = i
    # n entries leave no place out unless one of them is there twice
    left = out.dtype.type(0)
    for i in range(np.uint64(n)):
        left |= out[i]
    if left < 0:
        for i in range(n):
            if out[order[i]] != i:
                # a later entry is the same
                return -i - 1
    return 0


@compiled(int64(int64, int64, int64, int64))
def invert(order: int, item: int, n: int, out: int) -> Any:
    """Inverse of a permutation: 0, or -1 - i where order[i] is out of range or comes again."""
    if item == 8:
        return _invert(i8(order, n), i8(out, n))
    return _invert(i4(order, n), i4(out, n))


@compiled()
def _sum(
    offsets: Any, each: int, most: int, values: int, out: int, item: int, kind: Any, D: int, lo: int, hi: int
) -> Any:
    last = np.int64(offsets[lo])
    if last < 0 or last > most:
        return -1
    for s in range(lo, hi):
        begin = last * each
        if offsets[s + 1] < last or offsets[s + 1] > most:
            return -1
        last = np.int64(offsets[s + 1])
        end = last * each
        total = _carray(pointer(out + s * D * item), (D,), kind)
        if D == 1:
            row = _carray(pointer(values + begin * item), (end - begin,), kind)
            scalar = kind(0)
            for i in range(end - begin):
                scalar += row[i]
            total[0] = scalar
        else:
            for d in range(D):
                total[d] = 0
            for r in range(begin, end):
                row = _carray(pointer(values + r * D * item), (D,), kind)
                for d in range(D):
                    total[d] += row[d]
    return 0


@compiled()
def _sum_of(offsets: Any, each: int, most: int, values: int, kind: int, out: int, D: int, lo: int, hi: int) -> Any:
    if kind == FLOAT32:
        return _sum(offsets, each, most, values, out, 4, np.float32, D, lo, hi)
    if kind == FLOAT64:
        return _sum(offsets, each, most, values, out, 8, np.float64, D, lo, hi)
    return _sum(offsets, each, most, values, out, 8, np.int64, D, lo, hi)


@compiled(int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64))
def segment_sum(
    offsets: int, item: int, each: int, most: int, values: int, kind: int, out: int, D: int, lo: int, hi: int
) -> Any:
    """Sums of segments lo ... hi - 1 of values [N, D], offsets counted in `each` positions.

    0, or -1 where offsets decrease or leave [0, most].
    """
    if item == 8:
        return _sum_of(i8(offsets, hi + 1), each, most, values, kind, out, D, lo, hi)
    return _sum_of(i4(offsets, hi + 1), each, most, values, kind, out, D, lo, hi)


@compiled()
def _cumsum(lengths: int, offsets: int, item: int, kind: Any, rows: int, N: int) -> None:
    for row in range(rows):
        # arrays that begin where a loop does: no index may be negative, so none is looked at
        each = _carray(pointer(lengths + row * N * item), (N,), kind)
        ends = _carray(pointer(offsets + row * (N + 1) * item), (N + 1,), kind)
        total = kind(0)
        ends[0] = total
        for i in range(N):
            total += each[i]
            ends[i + 1] = total


@compiled(types.void(int64, int64, int64, int64, int64))
def cumsum(lengths: int, item: int, rows: int, N: int, offsets: int) -> None:
    """Offsets [rows, N + 1] of lengths [rows, N]."""
    if item == 8:
        _cumsum(lengths, offsets, 8, np.int64, rows, N)
    else:
        _cumsum(lengths, offsets, 4, np.int32, rows, N)
