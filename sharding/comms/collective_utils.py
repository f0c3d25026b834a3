"""Control flow that ranks share: what one rank finds out, all get to know, and its errors as well."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from .exchange import Exchange

T = TypeVar("T")
P = ParamSpec("P")


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
    result: Any = None
    failure: Exception | None = None
    said = b""
    if is_leader(pg, rank):
        try:
            result = func(*args, **kwargs)
            said = pickle.dumps((True, result))
        except Exception as error:
            failure = error
            said = _packed(error)
    told = Exchange(pg).value(said, rank)
    if failure is not None:
        raise failure
    if is_leader(pg, rank):
        return result  # type: ignore[no-any-return]
    good, value = pickle.loads(told)
    if good:
        return value  # type: ignore[no-any-return]
    text, packed = value
    raise _unpacked(packed, text) from RuntimeError(f"rank {rank} failed: {text}")


def run_on_leader(pg: dist.ProcessGroup, rank: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function run on one rank of the group and return on all; as `invoke_on_rank_and_broadcast_result`."""

    def decorate(func: Callable[P, T]) -> Callable[P, T]:
        @wraps(func)
        def on_leader(*args: P.args, **kwargs: P.kwargs) -> T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return on_leader

    return decorate


def _packed(error: Exception) -> bytes:
    """An error for other ranks, and its text for those that cannot read it."""
    text = f"{type(error).__name__}: {error}"
    try:
        return pickle.dumps((False, (text, pickle.dumps(error))))
    except Exception:
        return pickle.dumps((False, (text, b"")))


def _unpacked(packed: bytes, text: str) -> Exception:
    try:
        error = pickle.loads(packed)
    except Exception:
        return RuntimeError(text)
    return error if isinstance(error, Exception) else RuntimeError(text)
