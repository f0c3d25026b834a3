"""Tables larger than the device: `tiered` in one process, without a plan; `cache_metrics` and `cache_regret` of any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from shardwise._names import did_you_mean
from shardwise.embeddings import optimizer_of
from shardwise.embeddings.tiers import CachedRows, CacheMetrics, metrics_of, regret

from ...planner.layout import Tier
from ..comms.env import ShardingEnv
from ..engine.collection import ShardedCollection
from ..modules.default_sharders import get_default_sharders
from ..modules.generators import table_wise
from ..modules.placement import Place, find_places
from ..plan.plan import EmbeddingComputeKernel, EmbeddingModuleShardingPlan, ShardingPlan
from .composable import shard_modules
from .unwrap import get_unwrapped_module


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
        ValueError: an ordinary optimizer trains a table of `tiers`, which has no gradient of all its rows; or a table
            is sharded already, by this function or by a plan.

    Example:
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(1000, 8, "item", feature_names=["clicked"])])
        >>> apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
        >>> ebc = tiered(ebc, {"item": Tier(slots=0.1)})
    """
    env = ShardingEnv.from_local(1, 0)
    places = find_places(module, get_default_sharders(), None, lambda kind: env)
    known = list(chain.from_iterable(place.parameters() for place in places))
    sharded = {
        table.name for part in module.modules() if isinstance(part, ShardedCollection) for table in part._routes.tables
    }
    for name in tiers:
        if name not in known:
            if name in sharded:
                raise ValueError(
                    f"table {name!r} is sharded, with a tier or without: give all tiers in one call, and those of a"
                    " plan in its constraints"
                )
            raise KeyError(f"no table {name!r} in the module, it has {sorted(set(known))}{did_you_mean(name, known)}")
    chosen = [place for place in places if any(name in tiers for name in place.parameters())]
    where = _device_of(chosen) if device is None else torch.device(device)
    plan = ShardingPlan({place.path: _plan_of(place, tiers, where) for place in chosen})
    return shard_modules(module, env, where, plan)


def _plan_of(place: Place, tiers: Mapping[str, Tier], device: torch.device) -> EmbeddingModuleShardingPlan:
    plan = EmbeddingModuleShardingPlan()
    for name, param in place.parameters().items():
        by_gradient = optimizer_of(param) is None and param.requires_grad
        if by_gradient and name in tiers:
            raise ValueError(
                f"table {name!r}: a table with a tier is trained by an optimizer in its backward, not by one that steps"
                " on its gradient: call apply_optimizer_in_backward for it before, or requires_grad_(False)"
            )
        kernel = EmbeddingComputeKernel.DENSE if by_gradient else EmbeddingComputeKernel.FUSED
        made = table_wise(0, compute_kernel=kernel.value)(param, 1, 1, device.type, place.sharder)
        plan[name] = replace(made, tier=tiers.get(name))
    return plan


def _device_of(places: list[Place]) -> torch.device:
    """Where the tables are; where something can be, if they are on meta."""
    devices = [param.device for place in places for param in place.parameters().values() if not param.is_meta]
    if devices:
        return devices[0]
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def cache_metrics(module: nn.Module, *, since: Mapping[str, CacheMetrics] | None = None) -> dict[str, CacheMetrics]:
    """What the caches of tables with a `Tier` did so far, by table: those of this rank, all shards together.

    Tables of one name in several collections are told apart by the path of the collection before it. Nothing is sent
    between ranks, and where slots are on a GPU nothing is copied from there.

    Args:
        module: a sharded model, a part of one, or what `tiered` gave.
        since: an earlier answer; what happened after it is counted, a step if it is that of the step before.

    Example:
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(1000, 8, "item", feature_names=["clicked"])])
        >>> apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
        >>> ebc = tiered(ebc, {"item": Tier(slots=0.1)})
        >>> batch = KeyedJaggedTensor(["clicked"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 1]))
        >>> ebc(batch).values().sum().backward()
        >>> before = cache_metrics(ebc)
        >>> ebc(batch).values().sum().backward()
        >>> f"{cache_metrics(ebc, since=before)['item'].hit_rate:.0%}"
        '100%'
    """
    now: dict[str, CacheMetrics] = {}
    for name, (stores, table) in _cached_tables(module).items():
        now[name] = metrics_of(stores)[table]
    if since is None:
        return now
    return {name: of_table.since(since[name]) if name in since else of_table for name, of_table in now.items()}


def trace_caches(module: nn.Module) -> None:
    """Have caches gather from now on which rows batches want, for `cache_regret`; 20 bytes a row on the host."""
    for stores, _ in _cached_tables(module).values():
        for store in stores:
            if store.traces is None:
                store.trace()


def cache_regret(module: nn.Module) -> dict[str, float]:
    """By table, as `cache_metrics`, the share of wanted rows since `trace_caches` that missed and need not have.

    What the best cache of as many slots, which knows all batches (Belady's), would have had of them more, from an empty
    start. Tables that were not traced are not there. Takes time in proportion to the square of the batches.
    """
    regrets = {}
    for name, (stores, table) in _cached_tables(module).items():
        traced = [part for store in stores for part in store.traced() if part[0].name == table]
        if traced:
            hits = sum(had for _, _, had in traced)
            best = sum(int(trace.belady([span.slots]).hits) for span, trace, _ in traced)
            regrets[name] = max(0.0, *regret([hits], [best], sum(trace.counted for _, trace, _ in traced)))
    return regrets


def _cached_tables(module: nn.Module) -> dict[str, tuple[list[CachedRows], str]]:
    """By name of `cache_metrics` the stores of this rank that have shards of a table, and the table's own name."""
    found: list[tuple[str, str, list[CachedRows]]] = []
    for path, child in get_unwrapped_module(module).named_modules():
        if not isinstance(child, ShardedCollection):
            continue
        stores = child.cached_stores()
        found += [(path, table, stores) for table in metrics_of(stores)]
    names = [table for _, table, _ in found]
    return {table if names.count(table) == 1 else f"{path}.{table}": (stores, table) for path, table, stores in found}
