"""Options of `shardwise plan` parsed into its request: sizes, shares, dtypes, cards, models."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .factory import factory_named, failed
from .output import Wrong

if TYPE_CHECKING:
    from torch import nn

    from ..embeddings import DataType
    from ..planner.constraints import ParameterConstraints
    from ..planner.cost.model import CostModel
    from ..planner.plan.planned import Request
    from ..planner.tables import Table
    from ..planner.topology import Topology

_UNITS = {
    "": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
# bytes and counts beyond these are slips of the hand, and more than the search's integers hold
_MOST_BYTES = 2**60
MOST_RANKS, MOST_SAMPLES = 2**14, 2**31


def size(text: str) -> int:
    """Bytes: of "80GiB" (1024^3 each), "80GB" (10^9 each), "85899345920"."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise click.BadParameter(f"{text!r} is no size: write 80GiB (of 1024^3 bytes), 80GB (of 10^9), or bytes")
    number = float(match[1]) * _UNITS[match[2].lower()]
    if number > _MOST_BYTES:
        raise click.BadParameter(f"{text!r} is more than any machine has: {_MOST_BYTES >> 40:,} TiB at most")
    return round(number)


def memory(text: str) -> int:
    """As `size`, and more than nothing."""
    number = size(text)
    if not number:
        raise click.BadParameter(f"{text!r} leaves no room for tables: write 80GiB")
    return number


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
    from ..planner.plan.files import data_type_from

    kind, _, table = text.partition(":")
    try:
        return data_type_from(kind), table or None
    except ValueError as error:
        raise click.BadParameter(f"a dtype {error}", param_hint="'--dtype'") from error


def optimizer(text: str) -> str | None:
    """The class name of an optimizer, in any case; None of "none"."""
    from ..planner.cost.shardwise import optimizer_named

    if text.lower() == "none":
        return None
    try:
        return optimizer_named(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'--optimizer'") from error


def unusable() -> tuple[type[Exception], ...]:
    """What files and arguments that are no good raise."""
    from ..planner.errors import PlannerError

    return ValueError, OSError, PlannerError


class CardName(click.Choice):  # type: ignore[type-arg,unused-ignore]
    """A card that kernels are compiled for, in any case."""

    name = "card"

    def __init__(self) -> None:
        from ..planner.constants_measured import OFFERED

        super().__init__(OFFERED)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from ..planner.constants_measured import CARDS, OFFERED, meant_card

        name = str(value).lower()
        if name in OFFERED:
            return name
        if name in CARDS and name != "cpu":
            self.fail(f"card {value!r} has no kernels compiled for it: for its memory alone, --hbm", param, ctx)
        return self.fail(f"card {value!r} is unknown{meant_card(name)}", param, ctx)


@dataclass(frozen=True)
class Model:
    """Tables of a user's model, and by their names the kinds of sharding that their modules offer."""

    tables: tuple[Table, ...]
    offered: Mapping[str, tuple[str, ...]]


def tables_of(
    factory: str, device: str, rules: Mapping[str, ParameterConstraints], optimizer: str | None = None
) -> Model:
    """The tables of the model that a factory makes, on the meta device, where they take no memory.

    Args:
        optimizer: of tables that have none in their backward; None leaves them what they train by then.

    Raises:
        ValueError: there is no such factory, it fails, or it makes no model with tables that can be planned.
    """
    import torch

    from ..embeddings import optimizer_of
    from ..embeddings.quant import QuantizedCollection
    from ..planner.tables import Table
    from ..sharding import get_default_sharders
    from ..sharding.planning.tables import tables_of_model

    # what a user's file prints is no part of the plan
    with redirect_stdout(sys.stderr):
        function = factory_named(factory)
        if needed := _needed(function):
            raise ValueError(f"--model {factory} takes {needed}, and is called with nothing here: give it a default")
        try:
            with torch.device("meta"):
                module = _module(function(), factory)
        except _NoModelError as error:
            raise ValueError(str(error)) from None
        except (Exception, SystemExit) as error:
            more = "; a model is made on the meta device here, where tensors have no values" * _wants_values(error)
            raise ValueError(f"{failed(factory, error)}{more}") from error
    for path, submodule in module.named_modules():
        if isinstance(submodule, QuantizedCollection):
            raise ValueError(
                f"--model {factory}: module {path or 'itself'!r} is quantized ({type(submodule).__name__}):"
                " plan places tables that train"
            )
    replicable = [name for name, rule in rules.items() if "data_parallel" in (rule.sharding_types or ())]
    model_tables = tables_of_model(module, get_default_sharders(), device, replicable)
    if not model_tables.tables:
        raise ValueError(
            f"--model {factory}: {type(module).__name__} has no tables: none of its modules is an"
            " EmbeddingBagCollection, an EmbeddingCollection, or another that sharders know"
        )
    names = [field.name for field in fields(Table)]
    tables: list[Table] = []
    offered: dict[str, tuple[str, ...]] = {}
    for table in model_tables.tables:
        plain = Table(**{name: getattr(table, name) for name in names})
        in_backward = optimizer_of(model_tables.parameters[table.path]) is not None
        tables.append(plain if in_backward or optimizer is None else replace(plain, optimizer=optimizer or None))
        kinds = tuple(dict.fromkeys(kind for kind, _ in table.ways))
        offered[table.name] = tuple(kind for kind in offered.get(table.name, kinds) if kind in kinds)
    return Model(tuple(tables), offered)


class _NoModelError(Exception):
    """A factory that returned no model; told as it is."""


def _module(made: Any, factory: str) -> nn.Module:
    """The model among what a factory of `plan` or `export` returns."""
    from torch import nn

    from ..inference import PredictFactory
    from ..inference.predict import parts_of

    if isinstance(made, PredictFactory):
        return parts_of(made, None, None)[0]
    first = made[0] if isinstance(made, tuple) and made else made
    if not isinstance(first, nn.Module):
        raise _NoModelError(f"--model {factory} returned {type(made).__name__}: it must return a model, an nn.Module")
    return first


def _needed(function: Callable[..., Any]) -> str:
    """The arguments that a function must be given, "" where there are none or it does not say."""
    try:
        every = inspect.signature(function).parameters.values()
    except ValueError:
        return ""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(
        parameter.name for parameter in every if parameter.default is parameter.empty and parameter.kind not in variadic
    )


def _wants_values(error: BaseException) -> bool:
    return isinstance(error, (NotImplementedError, RuntimeError)) and "meta" in str(error)


def require_options(asked: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other or leave out what a plan needs, before anything heavy is imported."""
    tables, model, world_size, hosts = (asked[name] for name in ("tables", "model", "world_size", "hosts"))
    device, hbm, card = asked["device"], asked["hbm"], asked["card"]
    if tables is not None and model is not None:
        wrong("--tables and --model both say what to plan: give one of them")
    if (tables is None and model is None) or world_size is None:
        wrong(
            "say what to plan: --tables FILE or --model FILE.py:FACTORY, and --world-size N (or a command:"
            " shardwise plan --help)"
        )
    if world_size % hosts:
        wrong(f"{world_size} ranks do not divide among {hosts} hosts")
    if device == "cuda" and hbm is None and card is None:
        wrong("say how much memory a GPU has: --card h100, or --hbm 80GiB")
    if device == "cpu" and (hbm is not None or card is not None):
        wrong("--hbm and --card are of GPUs, and --device is cpu: give --ddr")
    if asked["constants"] is not None and asked["cost"] != "shardwise":
        wrong(f"--constants are of --cost shardwise, and --cost is {asked['cost']}")
    if asked["trace"] is not None and asked["cost"] != "shardwise":
        wrong(f"--trace is for --cost shardwise, and --cost is {asked['cost']}")


def request_of(
    *,
    tables: Path | None,
    model: str | None,
    world_size: int,
    hosts: int,
    hbm: int | None,
    ddr: int | None,
    card: str | None,
    device: str,
    batch_size: int,
    constraints: Path | None,
    optimizer: str | None,
    cost: str,
    constants: Path | None,
    reserve: float | int,
    trace: Path | None = None,
) -> Request:
    """What the arguments ask for, checked by `require_options`; `optimizer` is "" for none, None if not given."""
    from ..planner.constants_measured import Constants
    from ..planner.constraints import ParameterConstraints, check_settings_of, constraint_of
    from ..planner.cost.model import cost_model
    from ..planner.plan.files import read_constraints, read_tables
    from ..planner.plan.planned import Request
    from .cache_runs import curves_of_trace

    rules = {} if constraints is None else read_constraints(constraints)
    constrained = len(rules)
    topology, reserved = _topology(device, world_size, hosts, hbm, ddr, card, reserve)
    measured = None if constants is None else Constants.load(constants)
    offered: Mapping[str, tuple[str, ...]] = {}
    if model is None:
        assert tables is not None
        default = "RowWiseAdagrad" if optimizer is None else optimizer
        every = [replace(table, optimizer=table.optimizer or default or None) for table in read_tables(tables)]
        assumed = f"{default or 'none'} where tables do not say another"
    else:
        model_tables = tables_of(model, device, rules, optimizer)
        every, offered = [*model_tables.tables], model_tables.offered
        assumed = (
            f"{'SGD' if optimizer is None else optimizer or 'none'} where the model has none in a table's backward"
        )
    check_settings_of(rules, every, device)
    cached = [table.name for table in every if (rule := constraint_of(rules, table.name)) and rule.tier is not None]
    curves = {} if trace is None else curves_of_trace(trace, cached)
    pricing = cost_model(cost, topology, batch_size, constants=measured, constraints=rules, curves=curves)
    for table in every:
        rule = constraint_of(rules, table.name)
        if table.name in offered and {way.sharding_type for way in pricing.ways(table, rule)} - set(
            offered[table.name]
        ):
            # what its module leaves out is said in the plan, so that whatif leaves it out too
            kinds = [*offered[table.name]]
            rules[table.name] = replace(rule or ParameterConstraints(), sharding_types=kinds)
    settings = {
        "tables": str(tables or model),
        "reservation": _share_text(reserve) if device == "cuda" else "none",
        "optimizer": assumed,
    }
    if constraints is not None:
        settings["constraints"] = f"{constraints}, for {constrained} tables"
    if trace is not None:
        settings["trace"] = f"{trace}: misses of {', '.join(curves) or 'no table'}, one of its batches a step"
    if source := _source(pricing, constants):
        settings["constants"] = source
    return Request(tuple(every), topology, batch_size, pricing, rules, reserved, settings)


def changed(
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
    """The request with the changes that were asked for, which its settings then tell.

    Args:
        optimizer: "" for none; None leaves what there is.
    """
    from ..planner.plan import whatif

    old, descriptions = request.topology, []
    if world_size is not None or hosts is not None:
        world = world_size or old.world_size
        if hosts is not None and world % hosts:
            wrong(f"{world} ranks do not divide among {hosts} hosts")
        request = whatif.with_world(request, world, local_world_size=None if hosts is None else world // hosts)
        descriptions.append(f"{world} ranks on {request.topology.hosts} hosts")
    for data_type, name in dtypes:
        request = whatif.with_data_type(request, data_type, names=None if name is None else [name])
        descriptions.append(f"{data_type.value.lower()} for {name or 'all tables'}")
    if optimizer is not None:
        request = whatif.with_optimizer(request, optimizer or None)
        descriptions.append(f"optimizer {optimizer or 'none'}")
    if old.compute_device == "cpu" and (card is not None or hbm is not None):
        wrong("--hbm and --card are of GPUs, and this plan is for cpu: give --ddr")
    if card is not None:
        request = whatif.with_card(request, card)
        descriptions.append(f"cards {card}")
    changes: tuple[tuple[str, int | None, Callable[[Request, int], Request]], ...] = (
        ("HBM", hbm, whatif.with_hbm),
        ("DDR", ddr, whatif.with_ddr),
    )
    for kind, given, change in changes:
        if given is not None:
            request = change(request, given)
            descriptions.append(f"{given / 2**30:.4g} GiB {kind}")
    if batch_size is not None:
        request = whatif.with_batch_size(request, batch_size)
        descriptions.append(f"batches of {batch_size}")
    if not descriptions:
        wrong("say what changes: --world-size, --hosts, --dtype, --optimizer, --card, --hbm, --ddr or --batch-size")
    settings = {**request.settings, "what if": ", ".join(descriptions)}
    if "constants" in settings and card is not None:
        settings["constants"] = _source(request.cost, None)
    return replace(request, settings=settings)


def wrong(message: str) -> NoReturn:
    """End with one line and status 2."""
    raise Wrong(message)


def _source(cost: CostModel, path: Path | None) -> str:
    """Where the constants of a cost model come from; "" of one that has none."""
    known = getattr(cost, "constants", None)
    return "" if known is None else f"{path or 'preset'}: {known.source}"


def _topology(
    device: str, world: int, hosts: int, hbm: int | None, ddr: int | None, card: str | None, reserve: float | int
) -> tuple[Topology, tuple[int, ...]]:
    """What tables may use, and what is kept from them."""
    from ..planner.plan.whatif import resized_topology
    from ..planner.topology import Topology

    whole = Topology(world, device, hbm, ddr, local_world_size=world // hosts, card=card)
    kept = tuple(round(available * reserve) if isinstance(reserve, float) else reserve for available in whole.hbm)
    if device == "cpu" or not any(kept):
        return whole, ()
    left = [available - less for available, less in zip(whole.hbm, kept, strict=True)]
    if min(left) < 0:
        wrong(f"--reserve {_share_text(reserve)} is more than the {min(whole.hbm) / 2**30:.4g} GiB of a GPU")
    return resized_topology(whole, hbm=left), kept


def _share_text(reserve: float | int) -> str:
    text = f"{100 * reserve:.4g} %" if isinstance(reserve, float) else f"{reserve / 2**30:.4g} GiB"
    return f"{text} of each GPU's memory"
