"""DLRM with a transformer between dense features and embeddings: `DLRM_Transformer` of TorchRec's experiments.

With x_0 = MLP(dense) and the pooled embeddings x_1 .. x_F as vectors of D numbers:

    logit = MLP_over( encoder(x_0, x_1, ..., x_F) side by side )

The encoder is torch's, made as TorchRec makes it: it takes the first dim, the batch, for the sequence. So a vector
attends to the vectors at its place in other samples, and a sample's logit depends on the batch that it is in.

Shapes: dense output [B, D], embeddings [B, F, D].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.embeddings import EmbeddingBagCollection

from .dlrm import DLRM, OverArch


class InteractionTransformerArch(nn.Module):
    """Dense output [B, D] and embeddings [B, F, D] -> the encoder's output of all of them, [B, (F + 1) D].

    Args:
        num_sparse_features: F; with none the dense output is returned.
        embedding_dim: D, a multiple of `nhead`.
        nhead: attention heads.
        ntransformer_layers: layers, each with torch's width of 2,048 and dropout of 0.1 when training.

    Raises:
        ValueError: `embedding_dim` is not a multiple of `nhead`.
    """

    def __init__(
        self, num_sparse_features: int, embedding_dim: int, nhead: int = 8, ntransformer_layers: int = 4
    ) -> None:
        super().__init__()
        if nhead < 1 or embedding_dim % nhead:
            raise ValueError(f"embedding_dim must be a multiple of nhead, got {embedding_dim} and {nhead}")
        self.F, self.nhead, self.ntransformer_layers = num_sparse_features, nhead, ntransformer_layers
        layer = nn.TransformerEncoderLayer(embedding_dim, nhead)
        # nested tensors need the batch first, of which torch warns
        self.interarch_TE = nn.TransformerEncoder(layer, ntransformer_layers, enable_nested_tensor=False)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        if self.F == 0:
            return dense_features
        vectors = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)  # [B, F + 1, D]
        encoded: Tensor = self.interarch_TE(vectors)
        return encoded.flatten(1)


class DLRM_Transformer(DLRM):
    """DLRM whose interactions are a transformer encoder of `ntransformer_layers` layers with `nhead` heads."""

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        nhead: int = 8,
        ntransformer_layers: int = 4,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )
        features, dim = self.sparse_arch.F, self.sparse_arch.D
        self.inter_arch = InteractionTransformerArch(features, dim, nhead, ntransformer_layers).to(dense_device)
        self.over_arch = OverArch((features + 1) * dim, over_arch_layer_sizes, device=dense_device)
