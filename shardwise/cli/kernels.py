"""`shardwise kernels`: the Triton kernels compiled, and executed, for GPUs that need not be present.

`check` compiles every kernel and holds what comes out to what is promised; `registers` prints what typical kernels
take; `run` executes what is compiled on this machine's CPU and holds it to its references: these three work on a
checkout, since a wheel leaves out what compiles and executes. `autotune` times their configs (tune.py).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from .._names import did_you_mean, did_you_mean_of
from .output import (
    FINE,
    NO,
    Writing,
    Wrong,
    json_option,
    load_torch,
    needs_checkout,
    out_option,
    print_json,
    print_table,
    progress,
    require_writable,
    table_of,
)
from .tune import add_autotune

if TYPE_CHECKING:
    from ..perf.compile.cases import Case
    from ..perf.compile.compiled import Report
    from ..perf.gpu.cases.runs import Missing, Outcome
    from ..perf.gpu.launches import Cut

_LIKE = "'pooled_lookup D=128 fp32'"


def add_kernels(commands: click.Group) -> None:
    """Give a group of commands the group `kernels`."""

    @commands.group()
    def kernels() -> None:
        """Compile, run and tune the Triton kernels."""

    @kernels.command()
    @click.option("--target", "targets", multiple=True, callback=_known, metavar="NAME", help="Default: all of them.")
    @click.option("--kernel", default="", metavar="TEXT", help="Only cases with this in their name.")
    @click.option("--candidates", is_flag=True, help="Also what the tuner may try at the main dims.")
    @click.option("--changed", is_flag=True, help="Only kernels that have not passed as they are now on this Triton.")
    @click.option("--record", is_flag=True, help="Write into perf/compile/checked.json which passed on this Triton.")
    @click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.", show_default=True)
    @json_option
    def check(
        targets: tuple[str, ...], kernel: str, candidates: bool, changed: bool, record: bool, jobs: int, as_json: bool
    ) -> None:
        """Compile every kernel as launches ask for it and as tuned files say, without a GPU.

        Prints a line for each case and target: registers of a thread, spilled bytes, bytes of shared memory, barriers,
        what a warp waits for in an iteration (as `kernels registers` says), and how many loads and stores of how many
        bytes ("5x16"). Of some targets a part of all cases is compiled (perf/compile/compiled.py). Ends with status 1
        and a line for each promise that a case breaks: a spill, a failing compiler, a narrow access to aligned rows, a
        row that is gathered late, and others (perf/compile/checks.py). Works on a checkout alone.
        """
        needs_checkout("kernels check")
        load_torch()
        from ..kernels._op import HAS_TRITON, INTERPRETED, triton
        from ..perf.compile import checked
        from ..perf.compile.cases import cases
        from ..perf.compile.compiled import TARGETS
        from ..perf.compile.tuning_space import candidate_cases, tuned_cases

        if not HAS_TRITON:
            raise click.UsageError("triton is not installed, and it is what compiles the kernels: pip install triton")
        if INTERPRETED:
            raise click.UsageError("TRITON_INTERPRET is set: the kernels are interpreted, not compiled; unset it")
        if record and (targets or kernel or candidates):
            raise click.UsageError(
                "--record is for a check of all kernels, not with --target, --kernel or --candidates"
            )
        try:
            # also before a check of some minutes that ends with writing it
            table = checked.read_table() if changed or record else {}
        except ValueError as error:
            raise Wrong(str(error)) from None
        launched = [*cases(), *tuned_cases()]
        # of what is compiled now, whatever becomes of the files meanwhile
        asked = checked.fingerprints(launched)
        known = checked.changed(launched, table, triton.__version__) if changed else launched
        more = candidate_cases() if candidates else []
        chosen = [case for case in (*known, *more) if kernel in case.name]
        if not any(kernel in case.name for case in (*launched, *more)):
            near = did_you_mean_of(kernel, (case.name for case in (*launched, *more)))
            raise click.UsageError(
                f"no case has {kernel!r} in its name{near or '; names are like '}{'' if near else _LIKE}"
            )
        if not chosen:
            those = f"every kernel with {kernel!r} in its name" if kernel else "every kernel"
            click.echo(f"{those} passed on triton {triton.__version__} as it is now", err=as_json)
        broken = _check(chosen, targets or [*TARGETS], jobs, as_json)
        if record:
            failing = {checked.group(case) for case in broken}
            checked.record(
                {name: promises for name, promises in asked.items() if name not in failing}, triton.__version__
            )
        sys.exit(NO if broken else FINE)

    @kernels.command()
    @click.option("--target", "targets", multiple=True, callback=_known, metavar="NAME", help="Default: four of them.")
    @click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.", show_default=True)
    @json_option
    def registers(targets: tuple[str, ...], jobs: int, as_json: bool) -> None:
        """Print what typical kernels take and wait for, compiled without a GPU, as a table of Markdown.

        Registers of a thread on each target; then, on the first of them, spilled bytes, bytes of shared memory,
        barriers, and of the longest loop the latencies that one warp alone waits in an iteration and how often it waits
        for memory in turn (perf/compile/scoreboard.py; NVIDIA's only); loads and stores of 8 bytes and more. Works on a
        checkout alone.
        """
        needs_checkout("kernels registers")
        load_torch()
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
        typical, asked = [named[name] for name in TYPICAL], targets or WHOLE
        if as_json:
            tasks = [(case, target) for case in typical for target in asked]
            reports = [(*task, report) for task, report in zip(tasks, _compiled(tasks, jobs), strict=True)]
            print_json({"triton": triton.__version__, "cases": [_report_json(*row) for row in reports]})
        else:
            print(f"triton {triton.__version__}\n")
            _print_registers(typical, asked, jobs)

    @kernels.command(cls=Writing)
    @click.option("--kernel", default="", metavar="TEXT", help="Only cases with this in their name or their kernels'.")
    @click.option("--all", "every", is_flag=True, help="Every rule, dtype, format and odd batch; then each barrier.")
    @click.option(
        "--barriers/--no-barriers", default=None, help="Take each barrier out in turn.  [default: with --all]"
    )
    @click.option("--shuffle", is_flag=True, help="Programs of a launch in another order than the grid's.")
    @out_option("Write all of it")
    @click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, help="Processes.", show_default=True)
    @json_option
    def run(
        kernel: str, every: bool, barriers: bool | None, shuffle: bool, out: Path | None, jobs: int, as_json: bool
    ) -> None:
        """Run every kernel as compiled for sm_90, without a GPU, and compare what it gives with its reference.

        Ops of the library run end to end on small inputs: each launch is compiled as on a GPU, and its PTX is executed,
        program by program, on the CPU. Reported are addresses outside of every buffer, misaligned vector accesses,
        races within a program and between programs, reads of shared memory that nobody wrote, threads that miss a
        barrier, and results that differ from the reference by more than is allowed (perf/selftest/tolerances.py).
        With --all each barrier is then taken out of its program, which has to be reported too, unless the accesses that
        it alone orders are seen to be of one thread each.

        Prints a line for each kernel: cases, launches, instructions, faults, the largest difference by what was
        allowed, and the stream that uses least of the 32-byte sectors that it touches. Ends with status 1 where
        anything is wrong. The usual cases take a minute, --all a quarter of an hour on two cores. Works on a checkout
        alone.
        """
        needs_checkout("kernels run")
        if out is not None:
            require_writable(out)
        load_torch()
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
            there = runs.select("", every)
            near = did_you_mean_of(kernel, (name for case in there for name in (case.name, *case.kernels)))
            like = "; names are like 'pooled lookup, D=128' and 'update.update'; --all has more"
            raise click.UsageError(f"{where} has {kernel!r} in its name or in its kernels'{near or like}")
        try:
            ran, cut = _run([case.name for case in chosen], every if barriers is None else barriers, shuffle, jobs)
        except RuntimeError as error:
            raise click.ClickException(f"a process ended: {error}; --jobs 1 shows where") from None
        command = f"shardwise kernels run{f' --kernel {kernel!r}' * bool(kernel)}{' --all' * every}"
        document = runs.document(ran, cut, command + " --shuffle" * shuffle, perf_counter() - begin)
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n")
        unexplained = runs.unexplained(cut)
        if as_json:
            print_json({**document, "unexplained": [vars(barrier) for barrier in unexplained]})
            sys.exit(NO if document["wrong"] or unexplained else FINE)
        sys.exit(_report(document, unexplained))

    add_autotune(kernels)


def _known(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of targets; a wheel, which compiles for none, lacks their list."""
    if not names or context.resilient_parsing:
        return names
    needs_checkout(f"kernels {context.info_name}")
    from ..perf.compile.compiled import TARGETS

    if unknown := [name for name in names if name not in TARGETS]:
        near = did_you_mean(unknown[0], TARGETS)
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(map(repr, TARGETS))}{near or '.'}")
    return names


def _compiled(tasks: Sequence[tuple[Case, str]], jobs: int) -> list[Report | str]:
    """What comes of each case and target, with a bar."""
    from ..perf.compile.compiled import compile_all

    reports: dict[int, Report | str] = {}
    with progress("compiling", len(tasks)) as update:
        for place, report in compile_all(tasks, jobs):
            reports[place] = report
            update(advance=1)
    return [reports[place] for place in range(len(tasks))]


def _check(cases: Sequence[Case], targets: Sequence[str], jobs: int, as_json: bool) -> list[Case]:
    """Compile and print; cases that break a promise."""
    from ..kernels._op import triton
    from ..perf.compile.checks import broken_promises
    from ..perf.compile.compiled import has_case

    tasks = [(case, target) for case in cases for target in targets if has_case(target, case)]
    reports = [(*task, report) for task, report in zip(tasks, _compiled(tasks, jobs) if tasks else [], strict=True)]
    broken = broken_promises(reports)
    if as_json:
        broken_rows = [{"case": case.name, "target": target, "broken": sentence} for case, target, sentence in broken]
        compiled_cases = [_report_json(*row) for row in reports]
        print_json({"triton": triton.__version__, "cases": compiled_cases, "broken": broken_rows})
    if as_json or not tasks:
        return [case for case, _, _ in broken]
    _print_reports(reports)
    for case, target, sentence in broken:
        print(f"{case.name} on {target}: {sentence}")
    compiled = f"{len(tasks)} cases and targets compiled by triton {triton.__version__}"
    print(f"{compiled}: {len(broken)} broken promises" if broken else f"{compiled}: every promise is kept")
    return [case for case, _, _ in broken]


def _print_registers(cases: Sequence[Case], targets: Sequence[str], jobs: int) -> None:
    compiled = _compiled([(case, target) for case in cases for target in targets], jobs)
    # the first target that has all the numbers
    main = next((place for place, target in enumerate(targets) if target.startswith("sm_9")), 0)
    spilled = f"spilled on {targets[main]}"
    columns = ["case", *targets, spilled, "shared", "barriers", "waits", "in turn", "loads", "stores"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row, case in enumerate(cases):
        reports = [compiled[row * len(targets) + place] for place in range(len(targets))]
        if isinstance(report := reports[main], str):
            print(f"| {case.name} | {report} |")
            continue
        registers = ["-" if isinstance(each, str) else each.registers for each in reports]
        numbers = [report.spills, report.shared_bytes, report.barriers, report.waits, report.long_waits]
        wide = [_accesses(report, kind, 8) for kind in ("load", "store")]
        print(f"| {' | '.join(map(str, [case.name, *registers, *numbers, *wide]))} |")


def _report_json(case: Case, target: str, report: Report | str) -> dict[str, Any]:
    """A case compiled for a target, for programs; accesses as [what, bytes of a thread, how many]."""
    named = {"case": case.name, "target": target}
    if isinstance(report, str):
        return {**named, "error": report}
    accesses = [[kind, size, number] for (kind, size), number in report.accesses.items()]
    return {**named, **vars(report), "accesses": accesses}


def _print_reports(reports: Sequence[tuple[Case, str, Report | str]]) -> None:
    numbers = ("registers", "spilled", "shared", "barriers", "waits", "in turn")
    table = table_of("case", "target", right=numbers, last=("loads", "stores"))
    for case, target, report in reports:
        if not isinstance(report, str):
            sizes = (report.registers, report.spills, report.shared_bytes, report.barriers)
            cells = (*sizes, report.waits, report.long_waits)
            table.add_row(case.name, target, *map(str, cells), _accesses(report, "load"), _accesses(report, "store"))
    print_table(table, drop=("stores", "loads", "in turn", "waits", "barriers"))


def _accesses(report: Report, wanted: str, least: int = 1) -> str:
    """How many accesses of how many bytes, of `least` and more."""
    accesses = report.accesses.items()
    sizes = sorted(((size, n) for (kind, size), n in accesses if kind == wanted and size >= least), reverse=True)
    return " ".join(f"{n}x{size}" for size, n in sizes)


def _run(names: Sequence[str], barriers: bool, shuffle: bool, jobs: int) -> tuple[list[Outcome], list[Missing]]:
    from ..perf.gpu.cases import runs

    ran: list[Outcome] = []
    cut: list[Missing] = []
    with runs.Workers(jobs) as workers:
        with progress("executing", len(names)) as update:
            for outcome in workers.outcomes([(name, None) for name in names], shuffle=1 if shuffle else None):
                ran.append(outcome)
                update(advance=1, description=f"executing: {outcome.case[:60]}")
        if barriers:
            with progress("taking barriers out", runs.count_barriers(ran)) as update:
                for missing in runs.barriers_cut(ran, workers):
                    cut.append(missing)
                    update(advance=1, description=f"taking barriers out: {missing.cut.kernel[:60]}")
    return ran, cut


def _report(document: dict[str, Any], unexplained: Sequence[Cut]) -> int:
    """Print a line for each kernel and each fault; the status of the process."""
    table = table_of(
        "kernel",
        right=("cases", "launches", "instructions", "barriers", "faults"),
        last=("largest difference", "least of its sectors"),
    )
    for name, entry in document["kernels"].items():
        barriers = [outcome for each in entry["barriers"].values() for outcome in each]
        shown = sum(outcome is not None for outcome in barriers)
        table.add_row(
            name, *(str(entry[column]) for column in ("cases", "launches", "instructions")),
            f"{shown}/{len(barriers)}" if barriers else "", str(len(entry["faults"])),
            "; ".join(f"{value:.1e} {kind}" if value else kind for kind, value in entry["differences"].items()),
            _least(entry["sector_share"]),
        )  # fmt: skip
    print_table(table, drop=("least of its sectors", "instructions", "launches"))
    for cut in unexplained:
        print(f"{cut.kernel}: nothing reports that barrier {cut.barrier} of program {cut.variant} is missing")
    for sentence in document["wrong"]:
        print(sentence)
    wrong = len(document["wrong"]) + len(unexplained)
    total = f"{document['cases']} cases, {document['instructions']} instructions, {document['seconds']} s"
    if document["barriers"]["cut"]:
        total += f", {document['barriers']['reported']} of {document['barriers']['cut']} missing barriers reported"
        for kind in ("redundant", "left"):
            if document["barriers"][kind]:
                total += f", {document['barriers'][kind]} {kind}"
    print(f"{total}: {f'{wrong} things are wrong' if wrong else 'no fault, every result as close as it must be'}")
    return NO if wrong else FINE


def _least(shares: dict[str, float]) -> str:
    if not shares:
        return ""
    kind = min(shares, key=lambda name: shares[name])
    return f"{shares[kind]:.0%} {kind}"
