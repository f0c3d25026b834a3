"""Move whole segments of values, and add up what was moved from one place: the two halves of every permute.

Shapes: V [N, ...] values in T segments, input offsets I [T + 1]; P [S] which segment comes where, repeats and omissions
allowed; output offsets O [S + 1], O[s + 1] - O[s] the size of segment P[s]; Y [M, ...] the moved values, M = O[S].
Bytes moved: 1-D values of one call: 2 M itemsize(V) each, and one search over S offsets a position for all of them;
rows: 2 M D itemsize(V), and 16 M for where each row lies. The sum of what was moved reads Y's gradient once and writes
V's, with 16 N for the segment of each row. Copies of one segment are added in the order of Y, in fp32 or fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import configs
from .._op import (
    INTERPRETED,
    gather_tile,
    launch_options,
    multiple,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..cpu import segments as cpu_segments
from ..features import row_alignment, segment_of_position
from ..lookup.sequence import _gather_kernel
from ..memory import MANY, require_memory, require_sortable

# an id for each thread: what is read and written one after another then uses its sectors (perf/compile/sectors.py)
_BLOCK = 64 if INTERPRETED else 128
INDEX_DTYPES = (torch.int32, torch.int64)


def positions_ref(permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, total: int) -> Tensor:
    """Where each of `total` output positions comes from: [M] int64, -1 for those that no segment owns."""
    position = torch.arange(total, device=permute.device)
    if permute.shape[0] == 0 or input_offsets.shape[0] < 2:
        return position * 0 - 1
    # the last segment that begins at or before the position
    s = torch.searchsorted(output_offsets.long(), position, right=True) - 1
    owned = (s >= 0) & (s < permute.shape[0])
    s = s.clamp(0, permute.shape[0] - 1)
    p = permute[s].long()
    owned &= (p >= 0) & (p < input_offsets.shape[0] - 1)
    begin = input_offsets[p.clamp(0, input_offsets.shape[0] - 2)].long()
    return torch.where(owned, begin + position - output_offsets[s], -1)


def move_segments_ref(
    values: Sequence[Tensor], permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, total: int | None = None
) -> list[Tensor]:
    """Y[O[s] + i] = V[I[P[s]] + i], zeros where that is no position of V, for each of the tensors in `values`."""
    total = int(output_offsets[-1]) if total is None else total
    at = positions_ref(permute, input_offsets, output_offsets, total)
    out = []
    for v in values:
        good = (at >= 0) & (at < v.shape[0])
        rows = v[torch.where(good, at, 0)] if v.shape[0] else v.new_zeros(total, *v.shape[1:])
        out.append(
            torch.where(good.view(-1, *[1] * (v.dim() - 1)), rows, torch.zeros((), dtype=v.dtype, device=v.device))
        )
    return out


def collect_segments_ref(
    grads: Sequence[Tensor], permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, size: int
) -> list[Tensor]:
    """The transpose of `move_segments_ref`: what was moved from one of `size` positions is added up there."""
    out = []
    for grad in grads:
        at = positions_ref(permute, input_offsets, output_offsets, grad.shape[0])
        good = (at >= 0) & (at < size)
        wide = grad if grad.dtype == torch.float64 else grad.float()
        total = wide.new_zeros(size, *grad.shape[1:]).index_add_(0, at[good], wide[good])
        out.append(total.to(grad.dtype))
    return out


@triton.jit(do_not_specialize=["N", "S", "T", "M", "steps"], do_not_specialize_on_alignment=["V", "W", "P", "I", "O"])
def _move_kernel(  # type: ignore[no-untyped-def]
    V,
    W,
    Y,
    Z,
    P,
    I,
    O,
    N,
    S,
    T,
    M,
    steps,
    TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < M
    s = segment_of_position(O, position, S, steps)
    begin = tl.load(O + s, mask=here, other=0).to(tl.int64)
    end = tl.load(O + s + 1, mask=here, other=0).to(tl.int64)
    p = tl.load(P + s, mask=here, other=-1).to(tl.int64)
    owned = here & (position >= begin) & (position < end) & (p >= 0) & (p < T)
    source = tl.load(I + p, mask=owned, other=-1).to(tl.int64) + position - begin
    owned &= (source >= 0) & (source < N)
    tl.store(Y + position, tl.load(V + source, mask=owned, other=0), mask=here)
    if TWO:
        tl.store(Z + position, tl.load(W + source, mask=owned, other=0), mask=here)


@triton.jit(do_not_specialize=["N", "S", "T", "M", "steps"], do_not_specialize_on_alignment=["P", "I", "O"])
def _locate_kernel(  # type: ignore[no-untyped-def]
    P,
    I,
    O,
    at,
    N,
    S,
    T,
    M,
    UNIT,
    steps,
    WHAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < M
    s = segment_of_position(O, position, S, steps)
    begin = tl.load(O + s, mask=here, other=0).to(tl.int64)
    owned = here & (position >= begin)
    if WHAT == "place":
        source = position - begin
    else:
        owned &= position < tl.load(O + s + 1, mask=here, other=0)
        if WHAT == "segment":
            source = s
        else:
            p = tl.load(P + s, mask=owned, other=-1).to(tl.int64)
            owned &= (p >= 0) & (p < T)
            source = tl.load(I + p, mask=owned, other=-1).to(tl.int64) + position - begin
            owned &= (source >= 0) & (source < N)
    tl.store(at + position, tl.where(owned, source * UNIT, -1).to(at.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N", "M"], do_not_specialize_on_alignment=["I", "O"])
def _collect_kernel(  # type: ignore[no-untyped-def]
    G,
    Q,
    segment,
    order,
    first,
    I,
    O,
    N,
    M,
    D,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = n < N
    t = tl.load(segment + n, mask=here, other=-1).to(tl.int64)
    owned = t >= 0
    begin = tl.load(I + t, mask=owned, other=0).to(tl.int64)
    low = tl.load(first + t, mask=owned, other=0)
    copies = (tl.load(first + t + 1, mask=owned, other=0) - low).to(tl.int32)
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = d < D
    total = tl.zeros((BLOCK_N, BLOCK_D), WIDE)
    for i in range(0, tl.max(copies, 0)):
        live = i < copies
        s = tl.load(order + low + i, mask=live, other=0)
        m = tl.load(O + s, mask=live, other=-1).to(tl.int64) + n - begin
        live &= (m >= 0) & (m < M)
        total += tl.load(G + (m * D)[:, None] + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0).to(WIDE)
    tl.store(
        Q + (n * D)[:, None] + d[None, :], total.to(Q.dtype.element_ty), mask=here[:, None] & in_row[None, :]
    )  # fmt: skip


def locate(
    what: str,
    offsets: Tensor,
    total: int,
    dtype: torch.dtype,
    unit: int = 1,
    permute: Tensor | None = None,
    input_offsets: Tensor | None = None,
    size: int = 0,
) -> Tensor:
    """Of each of `total` positions in segments [S] that begin at `offsets`, by a kernel: [total] of `dtype`.

    "place": its place in its segment (whose last end at `total`). "segment": the number of its segment, times `unit`.
    "source": where in `size` values the moved segment has it, times `unit`. -1 where there is none.
    """
    at = torch.empty(total, dtype=dtype, device=offsets.device)
    S = offsets.shape[0] - (what != "place")
    if total == 0 or S < 1:
        return at.fill_(-1)
    offsets = offsets.contiguous()
    permute = offsets if permute is None else permute.contiguous()
    starts = offsets if input_offsets is None else input_offsets.contiguous()
    _locate_kernel[(triton.cdiv(total, _BLOCK),)](
        permute, starts, offsets, at, size, S, starts.shape[0] - 1, total, unit, S.bit_length() + 1, what, _BLOCK
    )
    return at


def gather_rows(values: Tensor, at: Tensor, unit: int) -> Tensor:
    """Rows of contiguous values [N, ...] that begin at the elements unit * at [M], zeros where at < 0, by a kernel."""
    out = values.new_empty(at.shape[0], *values.shape[1:])
    if out.numel() == 0:
        return out
    source, target = _numbers(values), _numbers(out)
    D = prod(values.shape[1:])
    block_n, block_d, warps = configs.gather_tile("gather", values, D, unit)
    grid = (triton.cdiv(at.shape[0], block_n), triton.cdiv(D, block_d))
    _gather_kernel[grid](source, at, target, at.shape[0], D, block_n, block_d, unit, num_warps=warps)
    return out


def unit_of(values: Tensor) -> int:
    """Elements to which every row of contiguous values [N, ...] is aligned."""
    columns = prod(values.shape[1:])
    return row_alignment(columns, values.itemsize) if columns and values.data_ptr() % 16 == 0 else 1


def _numbers(values: Tensor) -> Tensor:
    # a copy need not know what the bits mean; bool and 8-bit floats are nothing that a kernel loads
    return values.view(torch.int8) if values.itemsize == 1 else values


def _move_segments(
    values: Sequence[Tensor], permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, total: int | None
) -> list[Tensor]:
    if total is None:
        # host sync: nobody gave the number of values
        total = int(output_offsets[-1])
    if total > MANY:
        for v in values:
            what = f"the permuted or selected lengths, which sum to {total}"
            require_memory(what, (total, *v.shape[1:]), v.dtype, v.device)
    if not runs_kernel(permute):
        return move_segments_ref(values, permute, input_offsets, output_offsets, total)
    values = [v.contiguous() for v in values]
    permute, starts, offsets = permute.contiguous(), input_offsets.contiguous(), output_offsets.contiguous()
    outs = [v.new_empty(total, *v.shape[1:]) for v in values]
    S, T, N = permute.shape[0], starts.shape[0] - 1, values[0].shape[0]
    if total == 0:
        return outs
    if S == 0 or T == 0 or N == 0:
        return [out.zero_() for out in outs]
    flat = [i for i, v in enumerate(values) if v.dim() == 1]
    # ids and their weights at once
    for pair in (flat[k : k + 2] for k in range(0, len(flat), 2)):
        sources, targets = ([_numbers(some[i]) for i in pair] for some in (values, outs))
        _move_kernel[(triton.cdiv(total, _BLOCK),)](
            sources[0], sources[-1], targets[0], targets[-1], permute, starts, offsets, N, S, T, total,
            S.bit_length() + 1, len(pair) == 2, _BLOCK,
        )  # fmt: skip
    for i, v in enumerate(values):
        if v.dim() > 1 and outs[i].numel():
            unit, D = unit_of(v), prod(v.shape[1:])
            at = locate("source", offsets, total, torch.int64, D // unit, permute, starts, N)
            outs[i] = gather_rows(v, at, unit)
    return outs


def _collect_segments(
    grads: Sequence[Tensor], permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, size: int
) -> list[Tensor]:
    if not runs_kernel(permute):
        return collect_segments_ref(grads, permute, input_offsets, output_offsets, size)
    outs = [grad.new_empty(size, *grad.shape[1:]) for grad in grads]
    T = input_offsets.shape[0] - 1
    if size == 0:
        return outs
    if T == 0 or permute.shape[0] == 0 or output_offsets.shape[0] == 0:
        return [out.zero_() for out in outs]
    require_sortable("the gradient of moved segments", "segments", permute)
    starts, offsets = input_offsets.contiguous(), output_offsets.contiguous()
    # the copies of a segment, in their order: entries first[t] ... first[t + 1] - 1
    keys, order = torch.sort(permute, stable=True)
    first = torch.searchsorted(keys, torch.arange(T + 1, dtype=keys.dtype, device=keys.device))
    segment = locate("segment", starts, size, torch.int64)
    for grad, out in zip(grads, outs, strict=True):
        grad = grad.contiguous()
        D = prod(grad.shape[1:])
        if out.numel() == 0:
            continue
        align = min(unit_of(grad), 16 // grad.itemsize)
        block_n, block_d, warps = (_BLOCK, 1, 4) if D == 1 else gather_tile(D, grad.itemsize, align)
        wide = tl.float64 if grad.dtype == torch.float64 else tl.float32
        grid = (triton.cdiv(size, block_n), triton.cdiv(D, block_d))
        _collect_kernel[grid](
            grad, out, segment, order, first, starts, offsets, size, grad.shape[0], D, wide, block_n, block_d, align,
            **launch_options(warps, 96),
        )  # fmt: skip
    return outs


def _fake_move(values: Any, permute: Any, input_offsets: Any, output_offsets: Any, total: Any) -> Any:
    if total is None:
        total = torch.library.get_ctx().new_dynamic_size()
    return [v.new_empty((total, *v.shape[1:])) for v in values]


def _setup_move(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    values, *where, _ = inputs
    ctx.save_for_backward(*where)
    ctx.size = values[0].shape[0] if values else 0


def _backward_of_move(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    wanted = [grad for grad in grads if grad is not None]
    collected = iter(torch.ops.shardwise.collect_segments(wanted, *ctx.saved_tensors, ctx.size) if wanted else ())
    return [None if grad is None else next(collected) for grad in grads], None, None, None, None


def _setup_collect(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grads, *where, _ = inputs
    ctx.save_for_backward(*where)
    ctx.total = grads[0].shape[0] if grads else 0


def _backward_of_collect(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    wanted = [grad for grad in grads if grad is not None]
    moved = iter(torch.ops.shardwise.move_segments(wanted, *ctx.saved_tensors, ctx.total) if wanted else ())
    return [None if grad is None else next(moved) for grad in grads], None, None, None, None


register_autograd(
    register(
        "move_segments(Tensor[] values, Tensor permute, Tensor input_offsets, Tensor output_offsets, SymInt? total)"
        " -> Tensor[]",
        _move_segments,
        _fake_move,
    ),
    _backward_of_move,
    _setup_move,
)
register_autograd(
    register(
        "collect_segments(Tensor[] grads, Tensor permute, Tensor input_offsets, Tensor output_offsets, SymInt size)"
        " -> Tensor[]",
        _collect_segments,
        lambda grads, permute, input_offsets, output_offsets, size: [
            grad.new_empty((size, *grad.shape[1:])) for grad in grads
        ],
    ),
    _backward_of_collect,
    _setup_collect,
)


def move_by(plan: cpu_segments.Plan, values: Tensor) -> Tensor:
    """The segments of values in the order of a plan, on the CPU; differentiable."""
    if values.requires_grad and torch.is_grad_enabled():
        return _Move.apply(values, plan)  # type: ignore[no-any-return, no-untyped-call]
    return cpu_segments.moved_by(plan, values)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, plan: cpu_segments.Plan) -> Tensor:
        ctx.plan = plan
        return cpu_segments.moved_by(plan, values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Collect.apply(grads[0], ctx.plan), None  # type: ignore[no-untyped-call]


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, plan: cpu_segments.Plan) -> Tensor:
        ctx.plan = plan
        return cpu_segments.collected_by(plan, grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _Move.apply(grads[0], ctx.plan), None  # type: ignore[no-untyped-call]


def check_index(name: str, tensor: Tensor, dims: int) -> None:
    """TypeError or ValueError unless a tensor is `dims`-D, int32 or int64."""
    if tensor.dtype not in INDEX_DTYPES or tensor.dim() != dims:
        raise bad_index(name, tensor, dims)


def bad_index(name: str, tensor: Tensor, dims: int) -> Exception:
    """The error for a tensor that is not `dims`-D of int32 or int64."""
    if tensor.dtype not in INDEX_DTYPES:
        return TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    return ValueError(f"{name} must be {dims}-D, got shape {list(tensor.shape)}")


def positions_of(starts: Tensor, sizes: Tensor, total: int) -> Tensor:
    """starts[s], starts[s] + 1, ... sizes[s] of them, one segment after another: [total] int64, on the CPU."""
    if total == 0:
        return starts.new_empty(0, dtype=torch.int64)
    if total > MANY:
        require_memory(f"the permuted lengths, which sum to {total}", (total,), torch.int64)
    ends = sizes.cumsum(0, dtype=torch.int64)
    # from one position to the next is 1, and more or less where a segment begins; empty ones begin together
    jumps = starts.to(torch.int64, copy=True)
    jumps[1:] -= (starts + sizes)[:-1]
    jumps[0] -= 1
    steps = torch.ones(total + 1, dtype=torch.int64, device="cpu").index_add_(0, ends - sizes, jumps)
    return steps[:total].cumsum_(0)
