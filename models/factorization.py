"""The two halves of DeepFM over lists of embeddings: a dense module for high orders, a factorization machine for pairs.

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", 2017, arXiv:1703.04247.

Shapes: embeddings [B, n, D] or [B, D], each of its own n and D; side by side they are [B, M].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn


def _side_by_side(embeddings: Sequence[Tensor]) -> Tensor:
    return torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)


class DeepFM(nn.Module):
    """The deep half: `dense_module` of all embeddings side by side, [B, M] -> what the module gives."""

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        return cast(Tensor, self.dense_module(_side_by_side(embeddings)))


class FactorizationMachine(nn.Module):
    """The pairwise half: the sum of the products of all pairs of the M numbers of a sample, [B, 1].

    With s the sum of the numbers and q that of their squares it is (s^2 - q) / 2.
    """

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        numbers = _side_by_side(embeddings)
        total = numbers.sum(dim=1, keepdim=True)
        squares = (numbers * numbers).sum(dim=1, keepdim=True)
        return 0.5 * (total * total - squares)
