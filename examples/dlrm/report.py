"""Reports of a training run while it runs: a bar, lines of JSON in a file, and a logger such as TensorBoard's."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from terminal import Bar

from shardwise.untrusted import read_text


class Logger(Protocol):
    """Where numbers of a run go besides: `torch.utils.tensorboard.SummaryWriter` fits."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object: ...


class Report:
    """Rank 0's bar, metrics file and logger; on other ranks, where `active` is False, nothing.

    Each line of the file is an object with `epoch`, `step` (over all epochs) and the numbers of that moment; the line
    that ends an epoch has `test_auc`. A run that goes on from a checkpoint cuts the lines beyond it, which it will
    write again, and appends; one that starts anew starts the file anew.
    """

    def __init__(
        self, path: Path | None, logger: Logger | None, bar: Bar, *, active: bool, step: int, finished_epochs: int
    ) -> None:
        self.bar = bar
        self._logger = logger if active else None
        self._lines = None
        if path is not None and active:
            cut_lines(path, step, finished_epochs)
            self._lines = path.open("a", encoding="utf-8")

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lines is not None:
            self._lines.close()

    def write(self, numbers: Mapping[str, float], *, epoch: int, step: int) -> None:
        """Tells the file and the logger, and the bar where there is a loss."""
        if "loss" in numbers:
            self.bar.numbers(numbers["loss"], numbers["samples_per_s"], numbers.get("hit_rate"))
        if self._lines is not None:
            line = {"epoch": epoch, "step": step, **numbers}
            self._lines.write(json.dumps(without_nan(line)) + "\n")
            # a line is on its way to the disk before the checkpoint of its step is
            self._lines.flush()
        if self._logger is not None:
            for tag, value in numbers.items():
                self._logger.add_scalar(tag, value, step)


def cut_lines(path: Path, step: int, finished_epochs: int) -> None:
    """Leaves the lines of a metrics file that lie before `step`, and of ends of epochs the first `finished_epochs`."""
    kept: list[str] = []
    if path.exists():
        for text in read_text(path).splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                # the line that was being written when the process was killed
                continue
            if line["epoch"] <= finished_epochs if "test_auc" in line else line["step"] <= step:
                kept.append(text + "\n")
    # written aside and moved, so that a kill leaves either the whole file or the cut one
    aside = path.with_name(path.name + ".cut")
    aside.write_text("".join(kept), encoding="utf-8")
    os.replace(aside, path)


def without_nan(value: Any) -> Any:
    """JSON has no nan."""
    if isinstance(value, dict):
        return {name: without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value
