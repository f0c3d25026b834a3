"""The nearest name to one that is unknown."""

from __future__ import annotations

import pytest

from shardwise._names import did_you_mean


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("itme", ["user", "item"], ": did you mean 'item'?"),
        ("h10", ["h200", "h100", "a100-40"], ": did you mean 'h100'?"),
        ("A100_80", ["a100-40", "a100-80"], ": did you mean 'a100-80'?"),
        ("rowwiseadagrad", ["SGD", "RowWiseAdagrad"], ": did you mean 'RowWiseAdagrad'?"),
        ("zebra", ["user", "item"], ""),
        ("", ["user"], ""),
        ("user", [], ""),
    ],
)
def test_the_name_that_is_alike_is_told_and_nothing_where_none_is(word: str, known: list[str], hint: str) -> None:
    assert did_you_mean(word, iter(known)) == hint
