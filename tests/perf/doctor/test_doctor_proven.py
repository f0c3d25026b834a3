"""What wheels say is proven is what the results in the checkout say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from checkout import ROOT

from shardwise.perf.doctor.proven import PROVEN

RESULTS = ROOT / "perf" / "results"
# folders that are not of a device with Triton's kernels
OTHERS = {"cpu", "planner"}
CORRECT = "correct PROVEN in perf/doctor/proven.py"


def _read(name: str) -> Any:
    return json.loads((ROOT / "perf" / name).read_text(encoding="utf-8"))


def test_targets_are_those_that_are_compiled_for() -> None:
    compiled = pytest.importorskip("shardwise.perf.compile.compiled")
    assert PROVEN.whole == compiled.WHOLE, CORRECT
    assert {*PROVEN.part} == {*compiled.TARGETS} - {*compiled.WHOLE}, CORRECT


def test_kernels_by_version_of_triton_are_those_that_passed() -> None:
    passed = {version: len(kernels) for version, kernels in _read("compile/checked.json").items()}
    assert PROVEN.compiled == passed, CORRECT


def test_cases_are_those_that_were_executed_without_a_fault() -> None:
    executed = _read("results/executed.json")
    assert executed["wrong"] == []
    measured = executed["cases"], executed["target"], executed["versions"]["triton"]
    assert (PROVEN.executed, PROVEN.target, PROVEN.executed_by) == measured, CORRECT


def test_pairs_are_those_whose_tests_all_passed() -> None:
    def good() -> Iterator[tuple[str, str]]:
        for pair in _read("results/matrix.json")["pairs"]:
            if all(phase["status"] == 0 and not phase["failed"] for phase in pair["phases"].values()):
                yield pair["torch"], pair["triton"]

    assert PROVEN.pairs == (*good(),), CORRECT


def test_gpus_are_those_that_there_are_results_of() -> None:
    """As long as there is none the doctor, the README and docs/evidence/gpu.md say that no kernel has run on a GPU."""
    assert {*PROVEN.gpus} == {path.name for path in RESULTS.iterdir() if path.is_dir()} - OTHERS, CORRECT
