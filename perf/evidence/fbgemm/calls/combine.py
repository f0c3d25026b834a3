"""Calls of joining inputs of several lookups to one."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import Call, Draw, calls


@calls("tbe_input_combine", "padding_fused_tbe_input_combine")
def _combine(draw: Draw) -> Call:
    padded = draw.op == "tbe_input_combine" and draw.coin(0.4)
    all_ends = padded or draw.coin(0.3)
    features = draw.between(1, 4)
    indices, offsets, weights, ends = [], [], [], []
    difference = ""
    for _ in range(features):
        lengths = draw.lengths(draw.between(1, 5), dtype=draw.index_dtype())
        with_end = all_ends or draw.coin()
        total = int(lengths.sum())
        size = total + (draw.below(3) if padded else 0)
        if size > total == 0:
            difference = "padding of a feature without indices"
        indices.append(draw.layout(draw.ints(size, 0, 99, draw.index_dtype())))
        starts = draw.offsets(lengths)
        offsets.append(draw.layout(starts if with_end else starts[:-1]))
        weights.append(_weights(draw, size))
        ends.append(with_end)
    call = Call([indices, offsets, weights, torch.tensor(ends)], packed=True, difference=difference)
    if draw.op == "padding_fused_tbe_input_combine":
        most = max(each.numel() for each in offsets)
        call.args = [*call.args, most + draw.below(3)]
    return call


@calls("tbe_input_combine_with_length", "padding_fused_tbe_input_combine_with_length")
def _combine_with_length(draw: Draw) -> Call:
    indices, lengths, weights = [], [], []
    for _ in range(draw.between(1, 4)):
        lengths.append(draw.layout(draw.lengths(draw.between(0, 5), dtype=draw.index_dtype())))
        size = int(lengths[-1].sum())
        indices.append(draw.layout(draw.ints(size, 0, 99, draw.index_dtype())))
        weights.append(_weights(draw, size))
    if draw.op == "tbe_input_combine_with_length":
        return Call([indices, lengths, weights], packed=True)
    return Call([indices, lengths, weights, max(each.numel() for each in lengths) + draw.below(3)], packed=True)


def _weights(draw: Draw, size: int) -> Tensor:
    return draw.layout(draw.floats(size if draw.coin(0.7) else 0))
