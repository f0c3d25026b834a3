"""Put whole segments of values, and what goes with them, into another order.

Letters and bytes moved as in segments.py, whose ops these functions call; lengths [T] or [T, B], P [S] which segment
(or row of segments) comes where. Lengths move by torch's own `index_select`.
A CPU tensor that nothing traces goes past the dispatcher: to the loops that numba compiles, or to torch's ops.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    direct,
    eager,
    register,
    runs_kernel,
)
from ..cpu import segments as cpu_segments
from ..memory import MANY, require_memory
from .segments import INDEX_DTYPES, bad_index, locate, move_by, positions_of, positions_ref

# values a segment from which one copy for each segment beats one index for each value
_LONG_SEGMENT = 500


def permute_1d(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    *,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move whole segments: segment s of the result is segment permute[s] of `values`; repeats and omissions allowed.

    Shapes: permute [S], lengths [T] (both int32 or int64), values and weights [N, ...] of any dtype but complex;
    N = sum(lengths). Differentiable in floating values and weights. FBGEMM: `permute_1D_sparse_data`.

    Returns:
        (lengths [S], values [M, ...], weights [M, ...] or None). `permuted_lengths_sum` is M where it is known: a GPU
        then need not be waited for. There what is no segment is moved as an empty one.

    Raises:
        IndexError: on the CPU, an entry of `permute` is no segment.
        ValueError: shapes do not fit; on the CPU, lengths are negative or do not add up to N, or the sum is not M.
        TypeError: permute or lengths are neither int32 nor int64, or values are complex.
    """
    _check(permute, lengths, 1, values, weights)
    if direct(permute, lengths, values, weights):
        permuted = cpu_segments.reordered(permute, lengths, values, weights)
        if permuted is not None and permuted_lengths_sum in (None, values.shape[0]):
            return permuted
    if not eager(permute, lengths, values, weights):
        return _on_device(permute, lengths, lengths, values, weights, permuted_lengths_sum)
    moved = lengths.new_empty(permute.shape[0])
    plan = cpu_segments.plan_of(permute, lengths, values.shape[0], moved)
    if plan is None:
        _check_values(permute, lengths, lengths, values.shape[0])
        moved = lengths.index_select(0, permute)
        ends = lengths.cumsum(0, dtype=torch.int64)
        total = _same_sum(int(moved.sum()), permuted_lengths_sum)
        at = positions_of((ends - lengths).index_select(0, permute), moved, total)
        return moved, _selected(values, at), None if weights is None else _selected(weights, at)
    _same_sum(plan.total, permuted_lengths_sum)
    return moved, move_by(plan, values), None if weights is None else move_by(plan, weights)


def permute_2d(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    *,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Move whole rows of segments: row s of the result is row permute[s] of `lengths` with its values.

    Shapes: permute [S], lengths [T, B] (both int32 or int64), values and weights [N, ...] of any dtype but complex;
    N = sum(lengths). Differentiable in floating values and weights. FBGEMM: `permute_2D_sparse_data`.

    Returns:
        (lengths [S, B], values [M, ...], weights [M, ...] or None); M as in `permute_1d`, which raises the same.
    """
    _check(permute, lengths, 2, values, weights)
    if not eager(permute, lengths, values, weights):
        return _on_device(permute, lengths, lengths.sum(1), values, weights, permuted_lengths_sum)
    sums = cpu_segments.row_sums(lengths)
    plan = None if sums is None else cpu_segments.plan_of(permute, sums, values.shape[0])
    if sums is None or plan is None:
        sums = lengths.sum(1)
        _check_values(permute, lengths, sums, values.shape[0])
        order, sizes = permute.tolist(), sums.tolist()
        _same_sum(sum(sizes[t] for t in order), permuted_lengths_sum)
        permuted = _on_torch([values] if weights is None else [values, weights], sizes, order)
        return lengths.index_select(0, permute), permuted[0], None if weights is None else permuted[1]
    _same_sum(plan.total, permuted_lengths_sum)
    moved = lengths.index_select(0, permute)
    return moved, move_by(plan, values), None if weights is None else move_by(plan, weights)


def permute_segments(tensors: Sequence[Tensor], sizes: Sequence[int], order: Sequence[int]) -> list[Tensor]:
    """Each of `tensors` with its segments in another order, where their sizes are known on the host.

    Shapes: tensors [N, ...] that share the segmentation; sizes [T] and order [S] Python ints, N = sum(sizes); repeats
    and omissions allowed. Differentiable. On CUDA one launch moves all 1-D tensors, and nothing waits.

    Returns:
        for each of them, segments order[0], order[1], ... one after another: [M, ...].

    Raises:
        IndexError: an entry of `order` is no segment.
        ValueError: a size is negative, or a tensor's length is not the sum of the sizes.
    """
    if not tensors:
        return []
    values = tensors[0].shape[0]
    for tensor in tensors:
        if tensor.shape[0] != values:
            raise ValueError(f"tensors must have one length, got {values} and {tensor.shape[0]}")
    if eager(*tensors):
        plan = cpu_segments.plan_known(order, sizes, values)
        if plan is not None:
            return [move_by(plan, tensor) for tensor in tensors]
        _check_known(sizes, order, values)
        return _on_torch(tensors, sizes, order)
    if torch.compiler.is_compiling() or not (tensors[0].is_cuda or INTERPRETED):
        # sizes of a traced program may be symbols
        parts = [torch.split_with_sizes(tensor, list(sizes)) for tensor in tensors]
        return [_joined([part[s] for s in order], tensor) for part, tensor in zip(parts, tensors, strict=True)]
    _check_known(sizes, order, values)
    ends = list(accumulate((sizes[s] for s in order), initial=0))
    known = [*order, *accumulate(sizes, initial=0), *ends]
    # a mode, of fake tensors say, sees only what torch itself makes, ten times as slowly
    seen = torch._C._len_torch_dispatch_stack() > 0
    numbers = torch.tensor(known, device="cpu") if seen else torch.frombuffer(array("q", known), dtype=torch.int64)
    S, T = len(order), len(sizes)
    # not blocking, since a blocking copy from the host would be a host sync
    where = torch.split_with_sizes(numbers.to(tensors[0].device, non_blocking=True), [S, T + 1, S + 1])
    return torch.ops.shardwise.move_segments(list(tensors), *where, ends[-1])  # type: ignore[no-any-return]


def expand_into_jagged_permute(
    permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, output_size: int
) -> Tensor:
    """Turn an order of segments into an order of their values: where each value of the output comes from.

    Shapes: permute [S], input_offsets [T + 1], output_offsets [S + 1] with output_size = output_offsets[S], all of one
    dtype, int32 or int64. Segment s of the output has the size that output_offsets give it, and begins where segment
    permute[s] of the input does. FBGEMM has the op by this name.

    Returns:
        [output_size], dtype of `permute`; on CUDA -1 where nothing comes from any segment.

    Raises:
        IndexError: on the CPU, an entry of `permute` is no segment.
        ValueError: shapes do not fit; on the CPU, output_offsets decrease or do not go from 0 to output_size.
        TypeError: dtypes differ or are neither int32 nor int64.
    """
    dtype = permute.dtype
    for name, tensor in (("permute", permute), ("input_offsets", input_offsets), ("output_offsets", output_offsets)):
        if tensor.dtype != dtype or dtype not in INDEX_DTYPES:
            raise TypeError(f"{name} must be int32 or int64 as permute is ({permute.dtype}), got {tensor.dtype}")
        if tensor.dim() != 1:
            raise ValueError(f"{name} must be 1-D, got shape {list(tensor.shape)}")
    # 1-D tensors say their number of elements much sooner than their shape
    if output_offsets.numel() != permute.numel() + 1:
        raise ValueError(
            f"output_offsets must have one entry more than permute has, {permute.shape[0] + 1}, "
            f"got {output_offsets.shape[0]}"
        )
    if input_offsets.numel() < 1:
        raise ValueError("input_offsets must have an entry more than there are segments, got none")
    if direct(permute, input_offsets, output_offsets):
        return _expand_cpu(permute, input_offsets, output_offsets, output_size)
    return torch.ops.shardwise.expand_into_jagged_permute(  # type: ignore[no-any-return]
        permute, input_offsets, output_offsets, output_size
    )


def expand_into_jagged_permute_ref(
    permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, output_size: int
) -> Tensor:
    """at[O[s] + i] = I[P[s]] + i."""
    return positions_ref(permute, input_offsets, output_offsets, output_size).to(permute.dtype)


def _expand(permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, output_size: int) -> Tensor:
    if runs_kernel(permute):
        if output_size > MANY:
            require_memory(f"output_size {output_size}", (output_size,), permute.dtype, permute.device)
        # as many positions as dtype can name: what lies in no segment is not cut off here
        everything = torch.iinfo(torch.int64).max
        return locate(
            "source", output_offsets, output_size, permute.dtype, 1, permute, input_offsets, everything
        )  # fmt: skip
    expand = expand_into_jagged_permute_ref if permute.is_cuda else _expand_cpu
    return expand(permute, input_offsets, output_offsets, output_size)


def _expand_cpu(permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, output_size: int) -> Tensor:
    if output_size > MANY:
        require_memory(f"output_size {output_size}", (output_size,), permute.dtype)
    source = cpu_segments.expand(permute, input_offsets, output_offsets, output_size)
    if source is not None:
        return source
    sizes = output_offsets.diff()
    cpu_segments.check_offsets("output_offsets", output_offsets, output_size)
    cpu_segments.check_order(permute, input_offsets.shape[0] - 1)
    return positions_of(input_offsets.index_select(0, permute), sizes, output_size).to(permute.dtype)


register(
    "expand_into_jagged_permute(Tensor permute, Tensor input_offsets, Tensor output_offsets, SymInt output_size)"
    " -> Tensor",
    _expand,
    lambda permute, input_offsets, output_offsets, output_size: permute.new_empty((output_size,)),
)


def _check(permute: Tensor, lengths: Tensor, dims: int, values: Tensor, weights: Tensor | None) -> None:
    if permute.dtype not in INDEX_DTYPES or permute.dim() != 1:
        raise bad_index("permute", permute, 1)
    if lengths.dtype not in INDEX_DTYPES or lengths.dim() != dims:
        raise bad_index("lengths", lengths, dims)
    if values.is_complex() or values.dim() == 0:
        raise _bad_values("values", values)
    if weights is not None:
        if weights.is_complex() or weights.dim() == 0:
            raise _bad_values("weights", weights)
        if weights.shape[0] != values.shape[0]:
            raise ValueError(f"weights has {weights.shape[0]} entries, values has {values.shape[0]}")
    segments = lengths.shape[0]
    # a number that a tracer does not know yet is checked when the program runs
    if isinstance(segments, int) and segments == 0 and permute.numel():
        raise IndexError(f"permute has {permute.shape[0]} entries, there are 0 segments")


def _bad_values(name: str, tensor: Tensor) -> Exception:
    if tensor.is_complex():
        return TypeError(f"{name} must not be complex, got {tensor.dtype}")
    return ValueError(f"{name} must have a first dimension, got shape []")


def _check_values(permute: Tensor, lengths: Tensor, sums: Tensor, values: int) -> None:
    """A plan's checks, on torch."""
    if lengths.numel():
        low, high = lengths.aminmax()
        if int(low) < 0:
            raise ValueError(f"lengths must be >= 0, got {int(low)}")
        # one by one, because sums that pass 2**63 come back too small
        if int(high) > values:
            raise ValueError(f"lengths must add up to the {values} values, one of them is {int(high)}")
    if int(sums.sum()) != values:
        raise ValueError(f"lengths sum to {int(sums.sum())}, values has {values}")
    cpu_segments.check_order(permute, lengths.shape[0])


def _check_known(sizes: Sequence[int], order: Sequence[int], values: int) -> None:
    """A plan's checks, on the host."""
    if min(sizes, default=0) < 0:
        raise ValueError(f"lengths must be >= 0, segment {list(sizes).index(min(sizes))} has {min(sizes)}")
    if sum(sizes) != values:
        raise ValueError(f"lengths sum to {sum(sizes)}, values has {values}")
    if order and not 0 <= min(order) <= max(order) < len(sizes):
        at, segment = next((i, s) for i, s in enumerate(order) if not 0 <= s < len(sizes))
        raise IndexError(f"permute[{at}] is {segment}, out of range for {len(sizes)} segments")


def _same_sum(total: int, expected: int | None) -> int:
    if expected is not None and expected != total:
        raise ValueError(f"permuted_lengths_sum is {expected}, the permuted lengths sum to {total}")
    return total


def _on_device(
    permute: Tensor, lengths: Tensor, sizes: Tensor, values: Tensor, weights: Tensor | None, total: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lengths by torch, values and weights by the op, which alone knows a sum that nobody gave."""
    T = lengths.shape[0]
    # of a number that a tracer does not know yet: more than none
    some = not isinstance(T, int) or T > 0
    # an index outside must stop no device: its segment is empty
    known = permute.clamp(0, T - 1 if some else 0)
    if some:
        moved = lengths.index_select(0, known)
        moved = moved * (known == permute).view(-1, *[1] * (lengths.dim() - 1))
        taken = moved if lengths.dim() == 1 else moved.sum(1)
    else:
        moved, taken = torch.empty_like(lengths), sizes
    starts, ends = (torch.nn.functional.pad(n.cumsum(0, dtype=torch.int64), (1, 0)) for n in (sizes, taken))
    both = [values] if weights is None else [values, weights]
    permuted = torch.ops.shardwise.move_segments(both, permute, starts, ends, total)
    return moved, permuted[0], None if weights is None else permuted[1]


def _on_torch(tensors: Sequence[Tensor], sizes: Sequence[int], order: Sequence[int]) -> list[Tensor]:
    """By whichever of torch's ops needs less time: a view for each segment, or an index for each value."""
    if not order:
        return [tensor[:0] for tensor in tensors]
    if sizes.count(sizes[0]) == len(sizes):
        rows = torch.frombuffer(array("q", order), dtype=torch.int64)
        each = [tensor.reshape(len(sizes), sizes[0], *tensor.shape[1:]) for tensor in tensors]
        return [_selected(tensor, rows).flatten(0, 1) for tensor in each]
    total = sum(sizes[s] for s in order)
    if total > MANY:
        for tensor in tensors:
            what = f"the permuted lengths, which sum to {total}"
            require_memory(what, (total, *tensor.shape[1:]), tensor.dtype)
    halves = any(tensor.requires_grad and tensor.itemsize == 2 for tensor in tensors)
    if not halves and (total >= _LONG_SEGMENT * len(order) or len(order) <= 32):
        parts = [torch.split_with_sizes(tensor, sizes) for tensor in tensors]
        return [_joined([part[s] for s in order], tensor) for part, tensor in zip(parts, tensors, strict=True)]
    numbers = torch.frombuffer(array("q", [*sizes, *order]), dtype=torch.int64)
    counts, at = torch.split_with_sizes(numbers, [len(sizes), len(order)])
    at = positions_of((counts.cumsum(0) - counts).index_select(0, at), counts.index_select(0, at), total)
    return [_selected(tensor, at) for tensor in tensors]


def _selected(values: Tensor, at: Tensor) -> Tensor:
    """Values at `at`, on torch; the gradients of copies of halves are added in fp32."""
    if values.requires_grad and values.dtype in (torch.float16, torch.bfloat16):
        return values.float().index_select(0, at).to(values.dtype)
    return values.index_select(0, at)


def _joined(parts: list[Tensor], whole: Tensor) -> Tensor:
    return torch.cat(parts) if parts else whole[:0]
