"""Pipelines that hand a model, or its backward, to torch.compile once it has run a few steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.sharding.engine.collection import leave_backward_untraced

from .arguments import TrainPipelineContext
from .base import TrainPipelineBase
from .sparse_dist import TrainPipelineSparseDist

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class TorchCompileConfig:
    """How `TrainPipelinePT2` compiles: the arguments of torch.compile, and in which step, counted from 0.

    Raises:
        ValueError: `compile_on_iter` is negative.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    compile_on_iter: int = 3

    def __post_init__(self) -> None:
        if self.compile_on_iter < 0:
            raise ValueError(f"compile_on_iter: must not be negative, got {self.compile_on_iter}")


class TrainPipelinePT2(TrainPipelineBase[In, Out]):
    """Compiles the model in step `compile_on_iter`, and copies the next batch while a batch trains.

    The steps before run as they are, so that modules which make something of the first batch have done so. With
    `fullgraph` what cannot be one graph is torch's error, in that step.

    Args:
        model, optimizer, device: as `TrainPipelineBase`.
        compile_configs: how to compile.
        pre_compile_fn, post_compile_fn: called with the model before and after `model.compile(...)`.
        input_transformer: makes of a batch, on the device, what the model gets, in all steps. Ours need none: jagged
            tensors are compiled as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        compile_configs: TorchCompileConfig | None = None,
        pre_compile_fn: Callable[[nn.Module], None] | None = None,
        post_compile_fn: Callable[[nn.Module], None] | None = None,
        input_transformer: Callable[[In], In] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._compile_configs = compile_configs or TorchCompileConfig()
        self._pre_compile_fn, self._post_compile_fn = pre_compile_fn, post_compile_fn
        self._input_transformer, self._iter = input_transformer, 0

    def _model_fwd(self, batch: In) -> tuple[Tensor, Out]:
        if self._input_transformer is not None:
            batch = self._input_transformer(batch)
        config = self._compile_configs
        if self._iter == config.compile_on_iter:
            if self._pre_compile_fn is not None:
                self._pre_compile_fn(self._model)
            self._model.compile(fullgraph=config.fullgraph, dynamic=config.dynamic, backend=config.backend)
            if self._post_compile_fn is not None:
                self._post_compile_fn(self._model)
        made = super()._model_fwd(batch)
        self._iter += 1
        return made


class TrainPipelineSparseDistCompAutograd(TrainPipelineSparseDist[In, Out]):
    """As `TrainPipelineSparseDist`, with the backward of all steps but the first compiled by torch's compiled autograd.

    The exchange of gradients and the update of sharded tables stay as they are, between the graphs. How to compile is
    the model's attribute `_compiled_autograd_options`, arguments of torch.compile, where it has one.

    Args as `TrainPipelineSparseDist`.

    Raises:
        ValueError: layers are wrapped by DistributedDataParallel, whose reduction compiled autograd does not run. On
            all ranks.
    """

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
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model, optimizer, device, execute_all_batches, apply_jit, context_type, pipeline_postproc,
            custom_model_fwd, 1, False, False, free_features_storage_early, clear_data_dist_inputs,
        )  # fmt: skip
        wrapped = [path for path, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
        if wrapped:
            raise ValueError(
                f"modules {wrapped} are DistributedDataParallel, whose reduction compiled autograd does not run: shard"
                " with init_data_parallel=False and reduce gradients in your optimizer's step, or train with"
                " TrainPipelineSparseDist"
            )
        leave_backward_untraced()
        self.compiled_autograd_options: dict[str, Any] = getattr(
            model, "_compiled_autograd_options", {"backend": "inductor", "dynamic": True, "fullgraph": False}
        )
        self._has_begun = False

    def get_compiled_autograd_ctx(self) -> AbstractContextManager[Any]:
        """Inside, a backward is compiled; nothing of the kind before the first step is over."""
        if not self._has_begun:
            return nullcontext()
        from torch._dynamo import compiled_autograd

        return compiled_autograd._enable(torch.compile(**self.compiled_autograd_options))

    def _backward(self, losses: Tensor) -> None:
        with self.get_compiled_autograd_ctx():
            super()._backward(losses)
        self._has_begun = True
