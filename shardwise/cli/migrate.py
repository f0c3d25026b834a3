"""`shardwise migrate`: reports on programs that are written for TorchRec, and rewrites their imports."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._version import how_to_install
from .output import print_json

if TYPE_CHECKING:
    from ..migration.names import Finding
    from ..migration.source import Unreadable, Use

# worst first, as the report has them
_STATUSES = ("missing", "differs", "mapped")
# lines of a file that the text names one by one
_LINES_SHOWN = 4
# of a column; what is longer pushes the rest of its line to the right
_WIDEST = 70


@dataclass(frozen=True)
class _Report:
    """Names with their places, files that could not be read, and files that were written."""

    files: int
    places: dict[str, list[tuple[Path, Use]]]
    problems: list[str]
    written: list[Path]

    def findings(self) -> list[Finding]:
        from ..migration.names import finding

        return sorted(map(finding, self.places), key=lambda one: (_STATUSES.index(one.status), one.name))


def add_migrate(commands: click.Group) -> None:
    """Give a group of commands the command `migrate`."""

    @commands.command()
    @click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
    @click.option("--write", is_flag=True, help="Rewrite the imports in the files.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    def migrate(paths: tuple[Path, ...], write: bool, as_json: bool) -> None:
        """What the programs PATHS take from TorchRec: mapped to ours, behaving differently, or missing.

        PATHS are files, and folders for all .py and .ipynb files below them but those of virtual environments and
        hidden folders. The code cells of a notebook are one program. Nothing of the programs is run. With --write,
        what `shardwise` has is imported from there and the rest from `shardwise.torchrec.<TorchRec's path>`; nothing
        but import statements changes. Names inside strings, star imports and lines for IPython are left alone. Ends
        with status 1 if a name is missing, a file cannot be read or written, or a folder has no program.
        """
        if find_spec("libcst") is None:
            raise click.ClickException(f"migrate reads programs with libcst: {how_to_install('migrate')}")
        report = _read([*_programs(paths)], write)
        bare = [path for path in paths if path.is_dir() and next(_below(path), None) is None]
        report.problems.extend(f"{path}: no .py or .ipynb file below it" for path in bare)
        if as_json:
            print_json(_as_json(report))
        else:
            _print(report)
        sys.exit(1 if report.problems or any(one.status == "missing" for one in report.findings()) else 0)


def _programs(paths: Iterable[Path]) -> Iterator[Path]:
    """The files themselves and those below the folders, each once."""
    seen: set[Path] = set()
    for path in paths:
        for one in _below(path) if path.is_dir() else [path]:
            if one.resolve() not in seen:
                seen.add(one.resolve())
                yield one


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        inside = (name for name in sorted(folders) if not name.startswith("."))
        folders[:] = [name for name in inside if not (Path(place) / name / "pyvenv.cfg").is_file()]
        yield from (Path(place) / name for name in sorted(files) if name.endswith((".py", ".ipynb")))


def _read(files: Sequence[Path], write: bool) -> _Report:
    from ..migration.notebook import is_notebook, read_notebook
    from ..migration.source import Unreadable, read_program
    from ..untrusted import read_regular

    report = _Report(len(files), {}, [], [])
    for file in files:
        try:
            source = read_regular(file)
            program = (read_notebook if is_notebook(file.name, source) else read_program)(source)
            for use in program.uses:
                report.places.setdefault(use.name, []).append((file, use))
            if write and program.rewritten != source:
                _replace(file, program.rewritten)
                report.written.append(file)
        except Unreadable as error:
            report.problems.append(f"{file}:{_line(error)}: {error}")
        except OSError as error:
            report.problems.append(f"{file}: {error.strerror}")
    return report


def _replace(file: Path, content: bytes) -> None:
    """Write `content` beside the file and put it in its place, so that a reader sees the old or the new."""
    # of a link, the file that it leads to
    file = file.resolve()
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as beside:
            beside.write(content)
        shutil.copymode(file, name)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {status: sum(one.status == status for one in findings) for status in _STATUSES}


def _as_json(report: _Report) -> dict[str, Any]:
    findings = report.findings()
    names = [
        {
            "name": one.name, "status": one.status, "ours": one.ours or None, "hint": one.hint or None,
            "differences": [{"link": row.link, "row": row.begins} for row in one.differences],
            "places": [
                {"file": str(file), **({} if use.cell is None else {"cell": use.cell}), "line": use.line}
                for file, use in report.places[one.name]
            ],
        }
        for one in findings
    ]  # fmt: skip
    return {
        "files": report.files, "counts": _counts(findings), "names": names, "problems": report.problems,
        "written": [*map(str, report.written)],
    }  # fmt: skip


def _print(report: _Report) -> None:
    findings = report.findings()
    lines = [("TorchRec", "status", "here", "where")]
    lines += [(one.name, one.status, _here(one), _where(report.places[one.name])) for one in findings]
    widths = [min(_WIDEST, max(map(len, column))) for column in list(zip(*lines, strict=True))[:-1]]
    for *cells, where in lines if findings else ():
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), where]))
    if rows := list(dict.fromkeys(row for one in findings for row in one.differences)):
        click.echo("\nWhat differs:")
        for row in rows:
            about = sorted({one.name.rpartition(".")[2] for one in findings if row in one.differences})
            click.echo(f"  {row.link}: {row.begins} ... ({', '.join(about)})")
        click.echo("")
    for line in [*report.problems, *(f"rewrote {file}" for file in report.written)]:
        click.echo(line)
    unread = f" ({len(report.problems)} with a problem)" if report.problems else ""
    mapped, differing, missing = (_counts(findings)[status] for status in reversed(_STATUSES))
    click.echo(
        f"{report.files} file{'s' * (report.files != 1)}{unread}: "
        f"{mapped} names mapped, {differing} that behave differently, {missing} missing"
    )


def _here(one: Finding) -> str:
    if one.ours:
        return one.ours
    if one.name.endswith(".*"):
        return "import what is used by name"
    return one.hint or "nothing like it"


def _where(places: Sequence[tuple[Path, Use]]) -> str:
    """Each file with its lines, the first of them if they are many."""
    lines: dict[Path, list[str]] = {}
    for file, use in places:
        lines.setdefault(file, []).append(_line(use))
    shown = []
    for file, all_of_it in lines.items():
        more = f" and {len(all_of_it) - _LINES_SHOWN} more" if len(all_of_it) > _LINES_SHOWN else ""
        shown.append(f"{file}:{', '.join(all_of_it[:_LINES_SHOWN])}{more}")
    return "; ".join(shown)


def _line(place: Use | Unreadable) -> str:
    return str(place.line) if place.cell is None else f"cell {place.cell}:{place.line}"
