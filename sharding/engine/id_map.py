"""What turns the ids that a table is asked for into its rows, on the rank that holds it; and the way back of the rows.

Letters as in step.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from .routes import Routes
from .wire import unpack_weights

if TYPE_CHECKING:
    from .step import Step


class IdMap(Protocol):
    """Rows of ids that may be any numbers from 0 on: hashing with admission and eviction, say.

    Without one an id is its row. Every rank that holds columns of the table has the map; ids come to it after the
    exchange, those of all features of the table at once, so that each map sees all ids of the table, in the same order
    on each of these ranks, and no others.
    """

    def translate(self, table: str, ids: Tensor, step: Tensor) -> Tensor:
        """The row [n] of each of `ids` [n] int64; `step` [1] int64 counts the updates so far."""
        ...


@runtime_checkable
class RangedIdMap(IdMap, Protocol):
    """A map whose table may be cut by rows: each row shard serves an equal part of the ids [0, `id_range`).

    A shard's map sees ids counted from the first of its part, and gives out rows counted from the first of the shard.
    """

    @property
    def id_range(self) -> int:
        """The same on all ranks."""
        ...


@dataclass(frozen=True)
class Renewal:
    """Rows [n] of a row shard that belong to other ids now, and the values [n, D] that they begin anew with."""

    rows: Tensor
    values: Tensor


@runtime_checkable
class RenewingIdMap(IdMap, Protocol):
    """A map that gives rows to other ids."""

    def renewal(self) -> Renewal | None:
        """What the last translation did so; it takes effect before its batch is looked up."""
        ...


@runtime_checkable
class SteppedIdMap(IdMap, Protocol):
    """A map that changes with the steps, whatever their ids: it translates at every one, if only no ids."""

    def begin_step(self) -> None:
        """Called on all ranks before the ids of a step are translated, also on those without rows of the table."""
        ...


def id_ranges(id_maps: Mapping[str, IdMap]) -> dict[str, int | None]:
    """The ids of each mapped table that row shards divide; None where its rows must be on one rank."""
    return {name: id_map.id_range if isinstance(id_map, RangedIdMap) else None for name, id_map in id_maps.items()}


def pack_mapped(step: Step, routes: Routes, rank: int) -> Tensor:
    """The row in its whole table of each id that this rank mapped, for the ranks that sent them: rank after rank."""
    firsts = [group.shards[slot.shard].rows[0] for group in routes.serving[rank].groups for slot in group.slots]
    counts, rows = step.received_lengths.sum(1), step.received_ids
    first = torch.tensor(firsts, dtype=rows.dtype, device="cpu").to(rows.device)
    rows = torch.where(rows < 0, rows, rows + first.repeat_interleave(counts, output_size=rows.shape[0]))
    came = sum(step.ids_from)
    places = torch.arange(came, device=rows.device)
    if came:
        # where each id that was mapped lay among those that came; column shards give an id the same row
        places = unpack_weights(step, places)
    of_ids = rows.new_empty(came).index_copy_(0, places[: rows.shape[0]], rows)
    blocks = of_ids.split_with_sizes(step.ids_from)
    return torch.cat([block[:count] for block, count in zip(blocks, step.returned_from, strict=True)])


def unpack_mapped(step: Step, routes: Routes, received: Tensor) -> list[Tensor]:
    """[L] the row of each id of each lookup of this rank's batch, in the order of the batch."""
    pieces: list[dict[int, Tensor]] = [{} for _ in routes.lookups]
    cuts: list[int | None] = [None] * len(pieces)
    for rank, block in enumerate(received.split_with_sizes(step.returned_to)):
        serving, first = routes.serving[rank], step.sending.first_stream[rank]
        counts = step.counts[first : first + serving.returned]
        for stream, rows in zip(serving.streams, block.split_with_sizes(counts), strict=False):
            # other column shards say the same
            pieces[stream.lookup].setdefault(stream.bucket, rows)
            cuts[stream.lookup] = stream.cut
    by_lookup = []
    for lookup, (buckets, cut) in enumerate(zip(pieces, cuts, strict=True)):
        rows = torch.cat([of_bucket for _, of_bucket in sorted(buckets.items(), key=lambda item: item[0])])
        if cut is not None:
            order = _bucket_order(step, lookup, routes.cuts[cut].borders)
            rows = torch.empty_like(rows).index_copy_(0, order, rows)
        by_lookup.append(rows)
    return by_lookup


def _bucket_order(step: Step, lookup: int, borders: tuple[int, ...]) -> Tensor:
    """Which id of a lookup's batch is at each place, bucket by bucket."""
    key, batch = step.sending.place_of_lookup[lookup], step.padded
    ends = batch.offset_per_key()
    ids = batch.values()[ends[key] : ends[key + 1]]
    # an id outside, which a lenient policy let pass, is in bucket 0
    ids = torch.where((ids < 0) | (ids >= borders[-1]), 0, ids)
    inner = torch.tensor(borders[1:-1], dtype=ids.dtype, device="cpu").to(ids.device)
    return torch.sort(torch.bucketize(ids, inner, right=True), stable=True).indices
