"""Columns of several tensors put together anew in several others, in one launch; and its transpose, which adds.

Shapes: X_i [B, D_i] inputs, Y_g [B, E_g] outputs; runs of columns as in regroup_plan.py. A vector is 16 bytes of a row
or what alignment leaves of them; a table [3 + 3 * repeats, V] int32 says for each of the V vectors of the outputs' rows
where it lies and where it comes from. The gradient is the same op with the transposed runs.
Bytes moved: each column of the outputs once, the columns that they come from once for each use, and the table (12 + 12
repeats bytes a vector, kept on the device) once for every BLOCK_B rows.
The torch path is one split per input and one `torch.cat` per output, and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    direct,
    eager,
    next_power_of_2,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from .regroup_plan import Piece, RegroupPlan, Runs, plan_pieces, transposed

# tensors of one launch: a pointer each among its arguments, and a comparison for each vector
_MOST = 16
# vectors of a program: four for each thread of four warps
_VECTORS = 128 if INTERPRETED else 512


def regroup_ref(tensors: Sequence[Tensor], pieces: Sequence[Sequence[Piece]]) -> list[Tensor]:
    """Each output's pieces (tensor, first column, columns) side by side."""
    nothing = tensors[0][:, :0]
    return [
        torch.cat([nothing, *(tensors[t][:, first : first + columns] for t, first, columns in listed)], dim=1)
        for listed in pieces
    ]


@triton.jit
def _begins(tensors, which, COUNT: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where tensor number `which` begins, for each vector, in bytes that BYTES divides."""
    # AMD's compiler fails at a choice among pointers, not at one among numbers
    chosen = tensors[0].to(tl.int64) + which * 0
    for i in tl.static_range(1, COUNT):
        chosen = tl.where(which == i, tensors[i].to(tl.int64), chosen)
    return tl.multiple_of(chosen.to(tl.pointer_type(tensors[0].dtype.element_ty)), BYTES)


@triton.jit(do_not_specialize=["B"])
def _regroup_kernel(  # type: ignore[no-untyped-def]
    X,
    Y,
    table,
    B,
    V,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ALIGN: tl.constexpr,
    BYTES: tl.constexpr,
):
    # neighbours in the grid are neighbours in a row
    blocks = tl.cdiv(V, BLOCK_V)
    v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    b = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    here = v < V
    lane = tl.arange(0, ALIGN)[None, None, :]
    rows = b[:, None]
    mask = (b < B)[:, None] & here[None, :]
    # a table's rows: output, its vector in a row, vectors of a row; the same of each input that is added there
    output = tl.load(table + v, mask=here, other=0)
    to = rows * tl.load(table + 2 * V + v, mask=here, other=0)[None, :]
    to = (to + tl.load(table + V + v, mask=here, other=0)[None, :]) * ALIGN
    # one input alone is moved as it is
    total = tl.zeros((BLOCK_B, BLOCK_V, ALIGN), tl.float64 if WIDE else tl.float32)
    for r in tl.static_range(REPEATS):
        source = table + (3 + 3 * r) * V + v
        which = tl.load(source, mask=here, other=-1)
        at = rows * tl.load(source + 2 * V, mask=here, other=0)[None, :]
        at = (at + tl.load(source + V, mask=here, other=0)[None, :]) * ALIGN
        begin = _begins(X, which, INPUTS, BYTES)[None, :] + at
        x = tl.load(begin[:, :, None] + lane, mask=(mask & (which >= 0)[None, :])[:, :, None], other=0)
        total = x if REPEATS == 1 else total + x.to(total.dtype)
    begin = _begins(Y, output, OUTPUTS, BYTES)[None, :] + to
    tl.store(begin[:, :, None] + lane, total.to(Y[0].dtype.element_ty), mask=mask[:, :, None])


def regroup(tensors: Sequence[Tensor], plan: RegroupPlan | Sequence[Sequence[Piece]]) -> list[Tensor]:
    """Put columns of several tensors together anew: one output per group of the plan; differentiable.

    Shapes: tensors [B, D_i] of one dtype and device. `plan` is made once by `plan_regroup` or `plan_pieces`, or says
    for each output its pieces (tensor, first column, columns). Columns may be left out and may be in several places:
    gradients of a column add in one fixed order, those of one left out are 0, and an input of which nothing is taken
    has no gradient or one of zeros.

    Returns:
        One [B, sum of columns] per output.

    Raises:
        ValueError, TypeError: tensors differ in B, dtype or device, or from what the plan was made for.
    """
    if not isinstance(plan, RegroupPlan):
        plan = plan_pieces([tensor.shape[1] for tensor in tensors], plan)
    _check(tensors, plan)
    if _is_plain(tensors, plan):
        parts: list[Tensor] = []
        for tensor, sizes in zip(tensors, plan.sizes, strict=True):
            parts += tensor.split_with_sizes(sizes, 1)
        return [
            torch.cat([parts[i] for i in output], 1) if output else tensors[0].narrow(1, 0, 0) for output in plan.parts
        ]
    flat, repeats, widths = plan.runs
    return torch.ops.shardwise.regroup_columns(list(tensors), flat, repeats, widths)  # type: ignore[no-any-return]


def permute_pooled(pooled: Tensor, dims: Sequence[int], order: Sequence[int]) -> Tensor:
    """Pooled embeddings [B, sum(dims)] of tables of `dims` columns, with the tables in another `order`; differentiable.

    `order` has the number of the table that comes next; tables may be left out, and may come twice: gradients add.

    Returns:
        [B, sum of dims[t] for t in order].

    Raises:
        ValueError: `dims` do not sum to the columns of `pooled`. IndexError: `order` has a table that does not exist.
    """
    # a compiler would trace what is kept, and warn
    plan_order = _plan_order.__wrapped__ if torch.compiler.is_compiling() else _plan_order
    return regroup([pooled], plan_order(tuple(dims), tuple(order)))[0]


@lru_cache(maxsize=128)
def _plan_order(dims: tuple[int, ...], order: tuple[int, ...]) -> RegroupPlan:
    starts = [0]
    for dim in dims:
        starts.append(starts[-1] + dim)
    for table in order:
        if not 0 <= table < len(dims):
            raise IndexError(f"order: there is no table {table}, only {len(dims)}")
    return plan_pieces([starts[-1]], [[(0, starts[table], dims[table]) for table in order]])


def _check(tensors: Sequence[Tensor], plan: RegroupPlan) -> None:
    if len(tensors) != len(plan.widths):
        raise ValueError(f"the plan is for {len(plan.widths)} tensors, got {len(tensors)}")
    if not tensors:
        raise ValueError("regroup needs at least one tensor, got none")
    first = tensors[0]
    for i, (tensor, width) in enumerate(zip(tensors, plan.widths, strict=True)):
        shape = tensor.shape
        if len(shape) != 2 or shape[1] != width:
            raise ValueError(f"tensor {i} must have shape [B, {width}], got {list(shape)}")
        if shape[0] != first.shape[0]:
            raise ValueError(f"tensors must have one batch size, got {first.shape[0]} and {shape[0]} (tensor {i})")
        if tensor.dtype != first.dtype:
            raise TypeError(f"tensors must have one dtype, got {first.dtype} and {tensor.dtype} (tensor {i})")
        if tensor.device != first.device:
            raise ValueError(f"tensors must be on one device, got {first.device} and {tensor.device} (tensor {i})")


def _is_plain(tensors: Sequence[Tensor], plan: RegroupPlan) -> bool:
    """Whether torch's own ops, gradients included, may be called past the dispatcher."""
    # torch would add up the gradients of halves in halves
    if plan.repeats and tensors[0].dtype not in (torch.float32, torch.float64):
        return direct(*tensors)
    return eager(*tensors)


def _nothing(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(tensors[0].shape[0], 0)


def _regroup_columns(tensors: list[Tensor], flat: list[int], repeats: int, widths: list[int]) -> list[Tensor]:
    runs = Runs(tuple(flat), repeats, tuple(widths))
    if not runs_kernel(tensors[0]):
        return _regroup_torch(tensors, runs)
    batch = tensors[0].shape[0]
    outs = [tensors[0].new_empty(batch, width) for width in widths]
    if len(tensors) > _MOST:
        # more pointers than a launch takes: one tensor, by one more copy
        runs = _in_one(runs, tuple(tensor.shape[1] for tensor in tensors))
        tensors = [torch.cat(tensors, 1)]
    tensors = [tensor.contiguous() for tensor in tensors]
    for low in range(0, len(outs), _MOST):
        _launch(tensors, outs[low : low + _MOST], _of_outputs(runs, low, low + _MOST))
    return outs


def _launch(tensors: list[Tensor], outs: list[Tensor], runs: Runs) -> None:
    batch, widths = tensors[0].shape[0], tuple(tensor.shape[1] for tensor in tensors)
    if batch == 0 or not runs.flat:
        return
    itemsize = tensors[0].itemsize
    aligned = all(map(_is_aligned, (*tensors, *outs)))
    align = _alignment(runs, widths, 16 // itemsize) if aligned else 1
    table = _table(runs, widths, align, tensors[0].device)
    block_b, block_v = regroup_tile(table.shape[1], align * itemsize)
    grid = (triton.cdiv(table.shape[1], block_v) * triton.cdiv(batch, block_b),)
    _regroup_kernel[grid](
        tuple(tensors), tuple(outs), table, batch, table.shape[1], len(tensors), len(outs), runs.repeats,
        tensors[0].dtype == torch.float64, block_b, block_v, align, align * itemsize, num_warps=4,
    )  # fmt: skip


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % 16 == 0


def regroup_tile(vectors: int, vector_bytes: int) -> tuple[int, int]:
    """Rows and vectors of a tile: of a row 512 bytes, where it has so many, and at most a vector for each thread."""
    block_v = min(next_power_of_2(vectors), 512 // vector_bytes, _VECTORS // 4)
    return _VECTORS // block_v, block_v


@lru_cache(maxsize=256)
def _alignment(runs: Runs, widths: tuple[int, ...], most: int) -> int:
    """Elements, a power of two up to `most`, that divide all columns and widths."""
    numbers = [*widths, *runs.widths]
    for output, column, columns, *pairs in runs.rows():
        numbers += [column, columns, *pairs[1::2]]
        del output
    common = gcd(most, *numbers)
    return common & -common


@lru_cache(maxsize=256)
def _table(runs: Runs, widths: tuple[int, ...], align: int, device: torch.device) -> Tensor:
    """[3 + 3 * repeats, V] int32: for each vector of the outputs where it lies, then where each of its sources lies."""
    rows = torch.tensor(runs.rows(), dtype=torch.int64, device="cpu")
    counts = rows[:, 2] // align
    run = torch.repeat_interleave(torch.arange(len(rows), device="cpu"), counts)
    within = torch.arange(len(run), device="cpu") - (counts.cumsum(0) - counts)[run]
    # what is not there has no width
    strides = [torch.tensor([*each, 0], device="cpu") // align for each in (runs.widths, widths)]
    lines = []
    for i in range(1 + runs.repeats):
        which, column = rows[run, 0 if i == 0 else 1 + 2 * i], rows[run, 1 if i == 0 else 2 + 2 * i]
        lines += [which, column // align + within, strides[i > 0][which]]
    return torch.stack(lines).to(torch.int32).to(device)


@lru_cache(maxsize=256)
def _in_one(runs: Runs, widths: tuple[int, ...]) -> Runs:
    """The runs where the inputs lie side by side in one tensor."""
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + width)
    flat: list[int] = []
    for place in runs.rows():
        flat += place[:3]
        for tensor, column in zip(place[3::2], place[4::2], strict=True):
            flat += (0, starts[tensor] + column) if tensor >= 0 else (-1, 0)
    return Runs(tuple(flat), runs.repeats, runs.widths)


@lru_cache(maxsize=256)
def _of_outputs(runs: Runs, low: int, high: int) -> Runs:
    """The runs of outputs low ... high - 1, numbered from 0."""
    if low == 0 and high >= len(runs.widths):
        return runs
    rows = [(row[0] - low, *row[1:]) for row in runs.rows() if low <= row[0] < high]
    return Runs(tuple(number for row in rows for number in row), runs.repeats, runs.widths[low:high])


def _regroup_torch(tensors: Sequence[Tensor], runs: Runs) -> list[Tensor]:
    """The kernel's result by torch's ops, run by run."""
    parts: list[list[Tensor]] = [[_nothing(tensors)] for _ in runs.widths]
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    for output, _, columns, *pairs in runs.rows():
        slices = [
            tensors[tensor].narrow(1, first, columns)
            for tensor, first in zip(pairs[::2], pairs[1::2], strict=True)
            if tensor >= 0
        ]
        if len(slices) < 2:
            parts[output] += slices or [tensors[0].new_zeros(tensors[0].shape[0], columns)]
            continue
        total = slices[0].to(wide)
        for other in slices[1:]:
            total = total + other
        parts[output].append(total.to(tensors[0].dtype))
    return [torch.cat(listed, 1) for listed in parts]


_transposed = lru_cache(maxsize=256)(transposed)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, flat, ctx.repeats, widths = inputs
    ctx.runs = Runs(tuple(flat), ctx.repeats, tuple(widths))
    # a plan has fixed widths, also where a compiler leaves sizes open
    ctx.widths = tuple(int(tensor.shape[1]) for tensor in tensors)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    flat, repeats, widths = _transposed(ctx.runs, ctx.widths)
    by_tensors = torch.ops.shardwise.regroup_columns(list(grads), flat, repeats, widths)
    # torch takes an empty list among the arguments for one of tensors
    return by_tensors, None if ctx.runs.flat else [], None, None


register_autograd(
    register(
        "regroup_columns(Tensor[] tensors, int[] flat, int repeats, int[] widths) -> Tensor[]",
        _regroup_columns,
        lambda tensors, flat, repeats, widths: [tensors[0].new_empty(tensors[0].shape[0], width) for width in widths],
    ),
    _backward,
    _setup_context,
)
