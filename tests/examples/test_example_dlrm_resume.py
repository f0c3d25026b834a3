"""The DLRM example loses nothing: killed and restarted, at the same or another number of ranks, with any pipeline.

Takes most of a minute: each claim is a run of the example that stops, and one that goes on.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import pytest
from checkout import ROOT
from fsspec.implementations.local import LocalFileSystem
from ranks import run_ranks
from test_example_dlrm import example, measured

from shardwise import checkpoint
from shardwise.perf.evidence.soak import workers_of

# a line of metrics every 4 steps, a checkpoint every 6: neither divides an epoch or the other
TRAIN = ("--epochs", "2", "--steps", "20", "--batch-size", "768", "--dim", "8", "--log-every", "4")
TRAIN += ("--checkpoint-every", "6", "--device", "cpu")
TIMES = ("samples_per_s", "seconds")


class Interrupted(Exception):
    """Stands for what ends a process in the middle of an epoch."""


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def start(self, config: dict[str, Any], *, step: int, finished_epochs: int) -> None:
        self.told.append(("start", {**config, "step": step, "finished_epochs": finished_epochs}))

    def log(self, metrics: dict[str, float], *, epoch: int, step: int) -> None:
        self.told.append(("log", {**metrics, "epoch": epoch, "step": step}))

    def finish(self, final: dict[str, float] | None) -> None:
        self.told.append(("finish", final))


def train(folder: Path, *argv: str, trackers: Any = ()) -> dict[str, Any]:
    saved = () if "--checkpoint-dir" in argv else ("--checkpoint-dir", str(folder / "checkpoints"))
    places = (*saved, "--metrics", str(folder / "metrics.jsonl"), "--resume")
    result: dict[str, Any] = example().main([*TRAIN, *places, *argv], trackers)
    return result


def lines(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics, without times."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in read]


def interrupt(folder: Path, stop: int, *argv: str) -> None:
    """Trains up to the line of metrics at or after step `stop`, where every rank's run ends."""
    report = example("report").Report
    write_line = report.write

    def write(self: Any, numbers: dict[str, float], *, epoch: int, step: int) -> None:
        write_line(self, numbers, epoch=epoch, step=step)
        if step >= stop:
            raise Interrupted

    report.write = write
    try:
        with pytest.raises(Interrupted):
            train(folder, *argv)
    finally:
        report.write = write_line


class Folders(LocalFileSystem):  # type: ignore[misc]
    """A store that all processes of this machine see: folders://, since file:// is a path."""

    protocol = "folders"


def with_folders(run: Callable[..., Any], folder: Path, *args: Any) -> Any:
    """In a process of its own, which has that store."""
    fsspec.register_implementation("folders", Folders, clobber=True)
    return run(folder, *args)


def resumed(world_size: int, folder: Path, step: int, *argv: str) -> dict[str, Any]:
    """What rank 0 gives of a run that ended at `step` and goes on with another process group."""
    run_ranks(world_size, interrupt, folder, step, *argv)
    return run_ranks(world_size, train, folder, *argv)[0]


Run = tuple[dict[str, Any], list[dict[str, float]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """What a run at a number of ranks gives and writes without a stop."""

    @cache
    def at(world_size: int, *argv: str) -> Run:
        folder = tmp_path_factory.mktemp("undisturbed")
        return run_ranks(world_size, train, folder, *argv)[0], lines(folder)

    return at


# before the first checkpoint, within an epoch, at its end, within the second
@pytest.mark.ranks
@pytest.mark.parametrize("step", [4, *(pytest.param(n, marks=pytest.mark.full) for n in (16, 20, 32))])
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_run_that_stops_and_resumes_is_the_run_that_did_not(
    tmp_path: Path, undisturbed: Callable[..., Run], step: int, world_size: int
) -> None:
    wanted, written = undisturbed(world_size)
    resumed_run = resumed(world_size, tmp_path, step)
    assert measured(resumed_run) == measured(wanted)
    assert [epoch["steps"] for epoch in resumed_run["epochs"]] == [20, 20]
    assert lines(tmp_path) == written


@pytest.mark.ranks
def test_a_run_whose_checkpoints_are_in_a_store_resumes_to_the_same_bits(
    tmp_path: Path, undisturbed: Callable[..., Run]
) -> None:
    wanted, written = undisturbed(2)
    argv = ("--checkpoint-dir", f"folders://{tmp_path}/store")
    run_ranks(2, with_folders, interrupt, tmp_path, 16, *argv)
    resumed_run = run_ranks(2, with_folders, train, tmp_path, *argv)[0]
    assert measured(resumed_run) == measured(wanted)
    assert lines(tmp_path) == written
    # the options lie beside the checkpoints, and the best epoch's below
    assert {"config.toml", "best"} < {path.name for path in (tmp_path / "store").iterdir()}


@pytest.mark.ranks
def test_a_store_that_is_not_there_is_told_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"train\.py: nowhere://x: .*nowhere"):
        run_ranks(2, train, tmp_path, "--checkpoint-dir", "nowhere://x")


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("pipeline", ["base", "sparse_dist", "prefetch"])
def test_a_pipeline_resumes_to_the_same_bits(tmp_path: Path, undisturbed: Callable[..., Run], pipeline: str) -> None:
    wanted, written = undisturbed(2)
    resumed_run = resumed(2, tmp_path, 16, "--pipeline", pipeline, "--checkpoint-async")
    assert measured(resumed_run) == measured(wanted)
    assert lines(tmp_path) == written


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), *(pytest.param(*ranks, marks=pytest.mark.full) for ranks in ((1, 2), (2, 3), (4, 2), (3, 4)))],
)
def test_another_number_of_ranks_continues_with_the_same_data(
    tmp_path: Path, undisturbed: Callable[..., Run], before: int, after: int
) -> None:
    """Fault 39: another world size on resume."""
    _, written = undisturbed(1)
    run_ranks(before, interrupt, tmp_path, 16)
    run_ranks(after, train, tmp_path)
    resumed_lines = lines(tmp_path)
    assert [list(line) for line in resumed_lines] == [list(line) for line in written]
    for line, other in zip(resumed_lines, written, strict=True):
        assert line == pytest.approx(other, abs=1e-5 if "loss" in other else 2e-4)


@pytest.mark.ranks
def test_a_finished_run_that_is_resumed_reports_again(tmp_path: Path, undisturbed: Callable[..., Run]) -> None:
    wanted, written = undisturbed(1)
    run_ranks(1, train, tmp_path)
    again = run_ranks(1, train, tmp_path)[0]
    assert measured(again) == measured(wanted)
    assert lines(tmp_path) == written


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--batch-size", "96"), "batch_size was 768 and is 96"),
        (("--seed", "1"), "--seed was 0 and is 1"),
        (("--lr", "0.5"), "--lr was 0.02 and is 0.5"),
        (("--steps", "10"), "--steps was 20 and is 10"),
    ],
)
def test_a_run_with_other_settings_does_not_resume(tmp_path: Path, change: tuple[str, ...], message: str) -> None:
    run_ranks(1, train, tmp_path, "--epochs", "1")
    assert message in run_ranks(1, refusal, tmp_path, *change, "--resume")[0]


@pytest.mark.ranks
def test_checkpoints_of_another_run_are_not_overwritten(tmp_path: Path) -> None:
    run_ranks(1, train, tmp_path, "--epochs", "1")
    message = run_ranks(1, refusal, tmp_path)[0]
    choices = "pass --resume, --overwrite or another --checkpoint-dir"
    refused = f"train.py: {tmp_path / 'checkpoints'} holds checkpoints: {choices}"
    assert message == refused
    # one of the best epoch alone: a run that kept its own beside it would have two best ones
    for path in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    assert run_ranks(1, refusal, tmp_path)[0] == refused


def refusal(folder: Path, *argv: str) -> str:
    """What the run says as it ends; SystemExit itself would end the process of the rank."""
    with pytest.raises(SystemExit) as stopped:
        example().main([*TRAIN, "--checkpoint-dir", str(folder / "checkpoints"), *argv])
    return str(stopped.value)


def with_tracker(folder: Path) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    kept = Kept()
    return kept.told, train(folder, trackers=[kept])


@pytest.mark.ranks
def test_a_tracker_is_told_what_the_file_has_on_rank_0_alone(tmp_path: Path, undisturbed: Callable[..., Run]) -> None:
    _, written = undisturbed(2)
    (told, result), (others, _) = run_ranks(2, with_tracker, tmp_path)
    assert others == [] and [what for what, _ in told] == ["start", *["log"] * len(written), "finish"]
    logged = [{name: value for name, value in line.items() if name not in TIMES} for _, line in told[1:-1]]
    assert logged == written
    config, final = told[0][1], told[-1][1]
    assert (config["dim"], config["step"], config["finished_epochs"]) == (8, 0, 0)
    best = result["epochs"][result["best_epoch"] - 1]
    assert final == {
        **{name: best[name] for name in ("epoch", "train_loss", "test_auc", "test_ne")},
        "int8_test_auc": result["int8"]["test_auc"], "int8_test_ne": result["int8"]["test_ne"],
    }  # fmt: skip


@pytest.mark.ranks
def test_lines_of_metrics_mean_over_all_steps_since_the_last(undisturbed: Callable[..., Run]) -> None:
    """40 steps in lines of 4: their mean is the mean of the epochs."""
    result, written = undisturbed(1)
    losses = [line["loss"] for line in written if "loss" in line]
    assert [line["step"] for line in written if "loss" in line] == list(range(4, 44, 4))
    assert math.fsum(losses) / 10 == pytest.approx(math.fsum(e["train_loss"] for e in result["epochs"]) / 2, rel=1e-12)


def test_a_line_cut_short_and_lines_beyond_the_checkpoint_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"epoch": 1, "step": 4}, {"epoch": 1, "step": 8, "test_auc": 0.5}, {"epoch": 2, "step": 12}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"epoch": 2, "st')
    cut = example("report").cut_lines
    # the checkpoint of the end of an epoch is one before or one after its evaluation
    for step, finished, kept in [(12, 1, 3), (8, 1, 2), (8, 0, 1), (4, 0, 1), (0, 0, 0)]:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"epoch": 2, "st')
        cut(path, step, finished)
        assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:kept]


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the processes of the ranks in /proc")
def test_a_killed_rank_under_torchrun_ends_with_the_bits_of_the_undisturbed_run(
    tmp_path: Path, undisturbed: Callable[..., Run]
) -> None:
    """Fault 39 and the restart of torchrun: one of two ranks gets SIGKILL once there is a checkpoint."""
    # long enough to be killed before it ends
    longer = ("--epochs", "6")
    wanted, written = undisturbed(2, *longer)
    script = str(ROOT / "examples" / "dlrm" / "train.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    command += ["--monitor-interval=0.1", script, *TRAIN, *longer]
    command += ["--resume", "--json", str(tmp_path / "result.json")]
    command += ["--checkpoint-dir", str(tmp_path / "checkpoints"), "--metrics", str(tmp_path / "metrics.jsonl")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (tmp_path / "log").open("w+") as log:
        run = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=ROOT)
        try:
            victim = None
            while run.poll() is None:
                time.sleep(0.02)
                if victim is None and checkpoint.latest(tmp_path / "checkpoints") is not None:
                    victim = workers_of(run.pid, script)[1]
                    os.kill(victim, signal.SIGKILL)
        finally:
            for pid in workers_of(run.pid, script):
                os.kill(pid, signal.SIGKILL)
            run.kill()
        log.seek(0)
        output = log.read()
    assert run.returncode == 0, output
    assert "resumed at step" in output
    assert "may hang" not in output
    assert measured(json.loads((tmp_path / "result.json").read_text())) == measured(wanted)
    assert lines(tmp_path) == written


@pytest.mark.parametrize(
    ("shared", "restarts", "warns"), [("True", "3", True), ("True", "0", False), ("False", "3", False)]
)
def test_a_store_that_outlives_its_workers_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shared: str, restarts: str, warns: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    example().main(["--epochs", "1", "--steps", "1", "--batch-size", "4096", "--dim", "4", "--device", "cpu"])
    assert ("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capsys.readouterr().out) == warns
