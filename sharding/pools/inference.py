"""Pools over the devices of one process, as inference has them: no collectives, rows are copied between devices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.embeddings.pools import (
    KeyedJaggedTensorPool,
    ObjectPool,
    RaggedRows,
    TensorJaggedIndexSelectLookup,
    TensorPool,
    check_ids,
    check_rows,
    read_padded,
    row_major,
    to_keyed,
    write_padded,
)
from shardwise.embeddings.pools.ragged_rows import select_rows
from shardwise.embeddings.pools.tensor_pool import write_rows
from shardwise.errors import RefusedValueError
from shardwise.jagged import KeyedJaggedTensor

from ..comms.env import ShardingEnv
from .plan import Blocks, ObjectPoolShardingPlan, ObjectPoolShardingType, blocks_by_capacity, even_blocks, spans


def blocks_of(plan: ObjectPoolShardingPlan, pool_size: int, devices: int) -> Blocks:
    """The rows of each device.

    Raises:
        RefusedValueError: the plan is not one of inference, not by rows, or has capacities for other devices.
    """
    if not plan.inference:
        raise RefusedValueError("Plan needs to have inference enabled: inference=True")
    if plan.sharding_type is not ObjectPoolShardingType.ROW_WISE:
        raise RefusedValueError(f"a pool over devices is ROW_WISE, got {plan.sharding_type}")
    capacities = plan.memory_capacity_per_rank
    if capacities is None:
        return even_blocks(pool_size, devices)
    if len(capacities) != devices:
        raise RefusedValueError(f"memory_capacity_per_rank has {len(capacities)} numbers for {devices} devices")
    return blocks_by_capacity(pool_size, capacities)


def device_of(device: torch.device, rank: int) -> torch.device:
    """Where block `rank` is: on the CPU all are."""
    return device if device.type == "cpu" else torch.device(device.type, rank)


class LocalShardPool(nn.Module):
    """One block of rows [P, dim] on its device."""

    def __init__(self, shard: Tensor) -> None:
        super().__init__()
        self._shard = nn.Parameter(shard, requires_grad=False)
        self.current_device = self._shard.device

    def set_device(self, device_str: str) -> None:
        """Where ids are taken to before a lookup, if the block was moved."""
        self.current_device = torch.device(device_str)

    def forward(self, rank_ids: Tensor) -> Tensor:
        """Rows [n, dim] of `rank_ids` [n], counted from the block's first."""
        return self._shard[rank_ids.to(self.current_device)]

    @torch.no_grad()
    def update(self, rank_ids: Tensor, values: Tensor) -> None:
        """Overwrite rows; the last one of an id stays."""
        write_rows(self._shard, rank_ids.to(self._shard.device), values.to(self._shard.device))


class ShardedInferenceTensorPool(ObjectPool[Tensor]):
    """A `TensorPool` over the devices of one process; `lookup` gives a tensor [n, dim] on `device`.

    Args:
        env: as many devices as ranks.
        module: the pool whose rows it begins with; zeros where it is on meta.
        device: the CPU unless given: then all blocks are there; with "cuda" block r is on cuda:r.

    Raises:
        RefusedValueError: as `blocks_of`.
    """

    def __init__(
        self,
        env: ShardingEnv,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        plan: ObjectPoolShardingPlan,
        module: TensorPool,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._pool_size, self._dim, self._dtype = pool_size, dim, dtype
        self._device = torch.device(device or "cpu")
        self._sharding_env, self._sharding_plan = env, plan
        self._blocks = blocks_of(plan, pool_size, env.world_size)
        self._local_shard_pools = nn.ModuleList()
        for rank, (low, high) in enumerate(spans(self._blocks)):
            rows = torch.zeros(high - low, dim, dtype=dtype, device=device_of(self._device, rank))
            if not module.pool.is_meta:
                rows.copy_(module.pool[low:high])
            self._local_shard_pools.append(LocalShardPool(rows))

    @property
    def pool_size(self) -> int:
        """How many rows there are on all devices together."""
        return self._pool_size

    @property
    def dim(self) -> int:
        """The width of a row."""
        return self._dim

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where ids come from and rows go to."""
        return self._device

    @property
    def unsharded_module_type(self) -> type[TensorPool]:
        """`TensorPool`."""
        return TensorPool

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows [n, dim] of `ids` [n]. Raises as `check_ids`."""
        check_ids(ids, self._pool_size, self._device)
        order, counts = self._blocks.split(ids)
        parts = torch.split(ids.long()[order], counts)
        found = [
            shard(part - first)
            for shard, part, first in zip(self._local_shard_pools, parts, self._blocks.borders, strict=False)
        ]
        rows = torch.cat([rows.to(ids.device) for rows in found])
        return torch.empty_like(rows).index_copy_(0, order, rows)

    @torch.no_grad()
    def update(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite the rows of `ids` [n] by `values` [n, dim]. Raises as `TensorPool.update`."""
        check_ids(ids, self._pool_size, self._device)
        check_rows(ids, values, self._dim, self._dtype, self._device)
        order, counts = self._blocks.split(ids)
        parts, rows = torch.split(ids.long()[order], counts), torch.split(values[order], counts)
        for shard, part, first, new in zip(self._local_shard_pools, parts, self._blocks.borders, rows, strict=False):
            assert isinstance(shard, LocalShardPool)
            shard.update(part - first, new)


class ShardedInferenceKeyedJaggedTensorPool(ObjectPool[KeyedJaggedTensor]):
    """A `KeyedJaggedTensorPool` over the devices of one process; arguments as `ShardedInferenceTensorPool`.

    Raises:
        RefusedValueError: as `blocks_of`.
    """

    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: Mapping[str, int],
        values_dtype: torch.dtype,
        is_weighted: bool,
        sharding_env: ShardingEnv,
        sharding_plan: ObjectPoolShardingPlan,
        module: KeyedJaggedTensorPool,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._pool_size, self._feature_max_lengths = pool_size, dict(feature_max_lengths)
        self._values_dtype, self._is_weighted = values_dtype, is_weighted
        self._device = torch.device(device or "cpu")
        self._sharding_env, self._sharding_plan = sharding_env, sharding_plan
        self._blocks = blocks_of(sharding_plan, pool_size, sharding_env.world_size)
        self._local_kjt_pool_shards = nn.ModuleList()
        make = partial(TensorJaggedIndexSelectLookup, values_dtype=values_dtype, is_weighted=is_weighted)
        for rank, (low, high) in enumerate(spans(self._blocks)):
            where = device_of(self._device, rank)
            shard = make(high - low, feature_max_lengths=self._feature_max_lengths, device=where)
            if not module.values.is_meta:
                for name, buffer in shard.states_to_register():
                    buffer.copy_(module.get_buffer(name)[low:high])
            self._local_kjt_pool_shards.append(shard)

    @property
    def pool_size(self) -> int:
        """How many rows there are on all devices together."""
        return self._pool_size

    @property
    def dtype(self) -> torch.dtype:
        """That of the values."""
        return self._values_dtype

    @property
    def device(self) -> torch.device:
        """Where ids come from and batches go to."""
        return self._device

    @property
    def unsharded_module_type(self) -> type[KeyedJaggedTensorPool]:
        """`KeyedJaggedTensorPool`."""
        return KeyedJaggedTensorPool

    def lookup(self, ids: Tensor) -> KeyedJaggedTensor:
        """The rows of `ids` [n] as a batch of n. Raises as `check_ids`."""
        check_ids(ids, self._pool_size, self._device)
        order, counts = self._blocks.split(ids)
        found = []
        for shard, part, first in zip(
            self._local_kjt_pool_shards, torch.split(ids.long()[order], counts), self._blocks.borders, strict=False
        ):
            assert isinstance(shard, TensorJaggedIndexSelectLookup)
            found.append(read_padded(shard.rows, (part - first).to(shard.rows.values.device)))
        lengths, values = (torch.cat([getattr(rows, name).to(ids.device) for rows in found]) for name in _OF_ROWS)
        weights = [rows.weights.to(ids.device) for rows in found if rows.weights is not None]
        rows = RaggedRows(lengths, values, torch.cat(weights) if weights else None)
        return to_keyed(select_rows(rows, torch.argsort(order)), list(self._feature_max_lengths))

    @torch.no_grad()
    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Overwrite the rows of `ids` [n] by a batch of n. Raises as `KeyedJaggedTensorPool.update`."""
        check_ids(ids, self._pool_size, self._device)
        rows = row_major(values, ids, self._feature_max_lengths, self._values_dtype, self._is_weighted, self._device)
        order, counts = self._blocks.split(ids)
        for shard, where, first in zip(
            self._local_kjt_pool_shards, torch.split(order, counts), self._blocks.borders, strict=False
        ):
            assert isinstance(shard, TensorJaggedIndexSelectLookup)
            part, device = select_rows(rows, where), shard.rows.values.device
            weights = None if part.weights is None else part.weights.to(device)
            moved = RaggedRows(part.lengths.to(device), part.values.to(device), weights)
            write_padded(shard.rows, (ids.long()[where] - first).to(device), moved)


_OF_ROWS = ("lengths", "values")
