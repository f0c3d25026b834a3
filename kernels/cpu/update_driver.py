"""The update on the CPU where numba is installed (the extra `cpu`): the loops of update_loops.py on some threads.

Its result does not depend on the number of threads nor on how the work is divided. Letters as in update/update.py.
"""

from __future__ import annotations

import importlib
import warnings
from array import array
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from .. import configs
from ..features import Segment
from ..rule import Rule
from ..transpose import CHUNK
from . import numba_loops
from .threads import call, spread

# elements that one thread moves before another can have been woken
_ALONE = 1 << 17
# what the sort does with an id, in elements moved
_ELEMENTS_AN_ID = 16
# ids of one row that are divided among threads
_LONG = 1 << 13
# tasks for each thread, so that none waits long for another
_TASKS = 8


# the compiled loops; None where numba is missing or does not work
_loops = partial(numba_loops.loops, "update_loops")


@cache
def _update_loop(rule: Rule) -> int | None:
    """The update with this rule; None where the rule has what only torch can do. Only where there are loops."""
    try:
        found: int = importlib.import_module(".rule", __package__).update_of(rule)
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
    n, bags, count = indices.shape[0], offsets.shape[0] - 1, features.shape[0]
    # entries of the sort hold 32 bits each of a row and of an element of the gradient
    small = segments[-1].end_row < 2**31 and n < 2**31 and grad.numel() < 2**32
    loops = _loops()
    if loops is None or not small or not all(_flat(flat) for flat in (weights, *states)):
        return False
    loop = _update_loop(rule)
    if loop is None:
        return False
    threads, widest = torch.get_num_threads(), max(dims)
    ids, ends, table, gradient = (
        indices.long().contiguous(),
        offsets.long().contiguous(),
        features.contiguous(),
        grad.float().contiguous(),
    )
    per_id = None if per_id_weights is None else per_id_weights.float().contiguous()
    numbers = numbers.contiguous()
    scaled = per_id is not None or pooling == "mean"
    # a gradient row belongs to a bag, or where nothing is pooled to an id
    columns, width = (grad.shape[1], 0) if pooling != "sequence" else (0, grad.shape[1])
    slices = _parts(configs.cpu("update_elements_an_id", _ELEMENTS_AN_ID) * n, bags, 2 * threads)
    most = n // loops.DENSE + count
    # the sort's memory, and where its parts begin
    sizes = (3 * count, slices + 1, most, slices * most, most + 1, n if scaled else 0, n if scaled else 0)
    memory = ids.new_empty(sum(sizes))
    places, at = [], memory.data_ptr()
    for size in sizes:
        places.append(at)
        at += 8 * size
    plan, borders, owners, counts, starts, source, scale = places
    job = array("q", (
        ids.data_ptr(), ends.data_ptr(), 0 if per_id is None else per_id.data_ptr(), table.data_ptr(),
        gradient.data_ptr(), numbers.data_ptr(),
        n, bags, count, numbers.shape[0], columns, width, decay,
        plan, borders, owners, counts, starts, 0, source, scale if scaled else 0,
        slices, 0, 0, 0,
        0, 0, 0, 0, 0, 0, widest,
        0, 0, 0, 0, 0, 0,
        weights.data_ptr(), weights.shape[0],
    ))  # fmt: skip
    for state in states:
        job.extend((state.data_ptr(), state.shape[0]))
    where = job.buffer_info()[0]
    call(loops.plan.address, where)
    divide = call if slices == 1 else spread
    divide(loops.count.address, where)
    total, largest = job[loops.TOTAL], job[loops.LARGEST]
    # each row belongs to one bucket, so tasks share none
    tasks = _parts(total * widest, total, configs.cpu("update_tasks", _TASKS) * threads)
    long = configs.cpu("update_long", _LONG) if tasks > 1 else total
    words = loops.scratch_words(largest, widest)
    # entries, then scratch, then what is found of long runs
    found = total + (threads if tasks > 1 else 1) * words
    room = ids.new_empty(found + 3 * (total // (long + 1) + 1))
    at = room.data_ptr()
    job[loops.ENTRIES], job[loops.SCRATCH], job[loops.FOUND] = at, at + 8 * total, at + 8 * found
    job[loops.TASKS], job[loops.LONG], job[loops.SCRATCH_WORDS] = tasks, long, words
    divide(loops.scatter.address, where)
    divide = call if tasks == 1 else spread
    divide(loop, where)
    runs = job[loops.RUNS]
    if runs:
        for begin, end, f in room[found : found + 3 * runs].view(runs, 3).tolist():
            _update_long(loop, job[:], int(room[begin]), begin, end, f, dims[f])
    return True


def _update_long(loop: int, job: array[int], entry: int, begin: int, end: int, feature: int, dim: int) -> None:
    """Update the row that entries begin ... end - 1 name, whose gradients all threads sum."""
    loops, where, blocks = _loops(), job.buffer_info()[0], -(-(end - begin) // CHUNK**2)
    sums = torch.empty(blocks, dim, dtype=torch.float32, device="cpu")
    run = torch.tensor([begin, end], device="cpu")
    job[loops.FOUND], job[loops.BLOCKS] = run.data_ptr(), sums.data_ptr()
    job[loops.TASKS], job[loops.WIDEST] = blocks, dim
    job[loops.UPDATING] = job[loops.WORKERS] = 0
    spread(loops.sum_blocks.address, where)
    call(loops.join_blocks.address, where)
    # what is left is an update of one row by one gradient
    one = torch.tensor([entry >> 32 << 32, 0, 1, feature], device="cpu")
    job[loops.ENTRIES], job[loops.STARTS], job[loops.OWNERS] = (one.data_ptr() + 8 * i for i in (0, 1, 3))
    job[loops.GRADIENT], job[loops.SCALE] = sums.data_ptr(), 0
    job[loops.BUCKETS] = job[loops.TASKS] = job[loops.TOTAL] = job[loops.LONG] = 1
    job[loops.UPDATING] = job[loops.WORKERS] = 0
    call(loop, where)


def _flat(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous()


def _parts(elements: int, most: int, parts: int) -> int:
    """Into how many parts work on so many elements is cut."""
    return (
        max(1, min(parts, most))
        if torch.get_num_threads() > 1 and elements > configs.cpu("update_alone", _ALONE)
        else 1
    )
