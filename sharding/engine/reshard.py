"""Sharded tables go over to another plan in place: weights, optimizer states, counts of steps and learning rates.

Each rank sends the rectangles in which its old shards meet new shards of others, one exchange a table; tables with a
tier, before or after, go some rows at a time. Numbers travel as fp32, which holds every weight as it is. A state per
row belongs to the columns that it was made of: it moves as it is where the new plan has numbers for the same columns,
and is averaged over columns only where `resplit` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.embeddings import TableGroup
from shardwise.embeddings.tiers import CachedRows, parts_of
from shardwise.errors import RefusedValueError
from shardwise.kernels import rule_named

from ...planner.layout import Shard, Span, TableOptions
from ..comms.agreement import Facts, agree
from ..comms.exchange import Exchange
from ..plan.caches import asked_tier
from ..plan.plan import ParameterSharding, options_of, shards_of
from .fully_sharded import FullyShardedShards
from .routes import Routes, Table
from .state import Box, States, overlap, part_of
from .tables import LocalTables, facts_of_replicas
from .tiers import require_tiers

if TYPE_CHECKING:
    from .collection import ShardedCollection


# of a table with a tier: numbers of whole rows that go over at a time
_CHUNK_BYTES = 16 * 2**20


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
        options: of tables whose options change; without a `tier` all rows of such a table are on the device.
        resplit: "mean" gives a column block whose rows have no number of their own yet (of a rule that keeps one a row)
            the mean over its columns of the numbers that these had.

    Raises:
        ValueError: the shards do not fit the tables, states per row would have to be split without `resplit`, a table
            that is trained by its gradient would be cut in another way, or rows are kept by a row store or
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
        shards = [
            shard
            for name, table in tables.items()
            for shard in (
                shards_of(name, changes[name], table.rows, table.dim, collection._env.world_size)
                if name in changes
                else collection.states.shards[name]
            )
        ]
        options = {}
        for name, placement in changes.items():
            table = tables[name]
            rule = None if table.optimizer is None else table.optimizer.rule
            tier = asked_tier(placement, table.rows, table.dim, table.dtype, rule=rule)
            options[name] = replace(options_of(placement), tier=tier)
        return shards, options

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
        raise RefusedValueError(
            f"Given module is unsharded: modules {sorted(changes) or path} are to be resharded, the model has"
            f" {sorted(paths)}, the plan {sorted(given)}"
        )
    return changes


def mebibytes(plan: Mapping[str, ParameterSharding]) -> float:
    """The volume of tables in fp32, as TorchRec counts it."""
    return (
        4
        / 2**20
        * sum(
            shard.shard_sizes[0] * shard.shard_sizes[1]
            for placement in plan.values()
            if placement.sharding_spec
            for shard in placement.sharding_spec.shards
        )
    )


def _go_over(
    collection: ShardedCollection,
    choose: Callable[[], tuple[list[Shard], dict[str, TableOptions]]],
    resplit: str | None,
) -> None:
    old, exchange, device = collection.states, collection._exchange, collection.device

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
        tables = [replace(table, options=_options(table, options.get(name))) for name, table in old.tables.items()]
        routes, facts = collection._plan(tables, shards)
        outside = [t.name for t in tables if t.optimizer is None and collection.parameter(t.name).requires_grad]
        require_tiers(tables, outside, device, fully_sharded=collection._replicas is not None)
        local_tables = LocalTables(routes, old.env.rank, device, collection._policy, None)
        local_tables.matrices()
        local_tables.attach_stores()
        new = States(routes, local_tables, old.env)
        for name, table in new.tables.items():
            stays = old.is_replicated(name) and new.is_replicated(name) or old.shards[name] == new.shards[name]
            if table.optimizer is None and collection.parameter(name).requires_grad and not stays:
                raise ValueError(
                    f"table {name!r} is trained by its gradient, which has the shape of this rank's part of it, as the"
                    " states of its optimizer do: an optimizer in the backward, applied before sharding, would let it"
                    " be cut in another way"
                )
            before = set(_columns_of(old, name).values())
            strange = sorted(set(_columns_of(new, name).values()) - before)
            if strange and resplit is None:
                raise ValueError(
                    f"table {name!r}: its optimizer has a number for each row of columns {sorted(before)}, the new plan"
                    f" wants them for columns {strange}: resplit='mean' takes the mean over columns, and tables with"
                    " row_state='table' have one number for whole rows"
                )
        return (routes, local_tables, new), {
            **facts,
            **facts_of_replicas(tables, shards, device),
            "resplit": str(resplit),
        }

    (routes, local_tables, new), number = agree(exchange, device, make)
    before, stores = collection.shards, collection._tables.stores()
    with before.assembled():
        _carry_steps(old, new, routes, exchange, device)
        for name in new.tables:
            _carry(name, old, new, exchange, device)
        local_tables.take_parameters(collection._tables)
    collection._settle(routes, number, local_tables)
    if isinstance(before, FullyShardedShards) and isinstance(collection.shards, FullyShardedShards):
        collection.shards.defers = before.defers
        collection.shards.spread()
    collection.fused_optimizer.follow_plan(collection.shards, collection.states)
    for store in stores:
        store.close()


def _options(table: Table, changed: TableOptions | None) -> TableOptions:
    """The options of a table under the new plan, which keeps what it says nothing of."""
    if changed is None:
        return table.options
    # a table trains as it did: the kernel of a plan says nothing here
    options = replace(changed.over(table.options), dense=table.options.dense, tier=changed.tier)
    for what in ("stochastic_rounding", "weights_precision"):
        before, after = getattr(table.options, what), getattr(options, what)
        if what == "stochastic_rounding" and before is None:
            before = after if table.optimizer is None else table.optimizer.stochastic_rounding
            after = before if after is None else after
        if before != after:
            raise ValueError(
                f"table {table.name!r}: {what} stays {before!r} when a table is resharded, and the new plan says"
                f" {after!r}: leave it None, or shard the model anew from a checkpoint"
            )
    return options


def _columns_of(states: States, name: str) -> dict[Span, Span]:
    """For each column block the columns that its numbers per row, if it has any, were made of."""
    table = states.tables[name]
    if table.optimizer is None or "row" not in rule_named(table.optimizer.rule).kinds:
        return {}
    return {strip: (0, table.dim) if table.options.row_state == "table" else strip for strip in states.strips(name)}


def moves_of(name: str, old: States, new: States) -> list[Move]:
    """How the cells of a table move, and its numbers per row: new shard by new shard."""
    moves, after = [], _columns_of(new, name)
    # of column blocks that have the same numbers the first gives them
    givers = {columns: strip for strip, columns in reversed(_columns_of(old, name).items())}
    columns_of_givers = {strip: columns for columns, strip in givers.items()}
    for target in new.shards[name]:
        for source in old.shards[name]:
            # of a replicated table each rank takes from its own
            if old.is_replicated(name) and source.rank != target.rank:
                continue
            cells = overlap((source.rows, source.cols), (target.rows, target.cols))
            if cells is not None:
                moves.append(Move(source, target, cells))
            if source.cols in columns_of_givers:
                columns, wanted = columns_of_givers[source.cols], after[target.cols]
                shared = overlap((source.rows, columns), (target.rows, wanted))
                # one column block has them as they are, or each has a part
                if shared is not None and (columns == wanted or wanted not in givers):
                    rows, (low, high) = shared[:1], shared[1]
                    moves.append(Move(source, target, rows, (high - low) / (wanted[1] - wanted[0])))
    return moves


class _OpenRows:
    """What this rank's shards of a table have in some of its rows: views, and of tables with a tier copies.

    Of a table that is `new` the copies begin as zeros, and `close` writes them.
    """

    def __init__(self, name: str, states: States, rows: Span, *, new: bool) -> None:
        self._new = new
        self._of: dict[Shard, tuple[Span, list[Tensor]]] = {}
        self._stored: list[tuple[CachedRows, int, int, list[Tensor]]] = []
        for shard, group, number in states.homes(name):
            shared = overlap((shard.rows,), (rows,))
            if shared is not None:
                begin, end = (row - shard.rows[0] for row in shared[0])
                self._of[shard] = shared[0], self._open(group, number, begin, end)

    def _open(self, group: TableGroup, number: int, begin: int, end: int) -> list[Tensor]:
        store = group.store
        if not isinstance(store, CachedRows) or not group.is_away:
            return [part[begin:end] for part in parts_of(group, number) if isinstance(part, Tensor)]
        if not self._new:
            return store.read(number, begin, end)
        layout = store.layouts[number]
        parts = layout.views(layout.empty(end - begin))
        self._stored.append((store, number, begin, parts))
        return parts

    def parts(self, shard: Shard, box: Box) -> list[Tensor]:
        """What a shard has in a box: of cells weights and states, of rows alone states per row."""
        rows, tensors = self._of[shard]
        return [part_of(t, (rows, shard.cols)[: t.dim()], box) for t in tensors if t.dim() == len(box)]

    def close(self) -> None:
        """Have what was written to `parts` in the tables."""
        for store, number, begin, parts in self._stored:
            store.write(number, begin, parts)


def _row_ranges(name: str, old: States, new: States) -> Iterator[Span]:
    """The rows of a table that go over at a time: all of them where they lie on the device before and after."""
    table = new.tables[name]
    if old.tables[name].options.tier is None and table.options.tier is None:
        yield 0, table.rows
        return
    states = () if table.optimizer is None else rule_named(table.optimizer.rule).kinds
    step = max(1, _CHUNK_BYTES // max(64, 4 * table.dim * (1 + len(states))))
    for begin in range(0, table.rows, step):
        yield begin, min(begin + step, table.rows)


@torch.no_grad()
def _carry(name: str, old: States, new: States, exchange: Exchange, device: torch.device) -> None:
    """Have a table's numbers go from its old shards into the new ones; all ranks together."""
    moves = moves_of(name, old, new)
    for rows in _row_ranges(name, old, new):
        clipped = [(move, overlap((move.box[0],), (rows,))) for move in moves]
        of_rows = [replace(move, box=(*shared, *move.box[1:])) for move, shared in clipped if shared is not None]
        sources, targets = _OpenRows(name, old, rows, new=False), _OpenRows(name, new, rows, new=True)
        _carry_rows(of_rows, sources, targets, exchange, device)
        targets.close()


def _carry_rows(
    moves: Sequence[Move], old: _OpenRows, new: _OpenRows, exchange: Exchange, device: torch.device
) -> None:
    rank = exchange.rank
    # for each rank: views of what it gets, and how much of what comes from it belongs together
    pieces: list[list[Tensor]] = [[] for _ in range(exchange.world_size)]
    sizes: list[list[int]] = [[] for _ in range(exchange.world_size)]
    arriving: list[tuple[Tensor, Move]] = []
    for move in moves:
        if move.source.rank == rank:
            pieces[move.target.rank] += [part.to(device) for part in old.parts(move.source, move.box)]
        if move.target.rank == rank:
            places = new.parts(move.target, move.box)
            sizes[move.source.rank] += [place.numel() for place in places]
            arriving += [(place, move) for place in places]
    travels = any(move.source.rank != move.target.rank for move in moves)
    came = exchange.pieces(pieces, sizes, device) if travels else list(map(iter, pieces))
    # a mean is added up, share by share
    for place in [place for place, move in arriving if move.share != 1]:
        place.zero_()
    for place, move in arriving:
        piece = next(came[move.source.rank]).view(place.shape)
        if move.share == 1:
            place.copy_(piece)
        else:
            place.add_(piece.to(place.device), alpha=move.share)


def _carry_steps(old: States, new: States, routes: Routes, exchange: Exchange, device: torch.device) -> None:
    """Have the new groups count on from the updates that their tables saw.

    Raises:
        ValueError: tables that would count together saw different numbers, and their rule reads it.
    """
    # host sync: a rank that gets a table cannot know its count; -1 where a rank has no rows
    own_steps = [max([int(group.step) for _, group, _ in old.homes(name)], default=-1) for name in old.tables]
    of_ranks = exchange.gather(own_steps, device) if own_steps else []
    steps = dict(zip(old.tables, map(max, zip(*of_ranks, strict=True)), strict=True))
    for serving in routes.serving:
        for part in serving.groups:
            # tables that no feature looks up are never updated
            names = sorted({shard.table for shard in part.shards})
            counts = {name: steps[name] for name in names if old.tables[name].features and steps[name] >= 0}
            spec = old.tables[part.shards[0].table].optimizer
            if spec is not None and rule_named(spec.rule).counts_steps and len(set(counts.values())) > 1:
                raise ValueError(
                    f"tables {sorted(counts)} have seen different numbers of updates, {list(counts.values())}, and the"
                    " new plan would count them together: set_optimizer_step of the fused optimizer makes them equal"
                )
    for name in new.tables:
        for _, group, _ in new.homes(name):
            group.step.fill_(max(int(group.step), steps[name]))
