"""`shardwise kernels run`: what it prints and writes, how it ends, and that each barrier of a kernel is taken out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result

from shardwise import cli
from shardwise.kernels import _op
from shardwise.perf.gpu.cases import runs
from shardwise.perf.gpu.launches import Cut
from shardwise.perf.selftest.tolerances import SAME


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), ("kernels", "run", *arguments))


@pytest.mark.executed
def test_the_command_prints_a_line_a_kernel_and_writes_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "executed.json"
    result = run("--kernel", "sequence lookup", "--jobs", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert any(line.startswith("lookup.sequence.gather ") and "same bits" in line for line in lines)
    assert lines[-1].startswith("2 cases, ") and lines[-1].endswith("no fault, every result as close as it must be")
    results = json.loads(file.read_text())
    assert {*results["kernels"]} == {"lookup.sequence.resolve", "lookup.sequence.gather"} and results["wrong"] == []
    gather = results["kernels"]["lookup.sequence.gather"]
    assert gather["launches"] == gather["cases"] == 2 and gather["instructions"] > 100
    assert gather["differences"] == {"same bits": 0.0} and 0 < gather["sector_share"]["load W"] <= 1
    assert (
        results["target"] == "sm_90"
        and results["versions"]["triton"]
        and "reason" in results["tolerances"]["same bits"]
    )


@pytest.mark.executed
def test_each_barrier_of_a_kernel_is_taken_out_and_reported() -> None:
    """By two processes, as by one."""
    result = run("--kernel", "pooled lookup, fp16 D=128", "--barriers", "--jobs", "2")
    assert result.exit_code == 0, result.output
    assert "1 of 1 missing barriers reported" in result.output
    assert " 1/1 " in result.output


@pytest.mark.executed
def test_a_barrier_that_nothing_explains_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "pooled lookup, fp16 D=128"

    def silent(*_: object) -> Iterator[runs.Missing]:
        yield runs.Missing(Cut("lookup.pooled.pooled_lookup", "a", 0), redundant=True)
        yield runs.Missing(Cut("lookup.pooled.pooled_lookup", "a", 1))

    monkeypatch.setattr(runs, "barriers_cut", silent)
    result = run("--kernel", name, "--barriers", "--jobs", "1")
    assert result.exit_code == 1
    assert "pooled.pooled_lookup: nothing reports that barrier 1 of program a is missing" in result.output
    assert "0 of 2 missing barriers reported, 1 redundant: 1 things are wrong" in result.output


def test_barriers_that_are_left_are_counted() -> None:
    """So many of a kernel, of which no run shows that two threads meet."""
    (kernel,) = runs._LEFT
    left = [runs.Missing(Cut(kernel, "a", i), may_be=True) for i in range(runs._LEFT[kernel][0] + 1)]
    assert runs.unexplained(left[:-1]) == [] and all(barrier.sentence for barrier in left)
    assert runs.unexplained(left) == [left[-1].cut]
    met, elsewhere = (
        runs.Missing(Cut(kernel, "a", 0)),
        runs.Missing(Cut("lookup.pooled.pooled_lookup", "a", 0), may_be=True),
    )
    assert runs.unexplained([met, elsewhere]) == [met.cut, elsewhere.cut]


@pytest.mark.executed
def test_a_difference_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = runs.select("calibration, by feature, fp32", False)
    (other,) = runs.select("sums of segments and their gradient, fp32 (20,)", False)
    assert other.reference is None
    wrong = replace(case, name="of something else", reference=other.run, tolerance=SAME)
    monkeypatch.setattr(runs, "CASES", (wrong,))
    monkeypatch.setattr(runs, "_BY_NAME", {wrong.name: wrong})
    result = run("--jobs", "1", "--kernel", "something")
    assert result.exit_code == 1
    assert "of something else: result 0 differs by inf" in result.output and "things are wrong" in result.output


def test_a_name_that_no_case_has_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "HAS_TRITON", True)
    monkeypatch.setattr(_op, "INTERPRETED", False)
    result = run("--kernel", "matmul")
    assert result.exit_code == 2 and "no usual case has 'matmul'" in result.output


def test_without_triton_and_in_the_interpreter_the_command_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "HAS_TRITON", True)
    monkeypatch.setattr(_op, "INTERPRETED", True)
    result = run()
    assert result.exit_code == 2 and "TRITON_INTERPRET is set" in result.output
    monkeypatch.setattr(_op, "HAS_TRITON", False)
    result = run()
    assert result.exit_code == 2 and "pip install triton" in result.output
