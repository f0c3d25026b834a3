"""The report of a command of evidence: a first line of versions, what is not as it has to be, tables."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from shardwise import __version__
from shardwise.perf.suite import machine

ROOT = Path(__file__).resolve().parents[2]


class Section(NamedTuple):
    """Lines to print, and what in them is not as it has to be."""

    lines: list[str]
    bad: list[str]


class Report(NamedTuple):
    """The text of a command, and whether all is as it has to be."""

    text: str
    good: bool


def grid(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table of Markdown."""
    cells: list[Sequence[object]] = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in cells]


def report_of(sections: Sequence[Section], how: str = "") -> Report:
    """Sections below the versions of everything and `how` they ran, faults first."""
    bad = [fault for section in sections for fault in section.bad]
    head = [f"{versions()}; {how}" if how else versions(), "", f"Not as it has to be: {len(bad)}.", ""]
    head += [*(f"- {fault}" for fault in bad), *([""] if bad else [])]
    lines = [*head, *(line for section in sections for line in section.lines)]
    return Report("\n".join(lines).rstrip() + "\n", not bad)


def versions() -> str:
    """One line of what ran, and where. numba chooses between two CPU paths of shardwise."""
    installed = {name: number or "not installed" for name, number in machine.versions().items()}
    return (
        f"shardwise {__version__}, torch {installed['torch']}, numba {installed['numba']},"
        f" fbgemm_gpu {installed['fbgemm']}, torchrec {installed['torchrec']}, Python {platform.python_version()},"
        f" {os.cpu_count()} CPUs, {date.today()}"
    )
