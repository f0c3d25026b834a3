"""Calls that must be refused, in tables of calls, errors and what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refused(*cases: tuple[Callable[[], object], type[Exception], str]) -> None:
    """Each call raises its error with a message that matches."""
    for call, error, match in cases:
        with pytest.raises(error, match=match):
            call()
            pytest.fail(f"nothing said {match!r}")
