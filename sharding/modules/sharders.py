"""Sharders: what can be done with the tables of a class of module, and the sharded module of a plan.

A sharder is chosen by a module's exact class. A class of yours that derives from a collection has a forward of its own,
which its sharded form would not run: it has no sharder, `sharder_of` warns, and `require_sharder` raises. Derive a
sharder whose `module_type` is your class to say that the collection's forward will do.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from shardwise.embeddings import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from shardwise.embeddings.optim.optimizers import optimizer_of, optimizer_spec

from ...planner.layout import CAPABILITIES, Shard, TableOptions
from ..comms.env import ShardingEnv
from ..engine.collection import ShardedCollection
from ..engine.id_map import IdMap
from ..engine.tables import Mark
from ..plan.caches import record_bytes, within_memory
from ..plan.module_sharder import (
    M,
    ModuleSharder,
    require_device_type,
    require_tables,
    require_type,
)
from ..plan.plan import (
    ParameterSharding,
    ShardingType,
    options_of,
    shards_of,
    tables_of,
)
from .fused_params import settings_from
from .sharded_collections import (
    Resharded,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedFusedEmbeddingBagCollection,
    ShardedFusedEmbeddingCollection,
)


class BaseEmbeddingSharder(ModuleSharder[M]):
    """A sharder of collections: every type on every device, one table per parameter.

    Args:
        fused_params: the optimizer of tables that have none in their backward, in FBGEMM's words: `optimizer` (its
            `EmbOptimType`, the name of one, or a class of ours), `learning_rate` (or `lr`, default 0.01), `eps`,
            `weight_decay`, `max_norm` (rowwise Adagrad: rows are cut to it when they are updated), ... Of all tables,
            where their plan says nothing: `output_dtype`, `weights_precision`, `bounds_check_mode` and `location`. Of
            those with rows below the device: `cache_load_factor`, `cache_algorithm`, `ssd_storage_directory`, ... (see
            `shardwise.planner.tiers`). A setting that the optimizer does not read, and one about caches and storage
            that is of no table or means nothing here, has no effect: a warning names it.
        qcomm_codecs_registry: as `ModuleSharder`.
        sharded_module_order_overwrite: sharding types, in the order in which TorchRec looks them up. Here tables of
            all types travel in one exchange, so that it has no effect: a warning says so.

    Raises:
        ValueError: the optimizer has no fused rule, a setting would change numbers and is not served, or a value is
            no good.
        TypeError: there is no such setting.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        _warn_of_order(sharded_module_order_overwrite)
        self._sharded_module_order_overwrite = sharded_module_order_overwrite
        self._fused_params = fused_params
        self._settings = settings_from(fused_params or {}, stacklevel=2)
        self._default_optimizer = self._settings.optimizer

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """As given."""
        return self._fused_params

    @property
    def default_optimizer(self) -> Mark:
        """Class and keyword arguments of the optimizer of tables that have none in their backward."""
        return self._default_optimizer

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables by name."""
        collection = cast(EmbeddingBagCollection, module)
        return dict(zip((config.name for config in tables_of(module)), collection._own_parameters(), strict=True))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of them, on the CPU as on a GPU."""
        require_device_type(compute_device_type)
        return [kind.value for kind in ShardingType if kind.value in CAPABILITIES[compute_device_type]]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """ "dense" of replicated tables (an optimizer in the backward is kept), "fused" of all others."""
        require_device_type(compute_device_type)
        return list(CAPABILITIES[compute_device_type].get(sharding_type, ())[:1])

    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """The sharded form of a collection; all ranks call this together. `device` is the CPU unless given.

        Raises:
            TypeError: the module is not of class `module_type`.
            ValueError: the plan does not fit the module.
        """
        where = torch.device(device or "cpu")
        shards, options = self._cut(module, params, env, module_fqn, where)
        sharded = self._build(module, shards, env, where, options)
        sharded._module_fqn = module_fqn
        return sharded

    def reshard(
        self,
        sharded_module: ShardedCollection,
        changed_shard_to_params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
    ) -> ShardedCollection:
        """The very module, once its tables went over to another plan. As `Resharded.update_shards`."""
        cast(Resharded, sharded_module).update_shards(changed_shard_to_params, env, device)
        return sharded_module

    def _cut(
        self, module: nn.Module, params: Mapping[str, ParameterSharding], env: ShardingEnv, module_fqn: str | None,
        device: torch.device,
    ) -> tuple[list[Shard], dict[str, TableOptions]]:  # fmt: skip
        """The shards of a module's plan, and how they work together. Raises as `shard`."""
        require_type(self, module)
        sizes = {config.name: (config.num_embeddings, config.embedding_dim) for config in tables_of(module)}
        require_tables(params, sizes, module_fqn)
        shards = [
            shard for name, size in sizes.items() for shard in shards_of(name, params[name], *size, env.world_size)
        ]
        tables = BaseEmbeddingSharder.shardable_parameters(self, cast(M, module))
        location = getattr(module, "_location", None)
        options = {name: self._options_of(name, params[name], tables[name], location) for name in sizes}
        return shards, self._fitted(params, shards, options, tables, device)

    def _fitted(
        self, params: Mapping[str, ParameterSharding], shards: Sequence[Shard], options: Mapping[str, TableOptions],
        tables: Mapping[str, torch.Tensor], device: torch.device,
    ) -> dict[str, TableOptions]:  # fmt: skip
        """The options with as few slots as leave the memory of a GPU free that settings of caches reserve."""
        self._settings.warn_of_caches(options.values())
        tiers = {name: table.tier for name, table in options.items()}
        reserved = {name: self._settings.reserved_of(params[name]) for name, tier in tiers.items() if tier is not None}
        named = ", ".join(repr(name) for name, size in reserved.items() if size)
        if not named:
            return dict(options)
        if device.type != "cuda":
            warnings.warn(
                f"cache_params.reserved_memory of tables {named} has no effect: a {device.type} has no memory of its"
                " own",
                stacklevel=5,
            )
            return dict(options)

        def row_bytes(name: str, width: int) -> int:
            mark = optimizer_of(tables[name]) or self._default_optimizer
            rule = optimizer_spec(*mark, table=name).rule
            return record_bytes(width, self._settings.type_of(tables[name], options[name]), rule)

        fitted = within_memory(tiers, reserved, shards, row_bytes, torch.cuda.mem_get_info(device)[1])
        return {name: replace(table, tier=fitted[name]) for name, table in options.items()}

    def _options_of(
        self, name: str, sharding: ParameterSharding, table: torch.Tensor, location: Any = None
    ) -> TableOptions:
        """What a table's plan says of it, and where it says nothing the `fused_params` or the collection."""
        mark = optimizer_of(table)
        options = options_of(sharding).over(self._settings.options_of(name, mark))
        tier = self._settings.tier_of(name, sharding, table, mark or self._default_optimizer, options, location)
        return replace(options, tier=tier)

    def _build(
        self,
        module: nn.Module,
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
        options: Mapping[str, TableOptions],
        *,
        dedup: bool = False,
        id_maps: Mapping[str, IdMap] | None = None,
    ) -> ShardedCollection:
        self._settings.require_device(device)
        fused_rows = isinstance(module, FusedEmbeddingCollection)
        make: Any = ShardedFusedEmbeddingCollection if fused_rows else ShardedEmbeddingCollection
        if isinstance(module, EmbeddingBagCollection):
            fused = isinstance(module, FusedEmbeddingBagCollection)
            make = ShardedFusedEmbeddingBagCollection if fused else ShardedEmbeddingBagCollection
        made: ShardedCollection = make(
            module, shards, env, device,
            default_optimizer=self._default_optimizer, options=dict(options), codecs=self.qcomm_codecs_registry,
            dedup=dedup, id_maps=id_maps,
        )  # fmt: skip
        return made


def _warn_of_order(types: Sequence[str] | None) -> None:
    """Say of an order of sharding types that it has no effect.

    Raises:
        ValueError: one is no sharding type, in capitals or not.
    """
    if types is None:
        return
    known = [kind.value for kind in ShardingType]
    unknown = [kind for kind in types if str(kind).lower() not in known]
    if isinstance(types, str) or unknown:
        raise ValueError(f"sharded_module_order_overwrite must be a list of {', '.join(known)}, got {types!r}")
    warnings.warn(
        "sharded_module_order_overwrite has no effect: tables of all sharding types travel in one exchange",
        stacklevel=3,
    )


class CollectionSharder(BaseEmbeddingSharder[M]):
    """A sharder that says by attributes what it shards, and what comes of it."""

    _module_type: type[M]
    _sharded_type: type[nn.Module]

    @property
    def module_type(self) -> type[M]:
        """What it shards."""
        return self._module_type

    @property
    def sharded_module_type(self) -> type[nn.Module]:
        """What comes of it."""
        return self._sharded_type


class EmbeddingBagCollectionSharder(CollectionSharder[EmbeddingBagCollection]):
    """The sharder of `EmbeddingBagCollection`."""

    _module_type = EmbeddingBagCollection
    _sharded_type = ShardedEmbeddingBagCollection


# what `set_ec_index_dedup` was given
_dedup_for_all = False


def set_ec_index_dedup(val: bool) -> None:
    """Have all `EmbeddingCollection`s that are sharded from now on in this process send each id of a batch once.

    TorchRec deprecates it for `EmbeddingCollectionSharder(use_index_dedup=...)`, as a DeprecationWarning says.
    """
    global _dedup_for_all
    warnings.warn(
        "set_ec_index_dedup: EmbeddingCollectionSharder(use_index_dedup=...) says it for its own modules",
        DeprecationWarning,
        stacklevel=2,
    )
    _dedup_for_all = bool(val)


def get_ec_index_dedup() -> bool:
    """What `set_ec_index_dedup` was given last; False before."""
    return _dedup_for_all


class EmbeddingCollectionSharder(CollectionSharder[EmbeddingCollection]):
    """The sharder of `EmbeddingCollection`.

    Args:
        fused_params, qcomm_codecs_registry: as `BaseEmbeddingSharder`.
        use_index_dedup: send each id of a batch once, whatever number of times it occurs; `set_ec_index_dedup(True)`
            has all sharders do so.
    """

    _module_type = EmbeddingCollection
    _sharded_type = ShardedEmbeddingCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._use_index_dedup = use_index_dedup

    def _build(
        self,
        module: nn.Module,
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
        options: Mapping[str, TableOptions],
        *,
        dedup: bool = False,
        id_maps: Mapping[str, IdMap] | None = None,
    ) -> ShardedCollection:
        dedup = self._use_index_dedup or get_ec_index_dedup()
        return super()._build(module, shards, env, device, options, dedup=dedup, id_maps=id_maps)


class _BringsOptimizer(CollectionSharder[M]):
    """A sharder of collections that have their optimizer."""

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
        sharded_module_order_overwrite: list[str] | None = None,
    ) -> None:
        if fused_params:
            raise ValueError(
                f"{type(self).__name__}: fused_params {dict(fused_params)} have no effect: "
                "the collection has its optimizer"
            )
        super().__init__(fused_params, qcomm_codecs_registry, sharded_module_order_overwrite)


class FusedEmbeddingBagCollectionSharder(_BringsOptimizer[FusedEmbeddingBagCollection]):
    """The sharder of `FusedEmbeddingBagCollection`, which brings its optimizer: `fused_params` raise ValueError."""

    _module_type = FusedEmbeddingBagCollection
    _sharded_type = ShardedFusedEmbeddingBagCollection


class FusedEmbeddingCollectionSharder(_BringsOptimizer[FusedEmbeddingCollection]):
    """The sharder of `FusedEmbeddingCollection`, which brings its optimizer: `fused_params` raise ValueError."""

    _module_type = FusedEmbeddingCollection
    _sharded_type = ShardedFusedEmbeddingCollection
