"""Plans as files: JSON that `ShardingPlan.save` and `shardwise plan` write, that people can read, and training loads.

    {"format": "shardwise-plan", "version": 1, "world_size": W, "local_world_size": L,
     "plan": {module path: {table: {"sharding_type", "compute_kernel", "ranks",
                                    "shards": [{"shard_offsets", "shard_sizes", "placement"}]}}},
     "about": {...}}

A table may have `reduction`, `row_state`, `enforce_hbm`, `stochastic_rounding`, `output_dtype` and `bounds_check_mode`
too. `about` is what the writer has to say of the plan: nothing of it is needed to train. A plan has no checksum: it is
made to be edited, says where work is done and no number of a table, and is checked to hold together when it is read.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise.embeddings import DataType
from shardwise.kernels import BoundsCheckMode
from shardwise.untrusted import parse_json, read_regular

from ...planner import layout
from ...planner.layout import Shard
from .plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

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
    "output_dtype": (lambda kind: kind.value, DataType),
    "bounds_check_mode": (lambda mode: mode.name, lambda name: BoundsCheckMode[name]),
}
# what has no effect where rows lie in the memory of the device, and is no plain data
_UNWRITTEN = ("cache_params", "key_value_params")


def plan_to_json(plan: ShardingPlan, world_size: int, local_world_size: int) -> dict[str, Any]:
    """A plan as a file has it; of its explanation there is the text."""
    modules = {path: {name: _written(one) for name, one in tables.items()} for path, tables in plan.plan.items()}
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
    for name, one in ((name, one) for tables in plan.plan.values() for name, one in tables.items()):
        if lost := [what for what in _UNWRITTEN if getattr(one, what) is not None]:
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
    if not isinstance(data["plan"], dict) or not all(isinstance(one, dict) for one in data["plan"].values()):
        raise ValueError(f"{where}: plan must be an object of modules, and each of them one of tables")
    modules = {}
    for path, tables in data["plan"].items():
        of_module = modules[path] = EmbeddingModuleShardingPlan()
        for name, said in tables.items():
            inside = f" of module {path!r}" if path else ""
            try:
                of_module[name] = _read(name, said, world)
            except ValueError as error:
                unnamed = str(error).removeprefix(f"table {name!r}: ")
                raise ValueError(f"{where}: table {name!r}{inside}: {unnamed}") from error
    about = data.get("about", {})
    explanation = about.get("explanation") if isinstance(about, dict) else None
    return ShardingPlan(modules, explanation=explanation, world_size=world, local_world_size=local)


def _written(one: ParameterSharding) -> dict[str, Any]:
    shards = [] if one.sharding_spec is None else one.sharding_spec.shards
    found: dict[str, Any] = {
        "sharding_type": one.sharding_type, "compute_kernel": one.compute_kernel, "ranks": one.ranks,
        "shards": [
            {
                "shard_offsets": list(shard.shard_offsets), "shard_sizes": list(shard.shard_sizes),
                "placement": str(shard.placement),
            }
            for shard in shards
        ],
    }  # fmt: skip
    for what, (write, _) in _OPTIONAL.items():
        if (value := getattr(one, what)) is not None:
            found[what] = write(value)
    return found


def _read(name: str, said: Any, world: int) -> ParameterSharding:
    """One table; raises ValueError without its name or with it in front."""
    if not isinstance(said, dict):
        raise ValueError(f"must be an object, got {said!r}")
    _require_keys("the table", said, _NEEDED, (*_NEEDED, "shards", *_OPTIONAL))
    more = {}
    for what, (_, read) in _OPTIONAL.items():
        if what in said:
            try:
                more[what] = read(said[what])
            except (KeyError, ValueError) as error:
                raise ValueError(f"{what} {said[what]!r} is unknown") from error
    for what in ("sharding_type", "compute_kernel"):
        if not isinstance(said[what], str):
            raise ValueError(f"{what} must be a string, got {said[what]!r}")
    ranks = said["ranks"]
    if not isinstance(ranks, list) or not all(_is_number(rank) and 0 <= rank < world for rank in ranks):
        raise ValueError(f"ranks must be numbers below {world}, got {ranks!r}")
    # a replica on every rank needs no cut
    replicated = said["sharding_type"] == "data_parallel"
    cuts = [] if replicated else [_read_shard(one) for one in said.get("shards", [])]
    if not replicated and not cuts:
        raise ValueError("it has no shards")
    spec = None if replicated else EnumerableShardingSpec(cuts)
    one = ParameterSharding(said["sharding_type"], said["compute_kernel"], ranks, spec, **more)
    if replicated:
        if sorted(ranks) != list(range(world)):
            raise ValueError(f"a data_parallel table is on all {world} ranks, here on {ranks}")
        return one
    held = [_held(name, cut) for cut in cuts]
    if sorted({shard.rank for shard in held}) != sorted(set(ranks)):
        raise ValueError(f"ranks are {ranks}, and its shards are on {[shard.rank for shard in held]}")
    layout.validate(held, {name: (max(s.rows[1] for s in held), max(s.cols[1] for s in held))}, world)
    return one


def _read_shard(said: Any) -> ShardMetadata:
    if not isinstance(said, dict):
        raise ValueError(f"a shard must be an object, got {said!r}")
    _require_keys("a shard", said, *[("shard_offsets", "shard_sizes", "placement")] * 2)
    for what in ("shard_offsets", "shard_sizes"):
        value = said[what]
        if not (isinstance(value, list) and len(value) == 2 and all(_is_number(n) and n >= 0 for n in value)):
            raise ValueError(f"{what} must be two numbers, of rows and of columns, got {value!r}")
    try:
        return ShardMetadata(list(said["shard_offsets"]), list(said["shard_sizes"]), said["placement"])
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"placement {said['placement']!r} is none: it is like 'rank:3/cuda:1'") from error


def _held(name: str, cut: ShardMetadata) -> Shard:
    (row, col), (height, width) = cut.shard_offsets, cut.shard_sizes
    where = cut.placement
    rank = where.rank() if where is not None and not isinstance(where, str) else None
    if rank is None:
        raise ValueError(f"placement {str(where)!r} names no rank")
    return Shard(name, rank, (row, row + height), (col, col + width))


def _require_keys(what: str, said: Mapping[str, Any], needed: tuple[str, ...], known: tuple[str, ...]) -> None:
    missing, unknown = [key for key in needed if key not in said], [key for key in said if key not in known]
    if missing or unknown:
        faults = [f"misses {missing}"] * bool(missing) + [f"has unknown {unknown}"] * bool(unknown)
        raise ValueError(f"{what} {' and '.join(faults)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
