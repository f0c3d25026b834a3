"""Searches learning rate, width and optimizer of the DLRM example with Optuna, and stops poor trials early.

    python examples/sweep.py --trials 20
    python examples/sweep.py --trials 10 --storage sqlite:///runs/sweep.db     # again: goes on with the same study
    python examples/sweep.py --trials 4 -- --steps 20 --batch-size 256         # options of train.py behind --

Each trial is a run of `dlrm/train.py` in this process. After each epoch a tracker reports its test NE, and a trial that
is worse than the median of the ones before is stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import optuna

sys.path.insert(0, str(Path(__file__).parent / "dlrm"))
train = import_module("train").main
StopTraining = import_module("report").StopTraining


class Pruner:
    """A tracker that tells a trial the test NE of each epoch and ends the run of a trial that is to be pruned."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def start(self, config: Mapping[str, Any], *, step: int, finished_epochs: int) -> None:
        """Nothing to open."""

    def log(self, metrics: Mapping[str, float], *, epoch: int, step: int) -> None:
        """Reports ends of epochs."""
        if "test_ne" in metrics:
            if math.isnan(metrics["test_ne"]):
                raise StopTraining(f"trial {self._trial.number} has no test NE in epoch {epoch}")
            self._trial.report(metrics["test_ne"], epoch)
            if self._trial.should_prune():
                raise StopTraining(f"trial {self._trial.number} is worse than the median in epoch {epoch}")

    def finish(self, final: Mapping[str, float] | None) -> None:
        """Nothing to close."""


def score(trial: optuna.Trial, options: Sequence[str]) -> float:
    """The best test NE of a run with the hyperparameters that the trial draws."""
    drawn = {
        "--lr": trial.suggest_float("lr", 1e-3, 0.3, log=True),
        "--dim": trial.suggest_categorical("dim", [4, 8, 16]),
        "--optimizer": trial.suggest_categorical("optimizer", ["adagrad", "rowwise_adagrad"]),
    }
    argv = [part for name, value in drawn.items() for part in (name, str(value))]
    try:
        # its table, and what to try next
        with contextlib.redirect_stdout(io.StringIO()):
            result = train([*options, *argv], [Pruner(trial)])
    except StopTraining as stop:
        raise optuna.TrialPruned(str(stop)) from None
    best = result["epochs"][result["best_epoch"] - 1]
    trial.set_user_attr("test_auc", best["test_auc"])
    return float(best["test_ne"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="how many runs to add to the study")
    parser.add_argument(
        "--storage", default=None, help="sqlite:///FILE keeps the study, which then goes on; else memory"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("options", nargs="*", help="options of train.py, behind --")
    args = parser.parse_args(argv)
    if args.trials < 1:
        parser.error(f"--trials must be positive, got {args.trials}")
    study = optuna.create_study(
        study_name="dlrm",
        storage=args.storage,
        load_if_exists=True,
        direction="minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=3),
    )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    before = len(study.trials)
    # one that goes on would draw its first trials again
    study.sampler = optuna.samplers.TPESampler(seed=args.seed + before)
    study.optimize(lambda trial: score(trial, args.options), n_trials=args.trials)
    for trial in study.trials[before:]:
        value = "pruned" if trial.value is None or trial.state.name == "PRUNED" else f"test NE {trial.value:.4f}"
        print(f"trial {trial.number}: {value}, {trial.params}")
    if all(trial.state.name != "COMPLETE" for trial in study.trials):
        raise SystemExit("sweep.py: no trial came to its end: none had a test NE")
    print(f"{len(study.trials)} trials, the best is {study.best_trial.number}: test NE {study.best_value:.4f}")
    options = " ".join(f"--{name} {value}" for name, value in study.best_params.items())
    print(f"python examples/dlrm/train.py {options}")


if __name__ == "__main__":
    main()
