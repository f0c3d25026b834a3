"""The stages of a step of the engine's modules, for pipelines that call them one by one.

`input_dist` (ids travel), `compute` (rows are looked up and sent off) and `output_dist` (a lazy result). All ranks call
the stages of their batches in the same order; several batches may be under way.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.jagged import Multistreamable

from ..comms.awaitable import Awaitable
from ..comms.streams import record_stream
from ..plan.sharded_module import ShardedModule

S = TypeVar("S")


class StepContext(Multistreamable):
    """What belongs to one step of one module; `step` once its ids have arrived."""

    def __init__(self) -> None:
        self.step: Any = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the step until `stream` is done with it."""
        record_stream(self.step, stream)


class SizesAwaitable(Awaitable[Awaitable[S]]):
    """Sizes of all ranks that are on their way; the ids leave once they are here."""

    def __init__(self, module: StagedModule[S], step: S, ctx: StepContext) -> None:
        super().__init__()
        self._module, self._step, self._ctx = module, step, ctx

    def _wait_impl(self) -> Awaitable[S]:
        self._module.send_ids(self._step)
        return IdsAwaitable(self._module, self._step, self._ctx)


class IdsAwaitable(Awaitable[S]):
    """Ids of all ranks that are on their way."""

    def __init__(self, module: StagedModule[S], step: S, ctx: StepContext) -> None:
        super().__init__()
        self._module, self._step, self._ctx = module, step, ctx

    def _wait_impl(self) -> S:
        self._module.receive_ids(self._step)
        self._ctx.step = self._step
        return self._step


class StagedModule(ShardedModule[S, S, Any, StepContext]):
    """A sharded module whose stages are calls over a step.

    S is a step under way: a `Step`, or one for each part of a module that holds several.
    """

    _unsharded_type: type[nn.Module]

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The class of the module before it was sharded."""
        return self._unsharded_type

    @abc.abstractmethod
    def start(self, *input: Any, **kwargs: Any) -> S:
        """Route this rank's batch and tell all ranks its sizes."""

    @abc.abstractmethod
    def send_ids(self, step: S) -> None:
        """Wait for the sizes of all ranks, and send ids."""

    @abc.abstractmethod
    def receive_ids(self, step: S) -> None:
        """Wait for the ids of all ranks."""

    @abc.abstractmethod
    def prefetch(
        self, dist_input: S, forward_stream: torch.Stream | None = None, ctx: StepContext | None = None
    ) -> bool:
        """Bring the rows of a batch whose ids are here into their slots; False where there is no room yet."""

    @abc.abstractmethod
    def announce(self, dist_input: S) -> None:
        """Tell row stores of a batch whose ids are here; batches are looked up in the order of these calls."""

    @abc.abstractmethod
    def look_up(self, step: S, *, all_tables: bool = False) -> None:
        """Find rows and send them off; `all_tables`: those of tables that every rank holds too, which need no way."""

    @abc.abstractmethod
    def output_dist(self, ctx: StepContext, output: S) -> Any:
        """The result, which waits for the rows of other ranks when it is used."""

    @abc.abstractmethod
    def fused_parameter_names(self) -> list[str]:
        """Parameters that the backward trains or that other ranks hold."""

    def create_context(self) -> StepContext:
        """For one step."""
        return StepContext()

    def input_dist(self, ctx: StepContext, *input: Any, **kwargs: Any) -> Awaitable[Awaitable[S]]:
        """Send the batch's sizes: the first wait is for those of all ranks, and sends ids; the second is for ids.

        Raises nothing; the first wait raises as the module's forward.
        """
        return SizesAwaitable(self, self.start(*input, **kwargs), ctx)

    def compute(self, ctx: StepContext, dist_input: S) -> S:
        """Look up what all ranks asked this one for, and send the rows off."""
        self.look_up(dist_input, all_tables=True)
        return dist_input

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of parameters whose gradients are not to be reduced by anybody else."""
        yield from (f"{prefix}.{name}" if prefix else name for name in self.fused_parameter_names())
