"""Modules that put pooled embeddings of several features into another order: FBGEMM's, by its names.

Shapes: pooled_embs [B, sum of embs_dims], feature beside feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn


class PermutePooledEmbeddings:
    """Features' columns in another order: place i gets those of feature permute[i]. No module, as upstream's is none.

    Args:
        embs_dims: [T] columns of each feature.
        permute: [T] the order, a permutation of 0 ... T - 1.
        device: where the numbers are kept; they go to the device of what is permuted.

    Raises:
        ValueError: a number of columns is negative, or `permute` is no permutation of the features.

    Example:
        >>> swap = PermutePooledEmbeddings([1, 2], [1, 0])
        >>> swap(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[2., 3., 1.]])
    """

    def __init__(self, embs_dims: Sequence[int], permute: Sequence[int], device: torch.device | None = None) -> None:
        numbers = _numbers_of(embs_dims, permute, device)
        self._offset_dim_list, self._permute, self._inv_offset_dim_list, self._inv_permute = numbers

    def __call__(self, pooled_embs: Tensor) -> Tensor:
        """The columns [B, sum of embs_dims] in the other order; differentiable."""
        numbers = (self._offset_dim_list, self._permute, self._inv_offset_dim_list, self._inv_permute)
        permuted: Tensor = torch.ops.fbgemm.permute_pooled_embs_auto_grad(
            pooled_embs, *(each.to(pooled_embs.device) for each in numbers)
        )
        return permuted


class PermutePooledEmbeddingsSplit(nn.Module):
    """`PermutePooledEmbeddings` as a module, whose numbers are buffers of its state dict."""

    _offset_dim_list: Tensor
    _permute: Tensor
    _inv_offset_dim_list: Tensor
    _inv_permute: Tensor

    def __init__(self, embs_dims: Sequence[int], permute: Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        offsets, order, inverse_offsets, inverse = _numbers_of(embs_dims, permute, device)
        self.register_buffer("_offset_dim_list", offsets)
        self.register_buffer("_permute", order)
        self.register_buffer("_inv_permute", inverse)
        self.register_buffer("_inv_offset_dim_list", inverse_offsets)

    def forward(self, pooled_embs: Tensor) -> Tensor:
        """The columns [B, sum of embs_dims] in the other order; differentiable."""
        numbers = (self._offset_dim_list, self._permute, self._inv_offset_dim_list, self._inv_permute)
        permuted: Tensor = torch.ops.fbgemm.permute_pooled_embs_auto_grad_split(
            pooled_embs, *(each.to(pooled_embs.device) for each in numbers)
        )
        return permuted


def _numbers_of(embs_dims: Sequence[int], permute: Sequence[int], device: torch.device | None) -> list[Tensor]:
    """Where features begin, their order, where they begin in it, and the order back: int64 [T + 1], [T] twice each."""
    dims, order = [int(dim) for dim in embs_dims], [int(place) for place in permute]
    if min(dims, default=0) < 0:
        raise ValueError(f"embs_dims must not be negative, got {dims}")
    if sorted(order) != list(range(len(dims))):
        raise ValueError(f"permute must have each of the {len(dims)} features of embs_dims once, got {order}")
    inverse = sorted(range(len(order)), key=order.__getitem__)
    lists = (
        accumulate(dims, initial=0), order, accumulate((dims[feature] for feature in order), initial=0), inverse
    )  # fmt: skip
    return [torch.tensor([*numbers], dtype=torch.int64, device=device) for numbers in lists]
