"""Cases for the compiler: the launches of the ops on quantized rows; cases.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch

from ...kernels.features import Feature, pack_features
from ...kernels.quantized import (
    pooled_lookup as quantized_lookup,
    rows as quantize,
    sequence_lookup as quantized_sequence,
)
from ...kernels.row_formats import ROW_FORMATS, TABLE_BOUNDARY, row_format

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (quantize, quantized_lookup, quantized_sequence)

# a run, its label, and what rows it reads where the order of a sum over a row is promised (nowhere)
Launch = tuple[Callable[[], object], str, str]


def launches() -> Iterator[Launch]:
    """Runs of every op, by format and by dim: rows on 16 bytes and not, in one block and in several."""
    for format in ROW_FORMATS:
        for dim in (1, 3, 7, 8, 20, 64, 128, 1023, 4096):
            yield from (
                (partial(_look_up, format, dim), f"D={dim} {format}", ""),
                (partial(_quantize, format, dim), f"D={dim} {format}", ""),
            )  # fmt: skip
        yield partial(_look_up, format, 128, weighted=True), f"D=128 {format} weighted", ""
        for output in (torch.float16, torch.bfloat16):
            words = f"D=128 {format} to {str(output).removeprefix('torch.')}"
            yield from (
                (partial(_look_up, format, 128, output=output), words, ""),
                (partial(_quantize, format, 128, output), words, ""),
            )  # fmt: skip
        yield from (
            (partial(_look_up, format, 128, beside=1), f"D=128 {format} beside D=1", ""),
            (partial(_look_up, format, 128, samples=1), f"D=128 {format} 1 samples", ""),
            (partial(_look_up, format, 128, ids=torch.int32), f"D=128 {format} i32 ids", ""),
            (partial(_look_up, format, 128, shifted=True), f"D=128 {format} shifted", ""),
        )  # fmt: skip
    for format in ("int8", "int4", "int2"):
        for dim in (7, 128):
            yield from (
                (partial(_look_up, format, dim, scales=torch.float32), f"D={dim} {format} fp32 scales", ""),
                (partial(_quantize, format, dim, scales=torch.float32), f"D={dim} {format} fp32 scales", ""),
            )  # fmt: skip


def _look_up(
    format: str,
    dim: int,
    *,
    weighted: bool = False,
    output: torch.dtype = torch.float32,
    beside: int = 0,
    samples: int = 8,
    ids: torch.dtype = torch.int64,
    shifted: bool = False,
    scales: torch.dtype | None = None,
) -> None:
    """A table of four rows, perhaps beside another one: bags of one id, and rows in sequence."""
    kind, dims, base = row_format(format), [beside] * bool(beside) + [dim], 0
    features = []
    for t, columns in enumerate(dims):
        features.append(Feature(base, 4, columns, 4 * t))
        base += -(-4 * kind.row_bytes(columns) // 64) * 64
    payload = torch.zeros(base + 4, dtype=torch.uint8)
    payload = payload[4:] if shifted else payload[:-4]
    rows = torch.zeros(4 * len(dims) * kind.parts, dtype=scales or kind.scale_dtype)
    n = len(dims) * samples
    where = (torch.zeros(n, dtype=ids), torch.arange(n + 1, dtype=ids))
    weights = torch.ones(n) if weighted else None
    packed = pack_features(features, boundary=TABLE_BOUNDARY)
    quantized_lookup._pooled(payload, rows, *where, weights, packed, dims, format, output)
    if not beside and not weighted:
        quantized_sequence._sequence(payload, rows, *where, packed, dim, format, output)


def _quantize(format: str, dim: int, dtype: torch.dtype = torch.float32, scales: torch.dtype | None = None) -> None:
    """Four rows there and back."""
    kind = row_format(format)
    scale_dtype = scales or kind.scale_dtype
    quantize._quantize_rows(torch.zeros(4, dim, dtype=dtype), format, scale_dtype)
    payload = torch.zeros(4, kind.row_bytes(dim), dtype=torch.uint8)
    quantize._dequantize_rows(payload, torch.zeros(4, kind.parts, dtype=scale_dtype), dim, format, dtype)
