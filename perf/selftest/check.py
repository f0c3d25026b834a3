"""A check: an op on one set of small inputs, its values and gradients held to a reference in plain torch.

Inputs are made on the CPU from seeds and moved to the device of a run. A gradient is held to what autograd makes of the
reference, wherever the reference has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .agreement import Tolerance
from .tolerances import SAME

# bags of a batch: empty ones, one value, and one that is longer than a tile
LENGTHS = (3, 0, 1, 7, 0, 40, 2)


@dataclass(frozen=True)
class Check:
    """One op, or several that belong together.

    `family` is what people know it by, `ops` the names that it is registered by (`torch.ops.shardwise`). `run` calls
    the ops on a device, `reference` does the same on the CPU in plain torch; both give tensors on the CPU, or None.
    """

    family: str
    name: str
    ops: tuple[str, ...]
    run: Callable[[torch.device], Sequence[Any]]
    reference: Callable[[], Sequence[Any]]
    tolerance: Tolerance = SAME


def check(
    family: str,
    name: str,
    ops: str,
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Callable[[], Sequence[Any]],
    *,
    leaves: Sequence[int] = (),
    tolerance: Tolerance = SAME,
) -> Check:
    """A check of `op(*inputs())` and of its gradient by the inputs at `leaves`; `ops` are names with blanks between."""

    def run(device: torch.device) -> Sequence[Any]:
        return _both_ways(op, leaves, [on(device, value) for value in inputs()])

    return Check(family, name, tuple(ops.split()), run, lambda: _both_ways(reference, leaves, inputs()), tolerance)


def _both_ways(op: Callable[..., Any], leaves: Sequence[int], inputs: Sequence[Any]) -> Sequence[Any]:
    """What an op gives, and the gradients of the inputs at `leaves` for a fixed gradient of its first result."""
    given = [value.detach().requires_grad_() if i in leaves else value for i, value in enumerate(inputs)]
    result = op(*given)
    parts = [*result] if isinstance(result, (tuple, list)) else [result]
    if leaves:
        first = parts[0]
        upstream = eighths(*first.shape, seed=9, dtype=first.dtype).to(first.device)
        parts += torch.autograd.grad(first, [given[i] for i in leaves], upstream)
    return [part.detach().cpu() if isinstance(part, Tensor) else part for part in parts]


def on(device: torch.device, value: Any) -> Any:
    """Tensors, and tensors in lists, on the device; everything else as it is. What an op writes to is a copy."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [on(device, item) for item in value]
    return value


def random(seed: int) -> torch.Generator:
    """A source of numbers."""
    return torch.Generator().manual_seed(seed)


def eighths(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiples of 1/8, whose sums are exact in every order."""
    return (torch.randint(-16, 17, shape, generator=random(seed)) / 8).to(dtype)


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=random(seed)).to(dtype)


def offsets_of(lengths: Sequence[int] = LENGTHS) -> Tensor:
    """Offsets [B + 1] of bags of these lengths."""
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends])
