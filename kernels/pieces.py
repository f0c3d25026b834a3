"""Parts of bags: one piece of each, the values that a mask leaves, which of all values are in a piece.

Shapes: V [N] values in bags of offsets I [B + 1]; X [B] where the piece of each bag begins, in ascending order; O
[B + 1] offsets of what is taken of each, M = O[B] in all; K [N] bool.
Bytes moved: a piece's values once each way, with searches over X or O, which stay in the cache; its gradient all of V
once. Of a mask, K twice and its values once each way. A mask of pieces is written once, a byte a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._op import INTERPRETED, register, register_autograd, runs_kernel, tl, triton
from .features import segment_of_position

_BLOCK = 64 if INTERPRETED else 128
# bags and positions of a tile that goes through masks
_BAGS, _POSITIONS = (4, 8) if INTERPRETED else (16, 32)


def inside_pieces_ref(begins: Tensor, sizes: Tensor, total: int) -> Tensor:
    """Which of `total` places lie in the pieces [B] that begin there and have these sizes, one after another."""
    bounds = torch.stack([begins, begins + sizes], 1).flatten()
    place = torch.arange(total, dtype=bounds.dtype, device=bounds.device)
    return (torch.searchsorted(bounds, place, right=True) & 1).bool()


def take_pieces_ref(values: Tensor, begins: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """Y[O[b] + i] = V[X[b] + i]."""
    taken = values[inside_pieces_ref(begins, offsets.diff(), values.shape[0])]
    return taken if total is None else taken[:total]


def place_pieces_ref(pieces: Tensor, begins: Tensor, offsets: Tensor, size: int) -> Tensor:
    """The transpose of `take_pieces_ref`: pieces where they were among `size` values, 0 elsewhere."""
    out = pieces.new_zeros(size)
    out[inside_pieces_ref(begins, offsets.diff(), size)] = pieces
    return out


def masked_counts_ref(mask: Tensor, offsets: Tensor) -> Tensor:
    """How many of each bag are true: [B], dtype of offsets."""
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))[offsets.long().clamp(0, mask.shape[0])]
    return before.diff().to(offsets.dtype)


def take_masked_ref(values: Tensor, mask: Tensor, offsets: Tensor, taken: Tensor, total: int | None = None) -> Tensor:
    """The values of bags where the mask is true."""
    in_bags = torch.arange(values.shape[0], device=values.device) < offsets[-1]
    return values[mask & in_bags]


@triton.jit(do_not_specialize=["N", "S", "M", "steps"], do_not_specialize_on_alignment=["V", "X", "O"])
def _take_pieces_kernel(V, Y, X, O, N, S, M, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < M
    s = segment_of_position(O, position, S, steps)
    source = tl.load(X + s, mask=here, other=0).to(tl.int64) + position - tl.load(O + s, mask=here, other=0)
    live = here & (source >= 0) & (source < N)
    tl.store(Y + position, tl.load(V + source, mask=live, other=0), mask=here)


@triton.jit(do_not_specialize=["N", "S", "M", "steps"], do_not_specialize_on_alignment=["V", "X", "O"])
def _place_pieces_kernel(V, Y, X, O, N, S, M, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < N
    s = segment_of_position(X, position, S, steps)
    place = position - tl.load(X + s, mask=here, other=0)
    begin = tl.load(O + s, mask=here, other=0).to(tl.int64)
    end = tl.load(O + s + 1, mask=here, other=0).to(tl.int64)
    live = here & (place >= 0) & (begin + place < end) & (end <= M)
    tl.store(Y + position, tl.load(V + begin + place, mask=live, other=0), mask=here)


@triton.jit(do_not_specialize=["N", "S", "steps"], do_not_specialize_on_alignment=["X", "L"])
def _inside_pieces_kernel(X, L, Y, N, S, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < N
    s = segment_of_position(X, position, S, steps)
    place = position - tl.load(X + s, mask=here, other=0)
    inside = (place >= 0) & (place < tl.load(L + s, mask=here, other=0))
    tl.store(Y + position, inside.to(tl.int8), mask=here)


@triton.jit(do_not_specialize=["N", "S"], do_not_specialize_on_alignment=["K", "I"])
def _masked_counts_kernel(K, I, C, N, S, BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr):  # type: ignore[no-untyped-def]
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    here = s < S
    # offsets out of order must not be followed outside the mask
    begin = tl.maximum(tl.load(I + s, mask=here, other=0).to(tl.int64), 0)
    end = tl.minimum(tl.load(I + s + 1, mask=here, other=0).to(tl.int64), N)
    total = tl.zeros((BLOCK_S,), tl.int64)
    for first in range(0, tl.max(end - begin, 0), BLOCK_L):
        at = begin[:, None] + first + tl.arange(0, BLOCK_L)[None, :]
        kept = tl.load(K + at, mask=at < end[:, None], other=0) != 0
        total += tl.sum(kept.to(tl.int32), 1)
    tl.store(C + s, total.to(C.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N", "S", "M"], do_not_specialize_on_alignment=["V", "K", "I", "O"])
def _take_masked_kernel(  # type: ignore[no-untyped-def]
    V,
    K,
    Y,
    I,
    O,
    N,
    S,
    M,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    here = s < S
    begin = tl.maximum(tl.load(I + s, mask=here, other=0).to(tl.int64), 0)
    end = tl.minimum(tl.load(I + s + 1, mask=here, other=0).to(tl.int64), N)
    # the place of the next value of each bag
    to = tl.load(O + s, mask=here, other=0).to(tl.int64)
    for first in range(0, tl.max(end - begin, 0), BLOCK_L):
        at = begin[:, None] + first + tl.arange(0, BLOCK_L)[None, :]
        kept = tl.load(K + at, mask=at < end[:, None], other=0) != 0
        before = tl.cumsum(kept.to(tl.int32), 1)
        place = to[:, None] + before - 1
        live = kept & (place >= 0) & (place < M)
        tl.store(Y + place, tl.load(V + at, mask=live, other=0), mask=live)
        to += tl.sum(kept.to(tl.int32), 1)


def _bits(values: Tensor) -> Tensor:
    # a copy need not know what the bits mean; bool is nothing that a kernel loads
    return values.view(torch.int8) if values.itemsize == 1 else values


def _take_pieces(values: Tensor, begins: Tensor, offsets: Tensor, total: int | None) -> Tensor:
    if not runs_kernel(values):
        return take_pieces_ref(values, begins, offsets, total)
    if total is None:
        # host sync: nobody gave the number of values
        total = int(offsets[-1])
    out, pieces = values.new_empty(total), begins.shape[0]
    if total and pieces:
        values = values.contiguous()
        _take_pieces_kernel[(triton.cdiv(total, _BLOCK),)](
            _bits(values), _bits(out), begins.contiguous(), offsets.contiguous(), values.shape[0], pieces, total,
            pieces.bit_length() + 1, _BLOCK,
        )  # fmt: skip
    return out


def _place_pieces(pieces: Tensor, begins: Tensor, offsets: Tensor, size: int) -> Tensor:
    if not runs_kernel(pieces):
        return place_pieces_ref(pieces, begins, offsets, size)
    out, count = pieces.new_empty(size), begins.shape[0]
    if not count or not pieces.shape[0]:
        return out.zero_()
    if size:
        pieces = pieces.contiguous()
        _place_pieces_kernel[(triton.cdiv(size, _BLOCK),)](
            _bits(pieces), _bits(out), begins.contiguous(), offsets.contiguous(), size, count, pieces.shape[0],
            count.bit_length() + 1, _BLOCK,
        )  # fmt: skip
    return out


def _inside_pieces(begins: Tensor, sizes: Tensor, total: int) -> Tensor:
    if not runs_kernel(begins):
        return inside_pieces_ref(begins, sizes, total)
    out, count = torch.empty(total, dtype=torch.bool, device=begins.device), begins.shape[0]
    if not count:
        return out.zero_()
    if total:
        _inside_pieces_kernel[(triton.cdiv(total, _BLOCK),)](
            begins.contiguous(), sizes.contiguous(), _bits(out), total, count, count.bit_length() + 1, _BLOCK
        )
    return out


def _masked_counts(mask: Tensor, offsets: Tensor) -> Tensor:
    if not runs_kernel(mask):
        return masked_counts_ref(mask, offsets)
    bags = offsets.shape[0] - 1
    out = offsets.new_empty(bags)
    if bags:
        _masked_counts_kernel[(triton.cdiv(bags, _BAGS),)](
            _bits(mask.contiguous()), offsets.contiguous(), out, mask.shape[0], bags, _BAGS, _POSITIONS
        )
    return out


def _take_masked(values: Tensor, mask: Tensor, offsets: Tensor, taken: Tensor, total: int | None) -> Tensor:
    if not runs_kernel(values):
        return take_masked_ref(values, mask, offsets, taken, total)
    if total is None:
        # host sync: nobody gave the number of values
        total = int(taken[-1])
    out, bags = values.new_empty(total), offsets.shape[0] - 1
    if total and bags:
        _take_masked_kernel[(triton.cdiv(bags, _BAGS),)](
            _bits(values.contiguous()), _bits(mask.contiguous()), _bits(out), offsets.contiguous(), taken.contiguous(),
            values.shape[0], bags, total, _BAGS, _POSITIONS,
        )  # fmt: skip
    return out


def _fake_take(values: Tensor, *rest: Any) -> Tensor:
    total = rest[-1]
    return values.new_empty(torch.library.get_ctx().new_dynamic_size() if total is None else total)


def _setup_take(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, begins, offsets, _ = inputs
    ctx.save_for_backward(begins, offsets)
    ctx.size = values.shape[0]


def _backward_of_take(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.shardwise.place_pieces(grad, *ctx.saved_tensors, ctx.size), None, None, None


def _setup_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pieces, begins, offsets, _ = inputs
    ctx.save_for_backward(begins, offsets)
    ctx.total = pieces.shape[0]


def _backward_of_place(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.shardwise.take_pieces(grad, *ctx.saved_tensors, ctx.total), None, None, None


register_autograd(
    register(
        "take_pieces(Tensor values, Tensor begins, Tensor offsets, SymInt? total) -> Tensor", _take_pieces, _fake_take
    ),
    _backward_of_take,
    _setup_take,
)
register_autograd(
    register(
        "place_pieces(Tensor pieces, Tensor begins, Tensor offsets, SymInt size) -> Tensor",
        _place_pieces,
        lambda pieces, begins, offsets, size: pieces.new_empty(size),
    ),
    _backward_of_place,
    _setup_place,
)
register(
    "inside_pieces(Tensor begins, Tensor sizes, SymInt total) -> Tensor",
    _inside_pieces,
    lambda begins, sizes, total: begins.new_empty(total, dtype=torch.bool),
)
register(
    "masked_counts(Tensor mask, Tensor offsets) -> Tensor",
    _masked_counts,
    lambda mask, offsets: offsets.new_empty(offsets.shape[0] - 1),
)
register(
    "take_masked(Tensor values, Tensor mask, Tensor offsets, Tensor taken, SymInt? total) -> Tensor",
    _take_masked,
    _fake_take,
)
