"""`shardwise plan`: from files of tables, or a model, to a plan that training loads, and what to make of plans.

plan_request.py reads the options, plan_printed.py prints.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import (
    Finite,
    Wrong,
    json_option,
    load_torch,
    one_line,
    print_json,
    progress,
    require_writable,
    spinner,
    warning_lines,
)
from .plan_request import (
    MOST_RANKS,
    MOST_SAMPLES,
    CardName,
    changed,
    dtype,
    memory,
    optimizer,
    request_of,
    require_options,
    share,
    unusable,
)

if TYPE_CHECKING:
    from ..planner.plan.plan_files import CutDifference
    from ..planner.plan.planned import Planned, Request
    from ..planner.reports.difference import Difference


def add_plan(commands: click.Group) -> None:
    """Give a group of commands the group `plan`."""
    from ..planner.constants_measured import COSTS

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    target = click.Path(dir_okay=False, writable=True, path_type=Path)
    ranks, samples = click.IntRange(1, MOST_RANKS), click.IntRange(1, MOST_SAMPLES)
    html = click.option("--html", type=target, help="Write a report that a browser shows.")
    out = click.option("--out", type=target, help="Write the plan; training loads it with ShardingPlan.load.")
    seconds = click.option("--seconds", type=Finite(0), help="Search so long; by default a fixed work.")
    card = click.option("--card", type=CardName(), help="The kind of GPU: its memory and speeds.")
    hbm = click.option("--hbm", type=memory, help="Memory of a GPU, 80GiB say.")
    ddr = click.option("--ddr", type=memory, help="Memory of the host that a rank has.  [default: 128GiB]")
    verbose = click.option("--verbose", is_flag=True, help="Print all of it, not 30 lines.")

    @commands.group(invoke_without_command=True)
    @click.option("--tables", type=file, help="JSON or TOML: name, num_embeddings, embedding_dim of each, and more.")
    @click.option("--model", metavar="FILE.py:FACTORY", help="A function that makes the model; MODULE:FACTORY too.")
    @click.option("--world-size", type=ranks, help="Ranks.")
    @click.option("--hosts", type=ranks, default=1, help="Hosts that the ranks are on.", show_default=True)
    @hbm
    @ddr
    @card
    @click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
    @click.option("--batch-size", type=samples, default=512, help="Samples of a rank.", show_default=True)
    @click.option("--constraints", type=file, help="JSON or TOML: what may be done with a table, by its name.")
    @click.option(
        "--optimizer", help="Of tables that do not say theirs; 'none'.  [default: RowWiseAdagrad; of a model SGD]"
    )
    @click.option("--trace", type=file, help="Of `cache record`: how often caches of rows below the device miss.")
    @click.option("--cost", type=click.Choice(COSTS), default="shardwise", help="The cost model.", show_default=True)
    @click.option("--constants", type=file, help="What `plan calibrate` measured.")
    @click.option(
        "--reserve",
        type=share,
        default="15%",
        help="Kept of each GPU's memory, a share or a size.",
        show_default=True,
    )
    @seconds
    @out
    @html
    @verbose
    @json_option
    @click.pass_context
    def plan(
        ctx: click.Context, /, as_json: bool, html: Path | None, out: Path | None, verbose: bool, **asked: Any
    ) -> None:
        """Plan where tables go, or look at plans.

        Prints in 30 lines how fast the plan is and how far, at most, from the fastest there is, what each rank does and
        where the tables with most work lie. If the tables do not fit it ends with status 1 and says what would help; if
        an argument is no good, with status 2.

        --model imports a file or module and calls a function of it that takes no arguments and returns the model. That
        is built on the meta device, where tables of any size take no memory: a function that reads the values of its
        tensors, or names a device itself, may not run so.

        Examples:
          shardwise plan --tables t.json --world-size 8 --card h100
          shardwise plan --model train.py:make --out plan.json ...
          shardwise plan explain plan.json --verbose
          shardwise plan whatif plan.json --dtype fp16
        """
        if ctx.invoked_subcommand is not None:
            return
        require_options(asked)
        _require_writable(out, html)
        limit = asked.pop("seconds")
        load_torch()
        with warning_lines() as warned, spinner("reading") as update, one_line(*unusable(), raised_as=Wrong):
            if asked["optimizer"] is not None:
                asked["optimizer"] = optimizer(asked["optimizer"]) or ""
            planned = _planned(lambda: request_of(**asked), limit, as_json, update)
            _write(planned, out, html)
        _give(planned, as_json, verbose, out, None, len(warned))

    @plan.command()
    @click.argument("path", metavar="PLAN", type=file)
    @click.option("--tables", "count", type=click.IntRange(0), help="Tell so many tables one by one, of --verbose.")
    @html
    @verbose
    @json_option
    def explain(path: Path, count: int | None, html: Path | None, verbose: bool, as_json: bool) -> None:
        """Why the plan in the file PLAN is as it is: how fast, what each rank does, and where its tables lie.

        --verbose tells each rank's time and memory by part, and each table with its alternatives.
        """
        _require_writable(html)
        load_torch()
        with warning_lines() as warned, spinner("reading") as update, one_line(*unusable(), raised_as=Wrong):
            from ..planner.plan.plan_files import is_whole, planned_from_json, read_plan

            read = read_plan(path)
            about = read.get("about")
            explanation = about.get("explanation") if isinstance(about, dict) else None
            if isinstance(explanation, str) and not is_whole(read) and not (as_json or html):
                from .plan_printed import print_text

                # a plan that TorchRec's search made has words, and nothing to make more of
                print_text(explanation)
                return
            planned = planned_from_json(read, str(path))
            _proven(planned, update)
            _write(planned, None, html)
        _give(planned, as_json, verbose or count is not None, None, count, len(warned))

    @plan.command()
    @click.argument("a", metavar="A", type=file)
    @click.argument("b", metavar="B", type=file)
    @verbose
    @json_option
    def diff(a: Path, b: Path, verbose: bool, as_json: bool) -> None:
        """What changes from the plan in file A to that in file B; ends with status 1 if anything does."""
        load_torch()
        with warning_lines(), spinner("comparing") as update, one_line(*unusable(), raised_as=Wrong):
            difference = _difference(a, b, update)
        if as_json:
            print_json(difference.as_dict())
        else:
            from .plan_printed import print_difference

            print_difference(difference, verbose)
        sys.exit(1 if difference else 0)

    @plan.command()
    @click.argument("path", metavar="PLAN", type=file)
    @click.option("--world-size", type=ranks, help="So many ranks.")
    @click.option("--hosts", type=ranks, help="On so many hosts.")
    @click.option("--dtype", "dtypes", multiple=True, help="fp16, or fp16:table; may repeat.")
    @click.option("--optimizer", help="Of all tables; 'none'.")
    @card
    @hbm
    @ddr
    @click.option("--batch-size", type=samples, help="Samples of a rank.")
    @seconds
    @out
    @html
    @verbose
    @json_option
    def whatif(
        path: Path,
        seconds: float | None,
        out: Path | None,
        html: Path | None,
        verbose: bool,
        as_json: bool,
        **changes: Any,
    ) -> None:
        """Plan again what the file PLAN was made from, with a change, and show both."""
        _require_writable(out, html)
        load_torch()
        with warning_lines(), spinner("reading") as update, one_line(*unusable(), raised_as=Wrong):
            from ..planner.plan.plan_files import load_planned
            from ..planner.reports.difference import diff as difference_of

            before = load_planned(path)
            request = before.request
            assert request is not None
            changes["dtypes"] = [dtype(text) for text in changes["dtypes"]]
            if changes["optimizer"] is not None:
                changes["optimizer"] = optimizer(changes["optimizer"]) or ""
            after = _planned(lambda: changed(request, **changes), seconds, as_json, update)
            difference = difference_of(before, after)
            _write(after, out, html)
        from .plan_printed import numbers, print_beside

        if as_json:
            print_json({"before": numbers(before), "after": numbers(after), **difference.as_dict()})
        else:
            print_beside(before, after, difference, verbose)

    @plan.command()
    @click.option("--world-size", type=click.IntRange(2), default=2, help="Processes.", show_default=True)
    @click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
    @click.option("--seconds", type=Finite(1), default=60.0, help="To measure.", show_default=True)
    @click.option("--threads", type=click.IntRange(1), default=1, help="Of each process.", show_default=True)
    @click.option("--out", type=target, required=True, help="Where the constants go; `plan --constants` reads them.")
    @json_option
    def calibrate(world_size: int, device: str, seconds: float, threads: int, out: Path, as_json: bool) -> None:
        """Measure this machine: lookups, updates and exchanges of several sizes, in processes started here."""
        _calibrate(world_size, device, seconds, threads, out, as_json)


def _planned(
    request: Callable[[], Request], seconds: float | None, as_json: bool, update: Callable[[str], None]
) -> Planned:
    """The plan with its proof; what does not fit ends the process with status 1."""
    from ..planner.plan.advice import NoRoomError
    from ..planner.plan.planning import plan_or_advise, warn_of_kernels
    from ..planner.plan.slots import ThrashError

    def show_search(doing: str, time_ms: float, bound_ms: float) -> None:
        update(_doing(doing, time_ms, bound_ms))

    asked = request()
    update(f"pricing {len(asked.tables):,} tables")
    try:
        planned = plan_or_advise(asked, seconds=seconds, tell=show_search)
    except (NoRoomError, ThrashError) as error:
        if as_json:
            print_json(error.as_dict())
        raise click.ClickException(str(error)) from error
    warn_of_kernels(planned)
    _proven(planned, update)
    return planned


def _proven(planned: Planned, update: Callable[[str], None]) -> None:
    """Ask for the best bound here, where a spinner turns: it takes longer than a plan."""
    solution = planned.solution
    update(_doing("proving how good it is", solution.time_ms, solution.bound_ms))
    # kept by the plan
    _ = planned.certified


def _doing(phase: str, time_ms: float, bound_ms: float) -> str:
    """What the search does, with what it has: "searching: 12.48 ms, at most 1.16% above the best"."""
    from ..planner.plan.explanation import ms, share

    if time_ms == float("inf") or not bound_ms > 0:
        return phase
    return f"{phase}: {ms(time_ms)} ms, at most {share(time_ms / bound_ms - 1)} above the best"


def _give(planned: Planned, as_json: bool, verbose: bool, path: Path | None, count: int | None, warned: int) -> None:
    """Print a plan; `path` is its file, if it has one."""
    from ..planner.plan.explanation import explain
    from ..planner.plan.plan_files import planned_to_json
    from .plan_printed import columns, print_plan, print_text

    if as_json:
        print_json(planned_to_json(planned))
    elif verbose:
        print_text(explain(planned, tables=count, width=columns()))
    else:
        print_plan(planned, path, warned)


def _require_writable(*paths: Path | None) -> None:
    for path in paths:
        if path is not None:
            require_writable(path)


def _write(planned: Planned, out: Path | None, html: Path | None) -> None:
    from ..planner.plan.plan_files import save_planned
    from ..planner.reports.page import report

    if out is not None:
        save_planned(planned, out)
    if html is not None:
        html.write_text(report(planned), encoding="utf-8")


def _difference(a: Path, b: Path, update: Callable[[str], None]) -> Difference | CutDifference:
    """Between two files: all that is known of both, or where one is without that, where shards lie."""
    from ..planner.plan.plan_files import CutDifference, is_whole, planned_from_json, read_plan
    from ..planner.reports.difference import diff

    first, second = read_plan(a), read_plan(b)
    if not (is_whole(first) and is_whole(second)):
        return CutDifference.between(first, second)
    before, after = planned_from_json(first, str(a)), planned_from_json(second, str(b))
    for planned in (before, after):
        _proven(planned, update)
    return diff(before, after)


def _calibrate(world_size: int, device: str, seconds: float, threads: int, out: Path, as_json: bool) -> None:
    from ..sharding.calibration.calibrate import calibrate

    require_writable(out)
    with one_line(*unusable(), raised_as=Wrong), progress("measuring") as update:
        try:
            constants = calibrate(
                world_size, device, seconds=seconds, out=out, threads=threads,
                progress=lambda done, of: update(completed=done, total=of),
            )  # fmt: skip
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        print_json(constants.to_json())
        return
    _print_constants(constants.to_json())


def _print_constants(constants: Mapping[str, Any]) -> None:
    for name, value in constants.items():
        click.echo(f"{name:16}{value if isinstance(value, str) else format(value, '.4g')}")
