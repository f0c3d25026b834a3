"""What a model does to a batch before a sharded module: left alone with a warning, or run ahead where that is safe."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from model_zoo import Batch, Net, batch_of, dense_optimizer, drain, plain_loop, same, sharded, state_of
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import KeyedJaggedTensor
from shardwise.sharding.pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist

pytestmark = pytest.mark.ranks


class Reordered(nn.Module):
    """Features in an order of its own; every id is shifted by a buffer."""

    shift: Tensor

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.register_buffer("shift", torch.tensor(0))
        self.scale = nn.Parameter(torch.ones(1), requires_grad=learned)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        mixed = features.permute([2, 0, 3, 1])
        shifted = mixed.values() + self.shift + (self.scale * 0).long()
        return KeyedJaggedTensor(mixed.keys(), shifted, None, mixed.lengths())


class Prepared(Net):
    """Calls its first collection with what it makes of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__("ps")
        self.kind = kind
        self.post = Reordered(kind == "learned")

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = self.post(batch.pooled)
        if self.kind == "branching" and batch.dense.sum() > 0:
            features = features.permute([0, 1, 2, 3])
        if self.kind == "sharded":
            rows = self.sequence(batch.lists["history"])
            zero = (rows["f0"].values().detach().sum() * 0).long()
            features = KeyedJaggedTensor(features.keys(), features.values() + zero, None, features.lengths())
        found = self.dense(batch.dense) + self.pooled(features).values().view(-1, 4, 8).sum(1)
        if self.kind == "twice":
            found = found + self.pooled(batch.pooled).values().view(-1, 4, 8).sum(1)
        out = self.over(found.tanh()).squeeze(1)
        return (out * out).sum() / 8, out


def beside_a_plain_loop(kind: str, pipeline: str, postproc: bool) -> tuple[bool, list[str], int]:
    """Whether all is the same, what was warned of, and how many headers of the pooled collection left ahead."""
    plain = sharded("ps", Prepared(kind))
    piped: Any = sharded("ps", Prepared(kind))
    expected = plain_loop(plain, (batch_of(step) for step in range(12)))
    ahead, depart = [0], piped.module.pooled.depart

    def counted(features: Any) -> Any:
        ahead[0] += not piped.module.forwards
        return depart(features)

    piped.module.forwards = 0
    piped.module.register_forward_pre_hook(lambda module, _: setattr(module, "forwards", module.forwards + 1))
    piped.module.register_forward_hook(lambda module, *_: setattr(module, "forwards", module.forwards - 1))
    piped.module.pooled.depart = counted
    optimizer = dense_optimizer(piped)
    of_kind: Any = {"sparse_dist": TrainPipelineSparseDist, "prefetch": PrefetchTrainPipelineSparseDist}[pipeline]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = of_kind(piped, optimizer, torch.device("cpu"), pipeline_postproc=postproc)
        outputs = drain(one.progress, (batch_of(step) for step in range(12)))
    left, right = state_of(plain), state_of(piped)
    good = same(expected, outputs) and all(torch.equal(value, right[key]) for key, value in left.items())
    return good, [str(w.message) for w in caught if "not pipelined" in str(w.message)], ahead[0]


@pytest.mark.parametrize("pipeline", ["sparse_dist", "prefetch"])
def test_what_makes_the_input_runs_ahead(pipeline: str) -> None:
    for good, said, ahead in run_ranks(2, beside_a_plain_loop, "plain", pipeline, True):
        assert good
        assert said == []
        assert ahead == 11


def test_a_module_that_is_called_twice_in_a_step_gets_each_batch_in_turn() -> None:
    for good, said, ahead in run_ranks(2, beside_a_plain_loop, "twice", "sparse_dist", True):
        assert good
        assert said == []
        assert ahead == 22


@pytest.mark.parametrize(
    ("kind", "postproc", "why"),
    [
        ("plain", False, "pipeline_postproc=True runs ahead what makes it, if that is possible"),
        ("learned", True, "it needs parameters that are trained, ['post.scale']"),
        ("sharded", True, "it needs the sharded module 'sequence'"),
        ("branching", True, "symbolically traced variables cannot be used as inputs to control flow"),
    ],
)
def test_what_cannot_run_ahead_runs_in_the_step_and_is_named(kind: str, postproc: bool, why: str) -> None:
    for good, said, ahead in run_ranks(2, beside_a_plain_loop, kind, "sparse_dist", postproc):
        assert good
        assert len(said) == 1
        assert said[0].startswith("module 'pooled' is not pipelined: its input is not a part of the batch")
        assert why in said[0]
        assert ahead == 0
