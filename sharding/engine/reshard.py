"""Sharded tables go over to another plan in place: weights, optimizer states, counts of steps and learning rates.

Each rank sends the rectangles in which its old shards meet new shards of others, one exchange a table. Numbers travel
as fp32, which holds every weight as it is. A state per row belongs to the columns that it was made of: it moves as it
is where the new plan has numbers for the same columns, and is averaged over columns only where `resplit` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.embeddings import TableGroup
from shardwise.kernels import rule_named

from ...planner.layout import Shard, Span, TableOptions
from ..comms.agreement import Facts, agree
from ..comms.exchange import Exchange
from ..plan.plan import ParameterSharding, options_of, shards_of
from .routes import Routes, Table
from .state import Box, States, overlap, part_of, volume
from .tables import LocalTables, facts_of_replicas

if TYPE_CHECKING:
    from .collection import ShardedCollection


@dataclass(frozen=True)
class Move:
    """Cells of `box` (rows, or rows and columns) from an old shard into a new one, of whose value they are `share`."""

    source: Shard
    target: Shard
    box: Box
    share: float = 1.0


def reshard(
    collection: ShardedCollection,
    shards: Sequence[Shard],
    options: Mapping[str, TableOptions] | None = None,
    *,
    resplit: str | None = None,
) -> None:
    """Hold the collection's tables by these shards from now on; all ranks call this, with no batch under way.

    Args:
        shards: of all tables.
        options: of tables whose options change.
        resplit: "mean" gives a column block whose rows have no number of their own yet (of a rule that keeps one a row)
            the mean over its columns of the numbers that these had.

    Raises:
        ValueError: the shards do not fit the tables, states per row would have to be split without `resplit`, a table
            that is trained by its gradient would be cut (or the other way round), or rows are kept by a row store or
            found by an id map, or gradients wait for a step. All ranks raise, and nothing is changed.
        RuntimeError: ranks disagree on the plan.
    """
    _go_over(collection, lambda: (list(shards), dict(options or {})), resplit)


def reshard_by_plan(
    collection: ShardedCollection, changes: Mapping[str, ParameterSharding], *, resplit: str | None = None
) -> None:
    """As `reshard`, by a plan of the tables that change."""

    def chosen() -> tuple[list[Shard], dict[str, TableOptions]]:
        tables = collection.states.tables
        unknown = sorted(set(changes) - set(tables))
        if unknown:
            raise ValueError(f"the plan names tables {unknown}, the module has {sorted(tables)}")
        shards: list[Shard] = []
        for name, table in tables.items():
            if name in changes:
                shards += shards_of(name, changes[name], table.rows, table.dim, collection._env.world_size)
            else:
                shards += collection.states.shards[name]
        return shards, {name: options_of(placement) for name, placement in changes.items()}

    _go_over(collection, chosen, resplit)


def changes_of(
    given: Mapping[str, Any], path: str | None, paths: Sequence[str]
) -> dict[str, tuple[float, Mapping[str, ParameterSharding]]]:
    """What `DistributedModelParallel.reshard` was asked for: module path -> (volume, plan of what changes).

    Raises:
        ValueError: it names no module of `paths`, or does not say which.
    """
    if all(isinstance(change, ParameterSharding) for change in given.values()):
        if path is None and len(paths) != 1:
            raise ValueError(f"say by sharded_module_fqn which module is resharded, the model has {sorted(paths)}")
        changes: dict[str, Any] = {paths[0] if path is None else path: (mebibytes(given), given)}
    else:
        changes = dict(given) if path is None else {name: given[name] for name in given if name == path}
    if set(changes) - set(paths) or not changes:
        asked = sorted(changes) or path
        raise ValueError(
            f"modules {asked} are to be resharded: the model has {sorted(paths)}, the plan {sorted(given)}"
        )
    return changes


def mebibytes(plan: Mapping[str, ParameterSharding]) -> float:
    """The volume of tables in fp32, as TorchRec counts it."""
    cuts = [
        shard.shard_sizes
        for placement in plan.values()
        if placement.sharding_spec
        for shard in placement.sharding_spec.shards
    ]
    return sum(rows * cols for rows, cols in cuts) * 4 / 2**20


def _go_over(
    collection: ShardedCollection,
    choose: Callable[[], tuple[list[Shard], dict[str, TableOptions]]],
    resplit: str | None,
) -> None:
    old, rank, device = collection.states, collection._env.rank, collection.device

    def make() -> tuple[tuple[Routes, LocalTables, States], Facts]:
        if resplit not in (None, "mean"):
            raise ValueError(f"resplit must be 'mean' or None, got {resplit!r}")
        shards, options = choose()
        unknown = sorted(set(options) - set(old.tables))
        if unknown:
            raise ValueError(f"options are given for tables {unknown}, the module has {sorted(old.tables)}")
        if collection._stores is not None or collection._id_maps:
            raise ValueError("tables whose rows are in a row store or found by an id map cannot be resharded")
        if collection._tables.accumulation.begun:
            raise ValueError("gradients wait for a step: call step() or zero_grad() of the fused optimizer first")
        tables = [replace(table, options=options.get(name, table.options)) for name, table in old.tables.items()]
        routes, facts = collection._plan(tables, shards)
        local_tables = LocalTables(routes, rank, device, collection._policy, None)
        local_tables.matrices()
        new = States(routes, local_tables, collection._env)
        for table in tables:
            _require_same_training(table, old, new, collection.parameter(table.name).requires_grad)
            if resplit is None:
                _require_same_columns(table.name, old, new)
        return (routes, local_tables, new), {
            **facts,
            **facts_of_replicas(tables, shards, device),
            "resplit": str(resplit),
        }

    exchange = collection._exchange
    (routes, local_tables, new), number = agree(exchange, device, make)
    _carry_steps(old, new, routes, exchange, device)
    with torch.no_grad():
        for name in new.tables:
            _Carried(name, old, new, device).go(exchange)
    local_tables.take_parameters(collection._tables)
    collection._settle(routes, number, local_tables)
    collection.fused_optimizer.follow_plan(collection.shards, collection.states)


def _require_same_training(table: Table, old: States, new: States, trained: bool) -> None:
    if table.optimizer is None and trained and not (old.is_replicated(table.name) and new.is_replicated(table.name)):
        raise ValueError(
            f"table {table.name!r} is replicated and trained by its gradient: an optimizer in the backward, applied"
            " before sharding, would let it be cut"
        )


def _columns_of(states: States, name: str) -> dict[Span, Span]:
    """For each column block the columns that its numbers per row were made of."""
    table, strips = states.tables[name], states.strips(name)
    whole = table.options.row_state == "table"
    return {strip: (0, table.dim) if whole else strip for strip in strips}


def _row_states(table: Table) -> list[bool]:
    """For each optimizer state whether it is one number a row."""
    return [] if table.optimizer is None else [kind == "row" for kind in rule_named(table.optimizer.rule).kinds]


def _require_same_columns(name: str, old: States, new: States) -> None:
    if any(_row_states(old.tables[name])):
        before = set(_columns_of(old, name).values())
        strange = sorted(set(_columns_of(new, name).values()) - before)
        if strange:
            raise ValueError(
                f"table {name!r}: its optimizer has a number for each row of columns {sorted(before)}, the new plan"
                f" wants them for columns {strange}: resplit='mean' takes the mean over columns, and tables with"
                " row_state='table' have one number for whole rows"
            )


def cell_moves(name: str, old: States, new: States) -> list[Move]:
    """How the cells of a table move, new shard by new shard."""
    moves = []
    for target in new.shards[name]:
        for source in _sources(old, name, target):
            box = overlap((source.rows, source.cols), (target.rows, target.cols))
            if box is not None:
                moves.append(Move(source, target, box))
    return moves


def row_moves(name: str, old: States, new: States) -> list[Move]:
    """How its numbers per row move."""
    moves, before, after = [], _columns_of(old, name), _columns_of(new, name)
    for target in new.shards[name]:
        wanted = after[target.cols]
        same = [strip for strip, columns in before.items() if columns == wanted]
        # one column block has them as they are, or each has a part
        strips = same[:1] or [strip for strip in _distinct(before) if overlap((before[strip],), (wanted,))]
        for source in _sources(old, name, target):
            rows = overlap((source.rows,), (target.rows,))
            if source.cols in strips and rows is not None:
                ((low, high),) = overlap((before[source.cols],), (wanted,)) or ((0, 0),)
                moves.append(Move(source, target, rows, (high - low) / (wanted[1] - wanted[0])))
    return moves


def _distinct(columns: Mapping[Span, Span]) -> list[Span]:
    """Column blocks, only the first of those that have the same numbers."""
    first: dict[Span, Span] = {}
    for strip, made_of in columns.items():
        first.setdefault(made_of, strip)
    return list(first.values())


def _sources(old: States, name: str, target: Shard) -> list[Shard]:
    """Old shards that a new one takes from: of a replicated table its own rank's."""
    shards = old.shards[name]
    return [s for s in shards if s.rank == target.rank] if old.is_replicated(name) else shards


class _Carried:
    """One table on its way from its old shards to the new ones."""

    def __init__(self, name: str, old: States, new: States, device: torch.device) -> None:
        self._rank, self._device = old.env.rank, device
        self._old = {shard: (group, number) for shard, group, number in old.homes(name)}
        self._new = {shard: (group, number) for shard, group, number in new.homes(name)}
        self._is_row = _row_states(old.tables[name])
        self._moves = [(move, False) for move in cell_moves(name, old, new)]
        if any(self._is_row):
            self._moves += [(move, True) for move in row_moves(name, old, new)]

    def go(self, exchange: Exchange) -> None:
        """Send, receive and fill; all ranks together."""
        me, world = self._rank, exchange.world_size
        sent: list[list[Tensor]] = [[] for _ in range(world)]
        sizes = [0] * world
        travels = False
        for move, per_row in self._moves:
            if move.source.rank == move.target.rank:
                continue
            travels = True
            if move.source.rank == me:
                sent[move.target.rank] += self._taken(move, per_row)
            elif move.target.rank == me:
                sizes[move.source.rank] += self._values(per_row) * volume(move.box)
        came = [torch.empty(0)] * world
        if travels:
            flat = [tensor for part in sent for tensor in part]
            send = torch.cat(flat) if flat else torch.empty(0, device=self._device)
            pending = exchange.rows(send, [sum(t.numel() for t in part) for part in sent], sizes)
            came = list(torch.split(pending.wait(), sizes))
        self._clear_means()
        at = [0] * world
        for move, per_row in self._moves:
            if move.target.rank != me:
                continue
            if move.source.rank == me:
                pieces = self._taken(move, per_row)
            else:
                size, source = volume(move.box), move.source.rank
                cuts = list(accumulate([size] * self._values(per_row), initial=at[source]))
                at[source] = cuts[-1]
                pieces = [came[source][begin : begin + size] for begin in cuts[:-1]]
            self._give(move, per_row, pieces)

    def _values(self, per_row: bool) -> int:
        """How many numbers each cell, or row, of a move has."""
        return sum(self._is_row) if per_row else 1 + len(self._is_row) - sum(self._is_row)

    def _tensors(self, home: tuple[TableGroup, int], per_row: bool) -> list[Tensor]:
        group, number = home
        states = [state for name, state in group.state_views(number).items() if name != "step"]
        picked = [state for state, is_row in zip(states, self._is_row, strict=True) if is_row == per_row]
        return picked if per_row else [group.view(number), *picked]

    def _taken(self, move: Move, per_row: bool) -> list[Tensor]:
        """Numbers of a move out of an old shard, flat fp32."""
        box = _cells(move.source, per_row)
        return [part_of(t, box, move.box).float().flatten() for t in self._tensors(self._old[move.source], per_row)]

    def _give(self, move: Move, per_row: bool, pieces: Sequence[Tensor]) -> None:
        box = _cells(move.target, per_row)
        for tensor, piece in zip(self._tensors(self._new[move.target], per_row), pieces, strict=True):
            place = part_of(tensor, box, move.box)
            if move.share == 1:
                place.copy_(piece.view(place.shape))
            else:
                place.add_(piece.view(place.shape), alpha=move.share)

    def _clear_means(self) -> None:
        for move, per_row in self._moves:
            if move.share != 1 and move.target.rank == self._rank:
                for tensor in self._tensors(self._new[move.target], per_row):
                    part_of(tensor, _cells(move.target, per_row), move.box).zero_()


def _cells(shard: Shard, per_row: bool) -> Box:
    return (shard.rows,) if per_row else (shard.rows, shard.cols)


def _carry_steps(old: States, new: States, routes: Routes, exchange: Exchange, device: torch.device) -> None:
    """Have the new groups count on from the updates that their tables saw.

    Raises:
        ValueError: tables that would count together saw different numbers, and their rule reads it.
    """
    # host sync: a rank that gets a table cannot know its count
    own_steps = [max([int(group.step) for _, group, _ in old.homes(name)], default=-1) for name in old.tables]
    of_ranks = exchange.gather(own_steps, device) if own_steps else []
    # counts are never below -1
    steps = dict(zip(old.tables, map(max, *of_ranks, [-1] * len(own_steps)), strict=True))
    for serving in routes.serving:
        for part in serving.groups:
            # tables that no feature looks up are never updated
            names = sorted({shard.table for shard in part.shards if old.tables[shard.table].features})
            counts = {name: steps[name] for name in names if steps[name] >= 0}
            spec = old.tables[part.shards[0].table].optimizer
            if spec is not None and rule_named(spec.rule).counts_steps and len(set(counts.values())) > 1:
                raise ValueError(
                    f"tables {sorted(counts)} have seen different numbers of updates, {list(counts.values())}, and the"
                    " new plan would count them together: set_optimizer_step of the fused optimizer makes them equal"
                )
    for name in new.tables:
        for _, group, _ in new.homes(name):
            group.step.fill_(max(int(group.step), steps[name]))
