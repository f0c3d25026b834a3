"""Plans as files, without torch: what `ShardingPlan.load` reads, and beside it all that the plan was made from.

`about` has the explanation as text, then tables, topology, batch size, cost model, constraints, settings, which choice
each item got, and what was predicted, so that a plan can be explained, compared and made again with a change. Prices
are not in it: the same cost model makes them again.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..cost.cache import caches_to
from ..cost.model import CostModel, cost_from
from ..search.problem import (
    Assignment,
    Problem,
    Solution,
    chosen,
)
from ..tiers import plain_tier, plain_tier_text
from ..topology import (
    BasicCommsBandwidths,
    CustomTopologyData,
    Topology,
    placement,
)
from .explanation import explain
from .files import constraint_to, constraints_from, read_data, table_from, table_to
from .planned import Planned, Request
from .planning import problem_of
from .slots import placed_tier

FORMAT, VERSION = "shardwise-plan", 1
_SPEEDS = (
    "hbm_mem_bw", "ddr_mem_bw", "ssd_mem_bw", "hbm_to_ddr_mem_bw", "bwd_compute_multiplier",
    "weighted_feature_bwd_compute_multiplier", "uneven_sharding_perf_multiplier",
)  # fmt: skip


def save_planned(planned: Planned, path: str | os.PathLike[str]) -> None:
    """Write a plan.

    Raises:
        ValueError: the plan does not know its request.
    """
    Path(path).write_text(json.dumps(planned_to_json(planned), indent=1) + "\n", encoding="utf-8")


def planned_to_json(planned: Planned) -> dict[str, Any]:
    """A plan as a file has it. Raises as `save_planned`."""
    request, topology, solution = planned.request, planned.topology, planned.certified
    if request is None:
        raise ValueError("this plan does not know what it was made from: only plans of plan_tables can be written")
    constants: Any = getattr(request.cost, "constants", None)
    loads = planned.loads
    about = {
        "tables": [table_to(table) for table in request.tables],
        "topology": _plain_topology(topology),
        "batch_size": planned.batch_size,
        "cost": {
            "name": planned.cost,
            "constants": None if constants is None else asdict(constants),
            **_caches(planned, request),
        },
        "constraints": {name: constraint_to(constraint) for name, constraint in request.constraints.items()},
        "reserved_bytes": list(request.reserved),
        "settings": dict(request.settings),
        "choices": [
            {
                "tables": list(item.names), "sharding_type": choice.sharding_type,
                "compute_kernel": choice.compute_kernel, "widths": list(choice.widths), "starts": list(starts),
                **({} if choice.cached is None else {"slots": choice.cached.slots, "hit_rate": choice.cached.hit_rate}),
            }
            for item, choice, starts in chosen(planned.problem, solution.assignment)
        ],
        "predicted": {
            "step_ms": solution.time_ms, "bound_ms": solution.bound_ms, "gap": solution.gap,
            "bound_from": solution.bound_from, "proven": solution.proven, "steps": solution.steps,
            "seconds": planned.seconds,
        },
        "explanation": explain(planned),
        "ranks": [
            {"ms": ms, "hbm_bytes": hbm, "ddr_bytes": ddr}
            for ms, hbm, ddr in zip(loads.time_ms.tolist(), loads.hbm.tolist(), loads.ddr.tolist(), strict=True)
        ],
    }  # fmt: skip
    return {
        "format": FORMAT, "version": VERSION, "world_size": topology.world_size,
        "local_world_size": topology.local_world_size, "plan": _modules(planned), "about": about,
    }  # fmt: skip


def _caches(planned: Planned, request: Request) -> dict[str, Any]:
    """What was known of caches, with the misses of those that the plan has; nothing where it has none."""
    caches, curve = getattr(request.cost, "caches", None), getattr(request.cost, "curve", None)
    used = {table.name: curve(table) for table, choice, _ in planned.placed() if choice.cached is not None and curve}
    return {"caches": caches_to(caches, used)} if used and caches is not None else {}


def load_planned(path: str | os.PathLike[str], *, cost: CostModel | None = None) -> Planned:
    """The plan in a file that `save_planned` wrote, with its choices priced again.

    Args:
        cost: a model of the user's own, where the plan was made with that.

    Raises:
        ValueError: the file is no plan, has nothing about how it was made, or was changed by hand.
        OSError: there is no such file.
    """
    return planned_from_json(read_plan(path), str(path), cost=cost)


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a plan's file, whoever wrote it.

    Raises:
        ValueError: it is no plan.
        OSError: there is no such file.
    """
    data = read_data(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'{path}: no plan: expected an object with "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise ValueError(f"{path}: version {data.get('version')!r} of the format; this version reads {VERSION}")
    if not isinstance(data.get("plan"), dict):
        raise ValueError(f'{path}: no plan: expected tables by module as "plan"')
    return data


def planned_from_json(data: Mapping[str, Any], where: str, *, cost: CostModel | None = None) -> Planned:
    """The plan that a file's object describes. Raises as `load_planned`."""
    about = data.get("about", {})
    if not is_whole(data):
        raise ValueError(
            f"{where}: this plan says nothing about how it was made, as `shardwise plan --out` does: it can be trained"
            " with and compared, not explained or planned again"
        )
    try:
        topology = _topology_from(about["topology"], int(data["world_size"]), int(data["local_world_size"]))
        batch_size = int(about["batch_size"])
        model = cost or cost_from(
            about["cost"]["name"], topology, batch_size, about["cost"]["constants"], about["cost"].get("caches")
        )
        tables = tuple(table_from(entry, f"{where}: table {entry.get('name')!r}") for entry in about["tables"])
        request = Request(
            tables, topology, batch_size, model, constraints_from(about["constraints"], where),
            tuple(about["reserved_bytes"]), {name: str(text) for name, text in about["settings"].items()},
        )  # fmt: skip
        problem, here = problem_of(request)
        predicted = about["predicted"]
        _require_numbers(predicted)
        solution = Solution(
            _assignment(problem, about["choices"], where), predicted["step_ms"], predicted["bound_ms"],
            predicted["bound_from"], predicted["proven"], predicted["steps"],
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: what it says about how it was made is not whole: {error!r}") from error
    planned = Planned(
        tuple(here),
        topology,
        batch_size,
        model.name,
        problem,
        solution,
        dict(request.settings),
        predicted["seconds"],
        request,
    )
    for module, of_module in _modules(planned).items():
        for name, expected in of_module.items():
            # a model may have more tables, and training may say more of one
            written = data["plan"].get(module, {}).get(name, {})
            if {key: written.get(key) for key in expected} != expected:
                raise ValueError(f"{where}: table {name!r} is not placed as the planner chose: the plan was changed")
    now = float(planned.loads.time_ms.max())
    if abs(now - solution.time_ms) > 1e-6 * solution.time_ms:
        warnings.warn(
            f"{where}: its cost model said {solution.time_ms:.4g} ms a step when it was made, now it says {now:.4g}:"
            " the bound is of then",
            stacklevel=2,
        )
    return planned


def _require_numbers(predicted: Mapping[str, Any]) -> None:
    """TypeError for predictions that are none."""
    for name in ("step_ms", "bound_ms", "seconds", "steps"):
        if not isinstance(predicted[name], (int, float)) or isinstance(predicted[name], bool):
            raise TypeError(f"{name} must be a number, got {predicted[name]!r}")
    if not isinstance(predicted["bound_from"], str):
        raise TypeError(f"bound_from must be a text, got {predicted['bound_from']!r}")


def is_whole(data: Mapping[str, Any]) -> bool:
    """Whether the file of a plan says how it was made."""
    about = data.get("about")
    return isinstance(about, dict) and "choices" in about


@dataclass(frozen=True)
class CutDifference:
    """Tables that two files place otherwise; false if there are none.

    Args:
        tables: path -> how each file places it, in a few words; None in the file that does not have it.
        world_sizes: of both.
    """

    tables: Mapping[str, tuple[str | None, str | None]]
    world_sizes: tuple[int, int]

    @classmethod
    def between(cls, a: Mapping[str, Any], b: Mapping[str, Any]) -> CutDifference:
        """The changes from one file to the other, in lines."""
        first, second = _cuts(a), _cuts(b)
        names = dict.fromkeys([*first, *second])
        changed = {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}
        return cls(changed, (a["world_size"], b["world_size"]))

    def __bool__(self) -> bool:
        return bool(self.tables) or self.world_sizes[0] != self.world_sizes[1]

    def __str__(self) -> str:
        lines = [
            f"{name}: {old or 'is not there'} -> {new or 'is not there'}" for name, (old, new) in self.tables.items()
        ]
        if self.world_sizes[0] != self.world_sizes[1]:
            lines.insert(0, "ranks: {} -> {}".format(*self.world_sizes))
        return "\n".join(lines or ["no difference"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data that json can write."""
        return {"tables": dict(self.tables), "world_sizes": self.world_sizes}


def _cuts(data: Mapping[str, Any]) -> dict[str, str]:
    """Path of each table -> how it is placed."""
    places = {}
    for module, tables in data["plan"].items():
        for name, entry in tables.items():
            cuts = sorted(
                (*map(tuple, (s["shard_offsets"], s["shard_sizes"])), s["placement"]) for s in entry["shards"]
            )
            on_ranks = f"on ranks {entry['ranks']}"
            where = ", ".join(f"[{r}:{r + h}, {c}:{c + w}] on {at}" for (r, c), (h, w), at in cuts)
            tier = f", {plain_tier_text(entry['tier'])}" if entry.get("tier") is not None else ""
            places[f"{module}.{name}" if module else name] = (
                f"{entry['sharding_type']} {entry['compute_kernel']} {where or on_ranks}{tier}"
            )
    return places


def _assignment(problem: Problem, entries: list[dict[str, Any]], where: str) -> Assignment:
    """The choices of a file among those that there are."""
    by_names = {tuple(entry["tables"]): entry for entry in entries}
    numbers, starts = [], []
    for item in problem.items:
        entry = by_names.get(item.names)
        wanted = entry and (entry["sharding_type"], entry["compute_kernel"], tuple(entry["widths"]))
        slots = None if entry is None else entry.get("slots")
        matching = [
            number
            for number, choice in enumerate(item.choices)
            if (choice.sharding_type, choice.compute_kernel, choice.widths) == wanted
            and (choice.cached is None or choice.cached.slots == slots)
        ]
        if entry is None or not matching:
            raise ValueError(f"{where}: {', '.join(item.names)}: no choice is as the file says; plan anew")
        numbers.append(matching[0])
        starts.append(tuple(entry["starts"]))
    return Assignment(tuple(numbers), tuple(starts))


def _modules(planned: Planned) -> dict[str, dict[str, Any]]:
    """Module path -> table -> where it goes, as `ShardingPlan` reads it."""
    local, device = planned.topology.local_world_size, planned.topology.compute_device
    modules: dict[str, dict[str, Any]] = {}
    for table, choice, starts in planned.placed():
        shards = planned.shards(table, choice, starts)
        replicated = choice.sharding_type == "data_parallel"
        tier = placed_tier(planned, table, choice)
        modules.setdefault(table.module, {})[table.name] = {
            **({} if tier is None else {"tier": plain_tier(tier)}),
            "sharding_type": choice.sharding_type,
            "compute_kernel": choice.compute_kernel,
            "ranks": [shard.rank for shard in shards],
            "shards": [
                {
                    "shard_offsets": [shard.rows[0], shard.cols[0]],
                    "shard_sizes": [shard.rows[1] - shard.rows[0], shard.cols[1] - shard.cols[0]],
                    "placement": placement(device, shard.rank, local),
                }
                for shard in ([] if replicated else shards)
            ],
        }
    return modules


def _plain_topology(topology: Topology) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "compute_device": topology.compute_device, "card": topology.card,
        "pod_size": topology.intra_group_size // topology.local_world_size,
        "hbm_bytes": list(topology.hbm), "ddr_bytes": list(topology.ddr),
        "ssd_bytes": [device.storage.ssd for device in topology.devices],
        "intra_host_bw": topology.intra_host_bw, "inter_host_bw": topology.inter_host_bw,
    }  # fmt: skip
    return {**plain, **{name: getattr(topology, name) for name in _SPEEDS}}


def _topology_from(plain: Mapping[str, Any], world: int, local: int) -> Topology:
    memory = {"hbm_cap": plain["hbm_bytes"], "ddr_cap": plain["ddr_bytes"], "ssd_cap": plain["ssd_bytes"]}
    return Topology(
        world,
        plain["compute_device"],
        local_world_size=local,
        pod_size=plain["pod_size"] if plain["pod_size"] > 1 else None,
        custom_topology_data=CustomTopologyData(memory, world),
        generalized_comms_bandwidths=BasicCommsBandwidths(plain["inter_host_bw"], plain["intra_host_bw"]),
        card=plain["card"],
        **{name: plain[name] for name in _SPEEDS},
    )
