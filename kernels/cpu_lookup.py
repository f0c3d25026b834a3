"""Pooled lookup on the CPU: the reference's result by few calls of torch over the flat buffer.

Letters and shapes as in pooled.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as nnf
from torch import Tensor

from .features import BASE, MEAN, ROWS, batch_size, column_offsets, linear_rows, table_rows


def pooled_lookup_cpu(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
) -> Tensor:
    """The reference's result by one `embedding_bag` per distinct dim over the flat buffer."""
    batch, columns = batch_size(offsets, len(dims)), column_offsets(dims)
    table_of = features.tolist()
    lengths = offsets.diff()
    outputs = []
    for dim in sorted(set(dims)):
        fs = [f for f in range(len(dims)) if dims[f] == dim]
        anchor = min(table_of[f][BASE] for f in fs)
        stop = max(table_of[f][BASE] + table_of[f][ROWS] * dim for f in fs)
        matrix = table_rows(weights, anchor, (stop - anchor) // dim, dim)
        ids, bags, scale = _of_features(fs, batch, indices, offsets, per_id_weights, len(dims))
        linear, valid = linear_rows(ids, bags, batch, features[fs], anchor, dim)
        if not bool(valid.all()):
            # leave bad ids out: a zero weight would not do where the row it multiplies holds an Inf
            linear, scale = linear[valid], None if scale is None else scale[valid]
            bags = torch.cat([bags.new_zeros(1), valid.cumsum(0)])[bags]
        pooled = bag_sums(matrix, linear, bags, scale).view(len(fs), batch, dim)
        if any(table_of[f][MEAN] for f in fs):
            counts = torch.stack([lengths[f * batch : (f + 1) * batch] for f in fs]).clamp(min=1)
            averaged = torch.tensor([bool(table_of[f][MEAN]) for f in fs])[:, None]
            pooled = pooled / torch.where(averaged, counts, 1)[:, :, None]
        if len(fs) == len(dims):
            return pooled.transpose(0, 1).reshape(batch, columns[-1])
        outputs.append((fs, pooled))
    out = torch.empty(batch, columns[-1])
    for fs, pooled in outputs:
        for f, block in zip(fs, pooled, strict=True):
            out[:, columns[f] : columns[f + 1]] = block
    return out


def bag_sums(matrix: Tensor, rows: Tensor, bags: Tensor, scale: Tensor | None) -> Tensor:
    """Sum over each bag of scale[i] * matrix[rows[i]] in fp32: rows [n], bags [m + 1] from 0 to n -> [m, dim]."""
    if matrix.dtype is not torch.float32:
        # embedding_bag rounds to the table's dtype: gather in fp32 and sum those rows instead
        matrix, rows = matrix[rows].float(), torch.arange(rows.shape[0], device=rows.device)
    if bags.shape[0] == 1 or rows.shape[0] == 0:
        return matrix.new_zeros(bags.shape[0] - 1, matrix.shape[1])
    # a strided scale would send embedding_bag down another path, with other bits
    scale = None if scale is None else scale.contiguous()
    return nnf.embedding_bag(
        rows, matrix, bags.to(rows.dtype), mode="sum", per_sample_weights=scale, include_last_offset=True
    )


def _of_features(
    fs: Sequence[int], batch: int, indices: Tensor, offsets: Tensor, scale: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The ids, bag offsets and per-id weights of some features, as if the batch had no others."""
    scale = None if scale is None else scale.float()
    end = int(offsets[-1])
    if len(fs) == count:
        return indices[:end], offsets, None if scale is None else scale[:end]
    bounds = offsets[::batch].tolist() if batch else [0] * (count + 1)
    pieces = [slice(bounds[f], bounds[f + 1]) for f in fs]
    lengths = torch.cat([offsets[f * batch : (f + 1) * batch + 1].diff() for f in fs])
    bags = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ids = torch.cat([indices[piece] for piece in pieces])
    return ids, bags, None if scale is None else torch.cat([scale[piece] for piece in pieces])
