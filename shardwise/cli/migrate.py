"""`shardwise migrate`: reports on programs that are written for TorchRec, and rewrites their imports."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._version import how_to_install
from .output import FINE, NO, WRONG, console, json_option, print_json, progress, show, waiting

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from ..migration.names import Finding
    from ..migration.report import Problem, ReadFile, Report
    from ..migration.source import Use
    from ..migration.trial import Trial

# files of a name, and lines of each, that the text names one by one
_FILES_SHOWN = 4
_LINES_SHOWN = 4
# at most of a name and of what is said of it, and what its places need beside them; else it has lines of its own
_WIDEST, _PLACES = 62, 28
# until a bar is shown
_SILENT_S = 1.0
_COLOURS = {"missing": "red", "numbers": "magenta", "error": "yellow", "looks": "cyan", "works": "green"}
# what a terminal would obey, and what cannot be written as UTF-8
_UNSEEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def add_migrate(commands: click.Group) -> None:
    """Give a group of commands the command `migrate`."""

    @commands.command()
    @click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
    @click.option("--diff", is_flag=True, help="Print what --write would change, for `patch -p0`.")
    @click.option("--write", is_flag=True, help="Rewrite the imports in the files.")
    @click.option("-v", "--verbose", is_flag=True, help="Say what shardwise does instead, and name every place.")
    @click.option("--run", is_flag=True, help="Try the program on two processes first, and report how far it came.")
    @click.option("--arguments", default="", metavar="TEXT", help="Of the program, for --run: '--epochs 1'.")
    @click.option("--timeout", default=300.0, show_default=True, help="Seconds after which --run stops the program.")
    @json_option
    def migrate(
        paths: tuple[Path, ...],
        diff: bool,
        write: bool,
        verbose: bool,
        run: bool,
        arguments: str,
        timeout: float,
        as_json: bool,
    ) -> None:
        """What the programs PATHS take from TorchRec: what works, behaves otherwise, or is missing.

        PATHS are files, and folders for all .py and .ipynb files below them but those of virtual environments and
        hidden folders. The code cells of a notebook are one program. With --write, what `shardwise` has is imported
        from there and the rest from `shardwise.torchrec.<TorchRec's path>`; nothing but import statements changes.
        Names inside strings, star imports and lines for IPython are left alone.

        Nothing of the programs is run, but with --run: then PATHS is one program, which runs as two ranks on the CPU,
        as `python -m shardwise.torchrec` runs it. Shown are the names that it took and where it stopped, not what it
        prints.

        Status 0: nothing is missing. 1: a name is missing, or the program stopped. 2: a file cannot be read or
        written, is no Python, or a folder has no program.
        """
        if diff and (write or as_json):
            raise click.UsageError(
                f"--diff writes nothing and prints no JSON: leave out {'--write' if write else '--json'}"
            )
        if run and (diff or write or len(paths) != 1 or paths[0].suffix != ".py"):
            raise click.UsageError("--run tries one program, a .py file, and goes without --diff and --write")
        if arguments and not run:
            raise click.UsageError("--arguments are those of the program that --run tries")
        if find_spec("libcst") is None:
            raise click.UsageError(f"migrate reads programs with libcst: {how_to_install('migrate')}")
        report = _read(paths, write)
        trial = _try(paths[0], arguments, timeout) if run and not report.problems else None
        if diff:
            _print_diff(report)
        elif as_json:
            print_json(_as_json(report) | ({"run": asdict(trial)} if trial else {}))
        else:
            _print(report, verbose)
            if trial is not None:
                _print_trial(trial)
        for problem in report.problems:
            _print_error(f"{_seen(str(problem.path))}:{problem.place and f'{problem.place}:'} {problem.message}")
        if diff:
            _print_error(_summary(report, "to rewrite"))
        sys.exit(
            WRONG
            if report.problems
            else NO
            if report.counts.missing or (trial is not None and not trial.works)
            else FINE
        )


def _read(paths: Sequence[Path], write: bool) -> Report:
    from ..migration.report import Problem, Report, programs, read_file, replace_file

    problems: list[Problem] = []
    files: list[ReadFile] = []
    written: list[Path] = []
    for path in _with_bar([*programs(paths, problems)]):
        read = read_file(path)
        if isinstance(read, Problem):
            problems.append(read)
            continue
        files.append(read)
        if write and read.changes:
            refused = replace_file(path, read.program.rewritten)
            if refused is None:
                written.append(path)
            else:
                problems.append(refused)
    return Report(files, problems, written)


def _try(program: Path, arguments: str, timeout_s: float) -> Trial:
    from ..migration.trial import try_program
    from ..sharding.testing.environment import serve_store

    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise click.BadParameter(f"{arguments!r} is no command line: {error}", param_hint="'--arguments'") from None
    # it ends with its last reference
    store = serve_store()
    with waiting("running the program on two ranks"):
        return try_program(program, words, timeout_s, store.port)


def _print_trial(trial: Trial) -> None:
    """How each rank ended, and what became of the names that the run took."""
    click.echo()
    for ending in trial.endings:
        if ending.status == 0:
            text = "ended well"
        else:
            how = "stopped from outside" if ending.status is None else f"ended with status {ending.status}"
            where = f" at {ending.place}" if ending.place else ""
            text = f"{how}{where}{f': {ending.error}' if ending.error else ''}"
        show(_text(f"rank {ending.rank} {text}", "" if ending.status == 0 else "red"))
    count = {
        status: sum(entry.status == status for entry in trial.findings) for status in ("works", "differs", "missing")
    }
    show(
        _text(
            f"It ran {trial.seconds:.0f} s and took {_many(len(trial.findings), 'name')}: {count['works']} served,"
            f" {count['differs']} served partly or otherwise, {count['missing']} not"
        )
    )
    for entry in trial.findings:
        if entry.status == "missing":
            show(_text(f"{entry.name}: {_here(entry)}", "red"))


def _with_bar(paths: Sequence[Path]) -> Iterator[Path]:
    """The paths, with a bar on stderr once they take their time."""
    with ExitStack() as stack:
        start = time.monotonic()
        advance: Callable[..., None] | None = None
        for number, path in enumerate(paths):
            if advance is None and time.monotonic() - start > _SILENT_S:
                advance = stack.enter_context(progress("reading", total=len(paths)))
            if advance is not None:
                advance(completed=number)
            yield path
        if advance is not None:
            advance(completed=len(paths))


def _as_json(report: Report) -> dict[str, Any]:
    names = [
        {
            "name": finding.name, "status": finding.status, "word": finding.word,
            "ours": finding.ours or None, "hint": finding.hint or None,
            "differences": [
                {key: getattr(row, key) for key in ("word", "torchrec", "shardwise", "why", "link")}
                for row in finding.differences
            ],
            "places": [
                {"file": str(file), **({} if use.cell is None else {"cell": use.cell}), "line": use.line}
                for file, use in report.places[finding.name]
            ],
        }
        for finding in report.findings
    ]  # fmt: skip
    return {
        "counts": {"files": len(report.files), **asdict(report.counts)},
        "files": [{"file": str(file.path), **asdict(file.counts)} for file in report.files],
        "names": names,
        "problems": [
            {"file": str(problem.path), "place": problem.place or None, "message": problem.message}
            for problem in report.problems
        ],
        "written": [*map(str, report.written)],
    }


def _print_diff(report: Report) -> None:
    """The diff on stdout, as bytes where it goes into a file or a pipe; where to apply it on stderr."""
    from ..migration.diff import folder_of, unified

    changed = [file for file in report.files if file.changes]
    if not changed:
        return
    working = Path.cwd()
    folder = folder_of((file.path for file in changed), working)
    stdout = sys.stdout.buffer
    on_terminal = sys.stdout.isatty()
    for file in changed:
        text = unified(file.path, file.source, file.program.rewritten, folder)
        if on_terminal:
            _print_coloured(text.decode(errors="replace"))
        else:
            stdout.write(text)
    stdout.flush()
    if folder != working.resolve():
        _print_error(f"The files are named as in {folder}: apply it there, with `patch -p0` or `git apply -p0`.")


def _print_coloured(text: str) -> None:
    for line in text.removesuffix("\n").split("\n"):
        head = line.startswith(("--- ", "+++ "))
        colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
        click.secho(_seen(line.removesuffix("\r")), fg=None if head else colour, bold=head)


def _print(report: Report, verbose: bool) -> None:
    using = [file for file in report.files if file.counts.names]
    tables = [_names_table(report, console().width, verbose)] if report.findings else []
    if report.differences:
        from ..migration.differences import WORDS

        legend = "; ".join(f"{word}: {meaning}" for word, meaning in WORDS.items())
        more = "" if verbose else " --verbose says what shardwise does instead."
        tables += [_text(f"What TorchRec does and shardwise does otherwise ({legend}).{more}", "bold")]
        tables += [_differences_table(report, verbose)]
    if len(using) > 1:
        tables.append(_files_table(using))
    for table in tables:
        show(table)
        click.echo()
    show(_text(_summary(report, "rewritten" if report.written else "to rewrite")))


def _names_table(report: Report, width: int, verbose: bool) -> RenderableType:
    """A line for each name where that fits, else a few."""
    from rich.table import Table

    rows = [
        (finding.word or finding.status, finding.name, _here(finding), _where(report.places[finding.name], verbose))
        for finding in report.findings
    ]
    names, here = (min(_WIDEST, max(len(row[column]) for row in rows)) for column in (1, 2))
    if len("missing") + 2 + names + 2 + here + 2 + _PLACES <= width:
        table = Table(box=None, pad_edge=False)
        for title, limit in (("status", 7), ("TorchRec", names), ("here", here), ("where", None)):
            table.add_column(title, overflow="fold", min_width=limit, max_width=limit)
        for status, *cells in rows:
            table.add_row(_text(status, _COLOURS[status]), *map(_text, cells))
        return table
    table = _two_columns()
    for status, name, *cells in rows:
        table.add_row(_text(status, _COLOURS[status]), _text(name, "bold"))
        for cell in cells:
            table.add_row("", _text(cell))
    return table


def _differences_table(report: Report, verbose: bool) -> RenderableType:
    table = _two_columns()
    for row in report.differences:
        about = dict.fromkeys(
            finding.name.rpartition(".")[2] for finding in report.findings if row in finding.differences
        )
        text = f"{row.torchrec} ({', '.join(about)})"
        table.add_row(_text(row.word, _COLOURS[row.word]), _text(text))
        if verbose:
            table.add_row("", _text(f"Here: {row.shardwise}"))
            table.add_row("", _text(f"Why: {row.why} ({row.link})"))
    return table


def _two_columns() -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _files_table(files: Sequence[ReadFile]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("file", overflow="fold")
    for title in ("names", "work", "differ", "missing", "imports"):
        table.add_column(title, justify="right", no_wrap=True)
    for file in files:
        counts = file.counts
        numbers = (counts.names, counts.works, counts.differs, counts.missing, counts.imports)
        table.add_row(_text(_seen(str(file.path))), *map(str, numbers))
    return table


def _summary(report: Report, imports: str) -> str:
    counts = report.counts
    number = counts.imports
    if report.written:
        number = sum(file.counts.imports for file in report.files if file.path in report.written)
    words = {"numbers": counts.numbers, "error": counts.error, "looks": counts.looks}
    by_word = (
        f" ({', '.join(f'{number} {word}' for word, number in words.items() if number)})" if counts.differs else ""
    )
    unread = f" ({len(report.problems)} with a problem)" if report.problems else ""
    files, names = _many(len(report.files), "file"), _many(counts.names, "name")
    return (
        f"{files} read{unread}, {names} of TorchRec: {counts.works} work, {counts.differs} differ{by_word}, "
        f"{counts.missing} missing; {_many(number, 'import')} {imports}"
    )


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _here(finding: Finding) -> str:
    if finding.ours:
        return finding.ours
    if finding.name.endswith(".*"):
        return "import what is used by name"
    return finding.hint or "nothing like it"


def _where(places: Sequence[tuple[Path, Use]], verbose: bool) -> str:
    """The first files, each with its first lines, or all."""
    lines: dict[Path, list[str]] = {}
    for file, use in places:
        lines.setdefault(file, []).append(use.place)
    files, each = (len(places), len(places)) if verbose else (_FILES_SHOWN, _LINES_SHOWN)
    shown = []
    for file, all_of_it in [*lines.items()][:files]:
        more = f" and {len(all_of_it) - each} more" if len(all_of_it) > each else ""
        shown.append(f"{_seen(str(file))}:{', '.join(all_of_it[:each])}{more}")
    if len(lines) > files:
        shown.append(f"and {_many(len(lines) - files, 'more file')}")
    return "\n".join(shown)


def _text(text: str, style: str = "") -> Text:
    """Text for a table, in which no bracket is markup and no character a command to the terminal."""
    from rich.text import Text

    return Text("\n".join(map(_seen, text.split("\n"))), style=style, overflow="fold")


def _seen(text: str) -> str:
    return _UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text)


def _print_error(text: str) -> None:
    """A line on stderr, whole where that is a file or a pipe."""
    err = console(stderr=True)
    err.print(_text(text), soft_wrap=not err.is_terminal)
