"""Lookups of quantized tables: gather rows, turn them into values and add (or average) them per bag.

Shapes: Q flat uint8 payload of many tables, S flat scales [all rows, parts], I [N] row ids, O [F*B + 1] bag offsets,
P [N] per-id weights, FT [F, 7] features (features.py; BASE counts bytes of Q, FIRST_ROW rows of S), Y output.
Bytes moved: N * (row_bytes + parts * itemsize(S)) + N * itemsize(I) + (F*B + 1) * itemsize(O) + itemsize(Y) of the
output, and N * 4 for per-id weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._op import register
from .features import BASE, FIRST_ROW, MEAN, ROWS, batch_size
from .quantize import dequantize_rows_ref
from .row_formats import row_format


def quantized_pooled_lookup_ref(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    format: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Y[b, f] = sum (or mean) over i in bag (f, b) of P[i] * W_f[I[i]], accumulated in fp32. Bad ids count as none."""
    batch = batch_size(offsets, len(dims))
    columns = []
    for f, dim in enumerate(dims):
        bags = offsets[f * batch : (f + 1) * batch + 1].long()
        ids = indices[bags[0] : bags[-1]].long()
        bag = torch.repeat_interleave(torch.arange(batch, device=ids.device), bags.diff())
        valid = (ids >= 0) & (ids < features[f, ROWS])
        picked = _rows(payload, scales, ids[valid], features[f], dim, format)
        if per_id_weights is not None:
            picked = picked * per_id_weights[bags[0] : bags[-1]][valid].float()[:, None]
        pooled = torch.zeros(batch, dim, device=ids.device).index_add_(0, bag[valid], picked)
        if features[f, MEAN]:
            pooled = pooled / bags.diff().clamp(min=1)[:, None]
        columns.append(pooled)
    return torch.cat(columns, dim=1).to(output_dtype)


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
        out[begin:end][valid] = _rows(payload, scales, ids[valid], features[f], dim, format)
    return out.to(output_dtype)


def _rows(payload: Tensor, scales: Tensor, ids: Tensor, feature: Tensor, dim: int, format: str) -> Tensor:
    """Values [n, dim] of a feature's table at row ids [n]."""
    kind = row_format(format)
    width, base, rows, first = kind.row_bytes(dim), int(feature[BASE]), int(feature[ROWS]), int(feature[FIRST_ROW])
    table = payload[base : base + rows * width].view(rows, width)
    parts = scales.view(-1, kind.parts) if kind.parts else scales.new_empty(first + rows, 0)
    return dequantize_rows_ref(table[ids], parts[first : first + rows][ids], dim, format)


def quantized_pooled_lookup(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    format: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Look ids up in many quantized tables of one format and pool them per bag.

    Shapes: payload flat uint8, scales flat (rows times parts), indices [N], offsets [F*B + 1], per_id_weights [N] or
    None, features [F, 7] from `pack_features` with BASE in bytes of payload and FIRST_ROW in rows of scales, dims one
    int per feature.

    Returns:
        [B, sum(dims)] in `output_dtype` (fp32, fp16 or bf16), accumulated in fp32; zeros for an empty bag.

    Ids outside a table count as none: run `check_ids` first to raise for them instead.
    """
    return torch.ops.shardwise.quantized_pooled_lookup(  # type: ignore[no-any-return]
        payload, scales, indices, offsets, per_id_weights, features, list(dims), format, output_dtype
    )


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


def _pooled(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: list[int],
    format: str,
    output_dtype: torch.dtype,
) -> Tensor:
    return quantized_pooled_lookup_ref(
        payload, scales, indices, offsets, per_id_weights, features, dims, format, output_dtype
    )


def _fake_pooled(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: list[int],
    format: str,
    output_dtype: torch.dtype,
) -> Tensor:
    return payload.new_empty((offsets.shape[0] - 1) // len(dims), sum(dims), dtype=output_dtype)


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
    return quantized_sequence_lookup_ref(payload, scales, indices, offsets, features, dim, format, output_dtype)


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
    "quantized_pooled_lookup(Tensor payload, Tensor scales, Tensor indices, Tensor offsets, Tensor? per_id_weights,"
    " Tensor features, int[] dims, str format, ScalarType output_dtype) -> Tensor",
    _pooled,
    _fake_pooled,
)
register(
    "quantized_sequence_lookup(Tensor payload, Tensor scales, Tensor indices, Tensor offsets, Tensor features, int dim,"
    " str format, ScalarType output_dtype) -> Tensor",
    _sequence,
    _fake_sequence,
)
