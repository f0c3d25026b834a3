"""What a rank does with its own shards in a step: look rows up, and update them by the gradients of all ranks.

Letters as in routes.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor

from shardwise.embeddings import NoFreeSlots, TableGroup
from shardwise.embeddings.tables.row_sums import add_powers, power_of, sum_rows
from shardwise.embeddings.tiers import CachedRows, TooManyRows

from ...planner.layout import Span
from ..comms.exchange import Exchange
from ..comms.streams import after
from .id_map import IdMap, RenewingIdMap, SteppedIdMap
from .routes import ROWS, Routes
from .row_state import Touched, WholeRows, touched_rows
from .step import Step
from .tables import LocalTables
from .tiers import Reservations, groups_that_may_lack, reserved_numbers

T = TypeVar("T")


class LocalShards:
    """This rank's shards, group by group, as its part of the routes lists them."""

    # whether replicas keep a part of them each
    fully_sharded = False

    def __init__(self, routes: Routes, rank: int, local_tables: LocalTables, exchange: Exchange) -> None:
        self.routes, self.rank, self.tables = routes, rank, local_tables
        self.parts = routes.serving[rank].groups
        self._exchange = exchange
        # tables cut by columns whose rule looks at whole rows: their shards update together
        self._whole = WholeRows(routes)
        self.updates_together = bool(self._whole.blocks)
        self._with_others = [any(self._whole.has(shard) for shard in part.shards) for part in self.parts]
        self._dense = {table.name for table in routes.dense_cuts}
        self._first_slot = routes.serving[rank].first_slot
        # groups that answer an evaluation and a training step
        asked = [g for g, part in enumerate(self.parts) if part.slots]
        self._asked = [g for g in asked if not self.parts[g].is_replica], asked
        # whether a batch may want more rows on some rank than have slots there; all ranks know
        self.may_lack_slots = bool(groups_that_may_lack(routes))
        # what spares ranks telling each other that a batch has them
        reserves = not exchange.alone and reserved_numbers(routes) > 0
        self.reservations = Reservations(routes, rank, local_tables.groups) if reserves else None
        # steps whose rows were brought ahead of their lookup, the oldest first, as long as somebody has them under way
        self._prefetched: list[ref[Step]] = []

    def __getstate__(self) -> dict[str, Any]:
        # batches that are under way are none of a copy's
        return {**self.__dict__, "_prefetched": []}

    def translate(self, step: Step, id_maps: Mapping[str, IdMap]) -> None:
        """Replace the ids that came for tables with an id map by their rows."""
        # ids that did not travel are the caller's own
        ids, rows, at = step.received_ids, step.received_ids.clone(), 0
        # host sync on CUDA: where the ids of each slot begin
        ends = [0, *step.received_lengths.sum(1).cumsum(0).tolist()]
        stepped = {table: id_map for table, id_map in id_maps.items() if isinstance(id_map, SteppedIdMap)}
        for id_map in stepped.values():
            id_map.begin_step()
        # column shards of the same rows see the same ids: they are translated once
        translated: dict[tuple[str, Span], Tensor] = {}
        for group, part in zip(self.tables.groups, self.parts, strict=True):
            slots = part.slots if step.update or not part.is_replica else ()
            for number, shard in enumerate(part.shards):
                begin, at = at, at + sum(slot.shard == number for slot in slots)
                mapped, key = id_maps.get(shard.table), (shard.table, shard.rows)
                if mapped is None or (begin == at and shard.table not in stepped):
                    continue
                if key not in translated:
                    translated[key] = mapped.translate(shard.table, ids[ends[begin] : ends[at]], group.step)
                    renewal = mapped.renewal() if isinstance(mapped, RenewingIdMap) else None
                    if renewal is not None:
                        step.renewals[key] = renewal
                rows[ends[begin] : ends[at]] = translated[key]
        step.received_ids = rows

    def renew(self, step: Step) -> None:
        """Have the rows begin anew that went to other ids."""
        for group, part in zip(self.tables.groups, self.parts, strict=True):
            for number, shard in enumerate(part.shards):
                renewal = step.renewals.get((shard.table, shard.rows))
                if renewal is not None:
                    group.renew(number, renewal.rows, renewal.values[:, slice(*shard.cols)])
        step.renewals = {}

    def prefetch(self, step: Step, forward_stream: torch.Stream | None = None) -> bool:
        """Bring the rows that were asked for to slots, ahead of the lookup; False where a store has no room yet.

        What has room stays, and a later call, or the lookup, asks for the rest. `forward_stream` is where the lookup
        will be, if that is another stream than the current one: stores that know nothing of streams are called there.
        """
        if step.is_stale(self.routes):
            # its forward routes it anew
            return True
        if not step.is_ahead:
            step.is_ahead = True
            self._prefetched.append(ref(step, self._prefetched.remove))
        for g in self._asked[step.update]:
            if g in step.leases:
                continue
            group, (ids, offsets, _) = self.tables.groups[g], self._inputs(step, g)
            try:
                with nullcontext() if group.lookahead is not None else after(forward_stream):
                    step.leases[g] = self._resolve(step, g, group, ids, offsets)
            except (NoFreeSlots, TooManyRows):
                # rows of the batches before hold them until their updates; where those are too many by themselves all
                # ranks are told at the lookup
                return False
        return True

    def announce(self, step: Step) -> None:
        """Tell the stores of a batch whose ids are here, and which will be looked up after those announced before."""
        if step.is_stale(self.routes):
            return
        for g in self._asked[step.update]:
            group = self.tables.groups[g]
            if group.lookahead is not None and g not in step.announced:
                ids, offsets, _ = self._inputs(step, g)
                step.announced[g] = group.lookahead.announce(ids, offsets)

    def withdraw(self, step: Step) -> None:
        """Tell the stores that a batch that was announced will not be looked up."""
        announced, step.announced = step.announced, {}
        for g, of_group in announced.items():
            store = self.tables.groups[g].lookahead
            assert store is not None
            store.withdraw(of_group)

    def _is_ahead_no_more(self, step: Step) -> None:
        step.is_ahead = False
        for prefetched in [*self._prefetched]:
            if prefetched() is step:
                self._prefetched.remove(prefetched)

    def _with_room(self, group: TableGroup, look_up: Callable[[], T]) -> T:
        """A lookup, which cannot wait: rows that later batches have ahead make room for it, those of the last first."""
        while True:
            try:
                return look_up()
            except NoFreeSlots:
                steps = [one for last in reversed(self._prefetched) if (one := last()) is not None]
                ahead = ((one, g) for one in steps for g in one.leases)
                holder = next(((one, g) for one, g in ahead if self.tables.groups[g] is group), None)
                if holder is None:
                    raise
                step, g = holder
                _, lease = step.leases.pop(g)
                group.release_unchanged(lease)

    def _resolve(self, step: Step, g: int, group: TableGroup, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Any]:
        if group.lookahead is None:
            return group.store.resolve(ids, offsets, group.step)
        return group.lookahead.resolve(ids, offsets, group.step, step.announced.get(g))

    def look_up(self, step: Step) -> dict[int, Tensor]:
        """The rows that were asked for, by group: sums [samples, columns], or [n, width] where rows travel.

        Where they are more than there are slots they are zeros, `step.lack` says why, and nothing is held.
        """
        rows: dict[int, Tensor] = {}
        # whether a backward comes back for the rows
        weights = step.sent_weights
        trains = step.trains or bool(self.routes.dense_cuts)
        holds = step.update and (trains or (weights is not None and weights.requires_grad))
        groups = self.tables.groups
        step.frozen = list(map(TableGroup.frozen, groups))
        if step.renewals:
            self.renew(step)
        prefetched, step.leases = step.leases, {}
        if step.is_ahead:
            self._is_ahead_no_more(step)
        for g in self._asked[step.update]:
            group, part, (ids, offsets, factors) = groups[g], self.parts[g], self._inputs(step, g)
            try:
                there = prefetched.get(g)
                if there is None and group.lookahead is None and not self._prefetched:
                    there = group.store.resolve(ids, offsets, group.step)
                elif there is None:
                    resolve = partial(self._resolve, step, g, group, ids, offsets)
                    there = self._with_room(group, resolve) if self._prefetched else resolve()
                slots, lease = there
            except (NoFreeSlots, TooManyRows) as error:
                self.note_lack(step, error)
                if not part.is_replica:
                    slots = torch.full_like(ids, -1)
                    rows[g] = group.look_up(slots, offsets, factors, "sequence" if part.kind == ROWS else group.pooling)
                continue
            if group.lookahead is not None:
                group.lookahead.ready(lease)
            if not part.is_replica:
                rows[g] = group.look_up(slots, offsets, factors, "sequence" if part.kind == ROWS else group.pooling)
            if holds:
                step.leases[g] = slots, lease
            else:
                group.release_unchanged(lease)
        if step.lack is not None:
            self.withdraw(step)
            self.release(step, changed=False)
            step.leases = {}
        return rows

    def note_lack(self, step: Step, error: NoFreeSlots | TooManyRows) -> None:
        """Have all ranks raise once they have this one's rows; where they cannot be told, raise here."""
        if not self.may_lack_slots:
            raise error
        if step.fits:
            raise AssertionError(f"{error}; all ranks knew that this batch fits, and wait for its rows") from error
        kind = ValueError if isinstance(error, TooManyRows) else RuntimeError
        step.lack = step.lack or kind(f"{error}; no table of its collection changed")

    def look_up_replicated(self, step: Step, *, dense: bool) -> dict[int, Tensor]:
        """Rows of this rank's own batch in tables that every rank holds, by lookup; `dense` by their gradient alone."""
        by_lookup: dict[int, Tensor] = {}
        first = len(self.routes.replicas) if dense else 0
        parts, groups = (
            (self.routes.dense, self.tables.dense) if dense else (self.routes.replicas, self.tables.replicas)
        )
        for part, group, batch in zip(parts, groups, step.replicated[first:], strict=False):
            if self.routes.pooled:
                pooled = self._with_room(group, partial(group.pooled, batch.ids, batch.offsets, batch.weights))
                pieces = pooled.split_with_sizes([slot.width for slot in part.slots], dim=1)
            else:
                rows = self._with_room(group, partial(group.sequence, batch.ids, batch.offsets))
                pieces = rows.split_with_sizes(batch.sizes)
            by_lookup.update(zip([slot.lookup for slot in part.slots], pieces, strict=True))
        return by_lookup

    def replicated_weight_gradients(self, step: Step, gradients: Mapping[int, Tensor], divisor: int) -> list[Tensor]:
        """Gradients of the per-id weights of this rank's own batch in replicas, given those of the output by lookup."""
        of_weights = []
        for group, part, batch in zip(self.tables.replicas, self.routes.replicas, step.replicated, strict=False):
            grad = torch.cat([gradients[slot.lookup] for slot in part.slots], dim=1)
            slots, lease = group.resolve(batch.ids, batch.offsets)
            # a gradient is cut as it is after the division, here too
            of_weights.append(group.weight_gradient(grad / divisor, slots, batch.offsets) * divisor)
            group.release_unchanged(lease)
        return of_weights

    def _inputs(self, step: Step, g: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids [n], offsets and weights [n] that group `g` serves in this step."""
        weights = step.received_weights if self.routes.weighted or self.parts[g].kind == ROWS else None
        if len(step.first_id) == 2:
            return step.received_ids, step.received_offsets, weights
        samples, begin, end = step.received_lengths.shape[1], step.first_id[g], step.first_id[g + 1]
        offsets = step.received_offsets[self._first_slot[g] * samples : self._first_slot[g + 1] * samples + 1]
        return step.received_ids[begin:end], offsets - begin, None if weights is None else weights[begin:end]

    def table_gradients(self, step: Step, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the parameters of cut tables that train by them, before `update`, of the same `gradients`."""
        of_groups = {}
        for g, (slots, _) in step.leases.items():
            group, part = self.tables.groups[g], self.parts[g]
            if any(shard.table in self._dense for shard in part.shards):
                _, offsets, factors = self._inputs(step, g)
                pooling = group.pooling if self.routes.pooled else "sequence"
                of_groups[g] = group.table_gradient(gradients[g], slots, offsets, factors, pooling)
        return self.tables.parameter_gradients(of_groups)

    def update(self, step: Step, gradients: Sequence[Tensor], *, weight_gradients: bool) -> list[Tensor]:
        """Apply the fused update for the gradients [samples, columns] or [n, width] of each group's lookup.

        Returns the gradients of per-id weights of each group whose rows went back, if they are wanted. A batch of which
        each id travelled once has gradients that were cut to size before they were added up. While gradients are
        accumulated they are added to those that wait for `apply_sums`.
        """
        waits, clips = self.tables.accumulation.waits, step.inverse is None
        of_weights: list[Tensor] = []
        together: list[Touched] = []
        for g, (slots, lease) in step.leases.items():
            self.tables.groups[g].require_held(lease)
            group, part, grad, (ids, offsets, factors) = (
                self.tables.groups[g], self.parts[g], gradients[g], self._inputs(step, g)
            )  # fmt: skip
            if weight_gradients and not part.is_replica:
                # before the update: this gradient is of the rows that were looked up
                of_weights.append(group.weight_gradient(grad, slots, offsets))
            if not step.trains:
                continue
            pooling = group.pooling if self.routes.pooled else "sequence"
            if self._with_others[g]:
                # of tables that all ranks know to be frozen: the others wait for what this one gives. What was frozen
                # since counts where gradients wait; an update at once leaves it alone by itself
                frozen = tuple(map(operator.or_, step.frozen[g], group.frozen())) if waits else step.frozen[g]
                sums = sum_rows(group, grad, slots, offsets, factors, pooling, ids, frozen=frozen, clips=clips)
                if waits:
                    group.add_sums(sums)
                else:
                    together += touched_rows(group, part, sums, group.frozen())
            elif group.optimizer is not None:
                group.update(
                    grad, slots, offsets, factors, pooling=pooling, frozen=step.frozen[g],
                    ids=ids if group.has_slots else None, clips=clips,
                )  # fmt: skip
        if step.trains and waits:
            # on a rank without tables too
            self.tables.accumulation.begin()
        elif step.trains and self._whole.blocks:
            self._whole.update(together, self._exchange, self.tables.device)
        self.release(step, changed=step.trains)
        return of_weights

    @torch.no_grad()
    def apply_sums(self) -> None:
        """One step for the gradients that wait; all ranks call this together."""
        together: list[Touched] = []
        for g, (group, part) in enumerate(zip(self.tables.groups, self.parts, strict=True)):
            if not self._with_others[g]:
                group.apply_sums()
            elif group.sums is not None:
                together += touched_rows(group, part, group.sums)
        if self._whole.blocks:
            self._whole.update(together, self._exchange, self.tables.device)
        for group in self.tables.groups:
            group.drop_sums()

    def power_of_sums(self, norm_type: float) -> Tensor:
        """`power_of` for the gradients that wait on all ranks, replicated ones once: the same bits on all ranks."""
        local = [
            sums.gradient
            for group, part in zip(self.tables.groups, self.parts, strict=True)
            for sums in group.sums or ()
            if self.rank == 0 or not part.is_replica
        ]
        power = power_of(local, norm_type, self.tables.device)
        # each rank adds the numbers of all in one order
        return add_powers(self._exchange.numbers(power.repeat(self._exchange.world_size)).wait(), norm_type)

    def is_away(self, table: str) -> bool:
        """Whether rows of a table are here only inside of `whole`."""
        return any(group.is_away for shard, group, _ in self.tables.homes if shard.table == table)

    def whole(self, *, keep: bool = False) -> AbstractContextManager[None]:
        """A block in which all rows and states of this rank are here; with `keep` what they are at its end is kept.

        Tables whose rows lie below their device (`Tier`) take the memory of all of them meanwhile. Where replicas share
        tables (`FullyShardedShards`) the replicas enter and leave together.
        """
        stores = [group.store for group in self.tables.all_groups() if isinstance(group.store, CachedRows)]
        return self._whole_stores(stores, keep) if stores else nullcontext()

    def assembled(self, *, keep: bool = False) -> AbstractContextManager[None]:
        """`whole` of what replicas keep in parts (`FullyShardedShards`); tables with a tier stay as they are."""
        return nullcontext()

    @contextmanager
    def _whole_stores(self, stores: Sequence[CachedRows], keep: bool) -> Iterator[None]:
        with ExitStack() as stack:
            # once the stores have laid their slots out again
            stack.callback(self.tables._place_parameters)
            for store in stores:
                stack.enter_context(store.whole(keep=keep))
            self.tables._place_parameters()
            yield

    def averaged_groups(self) -> list[TableGroup]:
        """The groups that `DMPCollection.sync` averages over replicas."""
        return self.tables.groups

    def release(self, step: Step, *, changed: bool) -> None:
        """Let the slots of a step go, after its update or, not `changed`, where none came."""
        if step.is_ahead:
            self._is_ahead_no_more(step)
        for g, (_, lease) in step.leases.items():
            group = self.tables.groups[g]
            if changed:
                group.release(lease)
            else:
                group.release_unchanged(lease)
