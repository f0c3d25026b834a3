"""Bags of rows times a matrix each, and the product of two lots of rows bag by bag: each is the other's gradient.

Shapes: X [N, M] and Y [N, K] rows, O [B + 1] offsets, W [B, M, K] matrices.
`jagged_dense_bmm` gives row n of bag b as X[n] W[b]: [N, K]; `jagged_jagged_bmm` the sum over a bag's rows of the outer
product of X[n] and Y[n]: [B, M, K]. As FBGEMM's ops of these names, but rows that take no part are defined, as 0.
Bytes moved: of `jagged_dense_bmm` N * (M + K) * itemsize, and B * M * K * itemsize where no bag is longer than a tile
of rows; of `jagged_jagged_bmm` the same where M and K are at most a tile (64). N bounds both: a tile reads the matrix
of each bag that it meets, and finds these bags by a search over the offsets.
Each element of a result is added up by one program, rows in order in steps of 32, columns in steps of the tile; fp32
products are not rounded to TF32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
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
    dense_bmm_cpu,
    jagged_bmm_cpu,
    limit_of,
    require_offsets,
)
from ..features import row_alignment
from .rows import (
    adds_in_fp32,
    check_bags,
    check_like,
    function_of,
)

_TILE = 16 if INTERPRETED else 64
# rows that a step of the sum over a bag adds: part of the order of addition
_STEP = 32


def jagged_dense_bmm_ref(
    values: Tensor, offsets: Tensor, dense: Tensor, max_length: int | None = None, transposed: bool = False
) -> Tensor:
    """Y[n] = X[n] W[b], or X[n] W[b]^T where transposed, for the first `max_length` rows n of each bag b; else 0."""
    matrices = dense.transpose(1, 2) if transposed else dense
    wide, limit, bounds = accumulator(values.dtype), limit_of(max_length, values.shape[0]), offsets.tolist()
    out = values.new_zeros(values.shape[0], matrices.shape[2])
    for b in range(dense.shape[0]):
        begin, end = bounds[b], min(bounds[b + 1], bounds[b] + limit)
        out[begin:end] = (values[begin:end].to(wide) @ matrices[b].to(wide)).to(values.dtype)
    return out


def jagged_jagged_bmm_ref(x: Tensor, y: Tensor, offsets: Tensor, max_length: int | None = None) -> Tensor:
    """W[b] = X[bag b]^T Y[bag b] over the first `max_length` rows of each bag."""
    wide, limit, bounds = accumulator(x.dtype), limit_of(max_length, x.shape[0]), offsets.tolist()
    out = x.new_zeros(offsets.shape[0] - 1, x.shape[1], y.shape[1])
    for b in range(out.shape[0]):
        begin, end = bounds[b], min(bounds[b + 1], bounds[b] + limit)
        out[b] = (x[begin:end].to(wide).t() @ y[begin:end].to(wide)).to(x.dtype)
    return out


@triton.jit
def _dot(a, b, total, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    # the interpreter would multiply the bits of bf16 as integers
    if WIDE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _bag_of(O, row, B):  # type: ignore[no-untyped-def]
    """The last of B bags that begins at or before a row, one number; the first where none does."""
    low = row * 0
    high = low + B
    # of a known number of steps the compiler would do four at a time, and spill (triton 3.7.1, sm_80)
    while high - low > 1:
        middle = (low + high) // 2
        right = tl.load(O + middle).to(tl.int64) <= row
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit(do_not_specialize=["N", "B", "limit"], do_not_specialize_on_alignment=["O"])
def _dense_bmm_kernel(  # type: ignore[no-untyped-def]
    X,
    O,
    W,
    Y,
    N,
    B,
    M,
    K,
    limit,
    WIDE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    M_ALIGN: tl.constexpr,
    K_ALIGN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_L
    stop = tl.minimum(row + BLOCK_L, N)
    end = tl.minimum(tl.load(O + B).to(tl.int64), stop)
    l = row + tl.arange(0, BLOCK_L)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    M = multiple(M, M_ALIGN)
    K = multiple(K, K_ALIGN)
    in_k = k < K
    while row < end:
        bag = _bag_of(O, row, B)
        begin = tl.load(O + bag).to(tl.int64)
        # offsets out of order must end the loop too
        then = tl.maximum(tl.minimum(tl.load(O + bag + 1).to(tl.int64), end), row + 1)
        in_bag = (l >= row) & (l < then)
        taken = in_bag & (l - begin < limit)
        total = tl.zeros((BLOCK_L, BLOCK_K), tl.float32)
        for m0 in range(0, M, BLOCK_M):
            m = m0 + tl.arange(0, BLOCK_M)
            in_m = m < M
            x = tl.load(X + (l * M)[:, None] + m[None, :], mask=taken[:, None] & in_m[None, :], other=0.0)
            if TRANSPOSED:
                there = W + bag * K * M + (k.to(tl.int64) * M)[:, None] + m[None, :]
                w = tl.trans(tl.load(there, mask=in_k[:, None] & in_m[None, :], other=0.0))
            else:
                there = W + bag * M * K + (m.to(tl.int64) * K)[:, None] + k[None, :]
                w = tl.load(there, mask=in_m[:, None] & in_k[None, :], other=0.0)
            total = _dot(x, w, total, WIDE)
        # a zero row times an Inf of the matrix is NaN
        total = tl.where(taken[:, None], total, 0.0)
        tl.store(Y + (l * K)[:, None] + k[None, :], total.to(Y.dtype.element_ty), mask=in_bag[:, None] & in_k[None, :])
        row = then
    rest = (l >= row) & (l < stop)
    nothing = tl.zeros((BLOCK_L, BLOCK_K), Y.dtype.element_ty)
    tl.store(Y + (l * K)[:, None] + k[None, :], nothing, mask=rest[:, None] & in_k[None, :])


@triton.jit(do_not_specialize=["N", "limit"], do_not_specialize_on_alignment=["O"])
def _jagged_bmm_kernel(  # type: ignore[no-untyped-def]
    X,
    Y,
    O,
    W,
    N,
    M,
    K,
    limit,
    WIDE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    M_ALIGN: tl.constexpr,
    K_ALIGN: tl.constexpr,
):
    bag = tl.program_id(0).to(tl.int64)
    begin = tl.maximum(tl.load(O + bag).to(tl.int64), 0)
    end = tl.minimum(tl.minimum(tl.load(O + bag + 1).to(tl.int64), N), begin + limit)
    M = multiple(M, M_ALIGN)
    K = multiple(K, K_ALIGN)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_m = m < M
    in_k = k < K
    total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    row = begin
    while row < end:
        l = row + tl.arange(0, STEP)
        taken = l < end
        x = tl.load(X + (l * M)[:, None] + m[None, :], mask=taken[:, None] & in_m[None, :], other=0.0)
        y = tl.load(Y + (l * K)[:, None] + k[None, :], mask=taken[:, None] & in_k[None, :], other=0.0)
        total = _dot(tl.trans(x), y, total, WIDE)
        row += STEP
    there = W + bag * M * K + (m.to(tl.int64) * K)[:, None] + k[None, :]
    tl.store(there, total.to(W.dtype.element_ty), mask=in_m[:, None] & in_k[None, :])


def jagged_dense_bmm(values: Tensor, offsets: Tensor, dense: Tensor, max_length: int | None = None) -> Tensor:
    """Each row times the matrix of its bag; differentiable in `values` and `dense`.

    Shapes: values [N, M], offsets [B + 1] int32 or int64, dense [B, M, K] of values' dtype (fp32, fp16, bf16 or fp64).

    Returns:
        [N, K] in that dtype, added up in fp32 (fp64 of fp64); 0 for rows past the last offset and for those of a bag
        from its `max_length`-th on.

    Raises:
        ValueError: shapes or devices that do not fit; on the CPU also offsets out of order or past the last row.
        TypeError: dtypes other than these.
    """
    check_bags("jagged_dense_bmm", values, offsets, max_length)
    _check_dense(values, offsets, dense)
    if direct(values, offsets, dense):
        return _dense_bmm(values, offsets, dense, max_length, False)
    if eager(values, offsets, dense):
        return _eager_dense(values, offsets, dense, max_length, False)
    return torch.ops.shardwise.jagged_dense_bmm(values, offsets, dense, max_length, False)  # type: ignore[no-any-return]


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, max_length: int | None = None) -> Tensor:
    """The transposed rows of each bag of `x` times those of `y`; differentiable in both.

    Shapes: x [N, M], y [N, K] of one dtype (fp32, fp16, bf16 or fp64), offsets [B + 1] int32 or int64. Rows past the
    last offset take no part, nor do those of a bag from its `max_length`-th on.

    Returns:
        [B, M, K] in that dtype, added up in fp32 (fp64 of fp64).

    Raises:
        ValueError: shapes or devices that do not fit; on the CPU also offsets out of order or past the last row.
        TypeError: dtypes other than these.
    """
    check_bags("jagged_jagged_bmm", x, offsets, max_length, name="x")
    if y.dim() != 2 or y.shape[0] != x.shape[0]:
        raise ValueError(f"jagged_jagged_bmm: y must be [{x.shape[0]}, K] with the rows of x, got {list(y.shape)}")
    check_like("jagged_jagged_bmm", "y", y, "x", x)
    if direct(x, y, offsets):
        return _jagged_bmm(x, y, offsets, max_length)
    if eager(x, y, offsets):
        return _eager_jagged(x, y, offsets, max_length)
    return torch.ops.shardwise.jagged_jagged_bmm(x, y, offsets, max_length)  # type: ignore[no-any-return]


def _check_dense(values: Tensor, offsets: Tensor, dense: Tensor) -> None:
    bags, columns = offsets.shape[0] - 1, values.shape[1]
    if dense.dim() != 3 or dense.shape[0] != bags or dense.shape[1] != columns:
        raise ValueError(
            f"jagged_dense_bmm: dense must be [{bags}, {columns}, K], a matrix for each bag with a row for each column"
            f" of values, got {list(dense.shape)}"
        )
    check_like("jagged_dense_bmm", "dense", dense, "values", values)


def _dense_bmm(values: Tensor, offsets: Tensor, dense: Tensor, max_length: int | None, transposed: bool) -> Tensor:
    if not (adds_in_fp32(values) and runs_kernel(values)):
        require_offsets("jagged_dense_bmm", offsets, values.shape[0])
        return dense_bmm_cpu(values, offsets, dense, max_length, transposed)
    rows, bags, columns = values.shape[0], dense.shape[0], dense.shape[1 if transposed else 2]
    out = values.new_empty(rows, columns)
    if out.numel() == 0 or bags == 0:
        return out.zero_()
    values, offsets, dense = values.contiguous(), offsets.contiguous(), dense.contiguous()
    inner = values.shape[1]
    # more rows than a usual bag has would be multiplied by its matrix for nothing
    block_l = max(16, min(_TILE, next_power_of_2(rows // bags)))
    block_m, block_k = _block(inner, 64 // values.itemsize), _block(columns, _TILE)
    align, inner_align = _align(out, columns), _align(values, inner)
    warps = _warps(block_l, block_m, block_k, values.itemsize)
    if align * values.itemsize < 16 and block_l * block_k == _TILE**2:
        # an address for each element of a tile is too much for the registers of few threads, for AMD's of masks (fp32,
        # triton 3.9.0) and for the 128 that sm_100's compiler leaves to a product of 16-bit numbers
        warps, block_k = 8, max(16, block_k // 2)
    elif values.itemsize == 4 and inner_align < 4 and (block_l, block_k) == (16, _TILE):
        # of wider tiles ptxas spills a word or two on one target or another
        warps, block_k = 4, 16
    grid = (triton.cdiv(rows, block_l), triton.cdiv(columns, block_k))
    _dense_bmm_kernel[grid](
        values, offsets, dense, out, rows, bags, inner, columns, limit_of(max_length, rows),
        INTERPRETED, transposed, block_l, block_m, block_k,
        inner_align, align, num_warps=warps,
    )  # fmt: skip
    return out


def _jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, max_length: int | None) -> Tensor:
    if not (adds_in_fp32(x) and runs_kernel(x)):
        require_offsets("jagged_jagged_bmm", offsets, x.shape[0])
        return jagged_bmm_cpu(x, y, offsets, max_length)
    rows, left, right = x.shape[0], x.shape[1], y.shape[1]
    out = x.new_empty(offsets.shape[0] - 1, left, right)
    if out.numel() == 0:
        return out
    x, y, offsets = x.contiguous(), y.contiguous(), offsets.contiguous()
    block_m, block_k = _block(left, _TILE), _block(right, _TILE)
    grid = (out.shape[0], triton.cdiv(left, block_m), triton.cdiv(right, block_k))
    x_align, y_align = _align(x, left), _align(y, right)
    warps = _warps(block_m, _STEP, block_k, 2)
    if min(x_align, y_align) * x.itemsize < 16 and x.itemsize == 4 and block_m * block_k == _TILE**2:
        # as above: 221 registers of 4 warps (triton 3.9.0, sm_80)
        warps = 8
    _jagged_bmm_kernel[grid](
        x, y, offsets, out, rows, left, right, limit_of(max_length, rows),
        INTERPRETED, _STEP, block_m, block_k, x_align, y_align, num_warps=warps,
    )  # fmt: skip
    return out


def _block(columns: int, most: int) -> int:
    """Columns of a tile; a product of tiles takes at least 16."""
    return max(16, min(most, next_power_of_2(columns)))


def _warps(rows: int, inner: int, columns: int, itemsize: int) -> int:
    """By the larger of two tiles; products of fp32 hold much of both in registers, and spill where these are few."""
    return itemsize * 2 if max(rows, inner) * columns >= 1024 else 1


def _align(rows: Tensor, columns: int) -> int:
    return row_alignment(columns, rows.itemsize) if rows.data_ptr() % 16 == 0 else 1


def _dense_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, dense, ctx.max_length, ctx.transposed = inputs
    ctx.save_for_backward(values, offsets, dense)


def _dense_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    values, offsets, dense = ctx.saved_tensors
    by_values = by_dense = None
    dense_bmm, jagged_bmm = _operators(grad, values, offsets, dense)
    if ctx.needs_input_grad[0]:
        by_values = dense_bmm(grad, offsets, dense, ctx.max_length, not ctx.transposed)
    if ctx.needs_input_grad[2]:
        pair = (grad, values) if ctx.transposed else (values, grad)
        by_dense = jagged_bmm(*pair, offsets, ctx.max_length)
    return by_values, None, by_dense, None, None


def _jagged_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, offsets, ctx.max_length = inputs
    ctx.save_for_backward(x, y, offsets)


def _jagged_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, y, offsets = ctx.saved_tensors
    by_x = by_y = None
    dense_bmm, _ = _operators(grad, x, y, offsets)
    if ctx.needs_input_grad[0]:
        by_x = dense_bmm(y, offsets, grad, ctx.max_length, True)
    if ctx.needs_input_grad[1]:
        by_y = dense_bmm(x, offsets, grad, ctx.max_length, False)
    return by_x, by_y, None, None


def _operators(*tensors: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Both ops, past the dispatcher where these tensors permit it."""
    if direct(*tensors):
        return _dense_bmm, _jagged_bmm
    return torch.ops.shardwise.jagged_dense_bmm, torch.ops.shardwise.jagged_jagged_bmm


_eager_dense = function_of(_dense_bmm, _dense_context, _dense_backward)
_eager_jagged = function_of(_jagged_bmm, _jagged_context, _jagged_backward)


register_autograd(
    register(
        "jagged_dense_bmm(Tensor values, Tensor offsets, Tensor dense, SymInt? max_length, bool transposed) -> Tensor",
        _dense_bmm,
        lambda values, offsets, dense, max_length, transposed: values.new_empty(
            values.shape[0], dense.shape[1 if transposed else 2]
        ),
    ),
    _dense_backward,
    _dense_context,
)
register_autograd(
    register(
        "jagged_jagged_bmm(Tensor x, Tensor y, Tensor offsets, SymInt? max_length) -> Tensor",
        _jagged_bmm,
        lambda x, y, offsets, max_length: x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1]),
    ),
    _jagged_backward,
    _jagged_context,
)
