"""The loops of the CPU's update, compiled by numba when this file is imported (cpu_compiled.py, at the first update).

Letters as in update.py, all arrays flat and contiguous: W [elements], I [N] int64, O [F*B + 1] int64, P [N] per-id
weights (empty if there are none), FT [F, 7], G the gradient; N, B, F, D, C = columns of a pooled G.
An update sorts entries, one for each id: the row's number among all rows in the upper half of 64 bits; in the lower
half the element of G where the id's gradient row begins, or, where rows are scaled, the id's position.
Loops release the GIL and never raise. Sums are added in the order that is written here: nothing may reassociate them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import float32, int64, uint64
from numba.core import cgutils
from numba.core import types as numba_types
from numba.extending import intrinsic

from .features import COLUMN, FIRST_ROW, MEAN, ROWS
from .transpose import CHUNK

LEVELS = 8  # of chunks of chunks: 32 ** 7 ids of one row
_LINE = 16  # fp32 in a cache line
_AHEAD = 12  # rows whose memory is asked for before they are needed
_SMALL = 24  # entries up to which insertion sort is the faster
_LOW = uint64(0xFFFFFFFF)  # half of an entry
_DIGIT = 8  # bits that a pass of the radix sort sorts by

# to type checkers these are functions of fewer arguments, and types without Tuple
_intrinsic: Any = intrinsic
types: Any = numba_types

F1, I1, U1 = float32[::1], int64[::1], uint64[::1]
I2 = int64[:, ::1]
F2 = float32[:, ::1]


# numba keeps code under the name of its function and sees changes of this file only, not of where these come from
_MARK = "-".join(map(str, (COLUMN, FIRST_ROW, MEAN, ROWS, CHUNK)))


def compiled(*signature: Any, **options: Any) -> Callable[[Any], Any]:
    """numba.njit without the GIL; with a signature compiled at once and kept on disk, else where it is called."""
    options = {"nogil": True, "error_model": "numpy", **options}

    def decorate(function: Any) -> Any:
        if signature:
            function.__qualname__ += f"_{_MARK}"
            try:
                return numba.njit(*signature, cache=True, **options)(function)
            except RuntimeError:
                # no place to keep it: neither beside this file nor in the home of the user can anything be written
                pass
        # LLVM takes these for too long to inline, and a call costs more than a row
        return numba.njit(*signature, forceinline=not signature, **options)(function)

    return decorate


@_intrinsic
def _lent(typing: Any, array: Any) -> Any:
    """The same array without an owner: slices of an owned array count references, atomically, two for every row.

    For arguments only, which the caller keeps: numba frees an array of its own after the last use of its name.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = context.make_array(signature.args[0])(context, builder, args[0])
        found.meminfo = cgutils.get_null_value(found.meminfo.type)
        found.parent = cgutils.get_null_value(found.parent.type)
        return found._getvalue()

    return array(array), generate


@_intrinsic
def _prefetch(typing: Any, array: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir = cgutils.ir
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        call = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        # to read, to keep in all caches, data
        hints = [ir.Constant(number, value) for value in (0, 3, 1)]
        builder.call(call, [builder.bitcast(builder.gep(data, [args[1]]), byte), *hints])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@_intrinsic
def _fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in fp32, rounded once, as the torch path and the kernels have it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@compiled()
def _prefetch_row(array: Any, at: int, dim: int) -> None:
    for d in range(0, dim, _LINE):
        _prefetch(array, at + d)


# numba compiles what an assignment of slices says of unequal shapes for seconds: rows are copied by loops
@compiled()
def _begin(total: Any, row: Any) -> None:
    for d in range(total.shape[0]):
        total[d] = float32(0) + row[d]


@compiled()
def _add(total: Any, row: Any) -> None:
    for d in range(total.shape[0]):
        total[d] += row[d]


@compiled()
def _begin_scaled(total: Any, row: Any, scale: float) -> None:
    for d in range(total.shape[0]):
        total[d] = _fma(scale, row[d], float32(0))


@compiled()
def _add_scaled(total: Any, row: Any, scale: float) -> None:
    for d in range(total.shape[0]):
        total[d] = _fma(scale, row[d], total[d])


@compiled(types.void(I1, I1, I2, int64, int64, int64, int64, I1))
def count(I: Any, O: Any, FT: Any, B: int, first: int, last: int, shift: int, counts: Any) -> None:
    """Add to `counts` how many ids of bags first ... last - 1 fall into each bucket of 2 ** shift rows."""
    N = I.shape[0]
    for bag in range(first, last):
        f = bag // B
        rows, first_row = uint64(FT[f, ROWS]), FT[f, FIRST_ROW]
        for i in range(max(O[bag], 0), min(O[bag + 1], N)):
            if uint64(I[i]) < rows:
                counts[(first_row + I[i]) >> shift] += 1


@compiled(types.Tuple((I1, U1))(I2))
def place(counts: Any) -> Any:
    """Counts [slice, bucket] become the first entry of each slice in its bucket; where buckets begin, room for all."""
    slices, buckets = counts.shape
    starts = np.empty(buckets + 1, np.int64)
    total = 0
    for bucket in range(buckets):
        starts[bucket] = total
        for part in range(slices):
            here = counts[part, bucket]
            counts[part, bucket] = total
            total += here
    starts[buckets] = total
    return starts, np.empty(total, np.uint64)


@compiled(types.void(I1, I1, F1, I2, int64, int64, int64, int64, int64, int64, I1, U1, I1, F1))
def scatter(
    I: Any, O: Any, P: Any, FT: Any, B: int, C: int, D: int, first: int, last: int, shift: int,
    places: Any, entries: Any, source: Any, scale: Any,
) -> None:  # fmt: skip
    """Write the entries of bags first ... last - 1 to their buckets; D > 0: G is [N, D], one row an id.

    With a `scale` [N] entries hold positions, and `source` and `scale` what belongs to each.
    """
    N, scaled = I.shape[0], scale.shape[0] > 0
    for bag in range(first, last):
        f = bag // B
        rows, first_row = uint64(FT[f, ROWS]), FT[f, FIRST_ROW]
        begin, end = max(O[bag], 0), min(O[bag + 1], N)
        at = (bag - f * B) * C + FT[f, COLUMN]
        length = float32(end - begin) if FT[f, MEAN] != 0 and D == 0 else float32(1)
        for i in range(begin, end):
            if D > 0:
                at = i * D
            if scaled:
                source[i] = at
                scale[i] = (P[i] if P.shape[0] > 0 else float32(1)) / length
            if uint64(I[i]) < rows:
                row = first_row + I[i]
                entries[places[row >> shift]] = (uint64(row) << uint64(32)) | uint64(i if scaled else at)
                places[row >> shift] += 1


@compiled()
def _row(entry: Any) -> Any:
    return int64(entry >> uint64(32))


@compiled(types.void(U1, U1, int64))
def _sort(entries: Any, other: Any, bits: int) -> None:
    """Sort entries by their lowest `bits` bits of row, equal rows in the order in which they come."""
    n = entries.shape[0]
    if n <= _SMALL:
        for i in range(1, n):
            entry, j = entries[i], i
            while j > 0 and _row(entries[j - 1]) > _row(entry):
                entries[j] = entries[j - 1]
                j -= 1
            entries[j] = entry
        return
    passes = -(-bits // _DIGIT)
    width = -(-bits // max(passes, 1))
    ends = np.empty(1 << width, np.int64)
    mask = uint64((1 << width) - 1)
    a, b = entries, other
    for k in range(passes):
        shift = uint64(32 + k * width)
        ends[:] = 0
        for i in range(n):
            ends[int64((a[i] >> shift) & mask)] += 1
        total = 0
        for digit in range(ends.shape[0]):
            here = ends[digit]
            ends[digit] = total
            total += here
        for i in range(n):
            digit = int64((a[i] >> shift) & mask)
            b[ends[digit]] = a[i]
            ends[digit] += 1
        a, b = b, a
    if passes % 2:
        for i in range(n):
            entries[i] = a[i]


@compiled()
def _sum_chunk(entries: Any, first: int, last: int, G: Any, source: Any, scale: Any, total: Any) -> None:
    dim, scaled = total.shape[0], scale.shape[0] > 0
    n = entries.shape[0]
    for i in range(first, last):
        if i + _AHEAD < n:
            ahead = int64(entries[i + _AHEAD] & _LOW)
            _prefetch_row(G, source[ahead] if scaled else ahead, dim)
        at = int64(entries[i] & _LOW)
        if scaled:
            factor, at = scale[at], source[at]
            if i == first:
                _begin_scaled(total, G[at : at + dim], factor)
            else:
                _add_scaled(total, G[at : at + dim], factor)
        elif i == first:
            _begin(total, G[at : at + dim])
        else:
            _add(total, G[at : at + dim])


@compiled(types.void(F2, I1, int64, int64))
def _carry(sums: Any, used: Any, level: int, dim: int) -> None:
    """The sum at level - 1 is complete: add it at `level`, and what becomes complete there further up."""
    while True:
        if used[level] == 0:
            _begin(sums[level, :dim], sums[level - 1, :dim])
        else:
            _add(sums[level, :dim], sums[level - 1, :dim])
        used[level] += 1
        if used[level] < CHUNK:
            return
        used[level] = 0
        level += 1


@compiled(types.void(F2, I1, int64))
def _finish(sums: Any, used: Any, dim: int) -> None:
    """Add up what is left at the levels above 0; the sum of everything comes to lie at level 0."""
    for level in range(1, LEVELS):
        if used[level] > 0:
            higher = False
            for upper in range(level + 1, LEVELS):
                higher |= used[upper] > 0
            if higher:
                used[level] = 0
                _carry(sums, used, level + 1, dim)
            else:
                _begin(sums[0, :dim], sums[level, :dim])
                return


@compiled(types.void(U1, int64, int64, F1, I1, F1, F2, I1, int64))
def _sum_run(
    entries: Any, first: int, last: int, G: Any, source: Any, scale: Any, sums: Any, used: Any, dim: int
) -> None:
    """Gradients of entries first ... last - 1, all of one row, come to lie in sums[0], added as transpose.py says."""
    used[:] = 0
    for begin in range(first, last, CHUNK):
        _sum_chunk(entries, begin, min(begin + CHUNK, last), G, source, scale, sums[0, :dim])
        _carry(sums, used, 1, dim)
    _finish(sums, used, dim)


@compiled(types.void(U1, F1, I1, F1, F2, int64, int64, F2, I1))
def sum_blocks(
    entries: Any, G: Any, source: Any, scale: Any, blocks: Any, first: int, last: int, sums: Any, used: Any
) -> None:
    """Sums of blocks first ... last - 1, of CHUNK ** 2 entries each, of one long run: [blocks, D]."""
    dim, step = blocks.shape[1], CHUNK * CHUNK
    entries, G, source, scale = _lent(entries), _lent(G), _lent(source), _lent(scale)
    sums, used = _lent(sums), _lent(used)
    for block in range(first, last):
        end = min((block + 1) * step, entries.shape[0])
        _sum_run(entries, block * step, end, G, source, scale, sums, used, dim)
        _begin(blocks[block], sums[0, :dim])


@compiled(types.void(F2, F1, F2, I1))
def join_blocks(blocks: Any, total: Any, sums: Any, used: Any) -> None:
    """The sum of a long run from those of its blocks."""
    dim = blocks.shape[1]
    used[:] = 0
    for block in range(blocks.shape[0]):
        _begin(sums[1, :dim], blocks[block])
        _carry(sums, used, 2, dim)
    _finish(sums, used, dim)
    _begin(total, sums[0, :dim])


def _apply(w: Any, g: Any, states: Any, at: int, row: int, numbers: Any) -> None:
    """Stands for a rule on one row: each has an `update_buckets` of its own (cpu_rule.py)."""


def _prefetch_states(states: Any, at: int, row: int, dim: int) -> None:
    """Stands for the same of the rule's states."""


def update_buckets(
    W: Any, states: Any, numbers: Any, decay: int, G: Any, source: Any, scale: Any, segments: Any, entries: Any,
    starts: Any, first: int, last: int, bits: int, long: int, found: Any, other: Any, sums: Any, used: Any,
) -> int:  # fmt: skip
    """Sort buckets first ... last - 1, add up the gradients of each row and apply the rule.

    Runs of more than `long` entries are left out; where they begin and end comes to stand in `found` [n, 2], and n is
    returned. Memory to work in: `other` [entries of the largest bucket], `sums` [LEVELS, widest row], `used`.
    """
    part = runs = 0
    other, sums, used = _lent(other), _lent(sums), _lent(used)
    factor = numbers[numbers.shape[0] - 1]
    scaled = scale.shape[0] > 0
    W, G, source, scale, entries = _lent(W), _lent(G), _lent(source), _lent(scale), _lent(entries)
    for bucket in range(first, last):
        mine = entries[starts[bucket] : starts[bucket + 1]]
        _sort(mine, other, bits)
        i, n, soon = 0, mine.shape[0], 0
        while i < n:
            row, end = _row(mine[i]), i + 1
            while row >= segments[part, 2]:
                part += 1
            dim, low, base = segments[part, 0], segments[part, 1], segments[part, 3]
            # every row once: runs of equal entries make i jump
            while soon < min(i + _AHEAD + 1, n):
                ahead = _row(mine[soon])
                if soon == 0 or ahead != _row(mine[soon - 1]):
                    there = base + (ahead - low) * dim
                    _prefetch_row(W, there, dim)
                    _prefetch_states(states, there, ahead, dim)
                soon += 1
            while end < n and _row(mine[end]) == row:
                end += 1
            at = base + (row - low) * dim
            w = W[at : at + dim]
            if end - i > long:
                found[runs, 0], found[runs, 1] = starts[bucket] + i, starts[bucket] + end
                runs += 1
            elif end - i == 1 and not scaled and decay == 0:
                # most rows of most batches: their gradient is read where it is
                if i + _AHEAD < n:
                    _prefetch_row(G, int64(mine[i + _AHEAD] & _LOW), dim)
                g = int64(mine[i] & _LOW)
                _apply(w, G[g : g + dim], states, at, row, numbers)
            else:
                if end - i <= CHUNK:
                    _sum_chunk(mine, i, end, G, source, scale, sums[0, :dim])
                else:
                    _sum_run(mine, i, end, G, source, scale, sums, used, dim)
                if decay == 1:
                    for d in range(dim):
                        sums[0, d] += factor * w[d]
                if decay == 2:
                    for d in range(dim):
                        w[d] -= factor * w[d]
                _apply(w, sums[0, :dim], states, at, row, numbers)
            i = end
    return runs
