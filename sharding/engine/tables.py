"""The tables that a rank holds: flat buffers of its shards, and their parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.embeddings import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    GradientCheckMode,
    LookupFeature,
    LookupPolicy,
    RowStore,
    TableGroup,
    TableShape,
)
from shardwise.embeddings.optim.optimizers import mark_optimizer, optimizer_of, optimizer_spec
from shardwise.embeddings.tables.row_sums import Accumulation
from shardwise.embeddings.tiers import CachedRows
from shardwise.kernels import numba_loops, rule_named

from ...planner.layout import Shard, TableOptions
from ..comms.agreement import MAY_DIFFER, exchange_device
from ..comms.consensus import STEP_ERRORS, all_or_error
from ..comms.exchange import Exchange
from .routes import Group, Routes, Serving, Table
from .settings import dtype_named
from .tiers import begin_lazily, cached_rows, fill_below, is_lazy, share_first_rows, slots_of

# an optimizer class and its keyword arguments
Mark: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, Any]]
Collection: TypeAlias = EmbeddingBagCollection | EmbeddingCollection
# a group's tables -> the store of their rows
Stores: TypeAlias = Callable[[Sequence[TableShape]], RowStore]
# a shard on this rank: table number `number` of a group
Home: TypeAlias = tuple[Shard, TableGroup, int]


def tables_of(
    module: Collection,
    shards: Sequence[Shard],
    default_optimizer: Mark,
    options: dict[str, TableOptions],
    mapped: Mapping[str, int | None],
) -> tuple[list[Table], list[Mark | None]]:
    """Tables and the optimizer marks they will carry: none of what is frozen, or trained by its gradient."""
    replicated = {shard.table for shard in shards if shard.replica}
    tables, marks = [], []
    for config, param in zip(module._configs, module._own_parameters(), strict=True):
        default = None if config.name in replicated else default_optimizer
        mark = (optimizer_of(param) or default) if param.requires_grad else None
        chosen = options.get(config.name, TableOptions())
        if chosen.dense:
            mark = None
        dtype = param.dtype if chosen.weights_precision is None else dtype_named(chosen.weights_precision)
        if chosen.stochastic_rounding is not None:
            mark = _rounded(mark, chosen.stochastic_rounding, config.name, param.requires_grad)
        tables.append(
            Table(
                config.name, config.num_embeddings, config.embedding_dim, dtype,
                None if mark is None else optimizer_spec(*mark, table=config.name),
                tuple(config.feature_names), module._is_averaged(config), chosen,
                config.name in mapped, mapped.get(config.name),
            )
        )  # fmt: skip
        marks.append(mark)
    return tables, marks


def _rounded(mark: Mark | None, stochastic: bool, table: str, trained: bool) -> Mark | None:
    """The optimizer of a table whose plan says how its rows are rounded."""
    if mark is None:
        if trained:
            warnings.warn(
                f"the plan's stochastic_rounding (table {table!r}) has no effect: the table has no optimizer in its"
                " backward, and an ordinary one rounds as torch does",
                stacklevel=2,
            )
        return None
    return mark[0], {**mark[1], "stochastic_rounding": stochastic}


def facts_of_replicas(tables: Iterable[Table], shards: Iterable[Shard], device: torch.device) -> dict[str, str]:
    """What the bits of replicated tables depend on besides their gradients: the same on all ranks, or replicas drift.

    On a CPU rules that are not exact (`Rule.is_exact`) have other bits with numba's loops than on torch alone.
    """
    replicated = {shard.table for shard in shards if shard.replica} if device.type == "cpu" else set()
    facts = {}
    for table in tables:
        if table.name in replicated and table.optimizer is not None and not rule_named(table.optimizer.rule).is_exact:
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
        self._routes, self._stores, self._rank = routes, stores, rank
        whole = {shard.table for group in routes.dense for shard in group.shards}
        self._by_gradient = [t.name for t in routes.tables if t.name in whole or t in routes.dense_cuts]
        serving = routes.serving[rank]
        self.groups = [self._table_group(group, serving, device) for group in serving.groups]
        self.dense = [self._table_group(group, None, device) for group in routes.dense]
        self.members = [*serving.groups, *routes.dense]
        # every shard with its group and its number there
        self.homes: list[Home] = [
            (shard, group, number)
            for group, part in zip(self.all_groups(), self.members, strict=True)
            for number, shard in enumerate(part.shards)
        ]
        self.replicas = [g for g, part in zip(self.groups, serving.groups, strict=True) if part.is_replica]
        self.parameters: dict[str, nn.Parameter] = {}
        # what a parameter is of a table that other ranks hold
        self._empty = torch.empty(0, device=device)
        self.device = device
        self.accumulate_as(Accumulation())

    def accumulate_as(self, accumulation: Accumulation) -> None:
        """Have gradients of all groups wait where it says so."""
        self.accumulation = accumulation
        for group in self.groups:
            group.accumulation = accumulation

    def _table_group(self, group: Group, serving: Serving | None, device: torch.device) -> TableGroup:
        by_name = {table.name: table for table in self._routes.tables}
        tables = [by_name[shard.table] for shard in group.shards]
        first = tables[0]
        shapes = [
            TableShape(
                shard.table, shard.rows[1] - shard.rows[0], shard.cols[1] - shard.cols[0],
                None if table.options.tier is None else slots_of(table.options.tier, shard, table)[0],
                begin=(shard.rows[0], shard.cols[0]),
            )
            for table, shard in zip(tables, group.shards, strict=True)
        ]  # fmt: skip
        lookups = [
            LookupFeature(
                self._routes.features[slot.lookup],
                slot.shard,
                # the average of a bag whose ids are divided is taken where all of them are
                self._routes.table_of(slot.lookup).mean
                and (serving is None or serving.streams[slot.stream].cut is None),
            )
            for slot in group.slots
        ]
        store = None if self._stores is None else self._stores(shapes)
        if first.options.tier is not None:
            store = cached_rows(tables, group.shards, shapes, self._rank, device)
        return TableGroup(
            shapes, lookups, dtype=first.dtype, device=device, optimizer=first.optimizer, policy=self._policy,
            store=store,
        )  # fmt: skip

    def all_groups(self) -> list[TableGroup]:
        """All of them."""
        return [*self.groups, *self.dense]

    def stores(self) -> list[CachedRows]:
        """Those of tables with a tier."""
        return [group.store for group in self.all_groups() if isinstance(group.store, CachedRows)]

    def attach_stores(self) -> None:
        """Have the stores of tables with a tier know their groups, and make what lies below."""
        for group in self.all_groups():
            if isinstance(group.store, CachedRows):
                group.store.attach(group)

    def _seeds_of(self, given: Sequence[tuple[Any, Tensor]], exchange: Exchange) -> dict[str, int]:
        """A seed for each table whose rows are made when they are first needed, the same on all ranks."""
        tiered = {table.name for table in self._routes.tables if table.options.tier is not None}
        lazy = [config.name for config, weight in given if config.name in tiered and is_lazy(config, weight)]
        if not lazy:
            return {}
        # from torch's generator, which manual_seed governs
        drawn = torch.randint(2**62, (len(lazy),), device="cpu").to(self.device)
        exchange.broadcast(drawn)
        return dict(zip(lazy, drawn.tolist(), strict=True))

    def _fill(self, given: Mapping[str, tuple[Any, Tensor]], seeds: Mapping[str, int]) -> None:
        """Give this rank's shards their first rows, of the module's weights or, where these are on meta, made here."""
        self.attach_stores()
        for shard, group, number in self.homes:
            config, weight = given[shard.table]
            if isinstance(group.store, CachedRows):
                if shard.table in seeds:
                    begin_lazily(group.store, number, shard, config, weight.dtype, seeds[shard.table])
                else:
                    fill_below(group.store, number, weight, shard, config.init_fn)
                continue
            view = group.view(number)
            if not weight.is_meta:
                view.copy_(weight[slice(*shard.rows), slice(*shard.cols)])
            elif config.init_fn is not None and view.numel() and not view.is_meta:
                config.init_fn(view)

    @torch.no_grad()
    def adopt(self, module: Collection, marks: Sequence[Mark | None], exchange: Exchange) -> None:
        """Take over the module's weights (or initialise what was on meta); replicas become rank 0's.

        Raises:
            ValueError: shards of a table on this rank are no matrix.
            OSError, MemoryError: what lies below a table with a tier cannot be made. All ranks raise, a RuntimeError
                where it was another's.
        """
        given = {
            config.name: (config, weight)
            for config, weight in zip(module._configs, module._own_parameters(), strict=True)
        }
        self.parameters = {name: nn.Parameter(self._empty, weight.requires_grad) for name, (_, weight) in given.items()}
        seeds = self._seeds_of(list(given.values()), exchange)
        if any(table.options.tier is not None for table in self._routes.tables):
            # the disk of one rank may be full: the others would wait for its rows
            fill, errors = partial(self._fill, given, seeds), replace(STEP_ERRORS, keeps_own=True)
            all_or_error(
                exchange, exchange_device(exchange.group, self.device), lambda: (fill(), ()), count=0, errors=errors
            )
        else:
            self._fill(given, seeds)
        self._place_parameters()
        for shard, group, number in self.homes:
            if shard.replica and isinstance(group.store, CachedRows):
                share_first_rows(group.store, number, exchange)
            elif shard.replica and not group.flat.is_meta:
                exchange.broadcast(group.view(number))
        for group in self.all_groups():
            if not isinstance(group.store, CachedRows):
                group.store.attach(group)
        for table, mark in zip(self._routes.tables, marks, strict=True):
            if mark is not None:
                mark_optimizer(self.parameters[table.name], *mark)

    def dense_parameters(self) -> list[nn.Parameter]:
        """Parameters of cut tables that train by their gradients, of which this rank has rows."""
        return [param for table in self._routes.dense_cuts if (param := self.parameters[table.name]).numel()]

    def gradient_parameters(self) -> list[nn.Parameter]:
        """Parameters of all tables that train by their gradients, whole ones too; none that is frozen or elsewhere."""
        parameters = [self.parameters[name] for name in self._by_gradient]
        return [param for param in parameters if param.requires_grad and param.numel()]

    def parameter_gradients(self, of_groups: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Gradients of `dense_parameters`, given those of the flat buffers of groups by number.

        None for a table that no group has a gradient of. Each is a tensor of its own to autograd, on the memory of the
        group's, so that it may be changed in place.
        """
        views: dict[str, list[Tensor]] = {}
        for number, flat in of_groups.items():
            for at, shape in enumerate(self.groups[number].tables):
                views.setdefault(shape.name, []).append(self.groups[number].cut(flat, at))
        gradients: list[Tensor | None] = []
        for table in self._routes.dense_cuts:
            if self.parameters[table.name].numel():
                whole = _stacked(table.name, views[table.name]) if table.name in views else None
                if whole is not None:
                    # the same memory as a tensor that is no view to autograd
                    place = (whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride())
                    whole = whole.new_empty(0).set_(*place)
                gradients.append(whole)
        return gradients

    def frozen_tables(self) -> int:
        """A number that tells which parameters want no gradient; every rank has one for each table."""
        return sum((not param.requires_grad) << number for number, param in enumerate(self.parameters.values()))

    def _place_parameters(self) -> None:
        """Make each parameter a view of its shards; their gradients stay."""
        matrices = self.matrices()
        for name, param in self.parameters.items():
            matrix = matrices.get(name, self._empty)
            if param.is_meta == matrix.is_meta:
                param.data = matrix
                continue
            # across meta parameters become new objects
            self.parameters[name] = nn.Parameter(matrix, requires_grad=param.requires_grad)
            vars(self.parameters[name]).update(vars(param))
        for group in self.all_groups():
            group.parameters = [self.parameters[shape.name] for shape in group.tables]

    def matrices(self) -> dict[str, Tensor]:
        """The shards of each table on this rank, one below the other.

        Raises:
            ValueError: they are no matrix.
        """
        views: dict[str, list[Tensor]] = {}
        for shard, group, number in self.homes:
            views.setdefault(shard.table, []).append(group.shown(number))
        return {name: _stacked(name, of_table) for name, of_table in views.items()}

    def take_parameters(self, other: LocalTables) -> None:
        """Make the parameters of another, the very objects, views of these shards; gradients stay."""
        self.parameters = other.parameters
        self._place_parameters()

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """`nn.Module._apply` for all groups.

        Raises:
            ValueError, RuntimeError: as `TableGroup.require_movable`; nothing has changed.
        """
        for group in self.all_groups():
            group.require_movable(fn)
        for group in self.all_groups():
            group.move(fn)
        self._empty = fn(self._empty)
        self.device = self._empty.device
        self._place_parameters()
        for param in self.parameters.values():
            if param.grad is not None:
                param.grad = fn(param.grad)

    @torch.no_grad()
    def follow(self, given: Mapping[str, Any]) -> bool:
        """Make parameters that were put in the place of these, by table, the views of the shards, with their values.

        Returns:
            Whether the tables are on another device by then: where they were made on meta, all parameters go at once.

        Raises:
            ValueError: one has another shape or dtype, is no parameter, or is where the others are not.
        """
        for name, param in given.items():
            own = self.parameters[name]
            if not isinstance(param, nn.Parameter) or hasattr(param, "placements"):
                raise ValueError(f"table {name!r}: only an nn.Parameter may take its sharded weight's place")
            if (param.shape, param.dtype) != (own.shape, own.dtype):
                raise ValueError(
                    f"table {name!r}: this rank's weight is {own.dtype} {list(own.shape)}, got {param.dtype}"
                    f" {list(param.shape)}"
                )
        devices = {str(given.get(name, own).device) for name, own in self.parameters.items()}
        if len(devices) > 1:
            raise ValueError(f"tables {list(self.parameters)}: give all weights one device, they are on {devices}")
        device = next(iter(given.values())).device
        moves: bool = device != self.device
        values = {name: param.detach().clone() for name, param in given.items()}
        for name, param in given.items():
            # what is held elsewhere keeps its rows
            own = self.parameters[name]
            own.data = own.data.clone()
            for mark, value in vars(own).items():
                vars(param).setdefault(mark, value)
            self.parameters[name] = param
        if moves:
            self.move(partial(torch.empty_like, device=device))
        else:
            self._place_parameters()
        for name, rows in values.items():
            if not rows.is_meta:
                self.parameters[name].copy_(rows)
        return moves

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # a copied group knows no parameters, and copied parameters may be views of nothing
        self._place_parameters()

    def children(self) -> nn.ModuleDict:
        """The parameters under the names of the unsharded module."""
        children = nn.ModuleDict({name: nn.Module() for name in self.parameters})
        for name, param in self.parameters.items():
            children[name].register_parameter("weight", param)
        return children


def _stacked(name: str, views: Sequence[Tensor]) -> Tensor:
    """Several shards of one table as one matrix, a view of what they are views of."""
    views = [view for view in views if view.numel()] or views[:1]
    if len(views) > 1 and not any(view.stride(1) for view in views):
        # of tables that are away (FULLY_SHARDED) nothing is in memory but one number
        return views[0][:1].expand(sum(view.shape[0] for view in views), -1)
    if views[0].is_meta:
        # no addresses there
        adjacent = all(a.storage_offset() + a.numel() == b.storage_offset() for a, b in pairwise(views))
    else:
        adjacent = all(a.data_ptr() + a.numel() * a.element_size() == b.data_ptr() for a, b in pairwise(views))
    if not adjacent or len({view.shape[1] for view in views}) > 1:
        raise ValueError(
            f"table {name!r}: its shards on one rank, {[list(view.shape) for view in views]}, are no matrix together;"
            " give those of a rank the same number of columns"
        )
    return views[0].as_strided((sum(view.shape[0] for view in views), views[0].shape[1]), views[0].stride())
