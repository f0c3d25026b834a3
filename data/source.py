"""The interface of a data source, and the cut of a batch over ranks that all readers share.

A global batch is the same samples in the same order at any number of ranks; rank r of W takes its r-th slice. So runs
at one rank and at W ranks train on the same global batches, and every rank sees the same number of them.

Batch k of epoch e is the same whether the epoch was read from its start or from `start_step=k`, so a run that knows its
epoch and step (`Position` keeps them) continues with the same data, at any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from .batch import Batch


class Source(Protocol):
    """Batches of clicks to train on, and others to evaluate on.

    `feature_rows` gives the rows that the table of each sparse feature needs, in the order of the batch's keys;
    `dense_names` names the dense columns; `skipped` counts the bad rows left out so far, by reason; `identity` tells
    the data and the order of its batches from others, in values that JSON has. `ids_per_sample` is the mean number of
    ids of each sparse feature in training, by which tables are planned. `train_samples` counts the samples of an epoch,
    bad ones among them, which may take a pass over the files the first time that it is asked for; None where files are
    too large for that.
    """

    @property
    def feature_rows(self) -> Mapping[str, int]: ...

    @property
    def ids_per_sample(self) -> Mapping[str, float]: ...

    @property
    def train_samples(self) -> int | None: ...

    @property
    def dense_names(self) -> tuple[str, ...]: ...

    @property
    def skipped(self) -> Mapping[str, int]: ...

    @property
    def identity(self) -> Mapping[str, str | int | float]: ...

    def train(
        self, batch_size: int, *, epoch: int = 0, start_step: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """Yields this rank's slice of each global batch of `batch_size` from number `start_step` of the epoch on.

        What does not fill a batch is left out. A `start_step` past the end of the epoch is a ValueError.
        """
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


def check_start(epoch: int, start_step: int, steps: int | None = None) -> None:
    """Refuses a start outside the epoch; `steps` is its number of batches, None where that is not known yet."""
    if epoch < 0:
        raise ValueError(f"epoch must not be negative, got {epoch}")
    if start_step < 0:
        raise ValueError(f"start_step must not be negative, got {start_step}")
    if steps is not None and start_step > steps:
        raise ValueError(f"start_step {start_step} lies past the end of epoch {epoch}, which has {steps} batches")


@dataclass(frozen=True)
class Position:
    """The next batch is number `step` of epoch `epoch`, in global batches of `batch_size` samples of `source`.

    A checkpoint keeps it so that a restarted run goes on with the same batches, at any number of ranks: the order of
    batches is a function of the source and the batch size alone. Against these two a resumed run is checked: with
    another of either, "batch 1,200 of epoch 3" would be other samples.

        saved = Position.of(source, 512, epoch=3, step=1200).to_json()
        position = restore_position(saved, source, 512)
        batches = source.train(512, epoch=position.epoch, start_step=position.step)
    """

    source: Mapping[str, str | int | float]
    batch_size: int
    epoch: int
    step: int

    @classmethod
    def of(cls, source: Source, batch_size: int, *, epoch: int = 0, step: int = 0) -> Position:
        """The position in `source`, by default at the start of training."""
        return cls(dict(source.identity), batch_size, epoch, step)

    def to_json(self) -> dict[str, Any]:
        """The position in values that JSON has."""
        return asdict(self)


def restore_position(saved: object, source: Source, batch_size: int) -> Position:
    """The position that `Position.to_json` saved, for a run over `source` in batches of `batch_size`.

    Raises:
        ValueError: that run would see other samples than the saved one, with what differs and both values, or `saved`
            is no position.
    """
    expected = Position.of(source, batch_size)
    if not isinstance(saved, Mapping) or set(saved) != set(expected.to_json()):
        raise ValueError(f"not a position in data, which has {', '.join(expected.to_json())}: {saved!r}")
    identity = saved["source"]
    if not isinstance(identity, Mapping):
        raise ValueError(f"position in data: 'source' must be a mapping, got {identity!r}")
    for name in ("batch_size", "epoch", "step"):
        # a bool is an int to Python
        if type(saved[name]) is not int or saved[name] < 0:
            raise ValueError(f"position in data: {name!r} must be an integer from 0 on, got {saved[name]!r}")
    was = {**identity, "batch_size": saved["batch_size"]}
    now = {**expected.source, "batch_size": batch_size}
    differ = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    if differ:
        listed = "; ".join(f"{name} was {was.get(name)!r} and is {now.get(name)!r}" for name in differ)
        raise ValueError(f"cannot continue with the same data, which changed since the position was saved: {listed}")
    return Position(dict(expected.source), batch_size, saved["epoch"], saved["step"])
