"""Where a pipeline's batches come from: fetched ahead, copied to the device, and agreed on by all ranks.

Ranks tell each other of every batch whether they have it, have none left, or failed to load it. That exchange leaves
when the batch is fetched and is waited for when its turn comes, so it costs a step nothing; and no rank starts a batch
that another one lacks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardwise.sharding.comms.consensus import PendingHeader, send_header
from shardwise.sharding.comms.env import ShardingEnv
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.engine.collection import ShardedCollection

from .calls import Started
from .streams import AllocatesOn, current, new_stream, on, record_stream, to_device

In = TypeVar("In")
# what a rank says of a batch that is not just there: there is none, or it is and the next one is not here yet
_ENDED, _WAITS = 1, 2


@dataclass
class Fetched(Generic[In]):
    """A batch under way: None once a loader has ended, or where it could not be loaded."""

    batch: In | None
    # what ranks have of it, on its way; None once it is here
    header: PendingHeader | None
    copied: Any = None
    # what is raised in its place, on all ranks, when its turn comes
    error: Exception | None = None
    # whether some rank has no such batch: all stop here
    ended: bool = False
    # whether on some rank the next one would be waited for; known with the header
    is_last_at_hand: bool = False
    # calls of its step that left ahead, and the kind of step that they left for
    started: list[Started] = field(default_factory=list)
    mode: tuple[bool, bool] | None = None
    # whether the memory of its features is freed
    is_freed: bool = False
    # whether another batch left in its place
    is_replaced: bool = False
    # whether it is not to leave ahead
    stays: bool = False
    # what its pipeline keeps of it; whether it was told to leave, and its ids to follow; whether these did
    context: Any = None
    has_left: bool = False
    has_sent: bool = False
    is_sent: bool = False
    # before its turn: whether its ids are here, stores know that it comes, and its rows are in their slots
    is_here: bool = False
    is_announced: bool = False
    is_prefetched: bool = False

    def use(self, stream: torch.Stream | None) -> In:
        """The batch, for work on the current stream."""
        assert self.batch is not None
        here = current(stream)
        if here is not None and self.copied is not None:
            here.wait_event(self.copied)
            record_stream(self.batch, here)
        return self.batch


class Feed(Generic[In]):
    """Fetches batches of a model for a device, in agreement with the other ranks that train it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self.stream = new_stream(device)
        self.follow(model)
        self._iterator: Iterator[In] | None = None
        # whether this rank has seen the end of its iterator, and whether all know of one
        self._is_empty = self._is_over = False
        self._has_warned = False
        # the stream that a batch is fetched from
        self._trains_on: Any = None

    def follow(self, model: nn.Module) -> None:
        """Agree with the ranks that train this model."""
        self.agrees_by = exchange_of(model, self._device)

    def is_over(self, iterator: Iterator[In]) -> bool:
        """Whether all ranks know that some rank's batches have ended; another iterator begins anew."""
        if iterator is not self._iterator:
            self._iterator = iterator
            self._is_empty = self._is_over = False
        return self._is_over

    def next(self, iterator: Iterator[In]) -> In | None:
        """A batch; None once the iterator has ended, which is then asked no more. Raises as the iterator."""
        self.is_over(iterator)
        batch = None if self._is_empty else next(iterator, None)
        self._is_empty = batch is None
        return batch

    def copy(self, batch: In | None, *, in_place: bool = False) -> In | None:
        """The batch on its way to the device; with `in_place` in memory of the stream that trains.

        Called by what `fetch` loads with.
        """
        loaded: In | None
        if not in_place or self.stream is None:
            loaded = to_device(batch, self._device, non_blocking=True)
        else:
            with AllocatesOn(self._trains_on, self.stream):
                loaded = to_device(batch, self._device, non_blocking=True)
        return loaded

    def fetch(self, load: Callable[[Iterator[In]], tuple[In | None, Any]], iterator: Iterator[In]) -> Fetched[In]:
        """Load a batch and its context, or learn that there is none, and tell the other ranks; waits for none of them.

        What `load` raises is raised on all ranks in the place of the batch.
        """
        exchange, device = self.agrees_by
        batch: In | None = None
        context = copied = None
        if self.stream is not None:
            self._trains_on = current(self.stream)
        told: list[list[int]] | Exception
        try:
            # what `load` makes of a batch is there once its copy is
            with on(self.stream):
                batch, context = load(iterator)
                if self.stream is not None:
                    copied = self.stream.record_event()
            # an iterator that does not count the batches that it has now is taken to have some
            at_hand = getattr(iterator, "at_hand", None)
            waits = at_hand is not None and not at_hand()
            told = [[_ENDED if batch is None else _WAITS * waits]] * exchange.world_size
        except StopIteration:
            told = [[_ENDED]] * exchange.world_size
        except Exception as error:
            batch, told = None, error
        with on(self.stream):
            header = send_header(exchange, device, told, width=1)
        return Fetched(batch, header, copied, context=context)

    def settle(self, fetched: Fetched[In]) -> None:
        """Wait until all ranks have said what they have of a batch; does nothing the second time."""
        header, fetched.header = fetched.header, None
        if header is None:
            return
        try:
            with on(self.stream):
                numbers = header.receive()
        except Exception as error:
            fetched.error = error
            return
        ended = [rank for rank, (told,) in enumerate(numbers) if told == _ENDED]
        fetched.is_last_at_hand = any(told for (told,) in numbers)
        if not ended:
            return
        fetched.ended = self._is_over = True
        if fetched.batch is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"ranks {ended} have no batch left: all ranks stop here, and a batch of this rank is left out. Give"
                " all ranks the same number of batches",
                stacklevel=3,
            )

    def drop(self, fetched: Fetched[In]) -> None:
        """Let a batch go that will not be used."""
        if fetched.header is not None:
            # as `settle`: what comes lies in memory of that stream
            with on(self.stream):
                fetched.header.pending.wait()


def exchange_of(model: nn.Module, device: torch.device) -> tuple[Exchange, torch.device]:
    """An exchange between all ranks that train a model, and the device whose tensors it takes."""
    group: Any = None
    for module in model.modules():
        if isinstance(getattr(module, "_env", None), ShardingEnv):
            env: ShardingEnv = module._env  # type: ignore[assignment]
            on_device = module.device if isinstance(module, ShardedCollection) else device
            return Exchange(env.data_parallel_group), on_device
        if isinstance(module, nn.parallel.DistributedDataParallel):
            group = module.process_group
    return Exchange(group), device
