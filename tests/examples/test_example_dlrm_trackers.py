"""Trackers of the DLRM example get what its metrics file has, also over a stop; one that fails ends alone.

Its configuration stands beside its checkpoints. Takes most of a minute: wandb starts a process of its own for each run.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from optional import need
from ranks import run_ranks
from test_example_dlrm import example, measured
from test_example_dlrm_resume import Kept, interrupt, train

SMALL = ("--epochs", "2", "--steps", "4", "--batch-size", "256", "--dim", "4", "--log-every", "2", "--device", "cpu")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def options(folder: Path) -> tuple[str, ...]:
    return ("--tensorboard", str(folder / "tensorboard"), "--wandb", "tests")


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run on two ranks that ended after step 16 of 40, six of them past its checkpoint, and went on."""
    need("tensorboard")
    need("wandb")
    folder = tmp_path_factory.mktemp("stopped")
    run_ranks(2, offline, interrupt, folder, 16, *options(folder))
    result = run_ranks(2, offline, train, folder, *options(folder))[0]
    return folder, result


def offline(run: Callable[..., Any], folder: Path, *args: Any) -> Any:
    """In a process of its own."""
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(folder), WANDB_SILENT="true")
    return run(folder, *args)


def points(rows: Iterable[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Every number by its name and step; of one that was told twice the later."""
    return {(name, row["step"]): value for row in rows for name, value in row.items() if name not in ("step", "epoch")}


def curves(folder: Path) -> dict[tuple[str, int], float]:
    """Those of the metrics file, by the names that trackers have for them."""
    rows = lines(folder / "metrics.jsonl")
    group = ["epoch/" if "test_auc" in row else "" for row in rows]
    return {
        (group[n] + name, step): value for n, row in enumerate(rows) for (name, step), value in points([row]).items()
    }


@pytest.mark.ranks
def test_tensorboard_has_the_points_of_the_metrics_file_over_a_stop(stopped_run: tuple[Path, dict[str, Any]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, result = stopped_run
    # two processes of rank 0, and of each that ended well the hyperparameters
    assert len([*(folder / "tensorboard").iterdir()]) == 3
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    wanted = curves(folder)
    for name in {name for name, _ in wanted}:
        scalars = events.Scalars(name)
        steps = [event.step for event in scalars]
        assert steps == sorted({step for tag, step in wanted if tag == name}), name
        # it keeps float32
        assert [event.value for event in scalars] == pytest.approx([wanted[name, step] for step in steps], rel=1e-6)
    final = {
        name.removeprefix("final/"): events.Scalars(name)[-1].value for name in events.Tags()["scalars"] if "/" in name
    }
    best = result["epochs"][result["best_epoch"] - 1]
    assert final["test_ne"] == pytest.approx(best["test_ne"]) and final["epoch"] == best["epoch"]
    assert final["int8_test_auc"] == pytest.approx(result["int8"]["test_auc"])
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    # types that protobuf makes when it is imported
    data = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    hparams = data.FromString(content).session_start_info.hparams
    assert hparams["dim"].number_value == 8 and hparams["optimizer"].string_value == "adagrad"
    assert b"| batch_size | 768 |" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def records(path: Path) -> Iterator[Any]:
    """What an offline run of wandb wrote: records in the log format of LevelDB behind a header of 7 bytes."""
    record = import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        # the last part of a record, or all of it
        if kind in (1, 4):
            yield record.FromString(whole)
            whole = b""


@pytest.mark.ranks
def test_wandb_has_the_points_of_the_metrics_file_over_a_stop(stopped_run: tuple[Path, dict[str, Any]]) -> None:
    folder, result = stopped_run
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    # both processes write the same run, and other ranks none
    name = (folder / "checkpoints" / "wandb_id").read_text().strip()
    assert [path.name for path in files] == [f"run-{name}.wandb"] * 2
    before, after = ([*records(path)] for path in files)
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in [*before, *after] if record.WhichOneof("record_type") == "history"
    ]  # fmt: skip
    told = points({name: value for name, value in row.items() if not name.startswith("_")} for row in rows)
    assert told == curves(folder)
    [run] = [record.run for record in after if record.WhichOneof("record_type") == "run"][:1]
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (run.project, config["dim"], config["optimizer"]) == ("tests", 8, "adagrad")
    summary = {
        item.key or item.nested_key[0]: json.loads(item.value_json)
        for record in after for item in record.summary.update
    }  # fmt: skip
    assert summary["final/test_ne"] == result["epochs"][result["best_epoch"] - 1]["test_ne"]
    exits = [record.exit.exit_code for part in (before, after) for record in part if record.HasField("exit")]
    assert exits == [1, 0]


class Fails(Kept):
    """A tracker whose disk is full from some call on."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__()
        self.method, self.error = method, error

    def start(self, config: Any, **where: Any) -> None:
        self._call("start")

    def log(self, metrics: Any, **where: Any) -> None:
        self._call("log")

    def finish(self, final: Any) -> None:
        self._call("finish")

    def _call(self, method: str) -> None:
        self.told.append((method, None))
        if method == self.method:
            raise self.error


@pytest.mark.parametrize(("method", "calls"), [("start", 1), ("log", 2), ("finish", 8)])
def test_a_tracker_that_fails_ends_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, calls: int
) -> None:
    failing, kept = Fails(method, OSError(28, "No space left on device")), Kept()
    result = example().main([*SMALL, "--metrics", str(tmp_path / "m.jsonl")], [failing, kept])
    assert (
        capsys.readouterr().out.count("warning: Fails gets no more numbers, training goes on: OSError: [Errno 28]") == 1
    )
    # once it failed nobody asks it again: start, four lines and two ends of epochs, finish
    assert len(failing.told) == calls and len(kept.told) == 8
    assert len(result["epochs"]) == 2 and len(lines(tmp_path / "m.jsonl")) == 6


def test_a_tracker_can_end_the_run(tmp_path: Path) -> None:
    stop = example("report").StopTraining("enough")
    failing, kept = Fails("log", stop), Kept()
    with pytest.raises(type(stop), match="enough"):
        example().main([*SMALL, "--metrics", str(tmp_path / "m.jsonl")], [failing, kept])
    # files are closed, and know that the run did not come to its end
    assert [call for call, _ in failing.told] == ["start", "log", "finish"] and kept.told[-1] == ("finish", None)
    assert len(lines(tmp_path / "m.jsonl")) == 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_library_of_a_tracker_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments = example("arguments")
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        arguments.parse("", [f"--{name}", str(tmp_path / "x")])
    assert f'--{name} needs {name}: pip install ".[track]" in a checkout of shardwise' in capsys.readouterr().err


def test_the_configuration_beside_the_checkpoints_is_the_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / 'a "folder"'
    argv = [*SMALL, "--checkpoint-dir", str(folder), "--patience", "1", "--lr", "1e-05"]
    first = example().main([*argv, "--overwrite"])
    saved = folder / "config.toml"
    arguments = example("arguments")
    written = arguments.parse("", ["--config", str(saved)])
    # that it was to overwrite is no part of what it is
    assert written == replace(arguments.parse("", argv), config=saved)
    assert "overwrite" not in saved.read_text() and [path.name for path in folder.glob("*.new")] == []
    again = example().main(["--config", str(saved), "--checkpoint-dir", str(tmp_path / "again")])
    assert measured(again) == measured(first)

    capsys.readouterr()
    with pytest.raises(SystemExit, match="--lr was 1e-05 and is 0.5"):
        example().main([*argv, "--lr", "0.5", "--resume"])
    assert "lr = 1e-05" in saved.read_text()
    example().main([*argv, "--resume"])
    assert "other options" not in capsys.readouterr().out
    example().main([*argv, "--resume", "--epochs", "3", "--patience", "None"])
    told = "resumed with other options: --epochs was 2 and is 3; --patience was 1 and is None\n"
    assert told in capsys.readouterr().out
    assert "epochs = 3\n" in saved.read_text() and "patience" not in saved.read_text()


def test_a_configuration_that_cannot_be_read_is_told_and_does_not_stop_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*SMALL, "--checkpoint-dir", str(tmp_path)]
    example().main([*argv, "--epochs", "1"])
    (tmp_path / "config.toml").write_text("optoin = 3\n")
    result = example().main([*argv, "--resume"])
    assert f"--config {tmp_path / 'config.toml'}: no option 'optoin'" in capsys.readouterr().out
    assert len(result["epochs"]) == 2 and all(math.isfinite(number) for number in measured(result))
    assert example("arguments").parse("", ["--config", str(tmp_path / "config.toml")]).epochs == 2
