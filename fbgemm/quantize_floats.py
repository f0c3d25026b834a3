"""Numbers as smaller floats: bf16, 8-bit floats with a scale for each row or without, floats that share an exponent.

An 8-bit float has a sign, `ebits` bits of exponent with a bias and 7 - `ebits` of mantissa; it has neither infinity
nor NaN. Rows have 1-4-3 with bias 15 (`forward`) or 1-5-2 with bias 31, scaled to fill numbers below 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwise.kernels._op import runs_kernel
from shardwise.kernels.quantized import (
    BACKWARD,
    EXTRA,
    FORWARD,
    float_to_bfloat16 as to_bfloat16,
    from_float8,
    scaled_codes,
    to_float8,
    to_fp8_rows,
)

from .quantize_rows import as_bytes, from_bytes, output_type, require_bytes, require_floats
from .registry import op


@op("FloatToBfloat16Quantized(Tensor input) -> Tensor")
def float_to_bfloat16(input: Tensor) -> Tensor:
    """fp32 numbers in bf16, of two that are as near the one farther from zero."""
    if input.dtype != torch.float32:
        raise TypeError(f"input must be float32, got {input.dtype}")
    return to_bfloat16(input)


@op("Bfloat16QuantizedToFloat(Tensor input) -> Tensor")
def bfloat16_to_float(input: Tensor) -> Tensor:
    """bf16 numbers in fp32."""
    if input.dtype != torch.bfloat16:
        raise TypeError(f"input must be bfloat16, got {input.dtype}")
    return input.float()


@op("FloatToFP8RowwiseQuantized(Tensor t, bool forward) -> Tensor")
def float_to_fp8_rows(t: Tensor, forward: bool) -> Tensor:
    """Rows [..., D] as rows of 8-bit floats [..., W + 8], W the multiple of 4 from D on; behind, fp32 scale and 0."""
    require_floats("t", t)
    if t.dim() < 2:
        raise ValueError(f"t must have at least 2 dimensions, got shape {list(t.shape)}")
    *outer, dim = t.shape
    width = (dim + 3) // 4 * 4
    if dim == 0:
        return t.new_zeros((*outer, EXTRA), dtype=torch.uint8)
    return to_fp8_rows(t.flatten(0, -2), width, forward).view(*outer, width + EXTRA)


@op("FP8RowwiseQuantizedToFloat(Tensor input, bool forward, int output_dtype=0) -> Tensor")
def fp8_rows_to_float(input: Tensor, forward: bool, output_dtype: int = 0) -> Tensor:
    """The values of rows of 8-bit floats [..., W + 8], [..., W] with the columns that rounding up has added."""
    dtype = output_type(output_dtype)
    require_bytes("input", input, EXTRA)
    if input.dim() < 2 or input.shape[-1] % 4:
        raise ValueError(f"input must be [..., a multiple of 4 bytes], got shape {list(input.shape)}")
    width = input.shape[-1] - EXTRA
    if runs_kernel(input):
        rows = torch.ops.shardwise.from_fp8_parts(input.flatten(0, -2), None, width, width, forward, dtype)
        return rows.view(*input.shape[:-1], width)  # type: ignore[no-any-return]
    scale = from_bytes(input[..., width : width + 4], torch.float32)
    return from_float8(input[..., :width], *_kind(forward)).div_(scale).to(dtype)


def _kind(forward: bool) -> tuple[int, int]:
    """Bits of exponent, and its bias."""
    return (FORWARD if forward else BACKWARD)[:2]


def _require_row_dim(row_dim: int) -> None:
    if row_dim < 4 or row_dim % 4:
        raise ValueError(f"row_dim must be a positive multiple of 4, got {row_dim}")


@op("FloatToPaddedFP8RowwiseQuantized(Tensor t, bool forward, int row_dim) -> Tensor")
def float_to_padded_fp8_rows(t: Tensor, forward: bool, row_dim: int) -> Tensor:
    """Rows [..., D] in parts of `row_dim` 8-bit floats, each with an fp32 scale and an int32 behind.

    The int32 is how many numbers a row's last part has too many, and in the others minus the way to the last one.
    Shapes: returns uint8 [..., parts * (row_dim + 8)], parts = D / row_dim, rounded up.
    """
    require_floats("t", t)
    _require_row_dim(row_dim)
    if t.dim() < 1:
        raise ValueError(f"t must have at least 1 dimension, got shape {list(t.shape)}")
    *outer, dim = t.shape
    parts = (dim + row_dim - 1) // row_dim
    if parts == 0:
        return t.new_zeros((*outer, 0), dtype=torch.uint8)
    rows = t.flatten(0, -2) if outer else t[None]
    surplus = parts * row_dim - dim
    if runs_kernel(t):
        # FBGEMM counts one more in each of several full rows
        mark = parts - 1 if rows.shape[0] == 1 else dim // row_dim
        quantized = torch.ops.shardwise.to_fp8_parts(rows, row_dim, 0.0, mark, surplus, forward)
        return quantized.view(*outer, parts * (row_dim + EXTRA))  # type: ignore[no-any-return]
    codes, scale = scaled_codes(pad(rows, (0, surplus)).view(-1, row_dim), 0.0, forward)
    part = torch.arange(parts, dtype=torch.int32, device=t.device)
    # FBGEMM counts one more in each of several full rows
    marks = torch.where(part < parts - 1, part - (parts - 1 if rows.shape[0] == 1 else dim // row_dim), surplus)
    marks = as_bytes(marks.to(torch.int32)[:, None]).repeat(rows.shape[0], 1)
    return torch.cat([codes, as_bytes(scale), marks], 1).view(*outer, parts * (row_dim + EXTRA))


def _padded_fp8_fake(
    input: Tensor, forward: bool, row_dim: int, output_last_dim: int = -1, output_dtype: int = 0
) -> Tensor:
    columns = output_last_dim if output_last_dim >= 0 else torch.library.get_ctx().new_dynamic_size()
    return input.new_empty((*input.shape[:-1], columns), dtype=output_type(output_dtype))


@op(
    "PaddedFP8RowwiseQuantizedToFloat(Tensor input, bool forward, int row_dim, int output_last_dim=-1, int"
    " output_dtype=0) -> Tensor",
    fake=_padded_fp8_fake,
)
def padded_fp8_rows_to_float(
    input: Tensor, forward: bool, row_dim: int, output_last_dim: int = -1, output_dtype: int = 0
) -> Tensor:
    """The values [..., D] of rows in parts, or of several such rows one behind the other, without what is too many.

    `output_last_dim`, which is D, saves a wait for the device. What parts have too many is read from the first row.
    """
    dtype = output_type(output_dtype)
    _require_row_dim(row_dim)
    require_bytes("input", input, 0)
    *outer, width = input.shape
    if width % (row_dim + EXTRA):
        raise ValueError(
            f"input must have a multiple of row_dim + {EXTRA} = {row_dim + EXTRA} bytes a row, got shape"
            f" {list(input.shape)}"
        )
    rows = input.flatten(0, -2) if outer else input[None]
    count, parts = rows.shape[0], width // (row_dim + EXTRA)
    if count == 0 or parts == 0:
        return input.new_zeros((*outer, max(output_last_dim, 0)), dtype=dtype)
    if runs_kernel(input):
        ends = torch.ops.shardwise.fp8_part_ends(rows, row_dim)
        # the sizes of outputs are known on the host alone
        columns = output_last_dim if output_last_dim >= 0 else int(ends[-1])
        chosen = torch.ops.shardwise.from_fp8_parts(rows, ends, columns, row_dim, forward, dtype)
        return chosen.view(*outer, columns)  # type: ignore[no-any-return]
    split = rows.reshape(count, parts, row_dim + EXTRA)
    scale = from_bytes(split[..., row_dim : row_dim + 4], torch.float32)
    surplus = from_bytes(split[0, :, row_dim + 4 :], torch.int32)[:, 0].clamp(0, row_dim)
    ends = (row_dim - surplus).cumsum(0)
    # the sizes of outputs are known on the host alone
    columns = output_last_dim if output_last_dim >= 0 else int(ends[-1])
    column = torch.arange(columns, device=input.device)
    part = torch.searchsorted(ends, column, right=True)
    # a part that is full begins its own length before its end
    known = part < parts
    part = part.clamp(max=parts - 1)
    place = column - (ends - row_dim + surplus)[part]
    values = from_float8(split[..., :row_dim], *_kind(forward)).div_(scale).to(dtype).flatten(1)
    chosen = values[:, torch.where(known, part * row_dim + place, 0)]
    return torch.where(known, chosen, 0).view(*outer, columns)


def _require_exponent(ebits: int, bias: int) -> None:
    if not 1 <= ebits <= 7:
        raise ValueError(f"ebits must be 1 to 7, got {ebits}")
    if not 0 <= bias <= 127:
        raise ValueError(f"exponent_bias must be 0 to 127, got {bias}")


@op("FloatToHFP8Quantized(Tensor input, int ebits, int exponent_bias, float max_pos) -> Tensor")
def float_to_hfp8(input: Tensor, ebits: int, exponent_bias: int, max_pos: float) -> Tensor:
    """Numbers [R, D] fp32 as 8-bit floats, to nearest even; what is beyond `max_pos`, and NaN, becomes it."""
    _require_exponent(ebits, exponent_bias)
    mbits = 7 - ebits
    largest = (2.0 - 2.0**-mbits) * 2.0 ** ((1 << ebits) - 1 - exponent_bias)
    if not 0 < max_pos <= largest:
        raise ValueError(
            f"max_pos must be above 0 and at most {largest:g}, the largest number with ebits={ebits} and"
            f" exponent_bias={exponent_bias}, got {max_pos:g}"
        )
    if input.dtype != torch.float32:
        raise TypeError(f"input must be float32, got {input.dtype}")
    if input.dim() != 2:
        raise ValueError(f"input must have 2 dimensions, got shape {list(input.shape)}")
    return to_float8(input, ebits, exponent_bias, max_pos)


@op("HFP8QuantizedToFloat(Tensor input, int ebits, int exponent_bias) -> Tensor")
def hfp8_to_float(input: Tensor, ebits: int, exponent_bias: int) -> Tensor:
    """The fp32 values of 8-bit floats [R, D]."""
    _require_exponent(ebits, exponent_bias)
    require_bytes("input", input, 0)
    if input.dim() != 2:
        raise ValueError(f"input must have 2 dimensions, got shape {list(input.shape)}")
    return from_float8(input, ebits, exponent_bias)


@op(
    "FloatToMSFPQuantized(Tensor input, int bounding_box_size, int ebits, int mbits, int bias, float min_pos, float"
    " max_pos) -> Tensor"
)
def float_to_msfp(
    input: Tensor, bounding_box_size: int, ebits: int, mbits: int, bias: int, min_pos: float, max_pos: float
) -> Tensor:
    """Numbers [R, D] fp32 rounded as if `bounding_box_size` neighbours of a row shared the largest one's exponent.

    They keep `mbits` bits behind it, fewer below 2**(1 - bias); what is beyond `max_pos`, and NaN, becomes it.
    """
    if not (1 <= ebits <= 8 and 1 <= mbits <= 23):
        raise ValueError(f"ebits must be 1 to 8 and mbits 1 to 23, got {ebits} and {mbits}")
    if not 0 < min_pos < max_pos:
        raise ValueError(f"min_pos and max_pos must be positive, the second larger, got {min_pos} and {max_pos}")
    if bounding_box_size < 1:
        raise ValueError(f"bounding_box_size must be positive, got {bounding_box_size}")
    if input.dtype != torch.float32:
        raise TypeError(f"input must be float32, got {input.dtype}")
    if input.dim() != 2:
        raise ValueError(f"input must have 2 dimensions, got shape {list(input.shape)}")
    if runs_kernel(input):
        return torch.ops.shardwise.share_exponents(  # type: ignore[no-any-return]
            input, bounding_box_size, mbits, bias, max_pos
        )
    rows, dim = input.shape
    magnitude = input.abs()
    fields = _exponent_field(magnitude)
    count = (dim + bounding_box_size - 1) // bounding_box_size
    boxes = pad(fields, (0, count * bounding_box_size - dim)).view(rows, count, bounding_box_size)
    shared = boxes.amax(2, keepdim=True).expand_as(boxes).reshape(rows, count * bounding_box_size)[:, :dim] - 127
    # in the middle of fp32's range nothing overflows
    shift = torch.where(fields >= 127, -32, 32)
    moved = torch.where(fields >= 127, magnitude * 2.0**-32, magnitude * 2.0**32)
    field = _exponent_field(moved)
    exponent = field - 127 - shift
    dropped = 23 - mbits + (1 - bias - exponent).clamp(min=0) + (shared - exponent).clamp(min=0)
    # a sum that leaves no room for what goes rounds to nearest even
    room = ((dropped + field).clamp(max=254).to(torch.int32) << 23).view(torch.float32)
    rounded = (moved + room) - room
    rounded = torch.where(fields >= 127, rounded * 2.0**32, rounded * 2.0**-32)
    return torch.copysign(torch.where(rounded < max_pos, rounded, max_pos), input)


def _exponent_field(magnitude: Tensor) -> Tensor:
    """The exponent of fp32 numbers that are not negative, plus 127."""
    return magnitude.view(torch.int32) >> 23


@op("MSFPQuantizedToFloat(Tensor input, int ebits, int mbits, int bias) -> Tensor")
def msfp_to_float(input: Tensor, ebits: int, mbits: int, bias: int) -> Tensor:
    """A copy: numbers rounded by `FloatToMSFPQuantized` are fp32 already."""
    return input.clone()
