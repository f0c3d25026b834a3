"""Pipelines that route the ids of the next batch while a batch trains.

Three batches are under way: one trains, the ids of the next one travel, the one after is loaded. In a step, before the
forward the next batch's sizes leave; between forward and backward they are waited for and its ids leave; the next step
waits for those. Rows are never looked up early, so every bit is that of the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from shardwise.sharding.dmp.dmp_collection import DMPCollection

from .ahead import Ahead
from .arguments import TrainPipelineContext
from .base import FedPipeline, warn_of_unused
from .feed import Fetched
from .streams import current, new_stream

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipelineSparseDist(FedPipeline[In, Out]):
    """Routes the ids of the next batch while a batch trains, and copies the one after to the device.

    The model stays as it is: its first step is watched for sharded modules that are called with a part of the batch,
    and in later steps these find their batch routed. A module whose input the model makes itself is not pipelined, and
    a warning names it, unless `pipeline_postproc` says to make that input ahead.

    Args:
        model, optimizer, device, custom_model_fwd: as `TrainPipelineBase`.
        execute_all_batches: False stops as soon as some rank's iterator ends, and leaves the batches under way.
        pipeline_postproc: trace by torch.fx what the model does to a batch before a sharded module, and run it ahead.
            The model runs it once more in the step: it must have no effects and no parameters that are trained.
        dmp_collection_sync_interval_batches: a `DMPCollection` averages its replicas after every so many batches, the
            first among them; None leaves it to you.
        enqueue_batch_after_forward: load a batch after the forward instead of before.
        apply_jit, context_type, enable_inplace_copy_batch, free_features_storage_early, clear_data_dist_inputs: have
            no effect.
    """

    # batches whose ids are under way during a step
    _batches_ahead = 1

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type | None = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model, optimizer, device, custom_model_fwd, depth=1 + self._batches_ahead,
            execute_all_batches=execute_all_batches,
        )  # fmt: skip
        warn_of_unused(
            apply_jit=apply_jit, context_type=context_type not in (None, TrainPipelineContext),
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early, clear_data_dist_inputs=clear_data_dist_inputs,
        )  # fmt: skip
        self._pipeline_postproc = pipeline_postproc
        self._sync_interval, self._steps = dmp_collection_sync_interval_batches, 0
        self._enqueue_after_forward = enqueue_batch_after_forward
        self._stream = new_stream(self._device, priority=-1)
        self._ahead = self._ahead_of(model)

    def _step(self, dataloader_iter: Iterator[In]) -> Out:
        self.fill_pipeline(dataloader_iter)
        first = self._first()
        self._ahead.arrive(first)
        self._raise(first)
        for fetched in islice(self._queue, 1, 1 + self._batches_ahead):
            self._start(fetched)
        if not self._enqueue_after_forward:
            self.enqueue_batch(dataloader_iter)
        self._queue.popleft()
        if self._trains():
            self._optimizer.zero_grad()
        batch = first.use(current(self._feed.stream))
        with self._ahead.taken(first, batch):
            losses, output = self._model_fwd(batch)
        if self._enqueue_after_forward:
            self.enqueue_batch(dataloader_iter)
        self._go_ahead()
        if self._trains():
            torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]
            self._synchronize()
            self._optimizer.step()
        self._steps += 1
        return output

    def detach(self) -> nn.Module:
        """The model, to be used without the pipeline; batches that were fetched stay. All ranks call it together."""
        for fetched in self._queue:
            self._ahead.drop(fetched)
        return self._model

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Go on after `detach`, with another model if one is given.

        Without `sparse_dist` the batches that are here already run without having left ahead.
        """
        if model is not None:
            self._model = model
            self._feed.follow(model)
            self._ahead = self._ahead_of(model)
        for fetched in self._queue:
            fetched.stays = not sparse_dist

    def reset(self) -> None:
        """Forget the batches under way; the next step begins anew. All ranks call it together."""
        self.detach()
        super().reset()
        self._steps = 0

    def _ahead_of(self, model: nn.Module) -> Ahead[In]:
        return Ahead(model, self._feed.agrees_by, self._stream, prepares=self._pipeline_postproc)

    def _start(self, fetched: Fetched[In]) -> None:
        self._feed.settle(fetched)
        self._ahead.start(fetched)

    def _go_ahead(self) -> None:
        """What comes between forward and backward."""
        waiting = list(self._queue)[: self._batches_ahead]
        # those that could not start before the model's first step was seen
        for fetched in waiting:
            self._start(fetched)
        for fetched in waiting:
            self._ahead.send(fetched)

    def _synchronize(self) -> None:
        if isinstance(self._model, DMPCollection) and self._sync_interval and not self._steps % self._sync_interval:
            self._model.sync()


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Also brings the rows of the next batch into the slots of their row store while a batch trains.

    Four batches are under way: the ids of the next one are here, those of the one after travel. Rows that leases hold
    stay; they are read after the update. Where a store has no room for two batches the lookup brings the rows.

    Args as `TrainPipelineSparseDist`; `pipeline_postproc` is True by default.
    """

    _batches_ahead = 2

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model, optimizer, device, execute_all_batches, apply_jit, None, pipeline_postproc, custom_model_fwd, 1,
            False, enable_inplace_copy_batch, free_features_storage_early, clear_data_dist_inputs,
        )  # fmt: skip

    def _go_ahead(self) -> None:
        super()._go_ahead()
        for fetched in islice(self._queue, 1):
            self._ahead.prefetch(fetched)


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Runs a model without gradients: no backward and no step, whatever its mode. The optimizer is not used.

    Args as `TrainPipelineSparseDist`.
    """

    # no backward hides the ids of a batch, so they travel during the forward of the batch before
    _batches_ahead = 2

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model, optimizer, device, True, apply_jit, None, pipeline_postproc, None, None, False,
            enable_inplace_copy_batch, free_features_storage_early, clear_data_dist_inputs,
        )  # fmt: skip

    @torch.no_grad()
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """The model's output for the next batch. Raises as `FedPipeline.progress`."""
        return super().progress(dataloader_iter)

    def _trains(self) -> bool:
        return False
