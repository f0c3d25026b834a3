"""Pooled lookups of many tables as one module: `EmbeddingBagCollection`.

Shapes: KJT of F features and B samples in, KeyedTensor [B, sum of dims] out, one column block per feature. Where the
batch has inverse indices [F, B_full] the output is [B_full, sum of dims].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.jagged import KeyedJaggedTensor, KeyedTensor
from shardwise.jagged.tracing import record_forward
from shardwise.kernels import configs
from shardwise.kernels._op import INTERPRETED, capturing, next_power_of_2, runs_kernel
from shardwise.kernels.features import ORDER, launch_order

from ..config import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from ..interfaces import PooledTables
from ..policy import DEFAULT_POLICY, LookupPolicy
from ..tables.grouped import columns_in_table_order
from ..tables.table_group import TableGroup
from ..tables.variable_batch import (
    expand_pooled,
    inverse_or_none,
    pad_strides,
    require_full_batch,
)
from .collection import TableCollection, require_features

if TYPE_CHECKING:
    from ..tables.table_group import TableGroup


class EmbeddingBagCollection(TableCollection, PooledTables):
    """Tables looked up by a `KeyedJaggedTensor`, the rows of each sample added or averaged.

    Output keys follow the order of `tables`, feature by feature; a feature that several tables share appears as
    `feature@table` for each. Output is fp32 whatever the tables' dtype, unless `policy` says otherwise;
    an empty bag gives zeros. Features of the batch that no table uses, and the padding of a capacity, are ignored.

    A batch with inverse indices comes out as the full batch that they describe, whatever batch size each feature has;
    without them all features need one batch size.

    With `is_weighted` the batch must carry per-id weights, which scale the rows (and are differentiable); without it
    weights in the batch are ignored. After `apply_optimizer_in_backward` on the parameters the backward trains them,
    unless the batch was looked up in `eval()` or the table is frozen by then.

    The backward reads the batch's own ids and weights, not copies. torch raises if they were changed in place since;
    what is written to them past torch, through `ids.numpy()` say, nobody sees: the rows that they name by then train.

    Args:
        tables: one config per table.
        is_weighted: whether lookups are scaled by the batch's weights.
        device: "meta" allocates nothing; strings and `torch.device` are both fine.
        policy: what bad ids and gradients do, and the dtype of the output.

    Raises:
        ValueError: two tables share a name, or a config is inconsistent.

    Example:
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(100, 8, "item", feature_names=["clicked"])])
        >>> ebc(KeyedJaggedTensor(["clicked"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))).values().shape
        torch.Size([2, 8])
    """

    _children_name = "embedding_bags"
    _config_type = EmbeddingBagConfig
    embedding_bags: nn.ModuleDict

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        super().__init__(tables, device, policy)
        self._is_weighted = is_weighted
        self._embedding_names = [name for names in self._names_by_table for name in names]
        self._embedding_dims = [
            config.embedding_dim
            for config, names in zip(self._configs, self._names_by_table, strict=True)
            for _ in names
        ]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look the batch up.

        Raises:
            KeyError: a feature is missing.
            IndexError: an id is outside its table (names feature, table, sample, id and rows), or an inverse index is
                outside of its feature's batch.
            ValueError: weights are missing, offsets are out of order, ids are on another device, or batch sizes differ
                and there are no inverse indices.
            TypeError: ids are not int32 or int64.
        """
        if isinstance(features, Proxy):
            return record_forward(EmbeddingBagCollection.forward, self, features)
        who = type(self).__name__
        features = require_features(features, who, self._is_weighted)
        require_full_batch(features, who)
        inverse = inverse_or_none(features, self._all_features)
        pooled = self._lookup(pad_strides(features), self._pooled)
        if pooled:
            values = columns_in_table_order(pooled, self._columns)
        else:
            values = torch.empty(features.stride(), 0, device=features.device())
        if inverse is not None:
            values = expand_pooled(values, self._embedding_dims, inverse)
        return KeyedTensor(self._embedding_names, self._embedding_dims, values)

    def _pooled(self, group: TableGroup, picked: KeyedJaggedTensor) -> Tensor:
        weights = picked.weights() if self._is_weighted else None
        if group.flat.is_cuda or INTERPRETED:
            order_features(group, picked.length_per_key_or_none())
        return group.pooled(picked.values(), picked.offsets(), weights, trains=self.training)

    def _is_averaged(self, config: BaseEmbeddingConfig) -> bool:
        assert isinstance(config, EmbeddingBagConfig)
        return config.pooling is PoolingType.MEAN

    def _child(self, config: BaseEmbeddingConfig, weight: Tensor) -> nn.Module:
        mode = "mean" if self._is_averaged(config) else "sum"
        rows, dim = weight.shape
        return nn.EmbeddingBag(rows, dim, mode=mode, include_last_offset=True, _weight=weight)


LONGEST_FIRST: Mapping[str, configs.Setting] = {"lookup.long_bags_first": True}
# orders of a group that are kept, for the batches to come and for graphs that recorded them
_MOST = 64


class _Orders:
    """The features of a group as they were made, and by each order that was asked for. None is ever written again."""

    def __init__(self, features: Tensor) -> None:
        self.made = features
        self.by_order: dict[tuple[int, ...], Tensor] = {}


_orders: WeakKeyDictionary[TableGroup, _Orders] = WeakKeyDictionary()


def longest_first(dims: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The order of launches in which, of features of one class and alignment of dims, those of more ids come first."""
    order = []
    # a launch serves a class of dims, or those of one alignment in it
    for _, features in groupby(launch_order(dims), key=lambda f: (next_power_of_2(dims[f]), dims[f] & -dims[f])):
        order += sorted(features, key=lambda f: -lengths[f])
    return order


def order_features(group: TableGroup, lengths: Sequence[int] | None) -> None:
    """Take the features of `group` in the order of a batch's ids a feature, where the host knows these.

    A launch serves the features of one class of dims, and its programs begin in their order: a feature of long bags
    that comes late leaves a few programs at work when all others are done. Rows are added in each bag as ever, no bit
    differs. Only a GPU can decide whether it pays: off unless switched on by `with configs.variant(LONGEST_FIRST)`.
    Where it does not, and while a graph is recorded, they stay as the last batch left them.
    """
    held = _orders.get(group) if _orders else None
    if not configs.setting("lookup.long_bags_first", False):
        if held is not None and any(group.features is ordered for ordered in held.by_order.values()):
            group.features = held.made
        return
    if lengths is None or torch.compiler.is_compiling() or not runs_kernel(group.flat) or capturing():
        return
    # moved to another device, or regrouped
    if held is None or all(group.features is not known for known in (held.made, *held.by_order.values())):
        held = _orders[group] = _Orders(group.features)
    order = tuple(longest_first(group.dims, lengths))
    if order not in held.by_order:
        if len(held.by_order) == _MOST:
            return
        made = held.made.clone()
        made[:, ORDER] = torch.tensor(order, dtype=torch.int64).to(made.device, non_blocking=True)
        held.by_order[order] = made
    group.features = held.by_order[order]
