"""Triton functions that decode quantized rows: numbers out of bytes, values out of numbers, scales out of memory.

Numbers become floats by their bits and not by a conversion: those of sm_80 run at a quarter of the speed of an
addition, and neither sm_80 nor gfx942 has e4m3 as a type. Products and sums here are rounded one by one, as on the CPU;
launches pass `UNFUSED`, or the compiler would make one rounding of the two.
"""

from __future__ import annotations

from torch import Tensor

from .._op import tl, triton

# option of a launch: no product and sum in one rounding
UNFUSED = {"enable_fp_fusion": False}


def paired(scales: Tensor) -> Tensor:
    """Scales as `row_scales` can load them, a row's scale and bias at once: elsewhere if they begin between two."""
    return scales if scales.data_ptr() % (2 * scales.itemsize) == 0 else scales.clone()


@triton.jit
def row_numbers(q, shift, BITS: tl.constexpr, FP8: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number that begins at bit `shift` of each byte, as fp32: of `BITS` bits, or e4m3 with `FP8`."""
    x = q.to(tl.int32)
    if FP8:
        # exponent and mantissa in the places of fp32's, whose exponent counts from 120 more
        magnitude = ((x & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.3292279957849159e36
        bits = magnitude.to(tl.int32, bitcast=True) | ((x & 0x80) << 24)
        # the one code that is no number
        return tl.where((x & 0x7F) == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    if BITS < 8:
        x = (x >> shift) & ((1 << BITS) - 1)
    # 2**23 + x
    return (x | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def row_scales(S, row, live, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale and bias of rows by one load each, fp32; where there is no bias, or neither, what is there is unused."""
    if PARTS == 2 and S.dtype.element_ty == tl.float16:
        both = tl.load(S.to(tl.pointer_type(tl.int32)) + row, mask=live, other=0)
        scale = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        bias = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif PARTS == 2:
        both = tl.load(S.to(tl.pointer_type(tl.int64)) + row, mask=live, other=0)
        scale = both.to(tl.int32).to(tl.float32, bitcast=True)
        bias = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif PARTS == 1:
        scale = tl.load(S + row, mask=live, other=0.0)
        bias = scale
    else:
        scale = row.to(tl.float32)
        bias = scale
    return scale, bias


@triton.jit
def row_values(q, scale, bias, shift, BITS: tl.constexpr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of a tile [rows, bytes] with the rows' scale and bias; without parts q holds the values."""
    if PARTS == 2:
        return row_numbers(q, shift, BITS, False) * scale[:, None] + bias[:, None]
    if PARTS == 1:
        return row_numbers(q, shift, BITS, True) * scale[:, None]
    return q.to(tl.float32)
