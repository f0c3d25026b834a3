"""Where a process stands among hosts, by TorchRec's names; `ShardingEnv` is what the engine goes by."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .env import ShardingEnv, ShardingEnv2D, get_local_size, new_group, number_in_environment

__all__ = [
    "get_group_rank",
    "get_local_rank",
    "get_local_size",
    "get_num_groups",
    "intra_and_cross_node_pg",
    "intra_and_cross_node_pg_2D",
]

_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")

Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]

# the default group they were made for, its backend, and the groups
_made: tuple[object, str | None, Groups] | None = None


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """This process's number on its host: LOCAL_RANK (or MPI's word for it) where it is one, else from `rank`.

    `world_size` and `rank` are those of the default process group unless given.
    """
    size, said = get_local_size(world_size), number_in_environment(_LOCAL_RANK)
    if said is not None and said < size:
        return said
    return (dist.get_rank() if rank is None else rank) % size


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """The number of this process's host, from 0."""
    return (dist.get_rank() if rank is None else rank) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """How many hosts there are."""
    if world_size is None:
        world_size = dist.get_world_size()
    return world_size // get_local_size(world_size)


def intra_and_cross_node_pg(device: torch.device | None = None, backend: str | None = None) -> Groups:
    """The group of this rank's host, and that of the ranks with its number on all hosts; made once, by all ranks.

    Of 12 ranks on hosts of 6, rank 7 gets the groups of 6 .. 11 and of 1, 7. On meta there are none.
    """
    global _made
    if device is not None and device.type == "meta":
        return None, None
    world = dist.group.WORLD
    if _made is None or _made[:2] != (world, backend):
        each, size, me = get_local_size(), dist.get_world_size(), dist.get_rank()
        intra = [list(range(first, first + each)) for first in range(0, size, each)]
        cross = [list(range(number, size, each)) for number in range(each)]
        _made = world, backend, (_group_of(me, intra, backend), _group_of(me, cross, backend))
    return _made[2]


def intra_and_cross_node_pg_2D(env: ShardingEnv2D, device: torch.device | None = None) -> Groups:  # noqa: N802
    """As `intra_and_cross_node_pg`, inside this rank's sharding group, whose hosts are as `env` says."""
    if device is not None and device.type == "meta":
        return None, None
    return env.local_group(), cross_group(env)


def cross_group(env: ShardingEnv) -> dist.ProcessGroup | None:
    """The ranks of `env` that have this one's number on their hosts; made anew at each call, by all of them."""
    if env.process_group is None:
        return None
    ranks = dist.get_process_group_ranks(env.process_group)
    mine = ranks[env.rank % env.local_world_size :: env.local_world_size]
    return new_group(mine, members_only=True)


def _group_of(rank: int, groups: list[list[int]], backend: str | None) -> dist.ProcessGroup | None:
    """The group with `rank` in it; every process makes every group, its own or not."""
    made = [new_group(ranks, backend) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
