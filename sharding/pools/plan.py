"""The plan of a pool: which rows each rank, or each device, holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RefusedValueError

from ..plan.plan import EmbeddingModuleShardingPlan


class ObjectPoolShardingType(Enum):
    """How a pool is cut.

    ROW_WISE: each rank holds a block of rows. REPLICATED_ROW_WISE: each host holds all rows, a block on each of its
    ranks; lookups stay on the host, and an update reaches all hosts.
    """

    ROW_WISE = "row_wise"
    REPLICATED_ROW_WISE = "replicated_row_wise"


@dataclass
class ObjectPoolShardingPlan(EmbeddingModuleShardingPlan):
    """How a pool is cut, and over what: a module's part of a `ShardingPlan` that names no tables.

    Args:
        inference: over the devices of one process, rather than over ranks.
        memory_capacity_per_rank: of the devices of one process: rows are dealt out in proportion to these.
    """

    sharding_type: ObjectPoolShardingType
    inference: bool = False
    memory_capacity_per_rank: list[int] | None = None

    __str__ = object.__str__

    def _serialize(self) -> dict[str, Any]:
        """The plan as names, numbers and lists."""
        plain: dict[str, Any] = {"sharding_type": self.sharding_type.name, "inference": self.inference}
        if self.memory_capacity_per_rank is not None:
            plain["memory_capacity_per_rank"] = self.memory_capacity_per_rank
        return plain


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of rows, one for each rank: block r is [borders[r], borders[r + 1])."""

    borders: tuple[int, ...]

    def size(self, rank: int) -> int:
        """Rows of a block; 0 where there are fewer rows than ranks."""
        return self.borders[rank + 1] - self.borders[rank]

    def split(self, ids: Tensor) -> tuple[Tensor, list[int]]:
        """The order [n] that puts ids of one block behind another, as they came within one, and how many each has."""
        ends = torch.tensor(self.borders[1:], device="cpu").to(ids.device)
        owners = torch.searchsorted(ends, ids.long(), right=True)
        counts = torch.bincount(owners, minlength=len(self.borders) - 1)
        # host sync on CUDA: sizes of what is sent
        return torch.argsort(owners, stable=True), counts.tolist()


def even_blocks(pool_size: int, ranks: int) -> Blocks:
    """Blocks of ceil(pool_size / ranks) rows; the last ones have what is left."""
    block = -(-pool_size // ranks)
    return Blocks(tuple(min(rank * block, pool_size) for rank in range(ranks + 1)))


def blocks_by_capacity(pool_size: int, capacities: Sequence[int]) -> Blocks:
    """Blocks in proportion to `capacities`, rounded down; the last one has what is left.

    Raises:
        RefusedValueError: a capacity below 0, or all of them 0.
    """
    if not capacities or min(capacities) < 0 or not sum(capacities):
        raise RefusedValueError(f"memory_capacity_per_rank must be numbers from 0 on, not all 0, got {capacities}")
    sizes = [int(capacity / sum(capacities) * pool_size) for capacity in capacities[:-1]]
    return Blocks((*accumulate(sizes, initial=0), pool_size))


def spans(blocks: Blocks) -> list[tuple[int, int]]:
    """The rows of each block, [low, high)."""
    return list(pairwise(blocks.borders))
