"""Collections of quantized tables: `EmbeddingBagCollection` and `EmbeddingCollection` for inference.

Inputs and outputs are those of the collections that were trained; see bag_collection.py and sequence_collection.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings.collection import pick_features, require_features
from shardwise.embeddings.config import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    embedding_names_by_table,
    named_tables,
)
from shardwise.embeddings.interfaces import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from shardwise.embeddings.table_layout import LookupFeature
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.kernels import quantize_rows

from .tables import QuantizedTable, QuantizedTables


class _QuantizedCollection(nn.Module):
    """Tables grouped by format; buffers of children are views of the groups' flat planes."""

    _children_name: str
    _config_type: type[BaseEmbeddingConfig] = BaseEmbeddingConfig

    def __init__(
        self, tables: Sequence[BaseEmbeddingConfig], device: torch.device | str | None, formats: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._configs = named_tables(list(tables), type(self).__name__, self._config_type)
        self._names_by_table = embedding_names_by_table(self._configs)
        self._formats = dict(formats)
        members: dict[tuple[str, int], list[int]] = {}
        for t, config in enumerate(self._configs):
            members.setdefault(self._group_key(config), []).append(t)
        self._members = list(members.values())
        self._groups = [
            QuantizedTables(
                [
                    QuantizedTable(config.name, config.num_embeddings, config.embedding_dim, formats[config.name])
                    for config in (self._configs[t] for t in ts)
                ],
                [
                    LookupFeature(feature, number, self._is_averaged(self._configs[t]))
                    for number, t in enumerate(ts)
                    for feature in self._configs[t].feature_names
                ],
                device="cpu" if device is None else device,
            )
            for ts in self._members
        ]
        children = nn.ModuleDict()
        for config in self._configs:
            children[config.name] = nn.Module()
        self.add_module(self._children_name, children)
        self._show()

    def _group_key(self, config: BaseEmbeddingConfig) -> tuple[str, int]:
        return self._formats[config.name], 0

    def _is_averaged(self, config: BaseEmbeddingConfig) -> bool:
        return getattr(config, "pooling", None) is PoolingType.MEAN

    def _show(self) -> None:
        """Register views of the planes as buffers of the children: weight, weight_qscale, weight_qbias."""
        children = self._modules[self._children_name]
        assert isinstance(children, nn.ModuleDict)
        for group, ts in zip(self._groups, self._members, strict=True):
            for number, t in enumerate(ts):
                child, scales = children[self._configs[t].name], group.scales_of(number)
                child.register_buffer("weight", group.payload_of(number))
                for part, name in enumerate(("weight_qscale", "weight_qbias")[: scales.shape[1]]):
                    child.register_buffer(name, scales[:, part : part + 1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for group in self._groups:
            group.move(fn)
        self._show()
        return self

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self._groups[0].payload.device if self._groups else torch.device("cpu")

    @torch.no_grad()
    def _fill(self, weights: Mapping[str, Tensor]) -> None:
        """Quantize float tables [rows, dim] into place."""
        for group, ts in zip(self._groups, self._members, strict=True):
            for number, t in enumerate(ts):
                payload, scales = quantize_rows(weights[self._configs[t].name], group.format.name, group.scales.dtype)
                group.payload_of(number).copy_(payload)
                group.scales_of(number).copy_(scales)


class EmbeddingBagCollection(_QuantizedCollection, EmbeddingBagCollectionInterface):
    """Pooled lookups of quantized tables."""

    _children_name = "embedding_bags"
    _config_type = EmbeddingBagConfig

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | str | None,
        output_dtype: torch.dtype = torch.float32,
        *,
        formats: Mapping[str, str],
    ) -> None:
        super().__init__(tables, device, formats)
        self._is_weighted, self._output_dtype = is_weighted, output_dtype
        self._embedding_names = [name for names in self._names_by_table for name in names]
        self._embedding_dims = [c.embedding_dim for c in self._configs for _ in c.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look the batch up."""
        require_features(features, type(self).__name__, self._is_weighted)
        blocks: dict[int, list[Tensor]] = {}
        for group, ts in zip(self._groups, self._members, strict=True):
            picked = pick_features(features, [f.name for f in group.lookups])
            group.check(picked.values(), picked.offsets(), padded=picked.capacity() is not None)
            weights = picked.weights() if self._is_weighted else None
            pooled = group.pooled(picked.values(), picked.offsets(), weights, self._output_dtype)
            pieces = iter(torch.split(pooled, group.dims, dim=1))
            for t in ts:
                blocks[t] = [next(pieces) for _ in self._names_by_table[t]]
        values = torch.cat([block for t in sorted(blocks) for block in blocks[t]], dim=1)
        return KeyedTensor(self._embedding_names, self._embedding_dims, values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the tables, in their order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether lookups are scaled by the batch's weights."""
        return self._is_weighted

    def output_dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self._output_dtype


class EmbeddingCollection(_QuantizedCollection, EmbeddingCollectionInterface):
    """Unpooled lookups of quantized tables."""

    _children_name = "embeddings"
    _config_type = EmbeddingConfig

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        *,
        formats: Mapping[str, str],
    ) -> None:
        super().__init__(tables, device, formats)
        self._need_indices, self._output_dtype = need_indices, output_dtype

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look the batch up."""
        require_features(features, type(self).__name__, False)
        by_name: dict[str, JaggedTensor] = {}
        for group, ts in zip(self._groups, self._members, strict=True):
            picked = pick_features(features, [f.name for f in group.lookups])
            group.check(picked.values(), picked.offsets(), padded=picked.capacity() is not None)
            rows = group.sequence(picked.values(), picked.offsets(), self._output_dtype)
            ends = list(accumulate(picked.length_per_key(), initial=0))
            lengths = picked.lengths().view(len(group.lookups), -1)
            for number, name in enumerate(name for t in ts for name in self._names_by_table[t]):
                piece = slice(ends[number], ends[number + 1])
                ids = picked.values()[piece] if self._need_indices else None
                by_name[name] = JaggedTensor(rows[piece], weights=ids, lengths=lengths[number])
        return {name: by_name[name] for names in self._names_by_table for name in names}

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of the tables, in their order."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The dim of every table."""
        return self._configs[0].embedding_dim if self._configs else 0

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table's features."""
        return self._names_by_table
