"""The command line: what it prints, as text and JSON, how it ends, and what it says where it cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import click
import pytest
from checkout import run_python
from click.testing import CliRunner, Result

from shardwise import __version__, cli
from shardwise.cli import kernels as cli_kernels
from shardwise.cli.output import require_writable
from shardwise.kernels import _op
from shardwise.perf.compile import (
    cases as launched,
    checked,
    compiled,
    tuning_space,
)
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.compiled import Report

GOOD = Report(40, 0, 0, 0, {("load", 16): 4, ("store", 16): 1}, (), (), 1.9, 2, True)
NEEDS_CASES = pytest.mark.skipif(
    not _op.HAS_TRITON or _op.INTERPRETED, reason="cases are noted from kernels that Triton could compile"
)


@cache
def noted() -> tuple[list[Case], list[Case]]:
    """What each command notes anew, for seconds."""
    return _cases(), [*_tuned_cases()]


_cases, _tuned_cases = launched.cases, tuning_space.tuned_cases


@pytest.fixture(autouse=True)
def _noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "cases", lambda: noted()[0])
    monkeypatch.setattr(tuning_space, "tuned_cases", lambda: noted()[1])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), arguments)


def compiled_as(report: Report | str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, str]]:
    """Put `report` in place of every report; returns what there was to compile."""
    asked: list[tuple[Case, str]] = []

    def compile_all(tasks: Sequence[tuple[Case, str]], jobs: int) -> Iterator[tuple[int, Report | str]]:
        asked.extend(tasks)
        # as they finish, not as they began
        yield from ((place, report) for place in reversed(range(len(tasks))))

    monkeypatch.setattr(compiled, "compile_all", compile_all)
    return asked


def test_a_place_that_cannot_be_written_is_told_before_and_a_file_there_is_kept(tmp_path: Path) -> None:
    require_writable(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").write_text("kept")
    require_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"
    for path in (tmp_path / "no folder" / "a.json", tmp_path):
        with pytest.raises(click.UsageError, match="cannot be written"):
            require_writable(path)


@pytest.mark.parametrize("command", [
    ["kernels", "run", "--out"], ["kernels", "run", "--json"], ["plan", "calibrate", "--out"],
    ["perf", "counts", "--out"], ["perf", "counts", "--update", "--baseline"],
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_said_before_the_work(command: list[str], tmp_path: Path) -> None:
    result = run(*command, str(tmp_path / "missing" / "found.json"))
    assert result.exit_code == 2 and "found.json cannot be written: No such file" in result.output, result.output
    assert "Traceback" not in result.output and not result.stdout


@NEEDS_CASES
def test_kept_promises_end_with_status_0_and_a_line_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = compiled_as(GOOD, monkeypatch)
    result = run("kernels", "check", "--target", "sm_80", "--target", "sm_90", "--kernel", "pooled_lookup D=128 fp32 w")
    assert result.exit_code == 0, result.output
    names = ["pooled_lookup D=128 fp32 weighted", "quantized_pooled_lookup D=128 fp32 weighted"]
    assert [(case.name, target) for case, target in asked] == [(n, t) for n in names for t in ("sm_80", "sm_90")]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [
        "pooled_lookup",
        "D=128",
        "fp32",
        "weighted",
        "sm_80",
        "40",
        "0",
        "0",
        "0",
        "1.9",
        "2",
        "4x16",
        "1x16",
    ] in rows
    assert result.stdout.rstrip().endswith("every promise is kept")


@NEEDS_CASES
def test_typical_kernels_are_a_row_each_of_a_table_of_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table in FACTS.md was of another compiler's kernels: nothing printed it again."""
    asked = compiled_as(GOOD, monkeypatch)
    result = run("kernels", "registers", "--target", "sm_80", "--target", "sm_90")
    assert result.exit_code == 0, result.output
    assert [(case.name, target) for case, target in asked] == list(product(compiled.TYPICAL, ("sm_80", "sm_90")))
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert rows[0].split("|")[1:5] == [" case ", " sm_80 ", " sm_90 ", " spilled on sm_90 "]
    assert rows[2] == "| pooled_lookup D=128 fp32 | 40 | 40 | 0 | 0 | 0 | 1.9 | 2 | 4x16 | 1x16 |"
    assert len(rows) == 2 + len(compiled.TYPICAL)


@NEEDS_CASES
def test_a_broken_promise_ends_with_status_1_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_as(Report(65, 8, 0, 0, {("load", 4): 16, ("store", 16): 1}, (), ()), monkeypatch)
    result = run("kernels", "check", "--target", "sm_90", "--kernel", "pooled_lookup D=128 fp32 w")
    assert result.exit_code == 1
    name = "pooled_lookup D=128 fp32 weighted on sm_90"
    assert f"{name}: spills 8 bytes, promised 0" in result.stdout
    assert f"{name}: takes 65 registers, promised at most 64" in result.stdout
    assert f"{name}: loads 0 bytes of rows by 16 bytes at a time, promised 64" in result.stdout
    # the lookup of quantized rows may take more registers
    assert result.stdout.rstrip().endswith("5 broken promises")


@NEEDS_CASES
def test_a_crash_of_the_compiler_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_as("the compiler failed: OSError: disk full", monkeypatch)
    result = run("kernels", "check", "--kernel", "gather D=128 fp32 sh")
    assert result.exit_code == 1
    for target in compiled.WHOLE:
        assert f"gather D=128 fp32 shifted on {target}: the compiler failed: OSError: disk full" in result.stdout


@NEEDS_CASES
def test_a_filter_that_leaves_nothing_is_an_error() -> None:
    result = run("kernels", "check", "--kernel", "matmul")
    assert result.exit_code == 2
    assert "no case has 'matmul' in its name" in result.output


@NEEDS_CASES
def test_a_whole_check_records_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One spill on another version of Triton, and what had passed in half an hour was forgotten."""
    written: list[set[str]] = []
    monkeypatch.setattr(checked, "record", lambda passed, version: written.append({*passed}))
    compiled_as("the compiler failed", monkeypatch)
    part = run("kernels", "check", "--record", "--kernel", "gather")
    assert part.exit_code == 2 and "--record is for a check of all kernels" in part.output
    assert run("kernels", "check", "--record").exit_code == 1 and written.pop() == set()
    # what `_check` returns breaks a promise
    everything = {checked.group(case) for case in (*launched.cases(), *tuning_space.tuned_cases())}
    monkeypatch.setattr(
        cli_kernels, "_check", lambda cases, *_: [case for case in cases if case.name.startswith("update sgd")]
    )
    assert run("kernels", "check", "--record").exit_code == 1
    assert written.pop() == everything - {"update sgd"} and "gather" in everything
    monkeypatch.setattr(checked, "changed", lambda cases, table, version: [])
    nothing = run("kernels", "check", "--changed", "--record")
    assert nothing.exit_code == 0 and "every kernel passed on triton" in nothing.output and len(written) == 1
    result = run("kernels", "check", "--changed", "--kernel", "gather D=128")
    assert result.exit_code == 0 and "every kernel with 'gather D=128' in its name passed on triton" in result.output
    # it said that every kernel passed
    assert run("kernels", "check", "--changed", "--kernel", "matmul").exit_code == 2


@NEEDS_CASES
def test_a_damaged_table_ends_a_check_before_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def damaged() -> dict[str, dict[str, str]]:
        (tmp_path / "checked.json").touch()
        return read(tmp_path / "checked.json")

    read = checked.read_table
    monkeypatch.setattr(checked, "read_table", damaged)
    monkeypatch.setattr(cli_kernels, "_check", lambda *asked: pytest.fail("nothing was to be compiled"))
    for option in ("--record", "--changed"):
        result = run("kernels", "check", option)
        assert result.exit_code == 2 and "checked.json is no table of kernels" in result.output


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("HAS_TRITON", False, "triton is not installed"), ("INTERPRETED", True, "TRITON_INTERPRET is set")],
)
def test_a_check_that_cannot_compile_says_why(
    name: str, value: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_op, "HAS_TRITON", True)
    monkeypatch.setattr(_op, "INTERPRETED", False)
    monkeypatch.setattr(_op, name, value)
    result = run("kernels", "check")
    assert result.exit_code == 2
    assert message in result.output


def test_the_module_runs_the_command() -> None:
    assert run_python("-m", "shardwise", "--version").stdout == f"shardwise, version {__version__}\n"
