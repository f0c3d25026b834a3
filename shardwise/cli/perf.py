"""`shardwise perf`: the regression suite and its comparisons, and exact counts of what a step calls and moves.

Needs the extra `perf`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import (
    FINE,
    NO,
    WRONG,
    Finite,
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
    show,
    table_of,
)

if TYPE_CHECKING:
    from ..perf.counts.baseline import Found
    from ..perf.suite.case import Case, Setting
    from ..perf.suite.measure import Budget, Measured
    from ..perf.suite.storage import Stored


def add_perf(commands: click.Group) -> None:
    """Give a group of commands the group `perf`."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    target = click.Path(dir_okay=False, path_type=Path)

    @commands.group()
    def perf() -> None:
        """Measure shardwise on this machine, and compare what was measured."""

    @perf.command(cls=Writing)
    @click.option(
        "--suite", "suites", multiple=True, metavar="NAME", help="cpu, cuda, full, ebc, operations; may repeat."
    )
    @click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
    @click.option("--only", default="", metavar="REGEX", help="Only cases with this in 'group: name'.")
    @click.option("--small", is_flag=True, help="Tiny sizes: a proof that all of it runs.")
    @click.option("--peers", is_flag=True, help="Measure FBGEMM and TorchRec too, where they are installed.")
    @click.option("--laps", type=click.IntRange(1), help="Over the list of cases.  [default: 6, on cuda 3]")
    @click.option("--threads", type=click.IntRange(1, 1024), help="Threads of the CPU.  [default: one for each core]")
    @click.option(
        "--limit-s",
        type=Finite(1),
        default=480.0,
        show_default=True,
        help="No case begins later.",
    )
    @click.option("--memory-gib", type=Finite(0.1), help="That tables of a case may take.")
    @click.option("--list", "listing", is_flag=True, help="Print the cases and measure nothing.")
    @out_option("Write what was measured; `report` and `compare` read it")
    @click.option("--html", type=target, help="Write the page of `report` as well.")
    @json_option
    def run(
        out: Path | None, listing: bool, suites: tuple[str, ...], device: str, only: str, as_json: bool, **how: Any
    ) -> None:
        """Check cases, then time ours beside torch and other peers; a table.

        Ends with status 1 if a case fails: it raises, or its result is not that of its reference; it is not timed then.
        Also if nothing was measured; with 130 after Ctrl-C, what was measured until then being written.
        """
        load_torch()
        import torch

        from ..perf.suite.case import chosen
        from ..perf.suite.cases import CASES

        if device == "cuda" and not torch.cuda.is_available():
            raise click.UsageError("--device cuda: torch sees no CUDA device here")
        if out is None and not listing and not as_json:
            raise click.UsageError("where should the measurements go? --out FILE, or --json")
        try:
            cases = chosen(CASES, suites or (device,), device, only)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
        if listing and as_json:
            print_json([{"group": case.group, "name": case.name} for case in cases])
        elif listing:
            click.echo("\n".join(f"{case.group}: {case.name}" for case in cases))
        else:
            sys.exit(_run(cases, suites or (device,), device, out, as_json, **how))

    @perf.command()
    @click.argument("base", type=file)
    @click.argument("new", type=file)
    @click.option(
        "--at-least",
        type=Finite(0),
        default=5.0,
        show_default=True,
        help="Percent that count.",
    )
    @click.option(
        "--iqr",
        "iqrs",
        type=Finite(0),
        default=3.0,
        show_default=True,
        help="IQRs that count.",
    )
    @click.option("--only", default="", metavar="REGEX", help="Only cases with this in 'group: name'.")
    @click.option("--force", is_flag=True, help="Compare also what was measured on another device.")
    @json_option
    def compare(base: Path, new: Path, at_least: float, iqrs: float, only: str, force: bool, as_json: bool) -> None:
        """Name the cases that are slower in NEW than in BASE; ends with status 1 if there are any.

        Slower means by more than the larger of --at-least percent and --iqr times the range between the quartiles of
        the laps, and beside what the same rounds measured as well. Cases that NEW has not or that fail there count too.
        """
        from ..perf.suite import compare as comparing
        from ..perf.suite.report import compared

        before, after = _loaded([base, new])
        _checked(only)
        refused = comparing.refusal(before, after)
        if refused and not force:
            raise click.UsageError(f"{refused}; --force compares them all the same")
        comparison = comparing.compare(before, after, at_least, iqrs, only)
        if as_json:
            print_json({"good": comparison.good, "judged": comparison.judged, **asdict(comparison)})
        else:
            for line in compared(comparison):
                show(line)
        # nothing was compared: these are the wrong files
        sys.exit(NO if not comparison.good else FINE if comparison.judged else WRONG)

    @perf.command()
    @click.argument("files", type=file, nargs=-1, required=True)
    @click.option("--html", type=target, help="Write a page that a browser shows, without scripts.")
    @json_option
    def report(files: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
        """Show what was measured: a table, of several files side by side."""
        from ..perf.suite.report import as_data
        from ..perf.suite.report_html import page

        stored = _loaded(files)
        if html is not None:
            require_writable(html)
        if as_json:
            print_json(as_data(stored))
        else:
            _show(stored)
        if html is not None:
            html.write_text(page(stored), encoding="utf-8")

    @perf.command(cls=Writing)
    @click.option("--only", default="", metavar="REGEX", help="Only steps whose name this is found in.")
    @click.option("--check", is_flag=True, help="End with status 1 if a count rose above the baseline.")
    @click.option("--update", is_flag=True, help="Write what was counted into the baseline.")
    @click.option("--parts", is_flag=True, help="Also print what each count is made up of.")
    @out_option("Write what was counted, as a baseline")
    @click.option("--baseline", type=target, help="Default: perf/counts/counts.json of the repository.")
    @json_option
    def counts(
        only: str, check: bool, update: bool, parts: bool, out: Path | None, baseline: Path | None, as_json: bool
    ) -> None:
        """Count what steps call, allocate, launch, send and wait for, exactly and without a GPU.

        Python calls and allocations are of the CPU path, with numba and on torch alone; kernels, copies and host syncs
        of the path that CUDA takes; collectives and bytes sent of two gloo processes. Numbers depend on the versions of
        Python and torch, and are compared with the baseline of the same versions alone. Works on a checkout alone.
        """
        needs_checkout("perf counts")
        load_torch()
        try:
            status = _counts(re.compile(only), check, update, parts, out, baseline, as_json)
        except re.error as error:
            raise click.UsageError(f"--only is no regular expression: {error}") from None
        except (ValueError, RuntimeError, OSError) as error:
            raise Wrong(str(error)) from None
        click.get_current_context().exit(status)


def _run(
    cases: Sequence[Case], suites: Sequence[str], device: str, out: Path | None, as_json: bool,
    *, html: Path | None, small: bool, peers: bool, laps: int | None, threads: int | None, limit_s: float,
    memory_gib: float | None,
) -> int:  # fmt: skip
    """Measure, write and print; the status of the process."""
    import torch

    from ..perf.suite import machine, storage
    from ..perf.suite.case import PEERS, Setting
    from ..perf.suite.measure import BUDGETS
    from ..perf.suite.report_html import page

    if html is not None and out is not None and html.resolve() == out.resolve():
        raise click.UsageError(f"--out and --html both name {out}")
    for path in (out, html):
        if path is not None:
            require_writable(path)
    torch.set_num_threads(threads or machine.cores())
    others = machine.importable_peers() if peers else frozenset[str]()
    if peers:
        missing = [name for name in PEERS if name not in {*others, "torch"}]
        if missing:
            click.echo(f"not installed, so not measured: {' and '.join(missing)}", err=True)
    memory = round(memory_gib * 2**30) if memory_gib else machine.memory_for_tables(device)
    setting = Setting(device, small, frozenset({"torch", *others}), memory)
    budget = BUDGETS[device](limit_s, laps, small)
    load = machine.load()
    measured = _with_progress(cases, setting, budget)
    about = {"suites": list(suites), "small": small, "laps": budget.laps, "peers": sorted(setting.peers), "load": load}
    info = machine.machine_info(device, torch.get_num_threads())
    document = storage.to_json(measured, info, about)
    if out is not None:
        storage.write(out, document)
    # as `report` has it of a file
    name = "what was measured" if out is None else str(out)
    stored = [storage.parsed(json.loads(json.dumps(document, default=str)), name)]
    if html is not None:
        html.write_text(page(stored), encoding="utf-8")
    if as_json:
        print_json(document)
    else:
        _show(stored)
    if measured.interrupted:
        # as a shell has it of a program that Ctrl-C ended
        return 130
    return NO if measured.failures or not measured.records else FINE


def _with_progress(cases: Sequence[Case], setting: Setting, budget: Budget) -> Measured:
    """A bar on a terminal, or a line for each lap elsewhere, on stderr."""
    from ..perf.suite.measure import run

    seen = -1
    terminal = sys.stderr.isatty()

    def show_lap(name: str, lap: int, place: int) -> None:
        nonlocal seen
        if terminal:
            shown(completed=place, description=f"lap {lap + 1}: {name[:40]}")
        elif lap != seen:
            click.echo(f"lap {lap + 1} over {len(cases)} cases", err=True)
        seen = lap

    with progress("measuring", len(cases)) as shown:
        return run(cases, setting, budget, tell=show_lap)


def _show(stored: Sequence[Stored]) -> None:
    from ..perf.suite.report import dispensable, heading, remarks, table

    for result in stored:
        show(heading(result))
    print_table(table(stored), drop=dispensable(stored))
    for result in stored:
        for remark in remarks(result):
            show(remark)


def _loaded(paths: Sequence[Path]) -> list[Stored]:
    from ..perf.suite.storage import load

    try:
        return [load(path) for path in paths]
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _checked(expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise click.UsageError(f"{expression!r} is no regular expression: {error}") from None


def _counts(
    only: re.Pattern[str],
    check: bool,
    update: bool,
    parts: bool,
    out: Path | None,
    baseline: Path | None,
    as_json: bool,
) -> int:
    """Count, print and compare; the status of the process."""
    from .._names import did_you_mean_of
    from ..perf.counts.baseline import (
        BASELINE,
        changes,
        document,
        read,
        versions,
        write,
    )
    from ..perf.counts.counted_ranks import STEPS as OF_RANKS, counts_of_ranks
    from ..perf.counts.counted_steps import STEPS
    from ..perf.counts.steps import counts_of, missing

    path, here = baseline or BASELINE, versions()
    # what is wrong with a file is said before anything is counted
    kept = read(path) if path.exists() or (check and not update) else {}
    for written in (out, path if update else None):
        if written is not None:
            require_writable(written)
    names = [step.name for step in (*STEPS, *OF_RANKS)]
    chosen = [name for name in names if only.search(name)]
    if not chosen:
        near = did_you_mean_of(only.pattern, names) or f"; there are: {'; '.join(names)}"
        raise ValueError(f"no step has {only.pattern!r} in its name{near}")
    alone = [step for step in STEPS if step.name in chosen]
    now = {}
    with progress("counting", len(chosen)) as shown:
        for step in alone:
            shown(description=f"counting {step.name[:40]}")
            now[step.name] = counts_of(step)
            shown(advance=1)
        if len(alone) < len(chosen):
            now |= counts_of_ranks(chosen)
            shown(completed=len(chosen))
    before = kept.get(here, {})
    echo = partial(click.echo, err=as_json)
    if as_json:
        print_json(document({here: now}))
    else:
        _print_counts(before, now, parts)
    for why in missing():
        echo(why)
    if out is not None:
        write(out, {here: now})
    differences = changes(before, now)
    if update:
        write(path, {**kept, here: {**before, **now}})
        echo(f"{path} holds {len(now)} steps of {here}")
        return FINE
    if here not in kept:
        others = f", only of {'; '.join(sorted(kept))}" if kept else ""
        echo(f"nothing to compare with: the baseline has no counts of {here}{others}")
        return NO if check else FINE
    rose = [difference for difference in differences if difference.rose]
    for difference in differences:
        if difference.rose or (difference.before is None):
            echo(str(difference))
    if any(difference.fell for difference in differences):
        echo("counts fell: `shardwise perf counts --update` keeps that")
    if not rose:
        echo(f"no count rose above the baseline of {here}")
    return NO if rose and check else FINE


def _print_counts(before: Found, now: Found, parts: bool) -> None:
    table = table_of("step", "count", right=("baseline", "now", "change"))
    for step, counts in now.items():
        for name, count in counts.items():
            old = before.get(step, {}).get(name)
            change = "" if old is None or old.total == count.total else f"{count.total - old.total:+,}"
            table.add_row(step, name, "" if old is None else f"{old.total:,}", f"{count.total:,}", change)
            if parts:
                known: Mapping[str, int] = {} if old is None else old.parts
                for part in sorted({*count.parts, *known}):
                    table.add_row("", f"  {part}", *_count_cells(None if old is None else known, count.parts, part))
    print_table(table)


def _count_cells(before: Mapping[str, int] | None, now: Mapping[str, int], part: str) -> tuple[str, str, str]:
    if before is None:
        return "", f"{now.get(part, 0):,}", ""
    change = now.get(part, 0) - before.get(part, 0)
    return f"{before.get(part, 0):,}", f"{now.get(part, 0):,}", f"{change:+,}" if change else ""
