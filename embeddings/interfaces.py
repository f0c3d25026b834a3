"""What a pooled and a sequence collection are to those who call them, whoever makes them."""

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
