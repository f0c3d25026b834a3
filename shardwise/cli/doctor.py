"""`shardwise doctor`: a check-up of this machine, of what shardwise runs on here, and of every family of its ops."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import click

from .output import FINE, NO, Finite, console, json_option, print_json, show

if TYPE_CHECKING:
    from rich.console import Console

    from ..perf.doctor.findings import Section

# colours of marks, and the width of their column
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red", "not tested": "cyan"}
MARK_COLUMNS, WHAT_COLUMNS = 10, 22
# where stderr is no terminal, a line at most so often, in seconds
LINE_S = 1.0

Tell = Callable[[str, int, int], None]


def add_doctor(commands: click.Group) -> None:
    """Give a group of commands the command `doctor`."""

    @commands.command()
    @click.option("--device", metavar="NAME", help="Only cpu, cuda (every GPU) or cuda:0.  [default: all of them]")
    @click.option("--quick", is_flag=True, help="Measure nothing and run no op.")
    @click.option(
        "--seconds", type=Finite(min=0, min_open=True), default=20.0, show_default=True,
        help="For the self-test at most, compiling apart.",
    )  # fmt: skip
    @json_option
    def doctor(device: str | None, quick: bool, seconds: float, as_json: bool) -> None:
        """Check this machine: versions, devices, bandwidths, links, every family of ops, what is tuned.

        Each line has a mark: ok; note, for what works and could be better, or should be known; problem, for what is
        broken; not tested. The self-test runs every family of ops on small inputs by every path that they may take
        here (Triton, numba, torch alone) and holds values and gradients to references in plain torch. Loops and
        kernels are compiled first, which takes a minute where it was never done, and is kept.

        Ends with status 1 where there is a problem. Needs no GPU, no network and no checkout. See docs/howto/doctor.md.
        """
        begin = time.perf_counter()
        with _progress() as (update, pause):
            update("importing torch", 0, 0)
            from ..perf.doctor.examine import device_names, document, examine
            from ..perf.doctor.findings import PROBLEM, count

            chosen = _chosen(device, device_names())
            sections: list[Section] = []
            for section in examine(chosen, quick=quick, seconds=seconds, tell=update):
                sections.append(section)
                if not as_json:
                    with pause():
                        _print(section)
        if as_json:
            print_json(document(sections, time.perf_counter() - begin))
        else:
            click.echo(_summary(sections, time.perf_counter() - begin))
        sys.exit(NO if count(sections, PROBLEM) else FINE)


def _chosen(device: str | None, present: list[str]) -> list[str]:
    """The devices that an option names, of those that are there."""
    if device is None:
        return present
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise click.BadParameter(f"{device!r} is no device: expected cpu, cuda or cuda:0", param_hint="--device")
    chosen = [name for name in present if name == device or (device == "cuda" and name != "cpu")]
    if not chosen:
        there = ", ".join(present)
        raise click.BadParameter(f"torch finds no device {device!r} here; there is {there}", param_hint="--device")
    return chosen


def _print(section: Section) -> None:
    """A heading, and a line for each finding: its mark, what it is about, what is so, and how to mend it."""
    from rich.table import Table
    from rich.text import Text

    to = console()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(width=MARK_COLUMNS, no_wrap=True)
    # a third of a narrow terminal at most
    table.add_column(width=min(WHAT_COLUMNS, max(8, to.width // 4)), overflow="fold")
    table.add_column(overflow="fold")
    for finding in section.findings:
        text = Text(finding.text)
        if finding.mend:
            text.append(f"\n-> {finding.mend}", style="bold")
        table.add_row(Text(finding.mark, style=STYLES[finding.mark]), finding.what, text)
    show(Text(f"\n{section.name}", style="bold"))
    show(table)


def _summary(sections: list[Section], seconds: float) -> str:
    """How many of which mark, in one line."""
    from ..perf.doctor.findings import NOTE, PROBLEM, UNTESTED, count

    problems, notes, untested = (count(sections, mark) for mark in (PROBLEM, NOTE, UNTESTED))
    text = f"{problems} problem{'s' * (problems > 1)}" if problems else "nothing is wrong"
    text += f", {notes} note{'s' * (notes > 1)}" if notes else ""
    text += f", {untested} not tested" if untested else ""
    return f"\n{text} ({seconds:.0f} s)"


@contextmanager
def _progress() -> Iterator[tuple[Tell, Callable[[], AbstractContextManager[None]]]]:
    """A bar on stderr that moves by itself, and how to take it away for a while; lines where that is no terminal."""
    to = console(stderr=True)
    if not to.is_terminal:
        yield _lines(to), _nothing
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn(),
        TimeElapsedColumn(),
    )  # fmt: skip
    # it refreshes in a thread of its own: nothing here forks
    with Progress(*columns, console=to, transient=True) as shown:
        task = shown.add_task("", total=None)

        def update(doing: str, done: int, total: int) -> None:
            shown.update(task, description=doing[: to.width // 2], completed=done, total=total or None)

        @contextmanager
        def pause() -> Iterator[None]:
            shown.stop()
            yield
            shown.start()

        yield update, pause


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _lines(to: Console) -> Tell:
    last = float("-inf")

    def print_line(doing: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_S:
            last = time.monotonic()
            to.print(f"doctor: {doing}" + (f" ({done} of {total})" if total else ""), soft_wrap=True)

    return print_line
