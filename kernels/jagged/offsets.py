"""Lengths, offsets and sums of bags: consecutive segments of values.

Letters: B bags, N values; lengths L [B], offsets O [B + 1] first value of each bag and then the end, V [N, ...].
Bytes moved: a sum of segments reads V once and O, and writes Y [B, ...]; its gradient, the other way round, also writes
and reads 8 bytes a value that say which bag it belongs to; a place in a bag, or an inverse, is written once.
`complete_cumsum` reads L and writes O; of more than 16,384 lengths a row, or of other integers, it is torch's own ops.
`offsets_to_lengths`, `pack_segments` and `unpack_segments` are torch's own ops on a GPU.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import configs
from .._op import (
    INTERPRETED,
    direct,
    launch_options,
    multiple,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
    unwatched,
)
from ..cpu import padded as cpu_padded, segments as cpu_segments
from ..memory import MANY, require_memory
from .padded import jagged_to_padded_dense, padded_dense_to_jagged
from .segments import INDEX_DTYPES, bad_index, check_index, gather_rows, locate, positions_of, unit_of

# an id for each thread: what is read and written one after another then uses its sectors (perf/compile/sectors.py)
_BLOCK = 64 if INTERPRETED else 128
# lengths that a program of `complete_cumsum` adds up at a time, and at most
_CUMSUM_BLOCK, _CUMSUM_MOST = (16, 1 << 14) if INTERPRETED else (2048, 1 << 14)
# segments and positions of a tile of 1-D values
_SUM_SEGMENTS, _SUM_POSITIONS = (4, 8) if INTERPRETED else (16, 32)

_empty_like = torch.empty_like


def complete_cumsum_ref(lengths: Tensor) -> Tensor:
    """O[b] = L[0] + ... + L[b - 1], in each row."""
    return F.pad(lengths.cumsum(-1, dtype=lengths.dtype), (1, 0))


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["L"])
def _cumsum_kernel(L, O, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    L += row * N
    O += row * (N + 1)
    total = tl.zeros((), O.dtype.element_ty)
    tl.store(O, total)
    for begin in range(0, N, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        length = tl.load(L + i, mask=i < N, other=0)
        tl.store(O + i + 1, total + tl.cumsum(length, 0), mask=i < N)
        total += tl.sum(length, 0)


def _complete_cumsum(lengths: Tensor) -> Tensor:
    n, rows = lengths.shape[-1], prod(lengths.shape[:-1])
    if not (runs_kernel(lengths) and n and rows):
        return complete_cumsum_ref(lengths)
    out = lengths.new_empty((*lengths.shape[:-1], n + 1))
    # of three sizes, as each is compiled by itself
    block = next((size for size in (128, 512) if n <= size <= _CUMSUM_BLOCK), _CUMSUM_BLOCK)
    # 8 numbers of 4 bytes a thread, 4 of 8: 8 of them spill (triton 3.6.0, sm_80)
    warps = max(1, min(2 * lengths.itemsize, block // 128))
    _cumsum_kernel[(rows,)](lengths.contiguous(), out, n, block, **launch_options(warps, 96))
    return out


register(
    "complete_cumsum(Tensor lengths) -> Tensor",
    _complete_cumsum,
    lambda lengths: lengths.new_empty((*lengths.shape[:-1], lengths.shape[-1] + 1)),
)


def complete_cumsum(lengths: Tensor) -> Tensor:
    """Offsets [B + 1] of lengths [B], or [K, B + 1] of [K, B]: sums of all before, in the dtype of `lengths`.

    FBGEMM: `asynchronous_complete_cumsum`.

    Raises:
        ValueError: `lengths` is a scalar.
    """
    if lengths.dim() == 0:
        raise ValueError("lengths must have a dimension, got shape []")
    if lengths.dtype in INDEX_DTYPES and direct(lengths):
        offsets = cpu_segments.complete_cumsum(lengths)
        if offsets is not None:
            return offsets
    elif lengths.dtype in INDEX_DTYPES and (lengths.is_cuda or INTERPRETED) and _is_one_launch(lengths):
        return torch.ops.shardwise.complete_cumsum(lengths)  # type: ignore[no-any-return]
    return complete_cumsum_ref(lengths)


def _is_one_launch(lengths: Tensor) -> bool:
    """Whether one program sums a row up in less time than torch's four launches take; compilers fuse torch's own."""
    return runs_kernel(lengths) and not torch.compiler.is_compiling() and lengths.shape[-1] <= _CUMSUM_MOST


def offsets_to_lengths(offsets: Tensor) -> Tensor:
    """Lengths [B] of offsets [B + 1], or [K, B] of [K, B + 1]: the inverse of `complete_cumsum`.

    Raises:
        ValueError: there is no entry.
    """
    if offsets.dim() == 0 or offsets.shape[-1] == 0:
        raise ValueError(f"offsets must have at least one entry, got shape {list(offsets.shape)}")
    return offsets[..., 1:] - offsets[..., :-1]


def offsets_range_ref(offsets: Tensor, range_size: int) -> Tensor:
    """0, 1, ... within each bag; the last ends at `range_size`."""
    position = torch.arange(range_size, device=offsets.device, dtype=offsets.dtype)
    if offsets.shape[0] == 0:
        return position * 0 - 1
    bag = torch.searchsorted(offsets, position, right=True) - 1
    return torch.where(bag >= 0, position - offsets[bag.clamp(min=0)], -1)


def offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """The place of each of `range_size` values in its bag: 0, 1, ... in every bag.

    Shapes: offsets [B], int32 or int64: where bags begin, the last of which ends at `range_size`; so offsets [B + 1]
    that end with `range_size` say the same. FBGEMM has the op by this name.

    Returns:
        [range_size], dtype of `offsets`; on CUDA -1 for values before the first bag.

    Raises:
        ValueError: on the CPU, offsets do not begin with 0, decrease, or pass `range_size`.
        TypeError: offsets are neither int32 nor int64.
    """
    check_index("offsets", offsets, 1)
    if range_size < 0:
        raise ValueError(f"range_size must be >= 0, got {range_size}")
    if direct(offsets):
        return _offsets_range(offsets, range_size)
    return torch.ops.shardwise.offsets_range(offsets, range_size)  # type: ignore[no-any-return]


def _offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    if range_size > MANY:
        require_memory(f"range_size {range_size}", (range_size,), offsets.dtype, offsets.device)
    if runs_kernel(offsets):
        return locate("place", offsets, range_size, offsets.dtype)
    if offsets.is_cuda:
        return offsets_range_ref(offsets, range_size)
    places = cpu_segments.places(offsets, range_size)
    if places is None:
        if range_size or offsets.shape[0]:
            cpu_segments.check_begins(offsets, range_size)
        sizes = torch.cat([offsets, offsets.new_tensor([range_size])]).diff()
        places = positions_of(torch.zeros_like(offsets), sizes, range_size).to(offsets.dtype)
    return places


register(
    "offsets_range(Tensor offsets, SymInt range_size) -> Tensor",
    _offsets_range,
    lambda offsets, range_size: offsets.new_empty((range_size,)),
)


def invert_permute_ref(permute: Tensor) -> Tensor:
    """Q[P[i]] = i."""
    return torch.argsort(permute).to(permute.dtype)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["P"])
def _invert_kernel(P, Q, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(P + i, mask=i < N, other=-1).to(tl.int64)
    tl.store(Q + p, i.to(Q.dtype.element_ty), mask=(p >= 0) & (p < N))


def invert_permute(permute: Tensor) -> Tensor:
    """The inverse Q of a permutation P of 0 ... n - 1: Q[P[i]] = i. Shapes: [n] -> [n], int32 or int64.

    FBGEMM has the op by this name. What is no permutation has no inverse: on CUDA, which is not waited for, entries
    that nothing is written to are -1.

    Raises:
        IndexError: on the CPU, an entry is not in 0 ... n - 1.
        ValueError: on the CPU, an entry is there twice; or the shape is not [n].
        TypeError: the dtype is neither int32 nor int64.
    """
    if permute.dtype not in INDEX_DTYPES or permute.dim() != 1:
        raise bad_index("permute", permute, 1)
    if type(permute) is Tensor and permute.is_cpu and unwatched():
        return _invert_cpu(permute)
    return torch.ops.shardwise.invert_permute(permute)  # type: ignore[no-any-return]


def _invert_permute(permute: Tensor) -> Tensor:
    if runs_kernel(permute):
        n = permute.shape[0]
        out = torch.full_like(permute, -1, memory_format=torch.contiguous_format)
        if n:
            _invert_kernel[(triton.cdiv(n, _BLOCK),)](permute.contiguous(), out, n, _BLOCK)
        return out
    return invert_permute_ref(permute) if permute.is_cuda else _invert_cpu(permute)


def _invert_cpu(permute: Tensor) -> Tensor:
    compiled = cpu_segments.loops()
    if compiled is not None:
        permute = permute.contiguous()
        inverse = _empty_like(permute)
        bad = compiled.invert(permute.data_ptr(), permute.itemsize, permute.numel(), inverse.data_ptr())
        if bad < 0:
            cpu_segments.check_order(permute, permute.shape[0])
            raise ValueError(f"permute has {int(permute[-bad - 1])} twice, it is no permutation")
        return inverse
    n = permute.shape[0]
    cpu_segments.check_order(permute, n)
    inverse = torch.full_like(permute, -1)
    inverse.scatter_(0, permute.long(), torch.arange(n, dtype=permute.dtype, device="cpu"))
    if n and int(inverse.min()) < 0:
        raise ValueError(f"permute lacks {int((inverse < 0).int().argmax())}, it is no permutation")
    return inverse


register(
    "invert_permute(Tensor permute) -> Tensor",
    _invert_permute,
    lambda permute: permute.new_empty(permute.shape),
)


def segment_sum_ref(offsets: Tensor, values: Tensor, batch_size: int = 1) -> Tensor:
    """Y[b] = V[O[b]] + ... + V[O[b + 1] - 1], offsets counted in `batch_size` values."""
    ends = (offsets * batch_size).tolist()
    wide = _wide(values)
    sums = [wide[a:b].sum(0, dtype=wide.dtype) for a, b in zip(ends, ends[1:], strict=False)]
    return torch.stack(sums).to(values.dtype) if sums else values.new_zeros(0, *values.shape[1:])


def segment_spread_ref(offsets: Tensor, sums: Tensor, size: int, batch_size: int = 1) -> Tensor:
    """The transpose of `segment_sum_ref`: each of `size` values gets the number of its segment, others 0."""
    bag = torch.searchsorted(offsets * batch_size, torch.arange(size, device=sums.device), right=True) - 1
    inside = (bag >= 0) & (bag < sums.shape[0])
    rows = sums[bag.clamp(0, sums.shape[0] - 1)] if sums.shape[0] else sums.new_zeros(size, *sums.shape[1:])
    return torch.where(
        inside.view(-1, *[1] * (sums.dim() - 1)), rows, torch.zeros((), dtype=sums.dtype, device=sums.device)
    )


@triton.jit(do_not_specialize=["S", "N", "EACH"], do_not_specialize_on_alignment=["V", "O"])
def _segment_sum_kernel(  # type: ignore[no-untyped-def]
    V,
    O,
    Y,
    S,
    N,
    EACH,
    WIDE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)
    here = s < S
    # offsets out of order must not be followed outside V
    begin = tl.maximum(tl.load(O + s, mask=here, other=0).to(tl.int64) * EACH, 0)
    end = tl.minimum(tl.load(O + s + 1, mask=here, other=0).to(tl.int64) * EACH, N)
    total = tl.zeros((BLOCK_S, BLOCK_L), WIDE)
    for first in range(0, tl.max(end - begin, 0), BLOCK_L):
        at = begin[:, None] + first + tl.arange(0, BLOCK_L)[None, :]
        total += tl.load(V + at, mask=at < end[:, None], other=0).to(WIDE)
    tl.store(Y + s, tl.sum(total, 1).to(Y.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["S", "N", "EACH"], do_not_specialize_on_alignment=["O"])
def _segment_rows_kernel(  # type: ignore[no-untyped-def]
    V,
    O,
    Y,
    S,
    N,
    D,
    EACH,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ALIGN: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = s < S
    begin = tl.maximum(tl.load(O + s, mask=here, other=0).to(tl.int64) * EACH, 0)
    end = tl.minimum(tl.load(O + s + 1, mask=here, other=0).to(tl.int64) * EACH, N)
    D = multiple(D, ALIGN)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = (d < D)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_D), WIDE)
    for i in range(0, tl.max(end - begin, 0), 2):
        row = begin + i
        v0 = tl.load(V + (row * D)[:, None] + d[None, :], mask=(row < end)[:, None] & in_row, other=0)
        v1 = tl.load(V + (row * D + D)[:, None] + d[None, :], mask=(row + 1 < end)[:, None] & in_row, other=0)
        total += v0.to(WIDE)
        total += v1.to(WIDE)
    tl.store(Y + (s * D)[:, None] + d[None, :], total.to(Y.dtype.element_ty), mask=here[:, None] & in_row)


def segment_sum(offsets: Tensor, values: Tensor, *, batch_size: int = 1) -> Tensor:
    """Sums of consecutive segments of `values`; differentiable.

    Shapes: offsets [B + 1] (int32 or int64), counted in `batch_size` values; values [N, ...], of which those outside
    of every segment have no say. Sums are kept in fp32, fp64 or int64 and returned in the dtype of values.
    FBGEMM: `segment_sum_csr(batch_size, offsets, values)`, for 1-D values.

    Returns:
        [B, ...]: 0 for an empty segment.

    Raises:
        ValueError: shapes do not fit, `batch_size` is not positive; on the CPU, offsets decrease or leave 0 ... N.
        TypeError: offsets are neither int32 nor int64.
    """
    if offsets.dtype not in INDEX_DTYPES or offsets.dim() != 1:
        raise bad_index("offsets", offsets, 1)
    segments, dims = offsets.numel() - 1, values.dim()
    if segments < 0:
        raise ValueError("offsets must have at least one entry, got none")
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if dims == 0:
        raise ValueError("values must have a first dimension, got shape []")
    plain = type(offsets) is Tensor and type(values) is Tensor and offsets.is_cpu and values.is_cpu
    if plain and not values.requires_grad and unwatched():
        compiled, kind = cpu_segments.loops(), cpu_segments.KINDS.get(values.dtype)
        if dims > 1 or compiled is None or kind is None or values.numel() > cpu_segments.FEW:
            return _sum_cpu(offsets, values, batch_size)
        # in this frame, as a few sums take less time than a call or two
        offsets, values, sums = offsets.contiguous(), values.contiguous(), values.new_empty(segments)
        most = values.numel() // batch_size
        if compiled.segment_sum(
            offsets.data_ptr(),
            offsets.itemsize,
            batch_size,
            most,
            values.data_ptr(),
            kind,
            sums.data_ptr(),
            1,
            0,
            segments,
        ):
            cpu_segments.check_ends(offsets, most)
        return sums
    return torch.ops.shardwise.segment_sum(offsets, values, batch_size)  # type: ignore[no-any-return]


def _segment_sum(offsets: Tensor, values: Tensor, batch_size: int) -> Tensor:
    if not runs_kernel(values):
        return segment_sum_ref(offsets, values, batch_size) if values.is_cuda else _sum_cpu(offsets, values, batch_size)
    offsets, values = offsets.contiguous(), values.contiguous()
    S, D = offsets.shape[0] - 1, prod(values.shape[1:])
    out = values.new_empty(S, *values.shape[1:])
    if out.numel() == 0:
        return out
    wide = {torch.float64: tl.float64}.get(values.dtype, tl.float32 if values.is_floating_point() else tl.int64)
    if D == 1:
        _segment_sum_kernel[(triton.cdiv(S, _SUM_SEGMENTS),)](
            values, offsets, out, S, values.shape[0], batch_size, wide, _SUM_SEGMENTS, _SUM_POSITIONS
        )
        return out
    align = unit_of(values)
    length = configs.length_class(values.shape[0], S)
    block_n, block_d, warps = configs.gather_tile("segment_rows", values, D, align, length)
    grid = (triton.cdiv(S, block_n), triton.cdiv(D, block_d))
    _segment_rows_kernel[grid](
        values, offsets, out, S, values.shape[0], D, batch_size, wide, block_n, block_d, align,
        **launch_options(warps, 64),
    )  # fmt: skip
    return out


def _sum_cpu(offsets: Tensor, values: Tensor, batch_size: int) -> Tensor:
    sums = cpu_segments.segment_sum(offsets, values, batch_size)
    if sums is not None:
        return sums
    wide = _wide(values)
    sums = None if wide.dtype is values.dtype else cpu_segments.segment_sum(offsets, wide, batch_size)
    if sums is None:
        cpu_segments.check_ends(offsets, values.shape[0] // batch_size)
        begin, end = int(offsets[0]) * batch_size, int(offsets[-1]) * batch_size
        sizes = offsets.diff() * batch_size
        if wide.dim() == 2 and wide.is_floating_point() and end > begin:
            starts = (offsets[:-1] * batch_size - begin).long()
            sums = F.embedding_bag(torch.arange(begin, end, device="cpu"), wide, starts, mode="sum")
        else:
            bag = torch.arange(sizes.shape[0], device="cpu").repeat_interleave(sizes, output_size=end - begin)
            sums = wide.new_zeros(sizes.shape[0], *wide.shape[1:]).index_add_(0, bag, wide[begin:end])
    return sums if sums.dtype == values.dtype else sums.to(values.dtype)


def _wide(values: Tensor) -> Tensor:
    if values.is_floating_point():
        return values if values.dtype == torch.float64 else values.float()
    return values.long()


def _segment_spread(offsets: Tensor, sums: Tensor, size: int, batch_size: int) -> Tensor:
    if runs_kernel(sums):
        if sums.shape[0] == 0:
            return sums.new_zeros(size, *sums.shape[1:])
        sums = sums.contiguous()
        unit, D = unit_of(sums), prod(sums.shape[1:])
        at = locate("segment", offsets * batch_size, size, torch.int64, max(D // unit, 1))
        return gather_rows(sums, at, unit)
    if sums.is_cuda:
        return segment_spread_ref(offsets, sums, size, batch_size)
    ends = offsets * batch_size
    spread = sums.repeat_interleave(ends.diff(), 0, output_size=int(ends[-1] - ends[0]))
    before, after = int(ends[0]), size - int(ends[-1])
    return F.pad(spread, (*[0] * (2 * (spread.dim() - 1)), before, after)) if before or after else spread


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    offsets, values, ctx.batch_size = inputs
    ctx.save_for_backward(offsets)
    ctx.size = values.shape[0]


def _backward_of_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return None, torch.ops.shardwise.segment_spread(*ctx.saved_tensors, grad, ctx.size, ctx.batch_size), None


def _setup_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    offsets, _, _, ctx.batch_size = inputs
    ctx.save_for_backward(offsets)


def _backward_of_spread(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return None, torch.ops.shardwise.segment_sum(*ctx.saved_tensors, grad, ctx.batch_size), None, None


register_autograd(
    register(
        "segment_sum(Tensor offsets, Tensor values, SymInt batch_size) -> Tensor",
        _segment_sum,
        lambda offsets, values, batch_size: values.new_empty((offsets.shape[0] - 1, *values.shape[1:])),
    ),
    _backward_of_sum,
    _setup_sum,
)
register_autograd(
    register(
        "segment_spread(Tensor offsets, Tensor sums, SymInt size, SymInt batch_size) -> Tensor",
        _segment_spread,
        lambda offsets, sums, size, batch_size: sums.new_empty((size, *sums.shape[1:])),
    ),
    _backward_of_spread,
    _setup_spread,
)


def pack_segments(values: Tensor, lengths: Tensor, max_length: int) -> Tensor:
    """Segments side by side, cut to `max_length` or padded with zeros to it; differentiable.

    Shapes: values [N, ...], lengths [B] (int32 or int64), N = sum(lengths). FBGEMM has the op by this name.

    Returns:
        [B, max_length, ...].

    Raises:
        ValueError: shapes do not fit; on the CPU, lengths are negative or do not add up to N.
        TypeError: lengths are neither int32 nor int64.
    """
    check_index("lengths", lengths, 1)
    if max_length < 0:
        raise ValueError(f"max_length must be >= 0, got {max_length}")
    return jagged_to_padded_dense(values, _offsets_of(lengths, values.shape[0]), max_length)


def unpack_segments(packed: Tensor, lengths: Tensor, *, total: int | None = None) -> Tensor:
    """The segments that `pack_segments` packed, one after another: its inverse, and its gradient.

    Shapes: packed [B, max_length, ...], lengths [B] (int32 or int64). `total` is their sum where it is known: a GPU
    then need not be waited for. Differentiable.

    Returns:
        [total, ...]: zeros where a segment is longer than max_length.

    Raises:
        ValueError: shapes do not fit; on the CPU, lengths are negative or do not add up to `total`.
        TypeError: lengths are neither int32 nor int64.
    """
    check_index("lengths", lengths, 1)
    if packed.dim() < 2 or packed.shape[0] != lengths.shape[0]:
        raise ValueError(f"packed must be [{lengths.shape[0]}, max_length, ...], got shape {list(packed.shape)}")
    if total is None:
        # host sync: nobody gave the number of values
        total = int(lengths.sum())
    return padded_dense_to_jagged(packed, _offsets_of(lengths, total), total)


def _offsets_of(lengths: Tensor, total: int) -> Tensor:
    """Offsets of lengths; on the CPU lengths that are negative or do not add up to `total` raise."""
    if direct(lengths) and lengths.is_cpu:
        offsets = cpu_padded.offsets_of(lengths, total)
        if offsets is not None:
            return offsets
        if lengths.numel() and (least := int(lengths.min())) < 0:
            raise ValueError(f"lengths must be >= 0, got {least}")
        if int(lengths.sum()) != total:
            raise ValueError(f"lengths sum to {int(lengths.sum())}, expected {total} values")
    return complete_cumsum(lengths)
