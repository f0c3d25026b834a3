"""A model of DeepFM: dense features and embeddings meet in a dense layer and in a factorization machine.

With d = MLP(dense) and the pooled embeddings x_1 .. x_F of the features:

    probability = sigmoid(linear( d || deep(d, x_1 .. x_F) || fm(d, x_1 .. x_F) ))

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", 2017, arXiv:1703.04247: a dense
module for high orders, a factorization machine for pairs, both of embeddings [B, n, D] or [B, D] side by side, [B, M].

`DenseArch`, `OverArch` and `SparseArch` here are this model's, not DLRM's.

Shapes: dense features [B, num_dense_features], d and every embedding [B, D], the output [B, 1].
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.embeddings import EmbeddingBagCollection

# TorchScript, which cannot take them, looks them up in this module to say so
from shardwise.jagged import KeyedJaggedTensor, KeyedTensor

from .dlrm import SparseArch as _Features


def _side_by_side(embeddings: list[Tensor]) -> Tensor:
    return torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)


class DeepFM(nn.Module):
    """The deep half: `dense_module` of all embeddings side by side, [B, M] -> what the module gives."""

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        deep: Tensor = self.dense_module(_side_by_side(embeddings))
        return deep


class FactorizationMachine(nn.Module):
    """The pairwise half: the sum of the products of all pairs of the M numbers of a sample, [B, 1].

    With s the sum of the numbers and q that of their squares it is (s^2 - q) / 2.
    """

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        numbers = _side_by_side(embeddings)
        total = numbers.sum(dim=1, keepdim=True)
        squares = (numbers * numbers).sum(dim=1, keepdim=True)
        return 0.5 * (total * total - squares)


class ModelInput(Protocol):
    """The fields of a batch that the wrappers read; TorchRec's test models have it under this name."""

    @property
    def float_features(self) -> Tensor: ...

    @property
    def idlist_features(self) -> KeyedJaggedTensor: ...

    @property
    def label(self) -> Tensor: ...


class SparseArch(nn.Module):
    """Looks up and pools: features of B samples -> a KeyedTensor [B, sum of dims]."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return cast("KeyedTensor", self.embedding_bag_collection(features))


class DenseArch(nn.Module):
    """Dense features [B, in_features] -> [B, embedding_dim], by two layers."""

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size), nn.ReLU(), nn.Linear(hidden_layer_size, embedding_dim), nn.ReLU()
        )

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.model(features)
        return output


class FMInteractionArch(nn.Module):
    """Dense output [B, D] and pooled embeddings -> [B, D + deep_fm_dimension + 1].

    `sparse_feature_names` are the keys of the embeddings to take, `fm_in_features` their dims and D together.
    """

    def __init__(self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int) -> None:
        super().__init__()
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU()))
        self.fm = FactorizationMachine()

    def forward(self, dense_features: Tensor, sparse_features: KeyedTensor) -> Tensor:
        if not self.sparse_feature_names:
            return dense_features
        embeddings = [dense_features, *(sparse_features[name] for name in self.sparse_feature_names)]
        return torch.cat([dense_features, self.deep_fm(embeddings), self.fm(embeddings)], dim=1)


class OverArch(nn.Module):
    """[B, in_features] -> a probability [B, 1]."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.model(features)
        return output


class SimpleDeepFMNN(nn.Module):
    """Dense features [B, num_dense_features] and sparse features of B samples -> probabilities [B, 1].

    All tables must have one embedding_dim. A feature that several tables serve counts once for each of them.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        features = _Features(embedding_bag_collection)
        names, dim = features.sparse_feature_names, features.D
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, dim)
        self.inter_arch = FMInteractionArch(dim * (len(names) + 1), names, deep_fm_dimension)
        self.over_arch = OverArch(dim + deep_fm_dimension + 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch(sparse_features)
        return cast(Tensor, self.over_arch(self.inter_arch(dense, sparse)))


class SimpleDeepFMNNWrapper(SimpleDeepFMNN):
    """The model on a whole batch: (loss, probabilities [B, 1]) when training, else the probabilities.

    The loss is that of TorchRec's: the binary cross-entropy that takes its input for logits, of the probabilities.
    """

    def forward(self, model_input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        prediction = super().forward(model_input.float_features, model_input.idlist_features)
        return with_loss(prediction, model_input.label) if self.training else prediction


def with_loss(prediction: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The binary cross-entropy of `prediction` [B, 1] as logits for `label` [B], and the prediction."""
    return F.binary_cross_entropy_with_logits(prediction.squeeze(1), label), prediction
