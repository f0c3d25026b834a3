"""Sharding without DistributedModelParallel: one module, or all collections of a model, and nothing else of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ..comms.agreement import Facts, agree, exchange_device, facts_of_versions
from ..comms.env import ShardingEnv, default_env
from ..comms.exchange import Exchange, hang_up
from ..comms.watch import watch_over
from ..modules.default_sharders import get_default_sharders, require_sharder
from ..modules.generators import ParameterShardingGenerator, apply_to_all
from ..modules.placement import (
    Place,
    agree_on_plan,
    facts_of_tables,
    find_places,
    plan_cuts,
    require_device,
    shard_places,
    warn_of_optimizers,
    warn_of_other_devices,
)
from ..plan.device_fallback import device_here, quiet_without_cuda
from ..plan.module_sharder import ModuleSharder
from ..plan.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from ..planning.planners import EmbeddingPlannerBase, plan_for
from .data_parallel import materialize, move

# what becomes of each table: placed already, or by a generator
TablePlans: TypeAlias = Mapping[str, ParameterSharding] | Mapping[str, ParameterShardingGenerator]


def shard(
    module: nn.Module,
    plan: EmbeddingModuleShardingPlan | TablePlans | ParameterShardingGenerator,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    sharder: ModuleSharder[Any] | None = None,
    *,
    timeout_s: float | None = 60,
) -> nn.Module:
    """The sharded form of one module; `module` itself stays as it is. All ranks call this together.

    Args:
        module: a collection, or what `sharder` is for.
        plan: where its tables go: a plan, a generator for each table by name, or one generator for all.
        env: rank and process group; by default those of torch.distributed's default group.
        device: where this rank computes; by default CUDA where there is one, else the CPU.
        sharder: by default that of `get_default_sharders()` for the module's exact class.
        timeout_s: as `DistributedModelParallel`.

    Raises:
        TypeError: the module has no sharder.
        ValueError: the plan does not fit the module, or the process group does not serve the device.
        RuntimeError: there is no process group, or ranks have different plans. What fails on one rank is raised on all.

    Example:
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(100, 64, "item", feature_names=["seen"])])
        >>> sharded = shard(ebc, row_wise(), ShardingEnv.from_local(1, 0))
    """
    env = env or default_env()
    here = _device(device)
    watch_over([env.process_group], timeout_s, hang_up)

    def planned() -> tuple[tuple[EmbeddingModuleShardingPlan, ModuleSharder[Any]], Facts]:
        require_device(env.process_group, here)
        chosen = require_sharder(module, sharder)
        made = _plan_of(module, plan, env, here, chosen)
        cuts = plan_cuts(made, chosen.shardable_parameters(module), chosen, env.world_size)
        return (made, chosen), {**facts_of_versions(here), **facts_of_tables(module, chosen), **cuts}

    (made, chosen), _ = agree(Exchange(env.process_group), exchange_device(env.process_group, here), planned)
    whole = ShardingPlan({"": made})
    with quiet_without_cuda(device or here):
        warn_of_other_devices(whole, here, stacklevel=2)
        warn_of_optimizers([Place(("",), module, chosen, env)], whole, stacklevel=2)
        return chosen.shard(module, made, env, here)


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool = False,
    *,
    timeout_s: float | None = 60,
) -> nn.Module:
    """Replace the collections of a model by their sharded forms, in place; other layers are not made data parallel.

    Args:
        module: the model; returned, or its sharded form if it is a collection itself.
        env: rank and process group; by default those of torch.distributed's default group.
        device: where this rank's tables are; by default CUDA where there is one, else the CPU.
        plan: where tables go; a collection that it does not name stays as it is. By default as
            `DistributedModelParallel`.
        sharders: what shards which class of module; by default `get_default_sharders()`.
        init_params: give other layers that are on meta their values, and move them to `device`.
        timeout_s: as `DistributedModelParallel`.

    Raises:
        ValueError, TypeError, RuntimeError: as `DistributedModelParallel`.
    """
    return _replaced(module, env, device, plan, sharders, init_params, None, timeout_s)


def _shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool | None = False,
    planner: EmbeddingPlannerBase | None = None,
    *,
    timeout_s: float | None = 60,
) -> nn.Module:
    """`shard_modules` by a planner of one's own, as TorchRec's notebooks call it.

    Args:
        planner: makes the plan, on rank 0 for all, if none is given.

    Raises:
        As `shard_modules`, and what the planner raises, on all ranks.
    """
    return _replaced(module, env, device, plan, sharders, bool(init_params), planner, timeout_s)


def _replaced(
    module: nn.Module,
    env: ShardingEnv | None,
    device: torch.device | str | None,
    plan: ShardingPlan | None,
    sharders: Sequence[ModuleSharder[Any]] | None,
    init_params: bool,
    planner: EmbeddingPlannerBase | None,
    timeout_s: float | None,
) -> nn.Module:
    if isinstance(env, Mapping):
        raise TypeError(
            f"env must be one ShardingEnv for all modules, got a dict of {sorted(env)}: call shard on each module with"
            " the environment that it is to have"
        )
    if plan is not None and planner is not None:
        warnings.warn("planner has no effect beside a plan", stacklevel=3)
    env, here = env or default_env(), _device(device, stacklevel=5)
    watch_over([env.process_group], timeout_s, hang_up)
    chosen = get_default_sharders() if sharders is None else sharders
    places = find_places(module, chosen, plan, lambda kind: env)

    def made() -> ShardingPlan:
        if planner is None:
            return plan_for(module, chosen, env, here)
        if env.process_group is None:
            return planner.plan(module, list(chosen))
        return planner.collective_plan(module, list(chosen), env.process_group)

    with quiet_without_cuda(device or here):
        plan = agree_on_plan(places, plan, here, env.process_group, made, partial=True, stacklevel=3)
        warn_of_optimizers(places, plan, stacklevel=3)
        module = shard_places(module, places, plan, here)
    if init_params:
        materialize(module, here)
        move(module, here)
    return module


def _plan_of(
    module: nn.Module,
    plan: EmbeddingModuleShardingPlan | TablePlans | ParameterShardingGenerator,
    env: ShardingEnv,
    device: torch.device,
    sharder: ModuleSharder[Any],
) -> EmbeddingModuleShardingPlan:
    params = sharder.shardable_parameters(module)
    given: Mapping[str, ParameterSharding | ParameterShardingGenerator]
    given = apply_to_all(module, plan, sharder) if callable(plan) else plan
    unknown = sorted(set(given) - set(params))
    if unknown:
        raise ValueError(f"the plan names unknown tables {unknown}, the module has {sorted(params)}")
    made = EmbeddingModuleShardingPlan()
    for name, sharding in given.items():
        if not isinstance(sharding, ParameterSharding):
            try:
                sharding = sharding(params[name], env.local_world_size, env.world_size, device.type, sharder)
            except ValueError as error:
                # a generator does not know its table's name
                raise ValueError(f"table {name!r}: {str(error).removeprefix(_UNNAMED)}") from error
        made[name] = sharding
    return made


_UNNAMED = "table '': "


def _device(device: torch.device | str | None, stacklevel: int = 4) -> torch.device:
    if device is not None:
        return device_here(device, stacklevel=stacklevel - 1)
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
