"""What all collections behind id maps have in common, float and quantized, in one piece or sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from torch import nn
from torch.fx import Proxy

from shardwise.embeddings.config import BaseEmbeddingConfig
from shardwise.errors import RefusedValueError
from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged.scripting import NotScriptable
from shardwise.jagged.tracing import OneNode, record_forward
from shardwise.untrusted import repeated

from .collection import ManagedCollisionCollection

OutT = TypeVar("OutT")
SlotsT = TypeVar("SlotsT")


class BehindMaps(OneNode, NotScriptable, nn.Module, Generic[OutT, SlotsT]):
    """A collection behind id maps: it remaps a batch's ids and looks the slots up.

    A forward returns (embeddings, remapped ids or None), always a tuple.
    """

    _managed_collision_collection: Any
    _return_remapped_features: bool

    def forward(self, features: Any, mutate_miss_lengths: bool = True) -> tuple[OutT, SlotsT]:
        """Map the batch's ids to slots and look those up.

        Raises:
            KeyError, IndexError, ValueError, TypeError, RuntimeError: as the collection without maps.
            TypeError: the collection inside was sharded or quantized by itself.
        """
        if isinstance(features, Proxy):
            return record_forward(BehindMaps.forward, self, features, mutate_miss_lengths)  # type: ignore[no-any-return]
        slots = self._remap(features, mutate_miss_lengths)
        returned: Any = slots if self._return_remapped_features else None
        return self._rows_of(slots), returned

    def _remap(self, features: Any, mutate_miss_lengths: bool) -> Any:
        """The slots of a batch."""
        return self._managed_collision_collection(features, mutate_miss_lengths=mutate_miss_lengths)

    def _rows_of(self, slots: Any) -> OutT:
        """The embeddings of slots."""
        raise NotImplementedError


class BehindFixedMaps(BehindMaps[OutT, KeyedJaggedTensor]):
    """Maps that learn no more, before the lookups of the next base class; with the remapped ids in any case."""

    _return_remapped_features = True

    def forward(self, features: KeyedJaggedTensor) -> tuple[OutT, KeyedJaggedTensor]:  # type: ignore[override]
        """Map the batch's ids and look the slots up; with the remapped ids. Raises as the collection without maps."""
        if isinstance(features, Proxy):
            return record_forward(BehindFixedMaps.forward, self, features)
        return super().forward(features)

    def _rows_of(self, slots: KeyedJaggedTensor) -> OutT:
        return super(BehindMaps, self).forward(slots)  # type: ignore[no-any-return]

    def train(self, mode: bool = True) -> Any:
        """As `nn.Module.train`, but that ids are looked up and not learned in either mode."""
        super().train(mode)
        self._managed_collision_collection.eval()
        return self


def require_tables_of_maps(
    who: str, configs: Sequence[BaseEmbeddingConfig], maps: ManagedCollisionCollection, facts: Sequence[str]
) -> None:
    """Nothing, if a collection and its maps have the same tables, by these attributes of their configs.

    Raises:
        ValueError: they have not, or in another order, where tables share features.
    """
    own, theirs = (
        {config.name: tuple(getattr(config, fact) for fact in facts) for config in of}
        for of in (configs, maps.embedding_configs())
    )
    if own != theirs:
        raise RefusedValueError(
            f"{who} and Managed Collision Collection must contain the Embedding Configs of the same tables:"
            f" {own} and {theirs}"
        )
    shared = sorted(repeated(maps._feature_names))
    if shared and list(own) != list(theirs):
        raise ValueError(
            f"{who} has tables {list(own)}, the managed collision collection {list(theirs)}: give both one order, in"
            f" which the slots of {shared} come, which several tables share"
        )
