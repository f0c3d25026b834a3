"""What a canary measures: time and memory of both libraries, and how far they are apart."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

# steps of which times are kept
_KEPT = 1000
# seconds of the clock, or an event of CUDA
Moment: TypeAlias = Any


@dataclass
class StepTimes:
    """When the calls of a step began and ended, and how many ids they looked up."""

    ids: int
    forward: list[tuple[Moment, Moment]] = field(default_factory=list)
    backward: list[tuple[Moment, Moment]] = field(default_factory=list)


class Stopwatch:
    """The times of one library's lookups in one module of tables."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.steps = 0
        self.kept: deque[StepTimes] = deque(maxlen=_KEPT)
        # of the last step, what was given to autograd
        self.output_bytes = 0

    def begin(self, ids: int) -> StepTimes:
        """A step that looks up so many ids."""
        self.steps += 1
        self.output_bytes = 0
        self.kept.append(StepTimes(ids))
        return self.kept[-1]

    @contextmanager
    def forward(self, step: StepTimes) -> Iterator[None]:
        """Time what runs while this is open."""
        start = self._now()
        yield
        step.forward.append((start, self._now()))

    def watch(self, step: StepTimes, output: torch.Tensor) -> None:
        """Time the node of autograd that made a lookup's output: its backward is the update."""
        self.output_bytes += output.numel() * output.element_size()
        node = output.grad_fn
        if node is None:
            return
        starts: list[Moment] = []
        node.register_prehook(lambda _: starts.append(self._now()))
        node.register_hook(lambda _given, _made: step.backward.append((starts.pop(), self._now())))

    def _now(self) -> Moment:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, calls: Sequence[tuple[Moment, Moment]]) -> float:
        if not self._on_cuda:
            return float(sum(end - start for start, end in calls))
        return float(sum(1e-3 * start.elapsed_time(end) for start, end in calls))

    def medians_us(self) -> tuple[float, float]:
        """Of forwards and backwards of a step; nan without one."""
        if self._on_cuda:
            # events have to be over before they are read
            torch.cuda.synchronize()
        kinds = ([s.forward for s in self.kept if s.forward], [s.backward for s in self.kept if s.backward])
        forward, backward = ([1e6 * self._seconds(calls) for calls in kind] for kind in kinds)
        return tuple(statistics.median(kind) if kind else math.nan for kind in (forward, backward))  # type: ignore[return-value]

    @property
    def ids_per_step(self) -> float:
        """The mean of the steps that are kept."""
        return statistics.fmean(step.ids for step in self.kept) if self.kept else 0.0


@dataclass(frozen=True)
class Half:
    """What one library did in one module of tables on this rank.

    Times are medians of a step in us, nan where there was none: `forward_us` of the lookup, `backward_us` of gradients
    and update. Bytes are of the tables' rows, of their optimizer states, of copies that only a shadow has, and of what
    the last lookup gave.
    """

    path: str
    library: str
    tables: tuple[str, ...]
    steps: int
    ids_per_step: float
    forward_us: float
    backward_us: float
    table_bytes: int
    state_bytes: int
    copied_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class Difference:
    """How far the shadow was off at most, in units of the largest number of what it was compared with.

    `steps` is how many lookups were compared and `updates` how many updates; `recopied` counts tables that somebody
    else wrote into, by a checkpoint say, so that they were copied anew.
    """

    path: str
    tables: tuple[str, ...]
    steps: int
    updates: int
    outputs: float
    weights: float
    states: float
    recopied: int


@dataclass(frozen=True)
class CanaryReport:
    """What this rank measured: `print` it for a table."""

    halves: tuple[Half, ...]
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        lines = _table(
            ["module", "library", "tables", "steps", "ids/step", "forward us", "backward us", "ns/id", "tables MiB",
             "states MiB", "copies MiB", "output MiB"],
            [_cells(half) for half in self.halves],
        )  # fmt: skip
        if self.differences:
            rows = [
                [d.path, _names(d.tables), d.steps, d.updates, f"{d.outputs:.1e}", f"{d.weights:.1e}",
                 f"{d.states:.1e}", d.recopied] for d in self.differences
            ]  # fmt: skip
            header = ["module", "tables", "lookups", "updates", "outputs off by", "weights", "states", "recopied"]
            lines += ["", *_table(header, rows)]
        return "\n".join(lines)


def _cells(half: Half) -> list[object]:
    both = half.forward_us + (0.0 if math.isnan(half.backward_us) else half.backward_us)
    per_id = f"{1e3 * both / half.ids_per_step:.0f}" if half.ids_per_step else "-"
    sizes = (half.table_bytes, half.state_bytes, half.copied_bytes, half.output_bytes)
    return [
        half.path, half.library, _names(half.tables), half.steps, f"{half.ids_per_step:.0f}", _us(half.forward_us),
        _us(half.backward_us), per_id, *(f"{size / 2**20:.2f}" for size in sizes),
    ]  # fmt: skip


def _us(time_us: float) -> str:
    return "-" if math.isnan(time_us) else f"{time_us:.0f}"


def _names(tables: Sequence[str], most: int = 3) -> str:
    more = len(tables) - most
    return ", ".join(tables[:most]) + (f" and {more} more" if more > 0 else "")


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [[*header], *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
