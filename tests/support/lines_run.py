"""How much Python a call runs, in lines: the same on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def lines_run(call: Callable[[], T]) -> tuple[T, int]:
    """What the call returns, and how many lines of Python it ran, those of all functions below it included."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call(), lines
    finally:
        sys.settrace(before)
