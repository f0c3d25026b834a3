"""Unpooled lookups of quantized tables as one module: `EmbeddingCollection`.

Shapes: KJT of F features and B samples in; per feature a JaggedTensor with values [ids of the feature, dim] out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.embeddings.collections.collection import require_features
from shardwise.embeddings.collections.sequence_collection import EmbeddingCollection as FloatEmbeddingCollection
from shardwise.embeddings.config import EmbeddingConfig
from shardwise.embeddings.interfaces import SequenceTables, require_one_dim
from shardwise.embeddings.policy import DEFAULT_POLICY, LookupPolicy
from shardwise.embeddings.tables.grouped import rows_by_name
from shardwise.embeddings.tables.variable_batch import pad_strides
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor
from shardwise.jagged.tracing import record_forward

from .collection import (
    DEFAULT_ROW_ALIGNMENT,
    QuantizedCollection,
    lookup_dtype,
    sequence_output,
    tell_what_does_nothing,
)
from .from_float import check_float_module, converted
from .tables import QuantizedTables, TableWeights


class EmbeddingCollection(QuantizedCollection, SequenceTables):
    """Quantized tables looked up by a `KeyedJaggedTensor`, one row per id.

    The output is that of the collection that was trained: a dict in the order of `tables`, feature by feature, with
    `need_indices` each with the ids as its weights.

    Args:
        tables: one config per table, all of one `embedding_dim`.
        device, output_dtype, table_name_to_quantized_weights, ...: as `EmbeddingBagCollection`.
        need_indices: whether outputs carry their ids.

    Raises:
        ValueError: tables differ in `embedding_dim`, or as `EmbeddingBagCollection`.
        KeyError: a table has no quantized weights.
    """

    _children_name = "embeddings"
    _shown_name = "QuantizedEmbeddingCollection"
    _config_type = EmbeddingConfig
    embeddings: nn.ModuleDict

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
        cache_features_order: bool = False,
        *,
        scale_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        require_one_dim(tables)
        tell_what_does_nothing(type(self).__name__, register_tbes=register_tbes, row_alignment=row_alignment)
        super().__init__(
            tables, device, output_dtype, table_name_to_quantized_weights,
            scale_dtype=scale_dtype, policy=policy,
        )  # fmt: skip
        self._need_indices = need_indices
        self._embedding_dim = tables[0].embedding_dim if tables else 0

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look the batch up.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as `shardwise.EmbeddingCollection.forward`.
        """
        if isinstance(features, Proxy):
            return record_forward(EmbeddingCollection.forward, self, features)
        features = require_features(features, type(self).__name__, False)
        found = self._look_up(pad_strides(features), self._rows)
        by_name = rows_by_name(features, found, self._members, self._names_by_table, need_indices=self._need_indices)
        return sequence_output(by_name, self._output_dtype)

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> EmbeddingCollection:
        """The quantized form of a float `EmbeddingCollection` (a fused one too), on its device.

        Raises:
            TypeError, ValueError: as `EmbeddingBagCollection.from_float`.
        """
        check_float_module(cls, module, FloatEmbeddingCollection)
        assert isinstance(module, FloatEmbeddingCollection)
        arguments = (module.device, module.need_indices())
        return converted(cls, module, module, arguments, use_precomputed_fake_quant=use_precomputed_fake_quant)

    def _rows(self, group: QuantizedTables, picked: KeyedJaggedTensor) -> Tensor:
        return group.sequence(picked.values(), picked.offsets(), lookup_dtype(self._output_dtype))
