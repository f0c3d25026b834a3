"""Quantized collections behind managed collision modules that learn no more: ids of any range in, rows out.

A forward returns (embeddings, remapped ids), always both. Ids have the slots that training gave them; all others share
the last row, as they did.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.embeddings.collections.bag_collection import EmbeddingBagCollection as FloatEmbeddingBagCollection
from shardwise.embeddings.config import EmbeddingBagConfig, EmbeddingConfig
from shardwise.embeddings.managed_collision import (
    BaseManagedCollisionEmbeddingCollection,
    BehindFixedMaps,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    require_tables_of_maps,
)
from shardwise.embeddings.policy import DEFAULT_POLICY, LookupPolicy
from shardwise.jagged import JaggedTensor, KeyedTensor

from .bag_collection import EmbeddingBagCollection
from .collection import DEFAULT_ROW_ALIGNMENT, QuantizedCollection
from .from_float import check_float_module, converted
from .sequence_collection import EmbeddingCollection
from .tables import TableWeights

OutT = TypeVar("OutT")


class _QuantizedBehindMaps(BehindFixedMaps[OutT], QuantizedCollection):
    """What the two have in common: how they are made."""

    _float_type: type[BaseManagedCollisionEmbeddingCollection]

    def _take_maps(self, maps: ManagedCollisionCollection | None) -> None:
        who = type(self).__name__
        if maps is None:
            raise ValueError(
                f"{who} takes a managed_collision_collection; without one use {who[len('Quant') :]}'s part"
            )
        require_tables_of_maps(who, self._configs, maps, ("num_embeddings", "feature_names"))
        self._managed_collision_collection = maps
        for module in maps.modules_by_table().values():
            module.reset_inference_mode()
        maps.eval()

    @classmethod
    def from_float(cls: type[BehindT], module: nn.Module, return_remapped_features: bool = False) -> BehindT:
        """The quantized form of the float module of the same name, with copies of its maps.

        `return_remapped_features` has no effect, as in TorchRec.

        Raises:
            TypeError, ValueError: as `EmbeddingBagCollection.from_float`.
        """
        check_float_module(cls, module, cls._float_type)
        assert isinstance(module, cls._float_type)
        inner: Any = module._embedding_module
        pooled = isinstance(inner, FloatEmbeddingBagCollection)
        arguments = (inner.is_weighted(), inner.device) if pooled else (inner.device, inner.need_indices())
        return converted(
            cls, module, inner, arguments,
            managed_collision_collection=copy.deepcopy(module._managed_collision_collection),
        )  # fmt: skip


BehindT = TypeVar("BehindT", bound=_QuantizedBehindMaps[Any])


class QuantManagedCollisionEmbeddingCollection(_QuantizedBehindMaps[dict[str, JaggedTensor]], EmbeddingCollection):  # type: ignore[misc]
    """A quantized `EmbeddingCollection` behind maps: (JaggedTensor by feature, remapped ids).

    Args:
        tables, device, need_indices, ...: as the quantized `EmbeddingCollection`.
        managed_collision_collection: modules of the same tables; required, and learns no more.
        return_remapped_features: of no effect; the remapped ids are returned in any case, as by TorchRec.

    Raises:
        ValueError: there is no managed collision collection, or it has other tables.
    """

    _shown_name = "QuantManagedCollisionEmbeddingCollection"
    _float_type = ManagedCollisionEmbeddingCollection

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
        self._take_maps(managed_collision_collection)


class QuantManagedCollisionEmbeddingBagCollection(_QuantizedBehindMaps[KeyedTensor], EmbeddingBagCollection):  # type: ignore[misc]
    """A quantized `EmbeddingBagCollection` behind maps: (KeyedTensor, remapped ids).

    Arguments and errors as `QuantManagedCollisionEmbeddingCollection`, with `is_weighted`.
    """

    _shown_name = "QuantManagedCollisionEmbeddingBagCollection"
    _float_type = ManagedCollisionEmbeddingBagCollection

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
        self._take_maps(managed_collision_collection)
