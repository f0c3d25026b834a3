"""Stand-ins for FBGEMM's two classes of TorchScript, by which torch.compile and torch.export trace a program with them.

shardwise has no such classes, and needs none: this is for programs that load FBGEMM itself beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._library.fake_class_registry import deregister_fake_class, has_fake_class, register_fake_class


class FakeAtomicCounter:
    """A number that calls change and read."""

    def __init__(self, counter_: int) -> None:
        self.counter_ = counter_

    @classmethod
    def __obj_unflatten__(cls, flat_obj: Iterable[tuple[str, Any]]) -> FakeAtomicCounter:
        return cls(**dict(flat_obj))

    def increment(self) -> int:
        """The number, one more than before."""
        self.counter_ += 1
        return self.counter_

    def decrement(self) -> int:
        """The number, one less than before."""
        self.counter_ -= 1
        return self.counter_

    def reset(self) -> None:
        """Begin at 0."""
        self.counter_ = 0

    def get(self) -> int:
        """The number."""
        return self.counter_

    def set(self, val: int) -> None:
        """Go on at `val`."""
        self.counter_ = val


class FakeTensorQueue:
    """Tensors that leave in the order in which they came; an empty one gives its first tensor, for ever."""

    def __init__(self, queue: list[Tensor], init_tensor: Tensor) -> None:
        self.queue, self.init_tensor = queue, init_tensor

    @classmethod
    def __obj_unflatten__(cls, flattened_ctx: Iterable[tuple[str, Any]]) -> FakeTensorQueue:
        return cls(**dict(flattened_ctx))

    def push(self, x: Tensor) -> None:
        """Put a tensor at the end."""
        self.queue.append(x)

    def pop(self) -> Tensor:
        """Take the tensor that has been there longest."""
        return self.queue.pop(0) if self.queue else self.init_tensor

    def top(self) -> Tensor:
        """The tensor that `pop` would take."""
        return self.queue[0] if self.queue else self.init_tensor

    def size(self) -> int:
        """How many there are."""
        return len(self.queue)


_FAKES: dict[str, Any] = {"fbgemm::AtomicCounter": FakeAtomicCounter, "fbgemm::TensorQueue": FakeTensorQueue}


def register_fake_classes() -> None:
    """Have torch trace FBGEMM's `AtomicCounter` and `TensorQueue`, those that this process has; none without FBGEMM."""
    for name, fake in _FAKES.items():
        if _exists(name):
            register_fake_class(name, fake)


def deregister_fake_classes() -> None:
    """Undo `register_fake_classes`; nothing happens where it did nothing."""
    for name in _FAKES:
        if has_fake_class(_full_name(name)):
            deregister_fake_class(name)  # type: ignore[no-untyped-call]


def _exists(name: str) -> bool:
    """Whether a library that was loaded defines this class."""
    try:
        torch._C._get_custom_class_python_wrapper(*name.split("::"))
    except RuntimeError:
        return False
    return True


def _full_name(name: str) -> str:
    return "__torch__.torch.classes." + name.replace("::", ".")
