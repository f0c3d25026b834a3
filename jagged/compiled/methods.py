"""Methods that are compiled where their object asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def pt2_compile_callable(f: Callable[..., Any]) -> Callable[..., Any]:
    """A method that runs under torch.compile for objects whose `enable_pt2_compile` is true, for others as it is.

    Each object compiles it once, and keeps what was compiled.
    """
    attribute = f"_{f.__name__}_pt2_compiled"

    @functools.wraps(f)
    def method(ref: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(ref, "enable_pt2_compile", False):
            return f(ref, *args, **kwargs)
        if not hasattr(ref, attribute):
            setattr(ref, attribute, torch.compile(f))
        return getattr(ref, attribute)(ref, *args, **kwargs)

    return method
