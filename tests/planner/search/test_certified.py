"""The plan comes first, and the best bound when it is asked for: the same plan, the same bound, no clock read."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingShardingPlanner, Topology
from shardwise.planner import Feature, Table, explain, plan_tables
from shardwise.planner.plan.plan_files import planned_to_json
from shardwise.planner.plan.planned import Planned
from shardwise.planner.search.solve import ENOUGH, certify
from shardwise.sharding import get_default_sharders
from shardwise.sharding.planning import leader

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
    told = explain(planned), planned_to_json(planned)["about"]["predicted"]
    assert asked.calls == [] and told[1]["bound_ms"] == certified.bound_ms and certified.bound_from in " ".join(
        told[0].split()
    )  # fmt: skip


def test_the_bound_is_the_same_whenever_it_is_asked() -> None:
    one, two = criteo(512), criteo(512)
    assert one.solution == two.solution
    assert one.certified == two.certified == certify(one.problem, one.solution)
    assert certify(one.problem, one.certified) is one.certified
    assert one.certified.gap < 2e-2


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
    said = leader._told(plan, 2)
    assert "slowest rank" in said["about"]["explanation"]
    # asked only for what returns at once
    assert asked and all(asked)
