"""Slots that a plan chooses: the best where tables lie, a bound that holds for any, files, and caches that thrash.

Takes 25 s: some fifty searches, each over hundreds of choices.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.planner import (
    Feature,
    NoRoomError,
    ParameterConstraints,
    Planned,
    PlannerError,
    Skew,
    Table,
    Topology,
    explain,
    load_planned,
    plan_tables,
    save_planned,
)
from shardwise.planner.cost.cache import Demand, MissCurve, share_slots
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.layout import Tier
from shardwise.planner.plan.slots import PREFETCH, ThrashError
from shardwise.planner.search.problem import loads
from shardwise.planner.search.relax import relax
from shardwise.planner.torchrec.storage_estimators import EmbeddingOffloadStats

GIB, MIB = 2**30, 2**20
TIERED = {"*": ParameterConstraints(tier=Tier())}


def tables_of(seed: int, count: int = 6) -> list[Table]:
    generator = np.random.default_rng(seed)
    return [
        Table(
            f"t{n}", int(generator.integers(50_000, 2_000_000)), int(generator.choice([16, 32, 64])),
            features=(Feature(f"f{n}", float(generator.integers(1, 12))),), optimizer="RowWiseAdagrad",
            skew=Skew(float(generator.uniform(0.95, 1.25))),
        )
        for n in range(count)
    ]  # fmt: skip


def topology_of(tables: list[Table], share: float, ranks: int = 2) -> Topology:
    size = sum(table.num_embeddings * (4 * table.embedding_dim + 4) for table in tables)
    return Topology(ranks, "cuda", hbm_cap=int(size * share / ranks) + 40 * MIB, ddr_cap=64 * GIB)


def planned_of(seed: int, share: float = 0.2, ranks: int = 2, **more: Any) -> Planned:
    tables = tables_of(seed)
    return plan_tables(tables, topology_of(tables, share, ranks), 512, constraints=TIERED, **more)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(10))
def test_slots_of_any_number_are_at_most_two_percent_better(seed: int) -> None:
    """Ten random sets of tables whose slots are chosen, with the gap that the relaxation proves."""
    planned = planned_of(seed, share=float(np.random.default_rng(seed).uniform(0.1, 0.5)), ranks=1 + seed % 3)
    assert planned.solution.gap <= 0.02 and planned.certified is planned.solution
    assert (planned.loads.hbm <= planned.problem.hbm).all()
    for _, choice, _ in planned.placed():
        assert choice.cached is not None and choice.cached.hit_rate >= 0.1


def test_on_one_rank_slots_are_those_of_memory_shared_by_what_a_byte_saves() -> None:
    planned = planned_of(3, share=0.3, ranks=1)
    cost = planned.request and planned.request.cost
    assert isinstance(cost, ShardwiseCost)
    demands, fixed = [], 0.0
    for table, choice, _ in planned.placed():
        cached = choice.cached
        assert cached is not None
        curve = cost.curve(table)
        # the prefetch of a miss, from what the plan counts for all of them
        idle = cost.links.prefetch_ms(0, curve.wanted, 1)
        a_miss = (choice.parts_ms[PREFETCH].sum() - idle) / max(cached.misses, 1e-9)
        demands.append(Demand(table.name, curve, cached.slot_bytes, a_miss, least=2 * curve.wanted))
        fixed += float(choice.hbm.sum()) - cached.slots * cached.slot_bytes
    best = share_slots(demands, planned.problem.hbm[0] - fixed)
    ours = sum(
        d.ms_per_miss * c.cached.misses for d, (_, c, _) in zip(demands, planned.placed(), strict=True) if c.cached
    )
    assert ours <= best.ms * 1.02


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 4))])
def test_the_bound_holds_for_slots_between_the_sizes_that_are_searched(seed: int) -> None:
    """A plan with sizes that the search did not have is never faster than the bound that it proved."""
    planned = planned_of(seed, share=0.2)
    request = planned.request
    assert request is not None
    generator = np.random.default_rng(seed)
    tables = {table.name: table for table in planned.tables}
    for _ in range(4):
        slots = {name: int(generator.integers(1000, table.num_embeddings)) for name, table in tables.items()}
        rules = {name: ParameterConstraints(tier=Tier(slots=count)) for name, count in slots.items()}
        try:
            with warnings.catch_warnings():
                # caches that thrash are not what is looked at here
                warnings.simplefilter("ignore")
                other = plan_tables(list(tables.values()), planned.topology, 512, constraints=rules)
        except NoRoomError:
            continue
        assert other.solution.time_ms >= planned.solution.bound_ms * (1 - 1e-9)


def test_more_memory_never_makes_a_plan_slower() -> None:
    times = [planned_of(5, share).solution.time_ms for share in (0.05, 0.2, 0.6, 1.3)]
    assert times == sorted(times, reverse=True)


def test_all_rows_are_on_the_device_where_they_fit() -> None:
    planned = planned_of(1, share=1.5)
    for table, choice, _ in planned.placed():
        assert choice.cached is not None and choice.cached.slots == table.num_embeddings
        assert choice.cached.misses == 0


def test_bytes_and_times_of_a_given_tier_are_those_of_the_design() -> None:
    table = Table("t", 100_000, 32, features=(Feature("f", 4.0),), optimizer="Adam", skew=Skew(1.1))
    topology = Topology(1, "cuda", hbm_cap=GIB, ddr_cap=GIB)
    cost = ShardwiseCost(topology, 512)
    curve = cost.curve(table)
    resident, cached = (
        cost.price(table, way)
        for rule in (None, ParameterConstraints(tier=Tier(slots=0.1)))
        for way in cost.ways(table, rule)
        if way.sharding_type == "table_wise"
    )
    row, record = 3 * 4 * 32, 384
    saved = 100_000 * row - 10_000 * (row + 26) - 4 * 100_000
    assert int(resident.hbm.sum() - cached.hbm.sum()) == saved and int(cached.ddr.sum()) == 100_000 * record
    assert cached.cached is not None and cached.cached.misses == curve.misses_at(10_000) and not cached.cached.chosen
    expected = cost.links.prefetch_ms(curve.misses_at(10_000), curve.wanted, record)
    assert cached.parts_ms[PREFETCH].sum() == pytest.approx(expected)
    on_disk = ParameterConstraints(tier=Tier(slots=0.1, below="file", folder="scratch", ram_rows=0.05))
    (stored,) = (cost.price(table, way) for way in cost.ways(table, on_disk) if way.sharding_type == "table_wise")
    assert int(stored.ddr.sum()) == 5000 * record
    assert stored.parts_ms[PREFETCH].sum() > cached.parts_ms[PREFETCH].sum()


def test_given_curves_and_statistics_are_what_is_predicted_by() -> None:
    tables = [Table("t", 100_000, 32, features=(Feature("f", 4.0),), optimizer="Adam")]
    topology = Topology(1, "cuda", hbm_cap=10 * MIB, ddr_cap=GIB)
    curve = MissCurve((5000.0, 20_000.0), (600.0, 50.0), (600.0, 50.0), 1800.0, "by hand")
    planned = plan_tables(tables, topology, 512, constraints=TIERED, curves={"t": curve})
    ((_, choice, _),) = planned.placed()
    assert choice.cached is not None and choice.cached.source == "by hand"
    assert choice.cached.slots == 20_000 and choice.cached.misses == 50
    statistics = EmbeddingOffloadStats(0.1, 1800, [80, 10, 5, 3, 2], 100_000)

    class Params:
        stats = statistics

    rules = {"t": ParameterConstraints(tier=Tier(), cache_params=Params())}
    with pytest.warns(UserWarning, match="cache_params"):
        planned = plan_tables(tables, topology, 512, constraints=rules)
    ((_, choice, _),) = planned.placed()
    assert choice.cached is not None and choice.cached.source == "cache statistics"


def test_a_plan_with_chosen_slots_is_written_read_and_explained(tmp_path: Path) -> None:
    planned = planned_of(2)
    save_planned(planned, tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    read = load_planned(tmp_path / "plan.json")
    assert read.solution.assignment.starts == planned.solution.assignment.starts
    assert read.loads.time_ms.tolist() == planned.loads.time_ms.tolist()
    text = explain(planned)
    assert explain(read) == text and "tiers" in text and "slots" in text and "% hits" in text
    for table, choice, _ in planned.placed():
        assert choice.cached is not None
        assert data["plan"][""][table.name]["tier"] == {"slots": choice.cached.slots, "max_slots": 1.0}


def test_a_cache_that_would_miss_nearly_always_is_refused_with_the_smallest_fix() -> None:
    tables = [Table("t", 1_000_000, 32, features=(Feature("f", 4.0),), optimizer="RowWiseAdagrad")]
    topology = Topology(1, "cuda", hbm_cap=7 * MIB, ddr_cap=4 * GIB)
    with pytest.raises(ThrashError, match=r"of the rows that table 't' wants.*GiB more for table 't'") as caught:
        plan_tables(tables, topology, 512, constraints=TIERED)
    more = caught.value.more_bytes["t"]
    assert more > 0
    enough = replace_hbm(topology, int(topology.hbm[0] + 1.05 * more))
    planned = plan_tables(tables, enough, 512, constraints=TIERED)
    ((_, choice, _),) = planned.placed()
    assert choice.cached is not None and choice.cached.hit_rate >= 0.1
    with pytest.warns(UserWarning, match="a cache would thrash: 0.5% of the rows"):
        plan_tables(tables, topology, 512, constraints={"t": ParameterConstraints(tier=Tier(slots=5000))})


def replace_hbm(topology: Topology, hbm: int) -> Topology:
    return Topology(topology.world_size, "cuda", hbm_cap=hbm, ddr_cap=topology.ddr[0])


def test_rows_that_take_far_longer_than_a_step_are_refused() -> None:
    tables = [Table("t", 1_000_000, 256, features=(Feature("f", 50.0),), optimizer="Adam", skew=Skew(0.7))]
    topology = Topology(1, "cuda", hbm_cap=500 * MIB, ddr_cap=8 * GIB, hbm_to_ddr_mem_bw=1e5)
    with pytest.raises(ThrashError, match=r"ms to come to rank 0, .* times the .* ms of all else"):
        plan_tables(tables, topology, 512, constraints=TIERED)


def test_a_model_is_planned_with_slots_that_its_table_then_has() -> None:
    import torch

    from shardwise import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingShardingPlanner,
        RowWiseAdagrad,
        apply_optimizer_in_backward,
        get_default_sharders,
    )

    tables = [EmbeddingBagConfig(rows, 32, name, feature_names=[name]) for name, rows in (("a", 500_000), ("b", 5000))]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables, device="meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    topology = Topology(2, "cuda", hbm_cap=120 * MIB, ddr_cap=GIB)
    rules = {"a": ParameterConstraints(tier=Tier(half_life=9), skew=Skew(1.1))}
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=256, constraints=rules)
    plan = planner.plan(model, get_default_sharders())
    tier: Any = plan.plan["0"]["a"].tier
    assert tier == Tier(slots=tier.slots, max_slots=1.0, half_life=9) and 1000 < tier.slots <= 500_000
    assert plan.plan["0"]["b"].tier is None and planner.last_plan is not None
    cached = [choice.cached for _, choice, _ in planner.last_plan.placed() if choice.cached is not None]
    assert [each.slots for each in cached] == [tier.slots]


def test_tables_that_share_a_rank_need_slots() -> None:
    rules = {"*": ParameterConstraints(tier=Tier(), same_rank="x")}
    with pytest.raises(PlannerError, match="same_rank='x' and a Tier without slots: give it a number"):
        plan_tables(tables_of(0), Topology(2, "cuda", hbm_cap=GIB, ddr_cap=GIB), 512, constraints=rules)


def test_sizes_of_one_cache_reach_to_their_neighbours() -> None:
    planned = planned_of(0)
    for item in planned.problem.items:
        for choice in item.choices:
            assert choice.reach is not None
            assert (choice.reach[0] <= choice.time_ms).all() and (choice.reach[1] <= choice.hbm).all()
    assert relax(planned.problem).bound_ms <= loads(planned.problem, planned.solution.assignment).time_ms.max()
    plain = replace(planned.problem, items=tuple(
        replace(item, choices=tuple(replace(choice, reach=None) for choice in item.choices))
        for item in planned.problem.items
    ))  # fmt: skip
    assert relax(planned.problem).bound_ms <= relax(plain).bound_ms * (1 + 1e-9)
