"""Memory that shardwise allocates without writing starts as NaN or a huge integer, so that unwritten output is seen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

ALLOCATORS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(allocate)
    def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        # first, because the compiler cannot trace a look at the frames
        if torch.compiler.is_compiling():
            return allocate(*args, **kwargs)
        tensor = allocate(*args, **kwargs)
        if sys._getframe(1).f_globals.get("__name__", "").startswith("shardwise."):
            _fill(tensor)
        return tensor

    return allocate_poisoned


# made once: the compiler keeps a list of torch's functions as it finds them, and may refuse wrappers of another test
WRAPPERS = [(owner, name, _poisoning(getattr(owner, name))) for owner, name in ALLOCATORS]


@contextmanager
def poisoned() -> Iterator[None]:
    """Poison what `torch.empty` and its siblings return to code of shardwise; other callers get what torch gives."""
    with ExitStack() as stack:
        for owner, name, wrapper in WRAPPERS:
            stack.enter_context(patch.object(owner, name, wrapper))
        yield


@torch.no_grad()
def _fill(tensor: Tensor) -> None:
    dtype = tensor.dtype
    if dtype.is_floating_point and dtype.itemsize == 1:
        # float8 has no fill_; these bits are a NaN in e4m3 and e5m2
        tensor.view(torch.uint8).fill_(0x7F)
    elif dtype.is_floating_point or dtype.is_complex:
        tensor.fill_(float("nan"))
    elif dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(dtype).max - 1)
