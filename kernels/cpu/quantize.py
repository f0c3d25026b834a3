"""Quantize rows and back on the CPU where numba is installed (the extra `cpu`): the loops of quantize_loops.py and
quantized_lookup_loops.py, a part of the rows for each thread. They give the reference's bits. Letters as in quantized/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..row_formats import RowFormat
from . import numba_loops
from .huge_pages import in_huge_pages
from .threads import run

# columns that one thread handles before another can have been woken
ALONE = 1 << 17
# columns of rows of another dtype that are made fp32, or made of fp32, at a time: they stay in a core's cache
_BLOCK_ELEMENTS = 1 << 17

# the compiled loops; None where numba is missing or does not work
_quantizing = partial(numba_loops.loops, "quantize_loops")
_looking_up = partial(numba_loops.loops, "quantized_lookup_loops")


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
    for begin, end in _blocks(rows, dim, weights.dtype):
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
    for begin, end in _blocks(rows, dim, weights.dtype):
        out = weights if end - begin == rows else weights[begin:end]
        values = out if out.dtype is torch.float32 else torch.empty(end - begin, dim, device="cpu")
        where = at + begin * width, kept + begin * each, half, values.data_ptr(), dim
        in_parts(partial(loops.dequantize, number, kind.bits, kind.parts, *where), end - begin, (end - begin) * dim)
        if values is not out:
            out.copy_(values)
    return True


def _blocks(rows: int, dim: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Begins and ends of rows: all at once if they are fp32 as the loops have them."""
    if dtype is torch.float32:
        return [(0, rows)] if rows else []
    step = max(1, _BLOCK_ELEMENTS * torch.get_num_threads() // dim)
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def in_parts(loop: Callable[[int, int], Any], count: int, elements: int) -> list[Any]:
    """What the loop over 0 ... count - 1 returns, cut into more tasks than threads where there is enough to do."""
    threads = 1 if elements <= ALONE else torch.get_num_threads()
    if threads == 1:
        return [loop(0, count)]
    parts = max(1, min(4 * threads, count))
    return run([partial(loop, count * part // parts, count * (part + 1) // parts) for part in range(parts)])
