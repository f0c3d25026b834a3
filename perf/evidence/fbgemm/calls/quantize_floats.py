"""Calls of bf16, of 8-bit floats and of floats that share an exponent. What FBGEMM has no CPU code for is in Python."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from .draw import Call, Draw, calls
from .quantize_rows import rare, rounded, rows

_FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
_EPSILON = 1e-20


@calls("FloatToBfloat16Quantized", "Bfloat16QuantizedToFloat")
def _bfloat16(draw: Draw) -> Call:
    shape = [draw.below(6) for _ in range(draw.below(4))]
    dtype = torch.float32 if draw.op.startswith("Float") else torch.bfloat16
    if rare(draw, 0.05):
        return Call([draw.floats(3, torch.float16)], "another dtype")
    values = draw.floats(shape, dtype, scale=draw.choice((1e-3, 2.0, 1e6)))
    if dtype == torch.float32 and draw.coin(0.3):
        # in the middle of two numbers of bf16
        values = values.bfloat16().float() * (1 + 2.0**-8)
    return Call([draw.layout(values)], packed=True)


def _kind(forward: bool) -> tuple[int, int, float]:
    """Bits of exponent, its bias, and the largest number of a scaled row."""
    return (4, 15, 0.9375) if forward else (5, 31, 0.875)


def _value(code: int, ebits: int, bias: int) -> float:
    """The number that an 8-bit float is."""
    mbits = 7 - ebits
    exponent, mantissa = code % 128 >> mbits, code % (1 << mbits)
    size = (
        mantissa * 2.0 ** (1 - bias - mbits)
        if exponent == 0
        else ((1 << mbits) + mantissa) * 2.0 ** (exponent - bias - mbits)
    )
    return -size if code >= 128 else size


def _code(x: float, forward: bool) -> int:
    """The code whose number is nearest to x, of two the even one."""
    ebits, bias, most = _kind(forward)
    size = min(abs(x), most)
    code = min(range(128), key=lambda code: (abs(_value(code, ebits, bias) - size), code % 2))
    return code + 128 * (math.copysign(1, x) < 0)


def _scale(part: list[float], forward: bool, least: float) -> float:
    """The fp32 scale of a row or a part of one."""
    largest = max([rounded(least), *(abs(x) for x in part)])
    return rounded(_kind(forward)[2] / rounded(rounded(_EPSILON) + largest))


def _bytes(rows_: list[list[int]], shape: list[int]) -> Tensor:
    return torch.tensor([byte for row in rows_ for byte in row], dtype=torch.uint8).view(shape)


@calls("FloatToFP8RowwiseQuantized")
def _to_fp8(draw: Draw) -> Call:
    shape = [*(draw.between(0, 4) for _ in range(draw.between(1, 2))), draw.below(9)]
    dtype, forward = draw.choice((torch.float32, torch.float16, torch.bfloat16)), draw.coin()
    values = rows(draw, shape, dtype)
    width = -(-shape[-1] // 4) * 4

    def expected() -> list[Tensor]:
        out = []
        for row in values.reshape(-1, shape[-1]).tolist() if values.numel() else []:
            scale = _scale(row, forward, _EPSILON)
            codes = [_code(rounded(x * scale), forward) for x in row]
            out.append([*codes, *[0] * (width - len(row)), *struct.pack("<2f", scale, 0.0)])
        made = [*shape[:-1], width + 8]
        return [_bytes(out, made) if out else torch.zeros(made, dtype=torch.uint8)]

    return Call([draw.layout(values), forward], expected=expected)


def _scaled(draw: Draw, shape: list[int], scale_shape: list[int]) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scales."""
    return draw.ints(shape, 0, 255, torch.uint8), draw.floats(scale_shape).abs() + 0.1


@calls("FP8RowwiseQuantizedToFloat")
def _from_fp8(draw: Draw) -> Call:
    outer = [draw.between(0, 4) for _ in range(draw.between(1, 2))]
    width, forward, output_dtype = draw.below(4) * 4, draw.coin(), draw.choice((0, 0, 1, 5))
    codes, scales = _scaled(draw, [*outer, width], [*outer, 2])
    given = [draw.layout(torch.cat([codes, scales.view(torch.uint8)], -1)), forward, output_dtype]

    def expected() -> list[Tensor]:
        ebits, bias, _ = _kind(forward)
        values = [_value(code, ebits, bias) for code in codes.flatten().tolist()]
        quotients = torch.tensor(values, dtype=torch.float64).view(codes.shape) / scales[..., :1].double()
        return [quotients.to(_FLOAT_TYPES[output_dtype])]

    return Call(given if output_dtype or draw.coin() else given[:2], expected=expected)


def _padded(row: list[float], row_dim: int, forward: bool, single: bool) -> list[int]:
    """A row in parts of `row_dim` numbers, each with its scale and a number that leads to the last part's padding."""
    out: list[int] = []
    parts = -(-len(row) // row_dim)
    for part in range(parts):
        numbers = row[part * row_dim : (part + 1) * row_dim]
        scale = _scale(numbers, forward, 0.0)
        surplus = row_dim - len(numbers)
        if part < parts - 1:
            surplus = part - (parts - 1) if single else -((len(row) - part * row_dim) // row_dim)
        codes = [_code(rounded(x * scale), forward) for x in numbers]
        out += [*codes, *[0] * (row_dim - len(numbers)), *struct.pack("<fi", scale, surplus)]
    return out


@calls("FloatToPaddedFP8RowwiseQuantized")
def _to_padded_fp8(draw: Draw) -> Call:
    outer = draw.choice(([], [1], [draw.between(0, 3)], [draw.between(1, 2), 2]))
    columns, row_dim, forward = draw.below(20), draw.choice((4, 8)), draw.coin()
    values = rows(draw, [*outer, columns], draw.choice((torch.float32, torch.float16, torch.bfloat16)))

    def expected() -> list[Tensor]:
        flat = values.reshape(-1, columns).tolist() if columns else []
        out = [_padded(row, row_dim, forward, len(flat) == 1) for row in flat]
        return [_bytes(out, [*outer, -(-columns // row_dim) * (row_dim + 8)])]

    return Call([draw.layout(values), forward, row_dim], expected=expected)


@calls("PaddedFP8RowwiseQuantizedToFloat")
def _from_padded_fp8(draw: Draw) -> Call:
    outer = draw.choice(([], [1], [draw.between(1, 3)], [draw.between(1, 2), 2]))
    # rows of several pieces, as they are where pieces were sent by several ranks
    pieces = [draw.between(1, 12) for _ in range(draw.between(1, 3))]
    row_dim, forward, output_dtype = draw.choice((4, 8)), draw.coin(), draw.choice((0, 0, 1, 5))
    numbers = [rows(draw, [math.prod(outer), columns]).tolist() for columns in pieces]
    packed = [
        [byte for row in each for byte in _padded(row, row_dim, forward, len(each) == 1)]
        for each in ([piece[place] for piece in numbers] for place in range(math.prod(outer)))
    ]
    scaled = [
        [
            _scale(row[at : at + row_dim], forward, 0.0)
            for at in range(0, len(row), row_dim)
            for _ in row[at : at + row_dim]
        ]
        for piece in numbers
        for row in piece
    ]

    def expected() -> list[Tensor]:
        ebits, bias, _ = _kind(forward)
        by_piece = [
            [_value(_code(rounded(x * s), forward), ebits, bias) / s for x, s in zip(row, scale, strict=True)]
            for row, scale in zip([row for piece in numbers for row in piece], scaled, strict=True)
        ]
        count = math.prod(outer)
        out = [sum(by_piece[place::count], []) for place in range(count)]
        values = torch.tensor(out, dtype=torch.float64).view(*outer, sum(pieces))
        return [values.to(_FLOAT_TYPES[output_dtype])]

    bytes_ = _bytes(packed, [*outer, len(packed[0])])
    last = sum(pieces) if draw.coin() else -1
    given: list[object] = [draw.layout(bytes_), forward, row_dim, last, output_dtype]
    return Call(given if output_dtype or last >= 0 or draw.coin() else given[:3], expected=expected)


@calls("FloatToHFP8Quantized", "HFP8QuantizedToFloat")
def _hfp8(draw: Draw) -> Call:
    ebits = draw.choice((4, 5, 4, 5, 2, 3, 6))
    bias = draw.choice((2 ** (ebits - 1) - 1, 2**ebits - 1))
    shape = [draw.below(6), draw.below(9)]
    if rare(draw, 0.04):
        shape = shape[:1]
    if draw.op == "HFP8QuantizedToFloat":
        return Call([draw.layout(draw.ints(shape, 0, 255, torch.uint8)), ebits, bias], packed=True)
    most = 2.0 ** (2**ebits - 1 - bias) * draw.choice((0.9375, 0.875, 0.5))
    values = draw.floats(shape, scale=draw.choice((most, 2 * most, 2.0 ** (2 - bias))))
    if draw.coin(0.2):
        # in the middle of two
        values = values.bfloat16().float()
    return Call([draw.layout(values), ebits, bias, most], packed=True)


@calls("FloatToMSFPQuantized", "MSFPQuantizedToFloat")
def _msfp(draw: Draw) -> Call:
    values = draw.floats([draw.below(5), draw.below(12)], scale=draw.choice((1e-4, 2.0, 1e4)))
    if draw.coin(0.3):
        # exponents far apart, and zeros
        values = values * 2.0 ** draw.ints(values.shape, -14, 6).float() * draw.ints(values.shape, 0, 3).clamp(max=1)
    ebits, mbits = draw.between(3, 8), draw.between(1, 10)
    bias = 2 ** (ebits - 1) - 1
    if draw.op == "MSFPQuantizedToFloat":
        return Call([draw.layout(values), ebits, mbits, bias], expected=lambda: [values])
    box, most = draw.between(1, 5), draw.choice((1e30, 1.5, 100.0))

    def expected() -> list[Tensor]:
        out = [
            _shared(row[at : at + box], mbits, bias, rounded(most))
            for row in values.tolist()
            for at in range(0, len(row), box)
        ]
        return [torch.tensor(sum(out, []), dtype=torch.float64).view(values.shape).float()]

    return Call([draw.layout(values), box, ebits, mbits, bias, 1e-30, most], expected=expected)


def _shared(box: list[float], mbits: int, bias: int, most: float) -> list[float]:
    """Numbers rounded to the mantissa that is left once the exponents are the largest one's."""
    exponents = [math.frexp(x)[1] - 1 if x else -127 for x in box]
    out = []
    for x, exponent in zip(box, exponents, strict=True):
        lost = max(1 - bias - exponent, 0) + max(max(exponents) - exponent, 0)
        step = 2.0 ** (exponent - mbits + lost)
        out.append(math.copysign(min(round(abs(x) / step) * step, most), x))
    return out
