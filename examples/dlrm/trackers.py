"""Trackers of others: TensorBoard and Weights & Biases.

Both get the names, steps and values of `--metrics`; what stands in its lines of ends of epochs is in a group `epoch/`,
since the speed of an epoch and that of its last steps are two curves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from arguments import Options
from beside import folder_of, read, write
from report import JsonLines, Tracker

# in the folder of checkpoints: which run of Weights & Biases goes on
WANDB_ID = "wandb_id"


def trackers_of(options: Options) -> list[Tracker]:
    """Those that the options name."""
    trackers: list[Tracker] = []
    if options.metrics is not None:
        trackers.append(JsonLines(options.metrics))
    if options.tensorboard is not None:
        trackers.append(TensorBoard(options.tensorboard))
    if options.wandb is not None:
        folder = folder_of(options)
        trackers.append(WeightsAndBiases(options.wandb, None if folder is None else folder / WANDB_ID))
    return trackers


def grouped(metrics: Mapping[str, float]) -> dict[str, float]:
    """The numbers, those of the end of an epoch by names of their own."""
    ends_epoch = "test_auc" in metrics
    return {f"epoch/{name}" if ends_epoch else name: value for name, value in metrics.items() if name != "epoch"}


class TensorBoard:
    """`--tensorboard`: scalars with their steps, the options as text, and at the end both as hyperparameters.

    A run that goes on hides what lies beyond its checkpoint, by `purge_step`; one that starts anew hides what an
    earlier one left in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config: dict[str, Any] = {}
        self._writer: Any = None

    def start(self, config: Mapping[str, Any], *, step: int, finished_epochs: int) -> None:
        """Opens a file of events."""
        from torch.utils.tensorboard import SummaryWriter

        self._config = {name: value for name, value in config.items() if value is not None}
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)
        rows = [f"| {name} | {value} |" for name, value in self._config.items()]
        self._writer.add_text("config", "\n".join(["| option | value |", "|---|---|", *rows]), step)
        self._writer.flush()

    def log(self, metrics: Mapping[str, float], *, epoch: int, step: int) -> None:
        """Writes the numbers as scalars."""
        for name, value in grouped(metrics).items():
            self._writer.add_scalar(name, value, step)
        # on its way to the disk before the checkpoint of its step is
        self._writer.flush()

    def finish(self, final: Mapping[str, float] | None) -> None:
        """Writes the final numbers beside the hyperparameters."""
        if final is not None:
            metrics = {f"final/{name}": value for name, value in final.items()}
            # a name of its own would be another run
            self._writer.add_hparams(self._config, metrics, run_name=".")
        self._writer.close()


class WeightsAndBiases:
    """`--wandb`: a run of that project, offline with WANDB_MODE=offline.

    `id_file` has the run's id, so that a process that goes on from a checkpoint goes on with the run, too. Numbers are
    drawn over our `step`, not over the count of calls: what comes again after a kill comes to the same places.
    """

    def __init__(self, project: str, id_file: Path | Any) -> None:
        self._project, self._id_file = project, id_file
        self._run: Any = None

    def start(self, config: Mapping[str, Any], *, step: int, finished_epochs: int) -> None:
        """Begins a run, or goes on with one."""
        import wandb

        name = uuid4().hex[:8]
        before = None if step == 0 or self._id_file is None else read(self._id_file)
        if before is not None:
            name = before.decode().strip()
        elif self._id_file is not None:
            write(self._id_file, f"{name}\n".encode())
        resume = None if before is None else "allow"
        self._run = wandb.init(project=self._project, id=name, resume=resume, config=dict(config))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], *, epoch: int, step: int) -> None:
        """Sends the numbers."""
        self._run.log({**grouped(metrics), "epoch": epoch, "step": step})

    def finish(self, final: Mapping[str, float] | None) -> None:
        """Puts the final numbers into the run's summary."""
        if final is not None:
            self._run.summary.update({f"final/{name}": value for name, value in final.items()})
        self._run.finish(exit_code=int(final is None))
