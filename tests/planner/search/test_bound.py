"""Bounds are never above the optimum and reach it where they are known to be tight; the best come when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import planner_oracle as oracle
import pytest
import torch
from planner_oracle import KINDS, SLACK, choice, random_problem, whole

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingShardingPlanner, Topology
from shardwise.planner import Feature, Table, explain, plan_tables
from shardwise.planner.plan.plan_files import planned_to_json
from shardwise.planner.plan.planned import Planned
from shardwise.planner.search.bound import lower_bound, prove_infeasible
from shardwise.planner.search.exact import solve_exactly
from shardwise.planner.search.problem import (
    Item,
    Problem,
    faults,
    loads,
)
from shardwise.planner.search.relax import least_work, options_of, relax
from shardwise.planner.search.solve import ENOUGH, certify
from shardwise.sharding import get_default_sharders
from shardwise.sharding.planning import leader

with_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="needs scipy")


def relaxed(problem: Problem, best: float) -> float:
    return relax(problem).bound_ms


def by_weights(problem: Problem, best: float) -> float:
    return lower_bound(problem, upper_ms=best, work=6).ms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("bound", "seeds"),
    [
        (relaxed, range(100)),
        pytest.param(by_weights, range(10), marks=with_scipy),
        pytest.param(by_weights, range(10, 210), marks=[with_scipy, pytest.mark.long]),
    ],
    ids=["relaxation", "weights", "weights, more"],
)
def test_no_bound_exceeds_the_optimum(kind: str, bound: Callable[[Problem, float], float], seeds: range) -> None:
    for seed in seeds:
        problem = random_problem(kind, seed)
        best = oracle.best_time_ms(problem)
        if best is not None:
            assert bound(problem, best) <= best * (1 + SLACK), seed


@with_scipy
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_proven_not_to_fit_does_not_fit(kind: str) -> None:
    for seed in range(10):
        problem = random_problem(kind, seed)
        assert (oracle.best_time_ms(problem) is None) == (prove_infeasible(problem) is not None), seed


@pytest.mark.parametrize(
    ("problem", "optimum"),
    [
        pytest.param(whole(5, 4, 4, world=2), 8, id="two on one rank"),
        pytest.param(whole(*[3] * 7, world=3), 9, id="three on one rank"),
        pytest.param(whole(*[3] * 7, world=3, base=2), 11, id="beside what ranks do anyway"),
    ],
)
def test_pigeonholes_bound_the_plan_without_a_solver(
    problem: Problem, optimum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.planner.search.bound.find_spec", lambda name: None)
    bound = lower_bound(problem, upper_ms=optimum)
    assert 0.999 * optimum < bound.ms <= optimum * (1 + SLACK)
    assert relax(problem).bound_ms < 0.95 * optimum


@with_scipy
def test_weights_see_that_only_some_pairs_of_tables_fit_together() -> None:
    """Three of 5 and four of 3 on three ranks: below 10 a rank with a 5 has room for one 3, and one 3 is left over."""
    problem = whole(5, 5, 5, 3, 3, 3, 3, world=3)
    bound = lower_bound(problem, upper_ms=10)
    assert bound.ms == pytest.approx(10, rel=2e-3) and bound.ms <= 10 * (1 + SLACK)
    assert relax(problem).bound_ms == pytest.approx(9, rel=1e-9)


def test_blocks_lie_beside_what_lies_on_all_ranks() -> None:
    """A table over all ranks takes 4 on each of 4; the other takes 5 whole, beside it 9, and 3 + 3 cut, beside it 7."""
    rows, cut = choice(np.full((1, 4), 4.0)), choice(np.full((2, 1), 3.0))
    items = (Item(("a",), (rows,)), Item(("b",), (choice(np.array([[5.0]])), cut)))
    problem = Problem(items, 4, np.full(4, 9), np.full(4, 9))
    bound = lower_bound(problem, upper_ms=7.0)
    assert bound.ms == pytest.approx(7, rel=1e-3) and bound.ms <= 7 * (1 + SLACK)
    assert bound.reason == "blocks beside what lies on all ranks"


@with_scipy
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 220), marks=pytest.mark.long)], ids=str)
def test_exact_solutions_are_those_of_brute_force(kind: str, seeds: range) -> None:
    for seed in seeds:
        problem = random_problem(kind, seed)
        best, solution = oracle.best_time_ms(problem), solve_exactly(problem)
        assert solution.proven, seed
        if best is None:
            assert solution.assignment is None and np.isinf(solution.bound_ms), seed
            continue
        assert solution.assignment is not None and not faults(problem, solution.assignment), seed
        time = float(loads(problem, solution.assignment).time_ms.max())
        assert best * (1 - SLACK) <= time <= best * (1 + 1e-6), seed
        assert time * (1 - 1e-6) <= solution.bound_ms <= best * (1 + SLACK), seed
        again = solve_exactly(problem, hint=solution.assignment)
        assert again.proven and again.bound_ms <= best * (1 + SLACK), seed


@with_scipy
def test_a_hint_that_is_not_optimal_is_improved() -> None:
    problem = whole(5, 4, 3, 3, 3, world=2)
    bad = solve_exactly(whole(1, 1, 1, 1, 1, world=2)).assignment
    assert bad is not None
    bad = type(bad)(bad.choices, ((0,), (0,), (0,), (1,), (1,)))
    solution = solve_exactly(problem, hint=bad)
    assert solution.proven and solution.assignment is not None
    assert loads(problem, solution.assignment).time_ms.max() == 9


def test_without_nodes_the_bound_of_the_relaxation_stays() -> None:
    problem = whole(5, 4, 3, 3, 3, world=2)
    solution = solve_exactly(problem, variables=1)
    assert solution.assignment is None and not solution.proven
    assert solution.bound_ms == relax(problem).bound_ms == pytest.approx(9, rel=1e-9)


@pytest.mark.parametrize(
    ("problem", "optimum"),
    [
        pytest.param(whole(7, 1, 1, world=3), 7, id="largest table"),
        pytest.param(whole(2, 2, 2, 2, world=2), 4, id="mean"),
        pytest.param(whole(2, 2, 2, 2, world=2, base=1.5), 5.5, id="mean and what ranks do anyway"),
    ],
)
def test_the_relaxation_is_tight_where_tables_divide_evenly(problem: Problem, optimum: float) -> None:
    assert relax(problem).bound_ms == pytest.approx(optimum, rel=1e-9)


def test_memory_makes_the_relaxation_pay_for_the_slower_kernel() -> None:
    """Four tables of 10 bytes, of which three fit into the memory of the device: one pays 2 instead of 1."""
    fast, slow = choice(np.array([[1.0]]), hbm=10), choice(np.array([[2.0]]), ddr=10)
    items = tuple(Item((f"t{i}",), (fast, slow)) for i in range(4))
    relaxed = relax(Problem(items, 2, np.array([15, 15]), np.array([99, 99])))
    assert relaxed.bound_ms == pytest.approx((3 * 1 + 2) / 2, rel=1e-9)
    assert relaxed.ms_per_hbm_byte == pytest.approx(0.1, rel=1e-6)
    assert relaxed.mix.sum(axis=0) == pytest.approx([3, 1], rel=1e-6)


FOUR = choice(np.array([[4.0]]), hbm=8)


@pytest.mark.parametrize(
    ("ranks", "hbm", "bound", "reason"),
    [
        # three tables of 4 may use two ranks only: 6 each, though the mean of all ranks is 3
        ((0, 1), [99, 99, 99, 99], 6, "mean of ranks 0-1"),
        (None, [9, 9, 9, 30], 4, None),
        # one rank has memory for any of them
        (None, [5, 5, 5, 30], 12, "mean of ranks 3"),
    ],
)
def test_ranks_that_tables_must_share_bound_the_plan(
    ranks: tuple[int, ...] | None, hbm: list[int], bound: float, reason: str | None
) -> None:
    items = tuple(Item((f"t{i}",), (FOUR,), ranks) for i in range(3))
    relaxed = relax(Problem(items, 4, np.array(hbm), np.full(4, 9)))
    assert relaxed.bound_ms == pytest.approx(bound, rel=1e-9)
    assert reason in (None, relaxed.reason)


def test_two_memories_are_priced_together() -> None:
    """Against the linear program itself."""
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(0)
    score, hbm, ddr = rng.random((3, 12, 5)) + 0.1
    limits = [0.55 * (least.min(axis=1).sum() + least.max(axis=1).sum()) for least in (hbm, ddr)]
    limits = [0.75 * limit for limit in limits]
    relaxation = least_work(score, ((hbm, limits[0]), (ddr, limits[1])))
    one_each = np.kron(np.eye(12), np.ones(5))
    exact = optimize.linprog(
        score.ravel(), np.stack([hbm.ravel(), ddr.ravel()]), limits, one_each, np.ones(12), bounds=(0, 1)
    )
    assert exact.status == 0
    assert relaxation.value_ms == pytest.approx(exact.fun, rel=1e-7) and relaxation.value_ms <= exact.fun * (1 + SLACK)
    assert min(relaxation.prices) > 0 and (relaxation.mix.sum(axis=1) == pytest.approx(1))


def test_options_need_the_place_that_fits_them_best() -> None:
    """The busy rank is the only one with room, so the target must cover what it does anyway."""
    item = Item(("t",), (choice(np.array([[2.0]]), hbm=8),))
    options = options_of(Problem((item,), 2, np.array([4, 9]), np.array([1, 1]), np.array([0.0, 3.0])))
    assert options.need_ms.tolist() == [[5.0]]


@with_scipy
def test_ranks_that_are_alike_are_numbered_in_the_order_of_use() -> None:
    """The first table lies on rank 0, and each other where one before it lies or on the next rank."""
    problem = whole(9, 8, 7, 6, 5, 5, 4, world=4)
    solution = solve_exactly(problem)
    assert solution.proven and solution.assignment is not None
    assert loads(problem, solution.assignment).time_ms.max() == pytest.approx(oracle.best_time_ms(problem))
    starts = [start for (start,) in solution.assignment.starts]
    assert all(start <= n for n, start in enumerate(starts))


@with_scipy
def test_ranks_that_differ_keep_their_numbers() -> None:
    """The large table fits on the last rank only."""
    items = tuple(
        Item((f"t{i}",), (choice(np.array([[time]]), hbm=size),)) for i, (time, size) in enumerate([(3, 9), (2, 1)])
    )
    solution = solve_exactly(Problem(items, 3, np.array([5, 5, 9]), np.full(3, 9)))
    assert solution.proven and solution.assignment is not None and solution.assignment.starts[0] == (2,)


SOLVE = importlib.import_module("shardwise.planner.search.solve")
# rows of some tables of a Criteo set, capped
ROWS = (
    10**7, 36_084, 17_217, 61, 9_758_201, 1_333_352, 313_829, 2_208, 9_994_222, 7_267_859, 415_421, 12_420,
)  # fmt: skip


def criteo(batch_size: int) -> Planned:
    tables = [Table(f"t{n}", rows, 128, features=(Feature(f"t{n}"),)) for n, rows in enumerate(ROWS)]
    return plan_tables(tables, Topology(4, "cuda", hbm_cap=80 << 30, local_world_size=4), batch_size)


class Asked:
    """Calls of the bounds that take most of the time: bounds by branching, and trees of programs beyond their root."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        bound, program = SOLVE.lower_bound, SOLVE.solve_exactly

        def lower_bound(*args: Any, **kwargs: Any) -> Any:
            self.calls += ["branching"] * (kwargs.get("work") != 0)
            # a little of each is enough here
            return bound(*args, **{"work": 3, **kwargs})

        def solve_exactly(*args: Any, **kwargs: Any) -> Any:
            self.calls += ["tree"] * (kwargs["nodes"] > SOLVE.ROOT and kwargs["variables"] > SOLVE.FEW_VARIABLES)
            return program(*args, **kwargs)

        for nodes in ("FIRST_NODES", "NODES"):
            monkeypatch.setattr(SOLVE, nodes, 2)
        monkeypatch.setattr(SOLVE, "lower_bound", lower_bound)
        monkeypatch.setattr(SOLVE, "solve_exactly", solve_exactly)


def test_a_plan_asks_no_bound_that_only_says_how_good_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning 26 tables for 8 ranks took up to 12 times TorchRec's time, and more than 9 parts of 10 proved bounds."""
    asked = Asked(monkeypatch)
    planned = criteo(8192)
    assert asked.calls == [] and not planned.solution.certified
    # where tables go, and how busy ranks are, asks none either
    assert len(list(planned.placed())) == len(ROWS) and planned.loads.time_ms.max() == pytest.approx(
        planned.solution.time_ms
    )
    assert asked.calls == []
    certified = planned.certified
    assert asked.calls and certified.certified and planned.certified is certified
    assert certified.assignment == planned.solution.assignment and certified.time_ms == planned.solution.time_ms
    assert planned.solution.bound_ms <= certified.bound_ms <= certified.time_ms
    assert certified.gap < 2e-2
    asked.calls.clear()
    reports = explain(planned), planned_to_json(planned)["about"]["predicted"]
    assert asked.calls == [] and reports[1]["bound_ms"] == certified.bound_ms and certified.bound_from in " ".join(
        reports[0].split()
    )  # fmt: skip


def test_the_bound_is_the_same_whenever_it_is_asked() -> None:
    first, second = criteo(512), criteo(512)
    assert first.solution == second.solution
    assert first.certified == second.certified == certify(first.problem, first.solution)
    assert certify(first.problem, first.certified) is first.certified
    assert first.certified.gap < 2e-2


def test_a_solution_is_no_worse_than_a_bound_says_and_small_ones_are_exact() -> None:
    small = plan_tables([Table(f"t{n}", 1000 * (n + 1), 32) for n in range(4)], Topology(2, "cpu"), 64)
    for solution in (small.solution, small.certified):
        assert solution.bound_ms <= solution.time_ms and solution.gap <= ENOUGH
    assert np.isfinite(small.certified.bound_ms)


def test_a_plan_for_all_ranks_does_not_wait_for_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that rank 0 sends has the bound that the search knew; who prints the plan there gets the best."""
    asked: list[bool] = []
    monkeypatch.setattr(
        "shardwise.planner.plan.planned.certify", lambda problem, known: asked.append(known.certified) or known
    )
    model = EmbeddingBagCollection(
        [EmbeddingBagConfig(100 * (n + 1), 64, f"t{n}", feature_names=[f"f{n}"]) for n in range(5)],
        device=torch.device("meta"),
    )
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=64)
    plan = planner.plan(model, get_default_sharders())
    assert planner.last_plan is not None
    plan_json = leader.as_json(plan, 2)
    assert "slowest rank" in plan_json["about"]["explanation"]
    # asked only for what returns at once
    assert asked and all(asked)
