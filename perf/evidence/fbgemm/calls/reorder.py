"""Calls of reordering bags of stacked requests by feature."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import Call, Draw, calls

_VALUES = (torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16)


@calls("reorder_batched_ad_lengths")
def _lengths(draw: Draw) -> Call:
    batch = draw.offsets(draw.lengths(draw.between(1, 4), dtype=draw.index_dtype()))
    # a feature for each of no items is no feature: FBGEMM divides by their number
    items = int(batch[-1])
    if items == 0:
        batch, items = torch.tensor([0, 1], dtype=batch.dtype), 1
    broadcast, dtype = draw.coin(0.3), draw.choice(_VALUES)
    bags = draw.between(0, 3) * (len(batch) - 1 if broadcast else items)
    numbers = draw.ints(bags, 0, 9, dtype)
    args = [draw.layout(numbers), draw.layout(batch), items, broadcast]
    if not broadcast and draw.coin(0.3):
        args.append(items + draw.below(3))
    elif draw.coin():
        args = args[: 4 if broadcast else 3]
    return Call(args, packed=True)


@calls("reorder_batched_ad_indices", "cat_reorder_batched_ad_indices", "reorder_batched_sequence_embeddings")
def _values(draw: Draw) -> Call:
    dtype = draw.index_dtype()
    counts = [draw.between(0, 3) for _ in range(draw.between(1, 4))]
    counts[0] = max(counts[0], 1)
    items, features = sum(counts), draw.between(1, 3)
    batch_dtype = dtype if draw.op == "reorder_batched_sequence_embeddings" else torch.int32
    batch = draw.offsets(torch.tensor(counts, dtype=batch_dtype))
    broadcast = draw.op != "reorder_batched_sequence_embeddings" and draw.coin(0.4)
    lengths = draw.lengths(features * (len(counts) if broadcast else items), dtype=dtype)
    most = items + draw.below(3) if draw.op == "cat_reorder_batched_ad_indices" and draw.coin() else items
    reordered = torch.zeros(features, most, dtype=dtype)
    for b, count in enumerate(counts):
        first = int(batch[b])
        for t in range(features):
            begin = features * (b if broadcast else first) + t * (1 if broadcast else count)
            reordered[t, first : first + count] = lengths[begin : begin + (1 if broadcast else count)]
    offsets, moved = draw.layout(draw.offsets(lengths)), draw.layout(draw.offsets(reordered.view(-1)))
    size, total = int(lengths.sum()), int(reordered.sum())
    if draw.op == "reorder_batched_sequence_embeddings":
        rows = draw.floats((size, draw.between(1, 4)), draw.choice(_VALUES[2:]))
        return Call([offsets, draw.layout(rows), moved, draw.layout(batch), items], packed=True)
    kind = draw.choice(_VALUES)
    values = draw.ints(size, 0, 99, kind)
    if draw.op == "reorder_batched_ad_indices":
        args = [offsets, draw.layout(values), moved, draw.layout(batch), items, broadcast]
        return Call([*args, total] if broadcast else args[: 5 + draw.below(2)], packed=True)
    pieces: list[Tensor] = []
    ends = draw.offsets(lengths)
    for b, count in enumerate(counts):
        begin = features * (b if broadcast else int(batch[b]))
        bags = features * (1 if broadcast else count)
        pieces.append(draw.layout(values[int(ends[begin]) : int(ends[begin + bags])]))
    args = [offsets, pieces, moved, draw.layout(batch), items, broadcast, total]
    return Call([*args, False, most] if most > items or draw.coin(0.3) else args, packed=True)
