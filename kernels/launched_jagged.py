"""What the launches of the jagged ops ask of the compiler; launched.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from . import elementwise, padded

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (padded, elementwise)

# a run, its label, and what rows it reads where the order of a sum over a row is promised ("" where it is not)
Launch = tuple[Callable[[], None], str, str]


def launches() -> Iterator[Launch]:
    """Runs of every jagged op."""
    yield from _segments()
    yield from _buckets()
    yield from _dense()
    yield from _select()


def _segments() -> Iterator[Launch]:
    yield from ()


def _buckets() -> Iterator[Launch]:
    yield from ()


def _dense() -> Iterator[Launch]:
    """Values there and back, summed and multiplied: every class of dims, types, and one to five jagged dims."""
    for dim in (1, 2, 3, 4, 5, 16, 20, 64, 128, 1023, 4096):
        yield _padded_run(dim, torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.int64):
        for dim in (1, 6, 128):
            yield _padded_run(dim, dtype)
    for dims in (2, 3, 5):
        yield _padded_run(128, torch.float32, dims=dims)
        yield _padded_run(1, torch.int64, dims=dims)
    yield _padded_run(128, torch.float32, ends=torch.int32)
    yield _padded_run(128, torch.float32, most=5)
    yield _padded_run(128, torch.float32, filling=1.0)
    yield _padded_run(3, torch.float32, filling=1.0)
    for dim, dtype in ((128, torch.float32), (3, torch.float32), (1, torch.float32), (128, torch.bfloat16)):
        for mode, words in ((padded.ADD, "sum"), (padded.MULTIPLY, "product")):
            yield _padded_run(dim, dtype, mode=mode, words=words)


def _padded_run(
    dim: int,
    dtype: torch.dtype,
    *,
    dims: int = 1,
    ends: torch.dtype = torch.int64,
    most: int = 4,
    filling: float = 0.0,
    mode: int = padded.MOVE,
    words: str = "",
) -> Launch:
    name = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32", "int64": "i64"}
    label = f"D={dim} {name[str(dtype)[6:]]}"
    label += f" {dims} jagged dims" * (dims > 1) + " i32 offsets" * (ends == torch.int32) + f" M={most}" * (most != 4)
    label += " filled" * (filling != 0) + f" {words}" * bool(words)
    return partial(_move_padded, dim, dtype, dims, ends, most, filling, mode), label, ""


def _move_padded(
    dim: int, dtype: torch.dtype, dims: int, ends: torch.dtype, most: int, filling: float, mode: int
) -> None:
    """Eight bags of one bag ... of one value, to padded and back."""
    offsets, extents = [torch.arange(9, dtype=ends)] * dims, [most] * dims
    values, dense = torch.zeros(8, dim, dtype=dtype), torch.zeros(8, *extents, dim, dtype=dtype)
    other: Tensor | None = {padded.MOVE: None, padded.ADD: dense, padded.MULTIPLY: values}[mode]
    padded.launch_to_padded(values, other, offsets, extents, filling, mode)
    padded.launch_to_jagged(dense, None if mode == padded.MOVE else values, offsets, 8, mode)


def _select() -> Iterator[Launch]:
    yield from ()
