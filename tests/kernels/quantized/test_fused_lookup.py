"""Lookups of rows that hold their scales give the bits of lookups of their values, on every path."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICES, torch_device
from torch import Tensor

from shardwise.kernels import ROW_FORMATS, dequantize_rows, quantize_rows, row_format
from shardwise.kernels.quantized import fused_lookup
from shardwise.kernels.quantized.fused_lookup import (
    MINIFLOAT,
    FusedTable,
    FusedTables,
    fused_pooled_lookup,
    fused_rows,
    fused_sequence_lookup,
    minifloat_values,
)

# on the CPU: the loops that numba compiles, and what torch does without numba
PATHS = [*DEVICES, "torch"]
FORMATS = ["int8", "int4", "int2", "fp16", "fp32", MINIFLOAT]
SAMPLES = 3


@pytest.fixture(autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(request.node, "callspec") and request.node.callspec.params.get("device") == "torch":
        monkeypatch.setattr(fused_lookup, "fused_loops", lambda: None)


def table_of(format: str, rows: int, dim: int, alignment: int) -> tuple[Tensor, Tensor, FusedTable]:
    """The bytes of a table's rows, their values [rows, dim] and what says how they lie."""
    if format == MINIFLOAT:
        parts = [torch.randint(0, 256, (rows, dim), dtype=torch.uint8)]
        values = minifloat_values(4, 7)[parts[0].long()]
    else:
        payload, scales = quantize_rows(torch.randn(rows, dim), format)
        values = dequantize_rows(payload, scales, dim, format)
        parts = [scales.view(torch.uint8).view(rows, -1) if row_format(format).parts else payload[:, :0], payload]
    width = sum(part.shape[1] for part in parts)
    fused = torch.cat([*parts, torch.full((rows, -width % alignment), 255, dtype=torch.uint8)], 1)
    return fused, values, FusedTable(format, rows, dim, fused.shape[1])


def mix(formats: list[str], dims: list[int], alignment: int, device: str) -> tuple[Tensor, FusedTables, list[Tensor]]:
    """A buffer of tables of 4, 5, ... rows, the tables and their values."""
    parts, tables, values, size = [], [], [], 0
    for t, (format, dim) in enumerate(zip(formats, dims, strict=True)):
        fused, own, table = table_of(format, 4 + t, dim, alignment)
        parts.append(torch.nn.functional.pad(fused.flatten(), (0, -fused.numel() % 16)))
        tables.append(FusedTable(table.format, table.rows, dim, table.stride, size))
        values.append(own)
        size += parts[-1].numel()
    return torch.cat(parts).to(torch_device(device.replace("torch", "cpu"))), FusedTables(tuple(tables)), values


def batch(tables: FusedTables, dtype: torch.dtype, where: torch.device) -> tuple[Tensor, Tensor]:
    """Ids with pruned ones among them, and offsets."""
    lengths = torch.randint(0, 5, (len(tables.tables) * SAMPLES,))
    ids = [torch.randint(-1, tables.tables[bag // SAMPLES].rows, (n,)) for bag, n in enumerate(lengths.tolist())]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return torch.cat(ids).to(where, dtype), offsets.to(where, dtype)


@pytest.mark.parametrize("device", PATHS)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alignment", [1, 16])
def test_sums_are_those_of_values(device: str, mean: bool, weighted: bool, alignment: int) -> None:
    """Row after row in their order, each product and sum rounded by itself; a mean is over pruned ids too."""
    fused, tables, values = mix([*FORMATS, "int4"], [8, 12, 4, 5, 7, 9, 20], alignment, device)
    dtype = torch.int32 if mean else torch.int64
    ids, offsets = batch(tables, dtype, fused.device)
    weights = torch.randn(len(ids)) if weighted else None
    given = None if weights is None else weights.to(fused.device)
    pooled = fused_pooled_lookup(fused, tables, ids, offsets, given, mean=mean).cpu()
    ends, rows, columns = offsets.tolist(), ids.tolist(), []
    for f, table in enumerate(values):
        bags = []
        for bag in range(f * SAMPLES, (f + 1) * SAMPLES):
            total = torch.zeros(table.shape[1])
            for position in range(ends[bag], ends[bag + 1]):
                if rows[position] >= 0:
                    row = table[rows[position]]
                    total = total + (row if weights is None else row * weights[position])
            bags.append(total / max(ends[bag + 1] - ends[bag], 1) if mean else total)
        columns.append(torch.stack(bags))
    assert torch.equal(pooled, torch.cat(columns, 1))


@pytest.mark.parametrize("device", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sequences_are_the_values(device: str, dtype: torch.dtype) -> None:
    fused, tables, values = mix(FORMATS, [8] * len(FORMATS), 16, device)
    ids, offsets = batch(tables, torch.int64, fused.device)
    rows = fused_sequence_lookup(fused, tables, ids, offsets, output_dtype=dtype).cpu()
    ends = offsets[::SAMPLES].tolist()
    wanted = [
        values[f][ids[position]] if ids[position] >= 0 else torch.zeros(8)
        for f in range(len(values))
        for position in range(ends[f], ends[f + 1])
    ]
    assert rows.dtype == dtype and torch.equal(rows, torch.stack(wanted).to(dtype))


@pytest.mark.parametrize("device", PATHS)
def test_rows_are_the_bytes(device: str) -> None:
    fused, tables, _ = mix(["int8", "int8"], [6, 6], 16, device)
    ids, offsets = batch(tables, torch.int32, fused.device)
    rows = fused_rows(fused, tables, ids, offsets)
    ends = offsets[::SAMPLES].tolist()
    for f, table in enumerate(tables.tables):
        for position in range(ends[f], ends[f + 1]):
            begin = (table.base or 0) + int(ids[position]) * table.stride
            whole = fused[begin : begin + 10] if ids[position] >= 0 else torch.zeros_like(rows[0])
            assert torch.equal(rows[position], whole)


@pytest.mark.parametrize("device", PATHS)
def test_tables_of_another_buffer_are_zeros(device: str) -> None:
    fused, tables, _ = mix(["int8", "fp16"], [4, 4], 16, device)
    both = FusedTables((tables.tables[0], FusedTable("fp16", 5, 4, 16, None)))
    # the second feature's ids are ids of that other table
    ids, offsets = (torch.tensor(numbers, device=fused.device) for numbers in ([1, 2, 99], [0, 2, 3]))
    pooled, rows = (look_up(fused, both, ids, offsets) for look_up in (fused_pooled_lookup, fused_sequence_lookup))
    assert pooled[:, :4].any() and not pooled[:, 4:].any()
    assert rows[:2].any() and not rows[2].any()


@pytest.mark.parametrize("device", ["cpu", "torch"])
@pytest.mark.parametrize("look_up", [fused_pooled_lookup, fused_sequence_lookup, fused_rows])
def test_bad_ids_raise_on_a_cpu(device: str, look_up: object) -> None:
    fused, tables, _ = mix(["int8", "int8"], [4, 4], 1, device)
    assert callable(look_up)
    for bad in (5, -2):
        ids, offsets = torch.tensor([0, 3, bad]), torch.tensor([0, 1, 2, 2, 3])
        with pytest.raises(IndexError, match=rf"feature 1, sample 1: id {bad} is outside \[0, 5\)"):
            look_up(fused, tables, ids, offsets)


@pytest.mark.parametrize("device", PATHS)
def test_nothing_to_look_up(device: str) -> None:
    fused, tables, _ = mix(["int4", "fp32"], [8, 8], 16, device)
    none, offsets = (
        torch.empty(0, dtype=torch.int64, device=fused.device),
        torch.zeros(7, dtype=torch.int64, device=fused.device),
    )
    assert not fused_pooled_lookup(fused, tables, none, offsets).any()
    assert fused_sequence_lookup(fused, tables, none, offsets).shape == (0, 8)
    assert fused_pooled_lookup(fused, tables, none, offsets[:1]).shape == (0, 16)


def test_minifloats_are_e4m3_but_for_the_last_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    torch_values = codes.view(torch.float8_e4m3fn).float()
    ours = minifloat_values(4, 7)
    assert torch.equal(ours[~torch_values.isnan()], torch_values[~torch_values.isnan()])
    assert ours[0x7F] == 480 and ours[0xFF] == -480


def test_every_format_of_integers_is_there() -> None:
    assert {name for name, kind in ROW_FORMATS.items() if kind.parts == 2} <= set(FORMATS)
