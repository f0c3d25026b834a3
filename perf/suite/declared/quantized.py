"""The bytes that lookups of quantized tables declare, as functions of a call.

Letters as in kernels/quantized/pooled_lookup.py; `sector` as in lookup.py. Tables begin on a sector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels import RowFormat
from shardwise.kernels.features import COLUMN, DIM, batch_size

from .lookup import Traffic, _ids_per_feature, _in_sectors


def quantized_pooled_lookup_bytes(
    kind: RowFormat,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    output_dtype: torch.dtype = torch.float32,
    *,
    sector: int = 1,
) -> Traffic:
    """Of `quantized_pooled_lookup`: a row and its scales for each id, the index once, the output once."""
    reads = _rows_read(kind, scales, indices, offsets, features, sector)
    reads |= {"I": indices.nbytes, "O": offsets.nbytes, "P": 0 if per_id_weights is None else per_id_weights.nbytes}
    size, stride = output_dtype.itemsize, output_dtype.itemsize * int(features[:, DIM].sum())
    row = sum(
        _in_sectors(size * dim, sector, stride, size * column) for column, dim in features[:, [COLUMN, DIM]].tolist()
    )
    return Traffic(reads, {"Y": batch_size(offsets, len(features)) * row})


def quantized_sequence_lookup_bytes(
    kind: RowFormat,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    output_dtype: torch.dtype = torch.float32,
    *,
    sector: int = 1,
) -> Traffic:
    """Of `quantized_sequence_lookup`: a row and its scales for each id and where they begin; the search is left out."""
    n, row = indices.shape[0], int(features[0, DIM]) * output_dtype.itemsize
    reads = _rows_read(kind, scales, indices, offsets, features, sector)
    reads |= {"I": indices.nbytes, "at": 16 * n}
    return Traffic(reads, {"at": 16 * n, "Y": n * _in_sectors(row, sector, row)})


def _rows_read(
    kind: RowFormat, scales: Tensor, indices: Tensor, offsets: Tensor, features: Tensor, sector: int
) -> dict[str, int]:
    per_feature = _ids_per_feature(offsets, features)
    widths = [kind.row_bytes(dim) for dim in features[:, DIM].tolist()]
    rows = sum(n * _in_sectors(width, sector, width) for n, width in zip(per_feature, widths, strict=True))
    parts = kind.parts * scales.itemsize
    return {"Q": rows, "S": indices.shape[0] * _in_sectors(parts, sector, parts) if parts else 0}
