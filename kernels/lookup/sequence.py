"""Sequence lookup: one row per id, unpooled, from many tables of one dim in one launch.

Shapes: W flat tables, I [N] row ids, O [F*B + 1] bag offsets, FT [F, 8] features (features.py), Y [N, D].
Bytes moved: N * D * itemsize(W) + N * itemsize(I) + N * D * 4, 16 N for where each row begins, and a search over
F feature boundaries per id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import configs
from .._op import (
    INTERPRETED,
    multiple,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..features import (
    BASE,
    FIELDS,
    ROWS,
    batch_size,
    feature_of_position,
    linear_rows,
    locate_ids,
    row_alignment,
    table_rows,
)

# an id for each thread: what is read and written one after another then uses its sectors (perf/compile/sectors.py)
_RESOLVE_IDS = 64 if INTERPRETED else 128


def sequence_lookup_ref(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dim: int,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Y[i] = W_f[I[i]] for the feature f that position i belongs to; zeros for bad ids and past the last offset."""
    _, f, valid = locate_ids(indices, offsets, features)
    # int32 ids times dim may pass 2**31
    elements = features[f, BASE] + indices.long() * dim
    at = torch.where(valid, elements, 0)[:, None] + torch.arange(dim, device=weights.device)
    # an empty table group has no element 0 to point at
    rows = weights[at] if weights.shape[0] else weights.new_zeros(at.shape)
    return torch.where(valid[:, None], rows.float(), 0.0).to(output_dtype)


@triton.jit(do_not_specialize=["N", "B"], do_not_specialize_on_alignment=["I", "O"])
def _resolve_kernel(  # type: ignore[no-untyped-def]
    I,
    O,
    FT,
    at,
    N,
    F,
    B,
    D,
    BASE: tl.constexpr,
    ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = (position < N) & (position < tl.load(O + tl.cast(F, tl.int64) * B))
    row = tl.load(I + position, mask=live, other=-1).to(tl.int64)  # [BLOCK_N]
    feature = FT + feature_of_position(O, position, F, B, STEPS).to(tl.int64) * FIELDS
    valid = live & (row >= 0) & (row < tl.load(feature + ROWS, mask=live, other=0))  # [BLOCK_N]
    begin = tl.load(feature + BASE, mask=valid, other=0) + row * D
    tl.store(at + position, tl.where(valid, begin // ALIGN, -1), mask=position < N)


@triton.jit(do_not_specialize=["N"])
def _gather_kernel(  # type: ignore[no-untyped-def]
    W,
    at,
    Y,
    N,
    D,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = position < N
    begin = tl.load(at + position, mask=here, other=-1)
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    source = W + (begin * ALIGN)[:, None] + d[None, :]
    rows = tl.load(source, mask=(begin >= 0)[:, None] & in_row[None, :], other=0.0)
    tl.store(
        Y + (position * D)[:, None] + d[None, :], rows.to(Y.dtype.element_ty), mask=here[:, None] & in_row[None, :]
    )


def sequence_lookup(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dim: int,
    segments: Sequence[int],
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The row of each id; differentiable in `weights`.

    Shapes: weights flat 1-D (fp32, fp16 or bf16), indices [N], offsets [F*B + 1], features [F, 8] whose tables all
    have `dim` columns.

    Returns:
        [N, dim] in `output_dtype` (fp32, fp16 or bf16); zeros for ids outside their table (run `check_ids` first
        to raise for them).
    """
    return torch.ops.shardwise.sequence_lookup(  # type: ignore[no-any-return]
        weights, indices, offsets, features, dim, list(segments), output_dtype
    )


def _sequence_lookup(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dim: int,
    segments: list[int],
    output_dtype: torch.dtype,
) -> Tensor:
    if not runs_kernel(weights):
        if not weights.is_cuda and len(segments) == 4:
            return _sequence_lookup_cpu(weights, indices, offsets, features, dim, segments).to(output_dtype)
        return sequence_lookup_ref(weights, indices, offsets, features, dim, output_dtype)
    ids, count = indices.shape[0], features.shape[0]
    out = torch.empty(ids, dim, dtype=output_dtype, device=weights.device)
    if ids == 0:
        return out
    indices, offsets = indices.contiguous(), offsets.contiguous()
    at = torch.empty(ids, dtype=torch.int64, device=weights.device)
    align = row_alignment(dim, weights.itemsize) if weights.data_ptr() % 16 == 0 else 1
    # two launches: searching and gathering in one crashes the compiler of triton 3.7.1 at 32 ids x 128 columns
    _resolve_kernel[(triton.cdiv(ids, _RESOLVE_IDS),)](
        indices, offsets, features, at, ids, count, batch_size(offsets, count), dim,
        BASE, ROWS, FIELDS, count.bit_length() + 1, _RESOLVE_IDS, align,
    )  # fmt: skip
    block_n, block_d, warps = configs.gather_tile("gather", weights, dim, align)
    grid = (triton.cdiv(ids, block_n), triton.cdiv(dim, block_d))
    _gather_kernel[grid](weights, at, out, ids, dim, block_n, block_d, align, num_warps=warps)
    return out


def _sequence_lookup_cpu(
    weights: Tensor, indices: Tensor, offsets: Tensor, features: Tensor, dim: int, segments: list[int]
) -> Tensor:
    """The reference's result by one row gather over the flat buffer, which holds tables of one dim only."""
    _, first_row, end_row, base = segments
    matrix = table_rows(weights, base, end_row - first_row, dim)
    ids = indices[: int(offsets[-1])]
    linear, valid = linear_rows(ids, offsets, batch_size(offsets, features.shape[0]), features, base, dim)
    if bool(valid.all()) and ids.shape[0] == indices.shape[0]:
        return matrix.index_select(0, linear).float()
    out = torch.zeros(indices.shape[0], dim, device="cpu")
    out[: ids.shape[0]][valid] = matrix.index_select(0, linear[valid]).float()
    return out


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, indices, offsets, features, ctx.dim, ctx.segments, _ = inputs
    ctx.save_for_backward(weights, indices, offsets, features)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weights, indices, offsets, features = ctx.saved_tensors
    dense = None
    if ctx.needs_input_grad[0]:
        dims = [ctx.dim] * features.shape[0]
        dense = torch.ops.shardwise.lookup_gradient(
            weights, grad, indices, offsets, None, features, dims, ctx.segments, "sequence"
        )
    return dense, None, None, None, None, None, None


register_autograd(
    register(
        "sequence_lookup(Tensor weights, Tensor indices, Tensor offsets, Tensor features, int dim, int[] segments,"
        " ScalarType output_dtype) -> Tensor",
        _sequence_lookup,
        lambda weights, indices, offsets, features, dim, segments, output_dtype: weights.new_empty(
            indices.shape[0], dim, dtype=output_dtype
        ),
    ),
    _backward,
    _setup_context,
)
