"""Settings of a pipeline that free memory early: what is freed when, and that every bit stays."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_zoo import Batch, Net, batch_of, dense_optimizer, drain, plain_loop, same, sharded
from pipeline_runs import CPU, as_a_plain_loop, equal
from ranks import error_of, run_ranks
from torch import Tensor

from shardwise import KeyedJaggedTensor, PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from shardwise.sharding.pipeline.arguments import TrainPipelineContext

pytestmark = pytest.mark.ranks


def features_of(batch: Batch) -> list[KeyedJaggedTensor]:
    return [batch.pooled, batch.weighted, batch.lists["history"]]


def bytes_of(kjt: KeyedJaggedTensor) -> dict[str, int]:
    return {name: tensor.untyped_storage().size() for name, tensor in kjt.storages().items()}


def freed_early(kind: str, world_parts: str) -> tuple[bool, list[bool]]:
    """Whether bits are those of a plain loop; of each batch whether its memory was freed as it left, and not before."""
    freed: list[bool] = []
    pooled, weighted = "p" in world_parts, "w" in world_parts

    class Watches(PrefetchTrainPipelineSparseDist if kind == "prefetch" else TrainPipelineSparseDist):  # type: ignore[misc]
        """Looks at the batch before and after it leaves."""

        def start_sparse_data_dist(self, batch: Batch | None, context: TrainPipelineContext) -> None:
            assert batch is not None
            before = [bytes_of(kjt) for kjt in features_of(batch)]
            super().start_sparse_data_dist(batch, context)
            after = [bytes_of(kjt) for kjt in features_of(batch)]
            if not context.index:
                # nobody knows yet what the model reads of it
                freed.append(before == after)
                return
            good = not pooled or not any(after[0].values())
            good &= not weighted or not any(after[1].values())
            # a result of sequences has the lengths of its bags
            good &= not after[2]["values"] and after[2]["lengths"] == before[2]["lengths"]
            freed.append(good)

    model = sharded(world_parts)
    pipeline = Watches(model, dense_optimizer(model), CPU, free_features_storage_early=True)
    outputs = drain(pipeline.progress, (batch_of(n) for n in range(8)))
    return as_a_plain_loop(model, outputs, range(8), world_parts), freed


@pytest.mark.parametrize(("kind", "world"), [("sparse_dist", 2), ("prefetch", 2), ("sparse_dist", 1)])
def test_features_are_freed_as_soon_as_they_are_lined_up_to_leave(kind: str, world: int) -> None:
    """Of each batch but the first; a rank that is alone looks its own ids up and keeps copies of them."""
    assert run_ranks(world, freed_early, kind, "pws") == [(True, [True] * 8)] * world


class ReadsAgain(Net):
    """Calls one collection with a part of the batch, another with what it makes of it."""

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.dense(batch.dense) + self.pooled(batch.pooled).values().view(-1, 4, 8).sum(1)
        rows = batch.lists["history"]
        copied = KeyedJaggedTensor(rows.keys(), rows.values() + 0, None, rows.lengths())
        out = self.over((hidden + self.sequence(copied)["f0"].values().sum()).tanh()).squeeze(1)
        return (out * out).sum() / 8, out


def kept_for_the_model() -> tuple[bool, bool]:
    """Whether bits are those of a plain loop, and nothing is freed that the model reads itself."""
    plain, model = (sharded("ps", ReadsAgain("ps")) for _ in range(2))
    batches = [batch_of(n) for n in range(5)]
    expected = plain_loop(plain, map(batch_of, range(5)))
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), CPU, free_features_storage_early=True)
    outputs = drain(pipeline.progress, iter(batches))
    kept = all(bytes_of(batch.pooled) == bytes_of(batch_of(n).pooled) for n, batch in enumerate(batches))
    return same(expected, outputs) and equal(model, plain), kept


@pytest.mark.filterwarnings("ignore:module 'sequence' is not pipelined")
def test_nothing_is_freed_where_the_model_makes_an_input_of_the_batch() -> None:
    assert run_ranks(2, kept_for_the_model) == [(True, True)] * 2


def changes(how: str) -> tuple[str, bool]:
    """What is raised where a batch that was freed finds another kind of step; whether the pipeline goes on."""
    model = sharded("ps")
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), CPU, free_features_storage_early=True)
    batches = (batch_of(n) for n in range(8))
    outputs = [pipeline.progress(batches).detach().clone() for _ in range(2)]
    error = ""
    if how == "eval":
        model.eval()
        error = error_of(pipeline.progress, batches)
        model.train()
        return error, len(drain(pipeline.progress, batches)) == 5
    # batches under way stay as they are, and the model can be used in between
    with torch.no_grad():
        pipeline.detach()(batch_of(20))
    pipeline.attach()
    outputs += drain(pipeline.progress, batches)
    return error, as_a_plain_loop(model, outputs, range(8))


def test_a_batch_that_was_freed_is_not_routed_once_more() -> None:
    for error, good in run_ranks(2, changes, "eval"):
        assert good and error.startswith("RuntimeError: the batch left ahead for another kind of step")
    assert run_ranks(2, changes, "detach") == [("", True)] * 2


def cleared() -> tuple[bool, list[tuple[bool, bool]]]:
    """Whether bits are those of a plain loop; of each batch, whether what it sent was there before, and not after."""
    presence: list[tuple[bool, bool]] = []

    class Watches(TrainPipelineSparseDist[Batch, Tensor]):
        """Looks at what was sent for a batch."""

        def clear_sparse_data_dist_inputs(self, context: TrainPipelineContext) -> None:
            steps = [entry.step for entry in self._fetched_of(context).started]
            sent = [weakref.ref(step.sent_ids) for step in steps]
            before = all(ref() is not None for ref in sent)
            super().clear_sparse_data_dist_inputs(context)
            presence.append((before, not any(ref() is not None for ref in sent)))

    model = sharded("pws")
    pipeline = Watches(model, dense_optimizer(model), CPU, clear_data_dist_inputs=True)
    outputs = drain(pipeline.progress, (batch_of(n) for n in range(6)))
    return as_a_plain_loop(model, outputs, range(6), "pws"), presence


def test_what_was_sent_is_let_go_before_the_forward() -> None:
    assert run_ranks(2, cleared) == [(True, [(True, True)] * 6)] * 2


def copied_in_place() -> tuple[bool, list[str]]:
    """Whether bits are those of a plain loop, and which of the two stages were called."""
    called: list[str] = []

    class Watches(TrainPipelineSparseDist[Batch, Tensor]):
        """Notes how batches are copied."""

        def copy_batch_to_gpu(self, dataloader_iter: Iterator[Batch]) -> Any:
            called.append("copy")
            return super().copy_batch_to_gpu(dataloader_iter)

        def inplace_copy_batch_to_gpu(self, dataloader_iter: Iterator[Batch]) -> Any:
            called.append("in place")
            return super().inplace_copy_batch_to_gpu(dataloader_iter)

    model = sharded("p")
    pipeline = Watches(model, dense_optimizer(model), CPU, enable_inplace_copy_batch=True)
    outputs = drain(pipeline.progress, (batch_of(n) for n in range(4)))
    return as_a_plain_loop(model, outputs, range(4), "p"), sorted(set(called))


def test_batches_are_copied_in_place_where_that_is_asked_for() -> None:
    assert run_ranks(1, copied_in_place) == [(True, ["in place"])]
