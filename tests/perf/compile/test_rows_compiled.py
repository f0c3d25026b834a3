"""The kernels of rows keep their promises, compiled for GPUs that need not be here."""

from __future__ import annotations

from functools import cache

import pytest
from targets import targeted

from shardwise.perf.compile import cases as launched, cases_served, compiled
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.checks import broken_promises

pytestmark = pytest.mark.compiled

# what a device does for a batch of a cache
BATCHES = (
    "claim_rows aged LFU", "mark_rows several tables", "list_rows several tables room for 70 more",
    "take_slots policy 3", "place_rows several tables clearing 3", "release_slots rows that changed",
    "link_rows a window", "expect_rows a window",
)  # fmt: skip
MATRIX = [
    *(("move_rows D=128 fp32 rowwise", target) for target in compiled.WHOLE),
    *((f"move_rows D={words}", "sm_90") for words in ("3 fp16 adam", "4 fp32 two states", "4096 fp32", "1 fp32")),
    *(
        (f"{kernel} 1 tables keys below 2147483647", target)
        for kernel in ("count_digits", "pick")
        for target in compiled.WHOLE
    ),
    *((f"initial_rows {words} D=128 fp32", target) for words in ("uniform", "normal") for target in compiled.WHOLE),
    ("initial_rows normal D=1023 bf16", "sm_90"),
    *(("make_rows normal D=128 fp32 adam", target) for target in compiled.WHOLE),
    ("make_rows uniform D=128 fp32 rowwise", "sm_90"),
    *((name, target) for name in BATCHES for target in compiled.WHOLE),
    *((f"claim_rows {words}", "sm_90") for words in ("LRU several tables", "no policy", "looked at alone")),
]


@cache
def cases() -> dict[str, Case]:
    batches = {name.split()[0] for name in BATCHES}
    modules = {"move_rows", "count_digits", "pick", "initial_rows", "make_rows", *batches}
    each = [case for launch in cases_served.launches() for case in launched.launches(*launch)]
    return {case.name: case for case in each if case.kernel_name in modules}


@pytest.mark.parametrize(("name", "target"), targeted(MATRIX))
def test_a_case_keeps_its_promises(name: str, target: str) -> None:
    report = compiled.compile_case(cases()[name], target)
    assert broken_promises([(cases()[name], target, report)]) == []
    assert report.spills == 0


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_rows_move_16_bytes_at_a_time_and_pass_through_no_shared_memory(target: str) -> None:
    report = compiled.compile_case(cases()["move_rows D=128 fp32"], target)
    assert (report.accesses["load", 16], report.accesses["store", 16]) == (4, 4)
    assert (report.shared_bytes, report.barriers, report.atomics) == (0, 0, ())
