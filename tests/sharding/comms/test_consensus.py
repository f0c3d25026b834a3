"""What one rank decides, or fails to, reaches all of them: over real processes, with errors of every kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardwise.checkpoint import CheckpointDamaged, CheckpointMismatch, Report
from shardwise.planner.errors import PlannerError, PlannerErrorType
from shardwise.sharding.checkpoint.errors import ERRORS as OF_CHECKPOINTS
from shardwise.sharding.comms.consensus import ErrorCodec, ErrorKind, all_or_error, value_or_error
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.comms.failures import RankFailure, is_agreed
from shardwise.sharding.planning.leader import _ERRORS as OF_PLANS
from shardwise.sharding.torchrec.collective_utils import _ERRORS as OF_ANY_FUNCTION

pytestmark = pytest.mark.ranks


class Refused(Exception):
    """Takes more than a text."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> tuple[type[Refused], tuple[str, int]]:
        return Refused, (str(self), self.code)


ERRORS = ErrorCodec(
    (ValueError, KeyError),
    [ErrorKind(Refused, payload=lambda error: error.code, rebuild=lambda text, code: Refused(text, code))],
)
NAMING = ErrorCodec((ValueError,), subclasses=True, names_rank=True, keeps_own=False)
# by name, as their functions do not travel to other processes
CODECS = {"errors": ERRORS, "naming": NAMING}


def decided(fail: Exception | None, value: object, codec: str, leader: int) -> list[Any]:
    """The value on this rank, or its error's class, text, code, cause and whether all agreed; and who was called."""
    called = []

    def decide() -> object:
        called.append(dist.get_rank())
        if fail is not None:
            raise fail
        return value

    try:
        agreed = value_or_error(
            Exchange(dist.group.WORLD), leader, decide, encode=lambda value: json.dumps(value).encode(),
            decode=json.loads, errors=CODECS[codec],
        )  # fmt: skip
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "code", None), str(error.__cause__), is_agreed(error)]
    finally:
        assert called == ([leader] if dist.get_rank() == leader else [])
    return [agreed]


@pytest.mark.parametrize("leader", [0, 1])
def test_what_one_rank_returns_all_have(leader: int) -> None:
    assert run_ranks(2, decided, None, {"a": [1, "x"]}, "errors", leader) == [[{"a": [1, "x"]}]] * 2


@pytest.mark.parametrize(
    ("fail", "value", "kind", "text", "code"),
    [
        (ValueError("no"), 0, "ValueError", "no", None),
        (KeyError("k"), 0, "KeyError", "'k'", None),
        (Refused("full", 507), 0, "Refused", "full", 507),
        # of a class that the others do not make again
        (ZeroDivisionError("by zero"), 0, "RuntimeError", "ZeroDivisionError: by zero", None),
        # the value itself cannot travel
        (None, {1, 2}, "RuntimeError", "TypeError: Object of type set is not JSON serializable", None),
        # its payload cannot either: the others have its text
        (Refused("odd", {1}), 0, "RuntimeError", "Refused: odd", None),  # type: ignore[arg-type]
    ],
)
def test_what_one_rank_raises_all_raise(
    fail: Exception | None, value: object, kind: str, text: str, code: int | None
) -> None:
    raiser, peer = run_ranks(2, decided, fail, value, "errors", 0)
    assert raiser[0] == (type(fail) if fail is not None else TypeError).__name__ and raiser[-1]
    assert peer[:3] == [kind, text, code] and peer[-1]
    assert peer[3].startswith("rank 0 failed: ")


def test_an_error_may_name_its_rank_and_be_the_same_on_all() -> None:
    for ranks in (2, 3):
        errors = run_ranks(ranks, decided, UnicodeError("bad text"), 0, "naming", 1)
        assert [error[:2] for error in errors] == [["ValueError", "rank 1: bad text"]] * ranks


class Odd(Exception):
    """Cannot be made again: its constructor takes two arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize(
    ("codec", "failure", "kind", "text"),
    [
        (OF_CHECKPOINTS, CheckpointDamaged("cut off"), CheckpointDamaged, "rank 1: cut off"),
        (OF_CHECKPOINTS, FileNotFoundError(2, "gone", "f"), OSError, "rank 1: [Errno 2] gone: 'f'"),
        (OF_CHECKPOINTS, BlockingIOError("locked"), BlockingIOError, "rank 1: locked"),
        (OF_CHECKPOINTS, IndexError("id 9"), RuntimeError, "rank 1: IndexError: id 9"),
        (OF_CHECKPOINTS, Odd("a", "b"), RuntimeError, "rank 1: Odd: a b"),
        (OF_PLANS, ZeroDivisionError("by zero"), ZeroDivisionError, "by zero"),
        (OF_PLANS, UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), RuntimeError,
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x78 in position 0: bad"),
        (OF_PLANS, Odd("a", "b"), RuntimeError, "Odd: a b"),
        (OF_ANY_FUNCTION, CheckpointDamaged("cut off"), CheckpointDamaged, "cut off"),
        (OF_ANY_FUNCTION, Odd("a", "b"), RuntimeError, "Odd: a b"),
    ],
)  # fmt: skip
def test_which_errors_other_ranks_raise(
    codec: ErrorCodec, failure: Exception, kind: type[Exception], text: str
) -> None:
    raised = codec.of_rank(failure, 1)
    assert (type(raised), raised.args[0]) == (kind, text)
    # where the text does not name the rank the cause does
    assert codec.names_rank or str(raised.__cause__).startswith(f"rank 1 failed: {type(failure).__name__}: ")


def test_what_an_error_has_besides_its_text_travels_with_it() -> None:
    report = Report(missing=["a"], resized={"b": ((2, 3), (4, 3))}, dtype={"c": ("F32", "F16")})
    mismatch = OF_CHECKPOINTS.of_rank(CheckpointMismatch(report, "does not fit"), 1)
    assert isinstance(mismatch, CheckpointMismatch)
    assert mismatch.report == report and str(mismatch).startswith("does not fit\nmissing in the checkpoint: a\n")
    failure = OF_CHECKPOINTS.of_rank(RankFailure("ranks died", [3, 5]), 1)
    assert isinstance(failure, RankFailure) and failure.ranks == (3, 5) and str(failure) == "ranks died"
    no_room = OF_PLANS.of_rank(PlannerError("no room", PlannerErrorType.INSUFFICIENT_STORAGE), 0)
    assert isinstance(no_room, PlannerError) and no_room.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def agreements() -> list[Any]:
    """Numbers of all ranks, an error of rank 1 alone, one of each, and numbers again."""
    exchange, rank = Exchange(dist.group.WORLD), dist.get_rank()
    outcomes: list[Any] = []
    for failing in ([], [1], [0, 1], []):
        failure = IndexError("x" * 600 + f" of rank {rank}")

        def work(fails: bool = rank in failing, failure: Exception = failure) -> tuple[str, list[int]]:
            if fails:
                raise failure
            return f"of {rank}", [7 + rank, rank]

        calls = exchange.calls
        try:
            outcome: Any = all_or_error(exchange, torch.device("cpu"), work, count=2)
        except Exception as error:
            # a rank that failed too, or whose own error is told, still shows that
            assert is_agreed(error) and error.__cause__ is (failure if rank in failing else None)
            outcome = f"{type(error).__name__}: {error}"
        outcomes.append((outcome, exchange.calls - calls))
    return outcomes


def test_ranks_go_on_together_or_raise_what_the_first_of_them_raised() -> None:
    """The text of an error was cut off after 512 bytes. A good agreement is one exchange; a bad one adds two, the
    size of an error and its bytes.
    """
    errors = [(f"IndexError: rank {rank}: {'x' * 600} of rank {rank}", 3) for rank in (1, 0)]
    for rank, outcomes in enumerate(run_ranks(2, agreements)):
        good = ((f"of {rank}", [[7, 0], [8, 1]]), 1)
        assert outcomes == [good, *errors, good]
