"""Reports of a training run while it runs: a bar, and trackers, of which a file with a JSON object a line is one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from terminal import Bar, Terminal

from shardwise.untrusted import read_text


class Tracker(Protocol):
    """Where the numbers of a run go, on rank 0. One that raises is left out from there on, and training goes on."""

    def start(self, config: Mapping[str, Any], *, step: int, finished_epochs: int) -> None:
        """Training begins with these options after `step` steps, all of them if it goes on from a checkpoint; what an
        earlier process told of later ones comes again."""

    def log(self, metrics: Mapping[str, float], *, epoch: int, step: int) -> None:
        """The numbers of a moment; `step` counts over all epochs. Those of the end of an epoch have `test_auc`."""

    def finish(self, final: Mapping[str, float] | None) -> None:
        """The run is over with these numbers of its best epoch, or was ended by an error, with None."""


class StopTraining(Exception):
    """A tracker raises it to end the run, which `train.main` then raises."""


class Report:
    """The bar and the trackers of rank 0; on other ranks, where `active` is False, nothing."""

    def __init__(self, trackers: Iterable[Tracker], terminal: Terminal, *, active: bool) -> None:
        self.bar: Bar | None = None
        self._given = [*trackers] if active else []
        # those that were started
        self._trackers: list[Tracker] = []
        self._terminal = terminal

    def __enter__(self) -> Report:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(None)

    def start(self, config: Mapping[str, Any], *, step: int, finished_epochs: int) -> None:
        """Opens the trackers."""
        for tracker in self._given:
            self._trackers.append(tracker)
            self._ask(tracker, lambda tracker: tracker.start(config, step=step, finished_epochs=finished_epochs))

    def write(self, numbers: Mapping[str, float], *, epoch: int, step: int) -> None:
        """Tells the trackers, and the bar where there is a loss."""
        if self.bar is not None and "loss" in numbers:
            self.bar.numbers(numbers["loss"], numbers["samples_per_s"], numbers.get("hit_rate"))
        self._each(lambda tracker: tracker.log(numbers, epoch=epoch, step=step))

    def finish(self, final: Mapping[str, float] | None) -> None:
        """Closes the trackers, once."""
        self._each(lambda tracker: tracker.finish(final))
        self._trackers = []

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in [*self._trackers]:
            self._ask(tracker, call)

    def _ask(self, tracker: Tracker, call: Callable[[Tracker], None]) -> None:
        try:
            call(tracker)
        except StopTraining:
            raise
        except Exception as error:
            # a full disk or a lost network is no reason to lose the training
            self._trackers.remove(tracker)
            name, why = type(tracker).__name__, f"{type(error).__name__}: {error}"
            self._terminal.say(f"warning: {name} gets no more numbers, training goes on: {why}")


class JsonLines:
    """`--metrics`: each line is an object with `epoch`, `step` and the numbers of that moment.

    A run that goes on from a checkpoint cuts the lines beyond it, which it will write again, and appends; one that
    starts anew starts the file anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: TextIO | None = None

    def start(self, config: Mapping[str, Any], *, step: int, finished_epochs: int) -> None:
        """Cuts what will come again."""
        cut_lines(self._path, step, finished_epochs)
        self._lines = self._path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, epoch: int, step: int) -> None:
        """Writes a line."""
        assert self._lines is not None
        self._lines.write(json.dumps(without_nan({"epoch": epoch, "step": step, **metrics})) + "\n")
        # a line is on its way to the disk before the checkpoint of its step is
        self._lines.flush()

    def finish(self, final: Mapping[str, float] | None) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


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
            try:
                before = line["epoch"] <= finished_epochs if "test_auc" in line else line["step"] <= step
            except (KeyError, TypeError):
                raise ValueError(f"{path} has lines that are no metrics, {text[:40]!r}: name another file") from None
            if before:
                kept.append(text + "\n")
    # written aside and moved, so that a kill leaves either the whole file or the cut one
    aside = path.with_name(path.name + ".cut")
    aside.write_text("".join(kept), encoding="utf-8")
    os.replace(aside, path)


def without_nan(value: Any) -> Any:
    """JSON has neither nan nor infinities."""
    if isinstance(value, dict):
        return {name: without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
