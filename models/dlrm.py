"""DLRM: dense features and embeddings meet in pairwise dot products.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019,
arXiv:1906.00091. With x_0 = MLP(dense) and the pooled embeddings x_1 .. x_F of the features:

    logit = MLP_over( x_0 || x_i . x_j  for all 0 <= i < j <= F )

Shapes: dense features [B, dense_in], dense output [B, D], embeddings [B, F, D], interactions [B, D + F (F + 1) / 2],
logits [B, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx, nn

from shardwise.embeddings import EmbeddingBagCollection, embedding_names_by_table
from shardwise.errors import RefusedValueError

from .mlp import MLP

if TYPE_CHECKING:
    from shardwise.data import Batch
    from shardwise.jagged import KeyedJaggedTensor, KeyedTensor


class SparseArch(nn.Module):
    """Looks up and pools: features of B samples -> [B, F, D], in the order of the tables and of their features.

    All tables must have one embedding_dim. A feature that several tables serve counts once for each of them.

    Raises:
        ValueError: there are no tables, or they are of several dims.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        configs = embedding_bag_collection.embedding_bag_configs()
        if not configs:
            raise RefusedValueError(
                "At least one embedding bag is required: embedding_bag_collection has no tables; a model of dense"
                " features alone is DenseArch, InteractionArch(0), which gives the dense output, and OverArch"
            )
        dims = {config.name: config.embedding_dim for config in configs}
        if len(set(dims.values())) > 1:
            raise RefusedValueError(f"All EmbeddingBagConfigs must have the same dimension, got {dims}")
        self.embedding_bag_collection = embedding_bag_collection
        self.D: int = configs[0].embedding_dim
        # the keys of the collection's output
        self._names = [name for names in embedding_names_by_table(configs) for name in names]
        self.F: int = len(self._names)

    @property
    def sparse_feature_names(self) -> list[str]:
        return self._names

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = cast("KeyedTensor", self.embedding_bag_collection(features))
        # a trace has no keys to compare, and our collections give them in this order
        if isinstance(pooled, fx.Proxy) or list(pooled.keys()) == self._names:
            values = pooled.values()
        else:
            by_name = pooled.to_dict()
            values = torch.cat([by_name[name] for name in self._names], dim=1)
        # B is spelled out because -1 cannot be inferred for an empty batch
        return values.reshape(values.size(0), self.F, self.D)


class DenseArch(nn.Module):
    """The bottom MLP: dense features [B, in_features] -> [B, layer_sizes[-1]], which must be the tables' dim."""

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.model = MLP(in_features, layer_sizes, device=device)

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.model(features)
        return output


class InteractionArch(nn.Module):
    """Dense output [B, D] and embeddings [B, F, D] -> [B, D + F (F + 1) / 2].

    The output is the dense vector followed by the dot products of all pairs (i, j), i < j, row by row, where vector 0
    is the dense one. All pairs come from one batched product.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.triu_indices: Tensor
        self.register_buffer("triu_indices", self._pairs(), persistent=False)

    def _pairs(self, device: torch.device | None = None) -> Tensor:
        return torch.triu_indices(self.F + 1, self.F + 1, offset=1, device=device)

    def reset_parameters(self) -> None:
        """Number the pairs anew, for a module that was made on meta."""
        self.register_buffer("triu_indices", self._pairs(self.get_buffer("triu_indices").device), persistent=False)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        if self.F == 0:
            return dense_features
        vectors = torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)  # [B, F + 1, D]
        products = torch.bmm(vectors, vectors.transpose(1, 2))  # [B, F + 1, F + 1]
        pairs = self.triu_indices  # [2, F (F + 1) / 2]
        return torch.cat((dense_features, products[:, pairs[0], pairs[1]]), dim=1)


class OverArch(nn.Module):
    """The top MLP: [B, in_features] -> [B, layer_sizes[-1]]; the last layer is linear. At least two layers.

    Raises:
        ValueError: there are fewer layers.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | str | None = None) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ValueError(
                f"OverArch must have multiple layers. layer_sizes needs at least two, got {list(layer_sizes)}"
            )
        self.model = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.model(features)
        return output


class DLRM(nn.Module):
    """Dense features [B, dense_in_features] and sparse features of B samples -> logits [B, over_arch_layer_sizes[-1]].

    The last of `dense_arch_layer_sizes` must equal the tables' embedding_dim. `dense_device` places all layers but the
    tables, which stay where `embedding_bag_collection` has them.

    Raises:
        ValueError: the last of `dense_arch_layer_sizes` is another.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> model = DLRM(tables, dense_in_features=3, dense_arch_layer_sizes=[8, 4], over_arch_layer_sizes=[8, 1])
        >>> batch = KeyedJaggedTensor(["clicked"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        >>> model(torch.randn(2, 3), batch).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        dim, features = self.sparse_arch.D, self.sparse_arch.F
        if not dense_arch_layer_sizes or dense_arch_layer_sizes[-1] != dim:
            raise ValueError(
                f"embedding_bag_collection dimension ({dim}) and final dense arch layer size must match: the last of"
                f" dense_arch_layer_sizes must be the tables' embedding_dim, got {list(dense_arch_layer_sizes)}"
            )
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, device=dense_device)
        self.inter_arch: nn.Module = InteractionArch(features).to(dense_device)
        self.over_arch = OverArch(dim + features * (features + 1) // 2, over_arch_layer_sizes, device=dense_device)

    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compile all layers but the tables with `torch.compile`; on a GPU the default mode makes CUDA graphs of them.

        Layers keep their names in state dicts. Those that are compiled already stay as they are; a copy of the model
        is not compiled.

        Args:
            compile_mode: as `torch.compile` has it.
        """
        for layers in (self.dense_arch, self.inter_arch, self.over_arch):
            # torch keeps the compiled call there, and leaves it out of copies
            if layers._compiled_call_impl is None:
                layers.compile(mode=compile_mode)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch(sparse_features)
        return cast(Tensor, self.over_arch(self.inter_arch(dense, sparse)))


class DLRMTrain(nn.Module):
    """A DLRM and its loss: `Batch -> (loss, (loss, logits [B], labels [B]))`, of which only the first has a gradient.

    The loss is the binary cross-entropy of the logits, averaged over the batch; the model must have one logit.
    """

    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
