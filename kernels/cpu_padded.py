"""Padded dense tensors on the CPU: the results of padded.py and elementwise.py by loops that numba compiles, or, where
it is missing, by few torch ops. Letters and shapes as in padded.py; unlike there, bad offsets raise.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import pairwise
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from .cpu_compiled import run
from .huge_pages import REUSED_BYTES, in_huge_pages

# bytes that one thread moves before another can have been woken
_ALONE = 1 << 19
# what is moved as it is, and what all else of so many bytes is moved as
_FLOATS = frozenset({torch.float32, torch.float64})
_NUMPYS = _FLOATS | {torch.int64, torch.int32, torch.int16, torch.int8}
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# types that the loops calculate in
_CALCULATED = (torch.float32, torch.float64, torch.int32, torch.int64)


@cache
def _loops() -> Any:
    """The compiled loops; None where numba is missing or does not work: then everything runs on torch."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        with warnings.catch_warnings():
            # numba speaks of caches and of its own deprecations
            warnings.simplefilter("ignore")
            return importlib.import_module(".cpu_padded_loops", __package__)
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        warnings.warn(f"shardwise: numba does not work here, padded tensors run on torch: {line}", stacklevel=2)
        return None


def to_padded(values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float) -> Tensor:
    """X of values."""
    loops = _loops()
    if loops is None or not _has_numbers(values):
        return _to_padded_torch(values, offsets, max_lengths, padding_value)
    total, most = values.shape[0], max_lengths[-1]
    begins, ends = _leaves(offsets, max_lengths, total)
    out = _new((offsets[0].shape[0] - 1, *max_lengths, *values.shape[1:]), values.dtype)
    target = _array(out)
    if not len(target):
        require_offsets(offsets, total)
        return out
    width = len(target) // (len(begins) * most)
    filling = float(padding_value) if values.dtype in _FLOATS else _bits(padding_value, values.dtype)
    arguments = (_array(values), begins, ends, total, filling, target, most, width)
    if _run(loops.to_padded, arguments, len(begins), target.nbytes) >= 0:
        _refuse(offsets, total)
    return out


def to_jagged(dense: Tensor, offsets: Sequence[Tensor], total_length: int | None) -> Tensor:
    """V of a dense."""
    loops = _loops()
    total = _total(offsets) if total_length is None else total_length
    if loops is None or not _has_numbers(dense):
        return _to_jagged_torch(dense, offsets, total)
    n = len(offsets)
    extents, rest = dense.shape[1 : n + 1], dense.shape[n + 1 :]
    begins, ends = _leaves(offsets, extents, total)
    out = _new((total, *rest), dense.dtype)
    width = prod(rest)
    if width == 0:
        require_offsets(offsets, total)
        return out
    _fill_what_loops_leave(out, offsets)
    filling = 0.0 if dense.dtype in _FLOATS else 0
    target = _array(out)
    arguments = (_array(dense), begins, ends, total, filling, target, extents[-1], width)
    if _run(loops.to_jagged, arguments, len(begins), target.nbytes) >= 0:
        _refuse(offsets, total)
    return out


def jagged_with_dense(values: Tensor, offsets: Sequence[Tensor], dense: Tensor, multiply: bool) -> Tensor:
    """V plus what the dense holds for it, or times that."""
    n, total = len(offsets), values.shape[0]
    loops = _loops()
    if loops is None or values.dtype not in _CALCULATED or not values.numel():
        found = to_jagged(dense, offsets, total)
        if not multiply:
            return found.add_(values)
        found.mul_(values)
        return found if _is_whole(offsets, dense, total) else found.masked_fill_(~_held(offsets, dense, values), 0)
    begins, ends = _leaves(offsets, dense.shape[1 : n + 1], total)
    out = _new(values.shape, values.dtype)
    _fill_what_loops_leave(out, offsets, None if multiply else values)
    target = _array(out)
    arguments = (_array(dense), _array(values), begins, ends, total, target, dense.shape[n], len(target) // total)
    if _run(loops.multiply if multiply else loops.add, arguments, len(begins), target.nbytes) >= 0:
        _refuse(offsets, total)
    return out


def require_offsets_on_cpu(offsets: Sequence[Tensor], total: int) -> None:
    """`require_offsets` where reading them waits for nothing."""
    if not offsets[0].is_cuda:
        require_offsets(offsets, total)


def require_offsets(offsets: Sequence[Tensor], total: int) -> None:
    """Raise ValueError unless all offsets go from 0, without a fall, to at most what they count."""
    for k, ends in enumerate(offsets):
        most = offsets[k + 1].shape[0] - 1 if k + 1 < len(offsets) else total
        if int(ends[0]) != 0 or int(ends[-1]) > most or (ends.shape[0] > 1 and int(ends.diff().min()) < 0):
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


def _leaves(offsets: Sequence[Tensor], max_lengths: Sequence[int], total: int) -> tuple[Any, Any]:
    """First value of each leaf and the end of its values, as arrays; offsets that only the loop can judge are left."""
    if len(offsets) == 1:
        ends = _array(offsets[0] if offsets[0].dtype is torch.int64 else offsets[0].long())
        if ends[0] != 0:
            _refuse(offsets, total)
        return ends[:-1], ends[1:]
    begins, ends = leaf_bounds(offsets, max_lengths, total)
    return begins.numpy(), ends.numpy()


def leaf_bounds(offsets: Sequence[Tensor], max_lengths: Sequence[int], total: int) -> tuple[Tensor, Tensor]:
    """First value of each leaf and the end of its values, [R] int64 both. Raises ValueError for bad offsets."""
    require_offsets(offsets, total)
    begins, ends = offsets[0][:-1].long(), offsets[0][1:].long()
    for most, following in zip(max_lengths[:-1], offsets[1:], strict=True):
        bag = begins[:, None] + torch.arange(most)
        live = bag < ends[:, None]
        bag = torch.where(live, bag, 0).flatten()
        if following.shape[0] == 1:
            begins = ends = torch.zeros_like(bag)
            continue
        begins = following[bag].long()
        ends = torch.where(live.flatten(), following[bag + 1].long(), begins)
    return begins.contiguous(), ends.contiguous()


def _fill_what_loops_leave(out: Tensor, offsets: Sequence[Tensor], values: Tensor | None = None) -> None:
    """Zeros, or `values`, past the last offset; everywhere where whole bags have no leaf."""
    begin = 0 if len(offsets) > 1 else int(offsets[0][-1])
    if 0 <= begin < out.shape[0]:
        if values is None:
            out[begin:].zero_()
        else:
            out[begin:].copy_(values[begin:])


def _to_padded_torch(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float
) -> Tensor:
    begins, ends = leaf_bounds(offsets, max_lengths, values.shape[0])
    shape, most = (offsets[0].shape[0] - 1, *max_lengths, *values.shape[1:]), max_lengths[-1]
    if values.dim() == 1 and begins.shape[0] and int((ends - begins).max()) > most > 0:
        # of single numbers that are cut it costs least to look up one for each place
        index = begins[:, None] + torch.arange(most)
        vacant = index >= ends[:, None]
        found = values.take(index.clamp_(max=values.shape[0] - 1))
        return found.masked_fill_(vacant, values.new_full((), padding_value)).view(shape)
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
        mask = torch.arange(most) < lengths[:, None]
    if cut or not numbers or not _is_dense(begins, ends):
        before = lengths.cumsum(0) - lengths
        k = torch.arange(int(lengths.sum()))
        if not numbers:
            starts = torch.arange(0, most * lengths.shape[0], most) if most else torch.zeros_like(before)
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
    """Whether every value has a place in the dense."""
    n = len(offsets)
    begins, ends = leaf_bounds(offsets, dense.shape[1 : n + 1], total)
    return int((ends - begins).clamp(max=dense.shape[n]).sum()) == total


def _held(offsets: Sequence[Tensor], dense: Tensor, values: Tensor) -> Tensor:
    """Which values have a place in the dense: [N] bool, with dims of 1 for those of a value."""
    everywhere = torch.ones(dense.shape[: len(offsets) + 1], dtype=torch.bool)
    return to_jagged(everywhere, offsets, values.shape[0]).view(-1, *[1] * (values.dim() - 1))


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    return in_huge_pages(out) if out.nbytes >= REUSED_BYTES else out


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.dtype in _NUMPYS or (tensor.itemsize in _BITS and not tensor.is_complex())


def _array(tensor: Tensor) -> Any:
    """A tensor as a flat array, a copy where it is not contiguous; the bits of what numpy or the loops do not know."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dtype not in _NUMPYS:
        tensor = tensor.view(_BITS[tensor.itemsize])
    array = tensor.numpy()
    return array if array.ndim == 1 else array.reshape(-1)


@lru_cache(maxsize=64)
def _bits(padding_value: float, dtype: torch.dtype) -> int:
    """The padding value as `_array` shows it."""
    return int(torch.full((1,), padding_value, dtype=dtype).view(_BITS[dtype.itemsize]))


def _run(loop: Callable[..., int], arguments: tuple[Any, ...], leaves: int, nbytes: int) -> int:
    """Run a loop over all leaves, on some threads if that pays: a bad leaf, -1 if there is none."""
    threads = torch.get_num_threads() if nbytes > _ALONE else 1
    if threads == 1:
        return int(loop(*arguments, 0, leaves))
    parts = max(1, min(4 * threads, leaves))
    borders = [leaves * part // parts for part in range(parts + 1)]
    return int(max(run([partial(loop, *arguments, *bounds) for bounds in pairwise(borders)])))
