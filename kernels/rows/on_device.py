"""A batch of a cache whose decisions are made on the device: kernels one after another, over memory of fixed sizes.

So nothing waits for the device, whatever it finds. Where there is no kernel their references run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .lowest import bin_count, pick_lowest
from .residency import Lookups, Scoring, SlotTables
from .residency_numbers import AGED_LFU, LRU, UNIT
from .slots import place_rows, take_slots
from .wanted import chunk_count, claim_rows, list_rows, mark_rows


class Counters(NamedTuple):
    """What a batch counts in: counts [4, T], tallies of the bits, and bins of keys; all of it as one, `whole`."""

    counts: Tensor
    tallies: Tensor
    bins: Tensor
    whole: Tensor


class Marks:
    """What is kept from one batch to the next, and is as it was after each: bits of rows, stamps of slots."""

    def __init__(self, state: SlotTables) -> None:
        device, tables = state.slot_of.device, state.row_borders.shape[0] - 1
        self.bits = torch.zeros(-(-state.slot_of.shape[0] // 32), dtype=torch.int32, device=device)
        # the last turn that found each slot
        self.used = torch.zeros_like(state.held)
        self.turn = 0
        self._gain: tuple[Tensor | None, Tensor] = (None, self.used[:0])
        # the next batch's, which are zeros, and those of the batch before
        self._counters = [_counters(tables, chunk_count(self.bits.shape[0]), device) for _ in range(2)]

    def counters(self) -> tuple[Counters, Tensor]:
        """Zeros to count in, and what has to be zeros when the next batch comes, 1-D as `Counters.whole`: [n]."""
        self._counters.reverse()
        spare, now = self._counters
        return now, spare.whole

    def zeros(self, counts: int) -> tuple[Tensor, Tensor]:
        """So many counts [counts], and tallies of the bits [chunks], int64."""
        both = torch.zeros(counts + chunk_count(self.bits.shape[0]), dtype=torch.int64, device=self.bits.device)
        return both[:counts], both[counts:]

    def gain(self, scoring: Scoring) -> Tensor:
        """The scoring's [d], on the device."""
        if scoring.gain is not self._gain[0]:
            assert scoring.gain is not None
            # host sync on CUDA: once
            self._gain = scoring.gain, scoring.gain.to(self.bits.device)
        return self._gain[1]


def _counters(tables: int, chunks: int, device: torch.device) -> Counters:
    # bins first: they are read 16 bytes at a time
    sizes = [bin_count(tables) // 2, 4 * tables, chunks]
    whole = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    bins, counts, tallies = torch.split(whole, sizes)
    return Counters(counts.view(4, tables), tallies, bins.view(torch.int32), whole)


class Wanted(NamedTuple):
    """What a batch found and moved: the slot [N] of each id within its table; slots [2N] that it holds, of which the
    second half are those that `rows` [N] came into after `saves` [N] left them, `fresh` ones without a record; counts
    [4, T] on the device, until the batch after the next: rows that hit and that were missing, fresh ones of these, and
    saves.
    """

    places: Tensor
    slots: Tensor
    rows: Tensor
    saves: Tensor
    fresh: Tensor
    counts: Tensor


def want(
    state: SlotTables,
    marks: Marks,
    ids: Tensor,
    offsets: Tensor,
    lookups: Lookups,
    scoring: Scoring,
    *,
    keeps: bool,
) -> Wanted:
    """Give slots to the rows of a batch's ids [N], offsets [F*B + 1], hold and score them. There is room for all.

    Without a policy of ours hits keep their scores, and what comes has 0.
    """
    n = ids.shape[0]
    (counts, tallies, bins, _), spare = marks.counters()
    marks.turn += 1
    kind, base, now = scoring.kind, scoring.base, scoring.batch if scoring.kind == LRU else 1
    gain = marks.gain(scoring) if kind == AGED_LFU else marks.used[:0]
    if kind == AGED_LFU:
        now = UNIT * scoring.batch // scoring.half_life + 1
    places, slots = claim_rows(
        ids, offsets, lookups.features, lookups.first_slots, state.slot_of, state.row_borders, state.held, marks.used,
        state.score, state.key, marks.bits, tallies, counts, gain, marks.turn, kind, now, base, keeps, True,
    )  # fmt: skip
    rows = list_rows(marks.bits, tallies, n)
    coming = slots[n:]
    pick_lowest(state.key, state.held, state.slot_borders, counts[1], bins, coming)
    saves, fresh = take_slots(
        rows, coming, state.row_borders, state.slot_of, state.row_of, state.held, state.dirty, state.stored,
        state.score, state.key, counts, gain, kind, now, base,
    )  # fmt: skip
    place_rows(places, offsets, lookups.first_slots, state.slot_of, spare)
    return Wanted(places, slots, rows, saves, fresh, counts)


def find_wanted(state: SlotTables, marks: Marks, ids: Tensor, offsets: Tensor, lookups: Lookups) -> tuple[Tensor, int]:
    """The slots [H] of rows of a batch that have some, and how many rows have none; nothing changes."""
    counts = _look(state, marks, ids, offsets, lookups)
    # host sync on CUDA: the caller asked
    return (marks.used == marks.turn).nonzero().squeeze(1), int(counts[1].sum())


def count_wanted(
    state: SlotTables, marks: Marks, ids: Tensor, offsets: Tensor, lookups: Lookups
) -> tuple[list[int], list[int]]:
    """For each table the distinct rows of ids [N] (offsets [F*B + 1]), and slots that would do: its, and those held."""
    counts = _look(state, marks, ids, offsets, lookups)
    taken = ((state.held > 0) | (marks.used == marks.turn)).long().cumsum(0)
    taken = torch.cat([taken.new_zeros(1), taken])[state.slot_borders].diff()
    # host sync on CUDA: the caller asked
    rows, needed = torch.stack([counts.sum(0), taken + counts[1]]).tolist()
    return rows, needed


def _look(state: SlotTables, marks: Marks, ids: Tensor, offsets: Tensor, lookups: Lookups) -> Tensor:
    """Counts [2, T] of rows that have slots and that have none; the marks have this turn's slots."""
    tables = state.row_borders.shape[0] - 1
    counts, tallies = marks.zeros(2 * tables)
    counts = counts.view(2, tables)
    marks.turn += 1
    claim_rows(
        ids, offsets, lookups.features, lookups.first_slots, state.slot_of, state.row_borders, state.held, marks.used,
        state.score, state.key, marks.bits, tallies, counts, marks.used[:0], marks.turn, 0, 0, 0, False, False,
    )  # fmt: skip
    list_rows(marks.bits, tallies, ids.shape[0])
    return counts


def announced_rows(
    state: SlotTables, marks: Marks, ids: Tensor, offsets: Tensor, lookups: Lookups
) -> tuple[Tensor, Tensor]:
    """The distinct rows [N] of a batch's ids, ascending, -1 behind them; and how many each table has [T]."""
    counts, tallies = marks.zeros(state.row_borders.shape[0] - 1)
    mark_rows(ids, offsets, lookups.features, state.row_borders, marks.bits, tallies, counts)
    return list_rows(marks.bits, tallies, ids.shape[0]), counts
