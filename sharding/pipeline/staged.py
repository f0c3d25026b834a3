"""A pipeline of stages that a user chooses; forward, backward and step stay in the user's own loop.

sparse = SparseDataDistUtil(model, None)
pipeline = StagedTrainPipeline([PipelineStage("copy", copy, None), sparse.start_sparse_data_dist_stage()])
while (batch := pipeline.progress(batches)) is not None:
    optimizer.zero_grad()
    losses, output = model(batch)
    losses.sum().backward()
    optimizer.step()
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardwise.sharding.comms.consensus import send_header

from .ahead import Ahead
from .base import TrainPipeline, warn_of_unused
from .feed import Fetched, exchange_of
from .streams import current, on, record_stream

In = TypeVar("In")
StageOut = TypeVar("StageOut")
RunnableType = Callable[..., Any]
# batches between the stage and the model's forward
_MOST = 8


@dataclass
class PipelineStage:
    """A step on the way of a batch: what is done with it, on which stream (None on the CPU).

    `fill_callback` runs after the stage while the pipeline fills, `data_exhausted_callback` in the place of the stage
    when there is no batch.
    """

    name: str
    runnable: RunnableType
    stream: torch.Stream | None
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


@dataclass(frozen=True)
class _Staged:
    """What a stage made of a batch, None where there is no batch, when that is done, and why it could not be loaded."""

    value: Any = None
    done: Any = None
    error: Exception | None = None


class StagedTrainPipeline(TrainPipeline[In, StageOut | None]):
    """Runs stages for several batches: in a call of `progress` each stage has another batch.

    Args:
        pipeline_stages: in the order that a batch goes through them.
        debug_mode: has no effect; a profiler shows each stage by its name.
        compute_stream: where the batch will be used; by default the current stream.
        on_flush_end: called when a flush is over.

    Raises:
        ValueError: there are no stages.
    """

    def __init__(
        self,
        pipeline_stages: list[PipelineStage],
        debug_mode: bool = False,
        compute_stream: torch.Stream | None = None,
        on_flush_end: Callable[[], None] | None = None,
    ) -> None:
        if not pipeline_stages:
            raise ValueError("pipeline_stages: a pipeline has at least one stage")
        warn_of_unused(debug_mode=debug_mode)
        self._stages, self._compute_stream, self.on_flush_end = list(pipeline_stages), compute_stream, on_flush_end
        self._iterator: Iterator[In] | None = None
        self._is_empty = self._flushes = False
        # of each batch under way what its last stage made, the oldest first; none before the pipeline is filled
        self._made: deque[_Staged] = deque()

    @property
    def num_stages(self) -> int:
        """How many stages there are, and batches under way."""
        return len(self._stages)

    def set_flush(self, flush: bool) -> None:
        """Whether to take no more batches: those under way are finished, then `flush_end` runs and all goes on."""
        self._flushes = flush

    def flush_end(self) -> None:
        """End a flush: the pipeline fills again."""
        self._flushes = False
        self._made.clear()
        if self.on_flush_end is not None:
            self.on_flush_end()

    def reset(self) -> None:
        """Forget the batches under way."""
        self._made.clear()
        self._iterator = None

    def progress(self, dataloader_iter: Iterator[In]) -> StageOut | None:
        """The next batch after all stages; None once there are no more.

        Raises:
            Exception: the iterator raised in the place of this batch. Ranks that routed it get None in this step.
        """
        if not self._made:
            for place in range(self.num_stages):
                made = self._load(dataloader_iter)
                for stage in self._stages[: self.num_stages - place]:
                    made = self._run(stage, made)
                    if stage.fill_callback is not None:
                        stage.fill_callback()
                self._made.append(made)
        first = self._made.popleft()
        self._made.append(self._load(dataloader_iter))
        # the newest batch first, as it has the longest way
        for number, stage in enumerate(self._stages):
            place = self.num_stages - 1 - number
            self._made[place] = self._run(stage, self._made[place])
        if first.value is None:
            # the end on all ranks: what this one has beyond it is left out
            self._made.clear()
            if first.error is not None:
                raise first.error
            if self._flushes:
                self.flush_end()
                return self.progress(dataloader_iter)
        elif first.done is not None:
            here = self._compute_stream or current(self._stages[-1].stream)
            here.wait_event(first.done)
            record_stream(first.value, here)
        return first.value  # type: ignore[no-any-return]

    def _run(self, stage: PipelineStage, made: _Staged) -> _Staged:
        if made.value is None:
            if stage.data_exhausted_callback is not None:
                stage.data_exhausted_callback()
            return made
        with on(stage.stream), torch.profiler.record_function(f"## stage {stage.name} ##"):
            here = current(stage.stream)
            if here is not None and made.done is not None:
                here.wait_event(made.done)
                record_stream(made.value, here)
            value = stage.runnable(made.value)
            return _Staged(value, None if here is None else here.record_event())

    def _load(self, iterator: Iterator[In]) -> _Staged:
        if iterator is not self._iterator:
            self._iterator, self._is_empty = iterator, False
        if self._flushes or self._is_empty:
            return _Staged()
        try:
            batch = next(iterator, None)
        except Exception as error:
            # raised when its turn comes, so that other stages tell the other ranks first
            return _Staged(error=error)
        self._is_empty = batch is None
        return _Staged(batch)


class SparseDataDistUtil(Generic[In]):
    """A stage that routes a batch's ids while the batches before it train; the last stage, or the one before prefetch.

    The model's first forward is watched, as by `TrainPipelineSparseDist`. In later ones sharded modules take the batch
    that was routed for them; after each the ids of the next batch leave. Ranks agree on each batch before its sizes
    leave, and a rank whose batches last longer gets None where another has none.

    Args:
        model: the loop calls it with the batches that come out of the pipeline, in their order.
        data_dist_stream: where ids are routed; None on the CPU.
        apply_jit: has no effect.
        prefetch_stream: where `prefetch` runs.
        pipeline_postproc: as `TrainPipelineSparseDist`.
        embedding_lookup_stream: for the stage `start_embedding_lookup`; lookups themselves run on the stream of the
            forward, so that each comes before or after an update. None on the CPU, where the stage serves as well.

    Raises:
        ValueError: there are both a `prefetch_stream` and an `embedding_lookup_stream`.
    """

    def __init__(
        self,
        model: nn.Module,
        data_dist_stream: torch.Stream | None,
        apply_jit: bool = False,
        prefetch_stream: torch.Stream | None = None,
        pipeline_postproc: bool = False,
        embedding_lookup_stream: torch.Stream | None = None,
    ) -> None:
        if prefetch_stream is not None and embedding_lookup_stream is not None:
            raise ValueError(
                "prefetch_stream and embedding_lookup_stream: a lookup brings rows to their slots itself; give one"
            )
        warn_of_unused(apply_jit=apply_jit)
        self.model, self.data_dist_stream, self.prefetch_stream = model, data_dist_stream, prefetch_stream
        self.embedding_lookup_stream = embedding_lookup_stream
        # batches whose rows were asked for ahead
        self._asked: deque[Fetched[In]] = deque(maxlen=_MOST)
        device = torch.device("cpu") if data_dist_stream is None else data_dist_stream.device
        self._agrees_by = exchange_of(model, device)
        self._ahead: Ahead[In] = Ahead(model, self._agrees_by, data_dist_stream, prepares=pipeline_postproc)
        self._under_way: deque[Fetched[In]] = deque()
        self._forward: AbstractContextManager[None] | None = None
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    def detach(self) -> nn.Module:
        """The model, to be used without the pipeline; what is under way is dropped."""
        for hook in self._hooks:
            hook.remove()
        for fetched in self._under_way:
            self._ahead.drop(fetched)
        self._under_way.clear()
        return self.model

    def start_sparse_data_dist(self, batch: In) -> In | None:
        """Have the sizes of a batch leave; None where another rank has no batch. What is wrong the forward raises.

        Raises:
            RuntimeError: the model is not called with what leaves the pipeline.
        """
        if not self._all_have(True):
            warnings.warn("another rank has no batch left: a batch of this rank is left out", stacklevel=2)
            return None
        if len(self._under_way) == _MOST:
            raise RuntimeError(f"the model was not called with the last {_MOST} batches that went through this stage")
        self._under_way.append(Fetched(batch, None))
        self._ahead.start(self._under_way[-1])
        return batch

    def data_exhausted_callback(self) -> None:
        """Tell the other ranks that this one has no batch."""
        self._all_have(False)

    def wait_sparse_data_dist(self) -> None:
        """Wait for the sizes of the batches under way, and have their ids leave; runs after each forward."""
        for fetched in self._under_way:
            self._ahead.start(fetched)
        for fetched in self._under_way:
            self._ahead.send(fetched)
            # a bad batch stays behind: the forward routes it itself, and raises on all ranks
            fetched.error = None

    def wait_sdd_fill_callback(self) -> None:
        """`wait_sparse_data_dist`, while the pipeline fills."""
        self.wait_sparse_data_dist()

    def prefetch(self, batch: In) -> In:
        """Bring the rows of a batch into the slots of their stores."""
        for fetched in self._under_way:
            if fetched.batch is batch:
                self._ahead.prefetch(fetched)
        return batch

    def start_embedding_lookup(self, batch: In) -> In:
        """Have a batch looked up ahead: a stage right after that which routes ids makes the loop semi-synchronous.

        Its rows leave their tables after the forward of the batch before and before that one's backward, on the stream
        of that forward: they miss that update, and no other. What `TrainPipelineSemiSync` leaves to the step is left
        to it here. All ranks call it for the same batches.
        """
        self._asked.extend(fetched for fetched in self._under_way if fetched.batch is batch)
        return batch

    def _look_up(self) -> None:
        while self._asked:
            fetched = self._asked.popleft()
            if fetched.started:
                self._ahead.look_up(fetched, all_tables=True)

    def load_prefetch(self) -> None:
        """Nothing is left to do: what was prefetched stays with its batch."""

    def start_sparse_data_dist_stage(
        self, name: str = "start_sparse_data_dist", runnable: RunnableType | None = None
    ) -> PipelineStage:
        """The stage; `runnable` in the place of `start_sparse_data_dist`, which it is to call."""
        run = runnable or self.start_sparse_data_dist
        return PipelineStage(
            name, run, self.data_dist_stream, self.wait_sdd_fill_callback, self.data_exhausted_callback
        )  # fmt: skip

    def _all_have(self, here: bool) -> bool:
        exchange, device = self._agrees_by
        return all(there for (there,) in send_header(exchange, device, [[int(here)]] * exchange.world_size).receive())

    def _before_forward(self, _: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        fetched: Fetched[In] = Fetched(given, None)
        if any(one.batch is given for one in self._under_way):
            # those before it were skipped
            while (fetched := self._under_way.popleft()).batch is not given:
                self._ahead.drop(fetched)
        self._ahead.arrive(fetched)
        self._forward = self._ahead.taken(fetched, given)
        self._forward.__enter__()

    def _after_forward(self, _: nn.Module, args: Any, output: Any) -> None:
        forward, self._forward = self._forward, None
        if forward is not None:
            # torch calls this from where it caught what the forward raised, with no output
            forward.__exit__(*(sys.exc_info() if output is None else (None, None, None)))
            self.wait_sparse_data_dist()
            self._look_up()
