"""Quantized lookups, jagged ops, buckets and calibrations keep their promises, compiled for GPUs that need not be here.

Beside test_kernels_compiled.py, so that two workers share the compiler's time.

Takes 30 s: kernels are compiled, most of them by a second each.
"""

from __future__ import annotations

from functools import cache

import pytest
import test_kernels_compiled
from targets import targeted

from shardwise.perf.compile import cases as launched, cases_jagged as launched_jagged, compiled
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.checks import broken_promises

pytestmark = pytest.mark.compiled

MATRIX = [
    *((f"quantized_pooled_lookup D=128 {format}", target) for format in ("int8", "int4") for target in compiled.WHOLE),
    *((f"gather_values D=128 {format}", target) for format, target in (("int8", "sm_90"), ("fp8", "gfx942"))),
    *((f"quantized_pooled_lookup D=128 {format}", "sm_90") for format in ("int2", "fp8", "fp16", "bf16", "fp32")),
    *((f"quantized_pooled_lookup D=7 {format}", "sm_90") for format in ("int8", "int4", "int2", "fp8")),
    *((f"quantized_pooled_lookup D=128 int8 {words}", "sm_90") for words in ("weighted", "shifted", "fp32 scales")),
    # spilled 96 bytes on triton 3.7.1, and 48 on 3.9.0
    *(("quantized_pooled_lookup D=128 int2 weighted", target) for target in ("sm_100", "sm_90")),
    *((f"quantize_rows D=128 {format}", "sm_90") for format in ("int8", "int4", "fp8")),
    ("dequantize_rows D=7 int4", "gfx942"), ("resolve_rows D=8 int8", "sm_90"),
    *(("move segments i64", target) for target in compiled.TARGETS),
    *(("collect segments D=128 fp32", target) for target in ("sm_80", "gfx942")),
    *(("segment_rows segments D=128 fp32", target) for target in ("sm_100", "gfx942")),
    ("segment_sum segments D=1 fp32", "sm_90"), ("locate sources i32", "sm_90"), ("locate places i64", "gfx942"),
    ("collect segments D=1023 bf16", "sm_90"),
    *(("cumsum 1664 i64", target) for target in compiled.TARGETS),
    *(("regroup fp32 by 4 from 10 to 2", target) for target in compiled.WHOLE),
    ("regroup fp32 by 1 from 2 to 2", "sm_90"), ("regroup bf16 by 8 from 2 to 2 3 times", "gfx942"),
    ("index_add D=128 fp32", "sm_90"), ("index_add D=3 fp32", "gfx942"), ("index_add D=1 fp32", "sm_90"),
    ("select select i64 weighted", "sm_90"), ("select select fp32", "gfx942"), ("sources select D=64 fp32", "sm_90"),
]  # fmt: skip
# of these also that they have nothing at all of something: bags of rows, padded tensors, buckets
PRODUCTS = [
    ("dense_bmm M=64 K=64 fp32", "sm_90"), ("dense_bmm M=64 K=64 fp32 long", "sm_80"),
    ("dense_bmm M=64 K=64 bf16 long", "gfx942"), ("jagged_bmm M=64 K=64 fp32", "sm_90"),
    ("jagged_bmm M=3 K=20 fp16", "sm_100"), ("softmax D=128 fp32", "sm_90"),
    ("softmax_gradient D=1023 fp16", "sm_80"), ("vector_product D=32 fp32", "gfx942"),
    ("by_vectors D=1023 fp32", "sm_90"), ("unary_chunk fp32 two levels", "sm_90"),
]  # fmt: skip
PADDED = [
    *(("to_padded D=128 fp32", target) for target in compiled.TARGETS),
    *(("to_jagged D=128 fp32", target) for target in compiled.TARGETS),
    ("to_padded D=3 fp32", "sm_90"), ("to_padded D=128 bf16 sum", "sm_90"),
    ("to_padded D=128 fp32 5 jagged dims", "sm_90"), ("to_jagged D=128 fp32 product", "sm_90"),
    ("places D=128 fp32 5 jagged dims", "sm_90"), ("to_padded D=1 i64", "sm_90"), ("to_jagged D=1 fp32", "sm_90"),
]  # fmt: skip
BUCKETS = [
    *((f"place_in_buckets {words}", "sm_90") for words in ("i64 i64 weighted", "i32 i32 300 buckets")),
    *((f"bucket_of_id i64 i32{words}", "sm_90") for words in ("", " borders", " blocks")),
    ("bucket_of_id i32 i32 batches", "gfx942"), ("place_in_buckets i64 i64 weighted", "gfx942"),
    ("unique_key i64 i64 16 rows", "sm_80"), ("number_unique i64 i32 16 rows", "sm_100"),
    ("histogram_binning fp32 segments", "sm_90"), ("histogram_binning bf16 borders", "sm_100"),
]  # fmt: skip
MATRIX += [*PRODUCTS, *PADDED, *BUCKETS]
NOTHING_OF = {"atomics": PRODUCTS, "shared_bytes": PADDED, "barriers": [*PADDED, *BUCKETS], "spills": BUCKETS}
# loads and stores of 16 bytes at a time
WIDE = [
    ("pooled_lookup D=128 fp32", "sm_90", 4, 1), ("regroup fp32 by 4 from 2 to 2", "sm_90", 4, 4),
    *(("quantized_pooled_lookup D=128 int8", target, 4, 4) for target in ("sm_80", "sm_90", "sm_100")),
]  # fmt: skip


@cache
def cases() -> dict[str, Case]:
    """With those of jagged ops that ask for the same as another."""
    jagged = [case for launch in launched_jagged.launches() for case in launched.launches(*launch)]
    return {case.name: case for case in jagged} | test_kernels_compiled.cases()


@pytest.mark.parametrize(("name", "target"), targeted(MATRIX))
def test_a_case_keeps_its_promises(name: str, target: str) -> None:
    report = compiled.compile_case(cases()[name], target)
    assert broken_promises([(cases()[name], target, report)]) == []
    assert not [what for what, listed in NOTHING_OF.items() if (name, target) in listed and getattr(report, what)]


@pytest.mark.parametrize(("name", "target", "loads", "stores"), targeted(WIDE))
def test_rows_move_16_bytes_at_a_time(name: str, target: str, loads: int, stores: int) -> None:
    report = compiled.compile_case(cases()[name], target)
    assert (report.accesses["load", 16], report.accesses["store", 16]) == (loads, stores)
    assert (report.spills, report.atomics) == (0, ())
    # quantized rows are dealt out again before they are stored
    assert name.startswith("quantized") or (report.shared_bytes, report.barriers) == (0, 0)
