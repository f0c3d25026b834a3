"""Calls of lookups in tables of one column, of remapping ids of pruned tables, and of pruning."""

from __future__ import annotations

import torch
from torch import Tensor

from .draw import Call, Draw, calls


@calls("batched_unary_embeddings")
def _unary(draw: Draw) -> Call:
    tasks, tables, batch = draw.between(1, 3), draw.between(1, 3), draw.between(1, 4)
    dtype = draw.index_dtype()
    rows = [draw.between(1, 5) for _ in range(tables)]
    ends = draw.offsets(torch.tensor(rows, dtype=dtype))
    lengths = draw.lengths(tables * batch, dtype=dtype)
    ids = [draw.below(rows[bag // batch]) for bag, length in enumerate(lengths.tolist()) for _ in range(length)]
    grad = draw.coin(0.2)
    shape = (tasks, int(ends[-1]), 1)
    weight = draw.floats(shape, draw.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16)), grad=grad)
    args = [draw.layout(weight), draw.layout(ends), draw.layout(draw.offsets(lengths))]
    # FBGEMM has gradients on CUDA alone
    difference = "gradients through batched_unary_embeddings" if grad else ""
    return Call([*args, draw.layout(torch.tensor(ids, dtype=dtype))], packed=True, difference=difference)


@calls("pruned_array_lookup")
def _array(draw: Draw) -> Call:
    rows, offsets, ids = _pruned(draw)
    kept = draw.index_dtype()
    remapped = torch.cat([draw.ints(each, -1, 99, kept) for each in rows])
    ends = draw.offsets(torch.tensor(rows))
    return Call([draw.layout(ids), draw.layout(offsets), draw.layout(remapped), draw.layout(ends)], packed=True)


@calls("pruned_hashmap_insert", "pruned_hashmap_lookup")
def _hash_table(draw: Draw) -> Call:
    slots, offsets, ids = _pruned(draw, most=draw.choice((9, 1000, 2**31 - 1)))
    kept = draw.index_dtype()
    ends = draw.offsets(torch.tensor(slots))
    table = torch.full((int(ends[-1]), 2), -1, dtype=kept)
    batch = (len(offsets) - 1) // len(slots)
    for t, size in enumerate(slots):
        begin, end = int(offsets[t * batch]), int(offsets[(t + 1) * batch])
        # a slot stays free: FBGEMM looks for one without end
        there = (
            draw.below(max(size - (end - begin), 1)) if draw.op == "pruned_hashmap_insert" else draw.below(size or 1)
        )
        known = ids[begin:end].tolist() or [7]
        for _ in range(there):
            table[int(ends[t]) + draw.below(size)] = torch.tensor([draw.choice(known), draw.below(99)], dtype=kept)
        if size and draw.op == "pruned_hashmap_lookup":
            table[int(ends[t]) + draw.below(size)] = -1
    if draw.op == "pruned_hashmap_lookup":
        return Call([draw.layout(ids), draw.layout(offsets), draw.layout(table), draw.layout(ends)], packed=True)
    dense = draw.ints(len(ids), -1, 99, ids.dtype)
    args = [draw.layout(ids), draw.layout(dense), draw.layout(offsets), draw.layout(table), draw.layout(ends)]
    return Call(args, packed=True)


@calls("embedding_bag_rowwise_prune")
def _prune(draw: Draw) -> Call:
    rows, dim = draw.below(7), draw.between(1, 4)
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16))
    weight, indicator = draw.layout(draw.floats((rows, dim), dtype)), draw.floats(rows)
    threshold = draw.choice((0.0, 0.5, 1.0, 5.0))
    if rows and draw.coin(0.3):
        threshold = abs(float(indicator[draw.below(rows)]))
    args = [weight, draw.layout(indicator), threshold, draw.index_dtype(), draw.coin(), draw.below(rows + 2)]
    return Call([*args, draw.choice((None, 1.0, 1.5, 0.8, 0.5))][: draw.between(4, 7)], packed=True)


def _pruned(draw: Draw, most: int | None = None) -> tuple[list[int], Tensor, Tensor]:
    """Sizes of tables, offsets and ids: within the sizes, or below `most`, with a slot more than ids in each table."""
    tables, batch, dtype = draw.between(1, 3), draw.between(1, 3), draw.index_dtype()
    lengths = draw.lengths(tables * batch, dtype=dtype)
    ids: list[int] = []
    sizes = []
    for t in range(tables):
        of_table = int(lengths[t * batch : (t + 1) * batch].sum())
        size = 0 if draw.coin(0.2) else of_table + draw.between(1, 20)
        sizes.append(size)
        ids += [draw.below(size or 9 if most is None else most) for _ in range(of_table)]
    return sizes, draw.offsets(lengths), torch.tensor(ids, dtype=dtype)
