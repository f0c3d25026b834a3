"""The tables that a rank holds: flat buffers of its shards, and their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.embeddings import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    GradientCheckMode,
    LookupFeature,
    LookupPolicy,
    OptimizerSpec,
    RowStore,
    TableGroup,
    TableShape,
)
from shardwise.embeddings.optim.optimizers import mark_optimizer, optimizer_of, optimizer_spec
from shardwise.embeddings.tables.row_sums import Accumulation
from shardwise.kernels import numba_loops, rule_named

from ...planner.layout import Shard, TableOptions
from ..comms.agreement import MAY_DIFFER
from ..comms.exchange import Exchange
from .routes import Group, Routes, Serving, Table

# an optimizer class and its keyword arguments
Mark: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, Any]]
Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection
# a group's tables -> the store of their rows
Stores: TypeAlias = Callable[[Sequence[TableShape]], RowStore]


def tables_of(
    module: Collection,
    shards: Sequence[Shard],
    default_optimizer: Mark,
    options: dict[str, TableOptions],
    mapped: Mapping[str, int | None],
) -> tuple[list[Table], list[Mark | None]]:
    """Tables and the optimizer marks they will carry; a frozen table has none, a cut one always has one otherwise."""
    replicated = {shard.table for shard in shards if shard.replica}
    tables, marks = [], []
    for config, param in zip(module._configs, module._table_parameters(), strict=True):
        mark = optimizer_of(param) if param.requires_grad else None
        if mark is None and param.requires_grad and config.name not in replicated:
            mark = default_optimizer
        spec: OptimizerSpec | None = None if mark is None else optimizer_spec(*mark, table=config.name)
        tables.append(
            Table(
                config.name, config.num_embeddings, config.embedding_dim, param.dtype, spec,
                tuple(config.feature_names), module._is_averaged(config), options.get(config.name, TableOptions()),
                config.name in mapped, mapped.get(config.name),
            )
        )  # fmt: skip
        marks.append(mark)
    return tables, marks


def facts_of_replicas(tables: Iterable[Table], shards: Iterable[Shard], device: torch.device) -> dict[str, str]:
    """What the bits of replicated tables depend on besides their gradients: the same on all ranks, or replicas drift.

    On a CPU rules that are not exact (`Rule.is_exact`) have other bits with numba's loops than on torch alone.
    """
    replicated = {shard.table for shard in shards if shard.replica} if device.type == "cpu" else set()
    facts = {}
    for table in tables:
        if table.name not in replicated or table.optimizer is None or rule_named(table.optimizer.rule).is_exact:
            continue
        by, processor = numba_loops.arithmetic()
        what = f"the updates of replicated table {table.name!r} ({table.optimizer.rule})"
        facts[f"arithmetic of {what}; the same numba on all ranks or SHARDWISE_NUMBA=0 on all mends it"] = by
        facts[f"{MAY_DIFFER}of {what}"] = processor
    return facts


class LocalTables:
    """A rank's groups of shards: `groups` as its part of the routes lists them, `dense` trained by gradients.

    A table's parameter is the matrix of its shards on this rank, one below the other; it is empty where there are none.
    """

    def __init__(
        self, routes: Routes, rank: int, device: torch.device, policy: LookupPolicy, stores: Stores | None
    ) -> None:
        # rows travel as fp32; what arrives is cast. Gradients that must raise do so on all ranks, before they travel
        check = GradientCheckMode.IGNORE if policy.gradient_check is GradientCheckMode.RAISE else policy.gradient_check
        self._policy = replace(policy, output_dtype=torch.float32, gradient_check=check)
        self._routes, self._stores = routes, stores
        serving = routes.serving[rank]
        self.groups = [self._table_group(group, serving, device) for group in serving.groups]
        self.dense = [self._table_group(group, None, device) for group in routes.dense]
        self.members = [*serving.groups, *routes.dense]
        self.replicas = [g for g, part in zip(self.groups, serving.groups, strict=True) if part.is_replica]
        self.parameters: dict[str, nn.Parameter] = {}
        self.device = device
        self.accumulate_as(Accumulation())

    def accumulate_as(self, accumulation: Accumulation) -> None:
        """Have gradients of all groups wait where it says so."""
        self.accumulation = accumulation
        for group in self.groups:
            group.accumulation = accumulation

    def _table_group(self, group: Group, serving: Serving | None, device: torch.device) -> TableGroup:
        by_name = {table.name: table for table in self._routes.tables}
        first = by_name[group.shards[0].table]
        shapes = [
            TableShape(
                shard.table, shard.rows[1] - shard.rows[0], shard.cols[1] - shard.cols[0],
                begin=(shard.rows[0], shard.cols[0]),
            )
            for shard in group.shards
        ]  # fmt: skip
        lookups = []
        for slot in group.slots:
            # the average of a bag whose ids are divided is taken where all of them are
            whole = serving is None or serving.streams[slot.stream].cut is None
            mean = by_name[group.shards[slot.shard].table].mean and whole
            lookups.append(LookupFeature(self._routes.lookups[slot.lookup][0], slot.shard, mean))
        return TableGroup(
            shapes, lookups, dtype=first.dtype, device=device, optimizer=first.optimizer, policy=self._policy,
            store=None if self._stores is None else self._stores(shapes),
        )  # fmt: skip

    def all_groups(self) -> list[TableGroup]:
        """All of them."""
        return [*self.groups, *self.dense]

    @torch.no_grad()
    def adopt(self, module: Collection, marks: Sequence[Mark | None], exchange: Exchange) -> None:
        """Take over the module's weights (or initialise what was on meta); replicas become rank 0's.

        Raises:
            ValueError: shards of a table on this rank are no matrix.
        """
        configs = {config.name: config for config in module._configs}
        old = dict(zip(configs, module._table_parameters(), strict=True))
        for name, before in old.items():
            self.parameters[name] = nn.Parameter(torch.empty(0, device=self.device), before.requires_grad)
        for group, part in zip(self.all_groups(), self.members, strict=True):
            for number, shard in enumerate(part.shards):
                view, before, init_fn = group.view(number), old[shard.table], configs[shard.table].init_fn
                if not before.is_meta:
                    view.copy_(before[slice(*shard.rows), slice(*shard.cols)])
                elif init_fn is not None and view.numel():
                    init_fn(view)
        self._place_parameters()
        for group, part in zip(self.all_groups(), self.members, strict=True):
            for number in range(len(part.shards)) if part.is_replica else ():
                exchange.broadcast(group.view(number))
        for table, mark in zip(self._routes.tables, marks, strict=True):
            if mark is not None:
                mark_optimizer(self.parameters[table.name], *mark)

    def frozen_tables(self) -> int:
        """A number that tells which parameters want no gradient; every rank has one for each table."""
        bits = 0
        for number, param in enumerate(self.parameters.values()):
            bits |= (not param.requires_grad) << number
        return bits

    def _place_parameters(self) -> None:
        """Make each parameter a view of its shards."""
        for group, part in zip(self.all_groups(), self.members, strict=True):
            group.parameters = [self.parameters[shard.table] for shard in part.shards]
        for name, matrix in self.matrices().items():
            self.parameters[name].data = matrix

    def matrices(self) -> dict[str, Tensor]:
        """The shards of each table on this rank, one below the other.

        Raises:
            ValueError: they are no matrix.
        """
        views: dict[str, list[Tensor]] = {}
        for group, part in zip(self.all_groups(), self.members, strict=True):
            for number, shard in enumerate(part.shards):
                views.setdefault(shard.table, []).append(group.view(number))
        return {name: _stacked(name, of_table) for name, of_table in views.items()}

    def take_parameters(self, other: LocalTables) -> None:
        """Make the parameters of another, the very objects, views of these shards; gradients stay."""
        self.parameters = other.parameters
        for param in self.parameters.values():
            param.data = torch.empty(0, device=self.device)
        self._place_parameters()

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """`nn.Module._apply` for all groups."""
        for group in self.all_groups():
            group.move(fn)
        empty = fn(torch.empty(0, device=self.device))
        self.device = empty.device
        for param in self.parameters.values():
            grad = None if param.grad is None else fn(param.grad)
            param.data = empty
            param.grad = grad
        self._place_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # a copied group knows no parameters, and copied parameters may be views of nothing
        self._place_parameters()

    def children(self) -> nn.ModuleDict:
        """The parameters under the names of the unsharded module."""
        children = nn.ModuleDict()
        for name, param in self.parameters.items():
            children[name] = nn.Module()
            children[name].register_parameter("weight", param)
        return children


def _stacked(name: str, views: Sequence[Tensor]) -> Tensor:
    """Several shards of one table as one matrix, a view of what they are views of."""
    first = views[0]
    if len(views) == 1:
        return first
    views = [view for view in views if view.numel()] or [first]
    first = views[0]
    ends = [view.data_ptr() + view.numel() * view.element_size() for view in views]
    adjacent = all(view.data_ptr() == end for view, end in zip(views[1:], ends, strict=False))
    if not adjacent or len({view.shape[1] for view in views}) > 1:
        raise ValueError(
            f"table {name!r}: its shards on one rank, {[list(view.shape) for view in views]}, are no matrix together;"
            " give those of a rank the same number of columns"
        )
    return first.as_strided((sum(view.shape[0] for view in views), first.shape[1]), first.stride())
