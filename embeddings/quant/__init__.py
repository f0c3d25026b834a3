"""Quantized tables for inference: collections that look like the trained ones and hold a quarter of their bytes."""

from .collections import EmbeddingBagCollection, EmbeddingCollection
from .fbgemm_rows import FUSED_8BIT, FUSED_NBIT, INFERENCE, FusedLayout, fuse_rows, inference_layout, split_rows
from .tables import QuantizedTable, QuantizedTables
from .torchrec_state import load_torchrec_state_dict, torchrec_state_dict

__all__ = [
    "FUSED_8BIT",
    "FUSED_NBIT",
    "INFERENCE",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FusedLayout",
    "QuantizedTable",
    "QuantizedTables",
    "fuse_rows",
    "inference_layout",
    "load_torchrec_state_dict",
    "split_rows",
    "torchrec_state_dict",
]
