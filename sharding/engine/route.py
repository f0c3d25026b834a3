"""A batch's ids, lined up for the ranks that serve them; those of tables that are cut by rows are divided first.

The ids of cut lookups are divided among buckets, and how many each bucket gets only their values tell. On the host
sizes are read first, and of those ids alone; on a GPU a batch is divided whole before, so that it is waited for once.
Nothing here waits for a GPU otherwise, or trusts what nobody has looked at yet: ids and lengths may prove to be bad
later.

Letters: W ranks, L lookups, B samples of one rank (1 where nothing is pooled), S streams, N ids, K buckets, C cuts,
which are the columns of what is divided (there all keys of a batch may be).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import sub
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.embeddings.tables.grouped import places_of
from shardwise.embeddings.tables.variable_batch import select_rows
from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged._segments import Beside
from shardwise.kernels import (
    BoundsCheckMode,
    block_bucketize,
    complete_cumsum,
    jagged_unique,
    permute_segments,
    raise_from_guard,
)
from shardwise.kernels.features import bag_of_position

from .routes import Cut, Routes, Stream, is_even
from .settings import IdCheck, id_checks
from .step import Step

# rows of a table whose ids may be any numbers
ANY = torch.iinfo(torch.int64).max


class Cutting:
    """How the columns of a division are divided among buckets: what is no cut lies in bucket 0 as it is."""

    def __init__(self, routes: Routes, columns: Sequence[Cut | None], device: torch.device) -> None:
        # the column of each cut
        at = {cut: column for column, cut in enumerate(columns)}
        self.columns = [at[cut] for cut in routes.cuts]
        borders_of = [(0, ANY) if cut is None else cut.borders for cut in columns]
        self.buckets = max(map(len, borders_of)) - 1
        padded = [borders + borders[-1:] * (self.buckets + 1 - len(borders)) for borders in borders_of]
        blocks = [max(1, borders[1] - borders[0]) for borders in padded]
        self.block_sizes = torch.tensor(blocks, device="cpu").to(device)
        even = all(is_even(borders) for borders in padded)
        self.borders = None if even else [torch.tensor(borders, device="cpu").to(device) for borders in padded]
        # cuts whose rows are averaged in the order of one process: their ids carry the share of each
        ordered = [cut is not None and routes.is_ordered(cut.lookup) for cut in columns]
        shared = [
            cut is not None and is_ordered and routes.table_of(cut.lookup).mean
            for cut, is_ordered in zip(columns, ordered, strict=True)
        ]
        self.averaged = torch.tensor(shared, device="cpu").to(device) if any(shared) else None
        # rows that nobody looks up or pools here travel: where they go is needed then
        self.keeps_places = not routes.pooled or any(ordered)
        self.rows = torch.tensor([borders[-1] for borders in padded], device="cpu").to(device)


@dataclass
class Division:
    """Columns divided among buckets: ids and weights [N] in the order [bucket][column][sample]."""

    # the column of each cut
    columns: Sequence[int]
    # [C, B], as they were given, and the weights [N] of the ids
    given_lengths: Tensor
    given_weights: Tensor | None
    ids: Tensor  # [N]
    lengths: Tensor  # [K * C, B]
    weights: Tensor | None  # [N]
    # [N] where each id lies, in the order in which they were given
    places: Tensor | None
    # [K * C] ids of each, and [K][C] the same once the host has read it
    sizes_there: Tensor
    sizes: list[int] = field(default_factory=list)

    @property
    def has_cuts_alone(self) -> bool:
        """Whether what was divided are the cuts, in their order."""
        return list(self.columns) == list(range(len(self.given_lengths)))

    def ids_of_cut(self, cut: int) -> slice:
        """Which of the ids, as they were given, are of this cut."""
        column, columns = self.columns[cut], len(self.given_lengths)
        begin = sum(sum(self.sizes[before::columns]) for before in range(column))
        return slice(begin, begin + sum(self.sizes[column::columns]))

    def lengths_of_cut(self, cut: int) -> Tensor:
        """The lengths [B] of its bags."""
        return self.given_lengths[self.columns[cut]]

    def counts_of_cut(self, cut: int) -> list[int]:
        """[K] its ids in each bucket."""
        return self.sizes[self.columns[cut] :: len(self.given_lengths)]

    def places_of_cut(self, cut: int) -> Tensor:
        """Where each of its ids lies among those of its buckets, one bucket after another: [n]."""
        assert self.places is not None
        places = self.places[self.ids_of_cut(cut)].long()
        # other cuts lie between the buckets of this one: what is before bucket k, less what of it is of this cut
        columns, own = len(self.given_lengths), self.counts_of_cut(cut)
        starts = list(accumulate(self.sizes, initial=0))[self.columns[cut] : -1 : columns]  # [K]
        shifts = list(map(sub, starts, accumulate(own[:-1], initial=0)))  # [K]
        # not blocking, since a blocking copy from the host would be a host sync
        numbers = torch.tensor([*starts[1:], *shifts], device="cpu").to(places.device, non_blocking=True)
        borders, moved = torch.split(numbers, [len(starts) - 1, len(shifts)])
        return places - moved[torch.searchsorted(borders, places, right=True)]

    def in_buckets(self, cut: int, rows: Tensor) -> Sequence[Tensor]:
        """The rows [n, dim] of its ids, bucket by bucket."""
        moved = torch.empty_like(rows).index_copy_(0, self.places_of_cut(cut), rows)
        return torch.split(moved, self.counts_of_cut(cut))


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
    bucketized = block_bucketize(
        lengths.flatten(), inside, cutting.block_sizes, cutting.buckets, weights=weights,
        block_bucketize_pos=cutting.borders, sequence=cutting.keeps_places or outside is not None,
    )  # fmt: skip
    divided_ids, places = bucketized.ids, bucketized.unbucketize_permute
    if outside is not None:
        assert places is not None and instead is not None
        divided_ids = divided_ids.clone()
        divided_ids[places.long()] = torch.where(outside, instead, divided_ids[places.long()])
    by_segment = bucketized.lengths.view(cutting.buckets * columns, batch)
    return Division(
        cutting.columns, lengths, given, divided_ids, by_segment, bucketized.weights,
        places if cutting.keeps_places else None, by_segment.sum(1),
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
    lookups in tables that every rank holds.
    """

    def __init__(
        self,
        routes: Routes,
        keys: Sequence[str],
        update: bool,
        device: torch.device,
        mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> None:
        """`mode` is what a bad id does where the plan says nothing of the table."""
        self.batch_keys = list(keys)
        self.place_of_lookup = places_of(keys, routes.features)
        streams = [serving.streams_for(update) for serving in routes.serving]
        # [W + 1] where the streams of each rank begin, and where those end whose results come back
        self.first_stream = list(accumulate(map(len, streams), initial=0))
        self.end_returned = [
            first + serving.returned for first, serving in zip(self.first_stream, routes.serving, strict=False)
        ]
        self.streams_to = list(map(len, streams))  # [W]
        sent = [stream for of_rank in streams for stream in of_rank]
        whole = [stream.lookup for stream in sent if stream.cut is None]
        cut = [cut.lookup for cut in routes.cuts]
        replicated = [[slot.lookup for slot in group.slots] for group in (*routes.replicas, *routes.dense)]
        picked = [*whole, *cut, *(n for lookups in replicated for n in lookups)]
        self.picks = [self.place_of_lookup[n] for n in picked]
        self.picked = _order_of(self.picks, len(keys), device)
        self.whole, self.replicated = len(whole), [len(lookups) for lookups in replicated]
        self.cuts = None if not cut else Cutting(routes, routes.cuts, device)
        # segments of whole lookups, then [bucket][cut], in the order of the streams
        numbers = iter(range(len(whole)))
        segments = len(whole) + (0 if self.cuts is None else self.cuts.buckets * len(cut))
        self.order = _order_of(
            [
                next(numbers) if stream.cut is None else len(whole) + stream.bucket * len(cut) + stream.cut
                for stream in sent
            ],
            segments, device,
        )  # fmt: skip
        self._find_checks(routes, keys, device, mode)
        self._find_division_of_keys(routes, len(keys), sent, device)
        # slots of all ranks, group by group: the stream of each, where the slots of each group begin, and which groups
        # are of each rank
        slots = [
            [
                [first + slot.stream for slot in group.slots]
                for group in serving.groups
                if update or not group.is_replica
            ]
            for first, serving in zip(self.first_stream, routes.serving, strict=False)
        ]
        self.slot_streams = [stream for rank in slots for group in rank for stream in group]
        self.group_slots = list(accumulate((len(group) for rank in slots for group in rank), initial=0))
        self.groups_of_rank = [slice(*ends) for ends in pairwise(accumulate(map(len, slots), initial=0))]

    def _find_checks(self, routes: Routes, keys: Sequence[str], device: torch.device, mode: BoundsCheckMode) -> None:
        """What the ids of each key are checked against: the smallest of the tables that they are looked up in."""
        rows = [(table.id_range or ANY) if table.mapped else table.rows for table in routes.tables]
        smallest: dict[int, int] = {}
        for key, (_, table) in zip(self.place_of_lookup, routes.lookups, strict=True):
            smallest[key] = min(smallest.get(key, ANY), rows[table])
        # other keys may hold anything
        self.used = sorted(smallest)
        self.all_used = len(self.used) == len(keys)
        self.rows = [smallest[k] for k in self.used]
        self.checks = id_checks(routes, keys, self.place_of_lookup, rows, mode, device)
        # ids outside their tables may pass, and count as none
        self.lenient = any(check.mode is not BoundsCheckMode.FATAL for check in self.checks)

    def _find_division_of_keys(self, routes: Routes, keys: int, sent: Sequence[Stream], device: torch.device) -> None:
        """How all keys of a batch are divided; `self.keys` is None where one that is cut is looked up otherwise too."""
        at = range(self.whole, self.whole + len(routes.cuts))
        # the key of each cut
        columns = [self.picks[n] for n in at]
        others = [key for n, key in enumerate(self.picks) if n not in at]
        self.keys: Cutting | None = None
        if not columns or len(set(columns)) < len(columns) or not set(columns).isdisjoint(others):
            return
        cut_of = dict(zip(columns, routes.cuts, strict=True))
        self.keys = Cutting(routes, [cut_of.get(key) for key in range(keys)], device)
        # segments [bucket][key] in the order of the streams, then the replicated; what is not cut lies in bucket 0
        whole = iter(self.picks)
        of_streams = [
            next(whole) if stream.cut is None else stream.bucket * keys + columns[stream.cut] for stream in sent
        ]
        self.keys_order = _order_of([*of_streams, *self.picks[at.stop :]], self.keys.buckets * keys, device)


class Order(NamedTuple):
    """Which segments are picked, one after another: on the host, and where the batch is."""

    numbers: list[int]
    there: Tensor


def _order_of(numbers: list[int], segments: int, device: torch.device) -> Order | None:
    """None where all `segments` are picked as they are."""
    if numbers == list(range(segments)):
        return None
    return Order(numbers, torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device))


class Segments(NamedTuple):
    """Ids and weights [N] segment by segment, lengths [segments, B], and on the host how many ids each has."""

    ids: Tensor
    weights: Tensor | None
    lengths: Tensor
    counts: list[int]

    def picked(self, order: Order) -> Segments:
        """Segments of these in another order."""
        ids, *weights = permute_segments(
            [self.ids] if self.weights is None else [self.ids, self.weights], self.counts, order.numbers
        )
        counts = list(map(self.counts.__getitem__, order.numbers))
        return Segments(ids, weights[0] if weights else None, self.lengths.index_select(0, order.there), counts)

    def part(self, first: int, last: int) -> tuple[Tensor, Tensor | None, Tensor, list[int]]:
        """What `Segments` of [first, last) would hold, as views."""
        begin, counts = sum(self.counts[:first]), self.counts[first:last]
        ids = slice(begin, begin + sum(counts))
        weights = None if self.weights is None else self.weights[ids]
        return self.ids[ids], weights, self.lengths[first:last], counts


@dataclass
class ReplicatedBatch:
    """What a rank looks up in tables that all ranks hold: the batch of one group's lookups, and ids of each."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    sizes: list[int]


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


def raise_with_sizes(
    guard: Tensor,
    features: KeyedJaggedTensor,
    picked: KeyedJaggedTensor,
    check: IdCheck,
    divided: Division | None,
) -> None:
    """Raise, or warn, for what a check left in a guard about the `picked` features of a batch on a GPU.

    The sizes of the batch and of what was `divided`, which must be known before its ids leave, come in the same copy.
    """
    beside = Beside(guard if divided is None else torch.cat([guard, divided.sizes_there]))
    try:
        features._sizes(beside)
    finally:
        # a bad offset explains wrong sizes
        numbers = beside.read()
        raise_from_guard(
            guard, picked.values(), picked.offsets(), check.features, check.names,
            fatal=check.mode is BoundsCheckMode.FATAL, numbers=numbers[:3],
        )  # fmt: skip
    if divided is not None:
        divided.sizes = numbers[3:]


def route(
    step: Step,
    routes: Routes,
    weights: Tensor | None,
    *,
    lenient: bool,
    divided: Division | None = None,
    sizes: list[int] | None = None,
) -> None:
    """Line the ids of `step.routed` up for the ranks that serve them; all features have one batch size.

    With `lenient` ids may lie outside their tables: they travel as numbers that lie outside every shard. `divided` is
    what `divide_ahead` found. `sizes` are those of the division, where the host knows them already.
    """
    features, sending = step.routed, step.sending
    step.batch = features.stride() if routes.pooled else 1
    if divided is not None:
        if not divided.sizes:
            beside = Beside(divided.sizes_there)
            # host sync on CUDA: the sizes that leave, and those of the batch
            features._sizes(beside)
            divided.sizes = beside.read()
        step.division, order = divided, sending.keys_order
        segments = Segments(divided.ids, divided.weights, divided.lengths, divided.sizes)
    else:
        # host sync on CUDA: the sizes that leave, read once
        counts = features._sizes()
        ids = features.values()
        if features.capacity() is not None:
            end = sum(counts)
            ids, weights = ids[:end], None if weights is None else weights[:end]
        ids, weights = _numbers(ids, routes, weights, lenient)
        if routes.pooled:
            lengths = features.lengths().view(len(counts), step.batch)
        else:
            lengths = torch.tensor(counts, dtype=torch.int32, device="cpu").view(-1, 1)
            lengths = lengths.to(ids.device, non_blocking=True)
        segments, order = Segments(ids, weights, lengths.to(torch.int32), counts), sending.picked
    if order is not None:
        segments = segments.picked(order)
    step.replicated = []
    # streams, or what they are made of, and then what is looked up here
    at = first = sending.first_stream[-1] if divided is not None else sending.whole + len(routes.cuts)
    for count in sending.replicated:
        ids, weights, lengths, counts = segments.part(first, first + count)
        step.replicated.append(ReplicatedBatch(ids, complete_cumsum(lengths.flatten().long()), weights, counts))
        first += count
    if sending.replicated:
        segments = Segments(*segments.part(0, at))
    if divided is None and sending.cuts is not None:
        segments = _divide_cuts(step, routes, segments, lenient, sizes)
    step.sent_ids, step.sent_weights, step.sent_lengths, step.counts = segments


def _numbers(ids: Tensor, routes: Routes, weights: Tensor | None, lenient: bool) -> tuple[Tensor, Tensor | None]:
    """Ids and weights [N] of a batch as they travel."""
    if routes.id_dtype == torch.int32 and ids.dtype == torch.int64 and lenient:
        # an id that no table has stays one: narrowing must not turn it into another row
        ids = ids.clamp(-1, torch.iinfo(torch.int32).max)
    ids = ids.to(routes.id_dtype)
    if routes.scaled and weights is None:
        weights = torch.ones(ids.shape[0], device=ids.device)
    return ids, None if weights is None else weights.float()


def _divide_cuts(step: Step, routes: Routes, segments: Segments, lenient: bool, sizes: list[int] | None) -> Segments:
    """Segments of whole lookups and of cuts, undivided, as those of the streams in their order."""
    sending = step.sending
    assert sending.cuts is not None
    ids, weights, lengths, counts = segments
    whole, end = sending.whole, sum(counts[: sending.whole])
    of_cuts = None if weights is None else weights[end:]
    step.division = division = divide(sending.cuts, lengths[whole:], ids[end:], of_cuts, routes, lenient)
    # host sync on CUDA: the sizes that leave
    division.sizes = division.sizes_there.tolist() if sizes is None else sizes
    if division.weights is not None:
        assert weights is not None
        weights = torch.cat([weights[:end], division.weights])
    divided = Segments(
        torch.cat([ids[:end], division.ids]), weights, torch.cat([lengths[:whole], division.lengths]),
        [*counts[:whole], *division.sizes],
    )  # fmt: skip
    return divided if sending.order is None else divided.picked(sending.order)


def dedup_ids(padded: KeyedJaggedTensor, sending: Sending) -> tuple[KeyedJaggedTensor, Tensor]:
    """The keys of a batch that are looked up, with each id once a key, as one bag; and where each id lies there."""
    picked = padded if sending.all_used else padded.permute(list(sending.used))
    ids = picked.values()[: sum(picked.length_per_key())]
    ends = torch.tensor(picked.offset_per_key(), device="cpu").to(ids.device)
    unique = jagged_unique(ids, ends, list(sending.rows))
    return KeyedJaggedTensor(picked.keys(), unique.ids, lengths=unique.lengths), unique.inverse


def expand_rows(step: Step, key: str, rows: Tensor) -> Tensor:
    """The row of each id of `key`, from the rows [u, dim] of its distinct ids. Differentiable, in a fixed order."""
    if step.inverse is None:
        return rows
    keys = step.routed.keys()
    sizes, number = dict(zip(step.padded.keys(), step.padded.length_per_key(), strict=True)), keys.index(key)
    begin = sum(sizes[name] for name in keys[:number])
    return select_rows(rows, step.inverse[begin : begin + sizes[key]] - step.routed.offset_per_key()[number])
