"""What goes wrong with checkpoints, and how ranks tell each other: all of them raise the first failing rank's error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from shardwise.sharding.exchange import Exchange

from .report import CheckpointMismatch, Report

T = TypeVar("T")


class CheckpointDamaged(ValueError):
    """A file of a checkpoint is missing, cut off, changed or not what it should be; the message names it."""


class RankDied(RuntimeError):
    """The process of a rank ended in the middle of a save; the message names it."""


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointDamaged, RankDied, ValueError, TypeError, KeyError, OSError, RuntimeError, BlockingIOError)
}


@dataclass(frozen=True)
class Link:
    """The ranks that save and load a model together, and the device on which they talk."""

    exchange: Exchange
    device: torch.device

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
    made: tuple[T, int] | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    if link.world_size == 1:
        if failure is not None:
            raise failure
    else:
        mine = [int(failure is not None), 0 if made is None else made[1]]
        told = torch.tensor([mine] * link.world_size, dtype=torch.int64, device="cpu").to(link.device)
        # host sync: whether all ranks are well
        rows = link.exchange.headers(told).wait().tolist()
        raise_first([bool(failed) for failed, _ in rows], failure, link)
        others = [rank for rank, (_, number) in enumerate(rows) if number != mine[1]]
        if others:
            raise RuntimeError(f"ranks {others} differ from this one in the step, the plan or the tables")
    assert made is not None
    return made[0]


def raise_first(failed: list[bool], failure: Exception | None, link: Link) -> None:
    """Raise on all ranks the error of the first that failed; `failure` is this rank's own."""
    if not any(failed):
        return
    first = failed.index(True)
    error = unpack(link.exchange.value(pack(failure, rank=link.rank), first))
    if failure is not None and link.rank == first:
        raise failure
    raise error from failure


def pack(failure: Exception | None, *, rank: int) -> bytes:
    """An error as bytes."""
    if failure is None:
        return b"{}"
    report = failure.report.as_json() if isinstance(failure, CheckpointMismatch) else None
    kind = next((name for name, one in _KINDS.items() if type(failure) is one), None)
    if kind is None:
        kind = next((name for name, one in _KINDS.items() if isinstance(failure, one)), "RuntimeError")
    text = str(failure.args[0]) if isinstance(failure, KeyError) and failure.args else str(failure)
    if not isinstance(failure, (*_KINDS.values(), CheckpointMismatch)):
        text = f"{type(failure).__name__}: {text}"
    return json.dumps({"kind": kind, "text": text, "rank": rank, "report": report}).encode()


def unpack(data: bytes) -> Exception:
    """The error that another rank packed, with its rank in front."""
    said = json.loads(data)
    if said["report"] is not None:
        # names and shapes are the same on all ranks, and so is what differs
        return CheckpointMismatch(Report.from_json(said["report"]), said["text"].split("\n")[0])
    return _KINDS[said["kind"]](f"rank {said['rank']}: {said['text']}")
