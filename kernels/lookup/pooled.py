"""Pooled lookup: gather rows of many tables and add (or average) them per bag, all tables in one launch.

Shapes: W flat tables, I [N] row ids, O [F*B + 1] bag offsets, P [N] per-id weights, FT [F, 8] features (features.py),
Y [B, sum of dims] output, one column block per feature.
Bytes moved: N * D * itemsize(W) (rows) + N * itemsize(I) + (F*B + 1) * itemsize(O) + F*B*D * itemsize(Y), and N * 4
for per-id weights. Rows wider than 1024 bytes are read in blocks of so many, and the ids, offsets and per-id weights
once for each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import configs
from .._op import (
    direct,
    launch_options,
    multiple,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..cpu.lookup import pooled_lookup_cpu
from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    MEAN,
    ORDER,
    ROWS,
    batch_size,
    same_length,
    table_rows,
)
from ..launch_plans import lookup_plan


def pooled_lookup_ref(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Y[b, f] = sum (or mean) over i in bag (f, b) of P[i] * W_f[I[i]], accumulated in fp32. Bad ids count as none."""
    batch = batch_size(offsets, len(dims))
    columns = []
    for f, dim in enumerate(dims):
        rows = int(features[f, ROWS])
        table = table_rows(weights, int(features[f, BASE]), rows, dim)
        bags = offsets[f * batch : (f + 1) * batch + 1].long()
        ids = indices[bags[0] : bags[-1]].long()
        bag = torch.repeat_interleave(torch.arange(batch, device=ids.device), bags.diff())  # [N_f]
        valid = (ids >= 0) & (ids < rows)
        picked = table[ids[valid]].float()  # [valid ids, D]
        if per_id_weights is not None:
            picked = picked * per_id_weights[bags[0] : bags[-1]][valid].float()[:, None]
        pooled = torch.zeros(batch, dim, device=ids.device).index_add_(0, bag[valid], picked)
        if features[f, MEAN]:
            pooled = pooled / bags.diff().clamp(min=1)[:, None]
        columns.append(pooled)
    return torch.cat(columns, dim=1).to(output_dtype)


# of a thread, where rows move by 16 bytes and by less: with fewer, ptxas loads a row where it is added and not while
# others are on their way; with 64 it spills rows of 1023 columns
_REGISTERS, _REGISTERS_OF_NARROW_ROWS = 64, 80


@triton.jit
def _row_ids(I, position, live):  # type: ignore[no-untyped-def]
    return tl.load(I + position, mask=live, other=-1).to(tl.int64)


@triton.jit
def _rows(table, row, D, d, live, in_row):  # type: ignore[no-untyped-def]
    return tl.load(table + (row * D)[:, None] + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _scaled(row, P, position, live, HAS_P: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_P:
        row = row * tl.load(P + position, mask=live, other=0.0).to(tl.float32)[:, None]
    return row


@triton.jit(do_not_specialize=["N", "B", "first"], do_not_specialize_on_alignment=["I", "O", "P"])
def _pooled_lookup_kernel(  # type: ignore[no-untyped-def]
    W,
    I,
    O,
    P,
    FT,
    Y,
    N,
    B,
    y_stride,
    first,
    BASE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    MEAN: tl.constexpr,
    ORDER: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_P: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
):
    f = tl.load(FT + (first + tl.program_id(1)).to(tl.int64) * FIELDS + ORDER)
    feature = FT + f * FIELDS
    rows = tl.load(feature + ROWS)
    D = tl.multiple_of(tl.load(feature + DIM), ALIGN)
    column = tl.multiple_of(tl.load(feature + COLUMN), OUT_ALIGN)
    table = W + tl.multiple_of(tl.load(feature + BASE), ALIGN)
    b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = b < B  # [BLOCK_B]
    begin = tl.load(O + f * B + b, mask=in_batch, other=0).to(tl.int64)
    end = tl.load(O + f * B + b + 1, mask=in_batch, other=0).to(tl.int64)
    # offsets out of order raise through the guard; here they only must not be followed outside I
    length = tl.maximum(tl.minimum(end, N) - tl.maximum(begin, 0), 0).to(tl.int32)
    begin = tl.maximum(begin, 0)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    pooled = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
    # four loads of ids, then four gathers of rows, all in flight before the first sum: ptxas keeps this order where
    # it is given registers for it (`_REGISTERS`), to which perf/compile/checks.py holds it
    for i in range(0, tl.max(length, 0), 4):
        p0 = begin + i
        p1 = begin + i + 1
        p2 = begin + i + 2
        p3 = begin + i + 3
        r0 = _row_ids(I, p0, i < length)  # [BLOCK_B] row ids
        r1 = _row_ids(I, p1, i + 1 < length)
        r2 = _row_ids(I, p2, i + 2 < length)
        r3 = _row_ids(I, p3, i + 3 < length)
        # an id outside the table counts as none; positions past the bag were loaded as -1
        m0 = (r0 >= 0) & (r0 < rows)
        m1 = (r1 >= 0) & (r1 < rows)
        m2 = (r2 >= 0) & (r2 < rows)
        m3 = (r3 >= 0) & (r3 < rows)
        v0 = _rows(table, r0, D, d, m0, in_row)  # [BLOCK_B, BLOCK_D]
        v1 = _rows(table, r1, D, d, m1, in_row)
        v2 = _rows(table, r2, D, d, m2, in_row)
        v3 = _rows(table, r3, D, d, m3, in_row)
        v0 = _scaled(v0, P, p0, m0, HAS_P)
        v1 = _scaled(v1, P, p1, m1, HAS_P)
        v2 = _scaled(v2, P, p2, m2, HAS_P)
        v3 = _scaled(v3, P, p3, m3, HAS_P)
        pooled = (((pooled + v0) + v1) + v2) + v3
    if tl.load(feature + MEAN) != 0:
        pooled = pooled / tl.maximum(length, 1).to(tl.float32)[:, None]
    out = Y + (b * multiple(y_stride, OUT_ALIGN))[:, None] + column + d[None, :]
    tl.store(out, pooled.to(Y.dtype.element_ty), mask=in_batch[:, None] & in_row[None, :])


def pooled_lookup(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    segments: Sequence[int],
    pooling: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Look ids up in many tables and pool them per bag; differentiable in `weights` and `per_id_weights`.

    Shapes: weights flat 1-D (fp32, fp16 or bf16), indices [N], offsets [F*B + 1], per_id_weights [N] or None,
    features [F, 8] from `pack_features`, dims one int per feature, segments from `flatten_segments`; `pooling` is "sum"
    if all features are summed and "mean" if some are averaged (`features` says which).

    Returns:
        [B, sum(dims)] in `output_dtype` (fp32, fp16 or bf16), accumulated in fp32; zeros for an empty bag, averaged or
        not.

    Ids outside a table count as none: run `check_ids` first to raise for them instead.
    """
    if direct(weights, indices, offsets, per_id_weights, features):
        same_length(per_id_weights, indices)
        pooled = pooled_lookup_cpu(weights, indices, offsets, per_id_weights, features, dims)
        return pooled if output_dtype is torch.float32 else pooled.to(output_dtype)
    return torch.ops.shardwise.pooled_lookup(  # type: ignore[no-any-return]
        weights, indices, offsets, per_id_weights, features, list(dims), list(segments), pooling, output_dtype
    )


def _pooled_lookup(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: list[int],
    segments: list[int],
    pooling: str,
    output_dtype: torch.dtype,
) -> Tensor:
    same_length(per_id_weights, indices)
    if not runs_kernel(weights):
        if weights.is_cuda:
            return pooled_lookup_ref(weights, indices, offsets, per_id_weights, features, dims, output_dtype)
        return pooled_lookup_cpu(weights, indices, offsets, per_id_weights, features, dims).to(output_dtype)
    batch, plan = batch_size(offsets, len(dims)), lookup_plan(tuple(dims), weights.itemsize, output_dtype.itemsize)
    out = torch.empty(batch, plan.columns, dtype=output_dtype, device=weights.device)
    if batch == 0:
        return out
    # kernels read ids, offsets and per-id weights one after another
    indices, offsets = indices.contiguous(), offsets.contiguous()
    per_id_weights = None if per_id_weights is None else per_id_weights.contiguous()
    length = configs.length_class(indices.shape[0], offsets.shape[0] - 1)
    aligned = weights.data_ptr() % 16 == 0
    for first, count, width, align, out_align, _ in plan.launches:
        align = align if aligned else 1
        block_b, block_d, warps = configs.gather_tile("pooled_lookup", weights, width, align, length)
        registers = _REGISTERS if align * weights.itemsize == 16 else _REGISTERS_OF_NARROW_ROWS
        registers = configs.setting("lookup.registers", registers)
        grid = (triton.cdiv(batch, block_b), count, triton.cdiv(width, block_d))
        _pooled_lookup_kernel[grid](
            weights, indices, offsets, per_id_weights if per_id_weights is not None else indices, features, out,
            indices.shape[0], batch, plan.columns, first,
            BASE, ROWS, DIM, COLUMN, MEAN, ORDER, FIELDS, per_id_weights is not None,
            block_b, block_d, align, out_align, **launch_options(warps, registers),
        )  # fmt: skip
    return out


def _fake(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: list[int],
    segments: list[int],
    pooling: str,
    output_dtype: torch.dtype,
) -> Tensor:
    return weights.new_empty((offsets.shape[0] - 1) // len(dims), sum(dims), dtype=output_dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, indices, offsets, per_id_weights, features, ctx.dims, ctx.segments, ctx.pooling, _ = inputs
    ctx.save_for_backward(weights, indices, offsets, per_id_weights, features)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, indices, offsets, per_id_weights, features = ctx.saved_tensors
    dense = dense_p = None
    layout = (features, ctx.dims, ctx.segments, ctx.pooling)
    if ctx.needs_input_grad[0]:
        dense = torch.ops.shardwise.lookup_gradient(weights, grad, indices, offsets, per_id_weights, *layout)
    if ctx.needs_input_grad[3]:
        dense_p = torch.ops.shardwise.per_id_weight_gradient(grad, weights, indices, offsets, *layout)
        dense_p = dense_p.to(per_id_weights.dtype)
    return dense, None, None, dense_p, None, None, None, None, None


register_autograd(
    register(
        "pooled_lookup(Tensor weights, Tensor indices, Tensor offsets, Tensor? per_id_weights, Tensor features,"
        " int[] dims, int[] segments, str pooling, ScalarType output_dtype) -> Tensor",
        _pooled_lookup,
        _fake,
    ),
    _backward,
    _setup_context,
)
