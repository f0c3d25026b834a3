"""Quantize rows and back: fp32, fp16 or bf16 rows to the payload and scales of a format of row_formats.py.

Shapes: W [R, D] rows, Q [R, row_bytes] uint8 payload, S [R, parts] scales (fp16 or fp32).
Bytes moved: R * (D * itemsize(W) + row_bytes + parts * itemsize(S)).

Integer formats: bias is the row's minimum, scale its range / levels, both in the dtype of S before numbers are made
from them, number = round((value - bias) / scale) to nearest even, cut to [0, levels]. A constant row has scale 1. These
are the steps of FBGEMM's N-bit rows, whose bits come out for int4 and int2 with fp16 scales; int8 with fp32 scales
gives the bits of its fused 8-bit rows. fp8 is e4m3 with scale = max|row| / 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._op import register
from .row_formats import RowFormat, row_format

# the largest number of e4m3
FP8_MAX = 448.0
# what FBGEMM adds to the range of a fused 8-bit row before it divides by it
_EPSILON = 1e-8
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def quantize_rows_ref(weights: Tensor, format: str, scale_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Q and S of W; see the module's docstring."""
    kind = row_format(format)
    dtype = scale_dtype or kind.scale_dtype
    rows = weights.float()
    if not kind.parts:
        packed = weights.to(_DTYPES[format]).contiguous().view(torch.uint8)
        return packed, rows.new_empty(rows.shape[0], 0, dtype=dtype)
    if kind.parts == 1:
        scale = (rows.abs().amax(1, keepdim=True) / FP8_MAX).to(dtype)
        scale = torch.where(scale == 0, 1, scale)
        return (rows / scale.float()).to(torch.float8_e4m3fn).view(torch.uint8), scale
    low, high = rows.aminmax(dim=1, keepdim=True)
    if kind.levels == 255 and dtype == torch.float32:
        scale = (high - low) / 255
        numbers = torch.round((rows - low) * (255 / (high - low + _EPSILON)))
        return numbers.to(torch.uint8), torch.cat([scale, low], 1)
    bias = low.to(dtype)
    scale = ((high - bias.float()) / kind.levels).to(dtype)
    inverse = 1 / scale.float()
    degenerate = (scale == 0) | inverse.isinf()
    scale = torch.where(degenerate, torch.ones_like(scale), scale)
    inverse = torch.where(degenerate, torch.ones_like(inverse), inverse)
    numbers = torch.round((rows - bias.float()) * inverse).clamp(0, kind.levels).to(torch.uint8)
    return _pack(numbers, kind), torch.cat([scale, bias], 1)


def dequantize_rows_ref(
    payload: Tensor, scales: Tensor, dim: int, format: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """W [R, D] of Q and S, computed in fp32."""
    kind = row_format(format)
    if not kind.parts:
        rows: Tensor = payload.contiguous().view(_DTYPES[format])
        return rows[:, :dim].to(dtype)
    if kind.parts == 1:
        return (payload.view(torch.float8_e4m3fn).float() * scales[:, :1].float()).to(dtype)
    numbers = _unpack(payload, kind)[:, :dim].float()
    return (numbers * scales[:, :1].float() + scales[:, 1:].float()).to(dtype)


def _pack(numbers: Tensor, kind: RowFormat) -> Tensor:
    """Numbers [R, D] uint8 as [R, row_bytes], the first column in the lowest bits of its byte."""
    per_byte = 8 // kind.bits
    if per_byte == 1:
        return numbers
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per_byte))
    packed = torch.zeros(padded.shape[0], padded.shape[1] // per_byte, dtype=torch.uint8, device=numbers.device)
    for place in range(per_byte):
        packed |= padded[:, place::per_byte] << (place * kind.bits)
    return packed


def _unpack(payload: Tensor, kind: RowFormat) -> Tensor:
    """The inverse of `_pack`; columns of padding are still there."""
    per_byte = 8 // kind.bits
    if per_byte == 1:
        return payload
    places = [(payload >> (place * kind.bits)) & kind.levels for place in range(per_byte)]
    return torch.stack(places, 2).view(payload.shape[0], payload.shape[1] * per_byte)


def quantize_rows(weights: Tensor, format: str, scale_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows.

    Shapes: weights [R, D] fp32, fp16 or bf16; returns payload uint8 [R, row_bytes] and scales [R, parts].

    Raises:
        ValueError: an unknown format, or scales of a dtype that the format does not have.
    """
    kind = row_format(format)
    dtype = scale_dtype or kind.scale_dtype
    if kind.parts and dtype not in kind.scale_dtypes:
        raise ValueError(f"scales of {format} rows are {' or '.join(map(str, kind.scale_dtypes))}, not {dtype}")
    return torch.ops.shardwise.quantize_rows(weights, format, dtype)  # type: ignore[no-any-return]


def dequantize_rows(
    payload: Tensor, scales: Tensor, dim: int, format: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of quantized rows, [R, dim] in `dtype`, computed in fp32.

    Shapes: payload uint8 [R, row_bytes], scales [R, parts], as `quantize_rows` gives them.

    Raises:
        ValueError: payload or scales do not have the shape that `dim` and `format` ask for.
    """
    kind = row_format(format)
    wanted = ((payload.shape[0], kind.row_bytes(dim)), (payload.shape[0], kind.parts))
    if (tuple(payload.shape), tuple(scales.shape)) != wanted:
        raise ValueError(
            f"{format} rows of dim {dim} have payload {list(wanted[0])} and scales {list(wanted[1])},"
            f" got {list(payload.shape)} and {list(scales.shape)}"
        )
    return torch.ops.shardwise.dequantize_rows(payload, scales, dim, format, dtype)  # type: ignore[no-any-return]


def _quantize_rows(weights: Tensor, format: str, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return quantize_rows_ref(weights, format, scale_dtype)


def _fake_quantize(weights: Tensor, format: str, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kind, (rows, dim) = row_format(format), weights.shape
    payload = weights.new_empty(rows, kind.row_bytes(dim), dtype=torch.uint8)
    return payload, weights.new_empty(rows, kind.parts, dtype=scale_dtype)


def _dequantize_rows(payload: Tensor, scales: Tensor, dim: int, format: str, dtype: torch.dtype) -> Tensor:
    return dequantize_rows_ref(payload, scales, dim, format, dtype)


def _fake_dequantize(payload: Tensor, scales: Tensor, dim: int, format: str, dtype: torch.dtype) -> Tensor:
    return payload.new_empty(payload.shape[0], dim, dtype=dtype)


register(
    "quantize_rows(Tensor weights, str format, ScalarType scale_dtype) -> (Tensor, Tensor)",
    _quantize_rows,
    _fake_quantize,
)
register(
    "dequantize_rows(Tensor payload, Tensor scales, int dim, str format, ScalarType dtype) -> Tensor",
    _dequantize_rows,
    _fake_dequantize,
)
