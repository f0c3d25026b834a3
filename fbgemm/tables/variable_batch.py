"""Batches whose features have batch sizes of their own, as FBGEMM's tables take and answer them.

Shapes: T features, R ranks, B_tr samples of feature t from rank r, B_t their sum, B the largest of these. A batch is
looked up as one of B samples whose last bags are empty; its output is cut to what each rank asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.embeddings.tables.variable_batch import on_device, select_rows
from shardwise.kernels import complete_cumsum, jagged_to_padded_dense


def require_batch_sizes(sizes: Sequence[Sequence[int]], features: int, offsets: Tensor) -> None:
    """Refuse batch sizes [T][R] that are not those of a batch.

    Raises:
        ValueError: they are of other features, of several numbers of ranks, negative, or do not add up to the bags.
    """
    what = "batch_size_per_feature_per_rank"
    if len(sizes) != features or len({len(of_feature) for of_feature in sizes}) > 1:
        raise ValueError(
            f"{what} must have a row for each of {features} features and as many ranks in each, got rows of"
            f" {[len(of_feature) for of_feature in sizes]}"
        )
    if negative := [size for of_feature in sizes for size in of_feature if size < 0]:
        raise ValueError(f"{what} must not be negative, got {negative[0]}")
    bags = offsets.numel() - 1
    if (total := sum(map(sum, sizes))) != bags:
        raise ValueError(f"{what} adds up to {total} bags, offsets are of {bags}")


def pad_bags(offsets: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Offsets [T * B + 1] of the same ids, each feature's bags being followed by empty ones."""
    totals = [sum(of_feature) for of_feature in sizes]
    if len(set(totals)) == 1:
        return offsets
    starts = complete_cumsum(on_device(totals, offsets.device))  # [T + 1]
    lengths = jagged_to_padded_dense(offsets.diff(), starts, max(totals))  # [T, B]
    return complete_cumsum(lengths.flatten())


def cut_to_ranks(pooled: Tensor, sizes: Sequence[Sequence[int]], dims: Sequence[int]) -> Tensor:
    """The rows [B_tr, D_t] of rank after rank, and within it feature after feature, as one vector.

    `pooled` is [B, sum of D_t]. Differentiable.
    """
    # one gather of pieces of columns, of the widest width that divides every feature's
    width = math.gcd(*dims)
    in_row = sum(dims) // width
    asked = torch.tensor(sizes, dtype=torch.int64, device="cpu")  # [T, R]
    pieces = torch.tensor(dims, dtype=torch.int64, device="cpu") // width  # [T]
    first_sample = asked.cumsum(1) - asked
    first_piece = pieces.cumsum(0) - pieces
    # of each pair of a rank and a feature, in this order: [R * T]
    counts = (asked * pieces[:, None]).t().flatten()
    start = (first_sample * in_row + first_piece[:, None]).t().flatten()
    per_sample = pieces.repeat(asked.shape[1])
    pair = torch.arange(len(counts), device="cpu").repeat_interleave(counts)
    within = torch.arange(len(pair), device="cpu") - (counts.cumsum(0) - counts)[pair]
    of_sample = per_sample[pair]
    at = start[pair] + within // of_sample * in_row + within % of_sample
    rows = pooled.reshape(-1, width)
    return select_rows(rows, at.to(pooled.device, non_blocking=True)).flatten()
