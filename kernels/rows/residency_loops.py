"""Loops over a batch's ids and over the slots of its rows, compiled by numba when this file is imported (residency.py).

Tensors come as addresses of contiguous memory. Loops release the GIL and never raise. Letters as in residency.py; a
row that was found missing is marked in `slot_of`, a slot that was found in `held`, so that each is found once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64
from numba.core import types as numba_types

from ..cpu.njit import compiled, i4, i8, prefetch, u1
from ..features import FIELDS, FIRST_ROW, ROWS
from .residency_numbers import BELOW, EMPTY_KEYS, FRESH, LFU, LRU, MARK, MARKED, NEXT_USES, SCORES, UNIT

types: Any = numba_types

# ids and rows whose memory is asked for before it is read
_AHEAD = 24
# bits of a digit of the sort
_DIGIT = 11
_DIGITS = 1 << _DIGIT


@compiled(inline=True)
def _id(address: int, nbytes: int, at: int) -> int:
    return i8(address, at + 1)[at] if nbytes == 8 else np.int64(i4(address, at + 1)[at])


@compiled(int64(*[int64] * 17))
def find_ids(
    ids: int,
    id_bytes: int,
    n: int,
    offsets: int,
    offset_bytes: int,
    samples: int,
    features: int,
    f_count: int,
    first_slots: int,
    table_of: int,
    slot_of: int,
    held: int,
    out: int,
    hits: int,
    missing: int,
    rows_total: int,
    counts: int,
) -> int:
    """The slot of each id within its table, -2 - row of those that are missing, -1 of what lies in no table.

    Distinct slots that were found go to `hits`, distinct rows that were not to `missing`, both as they come. counts
    [T, 2] are hits and missing rows of each table. Gives the number of missing rows.
    """
    feature, first_slot, table = i8(features, f_count * FIELDS), i8(first_slots, f_count), i8(table_of, f_count)
    slot, holders, place = i4(slot_of, rows_total), i4(held, 1 << 62), i8(out, n)
    hit, absent, count = i8(hits, n), i8(missing, n), i8(counts, 1 << 62)
    hit_count, absent_count, begin = 0, 0, 0
    for f in range(f_count):
        rows, first = feature[f * FIELDS + ROWS], feature[f * FIELDS + FIRST_ROW]
        end = min(max(_id(offsets, offset_bytes, (f + 1) * samples), begin), n)
        hits_before, absent_before = hit_count, absent_count
        for i in range(begin, end):
            if i + _AHEAD < end:
                following = _id(ids, id_bytes, i + _AHEAD)
                if 0 <= following < rows:
                    prefetch(slot_of + 4 * (first + following))
            id = _id(ids, id_bytes, i)
            if id < 0 or id >= rows:
                place[i] = -1
                continue
            row = first + id
            s = slot[row]
            if s >= 0:
                place[i] = s - first_slot[f]
                if holders[s] < MARK:
                    holders[s] += MARK
                    hit[hit_count] = s
                    hit_count += 1
            else:
                place[i] = -2 - row
                if s >= FRESH:
                    slot[row] = s + MARKED
                    absent[absent_count] = row
                    absent_count += 1
        count[2 * table[f]] += hit_count - hits_before
        count[2 * table[f] + 1] += absent_count - absent_before
        begin = end
    for i in range(begin, n):
        place[i] = -1
    return absent_count


@compiled(int64(*[int64] * 9))
def find_rows(
    rows: int, n: int, borders: int, tables: int, slot_of: int, held: int, hits: int, missing: int, counts: int
) -> int:
    """As `find_ids`, of distinct rows [n] in ascending order; borders [T + 1] are those of rows."""
    row, border, count = i8(rows, n), i8(borders, tables + 1), i8(counts, 2 * tables)
    slot, holders = i4(slot_of, border[tables]), i4(held, 1 << 62)
    hit, absent = i8(hits, n), i8(missing, n)
    hit_count, absent_count, i = 0, 0, 0
    for t in range(tables):
        hits_before, absent_before = hit_count, absent_count
        while i < n and row[i] < border[t + 1]:
            if i + _AHEAD < n:
                prefetch(slot_of + 4 * row[i + _AHEAD])
            s = slot[row[i]]
            if s >= 0:
                holders[s] += MARK
                hit[hit_count] = s
                hit_count += 1
            else:
                slot[row[i]] = s + MARKED
                absent[absent_count] = row[i]
                absent_count += 1
            i += 1
        count[2 * t] = hit_count - hits_before
        count[2 * t + 1] = absent_count - absent_before
    return absent_count


@compiled(types.void(*[int64] * 6))
def forget(hits: int, hit_count: int, missing: int, missing_count: int, held: int, slot_of: int) -> None:
    """Take the marks of a batch back."""
    hit, absent, holders, slot = i8(hits, hit_count), i8(missing, missing_count), i4(held, 1 << 62), i4(slot_of, 1 << 62)
    for i in range(hit_count):
        holders[hit[i]] -= MARK
    for i in range(missing_count):
        slot[absent[i]] -= MARKED


@compiled(types.void(*[int64] * 6))
def sort_rows(rows: int, others: int, n: int, scratch: int, bins: int, rows_total: int) -> None:
    """Sort rows [n] below `rows_total` in place, `others` [n] with them (0: none); scratch [2 n] int64, bins [2048]."""
    source, target = rows, scratch
    other, other_target = others, scratch + 8 * n
    bin, shift = i8(bins, _DIGITS), 0
    while rows_total >> shift > 0:
        bin[:] = 0
        key, to = i8(source, n), i8(target, n)
        for i in range(n):
            bin[(key[i] >> shift) & (_DIGITS - 1)] += 1
        at = 0
        for b in range(_DIGITS):
            count = bin[b]
            bin[b] = at
            at += count
        if others:
            with_key, with_to = i8(other, n), i8(other_target, n)
            for i in range(n):
                b = (key[i] >> shift) & (_DIGITS - 1)
                to[bin[b]], with_to[bin[b]] = key[i], with_key[i]
                bin[b] += 1
        else:
            for i in range(n):
                b = (key[i] >> shift) & (_DIGITS - 1)
                to[bin[b]] = key[i]
                bin[b] += 1
        source, target = target, source
        other, other_target = other_target, other
        shift += _DIGIT
    if source != rows:
        i8(rows, n)[:] = i8(source, n)
        if others:
            i8(others, n)[:] = i8(other, n)


@compiled(types.void(*[int64] * 12))
def take(
    picked: int,
    missing: int,
    n: int,
    borders: int,
    tables: int,
    slot_of: int,
    row_of: int,
    dirty: int,
    stored: int,
    saves: int,
    fresh: int,
    counts: int,
) -> None:
    """Rows `missing` [n], ascending, move into the slots `picked` for them; what was there leaves.

    counts [T, 2] are fresh rows and saves of each table; borders [T + 1] are those of rows.
    """
    slot, row, border = i8(picked, n), i8(missing, n), i8(borders, tables + 1)
    slots, rows, is_dirty, is_stored = i4(slot_of, border[tables]), i8(row_of, 1 << 62), u1(dirty, 1 << 62), u1(stored, 1 << 62)
    save, is_fresh, count = i8(saves, n), u1(fresh, n), i8(counts, 2 * tables)
    i = 0
    for t in range(tables):
        fresh_count, save_count = 0, 0
        while i < n and row[i] < border[t + 1]:
            if i + _AHEAD < n:
                ahead = slot[i + _AHEAD]
                prefetch(row_of + 8 * ahead)
                prefetch(slot_of + 4 * row[i + _AHEAD])
            s, r = slot[i], row[i]
            old, saved = rows[s], np.int64(-1)
            if old >= 0:
                if is_dirty[s]:
                    saved = old
                    save_count += 1
                slots[old] = BELOW if is_dirty[s] or is_stored[s] else FRESH
            save[i] = saved
            begins = slots[r] == FRESH + MARKED
            is_fresh[i] = begins
            fresh_count += begins
            slots[r], rows[s] = s, r
            is_stored[s], is_dirty[s] = not begins, 0
            i += 1
        count[2 * t], count[2 * t + 1] = fresh_count, save_count


@compiled(inline=True)
def _scored(score: int, kind: int, batch: int, half_life: int, gain: Any, gains: int) -> int:
    if kind == LRU:
        return np.int64(batch)
    if kind == LFU:
        return score + 1
    now = np.int64(UNIT * batch // half_life + 1)
    if score <= 0:
        return now
    high, low = max(score, now), min(score, now)
    return high + gain[min(high - low, gains - 1)]


@compiled(types.void(*[int64] * 14))
def use(
    slots: int,
    hit_count: int,
    n: int,
    held: int,
    score: int,
    key: int,
    kind: int,
    batch: int,
    half_life: int,
    gain: int,
    gains: int,
    base: int,
    keeps: int,
    scores: int,
) -> None:
    """Hold the slots [n] of a batch and give them new scores; those from `hit_count` on have just come.

    Scores by a policy of ours, or as `scores` [n] says where `kind` is 0. Keys follow, but with `keeps` those of hits
    that have a next use stay.
    """
    slot, holders, scored, keyed = i8(slots, n), i4(held, 1 << 62), i8(score, 1 << 62), i4(key, 1 << 62)
    gained, given = i4(gain, gains), i8(scores, n)
    for i in range(n):
        s = slot[i]
        is_hit = i < hit_count
        holders[s] += 1 - MARK if is_hit else 1
        if kind == 0:
            value = given[i]
        else:
            value = _scored(scored[s] if is_hit else 0, kind, batch, half_life, gained, gains)
        scored[s] = value
        if not (keeps and is_hit and keyed[s] > SCORES + EMPTY_KEYS):
            keyed[s] = min(max(value - base, 0), SCORES) + EMPTY_KEYS


@compiled(types.void(*[int64] * 7))
def expect(rows: int, n: int, begin: int, following: int, size: int, slot_of: int, key: int) -> None:
    """Slots of the rows [n] of a batch that was announced know their next use, from the ring `following` [size]."""
    row, slot, keyed, ring = i8(rows, n), i4(slot_of, 1 << 62), i4(key, 1 << 62), i4(following, size)
    at = begin % size
    for i in range(n):
        if ring[at] >= 0:
            keyed[slot[row[i]]] = NEXT_USES - ring[at]
        at = at + 1 if at + 1 < size else 0


@compiled(types.void(*[int64] * 9))
def place(
    out: int,
    offsets: int,
    offset_bytes: int,
    samples: int,
    f_count: int,
    first_slots: int,
    slot_of: int,
    n: int,
    rows_total: int,
) -> None:
    """Put the slots of rows that were missing where `find_ids` left their numbers."""
    at, slot, first_slot = i8(out, n), i4(slot_of, rows_total), i8(first_slots, f_count)
    begin = 0
    for f in range(f_count):
        end = min(max(_id(offsets, offset_bytes, (f + 1) * samples), begin), n)
        for i in range(begin, end):
            if at[i] <= -2:
                at[i] = slot[-2 - at[i]] - first_slot[f]
        begin = end


@compiled(types.void(*[int64] * 5))
def release(slots: int, n: int, held: int, dirty: int, changed: int) -> None:
    """Slots [n] are held by one lease less, and `changed` ones are other than their records."""
    slot, holders, is_dirty = i8(slots, n), i4(held, 1 << 62), u1(dirty, 1 << 62)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(held + 4 * slot[i + _AHEAD])
        holders[slot[i]] -= 1
        if changed:
            is_dirty[slot[i]] = 1


@compiled(int64(*[int64] * 12))
def distinct(
    ids: int,
    id_bytes: int,
    n: int,
    offsets: int,
    offset_bytes: int,
    samples: int,
    features: int,
    f_count: int,
    latest: int,
    begin: int,
    rows: int,
    before: int,
) -> int:
    """Distinct rows of a batch as they come, and what `latest` had of each, where they are marked by `begin`.

    latest [R] has less than `begin` of every row before. Gives their number.
    """
    feature, last, row_out, old = i8(features, f_count * FIELDS), i8(latest, 1 << 62), i8(rows, n), i8(before, n)
    count, low = 0, 0
    for f in range(f_count):
        table_rows, first = feature[f * FIELDS + ROWS], feature[f * FIELDS + FIRST_ROW]
        end = min(max(_id(offsets, offset_bytes, (f + 1) * samples), low), n)
        for i in range(low, end):
            if i + _AHEAD < end:
                following = _id(ids, id_bytes, i + _AHEAD)
                if 0 <= following < table_rows:
                    prefetch(latest + 8 * (first + following))
            id = _id(ids, id_bytes, i)
            if 0 <= id < table_rows and last[first + id] < begin:
                row_out[count], old[count] = first + id, last[first + id]
                last[first + id] = begin
                count += 1
        low = end
    return count


@compiled(types.void(*[int64] * 11))
def link(
    rows: int,
    before: int,
    n: int,
    number: int,
    begin: int,
    first: int,
    latest: int,
    following: int,
    size: int,
    slot_of: int,
    key: int,
) -> None:
    """The batch `number` is the next use of its rows, for what they were announced before at `before`, or their slots.

    Its rows stand from `begin` on among all that was announced; what stands before `first` is no more.
    """
    row, old, last, ring = i8(rows, n), i8(before, n), i8(latest, 1 << 62), i4(following, size)
    slot, keyed = i4(slot_of, 1 << 62), i4(key, 1 << 62)
    at = begin % size
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(slot_of + 4 * row[i + _AHEAD])
        r = row[i]
        ring[at] = -1
        if old[i] >= first:
            ring[old[i] % size] = number
        else:
            s = slot[r]
            if s >= 0:
                keyed[s] = NEXT_USES - number
        last[r] = begin + i
        at = at + 1 if at + 1 < size else 0
