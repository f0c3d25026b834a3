"""What the soak makes of the files that a disturbed run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.perf.evidence.soak import (
    Job,
    messages,
    repeated_steps,
    same_metrics,
    same_tensors,
)


def events(*runs: tuple[int, list[int]]) -> list[dict[str, float]]:
    return [{"t": 0.0, "pid": pid, "step": step} for pid, steps in runs for step in steps]


@pytest.mark.parametrize(
    ("runs", "repeated"),
    [
        ([], 0),
        ([(1, [5, 10, 15])], 0),
        # the second begins after step 10, the third at the start
        ([(1, [5, 10, 15, 20]), (2, [15, 20, 25]), (3, [5, 10, 15, 20, 25, 30])], 10 + 25),
        ([(1, [5, 10]), (2, [15, 20])], 0),
    ],
)
def test_steps_are_counted_as_repeated_when_they_lie_before_the_furthest_one(
    runs: list[tuple[int, list[int]]], repeated: int
) -> None:
    assert repeated_steps(events(*runs), line_steps=5) == repeated


LINES: list[dict[str, Any]] = [
    {"epoch": 1, "step": 5, "loss": 0.5, "samples_per_s": 10.0},
    {"epoch": 1, "step": 10, "loss": 0.25, "samples_per_s": 10.0},
    {"epoch": 1, "step": 10, "test_auc": 0.75, "seconds": 2.0},
]


@pytest.mark.parametrize(
    ("change", "same", "apart"),
    [
        ({}, True, 0.0),
        ({"samples_per_s": 99.0}, True, 0.0),
        ({"loss": 0.375}, False, 0.125),
        ({"step": 11}, False, 0.0),
    ],
)
def test_metrics_are_compared_in_all_but_times(
    tmp_path: Path, change: dict[str, float], same: bool, apart: float
) -> None:
    first, other = tmp_path / "one", tmp_path / "other"
    first.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    other.write_text("".join(json.dumps(line) + "\n" for line in [LINES[0], {**LINES[1], **change}, LINES[2]]))
    assert same_metrics(first, other) == (same, apart)


def test_checkpoints_are_the_same_in_all_bytes_or_not(tmp_path: Path) -> None:
    for name, data in (("a", b"12"), ("b", b"12"), ("c", b"13"), ("empty", None)):
        (tmp_path / name).mkdir()
        if data is not None:
            (tmp_path / name / "rank-00000.safetensors").write_bytes(data)
    assert same_tensors(tmp_path / "a", tmp_path / "b")
    assert not same_tensors(tmp_path / "a", tmp_path / "c")
    assert not same_tensors(tmp_path / "empty", tmp_path / "empty")


def test_exceptions_of_ranks_are_counted_by_name(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[rank1]: shardwise.RankFailure: rank 0 ended\nRuntimeError: x\n  ValueError: quoted\nRankFailure: y\n"
    )
    assert messages(log) == {"RankFailure": 2, "RuntimeError": 1}


def test_events_are_read_once_and_when_they_are_whole(tmp_path: Path) -> None:
    job = Job(tmp_path / "job", 2, [])
    path = tmp_path / "job" / "events.jsonl"
    job.read_events()
    for text, steps in [('{"step": 1}\n{"st', [1]), ('{"step": 1}\n{"step": 2}\n', [1, 2]), ("", [1, 2])]:
        path.write_text(text or path.read_text())
        job.read_events()
        assert [event["step"] for event in job.events] == steps
