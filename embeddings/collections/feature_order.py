"""In which order a lookup takes features: those of long bags first, which only a GPU can decide and is off by default.

A launch serves the features of one class of dims, and its programs begin in their order. A feature of long bags that
comes late leaves a few programs at work when all others are done. Rows are added in each bag as ever: no bit differs.
Switched on by `with configs.variant(LONGEST_FIRST)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwise.kernels import configs
from shardwise.kernels._op import capturing, next_power_of_2, runs_kernel
from shardwise.kernels.features import ORDER, launch_order

if TYPE_CHECKING:
    from ..tables.table_group import TableGroup

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
