"""Unary lookup: tables of one column, the same ids for several tasks, bags summed.

Shapes: W [tasks, S] the rows of all T tables behind one another, TO [T + 1] where each table's rows begin and the last
one's end, I [N] ids within their table, O [T*B + 1] offsets, bag (t, b) is ids O[t*B + b] ...; Y [tasks, B, T].
As FBGEMM's batched_unary_embeddings, whose weight is [tasks, S, 1].
Bytes moved: forward N * (itemsize(I) + tasks * sector) + tasks * B * T * itemsize(W): each row is a sector of its own;
backward besides the dense gradient a sort of N numbers, and N * (8 + tasks * sector) for each level of chunks.
The gradient of a row is added up in the order of ids by chunks as in transpose.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    direct,
    eager,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..cpu.products import accumulator, unary_gradient_cpu, unary_lookup_cpu
from ..features import bag_of_position
from ..memory import require_sortable
from ..transpose import (
    CHUNK,
    chunks_of,
    key_dtype,
    levels_for,
)
from .rows import (
    FLOATS,
    adds_in_fp32,
    check_offsets,
    function_of,
)

_BLOCK = 16 if INTERPRETED else 128


def batched_unary_embeddings_ref(weight: Tensor, table_offsets: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """Y[n, b, t] = sum over ids i of bag (t, b) of W[n, TO[t] + i]."""
    first, bounds, tables = table_offsets.tolist(), offsets.tolist(), table_offsets.shape[0] - 1
    batch = (len(bounds) - 1) // max(tables, 1)
    out = weight.new_zeros(weight.shape[0], batch, tables)
    for t in range(tables):
        for b in range(batch):
            rows = first[t] + ids[bounds[t * batch + b] : bounds[t * batch + b + 1]].long()
            out[:, b, t] = weight[:, rows, 0].to(accumulator(weight.dtype)).sum(1).to(weight.dtype)
    return out


@triton.jit(do_not_specialize=["N", "B"], do_not_specialize_on_alignment=["TO", "O", "I"])
def _unary_kernel(W, TO, O, I, Y, N, S, B, T, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    task = tl.program_id(1).to(tl.int64)
    bag = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = bag < tl.cast(T, tl.int64) * B
    t = bag // B
    first = tl.load(TO + t, mask=live, other=0).to(tl.int64)
    rows = tl.load(TO + t + 1, mask=live, other=0).to(tl.int64)
    # ids and offsets out of order only must not be followed outside the tables
    rows = tl.minimum(rows, S) - first
    begin = tl.maximum(tl.load(O + bag, mask=live, other=0).to(tl.int64), 0)
    end = tl.minimum(tl.load(O + bag + 1, mask=live, other=0).to(tl.int64), N)
    length = (end - begin).to(tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, tl.max(length, 0)):
        row = tl.load(I + begin + i, mask=i < length, other=-1).to(tl.int64)
        inside = (row >= 0) & (row < rows) & (first >= 0)
        total += tl.load(W + task * S + first + row, mask=inside, other=0.0).to(tl.float32)
    there = Y + task * T * B + (bag - t * B) * T + t
    tl.store(there, total.to(Y.dtype.element_ty), mask=live)


@triton.jit(
    do_not_specialize=["g_size", "p_size"], do_not_specialize_on_alignment=["source", "start", "row", "slot", "total"]
)
def _unary_chunk_kernel(  # type: ignore[no-untyped-def]
    G,
    source,
    start,
    row,
    slot,
    total,
    Q,
    P,
    g_size,
    S,
    p_size,
    LEAF: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    task = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = c < tl.load(total)
    begin = tl.load(start + c, mask=live, other=0)
    length = tl.load(start + c + 1, mask=live, other=0) - begin
    added = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, CHUNK):
        at = begin + i
        if LEAF:
            at = tl.load(source + at, mask=i < length, other=0)
        added += tl.load(G + task * g_size + at, mask=i < length, other=0.0).to(tl.float32)
    to = tl.load(slot + c, mask=live, other=-1)
    whole = live & (to < 0)
    there = tl.load(row + c, mask=whole, other=0).to(tl.int64)
    tl.store(Q + task * S + there, added, mask=whole)
    tl.store(P + task * p_size + to, added, mask=live & (to >= 0))


def batched_unary_embeddings(weight: Tensor, table_offsets: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """The summed rows of each bag of ids, in tables of one column; differentiable in `weight`.

    Shapes: weight [tasks, S, 1] (or [tasks, S]) fp32, fp16, bf16 or fp64, S = table_offsets[T] rows of all tables;
    table_offsets [T + 1], offsets [T*B + 1], ids [N], each int32 or int64; bag (t, b) has the number t * B + b.

    Returns:
        [tasks, B, T] in weight's dtype, added up in fp32 (fp64 of fp64).

    Raises:
        ValueError: shapes or devices that do not fit; on the CPU also offsets out of order.
        TypeError: dtypes other than these.
        IndexError: on the CPU, an id outside its table; elsewhere it counts as 0.
    """
    op = "batched_unary_embeddings"
    if (dims := weight.dim()) != 2 and (dims != 3 or weight.shape[2] != 1):
        raise ValueError(f"{op}: weight must be [tasks, rows, 1], got shape {list(weight.shape)}")
    if weight.dtype not in FLOATS:
        raise TypeError(f"{op}: weight must be float32, float16, bfloat16 or float64, got {weight.dtype}")
    for name, tensor, least in (("offsets", offsets, 1), ("table_offsets", table_offsets, 1), ("ids", ids, 0)):
        check_offsets(op, tensor, weight, like="weight", name=name, least=least)
    tables, bags = table_offsets.numel() - 1, offsets.numel() - 1
    if bags % tables if tables else bags:
        raise ValueError(f"{op}: {bags + 1} offsets do not divide among {tables} tables: expected T*B + 1")
    if direct(weight, table_offsets, offsets, ids):
        return _lookup(weight, table_offsets, offsets, ids)
    if eager(weight, table_offsets, offsets, ids):
        return _eager(weight, table_offsets, offsets, ids)
    return torch.ops.shardwise.batched_unary_embeddings(weight, table_offsets, offsets, ids)  # type: ignore[no-any-return]


def _lookup(weight: Tensor, table_offsets: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    if not (adds_in_fp32(weight) and runs_kernel(weight)):
        return unary_lookup_cpu(weight, table_offsets, offsets, ids)
    matrix = weight.reshape(weight.shape[:2])
    (tasks, total), tables, bags = matrix.shape, table_offsets.shape[0] - 1, offsets.shape[0] - 1
    out = weight.new_empty(tasks, bags // max(tables, 1), tables)
    if out.numel() == 0:
        return out
    matrix, table_offsets, offsets, ids = (t.contiguous() for t in (matrix, table_offsets, offsets, ids))
    _unary_kernel[(triton.cdiv(bags, _BLOCK), tasks)](
        matrix, table_offsets, offsets, ids, out, ids.shape[0], total, bags // tables, tables, _BLOCK, num_warps=4
    )
    return out


def _gradient(grad: Tensor, table_offsets: Tensor, offsets: Tensor, ids: Tensor, total: int) -> Tensor:
    if not (adds_in_fp32(grad) and runs_kernel(grad)):
        return unary_gradient_cpu(grad, table_offsets, offsets, ids, total)
    require_sortable("the gradient of batched_unary_embeddings", "ids", ids)
    tasks, batch, tables = grad.shape
    out = torch.zeros(tasks, total, device=grad.device)
    count = ids.shape[0]
    if grad.numel() == 0 or count == 0 or total == 0:
        return out.to(grad.dtype)
    bag = bag_of_position(offsets, count)
    t = (bag // batch).clamp(max=tables - 1)
    outside = (bag >= tables * batch) | (ids < 0) | (ids >= table_offsets.diff()[t])
    rows = torch.where(outside, total, ids + table_offsets[t]).to(key_dtype(total))
    keys, order = torch.sort(rows, stable=True)
    # the element of a task's gradient that each id, in the order of rows, adds
    source = (bag % batch * tables + t)[order]
    level, size = grad.contiguous(), batch * tables
    for number in range(levels_for(count)):
        chunks = chunks_of(keys, 0, total)
        slots = chunks.next_keys.shape[0]
        partial = torch.empty(tasks, slots, device=grad.device)
        _unary_chunk_kernel[(triton.cdiv(keys.shape[0], _BLOCK), tasks)](
            level, source, chunks.start, chunks.row, chunks.slot, chunks.total, out, partial, size, total, slots,
            number == 0, CHUNK, _BLOCK, num_warps=4,
        )  # fmt: skip
        level, size, keys = partial, slots, chunks.next_keys
    return out.to(grad.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, *rest = inputs
    ctx.shape = weight.shape
    ctx.save_for_backward(*rest)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    table_offsets, offsets, ids = ctx.saved_tensors
    plain = direct(grad, table_offsets, offsets, ids)
    gradient = _gradient if plain else torch.ops.shardwise.batched_unary_embeddings_gradient
    return gradient(grad, table_offsets, offsets, ids, ctx.shape[1]).view(ctx.shape), None, None, None


_eager = function_of(_lookup, _setup_context, _backward)


def _fake(weight: Tensor, table_offsets: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    tables = table_offsets.shape[0] - 1
    return weight.new_empty(weight.shape[0], (offsets.shape[0] - 1) // tables if tables else 0, tables)


register_autograd(
    register(
        "batched_unary_embeddings(Tensor weight, Tensor table_offsets, Tensor offsets, Tensor ids) -> Tensor",
        _lookup,
        _fake,
    ),
    _backward,
    _setup_context,
)


def _setup_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *rest, _ = inputs
    ctx.save_for_backward(*rest)


def _backward_of_gradient(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    # linear in the gradient: its transpose is the lookup
    return torch.ops.shardwise.batched_unary_embeddings(upstream, *ctx.saved_tensors), None, None, None, None


register_autograd(
    register(
        "batched_unary_embeddings_gradient(Tensor grad, Tensor table_offsets, Tensor offsets, Tensor ids, SymInt rows)"
        " -> Tensor",
        _gradient,
        lambda grad, table_offsets, offsets, ids, rows: grad.new_empty(grad.shape[0], rows),
    ),
    _backward_of_gradient,
    _setup_gradient,
)
