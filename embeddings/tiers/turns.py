"""The order in which streams of a device, and threads, may touch what a store has: `Turns`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Turns:
    """Has blocks of work on the same tensors run in the order in which they were entered, whatever their streams.

    A block waits, on its own stream, for the block before it, and for nothing else that was given to another stream.
    Blocks may lie in each other, and one thread has its turn at a time. A device without streams has no order but that
    of its program.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._depth = device, 0
        self._has_streams = device.type not in ("cpu", "meta")
        self._last: Any = None
        # the stream of the last block
        self._last_on: Any = None
        self._lock, self._blocks = threading.RLock(), 0
        self._later: deque[Callable[[], None]] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block of work on the current stream."""
        with self._lock:
            self._blocks += 1
            try:
                with self._in_order():
                    yield
            finally:
                self._blocks -= 1
        if self._later:
            self._catch_up()

    def soon(self, call: Callable[[], None]) -> None:
        """Make a call that takes a turn, now or once the block under way has ended; waits for nobody.

        For what is done when an object goes: the collector may run it in any thread, in the middle of a block.
        """
        self._later.append(call)
        self._catch_up()

    def _catch_up(self) -> None:
        while self._later and self._lock.acquire(blocking=False):
            try:
                if self._blocks:
                    return
                self._later.popleft()()
            finally:
                self._lock.release()

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        if not self._has_streams:
            yield
            return
        here = torch.get_device_module(self._device).current_stream(self._device)
        if self._last is not None and self._last_on != here:
            here.wait_event(self._last)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._last, self._last_on = here.record_event(), here

    def keep(self, *tensors: Tensor) -> None:
        """Have tensors of the device that another stream made outlive what the current one does with them."""
        if self._has_streams:
            here = torch.get_device_module(self._device).current_stream(self._device)
            for tensor in tensors:
                tensor.record_stream(here)

    def synchronize(self) -> None:
        """Wait for all work on the device: what lies in memory may then move to other memory."""
        if self._has_streams:
            # host sync: rare, tables grow by half
            torch.get_device_module(self._device).synchronize(self._device)
