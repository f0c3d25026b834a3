"""Every exchange of a pipeline is waited for on the stream that its memory belongs to, dropped batches included.

Two gloo ranks with streams that are not there: what is recorded is which stream is current when an exchange begins and
when it is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model_zoo import Batch, batch_of, dense_optimizer, sharded
from ranks import run_ranks
from torch import Tensor

from shardwise.sharding.comms.exchange import Pending
from shardwise.sharding.pipeline import (
    PrefetchTrainPipelineSparseDist,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    streams,
)
from shardwise.sharding.pipeline.ahead import Ahead
from shardwise.sharding.pipeline.feed import Feed

CPU = torch.device("cpu")
PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}


class Stream:
    """A stream of a GPU that is not there."""

    device = torch.device("cuda", 0)

    def __init__(self, name: str) -> None:
        self.name = name

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...


class _Torch:
    """torch, with `cuda` in the place of torch.cuda."""

    def __init__(self, cuda: Streams) -> None:
        self.cuda = cuda

    def get_device_module(self, device: torch.device) -> Streams:
        return self.cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Streams:
    """In the place of torch.cuda: the current stream, and of each exchange where it began and where it was waited for.

    `dropped` counts the same of those that a drop waited for.
    """

    def __init__(self) -> None:
        self.current = [Stream("main")]
        self.waits: Counter[tuple[str, str]] = Counter()
        self.dropped: Counter[tuple[str, str]] = Counter()
        self.drops = 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def current_stream(self, device: torch.device) -> Stream:
        return self.current[-1]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        begin, wait = Pending.__init__, Pending.wait

        def began(pending: Any, *args: Any, **kwargs: Any) -> None:
            begin(pending, *args, **kwargs)
            pending.began_on, pending.is_new = self.current[-1].name, True

        def waited(pending: Any) -> Tensor:
            if pending.is_new:
                pending.is_new = False
                pair = (pending.began_on, self.current[-1].name)
                (self.dropped if self.drops else self.waits)[pair] += 1
            return wait(pending)

        def counting(drop: Any) -> Any:
            def dropped(*args: Any) -> None:
                self.drops += 1
                drop(*args)
                self.drops -= 1

            return dropped

        with ExitStack() as patches:
            patches.enter_context(patch.object(Pending, "__init__", began))
            patches.enter_context(patch.object(Pending, "wait", waited))
            patches.enter_context(patch.object(streams, "torch", _Torch(self)))
            patches.enter_context(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
            for kind in (Ahead, Feed):
                patches.enter_context(patch.object(kind, "drop", counting(kind.drop)))
            yield


def bad(batch: Batch) -> Batch:
    """The batch with an id outside its table."""
    batch.pooled.values()[:1] = 10**6
    return batch


def pipelined(kind: str) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Steps, a bad batch, another kind of step, a detached model, another one, a reset, and an end."""
    model, seen = sharded("ps"), Streams()
    with seen.recorded():
        pipeline = PIPELINES[kind](model, dense_optimizer(model), CPU)
        pipeline._feed.stream = Stream("copies")
        if kind != "base":
            pipeline._stream = Stream("routing")
            pipeline._ahead = pipeline._ahead_of(model)
        batches = iter([bad(batch_of(n)) if n == 4 else batch_of(n) for n in range(24)])
        for step in range(14):
            model.train(step % 6 != 5)
            with suppress(IndexError):
                pipeline.progress(batches)
            if step == 9 and kind != "base":
                pipeline.detach()
                pipeline.attach(model)
        pipeline.reset()
        pipeline._feed.stream = Stream("copies")
        with suppress(StopIteration):
            while True:
                pipeline.progress(batches)
    return seen.waits, seen.dropped


def staged() -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Steps of a user's own loop that skips a batch, and a detached model."""
    model, seen, routing = sharded("ps"), Streams(), Stream("routing")
    with seen.recorded():
        sparse: Any = SparseDataDistUtil(model, None)
        sparse.data_dist_stream = routing
        sparse._ahead._stream = routing
        pipeline: Any = StagedTrainPipeline([sparse.start_sparse_data_dist_stage()])
        batches = iter([batch_of(n) for n in range(9)])
        step = 0
        while (batch := pipeline.progress(batches)) is not None:
            step += 1
            if step != 4:
                model(batch)
            if step == 7:
                sparse.detach()
                break
    return seen.waits, seen.dropped


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [*PIPELINES, "staged"])
def test_what_a_dropped_batch_sent_is_waited_for_on_the_stream_that_sent_it(kind: str) -> None:
    """The main stream waited: memory of another one went back to that one's pool while it was still written to."""
    for waits, dropped in run_ranks(2, staged) if kind == "staged" else run_ranks(2, pipelined, kind):
        assert all(began == waited for began, waited in (*waits, *dropped)), (waits, dropped)
        own = "copies" if kind == "base" else "routing"
        assert dropped[own, own] > 0 and waits[own, own] > 0
