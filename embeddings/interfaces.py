"""Interfaces of pooled and sequence collections, whoever makes them: what their callers may rely on.

Large programs read attributes of TorchRec's that begin with an underscore: those are properties here, read-only.
"""

from __future__ import annotations

import abc

from torch import nn

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from .config import EmbeddingBagConfig, EmbeddingConfig


class EmbeddingBagCollectionInterface(nn.Module, abc.ABC):
    """Pooled lookups of many tables: a KJT of B samples in, a KeyedTensor [B, sum of dims] out."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look the batch up."""

    @abc.abstractmethod
    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the tables, in their order."""

    @abc.abstractmethod
    def is_weighted(self) -> bool:
        """Whether lookups are scaled by the batch's weights."""


class PooledTables(EmbeddingBagCollectionInterface):
    """What our pooled collections, trained and quantized, say of themselves."""

    _configs: list[EmbeddingBagConfig]
    _is_weighted: bool
    _embedding_dims: list[int]

    @property
    def _embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """`embedding_bag_configs()`, by the name of TorchRec's attribute."""
        return self._configs

    @property
    def _lengths_per_embedding(self) -> list[int]:
        """The columns of each output key."""
        return self._embedding_dims

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the tables, in their order; a quantized collection's have quantized data types."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether lookups are scaled by the batch's weights."""
        return self._is_weighted


class EmbeddingCollectionInterface(nn.Module, abc.ABC):
    """Unpooled lookups of many tables: a KJT in, a JaggedTensor of rows per feature out."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look the batch up."""

    @abc.abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of the tables, in their order."""

    @abc.abstractmethod
    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""

    @abc.abstractmethod
    def embedding_dim(self) -> int:
        """The dim of every table."""

    @abc.abstractmethod
    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table's features."""


class SequenceTables(EmbeddingCollectionInterface):
    """What our sequence collections, trained and quantized, say of themselves."""

    _configs: list[EmbeddingConfig]
    _need_indices: bool
    _embedding_dim: int
    _names_by_table: list[list[str]]

    @property
    def _embedding_configs(self) -> list[EmbeddingConfig]:
        """`embedding_configs()`, by the name of TorchRec's attribute."""
        return self._configs

    @property
    def _embedding_names_by_table(self) -> list[list[str]]:
        """`embedding_names_by_table()`, by the name of TorchRec's attribute."""
        return self._names_by_table

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of the tables, in their order; a quantized collection's have quantized data types."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """The dim of every table."""
        return self._embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table's features."""
        return self._names_by_table


def require_one_dim(tables: list[EmbeddingConfig]) -> None:
    """ValueError unless all tables of a sequence collection have one embedding_dim."""
    dims = {config.name: config.embedding_dim for config in tables}
    if len(set(dims.values())) > 1:
        first = tables[0].embedding_dim
        other = next(name for name, dim in dims.items() if dim != first)
        raise ValueError(
            "All tables in a EmbeddingCollection are required to have same embedding dimension. Violating case:"
            f" {other}'s embedding_dim {dims[other]} != {first}; all are {dims}"
        )
