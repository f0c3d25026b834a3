"""The rows that a batch wants, found on the device in memory of fixed sizes: nothing waits for how many there are.

Letters: N ids, F features, R rows and S slots of T tables, W words of 32 rows, C chunks of words.
A row is wanted once however often its id comes: by a stamp of the batch on its slot, or by a bit where it has none.
Bits are counted by chunk, so that each chunk knows where its rows begin among all, ascending.
Bytes moved: an id, its place, its slot and a stamp for each id, 21 a slot that is held; bits are read and cleared once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._op import INTERPRETED, next_power_of_2, register, runs_kernel, tl, triton
from ..features import FIELDS, FIRST_ROW, ROWS, feature_of_position, locate_ids, segment_of_position
from .residency_numbers import EMPTY_KEYS, LFU, LRU, SCORES

# ids of a program, one a thread, as neighbours read neighbours; tables that it counts at least: a warp of AMD's
_BLOCK, _WARPS, _TABLES = (64, 8, 64) if INTERPRETED else (256, 8, 64)
# words of a tile; of a chunk at least, and chunks at most; tallies that are added up at once, one for each thread
_WORDS, _CHUNK_WORDS, _MOST_CHUNKS, _TALLIES = (8, 16, 8, 8) if INTERPRETED else (128, 256, 4096, 128)


def chunk_words(words: int) -> int:
    """Words of each chunk of so many."""
    return max(_CHUNK_WORDS, next_power_of_2(-(-words // _MOST_CHUNKS)))


def chunk_count(words: int) -> int:
    """Chunks of so many words."""
    return -(-words // chunk_words(words))


def rows_of_ids(ids: Tensor, offsets: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """The rows [N] of ids, counted over all tables, -1 of what lies in no table; and the feature [N] of each."""
    _, feature, inside = locate_ids(ids, offsets, features)
    return torch.where(inside, ids.long() + features[feature, FIRST_ROW], -1), feature


def _first_of_each(rows: Tensor) -> Tensor:
    """Whether each of rows [N] is the first of its number; -1 is none."""
    ordered, order = rows.sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return torch.zeros_like(first).scatter_(0, order, first) & (rows >= 0)


def _set_bits(bits: Tensor, tallies: Tensor, rows: Tensor) -> None:
    """Set the bits of distinct rows, and count them by chunk."""
    sums = torch.zeros(bits.shape[0], dtype=torch.int64, device=bits.device)
    sums.index_add_(0, rows >> 5, torch.ones_like(rows) << (rows & 31))
    bits |= torch.where(sums >> 31 > 0, sums - (1 << 32), sums).int()
    tallies.index_add_(0, (rows >> 5) // chunk_words(bits.shape[0]), torch.ones_like(rows))


def _by_table(rows: Tensor, row_borders: Tensor) -> Tensor:
    """How many of rows [n] each of T tables has."""
    tables = torch.bucketize(rows, row_borders[1:], right=True)
    counts = torch.zeros(row_borders.shape[0] - 1, dtype=torch.int64, device=rows.device)
    return counts.index_add_(0, tables, torch.ones_like(tables))


def claim_rows_ref(
    ids: Tensor, offsets: Tensor, features: Tensor, first_slots: Tensor, slot_of: Tensor, row_borders: Tensor,
    held: Tensor, used: Tensor, score: Tensor, key: Tensor, bits: Tensor, tallies: Tensor, counts: Tensor,
    gain: Tensor, turn: int, kind: int, now: int, base: int, keeps: bool, holds: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The first id of each row claims it."""
    rows, feature = rows_of_ids(ids, offsets, features)
    slots = torch.where(rows >= 0, slot_of[rows.clamp(min=0)].long(), -1)
    first = _first_of_each(rows)
    hits = torch.where(first & (slots >= 0), slots, -1)
    hit, missing = hits[hits >= 0], rows[first & (slots < 0)]
    used[hit] = turn
    _set_bits(bits, tallies, missing)
    counts[0] += _by_table(rows[hits >= 0], row_borders)
    counts[1] += _by_table(missing, row_borders)
    if holds:
        held[hit] += 1
        if kind:
            score[hit] = scores_ref(score[hit], gain, kind, now)
            new = (score[hit] - base).clamp(0, SCORES).add(EMPTY_KEYS).int()
            key[hit] = torch.where(key[hit] > SCORES + EMPTY_KEYS, key[hit], new) if keeps else new
    places = torch.where(slots >= 0, slots - first_slots[feature], -2 - rows)
    return torch.where(rows >= 0, places, -1), torch.cat([hits, torch.full_like(hits, -1)])


def scores_ref(scores: Tensor, gain: Tensor, kind: int, now: int) -> Tensor:
    """Scores [n] of slots after one more use, by the policies of ours; `now` is that of a row that has just come."""
    if kind == LRU:
        return torch.full_like(scores, now)
    if kind == LFU:
        return scores + 1
    high, low = scores.clamp(min=now), scores.clamp(max=now)
    return torch.where(scores > 0, high + gain[(high - low).clamp(max=gain.shape[0] - 1)], now)


@triton.jit
def scored(score, gain, gains, now, KIND: tl.constexpr, LRU: tl.constexpr, LFU: tl.constexpr, live):  # type: ignore[no-untyped-def]
    """`scores_ref` of some slots."""
    if KIND == LRU:
        y = score * 0 + now
    elif KIND == LFU:
        y = score + 1
    else:
        high = tl.maximum(score, now)
        apart = tl.minimum(high - tl.minimum(score, now), gains - 1)
        more = tl.load(gain + apart, mask=live, other=0)
        y = tl.where(score > 0, high + more, now)
    return y


@triton.jit
def key_of_score(score, base, SCORES: tl.constexpr, EMPTY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of slots whose rows no announced batch needs."""
    return (tl.minimum(tl.maximum(score - base, 0), SCORES) + EMPTY).to(tl.int32)


@triton.jit
def _row_of_id(  # type: ignore[no-untyped-def]
    I, O, FT, N, F, B, n, STEPS: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, FIRST_ROW: tl.constexpr
):
    """Rows of ids, counted over all tables, -1 of what lies in no table, and the features of these."""
    live = (n < N) & (n < tl.load(O + tl.cast(F, tl.int64) * B))
    id = tl.load(I + n, mask=live, other=-1).to(tl.int64)
    f = feature_of_position(O, n, F, B, STEPS).to(tl.int64)
    rows = tl.load(FT + f * FIELDS + ROWS, mask=live, other=0)
    first = tl.load(FT + f * FIELDS + FIRST_ROW, mask=live, other=0)
    return tl.where(live & (id >= 0) & (id < rows), id + first, -1), f


@triton.jit
def _mark(row, live, bits, tallies, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Set the bits of rows; whether each is the one of its row that did."""
    bit = tl.full(row.shape, 1, tl.int32) << (row & 31).to(tl.int32)
    before = tl.atomic_or(bits + (row >> 5), bit, mask=live)
    won = live & ((before & bit) == 0)
    tl.atomic_add(tallies + (row >> 5) // CHUNK, tl.full(row.shape, 1, tl.int64), mask=won)
    return won


@triton.jit
def _count(counts, row, won, borders, T, steps, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to the counts of tables what was won of each."""
    table = segment_of_position(borders, tl.maximum(row, 0), T, steps).to(tl.int32)
    total = tl.histogram(table, BLOCK_T, mask=won)
    tl.atomic_add(counts + tl.arange(0, BLOCK_T), total.to(tl.int64), mask=total > 0)


@triton.jit(
    do_not_specialize=["N", "F", "B", "T", "steps", "gains", "turn", "now", "base"],
    do_not_specialize_on_alignment=["I", "O", "gain", "tallies", "counts"],
)
def _claim_rows_kernel(  # type: ignore[no-untyped-def]
    I,
    O,
    FT,
    first_slots,
    slot_of,
    borders,
    held,
    used,
    score,
    key,
    bits,
    tallies,
    counts,
    gain,
    places,
    slots,
    N,
    F,
    B,
    T,
    steps,
    gains,
    turn,
    now,
    base,
    KIND: tl.constexpr,
    KEEPS: tl.constexpr,
    HOLDS: tl.constexpr,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LRU: tl.constexpr,
    LFU: tl.constexpr,
    SCORES: tl.constexpr,
    EMPTY: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, f = _row_of_id(I, O, FT, N, F, B, n, STEPS, FIELDS, ROWS, FIRST_ROW)
    live = row >= 0
    slot = tl.load(slot_of + row, mask=live, other=-1)
    hit = live & (slot >= 0)
    before = tl.atomic_max(used + slot, tl.zeros((BLOCK,), tl.int32) + turn, mask=hit)
    won = hit & (before < turn)
    if HOLDS:
        # one id of each row comes here
        tl.store(held + slot, tl.load(held + slot, mask=won, other=0) + 1, mask=won)
        if KIND > 0:
            new = scored(tl.load(score + slot, mask=won, other=0), gain, gains, now, KIND, LRU, LFU, won)
            tl.store(score + slot, new, mask=won)
            low = key_of_score(new, base, SCORES, EMPTY)
            if KEEPS:
                old = tl.load(key + slot, mask=won, other=0)
                low = tl.where(old > SCORES + EMPTY, old, low)
            tl.store(key + slot, low, mask=won)
    new_row = _mark(row, live & (slot < 0), bits, tallies, CHUNK)
    _count(counts, row, won, borders, T, steps, BLOCK_T)
    _count(counts + T, row, new_row, borders, T, steps, BLOCK_T)
    first = tl.load(first_slots + f, mask=live, other=0)
    place = tl.where(slot >= 0, slot - first, -2 - row)
    tl.store(places + n, tl.where(live, place, -1), mask=n < N)
    tl.store(slots + n, tl.where(won, slot, -1).to(tl.int64), mask=n < N)
    tl.store(slots + N + n, tl.full((BLOCK,), -1, tl.int64), mask=n < N)


def claim_rows(
    ids: Tensor, offsets: Tensor, features: Tensor, first_slots: Tensor, slot_of: Tensor, row_borders: Tensor,
    held: Tensor, used: Tensor, score: Tensor, key: Tensor, bits: Tensor, tallies: Tensor, counts: Tensor,
    gain: Tensor, turn: int, kind: int, now: int, base: int, keeps: bool, holds: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Find the rows of a batch; hold the slots of those that have some, mark the others.

    Shapes: ids [N], offsets [F*B + 1], features [F, 8] of the numbers of rows, first_slots [F], slot_of [R] int32,
    row_borders [T + 1]; held, used, key [S] int32, score [S] int64; bits [W] int32, tallies [C], counts [2 or more, T]
    int64, gain [n] int32. `used` has less than `turn`, bits, tallies and counts have zeros.

    Args:
        kind, now, base: the policy, or 0 for none, what it gives to a row that has just come, and where keys begin.
        keeps: keys of slots stay that have a next use.
        holds: held, scores and keys change; else rows are found alone.

    Returns:
        The slot [N] of each id within its table, -2 - row of those that have none, -1 of what lies in no table; and
        the slots [2N] that were found, each once, -1 elsewhere and in all of the second half, which is for what comes.
        counts [0] and [1] are rows found and rows marked by table.
    """
    return torch.ops.shardwise.claim_rows(  # type: ignore[no-any-return]
        ids, offsets, features, first_slots, slot_of, row_borders, held, used, score, key, bits, tallies, counts, gain,
        turn, kind, now, base, keeps, holds,
    )  # fmt: skip


def _claim_rows(ids: Tensor, offsets: Tensor, features: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    if not ids.shape[0]:
        return torch.empty_like(ids, dtype=torch.int64), torch.empty_like(ids, dtype=torch.int64)
    if not runs_kernel(ids):
        return claim_rows_ref(ids, offsets, features, *rest)  # type: ignore[arg-type]
    return _launch_claim(ids.contiguous(), offsets.contiguous(), features, *rest)  # type: ignore[arg-type]


def _launch_claim(
    ids: Tensor, offsets: Tensor, features: Tensor, first_slots: Tensor, slot_of: Tensor, row_borders: Tensor,
    held: Tensor, used: Tensor, score: Tensor, key: Tensor, bits: Tensor, tallies: Tensor, counts: Tensor,
    gain: Tensor, turn: int, kind: int, now: int, base: int, keeps: bool, holds: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, count, tables = ids.shape[0], features.shape[0], row_borders.shape[0] - 1
    places, slots = (torch.empty(size, dtype=torch.int64, device=ids.device) for size in (n, 2 * n))
    samples = (offsets.shape[0] - 1) // max(count, 1)
    _claim_rows_kernel[(triton.cdiv(n, _BLOCK),)](
        ids, offsets, features, first_slots, slot_of, row_borders, held, used, score, key, bits, tallies, counts, gain,
        places, slots, n, count, samples, tables, tables.bit_length() + 1, gain.shape[0], turn, now, base,
        kind, keeps, holds, count.bit_length() + 1, chunk_words(bits.shape[0]), _BLOCK,
        max(_TABLES, next_power_of_2(tables)), LRU, LFU, SCORES, EMPTY_KEYS, FIELDS, ROWS, FIRST_ROW,
        num_warps=_WARPS,
    )  # fmt: skip
    return places, slots


register(
    "claim_rows(Tensor ids, Tensor offsets, Tensor features, Tensor first_slots, Tensor slot_of, Tensor row_borders,"
    " Tensor(a!) held, Tensor(b!) used, Tensor(c!) score, Tensor(d!) key, Tensor(e!) bits, Tensor(f!) tallies,"
    " Tensor(g!) counts, Tensor gain, SymInt turn, int kind, SymInt now, SymInt base, bool keeps, bool holds)"
    " -> (Tensor, Tensor)",
    _claim_rows,
    lambda ids, *rest: tuple(ids.new_empty(size, dtype=torch.int64) for size in (ids.shape[0], 2 * ids.shape[0])),
)


def mark_rows_ref(
    ids: Tensor, offsets: Tensor, features: Tensor, row_borders: Tensor, bits: Tensor, tallies: Tensor, counts: Tensor
) -> None:
    """Every distinct row."""
    rows, _ = rows_of_ids(ids, offsets, features)
    distinct = rows[_first_of_each(rows)]
    _set_bits(bits, tallies, distinct)
    counts += _by_table(distinct, row_borders)


@triton.jit(
    do_not_specialize=["N", "F", "B", "T", "steps"],
    do_not_specialize_on_alignment=["I", "O", "tallies", "counts"],
)
def _mark_rows_kernel(  # type: ignore[no-untyped-def]
    I,
    O,
    FT,
    borders,
    bits,
    tallies,
    counts,
    N,
    F,
    B,
    T,
    steps,
    STEPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, _ = _row_of_id(I, O, FT, N, F, B, n, STEPS, FIELDS, ROWS, FIRST_ROW)
    won = _mark(row, row >= 0, bits, tallies, CHUNK)
    _count(counts, row, won, borders, T, steps, BLOCK_T)


def mark_rows(
    ids: Tensor, offsets: Tensor, features: Tensor, row_borders: Tensor, bits: Tensor, tallies: Tensor, counts: Tensor
) -> None:
    """Mark all rows of a batch, and count those of each table.

    Shapes: as `claim_rows`, but counts [T]; bits, tallies and counts have zeros.
    """
    torch.ops.shardwise.mark_rows(ids, offsets, features, row_borders, bits, tallies, counts)


def _mark_rows(
    ids: Tensor, offsets: Tensor, features: Tensor, row_borders: Tensor, bits: Tensor, tallies: Tensor, counts: Tensor
) -> None:
    if not ids.shape[0]:
        return
    if not runs_kernel(ids):
        mark_rows_ref(ids, offsets, features, row_borders, bits, tallies, counts)
        return
    n, count, tables = ids.shape[0], features.shape[0], row_borders.shape[0] - 1
    _mark_rows_kernel[(triton.cdiv(n, _BLOCK),)](
        ids.contiguous(), offsets.contiguous(), features, row_borders, bits, tallies, counts, n, count,
        (offsets.shape[0] - 1) // max(count, 1), tables, tables.bit_length() + 1, count.bit_length() + 1,
        chunk_words(bits.shape[0]), _BLOCK, max(_TABLES, next_power_of_2(tables)), FIELDS, ROWS, FIRST_ROW,
        num_warps=_WARPS,
    )  # fmt: skip


register(
    "mark_rows(Tensor ids, Tensor offsets, Tensor features, Tensor row_borders, Tensor(a!) bits, Tensor(b!) tallies,"
    " Tensor(c!) counts) -> ()",
    _mark_rows,
    lambda ids, offsets, features, row_borders, bits, tallies, counts: None,
)


def list_rows_ref(bits: Tensor, tallies: Tensor, capacity: int) -> Tensor:
    """The bits of words that have some."""
    words = bits.nonzero().squeeze(1)
    here = (bits[words, None].long() >> torch.arange(32, device=bits.device)) & 1
    rows = ((words[:, None] << 5) + torch.arange(32, device=bits.device))[here > 0][:capacity]
    bits.zero_()
    return torch.cat([rows, rows.new_full((capacity - rows.shape[0],), -1)])


@triton.jit
def _ones(x):  # type: ignore[no-untyped-def]
    """How many bits of uint32 are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["W", "chunks", "capacity"], do_not_specialize_on_alignment=["tallies"])
def _list_rows_kernel(  # type: ignore[no-untyped-def]
    bits,
    tallies,
    rows,
    W,
    chunks,
    capacity,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TALLIES: tl.constexpr,
):
    c = tl.program_id(0)
    before = tl.zeros((TALLIES,), tl.int64)
    every = tl.zeros((TALLIES,), tl.int64)
    for begin in range(0, chunks, TALLIES):
        other = begin + tl.arange(0, TALLIES)
        tally = tl.load(tallies + other, mask=other < chunks, other=0)
        every += tally
        before += tl.where(other < c, tally, 0)
    at = tl.sum(before, 0)
    total = tl.sum(every, 0)
    here = tl.load(tallies + c)
    if here > 0:
        first = c.to(tl.int64) * CHUNK
        for begin in range(0, CHUNK, BLOCK):
            w = first + begin + tl.arange(0, BLOCK)
            word = tl.load(bits + w, mask=w < W, other=0).to(tl.uint32, bitcast=True)
            count = _ones(word)
            found = tl.sum(count, 0)
            if found > 0:
                place = at + tl.cumsum(count, 0) - count
                tl.store(bits + w, tl.zeros((BLOCK,), tl.int32), mask=(w < W) & (count > 0))
                # the lowest bit of each word at a time
                for _ in range(0, tl.max(count, 0)):
                    one = word != 0
                    rest = word & (word - 1)
                    row = w * 32 + _ones((word ^ rest) - 1)
                    tl.store(rows + place, row, mask=one & (place < capacity))
                    word = rest
                    place += one.to(tl.int64)
                at += found
    # what is behind the last row, in equal parts
    part = tl.cdiv(capacity, chunks)
    for begin in range(c * part, tl.minimum((c + 1) * part, capacity), BLOCK):
        p = begin + tl.arange(0, BLOCK)
        live = (p >= total) & (p < capacity) & (p < (c + 1) * part)
        tl.store(rows + p, tl.full((BLOCK,), -1, tl.int64), mask=live)


def list_rows(bits: Tensor, tallies: Tensor, capacity: int) -> Tensor:
    """The rows [capacity] that are marked, ascending, -1 behind them; their bits are cleared.

    Shapes: bits [W] int32, tallies [C] int64, the bits of each chunk.
    """
    return torch.ops.shardwise.list_rows(bits, tallies, capacity)  # type: ignore[no-any-return]


def _list_rows(bits: Tensor, tallies: Tensor, capacity: int) -> Tensor:
    if not runs_kernel(bits):
        return list_rows_ref(bits, tallies, capacity)
    rows, chunks = torch.empty(capacity, dtype=torch.int64, device=bits.device), tallies.shape[0]
    if not chunks:
        return rows.fill_(-1)
    _list_rows_kernel[(chunks,)](
        bits, tallies, rows, bits.shape[0], chunks, capacity, chunk_words(bits.shape[0]), _WORDS, _TALLIES
    )
    return rows


register(
    "list_rows(Tensor(a!) bits, Tensor tallies, SymInt capacity) -> Tensor",
    _list_rows,
    lambda bits, tallies, capacity: tallies.new_empty(capacity),
)
