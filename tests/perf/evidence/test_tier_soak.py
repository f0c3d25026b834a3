"""A soak of seconds keeps the bits of resident tables, and what would become more in hours is named."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.perf.evidence.tiers import soak as evidence
from shardwise.perf.evidence.tiers.soak import Sample, Soak, batch_of, section_of

SAMPLES = [Sample(float(n), 100 * n, 400.0, 300.0, 10, 3) for n in range(1, 101)]
DONE = {"copies": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_short_soak_has_the_bits_of_resident_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {
        "TABLES": {"item": (2000, 8, 4), "user": (1000, 4, 2)}, "SLOTS": 200, "RAM_ROWS": 300, "HOT": 400, "BATCH": 16,
        "STEPS_A_ROUND": 12, "COPIED_EVERY": 2, "SAVED_EVERY": 2,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(evidence, name, value)
    soak = Soak(tmp_path)
    for _ in range(4):
        soak.round()
    soak.compare_saved()
    assert not soak.differs
    assert soak.done == {"copies": 2, "checkpoints": 2, "evaluations": 12}
    assert len({(sample.open_files, sample.threads) for sample in soak.samples[1:]}) == 1
    # a difference is found
    with torch.no_grad():
        soak.whole.get_parameter("over.bias").add_(1e-3)
    soak.round()
    soak.compare_saved()
    assert soak.differs[0] == "round 5: losses" and "checkpoints: values: over.bias differs" in soak.differs[-1]


def test_a_hundredth_of_the_hot_ids_is_exchanged_in_each_step() -> None:
    places = torch.arange(evidence.HOT)
    for rows, _, _ in evidence.TABLES.values():
        changed = evidence.hot_ids(places, 700, rows) != evidence.hot_ids(places, 701, rows)
        assert int(changed.sum()) == evidence.HOT // 100
    assert batch_of(7).values().equal(batch_of(7).values())


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, None),
        ({"anonymous_mib": 403.0}, None),
        ({"anonymous_mib": 405.0}, "anonymous memory changed by +1.25% after the warm-up, more than 1%"),
        ({"allocated_mib": 304.0}, "allocated memory changed by +1.33% after the warm-up, more than 1%"),
        ({"open_files": 11}, "open files: 10 after the warm-up, 11 later"),
        ({"threads": 4}, "threads: 3 after the warm-up, 4 later"),
    ],
)
def test_what_becomes_more_is_named(changed: dict[str, Any], fault: str | None) -> None:
    later = [replace(sample, **changed) for sample in SAMPLES[50:]]
    section = section_of([*SAMPLES[:50], *later], [], DONE, {"item": 0.5})
    assert section.bad == ([] if fault is None else [fault])
    # the warm-up may be anything
    warmer = [replace(sample, anonymous_mib=900.0, threads=30) for sample in SAMPLES[:20]]
    assert not section_of([*warmer, *SAMPLES[20:]], [], DONE, {}).bad
    assert section_of(SAMPLES, ["round 3: losses"], DONE, {}).bad == ["round 3: losses"]
