"""What the commands have in common: errors as one line, JSON, tables that fit the terminal, bars on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from .._version import in_checkout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# of a file or a pipe; of a terminal that does not say
_FILE_COLUMNS, _TERMINAL_COLUMNS = 160, 80
# what a column that folds must keep
_READABLE = 16
# of what takes no longer nothing is shown
_QUICK_S = 1.0


class Wrong(click.ClickException):
    """A file or an argument that is no good: one line, and status 2."""

    exit_code = 2


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
        told = f"`shardwise {command}` works on a checkout of shardwise: in its folder, `python -m shardwise {command}`"
        raise click.UsageError(told)


def require_writable(path: Path) -> None:
    """Say now that a file cannot be written, not after minutes of work."""
    there = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise click.UsageError(f"{path} cannot be written: {error.strerror or error}") from None


@contextmanager
def one_line(*kinds: type[Exception], told_as: type[click.ClickException] = click.ClickException) -> Iterator[None]:
    """Errors of these kinds are one line and a status, not a traceback."""
    try:
        yield
    except kinds as error:
        # the text of a KeyError is in quotes
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise told_as(str(text)) from error


def print_json(data: Any, indent: int = 2) -> None:
    """JSON, for programs."""
    click.echo(json.dumps(data, indent=indent))


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--json`, the argument `as_json`: one document on stdout and nothing else there."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(command)


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
            table.columns = kept
    shown.print(table)
    if left_out:
        names = ", ".join(left_out)
        click.echo(f"columns left out, for there is no room: {names}; COLUMNS=160 shows more", err=True)


def _least(table: Table, shown: Console) -> int:
    """Columns of the terminal that a table needs where what folds is still readable."""
    width = 0
    for column in table.columns:
        widest = max((shown.measure(cell).maximum for cell in (column.header, *column.cells)), default=0)
        width += (widest if column.no_wrap else min(widest, _READABLE)) + 2
    return width


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
def told_warnings() -> Iterator[list[str]]:
    """What warns inside is a line each on stderr, once, after all of it; yields the lines, which it fills then."""
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=UserWarning)
        try:
            yield lines
        finally:
            meant = (str(one.message) for one in caught if issubclass(one.category, UserWarning))
            lines += dict.fromkeys(" ".join(text.split()) for text in meant)
            mark = click.style("Warning:", fg="yellow", bold=True)
            context = click.get_current_context(silent=True)
            for line in lines:
                click.echo(f"{mark} {line}", err=True, color=context.color if context is not None else None)


@contextmanager
def progress(doing: str, total: float | None = None, *, unit: str = "") -> Iterator[Callable[..., None]]:
    """A bar on stderr; what it yields changes it, by the arguments of rich's `Progress.update`.

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
    # no refreshing thread: processes are forks of this one
    with Progress(*columns, console=console(stderr=True), auto_refresh=False) as shown:
        task = shown.add_task(doing, total=total)
        yield lambda **change: shown.update(task, refresh=True, **change)
