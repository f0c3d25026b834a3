r"""Lines of Criteo's logs to columns, many lines at a time; what is not plain goes through a parser of one line.

A loop that numba compiles reads rows of digits, hex digits and tabs. A row that holds anything else is parsed by
itself, from its text, and that alone decides what is an error: a row has one meaning, a bad one costs only itself.
Without numba, the extra `cpu`, all rows are parsed so, at a twentieth of the rows a second.

Bare pyarrow reads less than this does, as hex digits stay text, and takes longer (`make evidence NAME=criteo_rows`).

Letters: n lines of 40 fields, 13 of which are integers and 26 categories.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.kernels import numba_loops

from .rows import BadRow, read_blocks

Ints: TypeAlias = npt.NDArray[np.int64]
Mask: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float32]
# what is wrong with a row of columns, by its place: file, line, fault
Fault: TypeAlias = tuple[int, Path, int, BadRow]

INTEGERS, CATEGORIES = 13, 26
_FIELDS = 1 + INTEGERS + CATEGORIES
_INTEGER = r"(?:-?[0-9]{1,18})?"
_CATEGORY = r"[0-9a-fA-F]{0,8}"
_ROW = re.compile(rf"[01](?:\t{_INTEGER}){{{INTEGERS}}}(?:\t{_CATEGORY}){{{CATEGORIES}}}")


def logarithms(integers: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """sign(x) log(1 + |x|), which is what a dense column holds."""
    dense = integers.astype(np.float64)
    return (np.sign(dense) * np.log1p(np.abs(dense))).astype(np.float32)


# nearly all counts are below: to look them up takes a quarter of the time
_LOGARITHMS = logarithms(np.arange(1 << 14))


@dataclass(frozen=True)
class Lines:
    """Lines of one file: their numbers in it [n], and where in `text` each starts and ends [n]."""

    path: Path
    text: npt.NDArray[np.uint8]
    numbers: Ints
    starts: Ints
    ends: Ints

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, chosen: slice | Mask) -> Lines:
        return Lines(self.path, self.text, self.numbers[chosen], self.starts[chosen], self.ends[chosen])

    def line(self, place: int) -> str:
        """The text of a line without its end."""
        return self.text[self.starts[place] : self.ends[place]].tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Columns:
    """Labels [n], dense columns [n, 13] and ids [26, n], -1 where a category is missing; bad rows hold anything."""

    labels: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    ids: Ints
    faults: Sequence[Fault] = ()


def read_criteo(path: Path) -> Iterator[Lines]:
    """The lines of a file in order, in blocks. Errors as `read_blocks`."""
    number = 1
    for block in read_blocks(path):
        lines = _lines(path, number, block)
        number += len(lines)
        yield lines


def _lines(path: Path, first: int, block: bytes) -> Lines:
    if b"\r" in block:
        # each of the three is an end of a line; CRLF counts once
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if not block.endswith(b"\n"):
        block += b"\n"
    text = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    starts = np.concatenate(([0], ends[:-1] + 1))
    return Lines(path, text, np.arange(first, first + len(ends)), starts, ends)


def parse(lines: Lines, row_counts: Ints) -> Columns:
    """The columns of lines; ids are categories modulo `row_counts` [26]."""
    labels, dense, ids, plain = _parse_plain(_loops(), lines, row_counts)
    faults: list[Fault] = []
    places: list[int] = []
    rows: list[list[str]] = []
    for place in np.flatnonzero(~plain).tolist():
        text = lines.line(place)
        fields = text.split("\t")
        if _ROW.fullmatch(text) is None:
            faults.append((place, lines.path, int(lines.numbers[place]), _fault(fields)))
        else:
            places.append(place)
            rows.append(fields)
    if rows:
        labels[places] = [float(fields[0]) for fields in rows]
        dense[places] = logarithms(np.array([[float(field or 0) for field in fields[1:14]] for fields in rows]))
        # -1 is missing: no category is negative
        categories = np.array([[int(field, 16) if field else -1 for field in fields[14:]] for fields in rows])
        ids[:, places] = np.where(categories < 0, -1, categories % row_counts).T
    return Columns(labels, dense, ids, faults)


def _parse_plain(loops: Any, lines: Lines, row_counts: Ints) -> tuple[Floats, Floats, Ints, Mask]:
    """The columns of the rows that the loop reads, and which these are: none without it."""
    n = len(lines)
    labels, dense = np.empty(n, np.float32), np.empty((n, INTEGERS), np.float32)
    ids, plain = np.empty((CATEGORIES, n), np.int64), np.zeros(n, np.bool_)
    if loops is not None:
        large = np.empty((2, n * INTEGERS), np.int64)
        # no category needs more than 32 bits: 0 leaves them as they are
        divisors = np.where(row_counts < 1 << 32, row_counts, 0).astype(np.uint32)
        count = loops.parse_rows(
            lines.text, lines.starts, lines.ends, _LOGARITHMS, divisors, labels, dense, ids, plain, *large
        )
        dense.reshape(-1)[large[0, :count]] = logarithms(large[1, :count])
    return labels, dense, ids, plain


def join(parts: Sequence[Columns]) -> Columns:
    """Columns one after the other."""
    if len(parts) == 1:
        return parts[0]
    faults: list[Fault] = []
    before = 0
    for part in parts:
        faults += [(before + place, path, number, bad) for place, path, number, bad in part.faults]
        before += len(part.labels)
    return Columns(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.dense for part in parts]),
        np.concatenate([part.ids for part in parts], axis=1),
        faults,
    )


def present(lines: Lines) -> tuple[Ints, int]:
    """Of the good lines: how often each category is there [26], and how many they are."""
    columns = parse(lines, np.ones(CATEGORIES, np.int64))
    good = np.ones(len(lines), np.bool_)
    good[[place for place, *_ in columns.faults]] = False
    return (columns.ids[:, good] >= 0).sum(axis=1), int(good.sum())


@cache
def _loops() -> Any:
    """The compiled loop, or None where numba is missing, off or does not work."""
    if not numba_loops.compiles():
        return None
    try:
        with warnings.catch_warnings():
            # numba speaks of caches
            warnings.simplefilter("ignore")
            from . import criteo_loops

            # no lines: what compiling or loading the loop says, it says here
            _parse_plain(criteo_loops, _lines(Path(), 1, b"")[:0], np.ones(CATEGORIES, np.int64))
    except Exception as error:
        warnings.warn(
            "shardwise: numba does not work here, Criteo's lines are parsed one by one, at a twentieth of the rate:"
            f" {numba_loops.line(error)}",
            stacklevel=2,
        )
        return None
    return criteo_loops


def _fault(fields: list[str]) -> BadRow:
    """The fault of a row that does not match."""
    if len(fields) != _FIELDS:
        return BadRow("wrong number of columns", f"{len(fields)} columns, expected {_FIELDS}")
    if fields[0] not in ("0", "1"):
        return BadRow("label not 0 or 1", f"column 1, the label, must be 0 or 1, got {fields[0]!r}")
    for column, field in enumerate(fields[1:14], start=2):
        if re.fullmatch(_INTEGER, field) is None:
            return BadRow("not an integer", f"column {column} must be an integer or empty, got {field!r}")
    for column, field in enumerate(fields[14:], start=15):
        if re.fullmatch(_CATEGORY, field) is None:
            return BadRow("not a category", f"column {column} must be up to 8 hex digits or empty, got {field!r}")
    raise AssertionError(f"a good row was refused: {fields}")
