"""Consensus of ranks: what one of them knows, or fails with, reaches all, and none is left waiting.

`value_or_error` is for what one rank decides. A header is for what all must manage: numbers from every rank to each
other one, in front of a step's ids those of its message, with what ranks must share and whether all is well. An error
travels as JSON in an exchange of its own, which a good step does not need: its class, its text, and what else its
constructor takes; an `ErrorCodec` says which classes the other ranks raise too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch

from shardwise.errors import REFUSALS

from .exchange import Exchange, Pending
from .failures import agreed

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

# a row of a header: numbers that ranks must share, the status, and then what is for the receiver
_SHARED, _STATUS, _NUMBERS = 3, 3, 4
_WELL, _FAILED = 0, 1
# how a message of `value_or_error` begins
_VALUE, _ERROR = b"v", b"e"


@dataclass(frozen=True)
class ErrorKind(Generic[E]):
    """A class of errors that a text is not enough for, with its subclasses: what goes along as JSON, and the way back.

    `rebuild` gets the text without the number of a rank.
    """

    error: type[E]
    payload: Callable[[E], Any]
    rebuild: Callable[[str, Any], Exception]


@dataclass(frozen=True)
class ErrorCodec:
    """Errors of a rank as bytes, and what the other ranks raise for them.

    Args:
        plain: classes that are made of a text. Any other error, and one that cannot be made again, is a RuntimeError
            whose text begins with its class.
        kinds: classes that take more than a text.
        subclasses: whether an error of a subclass is raised as the class of `plain` that it derives from.
        names_rank: whether the text begins with the rank that failed; it is said by the error's cause otherwise.
        keeps_own: whether the rank that failed raises its error as it is, rather than as the others do.
    """

    plain: Sequence[type[Exception]]
    kinds: Sequence[ErrorKind[Any]] = ()
    subclasses: bool = False
    names_rank: bool = False
    keeps_own: bool = True

    def encode(self, error: Exception) -> bytes:
        """The error, for other ranks."""
        # a KeyError prints its argument in quotes
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        message = {"class": type(error).__name__, "text": text}
        kind = next((kind for kind in self.kinds if isinstance(error, kind.error)), None)
        alike = isinstance if self.subclasses else lambda error, plain: type(error) is plain
        plain = next((plain for plain in self.plain if alike(error, plain)), None)
        if kind is not None:
            # where it has something that does not travel, its text does
            with suppress(Exception):
                return json.dumps({**message, "kind": kind.error.__name__, "payload": kind.payload(error)}).encode()
        elif plain is not None:
            message["plain"] = plain.__name__
        return json.dumps(message).encode()

    def decode(self, data: bytes, rank: int) -> Exception:
        """What other ranks raise for an error of rank `rank`."""
        message = json.loads(data)
        named = f"{message['class']}: {message['text']}"
        prefix = f"rank {rank}: " if self.names_rank else ""
        error: object = None
        # one that takes more than a text is not made again
        with suppress(Exception):
            if "kind" in message:
                kind = next(kind for kind in self.kinds if kind.error.__name__ == message["kind"])
                error = kind.rebuild(message["text"], message["payload"])
            elif "plain" in message:
                plain = next(plain for plain in self.plain if plain.__name__ == message["plain"])
                error = plain(prefix + message["text"])
        if not isinstance(error, Exception):
            error = RuntimeError(prefix + named)
        if not self.names_rank:
            error.__cause__ = RuntimeError(f"rank {rank} failed: {named}")
        return error

    def of_rank(self, error: Exception, rank: int) -> Exception:
        """An error of rank `rank` as other ranks would raise it."""
        return self.decode(self.encode(error), rank)


# of a step and of agreements: those that bad input raises, on all ranks with one text
STEP_ERRORS = ErrorCodec(
    (*REFUSALS, RuntimeError, IndexError, ValueError, KeyError, TypeError, OverflowError, FloatingPointError),
    names_rank=True,
    keeps_own=False,
)


def value_or_error(
    exchange: Exchange,
    rank: int,
    fn: Callable[[], T],
    *,
    encode: Callable[[T], bytes],
    decode: Callable[[bytes], T],
    errors: ErrorCodec,
    device: torch.device | None = None,
) -> T:
    """What `fn` returns on rank `rank`, which alone calls it, on every rank; all ranks call this together.

    Args:
        encode: the value as bytes; an error of it is one of `fn`.
        decode: the value of bytes, on the other ranks.
        errors: how an error travels.
        device: where bytes travel over NCCL alone.

    Raises:
        What `fn` or `encode` raised, on all ranks: none waits for a rank that failed.
    """
    value: T | None = None
    message: bytes | Exception = b""
    if exchange.rank == rank:
        try:
            value = fn()
            message = encode(value)
        except Exception as error:
            message = error
    received = _message_or_error(exchange, rank, message, errors, device)
    return cast(T, value) if exchange.rank == rank else decode(received)


def _message_or_error(
    exchange: Exchange, rank: int, message: bytes | Exception, errors: ErrorCodec, device: torch.device | None
) -> bytes:
    """The message of rank `rank`, on every rank; where it is an error all raise it."""
    failure = message if isinstance(message, Exception) else None
    if exchange.alone and failure is not None:
        raise failure
    data = _ERROR + errors.encode(message) if isinstance(message, Exception) else _VALUE + message
    received = exchange.value(data, rank, device)
    if failure is not None and errors.keeps_own:
        raise agreed(failure)
    if received.startswith(_ERROR):
        raise agreed(errors.decode(received[len(_ERROR) :], rank))
    return received[len(_VALUE) :]


def raise_first(
    exchange: Exchange,
    statuses: Sequence[int],
    failure: Exception | None,
    device: torch.device,
    errors: ErrorCodec = STEP_ERRORS,
) -> NoReturn:
    """Raise on all ranks the error of the first whose status is not 0; `failure` is this one's own, if it has one."""
    first = next(rank for rank, status in enumerate(statuses) if status)
    message = failure if failure is not None and first == exchange.rank else b""
    try:
        _message_or_error(exchange, first, message, errors, device)
    except Exception as error:
        if error is failure:
            raise
        # several ranks may have failed, each with an error of its own
        raise error from failure
    raise AssertionError(f"rank {first} has no error")


@dataclass(frozen=True)
class PendingHeader:
    """The headers of all ranks on their way to this one, which sent its own."""

    exchange: Exchange
    device: torch.device
    pending: Pending
    shared: list[int]
    failure: Exception | None
    errors: ErrorCodec

    def receive(self) -> list[list[int]]:
        """What each rank sent this one, once it is here: [W][H].

        Raises:
            What the first rank that failed raised, on all ranks; RuntimeError: ranks differ in what all must share.
        """
        if self.exchange.alone and self.failure is not None:
            raise self.failure
        # host sync, the only one of a step that waits for other ranks: the numbers, and whether all ranks are well
        rows: list[list[int]] = self.pending.wait().tolist()
        well, numbers = [*self.shared, _WELL], []
        for row in rows:
            if row[:_NUMBERS] != well:
                self._fail(rows)
            numbers.append(row[_NUMBERS:])
        return numbers

    def _fail(self, rows: list[list[int]]) -> NoReturn:
        """Raise on all ranks what the first that failed raised, or in what this one differs from others."""
        statuses = [row[_STATUS] for row in rows]
        if any(statuses):
            raise_first(self.exchange, statuses, self.failure, self.device, self.errors)
        meanings = (
            "their plans, table configs or order of lookups", "whether gradients are enabled",
            "whether per-id weights have gradients",
        )  # fmt: skip
        number = next(n for n in range(_SHARED) if any(row[n] != self.shared[n] for row in rows))
        others, what = [rank for rank, row in enumerate(rows) if row[number] != self.shared[number]], meanings[number]
        if number == 1 and self.shared[number] and all(rows[rank][number] for rank in others):
            what = "whether their module is in train() or eval()"
        raise agreed(RuntimeError(f"ranks {others} differ from this one in {what}"))


def send_header(
    exchange: Exchange,
    device: torch.device,
    numbers: Sequence[Sequence[int]] | Exception,
    *,
    shared: Sequence[int] = (0,) * _SHARED,
    width: int | None = None,
    errors: ErrorCodec = STEP_ERRORS,
) -> PendingHeader:
    """Send row d of `numbers` [W][up to H] to rank d, or that this rank cannot go on; waits for nobody.

    Args:
        shared: what ranks must share of a step: the fingerprint of their plan; 0 without a backward, 2 with one that
            trains tables, 1 with another; whether gradients of per-id weights are wanted.
        width: H, the same on all ranks; the length of the rows unless given.
    """
    failure = numbers if isinstance(numbers, Exception) else None
    front, rows = [*shared, _WELL if failure is None else _FAILED], []
    for row in [()] * exchange.world_size if isinstance(numbers, Exception) else numbers:
        rows.append([*front, *row, *[0] * ((len(row) if width is None else width) - len(row))])
    packed = torch.tensor(rows, dtype=torch.int64, device="cpu")  # [W, 4 + H]
    if device.type == "cuda":
        # nothing waits for what leaves from pinned memory
        packed = packed.pin_memory()
    pending = exchange.all_to_all(packed.to(device, non_blocking=True), what="headers")
    return PendingHeader(exchange, device, pending, front[:_SHARED], failure, errors)


def header_bytes(width: int) -> int:
    """Bytes of a header with so many numbers for its receiver."""
    return 8 * (_NUMBERS + width)


def all_or_error(
    exchange: Exchange,
    device: torch.device,
    fn: Callable[[], tuple[T, Sequence[int]]],
    *,
    count: int,
    errors: ErrorCodec = STEP_ERRORS,
) -> tuple[T, list[list[int]]]:
    """What `fn` returns, once it returned on all ranks, and the `count` numbers that it returns too of each rank.

    All ranks call this together.

    Raises:
        What `fn` raised on the first rank that failed, on all ranks: none goes on to a collective that others never
            join.
    """
    made: tuple[T, Sequence[int]] | None = None
    numbers: Sequence[Sequence[int]] | Exception
    try:
        made = fn()
        numbers = [made[1]] * exchange.world_size
    except Exception as error:
        numbers = error
    of_ranks = send_header(exchange, device, numbers, width=count, errors=errors).receive()
    assert made is not None
    return made[0], of_ranks
