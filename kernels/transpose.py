"""The transposed index of a lookup: for each touched row, the positions that hit it, cut into chunks.

The backward of a pooled lookup is a pooled lookup over this index. Order of addition is part of the contract: the
gradients of one row are added in chunks of at most CHUNK positions, counted from the start of that row's own run in
sample order; the chunk sums of a long run are added the same way, level by level. So a row's bits depend on its own
run alone, never on neighbours, launch grouping, tile or grid. CHUNK is a constant of the contract, never tuned.

Letters: N ids, R rows of the flat buffer; keys [N] row numbers sorted, position [N] id positions in that order.
No function here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .features import FIRST_ROW, Segment, locate_ids

CHUNK = 32


class Transposed(NamedTuple):
    """Ids in row order: keys [N] (padding keys last), their positions [N] and bag numbers [N]."""

    keys: Tensor
    position: Tensor
    bag: Tensor


class Chunks(NamedTuple):
    """Chunks of one level; chunk c is positions [start[c], start[c+1]). Entries past `total` mean nothing."""

    start: Tensor  # [n + 1]
    row: Tensor  # [n] row number of each chunk
    slot: Tensor  # [n] where a chunk of a longer run leaves its partial sum; -1 if the chunk is its whole run
    total: Tensor  # [1] number of chunks
    next_keys: Tensor  # row number of each slot, padded: the keys of the next level


def transpose_index(indices: Tensor, offsets: Tensor, features: Tensor, segments: Sequence[Segment]) -> Transposed:
    """Sort the ids of a batch by row, ids of one row in sample order; bad ids go last under a padding key."""
    bag, f, valid = locate_ids(indices, offsets, features)
    rows_total = segments[-1].end_row
    keys = torch.where(valid, indices + features[f, FIRST_ROW], rows_total).to(key_dtype(rows_total))  # [N]
    keys, position = torch.sort(keys, stable=True)
    return Transposed(keys, position, bag[position].clamp(max=offsets.shape[0] - 2))


def key_dtype(rows: int) -> torch.dtype:
    """The narrowest type for so many row numbers and the padding key: half as long sorts in half the passes."""
    return torch.int32 if rows < 2**31 else torch.int64


def run_begins(keys: Tensor) -> Tensor:
    """Whether each entry of keys [n], sorted, is the first of its run of equal keys."""
    begins = torch.ones(keys.shape[0], dtype=torch.bool, device=keys.device)
    torch.ne(keys[1:], keys[:-1], out=begins[1:])
    return begins


def _position_in_run(keys: Tensor) -> tuple[Tensor, Tensor]:
    """0 .. n - 1, and the place of each entry in its run of equal keys, counted from the run's start: both [n]."""
    at = torch.arange(keys.shape[0], device=keys.device)
    return at, at - torch.where(run_begins(keys), at, 0).cummax(0).values


def chunks_of(keys: Tensor, low: int, high: int, most: int = CHUNK) -> Chunks:
    """Cut the runs of equal keys in [low, high) into chunks of `most`; keys [n] sorted, others are ignored."""
    n, device = keys.shape[0], keys.device
    at, in_run = _position_in_run(keys)
    head = (in_run % most == 0) & (keys >= low) & (keys < high)
    number = head.cumsum(0)  # [n] chunks up to each position
    count = number[-1:]
    # everything that is not a head writes to entry n, which nobody reads
    target = torch.where(head, number - 1, n)
    end = (keys < high).sum()  # []
    start = end.repeat(n + 1).scatter_(0, target, torch.where(head, at, end))  # [n + 1]
    row = keys.new_zeros(n + 1).scatter_(0, target, keys)[:n]
    opens = torch.zeros(n + 1, dtype=torch.bool, device=device).scatter_(0, target, head & (in_run == 0))
    last = at + 1 >= count  # [n]
    long = (at < count) & ~(opens[:n] & (opens[1:] | last))
    slot = torch.where(long, long.cumsum(0) - 1, -1)  # [n]
    # a run of more than `most` positions has fewer than 2 / most chunks a position
    slots = 2 * n // most + 1
    next_keys = keys.new_full((slots + 1,), high)
    next_keys.scatter_(0, torch.where(long, slot, slots), torch.where(long, row, high))
    return Chunks(start, row, slot, count, next_keys[:slots])


def levels_for(ids: int) -> int:
    """Levels of chunks that reduce a run of `ids` positions to one chunk."""
    levels = 1
    while ids > CHUNK:
        ids = -(-ids // CHUNK)
        levels += 1
    return levels
