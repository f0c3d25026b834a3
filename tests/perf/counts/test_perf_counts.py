"""`shardwise perf counts`: what is planted into a step is caught by its name, and the repository's counts still hold.

Numbers of this process would have conftest's poison in them: it is left out here, and the check of the repository's
baseline is a process of its own.

Takes most of a minute: each count is a step made anew on three paths, and the repository's counts are all counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from shardwise import KeyedJaggedTensor
from shardwise.embeddings.tables.table_group import TableGroup
from shardwise.kernels import numba_loops
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.counts import (
    baseline as count_baseline,
    counted_ranks,
    counted_steps,
    steps as count_steps,
)
from shardwise.perf.counts.baseline import Change, changes
from shardwise.perf.counts.steps import (
    Count,
    Counts,
    counts_of,
    of_ranks,
)
from shardwise.sharding.comms.exchange import Exchange

pytest.importorskip("click")
pytest.importorskip("rich")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="counts are of the paths that run without the interpreter")

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="kernels are triton's")
SMALL = "EBC step, SGD"


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: that would be more calls, kernels and allocations."""
    yield


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tables instead of 26, and batches of 4."""
    shape = counted_steps.SHAPE
    monkeypatch.setattr(counted_steps, "KEYS", counted_steps.KEYS[:3])
    monkeypatch.setattr(
        counted_steps, "SHAPE", type(shape)("small", shape.rows[:3], 8, 4, shape.lengths[:3], fixed=False)
    )


def step_of(name: str) -> counted_steps.Step:
    (step,) = (step for step in counted_steps.STEPS if step.name == name)
    return step


def counts(name: str = SMALL) -> Counts:
    return counts_of(step_of(name))


def rises(before: Counts, now: Counts) -> dict[str, Change]:
    """What rose, by the count."""
    return {change.count: change for change in changes({SMALL: before}, {SMALL: now}) if change.rose}


def invoke(*args: str) -> tuple[int, str]:
    from click.testing import CliRunner

    from shardwise.cli import commands

    result = CliRunner().invoke(commands(), ["perf", "counts", *args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """What the command counts from now on: this, without counting."""
    step_counts = dict(small_counts())
    monkeypatch.setattr(count_steps, "counts_of", lambda step: step_counts)
    return step_counts


@pytest.fixture
def baseline(tmp_path: Path) -> str:
    """A baseline with the small step, counted once."""
    file = tmp_path / "counts.json"
    count_baseline.write(file, {count_baseline.versions(): {SMALL: small_counts()}})
    return str(file)


@cache
def small_counts() -> Counts:
    return counts()


@pytest.mark.full
def test_counts_are_the_same_twice() -> None:
    assert small_counts() == counts()
    assert counts("KJT permute") == counts("KJT permute")


def helper() -> None:
    """A Python function more."""


def more_calls(self: TableGroup, *args: Any, **kwargs: Any) -> Any:
    helper()
    return plain_pooled(self, *args, **kwargs)


def more_memory(self: TableGroup, *args: Any, **kwargs: Any) -> Any:
    torch.empty(1000)
    return plain_pooled(self, *args, **kwargs)


def more_kernels(self: TableGroup, *args: Any, **kwargs: Any) -> Any:
    looked_up: Tensor = plain_pooled(self, *args, **kwargs)
    return looked_up + 0


def another_wait(self: TableGroup, *args: Any, **kwargs: Any) -> Any:
    looked_up: Tensor = plain_pooled(self, *args, **kwargs)
    bool(looked_up.isfinite().all())
    return looked_up


plain_pooled = TableGroup.pooled
PLANTED: dict[str, tuple[Callable[..., Any], str, int, str]] = {
    "an allocation": (more_memory, "allocations, torch alone", 1, "bytes allocated, torch alone rose by 4,000,"),
    "a launch": (more_kernels, "kernels", 1, "torch add "),
    "a host sync": (another_wait, "host syncs", 1, "_local_scalar_dense"),
}


@pytest.mark.full
@needs_triton
@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_into_a_step_fails_the_check_by_name(
    what: str, baseline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, count, by, part = PLANTED[what]
    monkeypatch.setattr(TableGroup, "pooled", planted)
    status, output = invoke("--only", SMALL, "--check", "--baseline", baseline)
    assert status == 1
    assert f"{SMALL}: {count} rose by {by:,}, from" in output
    assert part in output


@pytest.mark.full
def test_a_python_call_more_fails_the_check_by_name(
    baseline: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, file = small_counts(), tmp_path / "found.json"
    with monkeypatch.context() as patched:
        patched.setattr(TableGroup, "pooled", more_calls)
        status, output = invoke("--only", SMALL, "--check", "--baseline", baseline, "--json", str(file))
    name = "python calls, torch alone"
    assert status == 1
    assert f"{SMALL}: {name} rose by 2" in output
    (step_counts,) = count_baseline.read(file).values()
    rose = rises(before, step_counts[SMALL])
    # the function that stands in for the method, and the one that it calls
    assert f"{name} rose by 2, from {before[name].total}" in str(rose[name])
    assert "tests 0 -> 2" in str(rose[name])
    monkeypatch.setattr(count_steps, "counts_of", lambda step: step_counts[SMALL])
    status, output = invoke("--only", SMALL, "--baseline", baseline)
    assert status == 0, "only --check fails"
    assert f"{SMALL}: {name} rose by 2" in output


def test_a_fall_is_no_failure_and_says_how_to_keep_it(baseline: str, counted: Counts) -> None:
    name = "python calls, torch alone"
    counted[name] = Count(counted[name].total - 5)
    status, output = invoke("--only", SMALL, "--check", "--baseline", baseline)
    assert status == 0
    assert "--update" in output
    assert invoke("--only", SMALL, "--update", "--baseline", baseline)[0] == 0
    assert "fell" not in invoke("--only", SMALL, "--check", "--baseline", baseline)[1]


def sharded_counts(plant: bool) -> Counts:
    """What a rank counts of a table-wise step, perhaps with a collective more."""
    step = counted_ranks.STEPS[0]
    plain = Exchange.all_to_all
    if plant:

        def twice(self: Exchange, *args: Any, what: str) -> Any:
            if what.startswith("row"):
                self.numbers(torch.zeros(2)).wait()
            return plain(self, *args, what=what)

        Exchange.all_to_all = twice  # type: ignore[method-assign,assignment]
    try:
        return of_ranks(step)
    finally:
        Exchange.all_to_all = plain  # type: ignore[method-assign]


@pytest.mark.full
@pytest.mark.ranks
def test_a_collective_more_is_counted_and_so_are_its_bytes() -> None:
    (before, _), (now, _) = (run_ranks(2, sharded_counts, plant) for plant in (False, True))
    assert before["collectives"].parts == {"all_to_all_single": 4}
    rose = rises(before, now)
    # where rows travel and where gradients do: two numbers of 4 bytes, twice, on both ranks
    assert str(rose["collectives"]).endswith("rose by 2, from 4 to 6 (all_to_all_single 4 -> 6)")
    assert rose["bytes sent"].now is not None
    assert rose["bytes sent"].now.total == before["bytes sent"].total + 32


def test_other_versions_are_not_compared(baseline: str, counted: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = count_baseline.versions()
    monkeypatch.setattr(count_baseline, "versions", lambda: "python 3.99, torch 2.99")
    counted["allocations, torch alone"] = Count(10**6)
    status, output = invoke("--only", SMALL, "--check", "--baseline", baseline)
    assert status == 1 and invoke("--only", SMALL, "--baseline", baseline)[0] == 0
    assert f"no counts of python 3.99, torch 2.99, only of {kept}" in output
    assert invoke("--only", SMALL, "--update", "--baseline", baseline)[0] == 0
    assert sorted(count_baseline.read(Path(baseline))) == sorted([kept, "python 3.99, torch 2.99"])


def test_without_numba_its_counts_are_left_out_and_said(baseline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = count_steps.importlib.util.find_spec
    with monkeypatch.context() as patched:
        patched.setattr(
            count_steps.importlib.util, "find_spec", lambda name, *a: None if name == "numba" else find(name, *a)
        )
        names, missing = counts(), count_steps.missing()
    # else the tests that follow in this process would go on without it
    count_steps._forget()
    assert not any(name.endswith("numba") for name in names)
    assert any("numba is not installed" in why for why in missing)
    assert numba_loops.loops("lookup_loops") is not None or find("numba") is None


BAD: dict[str, tuple[str | bytes | None, str]] = {
    "no file": (None, "does not exist: `shardwise perf counts --update` writes it"),
    "no JSON": ("counts", "is no file of `shardwise perf counts`"),
    "other JSON": ('{"cases": []}', "is no file of `shardwise perf counts`"),
    "a list": ("[1, 2]", "is no file of `shardwise perf counts`"),
    "another format": ('{"format": 7, "counts": {}}', "has format 7, this version of shardwise reads 1"),
    "no text": (b"\xc7counts", "counts.json is no file of `shardwise perf counts`"),
    "no number": ('{"format": 1, "counts": {"v": {"s": {"c": {"total": 1.5}}}}}', "counts are whole numbers"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_baseline_is_refused_before_anything_is_counted(what: str, tmp_path: Path) -> None:
    text, message = BAD[what]
    file = tmp_path / "counts.json"
    if text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    status, output = invoke("--check", "--baseline", str(file))
    assert status == 2, "1 is of a count that rose"
    assert message in output.replace("\n", " ")


def test_an_unknown_step_and_a_bad_expression_are_named() -> None:
    status, output = invoke("--only", "no such step")
    assert status == 2
    assert "no step has 'no such step' in its name; there are: EBC forward" in output
    status, output = invoke("--only", "(")
    assert status == 2
    assert "--only is no regular expression" in output


def test_files_hold_what_was_counted(tmp_path: Path) -> None:
    step_counts = {"a step": {"kernels": Count.of({"b": 2, "a": 1}), "bytes sent": Count(7)}, "other": {}}
    file = tmp_path / "counts.json"
    count_baseline.write(file, {"v1": step_counts, "v2": {}})
    assert count_baseline.read(file) == {"v1": step_counts, "v2": {}}
    assert list(json.loads(file.read_text())["counts"]["v1"]["a step"]["kernels"]["parts"]) == ["a", "b"]


def test_batches_of_turns_have_the_same_lengths_and_other_ids() -> None:
    first, other = (counted_steps.batch_of(turn, torch.device("cpu")) for turn in (0, 1))
    assert isinstance(first, KeyedJaggedTensor)
    assert torch.equal(first.lengths(), other.lengths())
    assert not torch.equal(first.values(), other.values())


def test_the_repository_has_counts_of_the_torch_that_the_tests_are_run_with() -> None:
    line = next(line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    torch_version = ".".join(line.removeprefix("torch==").split(".")[:2])
    assert any(name.endswith(f"torch {torch_version}") for name in count_baseline.read(count_baseline.BASELINE))


@pytest.mark.full
@pytest.mark.parametrize("only", ["^(?!.*ranks)", pytest.param("ranks", marks=pytest.mark.ranks)], ids=["one", "two"])
def test_no_count_of_the_repository_rose(only: str) -> None:
    """CI: what a step calls, allocates, launches, sends and waits for only falls, or somebody says why."""
    if (here := count_baseline.versions()) not in count_baseline.read(count_baseline.BASELINE):
        pytest.skip(f"the repository has no counts of {here}: shardwise perf counts --update")
    command = [sys.executable, "-m", "shardwise", "perf", "counts", "--check", "--only", only]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
