"""Quantized collections under the names of the trained ones: `shardwise.quant.EmbeddingBagCollection`."""

from __future__ import annotations

from .embeddings.quant import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection,
    QuantConfig,
)

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "QuantConfig",
]
