"""Find the first element of a gradient that is NaN or infinite, before an update reads it.

Letters: G [B, sum of dims] (pooled) or [N, D] (sequence) upstream gradient, or the per-id weights [N] that scale it;
guard [3] int64 (bounds.py).
Bytes moved: the gradient once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    register,
    runs_kernel,
    tl,
    triton,
)
from ..features import batch_size
from .bounds import OK, first_true

_BLOCK = 64 if INTERPRETED else 2048


def check_gradient_ref(grad: Tensor, guard: Tensor) -> None:
    """Lower guard[2] to the number of the first element that is not finite, counted row by row."""
    if grad.numel():
        guard[2] = torch.minimum(guard[2], first_true(~grad.isfinite().flatten()))


@triton.jit(do_not_specialize=["N"])
def _check_gradient_kernel(G, guard, N, BLOCK: tl.constexpr, NONE: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * BLOCK
    position = start + tl.arange(0, BLOCK)
    # without a mask a thread reads 16 bytes at once, with one whose alignment nobody knows element after element
    if start + BLOCK <= N:
        g = tl.load(G + position).to(tl.float32)
    else:
        g = tl.load(G + position, mask=position < N, other=0.0).to(tl.float32)
    # NaN compares false
    bad = (tl.abs(g) < float("inf")) == 0
    first = tl.min(tl.where(bad, position, NONE), 0)
    tl.atomic_min(guard + 2, first, mask=first != NONE)


def check_gradient(grad: Tensor, guard: Tensor) -> None:
    """Leave the first element of `grad` that is NaN or infinite in guard[2], which masks every update; no sync."""
    torch.ops.shardwise.check_gradient(grad, guard)


def _check_gradient(grad: Tensor, guard: Tensor) -> None:
    if not runs_kernel(grad):
        # one finite sum proves all of them finite, and is the faster to come by
        if grad.is_cuda or not bool(grad.sum(dtype=torch.float32).isfinite()):
            check_gradient_ref(grad, guard)
    elif grad.numel():
        grad = grad.contiguous()
        grid = (triton.cdiv(grad.numel(), _BLOCK),)
        _check_gradient_kernel[grid](grad, guard, grad.numel(), _BLOCK, OK)


def describe_gradient(element: int, grad: Tensor, dims: Sequence[int], names: Sequence[str]) -> str:
    """Feature, table, sample and value of an element of a pooled gradient [B, D], or position and value, for people."""
    row, column = divmod(element, grad.shape[1])
    value = float(grad[row, column])
    if sum(dims) != grad.shape[1]:
        return f"{', '.join(names)}: the gradient of id number {row} is {value}"
    for name, dim in zip(names, dims, strict=True):
        if column < dim:
            return f"{name}, sample {row}: its gradient is {value} in column {column}"
        column -= dim
    raise AssertionError("the columns of a gradient are those of the features")


def describe_weight(position: int, per_id_weights: Tensor, offsets: Tensor, names: Sequence[str]) -> str:
    """Feature, table, sample and value of the per-id weight [N] at `position`, for people; offsets [F*B + 1]."""
    bag = int(torch.searchsorted(offsets[1:].contiguous(), position, right=True))
    f, sample = divmod(bag, batch_size(offsets, len(names)))
    return f"{names[f]}, sample {sample}: the weight of an id is {float(per_id_weights[position])}"


register(
    "check_gradient(Tensor grad, Tensor(a!) guard) -> ()",
    _check_gradient,
    lambda grad, guard: None,
)
