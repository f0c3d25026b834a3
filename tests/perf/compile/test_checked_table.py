"""The table of kernels that passed the whole check: what changes a fingerprint, and what is compiled again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.kernels import RULES, _op, define_rule
from shardwise.perf.compile import (
    cases as launched,
    checked,
    checks as promises,
    compiled,
    tuning_space,
)
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.checked import changed, fingerprints, group
from shardwise.perf.compile.checks import broken_promises

NEEDS_CASES = pytest.mark.skipif(
    not _op.HAS_TRITON or _op.INTERPRETED, reason="cases are noted from kernels that Triton could compile"
)
VERSION = "3.7.1"


@cache
def cases() -> tuple[Case, ...]:
    return (*launched.cases(), *tuning_space.tuned_cases())


@pytest.mark.compiled
def test_kernels_that_changed_since_the_whole_check_keep_their_promises() -> None:
    """`kernels check` ended with status 1 on a clean clone: the tests compiled a part that had no fault."""
    if (version := _op.triton.__version__) not in checked.read_table():
        pytest.skip(f"no whole check is recorded for triton {version}: shardwise kernels check --record")
    stale = changed(cases(), checked.read_table(), version)
    tasks = [(case, target) for case in stale for target in compiled.TARGETS if compiled.has_case(target, case)]
    reports = dict(compiled.compile_all(tasks, jobs=2))
    broken = broken_promises([(*task, reports[place]) for place, task in enumerate(tasks)])
    assert [f"{case.name} on {target}: {sentence}" for case, target, sentence in broken] == []


@NEEDS_CASES
def test_the_table_has_every_kernel_for_the_version_that_the_tests_are_run_with() -> None:
    line = next(line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("triton=="))
    assert {*checked.read_table()[line.removeprefix("triton==")]} == {group(case) for case in cases()}


@NEEDS_CASES
def test_a_rule_that_a_program_defines_is_no_case_of_the_whole_check() -> None:
    """Two rules that other tests had defined in the process were kernels that nobody had checked."""
    before = {case.name for case in cases()}
    rule = define_rule()(_step_of_ones_own)
    try:
        assert {case.name for case in (*launched.cases(), *tuning_space.tuned_cases())} == before
    finally:
        del RULES[rule.name]


def _step_of_ones_own(w: Any, g: Any, lr: float = 0.5) -> Any:
    return w - lr * g


def _helper(x: Any) -> Any:
    return x + 1


def _other_helper(x: Any) -> Any:
    return x + 2


CALLED = SimpleNamespace(fn=_helper)
ROWS = 4


def _kernel(W: Any) -> Any:
    return CALLED(W) * ROWS  # type: ignore[operator]


def made(**differing: Any) -> Case:
    case = Case("gather D=4 fp32", SimpleNamespace(fn=_kernel), {"W": "*fp32", "Y": "*fp32"}, CONSTANTS, (), 4, 64)
    return replace(case, **differing)


CONSTANTS = {"BLOCK_N": 4, "BLOCK_D": 4, "ALIGN": 4}
CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Case]] = {
    "a function that it calls": lambda patch: (patch.setattr(CALLED, "fn", _other_helper), made())[1],
    "a function given as a constant": lambda patch: made(constants={**CONSTANTS, "RULE": CALLED}),
    "a value that it reads": lambda patch: (patch.setitem(globals(), "ROWS", 8), made())[1],
    "its tile": lambda patch: made(constants={**CONSTANTS, "BLOCK_D": 8}),
    "its warps": lambda patch: made(num_warps=8),
    "its registers": lambda patch: made(registers=80),
    "a type": lambda patch: made(types={"W": "*fp16", "Y": "*fp32"}),
    "what is aligned": lambda patch: made(aligned=(("W",),)),
    "what is promised": lambda patch: (patch.setattr(promises, "REGISTERS_OF_ALIGNED_LOOKUPS", 40), made())[1],
    "what is promised of waits": lambda patch: (patch.setattr(promises, "GATHERS_FIRST", "gather "), made())[1],
    "its source": lambda patch: made(kernel=SimpleNamespace(fn=_other_helper)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_is_compiled_or_promised_changes_the_fingerprint(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fingerprints([made()])
    assert fingerprints([made()]) == before and [*before] == ["gather"]
    assert fingerprints([CHANGES[what](monkeypatch)]) != before


WRITTEN = """
    @jit
    def gather(W, N, BLOCK: constexpr):
        rows = arange(0, BLOCK)
        store(W + rows, 2 * rows, mask=(rows < N) & (rows % 4 == 0))
"""
SAME = {
    "a comment": WRITTEN.replace("rows = arange", "# rows of a block\n        rows = arange"),
    "a waiver": WRITTEN.replace("constexpr):", "constexpr):  # type: ignore"),
    "a docstring": WRITTEN.replace("rows = arange", '"""Moves rows."""\n        rows = arange'),
    "a parameter a line": WRITTEN.replace(
        "W, N, BLOCK: constexpr", "\n        W,\n        N,\n        BLOCK: constexpr,\n    "
    ),
    "an expression on two lines": WRITTEN.replace("(rows < N) & ", "(rows < N)\n            & "),
    "no indent": "\n".join(line.removeprefix("    ") for line in WRITTEN.splitlines()),
}
DIFFERENT = {
    "a constant": ("2 * rows", "3 * rows"),
    "an operator": ("rows < N", "rows <= N"),
    "the order of operands": ("2 * rows", "rows * 2"),
    "an annotation": ("BLOCK: constexpr", "BLOCK"),
    "a default": ("BLOCK: constexpr", "BLOCK: constexpr = 4"),
    "a decorator": ("@jit", "@jit(do_not_specialize=['N'])"),
    "the order of parameters": ("W, N", "N, W"),
    "a keyword": ("mask=(", "other=("),
}


@pytest.mark.parametrize("what", SAME)
def test_how_a_kernel_is_written_down_is_no_change(what: str) -> None:
    """One parameter a line, or a comment, would have cost 24 minutes of compiling for each version of Triton."""
    assert SAME[what] != WRITTEN and checked.syntax(SAME[what]) == checked.syntax(WRITTEN)


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_kernel_that_computes_something_else_has_another_fingerprint(what: str) -> None:
    changed_source = WRITTEN.replace(*DIFFERENT[what])
    assert changed_source != WRITTEN and checked.syntax(changed_source) != checked.syntax(WRITTEN)


def test_only_kernels_that_differ_are_compiled_again_and_each_version_has_its_own_word(tmp_path: Path) -> None:
    path, other = tmp_path / "checked.json", made(name="update sgd D=4 fp32", constants={"BLOCK_C": 1, "KINDS": ()})
    assert checked.read_table(path) == {}
    checked.record(fingerprints([made()]), VERSION, path)
    assert changed([made()], checked.read_table(path), VERSION) == []
    assert changed([made()], checked.read_table(path), "3.9.0") == [made()]
    slower = made(num_warps=8)
    checked.record(fingerprints([slower]), "3.9.0", path)
    assert changed([made()], checked.read_table(path), VERSION) == []
    assert changed([slower], checked.read_table(path), VERSION) == [slower]
    assert group(other) == "update sgd"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"3.7.1": []}', '{"3.7.1": {"gather": 3}}', "<<<<<<< HEAD"])
def test_a_damaged_table_is_named(text: str, tmp_path: Path) -> None:
    """`kernels check --record` compiled for minutes, and then ended in a JSONDecodeError."""
    (path := tmp_path / "checked.json").write_text(text)
    with pytest.raises(ValueError, match=r"checked.json is no table of kernels by version of triton.*take it from git"):
        checked.read_table(path)
