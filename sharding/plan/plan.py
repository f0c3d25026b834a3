"""Plans as people read and write them: `ShardingPlan` and its parts by TorchRec's names, their files, and their shards.

A file is JSON that `ShardingPlan.save` and `shardwise plan` write, that people can read, and training loads.

    {"format": "shardwise-plan", "version": 1, "world_size": W, "local_world_size": L,
     "plan": {module path: {table: {"sharding_type", "compute_kernel", "ranks",
                                    "shards": [{"shard_offsets", "shard_sizes", "placement"}]}}},
     "about": {...}}

A table may have `reduction`, `row_state`, `enforce_hbm`, `stochastic_rounding`, `output_dtype`, `bounds_check_mode`,
`tier`, `cache_params` and `key_value_params` too. `about` is what the writer has to say of the plan: nothing of it is
needed to train. A plan has no checksum: it is made to be edited, says where work is done and no number of a table, and
is checked to hold together when it is read.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise.embeddings import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from shardwise.kernels import BoundsCheckMode
from shardwise.untrusted import parse_json, read_regular

from ...planner import layout
from ...planner.layout import (
    CAPABILITIES,
    TIERED_KERNELS,
    TRAINED_SETTINGS,
    Shard,
    TableOptions,
    Tier,
    bounds_check_name,
    check_settings,
    data_parallel as data_parallel_shards,
    type_name,
)
from ...planner.tiers import plain_tier, settings_of, tier_from
from ..comms.env import get_local_size
from .caches import CacheParams as CacheParams, KeyValueParams, describe, lost_params, read_params, written_params


class ShardingType(Enum):
    """How a table is cut over ranks; `shardwise.planner.layout` has a function for each."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class EmbeddingComputeKernel(Enum):
    """How a table is stored and trained. All of TorchRec's names are known; a plan may use `SERVED_KERNELS`."""

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    QUANT = "quant"
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"
    KEY_VALUE = "key_value"
    CUSTOMIZED_KERNEL = "customized_kernel"
    SSD_VIRTUAL_TABLE = "ssd_virtual_table"
    DRAM_VIRTUAL_TABLE = "dram_virtual_table"
    DRAM_SSD_VIRTUAL_TABLE = "dram_ssd_virtual_table"
    FUSED_TRITON = "fused_triton"


# kernels that the engine runs for some sharding type
SERVED_KERNELS = tuple(dict.fromkeys(k for types in CAPABILITIES.values() for ks in types.values() for k in ks))
# spellings that older plans and tutorials use
_KERNEL_ALIASES = {"batched_fused": "fused", "batched_dense": "dense"}
# types whose shards add up, and those whose shards have some of a row's columns
_CUT_BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")
_CUT_BY_COLUMNS = ("column_wise", "table_column_wise", "grid_shard")


@dataclass(repr=False)
class ParameterSharding:
    """Where one table goes: its sharding type and kernel by value, its ranks, and the exact cut.

    Args:
        sharding_type, compute_kernel: values of `ShardingType` and `EmbeddingComputeKernel`.
        ranks: the rank of each shard.
        sharding_spec: the shards; None for data_parallel alone.
        cache_params, enforce_hbm, stochastic_rounding, bounds_check_mode, output_dtype, key_value_params: as TorchRec
            has them; `shards_of` says which are served.
        reduction, row_state: as `TableOptions`, for tables cut by rows and by columns; None is the default.
        tier: where rows lie that are not on the device, whatever the kernel says; None is that it says so.

    Raises:
        ValueError: the type, the kernel or an option is unknown, a cut table has no `sharding_spec` or a replicated one
            has, an option says something of a cut that the type does not make, or a tier is given to a table that
            trains by its gradient.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: EnumerableShardingSpec | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    output_dtype: DataType | None = None
    key_value_params: object | None = None
    reduction: str | None = field(default=None, kw_only=True)
    row_state: str | None = field(default=None, kw_only=True)
    tier: Tier | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.compute_kernel = _KERNEL_ALIASES.get(self.compute_kernel, self.compute_kernel)
        for words, what, value, known in (
            ("Sharding type", "sharding_type", self.sharding_type, ShardingType),
            ("Compute kernel", "compute_kernel", self.compute_kernel, EmbeddingComputeKernel),
        ):
            if value not in {member.value for member in known}:
                values = [member.value for member in known]
                raise ValueError(f"{words} not supported {value}: {what} {value!r} is not one of {values}")
        replicated = self.sharding_type == ShardingType.DATA_PARALLEL.value
        if replicated != (self.sharding_spec is None):
            needs = "has no cut: its sharding_spec is None" if replicated else "needs a sharding_spec"
            raise ValueError(f"a {self.sharding_type} table {needs}")
        TableOptions(self.reduction or "partial", self.row_state or "shard")
        for what, option, types in (
            ("reduction", self.reduction, _CUT_BY_ROWS),
            ("row_state", self.row_state, _CUT_BY_COLUMNS),
        ):
            if option is not None and self.sharding_type not in types:
                raise ValueError(f"{what}={option!r} is for {', '.join(types)}: this table is {self.sharding_type}")
        if self.tier is not None and self.compute_kernel == EmbeddingComputeKernel.DENSE.value and not replicated:
            raise ValueError(
                f"tier={self.tier} is for tables with an optimizer in the backward: compute_kernel 'fused'"
            )

    def __repr__(self) -> str:
        # TorchRec's text, to which our own fields are added where they say something
        shown = [f.name for f in fields(self) if not f.kw_only or getattr(self, f.name) is not None]
        return f"ParameterSharding({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """Table name -> `ParameterSharding`; prints as two tables, and a third of where rows lie if some are below."""

    def __str__(self) -> str:
        where = [
            (name, sharding.sharding_type, sharding.compute_kernel, str(sharding.ranks))
            for name, sharding in self.items()
        ]
        cuts = [
            (name, str(shard.shard_offsets), str(shard.shard_sizes), str(shard.placement))
            for name, sharding in self.items()
            for shard in (sharding.sharding_spec.shards if sharding.sharding_spec else ())
        ]
        tables = _columns(("param", "sharding type", "compute kernel", "ranks"), where)
        tiers = [(name, words) for name, sharding in self.items() if (words := describe(sharding))]
        below = f"\n\n{_columns(('param', 'tier'), tiers)}" if tiers else ""
        return f"\n\n{tables}\n\n{_columns(('param', 'shard offsets', 'shard sizes', 'placement'), cuts)}{below}"

    def _serialize(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers."""
        return {name: _plain(sharding) for name, sharding in self.items()}


@dataclass
class ShardingPlan:
    """Module path -> plan of that module's tables; the root module's path is ''.

    Args:
        plan: by module path.
        explanation: why the planner chose it; prints behind the tables.
        world_size, local_world_size: the ranks it is for, and those of a host, where known.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> wise = {"item": sharding.table_wise(rank=1)}
        >>> module_plan = construct_module_sharding_plan(tables, wise, local_size=2, world_size=2, device_type="cpu")
        >>> plan = ShardingPlan({"sparse.tables": module_plan})
        >>> plan.get_plan_for_module("sparse.tables")["item"].ranks
        [1]
    """

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)
    explanation: object | None = field(default=None, kw_only=True, compare=False, repr=False)
    world_size: int | None = field(default=None, kw_only=True, compare=False, repr=False)
    local_world_size: int | None = field(default=None, kw_only=True, compare=False, repr=False)

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """The plan of the module at this path, or None."""
        return self.plan.get(module_path)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        world_size: int | None = None,
        local_world_size: int | None = None,
    ) -> None:
        """Write the plan to a JSON file, which `load` and `shardwise plan` read.

        Args:
            path: of the file; one that is there is replaced.
            world_size: ranks that the plan is for; needed where it was made by hand, without a process group.
            local_world_size: those of a host, by default as `ShardingEnv` finds them.

        Raises:
            ValueError: nobody says how many ranks, or the plan does not fit so many.
        """
        world = self.world_size if world_size is None else world_size
        if world is None and dist.is_initialized():
            world = dist.get_world_size()
        if world is None:
            raise ValueError("a plan's file says how many ranks it is for: save(path, world_size=...)")
        local = self.local_world_size if local_world_size is None else local_world_size
        save_plan(self, path, world, get_local_size(world) if local is None else local)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ShardingPlan:
        """The plan in a file that `save` or `shardwise plan` wrote.

        Raises:
            ValueError: the file is no plan, or what it says does not hold together; names the file and the table.
            OSError: there is no such file.
        """
        return load_plan(path)

    def __str__(self) -> str:
        parts = [f"module: {path}{plan}" for path, plan in self.plan.items()]
        return "\n\n".join(parts if self.explanation is None else [*parts, str(self.explanation)])

    def _serialize(self) -> dict[str, Any]:
        """The plan as dicts, lists, strings and numbers."""
        return {"plan": {path: plan._serialize() for path, plan in self.plan.items()}}


def tables_of(module: nn.Module) -> Sequence[EmbeddingBagConfig | EmbeddingConfig]:
    """The table configs of a collection.

    Raises:
        TypeError: the module is no collection.
    """
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    if isinstance(module, EmbeddingCollection):
        return module.embedding_configs()
    raise TypeError(f"{type(module).__name__} holds no tables: expected a collection")


def options_of(sharding: ParameterSharding) -> TableOptions:
    """How the shards that a `ParameterSharding` describes work together; `caches.asked_tier` says what tier they have.

    Raises:
        ValueError: `reduction`, `row_state`, `output_dtype` or `bounds_check_mode` is unknown.
    """
    default, mode = TableOptions(), sharding.bounds_check_mode
    return TableOptions(
        default.reduction if sharding.reduction is None else sharding.reduction,
        default.row_state if sharding.row_state is None else sharding.row_state,
        None if sharding.output_dtype is None else type_name(sharding.output_dtype),
        None if mode is None else bounds_check_name(mode),
        sharding.stochastic_rounding,
        dense=sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value and sharding.sharding_spec is not None,
    )


def shards_of(name: str, sharding: ParameterSharding, rows: int, dim: int, world_size: int) -> list[Shard]:
    """The shards that a `ParameterSharding` describes, empty ones included; `layout.validate` checks the cut.

    A warning names settings of where rows are kept that the kernel does not read.

    Raises:
        ValueError: a shard's placement names no rank, `ranks` says otherwise than the shards, the kernel is none of
            `SERVED_KERNELS`, `bounds_check_mode` or `output_dtype` is none that tables which train have, or a setting
            of a cache is no good.
    """
    _require_served(name, sharding)
    if sharding.sharding_spec is None:
        return data_parallel_shards(name, rows, dim, world_size)
    shards = []
    for cut in sharding.sharding_spec.shards:
        shard = shard_of(name, cut)
        if shard is None:
            raise ValueError(f"table {name!r}: a shard's placement names no rank: {cut.placement}")
        shards.append(shard)
    placed = sorted({shard.rank for shard in shards})
    if sharding.ranks is not None and sorted(set(sharding.ranks)) != placed:
        raise ValueError(f"table {name!r}: the plan says ranks {sharding.ranks}, its shards are on {placed}")
    return shards


def shard_of(name: str, cut: ShardMetadata) -> Shard | None:
    """The shard of a table that `cut` describes; None where its placement names no rank."""
    (row, col), (height, width) = cut.shard_offsets, cut.shard_sizes
    placement = cut.placement
    rank = placement.rank() if placement is not None and not isinstance(placement, str) else None
    return None if rank is None else Shard(name, rank, (row, row + height), (col, col + width))


def _require_served(name: str, sharding: ParameterSharding) -> None:
    if sharding.compute_kernel not in SERVED_KERNELS:
        raise ValueError(
            f"table {name!r}: compute_kernel {sharding.compute_kernel!r} is not served: a plan to train with has"
            " 'fused' (an optimizer in the backward), the same with rows below the device"
            f" ({', '.join(map(repr, TIERED_KERNELS))}) or 'dense' (a gradient for an ordinary optimizer)"
        )
    try:
        settings_of(sharding)
    except ValueError as error:
        raise ValueError(f"table {name!r}: {error}") from error
    for what, reason in check_settings(name, sharding, TRAINED_SETTINGS).items():
        warnings.warn(f"the plan's {what} (table {name!r}) has no effect: {reason}", stacklevel=3)


def _plain(sharding: ParameterSharding) -> dict[str, Any]:
    described = _described(sharding)
    if sharding.sharding_spec is None:
        del described["shards"]
    ours: dict[str, Any] = {"reduction": sharding.reduction, "row_state": sharding.row_state}
    if sharding.tier is not None:
        plain = plain_tier(sharding.tier)
        ours["tier"] = str(sharding.tier) if plain is None else plain
    return {**described, **{what: value for what, value in ours.items() if value is not None}}


def _described(sharding: ParameterSharding) -> dict[str, Any]:
    return {
        "sharding_type": sharding.sharding_type, "compute_kernel": sharding.compute_kernel, "ranks": sharding.ranks,
        "shards": [
            {
                "shard_offsets": list(shard.shard_offsets), "shard_sizes": list(shard.shard_sizes),
                "placement": str(shard.placement),
            }
            for shard in (sharding.sharding_spec.shards if sharding.sharding_spec else ())
        ],
    }  # fmt: skip


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns below their names: TorchRec's text to the last space, that of no rows included."""
    if not rows:
        return "\n"
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    title = " | ".join(name.center(width) for name, width in zip(names, widths, strict=True))
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, " | ".join("-" * width for width in widths), *lines])


FORMAT, VERSION = "shardwise-plan", 1
_KEYS = ("format", "version", "world_size", "local_world_size", "plan", "about")
# of a table: what must be there, and what may
_NEEDED = ("sharding_type", "compute_kernel", "ranks")
_OPTIONAL: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    # name -> how it is written and how it is read
    "reduction": (str, str),
    "row_state": (str, str),
    "enforce_hbm": (bool, bool),
    "stochastic_rounding": (bool, bool),
    "output_dtype": (type_name, DataType),
    "bounds_check_mode": (lambda mode: mode.name, lambda name: BoundsCheckMode[name]),
    # of these a file has what is plain data
    "tier": (plain_tier, tier_from),
    "cache_params": (written_params, partial(read_params, CacheParams)),
    "key_value_params": (written_params, partial(read_params, KeyValueParams)),
}


def plan_to_json(plan: ShardingPlan, world_size: int, local_world_size: int) -> dict[str, Any]:
    """A plan as a file has it; of its explanation there is the text.

    Raises:
        ValueError: a module's part is no plan of tables.
    """
    for path, of_module in plan.plan.items():
        if type(of_module) not in (dict, EmbeddingModuleShardingPlan):
            raise ValueError(
                f"module {path!r}: the file of a plan has tables alone, not the {type(of_module).__name__} of a"
                " module without them: leave it out, and make it where the model is sharded"
            )
    modules = {
        path: {name: _written(sharding) for name, sharding in tables.items()} for path, tables in plan.plan.items()
    }
    about = {} if plan.explanation is None else {"explanation": str(plan.explanation)}
    return {
        "format": FORMAT, "version": VERSION, "world_size": world_size, "local_world_size": local_world_size,
        "plan": modules, "about": about,
    }  # fmt: skip


def save_plan(plan: ShardingPlan, path: str | os.PathLike[str], world_size: int, local_world_size: int) -> None:
    """Write a plan for so many ranks.

    Raises:
        ValueError: the plan does not hold together, or is for another number of ranks.
    """
    data = plan_to_json(plan, world_size, local_world_size)
    # what cannot be read again is not written
    plan_from_json(data, f"a plan for {world_size} ranks")
    about = getattr(plan.explanation, "about", None)
    if about is not None:
        # what the planner knows, so that `shardwise plan` can explain the plan and change it
        data["about"] |= about()
    for name, sharding in ((name, sharding) for tables in plan.plan.values() for name, sharding in tables.items()):
        if lost := _lost(sharding):
            warnings.warn(f"table {name!r}: the file of a plan has no {' and no '.join(lost)}", stacklevel=4)
    Path(path).write_text(json.dumps(data, indent=1) + "\n")


def load_plan(path: str | os.PathLike[str]) -> ShardingPlan:
    """The plan in a file, for any world size; the plan knows for which it was made.

    Raises:
        ValueError: the file is no plan, or what it says does not hold together; names the file and the table.
        OSError: there is no such file, or it is no regular one.
    """
    try:
        data = parse_json(read_regular(path), allow_nan=True)
    except ValueError as error:
        raise ValueError(f"{path}: no plan: {error}") from error
    return plan_from_json(data, str(path))


def plan_from_json(data: Any, where: str) -> ShardingPlan:
    """The plan that `data` describes; `where` begins the text of errors. Raises as `load_plan`."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'{where}: no plan: it must be an object with "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ValueError(
            f"{where}: version {data.get('version')!r} of the format; this version of shardwise reads {VERSION}"
        )
    _require_keys(f"{where}: the plan", data, _KEYS[:5], _KEYS)
    world, local = data["world_size"], data["local_world_size"]
    for what, value in (("world_size", world), ("local_world_size", local)):
        if not _is_number(value) or value < 1:
            raise ValueError(f"{where}: {what} must be a positive number, got {value!r}")
    if world % local:
        raise ValueError(f"{where}: local_world_size {local} does not divide {world} ranks into hosts")
    if not isinstance(data["plan"], dict) or not all(isinstance(tables, dict) for tables in data["plan"].values()):
        raise ValueError(f"{where}: plan must be an object of modules, and each of them one of tables")
    modules = {}
    for path, tables in data["plan"].items():
        of_module = modules[path] = EmbeddingModuleShardingPlan()
        for name, table_data in tables.items():
            inside = f" of module {path!r}" if path else ""
            try:
                of_module[name] = _read(name, table_data, world)
            except ValueError as error:
                unnamed = str(error).removeprefix(f"table {name!r}: ")
                raise ValueError(f"{where}: table {name!r}{inside}: {unnamed}") from error
    about = data.get("about", {})
    explanation = about.get("explanation") if isinstance(about, dict) else None
    return ShardingPlan(modules, explanation=explanation, world_size=world, local_world_size=local)


def _written(sharding: ParameterSharding) -> dict[str, Any]:
    written = _described(sharding)
    for what, (write, _) in _OPTIONAL.items():
        value = getattr(sharding, what)
        if value is not None and what not in _lost(sharding):
            written[what] = write(value)
    return written


def _lost(sharding: ParameterSharding) -> list[str]:
    """What of a table's settings is no plain data, so that a file does not have it."""
    lost = ["tier"] if sharding.tier is not None and plain_tier(sharding.tier) is None else []
    for what in ("cache_params", "key_value_params"):
        lost += [f"{what}.{name}".rstrip(".") for name in lost_params(getattr(sharding, what))]
    return lost


def _read(name: str, data: Any, world: int) -> ParameterSharding:
    """One table; raises ValueError without its name or with it in front."""
    if not isinstance(data, dict):
        raise ValueError(f"must be an object, got {data!r}")
    _require_keys("the table", data, _NEEDED, (*_NEEDED, "shards", *_OPTIONAL))
    more = {}
    for what, (_, read) in _OPTIONAL.items():
        if what in data:
            try:
                more[what] = read(data[what])
            except (KeyError, ValueError) as error:
                reason = f": {error}" if isinstance(data[what], dict) else ""
                raise ValueError(f"{what} {data[what]!r} is unknown{reason}") from error
    for what in ("sharding_type", "compute_kernel"):
        if not isinstance(data[what], str):
            raise ValueError(f"{what} must be a string, got {data[what]!r}")
    ranks = data["ranks"]
    if not isinstance(ranks, list) or not all(_is_number(rank) and 0 <= rank < world for rank in ranks):
        raise ValueError(f"ranks must be numbers below {world}, got {ranks!r}")
    # a replica on every rank needs no cut
    replicated = data["sharding_type"] == "data_parallel"
    cuts = [] if replicated else [_read_shard(shard_data) for shard_data in data.get("shards", [])]
    if not replicated and not cuts:
        raise ValueError("it has no shards")
    spec = None if replicated else EnumerableShardingSpec(cuts)
    sharding = ParameterSharding(data["sharding_type"], data["compute_kernel"], ranks, spec, **more)
    if replicated:
        if sorted(ranks) != list(range(world)):
            raise ValueError(f"a data_parallel table is on all {world} ranks, here on {ranks}")
        return sharding
    held = []
    for cut in cuts:
        shard = shard_of(name, cut)
        if shard is None:
            raise ValueError(f"placement {str(cut.placement)!r} names no rank")
        held.append(shard)
    if sorted({shard.rank for shard in held}) != sorted(set(ranks)):
        raise ValueError(f"ranks are {ranks}, and its shards are on {[shard.rank for shard in held]}")
    layout.validate(held, {name: (max(s.rows[1] for s in held), max(s.cols[1] for s in held))}, world)
    return sharding


def _read_shard(data: Any) -> ShardMetadata:
    if not isinstance(data, dict):
        raise ValueError(f"a shard must be an object, got {data!r}")
    _require_keys("a shard", data, *[("shard_offsets", "shard_sizes", "placement")] * 2)
    for what in ("shard_offsets", "shard_sizes"):
        value = data[what]
        if not (isinstance(value, list) and len(value) == 2 and all(_is_number(n) and n >= 0 for n in value)):
            raise ValueError(f"{what} must be two numbers, of rows and of columns, got {value!r}")
    try:
        return ShardMetadata(list(data["shard_offsets"]), list(data["shard_sizes"]), data["placement"])
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"placement {data['placement']!r} is none: it is like 'rank:3/cuda:1'") from error


def _require_keys(what: str, data: Mapping[str, Any], needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    missing, unknown = [key for key in needed if key not in data], [key for key in data if key not in known]
    if missing or unknown:
        faults = [f"misses {missing}"] * bool(missing) + [f"has unknown {unknown}"] * bool(unknown)
        raise ValueError(f"{what} {' and '.join(faults)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
