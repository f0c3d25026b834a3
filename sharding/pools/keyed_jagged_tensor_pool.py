"""`ShardedKeyedJaggedTensorPool`: a `KeyedJaggedTensorPool` whose rows lie in blocks over ranks.

Rows travel without padding: how many values each feature has goes first. Shapes as in `ragged_rows.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.embeddings.pools import (
    KeyedJaggedTensorPool,
    RaggedRows,
    check_ids,
    read_padded,
    row_major,
    to_keyed,
    write_padded,
)
from shardwise.embeddings.pools.object_pool import warn_of_host_memory
from shardwise.embeddings.pools.ragged_rows import KeepsPaddedRows, select_rows
from shardwise.jagged import KeyedJaggedTensor

from ..comms.awaitable import LazyAwaitable
from ..comms.env import ShardingEnv
from .plan import ObjectPoolShardingPlan
from .sharded_pool import PendingRows, ShardedObjectPool, send_rows


class KeyedJaggedTensorPoolAwaitable(LazyAwaitable[KeyedJaggedTensor]):
    """A batch of n to come; rows come by rank, and `order` [n] is where each one stood."""

    def __init__(
        self, lengths: Tensor, values: PendingRows, weights: PendingRows | None, order: Tensor, keys: list[str]
    ) -> None:
        super().__init__()
        self._lengths, self._values, self._weights, self._order, self._keys = lengths, values, weights, order, keys

    def _wait_impl(self) -> KeyedJaggedTensor:
        weights = None if self._weights is None else self._weights.wait()
        rows = RaggedRows(self._lengths, self._values.wait(), weights)
        return to_keyed(select_rows(rows, torch.argsort(self._order)), self._keys)


class ShardedKeyedJaggedTensorPool(KeepsPaddedRows, ShardedObjectPool[KeyedJaggedTensor]):
    """A `KeyedJaggedTensorPool` over the ranks of `sharding_env`: `lookup(ids)` gives a KeyedJaggedTensor to come.

    Args:
        device: the CPU unless given.
        enable_uvm: has no effect but a warning.
        module: the pool whose rows it begins with; empty ones unless given, or where it is on meta.

    Raises:
        RefusedValueError: as `ShardedObjectPool`.
    """

    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: Mapping[str, int],
        values_dtype: torch.dtype,
        is_weighted: bool,
        sharding_env: ShardingEnv,
        sharding_plan: ObjectPoolShardingPlan,
        device: torch.device | str | None = None,
        enable_uvm: bool = False,
        *,
        module: KeyedJaggedTensorPool | None = None,
    ) -> None:
        super().__init__(sharding_env, pool_size, sharding_plan, device)
        warn_of_host_memory(enable_uvm, "ShardedKeyedJaggedTensorPool")
        self._feature_max_lengths, self._is_weighted = dict(feature_max_lengths), is_weighted
        whole = module
        if whole is None:
            whole = KeyedJaggedTensorPool(pool_size, feature_max_lengths, values_dtype, is_weighted)
        self._hold(whole.named_buffers(), not whole.values.is_meta)

    @property
    def unsharded_module_type(self) -> type[KeyedJaggedTensorPool]:
        """`KeyedJaggedTensorPool`."""
        return KeyedJaggedTensorPool

    def lookup(self, ids: Tensor) -> LazyAwaitable[KeyedJaggedTensor]:  # type: ignore[override]
        """The rows of `ids` [n] as a batch of n, to come. Raises as `check_ids`, on all ranks."""

        def checked() -> Tensor:
            check_ids(ids, self._pool_size, self._device)
            return ids

        route, asked = self._ask(checked)
        rows = read_padded(self._rows, asked)
        lengths = send_rows(self._lookups, rows.lengths, route.came, route.sent).wait()
        sent, came = _totals(rows.lengths, route.came), _totals(lengths, route.sent)
        values = send_rows(self._lookups, rows.values, sent, came)
        weights = None if rows.weights is None else send_rows(self._lookups, rows.weights, sent, came)
        return KeyedJaggedTensorPoolAwaitable(lengths, values, weights, route.order, list(self._feature_max_lengths))

    @torch.no_grad()
    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Overwrite the rows of `ids` [n] by a batch of n.

        Raises:
            IndexError, ValueError: as `KeyedJaggedTensorPool.update`, on all ranks; nothing is written then.
        """
        sent: list[list[int]] = []
        made: list[RaggedRows] = []

        def checked() -> tuple[Tensor, list[list[int]]]:
            check_ids(ids, self._pool_size, self._device)
            rows = row_major(values, ids, self._feature_max_lengths, self.values_dtype, self._is_weighted, self._device)
            order, split = self._blocks.split(ids)
            hosts = self._everywhere.world_size // len(split)
            made.append(select_rows(rows, order.repeat(hosts)))
            totals = _totals(made[0].lengths, split * hosts)
            sent.extend(list(pair) for pair in zip(split * hosts, totals, strict=True))
            return order.repeat(hosts), sent

        order, came = self._route(self._everywhere, checked)
        (rows_sent, values_sent), (rows_came, values_came) = (
            map(list, zip(*sent, strict=True)),
            map(list, zip(*came, strict=True)),
        )
        rows = made[0]
        pending = [send_rows(self._everywhere, t, rows_sent, rows_came) for t in (ids.long()[order], rows.lengths)]
        flat = [rows.values, *([] if rows.weights is None else [rows.weights])]
        pending += [send_rows(self._everywhere, t, values_sent, values_came) for t in flat]
        new_ids, lengths, new_values, *weights = [one.wait() for one in pending]
        mine = new_ids - self._blocks.borders[self._holders.rank]
        write_padded(self._rows, mine, RaggedRows(lengths, new_values, weights[0] if weights else None))


def _totals(lengths: Tensor, counts: Sequence[int]) -> list[int]:
    """How many values the rows for each rank have: lengths [n, F], counts of rows by rank."""
    # host sync on CUDA: sizes of what is sent
    by_row: list[int] = lengths.sum(1).tolist()
    totals, at = [], 0
    for count in counts:
        totals.append(sum(by_row[at : at + count]))
        at += count
    return totals
