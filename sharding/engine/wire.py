"""The messages of a step, each packed and unpacked side by side: ids, rows, gradients of rows, gradients of weights.

    message             from               to                 a block from one rank to another
    ids                 who has a batch    who serves ids     int32: ids, lengths of bags, weights of ids, by stream
    rows                who serves         who has the batch  fp32: sums of bags, sums of hosts, rows of ids, by group
    gradients           who has the batch  who serves         fp32: of rows, the other way
    weight gradients    who serves         who has the batch  fp32: of the weights of ids, stream by stream

Rows have two layouts with the same four methods. `PooledWire` sends sums [B, columns] (and rows of those lookups that
are pooled where their batch is, to be added in the order of one process); `SequenceWire` sends a row for each id. On
their way rows and gradients may be compressed by `codec` and `codec_back`, block by block. Sizes are known on both
sides: what a method packs for a rank has the size that the other side of the pair expects.

Letters as in step.py; P columns of sums that a rank serves, H those that its host adds first.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import add, mul, sub
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import (
    Feature,
    Segment,
    complete_cumsum,
    flatten_segments,
    pack_features,
    permute_1d,
    permute_2d,
    pooled_lookup,
)
from shardwise.kernels.huge_pages import in_huge_pages

from ..comms.codecs import Codec
from ..comms.exchange import Buffers
from ..comms.host_exchange import HostExchange
from .columns import Key, OutputColumns
from .routes import HOST, POOLED, REPLICA, ROWS, Routes, Serving, Slot, Stream
from .step import Step


class Receiving:
    """How the ids of all ranks come into order on the rank that serves them: made once, for updates or without."""

    def __init__(self, routes: Routes, rank: int, update: bool, device: torch.device) -> None:
        serving, world = routes.serving[rank], routes.world_size
        self.streams = len(serving.streams_for(update))
        groups = [group for group in serving.groups if update or not group.is_replica]
        self.groups = len(groups)
        slots = [slot.stream for group in groups for slot in group.slots]
        # segments arrive as [source][stream], and are kept as [slot][source]
        order = [source * self.streams + stream for stream in slots for source in range(world)]
        self.order = (
            None if order == list(range(world * self.streams)) else torch.tensor(order, device="cpu").to(device)
        )
        self.slot_streams = torch.tensor(slots, dtype=torch.int64, device="cpu").to(device)
        self.routes, self.scaled, self.id_dtype = routes, routes.scaled, routes.id_dtype
        # int32 numbers that travel for an id: itself and, where those do, its factor
        self.per_id = self.id_dtype.itemsize // 4 + self.scaled


def pack_sizes(step: Step) -> list[list[int]]:
    """[W][B, ids, those whose results come back, ids of each group of the rank]: what the header tells each rank."""
    counts, sending = step.counts, step.sending
    before = list(accumulate(counts, initial=0))  # [S + 1] ids before each stream
    first = list(map(before.__getitem__, sending.first_stream))  # [W + 1] ids before those of each rank
    step.ids_to = list(map(sub, first[1:], first))
    step.returned_to = list(map(sub, map(before.__getitem__, sending.end_returned), first))
    of_slots = list(accumulate(map(counts.__getitem__, sending.slot_streams), initial=0))
    of_groups = list(map(of_slots.__getitem__, sending.group_slots))  # ids before each group of all ranks
    of_groups = list(map(sub, of_groups[1:], of_groups))
    step.ids_to_groups = list(map(of_groups.__getitem__, sending.groups_of_rank))
    of_ranks = zip(repeat(step.batch), step.ids_to, step.returned_to, strict=False)
    return list(map(list.__add__, map(list, of_ranks), step.ids_to_groups))


def unpack_sizes(step: Step, sizes: Sequence[Sequence[int]]) -> None:
    """[W] the same from every rank, of the groups of this one."""
    batches, ids, returned, *groups = zip(*sizes, strict=True)
    step.batches, step.ids_from, step.returned_from = list(batches), list(ids), list(returned)
    step.ids_by_group, receiving = groups, step.receiving
    # int32 numbers that come from each: ids, their weights where those travel, and lengths
    step.id_sizes = list(map(add, map(receiving.per_id.__mul__, ids), map(receiving.streams.__mul__, batches)))


def pack_ids(step: Step) -> tuple[Tensor, list[int]]:
    """What goes to each rank, int32, and the size [W] of each block: ids, lengths and weights of its streams."""
    each = step.sent_ids.element_size() // 4
    id_sizes = list(map(each.__mul__, step.ids_to))
    length_sizes = list(map(step.batch.__mul__, step.sending.streams_to))
    ids = step.sent_ids.view(torch.int32).split_with_sizes(id_sizes)
    lengths = step.sent_lengths.flatten().split_with_sizes(length_sizes)
    sizes, weights = list(map(add, id_sizes, length_sizes)), step.sent_weights
    if weights is None:
        return torch.cat(list(chain.from_iterable(zip(ids, lengths, strict=True)))), sizes
    factors = weights.detach().contiguous().view(torch.int32).split_with_sizes(step.ids_to)
    blocks = chain.from_iterable(zip(ids, lengths, factors, strict=True))
    return torch.cat(list(blocks)), list(map(add, sizes, step.ids_to))


def unpack_ids(step: Step, data: Tensor | None) -> None:
    """Bring what all ranks sent into the order [slot][global sample][position]; None of a rank that is alone.

    Global samples are rank 0's batch, then rank 1's, and so on, so gradients reach a row in the order of one process
    that saw the whole batch. Where nothing is pooled samples do not matter: all ids of a lookup count as one bag.
    """
    receiving, batches = step.receiving, step.batches
    ids, lengths, weights = step.sent_ids, [step.sent_lengths], step.sent_weights
    weights = None if weights is None else weights.detach()
    streams, samples, order = receiving.streams, sum(batches), receiving.order
    if data is not None:
        each, scaled = receiving.id_dtype.itemsize // 4, receiving.scaled
        sizes: list[int] = []
        for batch, count in zip(batches, step.ids_from, strict=True):
            sizes += (count * each, batch * streams, count * scaled)
        parts = data.split_with_sizes(sizes)
        ids, lengths = torch.cat(parts[::3]).view(receiving.id_dtype), list(parts[1::3])
        weights = torch.cat(parts[2::3]).view(torch.float32) if scaled else None
    # groups of replicas have ids where an update follows
    step.first_id = list(accumulate(map(sum, step.ids_by_group[: receiving.groups]), initial=0))
    if len(set(batches)) == 1:
        bags = (lengths[0] if len(lengths) == 1 else torch.cat(lengths)).view(len(batches) * streams, batches[0])
        if order is not None:
            bags, ids, weights = permute_2d(order, bags, ids, weights, permuted_lengths_sum=step.first_id[-1])
        bags = bags.reshape(receiving.slot_streams.shape[0], samples)
    else:
        by_rank = [of_rank.view(streams, batch) for of_rank, batch in zip(lengths, batches, strict=True)]
        if order is not None:
            segments = torch.cat([of_rank.sum(1) for of_rank in by_rank])
            _, ids, weights = permute_1d(order, segments, ids, weights, permuted_lengths_sum=step.first_id[-1])
        bags = torch.cat([of_rank.index_select(0, receiving.slot_streams) for of_rank in by_rank], dim=1)
    step.received_ids, step.received_weights, step.received_lengths = ids, weights, bags
    step.arrived_lengths = lengths
    step.received_offsets = complete_cumsum(bags.flatten() if step.first_id[-1] < 2**31 else bags.flatten().long())


def unpack_weights(step: Step, data: Tensor) -> Tensor:
    """A number of each id that came, rank after rank, as its weight: [M], in the order of the ids that are here."""
    order = step.receiving.order
    if order is None:
        return data
    by_rank = zip(step.arrived_lengths, step.batches, strict=True)
    sizes = torch.cat([lengths.view(step.receiving.streams, batch).sum(1) for lengths, batch in by_rank])
    _, weights, _ = permute_1d(order, sizes, data, permuted_lengths_sum=step.received_ids.shape[0])
    return weights


class Wire(abc.ABC):
    """How rows and their gradients lie in the blocks between ranks, on one rank."""

    def __init__(self, routes: Routes, rank: int, codec: Codec | None = None, codec_back: Codec | None = None) -> None:
        self.routes, self.codec, self.codec_back = routes, codec, codec_back
        # whether sums become averages where they arrive
        self.has_averages = False
        # groups of shards that this rank serves, and where the slots of each begin
        self.groups, self.first_slot = routes.serving[rank].groups, routes.serving[rank].first_slot
        # [W] of each rank its slots whose rows travel, group by group, with their streams
        self._row_slots = [_slots_of(serving, ROWS) for serving in routes.serving]

    @abc.abstractmethod
    def pack_rows(self, step: Step, rows: Mapping[int, Tensor]) -> tuple[Tensor, list[int]]:
        """What goes to each rank, flat, and the size of each block, of what was looked up by group."""

    @abc.abstractmethod
    def unpack_rows(self, step: Step, received: Tensor, replicated: Mapping[int, Tensor]) -> Tensor:
        """This rank's output, of what came from all ranks and of rows of replicated tables by lookup."""

    @abc.abstractmethod
    def pack_gradients(self, step: Step, grad: Tensor, divisor: int, buffers: Buffers) -> tuple[Tensor, list[int]]:
        """The transpose of `unpack_rows`: what goes to each rank of the output's gradient, over `divisor`."""

    @abc.abstractmethod
    def unpack_gradients(self, step: Step, received: Tensor) -> list[Tensor]:
        """The transpose of `pack_rows`: the gradient of each group's lookup."""

    @abc.abstractmethod
    def row_sizes(self, step: Step) -> list[int]:
        """[W] numbers of the block of rows that comes from each rank."""

    @abc.abstractmethod
    def gradient_sizes(self, step: Step) -> list[int]:
        """[W] numbers of the block of gradients that comes from each rank."""

    @abc.abstractmethod
    def by_lookup(self, step: Step, values: Tensor) -> dict[int, Tensor]:
        """What belongs to each lookup in the output or its gradient, as views."""

    def gradient_of_sums(self, step: Step, grad: Tensor, divisor: int, *, checked: bool) -> Tensor:
        """The gradient of what was sent, given the output's, which differ where the wire `has_averages`."""
        return grad

    def ids_by_source(self, step: Step, g: int) -> Tensor:
        """[slots of group g, W] ids of each slot from each rank."""
        lengths = step.received_lengths[self.first_slot[g] : self.first_slot[g + 1]]
        if not self.routes.pooled:
            return lengths
        return torch.stack([part.sum(1) for part in lengths.split_with_sizes(step.batches, dim=1)], dim=1)

    def overflowing_lookup(self, step: Step) -> int:
        """The first lookup with a row that the codec cannot carry, of those that this rank sent; host syncs on CUDA."""
        assert self.codec is not None
        suspects: list[int] = []
        for g, rows in step.unsure_rows.items():
            slots = self.groups[g].slots
            if self.groups[g].kind == ROWS:
                pieces = rows.split_with_sizes(self.ids_by_source(step, g).sum(1).tolist())
            else:
                pieces = rows.split_with_sizes([slot.width for slot in slots], dim=1)
            pairs = zip(slots, pieces, strict=True)
            suspects += [slot.lookup for slot, piece in pairs if self.codec.overflows(piece.flatten())]
            # what each rank of a host can carry may be too much together
            suspects += [slot.lookup for slot in slots if self.groups[g].kind == HOST]
        # values of several lookups may share a scale that none of them overflows alone
        return min(suspects, default=0)

    def _rows_by_source(self, step: Step, g: int, rows: Tensor) -> Sequence[Tensor]:
        """Rows [n, width] of group g, which lie [slot][source], as a flat block for each source, [slot] within."""
        slots, world = self.first_slot[g + 1] - self.first_slot[g], len(step.batches)
        if world > 1 and slots > 1:
            sizes, order = self.ids_by_source(step, g), torch.arange(slots * world, device=rows.device)
            order = order.view(slots, world).t().flatten()
            _, rows, _ = permute_1d(order, sizes.flatten().long(), rows, permuted_lengths_sum=rows.shape[0])
        width = self.groups[g].row_width
        return rows.flatten().split_with_sizes(list(map(width.__mul__, step.ids_by_group[g])))

    def _rows_by_lookup(self, step: Step, blocks: Sequence[Tensor]) -> dict[int, Tensor]:
        """Rows [n, dim] of each lookup, in the order of its ids, from the flat rows of each rank."""
        strips: dict[int, dict[tuple[int, int], list[tuple[int, int | None, Tensor]]]] = {}
        for rank, block in enumerate(blocks):
            at = 0
            for slot, stream in self._row_slots[rank]:
                count = step.counts[step.sending.first_stream[rank] + slot.stream]
                rows = block[at : at + count * slot.width].view(count, slot.width)
                strip = strips.setdefault(stream.lookup, {}).setdefault(slot.columns, [])
                strip.append((stream.bucket, stream.cut, rows))
                at += count * slot.width
        by_lookup = {}
        for lookup, by_columns in strips.items():
            pieces = []
            for _, buckets in sorted(by_columns.items()):
                buckets.sort(key=lambda bucket: bucket[0])
                rows, cut = torch.cat([of_bucket for _, _, of_bucket in buckets]), buckets[0][1]
                if cut is not None:
                    assert step.division is not None
                    rows = rows.index_select(0, step.division.places_of_cut(cut))
                pieces.append(rows)
            by_lookup[lookup] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return by_lookup


class PooledWire(Wire):
    """Bags: a block of rows is sums [B, P], sums that the host has added [B, H], and rows [n, width] group by group.

    `host` adds sums inside a host before they travel on; those go between ranks of equal number on their hosts.
    """

    def __init__(
        self,
        routes: Routes,
        rank: int,
        codec: Codec | None = None,
        codec_back: Codec | None = None,
        host: HostExchange | None = None,
    ) -> None:
        super().__init__(routes, rank, codec, codec_back)
        self._host, self.columns = host, OutputColumns(routes, rank)
        self.has_averages = bool(self.columns.divided)
        near = [routes.are_counterparts(rank, other) for other in range(routes.world_size)]
        pairs = list(zip(routes.serving, near, strict=True))
        # [W] P and H of what comes from each rank, and both; columns of its gradient that this one wants
        self._sums = [serving.sums for serving in routes.serving]
        self._host_sums = [serving.host_sums * is_near for serving, is_near in pairs]
        self._columns_from = list(map(add, self._sums, self._host_sums))
        self._row_groups = [(r, serving.row_groups) for r, serving in enumerate(routes.serving) if serving.row_groups]
        own = routes.serving[rank]
        self._gradient_columns, self._gradient_host_columns = own.gradient_columns, own.host_sums
        self._near = [other for other, is_near in enumerate(near) if is_near]
        # whether what each rank wants of a gradient lies together, so that the copy may divide
        wanted = (*self.columns.wanted, *self.columns.wanted_by_host)
        self._in_single_runs = all(len(runs) <= 1 for runs, _ in wanted)

    def pack_rows(self, step: Step, rows: Mapping[int, Tensor]) -> tuple[Tensor, list[int]]:
        # of each kind: sums [samples of all ranks, columns of the group], or rows source by source
        batches, by_kind = step.batches, {POOLED: list[Tensor](), HOST: list[Tensor](), ROWS: list[Tensor]()}
        for g, of_group in rows.items():
            by_kind[self.groups[g].kind].append(of_group)
        sums, of_host, by_rows = by_kind.values()
        matrix = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1) if sums else None
        if matrix is not None and not by_rows and self._host is None:
            return matrix.flatten(), list(map(matrix.shape[1].__mul__, batches))
        blocks: list[list[Tensor]] = [[] for _ in batches]
        if matrix is not None:
            for block, part in zip(blocks, matrix.split_with_sizes(batches), strict=True):
                block.append(part.flatten())
        if self._host is not None:
            empty = torch.empty(sum(batches), 0, device=step.received_ids.device)
            for rank, part in self._host.rows(torch.cat(of_host, dim=1) if of_host else empty, batches):
                blocks[rank].append(part.flatten())
        for g in rows if by_rows else ():
            if self.groups[g].kind == ROWS:
                for block, part in zip(blocks, self._rows_by_source(step, g, rows[g]), strict=True):
                    block.append(part)
        return _joined(blocks, step.received_ids.device)

    def unpack_rows(self, step: Step, received: Tensor, replicated: Mapping[int, Tensor]) -> Tensor:
        """[B, columns]: what has one source is copied, what has several is added in the order of the ranks."""
        columns, batch = self.columns, step.batch
        matrices: dict[Key, Tensor] = {}
        rest = []
        for rank, block in enumerate(received.split_with_sizes(step.row_sizes)):
            ends = [batch * self._sums[rank], batch * (self._sums[rank] + self._host_sums[rank])]
            if self._sums[rank]:
                matrices[POOLED, rank] = block[: ends[0]].view(batch, self._sums[rank])
            if self._host_sums[rank]:
                matrices[HOST, rank] = block[ends[0] : ends[1]].view(batch, self._host_sums[rank])
            if columns.ordered:
                rest.append(block[ends[1] :])
        if columns.ordered:
            for lookup, rows in self._rows_by_lookup(step, rest).items():
                matrices[ROWS, lookup] = _pool_in_order(step, self.routes, columns.ordered[lookup], rows)
        for lookup, piece in replicated.items():
            matrices[REPLICA, lookup] = piece
        if not columns.layers:
            return received.new_empty(batch, 0)
        first, *others = columns.layers
        pieces = [matrices[run.key][:, run.first : run.first + run.high - run.low] for run in first]
        if len(pieces) == 1 and not others:
            # a view of what was received
            output = pieces[0]
        else:
            output = in_huge_pages(torch.empty(batch, columns.starts[-1], device=received.device))
            addend = others[0][0] if len(pieces) == 1 else None
            if addend is not None and addend.high - addend.low == columns.starts[-1]:
                # row-wise tables alone: in one pass, and what was received is free again
                del others[0]
                low, high = addend.first, addend.first + addend.high - addend.low
                torch.add(pieces[0], matrices[addend.key][:, low:high], out=output)
            else:
                torch.cat(pieces, dim=1, out=output)
        for layer in others:
            for run in layer:
                output[:, run.low : run.high] += matrices[run.key][:, run.first : run.first + run.high - run.low]
        if self.has_averages:
            self._divide(step, output)
        return output

    def _divide(self, step: Step, values: Tensor) -> None:
        """Divide the columns of averaged lookups whose ids are divided by the lengths of their bags, in place."""
        for lookup, cut in self.columns.divided.items():
            assert step.division is not None
            self.columns.of_lookup(values, lookup).div_(step.division.lengths_of_cut(cut).clamp(min=1)[:, None])

    def gradient_of_sums(self, step: Step, grad: Tensor, divisor: int, *, checked: bool) -> Tensor:
        # an optimizer cuts the gradient of the average, after its division by `divisor`: so it is cut here
        grad = grad.clone()
        for lookup, most in self.columns.max_gradient.items():
            if most is not None:
                of_lookup = self.columns.of_lookup(grad, lookup)
                of_lookup.copy_(cut_gradient(of_lookup, most * divisor, checked=checked))
        self._divide(step, grad)
        return grad

    def pack_gradients(self, step: Step, grad: Tensor, divisor: int, buffers: Buffers) -> tuple[Tensor, list[int]]:
        """Of `grad` [B, columns] those that each rank wants, for itself and for its host."""
        batch, at = grad.shape[0], 0
        blocks = list(zip(self.columns.wanted, self.columns.wanted_by_host, strict=True))
        sizes = [batch * (own.width + of_host.width) for own, of_host in blocks]
        sent = buffers.take(sum(sizes), grad.device)
        for runs, width in chain.from_iterable(blocks):
            if width:
                out = sent[at : at + batch * width].view(batch, width)
                pieces = []
                for low, high in runs:
                    pieces.append(grad[:, low:high])
                if self._in_single_runs:
                    torch.div(pieces[0], divisor, out=out)
                else:
                    torch.cat(pieces, dim=1, out=out)
                at += batch * width
        if divisor > 1 and not self._in_single_runs:
            sent.div_(divisor)
        return sent, sizes

    def unpack_gradients(self, step: Step, received: Tensor) -> list[Tensor]:
        batches, columns = step.batches, self._gradient_columns
        if self._host is None:
            own = of_host = received.view(sum(batches), columns)
        else:
            blocks = received.split_with_sizes(self.gradient_sizes(step))
            own = torch.cat([block[: batch * columns] for block, batch in zip(blocks, batches, strict=True)])
            own = own.view(sum(batches), columns)
            rest = torch.cat([blocks[rank][batches[rank] * columns :] for rank in self._near])
            answered = sum(map(batches.__getitem__, self._near))
            of_host = self._host.rows_transpose(rest.view(answered, self._gradient_host_columns), batches)
        gradients, at = [], {True: 0, False: 0}
        for group in self.groups:
            is_host = group.kind == HOST
            begin, at[is_host] = at[is_host], at[is_host] + group.width
            gradients.append((of_host if is_host else own)[:, begin : begin + group.width])
        return gradients

    def row_sizes(self, step: Step) -> list[int]:
        sizes = list(map(step.batch.__mul__, self._columns_from))
        for rank, groups in self._row_groups:
            for g, width in groups:
                sizes[rank] += step.ids_to_groups[rank][g] * width
        return sizes

    def gradient_sizes(self, step: Step) -> list[int]:
        sizes = list(map(self._gradient_columns.__mul__, step.batches))
        for rank in self._near if self._gradient_host_columns else ():
            sizes[rank] += step.batches[rank] * self._gradient_host_columns
        return sizes

    def by_lookup(self, step: Step, values: Tensor) -> dict[int, Tensor]:
        return {lookup: self.columns.of_lookup(values, lookup) for lookup in range(len(self.routes.lookups))}


class SequenceWire(Wire):
    """Rows: a block is rows [n, width] of ids, group by group, slot by slot; the output lookup by lookup [n, D].

    `lookups` are in the output, in this order.
    """

    def __init__(self, routes: Routes, rank: int, codec: Codec | None = None, codec_back: Codec | None = None) -> None:
        super().__init__(routes, rank, codec, codec_back)
        exchanged = [n for n in range(len(routes.lookups)) if n not in routes.dense_lookups]
        self._gradient_slots = [_slots_of(serving, ROWS, REPLICA) for serving in routes.serving]
        slots = list(chain.from_iterable(self._gradient_slots))
        asked = [stream.lookup for _, stream in slots]
        whole = all(slot.columns == (0, routes.dims[slot.lookup]) for slot, _ in slots) and not routes.replicas
        # what comes is the result, or is it once it is brought from the order of buckets to that of the ids
        self._as_they_come = whole and not routes.cuts and len(set(asked)) == len(asked)
        buckets = [(stream.bucket, stream.cut) for _, stream in slots if stream.cut is not None]
        in_order = buckets == sorted(buckets) and len(buckets) == len(slots) > 0
        self._by_bucket = whole and in_order and [cut.lookup for cut in routes.cuts] == exchanged
        self.lookups = asked if self._as_they_come else exchanged
        self._width = slots[0][0].width if slots else 0
        # [W][groups] columns of rows that come back, 0 of replicas
        self._row_widths = [[group.row_width * (not group.is_replica) for group in s.groups] for s in routes.serving]

    def pack_rows(self, step: Step, rows: Mapping[int, Tensor]) -> tuple[Tensor, list[int]]:
        by_group = [self._rows_by_source(step, g, rows[g]) for g in rows]
        blocks = list(zip(*by_group, strict=True)) or [()] * len(step.batches)
        return _joined(blocks, step.received_ids.device)

    def unpack_rows(self, step: Step, received: Tensor, replicated: Mapping[int, Tensor]) -> Tensor:
        """[ids of all `lookups`, D]."""
        if not self.lookups:
            return received.new_empty(0, 0)
        if self._is_in_order(step):
            rows = received.view(-1, self._width)
            places = None if step.division is None else step.division.places
            return rows if places is None else rows.index_select(0, places)
        by_lookup = {**self._rows_by_lookup(step, received.split_with_sizes(step.row_sizes)), **replicated}
        return torch.cat([by_lookup[lookup] for lookup in self.lookups])

    def pack_gradients(self, step: Step, grad: Tensor, divisor: int, buffers: Buffers) -> tuple[Tensor, list[int]]:
        """The rows of `grad` [ids of all `lookups`, D] that each rank wants."""
        if self._is_in_order(step):
            sizes = [sum(of_rank) * self._width for of_rank in step.ids_to_groups]
            if step.division is None or step.division.places is None:
                return grad.reshape(-1) / divisor, sizes
            sent = torch.empty_like(grad).index_copy_(0, step.division.places.long(), grad).reshape(-1)
            return sent.div_(divisor) if divisor > 1 else sent, sizes
        of_lookup = self.by_lookup(step, grad)
        in_buckets: dict[int, Sequence[Tensor]] = {}
        flat, sizes = [grad.new_empty(0)], []
        for slots in self._gradient_slots:
            size = 0
            for slot, stream in slots:
                rows = of_lookup[stream.lookup]
                if stream.cut is not None:
                    if stream.cut not in in_buckets:
                        assert step.division is not None
                        in_buckets[stream.cut] = step.division.in_buckets(stream.cut, rows)
                    rows = in_buckets[stream.cut][stream.bucket]
                flat.append(rows[:, slot.columns[0] : slot.columns[1]].reshape(-1))
                size += rows.shape[0] * slot.width
            sizes.append(size)
        sent = torch.cat(flat)
        return sent.div_(divisor) if divisor > 1 else sent, sizes

    def unpack_gradients(self, step: Step, received: Tensor) -> list[Tensor]:
        """[n, width] of each group, [slot][source]: the transpose of `_rows_by_source`."""
        # [W * G] numbers, source after source
        parts = received.split_with_sizes(list(chain.from_iterable(zip(*self._sizes_by_group(step), strict=True))))
        gradients, world = [], len(step.batches)
        for g, group in enumerate(self.groups):
            rows, slots = torch.cat(parts[g :: len(self.groups)]).view(-1, max(1, group.row_width)), len(group.slots)
            if world > 1 and slots > 1:
                order = torch.arange(slots * world, device=rows.device).view(world, slots).t().flatten()
                sizes = self.ids_by_source(step, g).t().flatten().long()
                _, rows, _ = permute_1d(order, sizes, rows, permuted_lengths_sum=rows.shape[0])
            gradients.append(rows)
        return gradients

    def row_sizes(self, step: Step) -> list[int]:
        sizes = []
        for ids, widths in zip(step.ids_to_groups, self._row_widths, strict=True):
            sizes.append(sum(map(mul, ids, widths)))
        return sizes

    def gradient_sizes(self, step: Step) -> list[int]:
        return list(map(sum, zip(*self._sizes_by_group(step), strict=True))) or [0] * len(step.batches)

    def _sizes_by_group(self, step: Step) -> list[list[int]]:
        """[G][W] numbers of the rows that each rank asked a group for."""
        return [
            list(map(group.row_width.__mul__, ids)) for group, ids in zip(self.groups, step.ids_by_group, strict=False)
        ]

    def by_lookup(self, step: Step, values: Tensor) -> dict[int, Tensor]:
        ids, places = step.routed.length_per_key(), step.sending.place_of_lookup
        rows = values.split_with_sizes([ids[places[lookup]] for lookup in self.lookups])
        return dict(zip(self.lookups, rows, strict=True))

    def _is_in_order(self, step: Step) -> bool:
        """Whether what comes is the output, but for the order of buckets."""
        return self._as_they_come or (self._by_bucket and (step.division is None or step.division.has_cuts_alone))


def pack_weight_gradients(step: Step, gradients: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Gradients of the weights that came, of each group whose results went back, for the ranks that sent them."""
    came, at = sum(step.ids_from), torch.cat([*gradients, step.sent_lengths.new_empty(0, dtype=torch.float32)])
    places = torch.arange(came, device=at.device)
    if came:
        # where each id that is looked up lay among those that came, one rank after another
        places = unpack_weights(step, places)
    # an id that several column shards of this rank looked up has a gradient from each
    of_ids = at.new_zeros(came).index_put_((places[: at.shape[0]],), at, accumulate=True)
    blocks = of_ids.split_with_sizes(step.ids_from)
    returned = [block[:count] for block, count in zip(blocks, step.returned_from, strict=True)]
    return torch.cat(returned), step.returned_from


def unpack_weight_gradients(step: Step, received: Tensor) -> Tensor:
    """The gradient [N] of the weights that this rank sent; those of ids that replicas serve count where they are."""
    pieces = []
    for part, ids in zip(received.split_with_sizes(step.returned_to), step.ids_to, strict=True):
        pieces += [part, part.new_zeros(ids - part.shape[0])]
    return torch.cat(pieces)


def _slots_of(serving: Serving, *kinds: str) -> list[tuple[Slot, Stream]]:
    """A rank's slots in groups of these kinds, with their streams."""
    slots = [slot for group in serving.groups if group.kind in kinds for slot in group.slots]
    return [(slot, serving.streams[slot.stream]) for slot in slots]


def _joined(blocks: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Tensor, list[int]]:
    """The parts of each block, one after another, and the size of each block."""
    flat, sizes = [torch.empty(0, device=device)], []
    for block in blocks:
        flat += block
        sizes.append(sum(map(Tensor.numel, block)))
    return torch.cat(flat), sizes


def cut_gradient(grad: Tensor, most: float, *, checked: bool) -> Tensor:
    """A gradient whose numbers are cut to +-`most`; where it is `checked` later, those that are not finite stay."""
    cut = grad.clamp(-most, most)
    return torch.where(grad.isfinite(), cut, grad) if checked else cut


def _pool_in_order(step: Step, routes: Routes, cut: int, rows: Tensor) -> Tensor:
    """Rows [n, dim] of a cut lookup's ids, pooled in the order of their bags: [B, dim]."""
    division = step.division
    assert division is not None
    n, dim = rows.shape
    lengths = division.lengths_of_cut(cut)
    if n == 0:
        return rows.new_zeros(lengths.shape[0], dim)
    table = Feature(0, n, dim, 0, routes.table_of(routes.cuts[cut].lookup).mean)
    weights = None if division.given_weights is None else division.given_weights[division.ids_of_cut(cut)]
    # not blocking, since a blocking copy from the host would be a host sync
    features = pack_features([table], torch.device("cpu")).to(rows.device, non_blocking=True)
    return pooled_lookup(
        rows.flatten(), torch.arange(n, device=rows.device), complete_cumsum(lengths.long()), weights, features, [dim],
        flatten_segments([Segment(dim, 0, n, 0)]), "mean" if table.mean else "sum",
    )  # fmt: skip


class CutGradient(torch.autograd.Function):
    """A tensor as it is, whose gradient is cut to +-`most`; `checked` as for `cut_gradient`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, most: float, checked: bool) -> Tensor:
        ctx.most, ctx.checked = most, checked
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        return cut_gradient(grad.float(), ctx.most, checked=ctx.checked).to(grad.dtype), None, None
