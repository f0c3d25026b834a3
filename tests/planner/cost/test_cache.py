"""Curves of misses, their approximation against caches that run, and memory shared among tables against the optimum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from shardwise.embeddings.tiers.curves import TraceCurves
from shardwise.planner.cost.cache import (
    Demand,
    Links,
    MissCurve,
    TooLittleMemory,
    curve_of,
    of_shard,
    record_bytes,
    share_slots,
    slot_bytes,
)
from shardwise.planner.tables import Feature, Skew, Table
from shardwise.planner.torchrec.proposers import EmbeddingOffloadScaleupProposer as ScaleUp
from shardwise.planner.torchrec.storage_estimators import EmbeddingOffloadStats


def random_curve(generator: np.random.Generator, rows: int) -> MissCurve:
    slots = np.unique(np.concatenate([[rows // 50 + 1], generator.integers(rows // 50 + 2, rows, 12), [rows]]))
    misses = np.sort(generator.random(len(slots)))[::-1] * rows / 20
    misses[-1] = 0
    return MissCurve.of_points(slots.tolist(), misses.tolist(), misses.tolist(), rows / 20, "drawn")


def test_a_curve_is_the_lower_hull_of_its_points() -> None:
    curve = MissCurve.of_points([1, 2, 3, 4, 5], [10, 9, 4, 3.5, 3.5], [0] * 5, 12, "by hand")
    assert curve.slots == (1, 3, 4) and curve.misses == (10, 4, 3.5)
    assert curve.misses_at(2) == 7 and curve.misses_at(100) == 3.5 and curve.hit_rate_at(3) == 1 - 4 / 12
    assert curve.slots_for(7) == 2 and curve.slots_for(3) == np.inf


@pytest.mark.parametrize("seed", range(5))
def test_hulls_lie_below_all_points_and_are_convex(seed: int) -> None:
    generator = np.random.default_rng(seed)
    slots, misses = range(1, 60), np.sort(generator.random(59))[::-1].tolist()
    curve = MissCurve.of_points(slots, misses, misses, 1, "drawn")
    assert all(curve.misses_at(s) <= m + 1e-12 for s, m in zip(slots, misses, strict=True))
    falls = np.diff(curve.misses) / np.diff(curve.slots)
    assert (np.diff(falls) > 0).all() and (falls < 0).all()


@pytest.mark.parametrize(("alpha", "shift"), [(0.0, 0.0), (0.8, 0.0), (1.05, 0.0), (1.3, 20.0)])
def test_ches_approximation_is_near_lru_of_ids_drawn_so(alpha: float, shift: float) -> None:
    rows, ids = 20_000, 1500
    generator = np.random.default_rng(0)
    chance = (np.arange(1, rows + 1) + shift) ** -alpha
    curves = TraceCurves(rows, first=150)
    for _ in range(250):
        drawn = np.unique(generator.choice(rows, ids, p=chance / chance.sum()))
        curves.add(torch.from_numpy(drawn))
    curve = MissCurve.of_skew(rows, ids, Skew(alpha, shift))
    assert curve.wanted == pytest.approx(curves.counted / 100, rel=0.02)
    sizes = [size for size in (2000, 4000, 8000, 16000) if size > curves.largest]
    measured = 1 - curves.lru(sizes).misses.numpy() / curves.counted
    # a cache may have lost a little more or less than the half of a batch that came at once
    assert [curve.hit_rate_at(size) for size in sizes] == pytest.approx(measured.tolist(), abs=0.02)


def test_cache_statistics_are_a_curve() -> None:
    counts = [50, 25, 12, 6, 4, 3]
    statistics = EmbeddingOffloadStats(0.2, 100, counts, 600)
    curve = MissCurve.of_statistics(statistics, 600)
    assert curve.wanted == 100 and curve.misses[-1] == 0
    for slots in (101, 201, 301, 401):
        assert curve.misses_at(slots) == pytest.approx(100 * statistics.expected_miss_rate(slots / 600), abs=1e-4)


def test_given_curves_go_before_statistics_and_these_before_skew() -> None:
    table = Table("t", 1000, 8, features=(Feature("f"),))
    given = random_curve(np.random.default_rng(0), 1000)
    statistics = EmbeddingOffloadStats(0.2, 100, [1, 1], 1000)
    assert curve_of(table, 50, {"t": given}, statistics) is given
    assert curve_of(table, 50, {}, statistics).source == "cache statistics"
    assert "approximation" in curve_of(table, 50, {}).source


def test_a_shard_of_a_part_of_the_rows_has_that_part_of_all() -> None:
    curve = random_curve(np.random.default_rng(1), 1000)
    part = of_shard(curve, 0.25)
    assert part.misses_at(50) == pytest.approx(curve.misses_at(200) / 4) and part.wanted == curve.wanted / 4


def test_bytes_of_a_record_are_those_of_the_store() -> None:
    from shardwise.data.record import record_bytes as stored

    rules = {"SGD": None, "RowWiseAdagrad": "rowwise_adagrad", "Adam": "adam"}
    for optimizer, rule in rules.items():
        for width in (4, 16, 100, 128):
            table = Table("t", 10, width, optimizer=optimizer)
            assert record_bytes(table, width) == stored(width, torch.float32, rule)
    assert slot_bytes(Table("t", 10, 16, optimizer="Adam"), 16) == 3 * 64 + 26


def test_a_file_is_as_slow_as_its_link_and_its_disk() -> None:
    links = Links(link_gb_s=10, disk_gb_s=1, disk_iops=1e6, find_ns=0)
    assert links.prefetch_ms(1000, 5000, 512) == pytest.approx(0.0512)
    assert links.prefetch_ms(1000, 5000, 512, from_disk=500) == pytest.approx(0.0512 + 500 * 4096 / 1e6)
    assert Links(10, 1, 1e5, 0).prefetch_ms(0, 0, 512, from_disk=1000) == pytest.approx(10.0)
    assert links.prefetch_ms(1000, 5000, 4096, from_disk=1000) == pytest.approx(0.4096 + 4.096)


def demands_of(seed: int, tables: int = 12) -> tuple[list[Demand], float]:
    generator = np.random.default_rng(seed)
    demands = []
    for number in range(tables):
        rows = int(generator.integers(1000, 100_000))
        demands.append(
            Demand(f"t{number}", random_curve(generator, rows), float(generator.choice([64, 128, 1024])),
                   float(generator.choice([1e-5, 3e-5])), fixed_bytes=4.0 * rows)
        )  # fmt: skip
    low, high = (sum(d.fixed_bytes + d.bytes_per_slot * d.range[end] for d in demands) for end in (0, 1))
    return demands, low + (high - low) * float(generator.uniform(0.02, 0.7))


@pytest.mark.parametrize("seed", range(10))
def test_shared_slots_are_the_optimum_of_the_linear_program(seed: int) -> None:
    demands, memory = demands_of(seed)
    shared = share_slots(demands, memory)
    # a variable for each piece: slots bought of it
    cost, room, limits = [], [], []
    base = sum(d.curve.misses_at(d.range[0]) * d.ms_per_miss for d in demands)
    left = memory - sum(d.fixed_bytes + d.range[0] * d.bytes_per_slot for d in demands)
    for demand in demands:
        for a, b, worth in demand.pieces():
            # the solver's tolerances are absolute
            cost.append(-1e6 * worth * demand.bytes_per_slot)
            room.append(demand.bytes_per_slot)
            limits.append((0, b - a))
    best = linprog(cost, A_ub=[room], b_ub=[left], bounds=limits)
    assert shared.bound_ms == pytest.approx(base + best.fun / 1e6, rel=1e-5)
    assert shared.bytes <= memory and shared.gap < 0.001


def test_memory_without_end_holds_all_rows_that_help() -> None:
    demands, _ = demands_of(3)
    shared = share_slots(demands, 1e15)
    assert list(shared.slots) == [int(d.range[1]) for d in demands] and shared.ms == pytest.approx(0, abs=1e-9)


def test_memory_for_less_than_the_smallest_caches_is_refused_with_what_would_do() -> None:
    demands, _ = demands_of(3)
    least = sum(d.fixed_bytes + d.bytes_per_slot * d.range[0] for d in demands)
    with pytest.raises(TooLittleMemory, match="the smallest caches of 12 tables need") as caught:
        share_slots(demands, least - 1000)
    assert caught.value.missing_bytes == pytest.approx(1000)


@pytest.mark.parametrize("seed", range(10))
def test_misses_are_never_more_than_those_of_torchrecs_proposer_with_the_same_memory(seed: int) -> None:
    """Both know the same histograms, begin with caches of one batch, and may use the same bytes."""
    generator = np.random.default_rng(seed)
    tables = int(generator.integers(4, 16))
    rows = generator.integers(10_000, 2_000_000, tables)
    row_bytes = generator.choice([64, 256, 512, 1536], tables).astype(float)
    wanted = (rows * generator.uniform(0.005, 0.05, tables)).astype(int)
    statistics = []
    for height, lookups in zip(rows.tolist(), wanted.tolist(), strict=True):
        counts = np.sort(generator.pareto(generator.uniform(0.5, 2), 200))[::-1] * generator.uniform(0.5, 1.5, 200)
        misses = 1 - np.cumsum(counts) / counts.sum()
        statistics.append(EmbeddingOffloadStats(float(misses.mean()), lookups, counts, height))
    demands = [
        Demand(str(n), MissCurve.of_statistics(statistics[n], int(rows[n])), float(row_bytes[n]), 1.0)
        for n in range(tables)
    ]
    begin = np.array([d.range[0] / r for d, r in zip(demands, rows, strict=True)])
    smallest = float((begin * rows * row_bytes).sum())
    budget = int((float((rows * row_bytes).sum()) - smallest) * generator.uniform(0.02, 0.5))
    model = np.stack([rows * row_bytes, np.zeros(tables)], axis=1)
    priority = [s.cacheability * s.expected_lookups for s in statistics]
    theirs = ScaleUp.allocate_budget(model, (rows * row_bytes).astype(np.int64), begin, budget, priority)
    ours = np.array(share_slots(demands, smallest + budget).slots) / rows
    assert (ours * rows * row_bytes).sum() <= smallest + budget

    def misses_of(load_factors: np.ndarray) -> float:
        return sum(
            s.expected_lookups * s.expected_miss_rate(float(f)) for s, f in zip(statistics, load_factors, strict=True)
        )

    assert misses_of(ours) <= misses_of(theirs)
