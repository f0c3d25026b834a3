"""What happens to a pipeline over cached tables happens to one over whole tables: to every bit, and every error.

Takes a minute: each case trains two models over two ranks.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import Batch, Net, batch_of, dense_optimizer, plain_loop, same, sharded, state_of, stores_of
from pipeline_runs import CPU
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import BoundsCheckMode, GradientCheckMode, LookupPolicy
from shardwise.planner.layout import Tier
from shardwise.sharding import GradientAccumulationConfig, GradientAccumulationWrapper
from shardwise.sharding.pipeline import (
    EvalPipelineFusedSparseDist,
    EvalPipelineSparseDist,
    PipelineStage,
    PrefetchTrainPipelineSparseDist,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TorchCompileConfig,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelinePT2,
    TrainPipelineSemiSync,
    TrainPipelineSparseDistLite,
)

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
AHEAD: dict[str, Any] = {"ahead": 6, "prefetch": 3}
Script = Callable[[Any], list[Any]]


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returned, as a copy, or the error that it raised."""
    try:
        found = call()
    except (StopIteration, RuntimeError, IndexError, ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return found.detach().clone() if isinstance(found, Tensor) else found


def looking_ahead(model: Any, **settings: Any) -> PrefetchTrainPipelineSparseDist[Any, Any]:
    return PrefetchTrainPipelineSparseDist(model, dense_optimizer(model), CPU, **{**AHEAD, **settings})


def bad(batch: Batch) -> Batch:
    """The batch with an id outside its table."""
    batch.pooled.values()[:1] = 10**6
    return batch


def eventful(model: Any) -> list[Any]:
    """Bad batches, a loader that fails on one rank, other kinds of steps, lookups in between, uneven ends, a reset."""

    def batches(first: int, last: int) -> Iterator[Batch]:
        for n in range(first, last):
            if n == 17 and dist.get_rank() == 1:
                yield Broken(batch_of(n))  # type: ignore[misc]
            else:
                yield bad(batch_of(n)) if n % 9 == 4 else batch_of(n)

    pipeline, given, found = looking_ahead(model), batches(0, 40), []
    for step in range(30):
        if step % 10 == 7:
            # the train pipeline's batches hold rows, and this one finds room
            with torch.no_grad():
                found.append(outcome(lambda step=step: model(batch_of(100 + step))[1]))
        model.train(step % 8 != 5)
        found.append(outcome(lambda: pipeline.progress(given)))
        model.train()
        if step == 12:
            pipeline.detach()
            found.append(outcome(lambda: model(batch_of(77))[1]))
        if step == 15:
            model.module.pooled.embedding_bags["t1"].weight.requires_grad_(False)
        if step == 19:
            model.module.pooled.embedding_bags["t1"].weight.requires_grad_(True)
    pipeline.reset()
    # one rank has fewer
    rest = batches(50, 58 + 2 * dist.get_rank())
    return [*found, *(outcome(lambda: pipeline.progress(rest)) for _ in range(11))]


class Broken:
    """A batch that cannot be copied."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        raise ValueError("batch 17 is damaged")


def accumulated(model: Any) -> list[Any]:
    """Three micro-batches a step, the last step of fewer."""
    optimizer = dense_optimizer(model)
    pipeline: Any = PrefetchTrainPipelineSparseDist(model, optimizer, CPU, **AHEAD)
    wrapper: Any = GradientAccumulationWrapper(pipeline, optimizer, model, GradientAccumulationConfig(num_steps=3))
    given = map(batch_of, range(11))
    return [outcome(lambda: wrapper.progress(given)) for _ in range(12)]


def guarded(model: Any) -> list[Any]:
    """Gradients that are not finite on one rank, which raise on both and change nothing."""

    class Overflowing(PrefetchTrainPipelineSparseDist[Any, Any]):
        def _backward(self, losses: Tensor) -> None:
            scale = float("inf") if self._steps == 0 and len(found) in (3, 6) and dist.get_rank() == 1 else 1.0
            super()._backward(losses * scale)

    found: list[Any] = []
    pipeline, given = Overflowing(model, dense_optimizer(model), CPU, **AHEAD), map(batch_of, range(12))
    for step in range(12):
        pipeline._steps = 0
        found.append(outcome(lambda: pipeline.progress(given)))
        del step
    return found


def warned(model: Any) -> list[Any]:
    """Bad ids that count as none."""
    pipeline = looking_ahead(model)
    given = (bad(batch_of(n)) if n % 3 == 1 else batch_of(n) for n in range(12))
    return [outcome(lambda: pipeline.progress(given)) for _ in range(13)]


def of_kind(make: Callable[[Any], Any], model: Any, *, count: int = 10) -> list[Any]:
    """Steps of another pipeline."""
    pipeline, given = make(model), map(batch_of, range(count))
    return [outcome(lambda: pipeline.progress(given)) for _ in range(count + 1)]


def semi_sync(model: Any) -> Any:
    return TrainPipelineSemiSync(model, dense_optimizer(model), CPU, start_batch=2)


def fused(model: Any) -> Any:
    return TrainPipelineFusedSparseDist(model, dense_optimizer(model), CPU)


def lite(model: Any) -> Any:
    return TrainPipelineSparseDistLite(model, dense_optimizer(model), CPU)


def base(model: Any) -> Any:
    return TrainPipelineBase(model, dense_optimizer(model), CPU)


def compiled(model: Any) -> Any:
    config = TorchCompileConfig(backend="eager", compile_on_iter=2)
    return TrainPipelinePT2(model, dense_optimizer(model), CPU, config)


def taking_turns(model: Any) -> list[Any]:
    """A train pipeline and two that evaluate, step by step."""
    train, evaluations = looking_ahead(model), []
    for kind in (EvalPipelineSparseDist, partial(EvalPipelineFusedSparseDist, enable_embedding_lookup_prefetch=True)):
        evaluations.append((kind(model, dense_optimizer(model), CPU), map(batch_of, range(100, 112))))
    given, found = map(batch_of, range(12)), []
    for step in range(12):
        found.append(outcome(lambda: train.progress(given)))
        one, batches = evaluations[step // 3 % 2]
        model.eval()
        found.append(outcome(lambda one=one, batches=batches: one.progress(batches)))
        # its rows are those of this moment
        one.detach()
        model.train()
    return found


def staged(model: Any) -> list[Any]:
    """A loop of one's own with a stage that prefetches; a batch is skipped."""
    sparse: Any = SparseDataDistUtil(model, None)
    stages = [sparse.start_sparse_data_dist_stage(), PipelineStage("prefetch", sparse.prefetch, None)]
    pipeline: Any = StagedTrainPipeline(stages)
    optimizer, given, found = dense_optimizer(model), map(batch_of, range(9)), []
    while (batch := pipeline.progress(given)) is not None:
        if len(found) == 4:
            found.append(None)
            continue
        optimizer.zero_grad()
        losses, output = model(batch)
        losses.sum().backward()
        optimizer.step()
        found.append(output.detach().clone())
    return found


SCRIPTS: dict[str, Script] = {
    "eventful": eventful,
    "accumulated": accumulated,
    "guarded": guarded,
    "warned": warned,
    "clipped": warned,
    "taking turns": taking_turns,
    "staged": staged,
    **{make.__name__: partial(of_kind, make) for make in (semi_sync, fused, lite, base, compiled)},
}


def net_of(name: str) -> nn.Module:
    """The model of a script, whose collections check what it is about."""
    module: Any = Net("ps")
    checks = GradientCheckMode.RAISE if name == "guarded" else GradientCheckMode.IGNORE
    bounds = BoundsCheckMode.WARNING if name in ("warned", "clipped") else BoundsCheckMode.FATAL
    for collection in (module.pooled, module.sequence):
        collection._policy = LookupPolicy(gradient_check=checks, bounds_check=bounds)
    return module  # type: ignore[no-any-return]


def differences(name: str, folder: str) -> tuple[list[str], int]:
    """What differs from the same over whole tables, and how many rows were saved."""
    # room for the rows of some batches ahead, not of three
    most = 0.6 if name == "eventful" else 1.0
    tier = Tier(0.1, "file", folder, max_slots=most)
    found = []
    for own in (None, tier):
        clipping = {"gradient_clipping": True, "max_gradient": 0.05} if name == "clipped" else {}
        model = sharded("ps", net_of(name), tier=own, rule_settings=clipping)
        outcomes = SCRIPTS[name](model)
        found.append((outcomes, state_of(model)))
    (expected, state), (outcomes, now) = found
    different = [key for key, value in state.items() if not torch.equal(value, now[key])]
    for step, (one, other) in enumerate(zip(expected, outcomes, strict=True)):
        if not (same([one], [other]) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other):
            different.append(f"step {step}: {one} is {other}")
    assert any(isinstance(one, Tensor) for one in outcomes)
    return different, sum(store.counts[0].misses for store in stores_of(model))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in ("base", "lite") else []) for name in SCRIPTS]
)
def test_a_pipeline_over_cached_tables_does_what_one_over_whole_tables_does(name: str, tmp_path: Path) -> None:
    for different, misses in run_ranks(2, differences, name, str(tmp_path)):
        assert not different
        assert misses > 0


def truncated(kind: str, folder: str) -> tuple[str, str, float]:
    """What this rank raises after the files of rank 1 are cut short, and after how many seconds."""
    model = sharded("ps", tier=Tier(0.5, "file", folder))
    pipeline: Any = looking_ahead(model) if kind == "prefetch" else None
    optimizer, batches = dense_optimizer(model), map(batch_of, range(40))
    begin = 0.0
    try:
        for step in range(30):
            if step == 5:
                begin = time.monotonic()
                for store in stores_of(model) if dist.get_rank() == 1 else ():
                    for below in store.below:
                        os.ftruncate(below._file.fileno(), 0)  # type: ignore[attr-defined]
            if pipeline is not None:
                pipeline.progress(batches)
            else:
                optimizer.zero_grad()
                model(next(batches))[0].backward()
                optimizer.step()
    except (OSError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", 0.0


@pytest.mark.parametrize("kind", ["plain", "prefetch"])
def test_a_file_that_is_lost_on_one_rank_is_an_error_on_all(kind: str, tmp_path: Path) -> None:
    """It names table and folder; the others name the rank, and nobody waits."""
    (other, text, seconds), (own, message, _) = run_ranks(2, truncated, kind, str(tmp_path))
    assert own == "OSError" and str(tmp_path) in message and "ends before its" in message
    assert message.startswith(f"[Errno {errno.EIO}] table 't")
    assert other == "RankFailure" and "rank 1 failed" in text and "ends before its" in text
    assert seconds < 10


class Counting(Iterator[Batch]):
    """A stream that has so many batches at each step, and no more until it is waited for."""

    def __init__(self, at_hand: list[int]) -> None:
        self.waiting, self.taken, self.waits = deque(at_hand), 0, 0
        self.here = self.waiting.popleft()

    def at_hand(self) -> int:
        return self.here

    def arrive(self) -> None:
        self.here += self.waiting.popleft() if self.waiting else 1

    def __next__(self) -> Batch:
        self.waits += not self.here
        self.here = max(0, self.here - 1)
        self.taken += 1
        return batch_of(self.taken - 1)


def streamed() -> tuple[list[int], list[int], bool]:
    """Batches under way before each step, those that were waited for by then, and whether bits are a plain loop's."""
    model = sharded("ps", tier=Tier(0.1, max_slots=1.0))
    # rank 1 has fewer at first
    stream = Counting([4, 5, 2, 2, 2, 9] if dist.get_rank() else [9, 9, 0, 0, 0, 0])
    pipeline, under_way, waits, outputs = looking_ahead(model, ahead=8, prefetch=1), [], [], []
    for _ in range(12):
        outputs.append(pipeline.progress(stream).detach().clone())
        under_way.append(len(pipeline.batches))
        waits.append(stream.waits)
        stream.arrive()
    whole = sharded("ps")
    return under_way, waits, same(plain_loop(whole, map(batch_of, range(12))), outputs)


def test_a_stream_is_looked_ahead_into_as_far_as_it_has_come() -> None:
    """Ranks look equally far. A step loads one batch in any case, and four are under way whatever is at hand."""
    (first, _, good), (second, waits, also_good) = run_ranks(2, streamed)
    assert good and also_good
    assert first == second and first[0] == 4 and max(first) == 11
    # the one batch of the first step
    assert waits[0] == 1
