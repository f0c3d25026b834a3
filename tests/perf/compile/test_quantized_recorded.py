"""What the interpreter records of lookups of quantized rows: no races, no false hints, no sector beyond the declared.

And what compilers of GPUs that need not be here make of the same kernels.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from kernel_inputs import assert_same_bits, torch_device
from quantized_inputs import Batch, Case, batch
from test_recorded import assert_within
from torch import Tensor

from shardwise.kernels import (
    quantize_rows,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
    row_format,
)
from shardwise.kernels.quantized.row_numbers import paired
from shardwise.perf.compile import cases as launched
from shardwise.perf.compile import compiled as compiler
from shardwise.perf.compile.checks import broken_promises
from shardwise.perf.compile.compiled import Report
from shardwise.perf.compile.recorded import (
    SECTOR,
    Launch,
    races,
    recorded,
)
from shardwise.perf.suite import declared

interpreted = pytest.mark.interpreted
ALIKE = {"tables": ((9, 64), (5, 64)), "batch": 4}
CASES = {
    "int8": Case("", "int8", weighted=True, **ALIKE),  # type: ignore[arg-type]
    "int4": Case("", "int4", **ALIKE),  # type: ignore[arg-type]
    "fp8": Case("", "fp8", **ALIKE),  # type: ignore[arg-type]
    "bf16": Case("", "bf16", **ALIKE),  # type: ignore[arg-type]
    "int2 odd": Case("", "int2", tables=((9, 7), (5, 7)), batch=4),
}


@cache
def run(name: str) -> tuple[Batch, Tensor, Tensor, list[Launch], list[Launch]]:
    torch_device("interpreted")
    there = batch(CASES[name])
    with recorded() as pooling:
        pooled = quantized_pooled_lookup(*there.pooled)
    with recorded() as gathering:
        rows = quantized_sequence_lookup(*there.sequence)
    return there, pooled, rows, pooling, gathering


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_programs_do_not_race_and_their_order_does_not_matter(name: str) -> None:
    there, pooled, rows, pooling, gathering = run(name)
    assert pooling and gathering
    assert [race for launch in pooling + gathering for race in races(launch)] == []
    with recorded(order=1):
        assert_same_bits(quantized_pooled_lookup(*there.pooled), pooled)
        assert_same_bits(quantized_sequence_lookup(*there.sequence), rows)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_no_sector_moves_beyond_the_declared_bytes(name: str) -> None:
    there, pooled, rows, pooling, gathering = run(name)
    where = (row_format(there.case.format), there.scales, there.indices, there.offsets)
    memory = {"Q": there.payload, "S": there.scales}
    traffic = declared.quantized_pooled_lookup_bytes(*where, there.per_id_weights, there.features, sector=SECTOR)
    assert_within(pooling, traffic, memory | {"Y": pooled}, "S", 2, 40)
    traffic = declared.quantized_sequence_lookup_bytes(*where, there.features, sector=SECTOR)
    assert_within(gathering, traffic, memory | {"Y": rows}, "S", 2, 40)


def test_a_call_declares_what_its_module_says() -> None:
    there = batch(Case("", "int4", tables=((9, 7),), features=((0, False),), batch=3))
    n = len(there.indices)
    got = declared.quantized_pooled_lookup_bytes(
        row_format("int4"), there.scales, there.indices, there.offsets, None, there.features, torch.float16
    )
    assert got.bytes_moved == n * (4 + 2 * 2 + 8) + 4 * 8 + 3 * 7 * 2
    got = declared.quantized_sequence_lookup_bytes(
        row_format("int4"), there.scales, there.indices, there.offsets, there.features
    )
    assert got.bytes_moved == n * (4 + 2 * 2 + 8 + 7 * 4) + 32 * n


def test_scales_that_begin_between_two_are_copied_before_they_are_read_in_pairs() -> None:
    _, scales = quantize_rows(torch.randn(4, 8), "int8")
    odd = torch.cat([scales.new_zeros(1), scales.flatten()])[1:]
    assert paired(odd).data_ptr() % 4 == 0 and torch.equal(paired(odd), scales.flatten())
    assert paired(scales).data_ptr() == scales.data_ptr()


TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
MATRIX = [
    *((f"quantized_pooled_lookup D=128 {format}", target) for format in ("int8", "int4") for target in TARGETS),
    *((f"gather_values D=128 {format}", target) for format, target in (("int8", "sm_90"), ("fp8", "gfx942"))),
    *((f"quantized_pooled_lookup D=128 {format}", "sm_90") for format in ("int2", "fp8", "fp16", "bf16", "fp32")),
    *((f"quantized_pooled_lookup D=7 {format}", "sm_90") for format in ("int8", "int4", "int2", "fp8")),
    *((f"quantized_pooled_lookup D=128 int8 {words}", "sm_90") for words in ("weighted", "shifted", "fp32 scales")),
    # spilled 96 bytes on triton 3.7.1, and 48 on 3.9.0
    *(("quantized_pooled_lookup D=128 int2 weighted", target) for target in ("sm_100", "sm_90")),
    *((f"quantize_rows D=128 {format}", "sm_90") for format in ("int8", "int4", "fp8")),
    ("dequantize_rows D=7 int4", "gfx942"), ("resolve_rows D=8 int8", "sm_90"),
]  # fmt: skip


@cache
def cases() -> dict[str, launched.Case]:
    return {case.name: case for case in launched.cases()}


@cache
def report(name: str, target: str) -> Report:
    return compiler.compile_case(cases()[name], target)


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "target"), MATRIX, ids=[f"{name} {target}" for name, target in MATRIX])
def test_a_case_keeps_its_promises(name: str, target: str) -> None:
    assert broken_promises([(cases()[name], target, report(name, target))]) == []


@pytest.mark.compiled
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_int8_rows_of_128_columns_move_16_bytes_at_a_time(target: str) -> None:
    found = report("quantized_pooled_lookup D=128 int8", target)
    assert found.accesses["load", 16] == 4
    assert found.accesses["store", 16] == 4
    assert (found.spills, found.atomics) == (0, ())
