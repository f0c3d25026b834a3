"""Proposers: what they propose and in which order, as TorchRec does for the same options; one that sizes caches."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from checkout import golden

from shardwise.perf.evidence.planner_cases import PROPOSERS, Instance, Module, Weight, instance
from shardwise.planner.torchrec import (
    partitioners,
    perf_models,
    proposers,
    types,
)
from shardwise.planner.torchrec.proposers import EmbeddingOffloadScaleupProposer
from shardwise.planner.torchrec.types import (
    Enumerator,
    Perf,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)
from shardwise.sharding import CacheParams

GOLDEN: Any = golden("planner_props")


def option(table: str, kind: str, ms: Sequence[float], hbm: int, *, ddr: int = 0) -> ShardingOption:
    """One shard for each time in `ms`, all of the same size."""
    shards = [Shard([1, 1], [0, 0], Storage(hbm, ddr), Perf(time, 0, 0, 0)) for time in ms]
    return ShardingOption(table, Weight((8, 8)), ("m", Module()), [1.0], 8, kind, "device", "fused", shards)


def proposals(proposer: Any, problem: Instance, most: int = 1000) -> list[list[int]]:
    """Numbers of the proposed options, placed and rated as a planner would."""
    number = {id(sharding_option): k for k, sharding_option in enumerate(problem.options)}
    proposer.load(problem.options)
    proposed = []
    while len(proposed) < most and (proposal := proposer.propose()):
        rated = None
        try:
            plan = partitioners.GreedyPerfPartitioner().partition(proposal, problem.topology)
            rated = perf_models.NoopPerfModel(problem.topology).rate(plan)
        except PlannerError:
            pass
        proposed.append([number[id(sharding_option)] for sharding_option in proposal])
        proposer.feedback(rated is not None, proposal, rated, problem.topology)
    return proposed


def problem(*options: ShardingOption, ranks: int = 2, hbm: int = 100) -> Instance:
    return Instance(list(options), Topology(ranks, "cuda", hbm_cap=hbm))


@pytest.mark.parametrize("seed", GOLDEN)
@pytest.mark.parametrize("name", PROPOSERS)
def test_proposals_are_torchrecs_in_torchrecs_order(name: str, seed: str) -> None:
    expected = GOLDEN[seed]["proposals"]
    assert proposals(PROPOSERS[name](proposers), instance(int(seed), types), len(expected[name]) or 1) == expected[name]


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_proposer_loaded_again_begins_again(name: str) -> None:
    proposer = PROPOSERS[name](proposers)
    first, other = instance(8, types), instance(3, types)
    expected = proposals(PROPOSERS[name](proposers), first, 50)
    proposals(proposer, other, 50)
    assert proposals(proposer, first, 50) == expected


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_proposal_is_repeated_until_feedback(name: str) -> None:
    proposer, problem_ = PROPOSERS[name](proposers), instance(8, types)
    proposer.load(problem_.options)
    first = proposer.propose()
    assert first == proposer.propose()
    if first:
        proposer.feedback(True, first, 1.0, problem_.topology)
        assert proposer.propose() != first


SLOW_OR_TWICE = problem(option("a", "table_wise", [3.0], 5), option("a", "row_wise", [2.0, 2.0], 5))
PROPOSED: dict[str, tuple[Any, Instance, list[list[int]]]] = {
    # a at 30, b at 25, then a at 20 (b and c are at their last)
    "greedy moves the table whose largest shard takes most memory": (
        proposers.GreedyProposer(),
        problem(
            option("a", "table_wise", [1.0], 30), option("a", "row_wise", [2.0, 2.0], 20),
            option("a", "column_wise", [3.0, 3.0], 5), option("b", "table_wise", [1.0], 25),
            option("b", "row_wise", [2.0], 10), option("c", "table_wise", [1.0], 90),
        ),
        [[0, 3, 5], [1, 3, 5], [1, 4, 5], [2, 4, 5]],
    ),
    "greedy never moves a table that takes no memory": (
        proposers.GreedyProposer(),
        problem(option("a", "table_wise", [1.0], 0), option("a", "row_wise", [2.0], 0)),
        [[0]],
    ),
    "options are as slow as their slowest shard": (proposers.GreedyProposer(), SLOW_OR_TWICE, [[1], [0]]),
    "options are as slow as the sum of their shards": (
        proposers.GreedyProposer(use_depth=False), SLOW_OR_TWICE, [[0], [1]],
    ),
    "uniform proposes only types that every table has": (
        proposers.UniformProposer(),
        problem(
            option("a", "table_wise", [1.0], 5), option("a", "row_wise", [2.0], 5), option("a", "row_wise", [1.0], 9),
            option("b", "column_wise", [1.0], 5), option("b", "row_wise", [3.0], 5),
        ),
        [[2, 4]],
    ),
    "dynamic programming on devices without memory finds the fastest": (
        proposers.DynamicProgrammingProposer(),
        problem(
            option("a", "table_wise", [3.0], 0, ddr=5), option("a", "row_wise", [1.0, 1.0], 0, ddr=5),
            option("b", "table_wise", [1.0], 0, ddr=5), option("b", "row_wise", [1.0], 7), hbm=0,
        ),
        [[0, 2], [1, 2]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PROPOSED)
def test_the_options_that_are_proposed(what: str) -> None:
    proposer, given, expected = PROPOSED[what]
    assert proposals(proposer, given) == expected


@pytest.mark.parametrize("threshold, count", [(None, 6), (0, 6), (1, 3), (3, 5)])
def test_greedy_stops_after_more_than_threshold_slower_proposals(threshold: int | None, count: int) -> None:
    given = problem(*(option("a", "table_wise", [1.0 + k], 10 - k) for k in range(6)))
    assert len(proposals(proposers.GreedyProposer(threshold=threshold), given)) == count


def test_grid_proposes_every_combination_once_and_none_beyond_its_limit() -> None:
    given = problem(*(option(table, "table_wise", [ms], 1) for table in "abc" for ms in (2.0, 1.0)))
    combinations = proposals(proposers.GridSearchProposer(max_proposals=8), given)
    assert combinations == [list(combination) for combination in itertools.product((1, 0), (3, 2), (5, 4))]
    assert proposals(proposers.GridSearchProposer(max_proposals=7), given) == []


def held(problem_: Instance, proposal: Sequence[int]) -> int:
    return sum(problem_.options[k].total_storage.hbm for k in proposal)


def spent(problem_: Instance, proposal: Sequence[int]) -> float:
    return sum(problem_.options[k].total_perf for k in proposal)


@pytest.mark.parametrize("seed", range(6))
def test_dynamic_programming_finds_the_least_time_within_each_total(seed: int) -> None:
    """With a bin for every size, the proposals are the fastest combinations of their sizes."""
    draw = random.Random(seed)
    given = problem(
        *(option(table, "table_wise", [draw.randint(0, 9) / 8], draw.randint(0, 20)) for table in "abcd" * 4),
        hbm=30,
    )
    proposed = proposals(proposers.DynamicProgrammingProposer(hbm_bins_per_device=30), given)
    tables: dict[str, list[int]] = {}
    for k, sharding_option in enumerate(given.options):
        tables.setdefault(sharding_option.fqn, []).append(k)
    fastest: dict[int, float] = {}
    for combination in itertools.product(*tables.values()):
        size = held(given, combination)
        fastest[size] = min(fastest.get(size, float("inf")), spent(given, combination))
    total = sum(device.storage.hbm for device in given.topology.devices)
    assert held(given, proposed[0]) == min(fastest)
    sizes = [held(given, proposal) for proposal in proposed[1:]]
    assert sizes == sorted({size for size in fastest if size < total}, reverse=True)
    assert [spent(given, proposal) for proposal in proposed[1:]] == [fastest[size] for size in sizes]


def test_dynamic_programming_needs_the_devices() -> None:
    proposer = proposers.DynamicProgrammingProposer()
    proposer.load([option("a", "table_wise", [1.0], 1)])
    with pytest.raises(ValueError, match="storage_constraint"):
        proposer.feedback(True)


def test_the_list_of_proposals_has_each_once() -> None:
    given = problem(*(option(table, "table_wise", [ms], 1) for table in "ab" for ms in (2.0, 1.0)))
    both = [proposers.GreedyProposer(), proposers.GridSearchProposer()]
    proposed = proposers.proposers_to_proposals_list(both, given.options)
    greedy, grid = (proposals(proposer, given) for proposer in both)
    number = {id(sharding_option): k for k, sharding_option in enumerate(given.options)}
    assert [[number[id(sharding_option)] for sharding_option in proposal] for proposal in proposed] == [
        *greedy,
        *(numbers for numbers in grid if numbers not in greedy),
    ]


@pytest.mark.parametrize("name", PROPOSERS)
def test_no_options_make_no_proposal(name: str) -> None:
    proposer = PROPOSERS[name](proposers)
    proposer.load([])
    assert not proposer.propose()


ROWS, COLUMNS = 1000, 8
TABLE_BYTES = ROWS * COLUMNS * 4
# what a cached table takes on the device whatever its cache, for prefetching
AHEAD_BYTES = 100


@dataclass
class Statistics:
    cacheability: float
    expected_lookups: float


class Estimates(Enumerator):
    """A cached table takes its cache and `AHEAD_BYTES`, misses cost a second for the whole table."""

    def __init__(self, ahead_bytes: int = AHEAD_BYTES) -> None:
        self.ahead_bytes = ahead_bytes

    def enumerate(self, module: Any, sharders: list[Any]) -> list[ShardingOption]:
        raise AssertionError("a proposer has its options already")

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        for option in sharding_options:
            cached = option.compute_kernel == "fused_uvm_caching"
            share = (option.cache_load_factor or 0.0) if cached else 1.0
            hbm = int(share * TABLE_BYTES) + self.ahead_bytes * cached
            option.shards[0].storage = Storage(hbm, TABLE_BYTES * cached)
            option.shards[0].perf = Perf(1.0, 0, 0, 0, prefetch_compute=1000 * (1 - share))


def table(name: str, load_factor: float | None, stats: Statistics | None, kernel: str = "fused_uvm_caching") -> Any:
    params = CacheParams(load_factor=load_factor, stats=stats)  # type: ignore[arg-type]
    shard = Shard([ROWS, COLUMNS], [0, 0])
    return ShardingOption(
        name, Weight((ROWS, COLUMNS)), ("m", Module()), [1.0], 8, "table_wise", "device", kernel, [shard], params
    )


def options(enumerator: Estimates) -> list[ShardingOption]:
    given = [
        table("often", 0.1, Statistics(0.5, 300)),
        table("seldom", 0.1, Statistics(0.5, 100)),
        table("unknown", 0.1, None),
        table("device", None, None, "fused"),
    ]
    enumerator.populate_estimates(given)
    return given


def sizes(proposal: list[ShardingOption]) -> dict[str, float | None]:
    return {option.name: option.cache_load_factor for option in proposal}


def hbm(proposal: list[ShardingOption]) -> int:
    return sum(option.total_storage.hbm for option in proposal)


def driven(
    room: int, *, largest: int | None = None, given: list[ShardingOption] | None = None
) -> list[list[ShardingOption]]:
    """All proposals with this much device memory; those of more than `largest` bytes cannot be placed."""
    enumerator, proposer = Estimates(), EmbeddingOffloadScaleupProposer()
    topology = Topology(1, "cuda", hbm_cap=room)
    proposer.load(given or options(enumerator), enumerator)
    proposed = []
    while (proposal := proposer.propose()) is not None:
        proposed.append(proposal)
        assert len(proposed) < 100
        fits = hbm(proposal) <= (room if largest is None else largest)
        rating = sum(option.total_perf for option in proposal) if fits else None
        proposer.feedback(fits, proposal, rating, topology)
    return proposed


def test_the_first_proposal_has_the_users_load_factors_and_the_others_larger_caches() -> None:
    first, *others = driven(4 * TABLE_BYTES)
    assert sizes(first) == {"often": 0.1, "seldom": 0.1, "unknown": 0.1, "device": None}
    assert others
    for proposal in others:
        for option in proposal[:2]:
            assert option.compute_kernel == "fused" or (option.cache_load_factor or 0) >= 0.0999


def test_caches_stay_within_the_memory_that_is_left() -> None:
    room = 2 * TABLE_BYTES
    assert max(map(hbm, driven(room))) <= room


def test_bytes_go_to_tables_in_proportion_to_lookups_that_a_cache_helps() -> None:
    for proposal in driven(2 * TABLE_BYTES)[1:]:
        often, seldom = (option.cache_load_factor for option in proposal[:2])
        if often is not None and seldom is not None:
            assert often - 0.1 == pytest.approx(3 * (seldom - 0.1), rel=1e-3)


def test_tables_without_statistics_or_caches_stay_as_they_are() -> None:
    for proposal in driven(4 * TABLE_BYTES):
        assert (proposal[2].compute_kernel, proposal[2].cache_load_factor) == ("fused_uvm_caching", 0.1)
        assert proposal[3].compute_kernel == "fused"


def test_a_cache_as_large_as_its_table_becomes_a_table_on_the_device() -> None:
    enumerator = Estimates()
    plan = EmbeddingOffloadScaleupProposer.next_plan(options(enumerator), 10 * TABLE_BYTES, enumerator)
    assert plan is not None
    assert [option.compute_kernel for option in plan] == ["fused", "fused", "fused_uvm_caching", "fused"]
    assert sizes(plan)["often"] is None


def test_what_could_not_be_placed_makes_later_proposals_smaller() -> None:
    largest = 2 * TABLE_BYTES
    hbm_sizes = [hbm(proposal) for proposal in driven(4 * TABLE_BYTES, largest=largest)]
    failed = [k for k, size in enumerate(hbm_sizes) if size > largest]
    assert failed
    for k in failed:
        assert all(size <= hbm_sizes[k] for size in hbm_sizes[k + 1 :])


def test_without_memory_to_spend_only_the_first_proposal_is_made() -> None:
    """TorchRec's search never returns from an empty interval."""
    assert len(driven(hbm(options(Estimates())))) == 1


def test_tables_whose_cache_takes_more_than_they_do_begin_on_the_device() -> None:
    enumerator, proposer = Estimates(ahead_bytes=TABLE_BYTES), EmbeddingOffloadScaleupProposer()
    proposer.load(options(enumerator), enumerator)
    proposal = proposer.propose()
    assert proposal is not None
    assert {option.compute_kernel for option in proposal} == {"fused"}
    assert hbm(proposal) == 4 * TABLE_BYTES


def test_the_users_options_and_parameters_are_not_changed() -> None:
    given = options(Estimates())
    assert len(driven(4 * TABLE_BYTES, given=given)) > 1
    assert sizes(given) == {"often": 0.1, "seldom": 0.1, "unknown": 0.1, "device": None}
    assert [option.compute_kernel for option in given] == [*["fused_uvm_caching"] * 3, "fused"]


def test_of_several_options_the_fastest_cached_one_is_used() -> None:
    given = [table("a", None, None, "fused"), table("a", 0.1, None), table("a", 0.5, None)]
    Estimates().populate_estimates(given)
    assert sizes(driven(4 * TABLE_BYTES, given=given)[0]) == {"a": 0.5}


def test_without_an_enumerator_only_the_first_proposal_is_made() -> None:
    given, proposer = options(Estimates()), EmbeddingOffloadScaleupProposer()
    proposer.load(given)
    proposer.feedback(True, proposer.propose(), 1.0, Topology(1, "cuda"))
    assert proposer.propose() is None


# model, bytes on the device, load factors, budget, priority, and the load factors that TorchRec 1.8.0 gives
ALLOCATIONS = [
    ([[1e3, 50], [2e3, 10], [500, 0]], [1040, 3000, 600], [0.1, 0.2, 0.5], 600, [1, 2, 3],
     [0.21666666865348816, 0.3166666626930237, 1.0]),
    ([[1e3, 50], [2e3, 10], [500, 0]], [1040, 3000, 600], [0.1, 0.2, 0.5], 5000, [1, 2, 3], [1.0, 1.0, 1.0]),
    ([[1e3, 500], [2e3, 10]], [1200, 3000], [0.5, 0.1], 900, [5, 1], [1.0, 0.44999998807907104]),
    ([[3e9, 7], [123456789, 11]], [4000000000, 200000000], [0.01, 0.3], 1234567890, [0.3, 0.7],
     [0.39271605014801025, 1.0]),
]  # fmt: skip


@pytest.mark.parametrize("model, ceiling, given, budget, priority, expected", ALLOCATIONS)
def test_bytes_are_dealt_out_as_torchrec_deals_them(
    model: Any, ceiling: Any, given: Any, budget: int, priority: Any, expected: list[float]
) -> None:
    factors = EmbeddingOffloadScaleupProposer.allocate_budget(model, ceiling, given, budget, priority)
    assert factors.tolist() == expected


def test_a_cache_that_takes_no_device_memory_keeps_its_load_factor() -> None:
    factors = EmbeddingOffloadScaleupProposer.allocate_budget([[0, 5], [100, 0]], [9, 200], [0.25, 0.5], 10, [1, 1])
    assert factors.tolist() == pytest.approx([0.25, 0.6])
