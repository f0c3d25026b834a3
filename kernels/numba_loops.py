"""The door to the loops that numba compiles: their files are not imported where numba, the extra `cpu`, is missing.

`SHARDWISE_NUMBA=0` turns them off, and so do `NUMBA_DISABLE_JIT=1` and `numba.config.DISABLE_JIT` before the first use:
under these the loops would be Python that reads raw addresses.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import cache
from typing import Any

import torch

from . import _op


def compiles() -> bool:
    """Whether numba is installed and works, and neither our switch nor its own is off."""
    if not _op.NUMBA:
        return False
    try:
        with warnings.catch_warnings():
            # numba speaks of its own deprecations
            warnings.simplefilter("ignore")
            if importlib.util.find_spec("numba") is None:
                return False
            return not importlib.import_module("numba").config.DISABLE_JIT
    except Exception as error:
        # as it does beside a numpy that is newer than it
        _warn_of_numba(line(error))
        return False


@cache
def _warn_of_numba(error: str) -> None:
    warnings.warn(f"shardwise: numba does not work here, its loops run on torch: {error}", stacklevel=5)


def arithmetic() -> tuple[str, str]:
    """The compiler of the CPU's updates of fp32 rows, and its target processor: sums over a row depend on both."""
    if not compiles():
        return "torch alone", torch.backends.cpu.get_cpu_capability()
    numba = importlib.import_module("numba")
    processor = numba.config.CPU_NAME or importlib.import_module("llvmlite.binding").get_host_cpu_name()
    return f"numba {numba.__version__}", str(processor)


@cache
def loops(name: str, room: str = "cpu") -> Any:
    """The file `name` of loops in a room of this folder, compiled; None where numba is missing, off or does not work:
    torch does the work."""
    if not compiles():
        return None
    try:
        with warnings.catch_warnings():
            # numba speaks of caches
            warnings.simplefilter("ignore")
            return importlib.import_module(f".{room}.{name}", __package__)
    except Exception as error:
        warnings.warn(f"shardwise: numba does not work here, {name} runs on torch: {line(error)}", stacklevel=3)
        return None


def compiled_by_types(function: Any) -> Any:
    """The decorator of that name of cpu/njit.py, for files of loops outside this folder; only where `compiles()`."""
    return importlib.import_module(".cpu.njit", __package__).compiled_by_types(function)


def line(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
