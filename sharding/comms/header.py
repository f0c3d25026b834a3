"""What ranks tell each other at construction and before any id travels: sizes, the plan, and whether all is well.

One int64 row per pair of ranks: fingerprint of the plan, batch, what the step wants, status, ids of the receiver's
streams, those whose results come back, and ids for each group of the receiver. A rank that fails sends its status, so
all ranks raise in that step; the text of the error follows in an exchange of its own, which a good step does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .exchange import Exchange, Pending
from .failures import agreed

_TEXT = 64  # int64 numbers: 512 bytes of UTF-8
_WELL = -1
# status -> what all ranks raise
_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError, IndexError, ValueError, KeyError, TypeError, OverflowError, FloatingPointError,
)  # fmt: skip
# numbers of a row: those that all ranks must share (fingerprint, what the step wants), the status, three sizes
_SHARED, _STATUS, FIELDS = 3, 3, 7
# of those that ranks share: 0 without a backward, 2 with one that trains tables, 1 with another
_BACKWARD = 1


@dataclass(frozen=True)
class Wants:
    """What a rank's step asks of the others: a backward, in it gradients of per-id weights, and tables that train."""

    update: bool = False
    weight_gradients: bool = False
    trains: bool = True


@dataclass(frozen=True)
class Sizes:
    """What a rank sends to another: samples, ids of all streams, those whose results come back, ids of each group."""

    batch: int
    ids: int
    returned: int
    ids_to_groups: Sequence[int]


@dataclass(frozen=True)
class Head:
    """What one rank told this one."""

    status: int
    sizes: Sizes


_NOTHING = Sizes(0, 0, 0, ())


def tell(
    exchange: Exchange,
    device: torch.device,
    mine: Sequence[Sizes] | Exception,
    *,
    wants: Wants,
    fingerprint: int,
    groups: int,
) -> Told:
    """Tell every rank what it will get from this one, or that this one cannot go on; waits for nobody.

    `groups` is the most groups that any rank has.
    """
    failure = mine if isinstance(mine, Exception) else None
    sizes = [_NOTHING] * exchange.world_size if isinstance(mine, Exception) else mine
    status = _WELL if failure is None else _status(failure)
    sent = pack(sizes, status, wants=wants, fingerprint=fingerprint, groups=groups)
    rows = torch.tensor(sent, device="cpu")
    if device.type == "cuda":
        # nothing waits for what leaves from pinned memory
        rows = rows.pin_memory()
    return Told(exchange, device, failure, sent, exchange.headers(rows.to(device, non_blocking=True)))


@dataclass(frozen=True)
class Told:
    """What this rank told the others, while theirs is on its way."""

    exchange: Exchange
    device: torch.device
    failure: Exception | None
    sent: list[list[int]]
    pending: Pending

    def hear(self) -> list[Head]:
        """What every rank told this one.

        Raises:
            As `raise_failures` and `raise_differences`.
        """
        failure = self.failure
        if self.exchange.alone and failure is not None:
            raise failure
        # host sync, the only one that waits for other ranks: the sizes of what comes, and whether all are well
        rows = self.pending.wait().tolist()
        heads, failed, differ = unpack(rows), False, False
        for row in rows:
            failed |= row[_STATUS] != _WELL
            differ |= row[:_SHARED] != self.sent[0][:_SHARED]
        if failed:
            said = torch.tensor(pack_text(failure, self.exchange.world_size), device="cpu").to(self.device)
            raise_failures(heads, unpack_texts(self.exchange.headers(said).wait().tolist()), failure)
        if differ:
            raise_differences(rows, self.sent[0])
        return heads


def pack(sizes: Sequence[Sizes], status: int, *, wants: Wants, fingerprint: int, groups: int) -> list[list[int]]:
    """The rows [W][H] that a rank sends."""
    backward = int(wants.update) + int(wants.update and wants.trains)
    shared, rows = [fingerprint, backward, int(wants.weight_gradients), status], []
    for one in sizes:
        padding = [0] * (groups - len(one.ids_to_groups))
        rows.append([*shared, one.batch, one.ids, one.returned, *one.ids_to_groups, *padding])
    return rows


def unpack(rows: Sequence[Sequence[int]]) -> list[Head]:
    """What came from each rank."""
    heads = []
    for row in rows:
        batch, ids, returned = row[_STATUS + 1 : FIELDS]
        heads.append(Head(row[_STATUS], Sizes(batch, ids, returned, row[FIELDS:])))
    return heads


def pack_text(failure: Exception | None, world_size: int) -> list[list[int]]:
    """The text of an error, or of none, as rows [W][64]."""
    data = b"" if failure is None else _message(failure).encode(errors="backslashreplace")
    data = data[: _TEXT * 8].ljust(_TEXT * 8, b"\0")
    return [[int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]] * world_size


def unpack_texts(rows: Sequence[Sequence[int]]) -> list[str]:
    """The text of each rank."""
    texts = [b"".join(number.to_bytes(8, "little", signed=True) for number in row) for row in rows]
    return [text.rstrip(b"\0").decode(errors="replace") for text in texts]


def raise_failures(heads: Sequence[Head], texts: Sequence[str], failure: Exception | None) -> None:
    """Raise on every rank what the first failing rank reported; `failure` is this rank's own.

    Raises:
        The failing rank's exception type with its number and message.
    """
    for rank, (head, text) in enumerate(zip(heads, texts, strict=True)):
        if head.status != _WELL:
            raise agreed(_ERRORS[head.status](f"rank {rank}: {text}")) from failure


def of_rank(failure: Exception, rank: int) -> Exception:
    """A rank's failure as the other ranks would raise it."""
    return _ERRORS[_status(failure)](f"rank {rank}: {_message(failure)}")


def raise_differences(rows: Sequence[Sequence[int]], mine: Sequence[int]) -> None:
    """Raise RuntimeError where ranks disagree on what all must share: the first numbers of their rows."""
    shared = (
        "their plans, table configs or order of lookups", "whether gradients are enabled",
        "whether per-id weights have gradients",
    )  # fmt: skip
    for number, what in enumerate(shared):
        other = [rank for rank, row in enumerate(rows) if row[number] != mine[number]]
        if other and number == _BACKWARD and mine[number] and all(rows[rank][number] for rank in other):
            what = "whether their module is in train() or eval()"
        if other:
            raise agreed(RuntimeError(f"ranks {other} differ from this one in {what}"))


def _status(failure: Exception) -> int:
    return next((number for number, error in enumerate(_ERRORS) if type(failure) is error), 0)


def _message(failure: Exception) -> str:
    # a KeyError prints its argument in quotes
    text = str(failure.args[0]) if isinstance(failure, KeyError) and failure.args else str(failure)
    known = any(type(failure) is error for error in _ERRORS)
    return text if known else f"{type(failure).__name__}: {text}"
