"""`shardwise plan`: from files of tables and constraints to a plan that training loads, and what to make of plans."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from ..embeddings.config import DataType
from ..planner.constants_measured import Constants
from ..planner.constraints import check_settings_of
from ..planner.cost.model import COSTS, CostModel, cost_model
from ..planner.errors import PlannerError
from ..planner.plan import whatif
from ..planner.plan.advice import NoRoomError
from ..planner.plan.explanation import explain
from ..planner.plan.files import data_type_from, read_constraints, read_tables
from ..planner.plan.plan_files import (
    CutDifference,
    is_whole,
    load_planned,
    planned_from_json,
    planned_to_json,
    read_plan,
    save_planned,
)
from ..planner.plan.planned import Planned, Request
from ..planner.plan.planning import plan_or_advise, warn_of_kernels
from ..planner.plan.whatif import resized_topology
from ..planner.reports.difference import diff as difference_of
from ..planner.reports.page import report
from ..planner.topology import CARD_HBM_GIB, Topology
from .output import (
    Wrong,
    one_line,
    print_json,
    progress,
    require_writable,
)

# what files and arguments that are no good raise
WRONG = (ValueError, OSError, PlannerError)
_UNITS = {
    "": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes: of "80GiB" (1024^3 each), "80GB" (10^9 each), "85899345920"."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise click.BadParameter(f"{text!r} is no size: write 80GiB (of 1024^3 bytes), 80GB (of 10^9), or bytes")
    return round(float(found[1]) * _UNITS[found[2].lower()])


def share(text: str) -> float | int:
    """A part of memory: of "15%" the float 0.15, of a size its bytes as an int."""
    if not text.strip().endswith("%"):
        return size(text)
    try:
        part = float(text.strip()[:-1]) / 100
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise click.BadParameter(f"{text!r} is no part of memory: write 15%, or a size like 10GiB")
    return part


def dtype(text: str) -> tuple[DataType, str | None]:
    """An element type for all tables ("fp16"), or for one ("fp16:item_id")."""
    kind, _, table = text.partition(":")
    try:
        return data_type_from(kind), table or None
    except ValueError as error:
        raise click.BadParameter(f"a dtype {error}") from error


def add_plan(commands: click.Group) -> None:
    """Give a group of commands the group `plan`."""

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    target = click.Path(dir_okay=False, writable=True, path_type=Path)
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
    as_html = click.option("--html", type=target, help="Write a report that a browser shows.")
    out = click.option("--out", type=target, help="Write the plan; training loads it with ShardingPlan.load.")
    seconds = click.option("--seconds", type=click.FloatRange(0), help="Search so long; by default a fixed work.")
    card = click.option("--card", type=click.Choice([*CARD_HBM_GIB]), help="The kind of GPU: its memory and speeds.")
    hbm = click.option("--hbm", type=size, help="Memory of a GPU, 80GiB say.")
    ddr = click.option("--ddr", type=size, help="Memory of the host that a rank has.  [default: 128GiB]")

    @commands.group(invoke_without_command=True)
    @click.option("--tables", type=file, help="JSON or TOML: name, num_embeddings, embedding_dim of each, and more.")
    @click.option("--world-size", type=click.IntRange(1), help="Ranks.")
    @click.option("--hosts", type=click.IntRange(1), default=1, help="Hosts that the ranks are on.", show_default=True)
    @hbm
    @ddr
    @card
    @click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
    @click.option("--batch-size", type=click.IntRange(1), default=512, help="Samples of a rank.", show_default=True)
    @click.option("--constraints", type=file, help="JSON or TOML: what may be done with a table, by its name.")
    @click.option(
        "--optimizer", default="RowWiseAdagrad", help="Of tables that do not say theirs; 'none'.", show_default=True
    )
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
    @as_json
    @as_html
    @click.pass_context
    def plan(ctx: click.Context, /, as_json: bool, html: Path | None, out: Path | None, **asked: Any) -> None:
        """Plan where tables go, or look at plans.

        Prints the plan and how far it is, at most, from the fastest there is. If the tables do not fit it ends with
        status 1 and says what would help; if an argument is no good, with status 2.
        """
        if ctx.invoked_subcommand is not None:
            return
        limit = asked.pop("seconds")
        with one_line(*WRONG, told_as=Wrong):
            request = _request(**asked)
        _give(_planned(request, limit, as_json), out, html, as_json)

    @plan.command()
    @click.argument("path", metavar="PLAN", type=file)
    @click.option("--tables", "count", type=click.IntRange(0), help="Tell so many tables one by one.")
    @as_json
    @as_html
    def explain(path: Path, count: int | None, as_json: bool, html: Path | None) -> None:
        """Why the plan in the file PLAN is as it is: each table and its alternatives, each rank's time and memory."""

        with one_line(*WRONG, told_as=Wrong):
            text = read_plan(path).get("about", {}).get("explanation")
            if text and not is_whole(read_plan(path)) and not (as_json or html):
                # a plan that TorchRec's search made has words, and nothing to make more of
                click.echo(text)
                return
            _give(load_planned(path), None, html, as_json, count)

    @plan.command()
    @click.argument("a", type=file)
    @click.argument("b", type=file)
    @as_json
    def diff(a: Path, b: Path, as_json: bool) -> None:
        """What changes from the plan in file A to that in file B; ends with status 1 if anything does."""
        with one_line(*WRONG, told_as=Wrong):
            found = _difference(a, b)
        click.echo(json.dumps(found.as_dict(), indent=1) if as_json else str(found))
        sys.exit(1 if found else 0)

    @plan.command()
    @click.argument("path", metavar="PLAN", type=file)
    @click.option("--world-size", type=click.IntRange(1), help="So many ranks.")
    @click.option("--hosts", type=click.IntRange(1), help="On so many hosts.")
    @click.option("--dtype", "dtypes", type=dtype, multiple=True, help="fp16, or fp16:table; may repeat.")
    @click.option("--optimizer", help="Of all tables.")
    @card
    @hbm
    @ddr
    @click.option("--batch-size", type=click.IntRange(1), help="Samples of a rank.")
    @seconds
    @out
    @as_json
    @as_html
    def whatif(
        path: Path, seconds: float | None, out: Path | None, as_json: bool, html: Path | None, **changes: Any
    ) -> None:
        """Plan again what the file PLAN was made from, with a change, and show both."""

        with one_line(*WRONG, told_as=Wrong):
            before = load_planned(path)
            assert before.request is not None
            request = _changed(before.request, **changes)
        after = _planned(request, seconds, as_json)
        found = difference_of(before, after)
        _write(after, out, html)
        if as_json:
            print_json({"before": _summary(before), "after": _summary(after), **found.as_dict()}, 1)
        else:
            click.echo(_beside(before, after))
            click.echo(f"\n{found}")

    @plan.command()
    @click.option("--world-size", type=click.IntRange(2), default=2, help="Processes.", show_default=True)
    @click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
    @click.option("--seconds", type=click.FloatRange(1), default=60.0, help="To measure.", show_default=True)
    @click.option("--threads", type=click.IntRange(1), default=1, help="Of each process.", show_default=True)
    @click.option("--out", type=target, required=True, help="Where the constants go; `plan --constants` reads them.")
    @as_json
    def calibrate(world_size: int, device: str, seconds: float, threads: int, out: Path, as_json: bool) -> None:
        """Measure this machine: lookups, updates and exchanges of several sizes, in processes started here."""
        _calibrate(world_size, device, seconds, threads, out, as_json)


def _wrong(message: str) -> NoReturn:
    raise Wrong(message)


def _request(
    *,
    tables: Path | None,
    world_size: int | None,
    hosts: int,
    hbm: int | None,
    ddr: int | None,
    card: str | None,
    device: str,
    batch_size: int,
    constraints: Path | None,
    optimizer: str,
    cost: str,
    constants: Path | None,
    reserve: float | int,
) -> Request:
    """What the arguments ask for."""

    if tables is None or world_size is None:
        _wrong("say what to plan: --tables FILE --world-size N (or a command: shardwise plan --help)")
    if world_size % hosts:
        _wrong(f"{world_size} ranks do not divide among {hosts} hosts")
    if device == "cuda" and hbm is None and card is None:
        _wrong("say how much memory a GPU has: --card h100, or --hbm 80GiB")
    if device == "cpu" and (hbm is not None or card is not None):
        _wrong("--hbm and --card are of GPUs, and --device is cpu: give --ddr")
    every = read_tables(tables)
    default = None if optimizer == "none" else optimizer
    every = [replace(one, optimizer=one.optimizer or default) for one in every]
    topology, reserved = _topology(device, world_size, hosts, hbm, ddr, card, reserve)
    measured = None if constants is None else Constants.load(constants)
    rules = {} if constraints is None else read_constraints(constraints)
    check_settings_of(rules, every, device)
    model = cost_model(cost, topology, batch_size, constants=measured, constraints=rules)
    settings = {
        "tables": str(tables),
        "reservation": _told_share(reserve) if device == "cuda" else "none",
        "optimizer": f"{optimizer} where tables do not say another",
    }
    if constraints is not None:
        settings["constraints"] = f"{constraints}, for {len(rules)} tables"
    if source := _source(model, constants):
        settings["constants"] = source
    return Request(tuple(every), topology, batch_size, model, rules, reserved, settings)


def _source(cost: CostModel, path: Path | None) -> str:
    """Where the constants of a cost model come from; "" of one that has none."""
    known = getattr(cost, "constants", None)
    return "" if known is None else f"{path or 'preset'}: {known.source}"


def _topology(
    device: str, world: int, hosts: int, hbm: int | None, ddr: int | None, card: str | None, reserve: float | int
) -> tuple[Topology, tuple[int, ...]]:
    """What tables may use, and what is kept from them."""

    whole = Topology(world, device, hbm, ddr, local_world_size=world // hosts, card=card)
    kept = tuple(round(one * reserve) if isinstance(reserve, float) else reserve for one in whole.hbm)
    if device == "cpu" or not any(kept):
        return whole, ()
    left = [one - less for one, less in zip(whole.hbm, kept, strict=True)]
    if min(left) < 0:
        _wrong(f"--reserve {_told_share(reserve)} is more than the {min(whole.hbm) / 2**30:.4g} GiB of a GPU")
    return resized_topology(whole, hbm=left), kept


def _told_share(reserve: float | int) -> str:
    told = f"{100 * reserve:.4g} %" if isinstance(reserve, float) else f"{reserve / 2**30:.4g} GiB"
    return f"{told} of each GPU's memory"


def _changed(
    request: Request,
    *,
    world_size: int | None,
    hosts: int | None,
    dtypes: Sequence[tuple[Any, str | None]],
    optimizer: str | None,
    card: str | None,
    hbm: int | None,
    ddr: int | None,
    batch_size: int | None,
) -> Request:
    """The request with the changes that were asked for, which its settings then tell."""

    old, told = request.topology, []
    if world_size is not None or hosts is not None:
        world = world_size or old.world_size
        if hosts is not None and world % hosts:
            _wrong(f"{world} ranks do not divide among {hosts} hosts")
        request = whatif.with_world(request, world, local_world_size=None if hosts is None else world // hosts)
        told.append(f"{world} ranks on {request.topology.hosts} hosts")
    for data_type, name in dtypes:
        request = whatif.with_data_type(request, data_type, names=None if name is None else [name])
        told.append(f"{data_type.value.lower()} for {name or 'all tables'}")
    if optimizer is not None:
        request = whatif.with_optimizer(request, None if optimizer == "none" else optimizer)
        told.append(f"optimizer {optimizer}")
    if card is not None:
        request = whatif.with_card(request, card)
        told.append(f"cards {card}")
    for what, given, change in (
        ("HBM", hbm, whatif.with_hbm), ("DDR", ddr, whatif.with_ddr),
    ):  # fmt: skip
        if given is not None:
            request = change(request, given)
            told.append(f"{given / 2**30:.4g} GiB {what}")
    if batch_size is not None:
        request = whatif.with_batch_size(request, batch_size)
        told.append(f"batches of {batch_size}")
    if not told:
        _wrong("say what changes: --world-size, --hosts, --dtype, --optimizer, --card, --hbm, --ddr or --batch-size")
    settings = {**request.settings, "what if": ", ".join(told)}
    if "constants" in settings and card is not None:
        settings["constants"] = _source(request.cost, None)
    return replace(request, settings=settings)


def _planned(request: Request, seconds: float | None, as_json: bool) -> Planned:
    """The plan; what does not fit ends the process with status 1."""

    with one_line(*WRONG, told_as=Wrong):
        try:
            planned = plan_or_advise(request, seconds=seconds)
            warn_of_kernels(planned)
            return planned
        except NoRoomError as error:
            if as_json:
                print_json(error.as_dict(), 1)
            raise click.ClickException(str(error)) from error


def _give(planned: Planned, out: Path | None, html: Path | None, as_json: bool, count: int | None = None) -> None:
    """Print a plan and write the files that were asked for."""

    _write(planned, out, html)
    click.echo(json.dumps(planned_to_json(planned), indent=1) if as_json else explain(planned, tables=count))


def _write(planned: Planned, out: Path | None, html: Path | None) -> None:

    with one_line(*WRONG, told_as=Wrong):
        if out is not None:
            save_planned(planned, out)
        if html is not None:
            html.write_text(report(planned), encoding="utf-8")


def _difference(a: Path, b: Path) -> Any:
    """Between two files: all that is known of both, or where one is without that, where shards lie."""

    first, second = read_plan(a), read_plan(b)
    if is_whole(first) and is_whole(second):
        return difference_of(planned_from_json(first, str(a)), planned_from_json(second, str(b)))
    return CutDifference.between(first, second)


def _calibrate(world_size: int, device: str, seconds: float, threads: int, out: Path, as_json: bool) -> None:
    from ..sharding.calibration.calibrate import calibrate

    require_writable(out)
    with one_line(*WRONG, told_as=Wrong), progress("measuring") as tell:
        try:
            found = calibrate(
                world_size, device, seconds=seconds, out=out, threads=threads,
                progress=lambda done, of: tell(completed=done, total=of),
            )  # fmt: skip
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        print_json(found.to_json(), 1)
        return
    for name, value in found.to_json().items():
        click.echo(f"{name:16}{value if isinstance(value, str) else format(value, '.4g')}")


def _summary(planned: Planned) -> dict[str, Any]:
    """The numbers of a plan that people compare."""
    loads, solution = planned.loads, planned.certified
    return {
        "ranks": planned.topology.world_size, "hosts": planned.topology.hosts, "batch_size": planned.batch_size,
        "step_ms": solution.time_ms, "bound_ms": solution.bound_ms, "gap": solution.gap,
        "samples_per_second": 1000 * planned.batch_size * planned.topology.world_size / solution.time_ms,
        "most_hbm_gib": float(loads.hbm.max()) / 2**30, "most_ddr_gib": float(loads.ddr.max()) / 2**30,
    }  # fmt: skip


def _beside(before: Planned, after: Planned) -> str:
    """Two plans' numbers in columns."""
    names = {
        "ranks": "ranks", "hosts": "hosts", "batch_size": "samples of a rank", "step_ms": "step ms",
        "bound_ms": "bound ms", "gap": "gap", "samples_per_second": "samples a second",
        "most_hbm_gib": "most HBM of a rank, GiB", "most_ddr_gib": "most DDR of a rank, GiB",
    }  # fmt: skip
    old, new = _summary(before), _summary(after)
    lines = [f"{'':26}{'before':>14}{'after':>14}"]
    lines += [f"{told:26}{_number(name, old):>14}{_number(name, new):>14}" for name, told in names.items()]
    return "\n".join(lines)


def _number(name: str, of: Mapping[str, Any]) -> str:
    value = of[name]
    if name == "gap":
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1e4 else f"{value:,.3f}"
