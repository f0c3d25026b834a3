"""Each head's weights times the rows of its bag: the pooling of attention.

Shapes: V [B*H, L] weights, X [N, H*D] rows, O [B + 1] offsets, Y [B*H, D]; G [B*H, D] the upstream gradient. Head h of
bag b is row b * H + h of V, Y and G, and columns h * D ... of X. As FBGEMM's batched_dense_vec_jagged_2d_mul: rows of a
bag from its L-th on take no part, and weights past a bag's rows are not read.
Bytes moved: forward N * H*D * itemsize + N * H * itemsize (weights) + B*H*D * itemsize; backward by X the same, by V
the same and B*H*L * itemsize instead of N * H * itemsize.
Each element of a result is added up by one program, in steps of a tile that follows from D alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._op import (
    direct,
    eager,
    multiple,
    next_power_of_2,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..cpu.products import (
    accumulator,
    vector_product_by_rows_cpu,
    vector_product_by_vectors_cpu,
    vector_product_cpu,
)
from ..features import row_alignment
from .rows import (
    adds_in_fp32,
    check_bags,
    check_like,
    function_of,
)

# elements of a tile, at two warps
_TILE = 1024


def jagged_vector_product_ref(vectors: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """Y[b, h] = sum over l < min(L, length of b) of V[b, h, l] * X[O[b] + l, h]."""
    bounds, wide = offsets.tolist(), accumulator(values.dtype)
    bags, length = len(bounds) - 1, vectors.shape[1]
    heads = heads_of(vectors, offsets)
    out = values.new_zeros(bags, heads, values.shape[1] // heads)
    for b in range(bags):
        rows = values[bounds[b] : bounds[b + 1]][:length].to(wide)
        for h, (weights, columns) in enumerate(
            zip(vectors.reshape(bags, heads, length)[b].to(wide), rows.chunk(heads, 1), strict=True)
        ):
            out[b, h] = (weights[: rows.shape[0]] @ columns).to(values.dtype)
    return out.view(bags * heads, -1) if bags else out.view(0, out.shape[2])


@triton.jit
def _bag(O, bag, N, L):  # type: ignore[no-untyped-def]
    """First row of a bag, end of those that a vector reaches, end."""
    begin = tl.minimum(tl.maximum(tl.load(O + bag).to(tl.int64), 0), N)
    end = tl.maximum(tl.minimum(tl.load(O + bag + 1).to(tl.int64), N), begin)
    return begin, tl.minimum(end, begin + L), end


@triton.jit(do_not_specialize=["N", "L"], do_not_specialize_on_alignment=["O"])
def _vector_product_kernel(  # type: ignore[no-untyped-def]
    V,
    X,
    O,
    Y,
    N,
    H,
    L,
    D,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    bag = lane // H
    begin, stop, _ = _bag(O, bag, N, L)
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    columns = X + (lane - bag * H) * D
    total = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    row = begin
    while row < stop:
        l = row + tl.arange(0, BLOCK_L)
        taken = l < stop
        v = tl.load(V + lane * L + (l - begin), mask=taken, other=0.0).to(tl.float32)
        there = columns + (l * H * D)[:, None] + d[None, :]
        total += v[:, None] * tl.load(there, mask=taken[:, None] & in_row[None, :], other=0.0).to(tl.float32)
        row += BLOCK_L
    tl.store(Y + lane * D + d, tl.sum(total, 0).to(Y.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["N", "B", "L"], do_not_specialize_on_alignment=["O"])
def _by_rows_kernel(  # type: ignore[no-untyped-def]
    G,
    V,
    O,
    Q,
    N,
    B,
    H,
    L,
    D,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    bag = lane // H
    # bag B is the rows past the last offset
    begin = tl.minimum(tl.maximum(tl.load(O + bag).to(tl.int64), 0), N)
    end = tl.minimum(tl.load(O + bag + 1, mask=bag < B, other=N).to(tl.int64), N)
    stop = tl.minimum(end, begin + tl.where(bag < B, L, 0))
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    g = tl.load(G + lane * D + d, mask=d < tl.where(bag < B, D, 0), other=0.0).to(tl.float32)
    columns = Q + (lane - bag * H) * D
    row = begin
    while row < end:
        l = row + tl.arange(0, BLOCK_L)
        v = tl.load(V + lane * L + (l - begin), mask=l < stop, other=0.0).to(tl.float32)
        q = tl.where((l < stop)[:, None], v[:, None] * g[None, :], 0.0)
        there = columns + (l * H * D)[:, None] + d[None, :]
        tl.store(there, q.to(Q.dtype.element_ty), mask=(l < end)[:, None] & in_row[None, :])
        row += BLOCK_L


@triton.jit(do_not_specialize=["N", "L"], do_not_specialize_on_alignment=["O"])
def _by_vectors_kernel(  # type: ignore[no-untyped-def]
    G,
    X,
    O,
    Q,
    N,
    H,
    L,
    D,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    bag = lane // H
    begin, stop, _ = _bag(O, bag, N, L)
    D = multiple(D, ALIGN)
    place = tl.program_id(1).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    taken = place < stop - begin
    columns = X + (lane - bag * H) * D + ((begin + place) * H * D)[:, None]
    dot = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        g = tl.load(G + lane * D + d, mask=d < D, other=0.0).to(tl.float32)
        x = tl.load(columns + d[None, :], mask=taken[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        dot += g[None, :] * x
    # a row that no weight has is 0, though the gradient may hold an Inf
    result = tl.where(taken, tl.sum(dot, 1), 0.0)
    tl.store(Q + lane * L + place, result.to(Q.dtype.element_ty), mask=place < L)


def jagged_vector_product(vectors: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """The rows of each bag added up with each head's weights; differentiable in `vectors` and `values`.

    Shapes: vectors [B*H, L], values [N, H*D] of one dtype (fp32, fp16, bf16 or fp64), offsets [B + 1] int32 or int64.
    H is what the rows of `vectors` say; of no bags 1.

    Returns:
        [B*H, D] in that dtype, added up in fp32 (fp64 of fp64). Rows of a bag from its L-th on take no part, nor do
        rows past the last offset.

    Raises:
        ValueError: shapes or devices that do not fit; on the CPU also offsets out of order or past the last row.
        TypeError: dtypes other than these.
    """
    op = "jagged_vector_product"
    check_bags(op, values, offsets)
    if vectors.dim() != 2:
        raise ValueError(f"{op}: vectors must be [B*H, L], got shape {list(vectors.shape)}")
    check_like(op, "vectors", vectors, "values", values)
    bags, heads = offsets.shape[0] - 1, heads_of(vectors, offsets)
    if heads < 1 or vectors.shape[0] != bags * heads:
        raise ValueError(f"{op}: the rows of vectors must be B*H for the {bags} bags, got {vectors.shape[0]}")
    if values.shape[1] % heads:
        raise ValueError(f"{op}: the columns of values must divide among {heads} heads, got {values.shape[1]}")
    if direct(vectors, values, offsets):
        return _product(vectors, values, offsets)
    if eager(vectors, values, offsets):
        return _eager(vectors, values, offsets)
    return torch.ops.shardwise.jagged_vector_product(vectors, values, offsets)  # type: ignore[no-any-return]


def heads_of(vectors: Tensor, offsets: Tensor) -> int:
    """H of vectors [B*H, L]."""
    bags = offsets.shape[0] - 1
    return vectors.shape[0] // bags if bags else 1


def _product(vectors: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    heads = heads_of(vectors, offsets)
    if not (adds_in_fp32(values) and runs_kernel(values)):
        return vector_product_cpu(vectors, values, offsets, heads)
    lanes, length, dim = vectors.shape[0], vectors.shape[1], values.shape[1] // heads
    out = values.new_empty(lanes, dim)
    if out.numel() == 0:
        return out
    vectors, values, offsets = vectors.contiguous(), values.contiguous(), offsets.contiguous()
    block_l, block_d, warps = _tile(dim)
    _vector_product_kernel[(lanes, triton.cdiv(dim, block_d))](
        vectors, values, offsets, out, values.shape[0], heads, length, dim,
        block_l, block_d, _align(dim, values, out), num_warps=warps,
    )  # fmt: skip
    return out


def _by_rows(grad: Tensor, vectors: Tensor, offsets: Tensor, rows: int) -> Tensor:
    heads = heads_of(vectors, offsets)
    if not (adds_in_fp32(grad) and runs_kernel(grad)):
        return vector_product_by_rows_cpu(grad, vectors, offsets, heads, rows)
    length, dim, bags = vectors.shape[1], grad.shape[1], offsets.shape[0] - 1
    out = grad.new_empty(rows, heads * dim)
    if out.numel() == 0:
        return out
    grad, vectors, offsets = grad.contiguous(), vectors.contiguous(), offsets.contiguous()
    block_l, block_d, warps = _tile(dim)
    _by_rows_kernel[((bags + 1) * heads, triton.cdiv(dim, block_d))](
        grad, vectors, offsets, out, rows, bags, heads, length, dim,
        block_l, block_d, _align(dim, grad, out), num_warps=warps,
    )  # fmt: skip
    return out


def _by_vectors(grad: Tensor, values: Tensor, offsets: Tensor, length: int) -> Tensor:
    heads = heads_of(grad, offsets)
    if not (adds_in_fp32(values) and runs_kernel(values)):
        return vector_product_by_vectors_cpu(grad, values, offsets, heads, length)
    lanes, dim = grad.shape
    out = grad.new_empty(lanes, length)
    if out.numel() == 0:
        return out
    grad, values, offsets = grad.contiguous(), values.contiguous(), offsets.contiguous()
    block_l, block_d, warps = _tile(dim)
    _by_vectors_kernel[(lanes, triton.cdiv(length, block_l))](
        grad, values, offsets, out, values.shape[0], heads, length, dim,
        block_l, block_d, _align(dim, grad, values), num_warps=warps,
    )  # fmt: skip
    return out


def _tile(dim: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile: at least 8 rows, so that short bags are done in few steps."""
    block_d = min(128, next_power_of_2(dim))
    return max(8, min(128, _TILE // block_d)), block_d, 2 if block_d > 4 else 1


def _align(dim: int, *rows: Tensor) -> int:
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in rows)
    return row_alignment(dim, rows[0].itemsize) if aligned else 1


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    vectors, values, offsets = ctx.saved_tensors
    by_vectors = by_rows = None
    plain = direct(grad, vectors, values, offsets)
    if ctx.needs_input_grad[0]:
        vectors_op = _by_vectors if plain else torch.ops.shardwise.jagged_vector_product_by_vectors
        by_vectors = vectors_op(grad, values, offsets, vectors.shape[1])
    if ctx.needs_input_grad[1]:
        rows_op = _by_rows if plain else torch.ops.shardwise.jagged_vector_product_by_rows
        by_rows = rows_op(grad, vectors, offsets, values.shape[0])
    return by_vectors, by_rows, None


_eager = function_of(_product, _setup_context, _backward)


register_autograd(
    register(
        "jagged_vector_product(Tensor vectors, Tensor values, Tensor offsets) -> Tensor",
        _product,
        lambda vectors, values, offsets: values.new_empty(
            vectors.shape[0], values.shape[1] // heads_of(vectors, offsets)
        ),
    ),
    _backward,
    _setup_context,
)


def _setup_of_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # the gradient, what it was multiplied by, and the offsets; not how many rows come out
    ctx.save_for_backward(*inputs[:3])


def _backward_by_rows(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    grad, vectors, offsets = ctx.saved_tensors
    by_grad = by_vectors = None
    # the product, contracted with G, is linear in each of G, V and X: gradients of one's gradient are those of the rest
    if ctx.needs_input_grad[0]:
        by_grad = torch.ops.shardwise.jagged_vector_product(vectors, upstream, offsets)
    if ctx.needs_input_grad[1]:
        by_vectors = torch.ops.shardwise.jagged_vector_product_by_vectors(grad, upstream, offsets, vectors.shape[1])
    return by_grad, by_vectors, None, None


def _backward_by_vectors(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    grad, values, offsets = ctx.saved_tensors
    by_grad = by_values = None
    if ctx.needs_input_grad[0]:
        by_grad = torch.ops.shardwise.jagged_vector_product(upstream, values, offsets)
    if ctx.needs_input_grad[1]:
        by_values = torch.ops.shardwise.jagged_vector_product_by_rows(grad, upstream, offsets, values.shape[0])
    return by_grad, by_values, None, None


register_autograd(
    register(
        "jagged_vector_product_by_rows(Tensor grad, Tensor vectors, Tensor offsets, SymInt rows) -> Tensor",
        _by_rows,
        lambda grad, vectors, offsets, rows: grad.new_empty(rows, heads_of(vectors, offsets) * grad.shape[1]),
    ),
    _backward_by_rows,
    _setup_of_gradient,
)
register_autograd(
    register(
        "jagged_vector_product_by_vectors(Tensor grad, Tensor values, Tensor offsets, SymInt length) -> Tensor",
        _by_vectors,
        lambda grad, values, offsets, length: grad.new_empty(grad.shape[0], length),
    ),
    _backward_by_vectors,
    _setup_of_gradient,
)
