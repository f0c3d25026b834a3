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

_LARGEST = {"fp16": torch.float16, "bf16": torch.bfloat16}


def quantized_rows(
    name: str, rows: Tensor, format: str, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Payload and scales of a table's float rows; on meta as empty as those.

    Raises:
        TypeError: they are no fp32, fp16 or bf16 rows.
        ValueError: a value is not finite, or too large for the format; names the table and the row.
    """
    if rows.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"table {name!r}: float32, float16 or bfloat16 rows are quantized, not {rows.dtype}")
    rows = rows.detach()
    kind = row_format(format)
    payload, scales = quantize_rows(rows, format, scale_dtype)
    if rows.is_meta or not rows.numel():
        return payload, scales
    finite = rows.isfinite().all(dim=1)
    # host syncs, once per table: a bad row must not be served
    if not bool(finite.all()):
        row = int(finite.logical_not().nonzero()[0, 0])
        raise ValueError(f"table {name!r}: row {row} has values that are not finite; it cannot be quantized")
    if kind.parts:
        fits, what = scales.isfinite().all(dim=1), f"{scales.dtype} scales"
    elif format in _LARGEST:
        fits = rows.abs().amax(dim=1).float() <= torch.finfo(_LARGEST[format]).max
        what = format
    else:
        return payload, scales
    if not bool(fits.all()):
        row = int(fits.logical_not().nonzero()[0, 0])
        largest = float(rows[row].abs().max())
        raise ValueError(
            f"table {name!r}: row {row} reaches {largest:g}, too large for {what}: choose another dtype for"
            " this table, bfloat16 say"
        )
    return payload, scales


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
