"""The loops of bucketing, deduplication and calibration on the CPU, compiled by numba where they are first called.

Tensors come as addresses and sizes: making a numpy array of a tensor costs more than a small batch does. An empty array
(`like`) says of what type the elements at an address are. Loops release the GIL, never raise, and read and write only
what the sizes say: they return a negative number where the input does not let them go on.
Letters as in bucketize.py, unique.py and calibration.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import carray, int64, uint64
from numba.core import types as numba_types
from numba.extending import intrinsic

# to type checkers these are functions of fewer arguments, and types without CPointer
_intrinsic: Any = intrinsic
types: Any = numba_types

# what an empty array says of elements: the tensors' own types, and by their size those that are only moved
LIKE = {name: np.empty(0, name) for name in ("int8", "int16", "int32", "int64", "float32", "float64")}
MOVED = {1: LIKE["int8"], 2: LIKE["int16"], 4: LIKE["int32"], 8: LIKE["int64"]}

# ids below this many, and their quotients, are exact as float64
LIKE_INT64, LIKE_INT32 = LIKE["int64"], LIKE["int32"]
_EXACT = int64(1) << 52
# an id of a bucket is stored as the bucket, one outside all blocks as -1 - bucket
BAD_LENGTHS, BAD_ID = -1, -2


def _compiled(function: Any) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # no place to keep it: neither beside this file nor in the home of the user can anything be written
        return numba.njit(**options)(function)


@_intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like.dtype)(types.int64, like), generate


@numba.njit(forceinline=True)
def _view(address: int, size: int, like: Any) -> Any:
    return carray(_pointer(address, like), (size,))


@numba.njit(forceinline=True)
def _feature_sizes(f: int, block_sizes: Any, totals: Any, buckets: int) -> tuple[int, int, int]:
    """Ids of a bucket, blocks of a bucket, and ids of all buckets."""
    local = totals[f] // buckets if totals.shape[0] else int64(1)
    blocks = local * buckets
    block = int64(block_sizes[f])
    most = int64(0x7FFFFFFFFFFFFFFF)
    size = block * local if block <= most // local else most
    return size, local, (block * blocks if block <= most // blocks else most)


@_compiled
def count_buckets(
    lengths_at: int, bags: int, lengths_like: Any, ids_at: int, n: int, ids_like: Any, sizes_at: int, sizes_like: Any,
    totals_at: int, borders_at: int, ends_at: int, features: int, batch: int, buckets: int, first: int, last: int,
    begin: int, where_at: int, new_lengths_at: int, counts_at: int,
) -> int:  # fmt: skip
    """Write the bucket of each id of bags first ... last - 1, which begin at position `begin`, and count them.

    Returns the position after the last id, BAD_LENGTHS, or BAD_ID - the position of a negative id.
    """
    i8 = LIKE_INT64
    lengths, ids = _view(lengths_at, bags, lengths_like), _view(ids_at, n, ids_like)
    block_sizes = _view(sizes_at, features, sizes_like)
    totals = _view(totals_at, features if totals_at else 0, i8)
    borders = _view(borders_at, features * (buckets + 1) if borders_at else 0, i8)
    ends = _view(ends_at, features if ends_at else 0, i8)
    where, counts = _view(where_at, n, LIKE_INT32), _view(counts_at, buckets, i8)
    new_lengths = _view(new_lengths_at, buckets * bags, lengths_like)
    f, end, size, local, whole, block = -1, int64(0), int64(0), int64(0), int64(0), int64(0)
    inverse, exact, blocks = 0.0, True, int64(1)
    at = int64(begin)
    if at < 0:
        return BAD_LENGTHS
    for bag in range(first, last):
        while bag >= end:
            f += 1
            end = ends[f] if ends.shape[0] else end + batch
            if bag < end:
                size, local, whole = _feature_sizes(f, block_sizes, totals, buckets)
                block, blocks = int64(block_sizes[f]), local * buckets
                inverse, exact = 1.0 / max(size, 1), whole <= _EXACT
        length = int64(lengths[bag])
        if length < 0 or length > n - at:
            return BAD_LENGTHS
        for i in range(at, at + length):
            id = int64(ids[i])
            if id < 0:
                return BAD_ID - i
            if borders.shape[0]:
                low, high = int64(0), int64(buckets)
                border = f * (buckets + 1)
                looked_up = id
                if block == 0:
                    looked_up = (id % blocks) * borders[border + buckets] // blocks
                # the number of inner borders that are at most the id, which is less than the last border
                if looked_up >= borders[border + buckets]:
                    p, mark = id % buckets, -1 - id % buckets
                else:
                    while high - low > 1:
                        middle = (low + high) // 2
                        if borders[border + middle] <= looked_up:
                            low = middle
                        else:
                            high = middle
                    p = low
                    mark = p if block else -1 - p
            elif id < whole:
                if exact:
                    p = int64(float(id) * inverse)
                    rest = id - p * size
                    p += int64(rest >= size) - int64(rest < 0)
                else:
                    p = id // size
                mark = p
            else:
                p = id % blocks // local
                mark = -1 - p
            where[i] = mark
            counts[p] += 1
            new_lengths[p * bags + bag] += 1
        at += length
    return at


@_compiled
def place_in_buckets(
    lengths_at: int, bags: int, lengths_like: Any, ids_at: int, n: int, ids_like: Any, sizes_at: int, sizes_like: Any,
    totals_at: int, borders_at: int, ends_at: int, features: int, batch: int, buckets: int, first: int, last: int,
    begin: int, where_at: int, cursors_at: int, keep_at: int, keep_all: bool, new_ids_at: int, weights_at: int,
    new_weights_at: int, weights_like: Any, positions_at: int, permute_at: int,
) -> None:  # fmt: skip
    """Move the ids of bags first ... last - 1 to where `cursors`, one for each bucket, say, in order."""
    i8 = LIKE_INT64
    lengths, ids = _view(lengths_at, bags, lengths_like), _view(ids_at, n, ids_like)
    block_sizes = _view(sizes_at, features, sizes_like)
    totals = _view(totals_at, features if totals_at else 0, i8)
    borders = _view(borders_at, features * (buckets + 1) if borders_at else 0, i8)
    ends = _view(ends_at, features if ends_at else 0, i8)
    keep = _view(keep_at, features if keep_at else 0, i8)
    where, cursors = _view(where_at, n, LIKE_INT32), _view(cursors_at, buckets, i8)
    new_ids = _view(new_ids_at, n, ids_like)
    weights = _view(weights_at, n if weights_at else 0, weights_like)
    new_weights = _view(new_weights_at, n if weights_at else 0, weights_like)
    positions = _view(positions_at, n if positions_at else 0, ids_like)
    permute = _view(permute_at, n if permute_at else 0, ids_like)
    f, end, size, local, blocks, kept = -1, int64(0), int64(0), int64(0), int64(1), keep_all
    outside = int64(1)
    at = int64(begin)
    for bag in range(first, last):
        while bag >= end:
            f += 1
            end = ends[f] if ends.shape[0] else end + batch
            if bag < end:
                size, local, _ = _feature_sizes(f, block_sizes, totals, buckets)
                kept = keep[f] != 0 if keep.shape[0] else keep_all
                outside = local * buckets
                if borders.shape[0] and block_sizes[f] != 0:
                    outside = int64(buckets)
        length = int64(lengths[bag])
        for i in range(at, at + length):
            mark = int64(where[i])
            p = mark if mark >= 0 else -1 - mark
            k = cursors[p]
            cursors[p] = k + 1
            id = int64(ids[i])
            if not kept:
                if mark < 0:
                    id = id // outside
                elif borders.shape[0]:
                    id -= borders[f * (buckets + 1) + p]
                else:
                    id -= p * size
            new_ids[k] = id
            if weights.shape[0]:
                new_weights[k] = weights[i]
            if positions.shape[0]:
                positions[k] = i - at
            if permute.shape[0]:
                permute[i] = k
        at += length


@_compiled
def cursors_of(counts_at: int, parts: int, buckets: int) -> None:
    """Replace counts [parts, buckets] by where each part begins in each bucket."""
    counts = _view(counts_at, parts * buckets, LIKE_INT64)
    total = int64(0)
    for p in range(buckets):
        for part in range(parts):
            n = counts[part * buckets + p]
            counts[part * buckets + p] = total
            total += n


@_compiled
def bucketize(
    lengths_at: int, bags: int, lengths_like: Any, ids_at: int, n: int, ids_like: Any, sizes_at: int, sizes_like: Any,
    totals_at: int, borders_at: int, ends_at: int, features: int, batch: int, buckets: int, new_lengths_at: int,
    scratch_at: int, keep_at: int, keep_all: bool, new_ids_at: int, weights_at: int, new_weights_at: int,
    weights_like: Any, positions_at: int, permute_at: int,
) -> int:  # fmt: skip
    """Count and place by one thread; scratch has 8 bytes a bucket and 4 an id. Returns what `count_buckets` does."""
    new_lengths = _view(new_lengths_at, buckets * bags, lengths_like)
    for i in range(buckets * bags):
        new_lengths[i] = 0
    counts = _view(scratch_at, buckets, LIKE_INT64)
    for p in range(buckets):
        counts[p] = 0
    where_at = scratch_at + 8 * buckets
    found = count_buckets(
        lengths_at, bags, lengths_like, ids_at, n, ids_like, sizes_at, sizes_like, totals_at, borders_at, ends_at,
        features, batch, buckets, 0, bags, 0, where_at, new_lengths_at, scratch_at,
    )  # fmt: skip
    if found != n:
        return found
    cursors_of(scratch_at, 1, buckets)
    place_in_buckets(
        lengths_at, bags, lengths_like, ids_at, n, ids_like, sizes_at, sizes_like, totals_at, borders_at, ends_at,
        features, batch, buckets, 0, bags, 0, where_at, scratch_at, keep_at, keep_all, new_ids_at, weights_at,
        new_weights_at, weights_like, positions_at, permute_at,
    )  # fmt: skip
    return found
