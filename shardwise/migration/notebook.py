"""The programs in a Jupyter notebook: its code cells read as one, and rewritten with every other byte as it was.

Lines for IPython (`%magic`, `!command`, `name?`) are left alone, and so are cells in another language (`%%bash`). What
`%time`, `%timeit` and `%prun` run is read, and so is a cell under another magic (`%%px`) if it is Python. A cell that
writes a Python file (`%%writefile train.py`) or runs by itself (`%%python`) is a program of its own.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .source import (
    Edit,
    Program,
    Unreadable,
    Use,
    edited,
    parsed,
    read_body,
)

__all__ = ["is_notebook", "read_notebook"]

# cell magics with a body of Python that runs among the others, with one by itself, and with one that is no Python; what
# another magic does with Python is unknown, so that is read too
_AMONG = re.compile(r"%%(?:capture|prun|time|timeit)\b|(?!%%)")
_ALONE = re.compile(
    r"%%(?:writefile|file)\s+(?:(?:-a|--append)\s+)?\S+\.py['\"]?\s*$|%%(?:script\s+(?:--?\w+\s+)*)?python3?\b"
)
_OTHER = re.compile(
    r"%%(?:!|(?:bash|cmd|file|html|javascript|js|latex|markdown|perl|ruby|script|sh|sql|svg|sx|system|writefile)\b)",
    re.IGNORECASE,
)
# a statement that is IPython's alone, one that pip's magic is found for without a sign, and an assignment of one
_STATEMENT = re.compile(
    r"\s*(?=%\w|%%\w|!)|\s*(?=\?{1,2}[\w.*%]+\s*$|[%\w.*]+\?{1,2}\s*$)"
    r"|\s*(?=(?:pip3?|conda|mamba|cd|load_ext|matplotlib)\s+(?!(?:and|else|if|in|is|not|or)\b)[^\W\d])"
)
_ASSIGNED = re.compile(r"\s*[^\W\d](?:[\w.,\s]|\[[^\]]*\])*=\s*(?=%\w|!)")
# a magic of a line with a statement of Python after it
_TIMED = re.compile(r"%(?:time|timeit|prun)(?:\s+-[a-zA-Z]+(?:\s*\d+)?)*\s+(?=[^-\s])")
# what opens or closes something, and where a string ends
_SIGN = re.compile(r"\"\"\"|'''|[\"'#()\[\]{}]")
_ENDS = {quote: re.compile(r"(?:\\.|[^\\])*?" + quote, re.S) for quote in ('"""', "'''", '"', "'")}


@dataclass(frozen=True)
class _Cell:
    """A code cell: which one counting from 1, where its source stands in the file, and its text."""

    number: int
    start: int
    end: int
    text: str


def is_notebook(name: str, source: bytes) -> bool:
    """Whether a file is a notebook; under another name, whether it looks like one, which is no Python of any use."""
    return name.endswith(".ipynb") or (source.lstrip().startswith(b"{") and b'"nbformat"' in source)


def read_notebook(source: bytes) -> Program:
    """The names of TorchRec that the code cells use, by cell and line, and the notebook with their imports rewritten.

    Raises:
        Unreadable: it is no notebook of format 4, its language is not Python, or a cell is no Python.
    """
    try:
        text = source.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(
            source.count(b"\n", 0, error.start) + 1, f"not UTF-8: byte 0x{source[error.start]:02x}"
        ) from None
    cells = _code_cells(text)
    uses: list[Use] = []
    changed: dict[int, str] = {}
    shared = []
    imports = 0
    for cell in cells:
        first = cell.text.lstrip().split("\n", 1)[0]
        if _ALONE.match(first):
            at = cell.text.index(first)
            imports += _read_cells(
                [(cell, cell.text[:at] + _blank(first, 0) + cell.text[at + len(first) :])], uses, changed
            )
        elif _AMONG.match(first) or (not _OTHER.match(first) and _is_python(_plain(cell))):
            shared.append((cell, _plain(cell)))
    imports += _read_cells(shared, uses, changed)
    ascii_only = text.isascii()
    for cell in sorted(cells, key=lambda cell: cell.start, reverse=True):
        if changed.get(cell.number, cell.text) != cell.text:
            new = _as_json(text[cell.start : cell.end], cell.text, changed[cell.number], ascii_only)
            text = text[: cell.start] + new + text[cell.end :]
    mark = source[:3] if source.startswith(b"\xef\xbb\xbf") else b""
    uses.sort(key=lambda use: (use.cell or 0, use.line, use.name))
    return Program(tuple(uses), mark + text.encode(), imports)


def _read_cells(cells: Sequence[tuple[_Cell, str]], uses: list[Use], changed: dict[int, str]) -> int:
    """Add the uses in cells, each with its Python as text of the same bytes and lines, and what they become.

    Returns how many imports that changes.
    """
    starts, body, lines = [], b"", [0]
    for cell, python in cells:
        try:
            encoded = python.encode()
            # alone, so that the error names the cell
            parsed(encoded)
        except UnicodeEncodeError as error:
            raise Unreadable(1, f"not UTF-8: {python[error.start]!a}", cell=cell.number) from None
        except Unreadable as error:
            raise Unreadable(error.line, str(error), cell=cell.number) from None
        starts.append(len(body))
        body += encoded + b"\n"
        # as the parser counts them
        lines.append(lines[-1] + len(re.findall(rb"\r\n?|\n", encoded + b"\n")))
    program = read_body(body, starts)
    for use in program.uses:
        at = bisect_left(lines, use.line) - 1
        uses.append(replace(use, line=use.line - lines[at], cell=cells[at][0].number))
    of_cell: dict[int, list[Edit]] = {}
    for start, end, new in program.edits:
        at = bisect_right(starts, start) - 1
        of_cell.setdefault(at, []).append((start - starts[at], end - starts[at], new))
    for at, some in of_cell.items():
        cell = cells[at][0]
        changed[cell.number] = edited(cell.text.encode(), some).decode()
    return program.imports


def _plain(cell: _Cell) -> str:
    """The text with an expression of as many bytes in place of what is IPython's alone."""
    lines: list[str] = []
    goes_on = False
    inside = _Inside()
    for line in cell.text.split("\n"):
        match = None if inside else _STATEMENT.match(line) or _ASSIGNED.match(line)
        if goes_on:
            lines.append("#" * len(line.encode()))
        elif match:
            # IPython takes the indent of the first line from all
            lines.append(_without_magic(line, match.end() if any(map(str.strip, lines)) else 0))
        else:
            lines.append(line)
            inside.read(line)
            continue
        goes_on = line.rstrip("\r").endswith("\\")
    return "\n".join(lines)


def _without_magic(line: str, begin: int) -> str:
    """A line whose magic begins there: what is timed as a second statement, all else blank."""
    timed = _TIMED.match(line, begin)
    if timed and _is_python(line[timed.end() :].strip()) and not line.rstrip("\r").endswith("\\"):
        return f"{line[:begin]}0;{' ' * (timed.end() - begin - 2)}{line[timed.end() :]}"
    return _blank(line, begin)


def _blank(line: str, begin: int) -> str:
    size = len(line[begin:].encode())
    return line[:begin] + ("0" + "#" * (size - 1) if size else "")


def _is_python(text: str) -> bool:
    try:
        # statements after a semicolon have to be simple, as those that are timed are
        ast.parse(f"0;{text}" if "\n" not in text else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


class _Inside:
    """Whether a statement that the lines so far begin is still open: in brackets, a string, or after a backslash."""

    def __init__(self) -> None:
        self.depth, self.quote, self.goes_on = 0, "", False

    def __bool__(self) -> bool:
        return bool(self.depth or self.quote or self.goes_on)

    def read(self, line: str) -> None:
        """Go on to the end of a line."""
        line, at, sign = line.rstrip("\r"), 0, None
        while True:
            if self.quote:
                end = _ENDS[self.quote].match(line, at)
                if end is None:
                    break
                self.quote, at = "", end.end()
            sign = _SIGN.search(line, at)
            if sign is None or sign[0] == "#":
                break
            at = sign.end()
            if sign[0] in _ENDS:
                self.quote = sign[0]
            else:
                self.depth = max(0, self.depth + (1 if sign[0] in "([{" else -1))
        self.goes_on = line.endswith("\\") and (sign is None if not self.quote else True)
        # one that ends with its line, unless that goes on
        if len(self.quote) == 1 and not self.goes_on:
            self.quote = ""


def _code_cells(text: str) -> list[_Cell]:
    try:
        notebook = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(error.lineno, f"no notebook: {error.msg}") from None
    except ValueError as error:
        # a number that Python does not read
        raise Unreadable(1, f"no notebook: {error}") from None
    except RecursionError:
        raise Unreadable(1, "no notebook: nested too deeply") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        version = notebook.get("nbformat") if isinstance(notebook, dict) else None
        old = f" of format {version}: `jupyter nbconvert --to notebook` makes one of format 4" if version else ""
        raise Unreadable(1, f"no notebook with cells{old}")
    language = _at(notebook, "metadata", "language_info", "name") or _at(notebook, "metadata", "kernelspec", "language")
    if language is not None and str(language).lower() not in ("python", "ipython", "python3"):
        raise Unreadable(1, f"the language of the notebook is {language}, not Python")
    cells, places = [], _sources(text)
    for number, cell in enumerate(notebook["cells"], start=1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        lines = [source] if isinstance(source, str) else source
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise Unreadable(1, "no notebook: source of a cell is no text", cell=number)
        cells.append(_Cell(number, *places.get(number, (0, 0)), "".join(lines)))
    return cells


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _sources(text: str) -> dict[int, tuple[int, int]]:
    """Where the value of "source" stands, by the number of the cell."""
    places = {}
    for key, start, _ in _members(text, 0):
        for number, (at, _) in enumerate(_elements(text, start) if key == "cells" else (), start=1):
            for name, begin, end in _members(text, at) if text[at] == "{" else ():
                if name == "source":
                    places[number] = (begin, end)
    return places


def _members(text: str, at: int) -> Iterator[tuple[str, int, int]]:
    """Key and place of each value of the JSON object at `at`."""
    at = _space(text, text.index("{", at) + 1)
    while text[at] == '"':
        key, at = _DECODER.raw_decode(text, at)
        start = _space(text, _space(text, at) + 1)
        end = _end(text, start)
        yield key, start, end
        at = _space(text, end)
        if text[at] != ",":
            return
        at = _space(text, at + 1)


def _elements(text: str, at: int) -> Iterator[tuple[int, int]]:
    """The place of each element of the JSON array at `at`."""
    at = _space(text, at + 1)
    while text[at] != "]":
        end = _end(text, at)
        yield at, end
        at = _space(text, end)
        if text[at] == ",":
            at = _space(text, at + 1)


def _space(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


_DECODER: Any = json.JSONDecoder()


def _end(text: str, at: int) -> int:
    """Where the JSON value at `at` ends."""
    return int(_DECODER.raw_decode(text, at)[1])


def _as_json(written: str, before: str, after: str, ascii_only: bool) -> str:
    """`after` as the value `written` was of `before`: lines that did not change keep their very characters."""
    if not written.startswith("["):
        return json.dumps(after, ensure_ascii=ascii_only)
    places = [*_elements(written, 0)]
    kept = {json.loads(written[start:end]): written[start:end] for start, end in places}
    opening = written[: places[0][0]]
    closing = written[places[-1][1] :]
    # of a list of one line, what stands before it
    between = written[places[0][1] : places[1][0]] if len(places) > 1 else "," + opening[1:]
    lines = re.findall(r"[^\n]*\n|[^\n]+", after)
    return opening + between.join(kept.get(line, json.dumps(line, ensure_ascii=ascii_only)) for line in lines) + closing
