"""Quantized tables for inference: collections that look like the trained ones and hold a quarter of their bytes."""

from .collections import EmbeddingBagCollection, EmbeddingCollection
from .tables import QuantizedTable, QuantizedTables

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "QuantizedTable", "QuantizedTables"]
