"""Stages that a user chooses, and batches loaded by a thread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import Batch, batch_of, dense_optimizer, plain_loop, same, sharded, state_of
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import DMPCollection
from shardwise.sharding.pipeline import (
    DataLoadingThread,
    PipelineStage,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipelineSparseDist,
)

CPU = torch.device("cpu")


def stages_of(*names: str) -> tuple[list[PipelineStage], list[str]]:
    """Stages that note what they do: "a3" is stage a with batch 3."""
    log: list[str] = []

    def noting(name: str) -> PipelineStage:
        def run(batch: str) -> str:
            log.append(name + batch[-1])
            return batch

        return PipelineStage(name, run, None, lambda: log.append(f"{name}f"), lambda: log.append(f"{name}x"))

    return [noting(name) for name in names], log


def test_each_stage_has_another_batch() -> None:
    stages, log = stages_of("a", "b")
    pipeline: StagedTrainPipeline[str, str] = StagedTrainPipeline(stages)
    assert pipeline.num_stages == 2
    batches = iter(["n0", "n1", "n2"])
    found = [pipeline.progress(batches)]
    assert log == ["a0", "af", "b0", "bf", "a1", "af", "a2", "b1"]
    found += [pipeline.progress(batches) for _ in range(3)]
    assert found == ["n0", "n1", "n2", None]
    assert log[8:] == ["ax", "b2", "ax", "bx", "ax", "bx"]
    # the next epoch
    again = iter(["n3", "n4"])
    assert [pipeline.progress(again) for _ in range(3)] == ["n3", "n4", None]


def test_a_flush_finishes_what_is_under_way_and_goes_on() -> None:
    stages, _ = stages_of("a", "b", "c")
    said: list[str] = []
    pipeline: StagedTrainPipeline[str, str] = StagedTrainPipeline(stages, on_flush_end=lambda: said.append("over"))
    batches = iter([f"n{n}" for n in range(7)])
    assert pipeline.progress(batches) == "n0"
    pipeline.set_flush(True)
    assert [pipeline.progress(batches) for _ in range(3)] == ["n1", "n2", "n3"]
    assert not said
    assert pipeline.progress(batches) == "n4"
    assert said == ["over"]
    assert [pipeline.progress(batches) for _ in range(3)] == ["n5", "n6", None]


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one stage"):
        StagedTrainPipeline([])
    stream: Any = object()
    with pytest.raises(ValueError, match="embedding_lookup_stream: rows would be looked up before the update"):
        SparseDataDistUtil(nn.Linear(1, 1), None, embedding_lookup_stream=stream)


def train_by_stages(prefetches: bool, counts: list[int], fails: bool) -> tuple[bool, int, list[str], list[str]]:
    """Whether all is as in a plain loop, steps, warnings, and what was raised."""
    model, plain = sharded("ps"), sharded("ps")
    sparse: SparseDataDistUtil[Batch] = SparseDataDistUtil(model, None)
    stages = [PipelineStage("copy", lambda batch: batch.to(CPU), None), sparse.start_sparse_data_dist_stage()]
    if prefetches:
        stages.append(PipelineStage("prefetch", sparse.prefetch, None, sparse.load_prefetch))
    pipeline: StagedTrainPipeline[Batch, Batch] = StagedTrainPipeline(stages)
    optimizer, outputs, raised = dense_optimizer(model), [], []
    mine = counts[dist.get_rank()]

    def load() -> Iterator[Batch]:
        for n in range(mine):
            if fails and n == 4 and dist.get_rank() == 1:
                raise OSError("day_4.tsv is not there")
            yield batch_of(n)

    batches = load()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            while (batch := pipeline.progress(batches)) is not None:
                optimizer.zero_grad()
                losses, output = model(batch)
                losses.backward()
                optimizer.step()
                outputs.append(output.detach().clone())
        except OSError as error:
            raised.append(str(error))
    assert sparse.detach() is model
    expected = plain_loop(plain, (batch_of(n) for n in range(len(outputs))))
    (one, other) = state_of(model), state_of(plain)
    good = same(expected, outputs) and all(torch.equal(value, other[key]) for key, value in one.items())
    return good, len(outputs), [str(w.message) for w in caught if "no batch left" in str(w.message)], raised


@pytest.mark.ranks
@pytest.mark.parametrize("prefetches", [False, True], ids=["routed", "prefetched"])
def test_a_loop_over_stages_gives_the_bits_of_a_plain_one(prefetches: bool) -> None:
    for good, steps, _, _ in run_ranks(2, train_by_stages, prefetches, [9, 9], False):
        assert good
        assert steps == 9


@pytest.mark.ranks
def test_stages_of_all_ranks_end_on_the_same_step() -> None:
    """Fault 36."""
    ranks = run_ranks(2, train_by_stages, False, [4, 7], False)
    assert [(good, steps) for good, steps, _, _ in ranks] == [(True, 4), (True, 4)]
    assert not ranks[0][2]
    assert ranks[1][2][0] == "another rank has no batch left: a batch of this rank is left out"


@pytest.mark.ranks
def test_a_loader_that_raises_ends_the_stages_of_all_ranks() -> None:
    """Fault 37: the rank itself raises, in the step whose batch it was; the others end there."""
    ranks = run_ranks(2, train_by_stages, False, [7, 7], True)
    assert [(good, steps, raised) for good, steps, _, raised in ranks] == [
        (True, 4, []),
        (True, 4, ["day_4.tsv is not there"]),
    ]


def numbers(count: int, bad: int | None = None) -> Iterator[Tensor]:
    for n in range(count):
        if n == bad:
            raise ValueError("half a line")
        yield torch.tensor([n])


def test_a_thread_loads_in_order_and_ends() -> None:
    thread: DataLoadingThread[Tensor] = DataLoadingThread(CPU, numbers(3), False)
    thread.start()
    found = [thread.get_next_batch() for _ in range(5)]
    assert [None if batch is None else int(batch) for batch in found] == [0, 1, 2, None, None]
    with pytest.raises(StopIteration):
        thread.get_next_batch(none_throws=True)
    thread.join(30)
    assert not thread.is_alive()


def test_what_a_thread_fails_on_is_raised_where_the_batch_is_asked_for() -> None:
    thread: DataLoadingThread[Tensor] = DataLoadingThread(CPU, numbers(3, bad=1), False)
    assert int(next(thread)) == 0
    with pytest.raises(ValueError, match="^rank 0: half a line$"):
        thread.get_next_batch()
    # a generator that raised is over
    assert thread.get_next_batch() is None


def test_a_thread_that_is_stopped_gives_no_more() -> None:
    def endless() -> Iterator[Tensor]:
        while True:
            yield torch.zeros(1)

    thread: DataLoadingThread[Tensor] = DataLoadingThread(CPU, endless(), False)
    assert next(thread) is not None
    thread.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert thread.get_next_batch() is None


def averaged(interval: int | None) -> list[int]:
    """Before which batches the replicas were averaged."""
    from model_zoo import Net

    from shardwise import ShardingPlan, construct_module_sharding_plan
    from shardwise.sharding import table_wise

    module = Net("p")
    cut = {f"t{n}": table_wise(0) for n in range(4)}
    plan = ShardingPlan({"pooled": construct_module_sharding_plan(module.pooled, cut, None, 1, 1, "cpu")})
    assert dist.group.WORLD is not None
    model = DMPCollection(module, CPU, plan, 2, 1, dist.group.WORLD)
    done, synced, sync = [0], [], model.sync

    def noted() -> None:
        synced.append(done[0])
        sync()

    model.sync = noted  # type: ignore[method-assign,assignment]
    pipeline: TrainPipelineSparseDist[Batch, Tensor] = TrainPipelineSparseDist(
        model, dense_optimizer(model), CPU, dmp_collection_sync_interval_batches=interval
    )
    batches = (batch_of(n) for n in range(7))
    for _ in range(7):
        pipeline.progress(batches)
        done[0] += 1
    return synced


@pytest.mark.ranks
@pytest.mark.parametrize(("interval", "steps"), [(1, list(range(7))), (3, [0, 3, 6]), (None, [])])
def test_replicas_are_averaged_after_every_so_many_batches(interval: int | None, steps: list[int]) -> None:
    assert run_ranks(2, averaged, interval) == [steps, steps]
