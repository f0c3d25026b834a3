"""The update on the CPU: the loops of update_loops.py on some threads where numba is installed (the extra `cpu`), else
sums of gradient rows by torch, in the order of the contract (transpose.py): `embedding_bag` adds each chunk.

The result does not depend on the number of threads nor on how the work is divided. Letters as in update/update.py.
Shapes: G [B, sum of dims] or [N, D] upstream gradient, keys [N] row numbers sorted, u distinct rows of a block.
"""

from __future__ import annotations

import importlib
import warnings
from array import array
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from .. import configs, numba_loops
from ..features import (
    FIRST_ROW,
    ROWS,
    Lookup,
    Segment,
    batch_size,
    column_offsets,
    linear_rows,
)
from ..rule import DECAYS, Rule, Update
from ..transpose import (
    CHUNK,
    Transposed,
    key_dtype,
    run_begins,
    transpose_index,
)
from .lookup import bag_sums, offsets_are_good
from .threads import call, spread

# Rows that are summed and updated at a time: half a MB of gradients
_BLOCK_ELEMENTS = 1 << 17


def transpose_index_cpu(indices: Tensor, offsets: Tensor, features: Tensor, segments: Sequence[Segment]) -> Transposed:
    """`transpose_index` by repeating what belongs to a feature or a bag instead of a search for each id."""
    if not offsets_are_good(offsets, indices.shape[0], padded=True):
        return transpose_index(indices, offsets, features, segments)
    ids, lengths, rows_total = indices[: int(offsets[-1])], offsets.diff(), segments[-1].end_row
    # rows by their numbers: as if all tables had one column
    keys, valid = linear_rows(
        ids, offsets, batch_size(offsets, features.shape[0]), features[:, [FIRST_ROW, ROWS]], base=0, dim=1
    )
    if not bool(valid.all()):
        keys = torch.where(valid, keys, rows_total)
    keys, position = torch.sort(keys.to(key_dtype(rows_total)), stable=True)
    bag = torch.arange(lengths.shape[0], dtype=torch.int32, device="cpu").repeat_interleave(
        lengths, output_size=ids.shape[0]
    )
    return Transposed(keys, position, bag[position])


def row_gradients(
    index: Transposed,
    grad: Tensor,
    scale: Tensor | None,
    segment: Segment,
    lookup: Lookup,
    batch: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Distinct rows of the segment [u] and their summed gradients [u, dim], added in the contract's order.

    They come in blocks that fit a core's cache, so that the update finds them there.
    """
    low, high = torch.searchsorted(index.keys, index.keys.new_tensor([segment.first_row, segment.end_row])).tolist()
    if low == high:
        # tables of this dim may have no features at all
        return
    keys = index.keys[low:high] - segment.first_row
    scale = None if scale is None else scale[low:high]
    if lookup.pooling != "sequence":
        matrix, source = _gradient_matrix(index.bag[low:high], grad, segment.dim, lookup.dims, batch)
    else:
        matrix, source = grad, index.position[low:high]
    while keys.shape[0]:
        starts = run_begins(keys).nonzero().squeeze(1)
        bounds = torch.cat([starts, starts.new_tensor([keys.shape[0]])])
        sizes, rows = bounds.diff(), keys[starts].long()
        long = sizes > CHUNK
        if not bool(long.any()):
            yield from _blocks_of_sums(matrix, source, scale, rows, bounds)
            return
        # their ids are parted from the others before rows are summed: numbers are cheap to move, rows are not
        of_long, short = long.repeat_interleave(sizes, output_size=keys.shape[0]), ~long
        of_short = ~of_long
        yield from _blocks_of_sums(
            matrix, source[of_short], None if scale is None else scale[of_short], rows[short],
            _offsets_of(sizes[short]),
        )  # fmt: skip
        rows, bounds = _chunks(rows[long], sizes[long])
        matrix = bag_sums(matrix, source[of_long], bounds, None if scale is None else scale[of_long])
        keys, source, scale = rows, torch.arange(rows.shape[0], device=rows.device), None


def _chunks(rows: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Runs side by side, cut into chunks of at most CHUNK: the row of each chunk, and the bounds of all chunks."""
    counts = (sizes + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
    last = counts.cumsum(0)
    parts = sizes.new_full((int(last[-1]),), CHUNK)
    parts[last - 1] = sizes - (counts - 1) * CHUNK
    return rows.repeat_interleave(counts, output_size=len(parts)), _offsets_of(parts)


def _offsets_of(sizes: Tensor) -> Tensor:
    """Where each of some parts begins, and the end of all."""
    offsets = sizes.new_zeros(sizes.shape[0] + 1)
    torch.cumsum(sizes, 0, out=offsets[1:])
    return offsets


def _blocks_of_sums(
    matrix: Tensor, source: Tensor, scale: Tensor | None, rows: Tensor, bounds: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and the sums of matrix[source[i]] between their bounds, so many at a time as stay in a core's cache."""
    block = max(1, configs.cpu("update_block_elements", _BLOCK_ELEMENTS) // matrix.shape[1])
    cuts = [*range(0, rows.shape[0], block), rows.shape[0]]
    # read at once, because each read costs as much as an operator
    ends = bounds[torch.tensor(cuts, device="cpu")].tolist()
    for (first, last), (begin, end) in zip(pairwise(cuts), pairwise(ends), strict=True):
        of_ids = bounds[first : last + 1] - begin if begin else bounds[first : last + 1]
        block_scale = None if scale is None else scale[begin:end]
        yield rows[first:last], bag_sums(matrix, source[begin:end], of_ids, block_scale)


def _gradient_matrix(bag: Tensor, grad: Tensor, dim: int, dims: Sequence[int], batch: int) -> tuple[Tensor, Tensor]:
    """G as rows of this dim, and the row of each bag: a view where all features have this dim."""
    samples = torch.arange(batch, device=bag.device)
    if set(dims) == {dim}:
        row_of_bag = samples * len(dims) + torch.arange(len(dims), device=bag.device)[:, None]
        return grad.reshape(-1, dim), row_of_bag.view(-1)[bag]
    columns = column_offsets(dims)
    of_dim = [j for j, other in enumerate(dims) if other == dim]
    number = torch.zeros(len(dims), dtype=torch.int64, device=bag.device)  # [F] place among the features of this dim
    number[of_dim] = torch.arange(len(of_dim), device=bag.device)
    row_of_bag = number[:, None] * batch + samples  # [F, B]
    return torch.cat([grad[:, columns[j] : columns[j] + dim] for j in of_dim]), row_of_bag.view(-1)[bag]


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
        address: int = importlib.import_module(".rule", __package__).update_of(rule)
        return address
    except Exception as error:
        warnings.warn(
            f"shardwise: numba does not compile the optimizer rule {rule.name!r}, it runs on torch:"
            f" {numba_loops.line(error)}",
            stacklevel=2,
        )
        return None


def update(update: Update, numbers: Tensor, grad: Tensor, lookup: Lookup) -> bool:
    """One optimizer step on fp32 tables: the rows' sums in the order of transpose.py, the rule row by row.

    False: nothing was done, the torch path has to.
    """
    weights, states, rule, decay = update.weights, update.states, update.rule, DECAYS.index(update.decay)
    indices, offsets, per_id_weights, features, segments, pooling, dims, _ = lookup
    n, bags, count = indices.shape[0], offsets.shape[0] - 1, features.shape[0]
    # entries of the sort hold 32 bits each of a row and of an element of the gradient
    small = segments[-1].end_row < 2**31 and n < 2**31 and grad.numel() < 2**32
    loops = _loops()
    if (
        loops is None
        or not small
        or not all(flat.dtype == torch.float32 and flat.is_contiguous() for flat in (weights, *states))
    ):
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
    call(loops.plan, where)
    divide = call if slices == 1 else spread
    divide(loops.count, where)
    total, largest = job[loops.TOTAL], job[loops.LARGEST]
    # each row belongs to one bucket, so tasks share none
    tasks = _parts(total * widest, total, configs.cpu("update_tasks", _TASKS) * threads)
    long = configs.cpu("update_long", _LONG) if tasks > 1 else total
    words = loops.scratch_words(largest, widest)
    # entries, then scratch, then what is found of long runs
    runs_at = total + (threads if tasks > 1 else 1) * words
    room = ids.new_empty(runs_at + 3 * (total // (long + 1) + 1))
    at = room.data_ptr()
    job[loops.ENTRIES], job[loops.SCRATCH], job[loops.LONG_RUNS] = at, at + 8 * total, at + 8 * runs_at
    job[loops.TASKS], job[loops.LONG], job[loops.SCRATCH_WORDS] = tasks, long, words
    divide(loops.scatter, where)
    divide = call if tasks == 1 else spread
    divide(loop, where)
    runs = job[loops.RUNS]
    if runs:
        for run in room[runs_at : runs_at + 3 * runs].view(runs, 3).tolist():
            _update_long(loop, job[:], int(room[run[0]]), run, dims[run[2]])
    return True


def _update_long(loop: int, job: array[int], entry: int, run: Sequence[int], dim: int) -> None:
    """Update the row of a run (begin, end, feature), whose gradients all threads sum: entries begin ... end - 1."""
    begin, end, feature = run
    loops, where, blocks = _loops(), job.buffer_info()[0], -(-(end - begin) // CHUNK**2)
    sums = torch.empty(blocks, dim, dtype=torch.float32, device="cpu")
    entries = torch.tensor([begin, end], device="cpu")
    job[loops.LONG_RUNS], job[loops.BLOCKS] = entries.data_ptr(), sums.data_ptr()
    job[loops.TASKS], job[loops.WIDEST] = blocks, dim
    job[loops.UPDATING] = job[loops.WORKERS] = 0
    spread(loops.sum_blocks, where)
    call(loops.join_blocks, where)
    # what is left is an update of one row by one gradient
    single = torch.tensor([entry >> 32 << 32, 0, 1, feature], device="cpu")
    job[loops.ENTRIES], job[loops.STARTS], job[loops.OWNERS] = (single.data_ptr() + 8 * i for i in (0, 1, 3))
    job[loops.GRADIENT], job[loops.SCALE] = sums.data_ptr(), 0
    job[loops.BUCKETS] = job[loops.TASKS] = job[loops.TOTAL] = job[loops.LONG] = 1
    job[loops.UPDATING] = job[loops.WORKERS] = 0
    call(loop, where)


def _parts(elements: int, most: int, parts: int) -> int:
    """Into how many parts work on so many elements is cut."""
    return (
        max(1, min(parts, most))
        if torch.get_num_threads() > 1 and elements > configs.cpu("update_alone", _ALONE)
        else 1
    )
