"""Quantized tables on the CPU, looked up by the loops of quantized_lookup_loops.py where numba, the extra `cpu`, is
installed, else by torch, a block of rows at a time that stays in a core's cache. Both give the reference's bits.

Rows are quantized and turned back by the loops of quantize_loops.py alone, a part of the rows for each thread.
Letters as in quantized/pooled_lookup.py and quantized/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import numba_loops
from ..features import (
    BASE,
    FIRST_ROW,
    MEAN,
    ROWS,
    Lookup,
    batch_size,
    column_offsets,
)
from ..huge_pages import in_huge_pages
from ..row_formats import RowFormat, dequantize_rows_ref, row_format
from .lookup import bag_sums
from .threads import run

# columns of rows that the torch path turns into values at a time
_BLOCK_ELEMENTS = 1 << 18
# columns that one thread handles before another can have been woken
ALONE = 1 << 17
# columns of rows of another dtype that are made fp32, or made of fp32, at a time: they stay in a core's cache
_QUANTIZED_ELEMENTS = 1 << 17


# the compiled loops; None where numba is missing or does not work
_quantizing = partial(numba_loops.loops, "quantize_loops")
_looking_up = partial(numba_loops.loops, "quantized_lookup_loops")
# of fused rows, for fused_lookup.py
fused_loops = _looking_up


def quantized_pooled_lookup_cpu(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    format: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The reference's result."""
    loops, batch, columns = _looking_up(), batch_size(offsets, len(dims)), sum(dims)
    out = in_huge_pages(torch.empty(batch, columns, dtype=torch.float32, device="cpu"))
    weights = None if per_id_weights is None else per_id_weights.float().contiguous()
    if loops is None:
        _pooled_by_torch(out, (payload, scales, format), Lookup(indices, offsets, weights, features, dims=dims))
    elif batch:
        # what the addresses are of must live until the loops are done
        kept = _Where(payload, scales, indices, offsets, features)
        numbers = (0 if weights is None else weights.data_ptr(), kept.features.data_ptr(), batch)
        loop = partial(loops.pool, *_kind(loops, format), *kept.addresses, *numbers, out.data_ptr(), columns)
        in_parts(loop, batch * len(dims), indices.shape[0] * max(dims) + out.numel())
    return out.to(output_dtype)


def quantized_sequence_lookup_cpu(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    dim: int,
    format: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The reference's result."""
    loops, count = _looking_up(), features.shape[0]
    batch, ids = batch_size(offsets, count), indices.shape[0]
    out = in_huge_pages(torch.empty(ids, dim, dtype=torch.float32, device="cpu"))
    if loops is None:
        _sequence_by_torch(out, (payload, scales, format), Lookup(indices, offsets, None, features), dim)
    elif ids:
        kept = _Where(payload, scales, indices, offsets, features)
        numbers = (kept.features.data_ptr(), count, batch, out.data_ptr(), dim)
        loop = partial(loops.gather, *_kind(loops, format), *kept.addresses, *numbers)
        in_parts(loop, ids, out.numel())
    return out.to(output_dtype)


def _kind(loops: Any, format: str) -> tuple[int, int, int]:
    """The loops' number of a format, its bits and parts."""
    return getattr(loops, format.upper()), row_format(format).bits, row_format(format).parts


class _Where:
    """Contiguous tensors of a lookup, and their addresses as the loops take them."""

    def __init__(self, payload: Tensor, scales: Tensor, indices: Tensor, offsets: Tensor, features: Tensor) -> None:
        self.tensors = [tensor.contiguous() for tensor in (payload, scales, indices, offsets)]
        self.features = features.contiguous()
        payload, scales, indices, offsets = self.tensors
        self.addresses = (
            payload.data_ptr(), scales.data_ptr(), int(scales.dtype == torch.float16), indices.data_ptr(),
            indices.itemsize, indices.shape[0], offsets.data_ptr(), offsets.itemsize,
        )  # fmt: skip


# payload, scales and the name of their format
_Table = tuple[Tensor, Tensor, str]


def _pooled_by_torch(out: Tensor, table: _Table, lookup: Lookup) -> None:
    indices, offsets, weights, features, *_ = lookup
    dims = lookup.dims
    batch, columns = out.shape[0], column_offsets(dims)
    for f, dim in enumerate(dims):
        values = _values_of(table, features[f].tolist(), dim)
        ends = offsets[f * batch : (f + 1) * batch + 1].long()
        rows = int(features[f, ROWS])
        for low, high in _blocks(ends, max(1, _BLOCK_ELEMENTS // dim)):
            bags, begin = ends[low : high + 1] - ends[low], int(ends[low])
            ids = indices[begin : begin + int(bags[-1])].long()
            valid = (ids >= 0) & (ids < rows)
            picked = values(ids[valid])
            if weights is not None:
                picked *= weights[begin : begin + len(ids)][valid][:, None]
            # sums of the valid ids before each bag's end
            kept = torch.cat([bags.new_zeros(1), valid.cumsum(0)])[bags]
            sums = bag_sums(picked, torch.arange(len(picked), device="cpu"), kept, None)
            if features[f, MEAN]:
                sums /= bags.diff().clamp(min=1)[:, None]
            out[low:high, columns[f] : columns[f] + dim] = sums


def _sequence_by_torch(out: Tensor, table: _Table, lookup: Lookup, dim: int) -> None:
    indices, offsets, features = lookup.indices, lookup.offsets, lookup.features
    batch, step = batch_size(offsets, features.shape[0]), max(1, _BLOCK_ELEMENTS // dim)
    out.zero_()
    for f, feature in enumerate(features.tolist()):
        values = _values_of(table, feature, dim)
        begin, end = int(offsets[f * batch]), int(offsets[(f + 1) * batch])
        for low in range(begin, end, step):
            ids = indices[low : min(low + step, end)].long()
            valid = (ids >= 0) & (ids < feature[ROWS])
            out[low : low + len(ids)][valid] = values(ids[valid])


def _values_of(quantized: _Table, feature: Sequence[int], dim: int) -> Callable[[Tensor], Tensor]:
    """A function that gives the values [n, dim] of a feature's table at row ids [n]."""
    payload, scales, format = quantized
    kind = row_format(format)
    width, base, rows, first = kind.row_bytes(dim), feature[BASE], feature[ROWS], feature[FIRST_ROW]
    table = payload[base : base + rows * width].view(rows, width)
    parts = scales.view(-1, kind.parts)[first : first + rows] if kind.parts else scales.new_empty(rows, 0)

    def values(ids: Tensor) -> Tensor:
        return dequantize_rows_ref(table.index_select(0, ids), parts.index_select(0, ids), dim, format)

    return values


def _blocks(ends: Tensor, ids: int) -> Iterator[tuple[int, int]]:
    """Runs of bags of at most so many ids, or of one bag."""
    bags, low = ends.shape[0] - 1, 0
    while low < bags:
        high = int(torch.searchsorted(ends, int(ends[low]) + ids, right=True)) - 1
        high = min(max(high, low + 1), bags)
        yield low, high
        low = high


def quantize(weights: Tensor, kind: RowFormat, payload: Tensor, scales: Tensor) -> bool | None:
    """Fill payload and scales: whether all scales are finite.

    None, and nothing is done: without numba, for rows without columns, and formats without scales.
    """
    loops, (rows, dim) = _quantizing(), weights.shape
    if loops is None or not kind.parts or not dim:
        return None
    number, half = getattr(loops, kind.name.upper()), scales.dtype is torch.float16
    to, kept, bad = payload.data_ptr(), scales.data_ptr(), False
    if rows * dim <= ALONE and weights.dtype is torch.float32:
        # a few rows: at once, and with nothing made for threads
        weights = weights.contiguous()
        return not loops.quantize(number, weights.data_ptr(), dim, to, kept, half, 0, rows)
    in_huge_pages(payload)
    width, each = payload.shape[1], kind.parts * scales.itemsize
    for begin, end in _blocks_of_rows(rows, dim, weights.dtype):
        block = weights if end - begin == rows else weights[begin:end]
        block = block.float().contiguous()
        task = partial(loops.quantize, number, block.data_ptr(), dim, to + begin * width, kept + begin * each, half)
        bad |= any(in_parts(task, end - begin, (end - begin) * dim))
    return not bad


def dequantize(payload: Tensor, scales: Tensor, kind: RowFormat, weights: Tensor) -> bool:
    """Fill W. False, and nothing is done: as `quantize`."""
    loops, (rows, dim) = _looking_up(), weights.shape
    if loops is None or not kind.parts or not dim:
        return False
    payload, scales = payload.contiguous(), scales.contiguous()
    number, half = getattr(loops, kind.name.upper()), scales.dtype is torch.float16
    if rows * dim <= ALONE and weights.dtype is torch.float32:
        loops.dequantize(
            number, kind.bits, kind.parts, payload.data_ptr(), scales.data_ptr(), half, weights.data_ptr(), dim, 0, rows
        )
        return True
    in_huge_pages(weights)
    at, kept, width, each = payload.data_ptr(), scales.data_ptr(), payload.shape[1], kind.parts * scales.itemsize
    for begin, end in _blocks_of_rows(rows, dim, weights.dtype):
        out = weights if end - begin == rows else weights[begin:end]
        values = out if out.dtype is torch.float32 else torch.empty(end - begin, dim, device="cpu")
        where = at + begin * width, kept + begin * each, half, values.data_ptr(), dim
        in_parts(partial(loops.dequantize, number, kind.bits, kind.parts, *where), end - begin, (end - begin) * dim)
        if values is not out:
            out.copy_(values)
    return True


def _blocks_of_rows(rows: int, dim: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Begins and ends of rows: all at once if they are fp32 as the loops have them."""
    if dtype is torch.float32:
        return [(0, rows)] if rows else []
    step = max(1, _QUANTIZED_ELEMENTS * torch.get_num_threads() // dim)
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def in_parts(loop: Callable[[int, int], Any], count: int, elements: int) -> list[Any]:
    """Results of the loop over 0 ... count - 1, cut into more tasks than threads where there is enough to do."""
    threads = 1 if elements <= ALONE else torch.get_num_threads()
    if threads == 1:
        return [loop(0, count)]
    parts = max(1, min(4 * threads, count))
    return run([partial(loop, count * part // parts, count * (part + 1) // parts) for part in range(parts)])
