"""The counts that the repository keeps, and what differs from them.

A file of counts holds them by versions, as Python's and torch's own functions and decompositions differ from version to
version: {"format": 1, "counts": {"python 3.11, torch 2.13": {step: {count: {"total": n, "parts": {part: n}}}}}}.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.perf.counts.steps import Count, Counts
from shardwise.untrusted import read_text

FORMAT = 1
# in the repository; a wheel has none
BASELINE = Path(__file__).resolve().parent / "counts.json"

# steps -> their counts
Found = Mapping[str, Counts]


@dataclass(frozen=True)
class Change:
    """A count that differs; None where one side does not have it."""

    step: str
    count: str
    before: Count | None
    now: Count | None

    @property
    def rose(self) -> bool:
        """Whether there is more of it; what is not in the baseline is no rise."""
        return self.before is not None and self.now is not None and self.now.total > self.before.total

    @property
    def fell(self) -> bool:
        """Whether there is less of it."""
        return self.before is not None and self.now is not None and self.now.total < self.before.total

    def __str__(self) -> str:
        if self.before is None or self.now is None:
            return f"{self.step}: {self.count}: {'not in the baseline' if self.before is None else 'not counted here'}"
        text = f"{self.step}: {self.count} {'rose' if self.rose else 'fell'}"
        text += f" by {abs(self.now.total - self.before.total):,}, from {self.before.total:,} to {self.now.total:,}"
        parts = [
            f"{name} {self.before.parts.get(name, 0)} -> {self.now.parts.get(name, 0)}"
            for name in sorted({*self.before.parts, *self.now.parts})
            if self.before.parts.get(name, 0) != self.now.parts.get(name, 0)
        ]
        return f"{text} ({', '.join(parts)})" if parts else text


def versions() -> str:
    """What counts depend on, beside shardwise."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"python {python}, torch {'.'.join(torch.__version__.split('.')[:2])}"


def read(path: Path) -> dict[str, dict[str, Counts]]:
    """A file's counts, by versions and step.

    Raises:
        FileNotFoundError, ValueError: there is none, or it is not one of counts.
    """
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist: `shardwise perf counts --update` writes it") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no file of `shardwise perf counts`: {error}") from None
    try:
        given = json.loads(text)
        if given["format"] != FORMAT:
            raise ValueError(f"{path} has format {given['format']!r}, this version of shardwise reads {FORMAT}")
        return {
            key: {step: {name: _count(entry) for name, entry in counts.items()} for step, counts in steps.items()}
            for key, steps in given["counts"].items()
        }
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no file of `shardwise perf counts`: {type(error).__name__}: {error}") from None


def _count(given: Any) -> Count:
    parts = given.get("parts", {})
    numbers = [given["total"], *parts.values()]
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"counts are whole numbers, got {numbers}")
    return Count(given["total"], parts)


def write(path: Path, counts: Mapping[str, Found]) -> None:
    """Write counts by versions and step; a line for each count, so that changes are read easily."""
    lines = ["{", f'"format": {FORMAT},', '"counts": {']
    for v, (key, steps) in enumerate(sorted(counts.items())):
        lines.append(f"{json.dumps(key)}: {{")
        for s, (step, of_step) in enumerate(steps.items()):
            lines.append(f"  {json.dumps(step)}: {{")
            for c, (name, count) in enumerate(of_step.items()):
                value = {"total": count.total} | ({"parts": dict(count.parts)} if count.parts else {})
                lines.append(f"    {json.dumps(name)}: {json.dumps(value)}{',' * (c + 1 < len(of_step))}")
            lines.append(f"  }}{',' * (s + 1 < len(steps))}")
        lines.append(f"}}{',' * (v + 1 < len(counts))}")
    path.write_text("\n".join([*lines, "}", "}"]) + "\n")


def document(counts: Mapping[str, Found]) -> dict[str, Any]:
    """What a file of these counts says."""
    return {
        "format": FORMAT,
        "counts": {
            key: {step: {name: asdict(count) for name, count in of_step.items()} for step, of_step in steps.items()}
            for key, steps in counts.items()
        },
    }


def changes(before: Found, now: Found) -> list[Change]:
    """What differs for the steps that were counted now."""
    changed = []
    for step, counts in now.items():
        old = before.get(step, {})
        for name in [*counts, *(name for name in old if name not in counts)]:
            change = Change(step, name, old.get(name), counts.get(name))
            if change.before is None or change.now is None or change.before.total != change.now.total:
                changed.append(change)
    return changed
