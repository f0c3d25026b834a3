"""Which processes share a model: rank, world size, the process group between them, and which of them share a host.

`get_local_rank` and its neighbours say it by TorchRec's names; `ShardingEnv` is what the engine goes by.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
import torch

from shardwise.errors import RefusedCallError

# torchrun's word for the ranks of a host, and those of MPI launchers
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


# whether a rank that is alone in its process group calls collectives too
_alone_calls = False
# whether backwards divide gradients by the number of ranks
_gradient_division = True
# ranks of a host inside a sharding group, once its groups were made
_node_group_size: int | None = None


@contextmanager
def collectives_at_one_rank() -> Iterator[None]:
    """Inside, models, checkpoints and functions of `comm_ops` call collectives in a process group of one rank too.

    Otherwise such a rank exchanges nothing: everything comes back as it was. For checks: one GPU then runs NCCL with
    its streams, waits and abort. What is made inside keeps it; results have the same bits, but codecs compress what a
    rank sends itself. Without a process group nothing changes.
    """
    global _alone_calls
    before, _alone_calls = _alone_calls, True
    try:
        yield
    finally:
        _alone_calls = before


def set_gradient_division(val: bool) -> None:
    """Whether backwards divide gradients by the number of ranks, as the mean over ranks of DDP does; True at first.

    Read when a backward runs.
    """
    global _gradient_division
    _gradient_division = val


def get_gradient_division() -> bool:
    """What `set_gradient_division` said."""
    return _gradient_division


def is_alone(pg: dist.ProcessGroup | None) -> bool:
    """Whether nothing is exchanged in a process group: it has one rank, outside of `collectives_at_one_rank`."""
    return pg is None or (dist.get_world_size(pg) == 1 and not _alone_calls)


def get_local_size(world_size: int | None = None) -> int:
    """Ranks of a host: LOCAL_WORLD_SIZE (or MPI's word for it) if it divides the world; else all ranks are one host.

    `world_size` is that of the default process group unless given.
    """
    world = dist.get_world_size() if world_size is None else world_size
    size = number_in_environment(_LOCAL_SIZE)
    return size if size and world % size == 0 else world


def number_in_environment(names: tuple[str, ...]) -> int | None:
    """The first of these variables that is a number."""
    return next((int(text) for name in names if (text := os.environ.get(name, "")).isdecimal()), None)


def new_group(ranks: list[int], backend: str | None = None, *, members_only: bool = False) -> dist.ProcessGroup:
    """A process group of these ranks, made by all processes together, or by its members alone."""
    group: Any = dist.new_group(ranks, backend=backend, use_local_synchronization=members_only)
    return group  # type: ignore[no-any-return]


class ShardingStrategy(Enum):
    """What `DMPCollection` does about replicas of tables.

    DEFAULT and PER_MODULE are alike: each replica holds all of its tables, and `sync()` averages them. With
    FULLY_SHARDED each replica keeps a part of the weights and optimizer states of its shards between steps; they are
    gathered for a lookup and an update, and averaged by every update.
    """

    DEFAULT = "default"
    PER_MODULE = "per_module"
    FULLY_SHARDED = "fully_sharded"


class ShardingEnv:
    """Rank and world size, and the process group of the exchanges; without a group one process holds everything.

    Several ranks without a group, as `from_local` makes them, are the devices of one process: quantized tables can be
    sharded over these, tables that train need a group.

    `local_world_size` consecutive ranks are one host, by default LOCAL_WORLD_SIZE of the environment where that divides
    the world, else all ranks. With `output_dtensor` state dicts have DTensors instead of ShardedTensors: of tables
    that are cut evenly over all ranks the local part is a tensor, of others a `LocalShardsWrapper` of a rank's pieces.

    Raises:
        ValueError: the rank is none of the world, or `local_world_size` does not divide it.

    Example:
        >>> env = ShardingEnv.from_local(world_size=1, rank=0)
        >>> env.world_size, env.rank, env.process_group
        (1, 0, None)
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
        if local_world_size is None:
            local_world_size = get_local_size(world_size)
        if local_world_size < 1 or world_size % local_world_size:
            raise ValueError(f"local_world_size {local_world_size} does not divide {world_size} ranks into hosts")
        self.world_size, self.rank, self.process_group = world_size, rank, pg
        self.local_world_size, self.output_dtensor = local_world_size, output_dtensor
        self.device_mesh: DeviceMesh | None = None
        self._local_group: dist.ProcessGroup | None = None

    @classmethod
    def from_process_group(
        cls, pg: dist.ProcessGroup, output_dtensor: bool = False, *, local_world_size: int | None = None
    ) -> ShardingEnv:
        """The ranks of a process group, for example `dist.group.WORLD`."""
        size, rank = dist.get_world_size(pg), dist.get_rank(pg)
        return ShardingEnv(size, rank, pg, output_dtensor, local_world_size=local_world_size)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """One process without torch.distributed, with as many devices as there are ranks."""
        return ShardingEnv(world_size, rank, local_world_size=world_size)

    def require_group(self) -> dist.ProcessGroup | None:
        """The process group, None of one rank alone.

        Raises:
            ValueError: there are several ranks and none between them.
        """
        if self.process_group is None and self.world_size != 1:
            raise ValueError(f"{self.world_size} ranks need a process group between them")
        return self.process_group

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> ShardingEnv:
        """The ranks of a mesh with the axes ("host", "local"); a part of a larger mesh, `mesh["host", "local"]`, too.

        Raises:
            ValueError: the axes are others, or a host's ranks are not consecutive ones of the mesh in rising order.
        """
        if mesh.mesh_dim_names != ("host", "local"):
            raise ValueError(f"a mesh of tables has the axes ('host', 'local'), got {mesh.mesh_dim_names}")
        ranks = mesh.mesh.flatten().tolist()
        if ranks != sorted(ranks):
            raise ValueError(f"hosts are consecutive ranks: the mesh {mesh.mesh.tolist()} must list ranks as they rise")
        world = dist.group.WORLD
        whole = world is not None and ranks == dist.get_process_group_ranks(world)
        pg = world if whole else mesh._flatten().get_group()
        assert pg is not None
        env = ShardingEnv(len(ranks), dist.get_rank(pg), pg, local_world_size=mesh.size(1))
        env.device_mesh, env._local_group = mesh, mesh.get_group("local")
        return env

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that train dense layers together."""
        return self.process_group

    def local_group(self) -> dist.ProcessGroup | None:
        """The group of this rank's host. All ranks must ask for it the first time."""
        if self._local_group is None and self.process_group is not None:
            ranks, each = dist.get_process_group_ranks(self.process_group), self.local_world_size
            hosts = [ranks[first : first + each] for first in range(0, self.world_size, each)]
            self._local_group = _group_of(ranks[self.rank], hosts)
        return self._local_group

    def __deepcopy__(self, memo: object) -> ShardingEnv:
        # copies of a model share its processes
        return self


class ShardingEnv2D(ShardingEnv):
    """Replicas of sharded tables: tables are sharded over `sharding_pg`, and averaged over `replica_pg` now and then.

    `rank`, `world_size` and `process_group` are those of the sharding group (TorchRec's `process_group` is the global
    one, here `global_pg`); `global_rank` and `global_world_size` count all ranks.

    Args:
        sharding_pg: the ranks that hold one replica together.
        replica_pg: the ranks that hold the same shards, one of each replica.
        global_pg: all ranks; dense layers are data parallel over it.
        device_mesh: the ranks of each sharding group, [replicas, ranks of a sharding group].
        node_group_size: consecutive ranks of a sharding group that are a host; by default as many as LOCAL_WORLD_SIZE
            and the mesh say.
        use_inter_host_allreduce: whether sharding groups are consecutive ranks, and replicas are averaged over hosts.
        sharding_strategy: see `ShardingStrategy`.

    Raises:
        ValueError: the mesh is no matrix of these groups, or a size does not divide.
    """

    def __init__(
        self,
        sharding_pg: dist.ProcessGroup,
        replica_pg: dist.ProcessGroup,
        global_pg: dist.ProcessGroup,
        device_mesh: DeviceMesh,
        node_group_size: int | None = None,
        use_inter_host_allreduce: bool = False,
        sharding_strategy: ShardingStrategy = ShardingStrategy.DEFAULT,
    ) -> None:
        sizes = dist.get_world_size(replica_pg), dist.get_world_size(sharding_pg)
        if device_mesh.ndim != 2 or tuple(device_mesh.mesh.shape) != sizes:
            shape = list(device_mesh.mesh.shape)
            raise ValueError(f"device_mesh must be [replicas, ranks of a sharding group] = {list(sizes)}, got {shape}")
        if node_group_size is None:
            replicas, local = sizes[0], get_local_size(sizes[0] * sizes[1])
            # ranks of a sharding group that are not consecutive stand `replicas` apart
            apart = local // replicas if local % replicas == 0 else 1
            node_group_size = math.gcd(local, sizes[1]) if use_inter_host_allreduce else apart
        super().__init__(sizes[1], dist.get_rank(sharding_pg), sharding_pg, local_world_size=node_group_size)
        self.sharding_pg, self.replica_pg, self.global_pg = sharding_pg, replica_pg, global_pg
        self.global_rank, self.global_world_size = dist.get_rank(global_pg), dist.get_world_size(global_pg)
        self.device_mesh, self.node_group_size = device_mesh, node_group_size
        self.use_inter_host_allreduce, self.sharding_strategy = use_inter_host_allreduce, sharding_strategy

    def num_sharding_groups(self) -> int:
        """How many replicas of the tables there are."""
        return self.global_world_size // self.world_size

    def remap_rank(self, rank: int, sharding_type: Any) -> int:
        """The place in its sharding group of one of all ranks, whatever group that is.

        Args:
            sharding_type: table_wise, column_wise or grid_shard, as a `ShardingType` or by value.

        Raises:
            ValueError: it is another type, or there is no such rank.
        """
        kind = getattr(sharding_type, "value", sharding_type)
        if kind not in ("table_wise", "column_wise", "grid_shard"):
            raise ValueError(f"remap_rank is for table_wise, column_wise and grid_shard, got {kind!r}")
        if not 0 <= rank < self.global_world_size:
            raise ValueError(f"rank must be one of {self.global_world_size}, got {rank}")
        # consecutive ranks are a group, or ranks that stand as far apart as there are groups
        return rank % self.world_size if self.use_inter_host_allreduce else rank // self.num_sharding_groups()

    @property
    def is_fully_sharded(self) -> bool:
        """Whether each of several replicas keeps a part of its shards alone."""
        return self.sharding_strategy is ShardingStrategy.FULLY_SHARDED and not is_alone(self.replica_pg)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return self.global_pg

    def local_group(self) -> dist.ProcessGroup | None:
        """The group of this rank's host inside its sharding group."""
        if self._local_group is None:
            ranks = dist.get_process_group_ranks(self.sharding_pg)
            first = self.rank - self.rank % self.local_world_size
            # each sharding group makes its own, so only the members of a host meet
            self._local_group = new_group(ranks[first : first + self.local_world_size], members_only=True)
        return self._local_group


def default_env() -> ShardingEnv:
    """The ranks of torch.distributed's default group.

    Raises:
        RuntimeError: there is none.
    """
    if not dist.is_initialized():
        raise RefusedCallError(
            "Process group is not initialized: call torch.distributed.init_process_group, or pass"
            " env=ShardingEnv.from_local(1, 0) for one process"
        )
    assert dist.group.WORLD is not None
    return ShardingEnv.from_process_group(dist.group.WORLD)


__all__ = [
    "get_group_rank",
    "get_local_rank",
    "get_local_size",
    "get_node_group_size",
    "get_num_groups",
    "get_topology_domain_multiple",
    "get_topology_group_world_size",
    "intra_and_cross_node_pg",
    "intra_and_cross_node_pg_2D",
]

_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")

Groups = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """This process's number on its host: LOCAL_RANK (or MPI's word for it) where it is one, else from `rank`.

    `world_size` and `rank` are those of the default process group unless given.
    """
    size, given = get_local_size(world_size), number_in_environment(_LOCAL_RANK)
    if given is not None and given < size:
        return given
    return (dist.get_rank() if rank is None else rank) % size


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """The number of this process's host, from 0."""
    return (dist.get_rank() if rank is None else rank) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """How many hosts there are."""
    return (dist.get_world_size() if world_size is None else world_size) // get_local_size(world_size)


def get_node_group_size(world_size: int | None = None) -> int:
    """Ranks of a host inside a sharding group, once `intra_and_cross_node_pg_2D` made its groups; else of a host."""
    return get_local_size(world_size) if _node_group_size is None else _node_group_size


def get_topology_domain_multiple() -> int | None:
    """The fewest hosts of a pod, whose ranks all are on a fast network: TOPOLOGY_DOMAIN_MULTIPLE, None without."""
    return number_in_environment(("TOPOLOGY_DOMAIN_MULTIPLE",))


def get_topology_group_world_size(world_size: int | None = None) -> int:
    """Ranks of a pod: of the TORCHREC_RESOLVED_POD_SIZE hosts that the scheduler gave it, of one host without.

    `ShardingEnv(..., local_world_size=get_topology_group_world_size())` has the engine treat a pod as a host.

    Raises:
        ValueError: pods of that size do not divide the world, or TORCHREC_RESOLVED_POD_SIZE is no number above 0.
    """
    world = dist.get_world_size() if world_size is None else world_size
    hosts, host = os.environ.get("TORCHREC_RESOLVED_POD_SIZE"), get_local_size(world)
    if hosts is None:
        return host
    if not hosts.isdecimal() or not int(hosts):
        raise ValueError(f"TORCHREC_RESOLVED_POD_SIZE must be a number of hosts above 0, got {hosts!r}")
    if world % (int(hosts) * host):
        raise ValueError(
            f"World size {world} is not a multiple of the topology group: {hosts} hosts (TORCHREC_RESOLVED_POD_SIZE) of"
            f" {host} ranks"
        )
    return int(hosts) * host


def intra_and_cross_node_pg(device: torch.device | None = None, backend: str | None = None) -> Groups:
    """The group of this rank's host, and that of the ranks with its number on all hosts; made once, by all ranks.

    Of 12 ranks on hosts of 6, rank 7 gets the groups of 6 .. 11 and of 1, 7. On meta there are none. A pod counts as
    one host, see `get_topology_group_world_size`.
    """
    on_meta = device is not None and device.type == "meta"
    return (None, None) if on_meta else _groups_of_hosts(dist.group.WORLD, backend)


@lru_cache(maxsize=1)
def _groups_of_hosts(world: dist.ProcessGroup, backend: str | None) -> Groups:
    """Those of the default group, which is made anew now and then."""
    each, size = get_topology_group_world_size(), dist.get_world_size(world)
    intra = [list(range(first, first + each)) for first in range(0, size, each)]
    cross = [list(range(number, size, each)) for number in range(each)]
    rank = dist.get_rank(world)
    return _group_of(rank, intra, backend), _group_of(rank, cross, backend)


def intra_and_cross_node_pg_2D(env: ShardingEnv2D, device: torch.device | None = None) -> Groups:  # noqa: N802
    """As `intra_and_cross_node_pg`, inside this rank's sharding group, whose hosts are as `env` says."""
    global _node_group_size
    if device is not None and device.type == "meta":
        return None, None
    _node_group_size = env.local_world_size
    return env.local_group(), cross_group(env)


def cross_group(env: ShardingEnv) -> dist.ProcessGroup | None:
    """The ranks of `env` that have this one's number on their hosts; made anew at each call, by all of them."""
    if env.process_group is None:
        return None
    ranks = dist.get_process_group_ranks(env.process_group)
    own = ranks[env.rank % env.local_world_size :: env.local_world_size]
    return new_group(own, members_only=True)


def _group_of(rank: int, groups: list[list[int]], backend: str | None = None) -> dist.ProcessGroup | None:
    """The group with `rank` in it; every process makes every group, its own or not."""
    made = [new_group(ranks, backend) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
