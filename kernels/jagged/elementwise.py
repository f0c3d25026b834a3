"""Sums and products of jagged values with a padded dense tensor, or with jagged values of the same bags.

Shapes: V [N, D] values, O_1 ... O_n offsets, X [B, M_1, ..., M_n, D] a dense, as in padded.py; one kernel moves and
calculates. Two jagged values of the same bags are multiplied by torch, which can be no faster.
Bytes moved: those of padded.py, and X once more for a sum that is dense, the values that have a place once more for a
product of two jagged, V once more for a sum that is jagged, and its values that have a place for such a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._op import (
    direct,
    eager,
    register,
    register_autograd,
    runs_kernel,
)
from ..cpu import padded as cpu_padded
from .padded import (
    ADD,
    MULTIPLY,
    check_dense,
    check_extents,
    check_offsets,
    dense_shape,
    for_each_offset,
    jagged_to_padded_dense,
    jagged_to_padded_dense_ref,
    launch_to_jagged,
    launch_to_padded,
    padded_dense_to_jagged,
    padded_dense_to_jagged_ref,
    places_ref,
)


def jagged_dense_add_ref(values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
    """X plus the values at their places."""
    return jagged_to_padded_dense_ref(values, offsets, dense.shape[1 : len(offsets) + 1]) + dense


def jagged_dense_add_jagged_ref(values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
    """V plus X at its places."""
    return values + padded_dense_to_jagged_ref(dense, offsets, values.shape[0])


def jagged_dense_mul_ref(values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
    """V times X at its places, 0 where it has none."""
    held = places_ref(offsets, dense.shape[1 : len(offsets) + 1], values.shape[0]) >= 0
    held = held.view(-1, *[1] * (values.dim() - 1))
    return torch.where(held, values * padded_dense_to_jagged_ref(dense, offsets, values.shape[0]), 0)


def padded_jagged_product_ref(x: Tensor, y: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int]) -> Tensor:
    """The products of two jagged values at their places, 0 elsewhere."""
    return jagged_to_padded_dense_ref(x * y, offsets, max_lengths)


def jagged_dense_add(values: Tensor, offsets: Sequence[Tensor] | Tensor, dense: Tensor) -> Tensor:
    """The dense tensor, with each value added at its place; values that are cut off are left out.

    Shapes: values [N, ...], offsets as in `jagged_to_padded_dense`, dense [B, M_1, ..., M_n, ...].

    Returns:
        A tensor like dense; differentiable in values and dense.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit; on the CPU also for bad offsets.
    """
    offsets = _checked(values, offsets, dense)
    if direct(values, dense, *offsets):
        return _jagged_dense_add(values, offsets, dense)
    if eager(values, dense, *offsets):
        return _AddDense.apply(values, offsets, dense)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.shardwise.jagged_dense_add(values, offsets, dense)  # type: ignore[no-any-return]


def jagged_dense_add_jagged(values: Tensor, offsets: Sequence[Tensor] | Tensor, dense: Tensor) -> Tensor:
    """Each value plus what the dense tensor holds at its place; values that are cut off stay as they are.

    Shapes as in `jagged_dense_add`: values [N, ...], dense [B, M_1, ..., M_n, ...].

    Returns:
        A tensor like values; differentiable in values and dense.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit; on the CPU also for bad offsets.
    """
    offsets = _checked(values, offsets, dense)
    if direct(values, dense, *offsets):
        return cpu_padded.jagged_with_dense(values, offsets, dense, multiply=False)
    if eager(values, dense, *offsets):
        return _AddJagged.apply(values, offsets, dense)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.shardwise.jagged_dense_add_jagged(values, offsets, dense)  # type: ignore[no-any-return]


def jagged_dense_mul(values: Tensor, offsets: Sequence[Tensor] | Tensor, dense: Tensor) -> Tensor:
    """Each value times what the dense tensor holds at its place; 0 for values that are cut off or in no bag.

    Shapes as in `jagged_dense_add`: values [N, ...], dense [B, M_1, ..., M_n, ...].

    Returns:
        A tensor like values; differentiable in values and dense.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit; on the CPU also for bad offsets.
    """
    offsets = _checked(values, offsets, dense)
    if direct(values, dense, *offsets):
        return cpu_padded.jagged_with_dense(values, offsets, dense, multiply=True)
    if eager(values, dense, *offsets):
        return _Multiply.apply(values, offsets, dense)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.shardwise.jagged_dense_mul(values, offsets, dense)  # type: ignore[no-any-return]


def jagged_jagged_mul(x: Tensor, y: Tensor, offsets: Sequence[Tensor] | Tensor) -> Tensor:
    """The products of two jagged values of the same bags: torch's own product, after checks. Offsets are not read.

    Shapes: x and y [N, ...], offsets as in `jagged_to_padded_dense`.

    Returns:
        A tensor like x; differentiable in both.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit.
    """
    check_offsets("x", x, [offsets] if isinstance(offsets, Tensor) else list(offsets))
    _check_alike("x", x, "y", y)
    return x * y


def _padded_product(x: Tensor, y: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int]) -> Tensor:
    """The products of two jagged values of the same bags as a padded dense: what the gradient of a dense factor is."""
    offsets, max_lengths = list(offsets), list(max_lengths)
    check_extents(offsets, max_lengths)
    if eager(x, y, *offsets):
        return jagged_to_padded_dense(x * y, offsets, max_lengths)
    return torch.ops.shardwise.padded_jagged_product(x, y, offsets, max_lengths)  # type: ignore[no-any-return]


def _checked(values: Tensor, offsets: Sequence[Tensor] | Tensor, dense: Tensor) -> list[Tensor]:
    offsets = [offsets] if isinstance(offsets, Tensor) else list(offsets)
    check_offsets("values", values, offsets)
    check_dense(dense, offsets)
    if dense.dtype is not values.dtype:
        raise TypeError(f"dense must have the dtype of values, {values.dtype}, got {dense.dtype}")
    if dense.device != values.device:
        raise ValueError(f"dense is on {dense.device}, values on {values.device}: move one of them")
    if dense.shape[len(offsets) + 1 :] != values.shape[1:]:
        raise ValueError(
            f"dense must end in the dims of values after {len(offsets) + 1} others: values have shape"
            f" {list(values.shape)}, dense {list(dense.shape)}"
        )
    return offsets


def _check_alike(x_name: str, x: Tensor, y_name: str, y: Tensor) -> None:
    if x.dtype is not y.dtype:
        raise TypeError(f"{y_name} must have the dtype of {x_name}, {x.dtype}, got {y.dtype}")
    if x.device != y.device:
        raise ValueError(f"{y_name} is on {y.device}, {x_name} on {x.device}: move one of them")
    if x.shape != y.shape:
        raise ValueError(f"{y_name} must have the shape of {x_name}, {list(x.shape)}, got {list(y.shape)}")


def _jagged_dense_add(values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
    extents = dense.shape[1 : len(offsets) + 1]
    if runs_kernel(values):
        cpu_padded.require_offsets_on_cpu(offsets, values.shape[0])
        return launch_to_padded(values, dense, offsets, extents, mode=ADD)
    if values.is_cuda:
        return jagged_dense_add_ref(values, offsets, dense)
    return cpu_padded.dense_with_jagged(values, offsets, dense)


def _jagged_dense_add_jagged(values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
    if runs_kernel(values):
        cpu_padded.require_offsets_on_cpu(offsets, values.shape[0])
        return launch_to_jagged(dense, values, offsets, values.shape[0], ADD)
    if values.is_cuda:
        return jagged_dense_add_jagged_ref(values, offsets, dense)
    return cpu_padded.jagged_with_dense(values, offsets, dense, multiply=False)


def _jagged_dense_mul(values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
    if runs_kernel(values):
        cpu_padded.require_offsets_on_cpu(offsets, values.shape[0])
        return launch_to_jagged(dense, values, offsets, values.shape[0], MULTIPLY)
    if values.is_cuda:
        return jagged_dense_mul_ref(values, offsets, dense)
    return cpu_padded.jagged_with_dense(values, offsets, dense, multiply=True)


def _padded_jagged_product(x: Tensor, y: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int]) -> Tensor:
    if runs_kernel(x):
        cpu_padded.require_offsets_on_cpu(offsets, x.shape[0])
        return launch_to_padded(x, y, offsets, max_lengths, mode=MULTIPLY)
    if x.is_cuda:
        return padded_jagged_product_ref(x, y, offsets, max_lengths)
    return cpu_padded.to_padded(x * y, offsets, max_lengths, 0.0)


class _AddDense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
        ctx.save_for_backward(*offsets)
        ctx.total = values.shape[0]
        return cpu_padded.dense_with_jagged(values, offsets, dense)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _backward_add(ctx, grads[0])


class _AddJagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
        ctx.save_for_backward(*offsets)
        ctx.max_lengths = dense.shape[1 : len(offsets) + 1]
        return cpu_padded.jagged_with_dense(values, offsets, dense, multiply=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        by_dense = None
        if ctx.needs_input_grad[2]:
            by_dense = jagged_to_padded_dense(grads[0], ctx.saved_tensors, ctx.max_lengths)
        return grads[0], None, by_dense


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
        ctx.save_for_backward(values, dense, *offsets)
        return cpu_padded.jagged_with_dense(values, offsets, dense, multiply=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        values, dense, *offsets = ctx.saved_tensors
        by_values = by_dense = None
        if ctx.needs_input_grad[0]:
            by_values = jagged_dense_mul(grads[0], offsets, dense)
        if ctx.needs_input_grad[2]:
            by_dense = _padded_product(grads[0], values, offsets, dense.shape[1 : len(offsets) + 1])
        return by_values, None, by_dense


def _setup_extents(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, dense = inputs
    ctx.save_for_backward(*offsets)
    ctx.dims, ctx.total = len(offsets), values.shape[0]
    ctx.max_lengths = dense.shape[1 : ctx.dims + 1]


def _setup_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, dense = inputs
    ctx.save_for_backward(values, dense, *offsets)
    ctx.dims = len(offsets)


def _setup_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, offsets, _ = inputs
    ctx.save_for_backward(x, y, *offsets)
    ctx.dims = len(offsets)


def _backward_add(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    by_values = None
    if ctx.needs_input_grad[0]:
        by_values = padded_dense_to_jagged(grad, ctx.saved_tensors, ctx.total)
    return by_values, None, grad


def _backward_product(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, y, *offsets = ctx.saved_tensors
    by_x = jagged_dense_mul(y, offsets, grad) if ctx.needs_input_grad[0] else None
    by_y = jagged_dense_mul(x, offsets, grad) if ctx.needs_input_grad[1] else None
    return by_x, by_y, None, None


def _like(index: int) -> Any:
    return lambda *inputs: torch.empty_like(inputs[index], memory_format=torch.contiguous_format)


_JAGGED_AND_DENSE = "(Tensor values, Tensor[] offsets, Tensor dense) -> Tensor"
register_autograd(
    register(f"jagged_dense_add{_JAGGED_AND_DENSE}", _jagged_dense_add, _like(2)),
    for_each_offset(1, _backward_add),
    _setup_extents,
)
register_autograd(
    register(f"jagged_dense_add_jagged{_JAGGED_AND_DENSE}", _jagged_dense_add_jagged, _like(0)),
    for_each_offset(1, _AddJagged.backward),
    _setup_extents,
)
register_autograd(
    register(f"jagged_dense_mul{_JAGGED_AND_DENSE}", _jagged_dense_mul, _like(0)),
    for_each_offset(1, _Multiply.backward),
    _setup_factors,
)
register_autograd(
    register(
        "padded_jagged_product(Tensor x, Tensor y, Tensor[] offsets, SymInt[] max_lengths) -> Tensor",
        _padded_jagged_product,
        lambda x, y, offsets, max_lengths: x.new_empty(dense_shape(x, offsets, max_lengths)),
    ),
    for_each_offset(2, _backward_product),
    _setup_product,
)
