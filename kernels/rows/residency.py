"""What a cache of rows does for each batch, over all its rows and slots: find, take, score, hold and release.

Shapes: R rows and S slots of T tables, N ids, U distinct rows of a batch, of which H hit and M are missing; `slot_of`
[R] int32, of slots `row_of` [S] int64, `held`, `key` [S] int32, `score` [S] int64, `dirty`, `stored` [S] bool.
Bytes moved by the loops: 12 an id, 8 a row that is looked at, 29 a slot that is used.

Decisions of a host, so no ops: nothing here is traced. Where there are no loops (residency_loops.py) the device decides
(on_device.py), the same; they differ in the order in which the slots of a batch stand, which nothing depends on.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import numba_loops
from .lowest import lowest
from .residency_numbers import (
    EMPTY_KEYS,
    END,
    ENTRIES,
    FIELDS_OF_QUEUE,
    HEAD,
    HEAP,
    HEAP_ROOM,
    HEAP_SIZE,
    HIGH,
    LIMIT,
    LOW,
    SCORES,
)
from .slots import expect_rows, link_rows, release_slots

# the CPU's compiled loops; None where numba is missing or does not work
loops = partial(numba_loops.loops, "residency_loops", "rows")
_BINS = 1 << 11
# slots of a table that are not read for every batch, but for about so many at once
MANY_SLOTS, BATCHES_OF_QUEUE = 1 << 19, 8


class SlotTables(NamedTuple):
    """What is known of rows and slots; borders [T + 1] are those of tables among rows and slots."""

    slot_of: Tensor
    row_of: Tensor
    held: Tensor
    dirty: Tensor
    stored: Tensor
    score: Tensor
    key: Tensor
    row_borders: Tensor
    slot_borders: Tensor

    @property
    def loops(self) -> Any:
        """The compiled loops, where the tables are on a CPU that has them."""
        return loops() if self.slot_of.is_cpu else None


class Lookups(NamedTuple):
    """Features [F, 8] of a lookup: as `pack_features` lays them out by the numbers of rows, the first slot [F] and the
    place [F] of each one's table."""

    features: Tensor  # [F, 8]
    first_slots: Tensor  # [F]
    tables: Tensor  # [F]

    def samples(self, offsets: Tensor) -> int:
        """Bags B of each feature, of offsets [F*B + 1]."""
        return (offsets.shape[0] - 1) // max(self.features.shape[0], 1)


class Found(NamedTuple):
    """Distinct rows of a batch: slots [H] of those that have some, and the rows [M] that have none, ascending.

    counts [T, 2] int64 on the host are the H and M of each table. They are marked until `forget`, or `take` and `use`.
    `hits` may be memory that the next batch takes; `absent` is where ids of missing rows stand, if loops found them.
    """

    hits: Tensor
    missing: Tensor
    counts: Tensor
    absent: Tensor | None = None


class Scratch:
    """Memory for what is found of a batch, kept from one to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int64, device="cpu")

    def rows(self, n: int) -> Tensor:
        """[3, n + 1] int64."""
        if self._memory.shape[0] < 3 * (n + 1):
            self._memory = torch.empty(4 * (n + 1), dtype=torch.int64, device="cpu")
        return self._memory[: 3 * (n + 1)].view(3, n + 1)


class Scoring(NamedTuple):
    """How a batch scores slots: a policy of ours by its number, or 0; keys are scores above `base`.

    `half_life` is in batches, `gain` int32 [d] of a half-life's parts.
    """

    kind: int
    batch: int
    base: int
    half_life: int = 1
    # log2(1 + 2^-d) for d parts, int32
    gain: Tensor | None = None


def find_ids(
    state: SlotTables, ids: Tensor, offsets: Tensor, lookups: Lookups, scratch: Scratch
) -> tuple[Found, Tensor]:
    """The rows of a batch's ids [N] (offsets [F*B + 1]), and the slot [N] of each id within its table.

    A missing row has -2 - row there until `place`, and what lies in no table -1.
    """
    n, compiled = ids.shape[0], state.loops
    ids, offsets = ids.contiguous(), offsets.contiguous()
    out, (hits, missing, absent) = torch.empty(n, dtype=torch.int64, device="cpu"), scratch.rows(n)
    tables = state.row_borders.shape[0] - 1
    # and the numbers of hits, of missing rows and of their ids
    counts = torch.zeros(2 * tables + 3, dtype=torch.int64, device="cpu")
    compiled.find_ids(
        ids.data_ptr(), ids.itemsize, n, offsets.data_ptr(), offsets.itemsize, lookups.samples(offsets),
        lookups.features.data_ptr(), lookups.features.shape[0], lookups.first_slots.data_ptr(),
        lookups.tables.data_ptr(), state.slot_of.data_ptr(), state.held.data_ptr(), out.data_ptr(), hits.data_ptr(),
        missing.data_ptr(), absent.data_ptr(), counts.data_ptr(), counts.data_ptr() + 16 * tables,
    )  # fmt: skip
    hit_count, missing_count, absent_count = counts[2 * tables :].tolist()
    rows = missing[:missing_count].clone()
    _sort(compiled, rows, None, state.slot_of.shape[0])
    return Found(hits[:hit_count], rows, counts[: 2 * tables].view(tables, 2), absent[:absent_count]), out


def _sort(compiled: Any, rows: Tensor, others: Tensor | None, rows_total: int) -> None:
    """Sort distinct rows in place by the loop, and others with them."""
    n = rows.shape[0]
    if n > 1:
        scratch = torch.empty(2 * n + _BINS, dtype=torch.int64, device="cpu")
        compiled.sort_rows(
            rows.data_ptr(), 0 if others is None else others.data_ptr(), n, scratch.data_ptr(),
            scratch.data_ptr() + 16 * n, rows_total,
        )  # fmt: skip


def find_rows(state: SlotTables, rows: Tensor) -> Found:
    """As `find_ids`, of distinct rows [U], ascending."""
    compiled, tables = state.loops, state.row_borders.shape[0] - 1
    n, rows = rows.shape[0], rows.contiguous()
    hits, missing = (torch.empty(n, dtype=torch.int64, device="cpu") for _ in range(2))
    counts = torch.empty(tables, 2, dtype=torch.int64, device="cpu")
    absent_count = compiled.find_rows(
        rows.data_ptr(), n, state.row_borders.data_ptr(), tables, state.slot_of.data_ptr(), state.held.data_ptr(),
        hits.data_ptr(), missing.data_ptr(), counts.data_ptr(),
    )  # fmt: skip
    return Found(hits[: n - absent_count], missing[:absent_count], counts)


def forget(state: SlotTables, found: Found) -> None:
    """Take the marks of a batch back that does not come."""
    state.loops.forget(
        found.hits.data_ptr(), found.hits.shape[0], found.missing.data_ptr(), found.missing.shape[0],
        state.held.data_ptr(), state.slot_of.data_ptr(),
    )  # fmt: skip


def take(state: SlotTables, missing: Tensor, picked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `missing` [M], ascending, move into the slots `picked` [M] for them; what was there leaves.

    Returns the rows [M] that left and have to be saved, -1 where none does, whether those that came are fresh [M], and
    counts [T, 2] of fresh rows and of saves by table.
    """
    tables = state.row_borders.shape[0] - 1
    n = missing.shape[0]
    saves, fresh = torch.empty(n, dtype=torch.int64, device="cpu"), torch.empty(n, dtype=torch.bool, device="cpu")
    counts = torch.empty(tables, 2, dtype=torch.int64, device="cpu")
    state.loops.take(
        picked.data_ptr(), missing.data_ptr(), n, state.row_borders.data_ptr(), tables, state.slot_of.data_ptr(),
        state.row_of.data_ptr(), state.dirty.data_ptr(), state.stored.data_ptr(), saves.data_ptr(), fresh.data_ptr(),
        counts.data_ptr(),
    )  # fmt: skip
    return saves, fresh, counts


def use(state: SlotTables, hits: Tensor, slots: Tensor, scoring: Scoring, given: Tensor | None, *, keeps: bool) -> None:
    """Hold the slots [U] of a batch, `hits` [H] and then those of rows that have just come, and score them.

    `given` [U] are the scores, which loops find themselves where the policy is ours. Keys follow scores; with `keeps`
    those of hits that have a next use stay.
    """
    count, n = hits.shape[0], slots.shape[0]
    given, gain = None if given is None else given.contiguous(), scoring.gain
    state.loops.use(
        slots.data_ptr(), count, n, state.held.data_ptr(), state.score.data_ptr(), state.key.data_ptr(),
        0 if given is not None else scoring.kind, scoring.batch, scoring.half_life,
        0 if gain is None else gain.data_ptr(), 0 if gain is None else len(gain), scoring.base, int(keeps),
        0 if given is None else given.data_ptr(),
    )  # fmt: skip


def key_of(scores: Tensor, base: int) -> Tensor:
    """Keys [n] int32 of slots whose rows no announced batch needs."""
    return (scores - base).clamp(0, SCORES).add(EMPTY_KEYS).int()


def expect(state: SlotTables, rows: Tensor, begin: int, following: Tensor) -> None:
    """Have the slots of the rows [U] of a batch know their next use, which stands in the ring from `begin` on."""
    n, size = rows.shape[0], following.shape[0]
    if (compiled := state.loops) is None:
        expect_rows(rows, state.slot_of, following, state.key, begin)
        return
    compiled.expect(
        rows.data_ptr(), n, begin, following.data_ptr(), size, state.slot_of.data_ptr(), state.key.data_ptr()
    )


def place(state: SlotTables, found: Found, slots: Tensor, offsets: Tensor, lookups: Lookups) -> Tensor:
    """The slots [N] that `find_ids` gave, with those of rows that were missing."""
    assert found.absent is not None
    offsets = offsets.contiguous()
    state.loops.place(
        slots.data_ptr(), slots.shape[0], found.absent.data_ptr(), found.absent.shape[0], offsets.data_ptr(),
        offsets.itemsize, lookups.samples(offsets), lookups.first_slots.data_ptr(), state.slot_of.data_ptr(),
    )  # fmt: skip
    return slots


class Victims:
    """Which slots go next, of tables with so many that they are not read for every batch: queues for some batches.

    A queue has the free slots of lowest keys as they were when it was filled; what comes below its highest entry since,
    as a slot is let go or gets another key, is added. So it gives what a look at all slots would.
    """

    def __init__(self) -> None:
        # [queues, fields] int64, tables of the queues, and memory that the fields point to
        self.queues = torch.empty(0, FIELDS_OF_QUEUE, dtype=torch.int64, device="cpu")
        self._tables: list[int] = []
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # what it knows of lies at addresses of this process
        other = Victims()
        other.queues, other._tables = self.queues.clone(), self._tables
        other.clear()
        return other.__dict__

    def clear(self, slot_borders: list[int] | None = None) -> None:
        """Know of nothing: keys changed that nobody told of; or slots are laid out anew, as these borders say."""
        if slot_borders is not None:
            sizes = list(zip(slot_borders, slot_borders[1:], strict=False))
            self._tables, self._memory = [t for t, (low, high) in enumerate(sizes) if high - low >= MANY_SLOTS], {}
            self.queues = torch.zeros(len(self._tables), FIELDS_OF_QUEUE, dtype=torch.int64, device="cpu")
            for q, t in enumerate(self._tables):
                self.queues[q, LOW], self.queues[q, HIGH] = sizes[t]
        for field in (HEAD, END, HEAP_SIZE):
            self.queues[:, field] = 0
        self.queues[:, LIMIT] = -1

    def pick(self, state: SlotTables, counts: Tensor, capacity: int) -> Tensor:
        """As `lowest`, of the state's tables; counts [T] on the host. What is picked has to be taken, or `clear`."""
        if not self._tables:
            return lowest(state.key, state.held, state.slot_borders, counts, capacity)
        others = counts.clone()
        others[self._tables] = 0
        total = int(others.sum())
        picked = lowest(state.key, state.held, state.slot_borders, others, total)
        pieces = list(picked.split_with_sizes(others.tolist()))
        for q, t in enumerate(self._tables):
            if wanted := int(counts[t]):
                pieces[t] = self._pick(state, q, t, wanted)
        return torch.cat(pieces)

    def _pick(self, state: SlotTables, q: int, t: int, wanted: int) -> Tensor:
        compiled, picked = state.loops, torch.empty(wanted, dtype=torch.int64, device="cpu")
        address = self.queues[q].data_ptr()
        for filled in (False, True):
            count = 0
            if int(self.queues[q, LIMIT]) >= 0:
                count = compiled.pick(
                    address, wanted, picked.data_ptr(), state.held.data_ptr(), state.key.data_ptr(), 0
                )
            if count == wanted or filled:
                break
            self._fill(state, q, t, wanted)
        picked[count:] = -1
        _sort(compiled, picked[:count], None, int(self.queues[q, HIGH]))
        return picked

    def _fill(self, state: SlotTables, q: int, t: int, wanted: int) -> None:
        """Look at all slots of the table."""
        low, high = self.queues[q, LOW : HIGH + 1].tolist()
        count = min(BATCHES_OF_QUEUE * wanted, high - low)
        slots = lowest(
            state.key[low:high], state.held[low:high], torch.tensor([0, high - low]), torch.tensor([count]), count
        )
        complete = bool((slots < 0).any())
        slots = slots[slots >= 0] + low
        entries = (state.key[slots].long() << 32) | slots
        _sort(state.loops, entries, None, 1 << 62)
        heap = torch.empty(2 * count + 1024, dtype=torch.int64, device="cpu")
        self._memory[q] = entries, heap
        limit = (1 << 63) - 1 if complete else int(entries[-1])
        fields = {LIMIT: limit, ENTRIES: entries.data_ptr(), HEAD: 0, END: entries.shape[0], HEAP: heap.data_ptr()}
        for field, value in {**fields, HEAP_SIZE: 0, HEAP_ROOM: heap.shape[0]}.items():
            self.queues[q, field] = value


def release(state: SlotTables, slots: Tensor, victims: Victims, *, changed: bool) -> None:
    """Slots [U] are held by one lease less; `changed` ones are other than their records below."""
    if (compiled := state.loops) is None:
        release_slots(slots, state.held, state.dirty, changed)
        return
    compiled.release(
        slots.data_ptr(), slots.shape[0], state.held.data_ptr(), state.dirty.data_ptr(), int(changed),
        state.key.data_ptr(), victims.queues.data_ptr(), victims.queues.shape[0],
    )  # fmt: skip


def distinct_rows(
    state: SlotTables, ids: Tensor, offsets: Tensor, lookups: Lookups, latest: Tensor, begin: int
) -> tuple[Tensor, Tensor]:
    """The distinct rows [U] of a batch, ascending, and what `latest` [R] int64 has of them: less than `begin`."""
    n, compiled = ids.shape[0], state.loops
    ids, offsets = ids.contiguous(), offsets.contiguous()
    rows, before = (torch.empty(n, dtype=torch.int64, device="cpu") for _ in range(2))
    count = compiled.distinct(
        ids.data_ptr(), ids.itemsize, n, offsets.data_ptr(), offsets.itemsize, lookups.samples(offsets),
        lookups.features.data_ptr(), lookups.features.shape[0], latest.data_ptr(), begin, rows.data_ptr(),
        before.data_ptr(),
    )  # fmt: skip
    rows, before = rows[:count].clone(), before[:count]
    _sort(compiled, rows, before, latest.shape[0])
    return rows, before


def link(
    state: SlotTables,
    rows: Tensor,
    before: Tensor,
    latest: Tensor,
    following: Tensor,
    victims: Victims,
    *,
    number: int,
    begin: int,
    first: int,
) -> None:
    """Make the batch `number` the next use of its rows [U]: of the places `before` [U] where they stand among all that
    was announced, or of their slots where that is before `first`. They stand from `begin` on in the ring `following`.
    """
    n, size = rows.shape[0], following.shape[0]
    if (compiled := state.loops) is None:
        link_rows(rows, state.slot_of, latest, following, state.key, number, begin, first)
        return
    compiled.link(
        rows.data_ptr(), before.data_ptr(), n, number, begin, first, latest.data_ptr(), following.data_ptr(), size,
        state.slot_of.data_ptr(), state.key.data_ptr(), state.held.data_ptr(), victims.queues.data_ptr(),
        victims.queues.shape[0],
    )  # fmt: skip
