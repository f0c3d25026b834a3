"""Pipelines by name, and whether one left a model as a plain loop does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from model_zoo import batch_of, dense_optimizer, plain_loop, same, sharded, state_of
from torch import Tensor

from shardwise.sharding.pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

TRAINING: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}
PIPELINES = {**TRAINING, "eval": EvalPipelineSparseDist}
CPU = torch.device("cpu")


def pipeline_of(kind: str, model: Any, **settings: Any) -> Any:
    """A pipeline over a model of the zoo."""
    return PIPELINES[kind](model, dense_optimizer(model), CPU, **settings)


def equal(model: Any, other: Any) -> bool:
    """Whether two models are the same bits."""
    first, second = state_of(model), state_of(other)
    return first.keys() == second.keys() and all(torch.equal(value, second[key]) for key, value in first.items())


def as_a_plain_loop(model: Any, outputs: list[Tensor], numbers: Iterable[int], parts: str = "ps") -> bool:
    """Whether a model and its outputs are those of a plain loop over the batches of these numbers."""
    plain = sharded(parts)
    return same(plain_loop(plain, map(batch_of, numbers)), outputs) and equal(model, plain)
