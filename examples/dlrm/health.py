"""Health of tables: which rows were trained, how the ids crowd, how large the rows are, what int8 costs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.data import Batch

# the rows that are asked for most
HOT_SHARE = 0.01


class LookupCounts:
    """How often each row was asked for in the training batches that passed here; `active` False counts nothing."""

    def __init__(self, feature_rows: Mapping[str, int], *, active: bool) -> None:
        self._counts = {name: torch.zeros(rows, dtype=torch.int64) for name, rows in feature_rows.items()}
        self._active = active

    def counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches."""
        return map(self._add, batches) if self._active else batches

    def _add(self, batch: Batch) -> Batch:
        ids = batch.sparse_features
        ends = ids.offset_per_key()
        for number, name in enumerate(ids.keys()):
            of_feature = ids.values()[ends[number] : ends[number + 1]]
            self._counts[name].index_add_(0, of_feature, torch.ones_like(of_feature))
        return batch

    def of_all_ranks(self, device: torch.device) -> dict[str, Tensor]:
        """By feature, [rows]; all ranks call this together."""
        whole = {}
        for name, counts in self._counts.items():
            total = counts.to(device)
            dist.all_reduce(total)
            whole[name] = total.cpu()
        return whole


@dataclass(frozen=True)
class TableHealth:
    """What is known of a table after training.

    `trained` is the share of its rows that a training sample asked for, `hot` the share of all lookups that went to the
    hottest 1% of rows (at least one row). Norms are Euclidean, of a row. `int8_error` is the largest difference of a
    row that int8 makes, as a part of that row's norm.
    """

    feature: str
    rows: int
    dim: int
    lookups: int
    trained: float
    hot: float
    median_norm: float
    largest_norm: float
    finite: bool
    int8_error: float


def health_of_tables(
    counts: Mapping[str, Tensor], weights: Mapping[str, Tensor], served: nn.Module
) -> list[TableHealth]:
    """Of every table: lookups of each row by feature, the model's whole weights, and the model with int8 tables."""
    int8 = served.state_dict()
    healths = []
    for feature, of_rows in counts.items():
        name = f"model.sparse_arch.embedding_bag_collection.embedding_bags.t_{feature}.weight"
        rows = int8[name] * int8[f"{name}_qscale"].float() + int8[f"{name}_qbias"].float()
        healths.append(table_health(feature, of_rows, weights[name], rows))
    return healths


def table_health(feature: str, counts: Tensor, weight: Tensor, quantized: Tensor) -> TableHealth:
    """Of a table `weight` [rows, dim] whose rows were asked for `counts` [rows] times; `quantized` is what int8 keeps
    of it, as floats."""
    hottest = max(1, round(len(counts) * HOT_SHARE))
    lookups = int(counts.sum())
    norms = weight.float().norm(dim=1)
    error = (weight.float() - quantized.float()).norm(dim=1) / norms.clamp(min=1e-12)
    return TableHealth(
        feature=feature,
        rows=len(counts),
        dim=weight.shape[1],
        lookups=lookups,
        trained=float((counts > 0).float().mean()),
        hot=float(counts.topk(hottest).values.sum()) / lookups if lookups else 0.0,
        median_norm=float(norms.median()),
        largest_norm=float(norms.max()),
        finite=bool(torch.isfinite(weight).all()),
        int8_error=float(error.max()),
    )
