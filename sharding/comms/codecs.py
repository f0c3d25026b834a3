"""Compressed blocks of rows: fp32 values to fewer bytes, and back.

Letters: n values of a block, in rows of `row` values that share a scale (the last row of a block may be shorter);
R = ceil(n / row) rows. A block is its payload (`bits` per value), then `row_bytes` per row of scales, each of the two
padded with zeros to a multiple of 4 bytes. Every rounding is to nearest, ties to even: same values, same bytes.

Formats: fp16, bf16; fp8 as OCP 8-bit floating point (e4m3: largest value 448; e5m2: 57344) under a scale per row;
int8 with a scale and a minimum per row; mx4 as the OCP Microscaling format MXFP4 (e2m1 under a power of two, E8M0).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

# values that share a scale, unless a setting says otherwise: fp8 then takes 8.5 bits a value, int8 takes 9
DEFAULT_ROW = 64
MX4_ROW = 32
# scales stay normal numbers, so that they keep their precision: a row of subnormal values rounds to multiples of less
_LEAST_SCALE = 2.0**-126


class Codec(abc.ABC):
    """A pair of inverse functions between fp32 values [n] and bytes [encoded_bytes(n)], n >= 0, on any device."""

    # equal names mean equal bytes: ranks compare them
    name: str

    @abc.abstractmethod
    def encoded_bytes(self, elements: int) -> int:
        """Bytes of a block of that many values, a multiple of 4."""

    @abc.abstractmethod
    def encode_blocks(self, flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Consecutive blocks of `sizes` values of flat [sum(sizes)] fp32, as uint8; and the bytes of each."""

    @abc.abstractmethod
    def decode_blocks(self, data: Tensor, sizes: Sequence[int]) -> Tensor:
        """The inverse of `encode_blocks`: fp32 [sum(sizes)]. `data` begins at a multiple of 4 bytes in its storage."""

    @abc.abstractmethod
    def overflows(self, flat: Tensor) -> Tensor:
        """Bool []: whether some finite value of the block `flat` would arrive as inf or NaN.

        Where values share a scale, an inf or NaN turns its row into NaN and counts too; fp16 and bf16 pass it on.
        No host sync.
        """

    def encode(self, flat: Tensor) -> Tensor:
        """The bytes [encoded_bytes(n)] of one block [n] fp32."""
        return self.encode_blocks(flat, [flat.shape[0]])[0]

    def decode(self, data: Tensor, elements: int) -> Tensor:
        """The values [elements] fp32 of one block."""
        return self.decode_blocks(data, [elements])

    @property
    def compresses(self) -> bool:
        """False where encoding only views the values as bytes."""
        return True

    def __repr__(self) -> str:
        return f"<Codec {self.name}>"


@dataclass(frozen=True)
class Format:
    """How values of one row become bytes.

    `quantize` takes rows [R, row] fp32 and returns the payload [R, row * bits / 8] uint8 and the scales [R, row_bytes]
    uint8; `dequantize` is its inverse. A row of 1 has no scales. Both can be pickled; formats of one name are equal.
    """

    name: str
    bits: int
    row: int
    row_bytes: int
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]] = field(compare=False)
    dequantize: Callable[[Tensor, Tensor], Tensor] = field(compare=False)


class FormatCodec(Codec):
    """A format, and a factor that values are multiplied with on their way (TorchRec's loss scale)."""

    def __init__(self, format: Format, *, loss_scale: float | None = None) -> None:
        if loss_scale is not None and not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(f"the loss scale must be positive and finite, got {loss_scale}")
        self.format = format
        self.loss_scale = loss_scale
        self.name = format.name if loss_scale is None else f"{format.name}*{loss_scale!r}"

    @property
    def compresses(self) -> bool:
        return self.format != FP32 or self.loss_scale is not None

    def encoded_bytes(self, elements: int) -> int:
        format = self.format
        return _padded(_payload(format, elements)) + _padded(_rows(format, elements) * format.row_bytes)

    def encode_blocks(self, flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_values(flat, sum(sizes))
        format, bytes_per_block = self.format, [self.encoded_bytes(n) for n in sizes]
        if flat.shape[0] == 0:
            return flat.new_empty(0, dtype=torch.uint8), bytes_per_block
        scaled = flat if self.loss_scale is None else flat * self.loss_scale
        payload, scales = format.quantize(_whole_rows(scaled, sizes, format.row))
        payload, scales = payload.flatten(), scales.flatten()
        if _is_payload_alone(format, sizes):
            return payload, bytes_per_block
        # of each block the payload of its values and, where there was a tail row, what filled that up
        parts: list[int] = []
        for n in sizes:
            used = _payload(format, n)
            parts += [used, _rows(format, n) * format.row * format.bits // 8 - used]
        used_and_filling = torch.split(payload, parts)
        scales_of = torch.split(scales, [_rows(format, n) * format.row_bytes for n in sizes])
        zeros = payload.new_zeros(3)
        pieces: list[Tensor] = []
        for used_part, scale in zip(used_and_filling[::2], scales_of, strict=True):
            for part in (used_part, scale):
                pieces += [part, zeros[: -part.shape[0] % 4]]
        return torch.cat(pieces), bytes_per_block

    def decode_blocks(self, data: Tensor, sizes: Sequence[int]) -> Tensor:
        format = self.format
        check_bytes(data, sum(self.encoded_bytes(n) for n in sizes))
        if data.shape[0] == 0:
            return data.new_empty(0, dtype=torch.float32)
        alone = _is_payload_alone(format, sizes)
        payload, scales = (data, data[:0]) if alone else self._parts(data, sizes)
        rows = payload.shape[0] * 8 // (format.bits * format.row)
        values = format.dequantize(payload.view(rows, -1), scales.view(rows, -1))
        flat = _cut(values.flatten(), sizes, format.row)
        return flat if self.loss_scale is None else flat / self.loss_scale

    def _parts(self, data: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The payload of whole rows and the scales of all blocks."""
        format = self.format
        parts: list[int] = []
        for n in sizes:
            for size in (_payload(format, n), _rows(format, n) * format.row_bytes):
                parts += [size, -size % 4]
        pieces = torch.split(data, parts)
        zeros = data.new_zeros(format.row * format.bits // 8)
        payload: list[Tensor] = [data[:0]]
        for n, piece in zip(sizes, pieces[::4], strict=True):
            payload += [piece, zeros[: _rows(format, n) * len(zeros) - _payload(format, n)]]
        return torch.cat(payload), torch.cat([data[:0], *pieces[2::4]])

    def overflows(self, flat: Tensor) -> Tensor:
        format = self.format
        if flat.shape[0] == 0 or not self.compresses:
            return flat.new_zeros((), dtype=torch.bool)
        check_values(flat, flat.shape[0])
        if format.row == 1:
            rows = flat.nan_to_num(0.0, 0.0, 0.0).view(1, -1)
        else:
            rows = _whole_rows(flat, [flat.shape[0]], format.row)
        # a row's scale depends on its extremes alone, and they are the first to leave the range
        edges = torch.stack([rows.amin(1), rows.amax(1)], 1)
        back = edges if self.loss_scale is None else edges * self.loss_scale
        back = format.dequantize(*format.quantize(back))
        if self.loss_scale is not None:
            back = back / self.loss_scale
        return ~back.isfinite().all()


def _payload(format: Format, n: int) -> int:
    return -(-n * format.bits // 8)


def _is_payload_alone(format: Format, sizes: Sequence[int]) -> bool:
    """Whether nothing lies between the payloads of the blocks."""
    return format.row == 1 and all(_payload(format, n) % 4 == 0 for n in sizes)


def _rows(format: Format, n: int) -> int:
    return -(-n // format.row)


def _padded(size: int) -> int:
    return -(-size // 4) * 4


def _whole_rows(flat: Tensor, sizes: Sequence[int], row: int) -> Tensor:
    """[R, row]: each block's last row filled up with its last value, which changes neither extreme of the row."""
    if any(n % row for n in sizes):
        pieces: list[Tensor] = []
        for block in torch.split(flat, list(sizes)):
            pieces += [block, block[-1:].expand(-block.shape[0] % row)] if block.shape[0] else []
        flat = torch.cat(pieces)
    return flat.reshape(-1, row)


def _cut(flat: Tensor, sizes: Sequence[int], row: int) -> Tensor:
    """The inverse of `_whole_rows`."""
    if not any(n % row for n in sizes):
        return flat
    parts: list[int] = []
    for n in sizes:
        parts += [n, -n % row]
    return torch.cat(torch.split(flat, parts)[::2])


def check_values(flat: Tensor, elements: int) -> None:
    """Raises ValueError unless these are fp32 [elements]."""
    if flat.dtype != torch.float32 or flat.dim() != 1 or flat.shape[0] != elements:
        raise ValueError(f"a codec takes {elements} float32 values, got {flat.dtype} of shape {list(flat.shape)}")


def check_bytes(data: Tensor, size: int) -> None:
    """Raises ValueError unless these are uint8 [size]."""
    if data.dtype != torch.uint8 or data.dim() != 1 or data.shape[0] != size:
        raise ValueError(f"a codec expected {size} bytes, got {data.dtype} of shape {list(data.shape)}")


def _as(dtype: torch.dtype, rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows.to(dtype).contiguous().view(torch.uint8), rows.new_empty((rows.shape[0], 0), dtype=torch.uint8)


def _from(dtype: torch.dtype, payload: Tensor, scales: Tensor) -> Tensor:
    return payload.view(dtype).to(torch.float32)


def plain(name: str, dtype: torch.dtype) -> Format:
    """Every value by itself, as `dtype`."""
    return Format(name, 8 * dtype.itemsize, 1, 0, partial(_as, dtype), partial(_from, dtype))


FP32 = plain("fp32", torch.float32)
FP16 = plain("fp16", torch.float16)
BF16 = plain("bf16", torch.bfloat16)


def _as_fp8(dtype: torch.dtype, rows: Tensor) -> tuple[Tensor, Tensor]:
    scale = (rows.abs().amax(1, keepdim=True) / torch.finfo(dtype).max).clamp(min=_LEAST_SCALE)
    return (rows / scale).to(dtype).view(torch.uint8), scale.view(torch.uint8)


def _from_fp8(dtype: torch.dtype, payload: Tensor, scales: Tensor) -> Tensor:
    return payload.view(dtype).to(torch.float32) * scales.view(torch.float32)


def fp8(*, row: int = DEFAULT_ROW, exponent_bits: int = 4) -> Format:
    """1 byte a value, e4m3 or e5m2, under an fp32 scale per row that takes the row's largest value to the format's."""
    dtype = {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}[exponent_bits]
    _check_row("fp8", row, 4)
    return Format(f"fp8e{exponent_bits}/{row}", 8, row, 4, partial(_as_fp8, dtype), partial(_from_fp8, dtype))


def _as_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    # aminmax of rows is ten times slower than both on CPU
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    scale = ((high - low) / 255).clamp(min=_LEAST_SCALE)
    steps = ((rows - low) / scale).round().clamp(max=255)
    # casting NaN to an integer is undefined
    return steps.nan_to_num(0.0).to(torch.uint8), torch.cat([scale, low], 1).view(torch.uint8)


def _from_int8(payload: Tensor, scales: Tensor) -> Tensor:
    scale, low = torch.split(scales.view(torch.float32), 1, 1)
    return payload.to(torch.float32) * scale + low


def int8(*, row: int = DEFAULT_ROW) -> Format:
    """1 byte a value: the nearest of 256 values evenly from a row's least to its largest; error: half a step."""
    _check_row("int8", row, 4)
    return Format(f"int8/{row}", 8, row, 8, _as_int8, _from_int8)


def _as_mx4(rows: Tensor) -> tuple[Tensor, Tensor]:
    bits = rows.abs().amax(1, keepdim=True).view(torch.int32)
    # a quarter more carries into the exponent from mantissa 1.75 on; 2 is the exponent of 6
    power = (((bits + 0x00200000) >> 23) - 2).clamp(min=1)
    power = power.masked_fill(bits >= 0x7F800000, 255)
    size = (rows / _power_of_two(power)).abs()
    # spacing 1/2 below 2, then 1, then 2; `round` takes ties to the even code in each
    code = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).round().clamp(max=7)
    code = code.nan_to_num(0.0).to(torch.uint8) | (rows.signbit().to(torch.uint8) << 3)
    return code[:, 0::2] | (code[:, 1::2] << 4), power.to(torch.uint8)


def _from_mx4(payload: Tensor, scales: Tensor) -> Tensor:
    codes = torch.stack([payload & 15, payload >> 4], 2).flatten(1)
    size, odd = codes & 7, codes & 1
    # twice the value: 0 1 2 3, 4 6, 8 12
    twice = torch.where(size < 4, size, (odd + 2) << (size >> 1) >> 1).to(torch.float32)
    values = torch.where(codes < 8, twice, -twice) * 0.5
    return values * _power_of_two(scales.to(torch.int32))


def mx4(*, row: int = MX4_ROW) -> Format:
    """Half a byte a value, e2m1, under a power of two per row (OCP Microscaling Formats 1.0, MXFP4).

    The power is the one of the row's largest value after its rounding to e2m1: values from 6 to 7 times it become 6.
    """
    _check_row("mx4", row, 8)
    return Format(f"mx4/{row}", 4, row, 1, _as_mx4, _from_mx4)


def _power_of_two(power: Tensor) -> Tensor:
    """2 ** (power - 127) of E8M0 bytes from 1, from its bits; NaN for 255."""
    return (power << 23).masked_fill(power == 255, 0x7FC00000).view(torch.float32)


def _check_row(name: str, row: int, multiple: int) -> None:
    if row <= 0 or row % multiple:
        raise ValueError(f"{name}: values sharing a scale must be a positive multiple of {multiple}, got {row}")
