"""The pooled lookup and the check of ids on the CPU, compiled by numba when they are first called.

Letters as in lookup/pooled.py; tensors come as addresses. Loops release the GIL and never raise. The rows of a bag are
added in the order of its ids, in fp32, as `embedding_bag` adds them; a sum stays in vector registers until it is whole.
"""

from __future__ import annotations

from typing import Any

from numba import float32, int64, uint64
from numba.core import cgutils, types as numba_types
from numba.extending import intrinsic

from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    MEAN,
    ROWS,
)
from .njit import (
    compiled,
    i4,
    i8,
    worker,
)
from .vectors import spread_lanes, taken, zeros_of

_AHEAD = 20  # rows whose memory is asked for before they are needed
_LINE = 64  # bytes of a cache line
FP32, FP16, BF16 = 0, 1, 2
# A loop's job, some int64: into how many parts it is divided, how many were taken, whether one found something bad;
# then the arguments of a lookup or a check, in the order in which the loops name them. All threads call a loop with the
# same job.
PARTS, TAKEN, BAD, LOOKUP, CHECK = 0, 1, 2, 15, 12

# to type checkers these are functions of fewer arguments, and types without Type
_intrinsic: Any = intrinsic
_types: Any = numba_types
_ir: Any = cgutils.ir


_zeros128, _zeros64, _zeros16, _zeros4, _zeros1 = map(zeros_of, (128, 64, 16, 4, 1))


def _loaded(builder: Any, count: int, address: Any, kind: int) -> Any:
    """fp32 of so many elements at an address, which are aligned as elements are."""
    element = _ir.FloatType() if kind == FP32 else _ir.HalfType() if kind == FP16 else _ir.IntType(16)
    where = builder.inttoptr(address, _ir.VectorType(element, count).as_pointer())
    raw = builder.load(where, align=4 if kind == FP32 else 2)
    wide = _ir.VectorType(_ir.FloatType(), count)
    if kind == FP16:
        return builder.fpext(raw, wide)
    if kind == BF16:
        whole = _ir.VectorType(_ir.IntType(32), count)
        bits = builder.shl(builder.zext(raw, whole), _ir.Constant(whole, [16] * count))
        return builder.bitcast(bits, wide)
    return raw


def _adds(kind: int) -> Any:
    @_intrinsic
    def add(typing: Any, total: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.fadd(args[0], _loaded(builder, total.count, args[1], kind))

        return total(total, _types.int64), generate

    return add


_add_fp32, _add_fp16, _add_bf16 = map(_adds, (FP32, FP16, BF16))


def _adds_scaled(kind: int) -> Any:
    @_intrinsic
    def add_scaled(typing: Any, total: Any, address: Any, scale: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            # rounded once, as embedding_bag has it
            row = _loaded(builder, total.count, args[1], kind)
            name = f"llvm.fma.v{total.count}f32"
            function = cgutils.get_or_insert_function(builder.module, _ir.FunctionType(row.type, [row.type] * 3), name)
            return builder.call(function, [spread_lanes(builder, total.count, args[2]), row, args[0]])

        return total(total, _types.int64, _types.float32), generate

    return add_scaled


_add_scaled_fp32, _add_scaled_fp16, _add_scaled_bf16 = map(_adds_scaled, (FP32, FP16, BF16))


@_intrinsic
def _divided(typing: Any, total: Any, by: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fdiv(args[0], spread_lanes(builder, total.count, args[1]))

    return total(total, _types.float32), generate


@_intrinsic
def _store(typing: Any, total: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[0], builder.inttoptr(args[1], args[0].type.as_pointer()), align=4)
        return context.get_dummy_value()

    return _types.void(total, _types.int64), generate


@_intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte, number = _ir.IntType(8).as_pointer(), _ir.IntType(32)
        call = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], _ir.FunctionType(_ir.VoidType(), [byte, number, number, number])
        )
        # to read, to keep in all caches, data
        hints = [_ir.Constant(number, value) for value in (0, 3, 1)]
        builder.call(call, [builder.inttoptr(args[0], byte), *hints])
        return context.get_dummy_value()

    return _types.void(_types.int64), generate


@_intrinsic
def _word(typing: Any, address: Any, size: Any) -> Any:
    """The number of so many bytes at an address: an int64 or int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole, half = _ir.IntType(64), _ir.IntType(32)
        number = cgutils.alloca_once(builder, whole)
        with builder.if_else(builder.icmp_signed("==", args[1], _ir.Constant(whole, 8))) as (then, otherwise):
            with then:
                builder.store(builder.load(builder.inttoptr(args[0], whole.as_pointer()), align=8), number)
            with otherwise:
                narrow = builder.load(builder.inttoptr(args[0], half.as_pointer()), align=4)
                builder.store(builder.sext(narrow, whole), number)
        return builder.load(number)

    return _types.int64(_types.int64, _types.int64), generate


@_intrinsic
def _number(typing: Any, address: Any) -> Any:
    """The fp32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], _ir.FloatType().as_pointer()), align=4)

    return _types.float32(_types.int64), generate


@compiled(inline=True)
def _bag(
    total: Any,
    kind: int,
    table: int,
    row_bytes: int,
    rows: int,
    ids: int,
    size: int,
    P: int,
    begin: int,
    end: int,
    last: int,
    width: int,
    length: int,
    out: int,
) -> None:
    """The sum of some columns, `width` bytes of a row, of ids begin ... end - 1, begun as `total` and divided by
    `length` unless that is 0. Rows are asked for up to that of the id at `last`."""
    for i in range(begin, end):
        ahead = table + _word(ids + min(i + _AHEAD, last) * size, size) * row_bytes
        for line in range(0, width, _LINE):
            _prefetch(ahead + line)
        index = _word(ids + i * size, size)
        # an id outside the table counts as none
        if uint64(index) < uint64(rows):
            row = table + index * row_bytes
            if P:
                p = _number(P + 4 * i)
                if kind == FP32:
                    total = _add_scaled_fp32(total, row, p)
                elif kind == FP16:
                    total = _add_scaled_fp16(total, row, p)
                else:
                    total = _add_scaled_bf16(total, row, p)
            elif kind == FP32:
                total = _add_fp32(total, row)
            elif kind == FP16:
                total = _add_fp16(total, row)
            else:
                total = _add_bf16(total, row)
    if length > 0:
        total = _divided(total, float32(length))
    _store(total, out)


@compiled(inline=True)
def _first_bag(offsets: int, size: int, bags: int, work: int) -> Any:
    """The first bag before which there are so many ids and bags."""
    low, high = 0, bags
    while low < high:
        middle = (low + high) // 2
        if _word(offsets + middle * size, size) + middle < work:
            low = middle + 1
        else:
            high = middle
    return low


@compiled(inline=True)
def _pooled(
    kind: int,
    W: int,
    ids: int,
    id_size: int,
    offsets: int,
    size: int,
    P: int,
    features: int,
    out: int,
    F: int,
    B: int,
    N: int,
    C: int,
    part: int,
    parts: int,
) -> Any:
    FT = i8(features, F * FIELDS)
    bags, itemsize = F * B, 4 if kind == FP32 else 2
    work = _word(offsets + bags * size, size) + bags
    bag = 0 if part == 0 else _first_bag(offsets, size, bags, work * part // parts)
    stop = bags if part + 1 == parts else _first_bag(offsets, size, bags, work * (part + 1) // parts)
    end = max(_word(offsets + bag * size, size), 0)
    while bag < stop:
        f = bag // B
        at = f * FIELDS
        rows, dim, mean = FT[at + ROWS], FT[at + DIM], FT[at + MEAN]
        table, row_bytes = W + FT[at + BASE] * itemsize, dim * itemsize
        last = max(min(_word(offsets + (f + 1) * B * size, size), N), 1) - 1
        y = out + 4 * ((bag - f * B) * C + FT[at + COLUMN])
        while bag < min(stop, (f + 1) * B):
            # offsets out of order raise elsewhere; here they only must not be followed outside the ids
            begin, after = min(max(end, 0), N), _word(offsets + (bag + 1) * size, size)
            length, end = after - end if mean else 0, after
            after = min(max(after, begin), N)
            d = 0
            while d < dim:
                # columns [d, dim) in the widest vectors
                here, to = table + d * itemsize, y + 4 * d
                if dim - d >= 128:
                    _bag(
                        _zeros128(),
                        kind,
                        here,
                        row_bytes,
                        rows,
                        ids,
                        id_size,
                        P,
                        begin,
                        after,
                        last,
                        128 * itemsize,
                        length,
                        to,
                    )
                    d += 128
                elif dim - d >= 64:
                    _bag(
                        _zeros64(),
                        kind,
                        here,
                        row_bytes,
                        rows,
                        ids,
                        id_size,
                        P,
                        begin,
                        after,
                        last,
                        64 * itemsize,
                        length,
                        to,
                    )
                    d += 64
                elif dim - d >= 16:
                    _bag(
                        _zeros16(),
                        kind,
                        here,
                        row_bytes,
                        rows,
                        ids,
                        id_size,
                        P,
                        begin,
                        after,
                        last,
                        16 * itemsize,
                        length,
                        to,
                    )
                    d += 16
                elif dim - d >= 4:
                    _bag(
                        _zeros4(),
                        kind,
                        here,
                        row_bytes,
                        rows,
                        ids,
                        id_size,
                        P,
                        begin,
                        after,
                        last,
                        4 * itemsize,
                        length,
                        to,
                    )
                    d += 4
                else:
                    _bag(
                        _zeros1(),
                        kind,
                        here,
                        row_bytes,
                        rows,
                        ids,
                        id_size,
                        P,
                        begin,
                        after,
                        last,
                        itemsize,
                        length,
                        to,
                    )
                    d += 1
            y += 4 * C
            bag += 1
    return 0


@compiled(inline=True)
def _pooled_parts(kind: int, address: int) -> None:
    job = i8(address, LOOKUP)
    while True:
        part = taken(address, TAKEN)
        if part >= job[PARTS]:
            return
        W, ids, id_size, offsets, size, P = job[3], job[4], job[5], job[6], job[7], job[8]
        features, out, F, B, N, C = job[9], job[10], job[11], job[12], job[13], job[14]
        _pooled(kind, W, ids, id_size, offsets, size, P, features, out, F, B, N, C, part, job[PARTS])


@worker
def pooled_fp32(address: int) -> None:
    _pooled_parts(FP32, address)


@worker
def pooled_fp16(address: int) -> None:
    _pooled_parts(FP16, address)


@worker
def pooled_bf16(address: int) -> None:
    _pooled_parts(BF16, address)


@compiled(inline=True)
def _inside(ids: int, size: int, begin: int, end: int, rows: int) -> Any:
    """Whether ids begin ... end - 1 lie in [0, rows)."""
    beyond, last = int64(0), rows - 1
    # no branch, so that it vectorises
    if size == 8:
        I = i8(ids, end)
        for i in range(uint64(begin), uint64(end)):
            beyond |= I[i] | (last - I[i])
    else:
        H = i4(ids, end)
        for i in range(uint64(begin), uint64(end)):
            beyond |= int64(H[i]) | (last - int64(H[i]))
    return beyond >= 0


@compiled(inline=True)
def _rising(offsets: int, size: int, first: int, last: int) -> Any:
    """Whether none of the offsets first ... last is negative or less than the one before it; first >= 1."""
    fallen = int64(0)
    if size == 8:
        O = i8(offsets, last + 1)
        for k in range(uint64(first), uint64(last + 1)):
            fallen |= O[k] | (O[k] - O[k - uint64(1)])
    else:
        H = i4(offsets, last + 1)
        for k in range(uint64(first), uint64(last + 1)):
            fallen |= int64(H[k]) | (int64(H[k]) - int64(H[k - uint64(1)]))
    return fallen >= 0


@compiled(inline=True)
def _are_good(
    ids: int,
    id_size: int,
    offsets: int,
    size: int,
    features: int,
    F: int,
    B: int,
    N: int,
    padded: int,
    part: int,
    parts: int,
) -> Any:
    """1 if nothing is wrong with this part of the offsets and of each feature's ids, else 0."""
    FT, bags = i8(features, F * FIELDS), F * B
    end = _word(offsets + bags * size, size)
    if _word(offsets, size) != 0 or end > N or (end < N and not padded):
        return 0
    if not _rising(offsets, size, 1 + bags * part // parts, bags * (part + 1) // parts):
        return 0
    begin = int64(0)
    for f in range(F):
        # offsets out of order, which may be for another part to find, are not followed outside the ids
        after = min(max(_word(offsets + (f + 1) * B * size, size), begin), N)
        n = after - begin
        if not _inside(ids, id_size, begin + n * part // parts, begin + n * (part + 1) // parts, FT[f * FIELDS + ROWS]):
            return 0
        begin = after
    return 1


@worker
def ids_are_good(address: int) -> None:
    """Leave in BAD whether something is wrong."""
    job = i8(address, CHECK)
    while True:
        part = taken(address, TAKEN)
        if part >= job[PARTS]:
            return
        ids, id_size, offsets, size, features = job[3], job[4], job[5], job[6], job[7]
        if not _are_good(ids, id_size, offsets, size, features, job[8], job[9], job[10], job[11], part, job[PARTS]):
            # whichever thread says it
            job[BAD] = 1
