"""Forwards of sharded modules in a pipeline of your own: they take a batch that was routed ahead.

    context = TrainPipelineContext()
    step = context.module_contexts["ebc"] = model.ebc.create_context()
    context.input_dist_tensors_requests["ebc"] = model.ebc.input_dist(step, batch).wait()
    model.ebc.forward = PipelinedForward("ebc", CallArgs([], {}), model.ebc, context)
    losses, output = model(batch)

All ranks call them for the same batches in the same order.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from shardwise.jagged import JaggedTensor, KeyedTensor
from shardwise.sharding.comms.awaitable import Awaitable, LazyAwaitable, LazyNoWait
from shardwise.sharding.engine.stages import StepContext
from shardwise.sharding.plan.sharded_module import ShardedModule

from .arguments import CallArgs, EmbeddingTrainPipelineContext, PrefetchTrainPipelineContext, TrainPipelineContext
from .streams import current, on, record_stream, wait_for

Context = TypeVar("Context", bound=TrainPipelineContext)


class BaseForward(Generic[Context]):
    """In the place of a sharded module's forward.

    Args:
        name: the module's path, which its entries in the context have.
        args: what the module is called with, as parts of the batch; for the pipeline's own use.
        module: the sharded module.
        context: of the batch whose step comes next; `set_context` changes it.
        stream: where the batch was routed; None on the CPU.
    """

    def __init__(
        self,
        name: str,
        args: CallArgs,
        module: ShardedModule[Any, Any, Any, Any],
        context: Context,
        stream: torch.Stream | None = None,
    ) -> None:
        self._name, self._args, self._module, self._context, self._stream = name, args, module, context, stream

    @property
    def name(self) -> str:
        """The module's path."""
        return self._name

    @property
    def args(self) -> CallArgs:
        """What the module is called with."""
        return self._args

    def set_context(self, context: Context) -> None:
        """Take the next batch from here."""
        self._context = context

    def get_context(self) -> Context:
        """Where the next batch is taken from."""
        return self._context

    def _take(self, inputs: dict[str, Any], contexts: dict[str, StepContext]) -> tuple[StepContext, Any]:
        """The module's own of both; what is taken is gone, so that no batch is looked up twice."""
        if self._name not in inputs:
            raise RuntimeError(
                f"module {self._name!r}: no batch was routed for this call, only for {sorted(inputs)}. A pipelined"
                " module is called once in a step"
            )
        return contexts.pop(self._name), inputs.pop(self._name)

    def _here(self, arrived: Any) -> Any:
        """`arrived` for the current stream."""
        here = current(self._stream)
        if here is not None:
            wait_for(self._stream)
            record_stream(arrived, here)
        return arrived


class PipelinedForward(BaseForward[TrainPipelineContext]):
    """Waits for the ids of the batch, and looks them up."""

    def __call__(self, *input: Any, **kwargs: Any) -> LazyAwaitable[Any]:
        """The lazy result of the batch that was routed; what the model passes is not looked at.

        Raises:
            RuntimeError: no batch was routed for this module.
        """
        ctx, request = self._take(self._context.input_dist_tensors_requests, self._context.module_contexts)
        with on(self._stream):
            arrived = request.wait()
        result: LazyAwaitable[Any] = self._module.compute_and_output_dist(ctx, self._here(arrived))
        return result


class EmbeddingPipelinedForward(BaseForward[EmbeddingTrainPipelineContext]):
    """Gives the model what was looked up ahead, cut off from its graph: `embedding_backward` is a second backward."""

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        """The lazy result of the batch that was looked up; of a managed-collision module both of its results.

        Raises:
            RuntimeError: none was.
        """
        _, looked_up = self._take(self._context.embedding_a2a_requests, self._context.module_contexts)
        if isinstance(looked_up, tuple):
            rows, remapped = looked_up[0].wait(), looked_up[1]
            return LazyNoWait(self._detached(rows)), LazyNoWait(remapped.wait() if remapped is not None else None)
        return LazyNoWait(self._detached(looked_up.wait()))

    def _detached(self, rows: Any) -> Any:
        """Rows whose gradients end here."""
        is_pooled = isinstance(rows, KeyedTensor)
        features: list[str | list[str]] = [list(rows.keys())] if is_pooled else [*rows]
        tensors = [rows.values()] if is_pooled else [jagged.values() for jagged in rows.values()]
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        self._context.embedding_features.append(features)
        self._context.embedding_tensors.append(tensors)
        self._context.detached_embedding_tensors.append(leaves)
        if isinstance(rows, KeyedTensor):
            return KeyedTensor(rows.keys(), rows.length_per_key(), leaves[0], rows.key_dim())
        return {
            name: JaggedTensor(leaf, weights=jagged.weights_or_none(), lengths=jagged.lengths())
            for (name, jagged), leaf in zip(rows.items(), leaves, strict=True)
        }


class InSyncEmbeddingPipelinedForward(EmbeddingPipelinedForward):
    """Gives the model what was looked up ahead, with its graph: one backward does all."""

    def _detached(self, rows: Any) -> Any:
        return rows


def embedding_backward(context: EmbeddingTrainPipelineContext) -> None:
    """Send the gradients on that the model's backward left on what `EmbeddingPipelinedForward` gave it.

    All ranks call it after that backward; tables are updated here. What the loss did not use gets a gradient of zeros,
    so that no rank waits for another.
    """
    looked_up, gradients = [], []
    for tensors, leaves in zip(context.embedding_tensors, context.detached_embedding_tensors, strict=True):
        for tensor, leaf in zip(tensors, leaves, strict=True):
            if tensor.requires_grad:
                looked_up.append(tensor)
                gradients.append(torch.zeros_like(tensor) if leaf.grad is None else leaf.grad)
    torch.autograd.backward(looked_up, gradients)


class PrefetchPipelinedForward(BaseForward[PrefetchTrainPipelineContext]):
    """Looks up a batch whose ids are here, and its rows in their slots."""

    def __init__(
        self,
        name: str,
        args: CallArgs,
        module: ShardedModule[Any, Any, Any, Any],
        context: PrefetchTrainPipelineContext,
        prefetch_stream: torch.Stream | None = None,
    ) -> None:
        super().__init__(name, args, module, context, prefetch_stream)

    def __call__(self, *input: Any, **kwargs: Any) -> Awaitable[Any]:
        """As `PipelinedForward`."""
        return self._look_up()

    def _look_up(self) -> LazyAwaitable[Any]:
        taken = self._context.module_input_post_prefetch, self._context.module_contexts_post_prefetch
        ctx, arrived = self._take(*taken)
        result: LazyAwaitable[Any] = self._module.compute_and_output_dist(ctx, self._here(arrived))
        return result


class PrefetchEmbeddingPipelinedForward(PrefetchPipelinedForward):
    """The lookup itself is made ahead, by `compute_and_output_dist`: rows are those before the updates in between."""

    _result: LazyAwaitable[Any] | None = None

    def compute_and_output_dist(self) -> None:
        """Look the batch up now, for the module's next call.

        Raises:
            RuntimeError: no batch was routed for this module.
        """
        self._result = self._look_up()

    def __call__(self, *input: Any, **kwargs: Any) -> Awaitable[Any]:
        """The lazy result of the batch that was looked up.

        Raises:
            RuntimeError: none was.
        """
        if self._result is None:
            raise RuntimeError(f"module {self._name!r}: compute_and_output_dist() comes before the module's call")
        result, self._result = self._result, None
        return result
