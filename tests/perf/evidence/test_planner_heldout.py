"""What the held-out measurement of the cost model says of made-up times, and which plans it picks."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.perf.evidence.planner_heldout import PLANS_EACH, judged, page, plans_of, workloads
from shardwise.planner.constants_measured import CARDS
from shardwise.sharding.calibration.calibrate import cases


def _plans(measured: list[float]) -> list[dict[str, Any]]:
    return [
        {
            "workload": f"w{n // 3}", "batch_size": 1, "plan": f"p{n}", "predicted_ms": 1.3**n,
            "rounds_ms": [0.5 * ms, ms, 9 * ms],
        }
        for n, ms in enumerate(measured)
    ]  # fmt: skip


def test_a_perfect_order_has_no_wrong_pair_and_no_regret() -> None:
    scores = judged(_plans([2.0, 3.0, 4.0, 5.0, 6.0, 7.0]))
    assert scores["spearman"] == pytest.approx(1) and scores["spearman_interval_95"] == pytest.approx([1, 1])
    # 1.3^2 is more than 1.5
    assert (scores["pairs_apart"], scores["pairs_wrong"]) == (10, [])
    assert scores["regret"] == {"w0": 0.0, "w1": 0.0}
    assert scores["predictions_span"] == pytest.approx(1.3**5)


def test_a_pair_that_came_out_the_other_way_round_is_named() -> None:
    scores = judged(_plans([2.0, 3.0, 1.0, 5.0, 6.0, 7.0]))
    assert scores["pairs_wrong"] == [[0, 2]] and scores["regret"]["w0"] == pytest.approx(1.0)
    assert scores["spearman"] == pytest.approx(1 - 6 * 6 / (6 * 35))


def test_equal_times_share_their_rank() -> None:
    scores = judged(_plans([1.0, 1.0, 2.0, 2.0]))
    # a factor that is the same for all correlations of ranks with ties
    assert scores["spearman"] == pytest.approx(0.8944, abs=1e-4)


def test_the_page_has_a_row_for_every_plan() -> None:
    plans = _plans([2.0, 3.0, 4.0])
    results = {
        "machine": "m", "cpus": 2, "torch": "t", "shardwise": "s", "load": [0.0, 0.0], "seconds": 1,
        "constants": CARDS["cpu"].constants.to_json(), "plans": plans, "judged": judged(plans),
    }  # fmt: skip
    text = page(results)
    assert [line for line in text.splitlines() if line.startswith("| w0, 1 | p")] == [
        f"| w0, 1 | p{n} | {1.3**n:.1f} | {n + 2:.1f} | {(n + 2) / 2:.1f} to {9 * (n + 2):.1f} |" for n in range(3)
    ]


def test_the_plans_are_twenty_of_workloads_that_calibration_does_not_know() -> None:
    plans = [plan for workload in workloads() for plan in plans_of(workload, CARDS["cpu"].constants)]
    assert len(plans) == 20 == len(workloads()) * PLANS_EACH
    assert max(p.predicted_ms for p in plans) > 4 * min(p.predicted_ms for p in plans)
    for workload in workloads():
        of_workload = [plan for plan in plans if plan.workload == workload]
        assert len({plan.placed for plan in of_workload}) == PLANS_EACH
        # nothing that is predicted to be faster was left to the planner's rivals
        assert of_workload[0].predicted_ms <= min(plan.predicted_ms for plan in of_workload) * (1 + 1e-9)
    known = {
        (t.num_embeddings, t.embedding_dim, tuple(f.pooling_factor for f in t.features))
        for case in cases()
        for t, _ in case.tables
    }
    assert not known & {
        (t.num_embeddings, t.embedding_dim, tuple(f.pooling_factor for f in t.features))
        for workload in workloads()
        for t in workload.tables
    }
