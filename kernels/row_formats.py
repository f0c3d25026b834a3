"""Formats of quantized rows: which numbers, of how many bits, and the scales that turn them into values again.

A table of R rows and D columns is two planes, the payload first: payload uint8 [R, row_bytes], then scales [R, k] where
k is 2 (scale, bias), 1 (scale) or 0. A row of payload holds nothing else, so that it can be read 16 bytes at a time.
value = number * scale + bias, each term only where the format has it. With fewer than 8 bits a number, column j lies in
byte j * bits / 8, the first column in the lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# bytes: tables of a payload begin on multiples of it, so that rows are aligned as far as their width lets them
TABLE_BOUNDARY = 16


@dataclass(frozen=True)
class RowFormat:
    """One way to store rows: `bits` a number, `parts` of a row's scales (2: scale and bias, 1: scale, 0: neither).

    `scale_dtypes` are those the scales may have, the default first; `levels` the highest number of an integer format.
    """

    name: str
    bits: int
    parts: int
    scale_dtypes: tuple[torch.dtype, ...] = ()
    levels: int = 0

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row's payload."""
        return -(-dim * self.bits // 8)

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales unless another is asked for; fp16 where there are none."""
        return self.scale_dtypes[0] if self.scale_dtypes else torch.float16

    def bytes_moved(self, dim: int, scale_dtype: torch.dtype | None = None) -> int:
        """Bytes of a row with its scales."""
        return self.row_bytes(dim) + self.parts * (scale_dtype or self.scale_dtype).itemsize


# of the values that rows without scales hold
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_HALF_OR_SINGLE = (torch.float16, torch.float32)

ROW_FORMATS: dict[str, RowFormat] = {
    format.name: format
    for format in (
        RowFormat("int8", 8, 2, _HALF_OR_SINGLE, levels=255),
        RowFormat("int4", 4, 2, _HALF_OR_SINGLE, levels=15),
        RowFormat("int2", 2, 2, _HALF_OR_SINGLE, levels=3),
        RowFormat("fp8", 8, 1, (torch.float32,)),
        RowFormat("fp16", 16, 0),
        RowFormat("bf16", 16, 0),
        RowFormat("fp32", 32, 0),
    )
}
"""Name -> format. fp16, bf16 and fp32 are here so that one lookup serves every table of a quantized collection."""


def row_format(name: str) -> RowFormat:
    """The format of that name.

    Raises:
        ValueError: there is none; names those that are.
    """
    if name not in ROW_FORMATS:
        raise ValueError(f"no row format is named {name!r}; there are {', '.join(ROW_FORMATS)}")
    return ROW_FORMATS[name]


def dequantize_rows_ref(
    payload: Tensor, scales: Tensor, dim: int, format: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """W [R, D] of Q and S, computed in fp32."""
    kind = row_format(format)
    if not kind.parts:
        rows: Tensor = payload.contiguous().view(DTYPES[format])
        return rows[:, :dim].to(dtype, copy=True)
    if kind.parts == 1:
        return (payload.view(torch.float8_e4m3fn).float() * scales[:, :1].float()).to(dtype)
    numbers = _unpack(payload, kind)[:, :dim].float()
    return (numbers * scales[:, :1].float() + scales[:, 1:].float()).to(dtype)


def _unpack(payload: Tensor, kind: RowFormat) -> Tensor:
    """The inverse of `_pack`; columns of padding are still there."""
    per_byte = 8 // kind.bits
    if per_byte == 1:
        return payload
    places = [(payload >> (place * kind.bits)) & kind.levels for place in range(per_byte)]
    return torch.stack(places, 2).view(payload.shape[0], payload.shape[1] * per_byte)
