"""How a keyed batch travels between ranks: cut by key, sent as flat tensors, and put together key by key again.

Segments of one rank come in the order of its keys; `recat` says in which order they make up the batch of the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.kernels import permute_segments

from ._strides import starts_of

if TYPE_CHECKING:
    from .keyed_jagged_tensor import KeyedJaggedTensor


def labels(variable: bool, weighted: bool) -> list[str]:
    """Names of the tensors that travel, in their order."""
    return ["lengths", "values", *["strides"] * variable, *["weights"] * weighted]


def splits(
    per_key: Sequence[int], length_per_key: Sequence[int], what: Sequence[str], key_splits: Sequence[int]
) -> list[list[int]]:
    """Sizes of the pieces of each tensor, piece i being the next `key_splits[i]` keys."""
    if sum(key_splits) != len(per_key) or min(key_splits, default=0) < 0:
        raise ValueError(f"key_splits must be >= 0 and sum to {len(per_key)} keys, got {list(key_splits)}")
    cuts = starts_of(key_splits)
    of_values = [sum(length_per_key[a:b]) for a, b in pairwise(cuts)]
    sizes = {
        "lengths": [sum(per_key[a:b]) for a, b in pairwise(cuts)],
        "values": of_values,
        "strides": list(key_splits),
        "weights": of_values,
    }
    return [sizes[name] for name in what]


def init(
    keys: Sequence[str],
    tensors: Sequence[Tensor],
    variable: bool,
    ranks: int,
    recat: Tensor | None,
    stride_per_rank: Sequence[int] | None,
    stagger: int,
) -> KeyedJaggedTensor:
    """KeyedJaggedTensor.dist_init."""
    from .keyed_jagged_tensor import KeyedJaggedTensor

    needed = 3 if variable else 2
    if len(tensors) not in (needed, needed + 1):
        names = ", ".join(labels(variable, True))
        raise ValueError(f"dist_init needs {needed} or {needed + 1} tensors ({names}), got {len(tensors)}")
    lengths, values = tensors[0], tensors[1]
    weights = tensors[-1] if len(tensors) > needed else None
    if variable:
        # host sync: batch sizes are known on the host of every batch
        per_segment: list[int] = tensors[2].tolist()
        rows = [per_segment[k :: len(keys)] for k in range(len(keys))] if per_segment else [[0]] * len(keys)
        if stagger > 1:
            turned = torch.arange(ranks).view(stagger, -1).T.flatten().tolist()
            rows = [[row[rank] for rank in turned] for row in rows]
        lengths, values, weights = _recat(lengths, values, weights, per_segment, recat)
        return KeyedJaggedTensor(keys, values, weights, lengths, stride_per_key_per_rank=rows).sync()
    if stride_per_rank is None:
        raise ValueError("dist_init needs stride_per_rank, the batch size of each rank")
    per_segment = [n for n in stride_per_rank for _ in keys]
    lengths, values, weights = _recat(lengths, values, weights, per_segment, recat)
    return KeyedJaggedTensor(keys, values, weights, lengths, stride=sum(stride_per_rank)).sync()


def _recat(
    lengths: Tensor, values: Tensor, weights: Tensor | None, per_segment: Sequence[int], recat: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(rank, key) segments, each of `per_segment` bags, in the order of `recat`."""
    if recat is None or not per_segment:
        return lengths, values, weights
    # host sync: pieces are cut on the host
    order = recat.tolist()
    sizes = [int(part.sum()) for part in torch.split_with_sizes(lengths, list(per_segment))]
    (lengths,) = permute_segments([lengths], per_segment, order)
    moved = permute_segments([values] if weights is None else [values, weights], sizes, order)
    return lengths, moved[0], None if weights is None else moved[1]
