"""Refusal of sizes that ask for more memory than there is: an error that names the argument and the bytes.

A system that promises more memory than it has (Linux, as a rule) grants what it cannot give, and ends the process when
that is written. So what can never fit is refused here by what the machine, or the container, has in all. What would fit
if nothing else ran is left to the system: it may still be refused there, or end the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path

import torch

# entries of a result from which on an op asks whether they fit
MANY = 1 << 20
# numbers that torch sorts at once on a GPU
MOST_SORTED = 2**31 - 1
# bytes that are had without asking
_LARGE = 1 << 30
# where Linux says what a container may have: cgroups of version 2 and 1
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def require_memory(argument: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Raise where a tensor of this shape cannot be had; `argument` is what asked for it, with its value.

    Raises:
        MemoryError: on the CPU. torch.OutOfMemoryError: on CUDA.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes <= _LARGE:
        return
    device = torch.device(device)
    most = _memory_of(device)
    if most is not None and nbytes > most:
        kind = torch.OutOfMemoryError if device.type == "cuda" else MemoryError
        raise kind(f"{_needs(argument, shape, dtype, nbytes)}, and {device.type} has {most:,} in all: is it too large?")
    if device.type == "cpu":
        try:
            # nothing is written: all that is asked is whether the system refuses
            torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        except (RuntimeError, MemoryError, OverflowError) as error:
            text = f"{_needs(argument, shape, dtype, nbytes)}, which the system does not give: is it too large?"
            raise MemoryError(text) from error


def require_sortable(op: str, what: str, numbers: torch.Tensor) -> None:
    """Raise where there are more numbers than torch sorts on a GPU.

    Raises:
        ValueError: names the op, what these are and the most of them.
    """
    if numbers.is_cuda and numbers.shape[0] > MOST_SORTED:
        raise ValueError(
            f"{op}: {numbers.shape[0]:,} {what} in one call; torch.sort takes at most {MOST_SORTED:,} on a GPU:"
            " split the batch"
        )


def _needs(argument: str, shape: Sequence[int], dtype: torch.dtype, nbytes: int) -> str:
    return f"{argument}: a tensor {list(shape)} of {dtype} needs {nbytes:,} bytes"


def _memory_of(device: torch.device) -> int | None:
    """Bytes that a device has in all; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _memory_of_host() if device.type == "cpu" else None


@cache
def _memory_of_host() -> int | None:
    """Memory and swap of this machine, or what its container may have of them."""
    limits = []
    with suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") + _swap())
    for file in _LIMITS:
        # "max" is no limit
        with suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    return min((n for n in limits if n > 0), default=None)


def _swap() -> int:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) << 10
    return 0
