"""The script that runs the tests on other versions: what it asks pip for, what it reads and what it keeps."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from shardwise.perf.evidence import matrix

JUNIT = """<testsuites><testsuite><testcase classname="tests.test_a" name="test_one"/>
<testcase classname="tests.test_a" name="test_two[x]"><failure message="no">E</failure></testcase>
<testcase classname="tests.test_b" name="test_three"><skipped message="no GPU"/></testcase>
<testcase classname="tests.test_b" name="test_four"><error message="fixture">E</error></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_are_named_and_a_run_without_a_report_has_none() -> None:
    failing = ["tests.test_a::test_two[x]", "tests.test_b::test_four"]
    assert matrix.counts(JUNIT) == {"passed": 1, "failed": 2, "skipped": 1, "failing": failing}
    assert matrix.counts("") == {"passed": 0, "failed": 0, "skipped": 0, "failing": []}


def test_a_pair_has_its_own_torch_and_the_other_versions_of_the_tests() -> None:
    lines = matrix.constraints("2.15.0", "3.9.0")
    assert "torch==2.15.0" in lines and not [line for line in lines if line.startswith(("torch==2.13", "triton=="))]
    assert [line for line in lines if line.startswith("numpy==")] and "pytest==9.2.0" in lines
    older = matrix.constraints("2.9.0", "3.6.0")
    assert [line for line in older if line.startswith("numpy")] == ["numpy<2.4"]


def test_a_pair_replaces_its_result_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "matrix.json"
    for torch, triton, passed in (("2.15.0", "3.9.0", 1), ("2.9.0", "3.6.0", 2), ("2.15.0", "3.9.0", 3)):
        matrix.write({"torch": torch, "triton": triton, "passed": passed}, path)
    pairs = json.loads(path.read_text())["pairs"]
    assert [(pair["torch"], pair["passed"]) for pair in pairs] == [("2.9.0", 2), ("2.15.0", 3)]


def test_a_phase_that_runs_alone_keeps_the_others_of_the_same_versions(tmp_path: Path) -> None:
    path, asked = tmp_path / "matrix.json", {"torch": "2.15.0", "triton": "3.9.0"}

    def phases() -> dict[str, int]:
        passed: dict[str, int] = json.loads(path.read_text())["pairs"][0]["phases"]
        return passed

    matrix.write({**asked, "versions": {"numpy": "2.4"}, "phases": {"torch path": 1, "compiled": 2}}, path)
    matrix.write({**asked, "versions": {"numpy": "2.4"}, "phases": {"compiled": 3}}, path)
    assert phases() == {"torch path": 1, "compiled": 3}
    matrix.write({**asked, "versions": {"numpy": "2.5"}, "phases": {"compiled": 4}}, path)
    assert phases() == {"compiled": 4}


def test_a_conflict_is_named_and_not_the_page_about_conflicts() -> None:
    """matrix.json said of torch 9.9.9 "ResolutionImpossible: for help visit ..." and no more."""
    conflict = "ERROR: Cannot install torch==9.9.9 because these package versions have conflicting dependencies."
    page = "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics/dependency-resolution/"
    assert matrix.reason(f"WARNING: slow\n{conflict}\n{page}\n\n") == conflict
    assert matrix.reason("WARNING: slow\n") == ""


def test_a_pair_that_cannot_be_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: slow\nERROR: No matching distribution for torch==9.0\n"
        )

    monkeypatch.setattr(matrix, "_commit", lambda: "abc")
    monkeypatch.setattr(matrix.subprocess, "run", refuse)
    pair = matrix.run_pair("9.0.0", "3.9.0", tmp_path, (), ())
    assert pair["not_installed"] == "ERROR: No matching distribution for torch==9.0" and "phases" not in pair
