"""What ranks raise when one of them fails in the middle of a step: who it was, where it was, and its error.

An error that all ranks know of (a bad id, ranks that disagree) is an ordinary exception, and the process group goes on.
Any other leaves ranks waiting for each other: a roll call finds out which of them is well, and the rest is said here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

E = TypeVar("E", bound=BaseException)

_AGREED = "_raised_on_all_ranks"
# texts of gloo and NCCL where a rank is gone or has hung up
_LOST = ("gloo/transport", "pair closure", "Connection closed by peer", "Connection reset by peer", "NCCL")
_WAY_OUT = (
    "Tables of the other ranks are as their last update left them. The process group is closed: destroy it and make"
    " another, or start all ranks again from a checkpoint"
)


class RankFailure(RuntimeError):
    """A rank failed, ended or did not come, so this one cannot go on; `ranks` says which, as far as is known.

    Raised on the ranks that are left. Ranks are those of the group that dense layers are averaged over.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type[RankFailure], tuple[str, tuple[int, ...]]]:
        return RankFailure, (str(self), self.ranks)


@dataclass(frozen=True)
class RankStatus:
    """What a rank reports of itself in a roll call: where it is, whether it waits for others, what it raised."""

    where: str
    waits: bool = False
    error: str | None = None

    def encode(self) -> str:
        """As it lies in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: bytes) -> RankStatus:
        """What `encode` gave."""
        return RankStatus(**json.loads(text))


def agreed(error: E) -> E:
    """Mark an error that every rank raises in this step: nobody is left waiting, and the group goes on."""
    setattr(error, _AGREED, True)
    return error


def raise_after_backward(error: Exception) -> None:
    """Raise out of the backward that runs now, once all else of it is done.

    DistributedDataParallel must finish its averages, which it does at the end of a backward, or it refuses the next.
    """
    engine: Any = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise error

    # a callback that is added by a callback comes after those of others
    engine.queue_callback(lambda: engine.queue_callback(fail))


def is_agreed(error: BaseException) -> bool:
    """Whether all ranks raise this error, or that which led to it."""
    return any(getattr(cause, _AGREED, False) for cause in _causes(error))


def is_of_group(error: BaseException) -> bool:
    """Whether an error came from the process group: another rank is its cause."""
    return any(
        isinstance(cause, dist.DistError)
        or (isinstance(cause, RuntimeError) and any(text in str(cause) for text in _LOST))
        for cause in _causes(error)
    )


def is_failure(error: BaseException) -> bool:
    """Whether a RankFailure is, or led to, this error."""
    return any(isinstance(cause, RankFailure) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def format_error(error: BaseException) -> str:
    """An error as the others quote it."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return text if len(text) <= 2000 else f"{text[:2000]}..."


def diagnose(why: str, statuses: Mapping[int, RankStatus], rank: int, world_size: int) -> RankFailure:
    """What rank `rank` raises after a roll call in which ranks reported `statuses`; `why` is what led to it."""
    failed = {r: status for r, status in statuses.items() if status.error is not None}
    silent = [r for r in range(world_size) if r not in statuses]
    absent = {r: status for r, status in statuses.items() if not status.waits}
    where = statuses[rank].where
    if failed:
        ranks = sorted(failed)
        text = "; ".join(f"rank {r} failed {failed[r].where}: {failed[r].error}" for r in ranks)
    elif silent:
        ranks = silent
        who = f"rank {silent[0]}" if len(silent) == 1 else f"each of ranks {silent}"
        text = f"{who} ended, or does not answer; {why}"
    elif 0 < len(absent) < world_size:
        ranks = sorted(absent)
        text = "; ".join(f"rank {r} did not come: it is {absent[r].where}" for r in ranks) + f", and {why}"
    else:
        ranks = [r for r in sorted(statuses) if statuses[r].where != where]
        text = f"ranks no longer hear each other, as {why}"
        text += "".join(f"; rank {r} is {statuses[r].where}" for r in ranks)
    return RankFailure(f"{text}. Rank {rank} was {where}. {_WAY_OUT}", ranks)


def closed_by(rank: int, status: RankStatus) -> RankFailure:
    """What the rank that failed raises in exchanges after that."""
    return RankFailure(f"rank {rank} failed {status.where}: {status.error}. {_WAY_OUT}", (rank,))


def store_lost(why: str, where: str, rank: int, host: int | None) -> RankFailure:
    """What a rank raises where nobody can be asked: the group's store is gone, kept by the process of rank `host`."""
    who = "the process that keeps the group's store" if host is None else f"rank {host} (which keeps the group's store)"
    text = f"{who} ended, or does not answer; {why}. Rank {rank} was {where}"
    return RankFailure(f"{text}. {_WAY_OUT}", () if host is None else (host,))
