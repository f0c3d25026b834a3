"""The transposed index of a batch on a GPU, in few launches: what each touched row adds up, level by level.

Shapes: I [N] ids, O [F*B + 1] bag offsets, P [N] per-id weights, FT [F, 8] features (features.py); K levels (`levels`);
C_k [5, n_k + 1] chunks of a level, n_k = N // 32**k + 1. What a chunk is, and the order of addition, stands in
transpose.py: chunk c of level 0 is the ids from C_0[START, c] to C_0[START, c + 1] in the order of their rows, and of
the next level partial sums of the one before. Nothing here waits for the device.

Launches: `row_keys`, a stable sort, and for up to 2048 ids one program that does all the rest. For more ids blocks mark
what begins at each of theirs and count it, one launch adds the counts of the blocks before up, and blocks write chunks.
torch's sort of up to 4096 keys is 4 launches (numbers from 0, written out, a copy of the keys, one radix sort in a
block), of more int32 keys 7 (numbers, a histogram, its sums, a pass for every 8 bits) and of int64 keys 11.
Bytes moved, beside those of `row_keys` and about 96 N for the sort: 40 N and a sector for each id's source, and 32 for
each chunk.
"""

# kernels have their constants annotated, a parameter a line, with what is no type without triton
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    launch_options,
    tl,
    triton,
)
from ..features import (
    COLUMN,
    MEAN,
    Lookup,
    batch_size,
    locate_ids,
)
from ..memory import require_sortable
from ..transpose import (
    CHUNK,
    Chunks,
    chunks_of,
    transpose_index,
)
from .row_keys import block_of_ids, index_type, lower_bound, row_keys

# rows of the chunks of a level
START = 0  # first position of the chunk; the next chunk's is its end
ROW = 1  # row number of the chunk
SLOT = 2  # where a chunk of a longer run leaves its partial sum; -1 if the chunk is its whole run
HASH = 3  # where the row lies in its whole table (`features.origin_of`), by which rows are rounded
SOURCE = 4  # of level 0: first element of the gradient row of the chunk's first id; of the levels above nothing
CHUNK_FIELDS = 5

# partial sums of one row that one program adds up, two levels at once: CHUNK * CHUNK at most
TAIL = 128

# up to so many ids one program does alone, a part after the other; ids of a part, of few ids and of more
ALONE = 256 if INTERPRETED else 2048
_PARTS = (64, 128) if INTERPRETED else (256, 1024)


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
    room: Tensor  # of all levels' chunks

    def tensors(self) -> list[Tensor]:
        """The tensors that `of_tensors` takes, in its order."""
        return [self.room, self.totals, self.source, *([] if self.scale is None else [self.scale])]

    @staticmethod
    def of_tensors(tensors: Sequence[Tensor]) -> RowChunks:
        """The chunks of a batch of as many ids as there are sources, from `tensors`."""
        room, totals, source, *scale = tensors
        return RowChunks(_cut(room, source.shape[0]), totals, source, scale[0] if scale else None, room)


def levels(ids: int) -> int:
    """Levels that add up a run of so many positions: chunks of CHUNK, and at last all of up to TAIL partial sums."""
    count, left = 1, -(-ids // CHUNK)
    if left <= 1:
        return 1
    while left > TAIL:
        count, left = count + 1, -(-left // CHUNK)
    return count + 1


def row_chunks_ref(lookup: Lookup, columns: int) -> tuple[list[Chunks], Tensor, Tensor | None]:
    """Chunks of each level, and source and scale of each id in row order; the last level's chunks are whole runs."""
    indices, offsets, per_id_weights, features, segments, pooling, *_ = lookup
    index, batch = transpose_index(indices, offsets, features, segments), batch_size(offsets, features.shape[0])
    _, _, valid = locate_ids(indices, offsets, features)
    source, scale = index.position * columns, None
    if pooling != "sequence":
        source = (index.bag % max(batch, 1)) * columns + features[index.bag // max(batch, 1), COLUMN]
    if per_id_weights is not None:
        scale = per_id_weights[index.position].float()
    if pooling == "mean":
        averaged = features[index.bag // max(batch, 1), MEAN] != 0  # [N]
        lengths = torch.where(averaged, offsets.diff()[index.bag], 1).clamp(min=1).float()  # [N]
        scale = 1 / lengths if scale is None else scale / lengths
    keys, chunks = index.keys, []
    for level in range(levels(indices.shape[0])):
        chunk = CHUNK if level == 0 or level < levels(indices.shape[0]) - 1 else CHUNK * CHUNK
        chunks.append(chunks_of(keys, 0, segments[-1].end_row, chunk))
        keys = chunks[-1].next_keys
    used = int(valid.sum())
    return chunks, source[:used], None if scale is None else scale[:used]


@triton.jit
def _places(keys, i, key, begin, N, end_row, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the run of each position of the block begins: within it, or for the block's first run before it."""
    opening = tl.load(keys + begin)
    again = (opening < end_row) & (opening == tl.load(keys + begin - 1, mask=begin > 0, other=-1))
    before = lower_bound(keys, begin * 0, tl.where(again, begin, 0), opening)
    first = lower_bound(keys, i * 0 + begin, tl.minimum(N - begin, BLOCK), key)
    return tl.where(again & (first == begin), before, first)


@triton.jit
def _heads(  # type: ignore[no-untyped-def]
    keys,
    i,
    key,
    first,
    live,
    N,
    LEVEL: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Which positions begin a chunk of the level, and of these one of several of its row; `live` are a level down."""
    if LEVEL == LEVELS - 1:
        # the last level adds up all that is left of a run
        return live & (i == first), live & (i != i)
    span = CHUNK ** (LEVEL + 1)
    head = live & ((i - first) % span == 0)
    return head, head & (key == tl.load(keys + first + span, mask=head & (first + span < N), other=-1))


@triton.jit
def _store_gradients(  # type: ignore[no-untyped-def]
    source,
    scale,
    position,
    i,
    valid,
    from_source,
    from_scale,
    HAS_SCALE: tl.constexpr,
):
    """Where the gradient of each id is, and its factor, in row order; the former is returned too."""
    p = tl.load(position + i, mask=valid, other=0)
    at = tl.load(from_source + p, mask=valid, other=0)
    tl.store(source + i, at, mask=valid)
    if HAS_SCALE:
        tl.store(scale + i, tl.load(from_scale + p, mask=valid, other=0.0), mask=valid)
    return at


@triton.jit
def _store_chunks(  # type: ignore[no-untyped-def]
    level,
    stride,
    c,
    head,
    begin,
    key,
    slot,
    at,
    position,
    places,
    i,
    LEVEL: tl.constexpr,
    ROW: tl.constexpr,
    SLOT: tl.constexpr,
    HASH: tl.constexpr,
    SOURCE: tl.constexpr,
    HASHED: tl.constexpr,
):
    """The fields of the chunks c of a level, which begin where `head` says."""
    element: tl.constexpr = level.dtype.element_ty
    level += c
    tl.store(level, begin.to(element), mask=head)
    tl.store(level + ROW * stride, key.to(element), mask=head)
    tl.store(level + SLOT * stride, slot.to(element), mask=head)
    if LEVEL == 0:
        tl.store(level + SOURCE * stride, at.to(element), mask=head)
    if HASHED:
        p = tl.load(position + i, mask=head, other=0)
        tl.store(level + HASH * stride, tl.load(places + p, mask=head, other=0), mask=head)


@triton.jit(do_not_specialize=["N", "end_row", "stride"])
def _mark_kernel(  # type: ignore[no-untyped-def]
    keys,
    position,
    from_source,
    from_scale,
    source,
    scale,
    marks,
    counts,
    N,
    end_row,
    stride,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    begin = block.to(INDEX) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < N, other=end_row)
    valid = key < end_row
    _store_gradients(source, scale, position, i, valid, from_source, from_scale, HAS_SCALE)
    # of a run that is no longer than a chunk the first id begins the only one
    head = valid & (key != tl.load(keys + i - 1, mask=valid & (i > 0), other=-1))  # [BLOCK]
    longer = key == tl.load(keys + i + CHUNK, mask=valid & (i + CHUNK < N), other=-1)
    longer |= key == tl.load(keys + i - CHUNK, mask=valid & (i >= CHUNK), other=-1)
    # three sums at once, each of which may be all of a block
    BITS: tl.constexpr = 10 if BLOCK < 1024 else 20
    WORD: tl.constexpr = tl.int32 if BLOCK < 1024 else tl.int64
    sums = tl.sum(valid.to(WORD) | (head.to(WORD) << BITS) | (longer.to(WORD) << (2 * BITS)), 0)
    heads = (sums >> BITS) & ((1 << BITS) - 1)  # of level 0
    bits = head.to(tl.int32)  # two for each level: head, and live
    counts += block
    tl.store(counts + (2 * LEVELS - 1) * stride, sums & ((1 << BITS) - 1))
    if (sums >> (2 * BITS)) == 0:
        tl.store(counts, heads)
        for j in tl.static_range(1, 2 * LEVELS - 1):
            tl.store(counts + j * stride, 0)
    else:
        first = _places(keys, i, key, begin, N, end_row, BLOCK)
        live = valid
        bits = bits * 0
        for k in tl.static_range(LEVELS):
            head, live = _heads(keys, i, key, first, live, N, k, LEVELS, CHUNK)
            bits |= (head.to(tl.int32) << (2 * k)) | (live.to(tl.int32) << (2 * k + 1))
            both = tl.sum(head.to(tl.int32) | (live.to(tl.int32) << 16), 0)
            tl.store(counts + 2 * k * stride, both & 0xFFFF)
            if k < LEVELS - 1:
                tl.store(counts + (2 * k + 1) * stride, both >> 16)
    tl.store(marks + i, bits.to(marks.dtype.element_ty), mask=i < N)


@triton.jit(do_not_specialize=["blocks", "stride"])
def _block_sums_kernel(counts, blocks, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each row of counts [rows, stride] becomes what the blocks before counted, and at place `blocks` all of them."""
    counts += tl.program_id(0).to(tl.int64) * stride
    b = tl.arange(0, BLOCK)
    count = tl.load(counts + b, mask=b < blocks, other=0)
    total = tl.zeros((), counts.dtype.element_ty)
    for _ in range(0, blocks + 1, BLOCK):
        # asked for before the sums are made, which it does not wait for
        following = tl.load(counts + b + BLOCK, mask=b + BLOCK < blocks, other=0)
        tl.store(counts + b, total + tl.cumsum(count, 0) - count, mask=b <= blocks)
        total += tl.sum(count, 0)
        count = following
        b += BLOCK


@triton.jit(do_not_specialize=["N", "blocks", "stride"])
def _chunk_kernel(  # type: ignore[no-untyped-def]
    keys,
    position,
    places,
    source,
    marks,
    counts,
    chunks,
    totals,
    N,
    blocks,
    stride,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW: tl.constexpr,
    SLOT: tl.constexpr,
    HASH: tl.constexpr,
    SOURCE: tl.constexpr,
    FIELDS: tl.constexpr,
    HASHED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    i = block.to(INDEX) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(marks + i, mask=i < N, other=0).to(tl.int32)
    head = (bits & 1) != 0
    key = tl.load(keys + i, mask=head, other=0)
    at = tl.load(source + i, mask=head, other=0)
    level = chunks
    # of level 0 the chunks are of ids: chunk c begins at one
    begin = i
    above = True
    for k in tl.static_range(LEVELS):
        # how far it is from one field of the level's chunks to the next: one more than there may be
        size = tl.cast(N, tl.int64) // CHUNK**k + 2
        before = counts + 2 * k * stride + block
        if above:
            head = ((bits >> (2 * k)) & 1) != 0
            # heads, and those of them that are one of several of their row: two sums at once
            word = ((bits >> (2 * k)) & 1) | (((bits >> (2 * k + 1)) & 1) << 16)
            earlier = tl.cumsum(word, 0) - word  # [BLOCK]
            c = tl.load(before) + (earlier & 0xFFFF)
            slot = c * 0 - 1
            following = slot
            if k < LEVELS - 1:
                following = tl.load(before + stride) + (earlier >> 16)
                slot = tl.where((word >> 16) != 0, following, -1)
            _store_chunks(
                level, size, c, head, begin, key, slot, at, position, places, i, k, ROW, SLOT, HASH, SOURCE, HASHED
            )
            # of the next level they are of partial sums
            begin = following
        if k == 0 and LEVELS > 1:
            # few blocks have a run of more ids than a chunk
            above = tl.load(before + stride + 1) > tl.load(before + stride)
        if block == blocks - 1:
            # where the last chunk ends
            total = tl.load(counts + 2 * k * stride + blocks)
            end = tl.load(counts + (2 * LEVELS - 1 if k == 0 else 2 * k - 1) * stride + blocks)
            tl.store(level + total, end.to(level.dtype.element_ty))
            tl.store(totals + k, total.to(tl.int64))
        level += FIELDS * size


@triton.jit(do_not_specialize=["N", "end_row", "parts"])
def _chunk_alone_kernel(  # type: ignore[no-untyped-def]
    keys,
    position,
    places,
    from_source,
    from_scale,
    source,
    scale,
    chunks,
    totals,
    N,
    end_row,
    parts,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW: tl.constexpr,
    SLOT: tl.constexpr,
    HASH: tl.constexpr,
    SOURCE: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HASHED: tl.constexpr,
    PARTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_mark_kernel`, `_block_sums_kernel` and `_chunk_kernel` in one program, for few ids."""
    tl.static_assert(BLOCK < 65536)
    zero = tl.full((), 0, tl.int32)
    # what the parts before have: valid ids, and chunks and partial sums of each level
    ids = zero
    before = (zero,) * (2 * LEVELS)
    # one part needs no barrier between it and the next
    for part in range(0, parts if PARTED else 1):
        start = part * BLOCK
        i = start + tl.arange(0, BLOCK)
        key = tl.load(keys + i, mask=i < N, other=end_row)
        live = key < end_row
        ids += tl.sum(live.to(tl.int32), 0)
        at = _store_gradients(source, scale, position, i, live, from_source, from_scale, HAS_SCALE)
        first = _places(keys, i, key, start, N, end_row, BLOCK)
        level = chunks
        begin = i
        after = ()
        for k in tl.static_range(LEVELS):
            size = N // CHUNK**k + 2
            head, live = _heads(keys, i, key, first, live, N, k, LEVELS, CHUNK)
            word = head.to(tl.int32) | (live.to(tl.int32) << 16)
            earlier = tl.cumsum(word, 0) - word
            c = before[2 * k] + (earlier & 0xFFFF)
            following = before[2 * k + 1] + (earlier >> 16)
            _store_chunks(
                level, size, c, head, begin, key, tl.where(live, following, -1), at, position, places, i, k,
                ROW, SLOT, HASH, SOURCE, HASHED,
            )  # fmt: skip
            begin = following
            both = tl.sum(word, 0)
            after = after + (before[2 * k] + (both & 0xFFFF), before[2 * k + 1] + (both >> 16))  # type: ignore[assignment]
            level += FIELDS * size
        before = after
    level = chunks
    for k in tl.static_range(LEVELS):
        end = ids if k == 0 else before[2 * k - 1]
        tl.store(level + before[2 * k], end.to(level.dtype.element_ty))  # pyright: ignore[reportAttributeAccessIssue]
        tl.store(totals + k, before[2 * k].to(tl.int64))
        level += FIELDS * (N // CHUNK**k + 2)


def row_chunks(
    lookup: Lookup,
    columns: int,
    guard: Tensor | None,
    step: Tensor | None,
    *,
    hashed: bool = False,
) -> RowChunks:
    """Sort the ids of a batch by row and cut each row's into chunks; a step is counted unless the guard has a fault.

    Shapes: gradient rows begin `columns` elements after one another; guard [3], step [1] int64, or no step is counted.
    Where a row lies in its whole table is left with its chunks if `hashed`.
    """
    indices, segments = lookup.indices, lookup.segments
    require_sortable("the update of a lookup", "ids", indices)
    n, device, end_row = indices.shape[0], indices.device, segments[-1].end_row if segments else 0
    by_id = row_keys(lookup, columns, guard, step, hashed=hashed)
    from_source, from_scale = by_id.source, by_id.scale
    places, scaled = by_id.source if by_id.places is None else by_id.places, from_scale is not None
    depth, index = levels(n), index_type(n)
    room = torch.empty(room_of(n), dtype=torch.int64, device=device)
    totals = torch.empty(depth, dtype=torch.int64, device=device)
    source = torch.empty_like(from_source)
    scale = None if from_scale is None else torch.empty_like(from_scale)
    made = RowChunks(_cut(room, n), totals, source, scale, room)
    if n == 0:
        return made
    keys, position = torch.sort(by_id.keys, stable=True)
    gather = (from_source, source if from_scale is None else from_scale, source, source if scale is None else scale)
    fields = (depth, CHUNK, ROW, SLOT, HASH, SOURCE, CHUNK_FIELDS)
    if n <= ALONE:
        parted = n > _PARTS[0]
        part = _PARTS[parted]
        _chunk_alone_kernel[(1,)](
            keys, position, places, *gather, room, totals, n, end_row, triton.cdiv(n, part),
            *fields, scaled, hashed, parted, part, **launch_options(part // 32, 64),
        )  # fmt: skip
        return made
    block, warps = block_of_ids()
    blocks = triton.cdiv(n, block)
    # rows of counts begin on 128 bytes, and have one more place for what all blocks counted
    stride = (blocks // 32 + 1) * 32
    marks = torch.empty(n, dtype=torch.int16, device=device)
    counts = torch.empty(2 * depth * stride, dtype=torch.int32 if index == tl.int32 else torch.int64, device=device)
    _mark_kernel[(blocks,)](
        keys, position, *gather, marks, counts, n, end_row, stride,
        depth, CHUNK, scaled, index, block, num_warps=warps,
    )  # fmt: skip
    width = _PARTS[blocks > _PARTS[0]]
    _block_sums_kernel[(2 * depth,)](counts, blocks, stride, width, **launch_options(width // 32, 64))
    _chunk_kernel[(blocks,)](
        keys, position, places, source, marks, counts, room, totals, n, blocks, stride,
        *fields, hashed, index, block, **launch_options(warps, 48),
    )  # fmt: skip
    return made


def _sizes(ids: int) -> list[int]:
    """Chunks of each level at most."""
    return [ids // CHUNK**k + 1 for k in range(levels(ids))]


def room_of(ids: int) -> int:
    """Elements of all levels' chunks: each level has one entry more, its end."""
    return CHUNK_FIELDS * sum(size + 1 for size in _sizes(ids))


def _cut(room: Tensor, ids: int) -> list[Level]:
    cut, at = [], 0
    for k, size in enumerate(_sizes(ids)):
        end = at + CHUNK_FIELDS * (size + 1)
        # a run of more positions than a chunk covers has fewer than twice as many chunks as it fills
        cut.append(Level(room[at:end].view(CHUNK_FIELDS, size + 1), size, 2 * ids // CHUNK ** (k + 1) + 1))
        at = end
    return cut
