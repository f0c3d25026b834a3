"""What goes wrong with checkpoints, and how ranks tell each other: all of them raise the first failing rank's error."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.comms.failures import RankFailure, agreed, is_of_group
from shardwise.sharding.comms.watch import Watch

from .report import CheckpointMismatch, Report

T = TypeVar("T")


class CheckpointDamaged(ValueError):
    """A file of a checkpoint is missing, cut off, changed or not what it should be; the message names it."""


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointDamaged, BlockingIOError, OSError, ValueError, TypeError, KeyError, RuntimeError)
}


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

    def told(self, mine: list[int]) -> list[list[int]]:
        """The numbers of all ranks.

        Raises:
            RankFailure: a rank is gone.
        """
        sent = torch.tensor([mine] * self.world_size, dtype=torch.int64, device="cpu").to(self.device)
        # host sync: what other ranks say
        return self._met(lambda: self.exchange.headers(sent).wait().tolist())

    def value(self, mine: bytes, rank: int) -> bytes:
        """Rank `rank`'s bytes, on every rank. Raises as `told`."""
        return self._met(lambda: self.exchange.value(mine, rank, self.device))

    def _met(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except RuntimeError as error:
            if self.watch is None or not is_of_group(error):
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
    made: tuple[T, int] | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    if link.exchange.alone:
        if failure is not None:
            raise failure
    else:
        mine = [int(failure is not None), 0 if made is None else made[1]]
        rows = link.told(mine)
        raise_first([bool(failed) for failed, _ in rows], failure, link)
        others = [rank for rank, (_, number) in enumerate(rows) if number != mine[1]]
        if others:
            raise agreed(RuntimeError(f"ranks {others} differ from this one in the step, the plan or the tables"))
    assert made is not None
    return made[0]


def raise_first(failed: list[bool], failure: Exception | None, link: Link) -> None:
    """Raise on all ranks the error of the first that failed; `failure` is this rank's own."""
    if not any(failed):
        return
    first = failed.index(True)
    error = unpack(link.value(pack(failure, rank=link.rank), first))
    if failure is not None and link.rank == first:
        raise agreed(failure)
    raise agreed(error) from failure


def pack(failure: Exception | None, *, rank: int) -> bytes:
    """An error as bytes."""
    if failure is None:
        return b"{}"
    report = failure.report.as_json() if isinstance(failure, CheckpointMismatch) else None
    kind = next((name for name, one in _KINDS.items() if isinstance(failure, one)), "RuntimeError")
    text = str(failure.args[0]) if isinstance(failure, KeyError) and failure.args else str(failure)
    if not isinstance(failure, tuple(_KINDS.values())):
        text = f"{type(failure).__name__}: {text}"
    ranks = failure.ranks if isinstance(failure, RankFailure) else None
    return json.dumps({"kind": kind, "text": text, "rank": rank, "report": report, "ranks": ranks}).encode()


def unpack(data: bytes) -> Exception:
    """The error that another rank packed, with its rank in front."""
    said = json.loads(data)
    if said["report"] is not None:
        # names and shapes are the same on all ranks, and so is what differs
        return CheckpointMismatch(Report.from_json(said["report"]), said["text"].split("\n")[0])
    if said["ranks"] is not None:
        return RankFailure(said["text"], said["ranks"])
    return _KINDS[said["kind"]](f"rank {said['rank']}: {said['text']}")
