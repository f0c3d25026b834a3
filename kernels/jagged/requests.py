"""Bags of requests that were stacked one after another, put beside one another by feature.

Shapes: Q [B + 1] offsets of the items of B requests, A items in all, T features. Bags come in the order request,
feature, item; with `broadcast` in the order request, feature, and each serves all items of its request. They leave in
the order feature, item: bag (t, a) has the number t * M + a, M at least A; bags of items A ... M - 1 are empty.
L are lengths of bags, V [N, ...] values; I and O are offsets of bags as they come and as they leave.
Bytes moved: a length is read and written; 1-D values are read and written, with searches over O and Q, which stay in
the cache; rows besides write and read 8 bytes each that say where they lie.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._op import INTERPRETED, register, register_autograd, runs_kernel, tl, triton
from ..features import segment_of_position
from .segments import gather_rows, move_segments_ref, unit_of

_BLOCK = 64 if INTERPRETED else 128


def source_bags(batch_offsets: Tensor, features: int, items: int, bags: int, broadcast: bool) -> Tensor:
    """The number of the bag that bag (t, a) comes from: [T, A] int64."""
    item = torch.arange(items, device=batch_offsets.device, dtype=batch_offsets.dtype)
    ends = batch_offsets[1:].contiguous()
    request = torch.searchsorted(ends, item, right=True)  # [A]
    feature = torch.arange(features, device=batch_offsets.device).unsqueeze(1)  # [T, 1]
    if broadcast:
        return (request * features + feature).clamp_(0, max(bags - 1, 0))
    request.clamp_(max=max(ends.shape[0] - 1, 0))
    first = batch_offsets[request].long()
    source = (ends[request] - first).mul(feature).add_(item).add_(first, alpha=features - 1)
    return source.clamp_(0, max(bags - 1, 0))


def reorder_lengths_ref(
    lengths: Tensor, batch_offsets: Tensor, features: int, items: int, most: int, broadcast: bool
) -> Tensor:
    """Lengths [T * M] of bags by feature."""
    source = source_bags(batch_offsets, features, items, lengths.shape[0], broadcast)
    return pad(lengths[source], (0, most - items)).flatten()


def reorder_values_ref(
    values: Tensor,
    offsets: Tensor,
    reordered: Tensor,
    batch_offsets: Tensor,
    items: int,
    most: int,
    broadcast: bool,
    size: int,
) -> Tensor:
    """`size` values of bags by feature."""
    features, bags = (reordered.shape[0] - 1) // max(most, 1), offsets.shape[0] - 1
    source = source_bags(batch_offsets, features, items, bags, broadcast)
    source = pad(source, (0, most - items), value=-1).flatten()
    return move_segments_ref([values], source, offsets, reordered, size)[0]


def restore_values_ref(
    values: Tensor, offsets: Tensor, reordered: Tensor, batch_offsets: Tensor, items: int, size: int
) -> Tensor:
    """The transpose of `reorder_values_ref` without padding: values of bags by feature as they came."""
    bags = offsets.shape[0] - 1
    source = source_bags(batch_offsets, bags // max(items, 1), items, bags, False).flatten()
    target = torch.empty_like(source).scatter_(0, source, torch.arange(bags, device=source.device))
    return move_segments_ref([values], target, reordered, offsets, size)[0]


@triton.jit
def _bag_before(Q, bag, live, B, T, ITEMS, MOST, steps, BROADCAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bag that a bag by feature comes from, and whether it is one of an item."""
    t = bag // MOST
    a = bag % MOST
    live &= a < ITEMS
    request = segment_of_position(Q, a, B, steps)
    if BROADCAST:
        return request * T + t, live
    first = tl.load(Q + request, mask=live, other=0).to(tl.int64)
    after = tl.load(Q + request + 1, mask=live, other=0).to(tl.int64)
    return first * (T - 1) + a + t * (after - first), live


@triton.jit
def _bag_after(Q, bag, live, B, T, ITEMS, steps):  # type: ignore[no-untyped-def]
    """The bag by feature that a bag becomes."""
    request = segment_of_position(Q, bag // T, B, steps)
    first = tl.load(Q + request, mask=live, other=0).to(tl.int64)
    after = tl.load(Q + request + 1, mask=live, other=0).to(tl.int64)
    items = tl.maximum(after - first, 1)
    place = bag - first * T
    return place // items * ITEMS + first + place % items


@triton.jit(do_not_specialize=["N", "M", "B", "T", "ITEMS", "MOST", "steps"], do_not_specialize_on_alignment=["L", "Q"])
def _request_lengths_kernel(  # type: ignore[no-untyped-def]
    L,
    Y,
    Q,
    N,
    M,
    B,
    T,
    ITEMS,
    MOST,
    steps,
    BROADCAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source, live = _bag_before(Q, bag, bag < M, B, T, ITEMS, MOST, steps, BROADCAST)
    live &= (source >= 0) & (source < N)
    tl.store(Y + bag, tl.load(L + source, mask=live, other=0), mask=bag < M)


@triton.jit(
    do_not_specialize=["N", "S", "M", "B", "T", "ITEMS", "MOST", "BAGS", "steps_of_bags", "steps"],
    do_not_specialize_on_alignment=["V", "I", "O", "Q"],
)
def _request_values_kernel(  # type: ignore[no-untyped-def]
    V,
    Y,
    I,
    O,
    Q,
    N,
    S,
    M,
    B,
    T,
    ITEMS,
    MOST,
    BAGS,
    UNIT,
    steps_of_bags,
    steps,
    BROADCAST: tl.constexpr,
    BACK: tl.constexpr,
    LOCATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < M
    s = segment_of_position(O, position, S, steps_of_bags)
    begin = tl.load(O + s, mask=here, other=0).to(tl.int64)
    end = tl.load(O + s + 1, mask=here, other=0).to(tl.int64)
    live = here & (position >= begin) & (position < end)
    if BACK:
        bag = _bag_after(Q, s, live, B, T, ITEMS, steps)
    else:
        bag, live = _bag_before(Q, s, live, B, T, ITEMS, MOST, steps, BROADCAST)
    live &= (bag >= 0) & (bag < BAGS)
    source = tl.load(I + bag, mask=live, other=-1).to(tl.int64) + position - begin
    live &= (source >= 0) & (source < N)
    if LOCATE:
        tl.store(Y + position, tl.where(live, source * UNIT, -1), mask=here)
    else:
        tl.store(Y + position, tl.load(V + source, mask=live, other=0), mask=here)


def _reorder_lengths(
    lengths: Tensor, batch_offsets: Tensor, features: int, items: int, most: int, broadcast: bool
) -> Tensor:
    if not runs_kernel(lengths):
        return reorder_lengths_ref(lengths, batch_offsets, features, items, most, broadcast)
    out = lengths.new_empty(features * most)
    requests = batch_offsets.shape[0] - 1
    if not out.shape[0]:
        return out
    if not requests or not lengths.shape[0]:
        return out.zero_()
    _request_lengths_kernel[(triton.cdiv(out.shape[0], _BLOCK),)](
        lengths.contiguous(), out, batch_offsets.contiguous(), lengths.shape[0], out.shape[0], requests, features,
        items, most, requests.bit_length() + 1, broadcast, _BLOCK,
    )  # fmt: skip
    return out


def _reorder_values(
    values: Tensor,
    offsets: Tensor,
    reordered: Tensor,
    batch_offsets: Tensor,
    items: int,
    most: int,
    broadcast: bool,
    size: int,
) -> Tensor:
    if not runs_kernel(values):
        return reorder_values_ref(values, offsets, reordered, batch_offsets, items, most, broadcast, size)
    features = (reordered.shape[0] - 1) // max(most, 1)
    return _moved(values, offsets, reordered, batch_offsets, features, items, most, broadcast, False, size)


def _restore_values(
    values: Tensor, offsets: Tensor, reordered: Tensor, batch_offsets: Tensor, items: int, size: int
) -> Tensor:
    if not runs_kernel(values):
        return restore_values_ref(values, offsets, reordered, batch_offsets, items, size)
    features = (offsets.shape[0] - 1) // max(items, 1)
    return _moved(values, reordered, offsets, batch_offsets, features, items, items, False, True, size)


def _moved(
    values: Tensor,
    starts: Tensor,
    ends: Tensor,
    batch_offsets: Tensor,
    features: int,
    items: int,
    most: int,
    broadcast: bool,
    back: bool,
    size: int,
) -> Tensor:
    """`size` values by the kernel: those of bags that begin at `starts` in bags that end at `ends`."""
    requests, bags, segments = batch_offsets.shape[0] - 1, starts.shape[0] - 1, ends.shape[0] - 1
    values, flat = values.contiguous(), values.dim() == 1
    out = values.new_empty(size, *values.shape[1:])
    if not out.numel():
        return out
    if not requests or not bags or not segments or not values.shape[0]:
        return out.zero_()
    unit = 1 if flat else unit_of(values)
    at = out if flat else torch.empty(size, dtype=torch.int64, device=values.device)
    source, target = (each.view(torch.int8) if each.itemsize == 1 else each for each in (values, at))
    _request_values_kernel[(triton.cdiv(size, _BLOCK),)](
        source, target, starts.contiguous(), ends.contiguous(), batch_offsets.contiguous(), values.shape[0], segments,
        size, requests, features, items, most, bags, max(prod(values.shape[1:]) // unit, 1),
        segments.bit_length() + 1, requests.bit_length() + 1, broadcast, back, not flat, _BLOCK,
    )  # fmt: skip
    return out if flat else gather_rows(values, at, unit)


def _setup_reorder(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, reordered, batch_offsets, ctx.items, ctx.most, ctx.broadcast, _ = inputs
    ctx.save_for_backward(offsets, reordered, batch_offsets)
    ctx.size = values.shape[0]


def _backward_of_reorder(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.broadcast or ctx.most != ctx.items:
        raise RuntimeError("reorder_request_values: values that are broadcast or padded have no gradient")
    restored = torch.ops.shardwise.restore_request_values(grad, *ctx.saved_tensors, ctx.items, ctx.size)
    return restored, None, None, None, None, None, None, None


def _setup_restore(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, offsets, reordered, batch_offsets, ctx.items, _ = inputs
    ctx.save_for_backward(offsets, reordered, batch_offsets)
    ctx.size = values.shape[0]


def _backward_of_restore(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    again = torch.ops.shardwise.reorder_request_values(
        grad, *ctx.saved_tensors, ctx.items, ctx.items, False, ctx.size
    )  # fmt: skip
    return again, None, None, None, None, None


def _of_size(values: Tensor, *rest: Any) -> Tensor:
    return values.new_empty(rest[-1], *values.shape[1:])


register(
    "reorder_request_lengths(Tensor lengths, Tensor batch_offsets, SymInt features, SymInt items, SymInt most,"
    " bool broadcast) -> Tensor",
    _reorder_lengths,
    lambda lengths, batch_offsets, features, items, most, broadcast: lengths.new_empty(features * most),
)
register_autograd(
    register(
        "reorder_request_values(Tensor values, Tensor offsets, Tensor reordered, Tensor batch_offsets, SymInt items,"
        " SymInt most, bool broadcast, SymInt size) -> Tensor",
        _reorder_values,
        _of_size,
    ),
    _backward_of_reorder,
    _setup_reorder,
)
register_autograd(
    register(
        "restore_request_values(Tensor values, Tensor offsets, Tensor reordered, Tensor batch_offsets, SymInt items,"
        " SymInt size) -> Tensor",
        _restore_values,
        _of_size,
    ),
    _backward_of_restore,
    _setup_restore,
)
