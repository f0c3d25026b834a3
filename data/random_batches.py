"""Random batches of any shape: ids, dense features and labels without a signal, to measure or to try a model with.

Shapes: F features of B samples; dense features [B, num_dense] standard normal, labels [B] of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import torch
from torch.utils.data import IterableDataset

from shardwise.jagged import KeyedJaggedTensor

from .batch import Batch


class RandomBatches:
    """The batches of a `RandomRecDataset`, as an iterator that `iter` sets to its begin.

    Per key: ids are below `hash_sizes`, bags hold up to `ids_per_features` and at least `min_ids_per_features` (0) ids.
    `num_generated_batches` are made beforehand and come in turn; where that is negative, each is made when it is asked
    for. `num_batches` (no end) is how many come. `generator` draws them; None is torch's own.

    Raises:
        ValueError: a list that has not one number per key, or a number out of its range; names the key.
    """

    generator: torch.Generator | None

    def __init__(
        self,
        keys: list[str],
        batch_size: int,
        hash_sizes: list[int],
        ids_per_features: list[int],
        num_dense: int,
        manual_seed: int | None = None,
        num_generated_batches: int = 10,
        num_batches: int | None = None,
        *,
        min_ids_per_features: list[int] | None = None,
    ) -> None:
        if num_generated_batches == 0:
            raise ValueError("RandomRecDataset: num_generated_batches must not be 0; -1 makes every batch anew")
        self.keys, self.batch_size, self.num_dense = keys, batch_size, num_dense
        self.num_generated_batches, self.num_batches = num_generated_batches, num_batches
        self.hash_sizes = _one_per_key("hash_sizes", hash_sizes, 0, keys)
        self.ids_per_features = _one_per_key("ids_per_features", ids_per_features, 0, keys)
        self.min_ids_per_features = _one_per_key("min_ids_per_features", min_ids_per_features or None, 0, keys)
        for key, rows, low, high in zip(
            keys, self.hash_sizes, self.min_ids_per_features, self.ids_per_features, strict=True
        ):
            if rows < 1:
                raise ValueError(f"RandomRecDataset: feature {key!r}: hash size must be positive, got {rows}")
            if not 0 <= low <= high:
                raise ValueError(f"RandomRecDataset: feature {key!r}: need 0 <= {low} (least ids) <= {high} (most ids)")
        self.generator = None if manual_seed is None else torch.Generator().manual_seed(manual_seed)
        self._made = [self._make() for _ in range(num_generated_batches)]
        self.batch_index = 0

    def batches(self) -> Iterator[Batch]:
        """Batches without end, from the first on."""
        return map(self._at, count())

    def __iter__(self) -> RandomBatches:
        self.batch_index = 0
        return self

    def __next__(self) -> Batch:
        if self.batch_index == self.num_batches:
            raise StopIteration
        self.batch_index += 1
        return self._at(self.batch_index - 1)

    def _at(self, turn: int) -> Batch:
        return self._made[turn % len(self._made)] if self._made else self._make()

    def _make(self) -> Batch:
        # lengths and ids feature by feature: the order in which TorchRec draws them
        lengths, ids = [torch.empty(0, dtype=torch.int32)], [torch.empty(0, dtype=torch.int64)]
        for rows, low, high in zip(self.hash_sizes, self.min_ids_per_features, self.ids_per_features, strict=True):
            drawn = torch.randint(low, high + 1, (self.batch_size,), dtype=torch.int32, generator=self.generator)
            lengths.append(drawn)
            ids.append(torch.randint(0, rows, (int(drawn.sum()),), generator=self.generator))
        dense = torch.randn(self.batch_size, self.num_dense, generator=self.generator)
        labels = torch.randint(0, 2, (self.batch_size,), generator=self.generator)
        sparse = KeyedJaggedTensor(self.keys, torch.cat(ids), lengths=torch.cat(lengths), stride=self.batch_size)
        return Batch(dense, sparse, labels)


class RandomRecDataset(IterableDataset[Batch]):
    """Yields `num_batches` batches, or batches without end, of `num_generated_batches` that are made beforehand.

    They come in turn, again and again; with a negative `num_generated_batches` every batch is made when it is asked
    for. Per feature, or one value for all: ids are below `hash_sizes` (100), a bag holds up to `ids_per_features` (2)
    ids and at least `min_ids_per_features` (`ids_per_feature` where that is given, so that bags are of one length, else
    0). The same `manual_seed` gives the same batches, and TorchRec's; None takes torch's own generator.

    Raises:
        ValueError: a list that has not one number per key, or a number out of its range; names the key.
    """

    def __init__(
        self,
        keys: list[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: list[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: list[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: list[int] | None = None,
    ) -> None:
        super().__init__()
        for name, number in (("batch_size", batch_size), ("num_dense", num_dense), ("num_batches", num_batches or 0)):
            if number < 0:
                raise ValueError(f"RandomRecDataset: {name} must not be negative, got {number}")
        least = _first(min_ids_per_feature, ids_per_feature, 0)
        self.keys, self.batch_size, self.num_dense, self.num_batches = list(keys), batch_size, num_dense, num_batches
        rows_per_key = _one_per_key("hash_sizes", hash_sizes, _first(hash_size, 100), keys)
        most_per_key = _one_per_key("ids_per_features", ids_per_features, _first(ids_per_feature, 2), keys)
        least_per_key = _one_per_key("min_ids_per_features", min_ids_per_features, least, keys)
        self.batch_generator = RandomBatches(
            self.keys,
            batch_size,
            rows_per_key,
            most_per_key,
            num_dense,
            manual_seed,
            num_generated_batches,
            min_ids_per_features=least_per_key,
        )

    def __iter__(self) -> Iterator[Batch]:
        # each reader has its own place among the batches
        return islice(self.batch_generator.batches(), self.num_batches)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("RandomRecDataset without num_batches has no length: its batches do not end")
        return self.num_batches


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _one_per_key(name: str, given: list[int] | None, every: int, keys: list[str]) -> list[int]:
    if given is None:
        return [every] * len(keys)
    if len(given) != len(keys):
        raise ValueError(f"RandomRecDataset: {name} must have a number for each of {len(keys)} keys, got {len(given)}")
    return list(given)
