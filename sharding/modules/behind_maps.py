"""What shards a collection whose ids find their rows by maps: those of managed collision, and of embedding pruning."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ...planner.layout import Shard
from ..comms.env import ShardingEnv, ShardingEnv2D
from ..engine.id_map import IdMap
from ..plan.module_sharder import require_type
from ..plan.plan import ParameterSharding
from .nested import Nested, _sharder_of
from .sharders import BaseEmbeddingSharder, CollectionSharder

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=Nested)


class BehindMapsSharder(CollectionSharder[M], Generic[M, S]):
    """Shards the collection inside of a module and, over the same shards, the maps of its ids.

    Args:
        inner: what shards the collection.
    """

    # what replicas do by the ids of their own batches
    _apart: str

    def __init__(self, inner: BaseEmbeddingSharder[Any]) -> None:
        self._e_sharder = inner
        super().__init__(inner.fused_params, inner.qcomm_codecs_registry)

    @abc.abstractmethod
    def _collection_of(self, module: M) -> nn.Module:
        """The collection inside."""

    @abc.abstractmethod
    def _shard_maps(
        self, module: M, shards: Sequence[Shard], env: ShardingEnv, device: torch.device, module_fqn: str | None
    ) -> tuple[nn.Module, Mapping[str, IdMap]]:
        """What holds the maps of this rank's shards, and the map of each table."""

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables of the collection by name."""
        return self._e_sharder.shardable_parameters(self._collection_of(module))

    def shard(  # type: ignore[override]
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> S:
        """The sharded form; all ranks call this together.

        Raises:
            TypeError: the module is not of class `module_type`.
            ValueError: the plan does not fit the module or its maps, or `env` has replicas.
        """
        require_type(self, module)
        if isinstance(env, ShardingEnv2D):
            raise ValueError(
                f"{type(module).__name__}: replicas (2D) {self._apart}, so their rows cannot be averaged: shard it over"
                " all ranks"
            )
        inner, where = self._collection_of(module), torch.device(device or "cpu")
        sharder = self._e_sharder if type(inner) is self._e_sharder.module_type else _sharder_of(inner, self)
        shards, options = sharder._cut(inner, params, env, module_fqn, where)
        maps, id_maps = self._shard_maps(module, shards, env, where, module_fqn)
        collection = sharder._build(inner, shards, env, where, options, id_maps=id_maps)
        make: Any = self._sharded_type
        sharded: S = make(module, collection.named_in_model(module_fqn), maps)
        return sharded.named_in_model(module_fqn)
