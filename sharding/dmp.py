"""`DistributedModelParallel`: plan, shard and run a model whose tables are spread over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise._version import __version__
from shardwise.embeddings import CombinedOptimizer, EmbeddingBagCollection, EmbeddingCollection, optimizer_of
from shardwise.planner import balanced_table_wise

from .collection import ShardedCollection
from .env import ShardingEnv
from .exchange import Exchange
from .generators import construct_module_sharding_plan, table_wise
from .header import agree
from .layout import Shard, fingerprint
from .modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from .plan import ShardingPlan, shards_of, tables_of
from .state import check_weights

Collection = EmbeddingBagCollection | EmbeddingCollection


class DistributedModelParallel(nn.Module):
    """A model whose embedding collections are sharded over ranks and whose other layers are data parallel.

    Collections are replaced in place in `module`; their weights are kept (those on meta are initialised). Dense layers
    are wrapped in DistributedDataParallel. Apply optimizers to tables (`apply_optimizer_in_backward`) before; a sharded
    table without one trains with SGD at lr 0.01, as in TorchRec, and a warning says so.

    Args:
        module: the model, or a collection itself.
        env: rank and process group; by default those of torch.distributed's default group.
        device: where this rank computes, a string or `torch.device`; by default "cpu".
        plan: where each table goes; by default whole tables balanced over the ranks.

    Raises:
        RuntimeError: there is no process group, or ranks hold different plans, tables or versions of shardwise.
        ValueError: the plan does not fit the module, a table's optimizer has no fused rule, or a dense layer has one
            in the backward. What fails on one rank is raised on all.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
    ) -> None:
        super().__init__()
        for what, value, kind in (("env", env, ShardingEnv), ("plan", plan, ShardingPlan)):
            if value is not None and not isinstance(value, kind):
                hint = ": ShardingPlan({module path: its plan})" if kind is ShardingPlan else ""
                raise TypeError(f"{what} must be a {kind.__name__}{hint}, got {type(value).__name__}")
        if env is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "no process group: call torch.distributed.init_process_group, or pass"
                    " env=ShardingEnv.from_local(1, 0) for one process"
                )
            assert dist.group.WORLD is not None
            env = ShardingEnv.from_process_group(dist.group.WORLD)
        self._env, self._device = env, torch.device(device or "cpu")
        places = list(_collections(module))
        # a collection that the model holds twice is sharded once, under its first path
        first_path = {id(one): path for path, one in reversed(places)}
        collections = {path: one for path, one in places if first_path[id(one)] == path}
        (self._plan, shards), _ = agree(
            Exchange(env.process_group), self._device, lambda: _planned(module, collections, plan, env, self._device)
        )
        _warn_of_default_optimizer(collections, self._plan)
        self._sharded = {path: self._shard(one, shards[path]) for path, one in collections.items()}
        for path, one in places:
            module = _replace(module, path, self._sharded[first_path[id(one)]])
        _materialize(module, self._device)
        module.to(self._device)
        self._dmp_wrapped_module = self._wrap_dense(module)

    @property
    def module(self) -> nn.Module:
        """The model itself, without the data-parallel wrapper."""
        wrapped = self._dmp_wrapped_module
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    @property
    def plan(self) -> ShardingPlan:
        """Where each table is; prints as tables."""
        return self._plan

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers that tables run in their backward, by full parameter name."""
        return CombinedOptimizer([(path, sharded.fused_optimizer) for path, sharded in self._sharded.items()])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's batch; all ranks must call it the same number of times."""
        return self._dmp_wrapped_module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the names of the unsharded model; a table of another rank is an empty parameter."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers by the names of the unsharded model."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The model by the names of the unsharded model, the same on all ranks whatever the plan.

        A cut table is a `ShardedTensor` (or a DTensor, see `ShardingEnv`) whose local shards are this rank's live rows,
        none on a rank without; replicated tables and dense layers are plain tensors. `torch.distributed.checkpoint`
        saves and loads it, also across plans and numbers of ranks.
        """
        found: dict[str, Any] = {} if destination is None else destination
        return self.module.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True
    ) -> Any:
        """Copy in what begins with `prefix`: what `state_dict` gave under the same plan, or tensors of whole tables.

        Raises:
            ValueError: a table has another shape, or is in pieces that another plan cut; names it. Nothing is changed.
            RuntimeError: keys are missing or unexpected (unless not `strict`), or a dense layer has another shape.
        """
        mine = {name[len(prefix) :]: value for name, value in state_dict.items() if name.startswith(prefix)}
        for path, sharded in self._sharded.items():
            check_weights(sharded, mine, f"{path}." if path else "")
        return self.module.load_state_dict(mine, strict)

    def _shard(self, collection: Collection, shards: Sequence[Shard]) -> ShardedCollection:
        default: Any = (torch.optim.SGD, {"lr": 0.01})
        if isinstance(collection, EmbeddingBagCollection):
            return ShardedEmbeddingBagCollection(collection, shards, self._env, self._device, default_optimizer=default)
        return ShardedEmbeddingCollection(collection, shards, self._env, self._device, default_optimizer=default)

    def _wrap_dense(self, module: nn.Module) -> nn.Module:
        """DDP around what is neither a table of another rank nor trained by the backward."""
        ignored = {
            f"{path}.{name}" if path else name
            for path, sharded in self._sharded.items()
            for name in sharded.fused_parameter_names()
        }
        trained = [p for name, p in module.named_parameters() if name not in ignored and p.requires_grad]
        if self._env.process_group is None or not trained:
            return module
        # buffers stay each rank's own, as TorchRec leaves them; by name, as DDP's option changed between torch versions
        ignored.update(name for name, _ in module.named_buffers())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(
            module,
            device_ids=None if self._device.type == "cpu" else [self._device],
            process_group=self._env.process_group,
            gradient_as_bucket_view=True,
            # as TorchRec: a layer that the loss never reaches is no error
            static_graph=True,
        )


def _collections(module: nn.Module, path: str = "") -> Iterator[tuple[str, Collection]]:
    """Every collection below `module` with its path; one that the model holds twice comes with both paths."""
    if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        yield path, module
        return
    # not named_children, which passes over a second path
    for name, child in module._modules.items():
        if child is not None:
            yield from _collections(child, f"{path}.{name}" if path else name)


def _replace(root: nn.Module, path: str, new: nn.Module) -> nn.Module:
    if not path:
        return new
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)
    return root


def _planned(
    module: nn.Module,
    collections: Mapping[str, Collection],
    plan: ShardingPlan | None,
    env: ShardingEnv,
    device: torch.device,
) -> tuple[tuple[ShardingPlan, dict[str, list[Shard]]], int]:
    """The plan and the shards of each collection, and a fingerprint of what ranks must share before they shard.

    Raises:
        ValueError: the plan does not fit the module, or a dense layer has an optimizer in the backward.
    """
    in_tables = {id(param) for one in collections.values() for param in one.parameters()}
    dense = [(name, param) for name, param in module.named_parameters() if id(param) not in in_tables]
    marked = [name for name, param in dense if param.requires_grad and optimizer_of(param) is not None]
    if marked and env.process_group is not None:
        raise ValueError(
            f"dense parameters {marked} have an optimizer in the backward, which would run before their gradients are"
            " averaged over the ranks: give them to an ordinary optimizer"
        )
    plan = plan if plan is not None else _balanced_plan(collections, env.world_size, device.type)
    unknown = set(plan.plan) - set(collections)
    if unknown:
        raise ValueError(f"the plan names modules {sorted(unknown)}, the model has {sorted(collections)}")
    shards: dict[str, list[Shard]] = {}
    for path, collection in collections.items():
        module_plan = plan.get_plan_for_module(path)
        if module_plan is None:
            raise ValueError(f"the plan has no part for module {path!r}; it has {sorted(plan.plan)}")
        sizes = {config.name: (config.num_embeddings, config.embedding_dim) for config in tables_of(collection)}
        if set(module_plan) != set(sizes):
            raise ValueError(f"the plan has tables {sorted(module_plan)}, the module {sorted(sizes)}")
        cuts = [shards_of(name, module_plan[name], *size, env.world_size) for name, size in sizes.items()]
        shards[path] = [shard for cut in cuts for shard in cut]
    return (plan, shards), fingerprint((), (__version__, *shards.items()))


def _balanced_plan(collections: Mapping[str, Collection], world_size: int, device_type: str) -> ShardingPlan:
    plan = ShardingPlan()
    for path, collection in collections.items():
        shards = balanced_table_wise(tables_of(collection), world_size)
        generators = {shard.table: table_wise(shard.rank) for shard in shards}
        plan.plan[path] = construct_module_sharding_plan(
            collection, generators, world_size=world_size, device_type=device_type
        )
    return plan


def _warn_of_default_optimizer(collections: Mapping[str, Collection], plan: ShardingPlan) -> None:
    without = [
        config.name
        for path, collection in collections.items()
        for config, param in zip(tables_of(collection), collection._table_parameters(), strict=True)
        if param.requires_grad
        and optimizer_of(param) is None
        and plan.plan[path][config.name].sharding_spec is not None
    ]
    if without:
        warnings.warn(
            f"tables {without} have no optimizer: sharded, their backward trains them with SGD at lr 0.01."
            " Choose one with apply_optimizer_in_backward before sharding",
            stacklevel=3,
        )


@torch.no_grad()
def _materialize(module: nn.Module, device: torch.device) -> None:
    """Give what is on meta memory and its initial values; what exists is kept, and collections have theirs already.

    Values come from the module's `reset_parameters`; without one they are zeros, and a warning says so.
    """
    made: dict[int, Tensor] = {}
    zeros = []
    for path, child in module.named_modules():
        own: list[dict[str, Any]] = [child._parameters, child._buffers]
        kept = [t for tensors in own for t in tensors.values() if t is not None and not t.is_meta]
        names = [name for tensors in own for name, t in tensors.items() if t is not None and t.is_meta]
        for tensors in own:
            # tied tensors stay tied
            tensors.update(
                {name: made.setdefault(id(t), _like(t, device)) for name, t in tensors.items() if name in names}
            )
        reset: Any = getattr(child, "reset_parameters", None)
        if names and reset is not None:
            values = [t.clone() for t in kept]
            reset()
            for tensor, value in zip(kept, values, strict=True):
                tensor.copy_(value)
        else:
            zeros += [f"{path}.{name}" if path else name for name in names]
    if zeros:
        warnings.warn(f"{zeros} were on meta and their modules have no reset_parameters: they are zeros", stacklevel=4)


def _like(meta: Tensor, device: torch.device) -> Tensor:
    """Zeros in the shape of a tensor on meta, a parameter with the marks of that one if it was one."""
    zeros = torch.zeros_like(meta, device=device)
    if isinstance(meta, nn.Parameter):
        zeros = nn.Parameter(zeros, meta.requires_grad)
        vars(zeros).update(vars(meta))
    return zeros
