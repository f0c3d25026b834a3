"""From a model and a plan to sharded modules: which modules a plan places, whether it fits them, and their replacement.

A place is a module for whose exact class there is a sharder, outermost first: inside a module that is sharded as a
whole nothing is looked for, unless the plan names what is inside and not the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.embeddings import EmbeddingBagCollection, EmbeddingCollection, optimizer_of

from ..comms.agreement import (
    Facts,
    agree,
    device_types,
    exchange_device,
    facts_of,
    facts_of_shards,
    facts_of_versions,
)
from ..comms.env import ShardingEnv
from ..comms.exchange import Exchange
from ..engine.collection import ShardedCollection
from ..plan.caches import describe
from ..plan.device_fallback import PLANNED_ON
from ..plan.module_sharder import ModuleSharder, require_tables
from ..plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    options_of,
    shards_of,
    tables_of,
)
from .default_sharders import sharder_of
from .fused_params import name_an_optimizer
from .sharders import BaseEmbeddingSharder


@dataclass(frozen=True)
class Place:
    """A module to be sharded, by the first of the paths at which the model holds it; `env` says over which ranks."""

    paths: tuple[str, ...]
    module: nn.Module
    sharder: ModuleSharder[Any]
    env: ShardingEnv

    @property
    def path(self) -> str:
        """The path that plans use."""
        return self.paths[0]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Tables by their names in a plan."""
        return self.sharder.shardable_parameters(self.module)


# a plan for a model's places, made by all ranks together and the same on all of them
PlanMaker = Callable[[], ShardingPlan]


def find_places(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    plan: ShardingPlan | None,
    env_of: Callable[[type[nn.Module]], ShardingEnv],
) -> list[Place]:
    """What is to be sharded in `module`, each module once."""
    modules = find_modules(module, sharders, plan)
    return [Place(paths, submodule, sharder, env_of(type(submodule))) for paths, submodule, sharder in modules]


def find_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], plan: ShardingPlan | None = None
) -> list[tuple[tuple[str, ...], nn.Module, ModuleSharder[Any]]]:
    """The modules in `module` that have a sharder: all paths of each, the module, what shards it."""
    paths: dict[int, list[str]] = {}
    by_id: dict[int, tuple[nn.Module, ModuleSharder[Any]]] = {}
    for path, submodule, sharder in _walk(module, sharders, plan, "", {}):
        paths.setdefault(id(submodule), []).append(path)
        by_id[id(submodule)] = submodule, sharder
    return [(tuple(paths[number]), submodule, sharder) for number, (submodule, sharder) in by_id.items()]


def _walk(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    plan: ShardingPlan | None,
    path: str,
    known: dict[int, ModuleSharder[Any] | None],
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    if isinstance(module, ShardedCollection):
        return
    if id(module) not in known:
        known[id(module)] = sharder_of(module, sharders)
    sharder = known[id(module)]
    below = f"{path}." if path else ""
    named = [] if plan is None or path in plan.plan else [name for name in plan.plan if name.startswith(below)]
    inside: set[str] = set()
    if sharder is not None and named:
        inside = {below + name for name, _ in module.named_modules(remove_duplicate=False)}
    if sharder is not None and not any(name in inside for name in named):
        yield path, module, sharder
        return
    # not named_children, which passes over a second path
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(child, sharders, plan, below + name, known)


def agree_on_plan(
    places: Sequence[Place],
    plan: ShardingPlan | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
    make_plan: PlanMaker,
    *,
    partial: bool = False,
    more: Callable[[], Facts] = dict,
    stacklevel: int = 2,
) -> ShardingPlan:
    """The plan, made where none is given, once it fits the model on all ranks of `group` and is the same there.

    With `partial` the plan may leave places out. `more` tells what else ranks must share, and raises where something
    else is wrong on this one.

    Raises:
        ValueError: the plan does not fit the model, or the process group does not serve the device; on all ranks.
        RuntimeError: ranks have different plans, tables or versions; says which.
    """

    def checked() -> tuple[None, Facts]:
        facts = {**facts_of_versions(device), **more()}
        for pg in {id(env.process_group): env.process_group for env in (place.env for place in places)}.values():
            require_device(pg, device)
        facts["plan"] = "none" if plan is None else "given"
        unknown = set(() if plan is None else plan.plan) - {place.path for place in places}
        if unknown:
            has = sorted(place.path for place in places)
            raise ValueError(f"the plan names modules {sorted(unknown)}, the model has {has}")
        facts["modules with tables"] = str([place.path for place in places])
        for place in places:
            facts |= facts_of_tables(place.module, place.sharder, place.path)
        if plan is not None:
            for place in places:
                facts |= _cuts_of(place, plan, partial)
        return None, facts

    agree(Exchange(group), exchange_device(group, device), checked)
    chosen = plan
    if chosen is None:
        chosen = make_plan()
        for place in places:
            # ranks agree on the tables by now, so a plan that does not fit them fails on all alike
            _cuts_of(place, chosen, partial)
    warn_of_other_devices(chosen, device, stacklevel=stacklevel + 1)
    return chosen


def shard_places(module: nn.Module, places: Sequence[Place], plan: ShardingPlan, device: torch.device) -> nn.Module:
    """Replace every place that the plan names by its sharded form, in place; returns `module`, or its sharded form."""
    for place in places:
        of_module = plan.get_plan_for_module(place.path)
        if of_module is not None:
            sharded = place.sharder.shard(place.module, of_module, place.env, device, place.path)
            for path in place.paths:
                module = _replace(module, path, sharded)
    return module


def sharded_collections(module: nn.Module) -> dict[str, ShardedCollection]:
    """The sharded collections of a model by their first paths."""
    return {path: one for path, one in module.named_modules() if isinstance(one, ShardedCollection)}


def collections_in(module: nn.Module) -> list[EmbeddingBagCollection | EmbeddingCollection]:
    """The collections in a module."""
    return [one for one in module.modules() if isinstance(one, EmbeddingBagCollection | EmbeddingCollection)]


def warn_of_optimizers(places: Sequence[Place], plan: ShardingPlan, stacklevel: int) -> None:
    """Name tables that train by SGD because nobody chose an optimizer, and those whose optimizer a plan passes over."""
    without: list[str] = []
    unused: list[str] = []
    for place in places:
        of_module: Mapping[str, ParameterSharding] = plan.get_plan_for_module(place.path) or {}
        named = name_an_optimizer(getattr(place.sharder, "fused_params", None))
        default = named or not isinstance(place.sharder, BaseEmbeddingSharder)
        for name, param in place.parameters().items() if of_module else ():
            if param.requires_grad and of_module[name].sharding_spec is not None:
                marked = optimizer_of(param) is not None
                if of_module[name].compute_kernel == EmbeddingComputeKernel.DENSE.value:
                    unused += [name] * bool(marked or named)
                elif not (marked or default):
                    without.append(name)
    if without:
        warnings.warn(
            f"tables {without} have no optimizer: sharded, their backward trains them with SGD at lr 0.01."
            " Choose one with apply_optimizer_in_backward before sharding",
            stacklevel=stacklevel + 1,
        )
    if unused:
        warnings.warn(
            f"the plan has compute_kernel 'dense' for tables {unused}: an ordinary optimizer over their parameters"
            " trains them, and the optimizer in their backward, or of their sharder's fused_params, has no effect."
            " compute_kernel 'fused' keeps it",
            stacklevel=stacklevel + 1,
        )


def facts_of_tables(module: nn.Module, sharder: ModuleSharder[Any], path: str = "") -> dict[str, str]:
    """What all ranks must share of a module: its sharder and the configs of its tables, in their order."""
    inside = f" of module {path!r}" if path else ""
    configs = tables_in(module)
    facts = {
        f"sharder{inside}": type(sharder).__name__,
        f"tables{inside}": str([config.name for config in configs]),
    }
    for config in configs:
        facts |= facts_of(config, f"table {config.name!r}{inside}")
    return facts


def _cuts_of(place: Place, plan: ShardingPlan, partial: bool) -> dict[str, str]:
    """What all ranks must share of a place's plan."""
    of_module = plan.get_plan_for_module(place.path)
    if of_module is None:
        if partial:
            return {f"plan of module {place.path!r}": "none"}
        raise ValueError(
            f"the plan has no part for module {place.path!r}; it has {sorted(plan.plan)}. To leave it unsharded, pass"
            " sharders without one for it"
        )
    world = place.env.world_size
    if plan.world_size not in (None, world):
        raise ValueError(
            f"the plan is for {plan.world_size} ranks, and module {place.path!r} is sharded over {world}: plan again"
            f" for {world} (EmbeddingShardingPlanner, or shardwise plan --world-size {world})"
        )
    inside = f" of module {place.path!r}" if place.path else ""
    cuts = plan_cuts(of_module, place.parameters(), place.sharder, world)
    return {name + inside: text for name, text in cuts.items()}


def plan_cuts(
    of_module: Mapping[str, ParameterSharding],
    params: Mapping[str, nn.Parameter],
    sharder: ModuleSharder[Any],
    world_size: int,
) -> dict[str, str]:
    """The shards that a module's plan means, as facts.

    Raises:
        ValueError: the plan names other tables than the module, or asks for what is not served.
    """
    require_tables(of_module, params)
    if not isinstance(sharder, BaseEmbeddingSharder):
        plain = (
            of_module if isinstance(of_module, EmbeddingModuleShardingPlan) else EmbeddingModuleShardingPlan(of_module)
        )
        return {"plan": str(plain._serialize())}
    cuts: dict[str, str] = {}
    with warnings.catch_warnings():
        # they are given where the module is sharded
        warnings.simplefilter("ignore")
        for name, param in params.items():
            cuts |= facts_of_shards(shards_of(name, of_module[name], param.shape[0], param.shape[1], world_size))
            cuts |= facts_of(options_of(of_module[name]), f"table {name!r}")
            cuts |= {f"tier of table {name!r}": described} if (described := describe(of_module[name])) else {}
    return cuts


def require_device(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise ValueError where a group cannot exchange tensors on a device; on meta nothing is exchanged."""
    served = device_types(group)
    if served and device.type not in (*served, "meta"):
        raise ValueError(
            f"device {str(device)!r}: the process group ({dist.get_backend(group)}) exchanges tensors on"
            f" {', '.join(served)}: pass device={served[0]!r}, or make the group with a backend for {device.type}"
        )


def warn_of_other_devices(plan: ShardingPlan, device: torch.device, stacklevel: int) -> None:
    """Name the devices of a plan that are not where its tables go."""
    placements = [
        shard.placement
        for of_module in plan.plan.values()
        for one in of_module.values()
        for shard in (one.sharding_spec.shards if one.sharding_spec else ())
    ]
    types = {where.device().type for where in placements if where is not None and not isinstance(where, str)}
    others = sorted(types - {device.type})
    if others and device.type != "meta":
        warnings.warn(
            f"{PLANNED_ON} {', '.join(others)}, and they are sharded for device {str(device)!r}: there"
            f" they go. To say so in the plan, make it with device_type={device.type!r}",
            stacklevel=stacklevel + 1,
        )


def _replace(root: nn.Module, path: str, new: nn.Module) -> nn.Module:
    if not path:
        return new
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, new)
    return root


def tables_in(module: nn.Module) -> list[Any]:
    """The configs of all tables in a module."""
    return [config for one in collections_in(module) for config in tables_of(one)]
