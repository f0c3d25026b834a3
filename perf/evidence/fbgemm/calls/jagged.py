"""Calls of ops that select, cut and number bags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .draw import Call, Draw, calls

NUMBERS = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def _numbers(draw: Draw, shape: int | list[int], *, grad: bool = False) -> Tensor:
    dtype = draw.choice(NUMBERS)
    if dtype.is_floating_point:
        return draw.layout(draw.floats(shape, dtype, grad=grad))
    return draw.layout(draw.ints(shape, -9, 9, dtype))


@calls("jagged_index_select")
def _index_select(draw: Draw) -> Call:
    bags, selected = draw.between(1, 6), draw.below(6)
    lengths = draw.lengths(bags, dtype=draw.index_dtype())
    indices = draw.ints(selected, 0, bags - 1, draw.index_dtype())
    values = _numbers(draw, [int(lengths.sum()), draw.between(1, 4)], grad=draw.coin())
    total: list[Any] = draw.choice(([], [None], [int(lengths[indices].sum())]))
    # FBGEMM reads its last offset
    difference = "" if selected else "no bag is selected: IndexError"
    return Call([values, draw.layout(lengths), draw.layout(indices), *total], packed=True, difference=difference)


@calls("jagged_index_select_2d_forward_v2")
def _index_select_by_ends(draw: Draw) -> Call:
    bags, selected = draw.between(1, 6), draw.between(1, 6)
    lengths = draw.lengths(bags)
    indices = draw.ints(selected, 0, bags - 1, draw.index_dtype())
    ends = lengths.cumsum(0), lengths[indices].cumsum(0)
    values = _numbers(draw, [int(lengths.sum()), draw.between(1, 4)])
    total: list[Any] = draw.choice(([], [None], [int(ends[1][-1])]))
    return Call([values, draw.layout(indices), *(draw.layout(each) for each in ends), *total], packed=True)


@calls("keyed_jagged_index_select_dim1")
def _keyed_select(draw: Draw) -> Call:
    keys, batch, selected = draw.between(1, 3), draw.between(1, 4), draw.between(1, 5)
    lengths = draw.lengths(keys * batch, dtype=draw.index_dtype())
    offsets = draw.offsets(lengths.to(draw.index_dtype()))
    indices = draw.ints(selected, 0, batch - 1, draw.index_dtype())
    values = _numbers(draw, int(lengths.sum()), grad=draw.coin())
    bags = [key * batch + index for key in range(keys) for index in indices.tolist()]
    places = [at for bag in bags for at in range(int(offsets[bag]), int(offsets[bag + 1]))]
    options: list[Any] = draw.choice(([], [None], [draw.floats(len(values))], [draw.floats(len(values)), len(places)]))

    def expected() -> Sequence[Any]:
        weights: list[Any] = [options[0].detach()[places]] if options and options[0] is not None else []
        return [values.detach()[places], lengths[bags], *weights]

    arguments = [draw.layout(each) for each in (lengths, offsets, indices)]
    return Call([values, *arguments, batch, *options], expected=expected)


@calls("jagged_unique_indices")
def _unique(draw: Draw) -> Call:
    tables, batch, dtype = draw.between(1, 3), draw.between(1, 3), draw.index_dtype()
    # keys of each table, and its rows
    keys, rows = [draw.between(1, 2) for _ in range(tables)], [draw.between(1, 6) for _ in range(tables)]
    table_of = [table for table in range(tables) for _ in range(keys[table])]
    first = [sum(rows[:table]) for table in range(tables)]
    # as TorchRec writes them: a table's rows belong to its last key, its keys are counted at the first or the last
    cumsum = [first[table] for table in table_of] + [sum(rows)]
    at_first = draw.coin()
    starts = [sum(keys[:table]) for table in range(tables)]
    counts = [0] * len(table_of)
    for table in range(tables):
        counts[starts[table] if at_first else starts[table] + keys[table] - 1] = keys[table]
    lengths = draw.lengths(len(table_of) * batch, dtype=draw.index_dtype())
    ids = [
        draw.below(rows[table_of[bag // batch]]) for bag, length in enumerate(lengths.tolist()) for _ in range(length)
    ]
    offsets = draw.offsets(lengths)

    def expected() -> Sequence[Any]:
        owners = [table_of[bag // batch] for bag, length in enumerate(lengths.tolist()) for _ in range(length)]
        pairs = list(zip(owners, ids, strict=True))
        distinct = sorted(set(pairs))
        sizes = []
        for table in range(tables):
            number, bags = sum(owner == table for owner, _ in distinct), keys[table] * batch
            sizes += [number // bags + (place < number % bags) for place in range(bags)]
        new_lengths = torch.tensor(sizes, dtype=offsets.dtype)
        distinct_ids = torch.tensor([index for _, index in distinct], dtype=dtype)
        inverse = torch.tensor([distinct.index(pair) for pair in pairs], dtype=torch.int64)
        return [new_lengths, draw.offsets(new_lengths), distinct_ids, inverse]

    indices = draw.layout(torch.tensor(ids, dtype=dtype))
    hash_size_offsets = draw.offsets(torch.tensor(counts, dtype=dtype))
    return Call(
        [torch.tensor(cumsum, dtype=dtype), hash_size_offsets, draw.layout(offsets), indices], expected=expected
    )


@calls("expand_into_jagged_permute")
def _expand(draw: Draw) -> Call:
    # FBGEMM takes as many entries as there are bags, of which some may repeat
    bags, dtype = draw.between(1, 6), draw.index_dtype()
    lengths = draw.lengths(bags, dtype=dtype)
    permute = draw.ints(bags, 0, bags - 1, dtype)
    ends = draw.offsets(lengths), draw.offsets(lengths[permute])
    arguments = [draw.layout(each) for each in (permute, *ends)]
    return Call([*arguments, int(ends[1][-1])], packed=True)


@calls("jagged_1d_to_truncated_values", "masked_select_jagged_1d")
def _cut(draw: Draw) -> Call:
    lengths = draw.layout(draw.lengths(draw.below(7), dtype=draw.index_dtype()))
    total = int(lengths.sum())
    truncated = draw.op == "jagged_1d_to_truncated_values"
    # more values than bags hold
    rest = draw.choice((0, 0, 2)) if truncated else 0
    values = _numbers(draw, total + rest)
    if truncated:
        return Call([values, lengths, draw.below(5)], packed=True)
    mask = draw.layout(draw.ints(total, 0, 1).bool())
    check_length: list[Any] = draw.choice(([], [None], [False], [True]))
    return Call([values, lengths, mask, *check_length], packed=True)


@calls("jagged_slice")
def _slice(draw: Draw) -> Call:
    lengths = draw.lengths(draw.between(1, 6))
    start = torch.tensor([draw.between(0, length) for length in lengths.tolist()], dtype=torch.int64)
    values = _numbers(draw, int(lengths.sum()), grad=draw.coin())
    return Call([values, draw.layout(lengths), draw.layout(start), draw.below(5)], packed=True)


@calls("jagged_acc_weights_and_counts")
def _weights_and_counts(draw: Draw) -> Call:
    size, distinct = draw.below(9), draw.between(1, 5)
    weights = draw.floats(size, draw.choice((torch.float32, torch.float64, torch.float16)))
    indices = draw.ints(size, 0, distinct - 1, draw.index_dtype())
    return Call([draw.layout(weights), draw.layout(indices), distinct], packed=True)


@calls("get_source_mask")
def _source_mask(draw: Draw) -> Call:
    bags, dtype = draw.below(7), draw.index_dtype()
    sizes = [draw.lengths(bags, dtype=dtype) for _ in range(2)]
    total = int(sizes[0].sum() + sizes[1].sum())
    return Call([*(draw.layout(each) for each in sizes), total], packed=True)
