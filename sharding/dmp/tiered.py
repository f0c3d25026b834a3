"""Tables larger than the device in one process, without a plan: `tiered`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from shardwise._names import did_you_mean
from shardwise.embeddings import optimizer_of

from ...planner.layout import Tier
from ..comms.env import ShardingEnv
from ..modules.default_sharders import get_default_sharders
from ..modules.generators import table_wise
from ..modules.placement import Place, find_places
from ..plan.plan import EmbeddingComputeKernel, EmbeddingModuleShardingPlan, ShardingPlan
from .composable import shard_modules


def tiered(module: nn.Module, tiers: Mapping[str, Tier], *, device: torch.device | str | None = None) -> nn.Module:
    """Keep some rows of tables on the device and all others below it, in this process alone; no plan is needed.

    Collections that have a table of `tiers` are replaced by their sharded forms with this process as the only rank;
    other tables of theirs stay on the device as a whole. Results have the same bits as before. Pipelines, checkpoints
    and state dicts take the result as they take a sharded model.

    Args:
        module: a model, changed in place, or a collection itself, of which the other form is returned.
        tiers: by table name; a name may stand for tables of several collections.
        device: where slots are; by default where the tables are, or the current GPU or the CPU if they are on meta.

    Raises:
        KeyError: there is no such table.
        ValueError: an ordinary optimizer trains a table of `tiers`, which has no gradient of all its rows.

    Example:
        >>> apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
        >>> ebc = tiered(ebc, {"item": Tier(slots=0.1)})
    """
    env = ShardingEnv.from_local(1, 0)
    places = find_places(module, get_default_sharders(), None, lambda kind: env)
    known = list(chain.from_iterable(place.parameters() for place in places))
    for name in tiers:
        if name not in known:
            raise KeyError(f"no table {name!r} in the module, it has {sorted(set(known))}{did_you_mean(name, known)}")
    chosen = [place for place in places if any(name in tiers for name in place.parameters())]
    plan = ShardingPlan({place.path: _plan_of(place, tiers) for place in chosen})
    return shard_modules(module, env, _device_of(chosen) if device is None else device, plan)


def _plan_of(place: Place, tiers: Mapping[str, Tier]) -> EmbeddingModuleShardingPlan:
    plan = EmbeddingModuleShardingPlan()
    for name, param in place.parameters().items():
        by_gradient = optimizer_of(param) is None and param.requires_grad
        if by_gradient and name in tiers:
            raise ValueError(
                f"table {name!r}: a table with a tier is trained by an optimizer in its backward, not by one that steps"
                " on its gradient: call apply_optimizer_in_backward for it before, or requires_grad_(False)"
            )
        kernel = EmbeddingComputeKernel.DENSE if by_gradient else EmbeddingComputeKernel.FUSED
        made = table_wise(0, compute_kernel=kernel.value)(param, 1, 1, param.device.type, place.sharder)
        plan[name] = replace(made, tier=tiers.get(name))
    return plan


def _device_of(places: list[Place]) -> torch.device | None:
    """Where the tables are; None if they are on meta."""
    devices = [param.device for place in places for param in place.parameters().values() if not param.is_meta]
    return devices[0] if devices else None
