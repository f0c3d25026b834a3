"""What goes wrong with checkpoints, and how ranks tell each other: all of them raise the first failing rank's error.

A checkpoint that does not fit the model is an error of its own: `Report` has exactly what differs, and `LoadPolicy`
says which differences a load may pass over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.errors import REFUSALS
from shardwise.sharding.comms.consensus import ErrorCodec, ErrorKind, all_or_error
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.comms.failures import RankFailure, agreed, is_agreed, is_of_group
from shardwise.sharding.comms.watch import Watch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LoadPolicy:
    """What a load does where checkpoint and model differ; by default it raises.

    Args:
        missing: what the model has and the checkpoint has not: "raise", or "keep" the model's values.
        unexpected: what the checkpoint has and the model has not: "raise", or "skip" it.
        resized: tensors of other shapes: "raise", or "overlap" to load the rows that both have (all other dimensions
            must be equal); rows that only the model has keep their values.
        dtype: tensors of other dtypes: "raise", or "cast" to the model's.
        rename: name in the checkpoint -> name in the model, of parameters (`ebc.embedding_bags.t0.weight`); optimizer
            states follow.

    Raises:
        ValueError: another word.
    """

    missing: str = "raise"
    unexpected: str = "raise"
    resized: str = "raise"
    dtype: str = "raise"
    rename: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in ("raise", allowed):
                raise ValueError(f"{name} must be 'raise' or {allowed!r}, got {getattr(self, name)!r}")


# what each difference may become instead of an error
_ALLOWED = {"missing": "keep", "unexpected": "skip", "resized": "overlap", "dtype": "cast"}
STRICT = LoadPolicy()
"""The policy of a load that raises at every difference: the default."""


@dataclass
class Report:
    """How a checkpoint differs from a model, by names of the model's tensors.

    An optimizer state is named `<parameter>: <rule> <state>`. `resized` and `dtype` have what the checkpoint has and
    what the model has.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    resized: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    dtype: dict[str, tuple[str, str]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)

    def refused_by(self, policy: LoadPolicy) -> list[str]:
        """The kinds of differences that are there and that a policy does not pass over."""
        return [name for name in _ALLOWED if getattr(self, name) and getattr(policy, name) == "raise"]

    def lines(self) -> list[str]:
        """It as text, a difference a line."""
        found = [f"missing in the checkpoint: {name}" for name in self.missing]
        found += [f"not in the model: {name}" for name in self.unexpected]
        for name, (theirs, mine) in self.resized.items():
            found.append(f"resized: {name} is {list(theirs)} in the checkpoint, {list(mine)} in the model")
        for name, (saved, wanted) in self.dtype.items():
            found.append(f"dtype: {name} is {saved} in the checkpoint, {wanted} in the model")
        found += [f"renamed: {old} is {new} in the model" for old, new in self.renamed.items()]
        return found

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))

    def as_json(self) -> dict[str, Any]:
        """It as plain dicts and lists."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        """What `as_json` gave."""
        resized = {name: (tuple(a), tuple(b)) for name, (a, b) in data["resized"].items()}
        dtype = {name: (a, b) for name, (a, b) in data["dtype"].items()}
        return Report(list(data["missing"]), list(data["unexpected"]), resized, dtype, dict(data["renamed"]))


class CheckpointMismatch(ValueError):
    """A checkpoint and a model differ in ways that the policy does not allow; `report` has all of them."""

    def __init__(self, report: Report, first_line: str) -> None:
        super().__init__("\n".join([first_line, *report.lines()]))
        self.report = report


def mismatch(report: Report, policy: LoadPolicy, path: str) -> CheckpointMismatch:
    """The error for a report that a policy refuses."""
    ways = ", ".join(f"{name}={_ALLOWED[name]!r}" for name in report.refused_by(policy))
    return CheckpointMismatch(
        report, f"{path} does not fit the model; to load it all the same: policy=LoadPolicy({ways}), or rename={{...}}"
    )


T = TypeVar("T")


class CheckpointDamaged(ValueError):
    """A file of a checkpoint is missing, cut off, changed or not what it should be; the message names it."""


# how errors reach the other ranks: they raise them by these classes, with the rank that failed in front
ERRORS = ErrorCodec(
    (*REFUSALS, CheckpointDamaged, BlockingIOError, OSError, ValueError, TypeError, KeyError, RuntimeError),
    [
        # names and shapes are the same on all ranks, and so is what differs
        ErrorKind(
            CheckpointMismatch,
            payload=lambda error: error.report.as_json(),
            rebuild=lambda text, report: CheckpointMismatch(Report.from_json(report), text.split("\n")[0]),
        ),
        ErrorKind(
            RankFailure, payload=lambda error: list(error.ranks), rebuild=lambda text, ranks: RankFailure(text, ranks)
        ),
    ],
    subclasses=True,
    names_rank=True,
)


@dataclass(frozen=True)
class Link:
    """The ranks that save and load a model together, and the device on which they talk.

    They read and write for as long as it takes, so no time limit is on the waits between; `watch` says who died.
    """

    exchange: Exchange
    device: torch.device
    watch: Watch | None = None

    @staticmethod
    def between(group: dist.ProcessGroup | None, device: torch.device) -> Link:
        """The link of a group's ranks."""
        exchange = Exchange(group)
        watch, exchange.watch = exchange.watch, None
        return Link(exchange, device, watch)

    def meet(self, ask: Callable[[], T]) -> T:
        """What `ask` returns, which waits for the other ranks.

        Raises:
            RankFailure: a rank is gone. And what `ask` raises.
        """
        try:
            return ask()
        except RuntimeError as error:
            if self.watch is None or is_agreed(error) or not is_of_group(error):
                raise
            raise self.watch.failure(error) from error

    @property
    def rank(self) -> int:
        """This one."""
        return self.exchange.rank

    @property
    def world_size(self) -> int:
        """How many."""
        return self.exchange.world_size


def agree(link: Link, make: Callable[[], tuple[T, int]]) -> T:
    """What `make` returns, with its fingerprint, once it did so on all ranks with one fingerprint.

    Raises:
        Exception: the first failing rank's, on all ranks.
        RuntimeError: the fingerprints differ.
    """

    def made() -> tuple[T, list[int]]:
        value, number = make()
        return value, [number]

    value, numbers = link.meet(lambda: all_or_error(link.exchange, link.device, made, count=1, errors=ERRORS))
    others = [rank for rank, number in enumerate(numbers) if number != numbers[link.rank]]
    if others:
        raise agreed(RuntimeError(f"ranks {others} differ from this one in the step, the plan or the tables"))
    return value
