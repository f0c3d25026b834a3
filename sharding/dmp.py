"""`DistributedModelParallel`: plan, shard and run a model whose tables are spread over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.embeddings import CombinedOptimizer, EmbeddingBagCollection, EmbeddingCollection, optimizer_of
from shardwise.planner import balanced_table_wise

from .collection import ShardedCollection, ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from .env import ShardingEnv
from .plan import (
    EmbeddingModuleShardingPlan,
    ShardingPlan,
    construct_module_sharding_plan,
    shards_of,
    table_wise,
    tables_of,  # fmt: skip
)

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
        RuntimeError: there is no process group, or ranks hold different plans.
        ValueError: the plan does not fit the module, or a table's optimizer has no fused rule.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
    ) -> None:
        super().__init__()
        if env is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "no process group: call torch.distributed.init_process_group, or pass"
                    " env=ShardingEnv.from_local(1, 0) for one process"
                )
            assert dist.group.WORLD is not None
            env = ShardingEnv.from_process_group(dist.group.WORLD)
        self._env, self._device = env, torch.device(device or "cpu")
        collections = dict(_collections(module))
        self._plan = plan if plan is not None else _balanced_plan(collections, env.world_size, self._device.type)
        unknown = set(self._plan.plan) - set(collections)
        if unknown:
            raise ValueError(f"the plan names modules {sorted(unknown)}, the model has {sorted(collections)}")
        _warn_of_default_optimizer(collections, self._plan)
        self._sharded: dict[str, ShardedCollection] = {}
        for path, collection in collections.items():
            module_plan = self._plan.get_plan_for_module(path)
            if module_plan is None:
                raise ValueError(f"the plan has no part for module {path!r}; it has {sorted(self._plan.plan)}")
            self._sharded[path] = self._shard(collection, module_plan)
            module = _replace(module, path, self._sharded[path])
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
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """This rank's part of the model by the names of the unsharded model.

        Each rank's dict holds its own tables whole, empty tensors for those of other ranks, and the dense layers.
        """
        found: dict[str, Any] = {} if destination is None else destination
        return self.module.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` of the same rank and plan gave.

        Raises:
            ValueError: `assign` is asked for, which would tear tables out of their buffers.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) would tear tables out of their buffers; leave it False")
        return self.module.load_state_dict(state_dict, strict)

    def _shard(self, collection: Collection, plan: EmbeddingModuleShardingPlan) -> ShardedCollection:
        sizes = {config.name: (config.num_embeddings, config.embedding_dim) for config in tables_of(collection)}
        if set(plan) != set(sizes):
            raise ValueError(f"the plan has tables {sorted(plan)}, the module {sorted(sizes)}")
        shards = [
            shard for name, one in plan.items() for shard in shards_of(name, one, *sizes[name], self._env.world_size)
        ]
        default = (torch.optim.SGD, {"lr": 0.01})
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
        # buffers stay each rank's own, as TorchRec leaves them; by name, because the option changed between torch versions
        ignored.update(name for name, _ in module.named_buffers())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
        return DistributedDataParallel(
            module,
            device_ids=None if self._device.type == "cpu" else [self._device],
            process_group=self._env.process_group,
            gradient_as_bucket_view=True,
        )


def _collections(module: nn.Module, path: str = "") -> Iterator[tuple[str, Collection]]:
    """Every collection below `module` by its path."""
    if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _collections(child, f"{path}.{name}" if path else name)


def _replace(root: nn.Module, path: str, new: nn.Module) -> nn.Module:
    if not path:
        return new
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)
    return root


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
        and (one := plan.plan.get(path, EmbeddingModuleShardingPlan()).get(config.name)) is not None
        and one.sharding_spec is not None
    ]
    if without:
        warnings.warn(
            f"tables {without} have no optimizer: sharded, their backward trains them with SGD at lr 0.01."
            " Choose one with apply_optimizer_in_backward before sharding",
            stacklevel=3,
        )


@torch.no_grad()
def _materialize(module: nn.Module, device: torch.device) -> None:
    """Give modules on meta memory and their initial values; collections have theirs already."""
    if isinstance(module, ShardedCollection):
        return
    own = [*module._parameters.values(), *module._buffers.values()]
    if any(tensor is not None and tensor.is_meta for tensor in own):
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device=device)
        module.to_empty(device=device, recurse=False)
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    for child in module.children():
        _materialize(child, device)
