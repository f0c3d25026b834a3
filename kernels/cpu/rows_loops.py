"""Loops over slots and records, compiled by numba when this file is imported; called from ../rows/.

Tensors come as addresses of contiguous memory. Loops release the GIL and never raise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float64, int64
from numba.core import cgutils, types as numba_types
from numba.extending import intrinsic

from .njit import bits_of, compiled, f4, i4, i8, memcpy

types: Any = numba_types
_intrinsic: Any = intrinsic

# moves whose memory is asked for before they are made, and bytes of a line of it
_AHEAD, _LINE = 12, 64
# values of a digit, and the largest key
_BINS, _MOST = 1 << 11, (1 << 31) - 1
# keys that are sampled of a table, of many slots and of few
_SAMPLES, _FEW_SAMPLES, _MANY_SLOTS = 1024, 256, 1 << 20


@_intrinsic
def _store_line(typing: Any, to: Any, source: Any) -> Any:
    """A line of memory copied past the caches to an address that is a multiple of 64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir = cgutils.ir
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        value = builder.load(builder.inttoptr(args[1], line), align=1)
        store = builder.store(value, builder.inttoptr(args[0], line), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    """Ask for a line to the second level: fewer than a row has can be under way to the first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir = cgutils.ir
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        read, second, data = (ir.Constant(number, n) for n in (0, 2, 1))
        builder.call(function, [builder.inttoptr(args[0], byte), read, second, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled(inline=True)
def _ask(address: int, nbytes: int) -> None:
    for at in range(0, nbytes, _LINE):
        _prefetch(address + at)


@compiled(inline=True)
def _copy(to: int, source: int, nbytes: int) -> None:
    if nbytes == 4:
        i4(to, 1)[0] = i4(source, 1)[0]
    else:
        memcpy(to, source, nbytes)


@_intrinsic
def _after_stores(typing: Any) -> Any:
    """Nothing that follows comes before what was stored past the caches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@compiled(inline=True)
def _store(to: int, source: int, nbytes: int) -> None:
    """Copy to a record, which nobody reads soon: whole lines are not read into a cache before they are written."""
    if to & 63 == 0:
        for _ in range(nbytes // 64):
            _store_line(to, source)
            to += 64
            source += 64
        nbytes &= 63
    if nbytes:
        _copy(to, source, nbytes)


@compiled(types.void(*[int64] * 8))
def move(parts: int, count: int, records: int, record: int, slots: int, saves: int, loads: int, moves: int) -> None:
    """Moves one after another: a slot's row goes out, and the next one comes in while its lines are in the cache.

    parts [count, 3]: address, bytes of a row, where it begins in a record of `record` bytes.
    """
    part = i8(parts, 3 * count)
    slot, save, load = i8(slots, moves), i8(saves, moves), i8(loads, moves)
    for m in range(moves):
        ahead = m + _AHEAD
        if ahead < moves and slot[ahead] >= 0:
            if save[ahead] >= 0:
                # the others are written whole
                _prefetch(records + (save[ahead] + 1) * record - _LINE)
            if load[ahead] >= 0:
                _ask(records + load[ahead] * record, record)
            for p in range(count):
                _ask(part[3 * p] + slot[ahead] * part[3 * p + 1], part[3 * p + 1])
        if slot[m] < 0:
            continue
        for p in range(count):
            nbytes = part[3 * p + 1]
            row, offset = part[3 * p] + slot[m] * nbytes, part[3 * p + 2]
            if save[m] >= 0:
                _store(records + save[m] * record + offset, row, nbytes)
            if load[m] >= 0:
                _copy(row, records + load[m] * record + offset, nbytes)
    _after_stores()


@compiled(inline=True)
def _bracket(key: Any, holders: Any, n: int, wanted: int, sample: Any) -> Any:
    """Keys between which the last wanted one probably is, by some keys of slots that nobody holds."""
    step = max(1, n // (_SAMPLES if n > _MANY_SLOTS else _FEW_SAMPLES))
    taken = 0
    for s in range(0, n, step):
        if holders[s] <= 0 and taken < _SAMPLES:
            at = taken
            while at > 0 and sample[at - 1] > key[s]:
                sample[at] = sample[at - 1]
                at -= 1
            sample[at] = key[s]
            taken += 1
    # three deviations of the number of sampled keys below it, and some
    expected = wanted // step
    spread = 4 + int(3 * np.sqrt(expected))
    low, high = np.int32(0), np.int32(_MOST)
    if expected - spread >= 0 and expected - spread < taken:
        low = sample[expected - spread]
    if expected + spread < taken:
        high = sample[expected + spread]
    return low, high


@compiled(inline=True)
def _list_up_to(key: Any, holders: Any, n: int, high: int, near: Any, listed: Any) -> Any:
    """Keys of at most `high`, of slots that nobody holds, and the slots; how many."""
    m = 0
    for s in range(n):
        if key[s] <= high and holders[s] <= 0:
            near[m] = key[s]
            listed[m] = s
            m += 1
    return m


@compiled(inline=True)
def _last_key(near: Any, m: int, rest: int, high: int, bin: Any) -> Any:
    """The key of place `rest`, counted from 1, of m keys in order, and which one of those equal to it is at that place.

    A digit of 11 bits at a time, of keys that begin with all digits before; no key is more than `high`.
    """
    prefix = np.int64(0)
    for shift in (22, 11, 0):
        # all would be counted one after another at 0
        if high >> shift == 0 and shift > 0:
            continue
        bin[:] = 0
        for i in range(m):
            if near[i] >> (shift + 11) == prefix:
                bin[np.uint64((near[i] >> shift) & (_BINS - 1))] += 1
        here = 0
        while here < _BINS - 1 and bin[here] < rest:
            rest -= bin[here]
            here += 1
        prefix = (prefix << 11) | here
    return prefix, rest


@compiled(types.void(*[int64] * 9))
def lowest(
    keys: int, held: int, borders: int, counts: int, tables: int, room: int, slots: int, out: int, capacity: int
) -> None:
    """Keys of a table that are about as low as wanted are listed, and of these the last one that is picked found.

    room [2 * (slots + 4096)] int32.
    """
    border, wanted, picked = i8(borders, tables + 1), i8(counts, tables), i8(out, capacity)
    bin, sample = i4(room, _BINS), i4(room + 4 * _BINS, _SAMPLES)
    near, listed = i4(room + 4 * 2 * 4096, slots), i4(room + 4 * (2 * 4096 + slots), slots)
    at = 0
    for t in range(tables):
        end = at + wanted[t]
        first, n = border[t], border[t + 1] - border[t]
        if at == end or n == 0:
            picked[at:end] = -1
            at = end
            continue
        key, holders = i4(keys + 4 * first, n), i4(held + 4 * first, n)
        low, high = _bracket(key, holders, n, wanted[t], sample)
        if low == high:
            # many keys are alike: their number is enough, and takes a part of the time of a list
            below, upto = 0, 0
            for s in range(n):
                below += (key[s] < low) & (holders[s] <= 0)
                upto += (key[s] <= low) & (holders[s] <= 0)
            if below < wanted[t] and wanted[t] <= upto:
                rest = wanted[t] - below
                for s in range(n):
                    if key[s] <= low and holders[s] <= 0 and (key[s] < low or rest > 0):
                        rest -= key[s] == low
                        picked[at] = first + s
                        at += 1
                continue
        m = _list_up_to(key, holders, n, high, near, listed)
        if m < wanted[t] and high < _MOST:
            high = np.int32(_MOST)
            m = _list_up_to(key, holders, n, high, near, listed)
        last, rest = np.int64(_MOST), np.int64(m)
        if m > wanted[t]:
            last, rest = _last_key(near, m, wanted[t], high, bin)
        for i in range(m):
            if near[i] < last or (near[i] == last and rest > 0):
                rest -= near[i] == last
                picked[at] = first + listed[i]
                at += 1
        picked[at:end] = -1
        at = end
    picked[at:] = -1


@compiled(inline=True)
def _mix32(x: Any) -> Any:
    # numba's products of uint32 are uint64
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32((x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))


@compiled(inline=True)
def _mix64(h: Any) -> Any:
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    h = (h ^ (h >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return h ^ (h >> np.uint64(33))


@compiled(inline=True)
def _random(state: Any, column: int) -> Any:
    low, high = np.uint32(state), np.uint32(state >> np.uint64(32))
    return _mix32(_mix32(np.uint32(np.uint32(column) * np.uint32(0x85EBCA6B) + low)) ^ high)


@compiled(types.void(*[int64] * 5, *[float64] * 4, int64, int64))
def uniform(
    rows: int,
    n: int,
    seed: int,
    first: int,
    columns: int,
    origin: float,
    step: float,
    least: float,
    most: float,
    table: int,
    out: int,
) -> None:
    """24 random bits as a fraction, scaled."""
    row, value = i8(rows, n), f4(out, n * columns)
    base = _mix64(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15))
    offset, factor = np.float32(origin), np.float32(step)
    low, high = np.float32(least), np.float32(most)
    for i in range(n):
        state = _mix64(np.uint64(row[i]) + base)
        for d in range(columns):
            number = np.float32(np.int32(_random(state, first + d) >> np.uint32(8))) * np.float32(2.0**-24)
            value[i * columns + d] = min(max(number * factor + offset, low), high)


@compiled(types.void(*[int64] * 5, *[float64] * 4, int64, int64))
def normal(
    rows: int,
    n: int,
    seed: int,
    first: int,
    columns: int,
    origin: float,
    step: float,
    least: float,
    most: float,
    table: int,
    out: int,
) -> None:
    """31 random bits as a tail of the normal distribution, looked up between two places of a table [2050]; scaled."""
    row, value, places = i8(rows, n), f4(out, n * columns), i4(table, 2050)
    base = _mix64(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15))
    offset, factor = np.float32(origin), np.float32(step)
    for i in range(n):
        state = _mix64(np.uint64(row[i]) + base)
        for d in range(columns):
            random = _random(state, first + d)
            bits = np.int64(bits_of(np.float32(np.uint32(random * np.uint32(2) + np.uint32(1))))) - (127 << 23)
            place = np.uint64(bits >> 17)
            here, following = np.int64(places[place]), np.int64(places[place + np.uint64(1)])
            x = here + ((following - here) * (bits & 0x1FFFF) >> 17)
            x = -x if random >> np.uint32(31) else x
            value[i * columns + d] = np.float32(x) * np.float32(2.0**-28) * factor + offset
