"""Sort keys of an update: each id's row of the flat buffer, and where the gradient of the id will lie.

Shapes: I [N] ids, O [F*B + 1] bag offsets, P [N] per-id weights, FT [F, 8] features (features.py). An id that is in no
bag, or outside its table, gets the number of rows as its key, which is behind all others. One launch, no wait.
Bytes moved: N * (itemsize(I) + 12), 4 N more where gradients are scaled and 16 N where rows are hashed; and a search of
an id's bag among the offsets, of which neighbours share the most.
"""

# kernels have their constants annotated, a parameter a line, with what is no type without triton
# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import configs
from .._op import tl, triton
from ..features import (
    COLUMN,
    FIELDS,
    FIRST_ROW,
    MEAN,
    ORIGIN,
    ROWS,
    Lookup,
)
from ..lookup.bounds import OK
from ..persistent_grid import persistent_programs
from ..transpose import key_dtype

# An id a thread: lanes beside one another read and write words beside one another, and a sector is used whole.
BLOCK = 256
# blocks of a program at most, where there are blocks for all of a device
_PARTS = 4


class RowKeys(NamedTuple):
    """For each id its row's number, first element of its gradient row, factor and place in its whole table."""

    keys: Tensor  # [N] int32 or int64
    source: Tensor  # [N] int64
    scale: Tensor | None  # [N] fp32
    places: Tensor | None  # [N] int64


@triton.jit
def lower_bound(numbers, low, n, wanted):  # type: ignore[no-untyped-def]
    """Place of the first of `n` ascending numbers, from place `low` on, that is no less than the wanted one."""
    # all halve alike, so that no range has to be kept for each; what is read lies within it whatever the numbers are
    while n > 0:
        half = (n + 1) >> 1
        low = tl.where(tl.load(numbers + (low + half - 1)) < wanted, low + half, low)
        n = n >> 1
    return low


@triton.jit
def _bags_between(O, first, last, bags):  # type: ignore[no-untyped-def]
    """The bag of position `first`, and how many bags later that of `last` is at most."""
    low = lower_bound(O + 1, first * 0, bags, first + 1)
    width = tl.minimum(first * 0 + 16, bags - low)
    while (low + width < bags) & (tl.load(O + tl.minimum(low + width + 1, bags)) <= last):
        width = tl.minimum(width * 4, bags - low)
    return low, width


@triton.jit
def _count_step(guard, step, NONE: tl.constexpr):  # type: ignore[no-untyped-def]
    # a bad batch is no step
    clean = (tl.load(guard) == NONE) & (tl.load(guard + 1) == NONE) & (tl.load(guard + 2) == NONE)
    count = tl.load(step) + clean.to(tl.int64)
    # all warps read, one writes
    tl.debug_barrier()
    tl.store(step, count)


@triton.jit
def _count_step_kernel(guard, step, NONE: tl.constexpr):  # type: ignore[no-untyped-def]
    _count_step(guard, step, NONE)


@triton.jit(do_not_specialize=["N", "B", "bags", "end_row", "columns", "parts"])
def _row_keys_kernel(  # type: ignore[no-untyped-def]
    I,
    O,
    P,
    FT,
    ids,
    guard,
    step,
    keys,
    source,
    scale,
    places,
    N,
    B,
    bags,
    end_row,
    columns,
    parts,
    NONE: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMN: tl.constexpr,
    MEAN: tl.constexpr,
    ORIGIN: tl.constexpr,
    FIELDS: tl.constexpr,
    COUNTS: tl.constexpr,
    POOLED: tl.constexpr,
    HAS_P: tl.constexpr,
    AVERAGED: tl.constexpr,
    HASHED: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if COUNTS:  # noqa: SIM102
        # one is known to the compiler, the other to the program
        if tl.program_id(0) == 0:
            _count_step(guard, step, NONE)
    start = tl.program_id(0).to(INDEX) * (parts * BLOCK)
    low = start * 0
    width = low + bags
    if parts > 1:
        # searched for once, and from here on for each id among few bags
        low, width = _bags_between(O, start, start + (parts * BLOCK - 1), bags)
    for part in range(0, parts):
        position = start + part * BLOCK + tl.arange(0, BLOCK)
        here = position < N
        # the first bag that ends behind the position
        bag = lower_bound(O + 1, position * 0 + low, width, position + 1)
        live = here & (bag < bags)
        f = bag // B
        feature = FT + f * FIELDS
        id = tl.load(I + position, mask=live, other=-1).to(tl.int64)
        good = live & (id >= 0) & (id < tl.load(feature + ROWS, mask=live, other=0))
        key = tl.where(good, tl.load(feature + FIRST_ROW, mask=good, other=0) + id, end_row)
        tl.store(keys + position, key.to(keys.dtype.element_ty), mask=here)
        at = ((bag - f * B) if POOLED else position).to(source.dtype.element_ty) * columns
        if POOLED:
            at += tl.load(feature + COLUMN, mask=good, other=0).to(source.dtype.element_ty)
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
                first = tl.load(O + bag, mask=averaged, other=0).to(tl.int64)
                length = tl.load(O + bag + 1, mask=averaged, other=1).to(tl.int64) - first
                by = tl.div_rn(by, tl.maximum(length, 1).to(tl.float32))
            tl.store(scale + position, by, mask=here)


def row_keys(
    lookup: Lookup,
    columns: int,
    guard: Tensor | None,
    step: Tensor | None,
    *,
    hashed: bool = False,
) -> RowKeys:
    """Keys, sources and factors of a batch's ids; arguments as of `row_chunks.row_chunks`.

    A step is counted if there are a guard and a step, unless the guard has a fault.
    """
    indices, offsets, per_id_weights, features, segments, pooling, _, ids = lookup
    n, device, count = indices.shape[0], indices.device, features.shape[0]
    indices, offsets = indices.contiguous(), offsets.contiguous()
    bags, end_row = offsets.shape[0] - 1, segments[-1].end_row if segments else 0
    scaled = per_id_weights is not None or pooling == "mean"
    keys = torch.empty(n, dtype=key_dtype(end_row), device=device)
    source = torch.empty(n, dtype=torch.int64, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device) if scaled else None
    places = torch.empty(n, dtype=torch.int64, device=device) if hashed else None
    counts = guard is not None and step is not None
    block, warps = block_of_ids()
    parts = max(1, min(_PARTS, n // (block * persistent_programs(device))))
    _row_keys_kernel[(max(1, triton.cdiv(n, block * parts)),)](
        indices, offsets, indices if per_id_weights is None else per_id_weights.contiguous(), features,
        indices if ids is None else ids.contiguous(), guard if counts else source, step if counts else source,
        keys, source, source if scale is None else scale, source if places is None else places,
        n, max(bags // max(count, 1), 1), bags, end_row, columns, parts,
        OK, FIRST_ROW, ROWS, COLUMN, MEAN, ORIGIN, FIELDS, counts, pooling != "sequence", per_id_weights is not None,
        pooling == "mean", hashed, index_type(max(n, bags)), block, num_warps=warps,
    )  # fmt: skip
    return RowKeys(keys, source, scale, places)


def block_of_ids() -> tuple[int, int]:
    """Ids of a block and warps of a program that has one: an id a thread, but for what an A/B puts in their place."""
    block = configs.setting("index.block", BLOCK)
    return block, configs.setting("index.warps", block // 32)


def index_type(count: int) -> Any:
    """The narrowest type for the numbers of so many things, and of a block of them more."""
    return tl.int32 if count < 2**30 else tl.int64


def count_step(guard: Tensor, step: Tensor) -> None:
    """Count a step, unless the guard has a fault."""
    _count_step_kernel[(1,)](guard, step, OK, num_warps=1)
