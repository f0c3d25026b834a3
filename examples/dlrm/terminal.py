"""The terminal of a run: lines that stay, and one line that moves.

On a terminal the last line is a spinner or a bar. In a file or a pipe, where nothing can move, a line says how far the
run is whenever there has been none for `QUIET_S`; after some minutes they come more rarely. Torch is not needed here:
this is there before it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

# a log gets a line after so many seconds without one, and after the first minutes one of so many seconds
QUIET_S, LATER_QUIET_S, FIRST_S = 2.5, 30.0, 180.0


class Terminal:
    """Rank 0's lines; on other ranks, where `active` is False, nothing."""

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self._moves = active and sys.stdout.isatty()
        self._began = time.monotonic()
        # whoever started this has waited already
        self._printed_at = self._began - LATER_QUIET_S
        # what is going on now, and how far it is
        self._status: Callable[[], str] | None = None
        self._shown: Any = None
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Terminal:
        if self.active and not self._moves:
            self._thread = threading.Thread(target=self._tick, name="terminal", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status = None
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, text: object) -> None:
        """A line, or several, that stay."""
        if not self.active:
            return
        self._printed_at = time.monotonic()
        if self._shown is not None:
            # as it stands: brackets in names of tables and paths mean nothing
            self._shown.console.print(str(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(text, flush=True)

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Show that this goes on, and for how long it has."""
        begin = time.monotonic()
        with self._moving(activity, total=None):
            self._status = lambda: f"{activity}: {time.monotonic() - begin:.0f} s"
            try:
                yield
            finally:
                self._status = None

    @contextmanager
    def bar(self, total: int | None) -> Iterator[Bar]:
        """A bar of so many steps."""
        with self._moving("", total=total) as update:
            shown = Bar(total, update)
            self._status = shown.text
            try:
                yield shown
            finally:
                self._status = None

    @contextmanager
    def _moving(self, text: str, total: int | None) -> Iterator[Callable[[int, str], None]]:
        """What sets the place and the text of the moving line."""
        if not self._moves:
            yield lambda done, text: None
            return
        # 0.1 s, and most runs in tests have no terminal
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        text_column = TextColumn("{task.description}", markup=False)
        columns = (
            (BarColumn(bar_width=24), text_column) if total else (SpinnerColumn(), text_column, TimeElapsedColumn())
        )
        with Progress(*columns, console=Console(), transient=True) as progress:
            task = progress.add_task(text, total=total)
            self._shown = progress
            try:
                yield lambda done, text: progress.update(task, completed=done, description=text)
            finally:
                self._shown = None

    def _tick(self) -> None:
        while not self._end.wait(0.1):
            now, status = time.monotonic(), self._status
            quiet = QUIET_S if now - self._began < FIRST_S else LATER_QUIET_S
            if status is not None and now - self._printed_at >= quiet:
                self.say(f"  {status()}")


class Bar:
    """How far training is: steps of all steps, and what is left at the speed since the warm-up."""

    def __init__(self, total: int | None, update: Callable[[int, str], None]) -> None:
        self._total, self._update = total, update
        self._done = 0
        self._phase = ""
        self._loss: float | None = None
        self._rate: float | None = None
        self._hit_rate: float | None = None
        self._from: tuple[float, int] | None = None

    def phase(self, text: str) -> None:
        """Say what goes on: "epoch 2/5"."""
        self._phase = text
        self._update(self._done, self.text())

    def restart_clock(self) -> None:
        """Steps from here on tell how fast it goes."""
        self._from = (time.monotonic(), self._done)

    def at(self, step: int) -> None:
        """So many steps are done."""
        self._done = step
        self._update(step, self.text())

    def numbers(self, loss: float, samples_per_s: float, hit_rate: float | None = None) -> None:
        """The newest loss and speed, and with tiers the share of rows that were on the device."""
        self._loss, self._rate, self._hit_rate = loss, samples_per_s, hit_rate

    def seconds_left(self) -> float | None:
        """At the speed of the steps since the warm-up, evaluations among them; None while nothing is known."""
        if self._total is None or self._from is None or self._done <= self._from[1]:
            return None
        begin, first = self._from
        return (time.monotonic() - begin) / (self._done - first) * (self._total - self._done)

    def text(self) -> str:
        """Everything in a line."""
        share = f" of {self._total:,} ({self._done / self._total:.0%})" if self._total else ""
        parts = [self._phase, f"step {self._done:,}{share}"]
        if self._loss is not None and self._rate is not None:
            parts += [f"loss {self._loss:.4f}", f"{self._rate:,.0f} samples/s"]
        if self._hit_rate is not None:
            parts.append(f"{self._hit_rate:.0%} of the rows on the device")
        left = self.seconds_left()
        if left is not None:
            parts.append(f"{left // 60:.0f} min {left % 60:.0f} s left" if left >= 60 else f"{left:.0f} s left")
        return ", ".join(filter(None, parts))
