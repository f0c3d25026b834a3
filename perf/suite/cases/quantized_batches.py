"""Batches of ids over quantized tables, for checks and measurements of their lookups, made on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import (
    ROW_FORMATS,
    Feature,
    pack_features,
    quantize_rows,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
)
from shardwise.kernels.row_formats import TABLE_BOUNDARY


@dataclass(frozen=True)
class Batch:
    """Arguments of the lookups: `tables` of `rows` x `dim`, `batch` bags of `length` ids for each."""

    format: str
    payload: Tensor
    scales: Tensor
    indices: Tensor
    offsets: Tensor
    per_id_weights: Tensor | None
    features: Tensor
    dims: list[int]

    def pooled(self, by: Callable[..., Any] = quantized_pooled_lookup) -> Tensor:
        where = (self.indices, self.offsets, self.per_id_weights, self.features, self.dims)
        result: Tensor = by(self.payload, self.scales, *where, self.format)
        return result

    def sequence(self, by: Callable[..., Any] = quantized_sequence_lookup) -> Tensor:
        where = (self.indices, self.offsets, self.features, self.dims[0])
        result: Tensor = by(self.payload, self.scales, *where, self.format)
        return result

    def to(self, device: str) -> Batch:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def make(
    device: str, format: str, tables: int, rows: int, dim: int, batch: int, length: int, *, weighted: bool = False
) -> Batch:
    """Random tables, quantized on the device, and uniform ids."""
    generator = torch.Generator(device).manual_seed(0)
    bytes_of_table = rows * ROW_FORMATS[format].row_bytes(dim)
    base = -(-bytes_of_table // 64) * 64
    payload, parts, features = torch.zeros(tables * base, dtype=torch.uint8, device=device), [], []
    for t in range(tables):
        q, s = quantize_rows(torch.randn(rows, dim, device=device, generator=generator), format)
        payload[t * base : t * base + bytes_of_table] = q.flatten()
        parts.append(s.flatten())
        features.append(Feature(t * base, rows, dim, t * rows, t % 2 == 1))
    n = tables * batch * length
    ids = torch.randint(0, rows, (n,), device=device, generator=generator)
    weights = torch.rand(n, device=device, generator=generator) if weighted else None
    offsets = torch.arange(tables * batch + 1, device=device) * length
    packed = pack_features(features, device, boundary=TABLE_BOUNDARY)
    return Batch(format, payload, torch.cat(parts), ids, offsets, weights, packed, [dim] * tables)
