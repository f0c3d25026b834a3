"""Padded dense tensors on the CPU: the results of ../jagged/padded.py and ../jagged/elementwise.py by loops that numba
compiles, or, where it is missing, by few torch ops. Letters and shapes as in ../jagged/padded.py; unlike there, bad
offsets raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import numba_loops
from ..huge_pages import REUSED_BYTES, in_huge_pages
from ..memory import MANY, require_memory
from .threads import run

# bytes that one thread moves before another can have been woken
_ALONE = 1 << 22
# types that the loops calculate in, as they number them
_KINDS = {torch.float32: 0, torch.float64: 1, torch.int32: 2, torch.int64: 3}
# what they calculate
_MULTIPLY, _ADD, _ADD_TO_DENSE = 0, 1, 2


# the compiled loops; None where numba is missing or does not work
_loops = partial(numba_loops.loops, "padded_loops")


def to_padded(values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float) -> Tensor:
    """X of values."""
    loops, size = _loops(), values.itemsize
    if (offsets[0].shape[0] - 1) * prod(max_lengths) > MANY:
        require_padded(values, offsets, max_lengths)
    if loops is None or size > 8 or values.is_complex():
        return _to_padded_torch(values, offsets, max_lengths, padding_value)
    shape = values.shape
    total, row = shape[0], shape[1:]
    out = _new((offsets[0].shape[0] - 1, *max_lengths, *row), values.dtype)
    nbytes = out.numel() * size
    if nbytes == 0:
        require_offsets(offsets, total)
        return out
    if not values.is_contiguous():
        values = values.contiguous()
    fill = _pattern(padding_value, math.copysign(1.0, padding_value), values.dtype)
    bags = _bags(loops, offsets, max_lengths, total)
    arguments = (values.data_ptr(), total, size * prod(row), out.data_ptr(), fill, *bags.numbers)
    if _run(loops.to_padded, arguments, bags.numbers[-1], nbytes) >= 0:
        _refuse(offsets, total)
    return out


def require_padded(values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int]) -> None:
    """Raise where there is no memory for X."""
    shape = (offsets[0].shape[0] - 1, *max_lengths, *values.shape[1:])
    require_memory(f"max_lengths {list(max_lengths)}", shape, values.dtype, values.device)


def require_jagged(dense: Tensor, offsets: Sequence[Tensor], total_length: int) -> None:
    """Raise where there is no memory for V."""
    shape = (total_length, *dense.shape[len(offsets) + 1 :])
    require_memory(f"{total_length} values by offsets, lengths or total_length", shape, dense.dtype, dense.device)


def to_jagged(dense: Tensor, offsets: Sequence[Tensor], total_length: int | None) -> Tensor:
    """V of a dense."""
    loops, size = _loops(), dense.itemsize
    if loops is None or size > 8 or dense.is_complex():
        total_length = _total(offsets) if total_length is None else total_length
        if total_length > MANY:
            require_jagged(dense, offsets, total_length)
        return _to_jagged_torch(dense, offsets, total_length)
    if total_length is None:
        ends = offsets[-1]
        total_length = int(loops.entry(ends.data_ptr(), ends.itemsize, (ends.shape[0] - 1) * ends.stride(0)))
        if total_length < 0:
            _refuse(offsets, total_length)
    if total_length > MANY:
        require_jagged(dense, offsets, total_length)
    n, shape = len(offsets), dense.shape
    row = shape[n + 1 :]
    out = _new((total_length, *row), dense.dtype)
    item = size * prod(row)
    if item == 0:
        require_offsets(offsets, total_length)
        return out
    if not dense.is_contiguous():
        dense = dense.contiguous()
    bags = _bags(loops, offsets, shape[1 : n + 1], total_length)
    if not bags.every:
        out.zero_()
    arguments = (dense.data_ptr(), total_length, item, out.data_ptr(), bags.every, *bags.numbers)
    if _run(loops.to_jagged, arguments, bags.numbers[-1], total_length * item) >= 0:
        _refuse(offsets, total_length)
    return out


def jagged_with_dense(values: Tensor, offsets: Sequence[Tensor], dense: Tensor, multiply: bool) -> Tensor:
    """V plus what the dense holds for it, or times that."""
    loops = _loops()
    if loops is None or values.dtype not in _KINDS or not values.numel():
        total = values.shape[0]
        out = to_jagged(dense, offsets, total)
        if not multiply:
            return out.add_(values)
        out.mul_(values)
        return out if _is_whole(offsets, dense, total) else out.masked_fill_(_vacant(offsets, dense, values), 0)
    return _calculated(loops, values, offsets, dense, _MULTIPLY if multiply else _ADD)


def dense_with_jagged(values: Tensor, offsets: Sequence[Tensor], dense: Tensor) -> Tensor:
    """X of values plus the dense."""
    loops = _loops()
    if loops is None or values.dtype not in _KINDS or not dense.numel():
        return to_padded(values, offsets, dense.shape[1 : len(offsets) + 1], 0.0).add_(dense)
    return _calculated(loops, values, offsets, dense, _ADD_TO_DENSE)


def _calculated(loops: Any, values: Tensor, offsets: Sequence[Tensor], dense: Tensor, how: int) -> Tensor:
    """Values with what a dense holds for them, or the dense with the values; what comes out has elements."""
    total, extents = values.shape[0], dense.shape[1 : len(offsets) + 1]
    if not values.is_contiguous():
        values = values.contiguous()
    if not dense.is_contiguous():
        dense = dense.contiguous()
    bags = _bags(loops, offsets, extents, total)
    if how == _ADD_TO_DENSE:
        out = _new(dense.shape, dense.dtype)
    else:
        out = _new(values.shape, values.dtype)
        if not bags.every and how == _ADD:
            out.copy_(values)
        elif not bags.every:
            out.zero_()
    arguments = (
        dense.data_ptr(), values.data_ptr(), total, prod(values.shape[1:]), _KINDS[values.dtype], out.data_ptr(), how,
        bags.every, *bags.numbers,
    )  # fmt: skip
    if _run(loops.calculate, arguments, bags.numbers[-1], out.numel() * out.itemsize) >= 0:
        _refuse(offsets, total)
    return out


def offsets_of(lengths: Tensor, total: int) -> Tensor | None:
    """Offsets [B + 1] int64 of lengths; None without numba, or where these are no lengths of `total` values."""
    loops = _loops()
    if loops is None:
        return None
    lengths = lengths.contiguous()
    bags = lengths.shape[0]
    out = torch.empty(bags + 1, dtype=torch.int64, device="cpu")
    return out if loops.offsets_of(lengths.data_ptr(), lengths.itemsize, bags, total, out.data_ptr()) else None


def require_offsets_on_cpu(offsets: Sequence[Tensor], total: int) -> None:
    """`require_offsets` where reading them waits for nothing."""
    if not offsets[0].is_cuda:
        require_offsets(offsets, total)


def require_offsets(offsets: Sequence[Tensor], total: int) -> None:
    """Raise ValueError unless all offsets go from 0, without a fall, to at most what they count."""
    for k, ends in enumerate(offsets):
        most = offsets[k + 1].shape[0] - 1 if k + 1 < len(offsets) else total
        if int(ends[0]) != 0 or int(ends[-1]) > most or bool((ends[1:] < ends[:-1]).any()):
            _refuse(offsets, total)


def _refuse(offsets: Sequence[Tensor], total: int) -> NoReturn:
    for k, ends in enumerate(offsets):
        last = k + 1 == len(offsets)
        most = total if last else offsets[k + 1].shape[0] - 1
        numbers = ends.tolist()
        if numbers[0] != 0:
            raise ValueError(f"offsets[{k}] must begin at 0, got {numbers[0]}")
        for i, (begin, end) in enumerate(pairwise(numbers)):
            if end < begin:
                raise ValueError(f"offsets[{k}] must not fall, got {begin} at position {i} and then {end}")
        if numbers[-1] > most:
            what = "values" if last else f"bags in offsets[{k + 1}]"
            raise ValueError(f"offsets[{k}] end at {numbers[-1]}, but there are {most} {what}")
    raise AssertionError("offsets are as they must be")


def _total(offsets: Sequence[Tensor]) -> int:
    """Values that offsets speak of."""
    total = int(offsets[-1][-1])
    if total < 0:
        _refuse(offsets, total)
    return total


class _Bags(NamedTuple):
    """Bags as the loops take them: ends, bytes of one, begins, stops, columns, most, parents."""

    numbers: tuple[int, ...]
    # whether parents have all bags, in order
    every: bool
    # what owns the memory
    owners: tuple[Tensor, ...]


def _bags(loops: Any, offsets: Sequence[Tensor], max_lengths: Sequence[int], total: int) -> _Bags:
    """Raises ValueError for bad offsets, but leaves those of one dim alone to the loop."""
    ends = offsets[-1]
    if not ends.is_contiguous():
        ends = ends.contiguous()
    n, of = len(offsets), ends.itemsize
    if n == 1:
        return _Bags((ends.data_ptr(), of, 0, 0, 1, max_lengths[0], ends.shape[0] - 1), True, (ends,))
    _require_offsets_compiled(loops, offsets, total)
    parents, first = offsets[0].shape[0] - 1, offsets[0].long().contiguous()
    owners: tuple[Tensor, ...] = (ends, first)
    begins = first.data_ptr()
    stops = begins + 8
    for columns, following in zip(max_lengths[: n - 2], offsets[1:-1], strict=True):
        following = following.contiguous()
        child = torch.empty(2, parents * columns, dtype=torch.int64, device="cpu")
        # memory of no element may have no address, which says that there is one dim alone
        low = child.data_ptr() or begins
        high = low + 8 * parents * columns
        loops.descend(begins, stops, parents, columns, following.data_ptr(), following.itemsize, low, high)
        parents, begins, stops = parents * columns, low, high
        owners = (*owners, child)
    return _Bags((ends.data_ptr(), of, begins, stops, max_lengths[-2], max_lengths[-1], parents), n == 2, owners)


def _require_offsets_compiled(loops: Any, offsets: Sequence[Tensor], total: int) -> None:
    for k, ends in enumerate(offsets):
        most = offsets[k + 1].shape[0] - 1 if k + 1 < len(offsets) else total
        ends = ends.contiguous()
        if not loops.ordered(ends.data_ptr(), ends.itemsize, ends.shape[0] - 1, most):
            _refuse(offsets, total)


def leaf_bounds(offsets: Sequence[Tensor], max_lengths: Sequence[int], total: int) -> tuple[Tensor, Tensor]:
    """First value of each leaf and the end of its values, [R] int64 both. Raises ValueError for bad offsets."""
    require_offsets(offsets, total)
    begins, ends = offsets[0][:-1].long(), offsets[0][1:].long()
    for most, following in zip(max_lengths[:-1], offsets[1:], strict=True):
        bag = begins[:, None] + torch.arange(most, device="cpu")
        live = bag < ends[:, None]
        bag = torch.where(live, bag, 0).flatten()
        if following.shape[0] == 1:
            begins = ends = torch.zeros_like(bag)
            continue
        begins = following[bag].long()
        ends = torch.where(live.flatten(), following[bag + 1].long(), begins)
    return begins.contiguous(), ends.contiguous()


def _to_padded_torch(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float
) -> Tensor:
    begins, ends = leaf_bounds(offsets, max_lengths, values.shape[0])
    shape, most = (offsets[0].shape[0] - 1, *max_lengths, *values.shape[1:]), max_lengths[-1]
    if values.dim() == 1 and begins.shape[0] and int((ends - begins).max()) > most > 0:
        # of single numbers that are cut it costs least to look up one for each place
        index = begins[:, None] + torch.arange(most, device="cpu")
        vacant = index >= ends[:, None]
        padded = values.take(index.clamp_(max=values.shape[0] - 1))
        return padded.masked_fill_(vacant, values.new_full((), padding_value)).view(shape)
    out = _new(shape, values.dtype).fill_(padding_value)
    if out.numel() == 0:
        return out
    source, place, mask = _moves(begins, ends, most, values.dim() == 1)
    values = values[: int(ends[-1])] if source is None else values.index_select(0, source)
    if mask is not None:
        out.view_as(mask).masked_scatter_(mask, values)
    else:
        assert place is not None
        out.view(-1, *values.shape[1:]).index_copy_(0, place, values)
    return out


def _to_jagged_torch(dense: Tensor, offsets: Sequence[Tensor], total: int) -> Tensor:
    n = len(offsets)
    begins, ends = leaf_bounds(offsets, dense.shape[1 : n + 1], total)
    rest = dense.shape[n + 1 :]
    if dense.numel() == 0 or total == 0:
        return dense.new_zeros(total, *rest)
    source, place, mask = _moves(begins, ends, dense.shape[n], not rest)
    if mask is not None:
        kept = dense.reshape(mask.shape).masked_select(mask)
    else:
        assert place is not None
        kept = dense.reshape(-1, *rest).index_select(0, place)
    if kept.shape[0] == total and source is None:
        return kept
    out = dense.new_zeros(total, *rest)
    if source is None:
        out[: kept.shape[0]] = kept
        return out
    return out.index_copy_(0, source, kept)


def _moves(
    begins: Tensor, ends: Tensor, most: int, numbers: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of the values that have a place, in order: where they are in V (None: they are its first ones) and their place
    in X, or where values are single `numbers` a mask [R, M] of their places.
    """
    lengths = ends - begins
    cut = bool(begins.shape[0]) and int(lengths.max()) > most
    if cut:
        lengths = lengths.clamp(max=most)
    source = place = mask = None
    if numbers:
        mask = torch.arange(most, device="cpu") < lengths[:, None]
    if cut or not numbers or not _is_dense(begins, ends):
        before = lengths.cumsum(0) - lengths
        k = torch.arange(int(lengths.sum()), device="cpu")
        if not numbers:
            starts = torch.arange(0, most * lengths.shape[0], most, device="cpu") if most else torch.zeros_like(before)
            place = (starts - before).repeat_interleave(lengths, output_size=k.shape[0]) + k
        if cut or not _is_dense(begins, ends):
            source = (begins - before).repeat_interleave(lengths, output_size=k.shape[0]) + k
    return source, place, mask


def _is_dense(begins: Tensor, ends: Tensor) -> bool:
    """Whether each leaf begins where the one before it ends."""
    if begins.shape[0] == 0:
        return True
    # two views of one tensor of offsets do by construction
    if begins.data_ptr() + begins.itemsize == ends.data_ptr():
        return True
    return int(begins[0]) == 0 and torch.equal(begins[1:], ends[:-1])


def _is_whole(offsets: Sequence[Tensor], dense: Tensor, total: int) -> bool:
    """Whether every value is known to have a place in the dense, which offsets of one jagged dim tell by themselves."""
    return len(offsets) == 1 and int(offsets[0].diff().clamp(max=dense.shape[1]).sum()) == total


def _vacant(offsets: Sequence[Tensor], dense: Tensor, values: Tensor) -> Tensor:
    """Which values have no place in the dense: [N] bool, with dims of 1 for those of a value."""
    everywhere = torch.ones(dense.shape[: len(offsets) + 1], dtype=torch.bool, device="cpu")
    held = to_jagged(everywhere, offsets, values.shape[0])
    return held.logical_not_().view(-1, *[1] * (values.dim() - 1))


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device="cpu")
    return in_huge_pages(out) if out.nbytes >= REUSED_BYTES else out


@lru_cache(maxsize=64)
def _pattern(padding_value: float, sign: float, dtype: torch.dtype) -> int:
    """Eight bytes of the padding value over and over; its sign, because 0 equals -0."""
    if dtype in (torch.float32, torch.float64):
        element = torch.tensor([padding_value], dtype=torch.float64, device="cpu").to(dtype)
    else:
        element = torch.full((1,), padding_value, dtype=dtype, device="cpu")
    return int(element.repeat(8 // dtype.itemsize).view(torch.int64))


def _run(loop: Callable[..., int], arguments: tuple[Any, ...], parents: int, nbytes: int) -> int:
    """Run a loop over all parents, on some threads if that pays: a bad bag, -1 if there is none."""
    threads = torch.get_num_threads() if nbytes > _ALONE else 1
    if threads == 1:
        return loop(*arguments, 0, parents)
    parts = max(1, min(4 * threads, parents))
    borders = [parents * part // parts for part in range(parts + 1)]
    return int(max(run([partial(loop, *arguments, *bounds) for bounds in pairwise(borders)])))
