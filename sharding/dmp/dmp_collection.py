"""2D parallelism: tables are sharded inside groups of ranks, and the groups' replicas are averaged now and then."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.embeddings.tiers import CachedRows

from ..comms.env import ShardingEnv, ShardingEnv2D, ShardingStrategy
from ..comms.exchange import Exchange
from ..engine.collection import ShardedCollection
from ..engine.fully_sharded import FullyShardedShards, whole_tables
from ..engine.tiers import share_first_rows
from ..plan.module_sharder import ModuleSharder
from ..plan.plan import ShardingPlan
from .data_parallel import DataParallelWrapper
from .dmp import DistributedModelParallel

# averages tensors over replicas, in place
AllReduce = Callable[[list[Tensor]], None]


@dataclass
class DMPCollectionConfig:
    """How modules of one class are sharded, where that differs from the rest of the model.

    Args:
        module: the class.
        plan: where their tables go, among the ranks of a sharding group; parts for other modules raise ValueError.
        sharding_group_size, node_group_size, use_inter_host_allreduce, sharding_strategy: as `DMPCollection`.
    """

    module: type[nn.Module]
    plan: ShardingPlan
    sharding_group_size: int
    node_group_size: int | None = None
    use_inter_host_allreduce: bool = False
    sharding_strategy: ShardingStrategy = ShardingStrategy.DEFAULT


class DMPCollection(DistributedModelParallel):
    """A model whose tables are sharded over groups of ranks, each group holding a replica of all of them.

    Each replica trains by the batches of its own group; `sync()` makes all replicas their mean. Dense layers are data
    parallel over all ranks, and replicas begin with the tables of the first. On the CPU as on GPUs.

    With `ShardingStrategy.FULLY_SHARDED` each replica keeps between steps only its part of the weights and optimizer
    states of its shards, and every update ends with the mean over replicas: what `sync()` after every step makes of
    DEFAULT, bit for bit where there are two replicas (sums of more are added in the order of ranks). A module that is
    called several times in a step is averaged after each of its backwards. Weights are
    gathered for each lookup, and weights and states for each update; so all ranks look up and train together, in
    evaluation too. Between steps parameters of tables show NaNs: `whole_tables` has the values, and so have state
    dicts and checkpoints, as copies; all ranks ask for these together.

    Args:
        module, device, sharders, init_data_parallel, init_parameters, data_parallel_wrapper, timeout_s: as
            `DistributedModelParallel`.
        plan: made for `sharding_group_size` ranks: rank r of it is the r-th of each group. It is not changed (TorchRec
            renumbers its ranks).
        world_size: all ranks.
        sharding_group_size: ranks that hold a replica together.
        global_pg: the group of all ranks.
        sharding_strategy: see `ShardingStrategy`.
        node_group_size: consecutive ranks of a sharding group that are a host; by default from LOCAL_WORLD_SIZE.
        use_inter_host_allreduce: sharding groups are consecutive ranks (0, 1 and 2, 3), so that exchanges stay on
            hosts; by default they are ranks apart (0, 2 and 1, 3), so that averages do.
        custom_all_reduce: as `set_all_reduce_hook`; FULLY_SHARDED tables are averaged without it.
        submodule_configs: modules of these classes are sharded by their own plans and groups.
        rs_awaitable_hook_module: a child of the model at the end of whose next forward the mean of FULLY_SHARDED tables
            is waited for and their memory let go, as `ensure_reduce_scatter_complete` does; or at their next lookup,
            if that comes before. By default this is at the end of the backward that updated them.
        use_sharded_relay: not served.

    Raises:
        ValueError: group sizes do not divide the world, the hook's module is no child or no table is FULLY_SHARDED, or
            something is asked for that is not served; and as `DistributedModelParallel`.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str,
        plan: ShardingPlan,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        sharding_strategy: ShardingStrategy = ShardingStrategy.DEFAULT,
        node_group_size: int | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        use_inter_host_allreduce: bool = False,
        custom_all_reduce: AllReduce | None = None,
        submodule_configs: list[DMPCollectionConfig] | None = None,
        rs_awaitable_hook_module: str | None = None,
        use_sharded_relay: bool = False,
        timeout_s: float | None = 60,
    ) -> None:
        if use_sharded_relay:
            raise ValueError(
                "use_sharded_relay is not served: it is an all-reduce of RCCLX, which public builds lack; sync()"
                " averages by one all-reduce per dtype"
            )
        if world_size != dist.get_world_size(global_pg):
            raise ValueError(f"world_size {world_size} is not that of global_pg, {dist.get_world_size(global_pg)}")
        device = torch.device(device)
        config = DMPCollectionConfig(
            nn.Module, plan, sharding_group_size, node_group_size, use_inter_host_allreduce, sharding_strategy
        )
        env = _env_for(config, global_pg, device)
        # before super(), which asks `_env_of`
        self._envs_of_classes = {
            submodule.module: _env_for(submodule, global_pg, device) for submodule in submodule_configs or []
        }
        if rs_awaitable_hook_module is not None:
            _require_hook(module, rs_awaitable_hook_module, [env, *self._envs_of_classes.values()])
        self._custom_all_reduce = custom_all_reduce
        # the parts of all plans; later ones go before
        plans = [plan, *(submodule.plan for submodule in submodule_configs or [])]
        whole = ShardingPlan({path: of_module for part in plans for path, of_module in part.plan.items()})
        super().__init__(
            module, env, device, whole, sharders, init_data_parallel, init_parameters, data_parallel_wrapper,
            timeout_s=timeout_s,
        )  # fmt: skip
        self._replicas = [(collection, _env_of_sharded(collection)) for collection in self._sharded.values()]
        exchanges = {id(env): Exchange(env.replica_pg) for _, env in self._replicas}
        self._exchanges = exchanges
        with torch.no_grad():
            for collection, env_of_collection in self._replicas:
                for tensor in _weights(collection):
                    exchanges[id(env_of_collection)].broadcast(tensor)
                for store, number in _tiered(collection):
                    share_first_rows(store, number, exchanges[id(env_of_collection)])
        if custom_all_reduce is not None:
            self._warn_of_hook()
        if rs_awaitable_hook_module is not None:
            for shards in self._parts():
                shards.defers = True
            child = dict(self.module.named_children())[rs_awaitable_hook_module]
            child.register_forward_hook(lambda *_: self.ensure_reduce_scatter_complete())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `DistributedModelParallel.forward`.

        An error that a sharding group raises together, for a bad id say, ends the others' step by RankFailure where
        tables are FULLY_SHARDED: they would wait for its part of the tables.
        """
        try:
            return super().forward(*args, **kwargs)
        except Exception as error:
            for shards in self._parts():
                shards.tell_replicas(error, "in forward")
            raise

    def ensure_reduce_scatter_complete(self) -> None:
        """Wait for the mean of FULLY_SHARDED tables that is under way, and let the memory of whole tables go.

        Nothing happens where none is: it is over with the backward, unless `rs_awaitable_hook_module` is given.

        Raises:
            RankFailure: another rank failed, ended or did not come.
        """
        for shards in self._parts():
            shards.complete()

    def whole_tables(self, *, keep: bool = False) -> AbstractContextManager[None]:
        """A block in which the parameters of FULLY_SHARDED tables have their values; all ranks enter it together.

        With `keep` what they are at its end is kept, of which all replicas must have made the same.
        """
        return whole_tables(self._dmp_wrapped_module, keep=keep)

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Make every replica's tables the mean of all; their optimizer states too, unless asked not to.

        One all-reduce for each dtype of weights, and one of states; of tables with a tier one of each for some rows at
        a time, whichever of them are on the device of each replica. All ranks call this together, after a step.
        Replicas have equal bits afterwards, but for states if these are left out. Tables that are FULLY_SHARDED are the
        mean already, and are left out.
        """
        with self.watched("in sync"):
            for env in {id(env): env for _, env in self._replicas}.values():
                collections = [
                    collection for collection, env_of_collection in self._replicas if env_of_collection is env
                ]
                self._average([tensor for collection in collections for tensor in _weights(collection)], env)
                if include_optimizer_state:
                    self._average([tensor for collection in collections for tensor in _states(collection)], env)
                for collection in collections:
                    for store, number in _tiered(collection):
                        self._average_below(store, number, env, states=include_optimizer_state)

    def set_all_reduce_hook(self, reduce_hook: AllReduce) -> None:
        """Let `reduce_hook` average tensors in `sync`, in place: it is called with those of one dtype at a time.

        It sees to the collective, its process group and its stream.
        """
        self._custom_all_reduce = reduce_hook
        self._warn_of_hook()

    def _warn_of_hook(self) -> None:
        if self._parts() and not any(_weights(collection) for collection, _ in self._replicas):
            warnings.warn(
                "custom_all_reduce has no effect: all tables are FULLY_SHARDED, and averaged by their updates",
                stacklevel=3,
            )

    @torch.no_grad()
    def _average(self, tensors: list[Tensor], env: ShardingEnv2D) -> None:
        if self._custom_all_reduce is None:
            self._exchanges[id(env)].mean(tensors)
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            self._custom_all_reduce([tensor for tensor in tensors if tensor.dtype == dtype])

    @torch.no_grad()
    def _average_below(self, store: CachedRows, number: int, env: ShardingEnv2D, *, states: bool) -> None:
        """Average all rows of a table with a tier: replicas cut it into the same chunks."""
        for begin, end in store.chunks(number):
            parts = store.read(number, begin, end)
            kept = len(parts) if states else 1
            # contiguous, on the device on which ranks talk
            alike = [part.contiguous().to(store.residency.device) for part in parts[:kept]]
            self._average(alike[:1], env)
            self._average(alike[1:], env)
            store.write(number, begin, [*alike, *[None] * (len(parts) - kept)])

    def _parts(self) -> list[FullyShardedShards]:
        """Of all collections of which each replica keeps a part."""
        of_all = [collection.shards for collection in self._sharded.values()]
        return [shards for shards in of_all if isinstance(shards, FullyShardedShards)]

    def _groups(self) -> list[dist.ProcessGroup | None]:
        envs = [env for env in (self._env, *self._envs_of_classes.values()) if isinstance(env, ShardingEnv2D)]
        return [*super()._groups(), *(pg for env in envs for pg in (env.sharding_pg, env.replica_pg))]

    def _env_of(self, kind: type[nn.Module]) -> ShardingEnv:
        return self._envs_of_classes.get(kind, self._env)


def _env_for(config: DMPCollectionConfig, global_pg: dist.ProcessGroup, device: torch.device) -> ShardingEnv2D:
    """Process groups of a mesh [replicas, ranks of a sharding group]; all ranks make them together."""
    world, size = dist.get_world_size(global_pg), config.sharding_group_size
    if size < 1 or world % size:
        raise ValueError(f"sharding_group_size {size} does not divide {world} ranks")
    if config.node_group_size is not None and (config.node_group_size < 1 or size % config.node_group_size):
        raise ValueError(f"node_group_size {config.node_group_size} does not divide sharding_group_size {size}")
    ranks = torch.tensor(dist.get_process_group_ranks(global_pg), device="cpu")
    # by columns or by rows
    groups = ranks.view(-1, size) if config.use_inter_host_allreduce else ranks.view(size, -1).t().contiguous()
    mesh = DeviceMesh(device.type, groups, mesh_dim_names=("replicate", "shard"))
    return ShardingEnv2D(
        mesh.get_group("shard"), mesh.get_group("replicate"), global_pg, mesh, config.node_group_size,
        config.use_inter_host_allreduce, config.sharding_strategy,
    )  # fmt: skip


def _env_of_sharded(collection: ShardedCollection) -> ShardingEnv2D:
    assert isinstance(collection._env, ShardingEnv2D)
    return collection._env


def _weights(collection: ShardedCollection) -> list[Tensor]:
    # replicated tables that are trained by their gradient are dense layers, and equal on all ranks
    return [group.flat for group in collection.shards.averaged_groups() if not group.is_away]


def _states(collection: ShardedCollection) -> list[Tensor]:
    return [state for group in collection.shards.averaged_groups() if not group.is_away for state in group.states]


def _tiered(collection: ShardedCollection) -> list[tuple[CachedRows, int]]:
    """Tables with a tier on this rank: the store of each, and its number there."""
    groups = collection.shards.averaged_groups()
    stores = [group.store for group in groups if isinstance(group.store, CachedRows) and group.is_away]
    return [(store, number) for store in stores for number in range(len(store.specs))]


def _require_hook(module: nn.Module, name: str, envs: Sequence[ShardingEnv2D]) -> None:
    children = [child for child, _ in module.named_children()]
    if name not in children:
        raise ValueError(f"rs_awaitable_hook_module {name!r} is none of the model's children {children}")
    if not any(env.sharding_strategy is ShardingStrategy.FULLY_SHARDED for env in envs):
        raise ValueError(
            f"rs_awaitable_hook_module {name!r}: nothing is reduce-scattered, as no sharding_strategy is FULLY_SHARDED;"
            " leave it None"
        )
