"""What a rank does with its own shards in a step: look rows up and send them off, take their gradients and update.

Letters as in routes.py. A flight has what belongs to one step; two may be under way at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings import NoFreeSlots
from shardwise.embeddings.tables.row_sums import add_powers, power_of, sum_rows
from shardwise.jagged import KeyedJaggedTensor

from ...planner.layout import Span
from ..comms.codecs import Codec
from ..comms.exchange import Exchange, Pending
from ..comms.header import Head
from .flags import is_wrong
from .held import Held
from .id_map import IdMap, Renewal, RenewingIdMap
from .results import by_slot, by_source
from .route import Inbound, Outbound
from .routes import HOST, POOLED, ROWS, Group, Routes
from .row_state import Touched, WholeRows, touched_rows


@dataclass
class Batch:
    """A batch as it was given, padded to one batch size, and as it was routed: that, or each id once."""

    given: KeyedJaggedTensor
    padded: KeyedJaggedTensor
    routed: KeyedJaggedTensor
    # where each id of the one lies in the other, if ids travel once
    inverse: Tensor | None = None


@dataclass
class InFlight:
    """A batch between `begin` and the end of its backward."""

    outbound: Outbound
    inbound: Inbound
    heads: list[Head]
    # whether a backward may follow: replicated tables then know every rank's ids
    update: bool
    batch: Batch
    # whether its backward trains tables: not one of a module in eval()
    trains: bool = True
    # of each group the tables that were frozen at the lookup
    frozen: list[tuple[bool, ...]] = field(default_factory=list)
    # rows on their way, and how many numbers come from each rank
    pending: Pending | None = None
    result_sizes: list[int] = field(default_factory=list)
    # rows that were found for each group, until all ranks are known to have sent theirs as they are
    found: dict[int, Tensor] = field(default_factory=dict)
    # for each group the slots of its ids, and what holds them until the update
    leases: list[tuple[Tensor, Any] | None] = field(default_factory=list)
    # rows of tables with an id map that begin anew before the lookup, by table and rows of the shard
    renewals: dict[tuple[str, Span], Renewal] = field(default_factory=dict)


class Owner:
    """This rank's shards; `local` is the exchange among the ranks of its host, where sums are added there first."""

    def __init__(
        self, routes: Routes, rank: int, held: Held, exchange: Exchange, local: Exchange | None, codec: Codec | None
    ) -> None:
        self.routes, self.rank, self.held, self._codec = routes, rank, held, codec
        self.parts = routes.serving[rank].groups
        self._exchange, self._local = exchange, local
        # tables cut by columns whose rule looks at whole rows: their shards update together
        self._whole = WholeRows(routes)
        mine = routes.serving[rank]
        counterparts = [routes.are_counterparts(rank, r) for r in range(routes.world_size)]
        # columns of sums that come back from each rank, and rows of which groups; columns of gradients that come
        self._columns = [
            serving.sums + serving.host_sums * near for serving, near in zip(routes.serving, counterparts, strict=True)
        ]
        self._row_groups = [(r, serving.row_groups) for r, serving in enumerate(routes.serving) if serving.row_groups]
        self._gradient_columns = [mine.gradient_columns + mine.host_sums * near for near in counterparts]
        # slots of each group
        self._first_slot = list(accumulate((len(part.slots) for part in self.parts), initial=0))

    @property
    def updates_together(self) -> bool:
        """Whether shards of different ranks update rows together."""
        return bool(self._whole.blocks)

    def translate(self, flight: InFlight, id_maps: Mapping[str, IdMap]) -> None:
        """Replace the ids that came for tables with an id map by their rows."""
        if not id_maps:
            return
        # ids that did not travel are the caller's own
        inbound, rows, at = flight.inbound, flight.inbound.ids.clone(), 0
        # host sync on CUDA: where the ids of each slot begin
        ends = [0, *inbound.lengths.sum(1).cumsum(0).tolist()]
        # column shards of the same rows see the same ids: they are translated once
        found: dict[tuple[str, Span], Tensor] = {}
        for group, part in zip(self.held.groups, self.parts, strict=True):
            slots = part.slots if flight.update or not part.is_replica else ()
            for number, shard in enumerate(part.shards):
                begin, at = at, at + sum(slot.shard == number for slot in slots)
                one = id_maps.get(shard.table)
                if one is None or begin == at:
                    continue
                mine, key = inbound.ids[ends[begin] : ends[at]], (shard.table, shard.rows)
                if key not in found:
                    found[key] = one.translate(shard.table, mine, group.step)
                    renewal = one.renewal() if isinstance(one, RenewingIdMap) else None
                    if renewal is not None:
                        flight.renewals[key] = renewal
                rows[ends[begin] : ends[at]] = found[key]
        flight.inbound = replace(inbound, ids=rows)

    def renew(self, flight: InFlight) -> None:
        """Have the rows begin anew that went to other ids."""
        if not flight.renewals:
            return
        for group, part in zip(self.held.groups, self.parts, strict=True):
            for number, shard in enumerate(part.shards):
                one = flight.renewals.get((shard.table, shard.rows))
                if one is not None:
                    group.renew(number, one.rows, one.values[:, slice(*shard.cols)])
        flight.renewals = {}

    def prefetch(self, flight: InFlight) -> bool:
        """Bring the rows that were asked for to slots, ahead of the lookup; False where a store has no room yet."""
        if flight.leases:
            return True
        for g, (group, part) in enumerate(zip(self.held.groups, self.parts, strict=True)):
            lease = None
            if part.slots and (flight.update or not part.is_replica):
                ids, offsets, _ = self._inputs(flight, g)
                try:
                    lease = group.store.resolve(ids, offsets, group.step)
                except NoFreeSlots:
                    # rows of the batch before hold them: the lookup asks again, after its update
                    self.release(flight)
                    flight.leases = []
                    return False
            flight.leases.append(lease)
        return True

    def look_up(self, flight: InFlight) -> None:
        """Find the rows that were asked for and send them off."""
        found: dict[int, Tensor] = {}
        given = flight.outbound.weights
        # whether a backward comes back for the rows
        holds = flight.update and (flight.trains or (given is not None and given.requires_grad))
        flight.frozen = [group.frozen() for group in self.held.groups]
        self.renew(flight)
        ahead, flight.leases = flight.leases, []
        for g, (group, part) in enumerate(zip(self.held.groups, self.parts, strict=True)):
            if not part.slots or (part.is_replica and not flight.update):
                flight.leases.append(None)
                continue
            ids, offsets, weights = self._inputs(flight, g)
            slots, lease = (ahead[g] if ahead else None) or group.store.resolve(ids, offsets, group.step)
            if not part.is_replica:
                found[g] = group.look_up(slots, offsets, weights, self._pooling(g, forward=True))
            flight.leases.append((slots, lease) if holds else None)
            if not holds:
                group.store.release(lease)
        sent, sizes = self._results(flight, found)
        flag = None
        if self._codec is not None:
            flag, flight.found = is_wrong(None, sent, self._codec, checked=False), found
        flight.result_sizes = self._result_sizes(flight)
        flight.pending = self._exchange.rows(sent, sizes, flight.result_sizes, codec=self._codec, flag=flag)

    def overflow(self, flight: InFlight) -> int:
        """One more than the first lookup with a number that the codec cannot carry; host syncs on CUDA."""
        codec, suspects = self._codec, []
        assert codec is not None
        for g, rows in flight.found.items():
            slots = self.parts[g].slots
            if self._pooling(g, forward=True) == "sequence":
                pieces = torch.split(rows, self._bags(flight, g).sum(1).tolist())
            else:
                pieces = torch.split(rows, [slot.width for slot in slots], dim=1)
            suspects += [s.lookup for s, piece in zip(slots, pieces, strict=True) if codec.overflows(piece.flatten())]
            # what each rank of a host can carry may be too much together
            suspects += [slot.lookup for slot in slots if self.parts[g].kind == HOST]
        # values of several lookups may share a scale that none of them overflows alone
        return min(suspects, default=0) + 1

    def _pooling(self, g: int, *, forward: bool) -> str:
        group, rows = self.held.groups[g], self.parts[g].kind == ROWS
        if not self.routes.pooled or (rows and forward):
            return "sequence"
        return group.pooling

    def _inputs(self, flight: InFlight, g: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and weights that group `g` serves in this step."""
        inbound, part = flight.inbound, self.parts[g]
        weighted = self.routes.weighted or (part.kind == ROWS and inbound.weights is not None)
        weights = inbound.weights if weighted and self.routes.pooled else None
        if len(inbound.first_id) == 2:
            return inbound.ids, inbound.offsets, weights
        samples, begin, end = inbound.lengths.shape[1], inbound.first_id[g], inbound.first_id[g + 1]
        offsets = inbound.offsets[self._first_slot[g] * samples : self._first_slot[g + 1] * samples + 1]
        return inbound.ids[begin:end], offsets - begin, None if weights is None else weights[begin:end]

    def _bags(self, flight: InFlight, g: int) -> Tensor:
        """Lengths [slots of the group, samples of all ranks]."""
        return flight.inbound.lengths[self._first_slot[g] : self._first_slot[g + 1]]

    def _ids_of_sources(self, flight: InFlight, g: int) -> Tensor:
        """Ids of each slot from each source, [slots of the group, W]."""
        lengths = self._bags(flight, g)
        if not self.routes.pooled:
            return lengths
        return torch.stack([part.sum(1) for part in torch.split(lengths, flight.inbound.batches, dim=1)], dim=1)

    def _results(self, flight: InFlight, found: Mapping[int, Tensor]) -> tuple[Tensor, list[int]]:
        """What goes to each rank, flat, one after another, and its sizes."""
        batches = flight.inbound.batches
        parts: list[list[Tensor]] = [[] for _ in batches]
        sums = [found[g] for g in found if self.parts[g].kind == POOLED]
        if sums:
            table = sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)
            if len(found) == len(sums) and self._local is None:
                return table.flatten(), [batch * table.shape[1] for batch in batches]
            for mine, block in zip(parts, torch.split(table, batches), strict=True):
                mine.append(block.flatten())
        if self._local is not None:
            host = [found[g] for g in found if self.parts[g].kind == HOST]
            table = torch.cat(host, dim=1) if host else self._nothing(sum(batches), 0)
            for rank, block in self._add_in_host(table, batches):
                parts[rank].append(block.flatten())
        for g in found:
            if self.parts[g].kind == ROWS:
                ids_from = [head.sizes.ids_to_groups[g] for head in flight.heads]
                sizes = self._ids_of_sources(flight, g)
                for mine, block in zip(parts, by_source(found[g], sizes, ids_from), strict=True):
                    mine.append(block)
        flat = [tensor for mine in parts for tensor in mine]
        return torch.cat(flat) if flat else self._nothing(0), [sum(t.numel() for t in mine) for mine in parts]

    def _result_sizes(self, flight: InFlight) -> list[int]:
        """Numbers that come back from each rank: its sums, those of its host through it, and rows."""
        out = flight.outbound
        sizes = [out.batch * columns for columns in self._columns]
        for rank, groups in self._row_groups:
            sizes[rank] += sum([out.ids_to_groups[rank][g] * width for g, width in groups])
        return sizes

    def _add_in_host(self, table: Tensor, batches: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Sums over this host's ranks of [samples, columns], for each source that this one answers: [B, columns]."""
        assert self._local is not None
        each, me, world = self.routes.local_size, self.rank % self.routes.local_size, len(batches)
        columns, blocks = table.shape[1], torch.split(table, list(batches))
        answers = [range(m, world, each) for m in range(each)]
        sizes = [sum(batches[m::each]) * columns for m in range(each)]
        sent = torch.cat([blocks[rank].flatten() for mine in answers for rank in mine])
        parts = self._local.rows(sent, sizes, [sizes[me]] * each).wait().view(each, sum(batches[me::each]), columns)
        total = parts[0]
        # in the order of the ranks
        for part in parts[1:]:
            total = total + part
        yield from zip(answers[me], torch.split(total, list(batches[me::each])), strict=True)

    def _give_to_host(self, mine: Tensor, batches: Sequence[int]) -> Tensor:
        """The transpose: gradients of the sources it answers, [their samples, columns], become those of all samples."""
        assert self._local is not None
        each, columns = self.routes.local_size, mine.shape[1]
        sizes = [sum(batches[m::each]) * columns for m in range(each)]
        given = self._local.rows_transpose(mine.flatten().repeat(each), [mine.numel()] * each, sizes)
        parts = torch.split(given.wait(), sizes)
        blocks: dict[int, Tensor] = {}
        for m, part in enumerate(parts):
            of_sources = part.view(-1, columns) if columns else self._nothing(sum(batches[m::each]), 0)
            blocks.update(
                zip(range(m, len(batches), each), torch.split(of_sources, list(batches[m::each])), strict=True)
            )
        return torch.cat([blocks[rank] for rank in range(len(batches))])

    def gradient_sizes(self, flight: InFlight) -> list[int]:
        """Numbers of the gradient that come from each rank."""
        if not self.routes.pooled:
            return [
                sum(count * part.row_width for count, part in zip(head.sizes.ids_to_groups, self.parts, strict=False))
                for head in flight.heads
            ]
        columns = self._gradient_columns
        return [batch * width for batch, width in zip(flight.inbound.batches, columns, strict=True)]

    def update(self, flight: InFlight, received: Tensor, *, weight_gradients: bool) -> list[Tensor] | None:
        """Apply the fused update for the gradients of all ranks. Gradients of per-id weights for each, if wanted.

        A batch of which each id travelled once has gradients that were cut to size before they were added up. While
        gradients are accumulated they are added to those that wait for `apply_sums`.
        """
        gradients, waits = self._gradients(flight, received), self.held.accumulation.waits
        clips = flight.batch.inverse is None
        found: list[Tensor] = []
        together: list[Touched] = []
        for g, (group, part) in enumerate(zip(self.held.groups, self.parts, strict=True)):
            lease = flight.leases[g]
            if lease is None:
                continue
            ids, offsets, weights = self._inputs(flight, g)
            grad = gradients[g]
            if weight_gradients and not part.is_replica:
                # before the update: this gradient is of the rows that were looked up
                found.append(group.weight_gradient(grad, lease[0], offsets))
            if not flight.trains:
                continue
            pooling = self._pooling(g, forward=False)
            if self._is_whole(part):
                # of tables that all ranks know to be frozen: the others wait for what this one gives. What was frozen
                # since counts where gradients wait; an update at once leaves it alone by itself
                frozen = tuple(map(operator.or_, flight.frozen[g], group.frozen())) if waits else flight.frozen[g]
                sums = sum_rows(group, grad, lease[0], offsets, weights, pooling, ids, frozen=frozen, clips=clips)
                if waits:
                    group.add_sums(sums)
                else:
                    together += touched_rows(group, part, sums, group.frozen())
            elif group.optimizer is not None:
                group.update(
                    grad, lease[0], offsets, weights, pooling=pooling, frozen=flight.frozen[g],
                    ids=ids if group.has_slots else None, clips=clips,
                )  # fmt: skip
        if flight.trains and waits:
            # on a rank without tables too
            self.held.accumulation.begin()
        elif flight.trains and self._whole.blocks:
            self._whole.update(together, self._exchange, self.held.device)
        self.release(flight)
        return self._weights_by_source(flight, found) if weight_gradients else None

    def _is_whole(self, part: Group) -> bool:
        """Whether a group's rows are updated together with shards of other ranks."""
        return bool(self._whole.blocks) and any(self._whole.has(shard) for shard in part.shards)

    @torch.no_grad()
    def apply_sums(self) -> None:
        """One step for the gradients that wait; all ranks call this together."""
        together: list[Touched] = []
        for group, part in zip(self.held.groups, self.parts, strict=True):
            if not self._is_whole(part):
                group.apply_sums()
            elif group.sums is not None:
                together += touched_rows(group, part, group.sums)
        if self._whole.blocks:
            self._whole.update(together, self._exchange, self.held.device)
        for group in self.held.groups:
            group.drop_sums()

    def power_of_sums(self, norm_type: float) -> Tensor:
        """`power_of` for the gradients that wait on all ranks, replicated ones once: the same bits on all ranks."""
        mine = [
            one.gradient
            for group, part in zip(self.held.groups, self.parts, strict=True)
            for one in group.sums or ()
            if self.rank == 0 or not part.is_replica
        ]
        power = power_of(mine, norm_type, self.held.device)
        # each rank adds the numbers of all in one order
        return add_powers(self._exchange.numbers(power.repeat(self._exchange.world_size)).wait(), norm_type)

    def release(self, flight: InFlight) -> None:
        """Let the slots of a step go, after its update or where that is left out."""
        # those of a batch that was resolved in part are fewer
        for group, lease in zip(self.held.groups, flight.leases, strict=False):
            if lease is not None:
                group.release(lease[1])

    def _gradients(self, flight: InFlight, received: Tensor) -> list[Tensor]:
        """The gradient of each group's lookup."""
        sizes, batches = self.gradient_sizes(flight), flight.inbound.batches
        if not self.routes.pooled:
            return self._row_gradients(flight, torch.split(received, sizes))
        columns, host = self.routes.serving[self.rank].gradient_columns, self.routes.serving[self.rank].host_sums
        if self._local is None:
            mine = received.view(sum(batches), columns)
            host_columns = self._nothing(0)
        else:
            blocks = torch.split(received, sizes)
            mine = torch.cat([block[: batch * columns] for block, batch in zip(blocks, batches, strict=True)])
            mine = mine.view(sum(batches), columns)
            answered = [r for r in range(len(batches)) if self.routes.are_counterparts(self.rank, r)]
            rest = torch.cat([blocks[r][batches[r] * columns :] for r in answered])
            host_columns = self._give_to_host(rest.view(sum(batches[r] for r in answered), host), batches)
        found, at = [], {True: 0, False: 0}
        for part in self.parts:
            is_host = part.kind == HOST
            begin, at[is_host] = at[is_host], at[is_host] + part.width
            found.append((host_columns if is_host else mine)[:, begin : begin + part.width])
        return found

    def _row_gradients(self, flight: InFlight, blocks: Sequence[Tensor]) -> list[Tensor]:
        by_group: list[list[Tensor]] = [[] for _ in self.parts]
        for head, block in zip(flight.heads, blocks, strict=True):
            sizes = [n * part.row_width for n, part in zip(head.sizes.ids_to_groups, self.parts, strict=False)]
            for mine, piece in zip(by_group, torch.split(block, sizes), strict=True):
                mine.append(piece)
        return [
            by_slot(mine, self._ids_of_sources(flight, g), part.row_width) if part.slots else mine[0]
            for g, (mine, part) in enumerate(zip(by_group, self.parts, strict=True))
        ]

    def _weights_by_source(self, flight: InFlight, found: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the weights of each source's ids, flat, in the order in which those came."""
        inbound = flight.inbound
        came, at = sum(head.sizes.ids for head in flight.heads), torch.cat([*found, self._nothing(0)])
        grads = self._nothing(came).zero_()
        # an id that several column shards of this rank looked up has a gradient from each
        places = inbound.places(came)[: at.shape[0]]
        grads.index_put_((places,), at, accumulate=True)
        blocks = torch.split(grads, [head.sizes.ids for head in flight.heads])
        return [block[: head.sizes.returned] for block, head in zip(blocks, flight.heads, strict=True)]

    def _nothing(self, *shape: int) -> Tensor:
        return torch.empty(*shape, device=self.held.device)
