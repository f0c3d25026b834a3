"""The report of `shardwise migrate`: what programs take from TorchRec, read and counted by file and overall."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..untrusted import read_regular
from .differences import WORDS, Difference
from .names import Finding, Status, finding
from .notebook import is_notebook, read_notebook
from .source import Program, Unreadable, Use, read_program

__all__ = ["STATUSES", "Counts", "Problem", "ReadFile", "Report", "programs", "read_file", "replace_file"]

# worst first, as the report has them
STATUSES: Sequence[Status] = ("missing", "differs", "works")


@dataclass(frozen=True)
class Counts:
    """Distinct names by what became of them, and import statements that a rewrite changes.

    Of `differs`, the last three say how many differ by which word, the gravest of each name.
    """

    names: int
    works: int
    differs: int
    missing: int
    imports: int
    numbers: int
    error: int
    looks: int


@dataclass(frozen=True)
class ReadFile:
    """A file, its bytes and what was found in them."""

    path: Path
    source: bytes
    program: Program

    @property
    def changes(self) -> bool:
        """Whether a rewrite has other bytes."""
        return self.program.rewritten != self.source

    @cached_property
    def counts(self) -> Counts:
        """The names of this file alone."""
        return _count({use.name for use in self.program.uses}, self.program.imports)


@dataclass(frozen=True)
class Problem:
    """A file that could not be read or written, or a folder without a program; `place` is a line, of a cell or not."""

    path: Path
    message: str
    place: str = ""


@dataclass(frozen=True)
class Report:
    """Files that were read, in their order, and what could not be."""

    files: Sequence[ReadFile]
    problems: Sequence[Problem]
    written: Sequence[Path]

    @cached_property
    def places(self) -> Mapping[str, Sequence[tuple[Path, Use]]]:
        """Where each name stands."""
        places: dict[str, list[tuple[Path, Use]]] = {}
        for file in self.files:
            for use in file.program.uses:
                places.setdefault(use.name, []).append((file.path, use))
        return places

    @cached_property
    def findings(self) -> Sequence[Finding]:
        """What became of each name, the worst first."""
        return sorted(map(finding, self.places), key=_gravity)

    @cached_property
    def differences(self) -> Sequence[Difference]:
        """What is said of them, the gravest first."""
        rows = dict.fromkeys(row for entry in self.findings for row in entry.differences)
        return sorted(rows, key=lambda row: [*WORDS].index(row.word))

    @cached_property
    def counts(self) -> Counts:
        """The names of all files, each once."""
        return _count(self.places, sum(file.program.imports for file in self.files))


def read_file(path: Path) -> ReadFile | Problem:
    """Read a program or a notebook."""
    try:
        source = read_regular(path)
        return ReadFile(path, source, (read_notebook if is_notebook(path.name, source) else read_program)(source))
    except Unreadable as error:
        return Problem(path, str(error), error.place)
    except OSError as error:
        return Problem(path, error.strerror or str(error))
    except ValueError as error:
        # too large, with its name in front
        return Problem(path, str(error).removeprefix(f"{path} "))


def replace_file(path: Path, content: bytes) -> Problem | None:
    """Write `content` beside the file and put it in its place, so that a reader sees the old or the new."""
    try:
        # of a link, the file that it leads to
        target = Path(os.path.realpath(path))
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:200]}.")
        try:
            with os.fdopen(handle, "wb") as beside:
                beside.write(content)
            shutil.copymode(target, name)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        return Problem(path, error.strerror or str(error))
    return None


def programs(paths: Iterable[Path], problems: list[Problem]) -> Iterator[Path]:
    """The files themselves and the .py and .ipynb files below folders, each once; what cannot be listed is a problem.

    Hidden folders and virtual environments below a folder are passed over.
    """
    seen: set[str] = set()
    for path in paths:
        number = 0
        for file in _below(path, problems) if path.is_dir() else [path]:
            number += 1
            # of a link that leads to itself, the link
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file
        if not number:
            problems.append(Problem(path, "no .py or .ipynb file below it"))


def _below(folder: Path, problems: list[Problem]) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        problems.append(Problem(Path(error.filename), error.strerror or str(error)))

    for place, folders, files in os.walk(folder, onerror=refused):
        inside = (name for name in sorted(folders) if not name.startswith("."))
        folders[:] = [name for name in inside if not (Path(place) / name / "pyvenv.cfg").is_file()]
        yield from (Path(place) / name for name in sorted(files) if name.endswith((".py", ".ipynb")))


def _gravity(entry: Finding) -> tuple[int, int, str]:
    return STATUSES.index(entry.status), [*WORDS, None].index(entry.word), entry.name


def _count(names: Iterable[str], imports: int) -> Counts:
    counter = Counter(word for name in names for word in (finding(name).status, finding(name).word))
    works, differs, missing = (counter[status] for status in reversed(STATUSES))
    by_word = {word: counter[word] for word in WORDS}
    return Counts(works + differs + missing, works, differs, missing, imports, **by_word)
