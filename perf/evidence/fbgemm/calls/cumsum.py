"""Calls of cumulative sums, of places within bags and of sums of bags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .draw import Call, Draw, calls


@calls("asynchronous_complete_cumsum", "asynchronous_inclusive_cumsum", "asynchronous_exclusive_cumsum")
def _cumsum(draw: Draw) -> Call:
    dtype = draw.choice((torch.int32, torch.int64, torch.int64, torch.float32))
    lengths = draw.lengths(draw.below(9), dtype=dtype)
    if draw.coin(0.2):
        lengths = draw.ints((draw.below(4), draw.between(1, 5)), 0, 4, dtype)
    return Call([draw.layout(lengths)], packed=True)


@calls("asynchronous_batched_complete_cumsum")
def _batched(draw: Draw) -> Call:
    return Call([draw.layout(draw.ints((draw.between(1, 4), draw.between(1, 5)), 0, 4, draw.index_dtype()))])


@calls("offsets_range")
def _offsets_range(draw: Draw) -> Call:
    lengths = draw.lengths(draw.between(1, 8), dtype=draw.index_dtype())
    offsets = draw.offsets(lengths)
    # with the end, or without it
    return Call([draw.layout(offsets[:-1] if draw.coin() else offsets), int(lengths.sum())])


@calls("segment_sum_csr")
def _segment_sum(draw: Draw) -> Call:
    lengths = draw.lengths(draw.between(1, 8), dtype=draw.index_dtype())
    batch_size = draw.between(1, 3)
    dtype = draw.choice((torch.float32, torch.float32, torch.float16, torch.int32, torch.int64))
    size = int(lengths.sum()) * batch_size
    values = draw.floats(size, dtype) if dtype.is_floating_point else draw.ints(size, -9, 9, dtype)
    return Call([batch_size, draw.layout(draw.offsets(lengths)), draw.layout(values)], packed=True)


@calls("lengths_range", "repeat_arange")
def _lengths_range(draw: Draw) -> Call:
    lengths = draw.lengths(draw.between(1, 8), dtype=draw.index_dtype())
    if draw.op == "lengths_range" and draw.coin():
        return Call([draw.layout(lengths), [int(lengths.sum())]])
    return Call([draw.layout(lengths)], packed=True)


@calls("jagged_hash_size_cumsum")
def _hash_sizes(draw: Draw) -> Call:
    keys, batch, dtype = draw.between(1, 4), draw.between(1, 4), draw.index_dtype()
    offsets = draw.offsets(draw.lengths(keys * batch, dtype=dtype))
    indices = draw.ints(int(offsets[-1]), 0, 9, dtype)

    def expected() -> Sequence[Any]:
        ends = offsets[::batch].tolist()
        rows = [max([-1, *indices[ends[key] : ends[key + 1]].tolist()]) + 1 for key in range(keys)]
        return [draw.offsets(torch.tensor(each, dtype=dtype)) for each in (rows, [1] * keys)]

    return Call([draw.layout(offsets), draw.layout(indices), batch], expected=expected)
