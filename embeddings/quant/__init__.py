"""Quantized tables for inference: collections that look like the trained ones and hold a quarter of their bytes."""

from .bag_collection import EmbeddingBagCollection, FeatureProcessedEmbeddingBagCollection
from .collection import QuantizedCollection, QuantizedRows
from .formats import QuantConfig, quantized_data_type, table_format
from .pruning import set_pruning_data
from .sequence_collection import EmbeddingCollection
from .table_weights import TableWeights, quantized_rows
from .tables import QuantizedTable, QuantizedTables

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "QuantConfig",
    "QuantizedCollection",
    "QuantizedRows",
    "QuantizedTable",
    "QuantizedTables",
    "TableWeights",
    "quantized_data_type",
    "quantized_rows",
    "set_pruning_data",
    "table_format",
]
