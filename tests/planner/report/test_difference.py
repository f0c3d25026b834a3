"""Two plans compared: what is said to differ does, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from planner_plain_costs import any_solution, some_plan, some_tables

from shardwise.planner.plan.explanation import gib, ms
from shardwise.planner.plan.planned import Planned
from shardwise.planner.reports.difference import diff
from shardwise.planner.search.problem import Assignment, loads


def moved(planned: Planned, item: int, number: int, starts: tuple[int, ...]) -> Planned:
    now = planned.solution.assignment
    choices, places = list(now.choices), list(now.starts)
    choices[item], places[item] = number, starts
    made = Assignment(tuple(choices), tuple(places))
    time = float(loads(planned.problem, made).time_ms.max())
    return replace(planned, solution=replace(planned.solution, assignment=made, time_ms=time))


def choice_of(planned: Planned, item: int, strategy: str) -> int:
    return next(n for n, c in enumerate(planned.problem.items[item].choices) if c.sharding_type == strategy)


def plain() -> Planned:
    """Ten tables, all table-wise on rank 0 of 4."""
    planned = some_plan(some_tables(10), 4, local_size=2, hbm_gib=200)
    for item in range(10):
        planned = moved(planned, item, choice_of(planned, item, "table_wise"), (0,))
    return planned


def test_equal_plans_have_no_difference() -> None:
    a = some_plan(some_tables(20), 8, local_size=4, hbm_gib=64)
    b = some_plan(some_tables(20), 8, local_size=4, hbm_gib=64)
    found = diff(a, replace(b, seconds=99.0))
    assert not found
    assert str(found) == "no difference: 20 tables placed alike"
    assert found.tables == () and found.ranks == ()


def test_a_moved_table_is_told_with_both_places_and_the_ranks_that_change() -> None:
    a = plain()
    b = moved(a, 3, choice_of(a, 3, "table_wise"), (2,))
    found = diff(a, b)
    (change,) = found.tables
    assert found and change.table == "t3" and found.same_tables == 9
    assert change.before is not None and change.after is not None
    assert (change.before.ranks, change.after.ranks) == (((0,),), ((2,),))
    text = str(found)
    before, after = a.loads, b.loads
    for rank in (0, 2):
        assert f"rank {rank}: {ms(before.time_ms[rank])} -> {ms(after.time_ms[rank])} ms" in text
        assert f"HBM {gib(before.hbm[rank])} -> {gib(after.hbm[rank])} GiB" in text
        assert found.ranks[rank].after_hbm == after.hbm[rank]
    assert "2 ranks of 4 with other time or memory" in text
    assert f"step: {ms(a.solution.time_ms)} -> {ms(b.solution.time_ms)} ms" in text


@pytest.mark.parametrize("strategy", ["row_wise", "data_parallel", "column_wise", "table_row_wise", "grid_shard"])
def test_another_strategy_is_a_difference(strategy: str) -> None:
    a = plain()
    number = choice_of(a, 5, strategy)
    choice = a.problem.items[5].choices[number]
    found = diff(a, moved(a, 5, number, (0,) * choice.blocks))
    (change,) = found.tables
    assert change.after is not None and change.after.sharding_type == strategy
    assert change.after.widths == choice.widths
    assert "- table_wise fused on rank 0: " in str(found) and f"+ {strategy} {choice.compute_kernel}" in str(found)


def test_blocks_of_one_width_that_change_places_are_no_difference() -> None:
    a = plain()
    number = choice_of(a, 0, "column_wise")
    assert not diff(moved(a, 0, number, (1, 2)), moved(a, 0, number, (2, 1)))
    assert diff(moved(a, 0, number, (1, 2)), moved(a, 0, number, (1, 3)))


def test_tables_and_ranks_of_one_plan_only_are_told() -> None:
    a = some_plan(some_tables(5), 2, hbm_gib=200)
    b = some_plan(some_tables(6), 4, hbm_gib=200)
    found = diff(a, b)
    new = next(change for change in found.tables if change.table == "t5")
    assert new.before is None and new.after is not None
    assert "- not in this plan" in str(found)
    assert "rank 3: no such rank -> " in str(found)
    assert found.settings == {"ranks": ("2, 2 to a host", "4, 4 to a host")}
    gone = next(change for change in diff(b, a).tables if change.table == "t5")
    assert gone.after is None


def test_settings_that_differ_are_told_even_where_the_plan_is_the_same() -> None:
    a = plain()
    found = diff(a, replace(a, settings={**a.settings, "reservation": "15 %"}))
    assert not found
    assert str(found) == "no difference: 10 tables placed alike\nreservation: none -> 15 %"


def test_the_dict_is_plain_data() -> None:
    a = some_plan(some_tables(10), 4, local_size=2, hbm_gib=200)
    b = replace(a, solution=any_solution(a.problem, seed=7))
    data = json.loads(json.dumps(diff(a, b).as_dict()))
    assert data["step_ms"] == [a.solution.time_ms, b.solution.time_ms]
    assert len(data["tables"]) + data["same_tables"] == 10
    assert [row["after_ms"] for row in data["ranks"]] == b.loads.time_ms.tolist()
    assert [row["before_hbm"] for row in data["ranks"]] == a.loads.hbm.tolist()
