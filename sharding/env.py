"""Which processes share a model: rank, world size and the process group between them."""

from __future__ import annotations

import torch.distributed as dist


class ShardingEnv:
    """Rank and world size, and the process group of the exchanges; without a group one process holds everything."""

    def __init__(self, world_size: int, rank: int, pg: dist.ProcessGroup | None = None) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        if pg is None and world_size != 1:
            raise ValueError(f"{world_size} ranks need a process group between them")
        self.world_size, self.rank, self.process_group = world_size, rank, pg

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> ShardingEnv:
        """The ranks of a process group, for example `dist.group.WORLD`."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """One process without torch.distributed.

        Raises:
            ValueError: more than one rank is asked for.
        """
        return cls(world_size, rank)
