"""Select bags of ragged values, of one key or the same samples of several: whole bags move, repeats allowed.

Shapes: V [N, D] or [N] values, P [N] weights of the values, O [K*B + 1] offsets (K keys of B bags each; one key where
there are no keys), I [S] bags to select of every key. Output: Y [M, D] or [M] values, Q [M] weights, lengths [K*S] and
offsets SO [K*S + 1] of the selected bags, M values in all.
Bytes moved: K*S * (itemsize(I) + 2 * itemsize(O) + 2 * 8 + itemsize(lengths)) for the bags; then for each selected
value its D elements there and back and, where D > 1, 16 bytes for where it lies; and a search over K*S bags.
The torch path composes torch's own ops, which is faster than FBGEMM's loop; its gradient is torch's, in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import configs
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
from ..cpu import segments as cpu_segments
from ..features import row_alignment, segment_of_position
from ..lookup.sequence import _gather_kernel
from ..memory import MANY, require_memory

# an id for each thread: what is read and written one after another then uses its sectors (perf/compile/sectors.py)
_BLOCK = 64 if INTERPRETED else 128
INTEGERS = (torch.int32, torch.int64)


def jagged_index_select_ref(values: Tensor, lengths: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Bags `indices` one after another, and their lengths."""
    bags = torch.split(values, lengths.tolist())
    return torch.cat([values[:0], *(bags[i] for i in indices.tolist())]), lengths[indices.long()]


def keyed_jagged_index_select_ref(
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Key by key, bags `indices` of that key one after another."""
    bags = [k + i for k in range(0, lengths.shape[0], max(batch_size, 1)) for i in indices.tolist()]
    spans = [(int(offsets[bag]), int(offsets[bag + 1])) for bag in bags]
    out = torch.cat([values[:0], *(values[begin:end] for begin, end in spans)])
    out_lengths = torch.tensor([end - begin for begin, end in spans], dtype=lengths.dtype, device=lengths.device)
    if weights is None:
        return out, out_lengths, None
    return out, out_lengths, torch.cat([weights[:0], *(weights[begin:end] for begin, end in spans)])


@triton.jit(do_not_specialize=["S", "B"], do_not_specialize_on_alignment=["O", "I"])
def _bags_kernel(O, I, lengths, begins, S, B, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    k = tl.program_id(1).to(tl.int64)
    s = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = s < S
    i = tl.load(I + s, mask=here, other=-1).to(tl.int64)
    # a bag that does not exist is empty
    exists = (i >= 0) & (i < B)
    bag = O + k * B + tl.where(exists, i, 0)
    begin = tl.load(bag, mask=exists, other=0).to(tl.int64)
    length = tl.maximum(tl.load(bag + 1, mask=exists, other=0).to(tl.int64) - begin, 0)
    tl.store(begins + k * S + s, begin, mask=here)
    tl.store(lengths + k * S + s, length.to(lengths.dtype.element_ty), mask=here)


@triton.jit
def _source(position, SO, begins, M, N, BAGS, steps):  # type: ignore[no-untyped-def]
    """The value that goes to each position, -1 for none."""
    live = (position < M) & (position < tl.load(SO + BAGS))
    bag = segment_of_position(SO, position, BAGS, steps)
    first = tl.load(SO + bag, mask=live, other=0)
    at = tl.load(begins + bag, mask=live, other=-1) + position - first
    # offsets out of order must not be followed outside V
    return tl.where(live & (at >= 0) & (at < N), at, -1)


@triton.jit(do_not_specialize=["M", "N", "BAGS", "steps"])
def _sources_kernel(SO, begins, at, M, N, BAGS, units, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = _source(position, SO, begins, M, N, BAGS, steps)
    tl.store(at + position, tl.where(source >= 0, source * units, -1), mask=position < M)


@triton.jit(do_not_specialize=["M", "N", "BAGS", "steps"], do_not_specialize_on_alignment=["V", "P"])
def _select_kernel(  # type: ignore[no-untyped-def]
    V,
    P,
    SO,
    begins,
    Y,
    Q,
    M,
    N,
    BAGS,
    steps,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = _source(position, SO, begins, M, N, BAGS, steps)
    value = tl.load(V + source, mask=source >= 0, other=0)
    tl.store(Y + position, value, mask=position < M)
    if WEIGHTED:
        weight = tl.load(P + source, mask=source >= 0, other=0)
        tl.store(Q + position, weight, mask=position < M)


def jagged_index_select(
    values: Tensor, lengths: Tensor, indices: Tensor, *, selected_lengths_sum: int | None = None
) -> tuple[Tensor, Tensor]:
    """Bags `indices` of ragged values in that order, repeats allowed; differentiable in float values.

    Shapes: values [N, D] or [N], lengths [B] that sum to N, indices [S] (int32 or int64 both).
    `selected_lengths_sum`, how many values are selected, spares a CUDA device the wait for that number.

    Returns:
        (values [M, D] or [M], lengths [S] in the dtype of `lengths`). The gradients of a bag that was selected more
        than once are added in the order of selection.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on the CPU also lengths that are negative or do not
            sum to N, and a wrong `selected_lengths_sum`.
        IndexError: on the CPU, an index outside [0, B). On CUDA such an index selects an empty bag.
    """
    check_values("values", values)
    check_integers("lengths", lengths, values)
    check_integers("indices", indices, values)
    if direct(values, lengths, indices):
        moved = _moved(values, lengths, indices, selected_lengths_sum)
        if moved is not None:
            return moved
    if is_plain(values, lengths, indices):
        with torch.no_grad():
            bags, ends = lengths.shape[0], lengths.cumsum(0)
            chosen, starts = pick(lengths, indices, bags), pick(ends - lengths, indices, bags)  # [S] lengths, [S]
            if bags and not (int(ends[-1]) == values.shape[0] and _all_within(lengths, values.shape[0])):
                raise ValueError(_what_is_wrong(lengths, values))
            at = positions(starts, chosen, selected_lengths_sum)  # [M]
        return values.index_select(0, at), chosen
    selected, chosen, _, _ = torch.ops.shardwise.jagged_index_select(
        values, None, offsets_of(lengths), indices, lengths.shape[0], lengths.dtype, selected_lengths_sum
    )
    return selected, chosen


def keyed_jagged_index_select(
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    weights: Tensor | None = None,
    *,
    selected_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples `indices` of every key, in that order and repeats allowed; differentiable in float values and weights.

    Shapes: values [N], lengths [K*B] key by key, offsets [K*B + 1] (those of the lengths), indices [S], batch_size B,
    weights [N]. Values past the last offset are ignored. `selected_lengths_sum`, how many values are selected, spares a
    CUDA device the wait for that number.

    Returns:
        (values [M], lengths [K*S] in the dtype of `lengths`, weights [M] or None). The gradients of a sample that was
        selected more than once are added in the order of selection.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on the CPU also offsets that decrease, pass the
            values or contradict the lengths of a selected bag, and a wrong `selected_lengths_sum`.
        IndexError: on the CPU, an index outside [0, B). On CUDA such an index selects empty bags.
    """
    _check_keyed(values, lengths, offsets, indices, batch_size, weights)
    if not is_plain(values, lengths, offsets, indices) or not (weights is None or is_plain(weights)):
        out, chosen, picked, _ = torch.ops.shardwise.jagged_index_select(
            values, weights, offsets, indices, batch_size, lengths.dtype, selected_lengths_sum
        )
        return out, chosen, None if weights is None else picked
    with torch.no_grad():
        check_offsets(offsets, values.shape[0])
        chosen, starts = pick(lengths, indices, batch_size), pick(offsets[:-1], indices, batch_size)
        if not torch.equal(pick(offsets[1:], indices, batch_size) - starts, chosen):
            raise ValueError(_contradiction(lengths, offsets))
        at = positions(starts, chosen, selected_lengths_sum)  # [M]
    return values.index_select(0, at), chosen, None if weights is None else weights.index_select(0, at)


def _check_keyed(
    values: Tensor, lengths: Tensor, offsets: Tensor, indices: Tensor, batch_size: int, weights: Tensor | None
) -> None:
    check_values("values", values)
    if values.dim() != 1:
        raise ValueError(f"values must have one dim, got shape {list(values.shape)}")
    for name, numbers in (("lengths", lengths), ("offsets", offsets), ("indices", indices)):
        check_integers(name, numbers, values)
    bags = lengths.shape[0]
    if offsets.shape[0] != bags + 1:
        raise ValueError(f"{bags} lengths need {bags + 1} offsets, got {offsets.shape[0]}")
    if batch_size < 0 or (bags % batch_size if batch_size else bags):
        raise ValueError(f"{bags} lengths do not divide among keys of batch_size {batch_size}")
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"weights must have the shape of values, {list(values.shape)}, got {list(weights.shape)}")
    if weights is not None and weights.device != values.device:
        raise ValueError(f"weights must be on the device of values, {values.device}, got {weights.device}")


def _contradiction(lengths: Tensor, offsets: Tensor) -> str:
    implied = offsets.diff()
    bag = int((implied != lengths).nonzero()[0])
    begin, end = int(offsets[bag]), int(offsets[bag + 1])
    return f"bag {bag} has length {int(lengths[bag])}, but its offsets go from {begin} to {end}"


def _moved(values: Tensor, lengths: Tensor, indices: Tensor, total: int | None) -> tuple[Tensor, Tensor] | None:
    """The selection as a move of segments; None without numba, and where something is wrong: torch's path says what."""
    chosen = lengths.new_empty(indices.numel())
    try:
        plan = cpu_segments.plan_of(indices, lengths, values.shape[0], chosen)
    except (IndexError, ValueError):
        return None
    if plan is None or total not in (None, plan.total):
        return None
    return cpu_segments.moved_by(plan, values), chosen


def check_values(name: str, values: Tensor) -> None:
    """ValueError unless [N] or [N, D]."""
    if values.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [N] or [N, D], got {list(values.shape)}")


def check_integers(name: str, tensor: Tensor, values: Tensor) -> None:
    """ValueError or TypeError unless 1-D, int32 or int64, and where `values` are."""
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dim, got shape {list(tensor.shape)}")
    if tensor.device != values.device:
        raise ValueError(f"{name} must be on the device of values, {values.device}, got {tensor.device}")


def is_plain(values: Tensor, *others: Tensor | None) -> bool:
    """Whether torch's own ops, gradient included, may be called on CPU values past the dispatcher."""
    # torch would add up the gradients of halves in halves
    in_full = not values.requires_grad or values.dtype in (torch.float32, torch.float64)
    return in_full and eager(values, *others)


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets [B + 1] int64 of lengths [B]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def pick(numbers: Tensor, indices: Tensor, batch_size: int) -> Tensor:
    """numbers [K*B] of the same samples [S] of every key: [K*S]. IndexError for a sample that does not exist."""
    try:
        if numbers.shape[0] == batch_size:
            return numbers.index_select(0, indices)
        return numbers.view(-1, batch_size).index_select(1, indices).flatten()
    except (IndexError, RuntimeError):
        bad = indices[(indices < 0) | (indices >= batch_size)]
        if not bad.shape[0]:
            raise
        raise IndexError(f"indices: {int(bad[0])} is outside [0, {batch_size}), the bags that there are") from None


def positions(starts: Tensor, lengths: Tensor, total: int | None) -> Tensor:
    """The numbers starts[b] ... starts[b] + lengths[b] - 1 of every bag: [M] int64."""
    ends = lengths.cumsum(0)
    lengths_sum = int(ends[-1]) if ends.shape[0] else 0
    if total is not None and total != lengths_sum:
        raise ValueError(f"selected_lengths_sum is {total}, but the selected lengths sum to {lengths_sum}")
    if lengths_sum > MANY:
        require_memory(f"the selected lengths, which sum to {lengths_sum}", (lengths_sum,), torch.int64, starts.device)
    at = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=lengths_sum)
    return at.add_(torch.arange(lengths_sum, device=at.device))


def _all_within(lengths: Tensor, most: int) -> bool:
    # one by one, because sums that pass 2**63 come back too small
    low, high = lengths.aminmax()
    return int(low) >= 0 and int(high) <= most


def _what_is_wrong(lengths: Tensor, values: Tensor) -> str:
    if int(lengths.min()) < 0:
        return f"lengths must be >= 0, bag {int(lengths.argmin())} has {int(lengths.min())}"
    return f"lengths sum to {sum(lengths.tolist())}, values has {values.shape[0]} rows"


def check_offsets(offsets: Tensor, values: int) -> None:
    """ValueError unless offsets begin at 0, do not decrease and end within `values`. CPU only."""
    if offsets.shape[0] == 0:
        raise ValueError("offsets must have at least the leading 0, got none")
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets must begin with 0, got {int(offsets[0])}")
    if int(offsets[-1]) > values:
        raise ValueError(f"offsets end at {int(offsets[-1])}, values has {values}")
    fallen = offsets[1:] < offsets[:-1]
    if bool(fallen.any()):
        bag = int(fallen.nonzero()[0])
        raise ValueError(
            f"offsets must not decrease: bag {bag} goes from {int(offsets[bag])} to {int(offsets[bag + 1])}"
        )


def _select(
    values: Tensor,
    weights: Tensor | None,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    lengths_dtype: torch.dtype,
    selected_lengths_sum: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not runs_kernel(values):
        out, lengths, picked, ends = _select_torch(values, weights, offsets, indices, batch_size, selected_lengths_sum)
        return out, lengths.to(lengths_dtype, copy=True), picked, ends
    device, samples = values.device, indices.shape[0]
    keys = (offsets.shape[0] - 1) // batch_size if batch_size else 0
    bags = keys * samples
    lengths = torch.empty(bags, dtype=lengths_dtype, device=device)
    begins = torch.empty(bags, dtype=torch.int64, device=device)
    values, offsets, indices = values.contiguous(), offsets.contiguous(), indices.contiguous()
    if bags:
        blocks = (triton.cdiv(samples, _BLOCK), keys)
        _bags_kernel[blocks](offsets, indices, lengths, begins, samples, batch_size, _BLOCK)
    ends = offsets_of(lengths)
    # host sync: the size of the output, unless the caller knew it
    count = int(ends[-1]) if selected_lengths_sum is None else selected_lengths_sum
    if count > MANY:
        what = f"the selected lengths, which sum to {count} (selected_lengths_sum)"
        require_memory(what, (count, *values.shape[1:]), values.dtype, device)
    out = torch.empty((count, *values.shape[1:]), dtype=values.dtype, device=device)
    out_weights = torch.empty(0 if weights is None else count, dtype=_weights_dtype(weights), device=device)
    if count == 0:
        return out, lengths, out_weights, ends
    steps, grid = bags.bit_length() + 1, (triton.cdiv(count, _BLOCK),)
    if values.dim() == 1:
        weighted = weights is not None
        _select_kernel[grid](
            values, weights.contiguous() if weights is not None else values, ends, begins, out,
            out_weights if weighted else out, count, values.shape[0], bags, steps, weighted, _BLOCK,
        )  # fmt: skip
        return out, lengths, out_weights, ends
    dim = values.shape[1]
    if dim == 0:
        return out, lengths, out_weights, ends
    at = torch.empty(count, dtype=torch.int64, device=device)
    align = row_alignment(dim, values.itemsize) if values.data_ptr() % 16 == 0 else 1
    # two launches, as in lookup/sequence.py
    _sources_kernel[grid](ends, begins, at, count, values.shape[0], bags, dim // align, steps, _BLOCK)
    block_n, block_d, warps = configs.gather_tile("gather", values, dim, align)
    tiles = (triton.cdiv(count, block_n), triton.cdiv(dim, block_d))
    _gather_kernel[tiles](values, at, out, count, dim, block_n, block_d, align, num_warps=warps)
    return out, lengths, out_weights, ends


def _select_torch(
    values: Tensor,
    weights: Tensor | None,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    selected_lengths_sum: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_offsets(offsets, values.shape[0])
    chosen = pick(offsets.diff(), indices, batch_size)
    at = positions(pick(offsets[:-1], indices, batch_size), chosen, selected_lengths_sum)
    picked = values.new_empty(0, dtype=_weights_dtype(weights)) if weights is None else weights.index_select(0, at)
    return values.index_select(0, at), chosen, picked, offsets_of(chosen)


def _weights_dtype(weights: Tensor | None) -> torch.dtype:
    return torch.float32 if weights is None else weights.dtype


def _fake(
    values: Tensor,
    weights: Tensor | None,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    lengths_dtype: torch.dtype,
    selected_lengths_sum: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count: Any = selected_lengths_sum
    if count is None:
        count = torch.library.get_ctx().new_dynamic_size()
    bags = (offsets.shape[0] - 1) // batch_size * indices.shape[0] if batch_size else 0
    return (
        values.new_empty((count, *values.shape[1:])),
        offsets.new_empty(bags, dtype=lengths_dtype),
        values.new_empty(0 if weights is None else count, dtype=_weights_dtype(weights)),
        offsets.new_empty(bags + 1, dtype=torch.int64),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    values, weights, offsets, indices, ctx.batch_size, _, _ = inputs
    ctx.save_for_backward(indices, offsets, output[3])
    ctx.rows, ctx.weighted = values.shape[0], weights is not None
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any, weights_grad: Tensor | None, __: Any) -> tuple[Any, ...]:
    indices, offsets, ends = ctx.saved_tensors

    def added(upstream: Tensor | None, wanted: bool) -> Tensor | None:
        if upstream is None or not wanted:
            return None
        return torch.ops.shardwise.jagged_index_add(upstream, ends, indices, offsets, ctx.batch_size, ctx.rows)  # type: ignore[no-any-return]

    by_weights = added(weights_grad, ctx.weighted and ctx.needs_input_grad[1])
    return added(grad, ctx.needs_input_grad[0]), by_weights, None, None, None, None, None


register_autograd(
    register(
        "jagged_index_select(Tensor values, Tensor? weights, Tensor offsets, Tensor indices, SymInt batch_size,"
        " ScalarType lengths_dtype, SymInt? selected_lengths_sum) -> (Tensor, Tensor, Tensor, Tensor)",
        _select,
        _fake,
    ),
    _backward,
    _setup_context,
)
