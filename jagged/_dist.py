"""How a keyed batch travels between ranks: cut by key, sent as flat tensors, and put together key by key again.

Segments of one rank come in the order of its keys; `recat` says in which order they make up the batch of the receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.kernels import complete_cumsum, permute_1d, permute_2d

from ._keys import starts_of

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
    total = values.shape[0]
    if variable:
        strides = tensors[2]
        table = strides.view(ranks, len(keys)).T if strides.numel() else strides.new_zeros(len(keys), 1)
        sizes = None
        if strides.numel():
            ends = complete_cumsum(lengths)[complete_cumsum(strides)].diff()
            sizes = ends.view(ranks, len(keys)).sum(0)
            if recat is not None:
                _, values, weights = permute_1d(recat, ends, values, weights, permuted_lengths_sum=total)
                _, lengths, _ = permute_1d(recat, strides, lengths, permuted_lengths_sum=lengths.shape[0])
        if stagger > 1:
            table = table[:, torch.arange(ranks, device=table.device).view(stagger, -1).T.flatten()]
        # host sync: batch sizes and counts are known on the host of every batch
        per_rank, known = table.cpu(), None if sizes is None else sizes.tolist()
        return KeyedJaggedTensor(keys, values, weights, lengths, stride_per_key_per_rank=per_rank, length_per_key=known)
    if stride_per_rank is None:
        raise ValueError("dist_init needs stride_per_rank, the batch size of each rank")
    if recat is not None and lengths.shape[0]:
        stride = stride_per_rank[0]
        if all(n == stride for n in stride_per_rank):
            lengths, values, weights = permute_2d(
                recat, lengths.view(-1, stride), values, weights, permuted_lengths_sum=total
            )
        else:
            lengths, values, weights = permute_1d(recat, lengths, values, weights, permuted_lengths_sum=total)
    return KeyedJaggedTensor(keys, values, weights, lengths.view(-1), stride=sum(stride_per_rank)).sync()
