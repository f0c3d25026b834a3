"""Training loops that fetch ahead: `progress(iterator)` makes one step and returns the model's output.

A model returns (losses, output) for a batch; the loss of a step is the sum of its losses. Gradients are zeroed at the
start of a step, so that they can be read after it, and only a model in training mode runs a backward and steps.
"""

from __future__ import annotations

import abc
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shardwise.sharding.dmp.dmp import DistributedModelParallel
from shardwise.sharding.dmp.dmp_collection import DMPCollection

from .arguments import TrainPipelineContext
from .feed import Feed, Fetched
from .streams import current

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipeline(abc.ABC, Generic[In, Out]):
    """Makes one step of training, or what a user's stages do, for each call of `progress`."""

    @abc.abstractmethod
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Make a step with the next batch; batches after it are taken from the iterator meanwhile."""

    def reset(self) -> None:
        """Forget what is under way."""

    def sync_embeddings(
        self, model: nn.Module, interval_batches: int | None, context: TrainPipelineContext | None = None
    ) -> None:
        """Average the replicas of a `DMPCollection` after batches 0, n, 2 n, ... of n = `interval_batches`.

        Nothing for another model, or without an interval. All ranks call it together, between backward and step.

        Args:
            context: its `index` is the number of the batch.

        Raises:
            ValueError: there is no such number.
        """
        if not isinstance(model, DMPCollection) or not interval_batches:
            return
        if context is None or context.index is None:
            raise ValueError("sync_embeddings counts batches by context.index: give a context that has it")
        if context.index % interval_batches == 0:
            model.sync()


class FedPipeline(TrainPipeline[In, Out]):
    """A pipeline over a queue of batches that all ranks agree on.

    Args as `TrainPipelineBase`, and: depth: batches that are fetched before a step; execute_all_batches: False stops as
    soon as some rank has fetched its last batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None,
        *,
        depth: int,
        execute_all_batches: bool = True,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._custom_model_fwd, self._depth = custom_model_fwd, depth
        self._execute_all_batches = execute_all_batches
        self._feed: Feed[In] = Feed(model, self._device)
        self._queue: deque[Fetched[In]] = deque()
        # for a `_next_batch` of a subclass to keep what it knows of its iterator in, as those of TorchRec programs do
        self._dataloader_iter: Iterator[In] | None = None
        self._dataloader_exhausted = False

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Make a step with the next batch and return the model's output.

        Raises:
            StopIteration: the iterator of some rank has ended, and the batches before are done. All ranks raise in the
                same step; a rank that has batches left warns.
            KeyError, IndexError, ValueError, TypeError, RuntimeError: the batch is bad, or could not be loaded, on
                some rank. All ranks raise in the step whose batch it is; nothing has changed, and the next step has the
                next batch.
            RankFailure: another rank of a `DistributedModelParallel` failed in the middle of the step, or ended.
        """
        with self._watched():
            return self._step(dataloader_iter)

    @abc.abstractmethod
    def _step(self, dataloader_iter: Iterator[In]) -> Out:
        """The step, of which every rank learns if it fails here."""

    def enqueue_batch(self, dataloader_iter: Iterator[In]) -> bool:
        """Fetch a batch; False once all ranks know that some rank has no more.

        Raises:
            StopIteration: some rank has no more, and `execute_all_batches` is False.
        """
        if self._feed.is_over(dataloader_iter):
            return False
        fetched = self._feed.fetch(self._load, dataloader_iter)
        if not self._execute_all_batches:
            self._feed.settle(fetched)
            if fetched.ended:
                raise StopIteration
        self._queue.append(fetched)
        return True

    def dequeue_batch(self) -> None:
        """Let the oldest batch go, whose step is over."""
        self._queue.popleft()

    def _load(self, dataloader_iter: Iterator[In]) -> tuple[In | None, Any]:
        """The next batch on the device, None at the end, and what is kept of it."""
        return self._feed.copy(self._next_batch(dataloader_iter)), None

    def _next_batch(self, dataloader_iter: Iterator[In]) -> In | None:
        """The next batch as it is loaded, None at the end; called once for each batch, on all ranks in the same order.

        A subclass may override it, with collectives in it too. What it raises is raised on all ranks in the place of
        the batch.
        """
        return self._feed.next(dataloader_iter)

    def _backward(self, losses: Tensor) -> None:
        """The backward of the sum of the losses; a subclass may scale it."""
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]

    def _optimizer_step(self) -> None:
        """The step of the optimizer."""
        self._optimizer.step()

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Fetch the batches that a step needs under way."""
        while len(self._queue) < self._depth and self.enqueue_batch(dataloader_iter):
            pass

    def reset(self) -> None:
        """Forget the batches that were fetched; the next step begins anew. All ranks call it together."""
        for fetched in self._queue:
            self._feed.drop(fetched)
        self._queue.clear()
        self._feed = Feed(self._model, self._device)

    def _first(self) -> Fetched[In]:
        """The batch whose turn it is, still in the queue.

        Raises:
            StopIteration: a rank has none. All ranks raise in this step.
            Exception: a rank could not load it, or it is bad. All ranks raise in this step, with the failing rank's
                number and message; the next step has the next batch.
        """
        if not self._queue:
            raise StopIteration
        first = self._queue[0]
        self._feed.settle(first)
        if first.ended:
            for fetched in self._queue:
                self._feed.drop(fetched)
            self._queue.clear()
            raise StopIteration
        self._raise(first)
        return first

    def _raise(self, first: Fetched[In]) -> None:
        if first.error is not None:
            self.dequeue_batch()
            raise first.error

    def _watched(self) -> AbstractContextManager[None]:
        """Tells the other ranks of what this one alone raises inside."""
        model = self._model
        return model.watched() if isinstance(model, DistributedModelParallel) else nullcontext()

    def _trains(self) -> bool:
        return self._model.training

    def _model_fwd(self, batch: In) -> tuple[Tensor, Out]:
        output: Any = self._model(batch) if self._custom_model_fwd is None else self._custom_model_fwd(batch)
        return output  # type: ignore[no-any-return]


class TrainPipelineBase(FedPipeline[In, Out]):
    """Copies the next batch to the device while a batch trains.

    Args:
        model: returns (losses, output) for a batch.
        optimizer: steps after each backward, if the model trains.
        device: where batches go.
        custom_model_fwd: called with a batch in place of the model.
        enable_inplace_copy_batch: give batches memory of the stream that trains, so that what one frees the next can
            have; their copies begin once that stream is done with what it was given before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        enable_inplace_copy_batch: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd, depth=1)
        self._enable_inplace_copy_batch = enable_inplace_copy_batch

    def _load(self, dataloader_iter: Iterator[In]) -> tuple[In | None, Any]:
        batch = self._next_batch(dataloader_iter)
        return self._feed.copy(batch, in_place=self._enable_inplace_copy_batch), None

    def _step(self, dataloader_iter: Iterator[In]) -> Out:
        self.fill_pipeline(dataloader_iter)
        first = self._first()
        self.enqueue_batch(dataloader_iter)
        try:
            if self._trains():
                self._optimizer.zero_grad()
            losses, output = self._model_fwd(first.use(current(self._feed.stream)))
            if self._trains():
                self._backward(losses)
                self._optimizer_step()
        finally:
            self.dequeue_batch()
        return output


def warn_of_unused(**settings: bool) -> None:
    """Name the settings that were given and change nothing here."""
    given = [name for name, value in settings.items() if value]
    if given:
        warnings.warn(f"{', '.join(given)}: no effect in shardwise, leave it out", stacklevel=3)
