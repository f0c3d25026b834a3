"""A rank that fails in a pipeline's step: its peers raise, with no block of `watched()` in the user's loop."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from failing_model import Fault, Model, build, features_of
from lone_ranks import Said, start_lone_ranks
from torch import Tensor

from shardwise import KeyedJaggedTensor, PrefetchTrainPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist

pytestmark = pytest.mark.ranks

PIPELINES = {kind.__name__: kind for kind in (TrainPipelineBase, TrainPipelineSparseDist)}
PIPELINES[PrefetchTrainPipelineSparseDist.__name__] = PrefetchTrainPipelineSparseDist


def train(kind: str, fault: Fault) -> None:
    model = build(fault)
    inner = model.module
    assert isinstance(inner, Model)
    optimizer = torch.optim.SGD([*inner.first.parameters(), *inner.last.parameters()], lr=0.1)

    def forward(batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        loss: Tensor = model(batch)
        inner.come("loss")
        return loss, loss.detach()

    pipeline = PIPELINES[kind](model, optimizer, torch.device("cpu"), custom_model_fwd=forward)
    batches = (features_of(step, dist.get_rank()) for step in range(6))
    for inner.step in range(6):
        pipeline.progress(batches)


def fail(*cases: tuple[str, Fault]) -> list[list[Said]]:
    """What both ranks of each pipeline said. All wait at once."""
    groups = [start_lone_ranks(2, train, kind, fault) for kind, fault in cases]
    found = [group.said() for group in groups]
    for first, _ in found:
        assert (first.error, first.ranks) == ("RankFailure", (1,)), first
    return found


def test_what_one_rank_raises_in_a_step_is_told() -> None:
    """Fault 34: the loss is the user's own code, which neither forward nor backward of the model sees."""
    for first, second in fail(*((kind, Fault("loss", "raise")) for kind in PIPELINES)):
        assert "ZeroDivisionError: the loader's seventh batch" in first.text
        assert second.error == "ZeroDivisionError"


def test_a_rank_killed_in_a_step_ends_its_peers() -> None:
    """Fault 34: ids of the next batch are on their way meanwhile."""
    places = ("input exchange", "backward")
    for _, second in fail(*(("TrainPipelineSparseDist", Fault(place, "kill")) for place in places)):
        assert second.killed
