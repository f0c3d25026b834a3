"""Gradients of several micro-batches, added up and applied once: for plain loops, and for any pipeline.

Dense layers keep theirs in `.grad`, as ever, reduced over ranks with the last micro-batch. Tables whose optimizer runs
in the backward let theirs wait, each row's added up, for the step of that optimizer. Gradients are sums over the
micro-batches: divide the loss by their number for the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.embeddings import FusedOptimizer, optimizer_of
from shardwise.embeddings.collections.collection import TableCollection

from ..comms.exchange import Exchange
from ..engine.collection import ShardedCollection

In = TypeVar("In")
Out = TypeVar("Out")
_OutOfPipeline = TypeVar("_OutOfPipeline", covariant=True)


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Forward and backward in here only add gradients up: for all micro-batches of a step but the last.

    Dense layers are not reduced over ranks (DistributedDataParallel's `no_sync`) and tables stay as they are. The last
    micro-batch comes after, outside; then call `step()` of the dense optimizer, and of the model's `fused_optimizer`,
    which applies the sum of each row once. `zero_grad()` of both gives a step up. All ranks do the same.

    Raises:
        RuntimeError: tables still wait for the step of the micro-batches before.
        ValueError: a dense parameter has an optimizer in the backward, which would step at each micro-batch.
    """
    with tables_wait(model), unreduced(model):
        yield


@contextmanager
def tables_wait(model: nn.Module) -> Iterator[None]:
    """The half of `accumulate` that tables trained in the backward need; errors as there."""
    fused = fused_optimizers(model)
    late = [name for optimizer in fused if optimizer.accumulation.is_whole for name in optimizer.params]
    if late:
        raise RuntimeError(
            f"the gradients of tables {late} wait for the step of the last micro-batches: call step() of the model's"
            " fused_optimizer after them, or zero_grad() to drop them"
        )
    _require_no_dense_optimizer(model)
    before = [optimizer.accumulation.on for optimizer in fused]
    for optimizer in fused:
        optimizer.accumulate_gradients()
    try:
        yield
    finally:
        for optimizer, on in zip(fused, before, strict=True):
            optimizer.accumulate_gradients(on)


@contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """The half of `accumulate` that data parallel layers need."""
    with ExitStack() as stack:
        for wrapper in _data_parallel_parts(model):
            # a static graph is learned in a step that reduces; what is a mean already stays what it is in another
            if not wrapper.static_graph or wrapper._static_graph_delay_allreduce_enqueued:
                stack.enter_context(wrapper.no_sync())
        yield


def fused_optimizers(model: nn.Module) -> list[FusedOptimizer]:
    """The optimizers that tables of a model run in their backward, sharded or not."""
    optimizers: list[FusedOptimizer] = []
    for module in model.modules():
        if isinstance(module, ShardedCollection):
            optimizers.append(module.fused_optimizer)
        elif isinstance(module, TableCollection):
            optimizers.append(module.fused_optimizer())
    return optimizers


def _data_parallel_parts(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _require_no_dense_optimizer(model: nn.Module) -> None:
    collections = [module for module in model.modules() if isinstance(module, ShardedCollection | TableCollection)]
    tables = {id(param) for fused in collections for param in fused.parameters()}
    marked = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and id(param) not in tables and optimizer_of(param) is not None
    ]
    if marked:
        raise ValueError(
            f"dense parameters {marked} have an optimizer in the backward, which steps at every micro-batch: give them"
            " to an ordinary optimizer"
        )


@torch.no_grad()
def reduce_gradients(wrapper: DistributedDataParallel) -> None:
    """Make the gradients that were added up without it their mean over the ranks; all ranks together."""
    trained: list[nn.Parameter] = [
        param
        for name, param in wrapper.module.named_parameters()
        if param.requires_grad and name not in wrapper.parameters_to_ignore
    ]
    exchange = Exchange(wrapper.process_group)
    # a layer that no rank used keeps no gradient; where some used it the others give zeros
    used = torch.tensor([param.grad is not None for param in trained], dtype=torch.float32, device="cpu")
    used = used.to(trained[0].device)
    exchange.mean([used])
    # host sync on CUDA: once for all parameters, at the end of an epoch
    for param, share in zip(trained, used.tolist(), strict=True):
        if share and param.grad is None:
            param.grad = torch.zeros_like(param)
    exchange.mean([param.grad for param in trained if param.grad is not None])


@dataclass
class GradientAccumulationConfig:
    """How many micro-batches are a step of the optimizer; more than one enable it.

    In the first `num_warmup_steps` micro-batches dense gradients are reduced each time, which changes no result.

    Raises:
        ValueError: a number is less than 1.
    """

    is_enabled: bool = False
    num_steps: int = 1
    num_warmup_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_warmup_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self.is_enabled = self.is_enabled or self.num_steps > 1


class AccumulatingOptimizer:
    """What a pipeline has in the place of its optimizer: `zero_grad` and `step` act once for several micro-batches.

    All else is the optimizer's own. Tables of the model whose optimizer is not part of it step with it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, config: GradientAccumulationConfig) -> None:
        self._optimizer, self._model, self._config = optimizer, model, config
        # micro-batches so far, and how many there were when the step under way began
        self.current_step = self._first = 0
        self._begins = True
        # whether the last micro-batch left dense gradients of its own on each rank
        self.is_unreduced = False

    def is_last(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        return (self.current_step + 1 - self._first) % self._config.num_steps == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, at the first micro-batch of a step."""
        if self._begins:
            self._optimizer.zero_grad(set_to_none)
            for fused in self._left_over():
                fused.zero_grad()
            self._begins = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """A step of the optimizer, at the last micro-batch of a step."""
        if self.is_last():
            self._step(*args, **kwargs)

    def advance_step(self) -> None:
        """A micro-batch is done."""
        self.current_step += 1

    def flush(self) -> None:
        """Step now for the micro-batches that wait, fewer than a whole step has; the next begins a step."""
        if (self.current_step - self._first) % self._config.num_steps:
            if self.is_unreduced:
                for wrapper in _data_parallel_parts(self._model):
                    reduce_gradients(wrapper)
            self._step()
            self._first = self.current_step

    def reset(self) -> None:
        """Begin anew: gradients so far are dropped by the next `zero_grad`."""
        self.set_step(0)
        self._begins, self.is_unreduced = True, False

    def set_step(self, step: int) -> None:
        """Go on as after `step` micro-batches."""
        self.current_step, self._first = step, 0

    def _step(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer.step(*args, **kwargs)
        for fused in self._left_over():
            fused.step()
        self._begins, self.is_unreduced = True, False

    def _left_over(self) -> list[FusedOptimizer]:
        """Those that the optimizer did not reach."""
        return [fused for fused in fused_optimizers(self._model) if fused.accumulation.begun]

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)


class Progresses(Protocol[_OutOfPipeline]):
    """A training pipeline: `progress` trains on the next batch, from `zero_grad` to `step` of its `_optimizer`."""

    def progress(self, dataloader_iter: Iterator[Any], /) -> _OutOfPipeline:
        """One batch; StopIteration where there is none, on all ranks in the same call."""
        ...


class GradientAccumulationWrapper(Generic[In, Out]):
    """A pipeline whose batches are micro-batches: its optimizer steps once for `config.num_steps` of them.

    Exact for tables too: they wait, and step with the optimizer, whether or not it includes their own. Attributes that
    it lacks are the pipeline's. A loss is not divided by the number of micro-batches.

    Args:
        pipeline: whatever has `progress(iterator)` and steps its own `_optimizer` there.
        optimizer: the pipeline's.
        model: the model that the pipeline trains, a `DistributedModelParallel` say.
        config: how many micro-batches are a step.

    Raises:
        ValueError: accumulation is enabled and the pipeline has no `_optimizer`, or stashes gradients.
    """

    def __init__(
        self,
        pipeline: Progresses[Out],
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        config: GradientAccumulationConfig,
    ) -> None:
        self._pipeline: Any = pipeline
        self._model, self._config = model, config
        self._optimizer_wrapper = AccumulatingOptimizer(optimizer, model, config)
        if config.is_enabled:
            if not hasattr(self._pipeline, "_optimizer"):
                kind = type(pipeline).__name__
                raise ValueError(f"{kind} has no _optimizer, whose steps are to wait: it is not a training pipeline")
            if getattr(self._pipeline, "_stash_gradients", False):
                raise ValueError(
                    "stash_gradients=True exchanges the gradients of each micro-batch for those of the one before, and"
                    " they do not add up: accumulate with stash_gradients=False"
                )
            self._pipeline._optimizer = self._optimizer_wrapper

    def progress(self, dataloader_iter: Iterator[In], is_last_batch: bool | None = None) -> Out:
        """Train on the next micro-batch, and step if it is the last of its step or, by `is_last_batch`, of all.

        Raises:
            StopIteration: there is no batch left; the micro-batches that waited have then been applied in a step.
        """
        if not self._config.is_enabled:
            return self._pipeline.progress(dataloader_iter)  # type: ignore[no-any-return]
        optimizer = self._optimizer_wrapper
        waits = not (optimizer.is_last() or is_last_batch)
        is_unreduced = waits and self.current_step >= self._config.num_warmup_steps
        try:
            with ExitStack() as stack:
                if waits:
                    stack.enter_context(tables_wait(self._model))
                if is_unreduced:
                    stack.enter_context(unreduced(self._model))
                output: Out = self._pipeline.progress(dataloader_iter)
        except StopIteration:
            optimizer.flush()
            raise
        optimizer.is_unreduced = is_unreduced
        optimizer.advance_step()
        if is_last_batch:
            optimizer.flush()
        return output

    def reset(self) -> None:
        """Begin anew, and the pipeline with it if it can: gradients so far are dropped by the next micro-batch."""
        self._optimizer_wrapper.reset()
        if hasattr(self._pipeline, "reset"):
            self._pipeline.reset()

    @property
    def optimizer_wrapper(self) -> AccumulatingOptimizer:
        """What the pipeline steps."""
        return self._optimizer_wrapper

    @property
    def current_step(self) -> int:
        """Micro-batches so far."""
        return self._optimizer_wrapper.current_step

    def set_step(self, step: int) -> None:
        """Go on as after `step` micro-batches."""
        self._optimizer_wrapper.set_step(step)

    def __getattr__(self, name: str) -> Any:
        if name == "_pipeline":
            raise AttributeError(name)
        return getattr(self._pipeline, name)
