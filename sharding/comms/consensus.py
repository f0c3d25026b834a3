"""Consensus of ranks: what one of them knows, or fails with, reaches all, and none is left waiting.

`value_or_error` is for what one rank decides. A header is for what all must manage: numbers from every rank to each
other one, in front of a step's ids those of its message, with what ranks must share and whether all is well. An error
travels as JSON in an exchange of its own, which a good step does not need: its class, its text, and what else its
constructor takes; an `ErrorCodec` says which classes the other ranks raise too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch

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
        for kind in self.kinds:
            if isinstance(error, kind.error):
                try:
                    return json.dumps({**message, "kind": kind.error.__name__, "payload": kind.payload(error)}).encode()
                except Exception:
                    # it has something that does not travel: its text does
                    return json.dumps(message).encode()
        for plain in self.plain:
            if type(error) is plain or (self.subclasses and isinstance(error, plain)):
                message["plain"] = plain.__name__
                break
        return json.dumps(message).encode()

    def decode(self, data: bytes, rank: int) -> Exception:
        """What other ranks raise for an error of rank `rank`."""
        message = json.loads(data)
        named = f"{message['class']}: {message['text']}"
        prefix = f"rank {rank}: " if self.names_rank else ""
        error: object = None
        try:
            if "kind" in message:
                kind = next(kind for kind in self.kinds if kind.error.__name__ == message["kind"])
                error = kind.rebuild(message["text"], message["payload"])
            elif "plain" in message:
                plain = next(plain for plain in self.plain if plain.__name__ == message["plain"])
                error = plain(prefix + message["text"])
        except Exception:
            # one that takes more than a text
            error = None
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
    (RuntimeError, IndexError, ValueError, KeyError, TypeError, OverflowError, FloatingPointError),
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
    failure: Exception | None = None
    message = b""
    if exchange.rank == rank:
        try:
            value = fn()
            message = _VALUE + encode(value)
        except Exception as error:
            failure, message = error, _ERROR + errors.encode(error)
    if exchange.alone and failure is not None:
        raise failure
    message = exchange.value(message, rank, device)
    if failure is not None and errors.keeps_own:
        raise agreed(failure)
    if message.startswith(_ERROR):
        raise agreed(errors.decode(message[len(_ERROR) :], rank))
    return cast(T, value) if exchange.rank == rank else decode(message[len(_VALUE) :])


def raise_first(
    exchange: Exchange,
    failed: Sequence[bool],
    failure: Exception | None,
    *,
    errors: ErrorCodec,
    device: torch.device | None = None,
) -> None:
    """Raise on all ranks the error of the first that `failed`; `failure` is this one's own, if it has one."""
    if not any(failed):
        return

    def fail() -> NoReturn:
        assert failure is not None
        raise failure

    try:
        value_or_error(exchange, failed.index(True), fail, encode=bytes, decode=bytes, errors=errors, device=device)
    except Exception as error:
        if error is failure:
            raise
        # several ranks may have failed, each with an error of its own
        raise error from failure


def raise_flagged(exchange: Exchange, flags: Sequence[int], failure: Exception | None, device: torch.device) -> None:
    """Raise on all ranks the error of the first whose flag, which came with rows, is not 0; `failure` is this one's."""
    if exchange.alone and failure is not None:
        raise failure
    raise_first(exchange, [flag != 0 for flag in flags], failure, errors=STEP_ERRORS, device=device)


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
        numbers, failed, differ = [], [], False
        for row in rows:
            failed.append(row[_STATUS] != _WELL)
            differ |= row[:_SHARED] != self.shared
            numbers.append(row[_NUMBERS:])
        if any(failed):
            raise_first(self.exchange, failed, self.failure, errors=self.errors, device=self.device)
        if differ:
            raise_differences(rows, self.shared)
        return numbers


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


def raise_differences(rows: Sequence[Sequence[int]], shared: Sequence[int]) -> NoReturn:
    """Raise RuntimeError, as ranks disagree on what all must share: the first numbers of their rows."""
    meanings = (
        "their plans, table configs or order of lookups", "whether gradients are enabled",
        "whether per-id weights have gradients",
    )  # fmt: skip
    number = next(n for n in range(_SHARED) if any(row[n] != shared[n] for row in rows))
    others, what = [rank for rank, row in enumerate(rows) if row[number] != shared[number]], meanings[number]
    if number == 1 and shared[number] and all(rows[rank][number] for rank in others):
        what = "whether their module is in train() or eval()"
    raise agreed(RuntimeError(f"ranks {others} differ from this one in {what}"))


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
    failure: Exception | None = None
    try:
        made = fn()
    except Exception as error:
        failure = error
    numbers = failure if made is None else [made[1]] * exchange.world_size
    assert numbers is not None
    of_ranks = send_header(exchange, device, numbers, width=count, errors=errors).receive()
    assert made is not None
    return made[0], of_ranks
