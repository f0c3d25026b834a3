"""What ranks tell each other at construction and before any id travels: sizes, the plan, and whether all is well.

One int64 row per pair of ranks: fingerprint of the plan, batch, whether gradients are on, status, ids for each group of
the receiver, and the text of an error. A rank that fails sends its status, so all ranks raise in that step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .exchange import Exchange

T = TypeVar("T")

_TEXT = 64  # int64 numbers: 512 bytes of UTF-8
_WELL = -1
# status -> what all ranks raise
_ERRORS: tuple[type[Exception], ...] = (RuntimeError, IndexError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Head:
    """What one rank told this one."""

    fingerprint: int
    batch: int
    update: bool
    status: int
    ids_to_groups: list[int]
    text: str


# how many agreements this process has seen; ranks take the largest, so that each has a number of its own
_agreements = 0


def agree(exchange: Exchange, device: torch.device, make: Callable[[], tuple[T, int]]) -> tuple[T, int]:
    """What `make` returns, something and its fingerprint, once it did so on all ranks with one fingerprint.

    The fingerprint comes back with the number of this agreement in it: two equal collections differ, so that ranks
    which call them in different orders find out.

    Raises:
        As `raise_failures`, on all ranks: none of them goes on to a collective that the others never join.
    """
    made: tuple[T, int] | None = None
    failure: Exception | None = None
    try:
        made = make()
    except Exception as error:
        failure = error
    global _agreements
    mine = 0 if made is None else made[1]
    told: tuple[int, list[list[int]]] = (_agreements, [[]] * exchange.world_size)
    heads = tell(exchange, device, failure or told, update=False, fingerprint=mine, groups=0)
    assert made is not None
    number = max(head.batch for head in heads)
    _agreements = number + 1
    return made[0], (mine + number) % 2**63


def tell(
    exchange: Exchange,
    device: torch.device,
    mine: tuple[int, Sequence[Sequence[int]]] | Exception,
    *,
    update: bool,
    fingerprint: int,
    groups: int,
) -> list[Head]:
    """Tell every rank this one's batch and ids per group (`pack`), or why it cannot go on, and hear theirs.

    Raises:
        As `raise_failures`.
    """
    failure = mine if isinstance(mine, Exception) else None
    if isinstance(mine, Exception):
        sent = pack_failure(mine, exchange.world_size, update=update, fingerprint=fingerprint, groups=groups)
    else:
        sent = pack(*mine, update=update, fingerprint=fingerprint, groups=groups)
    # host sync, the only one of a step: the sizes of what comes, and whether all ranks are well
    heads = unpack(exchange.headers(sent.to(device)).tolist())
    raise_failures(heads, failure, update=update, fingerprint=fingerprint)
    return heads


def pack(batch: int, ids_to_groups: Sequence[Sequence[int]], *, update: bool, fingerprint: int, groups: int) -> Tensor:
    """The rows of a rank that is well, [W, H] int64 on CPU; `groups` is the most groups that any rank has."""
    rows = []
    for ids in ids_to_groups:
        padding = [0] * (groups - len(ids) + _TEXT)
        rows.append([fingerprint, batch, int(update), _WELL, *ids, *padding])
    return torch.tensor(rows)


def pack_failure(failure: Exception, world_size: int, *, update: bool, fingerprint: int, groups: int) -> Tensor:
    """The rows of a rank that cannot go on, same shape as `pack`."""
    kind = next((number for number, error in enumerate(_ERRORS) if type(failure) is error), 0)
    data = _message(failure).encode(errors="backslashreplace")[: _TEXT * 8].ljust(_TEXT * 8, b"\0")
    text = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    return torch.tensor([[fingerprint, 0, int(update), kind, *[0] * groups, *text]]).repeat(world_size, 1)


def unpack(rows: Sequence[Sequence[int]]) -> list[Head]:
    """What came from each rank."""
    heads = []
    for row in rows:
        text = b"".join(number.to_bytes(8, "little", signed=True) for number in row[-_TEXT:]).rstrip(b"\0")
        heads.append(Head(row[0], row[1], bool(row[2]), row[3], list(row[4:-_TEXT]), text.decode(errors="replace")))
    return heads


def raise_failures(heads: Sequence[Head], failure: Exception | None, *, update: bool, fingerprint: int) -> None:
    """Raise on every rank what the first failing rank reported; `failure` is this rank's own.

    Raises:
        The failing rank's exception type with its number and message; RuntimeError where ranks disagree.
    """
    if failure is not None and len(heads) == 1:
        raise failure
    for rank, head in enumerate(heads):
        if head.status != _WELL:
            raise _ERRORS[head.status](f"rank {rank}: {head.text}") from failure
    for what, values, mine in (
        ("their plans, table configs or order of lookups", [head.fingerprint for head in heads], fingerprint),
        ("whether gradients are enabled", [head.update for head in heads], update),
    ):
        other = [rank for rank, value in enumerate(values) if value != mine]
        if other:
            raise RuntimeError(f"ranks {other} differ from this one in {what}")


def _message(failure: Exception) -> str:
    # a KeyError prints its argument in quotes
    text = str(failure.args[0]) if isinstance(failure, KeyError) and failure.args else str(failure)
    known = any(type(failure) is error for error in _ERRORS)
    return text if known else f"{type(failure).__name__}: {text}"
