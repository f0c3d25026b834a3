"""Batches on their way to a device, and streams beside the current one; a CPU has none, and all is done in place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.sharding.comms.streams import record_stream

__all__ = ["AllocatesOn", "current", "new_stream", "on", "record_stream", "to_device", "wait_for"]


def new_stream(device: torch.device, priority: int = 0) -> torch.Stream | None:
    """A stream of a device; None on the CPU."""
    if device.type == "cpu":
        return None
    return cast(torch.Stream, torch.get_device_module(device).Stream(device=device, priority=priority))


def on(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Work begun inside goes to `stream`."""
    if stream is None or stream.device.type == "cpu":
        return nullcontext()
    return cast(AbstractContextManager[Any], torch.get_device_module(stream.device).stream(stream))


def current(stream: torch.Stream | None) -> Any:
    """The stream that work goes to now, on the device of `stream`; None where that is none."""
    if stream is None or stream.device.type == "cpu":
        return None
    return torch.get_device_module(stream.device).current_stream(stream.device)


def wait_for(stream: torch.Stream | None) -> None:
    """Work begun from now on comes after what `stream` has been given."""
    here = current(stream)
    if here is not None:
        here.wait_stream(stream)


def to_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """A batch on `device`: what has a `to` is copied by it; lists, tuples and dicts are looked into.

    Raises:
        TypeError: it has no `to` and is none of these.
    """
    if batch is None or isinstance(batch, bool | int | float | str):
        return batch
    if hasattr(batch, "to"):
        return batch.to(device=device, non_blocking=non_blocking)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device, non_blocking) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [to_device(part, device, non_blocking) for part in batch]
        # a named tuple takes its parts one by one
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise TypeError(
        f"a batch is moved by its `to(device, non_blocking)`, which {type(batch).__name__} lacks; lists, tuples and"
        " dicts of what has one will do too"
    )


class AllocatesOn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, what is copied from the CPU to a device gets memory of the stream `owner`; the copy goes to `copies`."""

    def __init__(self, owner: Any, copies: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner, self._copies = owner, copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device: Any = kwargs.get("device") or "cpu"
        is_copy = func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu"
        if not is_copy or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        source, dtype = args[0], kwargs.get("dtype")
        with on(self._owner):
            there = torch.empty_like(source, device=device, dtype=dtype or source.dtype)
        # memory that was freed there may still be read by what that stream was given
        self._copies.wait_stream(self._owner)
        there.copy_(source, non_blocking=bool(kwargs.get("non_blocking")))
        there.record_stream(self._copies)
        return there
