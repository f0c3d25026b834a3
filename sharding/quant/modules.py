"""`ShardedQuantEmbeddingBagCollection`, `ShardedQuantEmbeddingCollection`: quantized tables on devices of one process.

Inputs, outputs, their bits and state dicts are those of the quantized collection that was sharded. Outputs are plain
and on one device, `device`; the batch may be on any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from shardwise.embeddings import (
    EmbeddingBagCollectionInterface,
    EmbeddingBagConfig,
    EmbeddingCollectionInterface,
    EmbeddingConfig,
    pick_features,
)
from shardwise.embeddings.collections.collection import require_features
from shardwise.embeddings.quant import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection,
)
from shardwise.embeddings.quant.collection import lookup_dtype, pooled_output, sequence_output
from shardwise.embeddings.tables.grouped import rows_by_name
from shardwise.embeddings.tables.variable_batch import expand_pooled, inverse_or_none, require_full_batch
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.jagged.tracing import record_forward
from shardwise.sharding.plan.plan import ParameterSharding
from shardwise.sharding.plan.sharded_module import NullShardedModuleContext

from .collection import Envs, FoundRows, ServedBatch, ShardedQuantizedCollection


class ShardedQuantEmbeddingBagCollection(ShardedQuantizedCollection, EmbeddingBagCollectionInterface):
    """A quantized `EmbeddingBagCollection` in pieces. Arguments are those of `ShardedQuantizedCollection`."""

    _children_name = "embedding_bags"
    _is_pooled = True
    _unsharded_type: type[nn.Module] = EmbeddingBagCollection

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: Envs,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        self._is_weighted = self._scales_by_weights = module.is_weighted()
        self._embedding_names = [name for names in self._names_by_table for name in names]
        self._embedding_dims = [config.embedding_dim for config in self._configs for _ in config.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look the batch up.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as the quantized `EmbeddingBagCollection`.
            RuntimeError: tables are on meta.
        """
        if isinstance(features, Proxy):
            return record_forward(ShardedQuantEmbeddingBagCollection.forward, self, features)
        return super().forward(features)  # type: ignore[no-any-return]

    def input_dist(  # type: ignore[override]
        self, ctx: NullShardedModuleContext, features: KeyedJaggedTensor
    ) -> ServedBatch:
        """Check the batch and bring its ids to the devices that look them up. Raises as `forward`."""
        who = type(self).__name__
        features = require_features(features, who, self._is_weighted)
        require_full_batch(features, who)
        return super().input_dist(ctx, features)

    def _joined(self, output: FoundRows) -> KeyedTensor:
        batch = output.batch
        inverse = inverse_or_none(batch.given, self._tables.features)
        values = self._tables.joined_sums(batch.spread, output.found, lookup_dtype(self._output_dtype))
        if inverse is not None:
            values = expand_pooled(values, self._embedding_dims, inverse.to(values.device))
        return pooled_output(values, self._embedding_names, self._embedding_dims, self._output_dtype)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the tables, in their order, with their quantized data types."""
        return self._configs  # type: ignore[no-any-return]

    def is_weighted(self) -> bool:
        """Whether lookups are scaled by the batch's weights."""
        return self._is_weighted


class ShardedQuantFeatureProcessedEmbeddingBagCollection(ShardedQuantEmbeddingBagCollection):
    """A quantized `FeatureProcessedEmbeddingBagCollection` in pieces; its processors run where outputs are."""

    _unsharded_type = FeatureProcessedEmbeddingBagCollection

    def __init__(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: Envs,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        is_meta = device is not None and torch.device(device).type == "meta"
        # processors have values whether tables do or not
        self.feature_processor = module.feature_processor if is_meta else module.feature_processor.to(self.device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Process the batch and look it up.

        Raises:
            KeyError, IndexError, ValueError, TypeError, RuntimeError: as `ShardedQuantEmbeddingBagCollection`, or as
                the processor does.
        """
        if isinstance(features, Proxy):
            return record_forward(ShardedQuantFeatureProcessedEmbeddingBagCollection.forward, self, features)
        return super().forward(features)

    def input_dist(  # type: ignore[override]
        self, ctx: NullShardedModuleContext, features: KeyedJaggedTensor
    ) -> ServedBatch:
        """Process the batch where outputs are, and bring it to the devices that look it up. Raises as `forward`."""
        features = require_features(features, type(self).__name__, False)
        return super().input_dist(ctx, self.feature_processor(features.to(self.device)))


class ShardedQuantEmbeddingCollection(ShardedQuantizedCollection, EmbeddingCollectionInterface):
    """A quantized `EmbeddingCollection` in pieces. Arguments are those of `ShardedQuantizedCollection`."""

    _children_name = "embeddings"
    _is_pooled = False
    _unsharded_type: type[nn.Module] = EmbeddingCollection

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: Envs,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        self._need_indices = module.need_indices()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look the batch up.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as the quantized `EmbeddingCollection`.
            RuntimeError: tables are on meta.
        """
        if isinstance(features, Proxy):
            return record_forward(ShardedQuantEmbeddingCollection.forward, self, features)
        return super().forward(features)  # type: ignore[no-any-return]

    def input_dist(  # type: ignore[override]
        self, ctx: NullShardedModuleContext, features: KeyedJaggedTensor
    ) -> ServedBatch:
        """Check the batch and bring its ids to the devices that look them up. Raises as `forward`."""
        features = require_features(features, type(self).__name__, False)
        return super().input_dist(ctx, features)

    def _joined(self, output: FoundRows) -> dict[str, JaggedTensor]:
        batch = output.batch
        rows = self._tables.joined_rows(batch.spread, output.found, lookup_dtype(self._output_dtype))
        picked = pick_features(batch.padded, self._tables.features).to(self.device)
        by_name = rows_by_name(
            batch.given.to(self.device), [(picked, rows)], [range(len(self._configs))], self._names_by_table,
            need_indices=self._need_indices,
        )  # fmt: skip
        return sequence_output(by_name, self._output_dtype)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of the tables, in their order, with their quantized data types."""
        return self._configs  # type: ignore[no-any-return]

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The dim of every table."""
        return self._configs[0].embedding_dim if self._configs else 0

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table's features."""
        return self._names_by_table
