"""Loops over slots and records, compiled by numba when this file is imported; called from ../rows/.

Tensors come as addresses of contiguous memory. Loops release the GIL and never raise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float64, int64
from numba.core import types as numba_types

from .njit import bits_of, compiled, f4, i4, i8, memcpy, prefetch

types: Any = numba_types

# moves whose memory is asked for before they are made, and bytes of a line of it
_AHEAD, _LINE = 8, 64
# bits of a digit of a key of 31: for many slots, and for so few that bins would cost more than another look at them
_WIDE, _NARROW, _FEW = 16, 8, 1 << 14
_KEY_BITS = 31


@compiled(inline=True)
def _ask(address: int, nbytes: int) -> None:
    for at in range(0, nbytes, _LINE):
        prefetch(address + at)


@compiled(inline=True)
def _copy(to: int, source: int, nbytes: int) -> None:
    if nbytes == 4:
        i4(to, 1)[0] = i4(source, 1)[0]
    else:
        memcpy(to, source, nbytes)


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
                _ask(records + save[ahead] * record, record)
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
                _copy(records + save[m] * record + offset, row, nbytes)
            if load[m] >= 0:
                _copy(row, records + load[m] * record + offset, nbytes)


@compiled(types.void(*[int64] * 8))
def lowest(keys: int, held: int, borders: int, counts: int, tables: int, bins: int, out: int, capacity: int) -> None:
    """Radix selection, a digit of the keys at a time from the highest, then the slots of picked keys in order."""
    border, wanted, picked = i8(borders, tables + 1), i8(counts, tables), i8(out, capacity)
    key, holders = i4(keys, border[tables]), i4(held, border[tables])
    at = 0
    for t in range(tables):
        end = at + wanted[t]
        if at == end:
            continue
        low, high = border[t], border[t + 1]
        digit = _WIDE if high - low > _FEW else _NARROW
        bin = i8(bins, 1 << digit)
        # keys whose highest bits, all but `shift` of them, are less than `prefix` are picked, and `rest` that equal it
        prefix, rest, shift = np.int64(0), wanted[t], np.int64(_KEY_BITS)
        while shift > 0:
            above = shift
            shift = max(np.int64(0), above - digit)
            bin[:] = 0
            mask = (1 << (above - shift)) - 1
            if above == _KEY_BITS:
                for s in range(low, high):
                    bin[key[s] >> shift] += holders[s] <= 0
            else:
                for s in range(low, high):
                    if key[s] >> above == prefix and holders[s] <= 0:
                        bin[(key[s] >> shift) & mask] += 1
            here = 0
            while here < mask and bin[here] < rest:
                rest -= bin[here]
                here += 1
            prefix = (prefix << (above - shift)) | here
            # all of the bin are picked: no lower digit decides
            if bin[here] <= rest:
                break
        for s in range(low, high):
            part = key[s] >> shift
            if part <= prefix and holders[s] <= 0:
                if part == prefix:
                    if rest == 0:
                        continue
                    rest -= 1
                picked[at] = s
                at += 1
                if at == end:
                    break
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
    """31 random bits as a tail of the normal distribution, looked up between two places of a table [2049]; scaled."""
    row, value, places = i8(rows, n), f4(out, n * columns), i4(table, 2049)
    base = _mix64(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15))
    offset, factor = np.float32(origin), np.float32(step)
    for i in range(n):
        state = _mix64(np.uint64(row[i]) + base)
        for d in range(columns):
            random = _random(state, first + d)
            bits = np.int64(bits_of(np.float32(np.uint32(random * np.uint32(2) + np.uint32(1))))) - (127 << 23)
            place = bits >> 17
            here, following = np.int64(places[place]), np.int64(places[min(place + 1, 2048)])
            x = here + ((following - here) * (bits & 0x1FFFF) >> 17)
            x = -x if random >> np.uint32(31) else x
            value[i * columns + d] = np.float32(x) * np.float32(2.0**-28) * factor + offset
