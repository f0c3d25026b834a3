"""Counters, gauges and histograms in the text format that Prometheus reads."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass
class Counts:
    """How often something happened, by the values of its labels."""

    kind: ClassVar[str] = "counter"
    name: str
    help: str
    labels: Sequence[str]
    by_labels: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def add(self, *values: str) -> None:
        self.by_labels[values] += 1

    def lines(self) -> list[str]:
        counts = sorted(self.by_labels.items())
        return [f"{self.name}{_labels(dict(zip(self.labels, key, strict=True)))} {count}" for key, count in counts]


@dataclass
class Histogram:
    """How often a number was at most each of `bounds`."""

    kind: ClassVar[str] = "histogram"
    name: str
    help: str
    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    total: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, number: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, number)] += 1
        self.total += number

    def lines(self) -> list[str]:
        lines, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            below += count
            lines.append(f"{self.name}_bucket{_labels({'le': bound})} {below}")
        return [*lines, f"{self.name}_sum {self.total}", f"{self.name}_count {below}"]


@dataclass
class Gauge:
    """A number as it is when it is asked for."""

    kind: ClassVar[str] = "gauge"
    name: str
    help: str
    read: Callable[[], float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        return [f"{self.name}{_labels(self.labels)} {self.read()}"]


def text(metrics: Sequence[Counts | Histogram | Gauge]) -> str:
    """All of them, as a scrape has it."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    escaped = (
        (name, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, value in labels.items()
    )
    inside = ",".join(f'{name}="{value}"' for name, value in escaped)
    return f"{{{inside}}}" if inside else ""
