"""Output of all commands: errors as one line, JSON, tables that fit the terminal, bars on stderr.

A command ends with status `FINE`; with `NO` where that is its answer: things differ, a promise is broken, a check
fails, a name is missing; with `WRONG` for arguments and files that are no good. help.py ends it with 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from .._version import in_checkout
from .help import Command

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column, Table

FINE, NO, WRONG = 0, 1, 2
# of a file or a pipe; of a terminal that does not say
_FILE_COLUMNS, _TERMINAL_COLUMNS = 160, 80
# what a column that folds must keep
_READABLE = 16
# of what takes no longer nothing is shown
_QUICK_S = 1.0
_BLANKS = re.compile(r"(?: |\x1b\[[\d;]*m)+$")


class Wrong(click.ClickException):
    """A file or an argument that is no good: one line, and status 2."""

    exit_code = WRONG


class Finite(click.FloatRange):
    """A number within a range; "nan" and "inf" are none, which no range of click's keeps out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return number


def needs_checkout(command: str) -> None:
    """Refuse a command whose rooms a wheel leaves out."""
    if not in_checkout():
        message = (
            f"`shardwise {command}` works on a checkout of shardwise: in its folder, `python -m shardwise {command}`"
        )
        raise click.UsageError(message)


class Place(click.Path):
    """A path as `click.Path` takes it, or a URL, of which is asked later whether something is there."""

    name = "path"

    def __init__(self, exists: bool = False, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(exists=exists, file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A Path or a `Url`."""
        if "://" not in str(value):
            return super().convert(value, param, ctx)
        # it comes with torch
        load_torch()
        from ..sharding.checkpoint.places import locate

        try:
            return locate(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def require_writable(path: Any) -> None:
    """Say now that a file cannot be written, not after minutes of work; of a URL the store says so."""
    if not isinstance(path, Path):
        return
    there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror or error}") from None


@contextmanager
def one_line(*kinds: type[Exception], raised_as: type[click.ClickException] = Wrong) -> Iterator[None]:
    """Errors of these kinds are one line and a status, not a traceback."""
    try:
        yield
    except kinds as error:
        # the text of a KeyError is in quotes, that of an OSError has a number before it
        text: object = error.args[0] if isinstance(error, KeyError) and error.args else error
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        # a library's sentence may have lines of its own
        raise raised_as("; ".join(line.strip() for line in str(text).splitlines() if line.strip())) from error


def print_json(data: Any) -> None:
    """The one document of `--json`. JSON has no word for NaN and infinity: they are null."""
    click.echo(json.dumps(_in_json(data), indent=2, allow_nan=False, default=str))


def _in_json(data: Any) -> Any:
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Mapping):
        return {key: _in_json(value) for key, value in data.items()}
    return [*map(_in_json, data)] if isinstance(data, (list, tuple)) else data


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, the argument `as_json`: one document on stdout and nothing else there."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


class Writing(Command):
    """A command of options alone with `--out FILE` beside `--json`; `--json FILE`, its first name, is taken for it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = []
        for place, argument in enumerate(args):
            option, equals, file = argument.partition("=")
            followed = equals or (place + 1 < len(args) and not args[place + 1].startswith("-"))
            named.append(f"--out{equals}{file}" if option == "--json" and followed else argument)
        return super().parse_args(ctx, named)


def out_option(contents: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--out FILE`, the argument `out`, for a command of the class `Writing`."""
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--out", type=path, help=f"{contents}; scripts may say --json FILE.")


def load_torch() -> None:
    """Import torch, which takes seconds; on a terminal stderr says so meanwhile.

    Raises:
        Wrong: it does not import.
    """
    if "torch" in sys.modules:
        return
    with waiting("importing torch"):
        try:
            import_module("torch")
        except (ImportError, OSError) as error:
            why = " ".join(f"{error}".split())[:300]
            raise Wrong(f"torch does not import: {why}; `shardwise doctor` says more") from None


@contextmanager
def waiting(doing: str) -> Iterator[None]:
    """A line on a terminal's stderr that is there while something is done; elsewhere nothing."""
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(f"{doing} ...")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write(f"\r{'':{len(doing) + 4}}\r")
            sys.stderr.flush()


def console(*, stderr: bool = False) -> Console:
    """Where tables are printed: as wide as the terminal, in a file or a pipe 160 columns; $COLUMNS counts for both.

    What is printed is taken as it stands: brackets and colons in names of tables and paths mean nothing.
    """
    from rich.console import Console

    context = click.get_current_context(silent=True)
    return Console(
        stderr=stderr,
        width=_width(sys.stderr if stderr else sys.stdout),
        no_color=True if context is not None and context.color is False else None,
        markup=False,
        emoji=False,
        highlight=False,
    )


def _width(stream: TextIO) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    if not stream.isatty():
        return _FILE_COLUMNS
    try:
        # 0 of a terminal that was not told its size
        return os.get_terminal_size(stream.fileno()).columns or _TERMINAL_COLUMNS
    except OSError:
        return _TERMINAL_COLUMNS


def table_of(*left: str, right: tuple[str, ...] = (), last: tuple[str, ...] = ()) -> Table:
    """A table without lines: columns to the left, numbers to the right, then columns to the left again.

    What is wider than its column is folded; numbers stay whole.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    for column in last:
        table.add_column(column, overflow="fold")
    return table


def print_table(table: Table, *, drop: Sequence[str] = ()) -> None:
    """Print a table that fits the console: what is wide is folded, and columns of `drop` go, one by one.

    A column goes where the others could not have `_READABLE` columns each, or all that they hold; stderr then says so.
    """
    shown, left_out = console(), []
    for name in drop:
        if _least(table, shown) <= shown.width:
            break
        kept = [column for column in table.columns if column.header != name]
        if len(kept) < len(table.columns):
            left_out.append(name)
            # rich takes the place of a column from it
            table.columns = [replace(column, _index=place) for place, column in enumerate(kept)]
    _divide(table, shown)
    show(table)
    if left_out:
        names = ", ".join(left_out)
        click.echo(f"columns left out, for there is no room: {names}; COLUMNS=160 shows more", err=True)


def show(renderable: RenderableType) -> None:
    """Print what rich can without the blanks that fill it to its width."""
    out = console()
    with out.capture() as printed:
        out.print(renderable)
    for line in printed.get().splitlines():
        click.echo(_trimmed(line), color=out.is_terminal or None)


def _trimmed(line: str) -> str:
    """A line without blanks at its end, which may lie before the end of a colour."""
    return _BLANKS.sub(lambda match: match[0].replace(" ", ""), line)


def _least(table: Table, shown: Console) -> int:
    """Columns of the terminal that a table needs where what folds is still readable."""
    widths = [(column, _widest(column, shown)) for column in table.columns]
    return sum(width if column.no_wrap else min(width, _READABLE) for column, width in widths) + 2 * len(widths) - 2


def _divide(table: Table, shown: Console) -> None:
    """Give what folds equal parts of what numbers leave, and less to what needs less; rich cuts numbers, too."""
    if _least(table, shown) > shown.width:
        return
    widths = sorted(((_widest(column, shown), column) for column in table.columns), key=lambda pair: pair[0])
    room = shown.width - 2 * len(widths) + 2 - sum(width for width, column in widths if column.no_wrap)
    folding = [pair for pair in widths if not pair[1].no_wrap]
    for place, (width, column) in enumerate(folding):
        column.width = min(width, room // (len(folding) - place))
        room -= column.width


def _widest(column: Column, shown: Console) -> int:
    """Columns of the terminal that the widest line of a column of a table takes."""
    return max(shown.measure(cell).maximum for cell in (column.header, *column.cells))


@contextmanager
def spinner(doing: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with what is being done, which a call changes, and for how long; gone in the end.

    It comes after a second, and only on a terminal. It turns in a thread, so nothing may fork beside it.
    """
    to = console(stderr=True)
    if not to.is_terminal:
        yield lambda _: None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    shown = Progress(*columns, console=to, transient=True)
    # beside what is being done the spinner and the time
    room = max(8, to.width - 12)
    task = shown.add_task(doing[:room], total=None)
    late = threading.Timer(_QUICK_S, shown.start)
    late.daemon = True
    late.start()
    try:
        yield lambda text: shown.update(task, description=text[:room])
    finally:
        late.cancel()
        late.join()
        shown.stop()


@contextmanager
def warning_lines() -> Iterator[list[str]]:
    """What warns inside is a line each on stderr, once, after all of it; yields the lines, which it fills then."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        try:
            yield lines
        finally:
            meant = (str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
            lines += dict.fromkeys(" ".join(text.split()) for text in meant)
            mark = click.style("Warning:", fg="yellow", bold=True)
            context = click.get_current_context(silent=True)
            for line in lines:
                click.echo(f"{mark} {line}", err=True, color=context.color if context is not None else None)


@contextmanager
def progress(doing: str, total: float | None = None, *, unit: str = "") -> Iterator[Callable[..., None]]:
    """A bar on a terminal's stderr while it lasts; what it yields changes it, as rich's `Progress.update` does.

    With `unit="bytes"` the numbers beside it are sizes.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    done: ProgressColumn = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), done, TimeRemainingColumn())
    to = console(stderr=True)
    # no refreshing thread: processes are forks of this one
    with Progress(*columns, console=to, auto_refresh=False, transient=True, disable=not to.is_terminal) as shown:
        task = shown.add_task(doing, total=total)
        yield lambda **change: shown.update(task, refresh=True, **change)
