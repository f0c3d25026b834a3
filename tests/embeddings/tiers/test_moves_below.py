"""Rows that a thread reads and writes: every interleaving of batches gives the rows that were written last."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.embeddings import NoFreeSlots, TableGroup
from shardwise.embeddings.tables.table_layout import LookupFeature, OptimizerSpec, TableShape
from shardwise.embeddings.tiers import CachedRows, CacheSpec, FileRecords, HostRecords

ROWS, DIM = 30, 4


@dataclass
class Slow:
    """A backing whose reads wait until they are let through; `log` has the calls as they end."""

    rows: int
    record_bytes: int
    gate: threading.Event = field(default_factory=threading.Event)
    log: list[tuple[str, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inner = HostRecords(self.rows, self.record_bytes)

    def read(self, rows: Tensor, out: Tensor) -> None:
        assert self.gate.wait(20)
        self.inner.read(rows, out)
        self.log.append(("read", rows.tolist()))

    def write(self, rows: Tensor, records: Tensor) -> None:
        self.inner.write(rows, records)
        self.log.append(("write", rows.tolist()))

    def grow(self, rows: int) -> None:
        self.inner.grow(rows)

    def close(self) -> None:
        self.inner.close()


def cached(slots: Sequence[int], below: Any, most: int | None = None) -> tuple[TableGroup, CachedRows]:
    """Tables "t0", "t1", ... of ROWS rows under rowwise Adagrad; row r of table t begins as 1000 t + r everywhere."""
    store = CachedRows([CacheSpec(count, most or count, below) for count in slots])
    shapes = [TableShape(f"t{t}", ROWS, DIM, slots=count) for t, count in enumerate(slots)]
    features = [LookupFeature(f"f{t}", t) for t in range(len(slots))]
    group = TableGroup(
        shapes, features, dtype=torch.float32, device=torch.device("cpu"),
        optimizer=OptimizerSpec("rowwise_adagrad"), store=store,
    )  # fmt: skip
    store.attach(group)
    for t in range(len(slots)):
        rows = torch.arange(ROWS, dtype=torch.float32)
        store.write(t, 0, [(1000 * t + rows)[:, None].expand(ROWS, DIM), rows])
    return group, store


def batch(*rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Ids of a batch of one sample, table by table, and its offsets."""
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.tensor([row for part in rows for row in part], dtype=torch.int64), ends


STEP = torch.zeros(1, dtype=torch.int64)


def test_a_prefetch_does_not_wait_for_its_rows() -> None:
    made: list[Slow] = []

    def slow(rows: int, record_bytes: int) -> Slow:
        made.append(Slow(rows, record_bytes))
        return made[-1]

    group, store = cached([6], slow)
    (below,) = made
    below.log.clear()
    slots, lease = store.resolve(*batch([3, 5, 9]), STEP)
    assert not below.log
    below.gate.set()
    store.ready(lease)
    assert below.log == [("read", [3, 5, 9])]
    assert group.view(0)[slots, 0].tolist() == [3, 5, 9]


def test_a_row_that_is_saved_and_wanted_again_is_read_after_it_was_written() -> None:
    """Also where the reads before it are slow: the victims of a batch leave before its own rows come."""
    made: list[Slow] = []
    group, store = cached([3], lambda rows, size: made.append(Slow(rows, size)) or made[-1])  # type: ignore[func-returns-value]
    (below,) = made
    below.gate.set()
    slots, first = store.resolve(*batch([0, 1, 2]), STEP)
    store.ready(first)
    group.view(0)[slots] = -7.0
    store.release(first)
    below.gate.clear()
    below.log.clear()
    _, second = store.resolve(*batch([10, 11, 12]), STEP)
    # given back before its rows came, they come all the same
    threading.Timer(0.05, below.gate.set).start()
    store.release_unchanged(second)
    slots, third = store.resolve(*batch([0, 1]), STEP)
    store.ready(third)
    assert group.view(0)[slots].eq(-7.0).all()
    assert [what for what, _ in below.log] == ["write", "read", "read"]


def test_a_later_batch_finds_what_an_earlier_one_still_waits_for() -> None:
    """Its row has a slot, of which only the other batch knew that nothing was in it yet."""
    made: list[Slow] = []
    group, store = cached([6], lambda rows, size: made.append(Slow(rows, size)) or made[-1])  # type: ignore[func-returns-value]
    _, early = store.resolve(*batch([3, 5]), STEP)
    slots, late = store.resolve(*batch([5]), STEP)
    made[0].gate.set()
    store.ready(late)
    assert group.view(0)[slots, 0].tolist() == [5]
    assert store.read(0, 5, 6)[0][0, 0] == 5
    store.release(early)


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_those_that_were_written_last(seed: int, tmp_path: Path) -> None:
    """Batches that are announced, resolved, awaited, changed, given back and dropped in every order, beside a dict."""
    generator = torch.Generator().manual_seed(seed)

    def some(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    counter = iter(range(10**6))
    group, store = cached(
        [7, 9], lambda rows, size: FileRecords(rows, size, tmp_path, name=f"t.{next(counter)}"), most=20
    )
    value = {(t, row): (1000.0 * t + row, float(row)) for t in (0, 1) for row in range(ROWS)}
    # resolved: rows by table, slots, lease; announced: ids, offsets, what `announce` gave
    held: list[tuple[list[list[int]], Tensor, Any]] = []
    changed: set[int] = set()
    waiting: list[tuple[list[list[int]], Any]] = []
    lease: Any = None
    for _ in range(150):
        what = some(8)
        if what < 2:
            rows = [sorted({some(ROWS) for _ in range(1 + some(4))}) for _ in range(2)]
            waiting.append((rows, store.announce(*batch(*rows))))
        elif what < 4:
            is_announced = bool(waiting) and bool(some(4))
            rows, announced = waiting[0] if is_announced else ([[some(ROWS)], [some(ROWS)]], None)
            try:
                slots, lease = store.resolve(*batch(*rows), STEP, announced)
            except NoFreeSlots:
                store.release(held.pop(0)[2])
                continue
            waiting = waiting[is_announced:]
            held.append((rows, slots, lease))
        elif what == 4 and held:
            rows, slots, lease = held[some(len(held))]
            store.ready(lease)
            changed.add(lease.number)
            at = slots.split([len(part) for part in rows])
            for t, (part, own) in enumerate(zip(rows, at, strict=True)):
                assert group.view(t)[own, 0].tolist() == [value[t, row][0] for row in part]
                new, state = torch.rand(len(part), generator=generator), torch.rand(len(part), generator=generator)
                group.view(t)[own] = new[:, None]
                store._parts(t)[1][own] = state
                value.update({(t, row): (float(a), float(b)) for row, a, b in zip(part, new, state, strict=True)})
        elif what == 5 and held:
            # its rows may have been changed, if it was awaited; if not nothing is wrong with saving them
            store.release(held.pop(some(len(held)))[2])
        elif what == 6 and waiting:
            store.withdraw(waiting.pop(some(len(waiting)))[1])
        elif what == 7 and held and held[-1][2].number not in changed:
            # no backward comes, and nobody says so
            del held[-1]
            lease = None
            assert len(store.residency.leases) == len(held)
        elif what == 7:
            t, begin = some(2), some(ROWS - 5)
            weights, sums = store.read(t, begin, begin + 5)
            assert weights[:, 0].tolist() == [value[t, begin + n][0] for n in range(5)]
            assert sums.tolist() == [value[t, begin + n][1] for n in range(5)]
        lease = None
    for _, _, lease in held:
        store.release(lease)
    with store.whole():
        for t in (0, 1):
            assert group.view(t)[:, -1].tolist() == [value[t, row][0] for row in range(ROWS)]
    assert not store.residency.held.any()
    assert sum(counts.saves for counts in store.counts) > 0
    store.close()


class Broken(HostRecords):
    """Fails from the moment on when it is told to, as a disk does."""

    fails = ""
    records = None  # type: ignore[assignment]

    def read(self, rows: Tensor, out: Tensor) -> None:
        if "read" in self.fails:
            raise OSError(5, "Input/output error", "/scratch/rows")
        torch.index_select(self._records, 0, rows, out=out)

    def write(self, rows: Tensor, records: Tensor) -> None:
        if "write" in self.fails:
            raise OSError(28, "No space left on device", "/scratch/rows")
        self._records.index_copy_(0, rows, records)


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_fails_is_an_error_of_whoever_waits_for_rows(what: str) -> None:
    """It names the table and the folder, and stays: rows are lost. Releasing does not raise."""
    made: list[Broken] = []
    _, store = cached([3], lambda rows, size: made.append(Broken(rows, size)) or made[-1])  # type: ignore[func-returns-value]
    _, first = store.resolve(*batch([0, 1, 2]), STEP)
    store.release(first)
    made[0].fails = what
    _, second = store.resolve(*batch([4, 5, 6]), STEP)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"table 't0': its rows could not be .*/scratch/rows"):
            store.ready(second)
    store.release_unchanged(second)
    with pytest.raises(RuntimeError, match="table 't0'"):
        store.read(0, 0, ROWS)
