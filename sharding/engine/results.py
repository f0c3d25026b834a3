"""What travels back to those who asked, and how a batch's output is put together from it. Gradients go the other way.

From one rank to another a block of fp32 numbers: the sums of bags [B, columns]; those that were added inside the host
[B, columns], between ranks of equal number on their hosts; rows of ids [n, width], group by group. An output column
has one source for each range of rows that holds it; they are added in the order of the ranks.

Letters as in routes.py; P columns of sums that a rank returns, H those that its host has added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels import (
    Feature,
    Segment,
    complete_cumsum,
    flatten_segments,
    pack_features,
    permute_1d,
    pooled_lookup,
)
from shardwise.kernels.huge_pages import in_huge_pages

from ..comms.exchange import Buffers
from .route import Outbound
from .routes import HOST, POOLED, REPLICA, ROWS, Routes, Serving, Slot, Stream

# a matrix of columns: sums of a rank, or of a host through it; rows pooled here, or tables at home, by lookup
Key = tuple[str, int]


class Run(NamedTuple):
    """Columns [low, high) of the output are columns from `first` on of the matrix `key`."""

    low: int
    high: int
    key: Key
    first: int


class Columns:
    """Where the output columns of a pooled lookup come from, on rank `me`: made once."""

    def __init__(self, routes: Routes, me: int) -> None:
        # tables trained by their gradient are looked up apart from all this
        self.widths = [0 if n in routes.dense_lookups else dim for n, dim in enumerate(routes.dims)]
        self.starts = list(accumulate(self.widths, initial=0))
        sources: dict[tuple[int, int], list[Run]] = {}
        for key, slots in _matrices(routes, me):
            at = 0
            for lookup, low, high in slots:
                begin = self.starts[lookup] + low
                sources.setdefault((begin, begin + high - low), []).append(Run(begin, begin + high - low, key, at))
                at += high - low
        by_layer: list[list[Run]] = []
        for _, runs in sorted(sources.items()):
            for layer, run in enumerate(runs):
                by_layer += [[]] * (layer == len(by_layer))
                by_layer[layer] = [*by_layer[layer], run]
        self.layers = [list(_merged(runs)) for runs in by_layer]
        first_cut = {cut.lookup: number for number, cut in reversed(list(enumerate(routes.cuts)))}
        # lookups that are pooled here, and averaged ones whose sums are divided here; and one of their cuts
        self.ordered = {n: cut for n, cut in first_cut.items() if routes.is_ordered(n)}
        self.divided = {n: cut for n, cut in first_cut.items() if routes.table_of(n).mean and n not in self.ordered}
        # what their gradients are cut to, if they are
        specs = {n: routes.table_of(n).optimizer for n in self.divided}
        self._most = {n: spec.max_gradient for n, spec in specs.items() if spec is not None}
        self.sums = [serving.sums for serving in routes.serving]
        self.host_sums = [
            serving.host_sums if routes.are_counterparts(rank, me) else 0 for rank, serving in enumerate(routes.serving)
        ]
        self._wanted = [self._gradient_runs(serving, POOLED, ROWS, REPLICA) for serving in routes.serving]
        self._wanted_by_host = [
            self._gradient_runs(serving, HOST) if routes.are_counterparts(rank, me) else []
            for rank, serving in enumerate(routes.serving)
        ]

    def _gradient_runs(self, serving: Serving, *kinds: str) -> list[tuple[int, int]]:
        """Columns of the output that slots of these kinds want the gradient of, in the order of the slots."""
        runs, at = [], 0
        for group in serving.groups:
            for slot in group.slots if group.kind in kinds else ():
                begin = self.starts[slot.lookup] + slot.columns[0]
                runs.append(Run(at, at + slot.width, (POOLED, 0), begin))
                at += slot.width
        return [(run.first, run.first + run.high - run.low) for run in _merged(runs)]

    def cut(self, blocks: Sequence[Tensor], batch: int) -> tuple[dict[Key, Tensor], list[Tensor]]:
        """The matrices of sums in what came from each rank, and what is left of it."""
        matrices, rest = {}, []
        for rank, (block, sums, host) in enumerate(zip(blocks, self.sums, self.host_sums, strict=True)):
            if sums:
                matrices[POOLED, rank] = block[: batch * sums].view(batch, sums)
            if host:
                matrices[HOST, rank] = block[batch * sums : batch * (sums + host)].view(batch, host)
            if self.ordered:
                rest.append(block[batch * (sums + host) :])
        return matrices, rest

    def put_together(self, matrices: Mapping[Key, Tensor], out: Outbound) -> Tensor:
        """The output [B, columns]."""
        if not self.layers:
            return torch.empty(out.batch, 0, device=out.ids.device)
        first, *others = self.layers
        pieces = [matrices[run.key][:, run.first : run.first + run.high - run.low] for run in first]
        # a single piece is a view of what was received
        if len(pieces) == 1:
            found = pieces[0]
        else:
            found = in_huge_pages(torch.empty(out.batch, self.starts[-1], device=out.ids.device))
            torch.cat(pieces, dim=1, out=found)
        for layer in others:
            for run in layer:
                found[:, run.low : run.high] += matrices[run.key][:, run.first : run.first + run.high - run.low]
        if self.divided:
            self._divide(found, out)
        return found

    def _divide(self, values: Tensor, out: Outbound) -> None:
        """Divide the columns of averaged lookups by their bags' lengths, in place."""
        for lookup, cut in self.divided.items():
            self.of_lookup(values, lookup).div_(out.lengths_of_cut(cut).clamp(min=1)[:, None])

    def of_lookup(self, values: Tensor, lookup: int) -> Tensor:
        """A lookup's columns, as a view."""
        return values[:, self.starts[lookup] : self.starts[lookup + 1]]

    def divided_gradient(self, grad: Tensor, out: Outbound, divisor: int, *, checked: bool) -> Tensor:
        """The gradient of the sums, given that of the output; it will be divided by `divisor`.

        An optimizer cuts the gradient of the average, so it is cut here: those who hold rows see it divided.
        """
        if not self.divided:
            return grad
        grad = grad.clone()
        for lookup, most in self._most.items():
            if most is not None:
                mine = self.of_lookup(grad, lookup)
                mine.copy_(cut_gradient(mine, most * divisor, checked=checked))
        self._divide(grad, out)
        return grad

    def gradients(self, grad: Tensor, buffers: Buffers) -> tuple[Tensor, list[int]]:
        """The columns of `grad` [B, columns] that each rank wants, for itself and for its host: flat, and its sizes."""
        batch = grad.shape[0]
        runs = [*zip(self._wanted, self._wanted_by_host, strict=True)]
        widths = [[sum(high - low for low, high in part) for part in both] for both in runs]
        sizes = [batch * sum(both) for both in widths]
        sent = buffers.take(sum(sizes), grad.device)
        at = 0
        for both, of_both in zip(runs, widths, strict=True):
            for part, width in zip(both, of_both, strict=True):
                if width:
                    out = sent[at : at + batch * width].view(batch, width)
                    torch.cat([grad[:, low:high] for low, high in part], dim=1, out=out)
                    at += batch * width
        return sent, sizes


def cut_gradient(grad: Tensor, most: float, *, checked: bool) -> Tensor:
    """A gradient whose numbers are cut to +-`most`; where it is `checked` later, those that are not finite stay."""
    found = grad.clamp(-most, most)
    return torch.where(grad.isfinite(), found, grad) if checked else found


def _matrices(routes: Routes, me: int) -> Iterator[tuple[Key, list[tuple[int, int, int]]]]:
    """Each matrix and its columns as (lookup, first and last column of it), in the order in which they are added."""
    for rank, serving in enumerate(routes.serving):
        yield (POOLED, rank), _slots(serving, POOLED)
        if routes.are_counterparts(rank, me):
            yield (HOST, rank), _slots(serving, HOST)
    ordered = sorted({cut.lookup for cut in routes.cuts if routes.is_ordered(cut.lookup)})
    for lookup in ordered:
        yield (ROWS, lookup), [(lookup, 0, routes.table_of(lookup).dim)]
    for group in routes.replicas:
        for slot in group.slots:
            yield (REPLICA, slot.lookup), [(slot.lookup, *slot.columns)]


def _slots(serving: Serving, kind: str) -> list[tuple[int, int, int]]:
    slots = [slot for group in serving.groups if group.kind == kind for slot in group.slots]
    return [(slot.lookup, *slot.columns) for slot in slots]


def _merged(runs: Sequence[Run]) -> Iterator[Run]:
    """Neighbours on both sides as one."""
    last: Run | None = None
    for run in runs:
        if last is None:
            last = run
        elif (last.key, last.high, last.first + last.high - last.low) == (run.key, run.low, run.first):
            last = last._replace(high=run.high)
        else:
            yield last
            last = run
    if last is not None:
        yield last


class Rows:
    """How rows of ids come together, lookup by lookup: made once.

    The result has the rows of all `lookups`, in that order.
    """

    def __init__(self, routes: Routes) -> None:
        self._serving = routes.serving
        exchanged = [n for n in range(len(routes.lookups)) if n not in routes.dense_lookups]
        slots = [
            (slot, serving.streams[slot.stream])
            for serving in routes.serving
            for group in serving.groups
            for slot in group.slots
        ]
        asked = [stream.lookup for _, stream in slots]
        whole = all(slot.columns == (0, routes.dims[slot.lookup]) for slot, _ in slots) and not routes.replicas
        # what comes is the result, or is it once it is brought from the order of buckets to that of the ids
        self._as_they_come = whole and not routes.cuts and len(set(asked)) == len(asked)
        buckets = [(stream.bucket, stream.cut) for _, stream in slots if stream.cut is not None]
        in_order = buckets == sorted(buckets) and len(buckets) == len(slots) > 0
        self._by_bucket = whole and in_order and [cut.lookup for cut in routes.cuts] == exchanged
        self.lookups = asked if self._as_they_come else exchanged
        self._width = slots[0][0].width if slots else 0

    def put_together(self, out: Outbound, received: Tensor, sizes: list[int], home: Mapping[int, Tensor]) -> Tensor:
        """Rows of all lookups [n, dim] from the flat rows of all ranks, and of tables at home by lookup."""
        if not self.lookups:
            return torch.empty(0, 0, device=out.ids.device)
        if self._as_they_come or (self._by_bucket and out.divides_cuts_alone):
            rows = received.view(-1, self._width)
            return rows if out.places is None else rows.index_select(0, out.places)
        found = {**self.by_lookup(out, torch.split(received, sizes)), **home}
        return torch.cat([found[n] for n in self.lookups])

    def by_lookup(self, out: Outbound, received: Sequence[Tensor]) -> dict[int, Tensor]:
        """Rows [n, dim] of each lookup, in the order of its ids, from the flat rows of each rank."""
        strips: dict[int, dict[tuple[int, int], list[tuple[int, int | None, Tensor]]]] = {}
        for rank, rows in enumerate(received):
            at = 0
            for slot, stream, count in self._segments(out, rank, (ROWS,)):
                mine = rows[at : at + count * slot.width].view(count, slot.width)
                strips.setdefault(stream.lookup, {}).setdefault(slot.columns, []).append(
                    (stream.bucket, stream.cut, mine)
                )
                at += count * slot.width
        found = {}
        for lookup, by_columns in strips.items():
            pieces = []
            for _, buckets in sorted(by_columns.items()):
                buckets.sort(key=lambda one: one[0])
                rows = torch.cat([mine for _, _, mine in buckets])
                cut = buckets[0][1]
                pieces.append(rows if cut is None else rows.index_select(0, _places_of(out, cut)))
            found[lookup] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return found

    def gradients(self, out: Outbound, grad: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """What each rank gets, flat, of the gradient of `put_together`; `counts` are the ids of each of `lookups`."""
        by_bucket = self._by_bucket and out.divides_cuts_alone
        if by_bucket:
            assert out.places is not None
            grad = torch.empty_like(grad).index_copy_(0, out.places.long(), grad)
        if self._as_they_come or by_bucket:
            sizes = [sum(of_rank) * self._width for of_rank in out.ids_to_groups]
            return list(torch.split(grad.reshape(-1), sizes))
        of_lookup = dict(zip(self.lookups, torch.split(grad, list(counts)), strict=True))
        in_buckets: dict[int, list[Tensor]] = {}
        blocks = []
        for rank in range(len(self._serving)):
            pieces = []
            for slot, stream, _ in self._segments(out, rank, (ROWS, REPLICA)):
                rows = of_lookup[stream.lookup]
                if stream.cut is not None:
                    if stream.cut not in in_buckets:
                        in_buckets[stream.cut] = _divided(out, stream.cut, rows)
                    rows = in_buckets[stream.cut][stream.bucket]
                pieces.append(rows[:, slice(*slot.columns)].reshape(-1))
            blocks.append(torch.cat(pieces) if pieces else grad.new_empty(0))
        return blocks

    def _segments(self, out: Outbound, rank: int, kinds: Sequence[str]) -> Iterator[tuple[Slot, Stream, int]]:
        """Slots of a rank's groups of these kinds, with their streams and ids."""
        serving, first = self._serving[rank], out.sending.first_stream[rank]
        for group in serving.groups:
            for slot in group.slots if group.kind in kinds else ():
                yield slot, serving.streams[slot.stream], out.counts[first + slot.stream]


def pool_in_order(out: Outbound, routes: Routes, cut: int, rows: Tensor) -> Tensor:
    """Rows [n, dim] of a cut lookup's ids, pooled in the order of their bags: [B, dim]."""
    n, dim = rows.shape
    lengths = out.lengths_of_cut(cut)
    if n == 0:
        return rows.new_zeros(lengths.shape[0], dim)
    table = Feature(0, n, dim, 0, routes.table_of(routes.cuts[cut].lookup).mean)
    weights = None if out.cut_weights is None else out.cut_weights[out.ids_of_cut(cut)]
    # not blocking, since a blocking copy from the host would be a host sync
    features = pack_features([table], torch.device("cpu")).to(rows.device, non_blocking=True)
    return pooled_lookup(
        rows.flatten(), torch.arange(n, device=rows.device), complete_cumsum(lengths.long()), weights, features, [dim],
        flatten_segments([Segment(dim, 0, n, 0)]), "mean" if table.mean else "sum",
    )  # fmt: skip


def _places_of(out: Outbound, cut: int) -> Tensor:
    """Where each id of a cut lookup lies among those of its buckets, one bucket after another."""
    assert out.places is not None
    places = out.places[out.ids_of_cut(cut)].long()
    # other cuts lie between the buckets of this one
    before, shifts, firsts, at, column = 0, [], [], 0, out.columns[cut]
    for counts in out.cut_counts:
        first = at + sum(counts[:column])
        firsts.append(first)
        shifts.append(first - before)
        before += counts[column]
        at += sum(counts)
    # not blocking, since a blocking copy from the host would be a host sync
    numbers = torch.tensor([*firsts[1:], *shifts], device="cpu").to(places.device, non_blocking=True)
    borders, moved = torch.split(numbers, [len(firsts) - 1, len(shifts)])
    return places - moved[torch.searchsorted(borders, places, right=True)]


def _divided(out: Outbound, cut: int, rows: Tensor) -> list[Tensor]:
    """The rows [n, dim] of a cut lookup's ids, bucket by bucket."""
    moved = torch.empty_like(rows).index_copy_(0, _places_of(out, cut), rows)
    return list(torch.split(moved, out.counts_of_cut(cut)))


def by_source(rows: Tensor, sizes: Tensor, ids_from: Sequence[int]) -> list[Tensor]:
    """Rows [n, width] that lie [slot][source] as flat blocks, one for each source, [slot] within.

    sizes [slots, W] ids of each; `ids_from[r]` of them are of rank r.
    """
    slots, world = sizes.shape
    if world > 1 and slots > 1:
        order = torch.arange(slots * world, device=rows.device).view(slots, world).t().flatten()
        _, rows, _ = permute_1d(order, sizes.flatten().long(), rows, permuted_lengths_sum=rows.shape[0])
    return [block.flatten() for block in torch.split(rows, list(ids_from))]


def by_slot(blocks: Sequence[Tensor], sizes: Tensor, width: int) -> Tensor:
    """The transpose of `by_source`: flat blocks of each source as rows [n, width] that lie [slot][source]."""
    slots, world = sizes.shape
    rows = torch.cat(list(blocks)).view(-1, width)
    if world > 1 and slots > 1:
        order = torch.arange(slots * world, device=rows.device).view(world, slots).t().flatten()
        _, rows, _ = permute_1d(order, sizes.t().flatten().long(), rows, permuted_lengths_sum=rows.shape[0])
    return rows
