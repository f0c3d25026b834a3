"""Averages of bags whose ids were divided among row shards: sums are divided by what their bags have in all.

The engine divides where a batch is, before its rows are put in order; these are for sharded modules of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardwise.embeddings import PoolingType
from shardwise.jagged import KeyedTensor

# empty bags have sums of 0, which stay 0
_EPS = 1e-6


def _create_mean_pooling_divisor(
    lengths: Tensor,
    keys: Sequence[str],
    offsets: Tensor,
    stride: int,
    stride_per_key: Sequence[int],
    dim_per_key: Tensor,
    pooling_type_to_rs_features: Mapping[str, Sequence[str]],
    embedding_names: Sequence[str],
    embedding_dims: Sequence[int],
    variable_batch_per_feature: bool,
    kjt_inverse_order: Tensor,
    kjt_key_indices: Mapping[str, int],
    kt_key_ordering: Tensor,
    inverse_indices: tuple[Sequence[str], Tensor] | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """What each sum of a pooled output is divided by, [B, sum of D_i]: its bag's length, or 1 of tables that add up.

    Args:
        lengths, offsets, weights: of the batch, [F * B], [F * B + 1] and, where it has weights, [N]: averages are then
            over the sum of a bag's weights.
        keys, stride, stride_per_key: of the batch.
        dim_per_key, embedding_dims, embedding_names: of the output.
        pooling_type_to_rs_features: features of row shards by the value of their pooling; those of SUM are not divided.
        variable_batch_per_feature: whether features differ in batch size; `inverse_indices` then make the full batch.
        kjt_inverse_order: for each key, where it is among the inverse indices.
        kjt_key_indices: where each feature is in the batch.
        kt_key_ordering: for each output, where its feature is in the batch; read if they are not as many.

    Raises:
        ValueError: features differ in batch size, and there are no inverse indices.
    """
    if weights is not None:
        sums = torch.cat([weights.new_zeros(1, dtype=torch.float64), weights.double().cumsum(0)])
        lengths = (sums[offsets[1:].long()] - sums[offsets[:-1].long()]).to(weights.dtype)
    if variable_batch_per_feature:
        if inverse_indices is None:
            raise ValueError("features differ in batch size: the mean of full bags needs inverse_indices")
        named, picked = inverse_indices
        if len(keys) != len(named):
            picked = picked[kjt_inverse_order]
        starts = list(accumulate(stride_per_key, initial=0))[:-1]
        stride = picked.shape[1]
        lengths = lengths[(picked + torch.tensor(starts, device=picked.device).unsqueeze(1)).flatten()]
    lengths = lengths.clone().view(-1, stride)  # [F, B]
    for feature in pooling_type_to_rs_features[PoolingType.SUM.value]:
        lengths[kjt_key_indices[feature]] = 1
    if len(embedding_names) != len(keys):
        lengths = lengths[kt_key_ordering]
    divisor = torch.repeat_interleave(lengths.t(), dim_per_key, dim=1, output_size=sum(embedding_dims))
    return (divisor + _EPS).detach()


def _apply_mean_pooling(keyed_tensor: KeyedTensor, divisor: Tensor) -> KeyedTensor:
    """A pooled output [B, sum of D_i] of sums, divided."""
    return KeyedTensor(keyed_tensor.keys(), keyed_tensor.length_per_key(), keyed_tensor.values() / divisor)
