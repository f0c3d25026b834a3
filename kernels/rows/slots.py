"""Slots on the device that rows take and leave, and the next uses of rows: what follows on `wanted.py`.

Letters: N ids of a batch, M rows at most that come, R rows and S slots of T tables. Numbers below 0 are none: so many
rows come as there are, and nothing waits for their number.
Bytes moved: 70 a row that comes, 24 an id for its place, 21 a slot that is let go, 40 a row that is announced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._op import next_power_of_2, register, runs_kernel, tl, triton
from ..features import bag_of_position, batch_size, feature_of_position, segment_of_position
from .residency_numbers import BELOW, EMPTY_KEYS, FRESH, LFU, LRU, NEXT_USES, SCORES
from .wanted import _BLOCK, _TABLES, _WARPS, key_of_score, scored, scores_ref


def take_slots_ref(
    rows: Tensor, slots: Tensor, row_borders: Tensor, slot_of: Tensor, row_of: Tensor, held: Tensor, dirty: Tensor,
    stored: Tensor, score: Tensor, key: Tensor, counts: Tensor, gain: Tensor, kind: int, now: int, base: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What leaves first, then what comes."""
    came = (rows >= 0) & (slots >= 0)
    slots[~came] = -1
    to, row = slots[came], rows[came]
    old, is_dirty = row_of[to], dirty[to]
    saves = torch.full_like(rows, -1)
    saves[came] = torch.where(is_dirty, old, -1)
    left = old >= 0
    slot_of[old[left]] = torch.where(is_dirty | stored[to], BELOW, FRESH).int()[left]
    fresh = torch.zeros_like(came)
    fresh[came] = slot_of[row] == FRESH
    slot_of[row], row_of[to] = to.int(), row
    stored[to], dirty[to], held[to] = ~fresh[came], False, 1
    score[to] = scores_ref(torch.zeros_like(to), gain, kind, now) if kind else 0
    key[to] = (score[to] - base).clamp(0, SCORES).add(EMPTY_KEYS).int()
    tables = torch.bucketize(rows.clamp(min=0), row_borders[1:], right=True)
    counts[2].index_add_(0, tables.clamp(max=counts.shape[1] - 1), fresh.long())
    counts[3].index_add_(0, tables.clamp(max=counts.shape[1] - 1), (saves >= 0).long())
    return saves, fresh


@triton.jit(
    do_not_specialize=["M", "T", "steps", "gains", "now", "base"],
    do_not_specialize_on_alignment=["rows", "slots", "counts", "gain"],
)
def _take_slots_kernel(  # type: ignore[no-untyped-def]
    rows,
    slots,
    borders,
    slot_of,
    row_of,
    held,
    dirty,
    stored,
    score,
    key,
    counts,
    gain,
    saves,
    fresh,
    M,
    T,
    steps,
    gains,
    now,
    base,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LRU: tl.constexpr,
    LFU: tl.constexpr,
    SCORES: tl.constexpr,
    EMPTY: tl.constexpr,
    BELOW: tl.constexpr,
    FRESH: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + m, mask=m < M, other=-1)
    slot = tl.load(slots + m, mask=m < M, other=-1)
    came = (row >= 0) & (slot >= 0)
    old = tl.load(row_of + slot, mask=came, other=-1)
    was_dirty = tl.load(dirty + slot, mask=came, other=0) != 0
    has_record = was_dirty | (tl.load(stored + slot, mask=came, other=0) != 0)
    is_fresh = came & (tl.load(slot_of + row, mask=came, other=BELOW) == FRESH)
    # rows that leave had slots, those that come had none: no two are one
    tl.store(slot_of + old, tl.where(has_record, BELOW, FRESH), mask=came & (old >= 0))
    tl.store(slot_of + row, slot.to(tl.int32), mask=came)
    tl.store(row_of + slot, row, mask=came)
    tl.store(stored + slot, (~is_fresh).to(tl.uint8), mask=came)
    tl.store(dirty + slot, tl.zeros((BLOCK,), tl.uint8), mask=came)
    tl.store(held + slot, tl.full((BLOCK,), 1, tl.int32), mask=came)
    new = tl.zeros((BLOCK,), tl.int64)
    if KIND > 0:
        new = scored(new, gain, gains, now, KIND, LRU, LFU, came)
    tl.store(score + slot, new, mask=came)
    tl.store(key + slot, key_of_score(new, base, SCORES, EMPTY), mask=came)
    saved = came & was_dirty & (old >= 0)
    tl.store(slots + m, tl.full((BLOCK,), -1, tl.int64), mask=(m < M) & (slot >= 0) & ~came)
    tl.store(saves + m, tl.where(saved, old, -1), mask=m < M)
    tl.store(fresh + m, is_fresh.to(tl.uint8), mask=m < M)
    table = segment_of_position(borders, tl.maximum(row, 0), T, steps).to(tl.int32)
    t = tl.arange(0, BLOCK_T)
    total = tl.histogram(table, BLOCK_T, mask=is_fresh)
    tl.atomic_add(counts + 2 * T + t, total.to(tl.int64), mask=total > 0)
    total = tl.histogram(table, BLOCK_T, mask=saved)
    tl.atomic_add(counts + 3 * T + t, total.to(tl.int64), mask=total > 0)


def take_slots(
    rows: Tensor, slots: Tensor, row_borders: Tensor, slot_of: Tensor, row_of: Tensor, held: Tensor, dirty: Tensor,
    stored: Tensor, score: Tensor, key: Tensor, counts: Tensor, gain: Tensor, kind: int, now: int, base: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Have rows move into slots that were picked for them, hold and score these; what was there leaves.

    Shapes: rows, slots [M] int64, the rows distinct, the slots free and distinct; row_borders [T + 1], slot_of [R],
    row_of [S] int64, held, key [S] int32, dirty, stored [S] bool, score [S] int64, counts [4, T] int64; others as
    `claim_rows`. Slots of no row become -1.

    Returns:
        The rows [M] that left and have to be saved, and whether those that came are fresh [M]; counts[2] and counts[3]
        have the fresh and the saved ones by table.
    """
    return torch.ops.shardwise.take_slots(  # type: ignore[no-any-return]
        rows, slots, row_borders, slot_of, row_of, held, dirty, stored, score, key, counts, gain, kind, now, base,
    )  # fmt: skip


def _take_slots(
    rows: Tensor, slots: Tensor, row_borders: Tensor, slot_of: Tensor, row_of: Tensor, held: Tensor, dirty: Tensor,
    stored: Tensor, score: Tensor, key: Tensor, counts: Tensor, gain: Tensor, kind: int, now: int, base: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    count, tables = rows.shape[0], row_borders.shape[0] - 1
    if not count:
        return torch.empty_like(rows), torch.empty_like(rows, dtype=torch.bool)
    if not runs_kernel(rows):
        return take_slots_ref(
            rows, slots, row_borders, slot_of, row_of, held, dirty, stored, score, key, counts, gain, kind, now, base
        )
    saves, fresh = torch.empty_like(rows), torch.empty(count, dtype=torch.bool, device=rows.device)
    _take_slots_kernel[(triton.cdiv(count, _BLOCK),)](
        rows, slots, row_borders, slot_of, row_of, held, dirty.view(torch.uint8), stored.view(torch.uint8), score, key,
        counts, gain, saves, fresh.view(torch.uint8), count, tables, tables.bit_length() + 1, gain.shape[0], now,
        base, kind, _BLOCK, max(_TABLES, next_power_of_2(tables)), LRU, LFU, SCORES, EMPTY_KEYS, BELOW, FRESH,
        num_warps=_WARPS,
    )  # fmt: skip
    return saves, fresh


register(
    "take_slots(Tensor rows, Tensor(i!) slots, Tensor row_borders, Tensor(a!) slot_of, Tensor(b!) row_of,"
    " Tensor(c!) held, Tensor(d!) dirty, Tensor(e!) stored, Tensor(f!) score, Tensor(g!) key, Tensor(h!) counts,"
    " Tensor gain, int kind, SymInt now, SymInt base) -> (Tensor, Tensor)",
    _take_slots,
    lambda rows, *rest: (torch.empty_like(rows), torch.empty_like(rows, dtype=torch.bool)),
)


def place_rows_ref(places: Tensor, offsets: Tensor, first_slots: Tensor, slot_of: Tensor, spare: Tensor) -> None:
    """By the feature of each."""
    spare.zero_()
    count = first_slots.shape[0]
    feature = bag_of_position(offsets, places.shape[0]) // max(batch_size(offsets, count), 1)
    came = slot_of[(-2 - places).clamp(min=0)].long() - first_slots[feature.clamp(max=count - 1)]
    places.copy_(torch.where(places <= -2, came, places))


@triton.jit(do_not_specialize=["N", "F", "B", "Z", "part"], do_not_specialize_on_alignment=["O", "spare"])
def _place_rows_kernel(  # type: ignore[no-untyped-def]
    places, O, first_slots, slot_of, spare, N, F, B, Z, part, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + n, mask=n < N, other=-1)
    came = place <= -2
    f = feature_of_position(O, n, F, B, STEPS).to(tl.int64)
    slot = tl.load(slot_of + (-2 - place), mask=came, other=0)
    tl.store(places + n, slot - tl.load(first_slots + f, mask=came, other=0), mask=came)
    # in equal parts
    end = tl.minimum((tl.program_id(0) + 1) * part, Z)
    for begin in range(tl.program_id(0) * part, end, BLOCK):
        z = begin + tl.arange(0, BLOCK)
        tl.store(spare + z, tl.zeros((BLOCK,), tl.int64), mask=z < end)


def place_rows(places: Tensor, offsets: Tensor, first_slots: Tensor, slot_of: Tensor, spare: Tensor) -> None:
    """Replace the rows that had no slot in `claim_rows`' places [N] by the slots that they have now.

    `spare` [Z] int64, which other batches count in, becomes zeros: a launch of its own would do nothing else.
    """
    torch.ops.shardwise.place_rows(places, offsets, first_slots, slot_of, spare)


def _place_rows(places: Tensor, offsets: Tensor, first_slots: Tensor, slot_of: Tensor, spare: Tensor) -> None:
    n, count, zeros = places.shape[0], first_slots.shape[0], spare.shape[0]
    if not n:
        spare.zero_()
        return
    if not runs_kernel(places):
        place_rows_ref(places, offsets, first_slots, slot_of, spare)
        return
    programs = triton.cdiv(n, _BLOCK)
    _place_rows_kernel[(programs,)](
        places, offsets.contiguous(), first_slots, slot_of, spare, n, count, (offsets.shape[0] - 1) // max(count, 1),
        zeros, triton.cdiv(zeros, programs), count.bit_length() + 1, _BLOCK, num_warps=_WARPS,
    )  # fmt: skip


register(
    "place_rows(Tensor(a!) places, Tensor offsets, Tensor first_slots, Tensor slot_of, Tensor(b!) spare) -> ()",
    _place_rows,
    lambda places, offsets, first_slots, slot_of, spare: None,
)


def release_slots_ref(slots: Tensor, held: Tensor, dirty: Tensor, changed: bool) -> None:
    """One holder less."""
    slots = slots[slots >= 0]
    held[slots] -= 1
    if changed:
        dirty[slots] = True


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["slots"])
def _release_slots_kernel(slots, held, dirty, N, CHANGED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + n, mask=n < N, other=-1)
    live = slot >= 0
    tl.store(held + slot, tl.load(held + slot, mask=live, other=1) - 1, mask=live)
    if CHANGED:
        tl.store(dirty + slot, tl.full((BLOCK,), 1, tl.uint8), mask=live)


def release_slots(slots: Tensor, held: Tensor, dirty: Tensor, changed: bool) -> None:
    """Have distinct slots [N] held once less; rows that may have `changed` are other than their records below."""
    torch.ops.shardwise.release_slots(slots, held, dirty, changed)


def _release_slots(slots: Tensor, held: Tensor, dirty: Tensor, changed: bool) -> None:
    n = slots.shape[0]
    if not n:
        return
    if not runs_kernel(slots):
        release_slots_ref(slots, held, dirty, changed)
        return
    _release_slots_kernel[(triton.cdiv(n, _BLOCK),)](
        slots, held, dirty.view(torch.uint8), n, changed, _BLOCK, num_warps=_WARPS
    )


register(
    "release_slots(Tensor slots, Tensor(a!) held, Tensor(b!) dirty, bool changed) -> ()",
    _release_slots,
    lambda slots, held, dirty, changed: None,
)


def link_rows_ref(
    rows: Tensor, slot_of: Tensor, latest: Tensor, following: Tensor, key: Tensor, number: int, begin: int, first: int
) -> None:
    """As the batch comes last, it is the next use of what was announced before it."""
    places = torch.arange(begin, begin + rows.shape[0], device=rows.device)
    following[places % following.shape[0]] = -1
    places, rows = places[rows >= 0], rows[rows >= 0]
    before = latest[rows]
    following[before[before >= first] % following.shape[0]] = number
    slots = slot_of[rows[before < first]].long()
    key[slots[slots >= 0]] = NEXT_USES - number
    latest[rows] = places


@triton.jit(
    do_not_specialize=["N", "size", "number", "begin", "first"], do_not_specialize_on_alignment=["rows", "following"]
)
def _link_rows_kernel(  # type: ignore[no-untyped-def]
    rows, slot_of, latest, following, key, N, size, number, begin, first, NEXT: tl.constexpr, BLOCK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    row = tl.load(rows + n, mask=inside, other=-1)
    live = row >= 0
    before = tl.load(latest + row, mask=live, other=-1)
    waits = live & (before >= first)
    # the ring has room for all that is announced: what stands in it before is elsewhere
    tl.store(following + (begin + n) % size, tl.full((BLOCK,), -1, tl.int32), mask=inside)
    tl.store(following + before % size, tl.zeros((BLOCK,), tl.int32) + number, mask=waits)
    slot = tl.load(slot_of + row, mask=live & (before < first), other=-1)
    tl.store(key + slot, tl.zeros((BLOCK,), tl.int32) + (NEXT - number), mask=slot >= 0)
    tl.store(latest + row, begin + n, mask=live)


def link_rows(
    rows: Tensor, slot_of: Tensor, latest: Tensor, following: Tensor, key: Tensor, number: int, begin: int, first: int
) -> None:
    """Make the batch `number` the next use of its distinct rows: of the places where they were announced before, or of
    their slots where that is before `first`. They stand from `begin` on in the ring `following`.

    Shapes: rows [N] int64, slot_of [R] int32, latest [R] int64, following [size] int32, key [S] int32.
    """
    torch.ops.shardwise.link_rows(rows, slot_of, latest, following, key, number, begin, first)


def _link_rows(
    rows: Tensor, slot_of: Tensor, latest: Tensor, following: Tensor, key: Tensor, number: int, begin: int, first: int
) -> None:
    n = rows.shape[0]
    if not n:
        return
    if not runs_kernel(rows):
        link_rows_ref(rows, slot_of, latest, following, key, number, begin, first)
        return
    _link_rows_kernel[(triton.cdiv(n, _BLOCK),)](
        rows, slot_of, latest, following, key, n, following.shape[0], number, begin, first, NEXT_USES, _BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip


register(
    "link_rows(Tensor rows, Tensor slot_of, Tensor(a!) latest, Tensor(b!) following, Tensor(c!) key, SymInt number,"
    " SymInt begin, SymInt first) -> ()",
    _link_rows,
    lambda rows, slot_of, latest, following, key, number, begin, first: None,
)


def expect_rows_ref(rows: Tensor, slot_of: Tensor, following: Tensor, key: Tensor, begin: int) -> None:
    """Of rows that will be used again."""
    places = torch.arange(begin, begin + rows.shape[0], device=rows.device)
    number = torch.where(rows >= 0, following[places % following.shape[0]], -1)
    slots = slot_of[rows[number >= 0]].long()
    key[slots] = NEXT_USES - number[number >= 0]


@triton.jit(do_not_specialize=["N", "size", "begin"], do_not_specialize_on_alignment=["rows", "following"])
def _expect_rows_kernel(rows, slot_of, following, key, N, size, begin, NEXT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + n, mask=n < N, other=-1)
    number = tl.load(following + (begin + n) % size, mask=row >= 0, other=-1)
    slot = tl.load(slot_of + row, mask=number >= 0, other=-1)
    tl.store(key + slot, NEXT - number, mask=slot >= 0)


def expect_rows(rows: Tensor, slot_of: Tensor, following: Tensor, key: Tensor, begin: int) -> None:
    """Have the slots of a batch's distinct rows know their next use, which stands in the ring from `begin` on.

    Shapes: as `link_rows`.
    """
    torch.ops.shardwise.expect_rows(rows, slot_of, following, key, begin)


def _expect_rows(rows: Tensor, slot_of: Tensor, following: Tensor, key: Tensor, begin: int) -> None:
    n = rows.shape[0]
    if not n:
        return
    if not runs_kernel(rows):
        expect_rows_ref(rows, slot_of, following, key, begin)
        return
    _expect_rows_kernel[(triton.cdiv(n, _BLOCK),)](
        rows, slot_of, following, key, n, following.shape[0], begin, NEXT_USES, _BLOCK, num_warps=_WARPS
    )


register(
    "expect_rows(Tensor rows, Tensor slot_of, Tensor following, Tensor(a!) key, SymInt begin) -> ()",
    _expect_rows,
    lambda rows, slot_of, following, key, begin: None,
)
