"""Batches of bags of rows, the ops on them by name, and each op once more in plain Python on lists.

A list model takes rows as lists of floats and bags as (begin, end), and says nothing of dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, nan
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import (
    batched_unary_embeddings,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_softmax,
    jagged_vector_product,
)
from shardwise.kernels.jagged import bmm as jagged_bmm, unary_embeddings, vector_product
from shardwise.kernels.jagged.softmax import jagged_softmax_ref

Rows = list[list[float]]


@dataclass(frozen=True)
class Bags:
    """Bags of rows: their lengths, rows past the last bag, columns, and the rest of what the ops take."""

    name: str
    lengths: tuple[int, ...] = (3, 0, 5, 1)
    rest: int = 0
    left: int = 4  # M, or D
    right: int = 5  # K
    max_length: int | None = None
    heads: int = 2
    vector: int = 4  # L
    tables: int = 1
    tasks: int = 2
    dtype: torch.dtype = torch.float32
    offset_dtype: torch.dtype = torch.int64

    @property
    def rows(self) -> int:
        return sum(self.lengths) + self.rest

    def offsets(self, device: torch.device) -> Tensor:
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        return ends.to(device, self.offset_dtype)


_MANY = (0, 2, 1, 0, 0, 7, 3, 1, 1, 0, 2, 30, 0, 4, 1, 2)
CASES = [
    Bags("usual"),
    Bags("no bags", lengths=(), rest=3),
    Bags("no bags nor rows", lengths=()),
    Bags("empty bags", lengths=(0, 0, 0)),
    Bags("empty bags before rows", lengths=(0, 0), rest=2, tables=2),
    Bags("one row", lengths=(1,), left=1, right=1, heads=1, vector=1, tasks=1),
    Bags("uneven", lengths=_MANY, left=17, right=33, tables=4, heads=3),
    Bags("cut", lengths=_MANY, max_length=2, vector=2, rest=3, tables=2),
    Bags("cut to nothing", max_length=0, vector=0),
    Bags("longer than cut", max_length=100, vector=100, rest=1),
    Bags("no columns", left=0, right=3, tasks=0),
    Bags("no columns right", right=0),
    Bags("int32 offsets", offset_dtype=torch.int32, tables=2),
    Bags("fp16", lengths=_MANY, left=16, right=8, dtype=torch.float16, tables=2, max_length=5),
    Bags("bf16", lengths=_MANY, left=16, right=8, dtype=torch.bfloat16, tables=4, rest=1),
    Bags("fp64", lengths=_MANY, dtype=torch.float64, tables=8, max_length=6, rest=1),
    Bags("wide", lengths=(2, 40), left=70, right=130),
]


@dataclass(frozen=True)
class Op:
    """An op, its reference, its model on lists, and the arguments that a case gives it."""

    call: Callable[..., Tensor]
    ref: Callable[..., Tensor]
    model: Callable[..., Any]
    inputs: Callable[[Bags, torch.device], tuple[Any, ...]]


def _normal(bags: Bags, device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, bags.dtype)


def _dense_inputs(bags: Bags, device: torch.device) -> tuple[Any, ...]:
    dense = _normal(bags, device, len(bags.lengths), bags.left, bags.right)
    return _normal(bags, device, bags.rows, bags.left), bags.offsets(device), dense, bags.max_length


def _jagged_inputs(bags: Bags, device: torch.device) -> tuple[Any, ...]:
    y = _normal(bags, device, bags.rows, bags.right, seed=1)
    return _normal(bags, device, bags.rows, bags.left), y, bags.offsets(device), bags.max_length


def _softmax_inputs(bags: Bags, device: torch.device) -> tuple[Any, ...]:
    return 3 * _normal(bags, device, bags.rows, bags.left), bags.offsets(device), bags.max_length


def _vector_inputs(bags: Bags, device: torch.device) -> tuple[Any, ...]:
    lanes = (len(bags.lengths) or 1) * bags.heads if bags.lengths else 0
    heads = bags.heads if bags.lengths else 1
    values = _normal(bags, device, bags.rows, heads * bags.left)
    return _normal(bags, device, lanes, bags.vector, seed=1), values, bags.offsets(device)


def _unary_inputs(bags: Bags, device: torch.device) -> tuple[Any, ...]:
    """Tables of 3, 4, 5 ... rows; ids of the last row first."""
    sizes = [3 + t for t in range(bags.tables)]
    per_table = len(bags.lengths) // bags.tables
    ids = [(sizes[bag // per_table] - 1 + i * i) % sizes[bag // per_table]
           for bag, length in enumerate(bags.lengths) for i in range(length)]  # fmt: skip
    table_offsets = torch.tensor([0, *sizes]).cumsum(0).to(device)
    numbers = torch.tensor([*ids, *[-1] * bags.rest], dtype=bags.offset_dtype, device=device)
    return _normal(bags, device, bags.tasks, sum(sizes), 1), table_offsets, bags.offsets(device), numbers


def bounds(offsets: Sequence[int], limit: int | None) -> list[tuple[int, int]]:
    """First row of each bag, and the end of those that take part."""
    return [(b, e if limit is None else min(e, b + limit)) for b, e in zip(offsets, offsets[1:], strict=False)]


def dense_model(values: Rows, offsets: list[int], dense: list[Rows], limit: int | None) -> Rows:
    out = [[0.0] * (len(dense[0][0]) if dense and dense[0] else 0) for _ in values]
    for matrix, (begin, end) in zip(dense, bounds(offsets, limit), strict=True):
        for i in range(begin, end):
            out[i] = [sum(x * row[k] for x, row in zip(values[i], matrix, strict=True)) for k in range(len(out[i]))]
    return out


def jagged_model(x: Rows, y: Rows, offsets: list[int], limit: int | None) -> list[Rows]:
    left, right = len(x[0]) if x else 0, len(y[0]) if y else 0
    return [
        [[sum(x[i][m] * y[i][k] for i in range(begin, end)) for k in range(right)] for m in range(left)]
        for begin, end in bounds(offsets, limit)
    ]


def softmax_model(values: Rows, offsets: list[int], limit: int | None) -> Rows:
    out = [[0.0] * len(row) for row in values]
    for begin, end in bounds(offsets, limit):
        for d in range(len(values[0]) if values else 0):
            column = [values[i][d] for i in range(begin, end)]
            top = max(column, default=0.0)
            powers = [exp(x - top) if abs(top) < inf else nan for x in column]
            for i, power in enumerate(powers):
                out[begin + i][d] = power / sum(powers)
    return out


def vector_model(vectors: Rows, values: Rows, offsets: list[int]) -> Rows:
    out = []
    heads = len(vectors) // max(len(offsets) - 1, 1)
    for lane, weights in enumerate(vectors):
        begin, end = bounds(offsets, len(weights))[lane // heads]
        dim = len(values[0]) // heads if values else 0
        columns = range(lane % heads * dim, (lane % heads + 1) * dim)
        out.append([sum(weights[i - begin] * values[i][c] for i in range(begin, end)) for c in columns])
    return out


def unary_model(weight: list[Rows], tables: list[int], offsets: list[int], ids: list[int]) -> list[Rows]:
    count = len(tables) - 1
    batch = (len(offsets) - 1) // max(count, 1)
    return [
        [
            [sum(task[tables[t] + i][0] for i in ids[offsets[t * batch + b] : offsets[t * batch + b + 1]])
             for t in range(count)]
            for b in range(batch)
        ]
        for task in weight
    ]  # fmt: skip


OPS = {
    "dense_bmm": Op(jagged_dense_bmm, jagged_bmm.jagged_dense_bmm_ref, dense_model, _dense_inputs),
    "jagged_bmm": Op(jagged_jagged_bmm, jagged_bmm.jagged_jagged_bmm_ref, jagged_model, _jagged_inputs),
    "softmax": Op(jagged_softmax, jagged_softmax_ref, softmax_model, _softmax_inputs),
    "vector_product": Op(jagged_vector_product, vector_product.jagged_vector_product_ref, vector_model, _vector_inputs),
    "unary": Op(
        batched_unary_embeddings, unary_embeddings.batched_unary_embeddings_ref, unary_model, _unary_inputs
    ),
}  # fmt: skip


def wanted(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The arguments with gradients wanted by those of floating point, and these."""
    given = tuple(
        a.detach().clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments
    )
    return given, [a for a in given if isinstance(a, Tensor) and a.requires_grad]


def as_lists(arguments: tuple[Any, ...]) -> list[Any]:
    return [a.tolist() if isinstance(a, Tensor) else a for a in arguments]


def exact(bags: Bags) -> Bags:
    return replace(bags, dtype=torch.float64)
