"""Pooled lookups of quantized tables as one module: `EmbeddingBagCollection`, and the one that processes features.

Shapes: KJT of F features and B samples in, KeyedTensor [B, sum of dims] out, as the collection that was trained.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.embeddings.collections.bag_collection import EmbeddingBagCollection as FloatEmbeddingBagCollection
from shardwise.embeddings.collections.collection import require_features
from shardwise.embeddings.collections.feature_processors import (
    FeatureProcessedEmbeddingBagCollection as FloatFeatureProcessedEmbeddingBagCollection,
    FeatureProcessorsCollection,
)
from shardwise.embeddings.config import EmbeddingBagConfig
from shardwise.embeddings.interfaces import PooledTables
from shardwise.embeddings.policy import DEFAULT_POLICY, LookupPolicy
from shardwise.embeddings.tables.grouped import columns_in_table_order
from shardwise.embeddings.tables.variable_batch import (
    expand_pooled,
    inverse_or_none,
    pad_strides,
    require_full_batch,
)
from shardwise.jagged import KeyedJaggedTensor, KeyedTensor
from shardwise.jagged.tracing import record_forward

from .collection import DEFAULT_ROW_ALIGNMENT, QuantizedCollection, lookup_dtype, pooled_output, tell_what_does_nothing
from .from_float import check_float_module, converted
from .tables import QuantizedTables, TableWeights


class EmbeddingBagCollection(QuantizedCollection, PooledTables):
    """Quantized tables looked up by a `KeyedJaggedTensor`, the rows of each sample added or averaged in fp32.

    Output keys, shared features, empty bags, batches with inverse indices and paddings are as in the collection that
    was trained. Tables are quantized to their configs' `data_type`: INT8, INT4, INT2, NFP8, FP16, BF16 or FP32; one
    with `num_embeddings_post_pruning` is pruned. There are no parameters and no gradients. A bad id raises, on CUDA at
    the next forward or at `check()`.

    Args:
        tables: one config per table.
        is_weighted: whether lookups are scaled by the batch's weights.
        device: "meta" allocates nothing.
        output_dtype: float32, float16, bfloat16; or uint8, where each feature has dim + 8 columns, which
            `shardwise.kernels.dequantize_pooled` turns into values: int8 numbers, then an fp32 scale and bias.
        table_name_to_quantized_weights: payload uint8 [rows, row_bytes] and scales [rows, parts] of each table (scales
            also as bytes, or None where the format has none); zeros without.
        register_tbes, row_alignment: TorchRec's, of no effect: lookups are no modules, rows are not padded.
        quant_state_dict_split_scale_bias, cache_features_order: TorchRec's; scale and bias are always tensors of their
            own, and features may come in any order.
        scale_dtype: of int8, int4 and int2 rows, for all tables or by name: float16, or float32 for twice the bytes.
            By default that of the given scales, else float16.
        policy: its `bounds_check` and `strict`.

    Raises:
        ValueError: as `shardwise.EmbeddingBagCollection`; or a data type or scale dtype that no rows are stored in, or
            weights of another shape; names the table.
        KeyError: a table has no quantized weights.
    """

    _children_name = "embedding_bags"
    _shown_name = "QuantizedEmbeddingBagCollection"
    _config_type = EmbeddingBagConfig
    embedding_bags: nn.ModuleDict

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
        cache_features_order: bool = False,
        *,
        scale_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        tell_what_does_nothing(type(self).__name__, register_tbes=register_tbes, row_alignment=row_alignment)
        super().__init__(
            tables, device, output_dtype, table_name_to_quantized_weights,
            scale_dtype=scale_dtype, policy=policy,
        )  # fmt: skip
        self._is_weighted = is_weighted
        self._embedding_names = [name for names in self._names_by_table for name in names]
        self._feature_names = [feature for config in self._configs for feature in config.feature_names]
        self._embedding_dims = [config.embedding_dim for config in self._configs for _ in config.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look the batch up.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as `shardwise.EmbeddingBagCollection.forward`.
        """
        if isinstance(features, Proxy):
            return record_forward(EmbeddingBagCollection.forward, self, features)
        who = type(self).__name__
        features = require_features(features, who, self._is_weighted)
        require_full_batch(features, who)
        inverse = inverse_or_none(features, self._feature_names)
        found = self._look_up(pad_strides(features), self._pooled)
        if found:
            values = columns_in_table_order(found, self._columns)
        else:
            values = torch.empty(features.stride(), 0, dtype=self._output_dtype, device=features.device())
        if inverse is not None:
            values = expand_pooled(values, self._embedding_dims, inverse)
        return pooled_output(values, self._embedding_names, self._embedding_dims, self._output_dtype)

    @classmethod
    def from_float(cls, module: nn.Module, use_precomputed_fake_quant: bool = False) -> EmbeddingBagCollection:
        """The quantized form of a float `EmbeddingBagCollection` (a fused one too), on its device.

        `module.qconfig`, a `QuantConfig`, says to what; `set_pruning_data` before, which rows stay. The float module
        is left as it is. `use_precomputed_fake_quant` is torch's, of no effect.

        Raises:
            TypeError: it is no such collection.
            ValueError: it has no qconfig, or a table cannot be quantized; names the table.
        """
        check_float_module(cls, module, FloatEmbeddingBagCollection)
        assert isinstance(module, FloatEmbeddingBagCollection)
        arguments = (module.is_weighted(), module.device)
        return converted(cls, module, module, arguments, use_precomputed_fake_quant=use_precomputed_fake_quant)

    def _pooled(self, group: QuantizedTables, picked: KeyedJaggedTensor) -> Tensor:
        weights = picked.weights() if self._is_weighted else None
        return group.pooled(picked.values(), picked.offsets(), weights, lookup_dtype(self._output_dtype))


class FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection):
    """A weighted quantized `EmbeddingBagCollection` whose features are processed first.

    Args:
        feature_processor: what makes the weights; required, and last only because TorchRec has it there.
        tables, ...: as `EmbeddingBagCollection`, `is_weighted` must be True.

    Raises:
        ValueError: there is no feature processor, or the collection is not weighted.
    """

    _shown_name = "QuantFeatureProcessedEmbeddingBagCollection"

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
        feature_processor: FeatureProcessorsCollection | None = None,
        cache_features_order: bool = False,
        *,
        scale_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        if feature_processor is None or not is_weighted:
            raise ValueError(
                "FeatureProcessedEmbeddingBagCollection takes a feature_processor, which makes weights, and"
                " is_weighted=True; without one use EmbeddingBagCollection"
            )
        super().__init__(
            tables, is_weighted, device, output_dtype, table_name_to_quantized_weights, register_tbes,
            quant_state_dict_split_scale_bias, row_alignment, cache_features_order,
            scale_dtype=scale_dtype, policy=policy,
        )  # fmt: skip
        self.feature_processor = feature_processor

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Process the batch and look it up.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as `EmbeddingBagCollection.forward`, or as the processor does.
        """
        return super().forward(self.feature_processor(features))

    @classmethod
    def from_float(
        cls, module: nn.Module, use_precomputed_fake_quant: bool = False
    ) -> FeatureProcessedEmbeddingBagCollection:
        """The quantized form of a float `FeatureProcessedEmbeddingBagCollection`; the processors are shared with it.

        Raises:
            TypeError, ValueError: as `EmbeddingBagCollection.from_float`.
        """
        check_float_module(cls, module, FloatFeatureProcessedEmbeddingBagCollection)
        assert isinstance(module, FloatFeatureProcessedEmbeddingBagCollection)
        processors, bags = module.split()
        return converted(
            cls, module, bags, (True, bags.device),
            use_precomputed_fake_quant=use_precomputed_fake_quant, feature_processor=processors,
        )  # fmt: skip
