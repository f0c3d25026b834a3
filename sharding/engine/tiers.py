"""Tables of a plan of which some rows lie below the device: what their store is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings import TableShape
from shardwise.embeddings.tiers import (
    Backing,
    CachedRows,
    CacheSpec,
    FileRecords,
    HostRecords,
    RamOverFile,
    policy_named,
)

from ...planner.layout import Shard, Tier
from ..comms.exchange import Exchange
from .routes import Table

# files of this process so far
_files = count()
# slots of a table of which no number is given, at first
_FIRST_SLOTS = 1024


def slots_of(tier: Tier, shard: Shard, table: Table) -> tuple[int, int]:
    """Slots of a shard at first, and how many they may become."""
    rows = shard.rows[1] - shard.rows[0]
    share = rows / table.rows
    slots = Tier.rows_of(tier.slots, rows, share)
    most = Tier.rows_of(tier.max_slots, rows, share)
    if slots is None:
        most = rows if most is None else most
        return min(_FIRST_SLOTS, most), most
    return slots, max(slots, most or 0)


def cached_rows(
    tables: Sequence[Table], shards: Sequence[Shard], shapes: Sequence[TableShape], rank: int, device: torch.device
) -> CachedRows:
    """The store of a group of shards, whose `shapes` have slots; `tables` are those of the shards."""
    specs = []
    for table, shard, shape in zip(tables, shards, shapes, strict=True):
        tier = table.options.tier
        assert tier is not None
        below = _below(tier, shard, table.rows, rank, pinned=device.type == "cuda")
        specs.append(CacheSpec(shape.resident, slots_of(tier, shard, table)[1], below))
    tier = tables[0].options.tier
    assert tier is not None
    return CachedRows(specs, policy_named(tier.policy, tier.half_life))


def _below(tier: Tier, shard: Shard, rows: int, rank: int, *, pinned: bool) -> Callable[[int, int], Backing]:
    if callable(tier.below):
        return partial(tier.below, shard.table)
    if tier.below == "ram":
        return partial(HostRecords, pinned=pinned)
    ram_rows = Tier.rows_of(tier.ram_rows, shard.rows[1] - shard.rows[0], (shard.rows[1] - shard.rows[0]) / rows)

    def over_file(rows: int, record_bytes: int) -> Backing:
        # ranks of one host have files of their own, and so have the tables of a rank; another job in this folder not
        file = FileRecords(rows, record_bytes, str(tier.folder), name=f"{shard.table}.{rank}.{next(_files)}")
        return file if ram_rows is None else RamOverFile(file, rows, record_bytes, ram_rows=ram_rows, pinned=pinned)

    return over_file


@torch.no_grad()
def fill_below(
    store: CachedRows, number: int, weight: Tensor, shard: Shard, init_fn: Callable[[Tensor], Any] | None
) -> None:
    """Give a table its rows: those of the unsharded weight, or where that is on meta what `init_fn` makes of them."""
    states = store.initial_states(number)
    for begin, end in store.chunks(number):
        if weight.is_meta:
            rows = torch.empty(end - begin, shard.cols[1] - shard.cols[0], dtype=weight.dtype)
            if init_fn is not None:
                init_fn(rows)
        else:
            rows = weight[shard.rows[0] + begin : shard.rows[0] + end, slice(*shard.cols)]
        store.write(number, begin, [rows, *(state.expand(end - begin, *state.shape[1:]) for state in states)])


def broadcast_below(store: CachedRows, number: int, exchange: Exchange) -> None:
    """Make the rows of a replicated table those of rank 0."""
    for begin, end in store.chunks(number):
        rows = store.read(number, begin, end)[0].contiguous().to(store.residency.device)
        exchange.broadcast(rows)
        store.write(number, begin, [rows, *[None] * (len(store.layouts[number].widths) - 1)])
