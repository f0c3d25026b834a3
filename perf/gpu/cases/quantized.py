"""Cases of quantized rows: there and back, pooled and in sequence, in every format; their bits are the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwise.kernels import (
    ROW_FORMATS,
    Feature,
    dequantize_pooled,
    dequantize_rows,
    pack_features,
    quantize_pooled,
    quantize_rows,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
)
from shardwise.kernels.quantized.pooled_lookup import quantized_pooled_lookup_ref
from shardwise.kernels.quantized.rows import quantize_rows_ref
from shardwise.kernels.quantized.sequence_lookup import quantized_sequence_lookup_ref
from shardwise.kernels.row_formats import TABLE_BOUNDARY, dequantize_rows_ref
from shardwise.perf.selftest.tolerances import SAME

from .case import Case, name_of

POOLED = ("quantized.pooled_lookup.quantized_pooled_lookup",)
SEQUENCE = ("quantized.sequence_lookup.resolve_rows", "quantized.sequence_lookup.gather_values")
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Tables:
    """Quantized tables (rows, dim), features (table, averaged) over them, and `bags` of `lengths` ids, perhaps bad."""

    format: str
    tables: tuple[tuple[int, int], ...] = ((9, 20), (5, 7))
    features: tuple[tuple[int, bool], ...] = ((0, False), (1, True))
    bags: int = 4
    lengths: tuple[int, int] = (0, 6)
    scales: torch.dtype | None = None
    output: torch.dtype = torch.float32
    weighted: bool = False
    ids: torch.dtype = torch.int64
    offsets: torch.dtype = torch.int64
    bad: bool = False
    shifted: bool = False


def cases() -> Iterator[Case]:
    """Each format at dims that fill bytes and vectors and that do not, with each dtype of scales and results."""
    for format, kind in ROW_FORMATS.items():
        yield from (
            *_rows(format),
            *_lookups(format),
        )  # fmt: skip
        for scales in kind.scale_dtypes[1:]:
            yield from (
                _rows_case(format, 128, f"{name_of(scales)} scales", scales=scales),
                _lookup_case(f"{name_of(scales)} scales", Tables(format, scales=scales)),
            )  # fmt: skip
    yield from (
        Case(
            f"pooled rows as bytes and back, {name_of(dtype)}",
            ("quantized.rows.quantize_rows", "quantized.rows.dequantize_rows"),
            partial(_pooled_as_bytes, dtype), SAME,
        )
        for dtype in (torch.float32, *HALVES)
    )  # fmt: skip


def _rows(format: str) -> Iterator[Case]:
    yield from (
        *(_rows_case(format, dim, f"D={dim}", quick=dim == 20) for dim in (20, 1, 3, 7, 8, 128, 1023)),
        *(_rows_case(format, 128, f"{name_of(dtype)} D=128", dtype=dtype) for dtype in HALVES),
    )  # fmt: skip


def _rows_case(
    format: str,
    dim: int,
    words: str,
    *,
    dtype: torch.dtype = torch.float32,
    scales: torch.dtype | None = None,
    quick: bool = False,
) -> Case:
    # rows without scales are cast by torch
    made = ("quantized.rows.quantize_rows", "quantized.rows.dequantize_rows") if ROW_FORMATS[format].parts else ()
    return Case(
        f"{format} rows there and back, {words}", made,
        partial(_there_and_back, format, dim, dtype, scales, (quantize_rows, dequantize_rows)), SAME,
        quick and bool(made),
        reference=partial(_there_and_back, format, dim, dtype, scales, (quantize_rows_ref, dequantize_rows_ref)),
    )  # fmt: skip


def _there_and_back(
    format: str, dim: int, dtype: torch.dtype, scales: torch.dtype | None, by: tuple[Any, Any]
) -> Sequence[Any]:
    rows = torch.randn(11, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    # a row of one value, and one of zeros
    rows[3], rows[4] = 0.75, 0.0
    payload, made = by[0](rows, format, scales or ROW_FORMATS[format].scale_dtype)
    return [payload, made, by[1](payload, made, dim, format, dtype)]


def _lookups(format: str) -> Iterator[Case]:
    for words, tables in {
        "odd dims": Tables(format),
        **{f"D={dim}": Tables(format, ((9, dim), (6, dim))) for dim in (1, 3, 8, 64, 128)},
        "D=1023": Tables(format, ((4, 1023),), ((0, False),), bags=2),
        "D=4096": Tables(format, ((3, 4096),), ((0, True),), bags=2, lengths=(1, 3)),
        "weighted": Tables(format, weighted=True),
        "weighted D=128 mean": Tables(format, ((9, 128),), ((0, True),), weighted=True),
        "bad ids": Tables(format, bad=True),
        "int32 ids and offsets": Tables(format, ids=torch.int32, offsets=torch.int32),
        "shifted D=64": Tables(format, ((9, 64),), ((0, False),), shifted=True),
        "long bags D=32": Tables(format, ((90, 32),), ((0, False),), lengths=(30, 60)),
        **{f"into {name_of(dtype)} D=64": Tables(format, ((9, 64),), ((0, False),), output=dtype) for dtype in HALVES},
    }.items():
        yield _lookup_case(words, tables, quick=words == "odd dims" and format in ("int4", "fp8", "bf16"))
        if len({dim for _, dim in tables.tables}) == 1 and not tables.weighted:
            yield Case(
                f"{format} rows in sequence, {words}", SEQUENCE, partial(_sequence, tables, quantized_sequence_lookup),
                SAME, quick=words == "D=8" and format in ("int8", "fp16"),
                reference=partial(_sequence, tables, quantized_sequence_lookup_ref),
            )  # fmt: skip


def _lookup_case(words: str, tables: Tables, quick: bool = False) -> Case:
    return Case(
        f"pooled lookup of {tables.format} rows, {words}", POOLED, partial(_pooled, tables, quantized_pooled_lookup),
        SAME, quick, reference=partial(_pooled, tables, quantized_pooled_lookup_ref),
    )  # fmt: skip


def _batch(tables: Tables) -> tuple[Any, ...]:
    """Payload, scales, ids, offsets, per-id weights, features and dims."""
    generator, kind = torch.Generator().manual_seed(0), ROW_FORMATS[tables.format]
    payloads, scales, features, base, first = [], [], [], 0, 0
    bases, first_rows = [], []
    for rows, dim in tables.tables:
        drawn = torch.randn(rows, dim, generator=generator)
        payload, made = quantize_rows_ref(drawn, tables.format, tables.scales or kind.scale_dtype)
        flat = torch.nn.functional.pad(payload.flatten(), (0, -payload.numel() % 64), value=255)
        bases.append(base)
        first_rows.append(first)
        payloads.append(flat)
        scales.append(made.flatten())
        base, first = base + flat.numel(), first + rows
    features = [Feature(bases[t], *tables.tables[t], first_rows[t], mean) for t, mean in tables.features]
    low, high = tables.lengths
    lengths = torch.randint(low, high + 1, (len(features), tables.bags), generator=generator)
    wrong = 2 if tables.bad else 0
    ids = torch.cat([
        torch.randint(-wrong, feature.rows + wrong, (int(count.sum()),), generator=generator)
        for feature, count in zip(features, lengths, strict=True)
    ])  # fmt: skip
    offsets = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)])
    weights = torch.randn(len(ids), generator=generator) if tables.weighted else None
    whole = torch.cat([torch.full((4,), 255, dtype=torch.uint8), *payloads])
    return (
        # a payload begins on 16 bytes, or on 4
        whole[4:] if tables.shifted else whole[4:].clone(), torch.cat(scales), ids.to(tables.ids),
        offsets.to(tables.offsets), weights, pack_features(features, boundary=TABLE_BOUNDARY),
        [feature.dim for feature in features],
    )  # fmt: skip


def _pooled(tables: Tables, by: Any) -> Sequence[Any]:
    return [by(*_batch(tables), tables.format, tables.output)]


def _sequence(tables: Tables, by: Any) -> Sequence[Any]:
    payload, scales, ids, offsets, _, features, dims = _batch(tables)
    return [by(payload, scales, ids, offsets, features, dims[0], tables.format, tables.output)]


def _pooled_as_bytes(dtype: torch.dtype) -> Sequence[Any]:
    pooled = torch.randn(5, 44, generator=torch.Generator().manual_seed(0)).to(dtype)
    sent = quantize_pooled(pooled, [20, 20, 4])
    return [sent, dequantize_pooled(sent, [20, 20, 4], dtype)]
