"""Calls of permutes of bags, features and sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .draw import Call, Draw, calls

# what FBGEMM moves: no float64 values, no bfloat16 weights
VALUES = (torch.int64, torch.int64, torch.int32, torch.float32, torch.float16, torch.bfloat16)
NO_GRADIENT = "a gradient that FBGEMM does not have"


def _order(draw: Draw, segments: int) -> Tensor:
    """A permutation, some of the segments, or some of them several times."""
    if draw.coin() or not segments:
        return draw.permutation(segments, torch.int32)
    return draw.ints(draw.below(segments + 3), 0, segments - 1, torch.int32)


def _numbers(draw: Draw, size: int, dtype: torch.dtype, grad: bool) -> Tensor:
    if dtype.is_floating_point:
        return draw.layout(draw.floats(size, dtype, grad=grad))
    return draw.layout(draw.ints(size, 0, 99, dtype))


def _moved(lengths: Tensor, order: Tensor) -> int:
    return int(lengths[order.long()].sum())


@calls("permute_1D_sparse_data")
def _permute_1d(draw: Draw) -> Call:
    lengths = draw.lengths(draw.below(9), dtype=draw.index_dtype())
    order, size = _order(draw, len(lengths)), int(lengths.sum())
    grad = draw.coin(0.2)
    args: list[Any] = [draw.layout(order), draw.layout(lengths), _numbers(draw, size, draw.choice(VALUES), grad)]
    if draw.coin():
        dtype = draw.choice((torch.float32, torch.float32, torch.float64))
        args.append(_numbers(draw, size, dtype, grad) if draw.coin(0.8) else None)
        if draw.coin():
            args.append(_moved(lengths, order))
    return Call(args, difference=NO_GRADIENT * grad, packed=True)


@calls("permute_2D_sparse_data", "permute_sparse_data", "permute_2D_sparse_data_input1D", "permute_sparse_features")
def _permute_2d(draw: Draw) -> Call:
    features, batch = draw.below(5), draw.between(1, 4)
    lengths = draw.lengths(features * batch, dtype=draw.index_dtype()).view(features, batch)
    order, size = _order(draw, features), int(lengths.sum())
    dtype = lengths.dtype if draw.op == "permute_sparse_features" else draw.choice(VALUES)
    grad = draw.coin(0.4)
    values = _numbers(draw, size, dtype, grad)
    if draw.op == "permute_2D_sparse_data_input1D":
        args: list[Any] = [draw.layout(order), draw.layout(lengths.flatten()), values, batch]
    else:
        args = [draw.layout(order), draw.layout(lengths), values]
    if draw.coin():
        dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.float16))
        args.append(_numbers(draw, size, dtype, grad) if draw.coin(0.8) else None)
        if draw.coin() and draw.op != "permute_sparse_features":
            args.append(_moved(lengths, order))
    # it moves gradients by the inverse of what has to be a permutation
    grad &= draw.op != "permute_2D_sparse_data" or sorted(order.tolist()) != list(range(features))
    return Call(args, difference=NO_GRADIENT * grad, packed=True)


@calls("permute_sequence_embeddings")
def _sequence(draw: Draw) -> Call:
    features, batch = draw.between(1, 4), draw.between(1, 4)
    lengths = draw.lengths(features * batch, dtype=draw.index_dtype()).view(features, batch)
    size = int(lengths.sum())
    dtype = draw.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
    if draw.coin():
        embeddings = draw.floats(size, dtype)
        return Call([draw.layout(_order(draw, features)), draw.layout(lengths), draw.layout(embeddings)], packed=True)
    embeddings = draw.floats((size, draw.between(1, 3)), dtype)
    order = _order(draw, features)
    rows = torch.split_with_sizes(embeddings, lengths.sum(1).tolist())
    moved = [lengths[order.long()], torch.cat([embeddings[:0], *(rows[f] for f in order.tolist())])]
    return Call([draw.layout(order), draw.layout(lengths), draw.layout(embeddings)], "rows", expected=lambda: moved)


@calls("permute_2D_sparse_preallocated_out")
def _preallocated(draw: Draw) -> Call:
    features, batch = draw.between(1, 4), draw.between(1, 4)
    lengths = draw.lengths(features * batch, dtype=draw.index_dtype()).view(features, batch)
    order, size = _order(draw, features), int(lengths.sum())
    values = _numbers(draw, size, draw.choice(VALUES), False)
    weights = _numbers(draw, size, draw.choice((torch.float32, torch.float64)), False) if draw.coin() else None
    moved = _moved(lengths, order)
    room = moved + draw.choice((0, 0, 2))
    outs = (
        lengths.new_zeros(len(order) + draw.choice((0, 0, 1)), batch),
        values.new_zeros(room),
        torch.zeros(room, dtype=torch.float32 if weights is None else weights.dtype),
    )
    given = [out if draw.coin(0.7) else None for out in outs]
    sums = moved if draw.coin() else None
    return Call([draw.layout(order), draw.layout(lengths), values, weights, sums, *given], packed=True)


@calls("invert_permute")
def _invert(draw: Draw) -> Call:
    permute = draw.permutation(draw.below(12), draw.index_dtype())
    if draw.coin(0.1) and permute.numel() % 2 == 0:
        permute = permute.view(2, -1)
    return Call([draw.layout(permute)], packed=True)


@calls("permute102_baddbmm_permute102")
def _baddbmm(draw: Draw) -> Call:
    M, G, K, N = draw.between(1, 4), draw.between(1, 3), draw.between(1, 4), draw.between(1, 4)
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.float16))
    grad = draw.coin(0.2)
    args = [draw.layout(draw.floats(shape, dtype, grad=grad)) for shape in ((G, N), (M, G, K), (G, K, N))]
    return Call(args, difference=NO_GRADIENT * grad)
