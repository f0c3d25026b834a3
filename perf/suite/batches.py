"""Batches of ids over tables for checks and measurements of the kernels, made on the device.

Letters as in the kernels: R rows, D dim, B samples, N ids, T tables. Workloads with names: workloads.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings.tables.table_layout import TableShape, lay_out
from shardwise.kernels import (
    RULES,
    Feature,
    flatten_segments,
    fused_update,
    new_guard,
    pack_features,
    pooled_lookup,
)
from shardwise.kernels.features import FIRST_ROW, MEAN
from shardwise.perf.suite.declared import fused_update_bytes, pooled_lookup_bytes
from shardwise.perf.suite.workloads import Workload, draw, draw_ids


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


def optimizer(rule: str, batch: Batch, *, lr: float = 0.01, start: float = 0.1) -> Optimizer:
    """Fresh states, all `start`."""
    device, rows = batch.weights.device, max(batch.segments[2::4])
    sizes = [rows if kind == "row" else batch.weights.numel() for kind in RULES[rule].kinds]
    states = [torch.full((size,), start, device=device) for size in sizes]
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

    ids: as a workload's, "zipf" with exponent 1, but with "hot" all ids name row 0.
    """
    on: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    lengths = torch.randint(0, 2 * length + 1, (len(tables) * batch,), **on)
    counts = lengths.view(len(tables), batch).sum(1).tolist()
    how = "zipf 1" if ids == "zipf" else ids
    parts = [
        torch.zeros(count, dtype=torch.int64, device=device) if ids == "hot" else draw_ids(how, rows, count, on)
        for (rows, _), count in zip(tables, counts, strict=True)
    ]
    averaged = [pooling == "mean" and t % 2 == 0 for t in range(len(tables))]
    return _assembled(tables, torch.cat(parts), lengths, weights, dtype, pooling, averaged, weighted, on)


def of_workload(
    workload: Workload,
    device: str,
    inputs: int,
    *,
    pooling: str = "sum",
    weighted: bool = False,
    weights: Tensor | None = None,
) -> list[Batch]:
    """So many distinct batches of a workload over one set of tables; "mean" averages all features."""
    batches: list[Batch] = []
    tables = [(rows, workload.dim) for rows in workload.rows]
    for seed in range(inputs):
        ids, lengths = draw(workload, seed, device)
        on: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
        averaged = [pooling == "mean"] * len(tables)
        made = _assembled(tables, ids, lengths, weights, workload.dtype, pooling, averaged, weighted, on)
        batches.append(made)
        weights = made.weights
    return batches


def _assembled(
    tables: Sequence[tuple[int, int]],
    ids: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    dtype: torch.dtype,
    pooling: str,
    averaged: Sequence[bool],
    weighted: bool,
    on: dict[str, Any],
) -> Batch:
    bases, first_rows, segments, elements = lay_out([TableShape(str(t), *table) for t, table in enumerate(tables)])
    features = [
        Feature(bases[t], rows, dim, first_rows[t], averaged[t]) for t, (rows, dim) in enumerate(tables)
    ]  # fmt: skip
    if weights is None:
        weights = torch.randn(elements, **on).to(dtype)
    dims = [dim for _, dim in tables]
    return Batch(
        weights=weights,
        indices=ids,
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        per_id_weights=torch.rand(ids.shape[0], **on) + 0.5 if weighted else None,
        features=pack_features(features, on["device"]),
        dims=dims,
        segments=flatten_segments(segments),
        pooling=pooling,
        grad=torch.randn(lengths.shape[0] // len(tables), sum(dims), **on),
    )


def bags_of_first(offsets: Tensor, features: int, samples: int) -> tuple[Tensor, Tensor]:
    """Which ids are of the first samples' bags, and the offsets of these bags alone."""
    bags = offsets.shape[0] - 1
    kept = torch.arange(bags, device=offsets.device) % (bags // features) < samples
    lengths = offsets.diff()
    ends = lengths[kept].cumsum(0)
    return kept.repeat_interleave(lengths), torch.cat([ends.new_zeros(1), ends])


def first_samples(batch: Batch, samples: int) -> Batch:
    """The bags of the first samples alone, over the same tables."""
    kept, offsets = bags_of_first(batch.offsets, len(batch.dims), samples)
    weights = None if batch.per_id_weights is None else batch.per_id_weights[kept]
    return replace(
        batch, indices=batch.indices[kept], offsets=offsets, per_id_weights=weights, grad=batch.grad[:samples]
    )  # fmt: skip


def compacted(batch: Batch) -> Batch:
    """The same bags over copies of the rows that they name, for tables of one dim: what a reference can bear."""
    bags = batch.grad.shape[0]
    of = torch.arange(len(batch.dims), device=batch.indices.device).repeat_interleave(batch.offsets[::bags].diff())
    rows, at = torch.unique(batch.indices + batch.features[of, FIRST_ROW], return_inverse=True)
    dim = batch.dims[0]
    first = torch.searchsorted(rows, batch.features[:, FIRST_ROW].contiguous())
    ends = [*first.tolist()[1:], rows.shape[0]]
    features = [
        Feature(begin * dim, end - begin, dim, begin, bool(mean))
        for begin, end, mean in zip(first.tolist(), ends, batch.features[:, MEAN].tolist(), strict=True)
    ]
    return replace(
        batch,
        weights=batch.weights.view(-1, dim)[rows].flatten(),
        indices=at - first[of],
        features=pack_features(features, batch.indices.device),
        segments=[dim, 0, rows.shape[0], 0],
    )


def lookup_bytes(batch: Batch) -> float:
    """As pooled.py declares."""
    args = (batch.weights, batch.indices, batch.offsets, batch.per_id_weights, batch.features)
    return pooled_lookup_bytes(*args).bytes_moved


def distinct_rows(batch: Batch) -> Tensor:
    """Numbers of the rows of all tables that a batch of equal bags a feature names, each once."""
    per_feature = batch.offsets[:: batch.grad.shape[0]].diff()  # [F]
    first = batch.features[:, FIRST_ROW].repeat_interleave(per_feature)  # [N]
    rows: Tensor = torch.unique(batch.indices + first)
    return rows


def touched_rows(batch: Batch) -> int:
    """Distinct (table, row) pairs of a batch of equal bags a feature."""
    return int(distinct_rows(batch).numel())


def update_bytes(batch: Batch, rule: str) -> float:
    """As update.py declares: gradient rows, rows and states of touched rows twice, 96 bytes an id for the sort."""
    where = (batch.weights, batch.indices, batch.offsets, batch.features)
    traffic = fused_update_bytes(*where, RULES[rule].kinds, batch.pooling)
    # what chunks of hot rows leave and read again is no floor
    return traffic.bytes_moved - traffic.reads["partial"] - traffic.writes["partial"]
