"""The loops of bucketing, deduplication and calibration on the CPU, compiled by numba where they are first called.

Tensors come as addresses and sizes: making a numpy array of a tensor costs more than a small batch does. An empty array
(`like`) says of what type the elements at an address are. Loops release the GIL, never raise, and read and write only
what the sizes say: they return a negative number where the input does not let them go on.
Letters as in ../jagged/bucketize.py, ../jagged/unique.py and ../jagged/calibration.py.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import carray
from numba.core import types as numba_types
from numba.extending import intrinsic

from .njit import compiled_by_types

# to type checkers these are functions of fewer arguments, types without CPointer, and numbers of Python
_intrinsic: Any = intrinsic
types: Any = numba_types
float64: Any = numba.float64
int64: Any = numba.int64
uint64: Any = numba.uint64
_inline: Any = numba.njit(forceinline=True)

# what a number says of elements: the tensors' own types, and by their size those that are only moved
LIKE: Any = {name: np.dtype(name).type(0) for name in ("int8", "int16", "int32", "int64", "float32", "float64")}
MOVED = {1: LIKE["int8"], 2: LIKE["int16"], 4: LIKE["int32"], 8: LIKE["int64"]}

# ids below this many, and their quotients, are exact as float64
LIKE_INT64, LIKE_INT32 = LIKE["int64"], LIKE["int32"]
LIKE_FLOAT64, LIKE_FLOAT32 = LIKE["float64"], LIKE["float32"]
_EXACT = int64(1) << 52
# rows an id up to which a mark for each row is faster than a sort, whose passes are of so many bits
DENSE, DIGIT = 4, 11
DIGITS = 1 << DIGIT
# an id of a bucket is stored as the bucket, one outside all blocks as -1 - bucket
BAD_LENGTHS, BAD_ID = -1, -2


@_intrinsic
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(like)(types.int64, like), generate


@_inline
def _view(address: int, size: int, like: Any) -> Any:
    return carray(_pointer(address, like), (size,))


@_inline
def _feature_sizes(f: int, block_sizes: Any, totals: Any, buckets: int) -> Any:
    """Ids of a bucket, blocks of a bucket, and ids of all buckets."""
    local = totals[f] // buckets if totals.shape[0] else int64(1)
    blocks = local * buckets
    block = int64(block_sizes[f])
    most = int64(0x7FFFFFFFFFFFFFFF)
    size = block * local if block <= most // local else most
    return size, local, (block * blocks if block <= most // blocks else most)


@_inline
def _divide_evenly(
    ids: Any, at: int, end: int, size: int, local: int, blocks: int, whole: int, where: Any, counts: Any
) -> Any:
    """Buckets of ids at ... end - 1 of one feature whose buckets have `size` ids, `whole` in all."""
    inverse = 1.0 / max(size, 1)
    exact = whole <= _EXACT
    for i in range(at, end):
        id = int64(ids[uint64(i)])
        if id < 0:
            return BAD_ID - i
        if id < whole:
            if exact:
                # a product instead of a quotient, which is wrong by 1 at most
                p = int64(float(id) * inverse)
                rest = id - p * size
                p += int64(rest >= size) - int64(rest < 0)
            else:
                p = id // size
            where[uint64(i)] = p
        else:
            p = id % blocks // local
            where[uint64(i)] = -1 - p
        counts[uint64(p)] += 1
    return end


@_inline
def _divide_by_borders(
    ids: Any, at: int, end: int, block: int, blocks: int, borders: Any, where: Any, counts: Any
) -> Any:
    """Buckets of ids at ... end - 1 of one feature between `borders` [K + 1]; where the block is 0 ids are raw."""
    buckets = borders.shape[0] - 1
    rows = borders[buckets]
    for i in range(at, end):
        id = int64(ids[i])
        if id < 0:
            return BAD_ID - i
        inside = id if block else id % blocks * rows // blocks
        if inside < rows:
            # without a branch, which would be guessed wrong
            p, left = int64(0), int64(buckets)
            while left > 1:
                half = left // 2
                p += half * int64(borders[uint64(p + half)] <= inside)
                left -= half
            where[i] = p if block else -1 - p
        else:
            p = id % buckets
            where[i] = -1 - p
        counts[p] += 1
    return end


@_inline
def _ids_of(lengths: Any, first: int, last: int, most: int) -> Any:
    """The sum of lengths first ... last - 1; BAD_LENGTHS if one is negative or they are more than `most`."""
    total, least, largest = int64(0), int64(0), int64(0)
    for bag in range(first, last):
        length = int64(lengths[uint64(bag)])
        total += length
        least, largest = min(least, length), max(largest, length)
    # no sum of lengths that are at most `most` overflows
    return BAD_LENGTHS if least < 0 or largest > most or total > most else total


@compiled_by_types
def count_buckets(
    lengths_at: int,
    bags: int,
    lengths_like: Any,
    ids_at: int,
    n: int,
    ids_like: Any,
    sizes_at: int,
    totals_at: int,
    borders_at: int,
    ends_at: int,
    features: int,
    batch: int,
    buckets: int,
    first: int,
    last: int,
    begin: int,
    where_at: int,
    new_lengths_at: int,
    counts_at: int,
) -> Any:
    """Write the bucket of each id of bags first ... last - 1, which begin at position `begin`, and count them.

    Returns the position after the last id, BAD_LENGTHS (also for a bad block size), or BAD_ID - the position of a bad
    id.
    """
    lengths, ids = _view(lengths_at, bags, lengths_like), _view(ids_at, n, ids_like)
    block_sizes = _view(sizes_at, features, LIKE_INT64)
    totals = _view(totals_at, features if totals_at else 0, LIKE_INT64)
    borders = _view(borders_at, features * (buckets + 1) if borders_at else 0, LIKE_INT64)
    ends = _view(ends_at, features if ends_at else 0, LIKE_INT64)
    where, counts = _view(where_at, n, LIKE_INT32), _view(counts_at, buckets, LIKE_INT64)
    new_lengths = _view(new_lengths_at, buckets * bags, lengths_like)
    at, bag = int64(begin), int64(first)
    for f in range(features):
        stop = min(ends[f] if ends.shape[0] else (f + 1) * batch, last)
        if bag >= stop:
            continue
        total = _ids_of(lengths, bag, stop, n - at)
        if at < 0 or total < 0 or block_sizes[f] < 0:
            return BAD_LENGTHS
        size, local, whole = _feature_sizes(f, block_sizes, totals, buckets)
        if borders.shape[0]:
            feature_borders = borders[f * (buckets + 1) : (f + 1) * (buckets + 1)]
            status = _divide_by_borders(
                ids, at, at + total, int64(block_sizes[f]), local * buckets, feature_borders, where, counts
            )
        else:
            status = _divide_evenly(ids, at, at + total, size, local, local * buckets, whole, where, counts)
        if status < 0:
            return status
        while bag < stop:
            for i in range(at, at + int64(lengths[uint64(bag)])):
                mark = int64(where[uint64(i)])
                new_lengths[uint64((mark if mark >= 0 else -1 - mark) * bags + bag)] += 1
            at += int64(lengths[uint64(bag)])
            bag += 1
    return at


@compiled_by_types
def place_in_buckets(
    lengths_at: int,
    bags: int,
    lengths_like: Any,
    ids_at: int,
    n: int,
    ids_like: Any,
    sizes_at: int,
    totals_at: int,
    borders_at: int,
    ends_at: int,
    features: int,
    batch: int,
    buckets: int,
    first: int,
    last: int,
    begin: int,
    where_at: int,
    cursors_at: int,
    keep_at: int,
    keep_all: bool,
    new_ids_at: int,
    weights_at: int,
    new_weights_at: int,
    weights_like: Any,
    positions_at: int,
    permute_at: int,
) -> None:
    """Move the ids of bags first ... last - 1 to where `cursors`, one for each bucket, say, in order.

    Positions need the permutation besides.
    """
    lengths, ids = _view(lengths_at, bags, lengths_like), _view(ids_at, n, ids_like)
    block_sizes = _view(sizes_at, features, LIKE_INT64)
    totals = _view(totals_at, features if totals_at else 0, LIKE_INT64)
    borders = _view(borders_at, features * (buckets + 1) if borders_at else 0, LIKE_INT64)
    ends = _view(ends_at, features if ends_at else 0, LIKE_INT64)
    keep = _view(keep_at, features if keep_at else 0, LIKE_INT64)
    where, cursors = _view(where_at, n, LIKE_INT32), _view(cursors_at, buckets, LIKE_INT64)
    new_ids = _view(new_ids_at, n, ids_like)
    weights = _view(weights_at, n if weights_at else 0, weights_like)
    new_weights = _view(new_weights_at, n if weights_at else 0, weights_like)
    positions = _view(positions_at, n if positions_at else 0, ids_like)
    permute = _view(permute_at, n if permute_at else 0, ids_like)
    at, bag = int64(begin), int64(first)
    for f in range(features):
        stop = min(ends[f] if ends.shape[0] else (f + 1) * batch, last)
        if bag >= stop:
            continue
        end = at + _ids_of(lengths, bag, stop, n - at)
        size, local, _ = _feature_sizes(f, block_sizes, totals, buckets)
        kept = keep[f] != 0 if keep.shape[0] else keep_all
        outside = int64(buckets) if borders.shape[0] and block_sizes[f] else local * buckets
        moves_more = weights.shape[0] + permute.shape[0] + borders.shape[0] > 0
        start = at
        for i in range(at, end):
            mark = int64(where[uint64(i)])
            id = int64(ids[uint64(i)])
            if mark >= 0:
                p = mark
                row = id - p * size
            else:
                p = -1 - mark
                row = id // outside
            k = cursors[uint64(p)]
            cursors[uint64(p)] = k + 1
            if moves_more:
                if borders.shape[0] and mark >= 0:
                    row = id - borders[f * (buckets + 1) + p]
                if weights.shape[0]:
                    new_weights[uint64(k)] = weights[uint64(i)]
                if permute.shape[0]:
                    permute[uint64(i)] = k
            new_ids[uint64(k)] = id if kept else row
        if positions.shape[0]:
            for b in range(bag, stop):
                for i in range(start, start + int64(lengths[uint64(b)])):
                    positions[uint64(permute[uint64(i)])] = i - start
                start += int64(lengths[uint64(b)])
        at, bag = end, stop


@compiled_by_types
def cursors_of(counts_at: int, parts: int, buckets: int) -> None:
    """Replace counts [parts, buckets] by where each part begins in each bucket."""
    counts = _view(counts_at, parts * buckets, LIKE_INT64)
    total = int64(0)
    for p in range(buckets):
        for part in range(parts):
            n = counts[part * buckets + p]
            counts[part * buckets + p] = total
            total += n


@compiled_by_types
def bucketize(
    lengths_at: int,
    bags: int,
    lengths_like: Any,
    ids_at: int,
    n: int,
    ids_like: Any,
    sizes_at: int,
    totals_at: int,
    borders_at: int,
    ends_at: int,
    features: int,
    batch: int,
    buckets: int,
    new_lengths_at: int,
    scratch_at: int,
    keep_at: int,
    keep_all: bool,
    new_ids_at: int,
    weights_at: int,
    new_weights_at: int,
    weights_like: Any,
    positions_at: int,
    permute_at: int,
) -> Any:
    """Count and place by one thread; scratch has 8 bytes a bucket and 4 an id. Returns what `count_buckets` does."""
    new_lengths = _view(new_lengths_at, buckets * bags, lengths_like)
    for i in range(buckets * bags):
        new_lengths[i] = 0
    counts = _view(scratch_at, buckets, LIKE_INT64)
    for p in range(buckets):
        counts[p] = 0
    where_at = scratch_at + 8 * buckets
    reached = count_buckets(
        lengths_at, bags, lengths_like, ids_at, n, ids_like, sizes_at, totals_at, borders_at, ends_at,
        features, batch, buckets, 0, bags, 0, where_at, new_lengths_at, scratch_at,
    )  # fmt: skip
    if reached != n:
        return reached
    cursors_of(scratch_at, 1, buckets)
    place_in_buckets(
        lengths_at, bags, lengths_like, ids_at, n, ids_like, sizes_at, totals_at, borders_at, ends_at,
        features, batch, buckets, 0, bags, 0, where_at, scratch_at, keep_at, keep_all, new_ids_at, weights_at,
        new_weights_at, weights_like, positions_at, permute_at,
    )  # fmt: skip
    return reached


@compiled_by_types
def id_range(ids_at: int, begin: int, end: int, ids_like: Any) -> Any:
    """The least and the largest of ids begin ... end - 1; (0, -1) of none."""
    ids = _view(ids_at, end, ids_like)
    if begin >= end:
        return int64(0), int64(-1)
    least, largest = int64(ids[begin]), int64(ids[begin])
    for i in range(begin, end):
        id = int64(ids[uint64(i)])
        least, largest = min(least, id), max(largest, id)
    return least, largest


@compiled_by_types
def unique_run(
    ids_at: int,
    begin: int,
    end: int,
    ids_like: Any,
    least: int,
    rows: int,
    number: int,
    scratch_at: int,
    unique_at: int,
    inverse_at: int,
    counts_at: int,
) -> Any:
    """Number the distinct ids of begin ... end - 1, which lie in [least, least + rows), in their order from `number`.

    Writes them to `unique`, how often they occur to `counts` if there is one, and the number of each id to its place of
    `inverse`. Scratch has 16 bytes an id, and 8 * DIGITS. Bits of a position and of a row are 63 at most.
    Returns how many distinct ids there are.
    """
    n = end - begin
    ids, inverse = _view(ids_at, end, ids_like), _view(inverse_at, end, LIKE_INT64)
    unique = _view(unique_at, n, ids_like)
    counts = _view(counts_at, n if counts_at else 0, LIKE_INT64)
    distinct = int64(0)
    if rows <= DENSE * n:
        # a mark for each row, which then holds its number
        marks = _view(scratch_at, rows, LIKE_INT32)
        for row in range(rows):
            marks[row] = 0
        for i in range(begin, end):
            marks[uint64(int64(ids[uint64(i)]) - least)] += 1
        for row in range(rows):
            times = marks[uint64(row)]
            if times:
                unique[distinct] = row + least
                if counts.shape[0]:
                    counts[distinct] = times
                marks[uint64(row)] = distinct
                distinct += 1
        for i in range(begin, end):
            inverse[uint64(i)] = number + marks[uint64(int64(ids[uint64(i)]) - least)]
        return distinct
    # entries of row and position, sorted by row digit by digit
    bits, shift = int64(0), int64(0)
    while (rows - 1) >> bits:
        bits += 1
    while n >> shift:
        shift += 1
    passes = max((bits + DIGIT - 1) // DIGIT, 1)
    width = (bits + passes - 1) // passes
    entries, other = _view(scratch_at, n, LIKE_INT64), _view(scratch_at + 8 * n, n, LIKE_INT64)
    places = _view(scratch_at + 16 * n, int64(1) << width, LIKE_INT64)
    for i in range(n):
        entries[uint64(i)] = ((int64(ids[uint64(begin + i)]) - least) << shift) | i
    mask = (int64(1) << width) - 1
    for turn in range(passes):
        low = shift + turn * width
        for digit in range(mask + 1):
            places[digit] = 0
        for i in range(n):
            places[uint64((entries[uint64(i)] >> low) & mask)] += 1
        total = int64(0)
        for digit in range(mask + 1):
            times = places[digit]
            places[digit] = total
            total += times
        for i in range(n):
            entry = entries[uint64(i)]
            digit = uint64((entry >> low) & mask)
            k = places[digit]
            places[digit] = k + 1
            other[uint64(k)] = entry
        entries, other = other, entries
    last, below = int64(-1), (int64(1) << shift) - 1
    distinct = int64(-1)
    for k in range(n):
        entry = entries[uint64(k)]
        row = entry >> shift
        distinct += int64(row != last)
        last = row
        unique[uint64(distinct)] = row + least
        inverse[uint64(begin + (entry & below))] = number + distinct
    if counts.shape[0]:
        for i in range(distinct + 1):
            counts[i] = 0
        for i in range(begin, end):
            counts[inverse[i] - number] += 1
    return distinct + 1


@compiled_by_types
def unique_tables(
    ids_at: int,
    n: int,
    ids_like: Any,
    offsets_at: int,
    bags: int,
    features: int,
    hash_sizes_at: int,
    first_features_at: int,
    tables: int,
    first: int,
    last: int,
    scratch_at: int,
    unique_at: int,
    inverse_at: int,
    numbers_at: int,
) -> Any:
    """Number the distinct ids of tables first ... last - 1 from 0, table after table, as `unique_run` does.

    `numbers` gets how many each table has. Returns how many there are, BAD_LENGTHS for offsets that are none, BAD_ID
    - the position for an id outside its table.
    """
    ids, offsets = _view(ids_at, n, ids_like), _view(offsets_at, bags + 1, LIKE_INT64)
    batch = bags // features
    hash_sizes, numbers = _view(hash_sizes_at, last, LIKE_INT64), _view(numbers_at, last, LIKE_INT64)
    first_features = _view(first_features_at, last + 1, LIKE_INT64)
    distinct, start = int64(0), int64(offsets[first_features[first] * batch])
    # offsets go from 0 to n, and never back
    if (first == 0 and start != 0) or (last == tables and offsets[bags] != n):
        return BAD_LENGTHS
    for bag in range(first_features[first] * batch, first_features[last] * batch):
        if offsets[uint64(bag)] > offsets[uint64(bag + 1)]:
            return BAD_LENGTHS
    size = ids.itemsize
    for table in range(first, last):
        begin = int64(offsets[first_features[table] * batch])
        end = int64(offsets[first_features[table + 1] * batch])
        if begin < start or end < begin or end > n:
            return BAD_LENGTHS
        least, largest = id_range(ids_at, begin, end, ids_like)
        if least < 0 or largest >= hash_sizes[table]:
            for i in range(begin, end):
                if ids[i] < 0 or ids[i] >= hash_sizes[table]:
                    return BAD_ID - i
        in_table = int64(0)
        if end > begin:
            in_table = unique_run(
                ids_at, begin, end, ids_like, least, largest - least + 1, distinct, scratch_at,
                unique_at + size * (start + distinct), inverse_at, 0,
            )  # fmt: skip
        numbers[table] = in_table
        distinct += in_table
    return distinct


@compiled_by_types
def spread(
    numbers_at: int,
    first_features_at: int,
    tables: int,
    batch: int,
    lengths_at: int,
    offsets_at: int,
    bags: int,
    like: Any,
) -> None:
    """Divide the distinct ids of each table evenly among its bags, the first ones have one more."""
    numbers = _view(numbers_at, tables, LIKE_INT64)
    first_features = _view(first_features_at, tables + 1, LIKE_INT64)
    lengths, offsets = _view(lengths_at, bags, like), _view(offsets_at, bags + 1, like)
    total = int64(0)
    offsets[0] = 0
    for table in range(tables):
        begin = first_features[table] * batch
        table_bags = first_features[table + 1] * batch - begin
        for i in range(table_bags):
            length = numbers[table] // table_bags + int64(i < numbers[table] % table_bags)
            lengths[begin + i] = length
            total += length
            offsets[begin + i + 1] = total


@compiled_by_types
def calibrate(
    logits_at: int,
    logits_like: Any,
    value_at: int,
    values: int,
    value_like: Any,
    lengths_at: int,
    lengths_like: Any,
    segments: int,
    examples_at: int,
    positives_at: int,
    borders_at: int,
    bins: int,
    shift: float,
    lower: float,
    step: float,
    after: float,
    weight: float,
    first: int,
    last: int,
    begin: int,
    predictions_at: int,
    bins_at: int,
) -> Any:
    """Predictions and bins of logits first ... last - 1, whose segments begin at `begin`.

    Returns where the segments end, or BAD_LENGTHS.
    """
    logits, predictions = _view(logits_at, last, logits_like), _view(predictions_at, last, logits_like)
    value = _view(value_at, values, value_like)
    lengths = _view(lengths_at, last if lengths_at else 0, lengths_like)
    total, at = (segments + 1) * bins, int64(begin)
    examples, positives = _view(examples_at, total, LIKE_FLOAT64), _view(positives_at, total, LIKE_FLOAT64)
    borders = _view(borders_at, bins - 1 if borders_at else 0, LIKE_FLOAT64)
    bin_ids = _view(bins_at, last, LIKE_INT64)
    for i in range(first, last):
        # storing it rounds to the logit's own type
        predictions[i] = float64(logits[i]) + shift
        predictions[i] = math.exp(-predictions[i])
    # divisions by themselves, so that they vectorise
    known, places = np.empty(last - first, np.float64), np.empty(last - first, np.float64)
    for j in range(last - first):
        known[j] = 1.0 / (1.0 + float64(predictions[uint64(first + j)]))
        places[j] = (known[j] - lower) / step
    for i in range(first, last):
        p = known[uint64(i - first)]
        b = int64(0)
        if borders_at:
            high = int64(bins - 1)
            while b < high:
                middle = (b + high) // 2
                if borders[middle] < p:
                    b = middle + 1
                else:
                    high = middle
        else:
            steps = min(places[uint64(i - first)], float64(bins))
            b = int64(steps)
            # bins contain their upper end; of a NaN this is the least integer
            b = max(min(b - int64(float64(b) == steps), int64(bins - 1)), int64(0))
        if lengths_at:
            length = int64(lengths[i])
            if length < 0 or length > values - at:
                return BAD_LENGTHS
            if length == 1 and value[at] >= 0 and value[at] < segments:
                b += (int64(value[at]) + 1) * bins
            at += length
        bin_ids[i] = b
        share = positives[uint64(b)] / examples[uint64(b)] * weight + p * (1.0 - weight)
        predictions[i] = share if examples[uint64(b)] > after else p
    return at
