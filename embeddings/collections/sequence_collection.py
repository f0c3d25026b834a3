"""Unpooled lookups of many tables as one module: `EmbeddingCollection`.

Shapes: KJT of F features and B samples in; per feature a JaggedTensor with values [ids of the feature, dim] out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor
from shardwise.jagged.tracing import record_forward

from ..config import BaseEmbeddingConfig, EmbeddingConfig
from ..interfaces import SequenceTables, require_one_dim
from ..policy import DEFAULT_POLICY, LookupPolicy
from ..tables.grouped import rows_by_name
from ..tables.table_group import TableGroup
from ..tables.variable_batch import pad_strides
from .collection import TableCollection, require_features


class EmbeddingCollection(TableCollection, SequenceTables):
    """Tables looked up by a `KeyedJaggedTensor`, one row per id.

    The output is a dict in the order of `tables`, feature by feature (`feature@table` where tables share a feature);
    each JaggedTensor has fp32 values [n, dim] and the feature's lengths. With `need_indices` it carries the ids as its
    weights. Per-id weights of the batch are ignored; padding of a batch with a capacity is left out. What a backward
    trains and reads is said at `EmbeddingBagCollection`.

    Of a batch with inverse indices every feature comes out as the full batch that they describe, rows, lengths and ids;
    without them each keeps its own batch size.

    `use_gather_select`, `use_gather_select_per_sharding` and `use_sorted_select` choose among TorchRec's ways to bring
    rows in order; here rows are looked up in the order of their ids, and gradients of a row are added in one order, so
    that they are kept and no bit depends on them.

    Raises:
        ValueError: tables differ in `embedding_dim`, share a name, or a config is inconsistent.

    Example:
        >>> ec = EmbeddingCollection([EmbeddingConfig(100, 8, "item", feature_names=["seen"])])
        >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        >>> ec(batch)["seen"].values().shape
        torch.Size([3, 8])
    """

    _children_name = "embeddings"
    _config_type = EmbeddingConfig
    embeddings: nn.ModuleDict

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: dict[str, bool] | None = None,
        *,
        use_sorted_select: bool = False,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        require_one_dim(tables)
        super().__init__(tables, device, policy)
        self._need_indices = need_indices
        self._use_gather_select, self._use_sorted_select = use_gather_select, use_sorted_select
        self._use_gather_select_per_sharding = use_gather_select_per_sharding
        self._embedding_dim = tables[0].embedding_dim if tables else 0

    def use_gather_select(self) -> bool:
        """As given."""
        return self._use_gather_select

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """As given: by sharding type what counts there in the place of `use_gather_select`."""
        return self._use_gather_select_per_sharding

    def use_sorted_select(self) -> bool:
        """As given, or set since."""
        return self._use_sorted_select

    def set_use_sorted_select(self, use_sorted_select: bool) -> None:
        """Change it."""
        self._use_sorted_select = use_sorted_select

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look the batch up.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as `EmbeddingBagCollection.forward`.
        """
        if isinstance(features, Proxy):
            return record_forward(EmbeddingCollection.forward, self, features)
        features = require_features(features, type(self).__name__, False)
        looked_up = self._lookup(pad_strides(features), self._rows)
        return rows_by_name(features, looked_up, self._members, self._names_by_table, need_indices=self._need_indices)

    def _rows(self, group: TableGroup, picked: KeyedJaggedTensor) -> Tensor:
        return group.sequence(picked.values(), picked.offsets(), trains=self.training)

    def _child(self, config: BaseEmbeddingConfig, weight: Tensor) -> nn.Module:
        return nn.Embedding(config.num_embeddings, config.embedding_dim, _weight=weight)
