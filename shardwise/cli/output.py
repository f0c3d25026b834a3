"""What the commands have in common: errors as one line, JSON, tables as wide as they are, progress on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._version import in_checkout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class Wrong(click.ClickException):
    """A file or an argument that is no good: one line, and status 2."""

    exit_code = 2


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


def wide_console(width: int, *, soft_wrap: bool = False) -> Console:
    """Where a line of a table is a line of the output, on a narrow terminal and in a file."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=soft_wrap)
    console.width = max(console.width, width)
    return console


def table_of(*left: str, right: tuple[str, ...], last: tuple[str, ...] = ()) -> Table:
    """A table without lines: columns to the left, numbers to the right, then columns to the left again."""
    from rich.table import Table

    table = Table(*left, box=None, pad_edge=False)
    for column in right:
        table.add_column(column, justify="right")
    for column in last:
        table.add_column(column)
    return table


@contextmanager
def progress(doing: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """A bar on stderr; what it yields changes it, by the arguments of rich's `Progress.update`."""
    from rich.console import Console
    from rich.progress import Progress

    # no refreshing thread: processes are forks of this one
    with Progress(console=Console(stderr=True), auto_refresh=False) as shown:
        task = shown.add_task(doing, total=total)
        yield lambda **change: shown.update(task, refresh=True, **change)
