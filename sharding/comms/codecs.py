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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# scales stay normal numbers, so that they keep their precision: a row of subnormal values rounds to multiples of less
_LEAST_SCALE = 2.0**-126


class Codec(abc.ABC):
    """A pair of inverse functions between fp32 values [n] and bytes [encoded_bytes(n)], n >= 0, on any device."""

    # equal names mean equal bytes: ranks compare them
    name: str
    # False where encoding only views the values as bytes
    compresses: bool = True
    # what rows become once they are here; None leaves their type to the collection
    output_dtype: torch.dtype | None = None

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

    def __repr__(self) -> str:
        return f"<Codec {self.name}>"


@dataclass(frozen=True)
class Format(abc.ABC):
    """How values of one row become bytes. A row of 1 has no scales; formats of one name are equal."""

    name: str
    bits: int
    row: int
    row_bytes: int

    @abc.abstractmethod
    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [R, row] fp32 as their payload [R, row * bits / 8] uint8 and their scales [R, row_bytes] uint8."""

    @abc.abstractmethod
    def dequantize(self, payload: Tensor, scales: Tensor) -> Tensor:
        """The inverse of `quantize`."""


class FormatCodec(Codec):
    """A format, and a factor that values are multiplied with on their way (TorchRec's loss scale)."""

    def __init__(self, format: Format, *, loss_scale: float | None = None) -> None:
        if loss_scale is not None and not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(f"the loss scale must be positive and finite, got {loss_scale}")
        self.format = format
        self.loss_scale = loss_scale
        self.name = format.name if loss_scale is None else f"{format.name}*{loss_scale!r}"
        self.compresses = format != FP32 or loss_scale is not None

    def encoded_bytes(self, elements: int) -> int:
        format = self.format
        return _padded(_payload(format, elements)) + _padded(_rows(format, elements) * format.row_bytes)

    def encode_blocks(self, flat: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
        check_block(flat, torch.float32, sum(sizes))
        format, bytes_per_block = self.format, [self.encoded_bytes(n) for n in sizes]
        if flat.shape[0] == 0:
            return flat.new_empty(0, dtype=torch.uint8), bytes_per_block
        scaled = flat if self.loss_scale is None else flat * self.loss_scale
        payload, scales = format.quantize(_whole_rows(scaled, sizes, format.row))
        if _is_payload_alone(format, sizes):
            return payload.flatten(), bytes_per_block
        rows, zeros = [_rows(format, n) for n in sizes], payload.new_zeros(3)
        pieces: list[Tensor] = []
        for n, values, scale in zip(sizes, torch.split(payload, rows), torch.split(scales, rows), strict=True):
            # without what filled the tail row up
            for part in (values.flatten()[: _payload(format, n)], scale.flatten()):
                pieces += [part, zeros[: -part.shape[0] % 4]]
        return torch.cat(pieces), bytes_per_block

    def decode_blocks(self, data: Tensor, sizes: Sequence[int]) -> Tensor:
        format, bytes_per_block = self.format, [self.encoded_bytes(n) for n in sizes]
        check_block(data, torch.uint8, sum(bytes_per_block))
        if data.shape[0] == 0:
            return data.new_empty(0, dtype=torch.float32)
        rows, payload, scales = [_rows(format, n) for n in sizes], data, data[:0]
        if not _is_payload_alone(format, sizes):
            zeros, payloads, scales_of = data.new_zeros(format.row * format.bits // 8), list[Tensor](), list[Tensor]()
            for n, count, block in zip(sizes, rows, torch.split(data, bytes_per_block), strict=True):
                used = _payload(format, n)
                payloads += [block[:used], zeros[: count * len(zeros) - used]]
                scales_of.append(block[_padded(used) :][: count * format.row_bytes])
            payload, scales = torch.cat(payloads), torch.cat(scales_of)
        flat = format.dequantize(payload.view(sum(rows), -1), scales.view(sum(rows), -1)).flatten()
        if any(n % format.row for n in sizes):
            blocks = torch.split(flat, [count * format.row for count in rows])
            flat = torch.cat([block[:n] for block, n in zip(blocks, sizes, strict=True)])
        return flat if self.loss_scale is None else flat / self.loss_scale

    def overflows(self, flat: Tensor) -> Tensor:
        format, scale = self.format, self.loss_scale
        if flat.shape[0] == 0 or not self.compresses:
            return flat.new_zeros((), dtype=torch.bool)
        check_block(flat, torch.float32, flat.shape[0])
        alone = format.row == 1
        rows = flat.nan_to_num(0.0, 0.0, 0.0).view(1, -1) if alone else _whole_rows(flat, [len(flat)], format.row)
        # a row's scale depends on its extremes alone, and they are the first to leave the range
        edges = torch.stack([rows.amin(1), rows.amax(1)], 1)
        back = format.dequantize(*format.quantize(edges if scale is None else edges * scale))
        return ~(back if scale is None else back / scale).isfinite().all()


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
            pieces += [block, block[-1:].expand(-block.shape[0] % row)]
        flat = torch.cat(pieces)
    return flat.reshape(-1, row)


def check_block(block: Tensor, dtype: torch.dtype, size: int) -> None:
    """Raises ValueError unless a block is [size] of this dtype: float32 as values, uint8 as bytes."""
    if block.dtype != dtype or block.shape != (size,):
        expects = f"takes {size} float32 values" if dtype is torch.float32 else f"expected {size} bytes"
        raise ValueError(f"a codec {expects}, got {block.dtype} of shape {list(block.shape)}")


@dataclass(frozen=True)
class Floats(Format):
    """Values as `dtype`; those of a longer row over an fp32 scale that takes its largest value to the dtype's."""

    dtype: torch.dtype

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.row == 1:
            values, no_scales = rows.to(self.dtype).contiguous(), rows.new_empty((rows.shape[0], 0), dtype=torch.uint8)
            return values.view(torch.uint8), no_scales
        scale = (rows.abs().amax(1, keepdim=True) / torch.finfo(self.dtype).max).clamp(min=_LEAST_SCALE)
        return (rows / scale).to(self.dtype).view(torch.uint8), scale.view(torch.uint8)

    def dequantize(self, payload: Tensor, scales: Tensor) -> Tensor:
        values = payload.view(self.dtype).to(torch.float32)
        return values if self.row == 1 else values * scales.view(torch.float32)


def plain(name: str, dtype: torch.dtype) -> Format:
    """Every value by itself, as `dtype`."""
    return Floats(name, 8 * dtype.itemsize, 1, 0, dtype)


FP32 = plain("fp32", torch.float32)
FP16 = plain("fp16", torch.float16)
BF16 = plain("bf16", torch.bfloat16)


def fp8(*, row: int | None = None, exponent_bits: int = 4) -> Format:
    """1 byte a value, e4m3 or e5m2, under an fp32 scale per row, by default of 64 values."""
    row = _row_of("fp8", row, 64, 4)
    return Floats(
        f"fp8e{exponent_bits}/{row}", 8, row, 4, {4: torch.float8_e4m3fn, 5: torch.float8_e5m2}[exponent_bits]
    )


@dataclass(frozen=True)
class Steps(Format):
    """The nearest of 256 values evenly from a row's least to its largest, which are what the scales tell."""

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        # aminmax of rows is ten times slower than both on CPU
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        scale = ((high - low) / 255).clamp(min=_LEAST_SCALE)
        steps = ((rows - low) / scale).round().clamp(max=255)
        # casting NaN to an integer is undefined
        return steps.nan_to_num(0.0).to(torch.uint8), torch.cat([scale, low], 1).view(torch.uint8)

    def dequantize(self, payload: Tensor, scales: Tensor) -> Tensor:
        scale, low = torch.split(scales.view(torch.float32), 1, 1)
        return payload.to(torch.float32) * scale + low


def int8(*, row: int | None = None) -> Format:
    """1 byte a value, one of 256 steps of its row, by default of 64 values; error: half a step."""
    row = _row_of("int8", row, 64, 4)
    return Steps(f"int8/{row}", 8, row, 8)


@dataclass(frozen=True)
class Microscaled(Format):
    """Two values of e2m1 in a byte, under a power of two per row (OCP Microscaling Formats 1.0, MXFP4).

    The power is the one of the row's largest value after its rounding to e2m1: values from 6 to 7 times it become 6.
    """

    def quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        bits = rows.abs().amax(1, keepdim=True).view(torch.int32)
        # a quarter more carries into the exponent from mantissa 1.75 on; 2 is the exponent of 6
        power = (((bits + 0x00200000) >> 23) - 2).clamp(min=1).masked_fill(bits >= 0x7F800000, 255)
        size = (rows / _power_of_two(power)).abs()
        # spacing 1/2 below 2, then 1, then 2; `round` takes ties to the even code in each
        code = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).round().clamp(max=7)
        code = code.nan_to_num(0.0).to(torch.uint8) | (rows.signbit().to(torch.uint8) << 3)
        return code[:, 0::2] | (code[:, 1::2] << 4), power.to(torch.uint8)

    def dequantize(self, payload: Tensor, scales: Tensor) -> Tensor:
        codes = torch.stack([payload & 15, payload >> 4], 2).flatten(1)
        size, odd = codes & 7, codes & 1
        # twice the value: 0 1 2 3, 4 6, 8 12
        twice = torch.where(size < 4, size, (odd + 2) << (size >> 1) >> 1).to(torch.float32)
        return torch.where(codes < 8, twice, -twice) * 0.5 * _power_of_two(scales.to(torch.int32))


def mx4(*, row: int | None = None) -> Format:
    """Half a byte a value, e2m1 under a power of two per row, by default of 32 values."""
    row = _row_of("mx4", row, 32, 8)
    return Microscaled(f"mx4/{row}", 4, row, 1)


def _power_of_two(power: Tensor) -> Tensor:
    """2 ** (power - 127) of E8M0 bytes from 1, from its bits; NaN for 255."""
    return (power << 23).masked_fill(power == 255, 0x7FC00000).view(torch.float32)


def _row_of(name: str, row: int | None, default: int, multiple: int) -> int:
    """How many values share a scale."""
    row = default if row is None else row
    if row <= 0 or row % multiple:
        raise ValueError(f"{name}: values sharing a scale must be a positive multiple of {multiple}, got {row}")
    return row
