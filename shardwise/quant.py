"""Quantized collections under the names of the trained ones: `shardwise.quant.EmbeddingBagCollection`."""

from __future__ import annotations

from .embeddings.quant import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]
