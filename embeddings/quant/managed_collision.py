"""Quantized collections behind managed collision modules that learn no more: ids of any range in, rows out.

A forward returns (embeddings, remapped ids), always both. Ids have the slots that training gave them; all others share
the last row, as they did.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.config import EmbeddingBagConfig, EmbeddingConfig
from shardwise.embeddings.managed_collision import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from shardwise.embeddings.policy import DEFAULT_POLICY, LookupPolicy
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from .bag_collection import EmbeddingBagCollection
from .collection import DEFAULT_ROW_ALIGNMENT, QuantizedCollection
from .from_float import MadeT, check_float_module, converted
from .sequence_collection import EmbeddingCollection
from .tables import TableWeights


class _BehindMaps(QuantizedCollection):
    """What the two have in common: maps that stay as they are."""

    _managed_collision_collection: ManagedCollisionCollection

    def _take_maps(self, maps: ManagedCollisionCollection | None, return_remapped_features: bool) -> None:
        who = type(self).__name__
        self._return_remapped_features = return_remapped_features
        if maps is None:
            raise ValueError(
                f"{who} takes a managed_collision_collection; without one use {who[len('Quant') :]}'s part"
            )
        mine = {config.name: (config.num_embeddings, config.feature_names) for config in self._configs}
        theirs = {config.name: (config.num_embeddings, config.feature_names) for config in maps.embedding_configs()}
        if mine != theirs:
            raise ValueError(f"{who} has tables {mine}, the managed collision collection {theirs}")
        self._managed_collision_collection = maps
        for module in maps.modules_by_table().values():
            module.reset_inference_mode()
        maps.eval()

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Map the batch's ids and look the slots up; with the remapped ids. Raises as the collection without maps."""
        slots = self._managed_collision_collection(features)
        return super().forward(slots), slots

    def train(self, mode: bool = True) -> Any:
        """As `nn.Module.train`, but that ids are looked up and not learned in either mode."""
        super().train(mode)
        self._managed_collision_collection.eval()
        return self


class QuantManagedCollisionEmbeddingCollection(_BehindMaps, EmbeddingCollection):
    """A quantized `EmbeddingCollection` behind maps: (JaggedTensor by feature, remapped ids).

    Args:
        tables, device, need_indices, ...: as the quantized `EmbeddingCollection`.
        managed_collision_collection: modules of the same tables; required, and learns no more.
        return_remapped_features: kept; the remapped ids are returned in any case, as by TorchRec.

    Raises:
        ValueError: there is no managed collision collection, or it has other tables.
    """

    if TYPE_CHECKING:

        def forward(  # type: ignore[override]
            self, features: KeyedJaggedTensor
        ) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor]:
            """That of the collection behind maps, which does not know the type."""
            ...

    _shown_name = "QuantManagedCollisionEmbeddingCollection"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Mapping[str, TableWeights] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
        managed_collision_collection: ManagedCollisionCollection | None = None,
        return_remapped_features: bool = False,
        cache_features_order: bool = False,
        *,
        scale_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        super().__init__(
            tables, device, need_indices, output_dtype, table_name_to_quantized_weights, register_tbes,
            quant_state_dict_split_scale_bias, row_alignment, cache_features_order,
            scale_dtype=scale_dtype, policy=policy,
        )  # fmt: skip
        self._take_maps(managed_collision_collection, return_remapped_features)

    @classmethod
    def from_float(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, module: nn.Module, return_remapped_features: bool = False
    ) -> QuantManagedCollisionEmbeddingCollection:
        """The quantized form of a float `ManagedCollisionEmbeddingCollection`, with copies of its maps.

        `return_remapped_features` has no effect, as in TorchRec.

        Raises:
            TypeError, ValueError: as `EmbeddingBagCollection.from_float`.
        """
        check_float_module(cls, module, ManagedCollisionEmbeddingCollection)
        assert isinstance(module, ManagedCollisionEmbeddingCollection)
        inner = module._embedding_collection
        return _converted(cls, module, inner, (inner.device, inner.need_indices()))


class QuantManagedCollisionEmbeddingBagCollection(_BehindMaps, EmbeddingBagCollection):
    """A quantized `EmbeddingBagCollection` behind maps: (KeyedTensor, remapped ids).

    Arguments and errors as `QuantManagedCollisionEmbeddingCollection`, with `is_weighted`.
    """

    if TYPE_CHECKING:

        def forward(  # type: ignore[override]
            self, features: KeyedJaggedTensor
        ) -> tuple[KeyedTensor, KeyedJaggedTensor]:
            """That of the collection behind maps, which does not know the type."""
            ...

    _shown_name = "QuantManagedCollisionEmbeddingBagCollection"

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | str | None,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Mapping[str, TableWeights] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = DEFAULT_ROW_ALIGNMENT,
        managed_collision_collection: ManagedCollisionCollection | None = None,
        return_remapped_features: bool = False,
        cache_features_order: bool = False,
        *,
        scale_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        super().__init__(
            tables, is_weighted, device, output_dtype, table_name_to_quantized_weights, register_tbes,
            quant_state_dict_split_scale_bias, row_alignment, cache_features_order,
            scale_dtype=scale_dtype, policy=policy,
        )  # fmt: skip
        self._take_maps(managed_collision_collection, return_remapped_features)

    @classmethod
    def from_float(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, module: nn.Module, return_remapped_features: bool = False
    ) -> QuantManagedCollisionEmbeddingBagCollection:
        """The quantized form of a float `ManagedCollisionEmbeddingBagCollection`. As that of sequences."""
        check_float_module(cls, module, ManagedCollisionEmbeddingBagCollection)
        assert isinstance(module, ManagedCollisionEmbeddingBagCollection)
        inner = module._embedding_bag_collection
        return _converted(cls, module, inner, (inner.is_weighted(), inner.device))


def _converted(
    cls: type[MadeT], module: BaseManagedCollisionEmbeddingCollection, inner: TableCollection, arguments: Sequence[Any]
) -> MadeT:
    return converted(
        cls, module, inner, arguments,
        managed_collision_collection=copy.deepcopy(module._managed_collision_collection),
        return_remapped_features=module._return_remapped_features,
    )  # fmt: skip
