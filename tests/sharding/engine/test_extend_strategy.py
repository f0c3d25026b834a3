"""A strategy of one's own, rows in proportion to weights of the ranks, runs from a plan; no line of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharding_mixes import Mix, Run, TableCase, batches_of_rank, build, environment, held, span_of, train, train_alone
from sharding_steps import expect_held
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from shardwise.planner.layout import Shard
from shardwise.sharding import EmbeddingBagCollectionSharder, ParameterSharding, construct_module_sharding_plan

pytestmark = pytest.mark.ranks

MIX = Mix((TableCase("t0", 23, 8, ("f0", "f1"), "row_wise"), TableCase("t1", 41, 12, ("f1",), "row_wise")))


def weighted_row_wise(name: str, rows: int, dim: int, ranks: Sequence[int], weights: Sequence[float]) -> list[Shard]:
    """A block of rows on each of `ranks`, in proportion to its weight."""
    edges = [round(rows * total / sum(weights)) for total in accumulate(weights, initial=0)]
    return [Shard(name, rank, cut, (0, dim)) for rank, cut in zip(ranks, pairwise(edges), strict=True)]


def generator_of(ranks: list[int], weights: list[float], reduction: str) -> Callable[..., ParameterSharding]:
    def generate(param: torch.nn.Parameter, *_: Any) -> ParameterSharding:
        rows, dim = param.shape
        shards = weighted_row_wise("", rows, dim, ranks, weights)
        cuts = [ShardMetadata([s.rows[0], 0], [s.rows[1] - s.rows[0], s.cols[1]], f"rank:{s.rank}/cpu") for s in shards]
        return ParameterSharding("row_wise", "fused", ranks, EnumerableShardingSpec(cuts), reduction=reduction)

    return generate


def steps_of_rank() -> Run:
    module, env = build(MIX, "rowwise_adagrad"), environment()
    cuts = {"t0": generator_of([1, 0], [3.0, 1.0], "ordered"), "t1": generator_of([0, 1], [2.0, 5.0], "partial")}
    model = EmbeddingBagCollectionSharder().shard(module, construct_module_sharding_plan(module, cuts), env)
    run = train(MIX, model, batches_of_rank(MIX, range(2)), False)
    run.weights, run.states = held(model)
    return run


def test_a_strategy_of_ones_own_trains_as_one_process() -> None:
    want, runs = train_alone(MIX, "rowwise_adagrad", 2), run_ranks(2, steps_of_rank)
    assert [{*run.weights} for run in runs] == [{"t0|17:23|0:8", "t1|0:12|0:12"}, {"t0|0:17|0:8", "t1|12:41|0:12"}]
    for rank, run in enumerate(runs):
        expect_held(want, run.weights, run.states)
        for values, whole in zip(run.outputs, want.outputs, strict=True):
            for value, rows in zip(values, whole, strict=True):
                torch.testing.assert_close(value, rows[slice(*span_of(MIX, rank, 2))], rtol=1e-6, atol=1e-6)
