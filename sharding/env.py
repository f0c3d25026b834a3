"""Which processes share a model: rank, world size, the process group between them, and which of them share a host."""

from __future__ import annotations

import os

import torch.distributed as dist


def get_local_size(world_size: int) -> int:
    """Ranks of a host: LOCAL_WORLD_SIZE, as torchrun sets it, if it divides `world_size`; else all ranks are one."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    size = int(said) if said.isdecimal() else 0
    return size if size and world_size % size == 0 else world_size


class ShardingEnv:
    """Rank and world size, and the process group of the exchanges; without a group one process holds everything.

    `local_world_size` consecutive ranks are one host, by default LOCAL_WORLD_SIZE of the environment where that divides
    the world, else all ranks. With `output_dtensor` state dicts have DTensors of tables that are cut evenly over all
    ranks, instead of ShardedTensors.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        pg: dist.ProcessGroup | None = None,
        output_dtensor: bool = False,
        *,
        local_world_size: int | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of {world_size}")
        if pg is None and world_size != 1:
            raise ValueError(f"{world_size} ranks need a process group between them")
        if local_world_size is None:
            local_world_size = get_local_size(world_size)
        if local_world_size < 1 or world_size % local_world_size:
            raise ValueError(f"local_world_size {local_world_size} does not divide {world_size} ranks into hosts")
        self.world_size, self.rank, self.process_group = world_size, rank, pg
        self.local_world_size, self.output_dtensor = local_world_size, output_dtensor
        self._local_group: dist.ProcessGroup | None = None

    @classmethod
    def from_process_group(
        cls, pg: dist.ProcessGroup, output_dtensor: bool = False, *, local_world_size: int | None = None
    ) -> ShardingEnv:
        """The ranks of a process group, for example `dist.group.WORLD`."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg, output_dtensor, local_world_size=local_world_size)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """One process without torch.distributed.

        Raises:
            ValueError: more than one rank is asked for.
        """
        return cls(world_size, rank)

    def local_group(self) -> dist.ProcessGroup | None:
        """The group of this rank's host. All ranks must ask for it the first time."""
        if self._local_group is None and self.process_group is not None:
            ranks = dist.get_process_group_ranks(self.process_group)
            each = self.local_world_size
            for host in range(0, self.world_size, each):
                # every process makes every group, its own or not
                group = dist.new_group(ranks[host : host + each])
                if host <= self.rank < host + each:
                    self._local_group = group
        return self._local_group
