"""Rows as bytes and back, and lookups of tables that hold them."""

from .fp8_rows import BACKWARD, EXTRA, FORWARD, scaled_codes, to_fp8_rows
from .fused_rows import packed_rows
from .small_floats import float_to_bfloat16, from_float8, to_float8

__all__ = [
    "BACKWARD",
    "EXTRA",
    "FORWARD",
    "float_to_bfloat16",
    "from_float8",
    "packed_rows",
    "scaled_codes",
    "to_float8",
    "to_fp8_rows",
]
