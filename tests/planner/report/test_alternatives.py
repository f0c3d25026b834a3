"""What a choice would cost instead is what trying all its places gives, and the pieces of ranks add up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from planner_plain_costs import any_solution, some_plan, some_tables

from shardwise.planner.plan.alternatives import alternatives, pieces, slowest_ranks
from shardwise.planner.plan.planned import Planned
from shardwise.planner.search.problem import (
    Assignment,
    Problem,
    faults,
    loads,
)


def moved(planned: Planned, item: int, number: int, starts: tuple[int, ...]) -> Assignment:
    now = planned.solution.assignment
    choices, places = list(now.choices), list(now.starts)
    choices[item], places[item] = number, starts
    return Assignment(tuple(choices), tuple(places))


def tried(planned: Planned, item: int, number: int) -> tuple[float | None, int]:
    """The fastest step over all places within memory, and the least that any place lacks."""
    problem = planned.problem
    choice = problem.items[item].choices[number]
    best, lack = None, 1 << 60
    places = range(0, problem.world_size, choice.span)
    boundless = replace(problem, hbm=problem.hbm + (1 << 60), ddr=problem.ddr + (1 << 60))
    for starts in itertools.product(places, repeat=choice.blocks):
        there = moved(planned, item, number, starts)
        if faults(boundless, there):
            continue
        held = loads(problem, there)
        over = int(max(0, (held.hbm - problem.hbm).max(), (held.ddr - problem.ddr).max()))
        lack = min(lack, over)
        if over == 0:
            step = float(held.time_ms.max())
            best = step if best is None else min(best, step)
    return best, lack


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("world", "local"), [(3, 3), (4, 2)])
def test_each_alternative_is_the_best_of_all_places(seed: int, world: int, local: int) -> None:
    planned = some_plan(some_tables(6, seed), world, local_size=local, hbm_gib=6, seed=seed)
    checked = lacking = 0
    for item, ways in alternatives(planned).items():
        assert [way.number for way in ways] == list(range(len(planned.problem.items[item].choices)))
        for way in ways:
            choice = planned.problem.items[item].choices[way.number]
            there = moved(planned, item, way.number, way.starts)
            held = loads(planned.problem, there)
            assert way.step_ms == pytest.approx(held.time_ms.max(), rel=1e-9)
            assert way.slower_ms == pytest.approx(held.time_ms.max() - planned.loads.time_ms.max(), abs=1e-9)
            if way.number == planned.solution.assignment.choices[item]:
                continue
            best, lack = tried(planned, item, way.number)
            assert way.fits == (not faults(planned.problem, there))
            if len(set(choice.widths)) > 1:
                # unequal blocks are placed one by one, which need not be the best
                assert not way.fits or (best is not None and way.step_ms >= best - 1e-9)
                continue
            assert way.over_bytes == lack
            assert way.fits == (best is not None)
            if best is not None:
                assert way.step_ms == pytest.approx(best, rel=1e-9)
            checked, lacking = checked + way.fits, lacking + (not way.fits)
    assert checked > 10


def test_what_does_not_fit_says_what_the_rank_lacks() -> None:
    planned = some_plan(some_tables(6, 1), 4, hbm_gib=40, seed=1)
    held = planned.loads.hbm
    # no rank has room for more than it holds
    tight = replace(planned, problem=replace(planned.problem, hbm=held.copy()))
    for item, ways in alternatives(tight).items():
        for way in ways:
            lack = loads(planned.problem, moved(planned, item, way.number, way.starts)).hbm - held
            assert way.over_bytes == max(0, lack.max())
            assert way.over_in == "hbm"
    assert sum(not way.fits for ways in alternatives(tight).values() for way in ways) > 10


def test_a_choice_keeps_to_the_ranks_of_its_item() -> None:
    planned = some_plan(some_tables(5), 4, local_size=2, hbm_gib=64)
    items = tuple(replace(item, ranks=(2, 3)) for item in planned.problem.items)
    problem = replace(planned.problem, items=items)
    found = alternatives(replace(planned, problem=problem))
    for item, ways in found.items():
        current = planned.solution.assignment.choices[item]
        names = {problem.items[item].choices[way.number].sharding_type for way in ways if way.number != current}
        assert not names & {"row_wise", "data_parallel"}
        for way in ways:
            if way.number != current:
                assert set(way.starts) <= {2, 3}


def test_pieces_add_up_to_the_loads_of_ranks() -> None:
    planned = some_plan(some_tables(30), 8, local_size=4, hbm_gib=64)
    held, found = planned.loads, pieces(planned)
    problem: Problem = planned.problem
    assert np.allclose([sum(p.time_ms for p in mine) for mine in found] + problem.base_ms, held.time_ms)
    assert [sum(p.hbm for p in mine) for mine in found] == held.hbm.tolist()
    assert [sum(p.ddr for p in mine) for mine in found] == held.ddr.tolist()
    blocks = sum(p.blocks for mine in found for p in mine)
    chosen = zip(problem.items, planned.solution.assignment.choices, strict=True)
    assert blocks == sum(item.choices[n].blocks * item.choices[n].span for item, n in chosen)


def test_slowest_ranks_come_slowest_first() -> None:
    planned = some_plan(some_tables(30), 8, hbm_gib=64)
    time = planned.loads.time_ms
    assert slowest_ranks(planned)[0] == time.argmax()
    assert sorted(slowest_ranks(planned, within=1.0)) == list(range(8))
    near = slowest_ranks(planned, within=0.2)
    assert {r for r in range(8) if time[r] >= time.max() * 0.8} == set(near)
    assert list(time[near]) == sorted(time[near], reverse=True)


def test_the_same_plan_gives_the_same_alternatives_twice() -> None:
    planned = some_plan(some_tables(20), 8, local_size=4, hbm_gib=64)
    again = replace(planned, solution=any_solution(planned.problem))
    assert alternatives(planned) == alternatives(again)
