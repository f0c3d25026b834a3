"""Batches of ids over tables for checks and measurements of the kernels, made on the device.

Letters as in the kernels: R rows, D dim, B samples, N ids, T tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings.table_layout import TableShape, lay_out
from shardwise.kernels import (
    RULES,
    Feature,
    flatten_segments,
    fused_update,
    new_guard,
    pack_features,
    pooled_lookup,
)
from shardwise.kernels.features import FIRST_ROW


@dataclass(frozen=True)
class Batch:
    """One lookup's arguments, all on one device, and the gradient of its output."""

    weights: Tensor
    indices: Tensor
    offsets: Tensor
    per_id_weights: Tensor | None
    features: Tensor
    dims: list[int]
    segments: list[int]
    pooling: str
    grad: Tensor

    def lookup(self) -> Tensor:
        return pooled_lookup(
            self.weights, self.indices, self.offsets, self.per_id_weights, self.features, self.dims, self.segments,
            self.pooling,
        )  # fmt: skip

    def to(self, device: torch.device | str) -> Batch:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    @property
    def ids(self) -> int:
        return self.indices.shape[0]


@dataclass
class Optimizer:
    """States of a rule for one batch's tables."""

    rule: str
    states: list[Tensor]
    step: Tensor
    hyper: Tensor
    guard: Tensor

    def update(self, batch: Batch, pooling: str | None = None, by: Callable[..., None] = fused_update) -> None:
        by(
            batch.weights, self.states, self.step, batch.grad, batch.indices, batch.offsets, batch.per_id_weights,
            batch.features, batch.dims, batch.segments, self.rule, self.hyper, self.guard, pooling or batch.pooling,
        )  # fmt: skip


def optimizer(rule: str, batch: Batch, *, lr: float = 0.01) -> Optimizer:
    """Fresh states, all 0.1."""
    device, rows = batch.weights.device, max(batch.segments[2::4])
    sizes = [rows if kind == "row" else batch.weights.numel() for kind in RULES[rule].kinds]
    states = [torch.full((size,), 0.1, device=device) for size in sizes]
    known = {**RULES[rule].hyper, "lr": lr, "eps": 1e-6, "weight_decay": 0.0}
    hyper = torch.tensor([known[name] for name in (*RULES[rule].hyper, "weight_decay")], dtype=torch.float64).to(device)
    return Optimizer(rule, states, torch.zeros(1, dtype=torch.int64, device=device), hyper, new_guard(device))


def make(
    device: str,
    tables: Sequence[tuple[int, int]],
    batch: int,
    length: int,
    *,
    ids: str = "uniform",
    pooling: str = "sum",
    weighted: bool = False,
    dtype: torch.dtype = torch.float32,
    weights: Tensor | None = None,
    seed: int = 0,
) -> Batch:
    """One feature a table (rows, dim), bags of 0 to 2 * length ids; "mean" averages every other feature.

    ids: "uniform", "zipf" (rank r about 1 / r, ranks scattered over the table) or "hot" (all ids name row 0).
    """
    on: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    bases, first_rows, segments, elements = lay_out([TableShape(str(t), *table) for t, table in enumerate(tables)])
    features = [
        Feature(bases[t], rows, dim, first_rows[t], pooling == "mean" and t % 2 == 0)
        for t, (rows, dim) in enumerate(tables)
    ]
    lengths = torch.randint(0, 2 * length + 1, (len(tables) * batch,), **on)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    counts = lengths.view(len(tables), batch).sum(1).tolist()
    parts = [_draw(ids, rows, count, on) for (rows, _), count in zip(tables, counts, strict=True)]
    if weights is None:
        weights = torch.randn(elements, **on).to(dtype)
    dims = [dim for _, dim in tables]
    return Batch(
        weights=weights,
        indices=torch.cat(parts),
        offsets=ends,
        per_id_weights=torch.rand(sum(counts), **on) + 0.5 if weighted else None,
        features=pack_features(features, device),
        dims=dims,
        segments=flatten_segments(segments),
        pooling=pooling,
        grad=torch.randn(batch, sum(dims), **on),
    )


def _draw(how: str, rows: int, count: int, on: dict[str, Any]) -> Tensor:
    if how == "hot":
        return torch.zeros(count, dtype=torch.int64, device=on["device"])
    if how == "zipf":
        rank = (float(rows) ** torch.rand(count, dtype=torch.float64, **on)).long() - 1
        return (rank.clamp(max=rows - 1) * 2_654_435_761) % rows
    return torch.randint(0, rows, (count,), **on)


def lookup_bytes(batch: Batch) -> float:
    """As pooled.py declares."""
    dim = batch.dims[0]
    rows = batch.ids * dim * batch.weights.itemsize + batch.grad.numel() * 4
    return rows + batch.ids * 8 + batch.offsets.numel() * 8 + (batch.ids * 4 if batch.per_id_weights is not None else 0)


def touched_rows(batch: Batch) -> int:
    """Distinct (table, row) pairs of a batch of equal bags a feature."""
    per_feature = batch.offsets[:: batch.grad.shape[0]].diff()
    first = batch.features[:, FIRST_ROW].repeat_interleave(per_feature)
    return int(torch.unique(batch.indices + first).numel())


def update_bytes(batch: Batch, rule: str) -> float:
    """As update.py declares: gradient rows, rows and states of touched rows twice, 96 bytes an id for the sort."""
    dim, rows = batch.dims[0], touched_rows(batch)
    per_row = dim * batch.weights.itemsize + sum(4 if kind == "row" else dim * 4 for kind in RULES[rule].kinds)
    return batch.ids * dim * 4 + 2 * rows * per_row + 96 * batch.ids
