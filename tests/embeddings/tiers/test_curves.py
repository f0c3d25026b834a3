"""Curves of hits against caches that are run row by row, and Belady's rule against every way to choose victims."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest
import torch

from shardwise.embeddings.tiers.curves import TraceCurves, regret, sizes_between


def trace(seed: int, rows: int, batches: int, largest: int) -> list[list[int]]:
    random.seed(seed)
    weights = [1 / (row + 1) for row in range(rows)]
    made = []
    for _ in range(batches):
        wanted = {*random.choices(range(rows), weights, k=random.randint(0, largest))}
        made.append(sorted(wanted))
    return made


def curves_of(batches: list[list[int]], rows: int, first: int = 0) -> TraceCurves:
    curves = TraceCurves(rows, first)
    for batch in batches:
        curves.add(torch.tensor(batch, dtype=torch.int64))
    return curves


def run(batches: list[list[int]], slots: int, first: int, policy: str) -> tuple[int, int, int]:
    """Hits, misses and saves of a cache whose victims are found by looking at all its rows."""
    held: dict[int, tuple[int, int]] = {}
    hits = misses = saves = 0
    for number, batch in enumerate(batches):
        missing = [row for row in batch if row not in held]
        others = [row for row in held if row not in batch]

        def again(row: int, number: int = number) -> int:
            return next((n for n in range(number + 1, len(batches)) if row in batches[n]), len(batches))

        others.sort(key=(lambda row: held[row]) if policy == "lru" else lambda row: -again(row))
        victims = others[: max(0, len(held) + len(missing) - slots)]
        for row in victims:
            del held[row]
        held.update({row: (number, place) for place, row in enumerate(batch)})
        if number >= first:
            hits, misses, saves = hits + len(batch) - len(missing), misses + len(missing), saves + len(victims)
    return hits, misses, saves


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_counts_at_all_sizes_are_those_of_caches_that_run(policy: str, seed: int, first: int) -> None:
    batches = trace(seed, rows=60, batches=25, largest=18)
    curves = curves_of(batches, 60, first)
    sizes = [*range(curves.largest, 61)]
    counts = curves.lru(sizes) if policy == "lru" else curves.belady(sizes)
    numbers = zip(counts.hits.tolist(), counts.misses.tolist(), counts.saves.tolist(), strict=True)
    assert [*numbers] == [run(batches, slots, first, policy) for slots in sizes]


def test_the_curve_of_all_sizes_begins_at_the_largest_batch_and_ends_where_nothing_is_missed_twice() -> None:
    batches = trace(1, rows=60, batches=25, largest=18)
    curves = curves_of(batches, 60)
    counts = curves.lru()
    assert counts.slots.tolist() == [*range(curves.largest, curves.wanted + 1)]
    assert int(counts.misses[-1]) == curves.wanted and int(counts.saves[-1]) == 0
    assert torch.equal(counts.hits, curves.lru(counts.slots.tolist()).hits)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_victims_has_more_hits_than_belady(seed: int) -> None:
    batches = trace(seed, rows=7, batches=9, largest=3)
    most = max(map(len, batches))
    for slots in range(most, 7):

        @cache
        def best(number: int, held: frozenset[int], slots: int = slots) -> int:
            if number == len(batches):
                return 0
            batch = frozenset(batches[number])
            others = held - batch
            excess = max(0, len(held | batch) - slots)
            ways = combinations(sorted(others), excess)
            return len(held & batch) + max(best(number + 1, (held | batch) - set(gone)) for gone in ways)

        assert int(curves_of(batches, 7).belady([slots]).hits) == best(0, frozenset())


def test_belady_has_at_least_the_hits_of_lru_and_regret_is_what_lacks() -> None:
    curves = curves_of(trace(3, rows=200, batches=60, largest=40), 200, first=10)
    sizes = sizes_between(curves.largest, curves.wanted, 12)
    lru, best = curves.lru(sizes), curves.belady(sizes)
    assert (best.hits >= lru.hits).all() and (best.hits > lru.hits).any()
    lacking = regret(lru.hits, best.hits, curves.counted)
    assert lacking[0] == int(best.hits[0] - lru.hits[0]) / curves.counted and lacking[-1] == 0


def test_a_cache_that_cannot_hold_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="a cache of 2 slots does not hold the largest batch, of 3 rows"):
        curves_of([[1, 2, 3]], 5).lru([2])


def test_an_empty_trace_has_empty_curves() -> None:
    counts = curves_of([], 5).belady([3])
    assert [int(n) for n in (counts.hits, counts.misses, counts.saves)] == [0, 0, 0]


def test_sizes_between_are_in_order_and_have_both_ends() -> None:
    assert sizes_between(10, 1000, 3) == [10, 100, 1000]
    assert sizes_between(5, 5) == [5]
