"""Calls of ops that select rows, and of those that pack segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .draw import Call, Draw, calls

NUMBERS = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.int32)


def _numbers(draw: Draw, shape: int | list[int], dtype: torch.dtype, *, grad: bool = False) -> Tensor:
    if dtype.is_floating_point:
        return draw.layout(draw.floats(shape, dtype, grad=grad))
    return draw.layout(draw.ints(shape, -9, 9, dtype))


@calls("group_index_select_dim0")
def _group(draw: Draw) -> Call:
    inputs, indices, dtype = [], [], draw.index_dtype()
    numbers, all_want = draw.choice((NUMBERS[:-1], (*NUMBERS, torch.float64))), draw.coin()
    for _ in range(draw.between(1, 3)):
        rows = draw.between(1, 5)
        shape = [rows, *draw.choice(([2], [3], [2, 2]))]
        inputs.append(_numbers(draw, shape, draw.choice(numbers), grad=all_want or draw.coin(0.2)))
        indices.append(draw.layout(draw.ints(draw.below(6), 0, rows - 1, dtype)))
    wanted, dims = {each.requires_grad for each in inputs}, {each.dim() for each in inputs}
    mixed = True in wanted and (len(wanted) == 2 or len(dims) == 2)
    difference = "gradients of a group are mixed up if some want none or dims differ" if mixed else ""
    return Call([inputs, indices], packed=True, difference=difference)


@calls("batch_index_select_dim0", "batch_index_select_dim0_tensor")
def _batch(draw: Draw) -> Call:
    tables, permuted = draw.between(1, 3), draw.coin(0.4)
    rows = [draw.between(1, 4) for _ in range(tables)]
    columns = [draw.between(1, 3) for _ in range(tables)]
    counts = [draw.between(1, 4)] * tables if permuted else [draw.between(1, 4) for _ in range(tables)]
    dtype = draw.choice((*NUMBERS, torch.float64))
    size = sum(row * column for row, column in zip(rows, columns, strict=True))
    inputs = _numbers(draw, size, dtype, grad=draw.coin())
    ids = [draw.below(row) for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    sizes: list[Any] = [counts, rows, columns]
    if draw.op.endswith("tensor"):
        sizes = [torch.tensor(each, dtype=torch.int64) for each in sizes]
    option = [permuted] if permuted or draw.coin() else []
    return Call([inputs, draw.layout(torch.tensor(ids, dtype=draw.index_dtype())), *sizes, *option], packed=True)


@calls("index_select_dim0")
def _select(draw: Draw) -> Call:
    rows = draw.between(1, 5)
    shape = [rows, *draw.choice(([], [3], [2, 2]))]
    values = _numbers(draw, shape, draw.choice((*NUMBERS, torch.float64)), grad=draw.coin())
    options: list[Any] = draw.choice(([], [0, rows], [None, None, True], [0, 0, False]))
    return Call([values, draw.layout(draw.ints(draw.below(6), 0, rows - 1, draw.index_dtype())), *options], packed=True)


@calls("pack_segments", "pack_segments_v2")
def _pack(draw: Draw) -> Call:
    lengths = draw.lengths(draw.below(6), dtype=draw.index_dtype())
    longest = draw.between(1, 5)
    options = [draw.coin(), draw.coin()][: draw.below(3)] if draw.op == "pack_segments_v2" else []
    dtype = draw.choice(NUMBERS[:-1] if options and options[0] else NUMBERS)
    shape = [int(lengths.sum()), *draw.choice(([], [3], [2, 2]))]
    values = _numbers(draw, shape, dtype, grad=draw.coin())
    cut = values.requires_grad and bool((lengths > longest).any())
    difference = "gradients of rows that were cut off are uninitialised" if cut else ""
    return Call([values, draw.layout(lengths), longest, *options], packed=True, difference=difference)


@calls("bottom_k_per_row")
def _bottom_k(draw: Draw) -> Call:
    shape = [draw.between(1, 3), *draw.choice(([], [2])), draw.between(2, 5)]
    unique = draw.coin()
    numbers = draw.ints(shape, 0, 4)
    distinct = [len(set(row)) if unique else len(row) for row in numbers.view(-1, shape[-1]).tolist()]
    # FBGEMM takes no 0 as the k of all rows
    alike = draw.coin() or len(distinct) == 1
    k = [draw.between(1, min(distinct))] if alike else [draw.between(0, most) for most in distinct]
    k_offsets = draw.offsets(torch.tensor(k, dtype=torch.int64))
    return Call([draw.layout(numbers), draw.layout(k_offsets), unique], packed=True)
