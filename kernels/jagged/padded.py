"""Jagged values as a padded dense tensor and back; the backward of each is the other.

Shapes: V [N, D] values; O_1 ... O_n offsets, one tensor for each jagged dim: O_1 [B + 1] counts bags of the next dim,
the last one counts values; M_1 ... M_n the dense extents; X [B, M_1, ..., M_n, D]. A leaf is one of the R = B * M_1 *
... * M_(n-1) rows of X that hold a bag of values: M_n * D consecutive elements. Values past the last offset are in no
bag. kept: the values of V that have a place in X. Any trailing shape stands for D, none for D = 1.
Bytes moved: to padded kept * D * itemsize + R * M_n * D * itemsize, and two offsets of each dim for each leaf; to
jagged kept * D * itemsize + N * D * itemsize, 16 N for the place of each value, and a search over each O for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor

from .. import configs
from .._op import (
    INTERPRETED,
    direct,
    eager,
    multiple,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..cpu import padded as cpu_padded
from ..features import row_alignment
from ..memory import MANY

MOST_DIMS = 5
# one for each thread: five searches of more would not fit into its registers
_PLACE_VALUES = 64 if INTERPRETED else 128
# what a kernel does to a value besides moving it
MOVE, ADD, MULTIPLY = 0, 1, 2


def places_ref(offsets: Sequence[Tensor], max_lengths: Sequence[int], total: int) -> Tensor:
    """Row of X [B * M_1 * ... * M_n, D] where each of `total` values goes, [N] int64; -1 for those that have none."""
    index = torch.arange(total, device=offsets[0].device)
    here, place, stride = torch.ones_like(index, dtype=torch.bool), torch.zeros_like(index), 1
    for ends, most in zip(reversed(offsets), reversed(max_lengths), strict=True):
        bags = ends.shape[0] - 1
        bag = torch.searchsorted(ends[1:].contiguous().long(), index, right=True)
        column = index - ends.long()[bag.clamp(max=bags)]
        here &= (bag < bags) & (column >= 0) & (column < most)
        place += column * stride
        index, stride = bag, stride * most
    return torch.where(here, place + index * stride, -1)


def jagged_to_padded_dense_ref(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float = 0.0
) -> Tensor:
    """X at each value's place the value, `padding_value` elsewhere."""
    shape = dense_shape(values, offsets, max_lengths)
    rows = prod(shape[: len(max_lengths) + 1])
    place = places_ref(offsets, max_lengths, values.shape[0])
    # one row more than asked for takes what has no place
    flat = values.new_full((rows + 1, *values.shape[1:]), padding_value)
    return flat.index_put((torch.where(place >= 0, place, rows),), values)[:rows].view(shape)


def padded_dense_to_jagged_ref(dense: Tensor, offsets: Sequence[Tensor], total_length: int) -> Tensor:
    """V[i] = X at the place of i, 0 where it has none."""
    n = len(offsets)
    place = places_ref(offsets, dense.shape[1 : n + 1], total_length)
    flat = dense.flatten(0, n)
    # a dense of no rows has no row 0 to point at
    flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
    return flat[torch.where(place >= 0, place, flat.shape[0] - 1)]


def _numbers(numbers: Iterable[int]) -> tuple[int, ...]:
    """Sizes as a tuple for a kernel, which `_number` reads: neither 1 nor divided by 16.

    Triton compiles for each number of a tuple that is, whatever the kernel's decorator says.
    """
    return tuple(4 * number + 2 for number in numbers)


@triton.jit
def _number(coded):  # type: ignore[no-untyped-def]
    return coded >> 2


def _pointers(offsets: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Offsets as a tuple for a kernel, on 16 bytes: triton compiles for those that are, as with `_numbers`."""
    return tuple(ends if ends.data_ptr() % 16 == 0 else ends.clone() for ends in (o.contiguous() for o in offsets))


@triton.jit
def _bag_bounds(O, bag, live, MOST):  # type: ignore[no-untyped-def]
    """Where each live bag begins and ends, within MOST things whatever the offsets say; 0 and 0 for the others."""
    begin = tl.load(O + bag, mask=live, other=0).to(tl.int64)
    end = tl.load(O + bag + 1, mask=live, other=0).to(tl.int64)
    return tl.maximum(begin, 0), tl.minimum(end, MOST)


@triton.jit(do_not_specialize=["R", "MOST", "WIDTH"])
def _to_padded_kernel(  # type: ignore[no-untyped-def]
    V,
    OTHER,
    O,
    COUNTS,
    STRIDES,
    PAD,
    Y,
    R,
    MOST,
    D,
    WIDTH,
    MODE: tl.constexpr,
    DIMS: tl.constexpr,
    ZERO: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
):
    """OTHER is a dense that is added to Y, or other jagged values that V is multiplied with; WIDTH = MOST * D."""
    # neighbours in the grid are neighbours in a row
    blocks = tl.cdiv(WIDTH, BLOCK_D)
    leaf = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = leaf < R  # [BLOCK_R]
    bag = leaf
    rest = leaf
    if DIMS > 1:
        bag = leaf // _number(STRIDES[0])
        rest = leaf - bag * _number(STRIDES[0])
    for k in tl.static_range(DIMS - 1):
        begin, end = _bag_bounds(O[k], bag, live, _number(COUNTS[k]))
        column = rest
        # the last stride is 1
        if k < DIMS - 2:
            column = rest // _number(STRIDES[k + 1])
            rest = rest - column * _number(STRIDES[k + 1])
        live = live & (column < end - begin)
        bag = begin + column
    begin, end = _bag_bounds(O[DIMS - 1], bag, live, _number(COUNTS[DIMS - 1]))
    D = multiple(D, ALIGN)
    elements = tl.minimum(end - begin, MOST) * D  # [BLOCK_R], of a bag
    e = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    filled = e[None, :] < elements[:, None]  # [BLOCK_R, BLOCK_D]
    source = (begin * D)[:, None] + e[None, :]
    x = tl.load(V + source, mask=filled, other=0)
    width = multiple(WIDTH, OUT_ALIGN)
    target = (leaf * width)[:, None] + e[None, :]
    inside = (leaf < R)[:, None] & (e < width)[None, :]
    if MODE == 0:
        if not ZERO:
            x = tl.where(filled, x, tl.load(PAD))
    else:
        if MODE == 1:
            other = tl.load(OTHER + target, mask=inside, other=0)
        else:
            other = tl.load(OTHER + source, mask=filled, other=0)
        if WIDEN:
            x = x.to(tl.float32)
            other = other.to(tl.float32)
        x = x + other if MODE == 1 else x * other
    tl.store(Y + target, x.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "steps"])
def _places_kernel(  # type: ignore[no-untyped-def]
    at,
    O,
    COUNTS,
    EXTENTS,
    N,
    steps,
    DIMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = position < N
    index = position
    place = position * 0
    stride = tl.full((), 1, tl.int64)
    for back in tl.static_range(DIMS):
        ends = O[DIMS - 1 - back]
        bags = _number(COUNTS[DIMS - 1 - back])
        # the last bag that begins at or before index
        low = position * 0
        high = low + bags + 1
        for _ in range(0, steps):
            middle = (low + high) // 2
            begins = tl.load(ends + middle, mask=middle <= bags, other=0).to(tl.int64)
            right = (begins <= index) & (middle < high)
            low = tl.where(right, middle, low)
            high = tl.where(right, high, middle)
        here = here & (low < bags)
        column = index - tl.load(ends + low, mask=here, other=0).to(tl.int64)
        extent = _number(EXTENTS[DIMS - 1 - back])
        here = here & (column >= 0) & (column < extent)
        place += column * stride
        stride = stride * extent
        index = low
    tl.store(at + position, tl.where(here, place + index * stride, -1), mask=position < N)


@triton.jit(do_not_specialize=["N"])
def _to_jagged_kernel(  # type: ignore[no-untyped-def]
    X,
    at,
    OTHER,
    Y,
    N,
    D,
    MODE: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """OTHER are jagged values that are added to what X holds for them, or multiplied with it."""
    position = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.load(at + position, mask=position < N, other=-1)  # [BLOCK_N], -1 where X holds nothing
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    in_dense = (place >= 0)[:, None] & in_row[None, :]  # [BLOCK_N, BLOCK_D]
    x = tl.load(X + (place * D)[:, None] + d[None, :], mask=in_dense, other=0)
    own = (position * D)[:, None] + d[None, :]
    inside = (position < N)[:, None] & in_row[None, :]
    if MODE != 0:
        # a product of nothing is 0, whatever the other factor is
        other = tl.load(OTHER + own, mask=inside if MODE == 1 else in_dense, other=0)
        if WIDEN:
            x = x.to(tl.float32)
            other = other.to(tl.float32)
        x = x + other if MODE == 1 else x * other
    tl.store(Y + own, x.to(Y.dtype.element_ty), mask=inside)


def launch_to_padded(
    values: Tensor,
    other: Tensor | None,
    offsets: Sequence[Tensor],
    max_lengths: Sequence[int],
    padding_value: float = 0.0,
    mode: int = MOVE,
) -> Tensor:
    """X of values; with ADD `other`, a dense, is added to it, with MULTIPLY V is multiplied with `other` [N, D]."""
    out = torch.empty(dense_shape(values, offsets, max_lengths), dtype=values.dtype, device=values.device)
    if out.numel() == 0:
        return out
    dim, most, leaves = prod(values.shape[1:]), max_lengths[-1], prod(out.shape[: len(offsets)])
    source, target, second = _as_numbers(values), _as_numbers(out), _as_numbers(values if other is None else other)
    counts = (*(ends.shape[0] - 1 for ends in offsets[1:]), values.shape[0])
    # leaves for each step along the batch and along every dim but the last
    strides = tuple(accumulate(reversed(max_lengths[:-1]), mul, initial=1))[::-1]
    pad = source if padding_value == 0 else _as_numbers(values.new_full((1,), padding_value))
    align = _alignment(dim, source, target, second)
    block_r, block_d, warps = configs.gather_tile("to_padded", values, most * dim, align)
    grid = (triton.cdiv(leaves, block_r) * triton.cdiv(most * dim, block_d),)
    _to_padded_kernel[grid](
        source, second, _pointers(offsets), _numbers(counts), _numbers(strides), pad, target,
        leaves, most, dim, most * dim, mode, len(offsets), padding_value == 0, _is_half(values), block_r, block_d,
        align, _alignment(most * dim, target, second), num_warps=warps,
    )  # fmt: skip
    return out


def launch_to_jagged(
    dense: Tensor, other: Tensor | None, offsets: Sequence[Tensor], total_length: int, mode: int = MOVE
) -> Tensor:
    """V of a dense; with ADD or MULTIPLY `other` [N, D] is added to it, or it is multiplied with that."""
    n = len(offsets)
    out = torch.empty(total_length, *dense.shape[n + 1 :], dtype=dense.dtype, device=dense.device)
    if out.numel() == 0:
        return out
    dim = prod(dense.shape[n + 1 :])
    at = torch.empty(total_length, dtype=torch.int64, device=dense.device)
    counts = tuple(ends.shape[0] - 1 for ends in offsets)
    # two launches: searching and gathering in one crashes the compiler of triton 3.7.1 at larger tiles
    _places_kernel[(triton.cdiv(total_length, _PLACE_VALUES),)](
        at, _pointers(offsets), _numbers(counts), _numbers(dense.shape[1 : n + 1]), total_length,
        (max(counts) + 1).bit_length() + 1, n, _PLACE_VALUES,
    )  # fmt: skip
    source, target, second = _as_numbers(dense), _as_numbers(out), _as_numbers(dense if other is None else other)
    align = _alignment(dim, source, target, second)
    # a column of single numbers: no row to share among threads
    single = dim == 1 and not INTERPRETED
    block_n, block_d, warps = (128, 1, 4) if single else configs.gather_tile("to_jagged", dense, dim, align)
    grid = (triton.cdiv(total_length, block_n), triton.cdiv(dim, block_d))
    _to_jagged_kernel[grid](
        source, at, second, target, total_length, dim, mode, _is_half(dense), block_n, block_d, align, num_warps=warps
    )
    return out


def _as_numbers(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _alignment(dim: int, *tensors: Tensor) -> int:
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        return 1
    return row_alignment(dim, tensors[0].itemsize)


def dense_shape(values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int]) -> list[int]:
    """[B, M_1, ..., M_n, D]."""
    return [offsets[0].shape[0] - 1, *max_lengths, *values.shape[1:]]


def jagged_to_padded_dense(
    values: Tensor,
    offsets: Sequence[Tensor] | Tensor,
    max_lengths: Sequence[int] | int,
    padding_value: float = 0.0,
) -> Tensor:
    """Each bag of values in a row of its own, cut at `max_lengths` or filled up with `padding_value`.

    Shapes: values [N, ...]; offsets one tensor for each jagged dim, at most five: the first [B + 1], each counting
    bags of the next, the last one counting values (one tensor alone may stand without a list, and so may its max
    length). Offsets begin at 0 and do not fall; values past the last are in no bag.

    Returns:
        [B, *max_lengths, ...] in the dtype of values, integers and bool included; differentiable in values.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit; on the CPU also where offsets fall or lead past
            the values. On CUDA nothing is read on the host, and bad offsets lead to no value that is not in values.
    """
    offsets = [offsets] if isinstance(offsets, Tensor) else list(offsets)
    extents: list[int] = list(max_lengths) if isinstance(max_lengths, (list, tuple)) else [max_lengths]  # type: ignore[list-item]
    check_offsets("values", values, offsets)
    check_extents(offsets, extents)
    if direct(values, *offsets):
        return cpu_padded.to_padded(values, offsets, extents, padding_value)
    if eager(values, *offsets):
        return _ToPadded.apply(values, offsets, extents, padding_value)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.shardwise.jagged_to_padded_dense(values, offsets, extents, padding_value)  # type: ignore[no-any-return]


def padded_dense_to_jagged(
    dense: Tensor, offsets: Sequence[Tensor] | Tensor, total_length: int | None = None
) -> Tensor:
    """The values of the bags that `offsets` describe, out of a padded dense tensor; 0 for those that it was cut off.

    Shapes: dense [B, M_1, ..., M_n, ...], offsets as in `jagged_to_padded_dense`. `total_length` is the number of
    values, the last offset unless given; without it a GPU is waited for. Values past the last offset are 0.

    Returns:
        [total_length, ...] in the dtype of dense; differentiable in dense.

    Raises:
        TypeError, ValueError: shapes, dtypes or devices do not fit; on the CPU also where offsets fall or lead past
            `total_length`.
    """
    offsets = [offsets] if isinstance(offsets, Tensor) else list(offsets)
    check_offsets("dense", dense, offsets)
    check_dense(dense, offsets)
    if total_length is not None and total_length < 0:
        raise ValueError(f"total_length must be >= 0, got {total_length}")
    if direct(dense, *offsets):
        return cpu_padded.to_jagged(dense, offsets, total_length)
    if eager(dense, *offsets):
        return _ToJagged.apply(dense, offsets, total_length)  # type: ignore[no-any-return, no-untyped-call]
    return torch.ops.shardwise.padded_dense_to_jagged(dense, offsets, total_length)  # type: ignore[no-any-return]


def check_offsets(name: str, tensor: Tensor, offsets: Sequence[Tensor]) -> None:
    """Offsets are 1-D integers, beside the tensor, for one to five jagged dims."""
    if not 1 <= len(offsets) <= MOST_DIMS:
        raise ValueError(f"offsets must be 1 to {MOST_DIMS} tensors, one for each jagged dim, got {len(offsets)}")
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have at least one dim, got a scalar")
    for k, ends in enumerate(offsets):
        if ends.dtype is not torch.int64 and ends.dtype is not torch.int32:
            raise TypeError(f"offsets[{k}] must be int32 or int64, got {ends.dtype}")
        if ends.dim() != 1 or ends.shape[0] == 0:
            raise ValueError(f"offsets[{k}] must be [bags + 1], got shape {list(ends.shape)}")
        if ends.device != tensor.device:
            raise ValueError(f"offsets[{k}] are on {ends.device}, {name} on {tensor.device}: move one of them")


def check_extents(offsets: Sequence[Tensor], max_lengths: Sequence[int]) -> None:
    """One extent for each jagged dim."""
    if len(max_lengths) != len(offsets):
        raise ValueError(f"max_lengths must be as many as offsets, got {len(max_lengths)} for {len(offsets)} offsets")
    if min(max_lengths) < 0:
        raise ValueError(f"max_lengths must be >= 0, got {list(max_lengths)}")


def check_dense(dense: Tensor, offsets: Sequence[Tensor]) -> None:
    """A dense with a row for each bag and a dim for each jagged dim."""
    n = len(offsets)
    if dense.dim() < n + 1:
        raise ValueError(f"dense must have a batch dim and {n} jagged dims, got shape {list(dense.shape)}")
    if dense.shape[0] != offsets[0].shape[0] - 1:
        raise ValueError(f"dense has a batch of {dense.shape[0]}, offsets[0] have {offsets[0].shape[0] - 1} bags")


def _jagged_to_padded_dense(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float
) -> Tensor:
    if runs_kernel(values):
        cpu_padded.require_offsets_on_cpu(offsets, values.shape[0])
        cpu_padded.require_padded(values, offsets, max_lengths)
        return launch_to_padded(values, None, offsets, max_lengths, padding_value)
    if values.is_cuda:
        return jagged_to_padded_dense_ref(values, offsets, max_lengths, padding_value)
    return cpu_padded.to_padded(values, offsets, max_lengths, padding_value)


def _padded_dense_to_jagged(dense: Tensor, offsets: Sequence[Tensor], total_length: int | None) -> Tensor:
    if not runs_kernel(dense) and not dense.is_cuda:
        return cpu_padded.to_jagged(dense, offsets, total_length)
    # host sync: the number of values is the size of the result
    total = int(offsets[-1][-1]) if total_length is None else total_length
    cpu_padded.require_offsets_on_cpu(offsets, total)
    if total > MANY:
        cpu_padded.require_jagged(dense, offsets, total)
    if runs_kernel(dense):
        return launch_to_jagged(dense, None, offsets, total)
    return padded_dense_to_jagged_ref(dense, offsets, total)


class _ToPadded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float
    ) -> Tensor:
        ctx.save_for_backward(*offsets)
        ctx.total = values.shape[0]
        return cpu_padded.to_padded(values, offsets, max_lengths, padding_value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return padded_dense_to_jagged(grads[0], ctx.saved_tensors, ctx.total), None, None, None


class _ToJagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor, offsets: Sequence[Tensor], total_length: int | None) -> Tensor:
        ctx.save_for_backward(*offsets)
        ctx.max_lengths = dense.shape[1 : len(offsets) + 1]
        return cpu_padded.to_jagged(dense, offsets, total_length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return jagged_to_padded_dense(grads[0], ctx.saved_tensors, ctx.max_lengths), None, None


def _setup_to_padded(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, _, _ = inputs
    ctx.save_for_backward(*offsets)
    ctx.dims, ctx.total = len(offsets), values.shape[0]


def _setup_to_jagged(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dense, offsets, _ = inputs
    ctx.save_for_backward(*offsets)
    ctx.dims = len(offsets)
    ctx.max_lengths = dense.shape[1 : ctx.dims + 1]


def _fake_to_jagged(dense: Tensor, offsets: Sequence[Tensor], total_length: int | None) -> Tensor:
    total = torch.library.get_ctx().new_dynamic_size() if total_length is None else total_length
    return dense.new_empty(total, *dense.shape[len(offsets) + 1 :])


def for_each_offset(place: int, backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward for a registered op: in place of the None at `place` a None for each tensor of offsets."""

    def listed(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        grads = backward(ctx, grad)
        return *grads[:place], [None] * ctx.dims, *grads[place + 1 :]

    return listed


register_autograd(
    register(
        "jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, float padding_value) -> Tensor",
        _jagged_to_padded_dense,
        lambda values, offsets, max_lengths, padding_value: values.new_empty(dense_shape(values, offsets, max_lengths)),
    ),
    for_each_offset(1, _ToPadded.backward),
    _setup_to_padded,
)
register_autograd(
    register(
        "padded_dense_to_jagged(Tensor dense, Tensor[] offsets, SymInt? total_length) -> Tensor",
        _padded_dense_to_jagged,
        _fake_to_jagged,
    ),
    for_each_offset(1, _ToJagged.backward),
    _setup_to_jagged,
)
