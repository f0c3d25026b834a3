"""Bucketing, deduplication and calibration on the CPU where numba is installed: cpu_buckets_loops.py on some threads.

Results do not depend on the number of threads. Letters as in bucketize.py, unique.py and calibration.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .cpu_compiled import run

# ids that one thread moves before another can have been woken
_ALONE = 1 << 15
_ITEMS = (torch.int32, torch.int64)


@cache
def loops() -> Any:
    """The compiled loops; None where numba is missing or does not work: then everything runs on the torch path."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        with warnings.catch_warnings():
            # numba speaks of caches and of its own deprecations
            warnings.simplefilter("ignore")
            return importlib.import_module(".cpu_buckets_loops", __package__)
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        warnings.warn(f"shardwise: numba does not work here, bucketing runs on torch: {line}", stacklevel=2)
        return None


def parts_of(ids: int, most: int) -> int:
    """Into how many tasks work on so many ids is cut: more than threads, so that none waits long for another."""
    if ids <= _ALONE:
        return 1
    threads = torch.get_num_threads()
    return max(1, min(4 * threads, most)) if threads > 1 else 1


def like(loop: Any, tensor: Tensor) -> Any:
    """What tells the loops the type of an int32 or int64 tensor."""
    return loop.LIKE_INT64 if tensor.dtype == torch.int64 else loop.LIKE_INT32


def bucketize(
    loop: Any,
    lengths: Tensor,
    ids: Tensor,
    block_sizes: Tensor,
    buckets: int,
    weights: Tensor | None,
    ends: Tensor | None,
    totals: Tensor | None,
    borders: Tensor | None,
    keep_all: bool,
    keep: Tensor | None,
    new_lengths: Tensor,
    new_ids: Tensor,
    new_weights: Tensor,
    positions: Tensor,
    permute: Tensor,
) -> int:
    """Fill the outputs, those without elements excepted; all tensors contiguous, the features' own but sizes int64.

    Returns the number of ids, or what `count_buckets` does where it could not go on: then outputs mean nothing.
    """
    bags, n, features = lengths.shape[0], ids.shape[0], block_sizes.shape[0]
    batch = bags // features if features else 0
    source = (
        lengths.data_ptr(), bags, like(loop, lengths), ids.data_ptr(), n, like(loop, ids),
        block_sizes.data_ptr(), like(loop, block_sizes), _address(totals), _address(borders), _address(ends),
        features, batch, buckets,
    )  # fmt: skip
    moved = loop.LIKE_INT32 if weights is None else loop.MOVED[weights.itemsize]
    target = (
        _address(keep), keep_all, new_ids.data_ptr(), _address(weights), new_weights.data_ptr(), moved,
        positions.data_ptr(), permute.data_ptr(),
    )  # fmt: skip
    parts = parts_of(n, bags)
    scratch = torch.empty(parts * buckets + (n + 1) // 2, dtype=torch.int64)
    at = scratch.data_ptr()
    if parts == 1:
        return loop.bucketize(*source, new_lengths.data_ptr(), at, *target)  # type: ignore[no-any-return]
    new_lengths.zero_()
    scratch[: parts * buckets].zero_()
    where = at + 8 * parts * buckets
    cuts = [bags * part // parts for part in range(parts + 1)]
    begins = [0]
    for low, high in pairwise(cuts):
        begins.append(begins[-1] + int(lengths[low:high].sum()))
    slices = [(low, high, begin) for (low, high), begin in zip(pairwise(cuts), begins[:-1], strict=True)]
    counts = [at + 8 * part * buckets for part in range(parts)]
    found = run(
        [
            partial(loop.count_buckets, *source, *bounds, where, new_lengths.data_ptr(), mine)
            for bounds, mine in zip(slices, counts, strict=True)
        ]
    )
    if found != begins[1:] or found[-1] != n:
        bad = [end for end in found if end < 0]
        return max(bad, default=loop.BAD_LENGTHS)
    loop.cursors_of(at, parts, buckets)
    run(
        [
            partial(loop.place_in_buckets, *source, *bounds, where, mine, *target)
            for bounds, mine in zip(slices, counts, strict=True)
        ]
    )
    return n


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
