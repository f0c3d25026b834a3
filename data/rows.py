"""Text files with bad rows in them: reading plain or gzipped lines, and raising or counting what is wrong.

Why no reader here is pyarrow's CSV reader. Criteo: it leaves hex digits as text, which takes longer than all that
`criteo_text` does to a row, checks included, and each row that it takes otherwise (spaces, 0x1, nineteen digits) would
need a second check. MovieLens: files are read whole, once, and Python's numbers, its quotes that close on their line
and errors by line would need the present reader beside it. `criteo_preprocess` reads what TorchRec's does: Python's
integers and csv's quotes, from files that a path manager opened; `torchrec.pipes` hands csv.reader's arguments on.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from shardwise.untrusted import require_regular

# of a text at a time: what a core has near it, and enough for calls of numpy to be long ones
_BLOCK = 1 << 18
_LINE_END = re.compile(rb"\r\n|\r|\n")
# of what stands in a file, in a message
_SHOWN = 400
_DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)

BadRowPolicy: TypeAlias = Literal["raise", "skip"]


class BadRow(Exception):
    """A row that cannot be used: `reason` is what it is counted under, `detail` says what stands there."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(shortened(detail))
        self.reason = reason


class BadRows:
    """Applies the policy: "raise" stops at the first bad row with `path:line: what is wrong`, "skip" counts it."""

    def __init__(self, policy: BadRowPolicy) -> None:
        if policy not in get_args(BadRowPolicy):
            raise ValueError(f'on_bad_row must be "raise" or "skip", got {policy!r}')
        self.policy = policy
        self.skipped: Counter[str] = Counter()

    def report(self, path: Path, line: int, bad: BadRow) -> None:
        if self.policy == "raise":
            raise ValueError(f'{path}:{line}: {bad}; pass on_bad_row="skip" to leave bad rows out') from bad
        self.skipped[bad.reason] += 1


def shortened(text: str) -> str:
    """Text for a message: a field may be as long as its file."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text):,} characters)"


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, unzipped where the name ends in .gz, one at a time and with their ends.

    A damaged archive is a ValueError with the line it broke after; a pipe or a device is an OSError. Bytes that are not
    UTF-8 become U+FFFD.
    """
    number = 0
    # splits are read one after the other, which a pipe does not survive
    require_regular(path)
    opened = gzip.open if path.suffix == ".gz" else open
    # newline="": the csv module wants line ends untouched
    with opened(path, "rt", encoding="utf-8", errors="replace", newline="") as lines:
        try:
            for number, line in enumerate(lines, start=1):  # noqa: B007
                yield line
        except _DAMAGED as error:
            raise ValueError(f"{path}:{number + 1}: damaged gzip file: {error}") from error


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a text file in blocks of whole lines, unzipped as by `read_lines` and with its errors."""
    passed = 0
    require_regular(path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        try:
            for block in _whole_lines(file.read):
                yield block
                if path.suffix == ".gz":
                    passed += block.count(b"\n") if b"\r" not in block else len(_LINE_END.findall(block))
            return
        except _DAMAGED:
            pass
    # lines that lie before the damage come first, and the line it is in is named: both as `read_lines` does
    for line in islice(read_lines(path), passed, None):
        yield line.encode("utf-8")


def _whole_lines(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Blocks that end where a line does, but for the last. A CR at the end of what was read may be half of an end."""
    pending: list[bytes] = []
    while block := read(_BLOCK):
        end = max(block.rfind(b"\n"), block.rfind(b"\r", 0, -1)) + 1
        if end:
            yield b"".join([*pending, block[:end]]) if pending else block[:end]
            pending = []
        if end < len(block):
            pending.append(block[end:])
    if pending:
        yield b"".join(pending)


def read_table(path: Path, columns: Sequence[str], bad_rows: BadRows) -> Iterator[tuple[int, list[str]]]:
    """Yields (line, fields) of a CSV file with a header, the fields in the order of `columns`.

    A row is a line: a quote that is not closed spoils its own row alone. Blank lines are passed over. A header that
    cannot be read or is without one of `columns` is a ValueError under any policy.
    """
    lines = read_lines(path)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path}:1: the file is empty, expected a header with {', '.join(columns)}")
    try:
        header = [name.strip().removeprefix("\ufeff") for name in _split(first)]
    except BadRow as bad:
        raise ValueError(f"{path}:1: the header is {bad}") from bad
    missing = [name for name in columns if name not in header]
    if missing:
        columns_there = shortened(", ".join(header))
        raise ValueError(f"{path}:1: no column {', '.join(map(repr, missing))} in the header {columns_there}")
    places = [header.index(name) for name in columns]
    for number, line in enumerate(lines, start=2):
        try:
            fields = _split(line)
            if fields and len(fields) != len(header):
                raise BadRow("wrong number of columns", f"{len(fields)} columns, the header has {len(header)}")
        except BadRow as bad:
            bad_rows.report(path, number, bad)
            continue
        if fields:
            yield number, [fields[place] for place in places]


def _split(line: str) -> list[str]:
    """The fields of one CSV line, none of a blank one."""
    try:
        return next(csv.reader((line,), strict=True))
    except csv.Error as error:
        raise BadRow("not CSV", f"not a CSV row, whose quotes close on its line: {error}") from None
