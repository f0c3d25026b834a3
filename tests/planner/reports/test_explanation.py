"""What a choice would cost instead is what trying all its places gives; a plan's text says what its numbers say."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from checkout import TESTS, python_path
from planner_plain_costs import any_solution, choice_of, moved, some_plan, some_tables

from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.plan.alternatives import alternatives, pieces, slowest_ranks
from shardwise.planner.plan.explanation import (
    explain,
    gib,
    ms,
    ranks,
    share,
    size,
)
from shardwise.planner.plan.planned import Planned
from shardwise.planner.search.problem import (
    PARTS,
    Item,
    Problem,
    faults,
    loads,
)
from shardwise.planner.topology import GIB


def tried(planned: Planned, item: int, number: int) -> tuple[float | None, int]:
    """The fastest step over all places within memory, and the least that any place lacks."""
    problem = planned.problem
    choice = problem.items[item].choices[number]
    best, lack = None, 1 << 60
    places = range(0, problem.world_size, choice.span)
    boundless = replace(problem, hbm=problem.hbm + (1 << 60), ddr=problem.ddr + (1 << 60))
    for starts in itertools.product(places, repeat=choice.blocks):
        there = moved(planned, item, number, starts).solution.assignment
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
            held = there.loads
            assert way.step_ms == pytest.approx(held.time_ms.max(), rel=1e-9)
            assert way.slower_ms == pytest.approx(held.time_ms.max() - planned.loads.time_ms.max(), abs=1e-9)
            if way.number == planned.solution.assignment.choices[item]:
                continue
            best, lack = tried(planned, item, way.number)
            assert way.fits == (not faults(planned.problem, there.solution.assignment))
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
            lack = moved(planned, item, way.number, way.starts).loads.hbm - held
            assert way.over_bytes == max(0, lack.max())
            assert way.over_in == "hbm"
    assert sum(not way.fits for ways in alternatives(tight).values() for way in ways) > 10


def test_a_choice_keeps_to_the_ranks_of_its_item() -> None:
    planned = some_plan(some_tables(5), 4, local_size=2, hbm_gib=64)
    items = tuple(replace(item, ranks=(2, 3)) for item in planned.problem.items)
    problem = replace(planned.problem, items=items)
    ways_by_item = alternatives(replace(planned, problem=problem))
    for item, ways in ways_by_item.items():
        current = planned.solution.assignment.choices[item]
        names = {problem.items[item].choices[way.number].sharding_type for way in ways if way.number != current}
        assert not names & {"row_wise", "data_parallel"}
        for way in ways:
            if way.number != current:
                assert set(way.starts) <= {2, 3}


def test_pieces_add_up_to_the_loads_of_ranks() -> None:
    planned = some_plan(some_tables(30), 8, local_size=4, hbm_gib=64)
    held, rank_pieces = planned.loads, pieces(planned)
    problem: Problem = planned.problem
    assert np.allclose([sum(p.time_ms for p in of_rank) for of_rank in rank_pieces] + problem.base_ms, held.time_ms)
    assert [sum(p.hbm for p in of_rank) for of_rank in rank_pieces] == held.hbm.tolist()
    assert [sum(p.ddr for p in of_rank) for of_rank in rank_pieces] == held.ddr.tolist()
    blocks = sum(p.blocks for of_rank in rank_pieces for p in of_rank)
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


def flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_the_header_has_the_step_the_bound_and_what_decided_the_result() -> None:
    planned = some_plan(some_tables(12), 4, hbm_gib=32)
    text = explain(planned)
    time = planned.loads.time_ms
    assert text.startswith("Plan: 12 tables on 4 ranks\n")
    assert f"{ms(time.max())} ms on the slowest rank (rank {time.argmax()}), predicted; {ms(time.mean())} ms" in text
    assert f"{ms(planned.solution.bound_ms)} ms: no plan within the limits is faster (mean of all ranks)" in text
    assert f"{time.max() / planned.solution.bound_ms - 1:.2%}: no plan can be faster by more than that" in flat(text)
    for phrase in (
        "plain",
        "512 samples a rank",
        "32.0 GiB of HBM a rank",
        "0.50 s",
        "none",
        "every way that PlainCosts",
    ):
        assert phrase in text


def test_the_header_has_what_could_be_chosen() -> None:
    rules = {"t3": ParameterConstraints(["row_wise"])}
    planned = some_plan(some_tables(5), 4, local_size=2, hbm_gib=64, constraints=rules)
    assert sum(len(item.choices) for item in planned.problem.items) == 33
    phrase = (
        "33 ways to place the tables: table_wise, column_wise, row_wise, table_row_wise, table_column_wise, grid_shard"
    )
    assert f"{phrase} and data_parallel; kernels dense and fused; 1 table with one way only" in flat(explain(planned))


def test_an_optimal_plan_says_so() -> None:
    planned = some_plan(some_tables(4), 2, hbm_gib=32)
    proven = replace(planned.solution, bound_ms=planned.solution.time_ms, proven=True)
    assert "0.00%: this plan is proven to be optimal" in explain(replace(planned, solution=proven))


def test_the_line_of_a_rank_has_its_parts_and_memory() -> None:
    planned = some_plan(some_tables(12), 4, local_size=2, hbm_gib=32)
    held = planned.loads
    lines = {line.split()[0]: line.split() for line in explain(planned).split("\n\n")[2].splitlines()[2:]}
    used = [n for n, part in enumerate(PARTS) if part != "prefetch"]
    assert sorted(lines) == ["0", "1", "2", "3"]
    for rank in range(4):
        numbers = [ms(held.time_ms[rank]), *(ms(held.parts_ms[n, rank]) for n in used)]
        assert lines[str(rank)][1:11] == [*numbers, gib(held.hbm[rank]), "of", "32.0"]


def test_every_table_has_its_place_its_cost_and_why_not_the_next_best() -> None:
    planned = some_plan(some_tables(12), 4, local_size=2, hbm_gib=12)
    text = flat(explain(planned))
    assignment = planned.solution.assignment
    ways_by_item = alternatives(planned)
    lacks = 0
    for index, (table, choice, starts) in enumerate(planned.placed()):
        about = re.search(
            rf"{table.name}: {table.num_embeddings:,} x {table.embedding_dim} fp32.*?Instead, .*?\.(?= |$)", text
        )
        assert about is not None
        held = sorted(start + place for start in starts for place in range(choice.span))
        assert f"on {ranks(held, 4)}: {ms(choice.work_ms)} ms, {gib(int(choice.hbm.sum()))} GiB." in about[0]
        assert f"{choice.sharding_type} {choice.compute_kernel}" in about[0]
        others = [way for way in ways_by_item[index] if way.number != assignment.choices[index]]
        slow = [way.slower_ms for way in others if way.fits]
        if min(slow) >= 1e-3:
            assert f"would be {ms(min(slow))} ms slower" in about[0]
        for way in others:
            name = planned.problem.items[index].choices[way.number].sharding_type
            fitting = [
                w for w in others if w.fits and planned.problem.items[index].choices[w.number].sharding_type == name
            ]
            if not way.fits and not fitting and name != choice.sharding_type:
                assert re.search(rf"{name} (does not fit )?\([\d.]+ [GM]iB of HBM too much\)", about[0])
                lacks += 1
    assert lacks


def test_what_would_be_slower_says_by_how_much_and_why() -> None:
    """One table alone: its best choice is certain, and all others are slower by what they cost more."""
    planned = some_plan(some_tables(1, seed=3), 2, hbm_gib=32)
    item = planned.problem.items[0]
    step = [float(np.max(choice.time_ms[0])) if choice.blocks == 1 else 1e9 for choice in item.choices]
    table_wise, replicated = (choice_of(planned, 0, kind) for kind in ("table_wise", "data_parallel"))
    text = flat(explain(moved(planned, 0, table_wise, (0,))))
    assert f"data_parallel would be {ms(step[replicated] - step[table_wise])} ms slower" in text


def test_equal_tables_are_told_once() -> None:
    table = some_tables(1)[0]
    tables = [replace(table, name=f"same{n}") for n in range(9)]
    planned = some_plan(
        tables, 3, hbm_gib=64, constraints={t.name: ParameterConstraints(["table_wise"]) for t in tables}
    )
    text = explain(planned)
    assert "and 8 equal: " in text
    assert "Nothing else is allowed." in text
    assert text.count("x 64 fp32") + text.count("x 32 fp32") + text.count("x 128 fp32") == 1


def test_large_plans_are_shortened_and_say_by_how_much() -> None:
    planned = some_plan(some_tables(300), 64, local_size=8, hbm_gib=200)
    text = flat(explain(planned))
    assert "... 50 ranks more, from" in text
    assert "... and 280 tables with less work" in text
    assert len(explain(planned, tables=3).splitlines()) < 80
    assert "... and 297 tables with less work" in flat(explain(planned, tables=3))
    work = sorted((choice.work_ms for _, choice, _ in planned.placed()), reverse=True)
    assert f"together {ms(sum(work[20:]))} ms" in text


def test_tables_that_share_a_rank_are_told_together() -> None:
    planned = some_plan(some_tables(2), 2, hbm_gib=64)
    first, second = planned.problem.items
    table_wise = [next(c for c in item.choices if c.sharding_type == "table_wise") for item in (first, second)]
    both = replace(
        table_wise[0],
        parts_ms=table_wise[0].parts_ms + table_wise[1].parts_ms,
        hbm=table_wise[0].hbm + table_wise[1].hbm,
    )
    item = Item((*first.names, *second.names), (both,))
    problem = Problem((item,), 2, planned.problem.hbm, planned.problem.ddr)
    text = explain(replace(planned, problem=problem, solution=any_solution(problem)))
    assert "t0 + t1: " in text
    assert "on the same rank: " in flat(text)


def test_wide_text_is_wrapped_to_the_width() -> None:
    planned = some_plan(some_tables(12), 4, hbm_gib=32)
    sentences = explain(planned, width=70).split("\n\n")
    assert (
        max(len(line) for chapter in (sentences[0], sentences[1], sentences[3]) for line in chapter.splitlines()) <= 70
    )


SCRIPT = """
from planner_plain_costs import some_plan, some_tables
from shardwise.planner.plan.explanation import explain
print(explain(some_plan(some_tables(60), 16, local_size=8, hbm_gib=64)))
"""


@pytest.mark.full
def test_the_text_does_not_depend_on_the_hash_seed() -> None:
    outputs = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": python_path()}
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=TESTS, env=environment, check=True, capture_output=True, text=True
        )
        outputs.add(ran.stdout)
    assert len(outputs) == 1 and "Plan: 60 tables on 16 ranks" in outputs.pop()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ranks([3], 8), "rank 3"),
        (ranks([0, 1, 2, 3, 7], 8), "ranks 0-3, 7"),
        (ranks([4, 5], 8), "ranks 4, 5"),
        (ranks([2, 2], 8), "rank 2 (2 blocks)"),
        (ranks(list(range(8)), 8), "all ranks"),
        (ranks([*range(8), *range(8)], 8), "all ranks (2 each)"),
        (ranks([0, 0, 1, 2], 8), "ranks 0 (2 blocks), 1, 2"),
        # milliseconds have four digits or so
        *zip(
            map(ms, (0.0, 0.3123, 12.046, 123.46, 12345.6)), ("0.000", "0.312", "12.05", "123.5", "12,346"), strict=True
        ),
        # bytes have the unit that suits
        *zip(map(gib, (0, 2**20, 12.34 * GIB, 3 * GIB)), ("0", "<0.01", "12.3", "3.00"), strict=True),
        *zip(map(size, (0, 2**20, 12.34 * GIB, 3 * GIB)), ("0 bytes", "1.0 MiB", "12.3 GiB", "3.0 GiB"), strict=True),
        # a gap that is some is never told as none
        *zip(map(share, (0.0, 1e-6, 1e-4, 0.0112)), ("0.00%", "<0.01%", "0.01%", "1.12%"), strict=True),
    ],
)
def test_ranks_are_told_in_runs_and_numbers_with_few_digits(text: str, expected: str) -> None:
    assert text == expected


def test_print_shows_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    planned: Planned = some_plan(some_tables(5), 2, hbm_gib=64)
    print(planned)
    assert capsys.readouterr().out == explain(planned) + "\n"
