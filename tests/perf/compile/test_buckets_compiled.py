"""The kernels of bucketing, deduplication and calibration keep their promises, compiled for GPUs that need not be here.

A subset of what `python -m shardwise kernels check` compiles.
"""

from __future__ import annotations

from functools import cache

import pytest

from shardwise.kernels.jagged import bucketize, calibration, unique
from shardwise.perf.compile import cases as launched
from shardwise.perf.compile import cases_jagged as launched_jagged
from shardwise.perf.compile import compiled
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.checks import broken_promises

pytestmark = pytest.mark.compiled

MATRIX = [
    *((f"place_in_buckets {words}", "sm_90") for words in ("i64 i64 weighted", "i32 i32 300 buckets")),
    *((f"bucket_of_id i64 i32{words}", "sm_90") for words in ("", " borders", " blocks")),
    ("bucket_of_id i32 i32 batches", "gfx942"), ("place_in_buckets i64 i64 weighted", "gfx942"),
    ("unique_key i64 i64 16 rows", "sm_80"), ("number_unique i64 i32 16 rows", "sm_100"),
    ("histogram_binning fp32 segments", "sm_90"), ("histogram_binning bf16 borders", "sm_100"),
]  # fmt: skip


@cache
def cases() -> dict[str, Case]:
    found = {}
    for run, label, rows in launched_jagged._buckets():
        found |= {case.name: case for case in launched.launches(run, label, rows)}
    return found


@pytest.mark.parametrize(("name", "target"), MATRIX, ids=[f"{name} {target}" for name, target in MATRIX])
def test_a_case_keeps_its_promises(name: str, target: str) -> None:
    report = compiled.compile_case(cases()[name], target)
    assert broken_promises([(cases()[name], target, report)]) == []
    assert (report.barriers, report.spills) == (0, 0)


def test_every_kernel_has_cases() -> None:
    kernels = {name for module in (bucketize, calibration, unique) for name, _ in launched.kernels_of(module)}
    assert {case.kernel_name for case in cases().values()} == kernels
