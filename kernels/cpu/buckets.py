"""Bucketing, deduplication and calibration on the CPU where numba is installed: buckets_loops.py on some threads.

Results do not depend on the number of threads. Letters as in ../jagged/bucketize.py, ../jagged/unique.py and
../jagged/calibration.py.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import numba_loops
from .threads import run

# ids that one thread moves before another can have been woken
_ALONE = 1 << 15


# the compiled loops; None where numba is missing or does not work
loops = partial(numba_loops.loops, "buckets_loops")


def parts_of(ids: int, most: int) -> int:
    """Into how many tasks work on so many ids is cut: more than threads, so that none waits long for another."""
    if ids <= _ALONE:
        return 1
    threads = torch.get_num_threads()
    return max(1, min(4 * threads, most)) if threads > 1 else 1


def like(loop: Any, tensor: Tensor | None) -> Any:
    """The loops' stand-in for the type of an int32 or int64 tensor, or of none."""
    return loop.LIKE_INT32 if tensor is None or tensor.dtype == torch.int32 else loop.LIKE_INT64


class Batch(NamedTuple):
    """Ids that are divided among buckets, and by what: tensors of features are int64 [F]."""

    lengths: Tensor  # [F * B]
    ids: Tensor  # [N]
    block_sizes: Tensor
    num_buckets: int
    weights: Tensor | None  # [N]
    ends: Tensor | None  # last bags, of features that have batches of their own
    totals: Tensor | None
    borders: Tensor | None
    keep_all: bool  # ids as they were
    keep: Tensor | None


def bucketize(loop: Any, batch: Batch, outputs: tuple[Tensor, ...]) -> int:
    """Fill the outputs (weights, lengths, ids, positions, permutation), those without elements excepted.

    All tensors are contiguous, those of features int64.

    Returns the number of ids, or what `count_buckets` does where it could not go on: then outputs mean nothing.
    """
    lengths, ids, block_sizes, buckets, weights, ends, totals, borders, keep_all, keep = batch
    new_weights, new_lengths, new_ids, positions, permute = outputs
    bags, n, features = lengths.shape[0], ids.shape[0], block_sizes.shape[0]
    samples = bags // features if features else 0
    source = (
        lengths.data_ptr(), bags, like(loop, lengths), ids.data_ptr(), n, like(loop, ids),
        block_sizes.data_ptr(), _address(totals), _address(borders), _address(ends),
        features, samples, buckets,
    )  # fmt: skip
    if positions.shape[0] and not permute.shape[0]:
        permute = torch.empty_like(ids)
    moved = loop.LIKE_INT32 if weights is None else loop.MOVED[weights.itemsize]
    target = (
        _address(keep), keep_all, new_ids.data_ptr(), _address(weights), new_weights.data_ptr(), moved,
        positions.data_ptr(), permute.data_ptr(),
    )  # fmt: skip
    parts = parts_of(n, bags)
    scratch = torch.empty(parts * buckets + (n + 1) // 2, dtype=torch.int64, device="cpu")
    at = scratch.data_ptr()
    if parts == 1:
        done: int = loop.bucketize(*source, new_lengths.data_ptr(), at, *target)
        return done
    new_lengths.zero_()
    scratch[: parts * buckets].zero_()
    where = at + 8 * parts * buckets
    cuts = [bags * part // parts for part in range(parts + 1)]
    begins = [0]
    for low, high in pairwise(cuts):
        begins.append(begins[-1] + int(lengths[low:high].sum()))
    slices = [(low, high, begin) for (low, high), begin in zip(pairwise(cuts), begins[:-1], strict=True)]
    counts = [at + 8 * part * buckets for part in range(parts)]
    reached = run(
        [
            partial(loop.count_buckets, *source, *bounds, where, new_lengths.data_ptr(), counts_at)
            for bounds, counts_at in zip(slices, counts, strict=True)
        ]
    )
    if reached != begins[1:] or reached[-1] != n:
        bad = [end for end in reached if end < 0]
        return int(max(bad, default=loop.BAD_LENGTHS))
    loop.cursors_of(at, parts, buckets)
    run(
        [
            partial(loop.place_in_buckets, *source, *bounds, where, counts_at, *target)
            for bounds, counts_at in zip(slices, counts, strict=True)
        ]
    )
    return n


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def unique(loop: Any, ids: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Distinct ids, sorted, and the number [N] of each; `counts` [N] is filled and cut. None: this needs torch."""
    n = ids.shape[0]
    least, largest = loop.id_range(ids.data_ptr(), 0, n, like(loop, ids))
    rows = largest - least + 1
    if not _sortable(rows, n):
        return None
    scratch = torch.empty(2 * n + loop.DIGITS, dtype=torch.int64, device="cpu")
    distinct, inverse = torch.empty_like(ids), torch.empty(n, dtype=torch.int64, device="cpu")
    size = loop.unique_run(
        ids.data_ptr(), 0, n, like(loop, ids), least, rows, 0, scratch.data_ptr(), distinct.data_ptr(),
        inverse.data_ptr(), _address(counts),
    )  # fmt: skip
    if counts is not None:
        counts.resize_(size)
    return distinct.resize_(size), inverse


def unique_per_table(
    loop: Any, ids: Tensor, offsets: Tensor, hash_sizes: Tensor, first_features: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | int:
    """Lengths, offsets, distinct ids of each table and the number [N] of each id; hash_sizes [T], first_features [T+1].

    A number is what `unique_tables` returns where it could not go on.
    """
    n, bags, tables = ids.shape[0], offsets.shape[0] - 1, hash_sizes.shape[0]
    features = int(first_features[-1])
    batch = bags // features
    parts = parts_of(n, tables)
    cuts = [tables * part // parts for part in range(parts + 1)]
    distinct, inverse = torch.empty_like(ids), torch.empty(n, dtype=torch.int64, device="cpu")
    lengths, ends = torch.empty(bags, dtype=offsets.dtype, device="cpu"), torch.empty_like(offsets)
    numbers = torch.empty(tables, dtype=torch.int64, device="cpu")
    begins = [0, n] if parts == 1 else offsets[first_features[cuts] * batch].tolist()
    # what these are worth where offsets go back is found by the loop before it writes
    memory = [
        torch.empty(2 * max(high - low, 0) + loop.DIGITS, dtype=torch.int64, device="cpu")
        for low, high in pairwise(begins)
    ]
    places = offsets.long()
    tasks = [
        partial(
            loop.unique_tables, ids.data_ptr(), n, like(loop, ids), places.data_ptr(), bags, features,
            hash_sizes.data_ptr(), first_features.data_ptr(), tables, low, high, scratch.data_ptr(),
            distinct.data_ptr(), inverse.data_ptr(), numbers.data_ptr(),
        )
        for (low, high), scratch in zip(pairwise(cuts), memory, strict=True)
    ]  # fmt: skip
    sizes = run(tasks) if parts > 1 else [tasks[0]()]
    if min(sizes) < 0:
        return int(max(size for size in sizes if size < 0))
    if parts == 1:
        distinct.resize_(sizes[0])
    else:
        distinct = torch.cat([distinct[begin : begin + size] for begin, size in zip(begins[:-1], sizes, strict=True)])
        total = 0
        for begin, end, size in zip(begins[:-1], begins[1:], sizes, strict=True):
            inverse[begin:end] += total
            total += size
    loop.spread(
        numbers.data_ptr(), first_features.data_ptr(), tables, batch, lengths.data_ptr(), ends.data_ptr(), bags,
        like(loop, offsets),
    )  # fmt: skip
    return lengths, ends, distinct, inverse


def _sortable(rows: int, n: int) -> bool:
    """Whether a row and a position fit into the 63 bits of an entry."""
    return rows.bit_length() + n.bit_length() <= 63


class Bins(NamedTuple):
    """A calibration's table: counts of each bin of each segment, and how a prediction finds its bin."""

    segment_value: Tensor | None
    segment_lengths: Tensor | None
    num_segments: int
    examples: Tensor  # [(segments + 1) * bins]
    positives: Tensor
    boundaries: Tensor | None  # [bins - 1]; None: bins of one width
    num_bins: int
    shift: float  # of a logit: the logarithm of the weight of positives
    lower: float
    step: float
    after: int  # examples of a bin from which on its rate is used
    weight: float


def calibrate(loop: Any, logit: Tensor, bins: Bins) -> tuple[Tensor, Tensor] | None:
    """Predictions and bins, all tensors contiguous but segments; None: something is wrong with the segments."""
    segment_value, segment_lengths, num_segments, examples, positives, boundaries, num_bins, *numbers = bins
    shift, lower, step, after, weight = map(float, numbers)
    n, dtype = logit.numel(), logit.dtype
    # halves are calibrated as fp32
    wide = logit if logit.itemsize > 2 else logit.float()
    predictions, bin_ids = torch.empty_like(wide), torch.empty(n, dtype=torch.int64, device="cpu")
    value = None if segment_value is None else segment_value.contiguous()
    lengths = None if segment_lengths is None else segment_lengths.contiguous()
    parts = parts_of(n, n) if lengths is None else 1
    call = partial(
        loop.calibrate, wide.data_ptr(), loop.LIKE_FLOAT64 if dtype == torch.float64 else loop.LIKE_FLOAT32,
        _address(value), 0 if value is None else value.shape[0], like(loop, value), _address(lengths),
        like(loop, lengths), num_segments,
        examples.data_ptr(), positives.data_ptr(), _address(boundaries), num_bins, shift, lower,
        step, after, weight,
    )  # fmt: skip
    out = (predictions.data_ptr(), bin_ids.data_ptr())
    if parts == 1:
        done = call(0, n, 0, *out)
    else:
        cuts = [n * part // parts for part in range(parts + 1)]
        done = min(run([partial(call, low, high, 0, *out) for low, high in pairwise(cuts)]))
    return None if done < 0 else (predictions.to(dtype), bin_ids)
