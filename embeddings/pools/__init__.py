"""Pools: rows that programs write and read by id, as a feature store does, without gradients."""

from .keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from .lookups import (
    KeyedJaggedTensorPoolLookup,
    TensorJaggedIndexSelectLookup,
    TensorLookup,
    TensorPoolLookup,
)
from .object_pool import ObjectPool, check_ids, deterministic_dedup
from .ragged_rows import PaddedRows, RaggedRows, read_padded, row_major, to_keyed, write_padded
from .tensor_pool import TensorPool, check_rows

__all__ = [
    "KeyedJaggedTensorPool",
    "KeyedJaggedTensorPoolLookup",
    "ObjectPool",
    "PaddedRows",
    "RaggedRows",
    "TensorJaggedIndexSelectLookup",
    "TensorLookup",
    "TensorPool",
    "TensorPoolLookup",
    "check_ids",
    "check_rows",
    "deterministic_dedup",
    "read_padded",
    "row_major",
    "to_keyed",
    "write_padded",
]
