"""Which rows of cached tables are on the device, which go when others come, and what is known of their next use.

Decisions alone: no row is moved here, so that a simulation of a cache is the cache itself over no storage. Rows and
slots are counted over all tables of a cache: R rows, S slots; table t has rows [first_row, first_row + rows) and slots
[first_slot, first_slot + slots). Exact: every row may lie in every slot of its table, so there are no conflict misses.

A batch wants distinct rows. Those without a slot take the slots with the lowest keys of their table that no lease
holds. Keys: empty slots first; then rows that no announced batch needs, by the policy's score; then rows by their next
use, the furthest first; among equals the lowest slot. With all batches announced that is Belady's choice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.kernels import rows as steps
from shardwise.kernels.features import Feature, pack_features
from shardwise.kernels.rows import (
    BELOW,
    EMPTY_KEYS,
    FRESH,
    NEXT_USES,
    SCORES,
    Found,
    Lookups,
    Marks,
    Scratch,
    SlotTables,
    Victims,
)

from .fetched import Fetched
from .policies import Policy, scoring_of

# no announced batch needs the row
_NONE = -1


class TooFewSlots(RuntimeError):
    """A batch wants more rows of a table than it has slots beside those that leases hold; nothing has changed.

    Attributes:
        needed: by number of table the slots that would do, of those that have too few.
    """

    def __init__(self, needed: dict[int, int]) -> None:
        super().__init__(f"too few slots: {needed} are needed, by number of table")
        self.needed = needed


def grown_slots(needed: int, most: int) -> int:
    """Slots of a table that needs more, and may have `most`: an eighth beyond what it needs.

    Batches of one size want about as many rows; the largest of them should not have the table copied again.
    """
    return min(needed + needed // 8, most)


@dataclass(frozen=True)
class Span:
    """A table of a cache: its rows and slots among those of all tables."""

    name: str
    first_row: int
    rows: int
    first_slot: int
    slots: int


class Moves(NamedTuple):
    """What a batch moves: the row `loads` [M] into `slots` [M], after `saves` [M] left it (-1: nothing to be saved).

    Rows come in ascending order; `fresh` [M] ones have no record below. A device that decides by itself has room for
    more: behind the last row slots, saves and loads are -1.
    """

    slots: Tensor
    saves: Tensor
    loads: Tensor
    fresh: Tensor


@dataclass(eq=False)
class Announced:
    """A batch that will come: its distinct rows [U], and where they stand among all that was announced.

    A device that decides by itself has -1 behind them, and `counts`, how many rows of each table they are.
    """

    number: int
    rows: Tensor
    begin: int
    is_pending: bool = True
    counts: Fetched | None = None

    @property
    def end(self) -> int:
        """Behind the last of its rows."""
        return self.begin + self.rows.shape[0]


@dataclass(eq=False)
class Lease:
    """Slots [U] that a batch holds until it is released; counts [T, 4] are what it did to each table: rows that hit and
    that were missing, of these the fresh ones, and rows that were saved.

    A device that decides by itself has -1 among the slots and keeps the counts; `most` are by table the slots at most.
    """

    slots: Tensor
    moves: Moves
    counts: Tensor
    most: Sequence[int] = ()

    def held(self) -> Tensor:
        """The slots, without what is none."""
        # host sync on CUDA
        return self.slots[self.slots >= 0]


@dataclass
class _Window:
    """Batches that were announced and have not come yet, and the next use of each of their rows."""

    batches: list[Announced] = field(default_factory=list)
    announced: int = 0
    # rows announced so far
    entries: int = 0
    # those that will not come, whose rows still name them as their next use
    withdrawn: list[Announced] = field(default_factory=list)


class Residency:
    """Where the rows of some tables are.

    Attributes:
        slot_of: [R] int32, BELOW and FRESH of rows without a slot.
        row_of: [S] int64, -1 of empty slots.
        held: [S] int32, the leases of each slot.
        dirty: [S] bool, whether a row is another than its record below.
        batch: batches that came so far.
    """

    def __init__(self, tables: Sequence[Span], policy: Policy, device: torch.device | None = None) -> None:
        self.tables, self.policy = list(tables), policy
        self.device = torch.device("cpu") if device is None else device
        rows = max((table.first_row + table.rows for table in tables), default=0)
        self.slot_of = torch.full((rows,), FRESH, dtype=torch.int32, device=self.device)
        self.batch = 0
        # keys of scores count from here
        self._base = 0
        self._scratch, self._victims = Scratch(), Victims()
        # of a device that decides by itself, once a batch came
        self._marks: Marks | None = None
        # those that are held
        self.leases: list[Lease] = []
        self._place_slots()
        self._window = _Window()
        # [R] where a row stands among all that was announced, the last time; made with the first announcement
        self._latest: Tensor | None = None
        # next use of what stands there, as a ring
        self._next = torch.full((1,), _NONE, dtype=torch.int32, device=self.device)

    def _place_slots(self) -> None:
        slots = max((table.first_slot + table.slots for table in self.tables), default=0)
        by_slot = sorted(range(len(self.tables)), key=lambda t: (self.tables[t].first_slot, self.tables[t].slots))
        by_row = sorted(range(len(self.tables)), key=lambda t: (self.tables[t].first_row, self.tables[t].rows))
        assert by_slot == by_row, "tables lie in one order by rows and by slots"
        # numbers of tables in the order in which they lie, and their borders
        self._order = by_row
        self._row_borders = torch.tensor(
            [0, *(self.tables[t].first_row + self.tables[t].rows for t in by_row)], device=self.device
        )
        self._slot_borders = torch.tensor(
            [0, *(self.tables[t].first_slot + self.tables[t].slots for t in by_row)], device=self.device
        )
        self.row_of = torch.full((slots,), -1, dtype=torch.int64, device=self.device)
        self.held = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.dirty = torch.zeros(slots, dtype=torch.bool, device=self.device)
        # whether a slot's row has a record below
        self._stored = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self._score = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._key = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self._victims.clear(self._slot_borders.tolist())
        self._marks = None

    @property
    def _state(self) -> SlotTables:
        # made for each batch: tensors are other ones once slots grew or the device changed
        return SlotTables(
            self.slot_of, self.row_of, self.held, self.dirty, self._stored, self._score, self._key, self._row_borders,
            self._slot_borders,
        )  # fmt: skip

    # ---- batches

    def announce(self, rows: Tensor) -> Announced:
        """Say that a batch will come that wants distinct `rows` [U], ascending; batches come in this order."""
        self._forget_withdrawn()
        return self._announce(rows, self._places()[rows])

    def announce_ids(self, ids: Tensor, offsets: Tensor, lookups: Lookups) -> Announced:
        """As `announce`, of a batch's ids [N], offsets [F*B + 1]."""
        self._forget_withdrawn()
        if self._state.loops is None:
            rows, counts = steps.announced_rows(self._state, self._kept_marks(), ids, offsets, lookups)
            # what was announced before is looked up where rows are linked
            announced = self._announce(rows, rows)
            announced.counts = Fetched(counts)
            return announced
        begin = self._window.entries
        return self._announce(*steps.distinct_rows(self._state, ids, offsets, lookups, self._places(), begin))

    def _places(self) -> Tensor:
        if self._latest is None:
            self._latest = torch.full_like(self.slot_of, -1, dtype=torch.int64)
        return self._latest

    def _announce(self, rows: Tensor, before: Tensor) -> Announced:
        window = self._window
        announced = Announced(window.announced, rows, window.entries)
        window.announced, window.entries = window.announced + 1, announced.end
        window.batches.append(announced)
        pending = announced.end - window.batches[0].begin
        if pending > self._next.shape[0]:
            self._grow_ring(pending)
        self._link(announced, before)
        return announced

    def _link(self, announced: Announced, before: Tensor) -> None:
        """Make the batch the next use of what its rows were announced for before, or of the slots where they are."""
        first = self._window.batches[0].begin
        steps.link(
            self._state, announced.rows, before, self._places(), self._next, self._victims,
            number=announced.number, begin=announced.begin, first=first,
        )  # fmt: skip

    def _grow_ring(self, pending: int) -> None:
        old, self._next = self._next, self._next.new_full((2 * pending,), _NONE)
        first = self._window.batches[0].begin
        places = torch.arange(first, self._window.batches[-1].begin, device=self.device)
        self._next[places % self._next.shape[0]] = old[places % old.shape[0]]

    def withdraw(self, announced: Announced) -> None:
        """Say that a batch that was announced will not come."""
        if announced.is_pending:
            announced.is_pending = False
            self._window.batches.remove(announced)
            # all at once, before anybody asks: a pipeline that is reset withdraws all that it announced
            self._window.withdrawn.append(announced)

    def _forget_withdrawn(self) -> None:
        """Link the batches that will come anew, where some between them will not."""
        window = self._window
        if not window.withdrawn:
            return
        assert self._latest is not None
        for batch in (*window.withdrawn, *window.batches):
            self._latest[batch.rows] = -1
            slots = self.slot_of[batch.rows].long()
            slots = slots[slots >= 0]
            self._key[slots] = steps.key_of(self._score[slots], self._base)
        window.withdrawn = []
        self._victims.clear()
        for batch in window.batches:
            self._link(batch, self._latest[batch.rows])

    def want(self, rows: Tensor, announced: Announced | None = None) -> Lease:
        """Give slots to the distinct `rows` [U] of a batch, ascending, and hold them.

        Raises:
            TooFewSlots: leases hold too many slots of a table.
        """
        if self._state.loops is None:
            # all tables as one, by the numbers of their rows
            features = pack_features([Feature(0, self.slot_of.shape[0], 1, 0)], self.device)
            nothing = features.new_zeros(1)
            offsets = torch.tensor([0, rows.shape[0]], device=self.device)
            return self._hold_on_device(rows, offsets, Lookups(features, nothing, nothing), announced)[1]
        return self._hold(steps.find_rows(self._state, rows), announced)

    def want_ids(
        self, ids: Tensor, offsets: Tensor, lookups: Lookups, announced: Announced | None = None
    ) -> tuple[Tensor, Lease]:
        """As `want`, of a batch's ids [N], offsets [F*B + 1]; and the slot [N] of each id within its table.

        -1 is the slot of what lies in no table.
        """
        if self._state.loops is None:
            return self._hold_on_device(ids, offsets, lookups, announced)
        found, places = steps.find_ids(self._state, ids, offsets, lookups, self._scratch)
        lease = self._hold(found, announced)
        if found.missing.shape[0]:
            places = steps.place(self._state, found, places, offsets, lookups)
        return places, lease

    def _hold(self, found: Found, announced: Announced | None) -> Lease:
        comes = self._has_come(announced)
        hits = found.hits
        scoring, most = scoring_of(self.policy, self.batch + 1, self._base)
        given = None
        if most is None:
            try:
                given = self._scores(hits, found.missing.shape[0])
            except BaseException:
                steps.forget(self._state, found)
                raise
            most = int(given.max()) if given.shape[0] else 0
        moves, counts = self._make_room(found)
        slots = torch.cat([hits, moves.slots]) if moves.slots.shape[0] else hits.clone()
        self.batch += 1
        steps.use(self._state, hits, slots, scoring, given, keeps=bool(self._window.batches) and not comes)
        lease = Lease(slots, moves, torch.cat([found.counts, counts], dim=1))
        return self._held(lease, announced, most, comes=comes)

    def _has_come(self, announced: Announced | None) -> bool:
        """Whether a batch is the next of those that were announced."""
        window = self._window
        if announced is not None and announced.is_pending and announced is not window.batches[0]:
            # those before it have not come, and may: to the window this is a batch that nobody announced
            self.withdraw(announced)
        self._forget_withdrawn()
        return announced is not None and announced.is_pending

    def _held(self, lease: Lease, announced: Announced | None, most: int, *, comes: bool) -> Lease:
        """The lease, once keys are those after its batch; scores are `most` at most."""
        if most - self._base > SCORES:
            self._rebase(most - SCORES // 2)
        if announced is not None and comes:
            announced.is_pending = False
            self._window.batches.pop(0)
            steps.expect(self._state, announced.rows, announced.begin, self._next)
        elif self._window.batches and lease.moves.loads.shape[0]:
            self._expect(lease.moves)
        self.leases.append(lease)
        return lease

    # ---- a device that decides by itself

    def _kept_marks(self) -> Marks:
        if self._marks is None:
            self._marks = Marks(self._state)
        return self._marks

    def _hold_on_device(
        self, ids: Tensor, offsets: Tensor, lookups: Lookups, announced: Announced | None
    ) -> tuple[Tensor, Lease]:
        """As `want_ids`; nobody waits for the device where the batch fits for sure."""
        comes, marks = self._has_come(announced), self._kept_marks()
        most_rows = self._most_rows(ids, offsets, lookups, announced)
        scoring, most = scoring_of(self.policy, self.batch + 1, self._base)
        hits = given = None
        if most is None:
            # host sync on CUDA: a function of users is asked before anything moves, and may give any scores
            hits, missing = steps.find_wanted(self._state, marks, ids, offsets, lookups)
            given = self._scores(hits, missing)
            most = int(given.max()) if given.shape[0] else 0
        self.batch += 1
        keeps = bool(self._window.batches) and not comes
        wanted = steps.want(self._state, marks, ids, offsets, lookups, scoring, keeps=keeps)
        moves = Moves(wanted.slots[ids.shape[0] :], wanted.saves, wanted.rows, wanted.fresh)
        lease = Lease(wanted.slots, moves, wanted.counts.t(), most_rows)
        if hits is not None and given is not None:
            slots = torch.cat([hits, moves.slots[moves.slots >= 0]])
            keys = steps.key_of(given, scoring.base)
            if keeps:
                keys = torch.where(self._key[slots] > SCORES + EMPTY_KEYS, self._key[slots], keys)
            self._score[slots], self._key[slots] = given, keys
        return wanted.places, self._held(lease, announced, most, comes=comes)

    def _most_rows(self, ids: Tensor, offsets: Tensor, lookups: Lookups, announced: Announced | None) -> Sequence[int]:
        """By table, in their order, the distinct rows that a batch wants at most; there is room for them.

        Raises:
            TooFewSlots: as `want`.
        """
        tables = [self.tables[t] for t in self._order]

        def fits(rows: Sequence[int]) -> bool:
            held = [sum(some) for some in zip(*(lease.most for lease in self.leases), strict=True)] or [0] * len(rows)
            return all(
                table.slots >= min(table.rows, before + more)
                for table, before, more in zip(tables, held, rows, strict=True)
            )

        most = [min(ids.shape[0], table.rows) for table in tables]
        if not fits(most) and announced is not None and announced.counts is not None:
            most = announced.counts.get().tolist()
        if fits(most):
            return most
        # host sync on CUDA: where so many rows might not fit they are counted
        most, needed = steps.count_wanted(self._state, self._kept_marks(), ids, offsets, lookups)
        lacking = {t: slots for t, slots in zip(self._order, needed, strict=True) if slots > self.tables[t].slots}
        if lacking:
            raise TooFewSlots(lacking)
        return most

    def _scores(self, hits: Tensor, missing: int) -> Tensor:
        """What the policy gives the slots [H] of a batch, and as many as are missing, before anything moves: it may be
        a user's, and fail."""
        before = torch.cat([self._score[hits], self._score.new_zeros(missing)])
        given: object = self.policy(before, self.batch + 1)
        if not isinstance(given, Tensor) or given.shape != before.shape or given.dtype.is_floating_point:
            what = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
            raise TypeError(
                f"tables {[table.name for table in self.tables]}: their policy must give integer scores"
                f" {list(before.shape)}, as many as it was given, not {what}"
            )
        return given.to(self._score)

    def _make_room(self, found: Found) -> tuple[Moves, Tensor]:
        """What moves, and fresh rows and saves [T, 2] by table."""
        missing = found.missing
        if not missing.shape[0]:
            return Moves(missing, missing, missing, missing.bool()), torch.zeros_like(found.counts)
        counts = found.counts[:, 1].contiguous()
        picked = self._victims.pick(self._state, counts, missing.shape[0])
        if int(picked.min()) < 0:
            needed = self._needed(counts)
            steps.forget(self._state, found)
            self._victims.clear()
            raise TooFewSlots(needed)
        saves, fresh, moved = steps.take(self._state, missing, picked)
        return Moves(picked, saves, missing, fresh), moved

    def _needed(self, missing: Tensor) -> dict[int, int]:
        """Slots that would do, of tables that have too few: those that are held and those of missing rows."""
        borders = self._slot_borders.tolist()
        needed = {}
        for n, t in enumerate(self._order):
            held = int((self.held[borders[n] : borders[n + 1]] > 0).sum()) + int(missing[n])
            if held > self.tables[t].slots:
                needed[t] = held
        return needed

    def _rebase(self, base: int) -> None:
        """Have keys of scores count from `base` on: they would pass those of next uses."""
        self._base = base
        scored = (self._key > 0) & (self._key <= SCORES + EMPTY_KEYS)
        self._key.copy_(torch.where(scored, steps.key_of(self._score, base), self._key))
        self._victims.clear()

    def _expect(self, moves: Moves) -> None:
        """Have rows that came for a batch that nobody announced know which of those that were needs them first."""
        # host sync on CUDA, below too: such batches are rare
        waits = (moves.loads >= 0) & (self._places()[moves.loads] >= self._window.batches[0].begin)
        rows, slots = moves.loads[waits], moves.slots[waits]
        for batch in reversed(self._window.batches) if bool(waits.any()) else ():
            self._key[slots[torch.isin(rows, batch.rows)]] = NEXT_USES - batch.number

    def release(self, lease: Lease, *, changed: bool) -> None:
        """Let the slots of a batch go; whether their rows may have `changed`."""
        if lease not in self.leases:
            return
        self.leases.remove(lease)
        steps.release(self._state, lease.slots, self._victims, changed=changed)

    # ---- what others ask

    def rows_held(self, without: Sequence[Lease] = ()) -> list[int]:
        """By table the rows that leases but those `without` hold, at most: one of several counts for each.

        Waits for no device.
        """
        leases = [lease for lease in self.leases if lease not in without]
        of_leases = [lease.most or lease.counts[:, :2].sum(1).tolist() for lease in leases]
        held = map(sum, zip(*of_leases, strict=True)) if of_leases else [0] * len(self.tables)
        by_number = dict(zip(self._order, held, strict=True))
        return [by_number[t] for t in range(len(self.tables))]

    def grow(self, slots: dict[int, int]) -> None:
        """Give tables, by number, more slots at their end; rows stay in theirs."""
        tables = list(self.tables)
        sizes = [slots.get(t, table.slots) for t, table in enumerate(tables)]
        borders = self._slot_borders
        kept = (self.row_of, self.held, self.dirty, self._stored, self._score, self._key)
        first, grown = 0, list(tables)
        for t in self._order:
            grown[t] = Span(tables[t].name, tables[t].first_row, tables[t].rows, first, sizes[t])
            first += sizes[t]
        self.tables = grown
        self._place_slots()
        now = (self.row_of, self.held, self.dirty, self._stored, self._score, self._key)
        for before, after in zip(tables, grown, strict=True):
            for source, target in zip(kept, now, strict=True):
                target[after.first_slot : after.first_slot + before.slots] = source[
                    before.first_slot : before.first_slot + before.slots
                ]
            rows = slice(after.first_row, after.first_row + after.rows)
            here = self.slot_of[rows]
            self.slot_of[rows] = torch.where(here >= 0, here + (after.first_slot - before.first_slot), here)
        shift = self._slot_borders[:-1] - borders[:-1]

        def moved(at: Tensor) -> Tensor:
            return at + shift[torch.bucketize(at, borders[1:], right=True)]

        for lease in self.leases:
            lease.slots, lease.moves = moved(lease.slots), lease.moves._replace(slots=moved(lease.moves.slots))

    def without_batches(self, kept: Sequence[Lease]) -> Residency:
        """The same rows in the same slots, of which no lease but `kept` holds any, and with no batch announced."""
        other = copy.copy(self)
        other.leases = [lease for lease in self.leases if lease in kept]
        other.held = torch.zeros_like(self.held)
        for lease in other.leases:
            other.held[lease.held()] += 1
        other._window, other._latest = _Window(), None
        other._next = torch.full((1,), _NONE, dtype=torch.int32, device=self.device)
        other._key = torch.where(self.row_of >= 0, steps.key_of(self._score, self._base), 0)
        other._scratch, other._victims, other._marks = Scratch(), Victims(), None
        other._victims.clear(self._slot_borders.tolist())
        return other

    def follow(self, device: torch.device) -> None:
        """Go on with the same rows in the same slots on another device; no batch is under way."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))
        self.device, self._marks = device, None

    def resident(self, table: int) -> tuple[Tensor, Tensor]:
        """Rows [n] of a table that have slots, ascending, and these; both counted within the table."""
        span = self.tables[table]
        slots = self.slot_of[span.first_row : span.first_row + span.rows]
        rows = (slots >= 0).nonzero().squeeze(1)
        return rows, slots[rows].long() - span.first_slot

    def store_all(self, table: int) -> None:
        """All rows of a table have records below from now on, which those with slots are equal to."""
        span = self.tables[table]
        rows = self.slot_of[span.first_row : span.first_row + span.rows]
        rows[rows == FRESH] = BELOW
        slots = slice(span.first_slot, span.first_slot + span.slots)
        self._stored[slots], self.dirty[slots] = True, False
