"""The kernel of an update: rows' gradients are added up in chunks, and the optimizer's rule is applied to whole runs.

Shapes: W, states and G as in update.py, chunks [5, n + 1] of a level (row_chunks.py), partial [slots, D] fp32.

A program goes through tiles of C chunks, and what it waits for is memory. A tile waits for its entries of the table,
then for the sources of all ids but the first, then for gradients, W and states, which come together: a chunk of one id
waits twice, one of two to four ids three times.
"""

# constexpr is no type, and a constexpr decides what is bound
# pyright: reportInvalidTypeForm=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from .._op import multiple, tl, triton
from .rounding import rounded_stochastically, salt_in_kernel


@triton.jit
def _gradient_rows(  # type: ignore[no-untyped-def]
    grad,
    src,
    scale,
    at,
    d,
    live,
    in_row,
    ALIGN: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Gradient rows [C, D] of the ids at some places of the index, times the ids' factors."""
    begin = tl.load(src + at, mask=live, other=0)
    return _scaled_rows(grad, begin, scale, at, d, live, in_row, ALIGN, HAS_SCALE)


@triton.jit
def _scaled_rows(  # type: ignore[no-untyped-def]
    grad,
    begin,
    scale,
    at,
    d,
    live,
    in_row,
    ALIGN: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    # not tl.multiple_of, which AMD's compiler forgets of what is loaded (triton 3.6.0)
    begin = multiple(begin, ALIGN)
    row = tl.load(grad + begin[:, None] + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0).to(tl.float32)
    if HAS_SCALE:
        row = row * tl.load(scale + at, mask=live, other=0.0)[:, None]
    return row


@triton.jit
def _sums(partial, at, D, d, live, in_row):  # type: ignore[no-untyped-def]
    return tl.load(partial + (at * D)[:, None] + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0)


@triton.jit
def _leave_sum(partial, slot, g, D, d, live, in_row):  # type: ignore[no-untyped-def]
    """Store the sums of chunks of longer runs, for the next level."""
    left = (live & (slot >= 0))[:, None] & in_row[None, :]
    tl.store(partial + (slot * D)[:, None] + d[None, :], g, mask=left)


@triton.jit
def _lower_bound(sorted_numbers, n, wanted, steps):  # type: ignore[no-untyped-def]
    """How many of n ascending numbers are less than the wanted one."""
    low = n * 0
    high = n
    for _ in range(0, steps):
        middle = low + (high - low) // 2
        less = tl.load(sorted_numbers + middle, mask=low < high, other=wanted) < wanted
        high = tl.where(less, high, middle)
        low = tl.where(less, middle + 1, low)
    return low


@triton.jit
def _chunk_entries(  # type: ignore[no-untyped-def]
    chunks,
    c,
    n,
    stride,
    ROW: tl.constexpr,
    SLOT: tl.constexpr,
    SOURCE: tl.constexpr,
    UPPER: tl.constexpr,
):
    """Of chunks c: where they begin, how long they are, their rows, slots, and where their first gradients are."""
    live = c < n
    begin = tl.load(chunks + c, mask=live, other=0)
    length = (tl.load(chunks + c + 1, mask=live, other=0) - begin).to(tl.int32)
    row = tl.load(chunks + ROW * stride + c, mask=live, other=0)
    slot = tl.load(chunks + SLOT * stride + c, mask=live, other=-1)
    source = begin
    if not UPPER:
        source = tl.load(chunks + SOURCE * stride + c, mask=live, other=0)
    return begin, length, row, slot, source


@triton.jit
def _ask_ahead(rows, live, nowhere, D, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bring rows that begin at some addresses [C] to the second-level cache, `nowhere` for others: NVIDIA only."""
    SECTOR: tl.constexpr = 256 // rows.dtype.element_ty.primitive_bitwidth
    first = tl.arange(0, (BLOCK_D + SECTOR - 1) // SECTOR) * SECTOR
    # in place of what is not to be asked for, the row's first element again, or the first row's
    near = rows[:, None] + tl.where(first < D, first, 0)[None, :]
    near = tl.where(live[:, None], near, nowhere)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [near.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


# programs is an argument because a compiler spills tl.num_programs, which it cannot read again, and not an argument
@triton.jit(
    do_not_specialize=["low", "high", "stride", "steps", "programs"],
    # a level's table begins where that of the one before ends
    do_not_specialize_on_alignment=["chunks", "n_chunks"],
)
def _update_kernel(  # type: ignore[no-untyped-def]
    W,
    states,
    partial,
    chunks,
    n_chunks,
    src,
    scale,
    grad,
    numbers,
    seed,
    step,
    guard,
    low,
    high,
    stride,
    steps,
    programs,
    D,
    NONE: tl.constexpr,
    RULE: tl.constexpr,
    KINDS: tl.constexpr,
    NUMBERS: tl.constexpr,
    TAKES_ROW: tl.constexpr,
    DECAY: tl.constexpr,
    ROUNDS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    UPPER: tl.constexpr,
    ONE_SEGMENT: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW: tl.constexpr,
    SLOT: tl.constexpr,
    HASH: tl.constexpr,
    SOURCE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    SRC_ALIGN: tl.constexpr,
    FILLED: tl.constexpr,
    TAIL: tl.constexpr,
    NEXT: tl.constexpr,
    PREFETCH: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):
    # a bad batch changes no row: it has no chunks
    clean = (tl.load(guard) == NONE) & (tl.load(guard + 1) == NONE) & (tl.load(guard + 2) == NONE)
    n = tl.where(clean, tl.load(n_chunks), 0).to(tl.int32)
    first = n * 0
    stride = tl.cast(stride, tl.int64)
    if not ONE_SEGMENT:
        # the segment's chunks lie between those of narrower and of wider tables
        first = _lower_bound(chunks + ROW * stride, n, low, steps)
        n = _lower_bound(chunks + ROW * stride, n, high, steps)
    D = multiple(D, ALIGN)
    d = tl.arange(0, BLOCK_D)
    # a row that fills the tile needs no mask, and the registers of none
    in_row = tl.full((BLOCK_D,), True, tl.int1) if FILLED else d < D
    if CONTIGUOUS:
        # a program's tiles lie side by side
        share = tl.cdiv(tl.cdiv(n - first, BLOCK_C), programs) * BLOCK_C
        first += tl.program_id(0) * share
        n = tl.minimum(n, first + share)
        ahead = BLOCK_C
    else:
        first += tl.program_id(0) * BLOCK_C
        ahead = programs * BLOCK_C
    if NEXT:
        coming = _chunk_entries(chunks, first + tl.arange(0, BLOCK_C), n, stride, ROW, SLOT, SOURCE, UPPER)
    for c0 in range(first, n, ahead):
        c = c0 + tl.arange(0, BLOCK_C)
        live = c < n
        # all that the table says of a chunk is asked for at once: each wait of this loop is one for memory
        if NEXT:
            begin, length, row, slot, source = coming
            coming = _chunk_entries(chunks, c + ahead, n, stride, ROW, SLOT, SOURCE, UPPER)
        else:
            begin, length, row, slot, source = _chunk_entries(chunks, c, n, stride, ROW, SLOT, SOURCE, UPPER)
        longest = tl.max(length, 0)
        whole = live & (slot < 0)
        if PREFETCH:
            begins = (row - low) * D
            _ask_ahead(W + begins, whole, W, D, BLOCK_D)
            for k in tl.static_range(len(KINDS)):
                if KINDS[k] == "row":
                    _ask_ahead(states[k] + row, whole, states[k], 1, 1)
                else:
                    _ask_ahead(states[k] + begins, whole, states[k], D, BLOCK_D)
        g = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
        if UPPER:
            # partial sums lie one after another; those of CHUNK are added before they are added to what was before
            for j in range(0, longest, CHUNK):
                part = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
                for i in range(j, tl.minimum(j + CHUNK, longest), 4):
                    g0 = _sums(grad, begin + i, D, d, i < length, in_row)
                    g1 = _sums(grad, begin + i + 1, D, d, i + 1 < length, in_row)
                    g2 = _sums(grad, begin + i + 2, D, d, i + 2 < length, in_row)
                    g3 = _sums(grad, begin + i + 3, D, d, i + 3 < length, in_row)
                    part = (((part + g0) + g1) + g2) + g3
                g = g + part
        else:
            # all, or all but the last four, which are added below
            for i in range(0, longest - 4 if TAIL else longest, 4):
                g0 = _gradient_rows(grad, src, scale, begin + i, d, i < length, in_row, SRC_ALIGN, HAS_SCALE)
                g1 = _gradient_rows(grad, src, scale, begin + i + 1, d, i + 1 < length, in_row, SRC_ALIGN, HAS_SCALE)
                g2 = _gradient_rows(grad, src, scale, begin + i + 2, d, i + 2 < length, in_row, SRC_ALIGN, HAS_SCALE)
                g3 = _gradient_rows(grad, src, scale, begin + i + 3, d, i + 3 < length, in_row, SRC_ALIGN, HAS_SCALE)
                g = (((g + g0) + g1) + g2) + g3
        if TAIL:
            i = (longest - 1) // 4 * 4
            # of a short run the table has the first source, so that nothing else is waited for
            later = tl.load(src + begin + i, mask=(i > 0) & (i < length), other=0)
            source = tl.where(i > 0, later, source)
            g0 = _scaled_rows(grad, source, scale, begin + i, d, i < length, in_row, SRC_ALIGN, HAS_SCALE)

        if not TAIL:
            # read again: no register keeps them while wide rows are added up
            row = tl.load(chunks + ROW * stride + c, mask=live, other=0)
            slot = tl.load(chunks + SLOT * stride + c, mask=live, other=-1)
            whole = live & (slot < 0)
            _leave_sum(partial, slot, g, D, d, live, in_row)

        # asked for beside the last gradient rows: a compiler moves a load down to its first use, past any loop, and
        # below there is none. For both, wide rows have too few registers
        at = (((row - low) * D)[:, None]) + d[None, :]
        mask = whole[:, None] & in_row[None, :]
        w = tl.load(W + at, mask=mask, other=0.0).to(tl.float32)
        kept = ()
        for k in tl.static_range(len(KINDS)):
            if KINDS[k] == "row":
                kept += (tl.load(states[k] + row[:, None], mask=whole[:, None], other=0.0),)  # type: ignore[assignment]
            else:
                kept += (tl.load(states[k] + at, mask=mask, other=0.0),)  # type: ignore[assignment]
        given = ()
        for k in tl.static_range(NUMBERS):
            given += (tl.load(numbers + k).to(tl.float32),)  # type: ignore[assignment]
        if ROUNDS:
            place = tl.load(chunks + HASH * stride + c, mask=whole, other=0)
            salt = salt_in_kernel(seed, step)
        if TAIL:
            g1 = _gradient_rows(grad, src, scale, begin + i + 1, d, i + 1 < length, in_row, SRC_ALIGN, HAS_SCALE)
            g2 = _gradient_rows(grad, src, scale, begin + i + 2, d, i + 2 < length, in_row, SRC_ALIGN, HAS_SCALE)
            g3 = _gradient_rows(grad, src, scale, begin + i + 3, d, i + 3 < length, in_row, SRC_ALIGN, HAS_SCALE)
            g = (((g + g0) + g1) + g2) + g3
            _leave_sum(partial, slot, g, D, d, live, in_row)

        if DECAY == 1:
            g = g + given[NUMBERS - 1] * w
        if DECAY == 2:
            w = w - given[NUMBERS - 1] * w
        if TAKES_ROW:
            kept += ((in_row[None, :], D),)  # type: ignore[assignment]
        updated = RULE(w, g, *kept, *given[: NUMBERS - 1])
        w = updated if len(KINDS) == 0 else updated[0]
        for k in tl.static_range(len(KINDS)):
            if KINDS[k] == "row":
                tl.store(states[k] + row[:, None], updated[k + 1], mask=whole[:, None])
            else:
                tl.store(states[k] + at, updated[k + 1], mask=mask)
        if ROUNDS:
            w = rounded_stochastically(w, place, d, salt, ROUNDS == 2)
        tl.store(W + at, w.to(W.dtype.element_ty), mask=mask)
