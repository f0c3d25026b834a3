"""Pipelines that look a batch up on a stream of its own, at once where its step begins.

Tables that are trained in the backward do not wait for the step of the optimizer, so the lookup begins while that runs.
Every bit is that of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .arguments import EmbeddingTrainPipelineContext
from .feed import Fetched
from .sparse_dist import Evaluation, TrainPipelineSparseDist
from .streams import current, new_stream, on, wait_for

In = TypeVar("In")
Out = TypeVar("Out")
_STREAMS = ("data_dist", "new", "current")


class TrainPipelineFusedSparseDist(TrainPipelineSparseDist[In, Out]):
    """Looks a batch up on a stream beside that which trains, from the end of the backward before on.

    Tables that the optimizer trains by their gradients, or that were changed since, wait for all that came before.
    Modules whose ids are mapped to rows, or whose weights are made by feature processors, are looked up in the forward.

    Args as `TrainPipelineSparseDist`, and:
        strict: nothing is left to refuse; it changes nothing.
        emb_lookup_stream: where lookups run: "data_dist", where ids are routed, "new", a stream of their own, or
            "current", that which trains. One and the same on the CPU.
        embedding_lookup_after_data_dist: look a batch up after the ids of the next one were routed and the one after
            that was loaded, right before the forward.

    Raises:
        ValueError: `emb_lookup_stream` is none of these.
    """

    _default_context_type = EmbeddingTrainPipelineContext

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        strict: bool = False,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        enable_inplace_copy_batch: bool = False,
        enqueue_batch_after_forward: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        if emb_lookup_stream not in _STREAMS:
            raise ValueError(f"emb_lookup_stream: must be one of {list(_STREAMS)}, got {emb_lookup_stream!r}")
        super().__init__(
            model, optimizer, device, execute_all_batches, apply_jit, None, pipeline_postproc, custom_model_fwd, 1,
            enqueue_batch_after_forward, enable_inplace_copy_batch, free_features_storage_early, clear_data_dist_inputs,
        )  # fmt: skip
        self._after_data_dist = embedding_lookup_after_data_dist
        streams = {"data_dist": self._stream, "current": None}
        self._emb_lookup_stream = (
            new_stream(self._device) if emb_lookup_stream == "new" else streams[emb_lookup_stream]
        )  # fmt: skip
        # the end of the last backward, and what the tables were then
        self._trained: Any = None
        self._versions: list[int] = []

    def start_embedding_lookup(self, batch: In | None, context: EmbeddingTrainPipelineContext) -> None:
        """Look a batch up whose ids were sent. All ranks in the same order.

        Raises:
            ValueError: the context is of no batch under way.
        """
        if batch is None:
            return
        stream = self._emb_lookup_stream
        here = current(stream)
        if stream is not None and here is not None:
            if self._trained is None or self._versions != self._table_versions():
                stream.wait_stream(here)
            else:
                stream.wait_event(self._trained)
        with on(stream):
            self._ahead.look_up(self._fetched_of(context), all_tables=False, used_on=here)

    def wait_embedding_lookup(self) -> None:
        """Have the stream that trains wait for lookups."""
        wait_for(self._emb_lookup_stream)

    def _after_arrival(self, first: Fetched[In]) -> None:
        if not self._after_data_dist:
            self.start_embedding_lookup(first.batch, first.context)

    def _before_forward(self, first: Fetched[In]) -> None:
        if self._after_data_dist:
            self.start_embedding_lookup(first.batch, first.context)
        self.wait_embedding_lookup()

    def _after_backward(self) -> None:
        here = current(self._emb_lookup_stream)
        if here is not None:
            self._trained, self._versions = here.record_event(), self._table_versions()

    def _table_versions(self) -> list[int]:
        """How often a program wrote to each table: updates in the backward do not count."""
        return [param._version for collection in self._ahead.collections() for param in collection.parameters()]


class EvalPipelineFusedSparseDist(Evaluation[In, Out], TrainPipelineFusedSparseDist[In, Out]):
    """As `TrainPipelineFusedSparseDist` without gradients: no backward and no step, whatever the model's mode.

    Args as there, and:
        enable_embedding_lookup_prefetch: look the next batch up after the forward of this one, so that the lookup is
            under way when its step begins. It holds the rows of two batches, and the rows are those of that moment:
            `detach()` before you train in between.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        strict: bool = False,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        enable_inplace_copy_batch: bool = False,
        enqueue_batch_after_forward: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
        *,
        enable_embedding_lookup_prefetch: bool = False,
    ) -> None:
        super().__init__(
            model, optimizer, device, execute_all_batches, apply_jit, pipeline_postproc, custom_model_fwd, strict,
            emb_lookup_stream, embedding_lookup_after_data_dist, enable_inplace_copy_batch, enqueue_batch_after_forward,
            free_features_storage_early, clear_data_dist_inputs,
        )  # fmt: skip
        self._enable_embedding_lookup_prefetch = enable_embedding_lookup_prefetch

    def _go_ahead(self) -> None:
        super()._go_ahead()
        if self._enable_embedding_lookup_prefetch:
            for fetched in islice(self._queue, 1, 2):
                if fetched.has_sent and fetched.error is None:
                    self.start_embedding_lookup(fetched.batch, fetched.context)
