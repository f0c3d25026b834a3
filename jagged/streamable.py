"""The interface of a batch that a training loop can move to a device ahead of its step."""

from __future__ import annotations

import abc
from typing import Any

import torch
from torch.fx import Proxy

# a torch without this name fails here; the flag behind it became thread-local in 2.15, and looking for it found nothing
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from .scripting import Unscripted


class Multistreamable(abc.ABC):
    """Something whose memory may be used on a stream other than the one that it was allocated on."""

    @abc.abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of every tensor until `stream` is done with it."""


class Pipelineable(Multistreamable):
    """Something that a pipeline can copy to a device: a batch, or what a batch holds."""

    @abc.abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> Pipelineable:
        """A copy on `device`."""


class Keyed(abc.ABC):
    """A type with keys, which programs also read as `_keys`, as TorchRec's types have them."""

    @abc.abstractmethod
    def keys(self) -> list[str]:
        """The keys, in their order."""

    @property
    def _keys(self) -> list[str]:
        return self.keys()


class Traceable:
    """A type whose construction from proxies `torch.fx` records instead of running it, and TorchScript refuses."""

    __torch_script_interface__ = Unscripted("torch.jit.annotations")
    _jit_override_qualname = Unscripted("torch.jit._state")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if is_fx_symbolic_tracing():
            for value in (*args, *kwargs.values()):
                if isinstance(value, Proxy):
                    return value.tracer.create_proxy("call_function", cls, args, kwargs)
        return object.__new__(cls)
