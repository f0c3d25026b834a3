"""`shardwise kernels run`: the compiled kernels executed on this machine's CPU, and held to their references."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click

    from ..perf.gpu.cases.runs import Missing, Outcome
    from ..perf.gpu.launches import Cut


def add_run(kernels: click.Group) -> None:
    """Give a group of commands the command `run`."""
    import click

    @kernels.command()
    @click.option("--kernel", default="", metavar="TEXT", help="Only cases with this in their name or their kernels'.")
    @click.option("--all", "every", is_flag=True, help="Every rule, dtype, format and odd batch; then each barrier.")
    @click.option(
        "--barriers/--no-barriers", default=None, help="Take each barrier out in turn.  [default: with --all]"
    )
    @click.option("--shuffle", is_flag=True, help="Programs of a launch in another order than the grid's.")
    @click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write all of it here.")
    @click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.", show_default=True)
    def run(kernel: str, every: bool, barriers: bool | None, shuffle: bool, file: Path | None, jobs: int) -> None:
        """Run every kernel as compiled for sm_90, without a GPU, and compare what it gives with its reference.

        Ops of the library run end to end on small inputs: each launch is compiled as on a GPU, and its PTX is executed,
        program by program, on the CPU. Reported are addresses outside of every buffer, misaligned vector accesses,
        races within a program and between programs, reads of shared memory that nobody wrote, threads that miss a
        barrier, and results that differ from the reference by more than is allowed (perf/gpu/cases/tolerances.py).
        With --all each barrier is then taken out of its program, which has to be reported too, unless the accesses that
        it alone orders are seen to be of one thread each.

        Prints a line for each kernel: cases, launches, instructions, faults, the largest difference by what was
        allowed, and the stream that uses least of the 32-byte sectors that it touches. Ends with status 1 where
        anything is wrong. The usual cases take a minute, --all a quarter of an hour on two cores.
        """
        from ..kernels._op import HAS_TRITON, INTERPRETED

        if not HAS_TRITON:
            raise click.UsageError("triton is not installed, and it is what compiles the kernels: pip install triton")
        if INTERPRETED:
            raise click.UsageError("TRITON_INTERPRET is set: the kernels are interpreted, not compiled; unset it")
        from ..perf.gpu.cases import runs

        begin = perf_counter()
        chosen = runs.select(kernel, every)
        if not chosen:
            where = "no case" if every else "no usual case"
            raise click.UsageError(
                f"{where} has {kernel!r} in its name or in its kernels'; names are like 'pooled lookup, D=128' and"
                " 'update.update'; --all has more"
            )
        try:
            ran, cut = _run([case.name for case in chosen], every if barriers is None else barriers, shuffle, jobs)
        except RuntimeError as error:
            raise click.ClickException(f"a process ended: {error}; --jobs 1 shows where") from None
        command = f"shardwise kernels run{f' --kernel {kernel!r}' * bool(kernel)}{' --all' * every}"
        found = runs.document(ran, cut, command + " --shuffle" * shuffle, perf_counter() - begin)
        if file is not None:
            file.write_text(json.dumps(found, indent=1) + "\n")
        sys.exit(_report(found, runs.unexplained(cut)))


def _run(names: Sequence[str], barriers: bool, shuffle: bool, jobs: int) -> tuple[list[Outcome], list[Missing]]:
    from ..perf.gpu.cases import runs

    ran: list[Outcome] = []
    cut: list[Missing] = []
    with runs.Workers(jobs) as workers:
        with _progress("executing", len(names)) as tell:
            for outcome in workers.outcomes([(name, None) for name in names], shuffle=1 if shuffle else None):
                ran.append(outcome)
                tell(outcome.case)
        if barriers:
            with _progress("taking barriers out", runs.count_barriers(ran)) as tell:
                for missing in runs.barriers_cut(ran, workers):
                    cut.append(missing)
                    tell(missing.cut.kernel)
    return ran, cut


@contextmanager
def _progress(doing: str, total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress

    # no refreshing thread: the processes are forks of this one
    with Progress(console=Console(stderr=True), auto_refresh=False) as shown:
        task = shown.add_task(doing, total=total)

        def tell(what: str) -> None:
            shown.update(task, advance=1, description=f"{doing}: {what[:60]}", refresh=True)

        yield tell


def _report(found: dict[str, Any], unexplained: Sequence[Cut]) -> int:
    """Print a line for each kernel and each fault; the status of the process."""
    from rich.console import Console
    from rich.table import Table

    table = Table("kernel", box=None, pad_edge=False)
    for column in ("cases", "launches", "instructions", "barriers", "faults"):
        table.add_column(column, justify="right")
    table.add_column("largest difference")
    table.add_column("least of its sectors")
    for name, entry in found["kernels"].items():
        barriers = [said for each in entry["barriers"].values() for said in each]
        shown = sum(said is not None for said in barriers)
        table.add_row(
            name, *(str(entry[column]) for column in ("cases", "launches", "instructions")),
            f"{shown}/{len(barriers)}" if barriers else "", str(len(entry["faults"])),
            "; ".join(f"{value:.1e} {kind}" if value else kind for kind, value in entry["differences"].items()),
            _least(entry["sector_share"]),
        )  # fmt: skip
    # a line of the table is a line of the output, on a narrow terminal and in a file
    console = Console(highlight=False)
    console.width = max(console.width, 170)
    console.print(table)
    for one in unexplained:
        print(f"{one.kernel}: nothing reports that barrier {one.barrier} of program {one.variant} is missing")
    for sentence in found["wrong"]:
        print(sentence)
    wrong = len(found["wrong"]) + len(unexplained)
    total = f"{found['cases']} cases, {found['instructions']} instructions, {found['seconds']} s"
    if found["barriers"]["cut"]:
        total += f", {found['barriers']['reported']} of {found['barriers']['cut']} missing barriers reported"
        for kind in ("redundant", "left"):
            if found["barriers"][kind]:
                total += f", {found['barriers'][kind]} {kind}"
    print(f"{total}: {f'{wrong} things are wrong' if wrong else 'no fault, every result as close as it must be'}")
    return 1 if wrong else 0


def _least(shares: dict[str, float]) -> str:
    if not shares:
        return ""
    what = min(shares, key=lambda name: shares[name])
    return f"{shares[what]:.0%} {what}"
