"""The order in which streams of a device may touch what a store has: `Turns`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Turns:
    """Has blocks of work on the same tensors run in the order in which they were entered, whatever their streams.

    A block waits, on its own stream, for the block before it, and for nothing else that was given to another stream.
    Blocks may lie in each other. A device without streams has no order but that of its program.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._depth = device, 0
        self._has_streams = device.type not in ("cpu", "meta")
        self._last: Any = None
        # the stream of the last block
        self._last_on: Any = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block of work on the current stream."""
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

    def synchronize(self) -> None:
        """Wait for all work on the device: what lies in memory may then move to other memory."""
        if self._has_streams:
            # host sync: rare, tables grow by half
            torch.get_device_module(self._device).synchronize(self._device)
