"""FBGEMM's modules of tables, with upstream's constructors, methods and state dicts, over our lookups and updates."""

from .inference import IntNBitTableBatchedEmbeddingBagsCodegen
from .inference_layout import (
    align_to_cacheline,
    nbit_construct_split_state,
    rounded_row_size_in_bytes,
    unpadded_row_size_in_bytes,
)

__all__ = [
    "IntNBitTableBatchedEmbeddingBagsCodegen",
    "align_to_cacheline",
    "nbit_construct_split_state",
    "rounded_row_size_in_bytes",
    "unpadded_row_size_in_bytes",
]
