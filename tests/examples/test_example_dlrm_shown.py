"""What a run of the DLRM example shows while it works, which epoch it ends with, and how its errors are told.

Takes 40 s: torchrun and its ranks are started for each error, as users start them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from ranks import run_ranks
from test_example_dlrm import example, train

from shardwise import checkpoint
from shardwise.data import Clicks, Criteo
from shardwise.kernels import numba_loops

SMALL = ("--epochs", "4", "--steps", "4", "--batch-size", "256", "--dim", "4", "--device", "cpu")


def scores(*nes: float) -> list[dict[str, float]]:
    return [{"test_ne": ne} for ne in nes]


@pytest.mark.parametrize(
    ("nes", "best"),
    [
        ((0.9, 0.8, 0.85), 1), ((0.9, 0.8, 0.8), 1), ((0.7,), 0), ((float("nan"), 0.9, float("nan")), 1),
        ((float("nan"), float("nan")), 1),
    ],
)  # fmt: skip
def test_the_best_epoch_is_the_first_of_the_lowest_ne(nes: tuple[float, ...], best: int) -> None:
    assert example("best").best_epoch(scores(*nes)) == best


def overfitted(folder: Path | None, *argv: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A run whose second epoch is said to be the best, and what it exports."""
    training = example("training")
    evaluate = training.evaluate
    entropies = iter([0.9, 0.5, 0.6, 0.7])
    training.evaluate = lambda *args: replace(evaluate(*args), ne=next(entropies))
    try:
        places = [] if folder is None else ["--checkpoint-dir", str(folder)]
        seen: dict[str, torch.Tensor] = {}
        quantize = training.quantize

        def kept(*args: Any) -> Any:
            served, weights = quantize(*args)
            seen.update(weights)
            return served, weights

        training.quantize = kept
        try:
            return example().main([*SMALL, *places, *argv]), seen
        finally:
            training.quantize = quantize
    finally:
        training.evaluate = evaluate


@pytest.mark.ranks
@pytest.mark.parametrize("saves", [False, True])
def test_a_run_ends_with_the_weights_of_its_best_epoch(tmp_path: Path, saves: bool) -> None:
    (result, weights), (_, others) = run_ranks(2, overfitted, tmp_path / "all" if saves else None)
    assert result["best_epoch"] == 2 and len(result["epochs"]) == 4
    run_ranks(2, train, *SMALL, "--epochs", "2", "--checkpoint-dir", str(tmp_path / "two"))
    path = checkpoint.latest(tmp_path / "two")
    assert path is not None
    wanted = checkpoint.full_state_dict(path)
    assert weights.keys() == others.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(weights[name], tensor) and torch.equal(others[name], tensor), name
    if saves:
        assert checkpoint.full_state_dict(tmp_path / "all" / "best" / path.name).keys() == wanted.keys()


@pytest.mark.ranks
def test_patience_ends_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    ((result, _),) = run_ranks(1, overfitted, None, "--patience", "1")
    assert [epoch["epoch"] for epoch in result["epochs"]] == [1, 2, 3] and result["best_epoch"] == 2


@pytest.mark.ranks
def test_a_demo_overwrites_the_checkpoints_of_the_one_before(tmp_path: Path) -> None:
    options = (*SMALL, "--checkpoint-dir", str(tmp_path), "--overwrite")
    run_ranks(1, train, *options)
    run_ranks(1, train, *options, "--epochs", "1", "--lr", "0.5")
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-000000000004"]
    assert [path.name for path in checkpoint.steps(tmp_path / "best")] == ["step-000000000004"]
    again = run_ranks(1, train, *options, "--epochs", "2", "--lr", "0.5", "--resume")[0]
    assert [epoch["epoch"] for epoch in again["epochs"]] == [1, 2]


def test_speeds_leave_the_first_steps_of_a_process_out() -> None:
    training, progress = example("training"), example("progress").Progress()
    clock = training.Clock()
    total = torch.zeros((), dtype=torch.float64)
    clock.start()
    for step in range(8):
        time.sleep(0.1 if step == 0 else 0.002)
        progress.advance()
        assert clock.advance() == (step == training.WARM_UP_STEPS - 1)
    looked = clock.look()
    assert looked["timed_steps"] == 3 and looked["timed_seconds"] < 0.1 < looked["seconds"]
    progress.seconds, progress.timed_seconds, progress.timed_steps = 10.0, 1.0, 3
    assert progress.samples_per_s(100) == 300
    # a run that has no other steps is told by what it has
    progress.timed_steps = 0
    assert progress.samples_per_s(100) == 80
    assert float(total) == 0


class Loops:
    """How many loops a process has called for the first time, compiled or loaded."""

    def __init__(self) -> None:
        from shardwise.kernels.cpu import njit

        self._before, self._njit = len(njit._dispatchers), njit

    def __call__(self) -> int:
        return len(self._njit._dispatchers) - self._before


def first_calls() -> tuple[int, int, set[str]]:
    """Loops that were called for the first time before training, and in it and after; files of loops imported then."""
    training, loops = example("training"), Loops()
    compile_loops, seen = training.compile_loops, {}

    def files() -> set[str]:
        return {name for name in sys.modules if name.startswith("shardwise.kernels.cpu.") and name.endswith("_loops")}

    def compiled(*args: Any) -> str:
        notice: str = compile_loops(*args)
        seen.update(calls=loops(), files=files())
        return notice

    training.compile_loops = compiled
    try:
        train(*SMALL, "--epochs", "1")
    finally:
        training.compile_loops = compile_loops
    return seen["calls"], loops(), files() - seen["files"]


@pytest.mark.ranks
@pytest.mark.skipif(not numba_loops.compiles(), reason="numba compiles nothing here")
@pytest.mark.parametrize("world_size", [1, 2])
def test_no_loop_is_compiled_once_training_has_begun(world_size: int) -> None:
    """36 of the first seconds of a demo were steps that waited for numba, counted as slow steps."""
    for before, after, files in run_ranks(world_size, first_calls):
        assert (after - before, files) == (0, set())


def test_ranks_of_a_machine_share_the_loops() -> None:
    owner = example("compiling")._owner
    assert [owner(number, 1) for number in range(3)] == [0, 0, 0]
    assert [owner(number, 2) for number in range(3)] == [0, 1, 1]
    assert [owner(number, 4) for number in range(3)] == [0, 1, 2]


def test_a_log_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = example("terminal")
    monkeypatch.setattr(terminal, "QUIET_S", 0.2)
    with terminal.Terminal(active=True) as shown, shown.doing("counting sheep"):
        time.sleep(0.7)
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 4 and set(lines) <= {"  counting sheep: 0 s", "  counting sheep: 1 s"}
    with terminal.Terminal(active=False) as shown, shown.doing("counting sheep"):
        shown.say("one")
        time.sleep(0.4)
    assert capsys.readouterr().out == ""


def test_a_bar_knows_its_total_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = example("terminal")
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    bar = terminal.Bar(1000, lambda done, text: None)
    bar.phase("epoch 1/2")
    bar.at(5)
    # nothing is known before the warm-up is over
    assert bar.text() == "epoch 1/2, step 5 of 1,000 (0%)"
    bar.restart_clock()
    now[0] = 110.0
    bar.at(105)
    bar.numbers(0.51, 12345.6)
    # 100 steps in 10 s, 895 to go
    assert bar.text() == "epoch 1/2, step 105 of 1,000 (10%), loss 0.5100, 12,346 samples/s, 1 min 30 s left"


def test_choices_of_options_are_what_there_is() -> None:
    arguments = example("arguments")
    assert tuple(example("model").OPTIMIZERS) == arguments.OPTIMIZERS
    assert tuple(example("training").PIPELINES) == arguments.PIPELINES


def test_arguments_are_refused_before_torch_is_imported() -> None:
    code = "import sys; sys.argv[1:] = ['--lr', 'x']; sys.path.insert(0, 'examples/dlrm'); import train"
    code += "\ntry: train.main()\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n" and done.stderr.count("\n") == 1


def torchrun(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["--monitor-interval=0.1", str(ROOT / "examples" / "dlrm" / "train.py"), *argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


def root_cause(done: subprocess.CompletedProcess[str]) -> str:
    """What torchrun's report has of the rank that failed first."""
    assert done.returncode != 0, done.stdout
    return done.stderr.split("Root Cause (first observed failure):")[1]


@pytest.mark.ranks
def test_the_error_of_a_rank_stands_in_the_report_of_torchrun(tmp_path: Path) -> None:
    """It said "To enable traceback see", and the error was lines above, among those of the others."""
    good = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))])
    # rank 1 takes the second half of a batch of 6
    (tmp_path / "day_0.tsv").write_text("\n".join([*[good] * 4, "bad", *[good] * 15]) + "\n")
    done = torchrun("--data", str(tmp_path), "--epochs", "1", "--batch-size", "6", "--dim", "4")
    cause = root_cause(done)
    assert "rank      : 1" in cause
    assert f"traceback : train.py: {tmp_path / 'day_0.tsv'}:5: 1 columns, expected 40" in cause
    assert "Traceback" not in done.stderr.split("FAILED")[-1]


@pytest.mark.ranks
def test_bad_arguments_are_told_once_and_in_the_report_of_torchrun() -> None:
    done = torchrun("--batch-size", "511")
    assert done.stderr.startswith("train.py: error: --batch-size 511 cannot be shared equally by 2 ranks: pass 512")
    assert done.stderr.count("(--help lists the options)") == 1
    assert "traceback : train.py: error: --batch-size 511" in root_cause(done)


def test_a_library_that_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("raise ModuleNotFoundError('No module named safetensors')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    script = str(ROOT / "examples" / "dlrm" / "train.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("train.py: No module named safetensors. What it needs comes with")
    assert "Traceback" not in done.stderr


def test_sources_know_how_many_samples_they_have(tmp_path: Path) -> None:
    """The bar had no total, since nobody asked the data for its size."""
    assert Clicks(0, train_samples=1000).train_samples == 1000
    # every tenth line is for evaluation
    (tmp_path / "day_0.tsv").write_text("a line\n" * 25)
    assert Criteo(tmp_path).train_samples == 23
