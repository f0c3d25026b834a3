"""What `ckpt show`, `perf report`, `perf compare` and `migrate` print fits terminals of 80, 100 and 160 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_cli_frame import run

from shardwise.cli.ckpt import _show
from shardwise.perf.suite import machine
from shardwise.perf.suite.case import OURS
from shardwise.perf.suite.measure import Failure, Measured
from shardwise.perf.suite.record import Lap, Record
from shardwise.perf.suite.storage import save
from shardwise.planner.layout import column_wise, data_parallel, row_wise
from shardwise.sharding.checkpoint.manifest import TABLE, FileFacts, Manifest, Stored, TableFacts

WIDTHS = pytest.mark.parametrize("columns", [80, 100, 160])
LONG = "model.sparse_arch.embedding_bag_collection.embedding_bags.a_feature_of_a_long_name"


def lines_that_fit(printed: str, columns: int) -> Sequence[str]:
    """The lines, none of them as long as a terminal would break it, and none with blanks at its end."""
    lines = printed.splitlines()
    assert [line for line in lines if len(line) > columns or line != line.rstrip()] == []
    return lines


def manifest() -> Manifest:
    """30 tables of long names, with many shards and states."""
    tables, tensors = {}, []
    for number in range(30):
        name, rows = f"{LONG}_{number}.weight", 10 ** (2 + number % 7)
        cut = (row_wise, column_wise)[number % 2]
        shards = cut(name, rows, 128, range(16)) if number % 5 else data_parallel(name, rows, 128, 16)
        rule = "rowwise_adagrad" if number % 2 else "adam"
        tables[name] = TableFacts(name, rows, 128, torch.float32, "", rule, {}, 123_456, tuple(shards))
        for state in ("weight", "exp_avg", "exp_avg_sq", "row_counter"):
            shape = (rows, 128) if state != "row_counter" else (rows,)
            tensors.append(
                Stored(TABLE, name, state, shape, torch.float32, (0, rows), (0, 128), "rank-00000.safetensors")
            )
    versions = {"shardwise": "0.1.0", "torch": "2.13.0", "python": "3.11"}
    return Manifest(
        12, 16, versions, {"epoch": 1}, tables, tuple(tensors), (FileFacts("rank-00000.safetensors", 1 << 40, ""),)
    )


@WIDTHS
def test_thirty_tables_of_long_names(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row took eight lines of a terminal, with its numbers broken between digits."""
    monkeypatch.setenv("COLUMNS", str(columns))
    _show(Path("runs") / "step-000000000012", manifest())
    printed = capsys.readouterr()
    lines = lines_that_fit(printed.out, columns)
    # numbers are whole, and stand below each other
    ends = {line.index(" 128 ") + 4 for line in lines if re.search(r"\d +128 ", line)}
    assert len(ends) == 1 and printed.out.count(" 128 ") == 30
    assert "100,000,000" in printed.out and "146,865.8" in printed.out and "0-15" in printed.out
    # what is the same of all names is said once
    module, _, name = LONG.rpartition(".")
    assert f"tables are {module}.<table>.weight" in " ".join(lines)
    assert columns < 160 or len([line for line in lines if line.startswith(f"{name}_")]) == 30
    assert ("columns left out" in printed.err) == (columns < 160)


def record(name: str, seconds: float) -> Record:
    own_times, peer_times = ([middle, 1.01 * middle, 0.99 * middle] for middle in (seconds, 2e-3))
    peers = {
        "torch": [2 * value for value in peer_times],
        "fbgemm": peer_times,
        "torchrec": [30 * value for value in peer_times],
    }
    sides = {OURS: own_times, **peers}
    return Record(name, "quantized", (Lap({**sides}, copy_gb_s=10.0),) * 3, "s", "cpu", 3e6, "ids")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two runs: the second has a case that is slower, one that fails and one that is gone, all of long names."""
    names = [
        f"quantized_pooled_lookup, {n} tables of another kind, weighted, rows as fp8 with scales [x]" for n in range(6)
    ]
    paths = []
    for place, slower in enumerate((1.0, 1.5)):
        records = tuple(record(name, 2e-3 * (slower if n == 1 else 1.0)) for n, name in enumerate(names[: 6 - place]))
        failed = (Failure(f"{names[0]}, failing", "update", "AssertionError: " + "ours gives 2, theirs 3; " * 8, ""),)
        measured = Measured(records, failed * place, tuple(f"{name}, late" for name in names))
        path = tmp_path / f"{'abc'[place]}.json"
        info = machine.machine_info("cpu", 2)
        save(path, measured, machine_info=info, about={"suites": ["cpu"], "load": 0.5})
        paths.append(path)
    return paths


@WIDTHS
@pytest.mark.parametrize("several", [False, True])
def test_reports_of_peers_and_several_files(
    columns: int, several: bool, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("perf", "report", *map(str, files[: 1 + several]))
    assert result.exit_code == 0, result.output
    lines_that_fit(result.stdout, columns)
    assert "2 ms" in result.stdout and (several or "0.50x (0.5-0.5)" in result.stdout)
    # a name with brackets is shown as it is
    assert "[x]" in result.stdout and "\\[" not in result.stdout


@WIDTHS
def test_comparisons(columns: int, files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("perf", "compare", *map(str, files))
    assert result.exit_code == 1, result.output
    lines = lines_that_fit(result.stdout, columns)
    assert lines[-1].endswith("REGRESSION") and any(
        line.startswith("slower: quantized_pooled_lookup, 1") for line in lines
    )


PROGRAM = """\
import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.a_module_that_nobody_knows.of_a_long_name import AClassOfALongNameThatIsNotThereAnyMore
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
"""


@WIDTHS
@pytest.mark.parametrize("options", [[], ["--verbose"], ["--diff"]])
def test_programs_of_long_paths_and_names(
    columns: int, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libcst")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        folder = Path("a_project_of_a_long_name") / f"and_a_package_of_one_too_{number}"
        folder.mkdir(parents=True)
        (folder / "train_a_model_of_a_long_name.py").write_text(PROGRAM)
    result = run("migrate", *options, ".")
    assert result.exit_code == 1, result.output
    if options != ["--diff"]:
        lines_that_fit(result.stdout, columns)
        assert "AClassOfALongNameThatIsNotThereAnyMore" in re.sub(r"\s+", "", result.stdout)
    assert "12 files read" in result.output and "1 missing" in " ".join(result.output.split())
