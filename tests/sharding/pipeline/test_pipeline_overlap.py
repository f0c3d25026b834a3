"""Exchanges of the next batch: launched before work on this one, awaited after it, on the stream of their memory.

Every exchange is waited for on the stream that its memory belongs to, dropped batches included: on two gloo ranks with
streams that are not there, what is recorded is which stream is current when an exchange begins and when it is waited
for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from model_zoo import Batch, batch_of, dense_optimizer, drain, sharded
from pipeline_runs import CPU, PIPELINES, TRAINING, pipeline_of
from ranks import run_ranks
from torch import Tensor

from shardwise.sharding.comms.exchange import Pending
from shardwise.sharding.pipeline import (
    SparseDataDistUtil,
    StagedTrainPipeline,
    streams,
)
from shardwise.sharding.pipeline.ahead import Ahead
from shardwise.sharding.pipeline.feed import Feed

STEPS = 10


class Log:
    """What happens in a run, in order: ("headers", n, "launched"), ("forward", n, "begins"), ..."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, str]] = []
        self._numbers: dict[str, int] = {}

    def exchange(self, launch: Any) -> Any:
        """`launch`, which is logged for headers and ids, as is the first wait for what it returns."""

        def launched(*args: Any, what: str) -> Pending:
            if what not in ("headers", "ids"):
                return launch(*args, what=what)  # type: ignore[no-any-return]
            number = self._numbers[what] = self._numbers.get(what, -1) + 1
            self.events.append((what, number, "launched"))
            pending: Any = launch(*args, what=what)
            wait, waited = pending.wait, iter([True])

            def awaited() -> Any:
                if next(waited, False):
                    self.events.append((what, number, "awaited"))
                return wait()

            pending.wait = awaited
            return pending  # type: ignore[no-any-return]

        return launched

    def place(self, what: str, number: int, event: str) -> int:
        """When it happened."""
        return self.events.index((what, number, event))

    def spans(self, exchange: str, number: int, work: str, step: int) -> bool:
        """Whether the exchange was under way during the whole work."""
        launched, awaited = (self.place(exchange, number, event) for event in ("launched", "awaited"))
        return launched < self.place(work, step, "begins") < self.place(work, step, "ends") < awaited


def logged(kind: str, steps: int) -> Log:
    """A run of this pipeline over a model with one collection."""
    model: Any = sharded("p")
    log = Log()
    exchange = model.module.pooled._exchange
    exchange.all_to_all = log.exchange(exchange.all_to_all)
    forwards = iter(range(steps))

    def forward(batch: Any) -> Any:
        step = next(forwards)
        log.events.append(("forward", step, "begins"))
        losses, output = model(batch)
        log.events.append(("forward", step, "ends"))
        if losses.requires_grad:
            # the gradient of the loss comes first, and those of dense layers last
            losses.register_hook(lambda _: log.events.append(("backward", step, "begins")))
        return losses, output

    optimizer = dense_optimizer(model)
    step = optimizer.step

    def stepped(*args: Any) -> None:
        step(*args)
        log.events.append(("backward", sum(what == "forward" for what, _, _ in log.events) // 2 - 1, "ends"))

    optimizer.step = stepped  # type: ignore[method-assign,assignment]
    pipeline = PIPELINES[kind](model, optimizer, CPU)
    pipeline._custom_model_fwd = forward
    assert len(drain(pipeline.progress, map(batch_of, range(steps)))) == steps
    return log


def hidden(kind: str, ids_during: str) -> tuple[int, int, int]:
    """Exchanges of sizes that span a forward, those of ids that span the work after it, and all exchanges."""
    log, ahead = logged(kind, STEPS), PIPELINES[kind]._batches_ahead
    # ids that leave after a forward travel during its backward, or during the next forward
    later = 0 if ids_during == "backward" else 1
    headers = sum(log.spans("headers", n, "forward", n - ahead) for n in range(ahead + 1, STEPS))
    ids = sum(log.spans("ids", n, ids_during, n - ahead + later) for n in range(ahead + 1, STEPS))
    return headers, ids, sum(event == "launched" for _, _, event in log.events)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "ids_during"), [("sparse_dist", "backward"), ("prefetch", "backward"), ("eval", "forward")]
)
def test_sizes_travel_during_a_forward_and_ids_during_the_work_after_it(kind: str, ids_during: str) -> None:
    """All but those of the first batches, which are there before the model's calls are known: over 70 %."""
    for headers, ids, exchanges in run_ranks(2, hidden, kind, ids_during):
        assert headers == ids == STEPS - PIPELINES[kind]._batches_ahead - 1
        assert headers + ids >= 0.7 * 2 * STEPS
        # no more exchanges than a plain loop has
        assert exchanges == 2 * STEPS


@pytest.mark.ranks
def test_without_a_pipeline_nothing_is_hidden() -> None:
    """The count can tell: two batches copied ahead, none routed."""
    for log in run_ranks(2, events_of, "base"):
        assert not any(log.spans("headers", n, "forward", n - 1) for n in range(1, STEPS))
        assert all(log.place("headers", n, "awaited") < log.place("ids", n, "launched") for n in range(STEPS))


def events_of(kind: str) -> Log:
    return logged(kind, STEPS)


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
    model, streams = sharded("ps"), Streams()
    with streams.recorded():
        pipeline = pipeline_of(kind, model)
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
    return streams.waits, streams.dropped


def staged() -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Steps of a user's own loop that skips a batch, and a detached model."""
    model, streams, routing = sharded("ps"), Streams(), Stream("routing")
    with streams.recorded():
        sparse: Any = SparseDataDistUtil(model, None)
        sparse.data_dist_stream = routing
        sparse._ahead._stream = routing
        pipeline: Any = StagedTrainPipeline([sparse.start_sparse_data_dist_stage()])
        batches = map(batch_of, range(9))
        step = 0
        while (batch := pipeline.progress(batches)) is not None:
            step += 1
            if step != 4:
                model(batch)
            if step == 7:
                sparse.detach()
                break
    return streams.waits, streams.dropped


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [*TRAINING, "staged"])
def test_what_a_dropped_batch_sent_is_waited_for_on_the_stream_that_sent_it(kind: str) -> None:
    """The main stream waited: memory of another one went back to that one's pool while it was still written to."""
    for waits, dropped in run_ranks(2, staged) if kind == "staged" else run_ranks(2, pipelined, kind):
        assert all(began == waited for began, waited in (*waits, *dropped)), (waits, dropped)
        own = "copies" if kind == "base" else "routing"
        assert dropped[own, own] > 0 and waits[own, own] > 0
