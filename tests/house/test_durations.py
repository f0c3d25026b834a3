"""What a run of the tests took is recorded, shown and compared; tiers hold what they are said to hold.

Takes 20 s: three runs of pytest in processes of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import durations
import pytest
from checkout import ROOT, TESTS, python_path
from ranks import run_ranks
from tiers import FOLDERS, starts_processes

SUITE = """
import time
import pytest
from ranks import run_ranks

def test_short(): pass
def test_slow(): time.sleep(0.3)
@pytest.mark.full
def test_full(): pass
@pytest.mark.long
def test_long(): pass
def test_of_ranks(): assert run_ranks(2, int) == [0, 0]
@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", range(20))
def test_sampled(n): pass
"""


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The record of a run over a small suite that has the conftest of this one."""
    (folder / "test_small.py").write_text(SUITE)
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    environment = {**os.environ, "PYTHONPATH": python_path(), "SHARDWISE_DURATIONS": str(folder / "runs")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    command += [f"--rootdir={folder}", f"-c{ROOT / 'pyproject.toml'}", str(folder / "test_small.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (folder / "runs").glob("*.json")
    found: dict[str, Any] = json.loads(written.read_text())
    return found


@pytest.mark.full
def test_a_run_records_every_test_and_what_its_ranks_needed(tmp_path: Path) -> None:
    found = run(tmp_path, "-n", "2")
    seconds = {name.split("::")[1]: value for name, value in found["tests"].items()}
    cases = {f"test_sampled[{n}]" for n in range(20)}
    assert {*seconds} == {"test_short", "test_slow", "test_full", "test_of_ranks", *cases}
    assert seconds["test_slow"] >= 0.3
    assert sum(found["files"].values()) == pytest.approx(sum(seconds.values()), abs=0.1)
    assert (found["phase"], found["tier"]) == ("torch", "all")
    assert (found["ranks"]["worlds"], found["ranks"]["processes"]) == (1, 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tier", "tests"),
    [("quick", {"test_short", "test_slow"}), ("test", {"test_short", "test_slow", "test_of_ranks"})],
)
def test_a_tier_leaves_out_what_it_says(tmp_path: Path, tier: str, tests: set[str]) -> None:
    found = run(tmp_path, "--tier", tier)
    names = {name.split("::")[1] for name in found["tests"]}
    drawn = {name for name in names if name.startswith("test_sampled")}
    assert names - drawn == tests and 2 <= len(drawn) <= 8


def through_a_function() -> None:
    ask()


def ask() -> list[int]:
    return [run_ranks(1, int)[0] for _ in range(1)]


@pytest.mark.parametrize(
    ("function", "starts"),
    [(through_a_function, True), (ask, True), (starts_processes, False), (durations.changes, False)],
)
def test_what_starts_processes_is_found_in_what_it_calls(function: Callable[..., object], starts: bool) -> None:
    assert starts_processes(function) == starts


class Run:
    """As much of pytest's config as an order needs."""

    def __init__(self, folder: Path, told: dict[str, float] | None) -> None:
        self.rootpath = folder
        self.workerinput = {} if told is None else {"shardwise_seconds": told}

    def getoption(self, name: str, default: str) -> str:
        return default


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid


@pytest.mark.parametrize(
    ("told", "order"),
    [
        ({"b": 3.0, "c": 0.1}, ["b::1", "b::2", "a::starts", "a::1", "c::1"]),
        ({}, ["a::starts", "a::1", "b::1", "b::2", "c::1"]),
        (None, ["c::1", "a::starts", "a::1", "b::1", "b::2"]),
    ],
    ids=["of an earlier run", "guessed", "without workers as collected"],
)
def test_files_that_take_long_come_first_and_stay_together(
    tmp_path: Path, told: dict[str, float] | None, order: list[str]
) -> None:
    items: list[Any] = [Item(name) for name in ("c::1", "a::starts", "a::1", "b::1", "b::2")]
    config: Any = Run(tmp_path, told)
    durations.longest_first(config, items, lambda item: "starts" in item.nodeid)
    assert [item.nodeid for item in items] == order


def test_seconds_are_of_the_largest_of_the_last_runs_of_a_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_DURATIONS", str(tmp_path))
    config: Any = Run(tmp_path, None)
    assert durations.earlier(config) == {}
    for name, files in {
        "1-torch": {"a": 1, "b": 2},
        "2-torch": {"a": 9},
        "3-compiled": {"a": 1, "b": 2, "c": 3},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"files": files}))
    (tmp_path / "4-torch.json").write_text("{")
    assert durations.earlier(config) == {"a": 1, "b": 2}


def record(**files: float) -> dict[str, Any]:
    return {
        "files": files,
        "tests": files,
        "seconds": 1,
        "phase": "torch",
        "tier": "all",
        "commit": "",
        "workers": 1,
        "ranks": {},
    }


def test_changes_are_those_of_a_second_and_a_fifth_and_slower_ones_come_first() -> None:
    before = record(same=10, slower=10, faster=10, little=0.5, gone=4)
    after = record(same=11.9, slower=12.1, faster=7, little=1.4, new=2)
    lines = [line.split()[-1] for line in durations.changes(before, after)]
    assert lines == ["slower", "new", "faster", "gone"]


def test_a_file_over_twenty_seconds_has_to_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "why.py").write_text('"""Waits. Takes 30 s: a timeout is waited for."""\n')
    (tmp_path / "not.py").write_text('"""Waits."""\n')
    lines = durations.long_files(record(**{"why.py": 30, "not.py": 21, "short.py": 19}), tmp_path)
    assert [(line.split()[2], "does not say why" in line) for line in lines] == [("why.py", False), ("not.py", True)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(record(**{f"{name}.py": 25})))
    assert durations.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    assert re.search(r"0\.0 ->\s+25\.0 s  b\.py\n.*25\.0 ->\s+0\.0 s  a\.py", capsys.readouterr().out)


@pytest.mark.skipif(not (TESTS / "kernels").exists(), reason="tests lie flat")
@pytest.mark.parametrize("phase", FOLDERS)
def test_a_phase_has_no_tests_outside_of_its_folders(phase: str) -> None:
    """Marks by themselves, and lists of devices that carry them."""
    devices = r"|^from \w+ import (\([^)]*|.*)\b(DEVICES|UPDATES)\b" if phase == "interpreted" else ""
    marked = re.compile(rf"\bmark\.{phase}\b{devices}", re.MULTILINE)
    places = [TESTS / folder for folder in (*FOLDERS[phase], "support")]
    outside = [
        path.name
        for path in TESTS.rglob("*.py")
        if not any(place in path.parents for place in places) and marked.search(path.read_text())
    ]
    assert outside == []
