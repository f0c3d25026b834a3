"""The way of a batch's ids to the ranks that serve them, and into their order there.

A rank keeps (slot, global sample, position), global samples being rank 0's batch, then rank 1's, and so on; so
gradients reach a row in the order of one process that saw the whole batch. Where nothing is pooled samples do not
matter: then all ids of a lookup count as one bag.

Letters: W ranks, L lookups, B samples of one rank (1 where nothing is pooled), S streams, N ids, C cuts, K buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import torch
from torch import Tensor

from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import (
    Feature,
    block_bucketize,
    complete_cumsum,
    pack_features,
    permute_1d,
    permute_2d,
    permute_segments,
)

from .routes import Routes, is_even

# rows of a table whose ids may be any numbers
_ANY = torch.iinfo(torch.int64).max


class Sending:
    """How batches of certain keys leave: made once, for updates or without.

    Segments of a batch are picked in this order: streams of whole lookups rank by rank, lookups that are cut, and
    lookups at home.
    """

    def __init__(self, routes: Routes, keys: Sequence[str], update: bool, device: torch.device) -> None:
        self.place = place = {key: number for number, key in enumerate(keys)}
        streams = [serving.streams_for(update) for serving in routes.serving]
        self.first_stream = list(accumulate(map(len, streams), initial=0))
        sent = [stream for mine in streams for stream in mine]
        whole = [stream.lookup for stream in sent if stream.cut is None]
        cut = [cut.lookup for cut in routes.cuts]
        home = [[slot.lookup for slot in group.slots] for group in (*routes.replicas, *routes.dense)]
        picked = [*whole, *cut, *(n for lookups in home for n in lookups)]
        self.picks = [place[routes.lookups[n][0]] for n in picked]
        self.as_they_are = self.picks == list(range(len(keys)))
        self.picks_there = torch.tensor(self.picks, dtype=torch.int64, device="cpu").to(device)
        self.whole, self.home = len(whole), [len(lookups) for lookups in home]
        self.cuts = None if not cut else Cutting(routes, device)
        # segments of whole lookups, then [bucket][cut], in the order of the streams
        numbers, order = iter(range(len(whole))), []
        for stream in sent:
            shifted = 0 if stream.cut is None else len(whole) + stream.bucket * len(cut) + stream.cut
            order.append(next(numbers) if stream.cut is None else shifted)
        segments = len(whole) + (0 if self.cuts is None else self.cuts.buckets * len(cut))
        self.order = None if order == list(range(segments)) else order
        self.order_there = torch.tensor(order, dtype=torch.int64, device="cpu").to(device)
        self._find_checks(routes, keys, device)
        # slots of all ranks, group by group: the stream of each, and where groups begin
        slots = [
            [
                [first + slot.stream for slot in group.slots]
                for group in serving.groups
                if update or not group.is_replica
            ]
            for first, serving in zip(self.first_stream, routes.serving, strict=False)
        ]
        self._slot_streams = [stream for rank in slots for group in rank for stream in group]
        self._bounds = list(accumulate((len(group) for rank in slots for group in rank), initial=0))
        self._groups = [len(rank) for rank in slots]

    def _find_checks(self, routes: Routes, keys: Sequence[str], device: torch.device) -> None:
        """What the ids of each key are checked against: the smallest of the tables that they are looked up in."""
        rows = [(table.id_range or _ANY) if table.mapped else table.rows for table in routes.tables]
        smallest: dict[str, tuple[int, int]] = {}
        for feature, table in routes.lookups:
            smallest[feature] = min(smallest.get(feature, (_ANY, table)), (rows[table], table))
        # other keys may hold anything
        self.used = [number for number, key in enumerate(keys) if key in smallest]
        self.all_used = len(self.used) == len(keys)
        self.rows = [smallest[keys[k]][0] for k in self.used]
        spec = [Feature(0, rows_of, 1, 0) for rows_of in self.rows]
        self.checked = pack_features(spec, device)
        names = [(keys[k], routes.tables[smallest[keys[k]][1]].name) for k in self.used]
        self.checked_names = [f"feature {feature!r} (table {table!r})" for feature, table in names]

    def ids_to_groups(self, counts: Sequence[int]) -> list[list[int]]:
        """Ids that go to each group of each rank, given the ids of each stream."""
        ends = list(accumulate([counts[stream] for stream in self._slot_streams], initial=0))
        sums = iter([ends[b] - ends[a] for a, b in pairwise(self._bounds)])
        return [list(islice(sums, groups)) for groups in self._groups]


class Cutting:
    """How the cut lookups of a plan are divided among buckets."""

    def __init__(self, routes: Routes, device: torch.device) -> None:
        cuts = routes.cuts
        self.buckets = max(len(cut.borders) for cut in cuts) - 1
        padded = [cut.borders + cut.borders[-1:] * (self.buckets + 1 - len(cut.borders)) for cut in cuts]
        blocks = [max(1, borders[1] - borders[0]) for borders in padded]
        self.block_sizes = torch.tensor(blocks, device="cpu").to(device)
        even = all(is_even(borders) for borders in padded)
        self.borders = None if even else [torch.tensor(borders, device="cpu").to(device) for borders in padded]
        # cuts whose rows are averaged in the order of one process: their ids carry the share of each
        shared = [routes.is_ordered(cut.lookup) and routes.table_of(cut.lookup).mean for cut in cuts]
        self.averaged = torch.tensor(shared, device="cpu").to(device) if any(shared) else None
        # rows that nobody looks up or pools here travel: where they go is needed then
        self.keeps_places = not routes.pooled or any(routes.is_ordered(cut.lookup) for cut in cuts)
        self.rows = torch.tensor([cut.borders[-1] for cut in cuts], device="cpu").to(device)


@dataclass
class Home:
    """What a rank looks up in tables that all ranks hold: the batch of one group's lookups, and ids of each."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    sizes: list[int]


@dataclass
class Outbound:
    """A rank's own batch, ready to leave."""

    batch: int
    # [streams of all ranks] ids of each
    counts: list[int]
    # [W][groups of the rank]
    ids_to_groups: list[list[int]]
    ids: Tensor
    # [streams of all ranks, B] int32
    lengths: Tensor
    # a factor for each id, through which gradients of weights go back
    weights: Tensor | None
    home: list[Home]
    sending: Sending
    # [K][C] ids in each bucket, and where each id of the cut lookups lies among them
    cut_counts: list[list[int]]
    places: Tensor | None
    # [C, B] lengths of the cut lookups, and the weights of their ids, as they were given
    cut_lengths: Tensor | None
    cut_weights: Tensor | None

    def ids_of_cut(self, cut: int) -> slice:
        """Which of the cut lookups' ids are of this one."""
        sizes = [sum(counts) for counts in zip(*self.cut_counts, strict=True)]
        begin = sum(sizes[:cut])
        return slice(begin, begin + sizes[cut])

    def blocks(self) -> list[list[Tensor]]:
        """What goes to each rank, as int32: ids, lengths and weights of its streams."""
        first = self.sending.first_stream
        ends = list(accumulate(self.counts, initial=0))
        ids, lengths = self.ids.view(torch.int32), self.lengths.flatten()
        each = self.ids.element_size() // 4
        weights = None if self.weights is None else self.weights.detach().contiguous().view(torch.int32)
        found = []
        for low, high in pairwise(first):
            begin, end = ends[low], ends[high]
            block = [ids[begin * each : end * each], lengths[low * self.batch : high * self.batch]]
            found.append(block if weights is None else [*block, weights[begin:end]])
        return found


def route(
    features: KeyedJaggedTensor, routes: Routes, sending: Sending, weights: Tensor | None, *, lenient: bool
) -> Outbound:
    """Line every lookup's ids up for the ranks that serve it; all features have one batch size.

    With `lenient` ids may lie outside their tables: they travel as numbers that lie outside every shard.
    """
    # host sync on CUDA: the sizes that leave, read once
    sizes = features.length_per_key()
    ids, batch = features.values(), features.stride() if routes.pooled else 1
    if features.capacity() is not None:
        end = sum(sizes)
        ids, weights = ids[:end], None if weights is None else weights[:end]
    if routes.id_dtype == torch.int32 and ids.dtype == torch.int64 and lenient:
        # an id that no table has stays one: narrowing must not turn it into another row
        ids = ids.clamp(-1, torch.iinfo(torch.int32).max)
    ids = ids.to(routes.id_dtype)
    if routes.scaled and weights is None:
        weights = torch.ones(ids.shape[0], device=ids.device)
    weights = None if weights is None else weights.float()
    lengths = features.lengths().view(len(sizes), batch) if routes.pooled else _column(sizes, ids.device)
    if not sending.as_they_are:
        tensors = [ids] if weights is None else [ids, weights]
        ids, *others = permute_segments(tensors, sizes, sending.picks)
        weights = others[0] if others else None
        lengths, sizes = lengths.index_select(0, sending.picks_there), [sizes[k] for k in sending.picks]
    lengths = lengths.to(torch.int32)

    whole, cuts = sending.whole, 0 if sending.cuts is None else len(routes.cuts)
    ends = list(accumulate(sizes, initial=0))
    home, at = [], whole + cuts
    for count in sending.home:
        part = slice(ends[at], ends[at + count])
        offsets = complete_cumsum(lengths[at : at + count].flatten().long())
        home.append(Home(ids[part], offsets, None if weights is None else weights[part], sizes[at : at + count]))
        at += count
    a, b = ends[whole], ends[whole + cuts]
    found = Outbound(
        batch, sizes[:whole], [], ids[:a], lengths[:whole], None if weights is None else weights[:a], home,
        sending, [], None, None, None,
    )  # fmt: skip
    if sending.cuts is not None:
        found.cut_lengths = lengths[whole : whole + cuts]
        found.cut_weights = weights[a:b].detach() if routes.weighted and weights is not None else None
        _divide(found, sending.cuts, ids[a:b], None if weights is None else weights[a:b], lenient)
    found.ids_to_groups = sending.ids_to_groups(found.counts)
    return found


def _divide(out: Outbound, cutting: Cutting, ids: Tensor, weights: Tensor | None, lenient: bool) -> None:
    """Divide the ids of cut lookups among buckets, and bring all streams into their order."""
    assert out.cut_lengths is not None
    lengths = out.cut_lengths.flatten()
    if cutting.averaged is not None:
        assert weights is not None
        weights = weights / _bag_lengths(cutting.averaged, out.cut_lengths)
    outside = None
    if lenient:
        rows = cutting.rows.repeat_interleave(out.cut_lengths.sum(1))
        outside = (ids < 0) | (ids >= rows)
        ids = torch.where(outside, 0, ids)
    found = block_bucketize(
        lengths, ids, cutting.block_sizes, cutting.buckets, weights=weights, block_bucketize_pos=cutting.borders,
        sequence=cutting.keeps_places or outside is not None,
    )  # fmt: skip
    bucketed, places = found.ids, found.unbucketize_permute
    if outside is not None:
        assert places is not None
        bucketed = bucketed.clone()
        bucketed[places.long()] = torch.where(outside, -1, bucketed[places.long()])
    by_segment = found.lengths.view(cutting.buckets * len(out.cut_lengths), out.batch)
    # host sync on CUDA: the sizes that leave
    counts = by_segment.sum(1).tolist()
    cuts = len(out.cut_lengths)
    out.cut_counts = [counts[k : k + cuts] for k in range(0, len(counts), cuts)]
    out.places = places if cutting.keeps_places else None
    out.counts = [*out.counts, *counts]
    out.ids = torch.cat([out.ids, bucketed])
    out.lengths = torch.cat([out.lengths, by_segment])
    if weights is not None:
        assert out.weights is not None and found.weights is not None
        out.weights = torch.cat([out.weights, found.weights])
    order = out.sending.order
    if order is not None:
        tensors = [out.ids] if out.weights is None else [out.ids, out.weights]
        out.ids, *others = permute_segments(tensors, out.counts, order)
        out.weights = others[0] if others else None
        out.lengths = out.lengths.index_select(0, out.sending.order_there)
        out.counts = [out.counts[segment] for segment in order]


def _bag_lengths(averaged: Tensor, lengths: Tensor) -> Tensor:
    """For each id the length of its bag, or 1 in lookups [C] that are not averaged; lengths [C, B]."""
    counted = torch.where(averaged[:, None], lengths, 1).flatten()
    return counted.repeat_interleave(lengths.flatten())


def _column(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32, device="cpu").view(-1, 1).to(device, non_blocking=True)


class Receiving:
    """How batches of all ranks come into order on the rank that serves them: made once, for updates or without."""

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
        self.first_slot = list(accumulate((len(group.slots) for group in groups), initial=0))
        self.scaled, self.id_dtype = routes.scaled, routes.id_dtype
        # int32 numbers that travel for an id: itself and, where those do, its factor
        self._per_id = self.id_dtype.itemsize // 4 + self.scaled

    def elements(self, batch: int, ids: int) -> int:
        """int32 numbers of a block from one rank: ids, lengths and, where factors travel, those."""
        return ids * self._per_id + batch * self.streams


@dataclass
class Inbound:
    """What a rank serves in this step: ids of all ranks in the order [slot][global sample][position]."""

    ids: Tensor
    # [slots, samples of all ranks] int32
    lengths: Tensor
    offsets: Tensor
    weights: Tensor | None
    # [W] samples of each rank
    batches: list[int]
    # where the ids of each group begin, and those of the last one end
    first_id: list[int]
    # lengths of each rank as they came, and the order of their segments since
    came: Sequence[Tensor]
    order: Tensor | None

    def places(self, came: int) -> Tensor:
        """For each id its place among the `came` ids as they came, one rank after another."""
        arrived = torch.arange(came, device=self.ids.device)
        if self.order is None or not came:
            return arrived
        streams = sum(mine.numel() for mine in self.came) // sum(self.batches)
        sizes = [mine.view(streams, batch).sum(1) for mine, batch in zip(self.came, self.batches, strict=True)]
        return permute_1d(self.order, torch.cat(sizes), arrived)[1]


def arrange(
    blocks: Sequence[Tensor], receiving: Receiving, batches: list[int], ids_from: list[int], group_ids: list[int]
) -> Inbound:
    """Bring the blocks of all ranks, each [stream][sample], into the order [slot][global sample].

    `ids_from[r]` ids came from rank r, `group_ids[g]` of all are looked up in group g.
    """
    each, streams = receiving.id_dtype.itemsize // 4, receiving.streams
    ids, lengths, weights = [], [], []
    for block, batch, count in zip(blocks, batches, ids_from, strict=True):
        end = count * each + streams * batch
        ids.append(block[: count * each])
        lengths.append(block[count * each : end])
        weights.append(block[end:])
    numbers = torch.cat(ids).view(receiving.id_dtype)
    factors = torch.cat(weights).view(torch.float32) if receiving.scaled else None
    return in_order(numbers, lengths, factors, receiving, batches, group_ids)


def in_order(
    ids: Tensor,
    lengths: Sequence[Tensor],
    weights: Tensor | None,
    receiving: Receiving,
    batches: list[int],
    group_ids: list[int],
) -> Inbound:
    """`arrange`, once ids [N] and weights [N] of all ranks lie one after another; lengths[r] [streams * B_r]."""
    slots, streams, samples = len(receiving.slot_streams), receiving.streams, sum(batches)
    order = receiving.order
    if len(set(batches)) == 1:
        bags = (lengths[0] if len(lengths) == 1 else torch.cat(list(lengths))).view(len(batches) * streams, batches[0])
        if order is not None:
            bags, ids, weights = permute_2d(order, bags, ids, weights, permuted_lengths_sum=sum(group_ids))
        bags = bags.reshape(slots, samples)
    else:
        by_rank = [mine.view(streams, batch) for mine, batch in zip(lengths, batches, strict=True)]
        if order is not None:
            sizes = torch.cat([mine.sum(1) for mine in by_rank])
            _, ids, weights = permute_1d(order, sizes, ids, weights, permuted_lengths_sum=sum(group_ids))
        bags = torch.cat([mine.index_select(0, receiving.slot_streams) for mine in by_rank], dim=1)
    first_id = list(accumulate(group_ids, initial=0))
    counted = bags.flatten() if first_id[-1] < 2**31 else bags.flatten().long()
    return Inbound(ids, bags, complete_cumsum(counted), weights, batches, first_id, lengths, order)
