"""`ObjectPool`: what pools have in common, objects that are written and read by their ids.

Shapes: ids [n] int32 or int64, each in [0, pool_size).
"""

from __future__ import annotations

import abc
import warnings
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.errors import RefusedIndexError, RefusedTypeError, RefusedValueError
from shardwise.jagged.scripting import NotScriptable
from shardwise.jagged.tracing import OneNode, record_forward

T = TypeVar("T")


class ObjectPool(OneNode, NotScriptable, nn.Module, abc.ABC, Generic[T]):
    """A store of `pool_size` objects; `pool(ids)` is `pool.lookup(ids)`."""

    @abc.abstractmethod
    def lookup(self, ids: Tensor) -> T:
        """The objects of `ids` [n]."""

    @abc.abstractmethod
    def update(self, ids: Tensor, values: T) -> None:
        """Put `values` in the place of the objects of `ids` [n]; of an id that comes twice the last one stays."""

    @property
    @abc.abstractmethod
    def pool_size(self) -> int:
        """How many objects there are."""

    def forward(self, ids: Tensor) -> Any:
        """The objects of `ids` [n]."""
        if isinstance(ids, Proxy):
            return record_forward(ObjectPool.forward, self, ids)
        return self.lookup(ids)


def check_ids(ids: Tensor, pool_size: int, device: torch.device) -> None:
    """Raise unless `ids` can be those of a pool on `device`.

    Raises:
        RefusedTypeError: they are no tensor of int32 or int64.
        RefusedValueError: they have another shape than [n], or lie on another device.
        RefusedIndexError: one is below 0, or the pool has not so many.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise RefusedTypeError(f"ids of a pool are a tensor of int32 or int64, got {getattr(ids, 'dtype', type(ids))}")
    if ids.dim() != 1:
        raise RefusedValueError(f"ids of a pool have the shape [n], got {list(ids.shape)}")
    if device.type == "meta":
        raise RefusedValueError("the pool is on meta and holds nothing: make it with device=, or shard it")
    require_device("ids", ids, device)
    # host sync on CUDA: an id outside would read, or overwrite, what is not the pool's
    if ids.numel() and bool(((ids < 0) | (ids >= pool_size)).any()):
        outside = ids[(ids < 0) | (ids >= pool_size)]
        raise RefusedIndexError(
            f"{outside.numel()} ids are outside of the pool: {int(outside[0])} is not in [0, {pool_size})"
        )


def require_device(what: str, given: Tensor, device: torch.device) -> None:
    """Raise RefusedValueError unless a tensor lies on `device`; one without a number is any of its type."""
    if given.device.type != device.type or (device.index is not None and given.device != device):
        raise RefusedValueError(f"{what} on {given.device}, the pool is on {device}: move them there")


def deterministic_dedup(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of `ids` [n] each one once, rising [m], and where it came last [m] int64."""
    unique, where = torch.unique(ids, return_inverse=True)
    last = torch.full(unique.shape, -1, dtype=torch.int64, device=ids.device)
    last.scatter_reduce_(0, where, torch.arange(ids.shape[0], device=ids.device), "amax")
    return unique, last


def warn_of_host_memory(enable_uvm: bool, what: str) -> None:
    """Warn where rows were asked to lie in host memory."""
    if enable_uvm:
        warnings.warn(
            f"{what}: enable_uvm=True has no effect: rows lie on the pool's device, host memory is not served",
            stacklevel=3,
        )
