"""Rows from outside: what `write` sends to the ranks that hold them, whatever the plan.

A batch to write is a KJT: by output name of a table ids [N], and rows [N, D] as its weights. Ids are divided among row
shards, rows among column shards, and every replica gets all. Where an id comes several times the last row counts: of
the highest rank, and of one rank the last in the order of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from shardwise._names import did_you_mean
from shardwise.embeddings import BaseEmbeddingConfig
from shardwise.embeddings.tiers import CachedRows
from shardwise.jagged import KeyedJaggedTensor

from ...planner.layout import Shard
from ..comms.awaitable import Awaitable
from ..comms.consensus import PendingHeader, send_header
from ..comms.env import ShardingEnv2D
from .stages import StagedModule, StepContext
from .state import take_over
from .step import Step
from .tables import Home

if TYPE_CHECKING:
    from ..comms.exchange import Pending
    from .collection import ShardedCollection


@dataclass(frozen=True)
class WrittenRows:
    """What came for one shard of this rank: rows of the shard [n], and their values [n, columns of the shard] fp32."""

    home: Home
    rows: Tensor
    values: Tensor


class WrittenSizes(Awaitable[Awaitable[list[WrittenRows]]]):
    """Sizes of what all ranks write, on their way; the rows leave once they are here.

    Its wait raises on all ranks what was wrong with the batch of one.
    """

    def __init__(self, collection: ShardedCollection, parts: list[list[_Part]], header: PendingHeader) -> None:
        super().__init__()
        self._collection, self._parts, self._header = collection, parts, header

    def _wait_impl(self) -> Awaitable[list[WrittenRows]]:
        collection, exchange = self._collection, self._collection._exchange
        # [W][shards of this rank] rows that come from each rank
        counts = [row[: len(collection._tables.homes)] for row in self._header.receive()]
        widths = [_width(shard) for shard, _, _ in collection._tables.homes]
        nothing = torch.empty(0, device=collection.device)
        ids = torch.cat([nothing.long()] + [ids for of_rank in self._parts for ids, _ in of_rank])
        rows = torch.cat([nothing] + [rows.flatten() for of_rank in self._parts for _, rows in of_rank])
        ids_to = [sum(len(ids) for ids, _ in of_rank) for of_rank in self._parts]
        rows_to = [sum(rows.numel() for _, rows in of_rank) for of_rank in self._parts]
        rows_from = [sum(map(int.__mul__, of_rank, widths)) for of_rank in counts]
        pending = (
            exchange.numbers(ids, ids_to, list(map(sum, counts))),
            exchange.rows(rows, rows_to, rows_from, what="written rows"),
        )
        return WrittenAwaitable(collection, counts, *pending)


class WrittenAwaitable(Awaitable[list[WrittenRows]]):
    """What all ranks write into the shards of this one, on its way."""

    def __init__(self, collection: ShardedCollection, counts: list[list[int]], ids: Pending, rows: Pending) -> None:
        super().__init__()
        self._homes, self._counts, self._pending = collection._tables.homes, counts, (ids, rows)

    def _wait_impl(self) -> list[WrittenRows]:
        ids, rows = (pending.wait() for pending in self._pending)
        widths = [_width(shard) for shard, _, _ in self._homes]
        of_ids = ids.split_with_sizes([count for of_rank in self._counts for count in of_rank])
        sizes = [count * width for of_rank in self._counts for count, width in zip(of_rank, widths, strict=True)]
        of_rows = rows.split_with_sizes(sizes)
        # blocks lie [source][shard]
        return [
            WrittenRows(
                home,
                torch.cat(of_ids[number :: len(widths)]),
                torch.cat([block.view(-1, widths[number]) for block in of_rows[number :: len(widths)]]),
            )
            for number, home in enumerate(self._homes)
        ]


class WritableTables(StagedModule[Step]):
    """What a sharded collection has for rows from outside: `write`, and its two halves."""

    _configs: Sequence[BaseEmbeddingConfig]

    @property
    def enable_embedding_update(self) -> bool:
        """Whether the config of some table lets its rows be written."""
        return any(config.enable_embedding_update for config in self._configs)

    def write(self, embeddings: KeyedJaggedTensor) -> None:
        """Write rows into tables whose config has `enable_embedding_update`; all ranks call this together.

        Any rank writes any rows of any table, and may have none: a KJT without keys. Of an id that comes several times
        the last row counts, by rank and then by place in the batch. Weights alone are written, rounded to the nearest
        of the table's type: optimizer states of the rows stay.

        Args:
            embeddings: by output name of a table ids [N] int32 or int64; weights [N, D] are their rows.

        Raises:
            ValueError, TypeError: a name is no writable table's, rows have another width, an id is outside its table,
                or the tables have a row store, an id map or replicas (2D). All ranks raise, and nothing is written.
        """
        write_rows([cast("ShardedCollection", self)], embeddings)

    def write_dist(  # type: ignore[override]
        self, ctx: StepContext, embeddings: KeyedJaggedTensor | Exception
    ) -> Awaitable[Awaitable[list[WrittenRows]]]:
        """Send what `write` is given to the ranks that hold it: the first wait is for sizes, and raises as `write`."""
        return start_write(cast("ShardedCollection", self), embeddings)

    def update(self, ctx: StepContext, dist_input: list[WrittenRows]) -> None:  # type: ignore[override]
        """Put into this rank's shards what `write_dist` brought."""
        put_rows(dist_input)


# local rows [n] and their values [n, columns] for one shard
_Part = tuple[Tensor, Tensor]


def start_write(collection: ShardedCollection, embeddings: KeyedJaggedTensor | Exception) -> WrittenSizes:
    """Divide what this rank writes among the shards of all, and tell each rank its sizes; waits for nobody.

    An exception in the place of the batch is raised on all ranks, by the first wait.
    """
    routes = collection._routes
    # of each rank, in the order of its `homes`
    groups = [(*serving.groups, *routes.dense) for serving in routes.serving]
    shards = [[shard for group in of_rank for shard in group.shards] for of_rank in groups]
    parts: list[list[_Part]] = [[] for _ in shards]
    sizes: Sequence[Sequence[int]] | Exception
    try:
        if isinstance(embeddings, Exception):
            raise embeddings
        take_over(collection)
        by_table = _rows_by_table(collection, embeddings)
        parts = [[_part_for(shard, by_table, collection) for shard in of_rank] for of_rank in shards]
        sizes = [[len(ids) for ids, _ in of_rank] for of_rank in parts]
    except Exception as error:
        sizes = error
    width = max(map(len, shards))
    shared = [collection._fingerprint, 0, 0]
    return WrittenSizes(
        collection, parts, send_header(collection._exchange, collection.device, sizes, shared=shared, width=width)
    )


@torch.no_grad()
def put_rows(written: Sequence[WrittenRows]) -> None:
    """Write into the shards of this rank what came: weights alone, rounded to the nearest of the table's type.

    Optimizer states of the rows stay, and so do gradients that wait for a step.
    """
    for part in written:
        if part.rows.numel():
            rows, inverse = torch.unique(part.rows, return_inverse=True)
            places = torch.arange(part.rows.shape[0], device=rows.device)
            last = torch.zeros_like(rows).scatter_reduce_(0, inverse, places, "amax")
            _, group, number = part.home
            values = part.values[last].to(group.flat.dtype)
            if isinstance(group.store, CachedRows) and group.is_away:
                group.store.write_rows(number, rows, [values, *[None] * (len(group.store.layouts[number].widths) - 1)])
            else:
                group.view(number)[rows] = values


def write_rows(collections: Sequence[ShardedCollection], embeddings: KeyedJaggedTensor) -> None:
    """Write a batch whose names are of tables of several collections; all ranks call this together.

    Raises:
        ValueError, TypeError: as `ShardedCollection.write`, on all ranks, and nothing is written.
    """
    batches: list[KeyedJaggedTensor | Exception] = []
    try:
        _require_batch(embeddings)
        writable = [writable_names(collection) for collection in collections]
        _require_names(embeddings.keys(), list(dict.fromkeys(chain.from_iterable(writable))), "the model")
        batches += [
            _picked(embeddings, [name for name in embeddings.keys() if name in names])  # noqa: SIM118
            for names in writable
        ]
    except Exception as error:
        batches = [error] * len(collections)
    # the rows of all are here before one is written
    failure: Exception | None = None
    came: list[list[WrittenRows]] = []
    for starting in [start_write(*each) for each in zip(collections, batches, strict=True)]:
        try:
            came.append(starting.wait().wait())
        except Exception as error:
            # on all ranks: sizes of the others are on their way, and all take them
            failure = failure or error
    if failure is not None:
        raise failure
    for written in came:
        put_rows(written)


def writable_names(collection: ShardedCollection) -> dict[str, int]:
    """Output names of tables with `enable_embedding_update`, and the number of the table of each."""
    return {
        name: number
        for number, (config, names) in enumerate(zip(collection._configs, collection._names_by_table, strict=True))
        if config.enable_embedding_update
        for name in names
    }


def _width(shard: Shard) -> int:
    return shard.cols[1] - shard.cols[0]


def _part_for(shard: Shard, by_table: Mapping[str, tuple[Tensor, Tensor]], collection: ShardedCollection) -> _Part:
    """What of the batch is the shard's."""
    if shard.table not in by_table:
        nothing = torch.empty(0, _width(shard), device=collection.device)
        return nothing.new_empty(0, dtype=torch.int64), nothing
    ids, rows = by_table[shard.table]
    inside = (ids >= shard.rows[0]) & (ids < shard.rows[1])
    # host sync on CUDA: how many there are
    return ids[inside] - shard.rows[0], rows[inside, slice(*shard.cols)]


def _require_batch(embeddings: object) -> None:
    if not isinstance(embeddings, KeyedJaggedTensor):
        raise TypeError(
            f"rows to write come as a KeyedJaggedTensor of ids whose weights are the rows, got"
            f" {type(embeddings).__name__}"
        )


def _require_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(
                f"{name!r} is no writable table's: enable_embedding_update of a config in {what} makes one, and"
                f" gives {list(known)}{did_you_mean(name, known)}"
            )


def _picked(embeddings: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    parts = [embeddings[name] for name in names]
    if not parts:
        weights = embeddings.weights_or_none()
        return KeyedJaggedTensor(
            [], embeddings.values()[:0], None if weights is None else weights[:0], lengths=embeddings.lengths()[:0]
        )
    weighted = embeddings.weights_or_none() is not None
    return KeyedJaggedTensor(
        list(names), torch.cat([part.values() for part in parts]),
        torch.cat([part.weights() for part in parts]) if weighted else None,
        lengths=torch.stack([part.values().new_tensor(part.values().shape[0]) for part in parts]),
    )  # fmt: skip


def _rows_by_table(collection: ShardedCollection, embeddings: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Ids [n] int64 and rows [n, D] fp32 of each table that this rank writes.

    Raises:
        ValueError, TypeError: they cannot be written; names table, value and what is expected.
    """
    _require_batch(embeddings)
    writable, tables = writable_names(collection), collection._routes.tables
    _require_names(embeddings.keys(), list(writable), "the collection")
    if isinstance(collection._env, ShardingEnv2D):
        raise ValueError("rows cannot be written where tables have replicas (2D): a sync would average them away")
    if collection._stores is not None:
        raise ValueError("rows cannot be written where tables have a row store")
    if collection.device.type == "meta":
        raise ValueError("this sharded collection is on meta: call to_empty(device=...) before rows are written")
    by_table: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name in embeddings.keys():  # noqa: SIM118
        table, part = tables[writable[name]], embeddings[name]
        ids, rows = part.values(), part.weights_or_none()
        if table.mapped:
            raise ValueError(f"table {table.name!r}: ids behind a managed collision module have no rows to write yet")
        _require_rows(table.name, (table.rows, table.dim), ids, rows, collection.device)
        assert rows is not None
        by_table.setdefault(table.name, []).append((ids.long(), rows.detach().float()))
    return {
        name: (torch.cat([ids for ids, _ in parts]), torch.cat([rows for _, rows in parts]))
        for name, parts in by_table.items()
    }


def _require_rows(table: str, size: tuple[int, int], ids: Tensor, rows: Tensor | None, device: torch.device) -> None:
    """Check the ids [n] and rows [n, D] for a table of `size`."""
    if rows is None or rows.dim() != 2 or rows.shape[1] != size[1] or not rows.is_floating_point():
        got = "none" if rows is None else f"{rows.dtype} {list(rows.shape)}"
        raise ValueError(f"table {table!r}: weights must be a row of {size[1]} numbers for each id, got {got}")
    if ids.is_floating_point() or ids.dtype is torch.bool:
        raise ValueError(f"table {table!r}: ids to write must be integers, got {ids.dtype}")
    if ids.device != device or rows.device != device:
        raise ValueError(f"table {table!r}: rows to write are on {rows.device}, the tables on {device}")
    # host sync on CUDA: rows that nobody has are refused before anything leaves
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size[0]):
        bad = ids[(ids < 0) | (ids >= size[0])][0]
        raise ValueError(f"table {table!r}: id {int(bad)} is outside [0, {size[0]}): nothing is written")
