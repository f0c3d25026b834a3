"""What one rank decides, or fails to, reaches all of them: over real processes, with errors of every kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from shardwise.sharding.comms.consensus import ErrorCodec, ErrorKind, value_or_error
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.comms.failures import is_agreed

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
        made = value_or_error(
            Exchange(dist.group.WORLD), leader, decide, encode=lambda one: json.dumps(one).encode(), decode=json.loads,
            errors=CODECS[codec],
        )  # fmt: skip
    except Exception as error:
        return [type(error).__name__, str(error), getattr(error, "code", None), str(error.__cause__), is_agreed(error)]
    finally:
        assert called == ([leader] if dist.get_rank() == leader else [])
    return [made]


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
    own, other = run_ranks(2, decided, fail, value, "errors", 0)
    assert own[0] == (type(fail) if fail is not None else TypeError).__name__ and own[-1]
    assert other[:3] == [kind, text, code] and other[-1]
    assert other[3].startswith("rank 0 failed: ")


def test_an_error_may_name_its_rank_and_be_the_same_on_all() -> None:
    for ranks in (2, 3):
        found = run_ranks(ranks, decided, UnicodeError("bad text"), 0, "naming", 1)
        assert [one[:2] for one in found] == [["ValueError", "rank 1: bad text"]] * ranks
