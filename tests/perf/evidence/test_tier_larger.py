"""What `make evidence NAME=tier_larger` says of its numbers: what is too slow is named."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from shardwise.perf.evidence.tiers.larger import batch_of, random_batches, section_of

STEP = {"mean_ms": 0.0, "loads": 4000.0, "saves": 4000.0}
GOOD = {
    "end": {"VmHWM": 1.5},
    "fill": {"rows_written": 10, "seconds": 1.0},
    "hits": {**STEP, "step_ms": 100.0},
    "plain": {**STEP, "step_ms": 160.0},
    "prefetch": {**STEP, "step_ms": 108.0},
    "cold_rows_a_second": 45_000.0,
    "disk_iops": 60_000.0,
}
OPTIONS = argparse.Namespace(gib=16.0, limit_gib=2.0)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        (
            {"prefetch": {**STEP, "step_ms": 112.0}},
            "a step with prefetch takes 1.12 x max(compute, disk), more than 1.1",
        ),
        # the disk is what a step waits for: 110 of 210 ms
        ({"plain": {**STEP, "step_ms": 210.0}, "prefetch": {**STEP, "step_ms": 120.0}}, None),
        ({"cold_rows_a_second": 30_000.0}, "cold rows come at 50% of the disk's rate, less than 70%"),
    ],
)
def test_what_is_too_slow_is_named(changed: dict[str, Any], fault: str | None) -> None:
    section = section_of({**GOOD, **changed}, OPTIONS, "RLIMIT_DATA")
    assert section.bad == ([] if fault is None else [fault])
    assert "| memory limit | 2 GiB by RLIMIT_DATA |" in section.lines


def test_random_rows_are_the_same_for_a_seed_and_in_bags_of_one_size() -> None:
    some, others = (next(random_batches(50, seed=3)) for _ in range(2))
    assert some.values().equal(others.values()) and int(some.values().max()) < 50
    assert batch_of(some.values(), 1).lengths().tolist() == [some.values().numel()]
