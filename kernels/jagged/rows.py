"""Checks of arguments that the ops on bags of rows share, and their direct way for eager CPU batches.

Letters: N rows, D columns, B bags; O [B + 1] offsets: bag b is rows O[b] ... O[b+1] - 1. Rows past O[B] belong to no
bag, nor do those of a bag from its `max_length`-th on take part: they come out as 0 and get a gradient of 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def check_bags(
    op: str, values: Tensor, offsets: Tensor, max_length: int | None = None, *, name: str = "values"
) -> None:
    """Raise unless values are rows of numbers and offsets are a list of integers on their device; no look at them.

    Raises:
        TypeError: a dtype that the ops do not take.
        ValueError: another shape, devices that differ, or a negative max_length.
    """
    if values.dim() != 2:
        raise ValueError(f"{op}: {name} must be 2-D, one row for each entry of a bag, got shape {list(values.shape)}")
    if values.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} must be float32, float16, bfloat16 or float64, got {values.dtype}")
    check_offsets(op, offsets, values)
    if max_length is not None and max_length < 0:
        raise ValueError(f"{op}: max_length must not be negative, got {max_length}")


def check_offsets(
    op: str, offsets: Tensor, beside: Tensor, *, like: str = "the rows", name: str = "offsets", least: int = 1
) -> None:
    """Raise unless offsets, or ids, are at least so many int32 or int64 numbers on the device of `beside`."""
    if offsets.dim() != 1 or offsets.shape[0] < least:
        raise ValueError(f"{op}: {name} must be 1-D with at least {least} entries, got shape {list(offsets.shape)}")
    if offsets.dtype not in _INTEGERS:
        raise TypeError(f"{op}: {name} must be int32 or int64, got {offsets.dtype}")
    if offsets.device != beside.device:
        raise ValueError(f"{op}: {name} must be on {beside.device} as {like}, got {offsets.device}")


def check_like(op: str, name: str, tensor: Tensor, like: str, expected: Tensor) -> None:
    """Raise unless `tensor` has the dtype and device of `expected`, the argument called `like`."""
    if tensor.dtype != expected.dtype:
        raise TypeError(f"{op}: {name} must have the dtype of {like}, {expected.dtype}, got {tensor.dtype}")
    if tensor.device != expected.device:
        raise ValueError(f"{op}: {name} must be on {expected.device} as {like}, got {tensor.device}")


def adds_in_fp32(values: Tensor) -> bool:
    """Whether rows are added up in fp32, as the Triton kernels do; fp64 runs on torch, which waits for a device."""
    return values.dtype != torch.float64


def function_of(
    forward: Callable[..., Tensor], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Tensor]:
    """`forward` with these gradients as an autograd.Function, of which a call costs less than of a registered op.

    Where a Function has a `setup_context` of its own, torch reads the signature of `forward` in every call, for 30 us.
    """

    def run(ctx: Any, *inputs: Any) -> Tensor:
        output = forward(*inputs)
        setup_context(ctx, inputs, output)
        return output

    parts = {"forward": staticmethod(run), "backward": staticmethod(backward)}
    made: Any = type(forward.__name__, (torch.autograd.Function,), parts)
    apply: Callable[..., Tensor] = made.apply
    return apply
