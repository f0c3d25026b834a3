"""Control flow that ranks share: what one rank finds out, all get to know, and its errors as well."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ..comms.consensus import ErrorCodec, ErrorKind, value_or_error
from ..comms.exchange import Exchange

T = TypeVar("T")
P = ParamSpec("P")

# TorchRec's names promise any value of Python, and so any error; pickled, as torch's own object collectives are
_ERRORS = ErrorCodec(
    (),
    [
        ErrorKind(
            Exception,
            payload=lambda error: pickle.dumps(error).decode("latin-1"),
            rebuild=lambda text, pickled: pickle.loads(pickled.encode("latin-1")),
        )
    ],
)


def is_leader(pg: dist.ProcessGroup | None, leader_rank: int = 0) -> bool:
    """Whether this process is rank `leader_rank` of the group; without a group it is rank 0 of itself."""
    return (0 if pg is None else dist.get_rank(pg)) == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: dist.ProcessGroup, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call `func` on one rank of the group and return on all of them what it returned; all ranks call this together.

    Raises:
        What `func` raised, on all ranks: none waits for a rank that failed.
        ValueError: there is no such rank.
    """
    if not 0 <= rank < dist.get_world_size(pg):
        raise ValueError(f"rank {rank} is not one of {dist.get_world_size(pg)}")
    result: T = value_or_error(
        Exchange(pg),
        rank,
        lambda: func(*args, **kwargs),
        encode=pickle.dumps,
        decode=pickle.loads,
        errors=_ERRORS,
    )
    return result


def run_on_leader(pg: dist.ProcessGroup, rank: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function run on one rank of the group and return on all; as `invoke_on_rank_and_broadcast_result`."""

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        @wraps(func)
        def on_leader(*args: P.args, **kwargs: P.kwargs) -> T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return on_leader

    return decorate
