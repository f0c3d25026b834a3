"""Proposers: what they propose and in which order; `GOLDEN` is what TorchRec proposes for the same options."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
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
from shardwise.planner.torchrec.types import (
    Perf,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)

GOLDEN: Any = golden("planner_props")


def option(table: str, kind: str, ms: Sequence[float], hbm: int, *, ddr: int = 0) -> ShardingOption:
    """One shard for each time in `ms`, all of the same size."""
    shards = [Shard([1, 1], [0, 0], Storage(hbm, ddr), Perf(time, 0, 0, 0)) for time in ms]
    return ShardingOption(table, Weight((8, 8)), ("m", Module()), [1.0], 8, kind, "device", "fused", shards)


def proposals(proposer: Any, problem: Instance, most: int = 1000) -> list[list[int]]:
    """Numbers of the proposed options, placed and rated as a planner would."""
    number = {id(one): k for k, one in enumerate(problem.options)}
    proposer.load(problem.options)
    found = []
    while len(found) < most and (proposal := proposer.propose()):
        rated = None
        try:
            plan = partitioners.GreedyPerfPartitioner().partition(proposal, problem.topology)
            rated = perf_models.NoopPerfModel(problem.topology).rate(plan)
        except PlannerError:
            pass
        found.append([number[id(one)] for one in proposal])
        proposer.feedback(rated is not None, proposal, rated, problem.topology)
    return found


def problem(*options: ShardingOption, ranks: int = 2, hbm: int = 100) -> Instance:
    return Instance(list(options), Topology(ranks, "cuda", hbm_cap=hbm))


@pytest.mark.parametrize("seed", GOLDEN)
@pytest.mark.parametrize("name", PROPOSERS)
def test_proposals_are_torchrecs_in_torchrecs_order(name: str, seed: str) -> None:
    theirs = GOLDEN[seed]["proposals"]
    assert proposals(PROPOSERS[name](proposers), instance(int(seed), types), len(theirs[name]) or 1) == theirs[name]


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


def test_greedy_moves_the_table_whose_largest_shard_takes_most_memory() -> None:
    given = problem(
        option("a", "table_wise", [1.0], 30),
        option("a", "row_wise", [2.0, 2.0], 20),
        option("a", "column_wise", [3.0, 3.0], 5),
        option("b", "table_wise", [1.0], 25),
        option("b", "row_wise", [2.0], 10),
        option("c", "table_wise", [1.0], 90),
    )
    # a at 30, b at 25, then a at 20 (b and c are at their last)
    assert proposals(proposers.GreedyProposer(), given) == [[0, 3, 5], [1, 3, 5], [1, 4, 5], [2, 4, 5]]


def test_greedy_never_moves_a_table_that_takes_no_memory() -> None:
    given = problem(option("a", "table_wise", [1.0], 0), option("a", "row_wise", [2.0], 0))
    assert proposals(proposers.GreedyProposer(), given) == [[0]]


def test_options_are_as_slow_as_their_slowest_shard_or_as_their_sum() -> None:
    given = problem(option("a", "table_wise", [3.0], 5), option("a", "row_wise", [2.0, 2.0], 5))
    assert proposals(proposers.GreedyProposer(), given)[0] == [1]
    assert proposals(proposers.GreedyProposer(use_depth=False), given)[0] == [0]


@pytest.mark.parametrize("threshold, count", [(None, 6), (0, 6), (1, 3), (3, 5)])
def test_greedy_stops_after_more_than_threshold_slower_proposals(threshold: int | None, count: int) -> None:
    given = problem(*(option("a", "table_wise", [1.0 + k], 10 - k) for k in range(6)))
    assert len(proposals(proposers.GreedyProposer(threshold=threshold), given)) == count


def test_uniform_proposes_only_types_that_every_table_has() -> None:
    given = problem(
        option("a", "table_wise", [1.0], 5),
        option("a", "row_wise", [2.0], 5),
        option("a", "row_wise", [1.0], 9),
        option("b", "column_wise", [1.0], 5),
        option("b", "row_wise", [3.0], 5),
    )
    assert proposals(proposers.UniformProposer(), given) == [[2, 4]]


def test_grid_proposes_every_combination_once_and_none_beyond_its_limit() -> None:
    given = problem(*(option(table, "table_wise", [ms], 1) for table in "abc" for ms in (2.0, 1.0)))
    combinations = proposals(proposers.GridSearchProposer(max_proposals=8), given)
    assert combinations == [list(one) for one in itertools.product((1, 0), (3, 2), (5, 4))]
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
    found = proposals(proposers.DynamicProgrammingProposer(hbm_bins_per_device=30), given)
    tables: dict[str, list[int]] = {}
    for k, one in enumerate(given.options):
        tables.setdefault(one.fqn, []).append(k)
    fastest: dict[int, float] = {}
    for one in itertools.product(*tables.values()):
        size = held(given, one)
        fastest[size] = min(fastest.get(size, float("inf")), spent(given, one))
    total = sum(device.storage.hbm for device in given.topology.devices)
    assert held(given, found[0]) == min(fastest)
    sizes = [held(given, one) for one in found[1:]]
    assert sizes == sorted({size for size in fastest if size < total}, reverse=True)
    assert [spent(given, one) for one in found[1:]] == [fastest[size] for size in sizes]


def test_dynamic_programming_on_devices_without_memory_finds_the_fastest() -> None:
    given = problem(
        option("a", "table_wise", [3.0], 0, ddr=5),
        option("a", "row_wise", [1.0, 1.0], 0, ddr=5),
        option("b", "table_wise", [1.0], 0, ddr=5),
        option("b", "row_wise", [1.0], 7),
        hbm=0,
    )
    assert proposals(proposers.DynamicProgrammingProposer(), given) == [[0, 2], [1, 2]]


def test_dynamic_programming_needs_the_devices() -> None:
    proposer = proposers.DynamicProgrammingProposer()
    proposer.load([option("a", "table_wise", [1.0], 1)])
    with pytest.raises(ValueError, match="storage_constraint"):
        proposer.feedback(True)


def test_the_list_of_proposals_has_each_once() -> None:
    given = problem(*(option(table, "table_wise", [ms], 1) for table in "ab" for ms in (2.0, 1.0)))
    both = [proposers.GreedyProposer(), proposers.GridSearchProposer()]
    found = proposers.proposers_to_proposals_list(both, given.options)
    greedy, grid = (proposals(one, given) for one in both)
    number = {id(one): k for k, one in enumerate(given.options)}
    assert [[number[id(one)] for one in proposal] for proposal in found] == [
        *greedy,
        *(one for one in grid if one not in greedy),
    ]


@pytest.mark.parametrize("name", PROPOSERS)
def test_no_options_make_no_proposal(name: str) -> None:
    proposer = PROPOSERS[name](proposers)
    proposer.load([])
    assert not proposer.propose()
