"""The update on the CPU where numba is installed (the extra `cpu`): the loops of cpu_loops.py on some threads.

Its result does not depend on the number of threads nor on how the work is divided. Letters as in update.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import numba_loops
from .features import Segment
from .rule import Rule
from .transpose import CHUNK

# elements that one thread moves before another can have been woken
_ALONE = 1 << 17
# ids in a bucket of the sort, about; and buckets at most (bits)
_BUCKET, _BUCKET_BITS = 512, 11
# what the sort does with an id, in elements moved
_ELEMENTS_AN_ID = 16
# ids of one row that are divided among threads
_LONG = 1 << 13


# the compiled loops; None where numba is missing or does not work
_loops = partial(numba_loops.loops, "cpu_loops")


@cache
def _update_loop(rule: Rule) -> Callable[..., int] | None:
    """The update with this rule; None where the rule has what only torch can do."""
    if _loops() is None:
        return None
    try:
        found: Callable[..., int] = importlib.import_module(".cpu_rule", __package__).update_of(rule)
        return found
    except Exception as error:
        warnings.warn(
            f"shardwise: numba does not compile the optimizer rule {rule.name!r}, it runs on torch:"
            f" {numba_loops.line(error)}",
            stacklevel=2,
        )
        return None


def update(
    weights: Tensor,
    states: Sequence[Tensor],
    rule: Rule,
    numbers: Tensor,
    decay: int,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    segments: Sequence[Segment],
    pooling: str,
) -> bool:
    """One optimizer step on fp32 tables: the rows' sums in the order of transpose.py, the rule row by row.

    False: nothing was done, the torch path has to.
    """
    # entries of the sort hold 32 bits each of a row and of an element of the gradient
    small = segments[-1].end_row < 2**31 and indices.shape[0] < 2**31 and grad.numel() < 2**32
    loop = _update_loop(rule) if small and all(_flat(flat) for flat in (weights, *states)) else None
    if loop is None:
        return False
    gradient = _array(grad.float().flatten())
    batch = _sort(indices, offsets, per_id_weights, features, grad, segments[-1].end_row, pooling)
    tables = (_array(weights), tuple(_array(state) for state in states), _array(numbers), decay)
    cut, total, widest = _array(torch.tensor(segments, device="cpu")), len(batch.entries), max(dims)
    # each row belongs to one bucket, so tasks share none
    parts = _parts(total * widest, total)
    borders = (
        torch.searchsorted(_tensor(batch.starts), torch.arange(parts + 1, device="cpu") * total // parts, right=True)
        - 1
    )
    borders[0], borders[-1] = 0, len(batch.starts) - 1
    long = _LONG if parts > 1 else total
    largest = int(_tensor(batch.starts).diff().max())
    tasks, left = [], []
    for low, high in pairwise(borders.tolist()):
        left.append(torch.empty(total // (long + 1) + 1, 2, dtype=torch.int64, device="cpu"))
        where = (batch.entries, batch.starts, low, high, batch.bits, long, _array(left[-1]))
        tasks.append(
            partial(loop, *tables, gradient, batch.source, batch.scale, cut, *where, *_scratch(largest, widest))
        )
    for runs, found in zip(run(tasks), left, strict=True):
        for begin, end in found[:runs].tolist():
            row = int(batch.entries[begin] >> 32)
            dim = next(segment.dim for segment in segments if row < segment.end_row)
            summed = _sum_long(batch, gradient, begin, end, dim)
            # what is left is an update of one row by one gradient
            none, one = (_array(torch.empty(0, dtype=dtype, device="cpu")) for dtype in (torch.int64, torch.float32))
            entry = batch.entries[begin : begin + 1] >> 32 << 32
            where = (entry, _array(torch.tensor([0, 1], device="cpu")), 0, 1, 0, 1, _array(found))
            loop(*tables, summed, none, one, cut, *where, *_scratch(1, widest))
    return True


class _Sorted(NamedTuple):
    """The ids of a batch by bucket of rows, as arrays: entries, where buckets begin, and what scaled entries name."""

    entries: Any
    starts: Any
    bits: int  # of a row's number that entries of a bucket are not yet sorted by
    source: Any
    scale: Any


def _sort(
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    grad: Tensor,
    rows: int,
    pooling: str,
) -> _Sorted:
    """Count the ids of each bucket, then move them there; the rest of the sort stays in a core's cache."""
    loops, n = _loops(), indices.shape[0]
    bags = offsets.shape[0] - 1
    scaled = per_id_weights is not None or pooling == "mean"
    source, scale = (
        _array(torch.empty(n if scaled else 0, dtype=dtype, device="cpu")) for dtype in (torch.int64, torch.float32)
    )
    bits = max(0, (rows - 1).bit_length() - min(_BUCKET_BITS, (n // _BUCKET).bit_length()))
    parts = _parts(_ELEMENTS_AN_ID * n, bags)
    counts = _array(torch.zeros(parts, ((rows - 1) >> bits) + 1, dtype=torch.int64, device="cpu"))
    shares = (torch.arange(parts + 1, device="cpu") * n // parts).to(offsets.dtype)
    borders = torch.searchsorted(offsets[:bags].contiguous(), shares)
    borders[0], borders[-1] = 0, bags
    ids, ends, p, ft = _ids(indices), _ids(offsets), _weights(per_id_weights), _array(features)
    batch = bags // features.shape[0]
    slices = list(zip(pairwise(borders.tolist()), counts, strict=True))
    run([partial(loops.count, ids, ends, ft, batch, *bounds, bits, mine) for bounds, mine in slices])
    starts, entries = loops.place(counts)
    # a gradient row belongs to a bag, or where nothing is pooled to an id
    rows_of = (grad.shape[1], 0) if pooling != "sequence" else (0, grad.shape[1])
    run(
        [
            partial(loops.scatter, ids, ends, p, ft, batch, *rows_of, *bounds, bits, mine, entries, source, scale)
            for bounds, mine in slices
        ]
    )
    return _Sorted(entries, starts, bits, source, scale)


def _sum_long(batch: _Sorted, gradient: Any, begin: int, end: int, dim: int) -> Any:
    """The summed gradient [dim] of one row that entries begin ... end - 1 name, by all threads."""
    loops, entries = _loops(), batch.entries[begin:end]
    blocks = -(-len(entries) // CHUNK**2)
    sums, total = _array(torch.empty(blocks, dim, device="cpu")), _array(torch.empty(dim, device="cpu"))
    parts = _parts(len(entries) * dim, blocks)
    borders = [blocks * part // parts for part in range(parts + 1)]
    of_run = (entries, gradient, batch.source, batch.scale, sums)
    run([partial(loops.sum_blocks, *of_run, *bounds, *_scratch(0, dim)[1:]) for bounds in pairwise(borders)])
    loops.join_blocks(sums, total, *_scratch(0, dim)[1:])
    return total


def _scratch(entries: int, dim: int) -> tuple[Any, Any, Any]:
    """Memory that a loop works in."""
    levels: int = _loops().LEVELS
    other = _array(torch.empty(entries, dtype=torch.int64, device="cpu")).view("uint64")
    return (
        other,
        _array(torch.empty(levels, dim, device="cpu")),
        _array(torch.empty(levels, dtype=torch.int64, device="cpu")),
    )


def _flat(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _array(tensor: Tensor) -> Any:
    return tensor.detach().contiguous().numpy()


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array)


def _ids(tensor: Tensor) -> Any:
    return _array(tensor.long())


def _weights(per_id_weights: Tensor | None) -> Any:
    return _array(torch.empty(0, device="cpu") if per_id_weights is None else per_id_weights.float())


def _parts(elements: int, most: int) -> int:
    """Into how many tasks work on so many elements is cut: more than threads, so that none waits long for another."""
    threads = torch.get_num_threads()
    return max(1, min(4 * threads, most)) if threads > 1 and elements > _ALONE else 1


def run(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of all tasks, done by this thread and by others that are free; an exception comes back to the caller."""
    results: list[Any] = [None] * len(tasks)
    numbers = count()

    def work() -> None:
        # next() on one counter gives each task to one thread
        while (number := next(numbers)) < len(tasks):
            results[number] = tasks[number]()

    others = _others(min(torch.get_num_threads(), len(tasks)) - 1, work)
    try:
        work()
    finally:
        # those that have not begun are not needed any more
        begun = [other for other in others if not other.cancel()]
        for other in begun:
            other.exception()
    for other in begun:
        other.result()
    return results


def _others(threads: int, work: Callable[[], None]) -> list[Future[None]]:
    if threads < 1:
        return []
    try:
        pool = _pool(threads, os.getpid())
        return [pool.submit(work) for _ in range(threads)]
    except RuntimeError:
        # the interpreter is about to end and starts no threads
        return []


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: those of a parent do not live on in its fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="shardwise")
