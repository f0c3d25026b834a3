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
from .residency_numbers import (
    BELOW,
    EMPTY_KEYS,
    END,
    ENTRIES,
    FIELDS_OF_QUEUE,
    FRESH,
    HEAD,
    HEAP,
    HEAP_ROOM,
    HEAP_SIZE,
    HIGH,
    LFU,
    LIMIT,
    LOW,
    LRU,
    MARK,
    MARKED,
    NEXT_USES,
    SCORES,
    UNIT,
)

types: Any = numba_types

# ids and rows whose memory is asked for before it is read
_AHEAD = 24
# bits of a digit of the sort
_DIGIT = 11
_DIGITS = 1 << _DIGIT


@compiled(inline=True)
def _id(address: int, nbytes: int, at: int) -> Any:
    return i8(address, at + 1)[at] if nbytes == 8 else np.int64(i4(address, at + 1)[at])


@compiled(types.void(*[int64] * 18))
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
    absent: int,
    counts: int,
    totals: int,
) -> None:
    """The slot of each id within its table, -2 - row of those that are missing, -1 of what lies in no table.

    Distinct slots that were found go to `hits`, distinct rows that were not to `missing`, both as they come, and to
    `absent` where ids of missing rows stand; each has room for one more than it gets. counts [T, 2] are hits and
    missing rows of each table, totals [3] the numbers of all that was written.
    """
    feature, first_slot, table = i8(features, f_count * FIELDS), i8(first_slots, f_count), i8(table_of, f_count)
    slot, holders, place = i4(slot_of, 1 << 62), i4(held, 1 << 62), i8(out, n)
    hit, gone, at, count = i8(hits, n + 1), i8(missing, n + 1), i8(absent, n + 1), i8(counts, 1 << 62)
    hit_count, gone_count, absent_count, begin = np.uint64(0), np.uint64(0), np.uint64(0), 0
    one, none = np.uint64(1), np.uint64(0)
    for f in range(f_count):
        rows, first, base = feature[f * FIELDS + ROWS], feature[f * FIELDS + FIRST_ROW], first_slot[f]
        end = min(max(_id(offsets, offset_bytes, (f + 1) * samples), begin), n)
        hits_before, gone_before = hit_count, gone_count
        for i in range(begin, end):
            # rows of ids to come are asked for first, and then what holds the slots of those nearer
            if i + 2 * _AHEAD < end:
                following = _id(ids, id_bytes, i + 2 * _AHEAD)
                if 0 <= following < rows:
                    prefetch(slot_of + 4 * (first + following))
                following = _id(ids, id_bytes, i + _AHEAD)
                if 0 <= following < rows:
                    prefetch(held + 4 * max(0, slot[np.uint64(first + following)]))
            id = _id(ids, id_bytes, i)
            if id < 0 or id >= rows:
                place[i] = -1
                continue
            row = np.uint64(first + id)
            s = slot[row]
            if s >= 0:
                # without a branch, which would be foretold wrong for a third of the ids
                place[i] = s - base
                holder = holders[np.uint64(s)]
                hit[hit_count] = s
                hit_count += one if holder < MARK else none
                holders[np.uint64(s)] = holder | MARK
            else:
                place[i] = -2 - first - id
                at[absent_count] = i
                absent_count += one
                gone[gone_count] = first + id
                gone_count += one if s >= FRESH else none
                slot[row] = s + MARKED if s >= FRESH else s
        count[2 * table[f]] += np.int64(hit_count - hits_before)
        count[2 * table[f] + 1] += np.int64(gone_count - gone_before)
        begin = end
    place[begin:] = -1
    total = i8(totals, 3)
    total[0], total[1], total[2] = np.int64(hit_count), np.int64(gone_count), np.int64(absent_count)


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
    hit, absent, holders, slot = (
        i8(hits, hit_count),
        i8(missing, missing_count),
        i4(held, 1 << 62),
        i4(slot_of, 1 << 62),
    )
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
    slots, rows, is_dirty, is_stored = (
        i4(slot_of, border[tables]),
        i8(row_of, 1 << 62),
        u1(dirty, 1 << 62),
        u1(stored, 1 << 62),
    )
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
    now = np.int64(UNIT * batch // half_life + 1)
    for i in range(n):
        if i + _AHEAD < n:
            ahead = slot[i + _AHEAD]
            prefetch(held + 4 * ahead)
            prefetch(score + 8 * ahead)
            prefetch(key + 4 * ahead)
        s, is_hit = np.uint64(slot[i]), i < hit_count
        holders[s] = (holders[s] & (MARK - 1)) + 1
        if kind == LRU:
            value: Any = np.int64(batch)
        elif kind == 0:
            value = given[i]
        else:
            value = scored[s] if is_hit else np.int64(0)
            if kind == LFU:
                value += 1
            elif value <= 0:
                value = now
            else:
                value = max(value, now) + gained[np.uint64(min(abs(value - now), gains - 1))]
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
    n: int,
    absent: int,
    absent_count: int,
    offsets: int,
    offset_bytes: int,
    samples: int,
    first_slots: int,
    slot_of: int,
) -> None:
    """Put the slots of rows that were missing where `find_ids` left their numbers."""
    place, slot, at = i8(out, n), i4(slot_of, 1 << 62), i8(absent, absent_count)
    first_slot, f, end = i8(first_slots, 1 << 62), -1, np.int64(0)
    for k in range(absent_count):
        i = at[k]
        while i >= end:
            f += 1
            end = _id(offsets, offset_bytes, (f + 1) * samples)
        place[i] = slot[np.uint64(-2 - place[i])] - first_slot[f]


@compiled()
def _note(key: int, slot: int, queues: Any, count: int) -> None:
    """A free slot has this key now: into the heap of its table's queue, where it is below what that knows of."""
    entry = (key << 32) | slot
    for q in range(count):
        base = q * FIELDS_OF_QUEUE
        if slot < queues[base + LOW] or slot >= queues[base + HIGH] or entry > queues[base + LIMIT]:
            continue
        size = queues[base + HEAP_SIZE]
        if size == queues[base + HEAP_ROOM]:
            # what is below the limit is not known any more
            queues[base + LIMIT] = -1
            continue
        heap = i8(queues[base + HEAP], size + 1)
        at = size
        while at > 0 and heap[(at - 1) >> 1] > entry:
            heap[at] = heap[(at - 1) >> 1]
            at = (at - 1) >> 1
        heap[at] = entry
        queues[base + HEAP_SIZE] = size + 1


@compiled()
def _pop(heap: Any, size: int) -> None:
    """Take the least entry out of a heap, of which `size` stay."""
    last, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last


@compiled(int64(*[int64] * 6))
def pick(queue: int, wanted: int, out: int, held: int, key: int, scratch: int) -> int:
    """The `wanted` slots of lowest (key, slot) of a queue's table that nobody holds, in the order of slots.

    Gives how many there were: fewer where the queue does not know of more. scratch is as of `sort_rows`.
    """
    own, slot = i8(queue, FIELDS_OF_QUEUE), i8(out, wanted)
    holders, keyed = i4(held, 1 << 62), i4(key, 1 << 62)
    entries, heap = i8(own[ENTRIES], own[END]), i8(own[HEAP], own[HEAP_ROOM])
    head, end, size, count, last = own[HEAD], own[END], own[HEAP_SIZE], 0, np.int64(-1)
    while count < wanted and (head < end or size > 0):
        if size > 0 and (head >= end or heap[0] < entries[head]):
            entry = heap[0]
            size -= 1
            _pop(heap, size)
        else:
            entry = entries[head]
            head += 1
        if entry == last:
            continue
        last = entry
        s = entry & 0xFFFFFFFF
        # others are held, or have got another key since
        if holders[s] <= 0 and keyed[s] == entry >> 32:
            slot[count] = s
            count += 1
    own[HEAD], own[HEAP_SIZE] = head, size
    return count


@compiled(types.void(*[int64] * 8))
def release(slots: int, n: int, held: int, dirty: int, changed: int, key: int, queues: int, queue_count: int) -> None:
    """Slots [n] are held by one lease less, and `changed` ones differ from their records; queues hear of free ones."""
    slot, holders, is_dirty = i8(slots, n), i4(held, 1 << 62), u1(dirty, 1 << 62)
    keyed, queue = i4(key, 1 << 62), i8(queues, queue_count * FIELDS_OF_QUEUE)
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(held + 4 * slot[i + _AHEAD])
            prefetch(dirty + slot[i + _AHEAD])
        s = np.uint64(slot[i])
        holders[s] -= 1
        if changed:
            is_dirty[s] = 1
        if queue_count and holders[s] == 0:
            _note(np.int64(keyed[s]), slot[i], queue, queue_count)


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


@compiled(types.void(*[int64] * 14))
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
    held: int,
    queues: int,
    queue_count: int,
) -> None:
    """The batch `number` is the next use of its rows, for what they were announced before at `before`, or their slots.

    Its rows stand from `begin` on among all that was announced; what stands before `first` is no more.
    """
    row, old, last, ring = i8(rows, n), i8(before, n), i8(latest, 1 << 62), i4(following, size)
    slot, keyed, holders = i4(slot_of, 1 << 62), i4(key, 1 << 62), i4(held, 1 << 62)
    queue = i8(queues, queue_count * FIELDS_OF_QUEUE)
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
                if queue_count and holders[s] <= 0:
                    _note(np.int64(keyed[s]), np.int64(s), queue, queue_count)
        last[r] = begin + i
        at = at + 1 if at + 1 < size else 0
