"""Calls of bringing tensors to one device."""

from __future__ import annotations

import torch

from .draw import Call, Draw, calls

_CPU = torch.device("cpu")
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@calls("merge_pooled_embeddings")
def _merge(draw: Draw) -> Call:
    rows, dim, dtype = draw.below(4), draw.below(2), draw.choice(_FLOATS)
    sizes = [draw.below(4) for _ in range(draw.between(1, 4))]
    grad = draw.coin(0.1)
    tensors = [draw.layout(draw.floats((rows, size) if dim else (size, rows), dtype, grad=grad)) for size in sizes]
    args = [tensors, rows, _CPU, *([dim] if dim == 0 or draw.coin() else [])]
    return Call(args, difference="gradients through merge_pooled_embeddings" if grad else "")


@calls("all_to_one_device")
def _all_to_one(draw: Draw) -> Call:
    shapes = [(draw.below(3), draw.between(1, 3)) for _ in range(draw.between(1, 4))]
    return Call([[draw.layout(draw.floats(shape, draw.choice(_FLOATS))) for shape in shapes], _CPU])


@calls("sum_reduce_to_one")
def _sum(draw: Draw) -> Call:
    shape, dtype = (draw.below(3), draw.between(1, 3)), draw.choice((*_FLOATS, torch.int64, torch.int32))
    # a tensor of the last dim alone counts for every row
    shapes = [shape if place == 0 or draw.coin(0.8) else shape[1:] for place in range(draw.between(1, 4))]
    if not dtype.is_floating_point:
        return Call([[draw.layout(draw.ints(each, -9, 9, dtype)) for each in shapes], _CPU])
    return Call([[draw.layout(draw.floats(each, dtype)) for each in shapes], _CPU])
