"""The stages of a sharded module's step by TorchRec's names, for pipelines that call them one by one.

A step is `input_dist` (ids travel), `compute` (rows are looked up and sent off) and `output_dist` (a lazy result). All
ranks call the stages of their batches in the same order; several batches may be under way.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

from shardwise.jagged import KeyedJaggedTensor

from .awaitable import Awaitable, LazyAwaitable, NoWait
from .owner import InFlight


class StepContext:
    """What belongs to one step of one module; `flight` once its ids have arrived."""

    def __init__(self) -> None:
        self.flight: InFlight | None = None


class Staged(abc.ABC):
    """The stages, over `begin`, `look_up` and `lazily` of a module."""

    @abc.abstractmethod
    def begin(self, features: KeyedJaggedTensor | Exception) -> InFlight:
        """Send the batch's ids, and take those of other ranks."""

    @abc.abstractmethod
    def look_up(self, flight: InFlight) -> None:
        """Find rows and send them off."""

    @abc.abstractmethod
    def lazily(self, flight: InFlight) -> LazyAwaitable[Any]:
        """The result, when it is used."""

    @abc.abstractmethod
    def fused_parameter_names(self) -> list[str]:
        """Parameters that the backward trains or that other ranks hold."""

    def create_context(self) -> StepContext:
        """For one step."""
        return StepContext()

    def input_dist(self, ctx: StepContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[InFlight]]:
        """Send the batch's ids: the first wait is for sizes, the second for ids. As `begin`, which waits for both."""
        ctx.flight = self.begin(features)
        return NoWait(NoWait(ctx.flight))

    def compute(self, ctx: StepContext, dist_input: InFlight) -> InFlight:
        """Look up what all ranks asked this one for, and send the rows off."""
        self.look_up(dist_input)
        return dist_input

    def output_dist(self, ctx: StepContext, output: InFlight) -> LazyAwaitable[Any]:
        """The result, which waits for the rows of other ranks when it is used."""
        return self.lazily(output)

    def compute_and_output_dist(self, ctx: StepContext, input: InFlight) -> LazyAwaitable[Any]:
        """Both."""
        return self.output_dist(ctx, self.compute(ctx, input))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of parameters whose gradients are not to be reduced by anybody else."""
        yield from (f"{prefix}.{name}" if prefix else name for name in self.fused_parameter_names())
