"""Quantized collections behind maps, in pieces on devices of one process.

Ids are mapped where outputs are, by the whole maps, before they go to the pieces: so any plan gives the bits of the
unsharded collection.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Proxy

from shardwise.embeddings.managed_collision import BehindFixedMaps, ManagedCollisionCollection
from shardwise.embeddings.quant import (
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
)
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.jagged.tracing import record_forward
from shardwise.planner.layout import SERVING
from shardwise.sharding.plan.module_sharder import ModuleSharder
from shardwise.sharding.plan.plan import ParameterSharding, ShardingType
from shardwise.sharding.plan.sharded_module import NullShardedModuleContext

from .collection import Envs, FoundRows, ServedBatch, ShardedQuantizedCollection
from .modules import ShardedQuantEmbeddingBagCollection, ShardedQuantEmbeddingCollection
from .sharders import BaseQuantEmbeddingSharder, M, QuantEmbeddingBagCollectionSharder, QuantEmbeddingCollectionSharder

OutT = TypeVar("OutT")


class InferManagedCollisionCollectionSharder(ModuleSharder[ManagedCollisionCollection]):
    """What places the maps of a quantized collection: copies that learn no more, where outputs are."""

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """`ManagedCollisionCollection`."""
        return ManagedCollisionCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All that serve quantized tables; TorchRec has row-wise alone."""
        return [kind.value for kind in ShardingType if kind.value in SERVING.get(compute_device_type, {})]

    def shard(
        self,
        module: ManagedCollisionCollection,
        params: Mapping[str, ParameterSharding],
        env: Envs,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ManagedCollisionCollection:
        """A copy on `device`, by default the CPU."""
        return copy.deepcopy(module).to(torch.device(device or "cpu")).eval()


class _PiecesBehindMaps(BehindFixedMaps[OutT], ShardedQuantizedCollection):
    """Whole maps where outputs are, before the collection in pieces."""

    def __init__(
        self,
        module: QuantManagedCollisionEmbeddingCollection | QuantManagedCollisionEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        mc_sharder: InferManagedCollisionCollectionSharder,
        env: Envs,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        self._managed_collision_collection = mc_sharder.shard(
            module._managed_collision_collection, table_name_to_parameter_sharding, env, self.device
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[OutT, KeyedJaggedTensor]:  # type: ignore[override]
        """Map the batch's ids and look the slots up: the stages in order. Raises as the collection without maps."""
        if isinstance(features, Proxy):
            return record_forward(_PiecesBehindMaps.forward, self, features)
        ctx = self.create_context()
        output: tuple[OutT, KeyedJaggedTensor] = self.compute_and_output_dist(ctx, self.input_dist(ctx, features))
        return output

    def input_dist(  # type: ignore[override]
        self, ctx: NullShardedModuleContext, features: KeyedJaggedTensor
    ) -> ServedBatch:
        """Map the batch's ids where outputs are, and bring the slots to the devices that look them up."""
        return super().input_dist(ctx, self._remap(features.to(self.device), mutate_miss_lengths=True))

    def output_dist(self, ctx: NullShardedModuleContext, output: FoundRows) -> tuple[OutT, KeyedJaggedTensor]:
        """The output of the collection, and the batch with slots in the place of ids."""
        return self._joined(output), output.batch.given


class ShardedQuantManagedCollisionEmbeddingCollection(  # type: ignore[misc]
    _PiecesBehindMaps[dict[str, JaggedTensor]], ShardedQuantEmbeddingCollection
):
    """A quantized `EmbeddingCollection` behind maps, in pieces: (JaggedTensor by feature, remapped ids)."""

    _unsharded_type = QuantManagedCollisionEmbeddingCollection


class ShardedQuantManagedCollisionEmbeddingBagCollection(  # type: ignore[misc]
    _PiecesBehindMaps[KeyedTensor], ShardedQuantEmbeddingBagCollection
):
    """A quantized `EmbeddingBagCollection` behind maps, in pieces: (KeyedTensor, remapped ids)."""

    _unsharded_type = QuantManagedCollisionEmbeddingBagCollection


class _SharderBehindMaps(BaseQuantEmbeddingSharder[M]):
    """What the two sharders have in common."""

    _inner_sharder: type[BaseQuantEmbeddingSharder[Any]]

    def __init__(
        self,
        e_sharder: BaseQuantEmbeddingSharder[Any] | None = None,
        mc_sharder: InferManagedCollisionCollectionSharder | None = None,
    ) -> None:
        e_sharder = e_sharder or self._inner_sharder()
        super().__init__(e_sharder.fused_params, e_sharder._shardable_params)
        self._mc_sharder = mc_sharder or InferManagedCollisionCollectionSharder()

    def _make(
        self, module: M, params: Mapping[str, ParameterSharding], env: Envs, device: torch.device | str | None
    ) -> nn.Module:
        make: Any = self._sharded_type
        made: nn.Module = make(module, params, self._mc_sharder, env, self._fused_params, device)
        return made


class QuantManagedCollisionEmbeddingCollectionSharder(_SharderBehindMaps[QuantManagedCollisionEmbeddingCollection]):
    """The sharder of `QuantManagedCollisionEmbeddingCollection`.

    Args:
        e_sharder: has the settings; by default one without any.
        mc_sharder: what places the maps.
    """

    _module_type = QuantManagedCollisionEmbeddingCollection
    _sharded_type = ShardedQuantManagedCollisionEmbeddingCollection
    _inner_sharder = QuantEmbeddingCollectionSharder


class QuantManagedCollisionEmbeddingBagCollectionSharder(
    _SharderBehindMaps[QuantManagedCollisionEmbeddingBagCollection]
):
    """The sharder of `QuantManagedCollisionEmbeddingBagCollection`; arguments as those of the sharder of sequences."""

    _module_type = QuantManagedCollisionEmbeddingBagCollection
    _sharded_type = ShardedQuantManagedCollisionEmbeddingBagCollection
    _inner_sharder = QuantEmbeddingBagCollectionSharder
