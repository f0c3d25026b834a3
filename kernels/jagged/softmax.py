"""Softmax over the rows of each bag, column by column.

Shapes: X [N, D] rows, O [B + 1] offsets, Y [N, D] the softmax; G its upstream gradient, Q the gradient by X, like X.
Bytes moved: forward 3 * N * D * itemsize (X twice, Y), backward 5 * N * D * itemsize (G and Y twice, Q), and the
offsets for each block of columns.
One program does a bag, in steps of a tile of rows; it keeps maxima and sums for each row of the tile and joins them at
the end, so a column's order of addition follows from D alone.
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
    limit_of,
    softmax_cpu,
    softmax_gradient_cpu,
)
from ..features import row_alignment
from .rows import adds_in_fp32, check_bags, function_of

# elements of a tile, at two warps
_TILE = 1024


def jagged_softmax_ref(values: Tensor, offsets: Tensor, max_length: int | None = None) -> Tensor:
    """Y = softmax of each bag's first `max_length` rows along the rows; 0 for all other rows."""
    limit, bounds = limit_of(max_length, values.shape[0]), offsets.tolist()
    out = torch.zeros_like(values)
    for b in range(len(bounds) - 1):
        begin, end = bounds[b], min(bounds[b + 1], bounds[b] + limit)
        out[begin:end] = values[begin:end].to(accumulator(values.dtype)).softmax(0).to(values.dtype)
    return out


@triton.jit
def _bounds(O, bag, B, N, limit):  # type: ignore[no-untyped-def]
    """First row of a bag, end of those that take part, end; bag B is the rows past the last offset."""
    begin = tl.minimum(tl.maximum(tl.load(O + bag).to(tl.int64), 0), N)
    end = tl.minimum(tl.load(O + bag + 1, mask=bag < B, other=N).to(tl.int64), N)
    # max_length is at most N
    taken = tl.where(bag < B, limit, 0)
    return begin, tl.maximum(tl.minimum(end, begin + taken), begin), end


@triton.jit(do_not_specialize=["N", "B", "limit"], do_not_specialize_on_alignment=["O"])
def _softmax_kernel(  # type: ignore[no-untyped-def]
    X,
    O,
    Y,
    N,
    B,
    D,
    limit,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    begin, stop, end = _bounds(O, tl.program_id(0).to(tl.int64), B, N, limit)
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = (d < D)[None, :]
    step = tl.arange(0, BLOCK_L)
    top = tl.full((BLOCK_L, BLOCK_D), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    row = begin
    while row < stop:
        l = row + step
        x = tl.load(X + (l * D)[:, None] + d[None, :], mask=(l < stop)[:, None] & in_row, other=float("-inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(top, x)
        # nothing but -inf so far: -inf less -inf would be NaN
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = higher
        row += BLOCK_L
    highest = tl.max(top, 0)  # [BLOCK_D]
    highest = tl.where(highest == float("-inf"), 0.0, highest)[None, :]
    # of a column of nothing but -inf 0 / 0 is left, as torch has it
    share = tl.sum(total * tl.exp(top - highest), 0)[None, :]  # [1, BLOCK_D]
    row = begin
    while row < end:
        l = row + step
        taken = (l < stop)[:, None]
        x = tl.load(X + (l * D)[:, None] + d[None, :], mask=taken & in_row, other=0.0).to(tl.float32)
        y = tl.where(taken, tl.exp(x - highest) / share, 0.0)
        tl.store(Y + (l * D)[:, None] + d[None, :], y.to(Y.dtype.element_ty), mask=(l < end)[:, None] & in_row)
        row += BLOCK_L


@triton.jit(do_not_specialize=["N", "B", "limit"], do_not_specialize_on_alignment=["O"])
def _softmax_gradient_kernel(  # type: ignore[no-untyped-def]
    G,
    Y,
    O,
    Q,
    N,
    B,
    D,
    limit,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    begin, stop, end = _bounds(O, tl.program_id(0).to(tl.int64), B, N, limit)
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = (d < D)[None, :]
    step = tl.arange(0, BLOCK_L)
    total = tl.zeros((BLOCK_L, BLOCK_D), tl.float32)
    row = begin
    while row < stop:
        l = row + step
        there = (l * D)[:, None] + d[None, :]
        g = tl.load(G + there, mask=(l < stop)[:, None] & in_row, other=0.0).to(tl.float32)
        y = tl.load(Y + there, mask=(l < stop)[:, None] & in_row, other=0.0).to(tl.float32)
        total += g * y
        row += BLOCK_L
    share = tl.sum(total, 0)[None, :]
    row = begin
    while row < end:
        l = row + step
        there = (l * D)[:, None] + d[None, :]
        taken = (l < stop)[:, None]
        g = tl.load(G + there, mask=taken & in_row, other=0.0).to(tl.float32)
        y = tl.load(Y + there, mask=taken & in_row, other=0.0).to(tl.float32)
        q = tl.where(taken, y * (g - share), 0.0)
        tl.store(Q + there, q.to(Q.dtype.element_ty), mask=(l < end)[:, None] & in_row)
        row += BLOCK_L


def jagged_softmax(values: Tensor, offsets: Tensor, max_length: int | None = None) -> Tensor:
    """Softmax over the rows of each bag, each column by itself; differentiable in `values`.

    Shapes: values [N, D] fp32, fp16, bf16 or fp64, offsets [B + 1] int32 or int64.

    Returns:
        [N, D] in values' dtype, computed in fp32 (fp64 of fp64). 0 for rows past the last offset and for those of a bag
        from its `max_length`-th on. A column of a bag that is -inf in every row, or +inf in one, is NaN, as torch's.

    Raises:
        ValueError: shapes or devices that do not fit; on the CPU also offsets out of order or past the last row.
        TypeError: dtypes other than these.
    """
    check_bags("jagged_softmax", values, offsets, max_length)
    if direct(values, offsets):
        return _softmax(values, offsets, max_length)
    if eager(values, offsets):
        return _eager(values, offsets, max_length)
    return torch.ops.shardwise.jagged_softmax(values, offsets, max_length)  # type: ignore[no-any-return]


def _softmax(values: Tensor, offsets: Tensor, max_length: int | None) -> Tensor:
    if not (adds_in_fp32(values) and runs_kernel(values)):
        return softmax_cpu(values, offsets, max_length)
    rows, columns = values.shape
    out = values.new_empty(rows, columns)
    if out.numel() == 0:
        return out
    values, offsets, bags = values.contiguous(), offsets.contiguous(), offsets.shape[0] - 1
    block_l, block_d, warps = _tile(columns)
    # the last program of a column block does the rows past the last offset
    _softmax_kernel[(bags + 1, triton.cdiv(columns, block_d))](
        values, offsets, out, rows, bags, columns, limit_of(max_length, rows),
        block_l, block_d, _align(columns, values), num_warps=warps,
    )  # fmt: skip
    return out


def _softmax_gradient(grad: Tensor, soft: Tensor, offsets: Tensor, max_length: int | None) -> Tensor:
    if not (adds_in_fp32(soft) and runs_kernel(soft)):
        return softmax_gradient_cpu(grad, soft, offsets, max_length)
    rows, columns = soft.shape
    out = soft.new_empty(rows, columns)
    if out.numel() == 0:
        return out
    grad, soft, offsets, bags = grad.contiguous(), soft.contiguous(), offsets.contiguous(), offsets.shape[0] - 1
    block_l, block_d, warps = _tile(columns)
    _softmax_gradient_kernel[(bags + 1, triton.cdiv(columns, block_d))](
        grad, soft, offsets, out, rows, bags, columns, limit_of(max_length, rows),
        block_l, block_d, _align(columns, grad, soft), num_warps=warps,
    )  # fmt: skip
    return out


def _tile(columns: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a tile: at least 8 rows, so that short bags are done in few steps."""
    block_d = min(128, next_power_of_2(columns))
    return max(8, min(128, _TILE // block_d)), block_d, 2 if block_d > 4 else 1


def _align(columns: int, *rows: Tensor) -> int:
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in rows)
    return row_alignment(columns, rows[0].itemsize) if aligned else 1


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets, ctx.max_length = inputs
    ctx.save_for_backward(output, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    soft, offsets = ctx.saved_tensors
    gradient = _softmax_gradient if direct(grad, soft, offsets) else torch.ops.shardwise.jagged_softmax_gradient
    return gradient(grad, soft, offsets, ctx.max_length), None, None


_eager = function_of(_softmax, _setup_context, _backward)


register_autograd(
    register(
        "jagged_softmax(Tensor values, Tensor offsets, SymInt? max_length) -> Tensor",
        _softmax,
        lambda values, offsets, max_length: values.new_empty(values.shape),
    ),
    _backward,
    _setup_context,
)


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, soft, offsets, ctx.max_length = inputs
    ctx.save_for_backward(grad, soft, offsets)


def _backward_of_gradient(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    """Of Q = Y (G - sum of GY over the bag): by G the same of U, by Y it is U (G - sum of GY) - G (sum of UY)."""
    grad, soft, offsets = ctx.saved_tensors
    by_grad = by_soft = None
    if ctx.needs_input_grad[0]:
        by_grad = torch.ops.shardwise.jagged_softmax_gradient(upstream, soft, offsets, ctx.max_length)
    if ctx.needs_input_grad[1]:
        rows, ops = soft.shape[0], torch.ops.shardwise
        taken = _takes_part(offsets, rows, ctx.max_length)[:, None]
        # what stands in rows that take no part counts for nothing, whatever it is
        u, g, y = (torch.where(taken, t.to(accumulator(soft.dtype)), 0) for t in (upstream, grad, soft))

        def of_bag(x: Tensor) -> Tensor:
            return ops.segment_spread(offsets, ops.segment_sum(offsets, x * y, 1), rows, 1)  # type: ignore[no-any-return]

        by_soft = torch.where(taken, u * (g - of_bag(g)) - g * of_bag(u), 0).to(soft.dtype)
    return by_grad, by_soft, None, None


def _takes_part(offsets: Tensor, rows: int, max_length: int | None) -> Tensor:
    """Whether each row is one of the first `max_length` of a bag: [N]."""
    position = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    last = offsets.shape[0] - 1
    bag = torch.searchsorted(offsets, position, right=True) - 1
    inside = bag < last
    if max_length is not None:
        inside &= position - offsets[bag] < max_length
    return inside


register_autograd(
    register(
        "jagged_softmax_gradient(Tensor grad, Tensor soft, Tensor offsets, SymInt? max_length) -> Tensor",
        _softmax_gradient,
        lambda grad, soft, offsets, max_length: soft.new_empty(soft.shape),
    ),
    _backward_of_gradient,
    _setup_gradient,
)
