"""Sequence lookup of quantized tables: the values of one row per id, unpooled, from many tables of one dim.

Letters as in pooled_lookup.py, but Y [N, D].
Bytes moved: N * (row_bytes + parts * itemsize(S)) + N * itemsize(I) + N * D * itemsize(Y), 32 N for where each row and
its scales begin, and a search over F feature boundaries per id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    multiple,
    register,
    runs_kernel,
    tl,
    triton,
)
from ..cpu.quantized_lookup import quantized_sequence_lookup_cpu
from ..features import (
    BASE,
    FIELDS,
    FIRST_ROW,
    ROWS,
    batch_size,
    feature_of_position,
    row_alignment as alignment,
)
from ..row_formats import RowFormat, row_format
from .pooled_lookup import (
    row_units,
    table_values,
    tuned_tile,
    unit_alignment,
    unit_count,
)
from .row_numbers import UNFUSED, paired, row_scales, row_values

# an id for each thread: what is read and written one after another then uses its sectors (perf/compile/sectors.py)
_RESOLVE_IDS = 64 if INTERPRETED else 128


def quantized_sequence_lookup_ref(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dim: int,
    format: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Y[i] = W_f[I[i]] for the feature f that position i belongs to; zeros for bad ids and past the last offset."""
    batch = batch_size(offsets, features.shape[0])
    out = torch.zeros(indices.shape[0], dim, device=payload.device)
    for f in range(features.shape[0]):
        begin, end = int(offsets[f * batch]), int(offsets[(f + 1) * batch])
        ids = indices[begin:end].long()
        valid = (ids >= 0) & (ids < features[f, ROWS])
        out[begin:end][valid] = table_values(payload, scales, ids[valid], features[f], dim, format)
    return out.to(output_dtype)


@triton.jit(do_not_specialize=["N", "B"], do_not_specialize_on_alignment=["I", "O"])
def _resolve_rows_kernel(  # type: ignore[no-untyped-def]
    I,
    O,
    FT,
    at,
    N,
    F,
    B,
    units,
    BASE: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = (position < N) & (position < tl.load(O + tl.cast(F, tl.int64) * B))
    row = tl.load(I + position, mask=live, other=-1).to(tl.int64)
    feature = FT + feature_of_position(O, position, F, B, STEPS).to(tl.int64) * FIELDS
    valid = live & (row >= 0) & (row < tl.load(feature + ROWS, mask=live, other=0))
    begin = tl.load(feature + BASE, mask=valid, other=0) // UNIT + row * units
    tl.store(at + position, tl.where(valid, begin // ALIGN, -1), mask=position < N)
    tl.store(at + N + position, tl.load(feature + FIRST_ROW, mask=valid, other=0) + row, mask=position < N)


@triton.jit(do_not_specialize=["N"])
def _gather_values_kernel(  # type: ignore[no-untyped-def]
    Q,
    S,
    at,
    Y,
    N,
    D,
    units,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_U: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
):
    PER: tl.constexpr = 8 // BITS if BITS < 8 else 1  # pyright: ignore[reportInvalidTypeForm]
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = position < N
    begin = tl.load(at + position, mask=here, other=-1)
    valid = begin >= 0
    u = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)
    mask = valid[:, None] & (u < multiple(units, ALIGN))[None, :]
    q = tl.load(Q + (begin * ALIGN)[:, None] + u[None, :], mask=mask, other=0)  # [BLOCK_N, BLOCK_U] bytes
    scale, bias = row_scales(S, tl.load(at + N + position, mask=valid, other=0), valid, PARTS)
    y0 = row_values(q, scale, bias, 0, BITS, PARTS)
    if PER == 4:
        y1 = row_values(q, scale, bias, 2, BITS, PARTS)
        y2 = row_values(q, scale, bias, 4, BITS, PARTS)
        y3 = row_values(q, scale, bias, 6, BITS, PARTS)
        y0 = tl.join(tl.join(y0, y2), tl.join(y1, y3)).reshape(BLOCK_N, BLOCK_U * 4)
    elif PER == 2:
        y0 = tl.join(y0, row_values(q, scale, bias, 4, BITS, PARTS)).reshape(BLOCK_N, BLOCK_U * 2)
    D = multiple(D, OUT_ALIGN)
    d = tl.program_id(1) * (BLOCK_U * PER) + tl.arange(0, BLOCK_U * PER)
    tl.store(Y + (position * D)[:, None] + d[None, :], y0.to(Y.dtype.element_ty), mask=here[:, None] & (d < D)[None, :])


def quantized_sequence_lookup(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dim: int,
    format: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The row of each id, unpooled, of many quantized tables of one format and dim: [N, dim] in `output_dtype`.

    Shapes as in `quantized_pooled_lookup`. Rows of ids outside their table, and past the last offset, are zeros.
    """
    return torch.ops.shardwise.quantized_sequence_lookup(  # type: ignore[no-any-return]
        payload, scales, indices, offsets, features, dim, format, output_dtype
    )


def _sequence(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dim: int,
    format: str,
    output_dtype: torch.dtype,
) -> Tensor:
    kind = row_format(format)
    if not runs_kernel(payload):
        path = quantized_sequence_lookup_ref if payload.is_cuda else quantized_sequence_lookup_cpu
        return path(payload, scales, indices, offsets, features, dim, format, output_dtype)
    ids, count, width = indices.shape[0], features.shape[0], unit_count(dim, kind)
    out = torch.empty(ids, dim, dtype=output_dtype, device=payload.device)
    if ids == 0:
        return out
    indices, offsets = indices.contiguous(), offsets.contiguous()
    payload, scales = payload.contiguous(), paired(scales.contiguous())
    units = row_units(payload, kind)
    at = torch.empty(2 * ids, dtype=torch.int64, device=payload.device)
    align = unit_alignment(dim, kind) if payload.data_ptr() % 16 == 0 else 1
    _resolve_rows_kernel[(triton.cdiv(ids, _RESOLVE_IDS),)](
        indices, offsets, features, at, ids, count, batch_size(offsets, count), width,
        BASE, ROWS, FIRST_ROW, FIELDS, count.bit_length() + 1, units.itemsize, _RESOLVE_IDS, align,
    )  # fmt: skip
    _gather(units, scales, at, out, dim, kind, align)
    return out


def gather_values(
    rows: Tensor,
    begins: Tensor,
    scales_at: Tensor,
    dim: int,
    format: str,
    alignment_bytes: int,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values [N, dim] of rows that lie anywhere in a buffer that holds their scales as well; for tensors of kernels.

    Shapes: rows flat uint8; begins int64 [N], where a row's numbers begin, in bytes or in values of a format without
    scales, -1 for a row of zeros; scales_at int64 [N] where its scale and bias do, in pairs of fp16 from the buffer's
    beginning. `alignment_bytes` divides the addresses of all beginnings.
    """
    kind, ids = row_format(format), begins.shape[0]
    out = torch.empty(ids, dim, dtype=output_dtype, device=rows.device)
    if ids == 0:
        return out
    if rows.data_ptr() % 16:
        rows = rows.clone()
    # what the buffer ends with may be less than a value
    units = row_units(rows if kind.parts else rows[: rows.shape[0] // 4 * 4], kind)
    align = min(unit_alignment(dim, kind), max(1, alignment_bytes // units.itemsize))
    at = torch.cat([torch.where(begins >= 0, begins // align, -1), scales_at])
    scales = rows[: rows.shape[0] // 4 * 4].view(torch.float16)
    _gather(units, scales, at, out, dim, kind, align)
    return out


def _gather(units: Tensor, scales: Tensor, at: Tensor, out: Tensor, dim: int, kind: RowFormat, align: int) -> None:
    ids, width = out.shape[0], unit_count(dim, kind)
    block_n, block_u, warps = tuned_tile("gather_values", units, width, kind, align)
    grid = (triton.cdiv(ids, block_n), triton.cdiv(width, block_u))
    _gather_values_kernel[grid](
        units, scales, at, out, ids, dim, width, kind.bits, kind.parts, block_n, block_u, align,
        alignment(dim, out.itemsize), num_warps=warps, **UNFUSED,
    )  # fmt: skip


def _fake_sequence(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dim: int,
    format: str,
    output_dtype: torch.dtype,
) -> Tensor:
    return payload.new_empty(indices.shape[0], dim, dtype=output_dtype)


register(
    "quantized_sequence_lookup(Tensor payload, Tensor scales, Tensor indices, Tensor offsets, Tensor features, int dim,"
    " str format, ScalarType output_dtype) -> Tensor",
    _sequence,
    _fake_sequence,
)
