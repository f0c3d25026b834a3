"""`ShardedTensorPool`: a `TensorPool` whose rows lie in blocks over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.embeddings.pools import TensorPool, check_ids, check_rows
from shardwise.embeddings.pools.object_pool import warn_of_host_memory
from shardwise.embeddings.pools.tensor_pool import write_rows

from ..comms.awaitable import LazyAwaitable
from ..comms.env import ShardingEnv
from .plan import ObjectPoolShardingPlan
from .sharded_pool import PendingRows, ShardedObjectPool, send_rows


class TensorPoolAwaitable(LazyAwaitable[Tensor]):
    """Rows [n, dim] to come; they come by rank, and `order` [n] is where each one stood."""

    def __init__(self, rows: PendingRows, order: Tensor) -> None:
        super().__init__()
        self._rows, self._order = rows, order

    def _wait_impl(self) -> Tensor:
        rows = self._rows.wait()
        return torch.empty_like(rows).index_copy_(0, self._order, rows)


class ShardedTensorPool(ShardedObjectPool[Tensor]):
    """A `TensorPool` over the ranks of `env`: `lookup(ids)` gives a tensor [n, dim] to come.

    Args:
        device: the CPU unless given.
        enable_uvm: has no effect but a warning.
        module: the pool whose rows it begins with; zeros unless given, or where it is on meta.

    Raises:
        RefusedValueError: as `ShardedObjectPool`.
    """

    _pool: Tensor

    def __init__(
        self,
        env: ShardingEnv,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        sharding_plan: ObjectPoolShardingPlan,
        device: torch.device | str | None = None,
        enable_uvm: bool = False,
        *,
        module: TensorPool | None = None,
    ) -> None:
        super().__init__(env, pool_size, sharding_plan, device)
        warn_of_host_memory(enable_uvm, "ShardedTensorPool")
        whole = TensorPool(pool_size, dim, dtype) if module is None else module
        self._hold(whole.named_buffers(), not whole.pool.is_meta)

    @property
    def dim(self) -> int:
        """The width of a row."""
        return self._pool.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""
        return self._pool.dtype

    @property
    def unsharded_module_type(self) -> type[TensorPool]:
        """`TensorPool`."""
        return TensorPool

    def lookup(self, ids: Tensor) -> LazyAwaitable[Tensor]:  # type: ignore[override]
        """Rows [n, dim] of `ids` [n], to come. Raises as `check_ids`, on all ranks."""

        def checked() -> Tensor:
            check_ids(ids, self._pool_size, self._device)
            return ids

        route, asked = self._ask(checked)
        rows = send_rows(self._lookups, self._pool[asked], route.came, route.sent)
        return TensorPoolAwaitable(rows, route.order)

    @torch.no_grad()
    def update(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite the rows of `ids` [n] by `values` [n, dim].

        Raises:
            IndexError, ValueError: as `TensorPool.update`, on all ranks; nothing is written then.
        """
        counts: list[int] = []

        def checked() -> tuple[Tensor, list[list[int]]]:
            check_ids(ids, self._pool_size, self._device)
            check_rows(ids, values, self.dim, self.dtype, self._device)
            order, split = self._blocks.split(ids)
            hosts = self._everywhere.world_size // len(split)
            counts.extend(split * hosts)
            return order.repeat(hosts), [[count, 0] for count in counts]

        order, came = self._route(self._everywhere, checked)
        new_ids, new_values = exchange_all(self, [ids.long()[order], values[order]], counts, [n for n, _ in came])
        write_rows(self._pool, new_ids - self._blocks.borders[self._holders.rank], new_values)


def exchange_all(
    pool: ShardedObjectPool[Tensor], tensors: Sequence[Tensor], sent: list[int], came: list[int]
) -> list[Tensor]:
    """Send the rows of several tensors [n, ...] alike, at once; waits."""
    pending = [send_rows(pool._everywhere, tensor, sent, came) for tensor in tensors]
    return [rows.wait() for rows in pending]
