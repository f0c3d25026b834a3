"""What of which table each rank has by a plan, in TorchRec's words, and the parts of a sharding strategy of one's own.

    infos = create_sharding_infos_by_sharding(module, plan)           # by sharding type
    tables = sharded_tables(infos["row_wise"], world_size)            # by rank
    lookup = GroupedPooledEmbeddingsLookup(group_tables(tables)[rank], pg=pg)

The engine serves all types in one step and has no strategies: `EmbeddingSharding` is for those of one's own, with
`KJTAllToAll` and its neighbours of `dist_data` between the ranks.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from shardwise.embeddings import PoolingType
from shardwise.embeddings.collections.position_weights import BaseGroupedFeatureProcessor
from shardwise.embeddings.config import EmbeddingTableConfig, data_type_to_dtype, embedding_names_by_table
from shardwise.embeddings.optim.optimizers import optimizer_of
from shardwise.jagged import KeyedJaggedTensor, Multistreamable

from ..comms.awaitable import Awaitable
from ..engine.collection import ShardedCollection
from ..plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
from .dist_data import KJTAllToAllTensorsAwaitable
from .embedding_types import (
    BaseEmbeddingLookup,
    FeatureShardingMixIn,
    GroupedEmbeddingConfig,
    KJTList,
    ListOfKJTList,
    ShardedEmbeddingTable,
)
from .fused_params import (
    add_params_from_parameter_sharding,
    convert_to_fbgemm_types,
    merge_fused_params,
    optimizer_type_to_emb_opt_type,
)

C = TypeVar("C")
F = TypeVar("F", bound=Multistreamable)
T = TypeVar("T")
W = TypeVar("W")

_KEY_VALUE = (
    EmbeddingComputeKernel.KEY_VALUE, EmbeddingComputeKernel.SSD_VIRTUAL_TABLE,
    EmbeddingComputeKernel.DRAM_VIRTUAL_TABLE, EmbeddingComputeKernel.DRAM_SSD_VIRTUAL_TABLE,
)  # fmt: skip
_CACHED = (EmbeddingComputeKernel.FUSED_UVM_CACHING, EmbeddingComputeKernel.QUANT_UVM_CACHING)
# kernels that differ in where rows lie alone are looked up together
_TOGETHER = {
    EmbeddingComputeKernel.FUSED_UVM: EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: EmbeddingComputeKernel.FUSED,
    EmbeddingComputeKernel.QUANT_UVM: EmbeddingComputeKernel.QUANT,
    EmbeddingComputeKernel.QUANT_UVM_CACHING: EmbeddingComputeKernel.QUANT,
}
_LOAD_FACTOR, _ALONE = "cache_load_factor", "use_one_tbe_per_table"
# fused parameters that say nothing of a lookup
_NOT_COMPARED = (_LOAD_FACTOR, "__register_ssd_table_list")


@dataclass
class EmbeddingShardingInfo:
    """A table of a module, where a plan puts it, its weights, and how it trains."""

    embedding_config: EmbeddingTableConfig
    param_sharding: ParameterSharding
    param: Tensor
    fused_params: dict[str, Any] | None = None


def create_sharding_infos_by_sharding(
    module: nn.Module,
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    fused_params: Mapping[str, Any] | None = None,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """The tables of a collection by their sharding type, in their order.

    Args:
        module: an `EmbeddingBagCollection` or `EmbeddingCollection`, or one that is sharded; of the latter `param` is
            this rank's part.
        table_name_to_parameter_sharding: the plan; of a sharded model `dmp.plan.plan[path]`.
        fused_params: those of the sharder; what a table has of its own, or its plan says, wins.

    Raises:
        KeyError: the plan lacks a table.
    """
    collection = cast(Any, module)
    configs = collection._configs
    if isinstance(module, ShardedCollection):
        params, weighted = [module.parameter(config.name) for config in configs], module._weighted
    else:
        params, weighted = collection._own_parameters(), bool(getattr(module, "is_weighted", bool)())
    infos: dict[str, list[EmbeddingShardingInfo]] = {}
    for config, param, names in zip(configs, params, embedding_names_by_table(configs), strict=True):
        if config.name not in table_name_to_parameter_sharding:
            raise KeyError(f"{config.name} not in table_name_to_parameter_sharding")
        sharding = table_name_to_parameter_sharding[config.name]
        settings = add_params_from_parameter_sharding(merge_fused_params(fused_params, _own_settings(param)), sharding)
        table = EmbeddingTableConfig(
            config.num_embeddings, config.embedding_dim, config.name, config.data_type, list(config.feature_names),
            config.weight_init_max, config.weight_init_min, config.num_embeddings_post_pruning, config.init_fn,
            pooling=getattr(config, "pooling", PoolingType.SUM), is_weighted=weighted, embedding_names=list(names),
        )  # fmt: skip
        # EmbeddingBagConfig refuses what no pooled table has
        table.pooling = getattr(config, "pooling", PoolingType.NONE)
        info = EmbeddingShardingInfo(table, sharding, param, convert_to_fbgemm_types(settings))
        infos.setdefault(sharding.sharding_type, []).append(info)
    return infos


def infos_of_bags(
    module: nn.Module,
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    prefix: str,
    fused_params: Mapping[str, Any] | None,
    suffix: str | None = "weight",
) -> dict[tuple[str, str | tuple[str, ...]], list[EmbeddingShardingInfo]]:
    """`create_sharding_infos_by_sharding` by sharding type and type of device: one, or that of each shard.

    Args:
        prefix, suffix: a table is the parameter or buffer `<prefix><table>.<suffix>` of the module.

    Raises:
        KeyError: the plan lacks a table, or the module has no such parameter.
    """
    named = {*dict(module.named_parameters()), *dict(module.named_buffers())}
    by_type = create_sharding_infos_by_sharding(module, table_name_to_parameter_sharding, fused_params)
    grouped: dict[tuple[str, str | tuple[str, ...]], list[EmbeddingShardingInfo]] = {}
    for name in (config.name for config in cast(Any, module)._configs):
        path = f"{prefix}{name}.{suffix}" if suffix is not None else f"{prefix}{name}"
        if path not in named:
            raise KeyError(f"table {name!r}: the module has no {path!r}")
        kind = table_name_to_parameter_sharding[name].sharding_type
        info = next(info for info in by_type[kind] if info.embedding_config.name == name)
        grouped.setdefault((kind, _devices_of(info)), []).append(info)
    return grouped


def infos_of_rows(
    module: nn.Module,
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    fused_params: Mapping[str, Any] | None,
) -> dict[tuple[str, str | tuple[str, ...]], list[EmbeddingShardingInfo]]:
    """`infos_of_bags` of an `EmbeddingCollection`."""
    return infos_of_bags(module, table_name_to_parameter_sharding, "embeddings.", fused_params)


def _devices_of(info: EmbeddingShardingInfo) -> str | tuple[str, ...]:
    spec = info.param_sharding.sharding_spec
    if spec is None:
        # of a replicated table no plan says it
        return info.param.device.type
    placements: list[Any] = [shard.placement for shard in spec.shards]
    kinds = tuple(placement.device().type for placement in placements)
    return kinds[0] if len(set(kinds)) == 1 else kinds


def _own_settings(param: Tensor) -> dict[str, Any]:
    """The optimizer in a table's backward, as fused parameters."""
    mark = optimizer_of(param)
    if mark is None:
        return {}
    kind: Any = mark[0]
    # a rule that FBGEMM has no name for is named by its class
    with suppress(ValueError):
        kind = optimizer_type_to_emb_opt_type(kind)
    return {"optimizer": kind, **mark[1]}


def sharded_tables(infos: Sequence[EmbeddingShardingInfo], world_size: int) -> list[list[ShardedEmbeddingTable]]:
    """By rank, the shards of these tables: whole tables where they are replicated, else those of the plan.

    A shard has the config of its whole table, with the rows and columns of its own in `local_rows` and `local_cols`.
    """
    by_rank: list[list[ShardedEmbeddingTable]] = [[] for _ in range(world_size)]
    for info in infos:
        config, sharding = info.embedding_config, info.param_sharding
        size = config.num_embeddings, config.embedding_dim
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
            for tables in by_rank:
                tables.append(_shard_of(info, size))
            continue
        assert sharding.sharding_spec is not None
        shards = sharding.sharding_spec.shards
        properties = TensorProperties(dtype=data_type_to_dtype(config.data_type))
        everywhere = ShardedTensorMetadata(list(shards), torch.Size(size), properties)
        for shard in shards:
            rows, cols = shard.shard_sizes
            placed: Any = shard.placement
            table = _shard_of(info, (rows, cols))
            table.local_metadata, table.global_metadata = shard, everywhere
            by_rank[placed.rank()].append(table)
    return by_rank


def _shard_of(info: EmbeddingShardingInfo, size: tuple[int, int]) -> ShardedEmbeddingTable:
    fields = {name: copy.copy(value) for name, value in vars(info.embedding_config).items() if name != "pooling"}
    replicated = info.param_sharding.sharding_type == ShardingType.DATA_PARALLEL.value
    kernel = "dense" if replicated else info.param_sharding.compute_kernel
    table = ShardedEmbeddingTable(
        **fields, local_rows=size[0], local_cols=size[1], compute_kernel=EmbeddingComputeKernel(kernel),
        fused_params={} if replicated else copy.copy(info.fused_params),
    )  # fmt: skip
    table.pooling = info.embedding_config.pooling
    return table


def group_tables(tables_per_rank: Sequence[Sequence[ShardedEmbeddingTable]]) -> list[list[GroupedEmbeddingConfig]]:
    """By rank, the shards that one lookup serves, in the order in which the first of each group comes.

    Shards lie together that have the same data type (of tables that are all quantized any), pooling, kernel (wherever
    rows lie), fused parameters but for `cache_load_factor`, and the same answers to whether features are processed and
    rows are written. Shards whose rows are cached and prefetched lie apart, those of each number of bytes a row by
    themselves. With `use_one_tbe_per_table` a table's shards lie alone. A group's `cache_load_factor` is the mean over
    its cached tables, by their rows.

    Raises:
        ValueError: some tables are weighted and others not.
    """
    if len({table.is_weighted for tables in tables_per_rank for table in tables}) > 1:
        names = [table.name for tables in tables_per_rank for table in tables if table.is_weighted]
        raise ValueError(f"group_tables: tables {names} are weighted and others not; group them apart")
    return [_groups_of(tables) for tables in tables_per_rank]


def _groups_of(tables: Sequence[ShardedEmbeddingTable]) -> list[GroupedEmbeddingConfig]:
    groups: dict[tuple[Any, ...], list[ShardedEmbeddingTable]] = {}
    all_quantized = all(table.compute_kernel is EmbeddingComputeKernel.QUANT for table in tables)
    for table in tables:
        settings = {name: value for name, value in (table.fused_params or {}).items() if name not in _NOT_COMPARED}
        if settings.get(_ALONE):
            settings[_ALONE] = table.name
        prefetched = _is_prefetched(table)
        row_bytes = table.local_cols * data_type_to_dtype(table.data_type).itemsize
        key = (
            None if all_quantized else table.data_type, table.pooling, table.has_feature_processor,
            tuple(sorted((name, _compared(value)) for name, value in settings.items())),
            _TOGETHER.get(table.compute_kernel, table.compute_kernel),
            row_bytes if prefetched else None, table.use_virtual_table if all_quantized else None,
            table.enable_embedding_update, table.stash_weights,
        )  # fmt: skip
        groups.setdefault(key, []).append(table)
    return [_group_of(key, members) for key, members in groups.items()]


def _compared(value: Any) -> Any:
    """A setting as dicts compare it."""
    return value if value.__hash__ is not None else repr(value)


def _group_of(key: tuple[Any, ...], members: list[ShardedEmbeddingTable]) -> GroupedEmbeddingConfig:
    data_type, pooling, has_feature_processor, _, kernel, _, _, enable_embedding_update, _ = key
    dropped = (*_NOT_COMPARED, "_batch_key", _ALONE)
    settings = {name: value for name, value in (members[0].fused_params or {}).items() if name not in dropped}
    cached = [
        (table.num_embeddings, table.fused_params[_LOAD_FACTOR])
        for table in members
        if table.compute_kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING
        and table.fused_params
        and _LOAD_FACTOR in table.fused_params
    ]
    if cached:
        settings[_LOAD_FACTOR] = sum(rows * factor for rows, factor in cached) / sum(rows for rows, _ in cached)
    return GroupedEmbeddingConfig(
        data_type, pooling, members[0].is_weighted, has_feature_processor, kernel, members, settings,
        enable_embedding_update,
    )  # fmt: skip


def _is_prefetched(table: ShardedEmbeddingTable) -> bool:
    """Whether rows are cached on the device, and brought there ahead of their lookup."""
    asked = bool(table.fused_params and table.fused_params.get("prefetch_pipeline"))
    return table.compute_kernel in _KEY_VALUE or (table.compute_kernel in _CACHED and asked)


@dataclass
class EmbeddingShardingContext(Multistreamable):
    """Of one step and one sharding type: batch sizes of the ranks, which the way back needs."""

    batch_size_per_rank: list[int] = field(default_factory=list)
    batch_size_per_rank_per_feature: list[list[int]] = field(default_factory=list)
    batch_size_per_feature_pre_a2a: list[int] = field(default_factory=list)
    variable_batch_per_feature: bool = False

    def record_stream(self, stream: torch.Stream) -> None:
        """There are no tensors."""


class KJTListAwaitable(Awaitable[KJTList]):
    """Batches that are on their way, one for each sharding type.

    Args:
        awaitables: what `KJTAllToAll` gives when its sizes are here.
        ctx: of the step; those of its `sharding_contexts` that have `batch_size_per_rank_per_feature` get it, of
            batches whose features differ in batch size.
    """

    def __init__(self, awaitables: Sequence[Awaitable[KeyedJaggedTensor]], ctx: Any) -> None:
        super().__init__()
        self.awaitables, self.ctx = list(awaitables), ctx

    def _wait_impl(self) -> KJTList:
        batches = [awaitable.wait() for awaitable in self.awaitables]
        for batch, context in zip(batches, getattr(self.ctx, "sharding_contexts", ()), strict=False):
            if batch.variable_stride_per_key() and hasattr(context, "batch_size_per_rank_per_feature"):
                by_rank = zip(*batch.stride_per_key_per_rank(), strict=True)
                context.batch_size_per_rank_per_feature = [list(sizes) for sizes in by_rank]
        return KJTList(batches)


class KJTListSplitsAwaitable(Awaitable[Awaitable[KJTList]], Generic[C]):
    """Sizes of batches that are on their way, one for each sharding type; the batches leave once they are here.

    Args:
        awaitables: what `KJTAllToAll` gives.
        ctx: of the step; each of its `sharding_contexts` gets, of these, what it has: `batch_size_per_rank`,
            `input_splits`, `output_splits` (ids to and from each rank) and `sparse_features_recat`.
        module_fqn, sharding_types: taken for TorchRec's sake: nothing is recorded by these names.
    """

    def __init__(
        self,
        awaitables: Sequence[Awaitable[Awaitable[KeyedJaggedTensor]]],
        ctx: C,
        module_fqn: str | None = None,
        sharding_types: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.awaitables, self.ctx = list(awaitables), ctx

    def _wait_impl(self) -> KJTListAwaitable:
        arriving = [awaitable.wait() for awaitable in self.awaitables]
        for batch, context in zip(arriving, getattr(self.ctx, "sharding_contexts", ()), strict=False):
            if isinstance(batch, KJTAllToAllTensorsAwaitable):
                for name, value in batch.sizes().items():
                    if hasattr(context, name) and value is not None:
                        setattr(context, name, value)
        return KJTListAwaitable(arriving, self.ctx)


class ListOfKJTListAwaitable(Awaitable[ListOfKJTList]):
    """Batches of several devices and sharding types that are on their way."""

    def __init__(self, awaitables: Sequence[Awaitable[KJTList]]) -> None:
        super().__init__()
        self.awaitables = list(awaitables)

    def _wait_impl(self) -> ListOfKJTList:
        return ListOfKJTList([awaitable.wait() for awaitable in self.awaitables])


class ListOfKJTListSplitsAwaitable(Awaitable[Awaitable[ListOfKJTList]]):
    """The sizes of these."""

    def __init__(self, awaitables: Sequence[Awaitable[Awaitable[KJTList]]]) -> None:
        super().__init__()
        self.awaitables = list(awaitables)

    def _wait_impl(self) -> Awaitable[ListOfKJTList]:
        return ListOfKJTListAwaitable([awaitable.wait() for awaitable in self.awaitables])


class BaseSparseFeaturesDist(nn.Module, abc.ABC, Generic[F]):
    """Sends each rank's batch to the ranks that have its tables."""

    @abc.abstractmethod
    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[F]] | F:
        """What is on its way: sizes first, then ids."""


class BaseEmbeddingDist(nn.Module, abc.ABC, Generic[C, T, W]):
    """Sends what was found to the ranks that asked."""

    @abc.abstractmethod
    def forward(self, local_embs: T, sharding_ctx: C | None = None) -> Awaitable[W] | W:
        """What is on its way."""


class EmbeddingSharding(abc.ABC, FeatureShardingMixIn, Generic[C, F, T, W]):
    """A strategy of one's own: what sends batches to tables, what looks them up, and what sends rows back.

    Args:
        qcomm_codecs_registry: codecs of the exchanges, as `get_qcomm_codecs_registry` makes them.
    """

    def __init__(self, qcomm_codecs_registry: Mapping[str, Any] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> Mapping[str, Any] | None:
        """Codecs of the exchanges, or None."""
        return self._qcomm_codecs_registry

    @abc.abstractmethod
    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[F]:
        """What sends batches."""

    @abc.abstractmethod
    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[C, T, W]:
        """What sends rows back."""

    @abc.abstractmethod
    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[F, T]:
        """What looks them up on this rank."""

    @abc.abstractmethod
    def embedding_dims(self) -> list[int]:
        """Columns of each output, rank after rank."""

    @abc.abstractmethod
    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """The place of each output's shard in its table."""

    @abc.abstractmethod
    def embedding_names(self) -> list[str]:
        """Names of outputs, rank after rank."""

    @abc.abstractmethod
    def embedding_names_per_rank(self) -> list[list[str]]:
        """The same, by rank."""

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """The shards of this rank; a subclass says them."""
        raise NotImplementedError(f"{type(self).__name__} has no embedding_tables")

    def uncombined_embedding_dims(self) -> list[int]:
        """Columns of each output before column shards of one table are put side by side."""
        return self.embedding_dims()

    def uncombined_embedding_names(self) -> list[str]:
        """Names of these."""
        return self.embedding_names()
