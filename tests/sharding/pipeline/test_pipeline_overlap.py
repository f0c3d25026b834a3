"""What a pipeline hides: exchanges of the next batch that are launched before work on this one and awaited after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_zoo import batch_of, dense_optimizer, drain, sharded
from ranks import run_ranks

from shardwise.sharding.comms.exchange import Pending
from shardwise.sharding.pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

pytestmark = pytest.mark.ranks

PIPELINES: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
    "eval": EvalPipelineSparseDist,
}
STEPS = 10


class Log:
    """What happens in a run, in order: ("headers", n, "launched"), ("forward", n, "begins"), ..."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, str]] = []
        self._numbers: dict[str, int] = {}

    def exchange(self, what: str, launch: Any) -> Any:
        """`launch`, which is logged, as is the first wait for what it returns."""

        def launched(*args: Any, **kwargs: Any) -> Pending:
            number = self._numbers[what] = self._numbers.get(what, -1) + 1
            self.events.append((what, number, "launched"))
            pending: Any = launch(*args, **kwargs)
            wait, waited = pending.wait, iter([True])

            def awaited() -> Any:
                if next(waited, False):
                    self.events.append((what, number, "awaited"))
                return wait()

            pending.wait = awaited
            return pending  # type: ignore[no-any-return]

        return launched

    def place(self, what: str, number: int, how: str) -> int:
        """When it happened."""
        return self.events.index((what, number, how))

    def spans(self, exchange: str, number: int, work: str, step: int) -> bool:
        """Whether the exchange was under way during the whole work."""
        launched, awaited = (self.place(exchange, number, how) for how in ("launched", "awaited"))
        return launched < self.place(work, step, "begins") < self.place(work, step, "ends") < awaited


def logged(kind: str, steps: int) -> Log:
    """A run of this pipeline over a model with one collection."""
    model: Any = sharded("p")
    log = Log()
    exchange = model.module.pooled._exchange
    exchange.headers, exchange.ids = log.exchange("headers", exchange.headers), log.exchange("ids", exchange.ids)
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
    pipeline = PIPELINES[kind](model, optimizer, torch.device("cpu"))
    pipeline._custom_model_fwd = forward
    assert len(drain(pipeline.progress, iter([batch_of(n) for n in range(steps)]))) == steps
    return log


def hidden(kind: str, ids_during: str) -> tuple[int, int, int]:
    """Exchanges of sizes that span a forward, those of ids that span the work after it, and all exchanges."""
    log, ahead = logged(kind, STEPS), PIPELINES[kind]._batches_ahead
    # ids that leave after a forward travel during its backward, or during the next forward
    later = 0 if ids_during == "backward" else 1
    headers = sum(log.spans("headers", n, "forward", n - ahead) for n in range(ahead + 1, STEPS))
    ids = sum(log.spans("ids", n, ids_during, n - ahead + later) for n in range(ahead + 1, STEPS))
    return headers, ids, sum(how == "launched" for _, _, how in log.events)


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


def test_without_a_pipeline_nothing_is_hidden() -> None:
    """The count can tell: two batches copied ahead, none routed."""
    for log in run_ranks(2, events_of, "base"):
        assert not any(log.spans("headers", n, "forward", n - 1) for n in range(1, STEPS))
        assert all(log.place("headers", n, "awaited") < log.place("ids", n, "launched") for n in range(STEPS))


def events_of(kind: str) -> Log:
    return logged(kind, STEPS)
