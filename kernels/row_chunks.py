"""The transposed index of a batch on a GPU, in few launches: what each touched row adds up, level by level.

Shapes: I [N] ids, O [F*B + 1] bag offsets, P [N] per-id weights, FT [F, 8] features (features.py); K levels (`levels`);
C_k [5, n_k + 1] chunks of a level, n_k = N // 32**k + 1. What a chunk is, and the order of addition, is said in
transpose.py: chunk c of level 0 is the ids from C_0[START, c] to C_0[START, c + 1] in the order of their rows, and of
the next level partial sums of the one before. Nothing here waits for the device.

Launches: `_row_keys_kernel`, a stable sort, and `_chunk_kernel`, which up to 2048 ids one program does alone,
and for more ids counts of blocks by `_mark_kernel` precede. torch's sort of up to 4096 keys is 4 launches (numbers
from 0, written out, a copy of the keys, one radix sort in a block), of more int32 keys 7 (numbers, a histogram, its
sums, a pass for every 8 bits) and of int64 keys 11.
Bytes moved, besides about 96 N for the sort: 72 N read and 56 N written, and the searches for an id's bag among the
offsets and for the first of equal keys, of which neighbours share the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._op import INTERPRETED, launch_options, tl, triton
from .bounds import OK
from .features import COLUMN, FIELDS, FIRST_ROW, MEAN, ORIGIN, ROWS, Segment, batch_size, locate_ids
from .memory import require_sortable
from .transpose import CHUNK, Chunks, chunks_of, key_dtype, transpose_index

# rows of the chunks of a level
START = 0  # first position of the chunk; the next chunk's is its end
ROW = 1  # row number of the chunk
SLOT = 2  # where a chunk of a longer run leaves its partial sum; -1 if the chunk is its whole run
HASH = 3  # where the row lies in its whole table (`features.origin_of`), by which rows are rounded
SOURCE = 4  # of level 0: first element of the gradient row of the chunk's first id; of the levels above nothing
CHUNK_FIELDS = 5

# partial sums of one row that one program adds up, two levels at once: CHUNK * CHUNK at most
TAIL = 128

_BLOCK, _WARPS = (256, 1) if INTERPRETED else (1024, 8)
# ids -> warps of the one program that has them all; more would not fit its registers
ONE_PROGRAM = {64: 1, 256: 1} if INTERPRETED else {1024: 8, 2048: 16}


class Level(NamedTuple):
    """Chunks of one level: where they are, and at most how many there are and leave a partial sum."""

    chunks: Tensor  # [5, capacity + 1] int64
    capacity: int
    slots: int


class RowChunks(NamedTuple):
    """Chunks of a batch's rows, level by level, and for each id in row order where its gradient is, and its factor."""

    levels: list[Level]
    totals: Tensor  # [K] chunks of each level
    source: Tensor  # [N] first element of the id's gradient row
    scale: Tensor | None  # [N] fp32


def levels(ids: int) -> int:
    """Levels that add up a run of so many positions: chunks of CHUNK, and at last all of up to TAIL partial sums."""
    count, left = 1, -(-ids // CHUNK)
    if left <= 1:
        return 1
    while left > TAIL:
        count, left = count + 1, -(-left // CHUNK)
    return count + 1


def row_chunks_ref(
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    segments: Sequence[Segment],
    columns: int,
    pooling: str,
) -> tuple[list[Chunks], Tensor, Tensor | None]:
    """Chunks of each level, and source and scale of each id in row order; the last level's chunks are whole runs."""
    index, batch = transpose_index(indices, offsets, features, segments), batch_size(offsets, features.shape[0])
    _, _, valid = locate_ids(indices, offsets, features)
    source, scale = index.position * columns, None
    if pooling != "sequence":
        source = (index.bag % max(batch, 1)) * columns + features[index.bag // max(batch, 1), COLUMN]
    if per_id_weights is not None:
        scale = per_id_weights[index.position].float()
    if pooling == "mean":
        averaged = features[index.bag // max(batch, 1), MEAN] != 0
        lengths = torch.where(averaged, offsets.diff()[index.bag], 1).clamp(min=1).float()
        scale = 1 / lengths if scale is None else scale / lengths
    keys, found = index.keys, []
    for level in range(levels(indices.shape[0])):
        chunk = CHUNK if level == 0 or level < levels(indices.shape[0]) - 1 else CHUNK * CHUNK
        found.append(chunks_of(keys, 0, segments[-1].end_row, chunk))
        keys = found[-1].next_keys
    used = int(valid.sum())
    return found, source[:used], None if scale is None else scale[:used]


@triton.jit(do_not_specialize=["N", "B", "bags", "end_row", "columns", "steps"])
def _row_keys_kernel(I, O, P, FT, ids, guard, step, keys, source, scale, places, N, B, bags, end_row, columns, steps, NONE: tl.constexpr, FIRST_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMN: tl.constexpr, MEAN: tl.constexpr, ORIGIN: tl.constexpr, FIELDS: tl.constexpr, POOLED: tl.constexpr, HAS_P: tl.constexpr, AVERAGED: tl.constexpr, HASHED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    # a bad batch is no step
    clean = (tl.load(guard) == NONE) & (tl.load(guard + 1) == NONE) & (tl.load(guard + 2) == NONE)
    tl.store(step, tl.load(step, mask=tl.program_id(0) == 0, other=0) + clean.to(tl.int64), mask=tl.program_id(0) == 0)

    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < N
    # the first bag that ends behind the position: neighbours look at the same offsets
    bag = position * 0
    high = bag + bags
    for _ in range(0, steps):
        middle = bag + (high - bag) // 2
        inside = here & (bag < high)
        ended = tl.load(O + middle + 1, mask=inside, other=0).to(tl.int64) <= position
        bag = tl.where(inside & ended, middle + 1, bag)
        high = tl.where(inside & (ended == 0), middle, high)
    live = here & (bag < bags)
    f = bag // B
    feature = FT + f * FIELDS
    id = tl.load(I + position, mask=live, other=-1).to(tl.int64)
    good = live & (id >= 0) & (id < tl.load(feature + ROWS, mask=live, other=0))
    key = tl.where(good, tl.load(feature + FIRST_ROW, mask=good, other=0) + id, end_row)
    tl.store(keys + position, key.to(keys.dtype.element_ty), mask=here)
    column = tl.load(feature + COLUMN, mask=good, other=0) if POOLED else 0
    at = ((bag - f * B) if POOLED else position) * columns + column
    tl.store(source + position, at, mask=here)
    if HASHED:
        own = tl.load(ids + position, mask=good, other=0).to(tl.int64)
        tl.store(places + position, own + tl.load(feature + ORIGIN, mask=good, other=0), mask=here)
    if HAS_P or AVERAGED:
        by = tl.full((BLOCK,), 1.0, tl.float32)
        if HAS_P:
            by = tl.load(P + position, mask=good, other=0.0).to(tl.float32)
        if AVERAGED:
            averaged = good & (tl.load(feature + MEAN, mask=good, other=0) != 0)
            begin = tl.load(O + bag, mask=averaged, other=0).to(tl.int64)
            length = tl.load(O + bag + 1, mask=averaged, other=1).to(tl.int64) - begin
            by = tl.div_rn(by, tl.maximum(length, 1).to(tl.float32))
        tl.store(scale + position, by, mask=here)


@triton.jit
def _marks(keys, i, key, N, end_row, steps, LEVELS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What begins at each position: bit 2 k a chunk of level k, bit 2 k + 1 one of several of its row."""
    valid = key < end_row
    again = valid & (key == tl.load(keys + i - 1, mask=valid & (i > 0), other=-1))
    # the first position of the run, found without a neighbouring program
    first = tl.where(again, 0, i)
    high = i
    for _ in range(0, steps):
        middle = first + (high - first) // 2
        inside = first < high
        less = tl.load(keys + middle, mask=inside, other=0) < key
        first = tl.where(inside & less, middle + 1, first)
        high = tl.where(inside & (less == 0), middle, high)
    place = i - first
    bits = tl.zeros(i.shape, tl.int32)
    # runs of more positions than a chunk of the level before covers
    longer = valid
    for k in tl.static_range(LEVELS):
        if k == LEVELS - 1:
            # the last level adds up all that is left of a run
            bits = bits | ((longer & (place == 0)).to(tl.int32) << (2 * k))
        else:
            head = longer & (place % (CHUNK ** (k + 1)) == 0)
            beyond = first + CHUNK ** (k + 1)
            longer = longer & (key == tl.load(keys + beyond, mask=longer & (beyond < N), other=-1))
            bits = bits | (head.to(tl.int32) << (2 * k)) | ((head & longer).to(tl.int32) << (2 * k + 1))
    return bits


@triton.jit
def _gathered(source, scale, position, i, valid, from_source, from_scale, HAS_SCALE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    p = tl.load(position + i, mask=valid, other=0)
    at = tl.load(from_source + p, mask=valid, other=0)
    tl.store(source + i, at, mask=valid)
    if HAS_SCALE:
        tl.store(scale + i, tl.load(from_scale + p, mask=valid, other=0.0), mask=valid)
    return at


@triton.jit(do_not_specialize=["N", "end_row", "steps", "blocks"])
def _mark_kernel(keys, position, from_source, from_scale, source, scale, marks, counts, N, end_row, steps, blocks, LEVELS: tl.constexpr, CHUNK: tl.constexpr, HAS_SCALE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    block = tl.program_id(0)
    i = block.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < N, other=end_row)
    bits = _marks(keys, i, key, N, end_row, steps, LEVELS, CHUNK)
    tl.store(marks + i, bits, mask=i < N)
    valid = key < end_row
    _gathered(source, scale, position, i, valid, from_source, from_scale, HAS_SCALE)
    for j in tl.static_range(2 * LEVELS - 1):
        tl.store(counts + j * blocks + block, tl.sum((bits >> j) & 1, 0))
    tl.store(counts + (2 * LEVELS - 1) * blocks + block, tl.sum(valid.to(tl.int32), 0))


@triton.jit
def _before(counts, block, ALONE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the blocks before this one counted together."""
    total = tl.full((), 0, INDEX)
    if not ALONE:
        for b0 in range(0, block, BLOCK):
            b = b0 + tl.arange(0, BLOCK)
            total += tl.sum(tl.load(counts + b, mask=b < block, other=0).to(INDEX), 0)
    return total


@triton.jit(do_not_specialize=["N", "end_row", "steps", "blocks"])
def _chunk_kernel(keys, position, places, from_source, from_scale, source, scale, marks, counts, chunks, totals, N, end_row, steps, blocks, LEVELS: tl.constexpr, CHUNK: tl.constexpr, ROW: tl.constexpr, SLOT: tl.constexpr, HASH: tl.constexpr, SOURCE: tl.constexpr, FIELDS: tl.constexpr, HAS_SCALE: tl.constexpr, HASHED: tl.constexpr, ALONE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    block = tl.program_id(0)
    i = block.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < N, other=end_row)
    valid = key < end_row
    if ALONE:
        at = _gathered(source, scale, position, i, valid, from_source, from_scale, HAS_SCALE)
        bits = _marks(keys, i, key, N, end_row, steps, LEVELS, CHUNK)
    else:
        bits = tl.load(marks + i, mask=i < N, other=0)
        at = tl.load(source + i, mask=(bits & 1) != 0, other=0)
    # of level 0 the chunks are of ids: chunk c begins at one
    begin = i
    end = _before(counts + (2 * LEVELS - 1) * blocks, block, ALONE, INDEX, BLOCK) + tl.sum(valid.to(tl.int32), 0)
    level = chunks
    for k in tl.static_range(LEVELS):
        # how far it is from one field of the level's chunks to the next: one more than there may be
        stride = tl.cast(N, tl.int64) // CHUNK**k + 2
        head = (bits >> (2 * k)) & 1
        before = _before(counts + 2 * k * blocks, block, ALONE, INDEX, BLOCK)
        c = before + tl.cumsum(head, 0) - head
        total = before + tl.sum(head, 0)
        begins = head != 0
        tl.store(level + c, begin, mask=begins)
        tl.store(level + ROW * stride + c, key.to(tl.int64), mask=begins)
        if k == 0:
            tl.store(level + SOURCE * stride + c, at, mask=begins)
        if HASHED:
            p = tl.load(position + i, mask=begins, other=0).to(INDEX)
            tl.store(level + HASH * stride + c, tl.load(places + p, mask=begins, other=0), mask=begins)
        # what no block comes after knows where the last chunk ends
        tl.store(level + total, end, mask=block == tl.num_programs(0) - 1)
        tl.store(totals + k, total, mask=block == tl.num_programs(0) - 1)
        if k < LEVELS - 1:
            several = (bits >> (2 * k + 1)) & 1
            before = _before(counts + (2 * k + 1) * blocks, block, ALONE, INDEX, BLOCK)
            slot = before + tl.cumsum(several, 0) - several
            tl.store(level + SLOT * stride + c, tl.where(several != 0, slot, -1), mask=begins)
            # of the next level they are of partial sums
            begin = slot
            end = before + tl.sum(several, 0)
        else:
            tl.store(level + SLOT * stride + c, c * 0 - 1, mask=begins)
        level += FIELDS * stride


def row_chunks(
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    segments: Sequence[Segment],
    columns: int,
    pooling: str,
    guard: Tensor,
    step: Tensor,
    *,
    hashed: bool = False,
    ids: Tensor | None = None,
) -> RowChunks:
    """Sort the ids of a batch by row and cut each row's into chunks; a step is counted unless the guard has a fault.

    Shapes: gradient rows begin `columns` elements after one another; guard [3], step [1] int64. Where a row lies in
    its whole table is left with its chunks if `hashed`; `ids` [N] are those whose slots `indices` are, if they are.
    """
    require_sortable("the update of a lookup", "ids", indices)
    n, device, count = indices.shape[0], indices.device, features.shape[0]
    indices, offsets = indices.contiguous(), offsets.contiguous()
    bags, end_row = offsets.shape[0] - 1, segments[-1].end_row if segments else 0
    scaled = per_id_weights is not None or pooling == "mean"
    keys = torch.empty(n, dtype=key_dtype(end_row), device=device)
    from_source = torch.empty(n, dtype=torch.int64, device=device)
    from_scale = torch.empty(n, dtype=torch.float32, device=device) if scaled else None
    places = torch.empty(n, dtype=torch.int64, device=device) if hashed else from_source
    grid = (max(1, triton.cdiv(n, _BLOCK)),)
    _row_keys_kernel[grid](
        indices, offsets, indices if per_id_weights is None else per_id_weights.contiguous(), features,
        indices if ids is None else ids.contiguous(), guard, step,
        keys, from_source, from_source if from_scale is None else from_scale, places,
        n, max(bags // max(count, 1), 1), bags, end_row, columns, bags.bit_length(),
        OK, FIRST_ROW, ROWS, COLUMN, MEAN, ORIGIN, FIELDS, pooling != "sequence", per_id_weights is not None,
        pooling == "mean", hashed, _BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    depth = levels(n)
    sizes = [n // CHUNK**k + 1 for k in range(depth)]
    room = torch.empty(CHUNK_FIELDS * sum(size + 1 for size in sizes), dtype=torch.int64, device=device)
    totals = torch.empty(depth, dtype=torch.int64, device=device)
    source = torch.empty_like(from_source)
    scale = None if from_scale is None else torch.empty_like(from_scale)
    found = RowChunks(_cut(room, sizes, n), totals, source, scale)
    if n == 0:
        return found
    keys, position = torch.sort(keys, stable=True)
    gather = (from_source, source if from_scale is None else from_scale, source, source if scale is None else scale)
    block = next((size for size in ONE_PROGRAM if n <= size), None)
    blocks = 1 if block else triton.cdiv(n, _BLOCK)
    marks, counts, index = position, totals, tl.int32 if n < 2**30 else tl.int64
    if block is None:
        marks = torch.empty(n, dtype=torch.int32, device=device)
        counts = torch.empty(2 * depth * blocks, dtype=torch.int32, device=device)
        _mark_kernel[(blocks,)](
            keys, position, *gather, marks, counts, n, end_row, n.bit_length(), blocks,
            depth, CHUNK, scaled, index, _BLOCK, **launch_options(_WARPS, 128),
        )  # fmt: skip
    _chunk_kernel[(blocks,)](
        keys, position, places, *gather, marks, counts, room, totals, n, end_row, n.bit_length(), blocks,
        depth, CHUNK, ROW, SLOT, HASH, SOURCE, CHUNK_FIELDS, scaled, hashed, block is not None,
        index, block or _BLOCK, **launch_options(_WARPS if block is None else ONE_PROGRAM[block], 128),
    )  # fmt: skip
    return found


def _cut(room: Tensor, sizes: Sequence[int], ids: int) -> list[Level]:
    found, at = [], 0
    for k, size in enumerate(sizes):
        end = at + CHUNK_FIELDS * (size + 1)
        # a run of more positions than a chunk covers has fewer than twice as many chunks as it fills
        found.append(Level(room[at:end].view(CHUNK_FIELDS, size + 1), size, 2 * ids // CHUNK ** (k + 1) + 1))
        at = end
    return found
