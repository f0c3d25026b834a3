"""A rank's part of a model and its optimizers, by the names of the unsharded model: what is saved, and filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from shardwise.embeddings import (
    CombinedOptimizer,
    FusedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerSpec,
    TableGroup,
)
from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.optim.keyed_optimizer import OptimizerWrapper
from shardwise.embeddings.tiers import RowPart, parts_of
from shardwise.kernels import rule_named
from shardwise.planner.layout import Shard, Span
from shardwise.sharding.comms.agreement import exchange_device
from shardwise.sharding.comms.env import ShardingEnv2D
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.dmp.dmp import DistributedModelParallel
from shardwise.sharding.dmp.unwrap import get_unwrapped_module
from shardwise.sharding.engine.collection import ShardedCollection
from shardwise.sharding.pools.sharded_pool import ShardedObjectPool

from .errors import Link
from .manifest import WEIGHT

# what JSON has, and what an optimizer's setting may be
Plain = int | float | str | bool | None


@dataclass(frozen=True)
class Home:
    """A shard that this rank holds: table number `number` of a group."""

    shard: Shard
    group: TableGroup
    number: int


@dataclass(frozen=True)
class Cells:
    """A tensor of a shard: [rows, columns], or [rows] numbers that were made of `columns`.

    Of a table with a tier there is no tensor, but what reads and writes it chunk by chunk.
    """

    state: str
    rows: Span
    columns: Span
    tensor: Tensor | RowPart


@dataclass(frozen=True)
class HeldTable:
    """A table, and what this rank holds of it; `shards` are those of all ranks.

    `writer` says who of the ranks that hold the same saves it: of a replicated table one rank, of replicas of all
    tables (2D) the first. `group` are the ranks of the shards.
    """

    name: str
    table: str
    rows: int
    dim: int
    dtype: torch.dtype
    optimizer: OptimizerSpec | None
    row_state: str
    has_features: bool
    shards: tuple[Shard, ...]
    homes: tuple[Home, ...]
    writer: bool
    device: torch.device
    group: dist.ProcessGroup | None = None
    # whether rows may lie below the device, on any rank
    tiered: bool = False

    @property
    def rule(self) -> str | None:
        """The fused optimizer's rule."""
        return None if self.optimizer is None else self.optimizer.rule

    @property
    def states(self) -> dict[str, bool]:
        """Names of the optimizer states, and whether each is one number a row."""
        if self.optimizer is None:
            return {}
        kinds = rule_named(self.optimizer.rule).kinds
        return {f"momentum{number}": kind == "row" for number, kind in enumerate(kinds, start=1)}

    @property
    def steps(self) -> int:
        """Updates that were counted here; -1 where no rows are."""
        # host sync
        return max([int(home.group.step) for home in self.homes], default=-1)

    @property
    def settings(self) -> dict[str, Any]:
        """The optimizer's settings, for those who read."""
        return {} if self.optimizer is None else {k: v for k, v in asdict(self.optimizer).items() if k != "rule"}

    def cells(self, home: Home) -> list[Cells]:
        """The tensors of one shard: its rows, then the states."""
        shard, (weights, *states) = home.shard, parts_of(home.group, home.number)
        cells = [Cells(WEIGHT, shard.rows, shard.cols, weights)]
        for (name, is_row), state in zip(self.states.items(), states, strict=True):
            columns = (0, self.dim) if is_row and self.row_state == "table" else shard.cols
            cells.append(Cells(name, shard.rows, columns, state))
        return cells

    def first_of_rows(self, shard: Shard) -> bool:
        """Whether it is the first shard with these rows, which saves numbers that all column blocks share."""
        return shard.cols == min(other.cols for other in self.shards if other.rows == shard.rows)


@dataclass(frozen=True)
class Leaf:
    """An ordinary optimizer of dense parameters, which it holds by the model's names."""

    optimizer: torch.optim.Optimizer
    params: Mapping[str, Tensor]

    @property
    def kind(self) -> str:
        """The class of the optimizer, of which the states are: Adam, say."""
        inner: Any = self.optimizer
        while getattr(inner, "_optimizer", None) is not None:
            inner = inner._optimizer
        return type(inner).__name__

    def states(self, name: str) -> dict[str, Any]:
        """States of a parameter, those in dicts as `outer/inner`."""
        return dict(_flat(self.optimizer.state.get(self.params[name], {})))

    def put_states(self, name: str, states: Mapping[str, Any]) -> None:
        """Give a parameter that has none its states."""
        made: dict[str, Any] = {}
        for key, value in states.items():
            *outer, last = key.split("/")
            place = made
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = value
        self.optimizer.state[self.params[name]] = made

    def put_value(self, name: str, key: str, value: Any) -> None:
        """Replace a state that is no tensor."""
        *outer, last = key.split("/")
        place: Any = self.optimizer.state[self.params[name]]
        for part in outer:
            place = place[part]
        place[last] = value


@dataclass
class Contents:
    """A model by the names of its unsharded form: tables, other parameters and buffers, optimizers."""

    tables: dict[str, HeldTable] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    # prefix of the parameter names, and the optimizer of a collection
    fused: list[tuple[str, FusedOptimizer]] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)

    def fused_groups(self) -> list[dict[str, Any]]:
        """`param_groups` of the tables' optimizers."""
        groups = []
        for prefix, optimizer in self.fused:
            for group in optimizer.published_groups():
                groups.append({**_plain_group(group), "params": [prefix + name for name in group["params"]]})
        return groups

    def dense_groups(self) -> list[dict[str, Any]]:
        """`param_groups` of the ordinary optimizers, with the class of each."""
        groups = []
        for leaf in self.leaves:
            names = {id(param): name for name, param in leaf.params.items()}
            for group in leaf.optimizer.param_groups:
                held = [names[id(param)] for param in group["params"] if id(param) in names]
                if held:
                    groups.append({**_plain_group(group), "optimizer": leaf.kind, "params": held})
        return groups


def link_of(model: nn.Module) -> Link:
    """The ranks that share a model: those of a sharded one, of a DistributedDataParallel, or this process alone."""
    sharded = next((module for module in model.modules() if isinstance(module, ShardedCollection)), None)
    env = model._env if isinstance(model, DistributedModelParallel) else None if sharded is None else sharded._env
    group = None if env is None else env.data_parallel_group
    if env is None and isinstance(model, DistributedDataParallel):
        group = model.process_group
    tensors = [sharded.device] if sharded is not None else [t.device for t in model.parameters() if not t.is_meta]
    device = tensors[0] if tensors else torch.device("cpu")
    return Link.between(group, exchange_device(group, device))


def contents_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, link: Link) -> Contents:
    """This rank's part of a model, and of its optimizers.

    Raises:
        ValueError: something is on meta, kept where a checkpoint does not reach (a row store, FSDP), or unknown to the
            model.
        TypeError: a state of an optimizer is neither a tensor nor JSON.
    """
    contents = Contents()
    seen: dict[int, str] = {}
    # parameters whose states are not kept by an ordinary optimizer
    not_dense: set[int] = set()
    for name, value in _walk(get_unwrapped_module(model), link):
        key = id(value.parameter) if isinstance(value, _Table) else id(value)
        if key in seen:
            contents.aliases[name] = seen[key]
            continue
        seen[key] = name
        if isinstance(value, _Table):
            contents.tables[name] = value.held
            whole = all(shard.replica or len(value.held.shards) == 1 for shard in value.held.shards)
            if value.held.optimizer is not None or not whole or not value.parameter.requires_grad:
                not_dense.add(key)
        else:
            contents.dense[name] = _require_plain(name, value)
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, ShardedCollection):
            contents.fused.append((f"{path}." if path else "", module.fused_optimizer))
        elif isinstance(module, TableCollection):
            contents.fused.append((f"{path}." if path else "", module.fused_optimizer()))
    if optimizer is not None:
        contents.leaves = list(_leaves(optimizer, seen, not_dense))
    return contents


@dataclass(frozen=True)
class _Table:
    held: HeldTable
    parameter: Tensor


def _walk(model: nn.Module, link: Link) -> Iterator[tuple[str, _Table | Tensor]]:
    """Tables, parameters and buffers, a shared one under each of its names."""
    inside: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        below = f"{path}." if path else ""
        if any(below.startswith(prefix) for prefix in inside):
            continue
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"module {path!r} has an extra state, an object that no checkpoint holds: give it to save as `extra`"
            )
        if isinstance(module, ShardedObjectPool) and module.is_cut:
            raise ValueError(
                f"pool {path!r}: rows of a pool over several ranks cannot be saved here: torch.distributed.checkpoint"
                " saves the state dict"
            )
        own: set[str] = set()
        if isinstance(module, ShardedCollection | TableCollection):
            tables = _sharded(module, below, link) if isinstance(module, ShardedCollection) else _whole(module, below)
            own = {name for name, _ in tables}
            inside.append(f"{below}{module._children_name}.")
            yield from tables
        for name, param in module._parameters.items():
            if param is not None and below + name not in own:
                yield below + name, param
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield below + name, buffer


def _sharded(collection: ShardedCollection, below: str, link: Link) -> list[tuple[str, _Table]]:
    if collection._stores is not None or collection._id_maps:
        raise ValueError(f"collection {below!r}: rows in a row store or found by an id map cannot be saved")
    tables, env = [], collection._env
    first = not isinstance(env, ShardingEnv2D) or Exchange(env.replica_pg).rank == 0
    for number, (name, table) in enumerate(collection.states.tables.items()):
        homes = tuple(Home(shard, group, n) for shard, group, n in collection.states.homes(name))
        writer = first and (not collection.states.is_replicated(name) or number % env.world_size == env.rank)
        held = HeldTable(
            below + collection.parameter_name(name), name, table.rows, table.dim, table.dtype, table.optimizer,
            table.options.row_state, bool(table.features), tuple(collection.states.shards[name]), homes, writer,
            collection.device, env.process_group, table.options.tier is not None,
        )  # fmt: skip
        tables.append((held.name, _Table(held, collection.parameter(name))))
    return tables


def _whole(collection: TableCollection, below: str) -> list[tuple[str, _Table]]:
    params = collection._own_parameters()
    tables, homes = [], collection._homes()
    for t, config in enumerate(collection._configs):
        (group, number), name = homes[t], f"{below}{collection._children_name}.{config.name}.weight"
        if group.flat.is_meta:
            raise ValueError(f"table {config.name!r} is on meta: call to_empty or shard it first")
        shard = Shard(config.name, 0, (0, config.num_embeddings), (0, config.embedding_dim))
        held = HeldTable(
            name, config.name, config.num_embeddings, config.embedding_dim, group.flat.dtype, group.optimizer,
            "table", bool(config.feature_names), (shard,), (Home(shard, group, number),), True, group.flat.device,
        )  # fmt: skip
        tables.append((name, _Table(held, params[t])))
    return tables


def _require_plain(name: str, tensor: Tensor) -> Tensor:
    if is_lazy(tensor) or tensor.is_meta:
        raise ValueError(f"{name!r} has no values yet: run a lazy module once, materialize what is on meta")
    if hasattr(tensor, "to_local") or hasattr(tensor, "local_shards"):
        raise ValueError(f"{name!r} is a {type(tensor).__name__}: dense layers in pieces (FSDP) cannot be saved here")
    return tensor


def _leaves(optimizer: torch.optim.Optimizer, names: Mapping[int, str], fused: set[int]) -> Iterator[Leaf]:
    """The optimizers inside one that have states of dense parameters."""
    if isinstance(optimizer, FusedOptimizer):
        return
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _leaves(part, names, fused)
        return
    if isinstance(optimizer, OptimizerWrapper):
        yield from _leaves(optimizer._optimizer, names, fused)
        inner = {id(param) for param in optimizer._optimizer.params.values()}
        # say the place of a schedule
        own = {name: param for name, param in optimizer.params.items() if id(param) not in inner}
        if own:
            yield Leaf(KeyedOptimizer(own, {p: optimizer.state[p] for p in own.values()}, []), own)
        return
    if isinstance(optimizer, KeyedOptimizer):
        given = {
            names.get(id(param), name): param for name, param in optimizer.params.items() if id(param) not in fused
        }
        yield Leaf(optimizer, given)
        return
    given = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ValueError(f"parameter {place} of group {number} of the optimizer is not in the model")
            if id(param) in fused:
                raise ValueError(f"{names[id(param)]!r} is trained in the backward, and by the optimizer that is given")
            given[names[id(param)]] = param
    yield Leaf(KeyedOptimizerWrapper(given, lambda _: optimizer) if given else optimizer, given)


def _flat(states: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in states.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}/")
        else:
            yield f"{before}{key}", value


def _plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON has them.

    Raises:
        TypeError: one is no number, text, or list of these.
    """
    return {key: _plain(key, value) for key, value in group.items() if key != "params"}


def _plain(key: str, value: Any) -> Plain | list[Any]:
    if isinstance(value, Tensor) and value.numel() == 1:
        # host sync: a rate that lives on the device
        return value.item()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(key, item) for item in value]
    if value is not None and not isinstance(value, int | float | str):
        raise TypeError(f"setting {key!r} of an optimizer is a {type(value).__name__}, which JSON has not")
    return value
