"""Calls of ops on bags beside padded dense tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .draw import Call, Draw, calls

# FBGEMM takes no fp64 here
FLOATS = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int32, torch.int64)


def _offsets(draw: Draw, dims: int, bags: int) -> list[Tensor]:
    """Offsets of so many jagged dims, those of the first of `bags` bags."""
    dtype = draw.index_dtype()
    offsets = []
    for _ in range(dims):
        offsets.append(draw.layout(draw.offsets(draw.lengths(bags, 3, dtype))))
        bags = int(offsets[-1][-1])
    return offsets


def _numbers(draw: Draw, shape: list[int], dtype: torch.dtype, *, grad: bool = False) -> Tensor:
    if dtype.is_floating_point:
        return draw.layout(draw.floats(shape, dtype, grad=grad))
    return draw.layout(draw.ints(shape, -9, 9, dtype))


def _bags_and_extents(draw: Draw) -> tuple[list[Tensor], list[int]]:
    dims = draw.choice((1, 1, 1, 2, 3))
    offsets = _offsets(draw, dims, draw.between(1, 5))
    return offsets, [draw.between(1, 4) for _ in range(dims)]


@calls("dense_to_jagged")
def _to_jagged(draw: Draw) -> Call:
    offsets, extents = _bags_and_extents(draw)
    shape = [offsets[0].shape[0] - 1, *extents, draw.between(1, 4)]
    dense = _numbers(draw, shape, draw.choice(NUMBERS), grad=draw.coin())
    total = int(offsets[-1][-1])
    options: list[Any] = draw.choice(([], [None], [total], [total + 2]))
    return Call([dense, offsets, *options], packed=True)


@calls("jagged_to_padded_dense")
def _to_padded(draw: Draw) -> Call:
    offsets, extents = _bags_and_extents(draw)
    shape = [int(offsets[-1][-1]) + draw.choice((0, 0, 2)), *draw.choice(([], [1], [3]))]
    values = _numbers(draw, shape, draw.choice(NUMBERS), grad=draw.coin())
    padding = draw.choice(([], [0.0], [-2.5]))
    return Call([values, offsets, extents, *padding], packed=True)


@calls("jagged_1d_to_dense", "jagged_2d_to_dense")
def _one_dim_to_dense(draw: Draw) -> Call:
    (offsets,) = _offsets(draw, 1, draw.between(1, 6))
    flat = draw.op == "jagged_1d_to_dense"
    shape = [int(offsets[-1]), *([] if flat else [draw.between(1, 4)])]
    values = _numbers(draw, shape, draw.choice(NUMBERS), grad=draw.coin())
    padding = [draw.choice((0, -1, 7))] if flat else []
    return Call([values, offsets, draw.between(1, 4), *padding], packed=True)


@calls("jagged_dense_elementwise_add_jagged_output", "jagged_dense_elementwise_add", "jagged_dense_elementwise_mul")
def _elementwise(draw: Draw) -> Call:
    offsets, extents = _bags_and_extents(draw)
    columns = draw.between(1, 4)
    # FBGEMM's gradient of a product takes no bf16
    dtype = draw.choice(FLOATS[:-1] if draw.op.endswith("mul") else NUMBERS)
    both = draw.coin(0.9)
    other = dtype if both else torch.float32
    x = _numbers(draw, [int(offsets[-1][-1]), columns], dtype, grad=both and draw.coin())
    y = _numbers(draw, [offsets[0].shape[0] - 1, *extents, columns], other, grad=both and draw.coin())
    return Call([x, offsets, y], packed=True)


@calls("jagged_dense_dense_elementwise_add_jagged_output")
def _two_dense(draw: Draw) -> Call:
    offsets, extents = _bags_and_extents(draw)
    dtype, bags, columns = draw.choice(NUMBERS), offsets[0].shape[0] - 1, draw.between(1, 4)
    x = _numbers(draw, [int(offsets[-1][-1]), columns], dtype, grad=draw.coin())
    same = draw.coin(0.7)
    others = extents if same else [draw.between(1, 4) for _ in extents]
    y_0 = _numbers(draw, [bags, *extents, columns], dtype, grad=same and draw.coin())
    y_1 = _numbers(draw, [bags, *others, columns], dtype, grad=same and draw.coin())
    return Call([x, offsets, y_0, y_1], packed=True)


@calls("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax", "batched_dense_vec_jagged_2d_mul")
def _products(draw: Draw) -> Call:
    bags, rows_columns = draw.between(1, 5), draw.between(1, 4)
    (offsets,) = _offsets(draw, 1, bags)
    rows = int(offsets[-1])
    # FBGEMM adds up products that are rounded to 16 bits each
    dtype = draw.choice(FLOATS[:2] if draw.op != "jagged_softmax" else FLOATS)
    grad = draw.coin(0.6)
    x = _numbers(draw, [rows, rows_columns], dtype, grad=grad)
    longest = draw.choice((1, 2, 5))
    if draw.op == "jagged_dense_bmm":
        y = _numbers(draw, [bags, rows_columns, draw.between(1, 4)], dtype, grad=draw.coin())
        return Call([x, offsets, y, longest], packed=True)
    if draw.op == "jagged_jagged_bmm":
        y = _numbers(draw, [rows, draw.between(1, 4)], dtype, grad=draw.coin())
        return Call([x, y, offsets, longest], packed=True)
    if draw.op == "jagged_softmax":
        cut = int(offsets.diff().max()) > longest
        return Call([x, offsets, longest], packed=True, difference="rows past max_L are uninitialised" if cut else "")
    heads = draw.between(1, 3)
    v = _numbers(draw, [bags * heads, longest], dtype, grad=draw.coin())
    a = _numbers(draw, [rows, heads * draw.between(1, 3)], dtype, grad=grad)
    return Call([v, a, offsets], packed=True)


@calls("stacked_jagged_1d_to_dense", "stacked_jagged_2d_to_dense")
def _stacked(draw: Draw) -> Call:
    keys, bags = draw.between(1, 3), draw.between(1, 4)
    flat = draw.op == "stacked_jagged_1d_to_dense"
    lengths = draw.layout(draw.ints([keys, bags], 0, 3, draw.index_dtype()))
    ends = [0, *lengths.sum(1).cumsum(0).tolist()]
    grad = draw.coin()
    shape = [ends[-1], *([] if flat else [draw.between(1, 4)])]
    values = _numbers(draw, shape, draw.choice(NUMBERS), grad=grad)
    padding = [draw.choice((0, -1, 7))] if flat or draw.coin() else []
    # FBGEMM keeps one tensor of offsets for all keys
    wrong = flat and keys > 1 and values.requires_grad
    difference = "gradients by the offsets of the last key" if wrong else ""
    extents = [draw.between(1, 4) for _ in range(keys)]
    return Call([values, lengths, ends, extents, *padding], packed=True, difference=difference)
