"""The way of a batch's ids to the ranks that serve them, and into their order there.

A rank keeps (slot, global sample, position), global samples being rank 0's batch, then rank 1's, and so on; so
gradients reach a row in the order of one process that saw the whole batch. Where nothing is pooled samples do not
matter: then all ids of a lookup count as one bag.

The ids of cut lookups are divided among buckets, and how many each bucket gets only their values tell. On the host
sizes are read first, and of those ids alone; on a GPU a batch is divided whole before, so that it is waited for once.
Nothing here waits for a GPU otherwise, or trusts what nobody has looked at yet: ids and lengths may prove to be bad
later.

Letters: W ranks, L lookups, B samples of one rank (1 where nothing is pooled), S streams, N ids, K buckets, C cuts,
which are the columns of what is divided (there all keys of a batch may be).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

import torch
from torch import Tensor

from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged._segments import Beside
from shardwise.kernels import (
    Feature,
    block_bucketize,
    complete_cumsum,
    pack_features,
    permute_1d,
    permute_2d,
    permute_segments,
)
from shardwise.kernels.features import bag_of_position

from .routes import Cut, Routes, Stream, is_even

# rows of a table whose ids may be any numbers
ANY = torch.iinfo(torch.int64).max


class Cutting:
    """How the columns of a division are divided among buckets: what is no cut lies in bucket 0 as it is."""

    def __init__(self, routes: Routes, columns: Sequence[Cut | None], device: torch.device) -> None:
        found = [(0, ANY) if cut is None else cut.borders for cut in columns]
        self.buckets = max(map(len, found)) - 1
        padded = [borders + borders[-1:] * (self.buckets + 1 - len(borders)) for borders in found]
        blocks = [max(1, borders[1] - borders[0]) for borders in padded]
        self.block_sizes = torch.tensor(blocks, device="cpu").to(device)
        even = all(is_even(borders) for borders in padded)
        self.borders = None if even else [torch.tensor(borders, device="cpu").to(device) for borders in padded]
        # cuts whose rows are averaged in the order of one process: their ids carry the share of each
        ordered = [cut is not None and routes.is_ordered(cut.lookup) for cut in columns]
        shared = [
            cut is not None and one and routes.table_of(cut.lookup).mean
            for cut, one in zip(columns, ordered, strict=True)
        ]
        self.averaged = torch.tensor(shared, device="cpu").to(device) if any(shared) else None
        # rows that nobody looks up or pools here travel: where they go is needed then
        self.keeps_places = not routes.pooled or any(ordered)
        self.rows = torch.tensor([borders[-1] for borders in padded], device="cpu").to(device)


@dataclass
class Division:
    """Columns divided among buckets: ids and weights [N] in the order [bucket][column][sample]."""

    # [C, B], as they were given, and the weights of the ids
    given_lengths: Tensor
    given_weights: Tensor | None
    ids: Tensor
    # [K * C, B]
    lengths: Tensor
    weights: Tensor | None
    # where each id lies, in the order in which they were given
    places: Tensor | None
    # [K * C] ids of each, and the same once the host has read it
    sizes: Tensor
    known: list[int] | None = None


def divide(
    cutting: Cutting, lengths: Tensor, ids: Tensor, weights: Tensor | None, routes: Routes, lenient: bool
) -> Division:
    """Divide ids [N] of columns with lengths [C, B] among buckets; waits for nothing."""
    columns, batch = lengths.shape
    given = weights.detach() if routes.weighted and weights is not None else None
    if cutting.averaged is not None:
        assert weights is not None
        counted = torch.where(cutting.averaged[:, None], lengths, 1).flatten()
        weights = weights / _of_bags(counted, lengths.flatten(), ids)
    inside, outside, instead = ids, None, None
    if lenient:
        rows = _of_bags(cutting.rows, lengths.sum(1), ids)
        outside = (ids < 0) | (ids >= rows)
        # of what is not cut the number itself lies outside
        inside, instead = torch.where(outside, 0, ids), torch.where(rows < ANY, -1, ids)
    found = block_bucketize(
        lengths.flatten(), inside, cutting.block_sizes, cutting.buckets, weights=weights,
        block_bucketize_pos=cutting.borders, sequence=cutting.keeps_places or outside is not None,
    )  # fmt: skip
    bucketed, places = found.ids, found.unbucketize_permute
    if outside is not None:
        assert places is not None and instead is not None
        bucketed = bucketed.clone()
        bucketed[places.long()] = torch.where(outside, instead, bucketed[places.long()])
    by_segment = found.lengths.view(cutting.buckets * columns, batch)
    return Division(
        lengths, given, bucketed, by_segment, found.weights, places if cutting.keeps_places else None,
        by_segment.sum(1),
    )  # fmt: skip


def _of_bags(numbers: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    """For each of `ids` [N] the number of its bag; numbers and lengths [bags]."""
    if not ids.is_cuda:
        return numbers.repeat_interleave(lengths, output_size=ids.shape[0])
    # a search waits for nothing, and bad lengths, which nobody has looked at yet, take it to no place that is not there
    bag = bag_of_position(complete_cumsum(lengths.long()), ids.shape[0])
    return torch.nn.functional.pad(numbers, (0, 1), value=1).index_select(0, bag)


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
        self.cuts = None if not cut else Cutting(routes, routes.cuts, device)
        # segments of whole lookups, then [bucket][cut], in the order of the streams
        numbers, order = iter(range(len(whole))), []
        for stream in sent:
            shifted = 0 if stream.cut is None else len(whole) + stream.bucket * len(cut) + stream.cut
            order.append(next(numbers) if stream.cut is None else shifted)
        segments = len(whole) + (0 if self.cuts is None else self.cuts.buckets * len(cut))
        self.order = None if order == list(range(segments)) else order
        self.order_there = torch.tensor(order, dtype=torch.int64, device="cpu").to(device)
        self._find_checks(routes, keys, device)
        self._find_division_of_keys(routes, len(keys), sent, device)
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
        rows = [(table.id_range or ANY) if table.mapped else table.rows for table in routes.tables]
        smallest: dict[str, tuple[int, int]] = {}
        for feature, table in routes.lookups:
            smallest[feature] = min(smallest.get(feature, (ANY, table)), (rows[table], table))
        # other keys may hold anything
        self.used = [number for number, key in enumerate(keys) if key in smallest]
        self.all_used = len(self.used) == len(keys)
        self.rows = [smallest[keys[k]][0] for k in self.used]
        spec = [Feature(0, rows_of, 1, 0) for rows_of in self.rows]
        self.checked = pack_features(spec, device)
        names = [(keys[k], routes.tables[smallest[keys[k]][1]].name) for k in self.used]
        self.checked_names = [f"feature {feature!r} (table {table!r})" for feature, table in names]

    def _find_division_of_keys(self, routes: Routes, keys: int, sent: Sequence[Stream], device: torch.device) -> None:
        """How all keys of a batch are divided; `self.keys` is None where one that is cut is looked up otherwise too."""
        at = range(self.whole, self.whole + len(routes.cuts))
        # the key of each cut
        self.columns = [self.picks[n] for n in at]
        others = [key for n, key in enumerate(self.picks) if n not in at]
        self.keys: Cutting | None = None
        if not self.columns or len(set(self.columns)) < len(self.columns) or not set(self.columns).isdisjoint(others):
            return
        cut_of = dict(zip(self.columns, routes.cuts, strict=True))
        self.keys = Cutting(routes, [cut_of.get(key) for key in range(keys)], device)
        # segments [bucket][key] in the order of the streams, then those at home; what is not cut lies in bucket 0
        order, whole = [], iter(self.picks)
        for stream in sent:
            order.append(next(whole) if stream.cut is None else stream.bucket * keys + self.columns[stream.cut])
        order += self.picks[at.stop :]
        self.keys_order = None if order == list(range(self.keys.buckets * keys)) else order
        self.keys_order_there = torch.tensor(order, dtype=torch.int64, device="cpu").to(device)

    def ids_to_groups(self, counts: Sequence[int]) -> list[list[int]]:
        """Ids that go to each group of each rank, given the ids of each stream."""
        ends = list(accumulate([counts[stream] for stream in self._slot_streams], initial=0))
        sums = iter([ends[b] - ends[a] for a, b in pairwise(self._bounds)])
        return [list(islice(sums, groups)) for groups in self._groups]


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
    # the column of each cut in what was divided, the cuts alone or all keys of the batch; [K * columns] ids of each
    # bucket and column, and where each id lies among them
    columns: Sequence[int]
    cut_sizes: list[int]
    places: Tensor | None
    # [columns, B] lengths, and the weights of their ids, as they were given
    cut_lengths: Tensor | None
    cut_weights: Tensor | None

    @property
    def divides_cuts_alone(self) -> bool:
        """Whether what was divided are the cuts, in their order."""
        return self.cut_lengths is None or list(self.columns) == list(range(len(self.cut_lengths)))

    @property
    def cut_counts(self) -> list[list[int]]:
        """[K][columns] ids."""
        assert self.cut_lengths is not None
        columns = len(self.cut_lengths)
        return [self.cut_sizes[at : at + columns] for at in range(0, len(self.cut_sizes), columns)]

    def ids_of_cut(self, cut: int) -> slice:
        """Which of the divided ids are of this cut."""
        sizes, column = list(map(sum, zip(*self.cut_counts, strict=True))), self.columns[cut]
        begin = sum(sizes[:column])
        return slice(begin, begin + sizes[column])

    def lengths_of_cut(self, cut: int) -> Tensor:
        """The lengths [B] of its bags."""
        assert self.cut_lengths is not None
        return self.cut_lengths[self.columns[cut]]

    def counts_of_cut(self, cut: int) -> list[int]:
        """Its ids in each bucket."""
        return [counts[self.columns[cut]] for counts in self.cut_counts]

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


def divide_ahead(
    features: KeyedJaggedTensor, routes: Routes, sending: Sending, weights: Tensor | None, *, lenient: bool
) -> Division | None:
    """Divide all keys of a batch that nothing was read of: on a GPU, where ids and lengths may yet prove to be bad.

    None where that is not for `route` to go on from: nothing is cut, a feature that is cut is looked up another way
    too, or values lie behind the batch's.
    """
    if sending.keys is None or features.capacity() is not None:
        return None
    lengths = features.lengths().view(len(features.keys()), features.stride())
    if not routes.pooled:
        lengths = lengths.sum(1, keepdim=True)
    ids, weights = _numbers(features.values(), routes, weights, lenient)
    return divide(sending.keys, lengths.to(torch.int32), ids, weights, routes, lenient)


def route(
    features: KeyedJaggedTensor,
    routes: Routes,
    sending: Sending,
    weights: Tensor | None,
    *,
    lenient: bool,
    divided: Division | None = None,
) -> Outbound:
    """Line every lookup's ids up for the ranks that serve it; all features have one batch size.

    With `lenient` ids may lie outside their tables: they travel as numbers that lie outside every shard. `divided` is
    what `divide_ahead` found.
    """
    if divided is not None:
        return _route_divided(features, routes, sending, divided)
    # host sync on CUDA: the sizes that leave, read once
    sizes = features._sizes()
    ids, batch = features.values(), features.stride() if routes.pooled else 1
    if features.capacity() is not None:
        end = sum(sizes)
        ids, weights = ids[:end], None if weights is None else weights[:end]
    ids, weights = _numbers(ids, routes, weights, lenient)
    lengths = features.lengths().view(len(sizes), batch) if routes.pooled else _column(sizes, ids.device)
    if not sending.as_they_are:
        tensors = [ids] if weights is None else [ids, weights]
        ids, *others = permute_segments(tensors, sizes, sending.picks)
        weights = others[0] if others else None
        lengths, sizes = lengths.index_select(0, sending.picks_there), [sizes[k] for k in sending.picks]
    lengths = lengths.to(torch.int32)

    whole, cuts = sending.whole, 0 if sending.cuts is None else len(routes.cuts)
    ends = list(accumulate(sizes, initial=0))
    a, b = ends[whole], ends[whole + cuts]
    home: list[Home] = []
    if sending.home:
        rest = None if weights is None else weights[b:]
        home = _at_home(sending, ids[b:], lengths[whole + cuts :], rest, sizes[whole + cuts :])
    found = Outbound(
        batch, sizes[:whole], [], ids[:a], lengths[:whole], None if weights is None else weights[:a], home,
        sending, range(cuts), [], None, None, None,
    )  # fmt: skip
    if sending.cuts is not None:
        cut = lengths[whole : whole + cuts]
        division = divide(sending.cuts, cut, ids[a:b], None if weights is None else weights[a:b], routes, lenient)
        # host sync on CUDA: the sizes that leave
        found.cut_sizes = division.sizes.tolist()
        found.places, found.cut_lengths, found.cut_weights = division.places, cut, division.given_weights
        found.counts = [*found.counts, *found.cut_sizes]
        found.ids = torch.cat([found.ids, division.ids])
        found.lengths = torch.cat([found.lengths, division.lengths])
        if division.weights is not None:
            assert found.weights is not None
            found.weights = torch.cat([found.weights, division.weights])
        if sending.order is not None:
            tensors = [found.ids] if found.weights is None else [found.ids, found.weights]
            found.ids, *others = permute_segments(tensors, found.counts, sending.order)
            found.weights = others[0] if others else None
            found.lengths = found.lengths.index_select(0, sending.order_there)
            found.counts = [found.counts[segment] for segment in sending.order]
    found.ids_to_groups = sending.ids_to_groups(found.counts)
    return found


def _numbers(ids: Tensor, routes: Routes, weights: Tensor | None, lenient: bool) -> tuple[Tensor, Tensor | None]:
    """Ids and weights of a batch as they travel."""
    if routes.id_dtype == torch.int32 and ids.dtype == torch.int64 and lenient:
        # an id that no table has stays one: narrowing must not turn it into another row
        ids = ids.clamp(-1, torch.iinfo(torch.int32).max)
    ids = ids.to(routes.id_dtype)
    if routes.scaled and weights is None:
        weights = torch.ones(ids.shape[0], device=ids.device)
    return ids, None if weights is None else weights.float()


def _at_home(
    sending: Sending, ids: Tensor, lengths: Tensor, weights: Tensor | None, sizes: Sequence[int]
) -> list[Home]:
    """What is looked up in tables that all ranks hold, group by group: sizes [lookups at home] ids of each."""
    ends, at = list(accumulate(sizes, initial=0)), 0
    home = []
    for count in sending.home:
        part = slice(ends[at], ends[at + count])
        offsets = complete_cumsum(lengths[at : at + count].flatten().long())
        mine = None if weights is None else weights[part]
        home.append(Home(ids[part], offsets, mine, list(sizes[at : at + count])))
        at += count
    return home


def _route_divided(features: KeyedJaggedTensor, routes: Routes, sending: Sending, division: Division) -> Outbound:
    """`route` of a batch that was divided whole."""
    if division.known is None:
        beside = Beside(division.sizes)
        # host sync on CUDA: the sizes that leave, and those of the batch
        features._sizes(beside)
        division.known = beside.read()
    counts, ids, lengths, weights = division.known, division.ids, division.lengths, division.weights
    order = sending.keys_order
    if order is not None:
        tensors = [ids] if weights is None else [ids, weights]
        ids, *others = permute_segments(tensors, counts, order)
        weights = others[0] if others else None
        lengths, counts = lengths.index_select(0, sending.keys_order_there), [counts[segment] for segment in order]
    streams = sending.first_stream[-1]
    end = sum(counts[:streams])
    home = _at_home(sending, ids[end:], lengths[streams:], None if weights is None else weights[end:], counts[streams:])
    return Outbound(
        features.stride() if routes.pooled else 1, counts[:streams], sending.ids_to_groups(counts), ids[:end],
        lengths[:streams], None if weights is None else weights[:end], home, sending, sending.columns,
        division.known, division.places, division.given_lengths, division.given_weights,
    )  # fmt: skip


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
        return permute_1d(self.order, torch.cat(sizes), arrived, permuted_lengths_sum=self.ids.shape[0])[1]


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
