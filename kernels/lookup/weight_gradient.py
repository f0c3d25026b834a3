"""Gradient of a pooled lookup by its per-id weights: the inner product of each id's row and its bag's gradient.

Shapes: as in pooled.py; G [B, sum of dims] upstream gradient, Q [N] the result, fp32.
Bytes moved: N * D * itemsize(W) (rows) + F*B*D * itemsize(G) + N * itemsize(I) + (F*B + 1) * itemsize(O) + N * 4.
The order of addition within a row follows the tile, which follows its width and alignment alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._op import (
    gather_tile,
    launch_options,
    multiple,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    MEAN,
    ORDER,
    ROWS,
    batch_size,
    column_offsets,
    locate_ids,
    table_rows,
)
from ..launch_plans import gradient_plan


def per_id_weight_gradient_ref(
    grad: Tensor, weights: Tensor, indices: Tensor, offsets: Tensor, features: Tensor, dims: Sequence[int]
) -> Tensor:
    """Q[i] = <G of i's bag, row of i>, over the bag's length where it is averaged: [N] fp32."""
    batch, columns = batch_size(offsets, len(dims)), column_offsets(dims)
    out = torch.zeros(indices.shape[0], device=grad.device)
    bag, f, valid = locate_ids(indices, offsets, features)
    lengths = offsets.diff().clamp(min=1)
    for j, dim in enumerate(dims):
        own = torch.nonzero(valid & (f == j)).squeeze(1)  # [n] positions of ids of this feature
        table = table_rows(weights, int(features[j, BASE]), int(features[j, ROWS]), dim)
        upstream = grad[bag[own] - j * batch, columns[j] : columns[j + 1]].float()  # [n, D]
        if features[j, MEAN]:
            upstream = upstream / lengths[bag[own]][:, None]
        out[own] = (upstream * table[indices[own].long()].float()).sum(1)
    return out


@triton.jit
def _products(dot, table, row, D, d, live, in_row, g):  # type: ignore[no-untyped-def]
    w = tl.load(table + (row * D)[:, None] + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0)
    return dot + g * w.to(tl.float32)


@triton.jit(do_not_specialize=["N", "B", "first"], do_not_specialize_on_alignment=["I", "O"])
def _weight_gradient_kernel(  # type: ignore[no-untyped-def]
    W,
    I,
    O,
    G,
    FT,
    Q,
    N,
    B,
    g_stride,
    first,
    BASE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    MEAN: tl.constexpr,
    ORDER: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    G_ALIGN: tl.constexpr,
):
    f = tl.load(FT + (first + tl.program_id(1)).to(tl.int64) * FIELDS + ORDER)
    feature = FT + f * FIELDS
    rows = tl.load(feature + ROWS)
    D = tl.multiple_of(tl.load(feature + DIM).to(tl.int32), ALIGN)
    column = tl.multiple_of(tl.load(feature + COLUMN), G_ALIGN)
    table = W + tl.multiple_of(tl.load(feature + BASE), ALIGN)
    b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = b < B  # [BLOCK_B]
    begin = tl.load(O + f * B + b, mask=in_batch, other=0).to(tl.int64)
    end = tl.load(O + f * B + b + 1, mask=in_batch, other=0).to(tl.int64)
    # offsets out of order raise through the guard; here they only must not be followed outside I
    length = tl.maximum(tl.minimum(end, N) - tl.maximum(begin, 0), 0).to(tl.int32)
    begin = tl.maximum(begin, 0)
    upstream = G + (b * multiple(g_stride, G_ALIGN))[:, None] + column  # [BLOCK_B, 1]
    for i in range(0, tl.max(length, 0), 2):
        live0 = i < length
        live1 = i + 1 < length
        r0 = tl.load(I + begin + i, mask=live0, other=-1).to(tl.int64)
        r1 = tl.load(I + begin + i + 1, mask=live1, other=-1).to(tl.int64)
        m0 = (r0 >= 0) & (r0 < rows)
        m1 = (r1 >= 0) & (r1 < rows)
        dot0 = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
        dot1 = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
        for d0 in range(0, D, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            in_row = d < D
            g = tl.load(upstream + d[None, :], mask=live0[:, None] & in_row[None, :], other=0.0).to(tl.float32)
            dot0 = _products(dot0, table, r0, D, d, m0, in_row, g)
            dot1 = _products(dot1, table, r1, D, d, m1, in_row, g)
        # computed here, it takes no registers while rows are gathered
        share = tl.where(tl.load(feature + MEAN) != 0, tl.maximum(length, 1).to(tl.float32), 1.0)
        tl.store(Q + begin + i, tl.sum(dot0, 1) / share, mask=live0)
        tl.store(Q + begin + i + 1, tl.sum(dot1, 1) / share, mask=live1)


def weight_gradient_tile(dim: int, itemsize: int, align: int) -> tuple[int, int, int]:
    """Bags, columns and warps: half a lookup's tile, because two sums and a gradient are held beside the rows."""
    block_b, block_d, warps = gather_tile(dim, itemsize, align)
    return max(1, block_b // 2), block_d, max(1, warps // 2)


def per_id_weight_gradient(
    grad: Tensor,
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dims: Sequence[int],
    segments: Sequence[int] | None = None,
    pooling: str = "sum",
) -> Tensor:
    """Gradient [N] fp32 of a pooled lookup by its per-id weights, given the gradient [B, sum(dims)] of its output.

    Shapes: weights flat 1-D, indices [N], offsets [F*B + 1], features [F, 8]. Ids outside their table and positions
    past the last offset get 0. Differentiable in `grad`, and in `weights` where `segments` and `pooling` are those of
    `pooled_lookup`.
    """
    segments = None if segments is None else list(segments)
    return torch.ops.shardwise.per_id_weight_gradient(  # type: ignore[no-any-return]
        grad, weights, indices, offsets, features, list(dims), segments, pooling
    )


def _per_id_weight_gradient(
    grad: Tensor,
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dims: list[int],
    segments: list[int] | None = None,
    pooling: str = "sum",
) -> Tensor:
    if not runs_kernel(weights):
        return per_id_weight_gradient_ref(grad, weights, indices, offsets, features, dims)
    batch, plan = batch_size(offsets, len(dims)), gradient_plan(tuple(dims), weights.itemsize, grad.itemsize)
    out = torch.zeros(indices.shape[0], dtype=torch.float32, device=grad.device)
    if batch == 0 or indices.shape[0] == 0:
        return out
    indices, offsets, grad = indices.contiguous(), offsets.contiguous(), grad.contiguous()
    aligned, grad_aligned = weights.data_ptr() % 16 == 0, grad.data_ptr() % 16 == 0
    for first, count, width, align, g_align, _ in plan.launches:
        block_b, block_d, warps = weight_gradient_tile(width, weights.itemsize, align)
        grid = (triton.cdiv(batch, block_b), count)
        _weight_gradient_kernel[grid](
            weights, indices, offsets, grad, features, out, indices.shape[0], batch, plan.columns, first,
            BASE, ROWS, DIM, COLUMN, MEAN, ORDER, FIELDS, block_b, block_d,
            align if aligned else 1, g_align if grad_aligned else 1,
            **launch_options(warps, 96),
        )  # fmt: skip
    return out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.dims, ctx.segments, ctx.pooling = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    grad, weights, indices, offsets, features = ctx.saved_tensors
    by_grad = by_weights = None
    # linear in G and in W: the gradients are a lookup and a table's gradient, with `upstream` as the weights of ids
    if ctx.needs_input_grad[0]:
        by_grad = torch.ops.shardwise.pooled_lookup(
            weights, indices, offsets, upstream, features, ctx.dims, ctx.segments or [], ctx.pooling, grad.dtype
        )
    if ctx.needs_input_grad[1]:
        if ctx.segments is None:
            raise RuntimeError("per_id_weight_gradient: its gradient by weights needs segments and pooling: pass them")
        by_weights = torch.ops.shardwise.lookup_gradient(
            weights, grad, indices, offsets, upstream, features, ctx.dims, ctx.segments, ctx.pooling
        )
    return by_grad, by_weights, *[None] * 6


register_autograd(
    register(
        "per_id_weight_gradient(Tensor grad, Tensor weights, Tensor indices, Tensor offsets, Tensor features,"
        " int[] dims, int[]? segments=None, str pooling='sum') -> Tensor",
        _per_id_weight_gradient,
        lambda grad, weights, indices, *args: indices.new_empty(indices.shape, dtype=torch.float32),
    ),
    _backward,
    _setup_context,
)
