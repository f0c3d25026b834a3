"""The loops of the CPU's update, compiled by numba when this file is imported (update.py, at the first update).

Letters as in update/update.py: W, I [N] int64, O [F*B + 1] int64, P [N] per-id weights, FT [F, 8], G the gradient; N,
B, F, D, C = columns of a pooled G. What a loop works on it reads from its job, some int64 whose places are named below:
numbers, and addresses of flat arrays. All threads call a loop with the same job and take tasks from it until none is
left.

An update sorts entries, one for each id: the row's number in its table in the upper half of 64 bits; in the lower half
the element of G where the id's gradient row begins, or, where rows are scaled, the id's position. A bucket holds the
entries of 2 ** shift neighbouring rows of a table. Loops never raise. Sums are added in the order that is written here:
nothing may reassociate them.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import float32, uint64
from numba.core import types as numba_types

from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    FIRST_ROW,
    MEAN,
    ORDER,
    ROWS,
)
from ..transpose import CHUNK
from .njit import _FORM as PARTS_FORM, c_function, f4, i8, pointer
from .vectors import (
    AHEAD,
    FORM,
    LANES,
    LINE,
    VECTORS,
    add_narrow,
    add_row,
    add_wide,
    begin_row,
    called,
    compiled,
    fma,
    prefetch_read,
    prefetch_row,
    taken,
)

# what a job holds: the batch,
IDS, OFFSETS, PER_ID, FEATURES, GRADIENT, NUMBERS = range(6)
N_IDS, N_BAGS, N_FEATURES, N_NUMBERS, COLUMNS, WIDTH, DECAY = range(6, 13)
# the sort,
PLAN, BORDERS, OWNERS, COUNTS, STARTS, ENTRIES, SOURCE, SCALE = range(13, 21)
SLICES, BUCKETS, TOTAL, LARGEST = range(21, 25)
# the update,
TASKS, LONG, LONG_RUNS, BLOCKS, SCRATCH, SCRATCH_WORDS, WIDEST = range(25, 32)
# what was taken and done so far, and from here on addresses and elements of W and of the states
COUNTING, COUNTED, SCATTERING, UPDATING, WORKERS, RUNS, TABLES = range(32, 39)

LEVELS = 8  # of chunks of chunks: 32 ** 7 ids of one row
BUCKET = 512  # ids of a bucket, about
_BUCKET_BITS = 11  # buckets of a table, at most
DENSE = 16  # ids a row from which a row has a bucket of its own
_SMALL = 24  # entries up to which insertion sort is the faster
DIGITS = 1 << 9  # values of the digits that the radix sort sorts by

# to type checkers these are functions of fewer arguments, and types without Tuple
_types: Any = numba_types
_carray: Any = numba.carray

# numba keeps code under the name of its function and sees changes of this file only, not of where these come from
_MARK = "-".join(map(str, (BASE, COLUMN, DIM, FIELDS, FIRST_ROW, MEAN, ORDER, ROWS, CHUNK, FORM, PARTS_FORM)))


def work(function: Any) -> int:
    """The address of a C function of a job's address, compiled at once and kept on disk."""
    function.__qualname__ += f"_{_MARK}"
    return c_function(function)


@work
def plan(address: int) -> None:
    """Say of each feature which bucket its table's first is and how many rows a bucket has, of each bucket one feature;
    and cut the bags into slices of about as many ids."""
    job = i8(address, TABLES)
    N, bags, F = job[N_IDS], job[N_BAGS], job[N_FEATURES]
    B = bags // F
    FT, O, places = i8(job[FEATURES], F * FIELDS), i8(job[OFFSETS], bags + 1), i8(job[PLAN], 3 * F)
    owners = i8(job[OWNERS], N // DENSE + F)
    # features that share a table are neighbours in the order of first rows, which is nearly that of launches
    order = places[2 * F :]
    for j in range(F):
        f, k = FT[j * FIELDS + ORDER], j
        while k > 0 and FT[order[k - 1] * FIELDS + FIRST_ROW] > FT[f * FIELDS + FIRST_ROW]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = f
    left, buckets, j = N, 0, 0
    while j < F:
        owner, ids, end = order[j], 0, j
        while end < F and FT[order[end] * FIELDS + FIRST_ROW] == FT[owner * FIELDS + FIRST_ROW]:
            f = order[end]
            ids += max(0, O[(f + 1) * B] - O[f * B])
            # tables without rows begin where the next one does
            if FT[f * FIELDS + ROWS] > FT[owner * FIELDS + ROWS]:
                owner = f
            end += 1
        rows, ids = FT[owner * FIELDS + ROWS], min(ids, left)
        left -= ids
        shift = 0
        if rows * DENSE > ids or rows > (1 << _BUCKET_BITS):
            most = 1
            while most * BUCKET <= ids and most < (1 << _BUCKET_BITS):
                most *= 2
            while ((rows - 1) >> shift) >= most:
                shift += 1
        for k in range(j, end):
            places[2 * order[k]], places[2 * order[k] + 1] = buckets, shift
        if rows > 0:
            for k in range(buckets, buckets + ((rows - 1) >> shift) + 1):
                owners[k] = owner
            buckets += ((rows - 1) >> shift) + 1
        j = end
    job[BUCKETS] = buckets
    borders, slices = i8(job[BORDERS], job[SLICES] + 1), job[SLICES]
    borders[0], borders[slices] = 0, bags
    for part in range(1, slices):
        low, high = borders[part - 1], bags
        while low < high:
            middle = (low + high) // 2
            if O[middle] * slices < N * part:
                low = middle + 1
            else:
                high = middle
        borders[part] = low


@compiled()
def _place(address: int) -> None:
    """Counts [slice, bucket] become the first entry of each slice in its bucket; where buckets begin, room for all."""
    job = i8(address, TABLES)
    slices, buckets = job[SLICES], job[BUCKETS]
    starts, counts = i8(job[STARTS], buckets + 1), i8(job[COUNTS], slices * buckets)
    total = largest = 0
    for bucket in range(buckets):
        starts[bucket] = total
        for part in range(slices):
            here = counts[part * buckets + bucket]
            counts[part * buckets + bucket] = total
            total += here
        largest = max(largest, total - starts[bucket])
    starts[buckets] = total
    job[TOTAL], job[LARGEST] = total, largest


@work
def count(address: int) -> None:
    """How many ids of each slice fall into each bucket; who is last turns that into where each slice writes."""
    job = i8(address, TABLES)
    N, bags, F, buckets, slices = job[N_IDS], job[N_BAGS], job[N_FEATURES], job[BUCKETS], job[SLICES]
    B = bags // F
    I, O = i8(job[IDS], N), i8(job[OFFSETS], bags + 1)
    FT, places, borders = i8(job[FEATURES], F * FIELDS), i8(job[PLAN], 2 * F), i8(job[BORDERS], slices + 1)
    while True:
        part = taken(address, COUNTING)
        if part >= slices:
            return
        counts = i8(job[COUNTS] + 8 * part * buckets, buckets)
        for bucket in range(buckets):
            counts[bucket] = 0
        for bag in range(borders[part], borders[part + 1]):
            f = bag // B
            rows, first, shift = uint64(FT[f * FIELDS + ROWS]), places[2 * f], places[2 * f + 1]
            for i in range(max(O[bag], 0), min(O[bag + 1], N)):
                if uint64(I[i]) < rows:
                    counts[first + (I[i] >> shift)] += 1
        if taken(address, COUNTED) == slices - 1:
            _place(address)


@work
def scatter(address: int) -> None:
    """Write the entries of each slice to their buckets; WIDTH > 0: G is [N, WIDTH], one row an id.

    With a scale [N] entries hold positions, and source and scale what belongs to each.
    """
    job = i8(address, TABLES)
    N, bags, F, buckets, slices = job[N_IDS], job[N_BAGS], job[N_FEATURES], job[BUCKETS], job[SLICES]
    B, C, D, scaled = bags // F, job[COLUMNS], job[WIDTH], job[SCALE] != 0
    I, O, P = i8(job[IDS], N), i8(job[OFFSETS], bags + 1), f4(job[PER_ID], N)
    FT, plans, borders = i8(job[FEATURES], F * FIELDS), i8(job[PLAN], 2 * F), i8(job[BORDERS], slices + 1)
    entries, source, scale = i8(job[ENTRIES], job[TOTAL]), i8(job[SOURCE], N), f4(job[SCALE], N)
    while True:
        part = taken(address, SCATTERING)
        if part >= slices:
            return
        places = i8(job[COUNTS] + 8 * part * buckets, buckets)
        for bag in range(borders[part], borders[part + 1]):
            f = bag // B
            rows, first, shift = uint64(FT[f * FIELDS + ROWS]), plans[2 * f], plans[2 * f + 1]
            begin, end = max(O[bag], 0), min(O[bag + 1], N)
            at = (bag - f * B) * C + FT[f * FIELDS + COLUMN]
            length = float32(end - begin) if FT[f * FIELDS + MEAN] != 0 and D == 0 else float32(1)
            for i in range(begin, end):
                if D > 0:
                    at = i * D
                if scaled:
                    source[i] = at
                    scale[i] = (P[i] if job[PER_ID] != 0 else float32(1)) / length
                if uint64(I[i]) < rows:
                    bucket = first + (I[i] >> shift)
                    entries[places[bucket]] = (I[i] << 32) | (i if scaled else at)
                    places[bucket] += 1


@compiled()
def _row(entry: int) -> int:
    return entry >> 32


@compiled()
def _at(entry: int) -> int:
    return entry & 0xFFFFFFFF


@called
def _sort(entries: Any, other: Any, ends: Any, bits: int) -> None:
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
    passes = 1
    while (1 << -(-bits // passes)) > DIGITS:
        passes += 1
    width = -(-bits // passes)
    mask = (1 << width) - 1
    a, b = entries, other
    for k in range(passes):
        shift = 32 + k * width
        for digit in range(1 << width):
            ends[digit] = 0
        for i in range(n):
            ends[(a[i] >> shift) & mask] += 1
        total = 0
        for digit in range(1 << width):
            here = ends[digit]
            ends[digit] = total
            total += here
        for i in range(n):
            digit = (a[i] >> shift) & mask
            b[ends[digit]] = a[i]
            ends[digit] += 1
        a, b = b, a
    if passes % 2:
        for i in range(n):
            entries[i] = a[i]


@called
def _sum_chunk(entries: Any, first: int, last: int, job: Any, total: Any, at: Any, factor: Any) -> None:
    """Gradients of entries first ... last - 1, CHUNK at most, come to lie in `total` [dim], added one after another."""
    n, dim, scaled = last - first, total.shape[0], job[SCALE] != 0
    source, scale = i8(job[SOURCE], job[N_IDS]), f4(job[SCALE], job[N_IDS])
    there = min(entries.shape[0] - first, n + AHEAD)
    for j in range(there):
        at[j] = _at(entries[first + j])
    if scaled:
        for j in range(n):
            factor[j] = scale[at[j]]
        for j in range(there):
            at[j] = source[at[j]]
    for j in range(there, n + AHEAD):
        at[j] = at[n - 1]
    d, where, factors = 0, at.ctypes.data, factor.ctypes.data if scaled else 0
    while d + VECTORS * LANES <= dim:
        add_wide(where, n, job[GRADIENT] + 4 * d, factors, total.ctypes.data + 4 * d)
        d += VECTORS * LANES
    while d + LANES <= dim:
        add_narrow(where, n, job[GRADIENT] + 4 * d, factors, total.ctypes.data + 4 * d)
        d += LANES
    for k in range(d, dim):
        total[k] = float32(0)
    if d < dim:
        for j in range(n):
            row = f4(job[GRADIENT] + 4 * at[j], dim)
            for k in range(d, dim):
                total[k] = fma(factor[j], row[k], total[k]) if scaled else total[k] + row[k]


@called
def _carry(sums: Any, used: Any, level: int, dim: int) -> None:
    """The sum at level - 1 is complete: add it at `level`, and what becomes complete there further up."""
    while True:
        if used[level] == 0:
            begin_row(sums[level, :dim], sums[level - 1, :dim])
        else:
            add_row(sums[level, :dim], sums[level - 1, :dim])
        used[level] += 1
        if used[level] < CHUNK:
            return
        used[level] = 0
        level += 1


@called
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
                begin_row(sums[0, :dim], sums[level, :dim])
                return


@called
def _sum_run(
    entries: Any, first: int, last: int, job: Any, dim: int, sums: Any, used: Any, at: Any, factor: Any
) -> None:
    """Gradients of entries first ... last - 1, all of one row, come to lie in sums[0], added as transpose.py says."""
    for level in range(LEVELS):
        used[level] = 0
    for begin in range(first, last, CHUNK):
        _sum_chunk(entries, begin, min(begin + CHUNK, last), job, sums[0, :dim], at, factor)
        _carry(sums, used, 1, dim)
    _finish(sums, used, dim)


@compiled()
def _memory(job: Any, worker: int) -> Any:
    """One thread's scratch: sums [LEVELS, WIDEST], used [LEVELS], at, factor, digits and the largest bucket."""
    dim = job[WIDEST]
    used = job[SCRATCH] + 8 * worker * job[SCRATCH_WORDS]
    at, factor, digits = (
        used + 8 * LEVELS,
        used + 8 * (LEVELS + CHUNK + AHEAD),
        used + 8 * (LEVELS + 2 * CHUNK + AHEAD),
    )
    other = digits + 8 * DIGITS
    sums = other + 8 * job[LARGEST]
    return (
        _carray(pointer(sums), (LEVELS, dim), np.float32), i8(used, LEVELS), i8(at, CHUNK + AHEAD), f4(factor, CHUNK),
        i8(digits, DIGITS), i8(other, job[LARGEST]),
    )  # fmt: skip


def scratch_words(largest: int, widest: int) -> int:
    """Words of 8 bytes that one thread works in."""
    return LEVELS + 2 * CHUNK + AHEAD + DIGITS + largest + LEVELS * widest // 2 + 8


@work
def sum_blocks(address: int) -> None:
    """Sums of blocks, of CHUNK ** 2 entries each, of one long run: entries LONG_RUNS[0] ... LONG_RUNS[1] - 1."""
    job = i8(address, TABLES)
    sums, used, at, factor, _, _ = _memory(job, taken(address, WORKERS))
    begin, end, dim, step = i8(job[LONG_RUNS], 2)[0], i8(job[LONG_RUNS], 2)[1], job[WIDEST], CHUNK * CHUNK
    entries = i8(job[ENTRIES] + 8 * begin, end - begin)
    while True:
        block = taken(address, UPDATING)
        if block >= job[TASKS]:
            return
        _sum_run(entries, block * step, min((block + 1) * step, end - begin), job, dim, sums, used, at, factor)
        begin_row(f4(job[BLOCKS] + 4 * block * dim, dim), sums[0])


@work
def join_blocks(address: int) -> None:
    """The sum of a long run from those of its blocks, where the first of these was."""
    job = i8(address, TABLES)
    sums, used, _, _, _, _ = _memory(job, 0)
    dim = job[WIDEST]
    for level in range(LEVELS):
        used[level] = 0
    for block in range(job[TASKS]):
        begin_row(sums[1], f4(job[BLOCKS] + 4 * block * dim, dim))
        _carry(sums, used, 2, dim)
    _finish(sums, used, dim)
    begin_row(f4(job[BLOCKS], dim), sums[0])


def _apply(w: Any, g: Any, states: Any, at: int, row: int, numbers: Any) -> None:
    """Stands for a rule on one row: each has an `update_buckets` of its own (rule.py)."""


def _prefetch_states(states: Any, at: int, row: int, dim: int) -> None:
    """Stands for the same of the rule's states."""


def _states(tables: Any) -> Any:
    """Stands for the states, of which a job holds addresses and elements."""


_STATES = 0  # stands for how many there are


@compiled()
def _border(starts: Any, entry: int) -> int:
    """The first bucket that begins at `entry` or after it."""
    low, high = 0, starts.shape[0] - 1
    while low < high:
        middle = (low + high) // 2
        if starts[middle] < entry:
            low = middle + 1
        else:
            high = middle
    return low


def update_buckets(address: int) -> None:
    """Sort buckets, add up the gradients of each row and apply the rule.

    Runs of more than LONG entries are left out; where they begin and end, and the feature, comes to stand in LONG_RUNS
    [RUNS, 3].
    """
    job, tables = i8(address, TABLES), i8(address + 8 * TABLES, 2 + 2 * _STATES)
    sums, used, positions, factor, digits, other = _memory(job, taken(address, WORKERS))
    numbers, decay, scaled, long = f4(job[NUMBERS], job[N_NUMBERS]), job[DECAY], job[SCALE] != 0, job[LONG]
    FT, places = i8(job[FEATURES], job[N_FEATURES] * FIELDS), i8(job[PLAN], 2 * job[N_FEATURES])
    owners = i8(job[OWNERS], job[BUCKETS])
    starts, W, states = i8(job[STARTS], job[BUCKETS] + 1), f4(tables[0], tables[1]), _states(tables)
    factor_of_decay = numbers[numbers.shape[0] - 1]
    tasks, total = job[TASKS], job[TOTAL]
    while True:
        task = taken(address, UPDATING)
        if task >= tasks:
            return
        # buckets that begin among this task's entries
        bucket = _border(starts, total * task // tasks)
        last = _border(starts, total * (task + 1) // tasks)
        while bucket < last:
            f = owners[bucket]
            dim, first_row = FT[f * FIELDS + DIM], FT[f * FIELDS + FIRST_ROW]
            base = FT[f * FIELDS + BASE]
            begin = starts[bucket]
            entries = i8(job[ENTRIES] + 8 * begin, starts[bucket + 1] - begin)
            if places[2 * f + 1] > 0:
                _sort(entries, other, digits, places[2 * f + 1])
            i, n, soon = 0, entries.shape[0], 0
            while i < n:
                row, end = _row(entries[i]), i + 1
                # every row once: runs of equal entries make i jump
                while soon < min(i + AHEAD + 1, n):
                    ahead = _row(entries[soon])
                    if soon == 0 or ahead != _row(entries[soon - 1]):
                        there = base + ahead * dim
                        prefetch_row(W, there, dim)
                        _prefetch_states(states, there, first_row + ahead, dim)
                    soon += 1
                while end < n and _row(entries[end]) == row:
                    end += 1
                at = base + row * dim
                w = W[at : at + dim]
                if end - i > long:
                    long_run = i8(job[LONG_RUNS] + 24 * taken(address, RUNS), 3)
                    long_run[0], long_run[1], long_run[2] = begin + i, begin + end, f
                elif end - i == 1 and not scaled and decay == 0:
                    # most rows of most batches: their gradient is read where it is
                    if i + AHEAD < n:
                        soon_read = f4(job[GRADIENT] + 4 * _at(entries[i + AHEAD]), dim)
                        for d in range(0, dim, LINE):
                            prefetch_read(soon_read, d)
                    _apply(w, f4(job[GRADIENT] + 4 * _at(entries[i]), dim), states, at, first_row + row, numbers)
                else:
                    g = sums[0, :dim]
                    if end - i <= CHUNK:
                        _sum_chunk(entries, i, end, job, g, positions, factor)
                    else:
                        _sum_run(entries, i, end, job, dim, sums, used, positions, factor)
                    if decay == 1:
                        for d in range(dim):
                            g[d] += factor_of_decay * w[d]
                    if decay == 2:
                        for d in range(dim):
                            w[d] -= factor_of_decay * w[d]
                    _apply(w, g, states, at, first_row + row, numbers)
                i = end
            bucket += 1
