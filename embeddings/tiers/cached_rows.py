"""Tables of which some rows are on the device and all others below it: the store of a `TableGroup` with slots.

A row and its optimizer states move together, as one record, and bits move as they are: lookups and updates give the
bits of tables that lie on the device as a whole. Which rows are where is `Residency`'s to decide.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shardwise.kernels import move_rows
from shardwise.kernels.rows import Lookups

from .backing import Backing, HostRecords, records_here, side_by_side
from .counts import CacheCounts
from .curves import TraceCurves
from .fetched import Fetched
from .policies import Policy, lru
from .records import RecordLayout
from .residency import Announced, Lease, Moves, Residency, Span, TooFewSlots, grown_slots
from .transfers import Transfers
from .turns import Turns

if TYPE_CHECKING:
    from ..tables.table_group import TableGroup

# batches in a row that nearly all miss before a warning
_COLD_BATCHES = 100
# rows that are copied at once where all of a table are: a few copies of them are in memory at a time
_CHUNK_BYTES = 16 * 2**20


class TooManyRows(ValueError):
    """A batch alone wants more rows of a table than may be on the device; nothing has changed."""


@runtime_checkable
class MakesRows(Protocol):
    """First values of rows [n, dim], by their numbers [n]; a device that decides by itself has them made in place."""

    def __call__(self, rows: Tensor, /) -> Tensor:
        """Of rows of a table."""
        ...

    def make(
        self, parts: Sequence[Tensor], moves: Moves, first_slot: int, first_row: int, starts: Sequence[float]
    ) -> None:
        """Write those that are fresh into their slots, and what states begin with; the table's begin at first_slot,
        and its rows at first_row. Nothing waits.
        """
        ...


@dataclass(frozen=True)
class CacheSpec:
    """What a cached table is made of.

    Args:
        slots: rows on the device at first.
        max_slots: up to so many they grow where a batch needs more.
        below: (rows, bytes of a record) -> where its records lie.
        fresh: rows [n] of the table -> their initial values [n, dim], where rows are made when they are first needed;
            otherwise all rows are given (`CachedRows.write`).
        share: the part of its table's rows that these are: a `Tier` counts slots of all of them.
    """

    slots: int
    max_slots: int
    below: Callable[[int, int], Backing]
    fresh: Callable[[Tensor], Tensor] | None = None
    share: float = 1.0


@dataclass(eq=False)
class CacheLease:
    """What holds the rows of a batch, and which of all that were resolved it is: loads up to its own are its."""

    number: int
    rows: Lease


@dataclass(eq=False)
class AnnouncedBatch:
    """What a store was told of a batch; it is withdrawn once nobody has this."""

    batch: Announced


class CachedRows:
    """A `RowStore` that brings rows to slots and back. Needs a group whose tables have `slots`.

    Rows in memory that the device reads by itself (backings with `records`) move when a batch is resolved. Others leave
    their slots then, and a thread writes and reads them, in this order, until `ready` puts what came into its slots. On
    CUDA a batch may be resolved on another stream than that of the lookups: both take turns (`Turns`).

    Args:
        specs: one a table, in the order of the group's tables.
        policy: which rows go first, as `Residency`.
    """

    def __init__(self, specs: Sequence[CacheSpec], policy: Policy = lru) -> None:
        self.specs, self.policy = list(specs), policy
        self._counts = [CacheCounts() for _ in specs]
        # of batches whose counts are on their way from the device
        self._counting: deque[Fetched] = deque()
        self.group: TableGroup | None = None
        # of each table, what batches wanted since `trace`; else nothing is gathered
        self.traces: list[TraceCurves] | None = None
        self._traced_from: list[int] = []
        self._transfers = Transfers("rows below")
        # batches that were resolved so far
        self._resolved = 0
        # what that was at the last prefetch without room
        self._stalled = -1
        # of which features and tables `_lookups` are
        self._made_of: tuple[Tensor, list[Span]] | None = None
        # of each table the batches in a row that nearly all missed, and whether that was said
        self._cold, self._warned = [0] * len(specs), [False] * len(specs)

    def attach(self, group: TableGroup) -> None:
        """As `RowStore.attach`."""
        self.group = group
        self._turns = Turns(group.device)
        with self._turns.turn():
            self._attach(group)

    def _attach(self, group: TableGroup) -> None:
        if any(shape.slots is None for shape in group.tables):
            raise ValueError("CachedRows: a table without slots has no cache")
        self.residency = Residency(self._spans(), self.policy, group.device)
        self.layouts = [RecordLayout.of(self._parts(t)) for t in range(len(group.tables))]
        # a shard may have no rows, of which nothing lies anywhere
        self.below: list[Backing] = [HostRecords(1, layout.bytes) for layout in self.layouts]
        for (layout, makes), alike in groupby(self._with_rows(), self._makes):
            tables = list(alike)
            backings = side_by_side(makes, [group.tables[t].rows for t in tables], layout.bytes)
            for t, made in zip(tables, backings, strict=True):
                self.below[t] = made
        for shape, below in zip(group.tables, self.below, strict=True):
            if not isinstance(below, Backing):
                raise TypeError(
                    f"table {shape.name!r}: what its tier has below makes a {type(below).__name__}, which is no"
                    " Backing: it needs read, write, grow and close"
                )
        for counts, layout in zip(self._counts, self.layouts, strict=True):
            counts.record_bytes = layout.bytes

    def _with_rows(self) -> list[int]:
        """Tables of which there are rows, as they lie beside each other."""
        return [t for t in self.residency._order if self.residency.tables[t].rows]

    def _makes(self, table: int) -> tuple[RecordLayout, Callable[[int, int], Backing]]:
        """What a table's records are, and what makes them."""
        return self.layouts[table], self.specs[table].below

    @property
    def counts(self) -> list[CacheCounts]:
        """What the tables did so far."""
        self._take_counts(wait=True)
        return self._counts

    def _spans(self) -> list[Span]:
        group = self.group
        assert group is not None
        return [
            Span(shape.name, group.first_ids[t], shape.rows, group.first_rows[t], shape.resident)
            for t, shape in enumerate(group.tables)
        ]

    def _parts(self, table: int) -> list[Tensor]:
        """What the slots of a table have, in the order of a record."""
        assert self.group is not None
        states = [view for name, view in self.group.state_views(table).items() if name != "step"]
        return [self.group.view(table).detach(), *states]

    # ---- batches

    def announce(self, ids: Tensor, offsets: Tensor) -> AnnouncedBatch:
        """As `LookaheadStore.announce`: ids [N], offsets [F*B + 1]."""
        with self._turns.turn():
            announced = AnnouncedBatch(self.residency.announce_ids(ids, offsets, self._lookups()))
        # a pipeline that is dropped says nothing of the batches that it had under way
        weakref.finalize(announced, _forget, weakref.ref(self), announced.batch).atexit = False
        return announced

    def _lookups(self) -> Lookups:
        """Features by the numbers of rows; made anew where slots or memory have moved."""
        group, residency = self.group, self.residency
        assert group is not None
        features = group.check.features
        if self._made_of is None or self._made_of[0] is not features or self._made_of[1] is not residency.tables:
            place = {t: n for n, t in enumerate(residency._order)}
            tables = [lookup.table for lookup in group.lookups]
            first = [residency.tables[t].first_slot for t in tables]
            numbers = [torch.tensor(some, dtype=torch.int64, device=features.device) for some in (
                first, [place[t] for t in tables])]  # fmt: skip
            self._lookups_now, self._made_of = Lookups(features, *numbers), (features, residency.tables)
        return self._lookups_now

    def withdraw(self, announced: AnnouncedBatch) -> None:
        """As `LookaheadStore.withdraw`."""
        with self._turns.turn():
            self.residency.withdraw(announced.batch)

    @torch.no_grad()
    def resolve(
        self, ids: Tensor, offsets: Tensor, step: Tensor, announced: AnnouncedBatch | None = None
    ) -> tuple[Tensor, CacheLease]:
        """As `RowStore.resolve`: slots [N] of ids [N]; the rows are in their slots once `ready` was called.

        Raises:
            NoFreeSlots: leases hold too many slots.
            TooManyRows: the batch alone wants more rows of a table than it may have slots.
        """
        batch = None if announced is None else announced.batch
        with self._turns.turn():
            if batch is not None:
                self._turns.keep(batch.rows)
            try:
                slots, lease = self.residency.want_ids(ids, offsets, self._lookups(), batch)
            except TooFewSlots as error:
                self._grow(error.needed)
                slots, lease = self.residency.want_ids(ids, offsets, self._lookups(), batch)
            self._resolved += 1
            held = CacheLease(self._resolved, lease)
            # where no backward comes and nobody says so, the rows may go once nobody has what was looked up
            weakref.finalize(held, _abandon, weakref.ref(self), held.number, lease).atexit = False
            self._move(held)
            if self.traces is not None:
                self._trace(lease, self.traces)
            # as they lie in memory: a copy to the host takes no kernel then
            self._counting.append(Fetched(lease.counts.t()))
            self._take_counts(wait=False)
            return slots, held

    def trace(self) -> None:
        """Gather from now on which rows batches want, in 20 bytes a row of the tables: `traces`."""
        self.traces = [TraceCurves(max(1, span.rows)) for span in self.residency.tables]
        self._traced_from = [counts.hits for counts in self.counts]

    def traced(self) -> Iterator[tuple[Span, TraceCurves, int]]:
        """The tables, what batches wanted of them since `trace`, and how many of these rows had a slot."""
        for t, trace in enumerate(self.traces or ()):
            yield self.residency.tables[t], trace, self.counts[t].hits - self._traced_from[t]

    def _trace(self, lease: Lease, traces: Sequence[TraceCurves]) -> None:
        # host sync on CUDA: traces lie on the host
        rows = self.residency.row_of[lease.held()].cpu().sort().values
        for span, trace in zip(self.residency.tables, traces, strict=True):
            trace.add(rows[(rows >= span.first_row) & (rows < span.first_row + span.rows)] - span.first_row)

    def room(self, without: Sequence[CacheLease] = ()) -> int:
        """Rows of each table that may have fewer slots than rows which find some for sure; waits for no device.

        Rows that leases hold count, as many as these hold at most, but for leases `without` which slots are counted.
        """
        held = self.residency.rows_held([lease.rows for lease in without])
        tables = zip(self.specs, self.residency.tables, held, strict=True)
        return min((spec.max_slots - rows for spec, span, rows in tables if spec.max_slots < span.rows), default=0)

    def _grow(self, needed: dict[int, int]) -> None:
        """Give tables the slots that they need.

        Raises:
            NoFreeSlots, TooManyRows: they may not have so many; nothing has changed.
        """
        from ..tables.table_group import NoFreeSlots

        group = self.group
        assert group is not None
        for t, slots in needed.items():
            shape, most = group.tables[t], self.specs[t].max_slots
            if slots <= most:
                continue
            if self.residency.leases:
                # one prefetch, however often it asks
                self._counts[t].stalls += self._stalled != self._resolved
                self._stalled = self._resolved
                raise NoFreeSlots(
                    f"table {shape.name!r}: {slots} slots are needed beside those of batches under way, and it may have"
                    f" {most}: more of them, a smaller prefetch, or torch.no_grad() where no backward comes, as outputs"
                    " that are kept hold their rows until then"
                )
            gib, enough = slots * self.layouts[t].bytes / 2**30, math.ceil(slots / self.specs[t].share)
            raise TooManyRows(
                f"table {shape.name!r}: a batch wants {slots} distinct rows and the table may have {most} of its"
                f" {shape.rows} rows on the device: Tier(max_slots={enough}), {gib:.3g} GiB here, would do, or smaller"
                " batches"
            )
        grown = {t: grown_slots(slots, self.specs[t].max_slots) for t, slots in needed.items()}
        # loads know their slots by the numbers of now, and kernels the memory of now
        self._settle()
        self._turns.synchronize()
        group.resize([grown.get(t, shape.resident) for t, shape in enumerate(group.tables)])
        self.residency.grow(grown)
        self._turns.synchronize()
        for t in grown:
            self._counts[t].grown += 1

    def _move(self, lease: CacheLease) -> None:
        """Have rows leave and come; those that a thread reads are there once `ready` was called."""
        for tables, moves in self._by_table(lease.rows):
            span = self.residency.tables[tables[0]]
            lazy = [t for t in tables if self.specs[t].fresh is not None]
            from_below = torch.where(moves.fresh, -1, moves.loads) if lazy else moves.loads
            if records_here(self.below[tables[0]]) is not None:
                numbers = moves.slots, moves.saves, from_below
                move_rows(*self._memory(tables), *numbers, span.first_slot, span.first_row)
            else:
                self._transfer(lease.number, tables[0], moves._replace(loads=from_below))
            for t in lazy:
                self._begin(t, moves, waits=not lease.rows.most)

    def _by_table(self, lease: Lease) -> Iterator[tuple[list[int], Moves]]:
        """Tables, and moves of which some may be theirs: all of a device that decides by itself, else their own.

        Several tables whose rows one call moves, or one.
        """
        residency, moves = self.residency, lease.moves
        if not moves.loads.shape[0]:
            return
        if lease.most:
            run: list[int] = []
            for t in self._with_rows():
                if run and not self._is_beside(run[-1], t):
                    yield run, moves
                    run = []
                run.append(t)
            yield run, moves
            return
        ends = torch.searchsorted(moves.loads, residency._row_borders).tolist()
        for t, begin, end in zip(residency._order, ends, ends[1:], strict=False):
            if begin < end:
                yield [t], Moves(*(part[begin:end] for part in moves))

    def _is_beside(self, table: int, other: int) -> bool:
        """Whether the other table's records follow on a table's, as its slots do where records are alike."""
        one, two = self.below[table], self.below[other]
        if not (isinstance(one, HostRecords) and isinstance(two, HostRecords) and two.follows(one)):
            return False
        return self.layouts[table] == self.layouts[other]

    def _memory(self, tables: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """What the slots of tables that lie beside each other have, as of one table, and their records."""
        parts, records = self._parts(tables[0]), records_here(self.below[tables[0]])
        assert records is not None
        if len(tables) == 1:
            return parts, records
        first, last = self.residency.tables[tables[0]], self.residency.tables[tables[-1]]
        slots, rows = last.first_slot + last.slots - first.first_slot, last.first_row + last.rows - first.first_row
        parts = [part.as_strided((slots, *part.shape[1:]), part.stride()) for part in parts]
        return parts, records.as_strided((rows, records.shape[1]), records.stride())

    def _transfer(self, number: int, table: int, moves: Moves) -> None:
        """Have a thread write the rows of a table that leave, and read those that come for a batch."""
        pinned = self.residency.device.type == "cuda"
        span, layout, below = self.residency.tables[table], self.layouts[table], self.below[table]
        # host sync on CUDA: files are read and written by rows that the host knows
        leaving, coming = (
            ((some >= span.first_row) & (some < span.first_row + span.rows)).nonzero().squeeze(1)
            for some in (moves.saves, moves.loads)
        )
        if leaving.numel():
            rows, order = (moves.saves[leaving] - span.first_row).sort()
            out = layout.empty(leaving.numel(), pinned=pinned)
            places = torch.arange(leaving.numel(), device=rows.device)
            slots = moves.slots[leaving][order] - span.first_slot
            move_rows(self._parts(table), out, slots, places, torch.full_like(places, -1))
            # host sync on CUDA: as above
            self._transfers.save(span.name, below, rows.cpu(), out)
        if coming.numel():
            records = layout.empty(coming.numel(), pinned=pinned)
            # host sync on CUDA: as above
            rows = (moves.loads[coming] - span.first_row).cpu()
            self._transfers.load(number, table, span.name, below, rows, records, moves.slots[coming])

    def _begin(self, table: int, moves: Moves, *, waits: bool) -> None:
        """Make the rows of a table that have no record, in their slots; it may wait for the device to say which."""
        fresh, span = self.specs[table].fresh, self.residency.tables[table]
        assert self.group is not None
        if isinstance(fresh, MakesRows) and not waits:
            fresh.make(self._parts(table), moves, span.first_slot, span.first_row, self.group.starts())
            return
        # host sync on CUDA: a function of others is given the rows alone
        new = moves.fresh & (moves.loads >= span.first_row) & (moves.loads < span.first_row + span.rows)
        slots, rows = moves.slots[new] - span.first_slot, moves.loads[new] - span.first_row
        self._make_fresh(table, self._parts(table), slots, rows)

    def _make_fresh(self, table: int, parts: Sequence[Tensor], slots: Tensor, rows: Tensor) -> None:
        fresh = self.specs[table].fresh
        if not slots.numel():
            return
        assert fresh is not None, "rows without a record have initial values"
        assert self.group is not None
        values = fresh(rows)
        parts[0][slots] = values.to(parts[0])
        for part, start in zip(parts[1:], self.group.starts(), strict=True):
            part[slots] = start

    def _take_counts(self, *, wait: bool) -> None:
        """Add up the counts of batches that are here, or of all."""
        while self._counting and (wait or self._counting[0].is_here()):
            self._count(self._counting.popleft().get().t())

    def _count(self, moved: Tensor) -> None:
        for t, (hits, missing, fresh, saves) in zip(self.residency._order, moved.tolist(), strict=True):
            counts = self._counts[t]
            counts.batches += 1
            counts.wanted += hits + missing
            counts.hits += hits
            counts.fresh += fresh
            counts.saves += saves
            # until slots are full every row that comes first is a miss
            if 10 * hits >= hits + missing or counts.misses <= self.residency.tables[t].slots:
                self._cold[t] = 0 if missing or hits else self._cold[t]
                continue
            self._cold[t] += 1
            if self._cold[t] == _COLD_BATCHES and not self._warned[t]:
                self._warned[t] = True
                warnings.warn(
                    f"table {self.residency.tables[t].name!r}: of the rows that a batch wants less than 10 % were in"
                    f" its {self.residency.tables[t].slots} slots, for {_COLD_BATCHES} batches in a row: a cache costs"
                    " more than it saves here. More slots would help (Tier(slots=...)), or no tier",
                    stacklevel=2,
                )

    def ready(self, lease: CacheLease) -> None:
        """As `LookaheadStore.ready`.

        Raises:
            OSError, RuntimeError: what lies below could not be read or written; names the table. So does each call
                after it, as rows are lost.
        """
        with self._turns.turn():
            self._put_loads(lease.number)

    @torch.no_grad()
    def _put_loads(self, batch: int | None) -> None:
        """Put into their slots what comes from below for the batches up to this one, or for all."""
        for load in self._transfers.loaded(batch):
            places = torch.arange(load.slots.shape[0], device=load.slots.device)
            slots = load.slots - self.residency.tables[load.table].first_slot
            move_rows(self._parts(load.table), load.records, slots, torch.full_like(places, -1), places)

    def _settle(self) -> None:
        """Have slots and what lies below be as if all moves had been made. Raises as `ready`."""
        self._put_loads(None)
        self._transfers.finish_writes()

    def holds(self, lease: CacheLease) -> bool:
        """As `LookaheadStore.holds`."""
        return lease.rows in self.residency.leases

    def release(self, lease: CacheLease) -> None:
        """As `RowStore.release`."""
        self._release(lease.number, lease.rows, changed=True)

    def release_unchanged(self, lease: CacheLease) -> None:
        """As `LookaheadStore.release_unchanged`."""
        self._release(lease.number, lease.rows, changed=False)

    def _release(self, number: int, lease: Lease, *, changed: bool) -> None:
        if lease not in self.residency.leases:
            return
        with self._turns.turn():
            self._turns.keep(lease.slots, *lease.moves)
            # of a disk that fails whoever wants rows next is told; this call cleans up after a step
            with suppress(Exception):
                self._put_loads(number)
            self.residency.release(lease, changed=changed)

    # ---- whole tables

    def settle(self) -> None:
        """Have all rows that are on their way where they go: who reads or writes rows finds them there."""
        with self._turns.turn():
            self._settle()

    def is_in_use(self) -> bool:
        """As `LookaheadStore.is_in_use`."""
        return bool(self.residency.leases or self.residency._window.batches)

    def follow(self, device: torch.device) -> None:
        """As `LookaheadStore.follow`."""
        assert not self.is_in_use()
        self._follow_residency(device)

    def _follow_residency(self, device: torch.device) -> None:
        """Have slots, and what knows their device, on this one."""
        self.residency.follow(device)
        self._turns = Turns(device)
        for below in self.below:
            if device.type == "cuda" and isinstance(below, HostRecords):
                below.pin()

    def initial_states(self, table: int) -> list[Tensor]:
        """What the optimizer states of a row begin with: [1, dim] or [1] each."""
        assert self.group is not None
        states = self._parts(table)[1:]
        return [
            state.new_full((1, *state.shape[1:]), start)
            for start, state in zip(self.group.starts(), states, strict=True)
        ]

    def chunks(self, table: int) -> Iterator[tuple[int, int]]:
        """Row ranges [begin, end) that cover a table, each of bounded memory."""
        assert self.group is not None
        rows, step = self.group.tables[table].rows, max(1, _CHUNK_BYTES // self.layouts[table].bytes)
        for begin in range(0, rows, step):
            yield begin, min(begin + step, rows)

    @torch.no_grad()
    def read(self, table: int, begin: int, end: int, slots: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Rows [begin, end) of a table as they are now, on the host: [n, dim], then the states [n, dim] or [n].

        `slots` are what the slots of the table have, where they do not lie in the group now.
        """
        with self._turns.turn():
            self._settle()
            return self._read(table, begin, end, slots)

    def _read(self, table: int, begin: int, end: int, slots: Sequence[Tensor] | None) -> list[Tensor]:
        span, layout = self.residency.tables[table], self.layouts[table]
        where = self.residency.slot_of[span.first_row + begin : span.first_row + end].long()
        records = layout.empty(end - begin)
        stored = (where == -1).nonzero().squeeze(1).cpu()
        if stored.numel():
            self._read_below(table, stored + begin, stored, records)
        fresh = (where == -2).nonzero().squeeze(1)
        if fresh.numel():
            self._make_fresh(table, layout.views(records), fresh.cpu(), fresh + begin)
        here = (where >= 0).nonzero().squeeze(1)
        if here.numel():
            nothing = torch.full_like(here, -1)
            move_rows(slots or self._parts(table), records, where[here] - span.first_slot, here, nothing)
        return layout.views(records)

    def _read_below(self, table: int, rows: Tensor, places: Tensor, records: Tensor) -> None:
        below = self.below[table]
        held = records_here(below)
        if held is not None:
            records[places] = held[rows]
        elif places.numel() == records.shape[0]:
            below.read(rows, records)
        else:
            part = self.layouts[table].empty(rows.numel())
            below.read(rows, part)
            records[places] = part

    @torch.no_grad()
    def write(
        self, table: int, begin: int, parts: Sequence[Tensor | None], slots: Sequence[Tensor] | None = None
    ) -> None:
        """Replace rows from `begin` on: weights [n, dim] and states, in the order of `read`; None stays.

        `slots` as there.
        """
        count = next(part.shape[0] for part in parts if part is not None)
        rows = torch.arange(begin, begin + count)
        self.write_rows(table, rows, parts, slots)

    @torch.no_grad()
    def write_rows(
        self, table: int, rows: Tensor, parts: Sequence[Tensor | None], slots: Sequence[Tensor] | None = None
    ) -> None:
        """Replace distinct rows [n] of a table, ascending, on the device and below. Other arguments as `write`."""
        with self._turns.turn():
            self._settle()
            self._write_rows(table, rows, parts, slots)

    def _write_rows(
        self, table: int, rows: Tensor, parts: Sequence[Tensor | None], slots: Sequence[Tensor] | None
    ) -> None:
        span, layout, below = self.residency.tables[table], self.layouts[table], self.below[table]
        rows = rows.to(self.residency.device)
        where = self.residency.slot_of[span.first_row + rows].long()
        here = (where >= 0).nonzero().squeeze(1)
        for own, given in zip(slots or self._parts(table), parts, strict=True):
            if given is not None and here.numel():
                own[where[here] - span.first_slot] = given[here.to(given.device)].to(own)
        self.residency.dirty[where[here]] = True
        away = (where < 0).nonzero().squeeze(1)
        if not away.numel():
            return
        records = layout.empty(away.numel())
        views, absent = layout.views(records), rows[away].cpu()
        fresh = (where[away] == -2).cpu()
        if any(part is None for part in parts):
            if bool((~fresh).any()):
                self._read_below(table, absent[~fresh], (~fresh).nonzero().squeeze(1), records)
            self._make_fresh(table, views, fresh.nonzero().squeeze(1), absent[fresh])
        for view, given in zip(views, parts, strict=True):
            if given is not None:
                view.copy_(given[away.to(given.device)])
        held = records_here(below)
        if held is not None:
            held[absent] = records
        else:
            below.write(absent, records)
        self.residency.slot_of[span.first_row + rows[away]] = -1

    @contextmanager
    def whole(self, *, keep: bool = False) -> Iterator[None]:
        """A block in which all rows of the group lie in its buffer, by their numbers; with `keep` changes stay.

        Takes the memory of all of them.
        """
        group = self.group
        assert group is not None
        if not group.is_away:
            # inside of another block
            yield
            return
        # while slots are where loads expect them
        with self._turns.turn():
            self._settle()
        count, shapes, memory = len(group.tables), group.tables, (group.flat, group.states)
        slots = [self._parts(t) for t in range(count)]
        group.lay_out_anew([replace(shape, slots=None) for shape in shapes])
        try:
            for t in range(count):
                rows = self._parts(t)
                for begin, end in self.chunks(t):
                    for target, part in zip(rows, self.read(t, begin, end, slots[t]), strict=True):
                        target[begin:end] = part
            yield
            if keep:
                for t in range(count):
                    rows = self._parts(t)
                    for begin, end in self.chunks(t):
                        self.write(t, begin, [part[begin:end] for part in rows], slots[t])
        finally:
            group.lay_out_anew(shapes, *memory)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: batches that are under way, which hold rows here, are none of a copy's."""
        if "residency" not in self.__dict__:
            return self.__dict__
        assert self.group is not None
        self.settle()
        self._take_counts(wait=True)
        # gradients that wait are copied with their group
        kept = [lease.rows for lease in self.group._leases]
        # what lies below first: it says why it cannot be pickled
        state = {"below": self.below, **self.__dict__, "residency": self.residency.without_batches(kept)}
        # of threads and streams
        del state["_transfers"], state["_turns"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._transfers = Transfers("rows below")
        if "residency" in state:
            # a copy may be on another device
            self._follow_residency(self.residency.slot_of.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedRows:
        probe = torch.empty(0)
        if copy.deepcopy(probe) is probe:
            assert self.group is not None
            raise TypeError(
                f"tables {[table.name for table in self.group.tables]} have tiers: two models cannot share the rows of"
                " a cache, as a copy to the same device would: copy.deepcopy inside of sharded_model_copy('cpu') makes"
                " one with rows of its own"
            )
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def close(self) -> None:
        """Let go what lies below."""
        self._transfers.close()
        for below in self.below:
            below.close()


def _abandon(store: weakref.ref[CachedRows], number: int, lease: Lease) -> None:
    """Give back what a lookup held whose backward never came: a step that failed, or none that trains."""
    cached = store()
    if cached is not None:
        cached._turns.soon(partial(cached._release, number, lease, changed=False))


def _forget(store: weakref.ref[CachedRows], batch: Announced) -> None:
    """Withdraw a batch that nobody has under way any more."""
    cached = store()
    if cached is not None and batch.is_pending:
        cached._turns.soon(partial(cached.residency.withdraw, batch))
