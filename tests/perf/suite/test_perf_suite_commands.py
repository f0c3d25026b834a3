"""`shardwise perf run`, `compare` and `report`, and `pytest perf/`, on cases that take no time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT, python_path

pytest.importorskip("click")
pytest.importorskip("rich")

import torch
from click.testing import CliRunner, Result
from perf_fake_cases import CASES, case

import shardwise.perf.suite.cases as suite
from shardwise import cli
from shardwise.perf.suite import machine, measure
from shardwise.perf.suite.case import Ready, Setting
from shardwise.perf.suite.storage import TEST, load

NAMES = ["logs, of three inputs", "own rounds", "size"]


def shardwise(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.commands(), ["perf", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(suite, "CASES", CASES)
    monkeypatch.setattr(measure, "yardsticks", lambda: {})
    # what other processes do to the turns of this one has tests of its own
    monkeypatch.setattr(measure, "disturbed", lambda turns: [])
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    good, files = "^(?!.*(wrong|raises))", ("--json", tmp_path / "a.json", "--html", tmp_path / "r.html")
    result = shardwise("run", "--small", "--threads", "1", "--only", good, *files)
    assert result.exit_code == 0, result.output
    return tmp_path / "a.json"


def edited(path: Path, name: str, change: Any) -> Path:
    """A copy in which the benchmark of this name is changed."""
    content = json.loads(path.read_text())
    for benchmark in content["benchmarks"]:
        if benchmark["param"] == name:
            change(benchmark)
    other = path.with_name("b.json")
    other.write_text(json.dumps(content))
    return other


def test_a_run_measures_prints_and_writes_every_case_and_ends_badly_where_one_is_wrong(tmp_path: Path) -> None:
    result = shardwise("run", "--small", "--threads", "1", "--laps", "2", "--json", tmp_path / "a.json")
    assert result.exit_code == 1, result.output
    run = load(tmp_path / "a.json")
    assert [record.name for record in run.measured.records] == NAMES
    assert [len(record.laps) for record in run.measured.records] == [2, 2, 1]
    assert {failure.name for failure in run.measured.failures} == {"wrong", "raises"}
    assert run.machine["threads"] == 1 and run.about["small"] is True and run.about["peers"] == ["torch"]
    for name in (*NAMES, "wrong", "raises"):
        assert name in result.output
    assert "failed: wrong: AssertionError: ours gives 2, the reference 3" in result.output
    assert re.search(r"package +own rounds +505 ms +\d+ % +.*0.51x", result.output)
    assert re.search(r"package +size +465 B", result.output)


def test_ctrl_c_keeps_what_was_measured_and_ends_as_a_shell_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(setting: Setting) -> Ready:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "CASES", (CASES[0], case("stopped", stopped), CASES[3]))
    result = shardwise("run", "--small", "--threads", "1", "--json", tmp_path / "a.json")
    assert result.exit_code == 130, result.output
    recorded = load(tmp_path / "a.json").measured
    assert [record.name for record in recorded.records] == [CASES[0].name]
    assert recorded.not_run == ("stopped", CASES[3].name)


def test_a_run_that_measures_nothing_ends_badly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run", lambda cases, *_, **__: measure.Measured(not_run=("logs",)))
    result = shardwise("run", "--small", "--threads", "1", "--json", tmp_path / "a.json")
    assert result.exit_code == 1 and "not run, the time was up: logs" in result.output


def test_a_report_says_machine_threads_and_versions(measured: Path) -> None:
    result = shardwise("report", measured)
    assert result.exit_code == 0
    head = result.output.splitlines()[0]
    assert f"torch {torch.__version__}" in head and "1 threads" in head and machine.device_name("cpu") in head


def test_peers_that_are_not_installed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "importable_peers", lambda: frozenset({"torchrec"}))
    result = shardwise("run", "--peers", "--small", "--only", "own", "--json", tmp_path / "a.json")
    assert result.exit_code == 0 and "not installed, so not measured: fbgemm" in result.output
    assert load(tmp_path / "a.json").about["peers"] == ["torch", "torchrec"]


def test_cases_are_listed_without_measuring() -> None:
    result = shardwise("run", "--list", "--suite", "full", "--suite", "cpu")
    assert result.exit_code == 0
    assert result.output.splitlines() == [f"{case.group}: {case.name}" for case in CASES]


def test_the_same_run_twice_is_no_regression_and_a_slowdown_is_one(measured: Path) -> None:
    again = shardwise("compare", measured, measured)
    assert again.exit_code == 0 and again.output.splitlines()[-1] == "3 same: no regression"

    def slower(benchmark: dict[str, Any]) -> None:
        for lap in benchmark["extra_info"]["laps"]:
            lap["times"]["shardwise"] = [1.2 * seconds for seconds in lap["times"]["shardwise"]]

    planted = edited(measured, "own rounds", slower)
    caught = shardwise("compare", measured, planted)
    assert caught.exit_code == 1
    assert "slower: own rounds: 505 ms -> 606 ms (+20.0 %)" in caught.output
    assert shardwise("compare", measured, planted, "--only", "size").exit_code == 0
    assert shardwise("compare", measured, planted, "--at-least", "25").exit_code == 0


def test_another_device_is_refused_unless_forced(measured: Path) -> None:
    content = json.loads(measured.read_text())
    content["machine_info"]["shardwise"]["device_name"] = "another"
    other = measured.with_name("b.json")
    other.write_text(json.dumps(content))
    refused = shardwise("compare", measured, other)
    assert refused.exit_code == 2 and "device_name" in refused.output and "--force" in refused.output
    forced = shardwise("compare", measured, other, "--force")
    assert forced.exit_code == 0 and "differs: device_name" in forced.output


def test_the_report_shows_every_case_as_a_table_and_as_a_page(measured: Path) -> None:
    page = measured.with_name("a.html")
    result = shardwise("report", measured, "--html", page)
    assert result.exit_code == 0
    text = page.read_text()
    assert measured.with_name("r.html").read_text() == text
    for name in NAMES:
        assert name in result.output and f'<th scope="row">{name}</th>' in text
    assert "logs, of three inputs\n3 MB in" in text and "own rounds\n0.51x of torch" in text
    assert not re.search(r"<script|https?://|<link|@import|url\(", text)

    open_tags: list[str] = []

    class Balanced(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag != "meta":
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            pass

    Balanced().feed(text)
    assert open_tags == []
    assert "median [1]" in shardwise("report", measured, measured).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--out", "x.json", "--suite", "gpu"], "there is no suite 'gpu'"),
        (["run", "--out", "x.json", "--only", "no such"], "no case for cpu has 'no such'"),
        (["run", "--out", "x.json", "--only", "("], "is no regular expression"),
        (["run", "--out", "no/such/folder/x.json"], "no/such/folder/x.json cannot be written"),
        (["run", "--out", "x.json", "--html", "no/x.html"], "no/x.html cannot be written"),
        (["run", "--out", "x.json", "--html", "./x.json"], "--out and --html both name x.json"),
        (["run", "--out", "x.json", "--limit-s", "nan"], "--limit-s"),
        (["run", "--out", "x.json", "--memory-gib", "inf"], "--memory-gib"),
        (["compare", "good.json", "good.json", "--iqr", "nan"], "--iqr"),
        (["run"], "--out FILE, or --json"),
        (["report", "bad.json"], "bad.json is no JSON"),
        (["report", "good.json", "--html", "no/x.html"], "no/x.html cannot be written"),
        (["report", "none.json"], "none.json"),
        (["compare", "good.json", "bad.json"], "bad.json is no JSON"),
        (["compare", "good.json", "good.json", "--only", "("], "is no regular expression"),
    ],
)
def test_bad_input_is_one_line_and_measures_nothing(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "run", None)
    Path("bad.json").write_text("not")
    Path("good.json").write_text('{"benchmarks": []}')
    result = shardwise(*arguments)
    assert result.exit_code == 2 and message in result.output, result.output
    assert not Path("x.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    result = shardwise("run", "--device", "cuda", "--json", "x.json")
    assert result.exit_code == 2 and "torch sees no CUDA device" in result.output


@pytest.mark.full
def test_pytest_runs_the_same_cases_under_the_same_names(measured: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    out = measured.with_name("b.json")
    # a worker of pytest-xdist, which it would take itself for, prints no table
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [
        sys.executable, "-m", "pytest", "-p", "perf_fake_cases", "-q", "-n0", "perf/", "--small", "--threads", "1",
        "--benchmark-json", str(out), f"--benchmark-compare={measured}",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env={**alone, "PYTHONPATH": python_path()}, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert "2 failed, 3 passed" in done.stdout, output
    # both are in the table, so the names paired; the machine is the same, so nothing is warned of
    assert "test_case[own rounds] (NOW)" in output and output.count("test_case[own rounds]") == 2, output
    assert "machine_info is different" not in output
    run = load(out)
    assert [record.name for record in run.measured.records] == NAMES
    assert {failure.name for failure in run.measured.failures} == {"wrong", "raises"}
    own = run.measured.records[1]
    assert own.laps[0].times["shardwise"] == [0.5, 0.51]
    benchmarks = {benchmark["param"]: benchmark for benchmark in json.loads(out.read_text())["benchmarks"]}
    assert benchmarks["own rounds"]["stats"]["data"] == pytest.approx([0.5, 0.51])
    assert benchmarks["own rounds"]["fullname"] == f"{TEST}[own rounds]"
    assert {*benchmarks[NAMES[0]]["extra_info"]["ratios"]} == {"torch"}
    assert shardwise("compare", measured, out, "--only", "package").exit_code == 0


def test_nothing_else_in_the_folder_is_collected_and_a_plain_pytest_leaves_it_alone() -> None:
    from fnmatch import fnmatch

    test_files = [path.name for path in (ROOT / "perf").rglob("*.py") if fnmatch(path.name, "test_*.py")]
    test_files += [path.name for path in (ROOT / "perf").rglob("*_test.py")]
    assert test_files == ["test_cases.py"]
    assert 'testpaths = ["tests"]' in (ROOT / "pyproject.toml").read_text()
