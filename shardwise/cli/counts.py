"""`shardwise perf counts`: what a step calls and moves, exactly and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .._version import in_checkout

if TYPE_CHECKING:
    import click

    from ..perf.counts.baseline import Found


def add_counts(perf: click.Group) -> None:
    """Give a group of commands the command `counts`."""
    import click

    file = click.Path(dir_okay=False, path_type=Path)

    @perf.command()
    @click.option("--only", default="", metavar="REGEX", help="Only steps whose name this is found in.")
    @click.option("--check", is_flag=True, help="End with status 1 if a count rose above the baseline.")
    @click.option("--update", is_flag=True, help="Write what was counted into the baseline.")
    @click.option("--parts", is_flag=True, help="Also print what each count is made up of.")
    @click.option("--json", "json_file", type=file, help="Write what was counted into this file, as a baseline.")
    @click.option("--baseline", type=file, help="Default: perf/counts/counts.json of the repository.")
    def counts(
        only: str, check: bool, update: bool, parts: bool, json_file: Path | None, baseline: Path | None
    ) -> None:
        """Count what steps call, allocate, launch, send and wait for, exactly and without a GPU.

        Python calls and allocations are of the CPU path, with numba and on torch alone; kernels, copies and host syncs
        of the path that CUDA takes; collectives and bytes sent of two gloo processes. Numbers depend on the versions of
        Python and torch, and are compared with the baseline of the same versions alone.
        """
        if (check or update) and baseline is None and not in_checkout():
            raise click.UsageError("the baseline is that of a checkout of shardwise: go there, or name a --baseline")
        try:
            status = _counts(re.compile(only), check, update, parts, json_file, baseline)
        except re.error as error:
            raise click.UsageError(f"--only is no regular expression: {error}") from None
        except (ValueError, RuntimeError, OSError) as error:
            raise click.ClickException(str(error)) from None
        click.get_current_context().exit(status)


def _counts(
    only: re.Pattern[str], check: bool, update: bool, parts: bool, json_file: Path | None, baseline: Path | None
) -> int:
    """Count, print and compare; the status of the process."""
    from rich.console import Console
    from rich.progress import track

    from ..perf.counts.baseline import (
        BASELINE,
        changes,
        read,
        versions,
        write,
    )
    from ..perf.counts.counted_ranks import STEPS as OF_RANKS
    from ..perf.counts.counted_ranks import counts_of_ranks
    from ..perf.counts.counted_steps import STEPS
    from ..perf.counts.steps import counts_of, missing

    path, here = baseline or BASELINE, versions()
    # what is wrong with the file is said before anything is counted
    kept = read(path) if path.exists() or (check and not update) else {}
    names = [step.name for step in (*STEPS, *OF_RANKS)]
    chosen = [name for name in names if only.search(name)]
    if not chosen:
        raise ValueError(f"no step has {only.pattern!r} in its name; there are: {'; '.join(names)}")
    alone = [step for step in STEPS if step.name in chosen]
    found = {
        step.name: counts_of(step) for step in track(alone, "counting", console=Console(stderr=True), transient=True)
    }
    if len(alone) < len(chosen):
        found |= counts_of_ranks(chosen)
    before = kept.get(here, {})
    _print(before, found, parts)
    for why in missing():
        print(why)
    if json_file is not None:
        write(json_file, {here: found})
    differences = changes(before, found)
    if update:
        write(path, {**kept, here: {**before, **found}})
        print(f"{path} holds {len(found)} steps of {here}")
        return 0
    if here not in kept:
        print(f"nothing to compare with: the baseline has no counts of {here}" + (
            f", only of {'; '.join(sorted(kept))}" if kept else ""))  # fmt: skip
        return 1 if check else 0
    rose = [one for one in differences if one.rose]
    for one in differences:
        if one.rose or (one.before is None):
            print(one)
    if any(one.fell for one in differences):
        print("counts fell: `shardwise perf counts --update` keeps that")
    if not rose:
        print(f"no count rose above the baseline of {here}")
    return 1 if rose and check else 0


def _print(before: Found, found: Found, parts: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("step", "count", box=None, pad_edge=False)
    for column in ("baseline", "now", "change"):
        table.add_column(column, justify="right")
    for step, counts in found.items():
        for name, count in counts.items():
            old = before.get(step, {}).get(name)
            change = "" if old is None or old.total == count.total else f"{count.total - old.total:+,}"
            table.add_row(step, name, "" if old is None else f"{old.total:,}", f"{count.total:,}", change)
            if parts:
                known: Mapping[str, int] = {} if old is None else old.parts
                for part in sorted({*count.parts, *known}):
                    table.add_row("", f"  {part}", *_numbers(None if old is None else known, count.parts, part))
    console = Console(highlight=False)
    console.width = max(console.width, 140)
    console.print(table)


def _numbers(before: Mapping[str, int] | None, now: Mapping[str, int], part: str) -> tuple[str, str, str]:
    if before is None:
        return "", f"{now.get(part, 0):,}", ""
    change = now.get(part, 0) - before.get(part, 0)
    return f"{before.get(part, 0):,}", f"{now.get(part, 0):,}", f"{change:+,}" if change else ""
