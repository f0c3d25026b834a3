"""Pipelines that route the ids of the next batch while a batch trains.

Three batches are under way: one trains, the ids of the next one travel, the one after is loaded. In a step, before the
forward the next batch's sizes leave; between forward and backward they are waited for and its ids leave; the next step
waits for those. Rows are never looked up early, so every bit is that of the plain loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor, nn

from .ahead import Ahead
from .arguments import PrefetchTrainPipelineContext, TrainPipelineContext
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
        context_type: what is made for each batch, called with its `index` and `version`; stages get it.
        enable_inplace_copy_batch: give batches memory of the stream that trains; see `inplace_copy_batch_to_gpu`.
        free_features_storage_early: free the memory of a batch's features as soon as they are lined up to leave, where
            sharded modules are all that reads them: the model may hand them on, and nothing else. What a sequence's
            result has of them stays. Nothing is freed for a model of which a sharded module is not pipelined, or whose
            input is made by the model.
        clear_data_dist_inputs: let go what was sent for a batch before its forward, in `clear_sparse_data_dist_inputs`.
        apply_jit: has no effect, with a warning: TorchScript of the dense layers would change no number.

    Example:
        >>> class Clicks(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        ...         self.over = torch.nn.Linear(4, 1)
        ...
        ...     def forward(self, batch):
        ...         logits = self.over(self.tables(batch.sparse_features).values()).squeeze(1)
        ...         return torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()
        >>> clicks = Clicks()
        >>> apply_optimizer_in_backward(RowWiseAdagrad, clicks.tables.parameters(), {"lr": 0.1})
        >>> model = DistributedModelParallel(clicks, env=ShardingEnv.from_local(world_size=1, rank=0))
        >>> dense = torch.optim.SGD(clicks.over.parameters(), lr=0.1)
        >>> pipeline = TrainPipelineSparseDist(model, dense, torch.device("cpu"))
        >>> ids = KeyedJaggedTensor(["clicked"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        >>> batches = iter([Batch(torch.zeros(2, 0), ids, torch.tensor([0.0, 1.0]))] * 3)
        >>> for step in range(3):
        ...     print(pipeline.progress(batches).shape)
        torch.Size([2])
        torch.Size([2])
        torch.Size([2])
    """

    # batches whose ids are under way during a step
    _batches_ahead = 1
    _default_context_type = TrainPipelineContext

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] | None = None,
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
        warn_of_unused(apply_jit=apply_jit)
        self._enable_inplace_copy_batch = enable_inplace_copy_batch
        self._free_features_storage_early, self._clear_inputs = free_features_storage_early, clear_data_dist_inputs
        self._context_type = context_type or self._default_context_type
        self._next_index = 0
        self._pipeline_postproc = pipeline_postproc
        self._sync_interval, self._steps = dmp_collection_sync_interval_batches, 0
        # its index counts the batches that trained
        self._trained_context = self._context_type(index=0, version=1)
        # whether a forward of this pipeline is under way
        self._is_taking = False
        self._loads = "after forward" if enqueue_batch_after_forward else "before forward"
        self._stream = new_stream(self._device, priority=-1)
        # where rows are brought to their slots, by pipelines that do
        self._rows_stream: torch.Stream | None = None
        self._ahead = self._ahead_of(model)

    @property
    def batches(self) -> deque[In | None]:
        """The batches under way, the oldest first: during a step its own, then the next."""
        return deque(fetched.batch for fetched in self._queue)

    @property
    def contexts(self) -> deque[TrainPipelineContext]:
        """Those of the batches under way."""
        return deque(fetched.context for fetched in self._queue)

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, TrainPipelineContext | None]:
        """The next batch, which is being copied to the device, and its context; (None, context) at the end.

        Runs on the stream of copies. What an override raises is raised on all ranks in the place of the batch.
        """
        return self._feed.copy(self._next_batch(dataloader_iter)), self._create_context()

    def inplace_copy_batch_to_gpu(self, dataloader_iter: Iterator[In]) -> tuple[In | None, TrainPipelineContext | None]:
        """As `copy_batch_to_gpu`, in whose place it is called with `enable_inplace_copy_batch`.

        A batch gets memory of the stream that trains, so that what one frees the next can have; its copy begins once
        that stream is done with what it was given before. On the CPU both are the same.
        """
        return self._feed.copy(self._next_batch(dataloader_iter), in_place=True), self._create_context()

    def clear_sparse_data_dist_inputs(self, context: TrainPipelineContext) -> None:
        """Let go what was sent for a batch whose ids have arrived; called before its forward, if that is asked for.

        Raises:
            ValueError: the context is of no batch under way.
        """
        self._ahead.clear_inputs(self._fetched_of(context))

    def start_sparse_data_dist(self, batch: In | None, context: TrainPipelineContext) -> None:
        """Route the ids of a batch and have their sizes leave; called once for each, all ranks in the same order.

        An override may give another batch, which is looked up in the place of the one that the model gets.

        Raises:
            ValueError: the context is of no batch under way.
        """
        fetched = self._fetched_of(context)
        # no rank begins what another one lacks, and all learn of it here
        self._feed.settle(fetched)
        if batch is not None:
            self._ahead.start(fetched, batch)

    def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
        """Wait for the sizes of all ranks and have the ids leave; called once for each batch that was started.

        Raises:
            ValueError: the context is of no batch under way.
        """
        self._ahead.send(self._fetched_of(context))

    def _load(self, dataloader_iter: Iterator[In]) -> tuple[In | None, TrainPipelineContext]:
        copy = self.inplace_copy_batch_to_gpu if self._enable_inplace_copy_batch else self.copy_batch_to_gpu
        batch, context = copy(dataloader_iter)
        return batch, self._create_context() if context is None else context

    def _create_context(self) -> TrainPipelineContext:
        context = self._context_type(index=self._next_index, version=1)
        self._next_index += 1
        return context

    def _fetched_of(self, context: TrainPipelineContext) -> Fetched[In]:
        for fetched in self._queue:
            if fetched.context is context:
                return fetched
        raise ValueError("the context is of no batch under way: stages take those that copy_batch_to_gpu gave")

    def _step(self, dataloader_iter: Iterator[In]) -> Out:
        self.fill_pipeline(dataloader_iter)
        first = self._first()
        # one that had no step before it to leave in
        if not first.has_left and not first.stays:
            first.has_left = first.has_sent = True
            self.start_sparse_data_dist(first.batch, first.context)
            self.wait_sparse_data_dist(first.context)
        self._ahead.arrive(first)
        self._raise(first)
        self._after_arrival(first)
        if self._clear_inputs:
            self.clear_sparse_data_dist_inputs(first.context)
        for fetched in islice(self._queue, 1, 1 + self._batches_ahead):
            if not fetched.has_left:
                self._start(fetched)
        if self._loads == "before forward":
            self.enqueue_batch(dataloader_iter)
        self._before_forward(first)
        try:
            if self._trains():
                self._optimizer.zero_grad()
            losses, output = self._taking(first)
            if self._loads == "after forward":
                self.enqueue_batch(dataloader_iter)
            self._go_ahead()
            if self._trains():
                self._backward(losses)
            if self._loads == "after backward":
                self.enqueue_batch(dataloader_iter)
            if self._trains():
                self._after_backward()
                self._trained_context.index = self._steps
                self.sync_embeddings(self._model, self._sync_interval, self._trained_context)
                self._optimizer_step()
                self._steps += 1
        finally:
            self.dequeue_batch()
        return output

    def _model_fwd(self, batch: In) -> tuple[Tensor, Out]:
        """The model's (losses, output) for a batch; its sharded modules take what has arrived of it.

        A `progress` of a subclass calls it with `batches[0]`, and may get what this class's own raises.
        """
        if self._is_taking or not self._queue or self._queue[0].batch is not batch:
            return super()._model_fwd(batch)
        first = self._first()
        self._ahead.arrive(first)
        self._raise(first)
        return self._taking(first)

    def _taking(self, first: Fetched[In]) -> tuple[Tensor, Out]:
        batch, self._is_taking = first.use(current(self._feed.stream)), True
        try:
            with self._ahead.taken(first, batch):
                return self._model_fwd(batch)
        finally:
            self._is_taking = False

    def _set_module_context(self, context: TrainPipelineContext) -> None:
        """Nothing: modules take a batch by itself. A `progress` as TorchRec's calls it."""

    def _wait_for_batch(self) -> None:
        """Have the current stream wait for the batch whose turn it is."""
        if self._queue and self._queue[0].batch is not None:
            self._queue[0].use(current(self._feed.stream))

    def _after_arrival(self, first: Fetched[In]) -> None:
        """What comes as soon as the ids of the batch are here."""

    def _before_forward(self, first: Fetched[In]) -> None:
        """What comes once all else is under way."""

    def _after_backward(self) -> None:
        """What comes between backward and step."""

    def detach(self) -> nn.Module:
        """The model, to be used without the pipeline; batches that were fetched stay. All ranks call it together."""
        for fetched in self._queue:
            # one whose features were freed cannot leave again
            if not fetched.is_freed:
                self._ahead.drop(fetched)
                fetched.has_left = fetched.has_sent = False
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
        for fetched in self._queue:
            self._ahead.drop(fetched)
        super().reset()
        self._steps = self._next_index = 0

    def _ahead_of(self, model: nn.Module) -> Ahead[In]:
        return Ahead(
            model, self._feed.agrees_by, self._stream, prepares=self._pipeline_postproc,
            rows_stream=self._rows_stream, frees=self._free_features_storage_early,
        )  # fmt: skip

    def _start(self, fetched: Fetched[In]) -> None:
        self._feed.settle(fetched)
        if self._ahead.can_start(fetched):
            fetched.has_left = True
            self.start_sparse_data_dist(fetched.batch, fetched.context)

    def _go_ahead(self) -> None:
        """What comes between forward and backward."""
        waiting = list(islice(self._queue, 1, 1 + self._batches_ahead))
        for fetched in waiting:
            if not fetched.has_left:
                # it could not start before the model's first step was seen
                self._start(fetched)
        for number, fetched in enumerate(waiting):
            if fetched.has_left and not fetched.has_sent:
                fetched.has_sent = True
                self.wait_sparse_data_dist(fetched.context)
            if number == 0:
                self._after_sending(fetched)

    def _after_sending(self, following: Fetched[In]) -> None:
        """What comes once the ids of the next batch have left, and before those of the one after."""


class Evaluation(TrainPipelineSparseDist[In, Out]):
    """A pipeline of this kind without gradients: no backward and no step, whatever the model's mode."""

    # no backward hides the ids of a batch, so they travel during the forward of the batch before
    _batches_ahead = 2

    @torch.no_grad()
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """The model's output for the next batch. Raises as `FedPipeline.progress`."""
        return super().progress(dataloader_iter)

    def _trains(self) -> bool:
        return False


class TrainPipelineSparseDistLite(TrainPipelineSparseDist[In, Out]):
    """Copies the next batch to the device and no more: one batch is under way, its ids travel in its own step.

    For a device without room for the ids of a second batch. A batch is loaded between backward and step. Replicas of a
    `DMPCollection` are averaged by your own `sync()` alone, as under TorchRec's.

    Args as `TrainPipelineSparseDist`.
    """

    _batches_ahead = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] | None = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model, optimizer, device, True, apply_jit, context_type, pipeline_postproc, custom_model_fwd, None,
            False, enable_inplace_copy_batch, free_features_storage_early, clear_data_dist_inputs,
        )  # fmt: skip
        self._loads = "after backward"


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Also brings the rows of the next batches into the slots of their row stores while a batch trains.

    By default four batches are under way: the ids of the next one are here and its rows come, the ids of the one after
    travel. Rows are read after the update, so every bit is that of the plain loop. Where a store has no room for the
    rows of a batch beside those that are held, they come a step later, or in the lookup.

    Args as `TrainPipelineSparseDist`; `pipeline_postproc` is True by default; and:
        ahead: batches that stores know of beyond the one whose rows come, as their ids are here: rows that these need
            soonest stay on the device. 0 tells stores nothing. The first step waits for all of these batches; an
            iterator with a method `at_hand()`, how many batches it has now, is asked for no more than those.
        prefetch: batches whose rows come ahead, while slots are free; 0 leaves them to the lookup.

    Raises:
        ValueError: either is no number of batches.
    """

    # by default
    _batches_ahead = 2
    _default_context_type = PrefetchTrainPipelineContext

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
        *,
        ahead: int = 0,
        prefetch: int = 1,
    ) -> None:
        if any(not isinstance(count, int) or count < 0 for count in (ahead, prefetch)):
            raise ValueError(f"ahead and prefetch: batches, none of them negative; got {ahead!r} and {prefetch!r}")
        self._known, self._prefetched = ahead, prefetch
        # those whose ids are here, and one whose ids travel
        self._batches_ahead = (max(prefetch, 1) + ahead if ahead else prefetch) + 1
        super().__init__(
            model, optimizer, device, execute_all_batches, apply_jit, None, pipeline_postproc, custom_model_fwd, 1,
            False, enable_inplace_copy_batch, free_features_storage_early, clear_data_dist_inputs,
        )  # fmt: skip
        self._rows_stream = new_stream(self._device)
        self._ahead = self._ahead_of(model)

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Fetch the batches that a step needs under way, and as many more of those at hand as `ahead` asks for."""
        needed = 2 + min(self._prefetched, 1)
        while len(self._queue) < self._depth:
            if len(self._queue) >= needed:
                # all ranks fetch as many: the answer of the last one is waited for
                self._feed.settle(self._queue[-1])
                if self._queue[-1].is_last_at_hand:
                    break
            if not self.enqueue_batch(dataloader_iter):
                break

    def _go_ahead(self) -> None:
        super()._go_ahead()
        coming = list(islice(self._queue, 1, self._batches_ahead))
        for fetched in coming:
            self._ahead.receive(fetched)
        # each batch takes its slots when those `ahead` of it are known, and no others: what moves hangs on no stall
        self._announce(coming[: 1 + self._known])
        for number, fetched in enumerate(coming[: self._prefetched]):
            self._announce(coming[: 1 + number + self._known])
            # in the order of the batches: one that waits for room is waited for
            if not self._ahead.prefetch(fetched):
                break

    def _announce(self, coming: list[Fetched[In]]) -> None:
        if self._known:
            for fetched in coming:
                self._ahead.announce(fetched)


class EvalPipelineSparseDist(Evaluation[In, Out]):
    """Runs a model without gradients: no backward and no step, whatever its mode. The optimizer is not used.

    Args as `TrainPipelineSparseDist`.
    """

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
