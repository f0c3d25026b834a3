"""The segment ops on the CPU where numba is installed (the extra `cpu`): the loops of segments_loops.py.

Each function returns None where numba is missing; then the op runs on torch. Letters as in ../jagged/permute.py and
../jagged/offsets.py. Results do not depend on the number of threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import numba_loops
from ..huge_pages import in_huge_pages
from ..memory import MANY, require_memory
from .threads import run

# bytes that one thread moves before another can have been woken
_ALONE = 1 << 22
# numbers that one thread sums
FEW = _ALONE // 8

# the compiled loops; None where numba is missing or does not work
loops = partial(numba_loops.loops, "segments_loops")


class Plan(NamedTuple):
    """Which segments of which sizes come in which order: starts [S] and outs [S + 1] in `room`, for `values` values."""

    room: Any  # an array or tensor that owns the memory at `address`
    address: int
    segments: int
    values: int
    total: int


def plan_known(order: Sequence[int], sizes: Sequence[int], values: int) -> Plan | None:
    """The plan for an order and sizes that are Python ints.

    Raises as `plan_of` does.
    """
    compiled = loops()
    if compiled is None:
        return None
    given = array("q", [*order, *sizes])
    room = array("q", bytes(16 * len(order) + 8))
    at, address, S = given.buffer_info()[0], room.buffer_info()[0], len(order)
    total = compiled.plan(at, 8, S, at + 8 * S, 8, len(sizes), values, address, 0)
    if total < 0:
        raise_for_plan(total, order, sizes, values)
    return Plan(room, address, S, values, total)


def plan_of(permute: Tensor, sizes: Tensor, values: int, moved: Tensor | None = None) -> Plan | None:
    """The plan for segments `permute` [S] of sizes [T], both int32 or int64; their sizes [S] are left in `moved`.

    Raises:
        IndexError: an entry of `permute` is no segment.
        ValueError: a size is negative, or sizes do not add up to `values`.
    """
    compiled = loops()
    if compiled is None:
        return None
    S = permute.shape[0]
    permute, sizes = permute.contiguous(), sizes.contiguous()
    room = permute.new_empty(2 * S + 1, dtype=torch.int64)
    total = compiled.plan(
        permute.data_ptr(), permute.itemsize, S, sizes.data_ptr(), sizes.itemsize, sizes.shape[0], values,
        room.data_ptr(), 0 if moved is None else moved.data_ptr(),
    )  # fmt: skip
    if total < 0:
        raise_for_plan(total, permute, sizes, values)
    return Plan(room, room.data_ptr(), S, values, total)


def raise_for_plan(code: int, order: Sequence[int] | Tensor, sizes: Sequence[int] | Tensor, values: int) -> None:
    """Raise the error of a plan's code, which is negative."""
    compiled = loops()
    at, kind = divmod(-code, 4)
    if kind == compiled.BAD_ORDER:
        raise IndexError(f"permute[{at}] is {int(order[at])}, out of range for {len(sizes)} segments")
    if kind == compiled.BAD_SIZE:
        raise ValueError(f"lengths must be >= 0, segment {at} has {int(sizes[at])}")
    raise ValueError(f"lengths sum to {int(sum(sizes))}, values has {values}")


def moved_by(plan: Plan, values: Tensor) -> Tensor:
    """The segments of values [N, ...] in their order: [total, ...]."""
    values = values.contiguous()
    if plan.total > MANY:
        what = f"the permuted or selected lengths, which sum to {plan.total}"
        require_memory(what, (plan.total, *values.shape[1:]), values.dtype)
    out = values.new_empty((plan.total, *values.shape[1:]) if values.dim() > 1 else plan.total)
    item = values.itemsize if values.dim() == 1 else _row_bytes(values)
    nbytes = plan.total * item
    move = loops().move
    if nbytes <= _ALONE:
        move(plan.address, plan.segments, values.data_ptr(), plan.values, out.data_ptr(), item, 0, plan.total)
        return out
    in_huge_pages(out)
    task = partial(move, plan.address, plan.segments, values.data_ptr(), plan.values, out.data_ptr(), item)
    _divided(task, plan.total, nbytes)
    return out


def reordered(
    permute: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Lengths, values and weights [N] of segments in another order, by one call of a loop that plans and moves.

    None without numba, where a plan and threads are better, where anything is wrong, and where the order is none of all
    segments: then `plan_of` tells.
    """
    compiled, S, N = loops(), permute.numel(), values.numel()
    if compiled is None or lengths.numel() != S or values.dim() != 1 or N * values.itemsize > _ALONE:
        return None
    permute, lengths, values = permute.contiguous(), lengths.contiguous(), values.contiguous()
    moved, out, other = torch.empty_like(lengths), torch.empty_like(values), None
    second = 0, 0, 0
    if weights is not None:
        if weights.dim() != 1:
            return None
        weights = weights.contiguous()
        other = torch.empty_like(weights)
        second = weights.data_ptr(), weights.itemsize, other.data_ptr()
    count = compiled.reorder(
        permute.data_ptr(), permute.itemsize, S, lengths.data_ptr(), lengths.itemsize, S, moved.data_ptr(), N,
        values.data_ptr(), values.itemsize, out.data_ptr(), *second,
    )  # fmt: skip
    return (moved, out, other) if count == N else None


def collected_by(plan: Plan, grad: Tensor) -> Tensor:
    """The sums of the rows [values, ...] of a gradient [total, ...] that come from one position, in their order."""
    compiled = loops()
    wide = grad if grad.dtype in (torch.float32, torch.float64) else grad.float()
    wide = wide.contiguous()
    out = wide.new_empty(plan.values, *grad.shape[1:])
    kind = compiled.FLOAT64 if wide.dtype == torch.float64 else compiled.FLOAT32
    columns = _row_bytes(wide) // wide.itemsize
    task = partial(
        compiled.collect, plan.address, plan.segments, wide.data_ptr(), out.data_ptr(), plan.values, columns, kind
    )
    _divided(task, plan.values, out.numel() * out.itemsize)
    return out.to(grad.dtype)


def row_sums(lengths: Tensor) -> Tensor | None:
    """Sums [T] int64 of rows of lengths [T, B]. ValueError where one is negative."""
    compiled = loops()
    if compiled is None:
        return None
    lengths = lengths.contiguous()
    T, B = lengths.shape
    out = lengths.new_empty(T, dtype=torch.int64)
    task = partial(compiled.row_sums, lengths.data_ptr(), lengths.itemsize, B, out.data_ptr())
    for status in _divided(task, T, lengths.numel() * lengths.itemsize):
        if status < 0:
            t, b = divmod(-status - 1, B)
            raise ValueError(f"lengths must be >= 0, lengths[{t}, {b}] is {int(lengths[t, b])}")
    return out


def segment_sum(offsets: Tensor, values: Tensor, each: int) -> Tensor | None:
    """Sums [S, ...] of segments of values [N, ...], raising as the op says; None without numba, or in other dtypes."""
    compiled, kind = loops(), KINDS.get(values.dtype)
    if compiled is None or kind is None:
        return None
    offsets, values = offsets.contiguous(), values.contiguous()
    S = offsets.numel() - 1
    if values.dim() == 1:
        N, columns, out = values.numel(), 1, values.new_empty(S)
    else:
        N, columns, out = values.shape[0], prod(values.shape[1:]), values.new_empty(S, *values.shape[1:])
    most, at, where, to = N // each, offsets.data_ptr(), values.data_ptr(), out.data_ptr()
    nbytes = 8 * N * columns
    if nbytes <= _ALONE:
        bad = compiled.segment_sum(at, offsets.itemsize, each, most, where, kind, to, columns, 0, S)
    else:
        task = partial(compiled.segment_sum, at, offsets.itemsize, each, most, where, kind, to, columns)
        bad = min(_divided(task, S, nbytes), default=0)
    if bad:
        check_ends(offsets, most)
    return out


# as the loops number them
KINDS = {torch.float32: 0, torch.float64: 1, torch.int64: 2}


def _row_bytes(values: Tensor) -> int:
    return values.itemsize * prod(values.shape[1:])


def _divided(task: Callable[[int, int], Any], items: int, nbytes: int) -> list[Any]:
    """task(lo, hi) over [0, items): at once, or in as many parts as threads have use for."""
    threads = 1 if nbytes <= _ALONE else torch.get_num_threads()
    if threads == 1 or items == 1:
        return [task(0, items)]
    parts = min(4 * threads, items)
    return run([partial(task, items * part // parts, items * (part + 1) // parts) for part in range(parts)])


def expand(permute: Tensor, input_offsets: Tensor, output_offsets: Tensor, total: int) -> Tensor | None:
    """Where each of `total` output positions comes from, in the dtype of `permute`; raises as the op says."""
    compiled = loops()
    if compiled is None:
        return None
    if total < 0:
        check_offsets("output_offsets", output_offsets, total)
    order, begins, ends = permute.contiguous(), input_offsets.contiguous(), output_offsets.contiguous()
    out = order.new_empty(total)
    status = compiled.expand(
        order.data_ptr(), order.itemsize, order.numel(), begins.data_ptr(), begins.numel() - 1, ends.data_ptr(),
        out.data_ptr(), total,
    )  # fmt: skip
    if status < 0:
        check_order(permute, input_offsets.shape[0] - 1)
        check_offsets("output_offsets", output_offsets, total)
    return out


def check_order(permute: Tensor, segments: int) -> None:
    """IndexError where an entry of `permute` is none of so many segments."""
    if permute.numel() == 0:
        return
    low, high = permute.aminmax()
    if int(low) < 0 or int(high) >= segments:
        at = int(((permute < 0) | (permute >= segments)).int().argmax())
        raise IndexError(f"permute[{at}] is {int(permute[at])}, out of range for {segments} segments")


def check_offsets(name: str, offsets: Tensor, end: int) -> None:
    """ValueError where offsets on the CPU do not go from 0 to `end`, or decrease."""
    if offsets.shape[0] == 0 or int(offsets[0]) != 0 or int(offsets[-1]) != end:
        span = f"from {int(offsets[0])} to {int(offsets[-1])}" if offsets.shape[0] else "none"
        raise ValueError(f"{name} must go from 0 to {end}, got {span}")
    fallen = offsets[1:] < offsets[:-1]
    if bool(fallen.any()):
        at = int(fallen.int().argmax())
        raise ValueError(f"{name} must not decrease, entry {at + 1} is {int(offsets[at + 1])} after {int(offsets[at])}")


def complete_cumsum(lengths: Tensor) -> Tensor | None:
    """Offsets [..., N + 1] of int32 or int64 lengths [..., N] on the CPU; None without numba."""
    compiled = loops()
    if compiled is None:
        return None
    lengths = lengths.contiguous()
    if lengths.dim() == 1:
        rows, n = 1, lengths.numel()
        out = lengths.new_empty(n + 1)
    else:
        n = lengths.shape[-1]
        rows, out = prod(lengths.shape[:-1]), lengths.new_empty(*lengths.shape[:-1], n + 1)
    compiled.cumsum(lengths.data_ptr(), lengths.itemsize, rows, n, out.data_ptr())
    return out


def places(offsets: Tensor, size: int) -> Tensor | None:
    """The place of each of `size` positions in its bag; raises as `offsets_range` says. None without numba."""
    compiled = loops()
    if compiled is None:
        return None
    offsets = offsets.contiguous()
    out = offsets.new_empty(size)
    status = compiled.places(offsets.data_ptr(), offsets.itemsize, offsets.numel(), out.data_ptr(), size)
    if status < 0:
        check_begins(offsets, size)
    return out


def check_begins(offsets: Tensor, size: int) -> None:
    """ValueError where the begins of bags that end at `size` do not begin with 0, or decrease."""
    check_offsets("offsets with range_size", torch.cat([offsets, offsets.new_tensor([size])]), size)


def check_ends(offsets: Tensor, most: int) -> None:
    """ValueError where offsets on the CPU decrease, or leave [0, most]."""
    bad = offsets.numel() > 0 and bool(
        (int(offsets[0]) < 0) or (int(offsets[-1]) > most) or (offsets[1:] < offsets[:-1]).any()
    )
    if bad:
        low, high = (int(n) for n in offsets.aminmax())
        raise ValueError(f"offsets must not decrease nor leave 0 ... {most}, got {low} ... {high}")
