"""What the launches of the jagged ops ask of the compiler; launched.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch

from . import jagged, permute, segments

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (jagged, permute, segments)

_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

# a run, its label, and what rows it reads where the order of a sum over a row is promised ("" where it is not)
Launch = tuple[Callable[[], object], str, str]


def launches() -> Iterator[Launch]:
    """Runs of every jagged op."""
    yield from _segments()
    yield from _buckets()
    yield from _dense()
    yield from _select()


def _segments() -> Iterator[Launch]:
    halves = [(dim, torch.float16) for dim in (1, 4, 128)] + [(dim, torch.bfloat16) for dim in (6, 1023)]
    for dim, dtype in [(dim, torch.float32) for dim in (1, 3, 4, 20, 64, 128, 1023, 4096)] + halves:
        yield partial(_move_and_sum, (4, dim), dtype), f"segments D={dim} {_NAMES[dtype]}", ""
    for dtype in (torch.float32, torch.float16, torch.int64, torch.int32):
        yield partial(_move_and_sum, (4,), dtype), f"segments {_NAMES[dtype]}", ""
    yield partial(_move_and_sum, (16,), torch.int64), "segments 16 i64", ""
    yield partial(_move_and_sum, (4,), torch.int64, torch.int32), "segments i64 i32 offsets", ""
    yield partial(_move_and_sum, (4, 128), torch.float32, torch.int32), "segments D=128 fp32 i32 offsets", ""
    for dtype in (torch.int32, torch.int64):
        offsets = torch.arange(0, 5, 2, dtype=dtype)
        places, expand = partial(jagged.offsets_range, offsets, 4), permute.expand_into_jagged_permute
        yield partial(jagged.invert_permute, offsets), _NAMES[dtype], ""
        yield places, f"places {_NAMES[dtype]}", ""
        yield partial(expand, offsets[:2], offsets, offsets, 4), f"sources {_NAMES[dtype]}", ""


def _move_and_sum(shape: tuple[int, ...], dtype: torch.dtype, index: torch.dtype = torch.int64) -> None:
    """Segments of 2 values each, swapped; where they lie together with fp32 weights, as in a batch of ids."""
    values = torch.zeros(shape, dtype=dtype)
    offsets, order = torch.arange(0, shape[0] + 1, 2, dtype=index), torch.arange(shape[0] // 2, dtype=index)
    both = [values, torch.zeros(shape[0])] if dtype == torch.int64 else [values]
    torch.ops.shardwise.move_segments(both, order, offsets, offsets, shape[0])
    if dtype.is_floating_point:
        torch.ops.shardwise.collect_segments(both, order, offsets, offsets, shape[0])
        torch.ops.shardwise.segment_spread(offsets, values[: shape[0] // 2], shape[0], 1)
    jagged.segment_sum(offsets, values)


def _buckets() -> Iterator[Launch]:
    yield from ()


def _dense() -> Iterator[Launch]:
    yield from ()


def _select() -> Iterator[Launch]:
    yield from ()
