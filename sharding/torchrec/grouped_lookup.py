"""Lookups of this rank's shards by TorchRec's names, for sharded modules of one's own.

One kernel serves a group of shards: a collection of this rank's rows, which trains in its backward ("fused") or by
gradients of its parameters ("dense"). With kernels of rows below the device it is the collection's sharded form over
this rank alone. Shapes: B samples, N ids, D_i columns of feature i.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.embeddings import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    LookupPolicy,
    PoolingType,
    apply_optimizer_in_backward,
    optimizer_of,
)
from shardwise.embeddings.collections.position_weights import BaseGroupedFeatureProcessor
from shardwise.embeddings.optim.fbgemm_types import PoolingMode, pooling_type_to_pooling_mode
from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged._combine import like
from shardwise.kernels import BoundsCheckMode

from ...planner.layout import TIERED_KERNELS
from ..comms.env import ShardingEnv, get_gradient_division
from ..engine.settings import dtype_named
from ..modules.default_sharders import require_sharder
from ..modules.fused_params import FusedSettings, settings_from
from ..modules.generators import table_wise
from ..plan.plan import EmbeddingComputeKernel, EmbeddingModuleShardingPlan, ShardingType
from .embedding_types import (
    BaseEmbeddingLookup,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)

_SERVED = (
    *(EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.FUSED_TRITON),
    *map(EmbeddingComputeKernel, TIERED_KERNELS),
)


class CommOpGradientScaling(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, input_tensor: Tensor, scale_gradient_factor: int) -> Tensor:
        """The tensor itself."""
        ctx.factor = scale_gradient_factor
        return input_tensor.view_as(input_tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """The gradient, scaled."""
        return grad_outputs[0] * ctx.factor, None


def _policy_of(output_dtype: str | None, bounds_check: str | None) -> LookupPolicy:
    """What fused parameters say of lookups."""
    checked = BoundsCheckMode.FATAL if bounds_check is None else BoundsCheckMode[bounds_check]
    return LookupPolicy(bounds_check=checked, output_dtype=dtype_named(output_dtype or "FP32"))


def _numbered(names: list[str]) -> list[str]:
    """The names, of which those that came before get a number."""
    return [f"{name}@{names[:n].count(name)}" if name in names[:n] else name for n, name in enumerate(names)]


def _own_config(
    table: ShardedEmbeddingTable, name: str, features: list[str], pooling: PoolingType | None
) -> EmbeddingBagConfig | EmbeddingConfig:
    """A shard as a table of its own, which begins as its part of the whole table would."""
    bounds = table.get_weight_init_max(), table.get_weight_init_min()
    size = table.local_rows, table.local_cols, name, table.data_type, features, *bounds
    if pooling is None:
        return EmbeddingConfig(*size, init_fn=table.init_fn)
    return EmbeddingBagConfig(*size, init_fn=table.init_fn, pooling=pooling)


class GroupKernel(nn.Module):
    """The shards of one group, looked up by a batch with a key for each of their features.

    Its parameters are the shards, `<table>.weight` [local_rows, local_cols]; a second shard of a table is
    `<table>@1.weight`.

    Args:
        config: the group.
        pooled: whether ids of a bag become one row, [B, sum of D_i]; else each keeps its own, feature after feature,
            [sum of N * D].
        device: of the rows.
        sharding_type: where tables are cut by rows, averages are sums here: who has the whole bag divides.

    Raises:
        ValueError: the kernel is not served, a shard has no rows, or a fused parameter is not served.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        *,
        pooled: bool,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
    ) -> None:
        super().__init__()
        self.config, self._is_pooled = config, pooled
        for table in config.embedding_tables:
            if table.compute_kernel not in _SERVED:
                raise ValueError(
                    f"table {table.name!r}: the kernels of a grouped lookup are {[kernel.value for kernel in _SERVED]},"
                    f" got {table.compute_kernel.value!r}"
                )
            if not table.local_rows or not table.local_cols:
                raise ValueError(f"table {table.name!r}: an empty shard is not looked up: leave it out of the group")
        dense = config.compute_kernel is EmbeddingComputeKernel.DENSE
        settings = settings_from({} if dense else config.fused_params or {})
        policy = _policy_of(settings.options.output_dtype, settings.options.bounds_check_mode)
        mean = pooling_type_to_pooling_mode(config.pooling, sharding_type) is PoolingMode.MEAN
        pooling = PoolingType.MEAN if mean else PoolingType.SUM
        tables, self._names = config.embedding_tables, _numbered([table.name for table in config.embedding_tables])
        # a feature of several shards is one key for each of them
        features = [feature for table in tables for feature in table.feature_names]
        self._keys = [
            feature if features.count(feature) == 1 else f"{feature}@{name}"
            for name, table in zip(self._names, tables, strict=True)
            for feature in table.feature_names
        ]
        keys = iter(self._keys)
        configs = [
            _own_config(table, name, [next(keys) for _ in table.feature_names], pooling if pooled else None)
            for name, table in zip(self._names, tables, strict=True)
        ]
        self._collection: Any
        weighted = config.is_weighted or config.has_feature_processor
        self._own_names = [f"{'embedding_bags' if pooled else 'embeddings'}.{name}.weight" for name in self._names]
        if pooled:
            self._collection = EmbeddingBagCollection(cast(Any, configs), weighted, device, policy=policy)
        else:
            self._collection = EmbeddingCollection(cast(Any, configs), device, policy=policy)
        if not dense:
            apply_optimizer_in_backward(settings.optimizer[0], self._collection.parameters(), settings.optimizer[1])
        kernels = {name: table.compute_kernel.value for name, table in zip(self._names, tables, strict=True)}
        self._is_below = any(kernel in TIERED_KERNELS for kernel in kernels.values()) and not settings.caches.resident
        if self._is_below:
            self._collection = _below(self._collection, kernels, settings, device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """The rows, as the class says. Raises as `EmbeddingBagCollection.forward`."""
        # by their places, whatever the batch calls them
        features = KeyedJaggedTensor(
            self._keys, features.values(), features.weights_or_none(), offsets=features.offsets(),
            stride=features.stride(), capacity=features.capacity(),
        )  # fmt: skip
        found = self._collection(features)
        if self._is_pooled:
            return cast(Tensor, found.values())
        return torch.cat([rows.values().reshape(-1) for rows in dict(found).values()])

    @property
    def fused_optimizer(self) -> Any:
        """The optimizer that its backward runs."""
        optimizer = self._collection.fused_optimizer
        return optimizer if self._is_below else optimizer()

    def whole(self, *, keep: bool = False) -> AbstractContextManager[None]:
        """A block in which parameters have all rows, also those below the device; with `keep` they take its changes."""
        return self._collection.shards.whole(keep=keep) if self._is_below else nullcontext()

    def split_embedding_weights(self) -> list[Tensor]:
        """The rows of each shard, in the order of the group; copies of rows that are below the device."""
        return [rows for _, rows in self.named_rows()]

    def named_rows(self) -> Iterator[tuple[str, Tensor]]:
        """Each shard's rows by its name; copies of rows that are below the device."""
        with self.whole():
            found = [(name, param.detach()) for name, param in self.named_shards()]
            yield from [(name, rows.clone()) for name, rows in found] if self._is_below else found

    def named_shards(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each shard by its name; it shows NaNs in the place of rows that are below the device."""
        for name, own in zip(self._names, self._own_names, strict=True):
            yield name, self._collection.get_parameter(own)


def _below(collection: Any, kernels: Mapping[str, str], settings: FusedSettings, device: torch.device | None) -> Any:
    """The sharded form of a collection over this rank alone, whose rows lie below the device as their kernels say."""
    sharder = require_sharder(collection)
    plan = EmbeddingModuleShardingPlan()
    for name, param in sharder.shardable_parameters(collection).items():
        made = table_wise(0, compute_kernel=kernels[name])(param, 1, 1, param.device.type, sharder)
        tier = settings.tier_of(name, made, param, optimizer_of(param), settings.options)
        plan[name] = replace(made, compute_kernel="fused", tier=tier)
    return sharder.shard(collection, plan, ShardingEnv.from_local(1, 0), device)


class _GroupedLookup(BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]):
    """What both lookups share: a kernel for each group, and their parameters by the tables' names."""

    _emb_modules: nn.ModuleList
    _feature_splits: list[int]
    _dummy_embs_tensor: Tensor
    grouped_configs: list[GroupedEmbeddingConfig]

    def _group(self, configs: list[GroupedEmbeddingConfig], kernels: list[nn.Module], device: Any) -> None:
        self.grouped_configs, self._emb_modules = configs, nn.ModuleList(kernels)
        self._feature_splits = [config.num_features() for config in configs]
        # what a rank without tables finds
        self.register_buffer("_dummy_embs_tensor", torch.empty(0, device=device, requires_grad=True), persistent=False)

    def _batches(self, sparse_features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        """The batch of each group.

        Raises:
            ValueError: features differ in batch size, or are not as many as the tables have.
        """
        if sparse_features.variable_stride_per_key():
            raise ValueError(
                f"{type(self).__name__} takes batches of one batch size; features that differ are looked up by"
                " collections, sharded by DistributedModelParallel"
            )
        return sparse_features.split(self._feature_splits)

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: torch.Stream | None = None) -> None:
        """Nothing to do: rows below the device come with their lookup."""

    def flush(self) -> None:
        """Nothing to do: state dicts have the rows of a cache as they are."""

    def purge(self) -> None:
        """Nothing to do: what a cache holds is never seen."""

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each shard by its table's name."""
        yield from self._shards()

    def _shards(self) -> Iterator[tuple[str, nn.Parameter]]:
        for kernel in self._emb_modules:
            if isinstance(kernel, GroupKernel):
                yield from kernel.named_shards()
            else:
                # a kernel of one's own names its parameters itself
                yield from ((name.removesuffix(".weight"), param) for name, param in kernel.named_parameters())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Shards as `<prefix>.<table>.weight`."""
        for name, param in self._shards():
            yield f"{prefix}.{name}.weight" if prefix else f"{name}.weight", param

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """None: rows are parameters."""
        yield from ()

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Shards as `<prefix><table>.weight`, live; copies of rows that are below the device."""
        destination = {} if destination is None else destination
        for name, param in self._shards():
            destination[f"{prefix}{name}.weight"] = param if keep_vars else param.detach()
        for kernel in self._emb_modules if not keep_vars else ():
            if isinstance(kernel, GroupKernel):
                destination |= {f"{prefix}{name}.weight": rows for name, rows in kernel.named_rows()}
        return destination

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Fill the shards by the values of their names; returns what is missing and what is not known.

        Raises:
            ValueError: a value has another shape than the shard.
            RuntimeError: with `strict`, a name is missing or not known.
        """
        own = {f"{name}.weight": param for name, param in self._shards()}
        missing, unknown = [key for key in own if key not in state_dict], [key for key in state_dict if key not in own]
        if strict and (missing or unknown):
            raise RuntimeError(f"{type(self).__name__}: state dict lacks {missing} and has {unknown}, not known here")
        for key, param in own.items():
            value = state_dict.get(key)
            if value is not None and value.shape != param.shape:
                raise ValueError(f"{key}: the shard is {list(param.shape)}, loaded {list(value.shape)}")
        with ExitStack() as stack:
            for kernel in self._emb_modules:
                if isinstance(kernel, GroupKernel):
                    stack.enter_context(kernel.whole(keep=True))
            for key, param in own.items():
                if key in state_dict:
                    param.copy_(state_dict[key])
        return nn.modules.module._IncompatibleKeys(missing, unknown)


class GroupedPooledEmbeddingsLookup(_GroupedLookup):
    """Pooled lookups of this rank's groups, side by side: [B, sum of D_i].

    A subclass may make kernels of its own in `_create_embedding_kernel`: modules that take a group's batch.

    Args:
        grouped_configs: the groups of this rank, see `group_tables`.
        device: of the rows.
        pg: the ranks; by default those of torch.distributed's default group, if there is one.
        feature_processor: what changes the batch of groups with `has_feature_processor`.
        scale_weight_gradients: multiply gradients of per-id weights by the number of ranks, where gradients of rows are
            divided by it: layers that make weights are averaged over ranks.
        sharding_type: where it cuts by rows, averages are left to who has the whole bag.
        env: not read: a group's rows are those of this rank alone.

    Raises:
        ValueError: as `GroupKernel`.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        device: torch.device | None = None,
        pg: dist.ProcessGroup | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
        scale_weight_gradients: bool = True,
        sharding_type: ShardingType | None = None,
        env: ShardingEnv | None = None,
    ) -> None:
        super().__init__()
        make = self._create_embedding_kernel
        self._group(
            grouped_configs, [make(config, device, pg, sharding_type, env) for config in grouped_configs], device
        )
        self._feature_processor = feature_processor
        self._world_size = dist.get_world_size(pg) if dist.is_initialized() else 1
        self._scale_gradient_factor = self._world_size if scale_weight_gradients and get_gradient_division() else 1

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        device: torch.device | None,
        pg: dist.ProcessGroup | None,
        sharding_type: ShardingType | None,
        env: ShardingEnv | None,
    ) -> nn.Module:
        return GroupKernel(config, pooled=True, device=device, sharding_type=sharding_type)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Look up a batch that has a key for each feature of each shard, in the order of the groups.

        Raises:
            ValueError, KeyError, IndexError: as `EmbeddingBagCollection.forward`, or keys do not fit the groups.
        """
        if not self._emb_modules:
            return self._dummy_embs_tensor.view(sparse_features.stride(), 0)
        found = [
            kernel(self._processed(config, features))
            for config, kernel, features in zip(
                self.grouped_configs, self._emb_modules, self._batches(sparse_features), strict=True
            )
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def _processed(self, config: GroupedEmbeddingConfig, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if config.has_feature_processor and self._feature_processor is not None:
            features = self._feature_processor(features)
        weights = features.weights_or_none() if config.is_weighted else None
        if weights is None or self._scale_gradient_factor == 1:
            return features
        scaled: Tensor = CommOpGradientScaling.apply(weights, self._scale_gradient_factor)  # type: ignore[no-untyped-call]
        return like(features, features._strides, features.values(), scaled, features.lengths(), None, True, None)


class GroupedEmbeddingsLookup(_GroupedLookup):
    """The row of each id of this rank's groups, one group after another: [sum of N * D].

    A subclass may make kernels of its own in `_create_embedding_kernel`: modules that take a group's batch.

    Args:
        grouped_configs: the groups of this rank, see `group_tables`.
        pg: not read: nothing is exchanged.
        device: of the rows.
        env: not read, as `pg`.

    Raises:
        ValueError: as `GroupKernel`.
    """

    def __init__(
        self,
        grouped_configs: list[GroupedEmbeddingConfig],
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        env: ShardingEnv | None = None,
    ) -> None:
        super().__init__()
        make = self._create_embedding_kernel
        self._group(grouped_configs, [make(config, pg, device, env) for config in grouped_configs], device)

    def _create_embedding_kernel(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None,
        device: torch.device | None,
        env: ShardingEnv | None = None,
    ) -> nn.Module:
        return GroupKernel(config, pooled=False, device=device)

    def forward(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Look up a batch. Arguments and errors as `GroupedPooledEmbeddingsLookup.forward`."""
        if not self._emb_modules:
            return self._dummy_embs_tensor
        batches = self._batches(sparse_features)
        found = [kernel(features).view(-1) for kernel, features in zip(self._emb_modules, batches, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found)
