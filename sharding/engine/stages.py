"""The stages of a sharded module's step by TorchRec's names, for pipelines that call them one by one.

A step is `input_dist` (ids travel), `compute` (rows are looked up and sent off) and `output_dist` (a lazy result). All
ranks call the stages of their batches in the same order; several batches may be under way.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

from shardwise.jagged import KeyedJaggedTensor

from ..comms.awaitable import Awaitable, LazyAwaitable
from .departure import Departure
from .owner import InFlight


class StepContext:
    """What belongs to one step of one module; `flight` once its ids have arrived."""

    def __init__(self) -> None:
        self.flight: InFlight | None = None


class SizesAwaitable(Awaitable[Awaitable[InFlight]]):
    """Sizes of all ranks that are on their way; the ids leave once they are here."""

    def __init__(self, module: Staged, departure: Departure, ctx: StepContext) -> None:
        super().__init__()
        self._module, self._departure, self._ctx = module, departure, ctx

    def _wait_impl(self) -> Awaitable[InFlight]:
        self._module.send_ids(self._departure)
        return IdsAwaitable(self._module, self._departure, self._ctx)


class IdsAwaitable(Awaitable[InFlight]):
    """Ids of all ranks that are on their way."""

    def __init__(self, module: Staged, departure: Departure, ctx: StepContext) -> None:
        super().__init__()
        self._module, self._departure, self._ctx = module, departure, ctx

    def _wait_impl(self) -> InFlight:
        self._ctx.flight = self._module.arrive(self._departure)
        return self._ctx.flight


class Staged(abc.ABC):
    """The stages, over `depart`, `send_ids`, `arrive`, `look_up` and `lazily` of a module."""

    @abc.abstractmethod
    def depart(self, features: KeyedJaggedTensor | Exception) -> Departure:
        """Tell all ranks the batch's sizes."""

    @abc.abstractmethod
    def send_ids(self, departure: Departure) -> None:
        """Wait for the sizes of all ranks, and send ids."""

    @abc.abstractmethod
    def arrive(self, departure: Departure) -> InFlight:
        """Wait for the ids of all ranks."""

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
        """Send the batch's sizes: the first wait is for those of all ranks, and sends ids; the second is for ids.

        Raises nothing; the first wait raises as `begin`.
        """
        return SizesAwaitable(self, self.depart(features), ctx)

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
