"""Rows as 8-bit and N-bit integers with a scale and a bias in each, and back.

Shapes: rows [..., D] floats; fused rows uint8 [..., bytes of D numbers + 2 scales], scale and bias behind the numbers
or in front of them, fp32 with 8 bits and fp16 with N bits. N-bit numbers lie 8 // N to a byte, the first column in the
lowest bits. Rows on CUDA have the bytes that they have on the CPU: no column is padded.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from shardwise.kernels._op import runs_kernel
from shardwise.kernels.quantized import packed_rows

from .registry import op

# FBGEMM's numbers of the types that rows are turned into
_OUTPUT_TYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
# bits of a number -> the format whose rows are FBGEMM's bit for bit (kernels/row_formats.py)
_QUANTIZED = {2: "int2", 4: "int4"}
_DEQUANTIZED = {**_QUANTIZED, 8: "int8"}
# bytes of scale and bias
_SINGLE, _HALF = 8, 4


def output_type(output_dtype: int) -> torch.dtype:
    """The dtype with FBGEMM's number `output_dtype`: 0 fp32, 1 fp16, 5 bf16."""
    if output_dtype not in _OUTPUT_TYPES:
        raise ValueError(f"output_dtype must be 0 (float32), 1 (float16) or 5 (bfloat16), got {output_dtype}")
    return _OUTPUT_TYPES[output_dtype]


def require_floats(name: str, rows: Tensor) -> None:
    """TypeError unless they are fp32, fp16 or bf16."""
    if rows.dtype not in _OUTPUT_TYPES.values():
        raise TypeError(f"{name} must be float32, float16 or bfloat16, got {rows.dtype}")


def require_bytes(name: str, rows: Tensor, least: int) -> None:
    """Raises unless they are uint8 with at least so many columns."""
    if rows.dtype != torch.uint8:
        raise TypeError(f"{name} must be uint8, got {rows.dtype}")
    if rows.dim() < 1 or rows.shape[-1] < least:
        raise ValueError(f"{name} must have at least {least} bytes a row, got shape {list(rows.shape)}")


def as_bytes(rows: Tensor) -> Tensor:
    """The bytes of contiguous rows [R, n], [R, n * itemsize]."""
    return rows.view(torch.uint8)


def from_bytes(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers whose bytes these are, wherever they lie in memory; columns become columns / itemsize."""
    # a copy: bytes within a row may begin at any address
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def _quantize_8bit(name: str, rows: Tensor) -> Tensor:
    require_floats(name, rows)
    if rows.dim() < 2:
        raise ValueError(f"{name} must have at least 2 dimensions, got shape {list(rows.shape)}")
    *outer, dim = rows.shape
    if dim == 0:
        return rows.new_zeros((*outer, _SINGLE), dtype=torch.uint8)
    if runs_kernel(rows):
        fused: Tensor = torch.ops.shardwise.to_fused_rows(rows.flatten(0, -2), 8, True, None)
        return fused.view(*outer, dim + _SINGLE)
    numbers, scales = torch.ops.shardwise.quantize_rows(rows.flatten(0, -2), "int8", torch.float32)
    return torch.cat([numbers, as_bytes(scales)], 1).view(*outer, dim + _SINGLE)


@op("FloatToFused8BitRowwiseQuantized(Tensor t) -> Tensor")
def float_to_fused_8bit(t: Tensor) -> Tensor:
    """Rows [..., D] as 8-bit rows [..., D + 8]."""
    return _quantize_8bit("t", t)


@op("HalfToFused8BitRowwiseQuantized(Tensor t) -> Tensor")
def half_to_fused_8bit(t: Tensor) -> Tensor:
    """Rows [..., D] as 8-bit rows [..., D + 8]."""
    return _quantize_8bit("t", t)


@op("FloatOrHalfToFused8BitRowwiseQuantized(Tensor t) -> Tensor")
def float_or_half_to_fused_8bit(t: Tensor) -> Tensor:
    """Rows [..., D] as 8-bit rows [..., D + 8]."""
    return _quantize_8bit("t", t)


def _dequantize_8bit(
    rows: Tensor, dtype: torch.dtype, *, last: bool = True, scale: torch.dtype = torch.float32
) -> Tensor:
    both = 2 * scale.itemsize
    require_bytes("input", rows, both)
    if rows.dim() < 2:
        raise ValueError(f"input must have at least 2 dimensions, got shape {list(rows.shape)}")
    *outer, width = rows.shape
    dim, flat = width - both, rows.flatten(0, -2)
    if runs_kernel(rows):
        wide = scale is torch.float32
        return torch.ops.shardwise.from_fused_rows(flat, 8, wide, last, dtype).view(*outer, dim)  # type: ignore[no-any-return]
    numbers, scales = (flat[:, :dim], flat[:, dim:]) if last else (flat[:, both:], flat[:, :both])
    values: Tensor = torch.ops.shardwise.dequantize_rows(
        numbers.contiguous(), from_bytes(scales, scale), dim, "int8", dtype
    )
    return values.view(*outer, dim)


@op("Fused8BitRowwiseQuantizedToFloat(Tensor input) -> Tensor")
def fused_8bit_to_float(input: Tensor) -> Tensor:
    """The fp32 values [..., D] of 8-bit rows [..., D + 8]."""
    return _dequantize_8bit(input, torch.float32)


@op("Fused8BitRowwiseQuantizedToHalf(Tensor input) -> Tensor")
def fused_8bit_to_half(input: Tensor) -> Tensor:
    """The fp16 values [..., D] of 8-bit rows [..., D + 8]."""
    return _dequantize_8bit(input, torch.float16)


@op("Fused8BitRowwiseQuantizedToBfloat16(Tensor input) -> Tensor")
def fused_8bit_to_bfloat16(input: Tensor) -> Tensor:
    """The bf16 values [..., D] of 8-bit rows [..., D + 8]."""
    return _dequantize_8bit(input, torch.bfloat16)


@op(
    "Fused8BitRowwiseQuantizedToFloatOrHalf(Tensor input, int output_dtype=0, bool scale_bias_last=True, bool"
    " quant_padding_float_type=True) -> Tensor"
)
def fused_8bit_to_float_or_half(
    input: Tensor, output_dtype: int = 0, scale_bias_last: bool = True, quant_padding_float_type: bool = True
) -> Tensor:
    """The values of 8-bit rows, whose scale and bias may be in front, and then fp16 (`quant_padding_float_type`)."""
    if scale_bias_last and not quant_padding_float_type:
        raise ValueError("quant_padding_float_type=False (fp16 scales) needs scale_bias_last=False")
    scale = torch.float32 if quant_padding_float_type else torch.float16
    return _dequantize_8bit(input, output_type(output_dtype), last=scale_bias_last, scale=scale)


def _mixed_dim_fake(input: Tensor, D_offsets: Tensor, output_dtype: int) -> Tensor:
    tables = D_offsets.shape[0] - 1
    return input.new_empty(input.shape[0], input.shape[1] - tables * _SINGLE, dtype=output_type(output_dtype))


@op(
    "Fused8BitRowwiseQuantizedToFloatMixedDim(Tensor input, Tensor D_offsets, int output_dtype) -> Tensor",
    fake=_mixed_dim_fake,
)
def fused_8bit_to_float_mixed_dim(input: Tensor, D_offsets: Tensor, output_dtype: int) -> Tensor:
    """The values [B, sum of dims] of 8-bit rows of T tables side by side, [B, sum of (D + 8)].

    Shapes: D_offsets [T + 1] int32 or int64, the first byte of each table's columns and the end of all.
    """
    dtype = output_type(output_dtype)
    if D_offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"D_offsets must be int32 or int64, got {D_offsets.dtype}")
    if D_offsets.dim() != 1 or D_offsets.shape[0] < 2:
        raise ValueError(f"D_offsets must have one dimension and 2 or more entries, got {list(D_offsets.shape)}")
    tables = D_offsets.shape[0] - 1
    require_bytes("input", input, _SINGLE * tables)
    if input.dim() != 2:
        raise ValueError(f"input must have 2 dimensions, got shape {list(input.shape)}")
    width = input.shape[1]
    if D_offsets.is_cpu:
        offsets = D_offsets.tolist()
        if offsets[0] != 0 or offsets[-1] != width or any(b - a < _SINGLE for a, b in pairwise(offsets)):
            raise ValueError(f"D_offsets must lead from 0 to {width} in steps of {_SINGLE} or more, got {offsets}")
    if runs_kernel(input):
        columns = width - _SINGLE * tables
        return torch.ops.shardwise.from_fused_tables(  # type: ignore[no-any-return]
            input, D_offsets.to(input.device), columns, dtype
        )
    ends = D_offsets[1:].to(input.device, torch.int64)
    at = (ends[:, None] + torch.arange(-_SINGLE, 0, device=input.device)).clamp(0, width - 1)
    scales = from_bytes(input[:, at.flatten()], torch.float32).view(-1, tables, 2)
    column = torch.arange(width - _SINGLE * tables, device=input.device)
    past = torch.arange(1, tables + 1, device=input.device) * _SINGLE
    table = torch.searchsorted(ends - past, column, right=True).clamp(max=tables - 1)
    values = input[:, column + _SINGLE * table].float() * scales[:, table, 0] + scales[:, table, 1]
    return values.to(dtype)


def _per_byte(bit_rate: int) -> int:
    """Numbers of a byte."""
    if not 1 <= bit_rate <= 8:
        raise ValueError(f"bit_rate must be 1 to 8, got {bit_rate}")
    return 8 // bit_rate


def _quantize_nbit(rows: Tensor, bit_rate: int, min_max: Tensor | None = None) -> Tensor:
    require_floats("input", rows)
    per_byte = _per_byte(bit_rate)
    if rows.dim() != 2 or rows.shape[1] % (2 * per_byte):
        raise ValueError(
            f"input must be [rows, a multiple of {2 * per_byte} columns] with {bit_rate} bits, got {list(rows.shape)}"
        )
    if rows.shape[1] == 0:
        # of no number
        return rows.new_zeros((rows.shape[0], _HALF), dtype=torch.uint8)
    if runs_kernel(rows):
        return torch.ops.shardwise.to_fused_rows(rows, bit_rate, False, min_max)  # type: ignore[no-any-return]
    if min_max is None and bit_rate in _QUANTIZED:
        packed, scales = torch.ops.shardwise.quantize_rows(rows, _QUANTIZED[bit_rate], torch.float16)
    else:
        values = rows.float()
        if min_max is None:
            low, high = values.aminmax(dim=1, keepdim=True)
        else:
            low, high = min_max[:, :1].float(), min_max[:, 1:].float()
        packed, scales = packed_rows(values, low, high, bit_rate)
    return torch.cat([packed, as_bytes(scales)], 1)


@op("FloatToFusedNBitRowwiseQuantizedSBHalf(Tensor input, int bit_rate) -> Tensor")
def float_to_fused_nbit(input: Tensor, bit_rate: int) -> Tensor:
    """Rows [R, D] as N-bit rows [R, D / (8 // N) + 4]; D a multiple of 2 bytes."""
    return _quantize_nbit(input, bit_rate)


@op("HalfToFusedNBitRowwiseQuantizedSBHalf(Tensor input, int bit_rate) -> Tensor")
def half_to_fused_nbit(input: Tensor, bit_rate: int) -> Tensor:
    """Rows [R, D] as N-bit rows [R, D / (8 // N) + 4]; D a multiple of 2 bytes."""
    return _quantize_nbit(input, bit_rate)


@op("FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(Tensor input, int bit_rate) -> Tensor")
def float_or_half_to_fused_nbit(input: Tensor, bit_rate: int) -> Tensor:
    """Rows [R, D] as N-bit rows [R, D / (8 // N) + 4]; D a multiple of 2 bytes."""
    return _quantize_nbit(input, bit_rate)


@op(
    "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalfWithRowwiseMinMax(Tensor input, int bit_rate, Tensor"
    " rowwise_min_max) -> Tensor"
)
def float_or_half_to_fused_nbit_min_max(input: Tensor, bit_rate: int, rowwise_min_max: Tensor) -> Tensor:
    """Rows [R, D] as N-bit rows of numbers between `rowwise_min_max` [R, 2]; what is beyond is cut."""
    if input.dim() != 2 or rowwise_min_max.shape != (input.shape[0], 2):
        raise ValueError(
            f"rowwise_min_max must be [{input.shape[0] if input.dim() else 'rows'}, 2] and input have 2 dimensions,"
            f" got {list(rowwise_min_max.shape)} and {list(input.shape)}"
        )
    if rowwise_min_max.dtype != input.dtype:
        raise TypeError(f"rowwise_min_max must be {input.dtype} as input is, got {rowwise_min_max.dtype}")
    return _quantize_nbit(input, bit_rate, rowwise_min_max)


def _dequantize_nbit(rows: Tensor, bit_rate: int, dtype: torch.dtype, *, last: bool = True) -> Tensor:
    per_byte = _per_byte(bit_rate)
    require_bytes("input", rows, _HALF)
    if rows.dim() != 2:
        raise ValueError(f"input must have 2 dimensions, got shape {list(rows.shape)}")
    if runs_kernel(rows):
        return torch.ops.shardwise.from_fused_rows(rows, bit_rate, False, last, dtype)  # type: ignore[no-any-return]
    width = rows.shape[1] - _HALF
    packed, scales = (rows[:, :width], rows[:, width:]) if last else (rows[:, _HALF:], rows[:, :_HALF])
    scales = from_bytes(scales, torch.float16)
    if bit_rate in _DEQUANTIZED:
        values: Tensor = torch.ops.shardwise.dequantize_rows(
            packed.contiguous(), scales, width * per_byte, _DEQUANTIZED[bit_rate], dtype
        )
        return values
    places = [(packed >> (place * bit_rate)) & ((1 << bit_rate) - 1) for place in range(per_byte)]
    numbers = torch.stack(places, 2).flatten(1).float()
    return (numbers * scales[:, :1].float() + scales[:, 1:].float()).to(dtype)


@op("FusedNBitRowwiseQuantizedSBHalfToFloat(Tensor input, int bit_rate) -> Tensor")
def fused_nbit_to_float(input: Tensor, bit_rate: int) -> Tensor:
    """The fp32 values [R, D] of N-bit rows."""
    return _dequantize_nbit(input, bit_rate, torch.float32)


@op("FusedNBitRowwiseQuantizedSBHalfToHalf(Tensor input, int bit_rate) -> Tensor")
def fused_nbit_to_half(input: Tensor, bit_rate: int) -> Tensor:
    """The fp16 values [R, D] of N-bit rows."""
    return _dequantize_nbit(input, bit_rate, torch.float16)


@op(
    "FusedNBitRowwiseQuantizedSBHalfToFloatOrHalf(Tensor input, int bit_rate, int output_dtype=0, bool"
    " scale_bias_last=True) -> Tensor"
)
def fused_nbit_to_float_or_half(
    input: Tensor, bit_rate: int, output_dtype: int = 0, scale_bias_last: bool = True
) -> Tensor:
    """The values [R, D] of N-bit rows, whose scale and bias may be in front."""
    return _dequantize_nbit(input, bit_rate, output_type(output_dtype), last=scale_bias_last)


@op("FusedNBitRowwiseQuantizedSBHalfFrontToFloatOrHalf(Tensor input, int bit_rate, int output_dtype) -> Tensor")
def fused_nbit_front_to_float_or_half(input: Tensor, bit_rate: int, output_dtype: int) -> Tensor:
    """The values [R, D] of N-bit rows with scale and bias in front."""
    return _dequantize_nbit(input, bit_rate, output_type(output_dtype), last=False)
