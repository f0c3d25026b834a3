"""Split a stream of samples in two, one to train on and one to validate on, without reading it twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch.utils.data import IterDataPipe

T = TypeVar("T")


class _Part(IterDataPipe[T]):
    """The samples of a stream that `chooser()` says yes to; it is asked for anew whenever the stream is read."""

    def __init__(self, stream: Iterable[T], chooser: Callable[[], Callable[[int], bool]], wanted: bool) -> None:
        super().__init__()
        self._stream, self._chooser, self._wanted = stream, chooser, wanted

    def __iter__(self) -> Iterator[T]:
        is_chosen = self._chooser()
        for number, sample in enumerate(self._stream):
            if is_chosen(number) is self._wanted:
                yield sample


def train_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Whether sample `idx` is to train on: of every 10**decimal_places of `key_fn(idx)` the first `train_perc` are."""
    of: int = 10**decimal_places
    return key_fn(idx) % of < round(train_perc * of)


def val_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Whether sample `idx` is to validate on: where `train_filter` says that it is not to train on."""
    return not train_filter(key_fn, train_perc, decimal_places, idx)


class _ByNumber:
    """Chooses a sample by its number; a class, so that it can be pickled for a loader's workers."""

    def __init__(self, train_perc: float, decimal_places: int, key_fn: Callable[[int], int] | None) -> None:
        self._train_perc, self._decimal_places, self._key_fn = train_perc, decimal_places, key_fn

    def __call__(self) -> Callable[[int], bool]:
        return self._is_chosen

    def _is_chosen(self, number: int) -> bool:
        return train_filter(self._key_fn or int, self._train_perc, self._decimal_places, number)


class _ByChance:
    """Chooses samples by a coin whose throws follow from a seed."""

    def __init__(self, train_perc: float, seed: int) -> None:
        self._train_perc, self._seed = train_perc, seed

    def __call__(self) -> Callable[[int], bool]:
        coin = random.Random(self._seed)
        return lambda number: coin.random() < self._train_perc


def idx_split_train_val(
    datapipe: Iterable[T],
    train_perc: float,
    decimal_places: int = 2,
    key_fn: Callable[[int], int] | None = None,
) -> tuple[IterDataPipe[T], IterDataPipe[T]]:
    """Train and validation samples, by number: of every 10**decimal_places in a row the first `train_perc` train.

    `key_fn` gives the number that counts, of a sample's number in the stream.

    Raises:
        ValueError: `train_perc` is not between 0 and 1.
    """
    return _split(datapipe, train_perc, _ByNumber(train_perc, decimal_places, key_fn))


def rand_split_train_val(
    datapipe: Iterable[T], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe[T], IterDataPipe[T]]:
    """Train and validation samples, by chance: each is to train on with probability `train_perc`, by a seeded coin.

    Raises:
        ValueError: `train_perc` is not between 0 and 1.
    """
    return _split(datapipe, train_perc, _ByChance(train_perc, random_seed))


def _split(
    stream: Iterable[T], train_perc: float, chooser: Callable[[], Callable[[int], bool]]
) -> tuple[IterDataPipe[T], IterDataPipe[T]]:
    if not 0.0 < train_perc < 1.0:
        raise ValueError(f"train_perc must be between 0 and 1, got {train_perc}")
    return _Part(stream, chooser, True), _Part(stream, chooser, False)
