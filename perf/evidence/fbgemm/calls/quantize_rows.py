"""Calls of 8-bit and N-bit rows, to and from floats."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .draw import Call, Draw, calls

_FLOAT_TYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
_MEMORY = "rows of another dtype than an op is named after"
_BF16 = "bf16 rows"
_EMPTY = "rows of no column"


def rare(draw: Draw, chance: float) -> bool:
    """True with this chance, but in none of the calls whose results are recorded."""
    return draw.seed >= 4 and draw.coin(chance)


def rows(draw: Draw, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of one of several kinds."""
    kind = draw.choice(("wide", "wide", "small", "shifted", "constant", "zeros", "few"))
    values = draw.floats(shape, torch.float32, scale=draw.choice((0.05, 2.0, 300.0)))
    if kind == "small":
        # zeros of both signs, of which a row's minimum may be either, are rare even in fp16
        values = values * 1e-3
    elif kind == "shifted":
        values = values * 0.01 + 10
    elif kind == "constant":
        values = values[..., :1].expand(*shape).contiguous()
    elif kind == "zeros":
        values = torch.zeros_like(values)
    elif kind == "few":
        values = draw.ints(shape, -2, 2).float() + 0.0
    return values.to(dtype)


def _outer(draw: Draw) -> list[int]:
    """All dimensions of rows but the last, one row in none of them once in eight calls."""
    if draw.coin(0.12):
        return [0]
    return [draw.between(1, 6)] if draw.coin(0.7) else [draw.between(1, 3) for _ in range(draw.between(2, 3))]


@calls("FloatToFused8BitRowwiseQuantized", "HalfToFused8BitRowwiseQuantized", "FloatOrHalfToFused8BitRowwiseQuantized")
def _to_8bit(draw: Draw) -> Call:
    shape = [*_outer(draw), draw.between(1, 40)]
    named = {"Float": (torch.float32,), "Half": (torch.float16,)}
    dtypes = named.get(draw.op.partition("To")[0], (torch.float32, torch.float16))
    dtype, difference = draw.choice(dtypes), ""
    if rare(draw, 0.05):
        dtype = torch.bfloat16 if len(dtypes) == 2 else draw.choice((torch.float32, torch.float16, torch.bfloat16))
        if dtype not in dtypes:
            difference = _BF16 if len(dtypes) == 2 else _MEMORY
    if rare(draw, 0.03):
        shape[-1], difference = 0, _EMPTY
    if rare(draw, 0.03):
        return Call([draw.floats(4)], "one dimension")
    return Call([draw.layout(rows(draw, shape, dtype))], packed=True, difference=difference)


def fused(draw: Draw, shape: Sequence[int], scale: torch.dtype, *, last: bool = True) -> Tensor:
    """Bytes of rows, `shape` of them for numbers, and a drawn scale and bias."""
    numbers = draw.ints(shape, 0, 255, torch.uint8)
    scales = draw.floats([*shape[:-1], 2], scale, scale=draw.choice((0.01, 2.0))).view(torch.uint8)
    return torch.cat([numbers, scales] if last else [scales, numbers], -1)


@calls("Fused8BitRowwiseQuantizedToFloat", "Fused8BitRowwiseQuantizedToHalf", "Fused8BitRowwiseQuantizedToBfloat16")
def _from_8bit(draw: Draw) -> Call:
    if rare(draw, 0.05):
        return Call([draw.choice((draw.ints(16, 0, 9, torch.uint8), draw.floats((2, 16))))], "bad rows")
    width = 0 if draw.coin(0.05) else draw.between(1, 40)
    return Call([draw.layout(fused(draw, [*_outer(draw), width], torch.float32))], packed=True)


@calls("Fused8BitRowwiseQuantizedToFloatOrHalf")
def _from_8bit_or_half(draw: Draw) -> Call:
    single, last = draw.coin(0.8), draw.coin()
    # fp16 scales are in front alone
    last = last and (single or rare(draw, 0.3))
    dtype = torch.float32 if single else torch.float16
    bytes_ = fused(draw, [*_outer(draw), draw.below(40)], dtype, last=last)
    output_dtype = draw.choice((2, 7)) if rare(draw, 0.1) else draw.choice((0, 1, 5))
    if single and last and draw.coin():
        return Call([draw.layout(bytes_), *([output_dtype] if output_dtype else [])], packed=True)
    return Call([draw.layout(bytes_), output_dtype, last, single], packed=True)


@calls("Fused8BitRowwiseQuantizedToFloatMixedDim")
def _mixed_dim(draw: Draw) -> Call:
    batch, dims = draw.below(4), [draw.below(9) for _ in range(draw.between(1, 4))]
    tables = [fused(draw, [batch, dim], torch.float32) for dim in dims]
    offsets = draw.offsets(torch.tensor([dim + 8 for dim in dims], dtype=draw.index_dtype()))
    output_dtype = draw.choice((0, 0, 1, 5))

    def expected() -> list[Tensor]:
        parts = [_in_python(table, 8, "f", last=True) for table in tables]
        return [_as_rows([sum(each, []) for each in zip(*parts, strict=True)], sum(dims), output_dtype)]

    return Call([draw.layout(torch.cat(tables, 1)), offsets, output_dtype], expected=expected)


def _nbit_rate(draw: Draw) -> int:
    return draw.choice((4, 4, 4, 2, 2, 1, 3, 5, 8))


@calls(
    "FloatToFusedNBitRowwiseQuantizedSBHalf",
    "HalfToFusedNBitRowwiseQuantizedSBHalf",
    "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf",
    "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalfWithRowwiseMinMax",
)
def _to_nbit(draw: Draw) -> Call:
    bit_rate, count, difference = _nbit_rate(draw), draw.below(6), ""
    expected: Callable[[], Sequence[Tensor]] | None = None
    named = {"Float": (torch.float32,), "Half": (torch.float16,)}
    dtypes = named.get(draw.op.partition("To")[0], (torch.float32, torch.float16))
    dtype = draw.choice(dtypes)
    columns = draw.between(1, 9) * 2 * (8 // bit_rate)
    if rare(draw, 0.03):
        columns += 1
    elif rare(draw, 0.03):
        columns, difference = 0, _EMPTY
    if rare(draw, 0.05):
        dtype = torch.bfloat16 if len(dtypes) == 2 else draw.choice((torch.float32, torch.float16, torch.bfloat16))
        if dtype not in dtypes:
            difference = _BF16 if len(dtypes) == 2 else _MEMORY
    if columns % (2 * (8 // bit_rate)):
        difference = ""
    values = rows(draw, (count, columns), dtype)
    given: list[object] = [draw.layout(values), bit_rate]
    if draw.op.endswith("MinMax"):
        ends = torch.stack([values.amin(1), values.amax(1)], 1) if columns else draw.floats((count, 2), dtype)
        if draw.coin():
            # cuts values, or leaves numbers unused
            ends = ends * draw.choice((0.5, 1.5))
        if rare(draw, 0.05):
            ends, difference = ends[:, :1], ""
        elif bit_rate not in (2, 4) and columns % (2 * (8 // bit_rate)) == 0 and not difference:
            # there FBGEMM takes the ends of the rows themselves
            expected = lambda: [_quantized(values, ends, bit_rate)]  # noqa: E731
        given.append(draw.layout(ends))
    return Call(given, packed=True, difference=difference, expected=expected)


@calls("FusedNBitRowwiseQuantizedSBHalfToFloat", "FusedNBitRowwiseQuantizedSBHalfToHalf")
def _from_nbit(draw: Draw) -> Call:
    if rare(draw, 0.05):
        return Call([draw.choice((draw.ints(16, 0, 9, torch.uint8), draw.floats((2, 16)))), 4], "bad rows")
    return Call(
        [draw.layout(fused(draw, [draw.below(6), draw.below(20)], torch.float16)), _nbit_rate(draw)], packed=True
    )


@calls("FusedNBitRowwiseQuantizedSBHalfToFloatOrHalf", "FusedNBitRowwiseQuantizedSBHalfFrontToFloatOrHalf")
def _from_nbit_or_half(draw: Draw) -> Call:
    front = draw.op.endswith("FrontToFloatOrHalf")
    last = not front and draw.coin(0.8)
    bit_rate, output_dtype = _nbit_rate(draw), draw.choice((0, 0, 0, 1, 1, 1, 5))
    bytes_ = fused(draw, [draw.below(6), draw.below(20)], torch.float16, last=last)

    def expected() -> list[Tensor]:
        values = _in_python(bytes_, bit_rate, "e", last=last)
        return [_as_rows(values, (bytes_.shape[1] - 4) * (8 // bit_rate), output_dtype)]

    # on the CPU FBGEMM gives no bf16 and takes scales to be last
    computed: Callable[[], Sequence[Tensor]] | None = expected if front or not last or output_dtype == 5 else None
    given: list[object] = [draw.layout(bytes_), bit_rate, output_dtype]
    if front:
        return Call(given, expected=expected)
    if last and draw.coin():
        return Call(given if output_dtype or draw.coin() else given[:2], packed=True, expected=computed)
    return Call([*given, last], packed=True, expected=computed)


def _in_python(bytes_: Tensor, bits: int, scales: str, *, last: bool) -> list[list[float]]:
    """The values of fused rows [R, bytes]; `scales` is how struct names the dtype of scale and bias."""
    size = 2 * struct.calcsize(scales)
    values = []
    for row in bytes_.tolist():
        numbers, both = (row[:-size], row[-size:]) if last else (row[size:], row[:size])
        scale, bias = struct.unpack(f"<2{scales}", bytes(both))
        places = [(byte >> (place * bits)) % 2**bits for byte in numbers for place in range(8 // bits)]
        values.append([number * scale + bias for number in places])
    return values


def _as_rows(values: list[list[float]], columns: int, output_dtype: int) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(len(values), columns).to(_FLOAT_TYPES[output_dtype])


def _quantized(values: Tensor, ends: Tensor, bits: int) -> Tensor:
    """Rows [R, D] as N-bit rows between ends [R, 2], with fp16 scale and bias behind."""
    out, per_byte, levels = [], 8 // bits, 2**bits - 1
    for row, (low, high) in zip(values.tolist(), ends.tolist(), strict=True):
        bias = rounded(low, "e")
        scale = rounded(rounded(rounded(high - bias) / levels), "e") or 1.0
        numbers = [round(rounded(rounded(x - bias) * rounded(1 / scale))) for x in row]
        numbers = [min(max(number, 0), levels) for number in numbers]
        for at in range(0, len(row), per_byte):
            out.append(sum(number << (place * bits) for place, number in enumerate(numbers[at : at + per_byte])))
        out += struct.pack("<2e", scale, bias)
    return torch.tensor(out, dtype=torch.uint8).view(len(values), values.shape[1] // per_byte + 4)


def rounded(x: float, dtype: str = "f") -> float:
    """The nearest number of a dtype as struct names it: fp32, or fp16 ("e")."""
    return float(struct.unpack(f"<{dtype}", struct.pack(f"<{dtype}", x))[0])
