"""The sweep of the DLRM example draws, prunes and goes on with the study of a file."""

from __future__ import annotations

import importlib
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from optional import need

TINY = ("--", "--steps", "3", "--epochs", "2", "--batch-size", "256", "--device", "cpu")


def sweep() -> Any:
    need("optuna")
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("sweep")


def test_a_sweep_finds_its_best_trial_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = f"sqlite:///{tmp_path / 'sweep.db'}"
    sweep().main(["--trials", "3", "--storage", storage, *TINY])
    first = capsys.readouterr().out
    scores = [float(text) for text in re.findall(r"^trial \d: test NE ([\d.]+), ", first, re.MULTILINE)]
    assert len(scores) == 3 and f"test NE {min(scores):.4f}\n" in first.split("3 trials, the best is ")[1]
    assert re.search(r"^python examples/dlrm/train\.py --lr \S+ --dim \d+ --optimizer \w+$", first, re.MULTILINE)
    sweep().main(["--trials", "1", "--storage", storage, *TINY])
    again = capsys.readouterr().out
    # it draws others than the trials before
    assert again.startswith("trial 3: ") and again.split("'lr': ")[1].split(",")[0] not in first
    assert "\n4 trials, the best is " in again


def test_a_trial_worse_than_the_median_is_pruned() -> None:
    optuna, module = need("optuna"), sweep()
    study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=1))
    study.enqueue_trial({"lr": 0.05, "dim": 4, "optimizer": "adagrad"})
    study.enqueue_trial({"lr": 0.001, "dim": 4, "optimizer": "adagrad"})
    study.optimize(lambda trial: module.score(trial, TINY[1:]), n_trials=2)
    good, poor = study.trials
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    # it ended after the first of two epochs
    assert list(good.intermediate_values) == [1, 2] and list(poor.intermediate_values) == [1]
    assert good.value == min(good.intermediate_values.values()) < poor.intermediate_values[1]


def test_trials_that_diverge_are_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first trial whose run diverged ended the whole sweep, and a sweep of such trials alone with a traceback."""
    module = sweep()
    told = iter([math.nan, 0.5, math.nan])

    def train(argv: list[str], trackers: list[Any]) -> dict[str, Any]:
        score = next(told)
        trackers[0].log({"test_ne": score}, epoch=1, step=3)
        if math.isnan(score):
            raise SystemExit("train.py: training diverged")
        return {"epochs": [{"test_ne": score, "test_auc": 0.7}], "best_epoch": 1}

    monkeypatch.setattr(module, "train", train)
    storage = ["--storage", f"sqlite:///{tmp_path / 'sweep.db'}"]
    with pytest.raises(SystemExit, match=r"sweep.py: no trial came to its end"):
        module.main(["--trials", "1", *storage])
    module.main(["--trials", "2", *storage])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[:3]] == [
        "trial 0: pruned",
        "trial 1: test NE 0.5000",
        "trial 2: pruned",
    ]
    assert lines[3] == "3 trials, the best is 1: test NE 0.5000"
