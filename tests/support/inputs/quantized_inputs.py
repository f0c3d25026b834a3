"""Quantized tables and batches for the tests of their kernels: one seeded `batch()` builder, bad ids among the ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import Feature, pack_features
from shardwise.kernels.quantized.rows import quantize_rows_ref


@dataclass(frozen=True)
class Case:
    """Tables (rows, dim), features (table, averaged) over them, and how a batch of ids is drawn."""

    name: str
    format: str = "int8"
    tables: tuple[tuple[int, int], ...] = ((9, 8), (5, 7))
    features: tuple[tuple[int, bool], ...] = ((0, False), (1, True))
    batch: int = 3
    longest: int = 6
    weighted: bool = False
    scale_dtype: torch.dtype | None = None
    ids: torch.dtype = torch.int64
    offsets: torch.dtype = torch.int64
    bad_ids: bool = False


@dataclass(frozen=True)
class Batch:
    """The arguments of the lookups."""

    case: Case
    payload: Tensor
    scales: Tensor
    indices: Tensor
    offsets: Tensor
    per_id_weights: Tensor | None
    features: Tensor
    dims: list[int]

    @property
    def pooled(self) -> tuple[Any, ...]:
        """Arguments of `quantized_pooled_lookup` without the output's dtype."""
        where = (self.indices, self.offsets, self.per_id_weights, self.features, self.dims)
        return self.payload, self.scales, *where, self.case.format

    @property
    def sequence(self) -> tuple[Any, ...]:
        """Arguments of `quantized_sequence_lookup` without the output's dtype; tables are of one dim."""
        where = (self.indices, self.offsets, self.features, self.dims[0])
        return self.payload, self.scales, *where, self.case.format

    def to(self, device: torch.device) -> Batch:
        """The same batch elsewhere."""
        return replace(
            self, **{name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        )


def batch(case: Case, seed: int = 0) -> Batch:
    """Random tables, quantized by the reference, and random bags of ids."""
    generator = torch.Generator().manual_seed(seed)
    payloads, scales, bases, byte = [], [], [], 0
    for rows, dim in case.tables:
        q, s = quantize_rows_ref(torch.randn(rows, dim, generator=generator), case.format, case.scale_dtype)
        bases.append(byte)
        flat = torch.nn.functional.pad(q.flatten(), (0, -q.numel() % 64))
        payloads.append(flat)
        scales.append(s.flatten())
        byte += flat.numel()
    first_rows = torch.tensor([0, *(rows for rows, _ in case.tables)]).cumsum(0).tolist()
    features = [Feature(bases[t], *case.tables[t], first_rows[t], mean) for t, mean in case.features]
    lengths = torch.randint(0, case.longest + 1, (len(features), case.batch), generator=generator)
    ids = []
    for f, feature in enumerate(features):
        low, high = (-2, feature.rows + 2) if case.bad_ids else (0, feature.rows)
        ids.append(torch.randint(low, high, (int(lengths[f].sum()),), generator=generator))
    indices = torch.cat(ids).to(case.ids)
    offsets = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)]).to(case.offsets)
    weights = torch.randn(len(indices), generator=generator) if case.weighted else None
    dims = [feature.dim for feature in features]
    return Batch(case, torch.cat(payloads), torch.cat(scales), indices, offsets, weights, pack_features(features), dims)
