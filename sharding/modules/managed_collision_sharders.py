"""Sharders of managed collision collections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.embeddings.managed_collision import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)

from ...planner.layout import CAPABILITIES, Shard
from ..comms.env import ShardingEnv, ShardingEnv2D
from ..plan.plan import ParameterSharding, ShardingType
from .managed_collision import (
    ShardedManagedCollisionCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
    ShardedManagedCollisionEmbeddings,
)
from .nested import _require, _sharder_of
from .sharders import BaseEmbeddingSharder, EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, ModuleSharder

C = TypeVar("C", bound=BaseManagedCollisionEmbeddingCollection)

# replicas would each give slots to the ids of their own batches
_SERVED = (
    ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.ROW_WISE,
)  # fmt: skip


class ManagedCollisionCollectionSharder(ModuleSharder[ManagedCollisionCollection]):
    """What places the managed collision modules of a collection; part of the sharders of whole collections."""

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """`ManagedCollisionCollection`."""
        return ManagedCollisionCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise, by columns and by rows; TorchRec has row-wise alone."""
        return [kind.value for kind in _SERVED if kind.value in CAPABILITIES[compute_device_type]]

    def shard(  # type: ignore[override]
        self,
        module: ManagedCollisionCollection,
        params: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionCollection:
        """The modules of this rank, for the shards of all tables. Raises as `ShardedManagedCollisionCollection`."""
        return ShardedManagedCollisionCollection(module, params, env, torch.device(device or "cpu"))


class _ManagedCollisionSharder(BaseEmbeddingSharder[C]):
    """What the two sharders have in common."""

    _sharded_type: type[ShardedManagedCollisionEmbeddings]

    def __init__(
        self,
        inner: BaseEmbeddingSharder[Any] | None,
        mc_sharder: ManagedCollisionCollectionSharder | None,
        fused_params: dict[str, Any] | None,
        qcomm_codecs_registry: Mapping[str, Any] | None,
        default: type[BaseEmbeddingSharder[Any]],
    ) -> None:
        if inner is not None and (fused_params is not None or qcomm_codecs_registry is not None):
            raise ValueError(
                "fused_params and qcomm_codecs_registry: the sharder that is given has its own; give it those"
            )
        self._e_sharder = inner or default(fused_params, qcomm_codecs_registry)
        self._mc_sharder = mc_sharder or ManagedCollisionCollectionSharder()
        super().__init__(self._e_sharder.fused_params, self._e_sharder.qcomm_codecs_registry)

    def shardable_parameters(self, module: C) -> dict[str, nn.Parameter]:
        """Tables of the collection by name."""
        return self._e_sharder.shardable_parameters(module._embedding_module)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Those of both."""
        served = self._mc_sharder.sharding_types(compute_device_type)
        return [kind for kind in self._e_sharder.sharding_types(compute_device_type) if kind in served]

    def shard(  # type: ignore[override]
        self,
        module: C,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionEmbeddings:
        """The sharded form; all ranks call this together.

        Raises:
            TypeError: the module is not of class `module_type`.
            ValueError: the plan does not fit the module, it is to return remapped features, or `env` has replicas.
        """
        _require(self, module)
        if module._return_remapped_features:
            raise ValueError(
                f"{type(module).__name__}: return_remapped_features=True is not served where tables are sharded: slots"
                " stay on the ranks that hold them; leave it False"
            )
        if isinstance(env, ShardingEnv2D):
            raise ValueError(
                f"{type(module).__name__}: replicas (2D) give slots to ids of their own batches, so their rows cannot"
                " be averaged: shard it over all ranks"
            )
        inner, where = module._embedding_module, torch.device(device or "cpu")
        sharder = self._e_sharder if type(inner) is self._e_sharder.module_type else _sharder_of(inner, self)
        shards, options = sharder._cut(inner, params, env, module_fqn)
        maps = self._mc_sharder.shard(module._managed_collision_collection, shards, env, where, module_fqn)
        collection = sharder._build(inner, shards, env, where, options, id_maps=maps.id_maps())
        return self._sharded_type(module, collection, maps)


class ManagedCollisionEmbeddingBagCollectionSharder(_ManagedCollisionSharder[ManagedCollisionEmbeddingBagCollection]):
    """The sharder of `ManagedCollisionEmbeddingBagCollection`.

    Args:
        ebc_sharder: what shards the collection; by default one with these settings.
        mc_sharder: what places the managed collision modules.
        fused_params, qcomm_codecs_registry: as `BaseEmbeddingSharder`.
    """

    _sharded_type = ShardedManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(ebc_sharder, mc_sharder, fused_params, qcomm_codecs_registry, EmbeddingBagCollectionSharder)

    @property
    def module_type(self) -> type[ManagedCollisionEmbeddingBagCollection]:
        """`ManagedCollisionEmbeddingBagCollection`."""
        return ManagedCollisionEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedManagedCollisionEmbeddingBagCollection]:
        """`ShardedManagedCollisionEmbeddingBagCollection`."""
        return ShardedManagedCollisionEmbeddingBagCollection


class ManagedCollisionEmbeddingCollectionSharder(_ManagedCollisionSharder[ManagedCollisionEmbeddingCollection]):
    """The sharder of `ManagedCollisionEmbeddingCollection`; arguments as those of the sharder of bags."""

    _sharded_type = ShardedManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: EmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(ec_sharder, mc_sharder, fused_params, qcomm_codecs_registry, EmbeddingCollectionSharder)

    @property
    def module_type(self) -> type[ManagedCollisionEmbeddingCollection]:
        """`ManagedCollisionEmbeddingCollection`."""
        return ManagedCollisionEmbeddingCollection

    @property
    def sharded_module_type(self) -> type[ShardedManagedCollisionEmbeddingCollection]:
        """`ShardedManagedCollisionEmbeddingCollection`."""
        return ShardedManagedCollisionEmbeddingCollection
