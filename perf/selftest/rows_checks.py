"""Checks of the ops that say where rows lie: moves between slots and records, victims, first values, batches of caches.

`ROWS` is the table of them, from which compilers and the executor of compiled kernels take calls, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import Feature, pack_features
from shardwise.kernels.rows import AGED_LFU, LFU, LRU, first_rows, initial_rows, lowest, move_rows, slots, wanted

from .check import Check, check, random
from .served_checks import Served

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# columns and dtype of each part of a row; no columns: one number a row
Parts = Sequence[tuple[int | None, torch.dtype]]
_F32, _NUMBER = torch.float32, (None, torch.float32)
PARTS: dict[str, Parts] = {
    "D=128 fp32": ((128, _F32),),
    "D=128 fp32 rowwise": ((128, _F32), _NUMBER),
    "D=128 fp32 adam": ((128, _F32),) * 3,
    "D=128 bf16 rowwise": ((128, torch.bfloat16), _NUMBER),
    "D=3 fp16 adam": ((3, torch.float16), (3, _F32), (3, _F32)),
    "D=4 fp32 two states": ((4, _F32), _NUMBER, (4, _F32)),
    "D=1 fp32": ((1, _F32),),
    "D=1023 fp32 rowwise": ((1023, _F32), _NUMBER),
    "D=4096 fp32": ((4096, _F32),),
}


def moves(parts: Parts, slots: int = 12, records: int = 40, count: int = 11) -> list[Any]:
    """Arguments of `move_rows`: random bits, and some moves without a slot, a save or a load."""
    generator = random(1)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(0, 120, shape, dtype=torch.uint8, generator=generator)

    tensors = [
        bits(slots * (columns or 1) * dtype.itemsize).view(dtype).view(slots, *([] if columns is None else [columns]))
        for columns, dtype in parts
    ]
    places = torch.randperm(records, generator=generator)
    numbers = [torch.randperm(slots, generator=generator)[:count], places[:count], places[count : 2 * count]]
    for each, every in zip(numbers, (5, 3, 4), strict=True):
        each[2::every] = -1
    return [tensors, bits(records, move_rows.layout_of(tensors).nbytes), *numbers]


def moves_of_one(parts: Parts) -> list[Any]:
    """The same where slots and records are counted over several tables: some are of others before it and behind it."""
    tensors, records, slots, saves, loads = moves(parts)
    first_slot, first_row = 5, 20
    slots, saves, loads = (torch.where(some >= 0, some + first, -1) for some, first in (
        (slots, first_slot), (saves, first_row), (loads, first_row)))  # fmt: skip
    slots[::5], saves[1::5], loads[2::5] = 2, first_row + len(records), 4
    slots[5::10] = first_slot + len(tensors[0])
    return [tensors, records, slots, saves, loads, first_slot, first_row]


def victims(sizes: Sequence[int], top: int) -> list[Any]:
    """Arguments of `lowest`: keys below `top`, every fifth slot held; a third of each table, of the last too many."""
    borders = torch.tensor([0, *sizes]).cumsum(0)
    keys = torch.randint(0, top, (int(borders[-1]) + 1,), generator=random(2), dtype=torch.int32)
    counts = torch.tensor([size // 3 for size in sizes[:-1]] + [sizes[-1] + 2])
    return [keys, (torch.arange(len(keys)) % 5 == 0).int(), borders, counts, int(counts.sum()) + 1]


def picks(sizes: Sequence[int], top: int) -> list[Any]:
    """Arguments of `pick_lowest`, the same."""
    *tensors, capacity = victims(sizes, top)
    return [*tensors, torch.zeros(lowest.bin_count(len(sizes)), dtype=torch.int32), torch.full((capacity,), -1)]


def _rows(kind: str, dtype: torch.dtype, columns: int) -> list[Any]:
    rows = torch.randint(-(2**62), 2**62, (9,), generator=random(3))
    return [rows, torch.tensor([12345]), 2, columns, kind, -0.5, 0.25, dtype]


def made(kind: str, parts: Parts) -> list[Any]:
    """Arguments of `make_rows`: some moves are of rows with a record, of other tables' slots, or of none."""
    tensors, _, slots, *_ = moves(parts)
    slots = torch.where(slots >= 0, slots + 5, -1)
    slots[::5], slots[5::10] = 2, 5 + len(tensors[0])
    fresh = torch.arange(len(slots)) % 4 != 1
    rows = torch.randint(0, 2**40, slots.shape, generator=random(5))
    starts = [0.25 * i for i in range(1, len(tensors))]
    return [tensors, slots, rows, fresh, 5, -7, 2**40 + 3, 2, kind, -0.5, 0.25, starts]


@dataclass
class Cache:
    """Tables of a cache, some of whose rows have slots, and a batch: rows with slots come once, as which of equal ids
    finds a slot hangs on the order of programs; others come twice.
    """

    rows: Sequence[int]
    slots: Sequence[int]

    def __post_init__(self) -> None:
        borders = [torch.tensor([0, *sizes]).cumsum(0) for sizes in (self.rows, self.slots)]
        self.row_borders, self.slot_borders = borders
        self.slot_of = torch.full((int(self.row_borders[-1]),), -1, dtype=torch.int32)
        count = int(self.slot_borders[-1])
        self.row_of = torch.full((count,), -1)
        generator = random(4)
        ids, missing = list[Tensor](), list[Tensor]()
        for t, (rows, room) in enumerate(zip(self.rows, self.slots, strict=True)):
            drawn = torch.randperm(rows, generator=generator)
            own, others = drawn[: room - room // 5], drawn[room - room // 5 :][: room // 4 + 1]
            first = int(self.slot_borders[t])
            self.slot_of[own + self.row_borders[t]] = torch.arange(first, first + len(own)).int()
            self.row_of[first : first + len(own)] = own + self.row_borders[t]
            some = own[: len(own) // 2]
            ids.append(torch.cat([some, others, others[::2], torch.tensor([-1, rows])]))
            missing.append(others + self.row_borders[t])
        # half of them are in the second sample
        ends = torch.tensor([len(some) for some in ids]).cumsum(0)
        self.offsets = torch.stack([ends - torch.tensor([len(some) // 2 for some in ids]), ends], 1).flatten()
        self.offsets = torch.cat([self.offsets.new_zeros(1), self.offsets])
        self.ids, self.missing = torch.cat(ids), torch.cat(missing).sort().values
        features = [Feature(0, n, 1, int(first)) for n, first in zip(self.rows, self.row_borders, strict=False)]
        self.features, self.first_slots = pack_features(features), self.slot_borders[:-1].clone()
        self.held, self.used = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
        self.score = torch.randint(0, 900, (count,), generator=generator)
        self.key = (self.score + 1).int()
        self.key[::3] = 2**31 - 5
        self.dirty, self.stored = torch.arange(count) % 3 == 0, torch.arange(count) % 2 == 0
        self.bits = torch.zeros(-(-len(self.slot_of) // 32), dtype=torch.int32)
        self.tallies = torch.zeros(wanted.chunk_count(len(self.bits)), dtype=torch.int64)
        self.counts = torch.zeros(4, len(self.rows), dtype=torch.int64)
        self.gain = (torch.arange(300, dtype=torch.int32) * 7) % 90

    def claim(self, kind: int, *, keeps: bool, holds: bool = True) -> list[Any]:
        """Arguments of `claim_rows`."""
        return [
            self.ids, self.offsets, self.features, self.first_slots, self.slot_of, self.row_borders, self.held,
            self.used, self.score, self.key, self.bits, self.tallies, self.counts, self.gain, 7, kind, 500, 20, keeps,
            holds,
        ]  # fmt: skip

    def mark(self) -> list[Any]:
        """Arguments of `mark_rows`."""
        return [self.ids, self.offsets, self.features, self.row_borders, self.bits, self.tallies, self.counts[0]]

    def marked(self, capacity: int) -> list[Any]:
        """Arguments of `list_rows`."""
        wanted._set_bits(self.bits, self.tallies, self.missing)
        return [self.bits, self.tallies, len(self.missing) + capacity]

    def take(self, kind: int) -> list[Any]:
        """Arguments of `take_slots`: victims are the last slots of each table, and there is room for more rows."""
        tables = torch.bucketize(self.missing, self.row_borders[1:], right=True)
        picked = [
            torch.arange(int(end) - int((tables == t).sum()), int(end)) for t, end in enumerate(self.slot_borders[1:])
        ]
        # some never left their first values
        self.slot_of[self.missing[::4]] = -2
        none = torch.full((3,), -1)
        # one slot of no row
        rows, picks = torch.cat([self.missing, none]), torch.cat([*picked, torch.tensor([-1, -1, 0])])
        return [
            rows, picks, self.row_borders, self.slot_of, self.row_of, self.held, self.dirty, self.stored, self.score,
            self.key, self.counts, self.gain, kind, 500, 20,
        ]  # fmt: skip

    def place(self, spare: int) -> list[Any]:
        """Arguments of `place_rows`, of rows that all have slots by now."""
        wanted_rows, _ = wanted.rows_of_ids(self.ids, self.offsets, self.features)
        places = torch.where(wanted_rows >= 0, -2 - wanted_rows, -1)
        self.slot_of.copy_(torch.arange(len(self.slot_of)))
        return [places, self.offsets, self.first_slots, self.slot_of, torch.arange(spare)]

    def release(self, *, changed: bool) -> list[Any]:
        """Arguments of `release_slots`."""
        some = torch.where(torch.arange(len(self.held)) % 3 == 1, -1, torch.arange(len(self.held)))
        return [some, self.held + 2, self.dirty, changed]

    def link(self) -> list[Any]:
        """Arguments of `link_rows`: some rows were announced before, some before the first batch that is to come."""
        latest = torch.full((len(self.slot_of),), -1)
        latest[::2], latest[::5] = torch.arange(len(latest))[::2] + 100, 3
        following = torch.full((4 * len(latest) + 7,), 2, dtype=torch.int32)
        rows = torch.cat([self.row_of[self.row_of >= 0].sort().values, torch.full((5,), -1)])
        begin = 100 + len(latest)
        return [rows, self.slot_of, latest, following, self.key, 9, begin, 100]

    def expect(self) -> list[Any]:
        """Arguments of `expect_rows`."""
        rows, slot_of, _, following, key, *_ = self.link()
        following[::2] = -1
        return [rows, slot_of, following, key, 5]


def _of_cache(rows: Sequence[int], slots: Sequence[int], op: str, *given: Any, **named: Any) -> Sequence[Any]:
    return getattr(Cache(rows, slots), op)(*given, **named)  # type: ignore[no-any-return]


def _caches() -> Iterator[Served]:
    several, one = ((40, 1, 0, 300), (20, 1, 0, 90)), ((700,), (200,))
    of = wanted
    for words, kind, keeps, sizes in (
        ("LRU several tables", LRU, False, several), ("LFU window", LFU, True, several),
        ("aged LFU", AGED_LFU, True, one), ("no policy", 0, False, one),
    ):  # fmt: skip
        yield Served(
            "claim_rows", words, of.claim_rows_ref, partial(_of_cache, *sizes, "claim", kind, keeps=keeps),
            "rows.wanted.claim_rows", writes=(6, 7, 8, 9, 10, 11, 12),
        )  # fmt: skip
    yield Served(
        "claim_rows", "looked at alone", of.claim_rows_ref,
        partial(_of_cache, *several, "claim", 0, keeps=False, holds=False),
        "rows.wanted.claim_rows", writes=(6, 7, 8, 9, 10, 11, 12),
    )  # fmt: skip
    for words, sizes in (("several tables", several), ("one table", one)):
        yield Served(
            "mark_rows", words, of.mark_rows_ref, partial(_of_cache, *sizes, "mark"), "rows.wanted.mark_rows",
            writes=(4, 5, 6),
        )  # fmt: skip
        for more in (-2, 70):
            yield Served(
                "list_rows", f"{words} room for {more} more", of.list_rows_ref,
                partial(_of_cache, *sizes, "marked", more), "rows.wanted.list_rows", writes=(0,),
            )  # fmt: skip
    for kind in (0, LRU, LFU, AGED_LFU):
        yield Served(
            "take_slots", f"policy {kind}", slots.take_slots_ref, partial(_of_cache, *several, "take", kind),
            "rows.slots.take_slots", writes=(1, 3, 4, 5, 6, 7, 8, 9, 10),
        )  # fmt: skip
    for spare in (3, 5000):
        yield Served(
            "place_rows", f"several tables clearing {spare}", slots.place_rows_ref,
            partial(_of_cache, *several, "place", spare), "rows.slots.place_rows", writes=(0, 4),
        )  # fmt: skip
    for changed in (False, True):
        yield Served(
            "release_slots", "rows that changed" if changed else "rows that did not", slots.release_slots_ref,
            partial(_of_cache, *several, "release", changed=changed), "rows.slots.release_slots", writes=(1, 2),
        )  # fmt: skip
    yield Served(
        "link_rows", "a window", slots.link_rows_ref, partial(_of_cache, *several, "link"), "rows.slots.link_rows",
        writes=(2, 3, 4),
    )  # fmt: skip
    yield Served(
        "expect_rows", "a window", slots.expect_rows_ref, partial(_of_cache, *several, "expect"),
        "rows.slots.expect_rows", writes=(3,),
    )  # fmt: skip


def _table() -> Iterator[Served]:
    for words, parts in PARTS.items():
        yield Served(
            "move_rows", words, move_rows.move_rows_ref, partial(moves, parts), "rows.move_rows.move_rows",
            writes=(0, 1),
        )  # fmt: skip
    yield Served(
        "move_rows", "of one table D=128 fp32 rowwise", move_rows.move_rows_ref,
        partial(moves_of_one, PARTS["D=128 fp32 rowwise"]), "rows.move_rows.move_rows", writes=(0, 1),
    )  # fmt: skip
    for sizes, top in (((300,), 2**31 - 1), ((20, 0, 7), 40), ((5,) * 20, 9)):
        yield Served(
            "lowest", f"{len(sizes)} tables keys below {top}", lowest.lowest_ref, partial(victims, sizes, top),
            "rows.lowest.count_digits rows.lowest.pick",
        )  # fmt: skip
        yield Served(
            "pick_lowest", f"{len(sizes)} tables keys below {top}", lowest.pick_lowest_ref,
            partial(picks, sizes, top), "rows.lowest.count_digits rows.lowest.pick", writes=(5,),
        )  # fmt: skip
    for kind, dtype, columns in (
        ("uniform", torch.float32, 128), ("normal", torch.float32, 128), ("uniform", torch.bfloat16, 20),
        ("normal", torch.float16, 3), ("normal", torch.bfloat16, 1023),
    ):  # fmt: skip
        yield Served(
            "initial_rows", f"{kind} D={columns} {_TYPES[dtype]}", initial_rows.initial_rows_ref,
            partial(_rows, kind, dtype, columns), "rows.initial_rows.initial_rows",
        )  # fmt: skip
    for kind, words in (
        ("uniform", "D=128 fp32 rowwise"), ("normal", "D=128 fp32 adam"), ("constant", "D=4 fp32 two states"),
        ("normal", "D=3 fp16 adam"), ("uniform", "D=128 bf16 rowwise"), ("normal", "D=1023 fp32 rowwise"),
        ("uniform", "D=1 fp32"),
    ):  # fmt: skip
        yield Served(
            "make_rows", f"{kind} {words}", first_rows.make_rows_ref, partial(made, kind, PARTS[words]),
            "rows.first_rows.make_rows", writes=(0,),
        )  # fmt: skip
    yield from _caches()


ROWS: tuple[Served, ...] = tuple(_table())


def checks() -> Iterator[Check]:
    """Every call of the table."""
    for each in ROWS:
        yield check(
            "rows of tables larger than the device", f"{each.op}, {each.words}", each.op, each.call,
            each.call_reference, each.inputs,
        )  # fmt: skip
