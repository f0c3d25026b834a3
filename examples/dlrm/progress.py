"""Progress of a run, what a checkpoint of it keeps besides the weights, and how a run goes on from one.

A checkpoint says which batch comes next (`shardwise.data.Position`), so a run that goes on sees the batches that it
would have seen, at any number of ranks. Nothing is drawn at random once the weights are initialised, so there is no
random state to keep; a model with dropout would keep `torch.get_rng_state()` of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from arguments import Options, as_toml, differences, read_toml
from beside import folder_of, read, write
from torch import Tensor

from shardwise import CombinedOptimizer, DistributedModelParallel, checkpoint
from shardwise.data import Position, Source, restore_position

T = TypeVar("T")

# so many lines of metrics are remembered for the page; of more, every second one
HISTORY = 600
# in the folder of checkpoints: the options of the run, for --config
CONFIG = "config.toml"
# options that make another model or another order of batches: a run cannot go on with others
SETTINGS = ("steps", "dim", "optimizer", "lr", "seed")


def kept_checkpoints(folder: Path | Any) -> list[Path | Any]:
    """Those of a run's steps, and of its best epoch."""
    return [*checkpoint.steps(folder), *checkpoint.steps(folder / "best")]


def seen_by_rank_0(look: Callable[[], T]) -> T:
    """What rank 0 finds in the file system or store, on all ranks, so that all do the same; SystemExit if it cannot."""
    seen: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            seen[0] = look()
        # a store that does not answer, is not known, or whose library is missing
        except (OSError, ValueError, ImportError) as error:
            seen[1] = f"train.py: {error}"
    dist.broadcast_object_list(seen)
    if seen[1] is not None:
        raise SystemExit(seen[1])
    return cast(T, seen[0])


def require_no_checkpoints(args: Options) -> None:
    """SystemExit on all ranks where there are some that the arguments neither resume nor give up."""
    folder = folder_of(args)
    if folder is None or args.resume or args.overwrite:
        return
    if seen_by_rank_0(lambda: kept_checkpoints(folder)):
        choices = "pass --resume, --overwrite or another --checkpoint-dir"
        raise SystemExit(f"train.py: {folder} holds checkpoints: {choices}")


@dataclass
class Progress:
    """Where a run stands: `step` counts over all epochs, the others but `epochs` are of the current epoch."""

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    # sums of the steps' losses, in the epoch and since the last line of metrics
    epoch_loss: float = 0.0
    line_loss: float = 0.0
    line_steps: int = 0
    # spent training, not saving or evaluating
    seconds: float = 0.0
    # of them those of steps past a process's first ones, which are slow, and how many steps these are
    timed_seconds: float = 0.0
    timed_steps: int = 0
    line_seconds: float = 0.0
    line_timed_steps: int = 0
    # the results of each finished epoch
    epochs: list[dict[str, float]] = field(default_factory=list)
    # step, mean loss, samples a second of lines of metrics; the speed is None where none was timed
    history: list[tuple[int, float, float | None]] = field(default_factory=list)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Progress:
        """What `to_json` gave."""
        progress = cls(**_each(content, lambda number: float(number) if isinstance(number, str) else number))
        progress.history = [(step, loss, rate) for step, loss, rate in progress.history]
        return progress

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it: losses that are no numbers, of a run that diverged, as text."""

        def spelled(number: Any) -> Any:
            return str(number) if isinstance(number, float) and not math.isfinite(number) else number

        kept: dict[str, Any] = _each(asdict(self), spelled)
        return kept

    def advance(self) -> None:
        """One more step is trained."""
        self.step += 1
        self.epoch_step += 1
        self.line_steps += 1

    def gather(self, rank_sum: Tensor, *, seconds: float, timed_seconds: float, timed_steps: int) -> None:
        """Adds the mean over ranks of the sums of losses that each rank has and sets this rank's back to 0.

        `seconds` were spent on these steps, `timed_seconds` of them on `timed_steps` steps past the warm-up. Sums of
        float32 losses are exact in float64, so how often this is called does not change a digit.
        """
        dist.all_reduce(rank_sum)
        mean = float(rank_sum) / dist.get_world_size()
        rank_sum.zero_()
        self.epoch_loss += mean
        self.line_loss += mean
        self.seconds += seconds
        self.timed_seconds += timed_seconds
        self.timed_steps += timed_steps
        self.line_seconds += timed_seconds
        self.line_timed_steps += timed_steps

    def end_line(self, batch_size: int) -> float:
        """The mean loss since the last line of metrics, which is kept in `history`."""
        mean = self.line_loss / self.line_steps
        rate = self.line_timed_steps * batch_size / self.line_seconds if self.line_timed_steps else None
        self.line_loss, self.line_steps = 0.0, 0
        self.line_seconds, self.line_timed_steps = 0.0, 0
        self.history.append((self.step, mean, rate))
        if len(self.history) > HISTORY:
            # a run may be long, and a checkpoint holds this
            self.history = self.history[1::2]
        return mean

    def end_epoch(self, result: dict[str, float]) -> None:
        """Keeps the result of the epoch, and the next one begins."""
        self.epochs.append(result)
        self.epoch += 1
        self.epoch_step = 0
        self.epoch_loss = self.seconds = self.timed_seconds = 0.0
        self.timed_steps = 0

    def samples_per_s(self, batch_size: int) -> float:
        """Of this epoch so far, without a process's first steps, unless there were no others."""
        if self.timed_steps:
            return self.timed_steps * batch_size / self.timed_seconds
        return self.epoch_step * batch_size / self.seconds


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` of each number within it."""
    if isinstance(value, dict):
        return {name: _each(entry, change) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_each(entry, change) for entry in value]
    return change(value)


class Checkpoints:
    """Saves to `--checkpoint-dir` and resumes from it; without that option does nothing."""

    def __init__(
        self, args: Options, source: Source, model: DistributedModelParallel, optimizer: CombinedOptimizer
    ) -> None:
        self._args = args
        self._source = source
        self._model = model
        self._optimizer = optimizer
        self._saving: checkpoint.Saving | None = None
        self._saved_step: int | None = None
        # of an earlier run, by --overwrite; on rank 0
        self.removed = 0

    def resume(self) -> Progress:
        """Loads the latest checkpoint into model and optimizer; where there is none, the start."""
        folder = folder_of(self._args)
        if folder is None:
            return Progress()
        if not self._args.resume:
            if self._args.overwrite and dist.get_rank() == 0:
                for path in kept_checkpoints(folder):
                    checkpoint.remove(path)
                    self.removed += 1
            # nobody saves there before all is gone
            dist.barrier()
            return Progress()
        latest = seen_by_rank_0(lambda: checkpoint.latest(folder))
        if latest is None:
            return Progress()
        try:
            extra = checkpoint.load(latest, self._model, self._optimizer).extra
        except ValueError as error:
            # damaged, or of another model
            raise SystemExit(f"train.py: {error}") from None
        settings = self._settings()
        differ = [name for name in SETTINGS if extra["settings"][name] != settings[name]]
        if differ:
            listed = "; ".join(f"--{name} was {extra['settings'][name]} and is {settings[name]}" for name in differ)
            raise SystemExit(f"train.py: {latest} cannot be resumed with other settings: {listed}")
        try:
            restore_position(extra["position"], self._source, self._args.batch_size)
        except ValueError as error:
            raise SystemExit(f"train.py: {latest}: {error}") from None
        progress = Progress.from_json(extra["progress"])
        self._saved_step = progress.step
        return progress

    def record_options(self, *, resumed: bool) -> str | None:
        """Rank 0 writes the options beside the checkpoints; of a run that goes on, which were others before."""
        folder = folder_of(self._args)
        if folder is None or dist.get_rank() != 0:
            return None
        path, notice = folder / CONFIG, None
        try:
            before = read(path) if resumed else None
            if before is not None:
                changed = differences(Options(**read_toml(before, path)), self._args)
                notice = f"resumed with other options: {'; '.join(changed)}" if changed else None
        except (OSError, ValueError) as error:
            notice = str(error)
        try:
            write(path, as_toml(self._args))
        except (OSError, UnicodeError) as error:
            # a checkpoint has what resuming needs
            notice = f"the options are not written beside the checkpoints: {error}"
        return notice

    def due(self, step: int) -> bool:
        every = self._args.checkpoint_every
        return self._args.checkpoint_dir is not None and every is not None and step % every == 0

    def save(self, progress: Progress) -> None:
        """Saves, unless this step is saved already: the end of an epoch may be a step that was due."""
        if self._args.checkpoint_dir is None or self._saved_step == progress.step:
            return
        self.finish()
        position = Position.of(self._source, self._args.batch_size, epoch=progress.epoch, step=progress.epoch_step)
        extra = {
            "position": position.to_json(),
            "settings": self._settings(),
            "progress": progress.to_json(),
            # which column is what, for whoever serves the model
            "dense": list(self._source.dense_names),
        }
        self._saving = checkpoint.save(
            self._args.checkpoint_dir,
            self._model,
            self._optimizer,
            step=progress.step,
            extra=extra,
            keep_last=self._args.keep_last,
            asynchronous=self._args.checkpoint_async,
        )
        self._saved_step = progress.step

    def finish(self) -> None:
        """Waits until the checkpoint that is being written is complete."""
        if self._saving is not None:
            self._saving.wait()
            self._saving = None

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self._args, name) for name in SETTINGS}
