"""What the launches of the jagged ops ask of the compiler; launched.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import ModuleType

import torch

from . import jagged_bmm, softmax, unary_embeddings, vector_product

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (jagged_bmm, softmax, unary_embeddings, vector_product)

# a run, its label, and what rows it reads where the order of a sum over a row is promised ("" where it is not)
Launch = tuple[Callable[[], None], str, str]


def launches() -> Iterator[Launch]:
    """Runs of every jagged op."""
    yield from _segments()
    yield from _buckets()
    yield from _dense()
    yield from _select()
    yield from _bmm()


def _segments() -> Iterator[Launch]:
    yield from ()


def _buckets() -> Iterator[Launch]:
    yield from ()


def _dense() -> Iterator[Launch]:
    yield from ()


def _select() -> Iterator[Launch]:
    yield from ()


_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _bmm() -> Iterator[Launch]:
    """Products, softmax, pooling by weights and unary lookups of bags of rows; a bag has 8 rows, or 100 "long"."""
    sizes = [(64, 64), (3, 20), (128, 256), (64, 1023)]
    for (left, right), dtype in product(sizes, _TYPES):
        label = f"M={left} K={right} {_TYPES[dtype]}"
        yield partial(_multiply, left, right, dtype), label, ""
        if left in (64, 128):
            yield partial(_multiply, left, right, dtype, 100), f"{label} long", ""
    yield partial(_multiply, 64, 64, torch.float32, 8, torch.int32), "M=64 K=64 fp32 i32 offsets", ""
    for dim, dtype in product((1, 4, 20, 32, 128, 1023), _TYPES):
        yield partial(_pool, dim, dtype), f"D={dim} {_TYPES[dtype]}", ""
    yield partial(_pool, 128, torch.float32, torch.int32), "D=128 fp32 i32 offsets", ""
    for dtype in _TYPES:
        yield partial(_look_up_unary, dtype), _TYPES[dtype], ""
    yield partial(_look_up_unary, torch.float32, torch.int32), "fp32 i32 ids i32 offsets", ""
    yield partial(_look_up_unary, torch.float32, torch.int64, 40), "fp32 two levels", ""


def _multiply(
    left: int, right: int, dtype: torch.dtype, rows: int = 8, offset_dtype: torch.dtype = torch.int64
) -> None:
    """A product of each of two bags with its matrix, which leaves the note of the one with its transpose."""
    x, y, offsets = torch.zeros(2 * rows, left, dtype=dtype), torch.zeros(2 * rows, right, dtype=dtype), _ends(2, rows)
    dense = torch.zeros(2, left, right, dtype=dtype)
    offsets = offsets.to(offset_dtype)
    # the last of a kernel's launches is noted: transposed and long by turns
    if rows == 8:
        jagged_bmm._dense_bmm(y, offsets, dense, None, True)
    else:
        jagged_bmm._dense_bmm(x, offsets, dense, None, False)
    jagged_bmm._jagged_bmm(x, y, offsets, None)


def _pool(dim: int, dtype: torch.dtype, offset_dtype: torch.dtype = torch.int64) -> None:
    """A softmax of rows of `dim` columns, a product with two heads' weights of as many, and their gradients."""
    offsets, rows = _ends(3, 8).to(offset_dtype), torch.zeros(24, dim, dtype=dtype)
    softmax._softmax(rows, offsets, None)
    softmax._softmax_gradient(rows, rows, offsets, None)
    vectors, grad = torch.zeros(6, 8, dtype=dtype), torch.zeros(6, dim, dtype=dtype)
    values = torch.zeros(24, 2 * dim, dtype=dtype)
    vector_product._product(vectors, values, offsets)
    vector_product._by_rows(grad, vectors, offsets, 24)
    vector_product._by_vectors(grad, values, offsets, 8)


def _look_up_unary(dtype: torch.dtype, index_dtype: torch.dtype = torch.int64, hits: int = 1) -> None:
    """Three tables of two rows, two bags each, for two tasks; `hits` more than 32 need two levels of chunks."""
    tables, offsets = _ends(3, 2), _ends(6, hits).to(index_dtype)
    ids, grad = torch.zeros(6 * hits, dtype=index_dtype), torch.zeros(2, 2, 3, dtype=dtype)
    unary_embeddings._lookup(torch.zeros(2, 6, 1, dtype=dtype), tables, offsets, ids)
    unary_embeddings._gradient(grad, tables, offsets, ids, 6)


def _ends(bags: int, rows: int) -> torch.Tensor:
    return torch.arange(bags + 1) * rows
