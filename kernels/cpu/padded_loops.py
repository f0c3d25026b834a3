"""Loops that move bags between jagged values and a padded dense, compiled by numba when this file is imported.

Tensors come as addresses of contiguous memory: an address costs a call a tenth of what an array does. A value has
`item` bytes, a leaf of the dense `most` places for values (letters of ../jagged/padded.py). Bags are those that `ends`,
offsets of `of` bytes each, describe. With one jagged dim bag p is leaf p; with more, `begins` and `stops` (int64, 0 for
one dim) hold the first bag of each parent and the end of its bags, and the parent has `columns` leaves. A loop does
parents low ... high - 1 of `parents` and returns -1, or a bag whose bounds leave the `total` values, before it touches
it. Loops release the GIL and never raise.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import int64
from numba.core import cgutils, types as numba_types
from numba.extending import intrinsic

from .njit import compiled, memcpy, pointer

# to type checkers this is a function of fewer arguments, and types without voidptr
_intrinsic: Any = intrinsic
types: Any = numba_types
_carray: Any = numba.carray

# bytes that are written at once, and up to which that is faster than a call of memcpy
_CHUNK, _FEW = 64, 1024

FLOAT32, FLOAT64, INT32, INT64 = 0, 1, 2, 3
MULTIPLY, ADD, ADD_TO_DENSE = 0, 1, 2


@_intrinsic
def _store_chunk(typing: Any, to: Any, pattern: Any) -> Any:
    """A chunk of eight times the pattern of eight bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir = cgutils.ir
        eight = ir.VectorType(ir.IntType(64), _CHUNK // 8)
        value = ir.Constant(eight, ir.Undefined)
        for k in range(_CHUNK // 8):
            value = builder.insert_element(value, args[1], ir.Constant(ir.IntType(32), k))
        builder.store(value, builder.inttoptr(args[0], eight.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@compiled(inline=True)
def _at(offsets: int, of: int, i: int) -> Any:
    if of == 8:
        return _carray(pointer(offsets + 8 * i), (1,), np.int64)[0]
    return np.int64(_carray(pointer(offsets + 4 * i), (1,), np.int32)[0])


@compiled(inline=True)
def _copy(to: int, source: int, nbytes: int, last_to: int, last_source: int) -> None:
    """Bytes, and up to a chunk too many: what follows is written later. Nothing is touched a chunk past the lasts."""
    if nbytes <= _FEW:
        # a chunk too long costs less than a branch on its length
        while nbytes > 0 and to <= last_to and source <= last_source:
            memcpy(to, source, _CHUNK)
            to += _CHUNK
            source += _CHUNK
            nbytes -= _CHUNK
    if nbytes > 0:
        memcpy(to, source, nbytes)


@compiled(inline=True)
def _fill(to: int, nbytes: int, pattern: int, last_to: int) -> None:
    """The pattern over and over; up to a chunk too many as in `_copy`."""
    while nbytes > 0 and to <= last_to:
        _store_chunk(to, pattern)
        to += _CHUNK
        nbytes -= _CHUNK
    if nbytes > 0:
        end = to + nbytes
        while to + _CHUNK <= end:
            _store_chunk(to, pattern)
            to += _CHUNK
        rest = _carray(pointer(to), (end - to,), np.uint8)
        for i in range(end - to):
            rest[i] = np.uint8((pattern >> (8 * (i & 7))) & 255)


@compiled(int64(int64, int64, int64, int64))
def ordered(ends: int, of: int, bags: int, most: int) -> Any:
    """Whether offsets [bags + 1] begin at 0, do not fall and end at `most` or before: 1 or 0."""
    last = _at(ends, of, 0)
    wrong = last
    for i in range(bags):
        end = _at(ends, of, i + 1)
        wrong |= end | (end - last) | (most - end)
        if wrong < 0:
            return 0
        last = end
    return 1 if wrong >= 0 and _at(ends, of, 0) == 0 and last <= most else 0


@compiled(int64(int64, int64, int64))
def entry(offsets: int, of: int, i: int) -> Any:
    """offsets[i]."""
    return _at(offsets, of, i)


@compiled(int64(int64, int64, int64, int64, int64))
def offsets_of(lengths: int, of: int, bags: int, total: int, out: int) -> Any:
    """Offsets [bags + 1] int64 of lengths: 1, or 0 where one is negative or they do not add up to `total`."""
    ends = _carray(pointer(out), (bags + 1,), np.int64)
    end, wrong = np.int64(0), np.int64(0)
    ends[0] = 0
    for i in range(bags):
        length = _at(lengths, of, i)
        # a sum that passes 2**63 has passed the total before
        wrong |= length | (total - end - length)
        end += length
        ends[i + 1] = end
        if wrong < 0:
            return 0
    return 1 if end == total else 0


@compiled(types.void(int64, int64, int64, int64, int64, int64, int64, int64))
def descend(begins: int, stops: int, parents: int, columns: int, ends: int, of: int, child: int, stop: int) -> None:
    """First thing of each of the parents' `columns` bags at `child`, the end of its things at `stop`: 0 for none."""
    first, last = _carray(pointer(begins), (parents,), np.int64), _carray(pointer(stops), (parents,), np.int64)
    low = _carray(pointer(child), (parents * columns,), np.int64)
    high = _carray(pointer(stop), (parents * columns,), np.int64)
    for p in range(parents):
        for column in range(columns):
            here = first[p] + column < last[p]
            low[p * columns + column] = _at(ends, of, first[p] + column) if here else 0
            high[p * columns + column] = _at(ends, of, first[p] + column + 1) if here else 0


@compiled(int64(*[int64] * 14))
def to_padded(
    values: int,
    total: int,
    item: int,
    out: int,
    fill: int,
    ends: int,
    of: int,
    begins: int,
    stops: int,
    columns: int,
    most: int,
    parents: int,
    low: int,
    high: int,
) -> Any:
    """Write leaves of the dense `out`: values, and then `fill`, a pattern of eight bytes."""
    if low == 0 and _at(ends, of, 0) != 0:
        return 0
    leaf = most * item
    last_to, last_source = out + high * columns * leaf - _CHUNK, values + total * item - _CHUNK
    to = out + low * columns * leaf
    for p in range(low, high):
        first, held = p, int64(1)
        if begins != 0:
            first = _at(begins, 8, p)
            held = min(_at(stops, 8, p) - first, columns)
        for bag in range(first, first + held):
            begin, end = _at(ends, of, bag), _at(ends, of, bag + 1)
            if begin < 0 or end < begin or end > total:
                return bag
            nbytes = min(end - begin, most) * item
            _copy(to, values + begin * item, nbytes, last_to, last_source)
            _fill(to + nbytes, leaf - nbytes, fill, last_to)
            to += leaf
        if held < columns:
            _fill(to, (columns - held) * leaf, fill, last_to)
            to += (columns - held) * leaf
    return -1


@compiled(inline=True)
def _value_ends(ends: int, of: int, begins: int, stops: int, parents: int, p: int) -> Any:
    """Where the values of parent p begin."""
    if begins == 0:
        return _at(ends, of, p)
    if p < parents:
        return _at(ends, of, _at(begins, 8, p))
    return _at(ends, of, _at(stops, 8, parents - 1)) if parents else int64(0)


@compiled(int64(*[int64] * 14))
def to_jagged(
    dense: int,
    total: int,
    item: int,
    out: int,
    every: int,
    ends: int,
    of: int,
    begins: int,
    stops: int,
    columns: int,
    most: int,
    parents: int,
    low: int,
    high: int,
) -> Any:
    """Write the values `out` of leaves: what the dense holds for them, 0 for what it does not hold.

    `every`: parents have all bags, in order; 0: what belongs to none of them is left as it is.
    """
    if low == 0 and _at(ends, of, 0) != 0:
        return 0
    leaf = most * item
    stop = total
    if high < parents:
        stop = max(0, min(total, _value_ends(ends, of, begins, stops, parents, high)))
    last_to = out + stop * item - _CHUNK if every else int64(-1)
    last_source = dense + parents * columns * leaf - _CHUNK
    for p in range(low, high):
        first, held, bags = p, int64(1), int64(1)
        source = dense + p * columns * leaf
        if begins != 0:
            first = _at(begins, 8, p)
            bags = _at(stops, 8, p) - first
            held = min(bags, columns)
        for bag in range(first, first + held):
            begin, end = _at(ends, of, bag), _at(ends, of, bag + 1)
            if begin < 0 or end < begin or end > total:
                return bag
            nbytes = min(end - begin, most) * item
            to = out + begin * item
            _copy(to, source, nbytes, last_to, last_source)
            if end - begin > most:
                _fill(to + nbytes, (end - begin - most) * item, 0, last_to)
            source += leaf
        if held < bags:
            begin, end = _at(ends, of, first + held), _at(ends, of, first + bags)
            _fill(out + begin * item, (end - begin) * item, 0, last_to)
    if every and high == parents:
        begin = _value_ends(ends, of, begins, stops, parents, parents)
        if begin < 0 or begin > total:
            return parents
        _fill(out + begin * item, (total - begin) * item, 0, last_to)
    return -1


@compiled(inline=True)
def _add_zero(x: int, z: int, n: int, kind: Any) -> None:
    """z = 0 + x, which is not x where that is -0."""
    left, right = _carray(pointer(z), (n,), kind), _carray(pointer(x), (n,), kind)
    for i in range(n):
        left[i] = kind(0) + right[i]


@compiled()
def _calculate(
    dense: int,
    values: int,
    total: int,
    width: int,
    size: int,
    kind: Any,
    out: int,
    how: int,
    every: int,
    ends: int,
    of: int,
    begins: int,
    stops: int,
    columns: int,
    most: int,
    parents: int,
    low: int,
    high: int,
) -> Any:
    if low == 0 and _at(ends, of, 0) != 0:
        return 0
    leaf, item = most * width, width * size
    for p in range(low, high):
        first, held, bags = p, int64(1), int64(1)
        at = p * columns * leaf
        if begins != 0:
            first = _at(begins, 8, p)
            bags = _at(stops, 8, p) - first
            held = min(bags, columns)
        for bag in range(first, first + held):
            begin, end = _at(ends, of, bag), _at(ends, of, bag + 1)
            if begin < 0 or end < begin or end > total:
                return bag
            n = min(end - begin, most) * width
            # arrays that begin where a loop does: no index may be negative, so none is looked at
            x = _carray(pointer(dense + at * size), (n,), kind)
            y = _carray(pointer(values + begin * item), (n,), kind)
            if how == ADD_TO_DENSE:
                z = _carray(pointer(out + at * size), (n,), kind)
                for i in range(n):
                    z[i] = y[i] + x[i]
                _add_zero(dense + (at + n) * size, out + (at + n) * size, leaf - n, kind)
            else:
                z = _carray(pointer(out + begin * item), (n,), kind)
                if how == ADD:
                    for i in range(n):
                        z[i] = x[i] + y[i]
                else:
                    for i in range(n):
                        z[i] = x[i] * y[i]
                if end - begin > most:
                    _leave(out, values, (begin + most) * item, (end - begin - most) * item, how)
            at += leaf
        if how == ADD_TO_DENSE:
            _add_zero(dense + at * size, out + at * size, (columns - held) * leaf, kind)
        elif held < bags:
            begin, end = _at(ends, of, first + held), _at(ends, of, first + bags)
            _leave(out, values, begin * item, (end - begin) * item, how)
    if how != ADD_TO_DENSE and every and high == parents:
        begin = _value_ends(ends, of, begins, stops, parents, parents)
        if begin < 0 or begin > total:
            return parents
        _leave(out, values, begin * item, (total - begin) * item, how)
    return -1


@compiled(inline=True)
def _leave(out: int, values: int, at: int, nbytes: int, how: int) -> None:
    """Write bytes that the dense has no place for: values of a sum, 0 of a product."""
    if nbytes > 0:
        if how == ADD:
            memcpy(out + at, values + at, nbytes)
        else:
            _fill(out + at, nbytes, 0, int64(-1))


@compiled(int64(*[int64] * 17))
def calculate(
    dense: int,
    values: int,
    total: int,
    width: int,
    kind: int,
    out: int,
    how: int,
    every: int,
    ends: int,
    of: int,
    begins: int,
    stops: int,
    columns: int,
    most: int,
    parents: int,
    low: int,
    high: int,
) -> Any:
    """The values of leaves, `width` elements each, times or plus what the dense holds for them; or the dense plus them.

    `every` as in `to_jagged`.
    """
    if kind == FLOAT32:
        return _calculate(
            dense,
            values,
            total,
            width,
            4,
            np.float32,
            out,
            how,
            every,
            ends,
            of,
            begins,
            stops,
            columns,
            most,
            parents,
            low,
            high,
        )
    if kind == FLOAT64:
        return _calculate(
            dense,
            values,
            total,
            width,
            8,
            np.float64,
            out,
            how,
            every,
            ends,
            of,
            begins,
            stops,
            columns,
            most,
            parents,
            low,
            high,
        )
    if kind == INT32:
        return _calculate(
            dense,
            values,
            total,
            width,
            4,
            np.int32,
            out,
            how,
            every,
            ends,
            of,
            begins,
            stops,
            columns,
            most,
            parents,
            low,
            high,
        )
    return _calculate(
        dense,
        values,
        total,
        width,
        8,
        np.int64,
        out,
        how,
        every,
        ends,
        of,
        begins,
        stops,
        columns,
        most,
        parents,
        low,
        high,
    )
