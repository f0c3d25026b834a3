"""Add selected bags back where they came from: the backward of index_select.py, and an op of its own.

Shapes: G [M, D] or [M] values of S selected bags of each of K keys, SO [K*S + 1] their offsets, I [S] the bag of a key
that each is added to, O [K*B + 1] offsets of the output X [N, D] or [N]; A [S] the selected bags in a stable order of
I, C [B + 1] where in A each bag's copies begin.
Bytes moved: G once, X once, S * 3 * 8 for the sort, 8 N (twice) for the bag of each row, 24 for each row of G.
Copies of a bag are added one after another in the order of I, in fp32 (float64 in float64): no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import configs
from .._op import (
    INTERPRETED,
    launch_options,
    multiple,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..features import row_alignment, segment_of_position
from ..memory import MANY, require_memory, require_sortable
from .index_select import check_integers, check_offsets, check_values, is_plain, offsets_of, pick, positions

# an id for each thread: what is read and written one after another then uses its sectors (perf/compile/sectors.py)
_BLOCK = 64 if INTERPRETED else 128


def jagged_index_add_ref(values: Tensor, lengths: Tensor, indices: Tensor, output_lengths: Tensor) -> Tensor:
    """Zeros, to which bag j is added at bag indices[j], one after another."""
    sums = [values.new_zeros((length, *values.shape[1:])) for length in output_lengths.tolist()]
    for bag, i in zip(torch.split(values, lengths.tolist()), indices.tolist(), strict=True):
        sums[i] = sums[i] + bag
    return torch.cat([values[:0], *sums])


@triton.jit(do_not_specialize=["N", "BAGS", "steps"], do_not_specialize_on_alignment=["O"])
def _owners_kernel(O, owner, N, BAGS, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bag of each row of X; -1 past the last."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (row < N) & (row >= tl.load(O)) & (row < tl.load(O + BAGS))
    bag = segment_of_position(O, row, BAGS, steps)
    tl.store(owner + row, tl.where(live, bag, -1), mask=row < N)


@triton.jit(do_not_specialize=["M", "N", "S", "B"], do_not_specialize_on_alignment=["SO", "O"])
def _index_add_kernel(  # type: ignore[no-untyped-def]
    G,
    SO,
    A,
    C,
    O,
    owner,
    X,
    M,
    N,
    S,
    B,
    D,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = row < N
    bag = tl.load(owner + row, mask=here, other=-1)
    owned = bag >= 0  # [BLOCK_N]
    # rows of G lie from the begin of a copy of the bag as rows of X from the begin of the bag
    place = row - tl.load(O + bag, mask=owned, other=0)
    before = bag // B * S
    sample = bag % B
    copy = tl.load(C + sample, mask=owned, other=0)
    copies = tl.load(C + sample + 1, mask=owned, other=0) - copy
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float64 if WIDE else tl.float32)
    for c in range(0, tl.max(copies, 0)):
        live = c < copies  # [BLOCK_N]
        selected = before + tl.load(A + copy + c, mask=live, other=0)
        source = tl.load(SO + selected, mask=live, other=0) + place
        # a copy shorter than its bag ends before, and no row is read outside G
        live = live & (source < tl.load(SO + selected + 1, mask=live, other=0)) & (source >= 0) & (source < M)
        g = tl.load(G + (source * D)[:, None] + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0)
        total += g.to(total.dtype)
    tl.store(X + (row * D)[:, None] + d[None, :], total.to(X.dtype.element_ty), mask=here[:, None] & in_row[None, :])


def jagged_index_add(
    values: Tensor, lengths: Tensor, indices: Tensor, output_lengths: Tensor, *, num_rows: int | None = None
) -> Tensor:
    """Add bag j of `values` to bag indices[j] of an output that begins as zeros; differentiable in values.

    Shapes: values [M, D] or [M] (float), lengths [S] that sum to M, indices [S], output_lengths [B].
    `num_rows`, the sum of output_lengths, spares a CUDA device the wait for that number.

    Returns:
        [num_rows, D] or [num_rows]. Bags that were given the same index are added in their order, in fp32 at least.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on the CPU also lengths that differ from those of
            the output's bags, or are negative, or do not sum to M, and a wrong `num_rows`.
        IndexError: on the CPU, an index outside [0, B). On CUDA its bag is left out.
    """
    check_values("values", values)
    if not values.is_floating_point():
        raise TypeError(f"values must be floating, got {values.dtype}")
    for name, numbers in (("lengths", lengths), ("indices", indices), ("output_lengths", output_lengths)):
        check_integers(name, numbers, values)
    if lengths.shape != indices.shape:
        raise ValueError(f"{lengths.shape[0]} lengths but {indices.shape[0]} indices")
    bags = output_lengths.shape[0]
    if is_plain(values, lengths, indices, output_lengths) and values.dtype in (torch.float32, torch.float64):
        return _add_plain(values, lengths, indices, output_lengths, num_rows)
    offsets, output_offsets = offsets_of(lengths), offsets_of(output_lengths)
    if num_rows is None:
        # host sync: the size of the output, unless the caller knew it
        num_rows = int(output_offsets[-1])
    elif values.is_cpu and not torch.compiler.is_compiling() and num_rows != int(output_offsets[-1]):
        raise ValueError(f"num_rows is {num_rows}, but output_lengths sum to {int(output_offsets[-1])}")
    return torch.ops.shardwise.jagged_index_add(values, offsets, indices, output_offsets, bags, num_rows)  # type: ignore[no-any-return]


def _add_plain(
    values: Tensor, lengths: Tensor, indices: Tensor, output_lengths: Tensor, num_rows: int | None
) -> Tensor:
    """On the CPU, with gradients of torch's own; lengths are checked here."""
    with torch.no_grad():
        bags, ends = output_lengths.shape[0], output_lengths.cumsum(0)
        rows = int(ends[-1]) if bags else 0
        if num_rows is not None and num_rows != rows:
            raise ValueError(f"num_rows is {num_rows}, but output_lengths sum to {rows}")
        if bags and int(output_lengths.min()) < 0:
            bag = int(output_lengths.argmin())
            raise ValueError(f"output_lengths must be >= 0, bag {bag} has {int(output_lengths[bag])}")
        # a sum that passes 2**63 comes back too small
        if bags and int(output_lengths.max()) > rows:
            raise ValueError(f"output_lengths sum to {sum(output_lengths.tolist())}, which no output can have")
        _check_alike(lengths, pick(output_lengths, indices, bags), indices)
        at = positions(pick(ends - output_lengths, indices, bags), lengths, None)
        if at.shape[0] != values.shape[0]:
            raise ValueError(f"lengths sum to {at.shape[0]}, values has {values.shape[0]} rows")
        if rows > MANY:
            _require_rows(values, rows)
    # torch adds in the order of `at`
    return values.new_zeros((rows, *values.shape[1:])).index_add(0, at, values)


def _require_rows(values: Tensor, rows: int) -> None:
    shape = (rows, *values.shape[1:])
    require_memory(f"output_lengths, which sum to {rows} (num_rows)", shape, values.dtype, values.device)


def _check_alike(lengths: Tensor, expected: Tensor, indices: Tensor) -> None:
    if not bool((lengths == expected).all()):
        j = int((lengths != expected).nonzero()[0])
        raise ValueError(
            f"bag {j} of length {int(lengths[j])} cannot be added to bag {int(indices[j % indices.shape[0]])} "
            f"of length {int(expected[j])}"
        )


def _add(
    values: Tensor, offsets: Tensor, indices: Tensor, output_offsets: Tensor, batch_size: int, num_rows: int
) -> Tensor:
    if num_rows > MANY:
        _require_rows(values, num_rows)
    if not runs_kernel(values):
        wide = values if values.dtype == torch.float64 else values.float()
        return _add_torch(wide, offsets, indices, output_offsets, batch_size, num_rows).to(values.dtype)
    out = torch.empty((num_rows, *values.shape[1:]), dtype=values.dtype, device=values.device)
    bags = output_offsets.shape[0] - 1
    if bags == 0 or indices.shape[0] == 0:
        return out.zero_()
    if out.numel() == 0:
        return out
    values, offsets, output_offsets = values.contiguous(), offsets.contiguous(), output_offsets.contiguous()
    require_sortable("jagged_index_add", "indices", indices)
    inside = (indices >= 0) & (indices < batch_size)
    # copies of bags that do not exist are sorted behind all others
    of, order = torch.sort(torch.where(inside, indices, batch_size), stable=True)
    begins = torch.searchsorted(of, torch.arange(batch_size + 1, dtype=of.dtype, device=of.device))
    owner = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    grid = (triton.cdiv(num_rows, _BLOCK),)
    _owners_kernel[grid](output_offsets, owner, num_rows, bags, bags.bit_length() + 1, _BLOCK)
    dim = out.numel() // num_rows
    align = row_alignment(dim, values.itemsize) if values.data_ptr() % 16 == 0 else 1
    block_n, block_d, warps = index_add_tile(values, dim, align)
    tiles = (triton.cdiv(num_rows, block_n), triton.cdiv(dim, block_d))
    _index_add_kernel[tiles](
        values, offsets, order, begins, output_offsets, owner, out, values.shape[0], num_rows, indices.shape[0],
        batch_size, dim, values.dtype == torch.float64, block_n, block_d, align, **launch_options(warps, 64),
    )  # fmt: skip
    return out


def index_add_tile(values: Tensor, dim: int, align: int) -> tuple[int, int, int]:
    """Rows, columns and warps: a lookup's tile, but of rows of one number more at a time, a thread for each."""
    if dim == 1:
        return (16, 1, 1) if INTERPRETED else (128, 1, 4)
    return configs.gather_tile("index_add", values, dim, align)


def _add_torch(
    values: Tensor, offsets: Tensor, indices: Tensor, output_offsets: Tensor, batch_size: int, num_rows: int
) -> Tensor:
    with torch.no_grad():
        check_offsets(offsets, values.shape[0])
        check_offsets(output_offsets, num_rows)
        if int(offsets[-1]) != values.shape[0]:
            raise ValueError(f"lengths sum to {int(offsets[-1])}, values has {values.shape[0]} rows")
        lengths = offsets.diff()
        _check_alike(lengths, pick(output_offsets.diff(), indices, batch_size), indices)
        at = positions(pick(output_offsets[:-1], indices, batch_size), lengths, None)
    # torch adds in the order of `at`
    return values.new_zeros((num_rows, *values.shape[1:])).index_add(0, at, values[: at.shape[0]])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, _, indices, output_offsets, ctx.batch_size, _ = inputs
    ctx.save_for_backward(indices, output_offsets)
    ctx.rows = values.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indices, output_offsets = ctx.saved_tensors
    selected = torch.ops.shardwise.jagged_index_select(
        grad, None, output_offsets, indices, ctx.batch_size, torch.int64, ctx.rows
    )
    return selected[0], None, None, None, None, None


register_autograd(
    register(
        "jagged_index_add(Tensor values, Tensor offsets, Tensor indices, Tensor output_offsets, SymInt batch_size,"
        " SymInt num_rows) -> Tensor",
        _add,
        lambda values, offsets, indices, output_offsets, batch_size, num_rows: values.new_empty(
            (num_rows, *values.shape[1:])
        ),
    ),
    _backward,
    _setup_context,
)
