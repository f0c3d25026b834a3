"""Ids divided among buckets: the ranges of rows that a table is cut into, which lie on several ranks.

Nothing here waits for a GPU, or trusts what nobody has looked at yet: ids and lengths may prove to be bad later.

Letters: N ids, B samples (1 where nothing is pooled), C columns (lookups that are cut, or all keys of a batch), K
buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels import block_bucketize, complete_cumsum
from shardwise.kernels.features import bag_of_position

from .routes import Cut, Routes, is_even

# rows of a table whose ids may be any numbers
ANY = torch.iinfo(torch.int64).max


class Cutting:
    """How the columns of a division are divided among buckets: what is no cut lies in bucket 0 as it is."""

    def __init__(self, routes: Routes, columns: Sequence[Cut | None], device: torch.device) -> None:
        found = [(0, ANY) if cut is None else cut.borders for cut in columns]
        self.buckets = max(map(len, found)) - 1
        padded = [borders + borders[-1:] * (self.buckets + 1 - len(borders)) for borders in found]
        blocks = [max(1, borders[1] - borders[0]) for borders in padded]
        self.block_sizes = torch.tensor(blocks, device="cpu").to(device)
        even = all(is_even(borders) for borders in padded)
        self.borders = None if even else [torch.tensor(borders, device="cpu").to(device) for borders in padded]
        # cuts whose rows are averaged in the order of one process: their ids carry the share of each
        ordered = [cut is not None and routes.is_ordered(cut.lookup) for cut in columns]
        shared = [
            cut is not None and one and routes.table_of(cut.lookup).mean
            for cut, one in zip(columns, ordered, strict=True)
        ]
        self.averaged = torch.tensor(shared, device="cpu").to(device) if any(shared) else None
        # rows that nobody looks up or pools here travel: where they go is needed then
        self.keeps_places = not routes.pooled or any(ordered)
        self.rows = torch.tensor([borders[-1] for borders in padded], device="cpu").to(device)


@dataclass
class Division:
    """Columns divided among buckets: ids and weights [N] in the order [bucket][column][sample]."""

    # [C, B], as they were given, and the weights of the ids
    given_lengths: Tensor
    given_weights: Tensor | None
    ids: Tensor
    # [K * C, B]
    lengths: Tensor
    weights: Tensor | None
    # where each id lies, in the order in which they were given
    places: Tensor | None
    # [K * C] ids of each, and the same once the host has read it
    sizes: Tensor
    known: list[int] | None = None


def divide(
    cutting: Cutting, lengths: Tensor, ids: Tensor, weights: Tensor | None, routes: Routes, lenient: bool
) -> Division:
    """Divide ids [N] of columns with lengths [C, B] among buckets; waits for nothing."""
    columns, batch = lengths.shape
    given = weights.detach() if routes.weighted and weights is not None else None
    if cutting.averaged is not None:
        assert weights is not None
        counted = torch.where(cutting.averaged[:, None], lengths, 1).flatten()
        weights = weights / _of_bags(counted, lengths.flatten(), ids)
    inside, outside, instead = ids, None, None
    if lenient:
        rows = _of_bags(cutting.rows, lengths.sum(1), ids)
        outside = (ids < 0) | (ids >= rows)
        # of what is not cut the number itself lies outside
        inside, instead = torch.where(outside, 0, ids), torch.where(rows < ANY, -1, ids)
    found = block_bucketize(
        lengths.flatten(), inside, cutting.block_sizes, cutting.buckets, weights=weights,
        block_bucketize_pos=cutting.borders, sequence=cutting.keeps_places or outside is not None,
    )  # fmt: skip
    bucketed, places = found.ids, found.unbucketize_permute
    if outside is not None:
        assert places is not None and instead is not None
        bucketed = bucketed.clone()
        bucketed[places.long()] = torch.where(outside, instead, bucketed[places.long()])
    by_segment = found.lengths.view(cutting.buckets * columns, batch)
    return Division(
        lengths, given, bucketed, by_segment, found.weights, places if cutting.keeps_places else None,
        by_segment.sum(1),
    )  # fmt: skip


def _of_bags(numbers: Tensor, lengths: Tensor, ids: Tensor) -> Tensor:
    """For each of `ids` [N] the number of its bag; numbers and lengths [bags]."""
    if not ids.is_cuda:
        return numbers.repeat_interleave(lengths, output_size=ids.shape[0])
    # a search waits for nothing, and bad lengths, which nobody has looked at yet, take it to no place that is not there
    bag = bag_of_position(complete_cumsum(lengths.long()), ids.shape[0])
    return torch.nn.functional.pad(numbers, (0, 1), value=1).index_select(0, bag)
