"""What a step costs: collectives, whatever the number of tables and strategies, bytes as a plan predicts, and calls.

The last are counted as beside TorchRec (perf/evidence/compare_sharding.py).

Takes a minute: a step of every strategy on ranks, traced call by call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from unittest.mock import patch

import pytest
import torch
from poison import ALLOCATORS
from ranks import run_ranks
from sharding_mixes import (
    STRATEGIES,
    Mix,
    TableCase,
    backward,
    batch_of,
    batches_of_rank,
    build,
    by_lookup,
    environment,
    mix_for,
    mix_of,
    shard,
    span_of,
)

from shardwise.perf.counts.calls import listed
from shardwise.perf.counts.traffic import predicted_bytes
from shardwise.perf.evidence.compare_sharding import calls_of_forward, collectives_of_step
from shardwise.perf.suite.cases.sharded_sides import Shape, Stepper
from shardwise.perf.suite.libraries import ours
from shardwise.planner.layout import TableOptions

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Case:
    """A mix, hosts of so many ranks, and what is asked of a step."""

    mix: Mix
    local: int = 4
    optimizer: str = "sgd"
    learned: bool = False
    update: bool = True


@dataclass
class Cost:
    """Of each of three steps: collectives forward and back, bytes that left, bytes that were predicted."""

    forward: list[int]
    back: list[int]
    sent: list[int]
    predicted: list[float]


def costs(cases: Sequence[Case]) -> list[Cost]:
    """One rank's."""
    environments = {local: environment(local) for local in sorted({case.local for case in cases})}
    rank_costs = []
    for case in cases:
        env, mix = environments[case.local], case.mix
        model = shard(mix, build(mix, case.optimizer), env)
        batches = [e - b for b, e in (span_of(mix, r, env.world_size) for r in range(env.world_size))]
        cost = Cost([], [], [], [])
        for step, (batch, upstream) in enumerate(batches_of_rank(mix, range(3))):
            if case.learned:
                batch.weights().requires_grad_()
            counts = [model.collectives]
            sent = model._exchange.sent + (model._local.sent if model._local else 0)
            with torch.set_grad_enabled(case.update):
                outputs = by_lookup(mix, model(batch))
            counts.append(model.collectives)
            backward(outputs, upstream)
            counts.append(model.collectives)
            cost.forward.append(counts[1] - counts[0])
            cost.back.append(counts[2] - counts[1])
            cost.sent.append(model._exchange.sent + (model._local.sent if model._local else 0) - sent)
            whole = batch_of(mix, step)
            mean = {k: n / max(1, mix.samples) for k, n in zip(whole.keys(), whole.length_per_key(), strict=True)}
            traffic = predicted_bytes(model._routes, env.rank, batches, mean, update=case.update)
            if not case.learned:
                traffic = [replace(pair, weight_gradients=0) for pair in traffic]
            cost.predicted.append(sum(sum(astuple(pair)) for pair in traffic))
        rank_costs.append(cost)
    return rank_costs


def many(strategies: Sequence[str], *, pooled: bool = True) -> Mix:
    """Forty tables."""
    return Mix(
        tuple(
            TableCase(f"t{n}", 9 + n, 8, (f"f{n % 5}",), strategies[n % len(strategies)], n % 3 == 0, seed=n)
            for n in range(40)
        ),
        pooled,
    )


FLAT = ("data_parallel", "table_wise", "column_wise", "table_column_wise")
HOSTS = Case(many(STRATEGIES), 2)
# a case, its collectives forward and back
CASES: dict[str, tuple[Case, int, int]] = {
    **{f"three tables, {name}": (Case(mix_for(name, pooled=True)), 3, 1) for name in STRATEGIES},
    "one table": (Case(Mix((TableCase("t", 9, 8, ("f",), "table_wise"),))), 3, 1),
    "forty tables": (Case(many(STRATEGIES)), 3, 1),
    "forty tables, rows in order": (Case(Mix(tuple(
        replace(t, options=TableOptions("ordered")) for t in many(STRATEGIES).tables
    )), 2), 3, 1),
    "forty tables, sequences": (Case(many(STRATEGIES, pooled=False), 2), 3, 1),
    "forty tables, two hosts": (HOSTS, 4, 2),
    "two hosts, nothing added there": (Case(many(FLAT), 2), 3, 1),
    "gradients of weights": (Case(replace(many(STRATEGIES), weighted=True), learned=True), 3, 2),
    "gradients of weights, two hosts": (Case(replace(many(STRATEGIES), weighted=True), 2, learned=True), 4, 3),
    "weights without gradients": (Case(replace(many(STRATEGIES), weighted=True)), 3, 1),
    "no backward": (Case(many(STRATEGIES), update=False), 3, 0),
    "no backward, two hosts": (Case(many(STRATEGIES), 2, update=False), 4, 0),
    "one number a row for all columns": (Case(Mix(tuple(
        replace(t, options=TableOptions(row_state="table")) for t in many(("column_wise", "row_wise")).tables
    )), optimizer="rowwise_adagrad"), 3, 2),
    "empty batches": (Case(replace(many(STRATEGIES), batches=(0, 0, 0, 0))), 3, 1),
}  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Cost]]:
    ranks = run_ranks(4, costs, [case for case, _, _ in CASES.values()])
    return {name: [costs[n] for costs in ranks] for n, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_collectives_do_not_depend_on_the_number_of_tables_and_strategies(
    name: str, measured: dict[str, list[Cost]]
) -> None:
    _, forward, back = CASES[name]
    for cost in measured[name]:
        assert cost.forward == [forward] * 3
        assert cost.back == [back] * 3


def expect_predicted_bytes(ranks: Sequence[Cost], case: Case) -> None:
    for step in range(3):
        predicted = sum(cost.predicted[step] for cost in ranks)
        assert sum(cost.sent[step] for cost in ranks) == pytest.approx(predicted, rel=1e-9), case


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("one number a row")])
def test_all_ranks_together_send_as_many_bytes_as_the_plan_predicts(name: str, measured: dict[str, list[Cost]]) -> None:
    expect_predicted_bytes(measured[name], CASES[name][0])


def test_random_mixes_send_as_many_bytes_as_their_plans_predict() -> None:
    cases = [Case(mix_of(seed, pooled=seed % 2 == 0), local) for seed in range(10) for local in (2, 4)]
    ranks = run_ranks(4, costs, cases)
    for n, case in enumerate(cases):
        expect_predicted_bytes([rank_costs[n] for rank_costs in ranks], case)


def test_one_rank_sends_nothing() -> None:
    (rank_costs,) = run_ranks(1, costs, [Case(replace(case.mix, batches=(3,)), 1) for case, _, _ in CASES.values()])
    assert all(cost.forward == cost.back == cost.sent == [0, 0, 0] for cost in rank_costs)


SMALL = Shape(26, 50, 8, 16, 1)


def _counts(strategy: str) -> tuple[dict[str, int], int, int, list[str]]:
    stepper = Stepper(ours(), SMALL, strategy, "rowwise_adagrad")
    with ExitStack() as stack:
        for owner, name in ALLOCATORS:
            # poison calls functions of its own
            stack.enter_context(patch.object(owner, name, getattr(owner, name).__wrapped__))
        called = dict(collectives_of_step(stepper))
        everything, own = calls_of_forward(stepper)
    return called, everything.total(), own.total(), listed(own, 20)


def test_a_third_forward_calls_at_most_300_functions_of_python_and_150_of_our_own() -> None:
    for called, everything, own, most in run_ranks(2, _counts, "table_wise"):
        assert called == {"all_to_all_single": 4}
        assert everything <= 300, most
        assert own <= 150, most
