"""DLRM with other ways for dense features and embeddings to meet: a cross network, or products of projections.

With x the dense output and the F embeddings side by side, [B, (F + 1) D]:

    DLRM_DCN          logit = MLP_over( low-rank cross network of x )
    DLRM_Projection   logit = MLP_over( dense || A(x) B(x) ),   A(x) [B, p, D] and B(x) [B, D, q] two MLPs

Shapes: dense output [B, D], embeddings [B, F, D].
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.embeddings import EmbeddingBagCollection

from .crossnet import LowRankCrossNet
from .deepfm import ModelInput, with_loss
from .dlrm import DLRM, DenseArch, OverArch


def choose(n: int, k: int) -> int:
    """How many ways there are to choose k of n; 0 where k is not in [0, n]."""
    return math.comb(n, k) if 0 <= k <= n else 0


def _side_by_side(dense_features: Tensor, sparse_features: Tensor) -> Tensor:
    return torch.cat((dense_features, sparse_features.flatten(1)), dim=1)


class InteractionDCNArch(nn.Module):
    """Dense output [B, D] and embeddings [B, F, D] -> `crossnet` of all of them, [B, (F + 1) D]."""

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        if self.F == 0:
            return dense_features
        crossed: Tensor = self.crossnet(_side_by_side(dense_features, sparse_features))
        return crossed


class InteractionProjectionArch(nn.Module):
    """Dense output [B, D] and embeddings [B, F, D] -> [B, D + p q]: the dense vector and all products of projections.

    The branches make p D and q D numbers of the (F + 1) D that there are; the first are p vectors one after another,
    the second the columns of a [D, q] matrix.
    """

    def __init__(
        self, num_sparse_features: int, interaction_branch1: nn.Module, interaction_branch2: nn.Module
    ) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        if self.F == 0:
            return dense_features
        batch, dim = dense_features.shape
        values = _side_by_side(dense_features, sparse_features)  # [B, (F + 1) D]
        first, second = self.interaction_branch1(values), self.interaction_branch2(values)
        # sizes are spelled out because -1 cannot be inferred for an empty batch
        rows = first.reshape(batch, first.shape[1] // dim, dim)  # [B, p, D]
        columns = second.reshape(batch, dim, second.shape[1] // dim)  # [B, D, q]
        return torch.cat((dense_features, torch.bmm(rows, columns).flatten(1)), dim=1)


class DLRM_DCN(DLRM):
    """DLRM whose interactions are a cross network of `dcn_num_layers` layers of rank `dcn_low_rank_dim`."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )
        features = self.sparse_arch.F
        width = (features + 1) * self.sparse_arch.D
        crossnet = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim)
        self.inter_arch = InteractionDCNArch(features, crossnet).to(dense_device)
        self.over_arch = OverArch(width, over_arch_layer_sizes, device=dense_device)


class DLRM_Projection(DLRM):
    """DLRM whose interactions are products of two projections; the last size of each must be a multiple of D.

    Raises:
        ValueError: it is none, or as `DLRM`.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        interaction_branch1_layer_sizes: Sequence[int],
        interaction_branch2_layer_sizes: Sequence[int],
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )
        features, dim = self.sparse_arch.F, self.sparse_arch.D
        branches, products = [], 1
        for name, sizes in (
            ("interaction_branch1_layer_sizes", interaction_branch1_layer_sizes),
            ("interaction_branch2_layer_sizes", interaction_branch2_layer_sizes),
        ):
            if not sizes or sizes[-1] % dim:
                branch, last = name.split("_")[1], sizes[-1] if sizes else 0
                raise ValueError(
                    f"Final interaction {branch} layer size ({last}) is not a multiple of embedding"
                    f" size ({dim}): the last of {name} must be one, got {list(sizes)}"
                )
            branches.append(DenseArch((features + 1) * dim, sizes, device=dense_device))
            products *= sizes[-1] // dim
        self.inter_arch = InteractionProjectionArch(features, *branches)
        self.over_arch = OverArch(dim + products, over_arch_layer_sizes, device=dense_device)


class DLRMWrapper(DLRM):
    """DLRM on a whole batch: (loss, logits [B, 1]) when training, else the logits."""

    def forward(self, model_input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(model_input.float_features, model_input.idlist_features)
        return with_loss(logits, model_input.label) if self.training else logits
