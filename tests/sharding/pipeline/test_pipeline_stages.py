"""A pipeline's stages are methods that a subclass may override, and is obeyed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import Batch, batch_of, dense_optimizer, drain, plain_loop, same, sharded
from pipeline_runs import CPU, as_a_plain_loop, equal
from ranks import error_of, run_ranks
from torch import Tensor

from shardwise import (
    EvalPipelineSparseDist,
    KeyedJaggedTensor,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
)
from shardwise.sharding.pipeline.arguments import PrefetchTrainPipelineContext, TrainPipelineContext

pytestmark = pytest.mark.ranks

KINDS: dict[str, Any] = {
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
    "eval": EvalPipelineSparseDist,
}


@dataclass
class Noted(PrefetchTrainPipelineContext):
    """A context of a user's own."""

    notes: list[str] = field(default_factory=list)


def calls_of(kind: str, steps: int) -> tuple[bool, list[tuple[str, int]], bool]:
    """Whether outputs are those of a plain loop; the stages of each batch in order; whether contexts are the user's."""
    calls: list[tuple[str, int]] = []
    kinds: set[type] = set()

    class Counted(KINDS[kind]):  # type: ignore[misc]
        """Notes its stages."""

        def copy_batch_to_gpu(self, dataloader_iter: Iterator[Batch]) -> Any:
            batch, context = super().copy_batch_to_gpu(dataloader_iter)
            if batch is not None:
                calls.append(("copy", context.index))
            return batch, context

        def enqueue_batch(self, dataloader_iter: Iterator[Batch]) -> bool:
            before = len(self.batches)
            enqueued: bool = super().enqueue_batch(dataloader_iter)
            assert enqueued == (len(self.batches) == before + 1)
            return enqueued

        def start_sparse_data_dist(self, batch: Batch | None, context: TrainPipelineContext) -> None:
            assert context.index is not None and batch is not None
            kinds.add(type(context))
            calls.append(("start", context.index))
            super().start_sparse_data_dist(batch, context)

        def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
            assert context.index is not None
            calls.append(("wait", context.index))
            super().wait_sparse_data_dist(context)

        def dequeue_batch(self) -> None:
            calls.append(("dequeue", self.contexts[0].index))
            super().dequeue_batch()

    model = sharded("ps")
    pipeline = Counted(model, dense_optimizer(model), CPU)
    if kind == "sparse_dist":
        pipeline = Counted(model, dense_optimizer(model), CPU, context_type=Noted)
    outputs = drain(pipeline.progress, (batch_of(n) for n in range(steps)))
    if kind == "eval":
        plain: Any = sharded("ps")
        good = same([plain(batch_of(n))[1].detach() for n in range(steps)], outputs) and equal(model, plain)
    else:
        good = as_a_plain_loop(model, outputs, range(steps))
    wanted = {"sparse_dist": Noted, "prefetch": PrefetchTrainPipelineContext, "eval": TrainPipelineContext}[kind]
    return good, calls, kinds == {wanted}


@pytest.mark.parametrize("kind", KINDS)
def test_every_batch_goes_through_each_stage_once_and_in_order(kind: str) -> None:
    steps = 6
    for good, calls, is_own in run_ranks(2, calls_of, kind, steps):
        assert good and is_own
        for number in range(steps):
            assert [stage for stage, index in calls if index == number] == ["copy", "start", "wait", "dequeue"]
        # the next batch leaves before this one's step is over
        assert all(calls.index(("wait", n + 1)) < calls.index(("dequeue", n)) for n in range(steps - 1))


def shifted(batch: Batch) -> Batch:
    """Every id of the pooled tables is the next one."""
    features = batch.pooled
    ids = (features.values() + 1) % 40
    return replace(batch, pooled=KeyedJaggedTensor(features.keys(), ids, None, features.lengths()))


def changed_by(stage: str) -> tuple[bool, bool]:
    """Whether outputs are those of a plain loop over other batches, and not over these."""

    class Shifts(TrainPipelineSparseDist[Batch, Tensor]):
        """Trains with other ids."""

        def copy_batch_to_gpu(self, dataloader_iter: Iterator[Batch]) -> Any:
            batch, context = super().copy_batch_to_gpu(dataloader_iter)
            return batch if batch is None or stage != "copy" else shifted(batch), context

        def start_sparse_data_dist(self, batch: Batch | None, context: TrainPipelineContext) -> None:
            # the first batch is routed by the model itself, which has it as it was
            if batch is not None and stage == "start" and context.index:
                batch = shifted(batch)
            super().start_sparse_data_dist(batch, context)

    model, plain, other = (sharded("p") for _ in range(3))
    outputs = drain(Shifts(model, dense_optimizer(model), CPU).progress, (batch_of(n) for n in range(5)))
    batches = [batch_of(n) if stage == "start" and not n else shifted(batch_of(n)) for n in range(5)]
    expected = plain_loop(plain, iter(batches))
    return same(expected, outputs) and equal(model, plain), same(plain_loop(other, map(batch_of, range(5))), outputs)


@pytest.mark.parametrize("stage", ["copy", "start"])
def test_a_stage_that_changes_the_batch_is_obeyed(stage: str) -> None:
    assert run_ranks(2, changed_by, stage) == [(True, False)] * 2


def ends_or_fails(how: str) -> tuple[int, str]:
    """Steps until a stage of rank 1 has no more batches, or fails; and what was raised."""

    class Stops(TrainPipelineSparseDist[Batch, Tensor]):
        """Has three batches, or cannot read the fourth."""

        def copy_batch_to_gpu(self, dataloader_iter: Iterator[Batch]) -> Any:
            batch, context = super().copy_batch_to_gpu(dataloader_iter)
            if context is not None and context.index == 3 and dist.get_rank() == 1:
                if how == "raises":
                    raise KeyError("no column 'age'")
                batch = None
            return batch, context

    model = sharded("p")
    pipeline, batches, steps = Stops(model, dense_optimizer(model), CPU), (batch_of(n) for n in range(6)), 0
    try:
        while True:
            pipeline.progress(batches)
            steps += 1
    except StopIteration:
        return steps, "end"
    except Exception as error:
        message = f"{type(error).__name__}: {error.args[0]}"
        return steps, message if len(drain(pipeline.progress, batches)) == 2 else "and did not go on"


@pytest.mark.filterwarnings("ignore:ranks .* have no batch left")
def test_a_stage_of_one_rank_that_ends_or_fails_does_so_on_all() -> None:
    assert run_ranks(2, ends_or_fails, "ends") == [(3, "end")] * 2
    assert run_ranks(2, ends_or_fails, "raises") == [(3, "KeyError: rank 1: no column 'age'")] * 2


def of_no_batch() -> str:
    model = sharded("p")
    pipeline = TrainPipelineSparseDist[Batch, Tensor](model, dense_optimizer(model), torch.device("cpu"))
    pipeline.progress(iter([batch_of(0)]))
    return error_of(pipeline.wait_sparse_data_dist, TrainPipelineContext())


def test_a_context_that_no_batch_has_is_refused() -> None:
    assert run_ranks(1, of_no_batch)[0].startswith("ValueError: the context is of no batch under way")


class Scaled(TrainPipelineSparseDist[Batch, Tensor]):
    """As TorchEasyRec's: ranks agree on each batch by themselves, and the loss is scaled in the backward."""

    def _next_batch(self, dataloader_iter: Iterator[Batch]) -> Batch | None:
        if dataloader_iter is not self._dataloader_iter:
            self._dataloader_iter, self._dataloader_exhausted = dataloader_iter, False
        batch = None if self._dataloader_exhausted else next(dataloader_iter, None)
        have = torch.tensor([int(batch is not None)])
        dist.all_reduce(have)
        if have.item() < dist.get_world_size():
            self._dataloader_exhausted, batch = True, None
        return batch

    def _backward(self, losses: Tensor) -> None:
        (torch.sum(losses, dim=0) / 4).backward()  # type: ignore[no-untyped-call]

    def _optimizer_step(self) -> None:
        for group in self._optimizer.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], 0.01)
        super()._optimizer_step()


class Predicts(TrainPipelineSparseDist[Batch, Tensor]):
    """As TorchEasyRec's: a rank whose batches have ended goes on with its last one until all have."""

    def _next_batch(self, dataloader_iter: Iterator[Batch]) -> Batch | None:
        batch = super()._next_batch(dataloader_iter)
        have = torch.tensor([int(batch is not None)])
        dist.all_reduce(have)
        last: Any = self.batches[0] if self.batches else None
        return replace(last) if batch is None and have.item() else batch


def of_other_programs() -> tuple[int, bool, int]:
    """Steps of both; and whether the first is a loop that scales and clips."""
    model, plain, rank = sharded("ps"), sharded("ps"), dist.get_rank()
    pipeline = Scaled(model, dense_optimizer(model), CPU)
    outputs = drain(pipeline.progress, iter([batch_of(n) for n in range(4 + rank)]))
    optimizer, expected = dense_optimizer(plain), []
    for n in range(4):
        optimizer.zero_grad()
        losses, output = plain(batch_of(n))
        (torch.sum(losses, dim=0) / 4).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.01)
        optimizer.step()
        expected.append(output.detach().clone())
    good = same(expected, outputs) and equal(model, plain)
    model.eval()
    predicts = Predicts(model, dense_optimizer(model), CPU)
    with torch.no_grad():
        return len(outputs), good, len(drain(predicts.progress, iter([batch_of(n) for n in range(3 + 2 * rank)])))


def test_what_loads_scales_and_steps_may_be_a_programs_own() -> None:
    """The overrides that TorchEasyRec makes: of `_next_batch` with a collective in it, and of `_backward`."""
    assert run_ranks(2, of_other_programs) == [(4, True, 5)] * 2


class Own(TrainPipelineSparseDist[Batch, Tensor]):
    """A step of its own, written as TorchRec's; counts what has left ahead of its forward."""

    ahead = 0

    def progress(self, dataloader_iter: Iterator[Batch]) -> Tensor:
        self.fill_pipeline(dataloader_iter)
        if not self.batches:
            raise StopIteration
        self._set_module_context(self.contexts[0])
        self._optimizer.zero_grad()
        self._wait_for_batch()
        if len(self.batches) >= 2:
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])
        self.enqueue_batch(dataloader_iter)
        self.ahead += bool(self._queue[0].started)
        losses, output = self._model_fwd(self.batches[0])  # type: ignore[arg-type]
        if len(self.batches) >= 2:
            self.wait_sparse_data_dist(self.contexts[1])
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.dequeue_batch()
        return output


def of_its_own_step() -> tuple[bool, int]:
    """Whether all is as in a plain loop over what both ranks have, and how many batches had left ahead."""
    model = sharded("ps")
    pipeline = Own(model, dense_optimizer(model), CPU)
    outputs = drain(pipeline.progress, iter([batch_of(n) for n in range(6 + dist.get_rank())]))
    return as_a_plain_loop(model, outputs, range(6)), pipeline.ahead


@pytest.mark.filterwarnings("ignore:ranks .* have no batch left")
def test_a_subclass_may_write_the_step_itself() -> None:
    """The first two find nobody who knows yet what the model looks up."""
    assert run_ranks(2, of_its_own_step) == [(True, 4)] * 2
