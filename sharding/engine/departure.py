"""Batches that leave ahead of the forward that will look them up, so that an earlier batch trains meanwhile.

The stages of a step have TorchRec's names for pipelines that call them one by one: `input_dist` (ids travel), `compute`
(rows are looked up and sent off) and `output_dist` (a lazy result). All ranks call the stages of their batches in the
same order; several batches may be under way.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.jagged import KeyedJaggedTensor

from ..comms.awaitable import Awaitable, LazyAwaitable
from ..comms.exchange import Pending
from ..comms.header import Head, Told
from .owner import Batch, InFlight, Owner
from .route import Inbound, Outbound, Receiving, arrange, in_order


@dataclass
class Departure:
    """A batch of one collection until its arrival: its sizes are told, then its ids travel, then it is a flight."""

    # None where it is bad on this rank: what the ranks are told then is the error
    outbound: Outbound | None
    batch: Batch | None
    update: bool
    # how what comes is put in order; another one since means another plan or device
    receiving: Receiving
    told: Told
    heads: list[Head] = field(default_factory=list)
    # ids on their way, and how many numbers come from each rank
    ids: Pending | None = None
    sizes: list[int] = field(default_factory=list)
    flight: InFlight | None = None

    def received(self) -> Inbound:
        """What all ranks sent, once it is here."""
        batches, ids_from, groups = [], [], []
        for head in self.heads:
            batches.append(head.sizes.batch)
            ids_from.append(head.sizes.ids)
            groups.append(head.sizes.ids_to_groups)
        to_groups = list(map(sum, zip(*groups, strict=True)))[: self.receiving.groups]
        if self.ids is None:
            out = self.outbound
            assert out is not None
            weights = None if out.weights is None else out.weights.detach()
            return in_order(out.ids, [out.lengths], weights, self.receiving, batches, to_groups)
        blocks = torch.split(self.ids.wait(), self.sizes)
        return arrange(blocks, self.receiving, batches, ids_from, to_groups)

    def settle(self) -> None:
        """Wait for what travels, without a look at it; on the stream that sent it, to whose memory it returns."""
        self.told.pending.wait()
        if self.ids is not None:
            self.ids.wait()

    def drop(self, owner: Owner) -> None:
        """Let the batch go, as no forward will take it: what travels is waited for, its rows may leave their slots."""
        self.settle()
        if self.flight is not None:
            # its rows went to other ids, whether it is looked up or not
            owner.renew(self.flight)
            owner.release(self.flight)


class Expected:
    """Departures of one collection, in the order of the forwards that will take them."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Departure, object | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, departure: Departure, features: object | None = None) -> None:
        """Have the next forward take this batch, if it is called with these `features`, the very object, or any."""
        self._waiting.append((departure, features))

    def pop(self, features: object) -> Departure | None:
        """The batch that a forward with `features` is to take, None if that is none of these."""
        departure, wanted = self._waiting[0]
        if wanted is not None and wanted is not features:
            return None
        self._waiting.popleft()
        return departure

    def pop_all(self) -> list[Departure]:
        """All of them."""
        found = [departure for departure, _ in self._waiting]
        self._waiting.clear()
        return found


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
