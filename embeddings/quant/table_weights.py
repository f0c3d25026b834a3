"""The rows of quantized tables as pairs of tensors: made from float rows, and as others give them.

Shapes: W [R, D] float rows; payload uint8 [R, row_bytes]; scales [R, parts], or None where the format has none.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from shardwise.kernels import quantize_rows, row_format

from .tables import QuantizedTable

TableWeights: TypeAlias = tuple[Tensor, Tensor | None]


def quantized_rows(
    name: str, rows: Tensor, format: str, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Payload and scales of a table's float rows; on meta as empty as those.

    Raises:
        ValueError: a row is not finite, or the format cannot hold it; names the table and the row.
    """
    try:
        return quantize_rows(rows.detach(), format, scale_dtype)
    except ValueError as error:
        raise ValueError(f"table {name!r}: {error}") from None


def scales_as(scales: Tensor | None, table: QuantizedTable, dtype: torch.dtype) -> Tensor:
    """Given scales as [rows, parts] of `dtype`; they may be bytes, uint8 [rows, parts * itemsize], or None for 0 parts.

    Raises:
        ValueError: shape or dtype are not the table's; names it.
    """
    parts = row_format(table.format).parts
    if scales is None and parts == 0:
        return torch.empty(table.rows, 0, dtype=dtype)
    if scales is not None:
        found = scales.contiguous().view(dtype) if scales.dtype == torch.uint8 else scales
        if found.dtype == dtype and found.shape == (table.rows, parts):
            return found
    got = "None" if scales is None else f"{scales.dtype} {list(scales.shape)}"
    raise ValueError(
        f"table {table.name!r}: the scales of {table.format} rows are {dtype} [{table.rows}, {parts}], got {got}"
    )
