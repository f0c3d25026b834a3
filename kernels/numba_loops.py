"""Where loops that numba compiles are found: files that are not imported where numba, the extra `cpu`, is missing."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache
from typing import Any


@cache
def loops(name: str) -> Any:
    """The file `name` of loops, compiled; None where numba is missing or does not work: then torch does the work."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        with warnings.catch_warnings():
            # numba speaks of caches and of its own deprecations
            warnings.simplefilter("ignore")
            return importlib.import_module(f".{name}", __package__)
    except Exception as error:
        warnings.warn(f"shardwise: numba does not work here, {name} runs on torch: {line(error)}", stacklevel=3)
        return None


def line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
