"""The programs in a Jupyter notebook: its code cells read as one, and rewritten with every other byte as it was.

Lines for IPython (`%magic`, `!command`, `name?`) are left alone, and so are cells in another language (`%%bash`). A
cell that writes a Python file (`%%writefile train.py`) or runs by itself (`%%python`) is a program of its own.
"""

from __future__ import annotations

import io
import json
import re
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .migrate_source import Edit, Program, Unreadable, Use, edited, read_body

__all__ = ["is_notebook", "read_notebook"]

# cell magics with a body of Python that runs among the others, and with one by itself
_AMONG = re.compile(r"%%(?:capture|prun|time|timeit)\b|(?!%%)")
_ALONE = re.compile(r"%%(?:writefile|file)\s+(?:-a\s+)?\S+\.py\s*$|%%python3?\b")
# a statement that is IPython's alone, and an assignment of one
_STATEMENT = re.compile(r"\s*(?=%\w|%%\w|!)|\s*(?=\?{1,2}[\w.*%]+\s*$|[%\w.*]+\?{1,2}\s*$)")
_ASSIGNED = re.compile(r"\s*[\w.,\s\[\]'\"]+=\s*(?=%\w|!)")


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
    for cell in cells:
        first = cell.text.lstrip().split("\n", 1)[0]
        if _ALONE.match(first):
            at = cell.text.index(first)
            _read_cells([(cell, cell.text[:at] + _blank(first, 0) + cell.text[at + len(first) :])], uses, changed)
        elif _AMONG.match(first):
            shared.append((cell, _plain(cell)))
    _read_cells(shared, uses, changed)
    ascii_only = text.isascii()
    for cell in sorted(cells, key=lambda cell: cell.start, reverse=True):
        if changed.get(cell.number, cell.text) != cell.text:
            new = _as_json(text[cell.start : cell.end], cell.text, changed[cell.number], ascii_only)
            text = text[: cell.start] + new + text[cell.end :]
    mark = source[:3] if source.startswith(b"\xef\xbb\xbf") else b""
    return Program(tuple(sorted(uses, key=lambda use: (use.cell or 0, use.line, use.name))), mark + text.encode())


def _read_cells(cells: Sequence[tuple[_Cell, str]], uses: list[Use], changed: dict[int, str]) -> None:
    """Add the uses in cells, each with its Python as text of the same bytes and lines, and what they become."""
    starts, body, lines = [], b"", [0]
    for cell, python in cells:
        try:
            encoded = python.encode()
            # alone, so that the error names the cell
            read_body(encoded)
        except UnicodeEncodeError as error:
            raise Unreadable(1, f"not UTF-8: {python[error.start]!a}", cell=cell.number) from None
        except Unreadable as error:
            raise Unreadable(error.line, str(error), cell=cell.number) from None
        starts.append(len(body))
        body += encoded + b"\n"
        lines.append(lines[-1] + encoded.count(b"\n") + 1)
    found, edits = read_body(body)
    for use in found:
        at = bisect_left(lines, use.line) - 1
        uses.append(replace(use, line=use.line - lines[at], cell=cells[at][0].number))
    of_cell: dict[int, list[Edit]] = {}
    for start, end, new in edits:
        at = bisect_right(starts, start) - 1
        of_cell.setdefault(at, []).append((start - starts[at], end - starts[at], new))
    for at, some in of_cell.items():
        cell = cells[at][0]
        changed[cell.number] = edited(cell.text.encode(), some).decode()


def _plain(cell: _Cell) -> str:
    """The text with an expression of as many bytes in place of what is IPython's alone."""
    lines: list[str] = []
    goes_on = False
    for line in cell.text.split("\n"):
        found = _STATEMENT.match(line) or _ASSIGNED.match(line)
        if goes_on:
            lines.append("#" * len(line.encode()))
        elif found and not _is_inside(lines):
            lines.append(_blank(line, found.end()))
        else:
            lines.append(line)
            continue
        goes_on = line.endswith("\\")
    return "\n".join(lines)


def _blank(line: str, begin: int) -> str:
    size = len(line[begin:].encode())
    return line[:begin] + ("0" + "#" * (size - 1) if size else "")


def _is_inside(lines: Sequence[str]) -> bool:
    """Whether a statement that these lines begin is still open: in brackets, a string, or after a backslash."""
    if lines and lines[-1].endswith("\\"):
        return True
    try:
        for _ in tokenize.generate_tokens(io.StringIO("\n".join([*lines, ""])).readline):
            pass
    except tokenize.TokenError as error:
        return "multi-line" in str(error) or "triple-quoted" in str(error)
    except SyntaxError:
        # what is no Python is said when the cell is read
        return False
    return False


def _code_cells(text: str) -> list[_Cell]:
    try:
        notebook = json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(error.lineno, f"no notebook: {error.msg}") from None
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
