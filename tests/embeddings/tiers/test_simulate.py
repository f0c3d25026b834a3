"""The simulated cache: Belady's hits where the window covers the trace, and a cache that is run by hand where not."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from shardwise.embeddings.tiers.curves import TraceCurves
from shardwise.embeddings.tiers.simulate import CacheSetting, rows_of_shard, simulate

ROWS = 80


def trace(seed: int, batches: int = 40, largest: int = 16) -> list[Tensor]:
    random.seed(seed)
    weights = [1 / (row + 1) for row in range(ROWS)]
    return [
        torch.tensor(sorted({*random.choices(range(ROWS), weights, k=random.randint(1, largest))}))
        for _ in range(batches)
    ]


def by_hand(batches: list[Tensor], slots: int) -> tuple[int, int]:
    """Hits and saves of LRU, whose victims of one batch are those in the lowest slots."""
    slot_rows: list[int | None] = [None] * slots
    used = [0] * slots
    hits = saves = 0
    for number, rows in enumerate(batch.tolist() for batch in batches):
        present = [slot for slot, row in enumerate(slot_rows) if row in rows]
        missing = [row for row in rows if row not in slot_rows]
        hits += len(present)
        free = sorted((slot for slot in range(slots) if slot not in present), key=lambda slot: (used[slot], slot))
        for slot, row in zip(sorted(free[: len(missing)]), missing, strict=True):
            saves += slot_rows[slot] is not None
            slot_rows[slot] = row
        for slot, row in enumerate(slot_rows):
            if row in rows:
                used[slot] = number + 1
    return hits, saves


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [16, 25, 60, 80])
def test_lru_is_the_cache_that_is_run_by_hand(seed: int, slots: int) -> None:
    batches = trace(seed)
    done = simulate(batches, CacheSetting(ROWS, slots, policy="lru"))
    assert (done.hits, done.saves) == by_hand(batches, slots)
    assert done.fresh == torch.cat(batches).unique().numel()
    assert done.by_batch[0] == (batches[0].numel(), batches[0].numel(), 0)


@pytest.mark.parametrize("policy", ["lru", "lfu", "aged_lfu"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [16, 30, 60])
def test_a_window_over_the_whole_trace_has_the_hits_of_belady(seed: int, slots: int, policy: str) -> None:
    batches = trace(seed)
    curves = TraceCurves(ROWS)
    for rows in batches:
        curves.add(rows)
    done = simulate(batches, CacheSetting(ROWS, slots, policy=policy, ahead=len(batches)))
    best = curves.belady([slots])
    assert (done.hits, done.saves) == (int(best.hits), int(best.saves))


def test_counts_from_a_batch_on_leave_out_those_before() -> None:
    batches = trace(3)
    done = simulate(batches, CacheSetting(ROWS, 20))
    first = simulate(batches[:10], CacheSetting(ROWS, 20))
    later = done.after(10)
    assert (later.wanted, later.hits, later.saves) == (
        done.wanted - first.wanted, done.hits - first.hits, done.saves - first.saves,
    )  # fmt: skip


def test_prefetches_that_find_no_room_wait_and_are_counted() -> None:
    batches = [torch.arange(10 * (n % 3), 10 * (n % 3) + 10) for n in range(12)]
    assert simulate(batches, CacheSetting(ROWS, 30, prefetch=2)).stalls == 0
    done = simulate(batches, CacheSetting(ROWS, 15, prefetch=2))
    assert done.stalls > 0 and done.wanted == 120


def test_a_batch_that_does_not_fit_grows_the_slots_or_is_refused() -> None:
    batches = [torch.arange(10), torch.arange(30)]
    with pytest.raises(ValueError, match="a batch wants 30 distinct rows, and there may be 20 slots"):
        simulate(batches, CacheSetting(ROWS, 20))
    done = simulate(batches, CacheSetting(ROWS, 20, max_slots=80))
    assert done.grown == 1 and done.slots >= 30 and done.misses == 30


def test_rows_of_a_shard_are_counted_from_its_first() -> None:
    rows = torch.tensor([0, 4, 5, 9, 10])
    assert rows_of_shard(rows, 5, 10).tolist() == [0, 4]
    assert rows_of_shard(rows, 20, 30).tolist() == []
