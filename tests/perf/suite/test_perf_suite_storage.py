"""Files of measurements: what comes back, what pytest-benchmark reads of ours and we of its, and what is refused."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from shardwise.perf.suite import machine, record
from shardwise.perf.suite.case import OURS
from shardwise.perf.suite.compare import compare
from shardwise.perf.suite.measure import Failure, Measured
from shardwise.perf.suite.record import Lap, Record
from shardwise.perf.suite.report import rows
from shardwise.perf.suite.storage import (
    TEST,
    load,
    save,
)

LAPS = (
    Lap({OURS: [1e-3, 2e-3, 3e-3], "torch": [2e-3, None, 2e-3], "python": [1e-4] * 3}, {OURS: [2]}, 10.0),
    Lap({OURS: [1e-3, 1e-3], "torch": [4e-3, 2e-3], "python": [1e-4] * 2}, {}, 20.0, {"torch, graph": "no"}),
)
TIMED = Record("pooled_lookup, small", "lookup", LAPS, "s", "cpu", 3e6, "ids", {"cut": 2})
SIZE = Record("wheel", "package", (Lap({OURS: [465_000.0]}),), "bytes")
MEASURED = Measured((TIMED, SIZE), (Failure("broken", "update", "AssertionError: no", "trace"),), ("late",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(
        tmp_path / "a.json",
        MEASURED,
        machine_info=machine.machine_info("cpu", 2),
        about={"suites": ["cpu"], "load": 0.5},
    )
    return tmp_path / "a.json"


def test_what_was_saved_is_loaded(path: Path) -> None:
    run = load(path)
    assert run.measured == MEASURED
    assert run.machine == machine.described("cpu", 2)
    assert run.about["suites"] == ["cpu"] and run.about["load"] == 0.5
    assert run.about["commit"] == machine.commit_info()["id"]
    assert compare(run, run).good
    # nothing but the file is left of writing it
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_a_file_says_what_follows_from_its_times(path: Path) -> None:
    (timed,) = json.loads(path.read_text())["benchmarks"]
    extra = timed["extra_info"]
    # one turn was disturbed and is left out: 1, 2, 1, 1 ms
    assert extra["medians"] == {OURS: 1e-3, "torch": 2e-3} and timed["stats"]["median"] == 1e-3
    assert extra["copy_gb_s"] == 15.0 and extra["gb_per_s"] == 3.0 and extra["percent_of_copy"] == 20.0
    assert extra["floor_s"] == 2e-4 and extra["floor"] == "ids" and extra["bytes_moved"] == 3e6
    # ours over theirs within a round: 0.5, 0.25, 0.5
    assert extra["ratios"] == {"torch": {"q1": 0.375, "median": 0.5, "q3": 0.5}}
    assert {"shardwise", "torch", "triton", "numba", "fbgemm", "torchrec", "python"} <= {
        *json.loads(path.read_text())["machine_info"]["shardwise"]["versions"]
    }


def test_pytest_benchmark_reads_the_file(path: Path) -> None:
    storage = pytest.importorskip("pytest_benchmark.storage.file")
    stats = pytest.importorskip("pytest_benchmark.stats")
    (benchmark,) = storage.FileStorage(str(path.parent), logger=None).load_benchmarks(str(path))
    assert benchmark["group"] == "lookup" and benchmark["name"] == "test_case[pooled_lookup, small]"
    assert benchmark["fullname"] == f"{TEST}[pooled_lookup, small]"
    benchmark_stats = stats.Stats()
    for seconds in benchmark["data"]:
        benchmark_stats.update(seconds)
    assert {*benchmark_stats.as_dict()} <= {*benchmark}
    for field in ("min", "max", "mean", "stddev", "rounds", "median", "total", "ops"):
        assert benchmark[field] == pytest.approx(benchmark_stats.as_dict()[field]), field


def foreign(path: Path, with_data: bool) -> Path:
    """As pytest-benchmark writes benchmarks of others, with `--benchmark-json` and with `--benchmark-autosave`."""
    data = [1e-3, 1.1e-3, 1.2e-3, 1.4e-3, 1.6e-3]
    stats: dict[str, Any] = {"min": 1e-3, "q1": 1.1e-3, "median": 1.2e-3, "q3": 1.4e-3, "max": 1.6e-3, "iqr": 3e-4}
    bench = {"group": None, "name": "test_x", "fullname": "b.py::test_x", "param": None, "extra_info": {}}
    bench["stats"] = {**stats, "data": data} if with_data else stats
    info = {"cpu": {"brand_raw": "a CPU"}, "python_version": "3.11.7"}
    path.write_text(
        json.dumps({"machine_info": info, "commit_info": {"id": "abc"}, "benchmarks": [bench], "datetime": "now"})
    )
    return path


@pytest.mark.parametrize("with_data", [True, False])
def test_files_of_other_benchmarks_are_read(tmp_path: Path, with_data: bool) -> None:
    run = load(foreign(tmp_path / "b.json", with_data))
    (only_record,) = run.measured.records
    assert only_record.name == "b.py::test_x" and record.median(only_record) == 1.2e-3
    assert record.relative_iqr(record.values(only_record)) == pytest.approx(0.25)
    assert run.machine["device_name"] == "a CPU" and run.about["commit"] == "abc"
    assert compare(run, run).good


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON at all", "is no JSON"),
        ("[1, 2]", "holds no measurements"),
        ('{"benchmarks": 3}', "holds no measurements"),
        ('{"benchmarks": [], "shardwise": {"format": 99}}', "format 99 of another shardwise"),
        ('{"benchmarks": [{"name": "a"}]}', "is damaged: KeyError"),
        ('{"benchmarks": [7]}', "is damaged"),
        ('{"benchmarks": [{"fullname": "a", "extra_info": {"laps": [{}]}, "stats": {}}]}', "is damaged"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"data": ["x"]}}]}', "is damaged"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"data": [null]}}]}', "no times of 'shardwise'"),
        ('{"benchmarks": [{"fullname": "a", "stats": {"data": [NaN]}}]}', "is damaged"),
        (
            '{"benchmarks": [{"fullname": "a", "stats": {"data": [1]}, "extra_info": {"bytes_moved": "3"}}]}',
            "no number",
        ),
        ('{"benchmarks": [{"fullname": "a", "stats": {"data": [1]}, "extra_info": {"notes": [1]}}]}', "notes"),
        ('{"benchmarks": [], "machine_info": 3}', "is damaged"),
    ],
)
def test_what_is_no_such_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="bad.json") as raised:
        load(path)
    assert message in str(raised.value)


def test_bytes_that_are_no_text_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    for name in ("bad.json", "none.json"):
        with pytest.raises(ValueError, match=name):
            load(tmp_path / name)


def test_statistics_are_those_of_the_turns_that_count() -> None:
    assert record.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == statistics.median([1, 2, 3, 4])
    assert record.quantile([7.0], 0.25) == 7.0
    assert record.relative_iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert record.best_median(TIMED) == 1e-3 and record.peers(TIMED) == ["torch"]
    graphs = Record("g", "lookup", (Lap({OURS: [2e-3], f"{OURS}{record.GRAPH}": [1e-3]}),), bytes_moved=1e6)
    assert record.best_median(graphs) == 1e-3 and record.gb_per_s(graphs) == 1.0
    assert record.floor_s(graphs) is None and record.percent_of_copy(graphs) is None


def graphed(own: float, replay: float, moved: float = 1e6) -> Record:
    """Of a GPU: FBGEMM was captured and torch was not."""
    times = {
        OURS: [own] * 4, "fbgemm": [4e-3] * 4, "torch": [6e-3] * 4,
        OURS + record.GRAPH: [replay] * 4, f"fbgemm{record.GRAPH}": [2e-3] * 4,
    }  # fmt: skip
    lap = Lap(times, {}, 4000.0, {f"torch{record.GRAPH}": "RuntimeError: it waits"})
    return Record("lookup", "lookup", (lap, lap), device="cuda", bytes_moved=moved)


def test_replays_are_a_record_of_their_own() -> None:
    eager, replays = record.split([graphed(2e-3, 5e-4)])
    assert record.sides(eager) == [OURS, "fbgemm", "torch"] and eager.name == "lookup"
    assert record.median(eager) == 2e-3 and record.ratio(eager, "fbgemm") == (0.5, 0.5, 0.5)
    assert replays.name == "lookup, graph" and record.median(replays) == 5e-4
    assert record.ratio(replays, "fbgemm") == (0.25, 0.25, 0.25)
    # what could not be captured is beside it eagerly, and the row says so
    assert record.ratio(replays, "torch") == pytest.approx((1 / 12,) * 3)
    assert replays.notes == {"no graph of torch": "RuntimeError: it waits"}
    assert record.gb_per_s(eager) == pytest.approx(0.5) and record.gb_per_s(replays) == pytest.approx(2.0)
    lost = Record("lost", "lookup", (Lap({OURS: [1.0]}, notes={OURS + record.GRAPH: "no"}),))
    assert [graph_record.notes for graph_record in record.split([lost])] == [{"no graph": "no"}]


def test_a_slower_replay_is_a_regression_though_eager_calls_are_as_before(tmp_path: Path) -> None:
    stored = []
    for name, replay in (("base", 5e-4), ("new", 6e-4)):
        path = tmp_path / f"{name}.json"
        save(path, Measured((graphed(2e-3, replay),)), machine_info=machine.machine_info("cpu", 2))
        stored.append(load(path))
    comparison = compare(*stored)
    assert [verdict.name for verdict in comparison.of("slower")] == ["lookup, graph"]
    assert [verdict.name for verdict in comparison.of("same")] == ["lookup"]
    printed = [row.cells["median"] for row in rows(stored[:1])]
    assert printed == ["2 ms", "500 us"]
