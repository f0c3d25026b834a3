"""Lookups of quantized tables give the same bits on every path: reference, loops, torch blocks and Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICES, assert_close, assert_same_bits, torch_device
from quantized_inputs import Batch, Case, batch
from torch import Tensor

from shardwise.kernels import (
    ROW_FORMATS,
    Feature,
    dequantize_rows,
    pack_features,
    pooled_lookup,
    quantize_rows,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
)
from shardwise.kernels.cpu import quantized_lookup as cpu_quantized
from shardwise.kernels.quantized.pooled_lookup import quantized_pooled_lookup_ref
from shardwise.kernels.quantized.sequence_lookup import quantized_sequence_lookup_ref
from shardwise.kernels.row_formats import TABLE_BOUNDARY

# on the CPU: the loops that numba compiles, and what torch does without numba
PATHS = [*DEVICES, "torch"]
EVERY = tuple((t, t % 2 == 1) for t in range(5))

CASES = [
    *(Case(name, name) for name in ROW_FORMATS),
    *(Case(f"{name} D=128", name, tables=((4, 128),), features=((0, False),), batch=2) for name in ROW_FORMATS),
    *(Case(f"{name} fp32 scales", name, scale_dtype=torch.float32) for name in ("int8", "int4", "int2")),
    *(Case(f"{name} weighted", name, weighted=True) for name in ("int8", "int4", "fp8", "fp16")),
    *(Case(f"{name} bad ids", name, weighted=True, bad_ids=True) for name in ROW_FORMATS),
    *(
        Case(f"{name} mixed dims", name, tables=((5, 1), (4, 33), (3, 2), (6, 8), (2, 20)), features=EVERY)
        for name in ("int8", "int4", "int2", "bf16")
    ),
    Case("int8 wide", tables=((2, 1030),), features=((0, False),), batch=1, longest=2),
    Case("int4 wide", "int4", tables=((2, 1030),), features=((0, False),), batch=1, longest=2),
    Case("int32 ids", "int4", ids=torch.int32),
    Case("int32 offsets", "int2", offsets=torch.int32),
    Case("int32 both", "int8", ids=torch.int32, offsets=torch.int32),
    Case("shared table", features=((0, False), (1, False), (0, True))),
    Case("batch 0", batch=0),
    Case("no ids", longest=0),
    Case("long bags", batch=2, longest=40),
]
ALIKE = [
    replace(case, tables=tuple((rows, case.tables[0][1]) for rows, _ in case.tables)) for case in CASES
]  # tables of one dim


def on(path: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[Batch, torch.device]:
    """The batch of a case on the device of a path."""
    device = torch_device("cpu" if path == "torch" else path)
    if path == "torch":
        monkeypatch.setattr(cpu_quantized, "_looking_up", lambda: None)
    return batch(case).to(device), device


def assert_same_codes(got: Tensor, expected: Tensor) -> None:
    """Equal in every bit, zeros in their sign too, where expected is a number; NaN elsewhere."""
    assert got.isnan().equal(expected.isnan())
    assert torch.equal(got.nan_to_num(nan=7.0).view(torch.int32), expected.nan_to_num(nan=7.0).view(torch.int32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("path", PATHS)
def test_pooled_rows_are_the_reference_in_every_bit(path: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    there, _ = on(path, case, monkeypatch)
    expected = quantized_pooled_lookup_ref(*batch(case).pooled)
    assert expected.shape == (case.batch, sum(there.dims))
    assert_same_bits(quantized_pooled_lookup(*there.pooled), expected)


@pytest.mark.parametrize("case", ALIKE, ids=lambda case: case.name)
@pytest.mark.parametrize("path", PATHS)
def test_rows_in_sequence_are_the_reference_in_every_bit(
    path: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, _ = on(path, case, monkeypatch)
    expected = quantized_sequence_lookup_ref(*batch(case).sequence)
    assert_same_bits(quantized_sequence_lookup(*there.sequence), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
def test_outputs_of_16_bits_are_those_of_32_rounded(
    path: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in CASES[:7]:
        there, _ = on(path, case, monkeypatch)
        # the interpreter cuts fp32 to bf16 where a GPU rounds
        tolerance = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-11
        wide = quantized_pooled_lookup_ref(*batch(case).pooled)
        assert_close(quantized_pooled_lookup(*there.pooled, output_dtype=dtype), wide.to(dtype), tolerance)
        alike = batch(replace(case, tables=((9, 8), (5, 8))))
        rows = quantized_sequence_lookup(*alike.to(there.payload.device).sequence, output_dtype=dtype)
        assert_close(rows, quantized_sequence_lookup_ref(*alike.sequence, output_dtype=dtype), tolerance)


@pytest.mark.parametrize("format", ROW_FORMATS)
@pytest.mark.parametrize("path", PATHS)
def test_a_row_has_the_same_bits_at_another_place_and_beside_another_table(
    path: str, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a shard holds of a table, under other numbers and behind other rows, pools to the bits of the whole."""
    there, device = on(path, Case("", format, weighted=True, longest=9), monkeypatch)
    first = int(there.offsets[there.case.batch])
    ids, dim, kind = there.indices[:first], there.dims[0], ROW_FORMATS[format]
    alone = quantized_pooled_lookup(*there.pooled)[:, :dim]
    # the rows that the batch asks for, each in its own place, and none shared
    table = there.payload[: 9 * kind.row_bytes(dim)].view(9, -1)[ids]
    parts = there.scales.view(-1, kind.parts)[ids].flatten() if kind.parts else there.scales
    features = pack_features([Feature(0, first, dim, 0)], device)
    assert there.per_id_weights is not None
    moved = quantized_pooled_lookup(
        table.flatten(), parts, torch.arange(first, device=device), there.offsets[: there.case.batch + 1],
        there.per_id_weights[:first], features, [dim], format,
    )  # fmt: skip
    assert_same_bits(moved, alone)


@pytest.mark.parametrize("path", PATHS)
def test_fp32_rows_pool_to_what_the_lookup_of_float_tables_gives(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there, _ = on(path, Case("", "fp32", tables=((9, 8), (5, 8)), longest=9), monkeypatch)
    features = there.features.clone()
    features[:, 0] //= 4
    floats = there.payload.view(torch.float32)
    pooled = pooled_lookup(
        floats, there.indices, there.offsets, None, features, there.dims, [8, 0, 14, 0], "mean"
    )  # fmt: skip
    assert_close(quantized_pooled_lookup(*there.pooled), pooled, 1e-6)


@pytest.mark.parametrize("format", ["int8", "fp8", "fp16"])
@pytest.mark.parametrize("path", PATHS)
def test_planes_need_not_be_contiguous(path: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read every other byte of a strided payload, and scales, as if they lay side by side."""
    there, _ = on(path, Case("", format, tables=((9, 8), (5, 8))), monkeypatch)
    strided = replace(
        there,
        payload=torch.stack([there.payload, ~there.payload], 1)[:, 0],
        scales=torch.stack([there.scales, there.scales + 1], 1)[:, 0],
    )
    assert_same_bits(quantized_pooled_lookup(*strided.pooled), quantized_pooled_lookup(*there.pooled))
    assert_same_bits(quantized_sequence_lookup(*strided.sequence), quantized_sequence_lookup(*there.sequence))


def test_a_table_off_the_boundary_of_payloads_is_refused() -> None:
    """A table of 8 x 128 bytes at byte 8 passed for aligned to 16: kernels were told so, and read other rows."""
    with pytest.raises(ValueError, match="feature 0: a table of dim 128 cannot begin at element 8"):
        pack_features([Feature(8, 8, 128, 0)], boundary=TABLE_BOUNDARY)


@pytest.mark.parametrize("path", ["cpu", "torch"])
def test_ids_past_the_last_offset_are_zeros(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there, _ = on(path, replace(ALIKE[0], longest=4), monkeypatch)
    longer = replace(there, indices=torch.cat([there.indices, there.indices.new_tensor([0, 1, 99])]))
    assert_same_bits(quantized_pooled_lookup(*longer.pooled), quantized_pooled_lookup(*there.pooled))
    rows = quantized_sequence_lookup(*longer.sequence)
    assert_same_bits(rows[:-3], quantized_sequence_lookup(*there.sequence))
    assert not rows[-3:].any()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    there = batch(Case("", "int8", tables=((500, 64),), features=((0, True),) * 3, batch=400, longest=9))
    pooled, rows = quantized_pooled_lookup(*there.pooled), quantized_sequence_lookup(*there.sequence)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_same_bits(quantized_pooled_lookup(*there.pooled), pooled)
        assert_same_bits(quantized_sequence_lookup(*there.sequence), rows)
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(pooled, quantized_pooled_lookup_ref(*there.pooled))


def test_the_torch_path_works_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks end between bags, and a bag longer than a block is a block of its own."""
    monkeypatch.setattr(cpu_quantized, "_looking_up", lambda: None)
    monkeypatch.setattr(cpu_quantized, "_BLOCK_ELEMENTS", 32)
    there = batch(Case("", "int4", tables=((9, 8), (5, 8)), batch=7, longest=9, weighted=True))
    assert_same_bits(quantized_pooled_lookup(*there.pooled), quantized_pooled_lookup_ref(*there.pooled))
    assert_same_bits(quantized_sequence_lookup(*there.sequence), quantized_sequence_lookup_ref(*there.sequence))


def test_infinities_and_nan_of_float_rows_are_kept() -> None:
    special = torch.tensor([[float("inf"), 1.0, -0.0, 65504.0, 2.0**-24, float("-inf")], [float("nan")] * 6])
    for format, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        rows = special.to(dtype)
        payload = torch.nn.functional.pad(rows.view(torch.uint8).flatten(), (0, 16))
        features = pack_features([Feature(0, 2, 6, 0)])
        ids, ends, none = torch.tensor([0, 1]), torch.tensor([0, 2]), torch.empty(0, dtype=torch.float16)
        got = quantized_sequence_lookup(payload, none, ids, ends, features, 6, format)
        assert got.isnan().equal(rows.isnan())
        # bits, so that a negative zero is seen
        assert torch.equal(
            got.nan_to_num(nan=7.0).view(torch.int32), rows.float().nan_to_num(nan=7.0).view(torch.int32)
        )


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_of_e4m3_is_the_number_that_torch_says(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    there, ones = codes.to(torch_device(device)), torch.ones(256, device=torch_device(device))
    features = pack_features([Feature(0, 256, 1, 0)], there.device)
    ids, ends = torch.arange(256, device=there.device), torch.tensor([0, 256], device=there.device)
    looked_up = quantized_sequence_lookup(there, ones, ids, ends, features, 1, "fp8")[:, 0]
    for got in (looked_up, dequantize_rows(there[:, None], ones[:, None], 1, "fp8")[:, 0]):
        assert_same_codes(got.cpu(), expected)


def call(name: str, format: str, device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    """An op and arguments for it."""
    ops = torch.ops.shardwise
    if name == "pooled":
        there = batch(Case("", format, weighted=True)).to(device)
        return ops.quantized_pooled_lookup.default, (*there.pooled, torch.float32)
    if name == "sequence":
        there = batch(Case("", format, tables=((9, 7), (5, 7)))).to(device)
        return ops.quantized_sequence_lookup.default, (*there.sequence, torch.float16)
    rows = torch.randn(3, 7, device=device)
    payload, scales = quantize_rows(rows, format)
    if name == "quantize":
        return ops.quantize_rows.default, (rows.to(torch.bfloat16), format, scales.dtype)
    return ops.dequantize_rows.default, (payload, scales, 7, format, torch.bfloat16)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8", "bf16"])
@pytest.mark.parametrize("name", ["pooled", "sequence", "quantize", "dequantize"])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str, name: str, format: str) -> None:
    op, args = call(name, format, torch_device(device))
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("device", DEVICES)
def test_lookups_compile_into_one_graph(device: str) -> None:
    there = batch(Case("", "int4", tables=((9, 7), (5, 7)), weighted=True)).to(torch_device(device))

    def both(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        at = replace(there, indices=ids, offsets=offsets)
        return quantized_pooled_lookup(*at.pooled) * 2, quantized_sequence_lookup(*at.sequence) + 1

    torch._dynamo.reset()
    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(there.indices, there.offsets), both(there.indices, there.offsets))


def test_a_quantized_lookup_says_that_it_has_no_gradient() -> None:
    """Weights of ids that were to be trained got none, with a warning of torch's."""
    kind = [Feature(0, 10, 8, 0)]
    payload, scales = (part.flatten() for part in quantize_rows(torch.randn(10, 8), "int8"))
    p = torch.ones(3, requires_grad=True)
    where = (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    out = quantized_pooled_lookup(payload, scales, *where, p, pack_features(kind), [8], "int8")
    assert out.abs().max() > 0
    with pytest.raises(RuntimeError, match="quantized_pooled_lookup has no gradient by per-id weights"):
        out.sum().backward()
