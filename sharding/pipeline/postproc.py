"""A module between the batch and a sharded module, in a pipeline of your own that swaps it into the model.

    context = TrainPipelineContext()
    model.post = PipelinedPostproc(model.post, "post", CallArgs([features], {}), context, None, None)
    model.post(batch)  # ahead: makes the arguments of the batch, calls the module, and keeps its result in the context
    losses, output = model(batch)  # the model's own call gets that result

`TrainPipelineSparseDist(pipeline_postproc=True)` needs none: it leaves the model as it is.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import nn

from .arguments import CallArgs, TrainPipelineContext
from .streams import on, record_stream


class NoOpStream:
    """In the place of a stream's context where there are no streams: does nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> NoOpStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class PipelinedPostproc(nn.Module):
    """A module whose result for a batch is made once, ahead of the model, and kept in the batch's context.

    Its parameters, buffers and layers are the module's own, under their names: the model's state dict stays.

    Args:
        postproc_module: the module; free of effects, as what it makes ahead is what the model gets.
        fqn: its path in the model, by which contexts keep its result.
        args: how its arguments are made of a batch.
        context: of the batch whose result comes next; `set_context` changes it.
        default_stream, dist_stream: where the model uses the result, and where it is made; None on the CPU.
    """

    def __init__(
        self,
        postproc_module: nn.Module,
        fqn: str,
        args: CallArgs,
        context: TrainPipelineContext,
        default_stream: torch.Stream | None,
        dist_stream: torch.Stream | None,
    ) -> None:
        super().__init__()
        self._fqn, self._args, self._context = fqn, args, context
        self._default_stream, self._dist_stream = default_stream, dist_stream
        # as one module with it: names have no step more
        self._parameters, self._buffers = postproc_module._parameters, postproc_module._buffers
        self._modules = postproc_module._modules
        self._non_persistent_buffers_set = postproc_module._non_persistent_buffers_set
        self.training = postproc_module.training
        object.__setattr__(self, "_postproc_module", postproc_module)

    @property
    def postproc_module(self) -> nn.Module:
        """The module."""
        module: nn.Module = vars(self)["_postproc_module"]
        return module

    @property
    def fqn(self) -> str:
        """Its path in the model."""
        return self._fqn

    @property
    def args(self) -> CallArgs:
        """How its arguments are made of a batch."""
        return self._args

    def set_context(self, context: TrainPipelineContext) -> None:
        """Keep results, and take them, here."""
        self._context = context

    def get_context(self) -> TrainPipelineContext:
        """Where results are kept."""
        return self._context

    def train(self, mode: bool = True) -> PipelinedPostproc:
        """As of the module."""
        self.postproc_module.train(mode)
        self.training = mode
        return self

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """The result that the context has; if there is none, that of the batch `input[0]`, which it then has.

        Raises:
            RuntimeError: there is none, and no batch: it was not called ahead.
        """
        results = self._context.postproc_fwd_results
        if self._fqn not in results:
            if len(input) != 1 or kwargs:
                raise RuntimeError(f"postproc {self._fqn!r}: call it with the batch alone, before the model's forward")
            positional, named = self._args.build_args_kwargs(input[0])
            with on(self._dist_stream):
                made = self.postproc_module(*positional, **named)
            if self._default_stream is not None and self._dist_stream is not None:
                self._default_stream.wait_stream(self._dist_stream)
                record_stream(made, self._default_stream)
            results[self._fqn] = made
        return results[self._fqn]
