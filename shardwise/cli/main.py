"""The command line, `shardwise` or `python -m shardwise`. Needs click and rich, the extra `cli`.

`kernels check` compiles every kernel for GPUs that need not be present and holds what comes out to what is promised;
`kernels run` executes what is compiled, on the CPU (kernels_run.py); `kernels autotune` times their configs
(tune.py).
`ckpt` looks at checkpoints and writes them anew (ckpt.py). `migrate` reports on programs written for TorchRec
(migrate.py). `perf` measures and compares (perf.py). `plan` plans where tables go (plan.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .._version import __version__, how_to_install, in_checkout

if TYPE_CHECKING:
    import click

    from ..perf.compile.cases import Case
    from ..perf.compile.compiled import Report


def main() -> None:
    """Run the command that the arguments of the process name."""
    missing = [library for library in ("click", "rich") if find_spec(library) is None]
    if missing:
        sys.exit(f"shardwise: the command line needs {' and '.join(missing)}: {how_to_install('cli')}")
    commands()(prog_name="shardwise")


def commands() -> click.Group:
    """The commands, for click to run."""
    import click

    from ..perf.compile.compiled import TARGETS
    from .ckpt import add_ckpt
    from .export import add_export
    from .kernels_run import add_run
    from .migrate import add_migrate
    from .perf import add_perf
    from .plan import add_plan
    from .tune import add_autotune

    @click.group(context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__)
    def shardwise() -> None:
        """Sharded embedding tables for PyTorch recommender models."""

    @shardwise.group()
    def kernels() -> None:
        """About the Triton kernels."""

    @kernels.command()
    @click.option("--target", "targets", multiple=True, type=click.Choice([*TARGETS]), help="Default: all of them.")
    @click.option("--kernel", default="", metavar="TEXT", help="Only cases with this in their name.")
    @click.option("--candidates", is_flag=True, help="Also what the tuner may try at the main dims.")
    @click.option("--changed", is_flag=True, help="Only kernels that have not passed as they are now on this Triton.")
    @click.option("--record", is_flag=True, help="Write into perf/compile/checked.json which passed on this Triton.")
    @click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.", show_default=True)
    def check(targets: tuple[str, ...], kernel: str, candidates: bool, changed: bool, record: bool, jobs: int) -> None:
        """Compile every kernel as launches ask for it and as tuned files say, without a GPU.

        Prints a line for each case and target: registers of a thread, spilled bytes, bytes of shared memory, barriers,
        what a warp waits for in an iteration (as `kernels registers` says), and how many loads and stores of how many
        bytes ("5x16"). Of some targets a part of all cases is compiled (perf/compile/compiled.py). Ends with status 1 and a
        line for each promise that a case breaks: a spill, a failing compiler, a narrow access to aligned rows, a row
        that is gathered late, and others (perf/compile/checks.py).
        """
        from ..kernels._op import HAS_TRITON, INTERPRETED, triton
        from ..perf.compile import checked
        from ..perf.compile.cases import cases
        from ..perf.compile.tuning_space import candidate_cases, tuned_cases

        if not HAS_TRITON:
            raise click.UsageError("triton is not installed, and it is what compiles the kernels: pip install triton")
        if INTERPRETED:
            raise click.UsageError("TRITON_INTERPRET is set: the kernels are interpreted, not compiled; unset it")
        if record and (targets or kernel or candidates):
            raise click.UsageError(
                "--record is for a check of all kernels, not with --target, --kernel or --candidates"
            )
        if record and not in_checkout():
            raise click.UsageError("--record writes into a checkout of shardwise: run it there")
        try:
            # also before a check of some minutes that ends with writing it
            table = checked.read_table() if changed or record else {}
        except ValueError as error:
            raise click.ClickException(str(error)) from None
        launched = [*cases(), *tuned_cases()]
        # of what is compiled now, whatever becomes of the files meanwhile
        asked = checked.fingerprints(launched)
        known = checked.changed(launched, table, triton.__version__) if changed else launched
        more = candidate_cases() if candidates else []
        chosen = [case for case in (*known, *more) if kernel in case.name]
        if not any(kernel in case.name for case in (*launched, *more)):
            raise click.UsageError(f"no case has {kernel!r} in its name; names are like 'pooled_lookup D=128 fp32'")
        if not chosen:
            those = f"every kernel with {kernel!r} in its name" if kernel else "every kernel"
            print(f"{those} passed on triton {triton.__version__} as it is now")
        broken = _check(chosen, targets or [*TARGETS], jobs) if chosen else []
        if record:
            failing = {checked.group(case) for case in broken}
            checked.record({name: found for name, found in asked.items() if name not in failing}, triton.__version__)
        sys.exit(1 if broken else 0)

    @kernels.command()
    @click.option("--target", "targets", multiple=True, type=click.Choice([*TARGETS]), help="Default: four of them.")
    @click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.", show_default=True)
    def registers(targets: tuple[str, ...], jobs: int) -> None:
        """Print what typical kernels take and wait for, compiled without a GPU, as a table of Markdown.

        Registers of a thread on each target; then, on the first of them, spilled bytes, bytes of shared memory,
        barriers, and of the longest loop the latencies that one warp alone waits in an iteration and how often it waits
        for memory in turn (perf/compile/scoreboard.py; NVIDIA's only); loads and stores of 8 bytes and more.
        """
        from ..kernels._op import HAS_TRITON, INTERPRETED, triton
        from ..perf.compile.cases import cases
        from ..perf.compile.compiled import TYPICAL, WHOLE

        if not HAS_TRITON or INTERPRETED:
            raise click.UsageError("triton is not installed, or TRITON_INTERPRET is set: nothing is compiled")
        named = {case.name: case for case in cases()}
        if unknown := [name for name in TYPICAL if name not in named]:
            raise click.ClickException(
                f"no case is called {unknown[0]!r} any more: correct TYPICAL in perf/compile/compiled.py"
            )
        print(f"triton {triton.__version__}\n")
        _print_registers([named[name] for name in TYPICAL], targets or WHOLE, jobs)

    add_run(kernels)
    add_autotune(kernels)
    add_ckpt(shardwise)
    add_export(shardwise)
    add_migrate(shardwise)
    add_perf(shardwise)
    add_plan(shardwise)
    return shardwise


def _check(cases: Sequence[Case], targets: Sequence[str], jobs: int) -> list[Case]:
    """Compile and print; cases that break a promise."""
    from rich.console import Console
    from rich.progress import Progress

    from ..kernels._op import triton
    from ..perf.compile.checks import broken_promises
    from ..perf.compile.compiled import compile_all, has_case

    tasks = [(case, target) for case in cases for target in targets if has_case(target, case)]
    found: dict[int, Report | str] = {}
    # no refreshing thread: the compiling processes are forks of this one
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("compiling", total=len(tasks))
        for place, report in compile_all(tasks, jobs):
            found[place] = report
            progress.advance(task)
            progress.refresh()
    reports = [(*tasks[place], found[place]) for place in range(len(tasks))]
    _print_table(reports)
    broken = broken_promises(reports)
    for case, target, sentence in broken:
        print(f"{case.name} on {target}: {sentence}")
    compiled = f"{len(tasks)} cases and targets compiled by triton {triton.__version__}"
    print(f"{compiled}: {len(broken)} broken promises" if broken else f"{compiled}: every promise is kept")
    return [case for case, _, _ in broken]


def _print_registers(cases: Sequence[Case], targets: Sequence[str], jobs: int) -> None:
    from ..perf.compile.compiled import compile_all

    tasks = [(case, target) for case in cases for target in targets]
    found = dict(compile_all(tasks, jobs))
    # the first target that has all the numbers
    main = next((place for place, target in enumerate(targets) if target.startswith("sm_9")), 0)
    spilled = f"spilled on {targets[main]}"
    columns = ["case", *targets, spilled, "shared", "barriers", "waits", "in turn", "loads", "stores"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row, case in enumerate(cases):
        reports = [found[row * len(targets) + place] for place in range(len(targets))]
        if isinstance(report := reports[main], str):
            print(f"| {case.name} | {report} |")
            continue
        registers = ["-" if isinstance(one, str) else one.registers for one in reports]
        numbers = [report.spills, report.shared_bytes, report.barriers, report.waits, report.long_waits]
        wide = [_accesses(report, what, 8) for what in ("load", "store")]
        print(f"| {' | '.join(map(str, [case.name, *registers, *numbers, *wide]))} |")


def _print_table(reports: Sequence[tuple[Case, str, Report | str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "target", box=None, pad_edge=False)
    for column in ("registers", "spilled", "shared", "barriers", "waits", "in turn"):
        table.add_column(column, justify="right")
    for column in ("loads", "stores"):
        table.add_column(column)
    for case, target, report in reports:
        if not isinstance(report, str):
            sizes = (report.registers, report.spills, report.shared_bytes, report.barriers)
            numbers = (*sizes, report.waits, report.long_waits)
            table.add_row(case.name, target, *map(str, numbers), _accesses(report, "load"), _accesses(report, "store"))
    # a line of the table is a line of the output, on a narrow terminal and in a file
    console = Console(highlight=False)
    console.width = max(console.width, 160)
    console.print(table)


def _accesses(report: Report, what: str, least: int = 1) -> str:
    """How many accesses of how many bytes, of `least` and more."""
    accesses = report.accesses.items()
    sizes = sorted(((size, n) for (kind, size), n in accesses if kind == what and size >= least), reverse=True)
    return " ".join(f"{n}x{size}" for size, n in sizes)
