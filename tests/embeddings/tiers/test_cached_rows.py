"""The store of tables behind slots: growth, what it says of a cache that does not help, and both of its paths."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.embeddings import LookupFeature, NoFreeSlots, OptimizerSpec, TableGroup, TableShape
from shardwise.embeddings.tiers import CachedRows, CacheSpec, HostRecords, TooManyRows, cached_rows as store_module, lru
from shardwise.kernels import move_rows
from shardwise.kernels.rows import lowest as lowest_module, residency as steps
from shardwise.sharding.engine.tiers import UniformRows

ROWS, DIM = 400, 4
CPU = torch.device("cpu")


def cached(slots: int, most: int | None = None, rows: Sequence[int] = (ROWS,)) -> tuple[TableGroup, CachedRows]:
    """Tables whose rows have their numbers as values, of which so many are on the device."""
    spec = OptimizerSpec("rowwise_adagrad", lr=0.1)
    store = CachedRows([CacheSpec(slots, most or slots, HostRecords) for _ in rows], lru)
    shapes = [TableShape(f"t{n}", count, DIM, slots=slots) for n, count in enumerate(rows)]
    lookups = [LookupFeature(f"f{n}", n) for n in range(len(rows))]
    group = TableGroup(shapes, lookups, dtype=torch.float32, device=CPU, optimizer=spec, store=store)
    store.attach(group)
    for t, count in enumerate(rows):
        store.write(t, 0, [torch.arange(count).float()[:, None].expand(count, DIM), torch.zeros(count)])
    return group, store


def look_up(group: TableGroup, *ids: Sequence[int]) -> Tensor:
    """One bag a feature, without a gradient."""
    offsets = torch.tensor([0, *torch.tensor([len(some) for some in ids]).cumsum(0).tolist()])
    with torch.no_grad():
        return group.pooled(torch.tensor([id for some in ids for id in some], dtype=torch.int64), offsets)


def test_slots_grow_by_an_eighth_beyond_what_is_needed_and_to_no_more_than_there_may_be() -> None:
    group, store = cached(4, 60)
    assert look_up(group, range(40))[0, 0] == sum(range(40))
    assert group.tables[0].resident == 45 and store.counts[0].grown == 1
    look_up(group, range(100, 158))
    assert group.tables[0].resident == 60 and store.counts[0].grown == 2
    assert store.counts[0].misses == 98


def test_a_batch_alone_that_does_not_fit_says_what_would_and_changes_nothing() -> None:
    group, store = cached(4, 60)
    look_up(group, [1, 2, 3])
    before = store.residency.slot_of.clone(), store.residency.row_of.clone(), store.residency._key.clone()
    message = r"table 't0': a batch wants 61 distinct rows and the table may have 60 of its 400 rows on the device: "
    with pytest.raises(TooManyRows, match=message + r"Tier\(max_slots=61\), 3.64e-06 GiB here, would do"):
        look_up(group, range(61))
    now = store.residency.slot_of, store.residency.row_of, store.residency._key
    assert all(map(torch.equal, before, now)) and not bool(store.residency.held.any())
    assert look_up(group, [1, 2, 3])[0, 0] == 6 and store.counts[0].misses == 3


def test_a_table_without_room_leaves_those_beside_it_as_they_were() -> None:
    group, store = cached(8, 8, rows=(ROWS, ROWS))
    look_up(group, [1, 2], [3])
    before = store.residency.slot_of.clone()
    with pytest.raises(TooManyRows, match="table 't1': a batch wants 9 distinct rows"):
        look_up(group, [4, 5], range(9))
    assert torch.equal(store.residency.slot_of, before) and not bool(store.residency.held.any())


def test_a_prefetch_without_room_is_counted_once() -> None:
    group, store = cached(8)
    ids, offsets = torch.arange(6), torch.tensor([0, 6])
    _, lease = store.resolve(ids, offsets, group.step)
    for _ in range(3):
        with pytest.raises(NoFreeSlots, match="table 't0': 12 slots are needed beside .* way, .*torch.no_grad"):
            store.resolve(ids + 10, offsets, group.step)
    assert store.counts[0].stalls == 1
    store.release_unchanged(lease)
    store.resolve(ids + 10, offsets, group.step)


def test_a_cache_that_nearly_always_misses_is_told_of_once() -> None:
    group, _ = cached(20)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in range(100):
            look_up(group, [(20 * batch + n) % ROWS for n in range(20)])
        # the first batch filled the slots
        assert not seen
        for batch in range(300):
            look_up(group, [(20 * batch + n) % ROWS for n in range(20)])
    assert len(seen) == 1
    text = str(seen[0].message)
    assert "table 't0'" in text and "less than 10 %" in text and "its 20 slots, for 100 batches in a row" in text


@pytest.mark.parametrize("hits", [2, 10])
def test_a_batch_that_hits_starts_the_count_of_misses_anew(hits: int) -> None:
    group, _ = cached(20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in range(250):
            new = [(20 * batch + n) % ROWS for n in range(20)]
            if batch % 50 == 49:
                new[:hits] = [(20 * (batch - 1) + n) % ROWS for n in range(20)][-hits:]
            look_up(group, new)


def test_torch_s_path_gives_the_same_bits_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[Tensor, ...]:
        group, store = cached(60, 70, rows=(ROWS, 90))
        generator = torch.Generator().manual_seed(0)
        for _ in range(30):
            ids = torch.cat([torch.randint(0, count, (40,), generator=generator) for count in (ROWS, 90)])
            offsets = torch.arange(0, 81, 10)
            group.pooled(ids, offsets).square().sum().backward()
        counts = [[c.wanted, c.hits, c.saves, c.fresh, c.batches, c.grown] for c in store.counts]
        rows = [part for t in range(2) for part in store.read(t, 0, group.tables[t].rows)]
        residency = store.residency
        return *rows, torch.tensor(counts), residency.slot_of, residency._key, residency._score, residency.dirty

    expected = run()
    for module in (steps, lowest_module):
        monkeypatch.setattr(module, "loops", lambda: None)
    for mine, theirs in zip(run(), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("rows", "dims", "calls"), [((ROWS, 90), (4, 4), 1), ((ROWS, 90, 70), (4, 4, 8), 2)])
def test_a_device_moves_the_rows_of_all_tables_that_are_alike_in_one_call(
    monkeypatch: pytest.MonkeyPatch, rows: Sequence[int], dims: Sequence[int], calls: int
) -> None:
    """Where each had a call of its own, the bits are the same."""

    def run(below: Any) -> tuple[int, list[Tensor]]:
        moves: list[int] = []
        monkeypatch.setattr(store_module, "move_rows", lambda *given: moves.append(1) or move_rows(*given))
        store = CachedRows([CacheSpec(60, 70, below) for _ in rows], lru)
        shapes = [
            TableShape(f"t{t}", count, dim, slots=60) for t, (count, dim) in enumerate(zip(rows, dims, strict=True))
        ]
        lookups = [LookupFeature(f"f{t}", t) for t in range(len(rows))]
        spec = OptimizerSpec("adam", lr=0.1)
        group = TableGroup(shapes, lookups, dtype=torch.float32, device=CPU, optimizer=spec, store=store)
        store.attach(group)
        generator = torch.Generator().manual_seed(2)
        for t, (count, dim) in enumerate(zip(rows, dims, strict=True)):
            store.write(t, 0, [torch.randn(count, dim, generator=generator), *torch.zeros(2, count, dim)])
        moves.clear()
        for _ in range(20):
            ids = torch.cat([torch.randint(0, count, (40,), generator=generator) for count in rows])
            group.pooled(ids, torch.arange(0, 40 * len(rows) + 1, 10)).square().sum().backward()
        count = len(moves)
        return count, [part for t in range(len(rows)) for part in store.read(t, 0, rows[t])]

    for module in (steps, lowest_module):
        monkeypatch.setattr(module, "loops", lambda: None)
    together, mine = run(HostRecords)
    apart, theirs = run(lambda rows, record_bytes: HostRecords(rows, record_bytes))
    assert (together, apart) == (20 * calls, 20 * len(rows))
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("high", [0.5, -0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_makes_first_rows_in_their_slots(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, high: float
) -> None:
    """In a shard that begins amid its table; of equal bounds they are constant. A function gives the same."""
    rows = (ROWS, 90)
    made = [UniformRows(2**40 + t, 1000 * t, 3, DIM, -0.25, high, dtype) for t in range(2)]

    def run(fresh: Sequence[Any]) -> list[Tensor]:
        store = CachedRows([CacheSpec(60, 70, HostRecords, fresh=each) for each in fresh], lru)
        shapes = [TableShape(f"t{t}", count, DIM, slots=60) for t, count in enumerate(rows)]
        spec = OptimizerSpec("rowwise_adagrad", lr=0.1, initial_accumulator_value=0.5)
        lookups = [LookupFeature(f"f{t}", t) for t in range(2)]
        group = TableGroup(shapes, lookups, dtype=dtype, device=CPU, optimizer=spec, store=store)
        store.attach(group)
        generator = torch.Generator().manual_seed(1)
        for _ in range(12):
            ids = torch.cat([torch.randint(0, count, (40,), generator=generator) for count in rows])
            group.pooled(ids, torch.arange(0, 81, 10)).square().sum().backward()
        assert all(count.fresh for count in store.counts)
        return [part for t in range(2) for part in store.read(t, 0, rows[t])]

    expected = run(made)
    for module in (steps, lowest_module):
        monkeypatch.setattr(module, "loops", lambda: None)
    calls: list[int] = []
    make = UniformRows.make
    monkeypatch.setattr(UniformRows, "make", lambda *given: calls.append(1) or make(*given))
    assert all(map(torch.equal, run(made), expected)) and len(calls) == 24
    assert all(map(torch.equal, run([partial(UniformRows.__call__, each) for each in made]), expected))
    assert len(calls) == 24
