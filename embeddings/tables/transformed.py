"""Lookups under the transforms of `torch.func` (grad, vmap, jacrev): by torch's own ops, which have rules for them.

Our lookups are autograd functions that write buffers, which a transform cannot look into. Bits may differ from theirs.
Shapes: ids [N], offsets [F*B + 1], pooled [B, sum of dims], rows [N, dim].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.features import BASE, COLUMN, DIM, MEAN, ROWS


def refuse_fused(tables: Sequence[str]) -> None:
    """RuntimeError: tables that their backward trains have no gradient for a transform."""
    raise RuntimeError(
        f"tables {list(tables)} have an optimizer in their backward, which the transforms of torch.func do not run:"
        " give their weights to torch.func.functional_call, or take gradients by backward()"
    )


def transformed_pooled(
    flat: Tensor, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None, features: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `kernels.pooled_lookup`."""
    pieces = []
    for table, facts, own, ends in _by_feature(flat, offsets, features):
        weights = None if per_id_weights is None else per_id_weights[own].to(table.dtype)
        mode = "mean" if facts[MEAN] and weights is None else "sum"
        sums = F.embedding_bag(
            ids[own], table, ends, mode=mode, per_sample_weights=weights, include_last_offset=True
        )  # fmt: skip
        if facts[MEAN] and weights is not None:
            sums = sums / ends.diff().clamp(min=1).unsqueeze(1)
        pieces.append((facts[COLUMN], sums))
    return torch.cat([sums for _, sums in sorted(pieces, key=lambda piece: piece[0])], dim=1).to(dtype)


def transformed_sequence(flat: Tensor, ids: Tensor, offsets: Tensor, features: Tensor, dtype: torch.dtype) -> Tensor:
    """As `kernels.sequence_lookup`."""
    rows = [F.embedding(ids[own], table) for table, _, own, _ in _by_feature(flat, offsets, features)]
    # ids past the last offset are nobody's
    rest = ids.shape[0] - sum(part.shape[0] for part in rows)
    return torch.cat([*rows, rows[0].new_zeros(rest, rows[0].shape[1])]).to(dtype)


def _by_feature(flat: Tensor, offsets: Tensor, features: Tensor) -> Iterator[tuple[Tensor, list[int], slice, Tensor]]:
    """Of each feature: its table, the numbers of its row of `features`, where its ids are, and the ends of its bags."""
    count = features.shape[0]
    samples = (offsets.shape[0] - 1) // count
    # host sync on CUDA: torch's lookups take each feature's ids by themselves
    begins, numbers = offsets[::samples].tolist() if samples else [0] * (count + 1), features.tolist()
    for f, facts in enumerate(numbers):
        base, rows, dim = facts[BASE], facts[ROWS], facts[DIM]
        table = flat[base : base + rows * dim].view(rows, dim)
        ends = offsets[f * samples : (f + 1) * samples + 1] - begins[f]
        yield (table.float() if table.element_size() < 4 else table), facts, slice(begins[f], begins[f + 1]), ends
