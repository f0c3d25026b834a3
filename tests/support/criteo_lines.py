"""Small Criteo text files, whose every field follows from its day, line and column."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def criteo_line(day: int, number: int, *, labelled: bool = True) -> str:
    """A line without its end; a fifth of the integers and some categories are missing."""
    seed = day * 7 + number
    integers = ["" if (seed + c) % 5 == 0 else str((seed * (c + 3)) % 40 - 2) for c in range(13)]
    ids = [(seed % 3 + 1) * 0x1234567 * (c % 4) % 2**32 for c in range(26)]
    categories = ["" if (seed * c) % 11 == 3 else f"{number:08x}" for c, number in enumerate(ids)]
    return "\t".join([*([str(seed % 2)] if labelled else []), *integers, *categories])


def write_criteo(folder: Path, days: int, rows: Callable[[int], int]) -> list[str]:
    """Files day_0, day_1, ... of `rows(day)` lines; their paths."""
    paths = [folder / f"day_{day}" for day in range(days)]
    for day, path in enumerate(paths):
        path.write_text("".join(criteo_line(day, number) + "\n" for number in range(rows(day))))
    return [str(path) for path in paths]
