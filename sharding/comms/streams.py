"""Work and memory that cross from one stream to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@contextmanager
def after(stream: Any) -> Iterator[None]:
    """Work begun inside goes to `stream`, after what the current one was given; None is the current one."""
    if stream is None or stream.device.type == "cpu":
        yield
        return
    module = torch.get_device_module(stream.device)
    stream.wait_stream(module.current_stream(stream.device))
    with module.stream(stream):
        yield


def record_stream(thing: Any, stream: Any) -> None:
    """Keep the memory of every tensor in a batch, or in what a step keeps of one, until `stream` is done with it."""
    if isinstance(thing, Tensor):
        if thing.device.type != "cpu":
            thing.record_stream(stream)
    elif hasattr(thing, "record_stream"):
        thing.record_stream(stream)
    elif isinstance(thing, Mapping):
        for part in thing.values():
            record_stream(part, stream)
    elif isinstance(thing, list | tuple):
        for part in thing:
            record_stream(part, stream)
    elif is_dataclass(thing):
        for field in fields(thing):
            # those of later phases of a step are not there yet
            record_stream(getattr(thing, field.name, None), stream)
