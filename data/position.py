"""Where a run stands in its data: what a checkpoint keeps so that a restarted run goes on with the same batches.

The order of a source's batches is a function of the source and the batch size alone, so a position is two numbers, the
epoch and the step, and no state of any rank. It fits any number of ranks. Beside the two stand the batch size and the
source's identity, against which a resumed run is checked: with another of either, "batch 1,200 of epoch 3" would be
other samples.

    saved = Position.of(source, 512, epoch=3, step=1200).to_json()
    position = restore_position(saved, source, 512)
    batches = source.train(512, epoch=position.epoch, start_step=position.step)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .source import Source


@dataclass(frozen=True)
class Position:
    """The next batch is number `step` of epoch `epoch`, in global batches of `batch_size` samples of `source`."""

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

    Raises ValueError when that run would see other samples than the saved one, with what differs and both values, and
    when `saved` is no position.
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
