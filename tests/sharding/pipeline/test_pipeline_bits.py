"""A pipelined loop gives the bits of a plain one, whatever the model, the plan and the batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import batch_of, dense_optimizer, drain, plain_loop, same, sharded, state_of
from ranks import run_ranks

from shardwise.sharding.pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

pytestmark = pytest.mark.ranks

PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}
CPU = torch.device("cpu")


def beside_a_plain_loop(kind: str, parts: str, steps: int, vbe: bool = False) -> tuple[bool, list[str], int]:
    """Whether outputs are the same, what differs in the end, and how many outputs there were."""
    plain, piped = sharded(parts), sharded(parts)
    expected = plain_loop(plain, (batch_of(step, vbe=vbe) for step in range(steps)))
    pipeline = PIPELINES[kind](piped, dense_optimizer(piped), CPU)
    outputs = drain(pipeline.progress, (batch_of(step, vbe=vbe) for step in range(steps)))
    one, other = state_of(plain), state_of(piped)
    assert one.keys() == other.keys()
    return (
        same(expected, outputs),
        [key for key, value in one.items() if not torch.equal(value, other[key])],
        len(outputs),
    )


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 4))])
@pytest.mark.parametrize("parts", ["p", "s", "pws"], ids=["pooled", "sequence", "three collections"])
def test_fifty_pipelined_steps_are_those_of_a_plain_loop(parts: str, world: int) -> None:
    for found in run_ranks(world, beside_a_plain_loop, "sparse_dist", parts, 50):
        assert found == (True, [], 50)


@pytest.mark.parametrize("kind", ["base", "prefetch"])
def test_every_pipeline_gives_the_bits_of_a_plain_loop(kind: str) -> None:
    for found in run_ranks(2, beside_a_plain_loop, kind, "pws", 20):
        assert found == (True, [], 20)


@pytest.mark.parametrize("kind", ["sparse_dist", "prefetch"])
def test_features_of_their_own_batch_sizes_give_the_bits_of_a_plain_loop(kind: str) -> None:
    for found in run_ranks(2, beside_a_plain_loop, kind, "p", 12, True):
        assert found == (True, [], 12)
