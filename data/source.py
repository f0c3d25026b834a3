"""What the readers have in common: the shape of a data source and the cut of a batch over ranks.

A global batch is the same samples in the same order at any number of ranks; rank r of W takes its r-th slice. So runs
at one rank and at W ranks train on the same global batches, and every rank sees the same number of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from .batch import Batch


class Source(Protocol):
    """Batches of clicks to train on, and others to evaluate on.

    `feature_rows` gives the rows that the table of each sparse feature needs, in the order of the batch's keys;
    `dense_names` names the dense columns; `skipped` counts the bad rows left out so far, by reason.
    """

    @property
    def feature_rows(self) -> Mapping[str, int]: ...

    @property
    def dense_names(self) -> tuple[str, ...]: ...

    @property
    def skipped(self) -> Mapping[str, int]: ...

    def train(self, batch_size: int, *, epoch: int = 0, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Yields this rank's slice of each global batch of `batch_size`; what does not fill a batch is left out."""
        ...

    def evaluate(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """Yields this rank's slice of each global batch, the last one included: a slice may be short or empty."""
        ...


def rank_slice(size: int, rank: int, world_size: int) -> slice:
    """The samples of a global batch of `size` that `rank` takes: contiguous, in rank order, sizes at most one apart."""
    return slice(size * rank // world_size, size * (rank + 1) // world_size)


def check_split(batch_size: int, rank: int, world_size: int) -> None:
    """Refuses a batch size that ranks cannot share equally: the mean of their losses would not be the batch's loss."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, world_size), got rank {rank} of world_size {world_size}")
    if batch_size <= 0 or batch_size % world_size:
        raise ValueError(f"batch_size must be a positive multiple of world_size {world_size}, got {batch_size}")
