"""The interface of a batch that a training loop can move to a device ahead of its step."""

from __future__ import annotations

import abc

import torch


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
