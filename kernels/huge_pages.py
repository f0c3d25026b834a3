"""Memory in pages of 2 MB where Linux gives them: fewer page faults for fresh outputs, fewer TLB misses for tables.

The C library maps tensors beyond 32 MB anew each time, so without this every step faults its output in, 4 KB at a time.
Smaller ones it is asked to keep for the next step.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

_MADV_HUGEPAGE = 14
_PAGE, HUGE_PAGE = 1 << 12, 1 << 21
# up to here the C library may reuse memory that was faulted in before
REUSED_BYTES = 1 << 25


@cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


@cache
def _keep_freed_memory() -> None:
    """Have the C library keep what is freed, in blocks of up to 32 MB and at most 64 MB at the end of its heap.

    glibc maps blocks that are larger than any mapped one that was freed before, and gives the end of its heap back when
    twice that is free (mallopt(3), M_MMAP_THRESHOLD), so what a step has to fault in hangs on what the process did
    earlier. Here it frees one of 32 MB, which has no pages as nobody writes to it. Nothing changes where malloc's own
    variables say otherwise (MALLOC_TRIM_THRESHOLD_).
    """
    torch.empty(REUSED_BYTES - (1 << 16), dtype=torch.uint8, device="cpu")


def in_huge_pages(tensor: Tensor, at_least: int = HUGE_PAGE) -> Tensor:
    """The CPU tensor itself; before it is first written, its memory is asked for in huge pages.

    Only advice: where the system has none to give, or the tensor has fewer than `at_least` bytes, nothing changes.
    From the first such tensor on, smaller ones lie in memory that was faulted in before.
    """
    size = tensor.numel() * tensor.itemsize
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or size < at_least:
        return tensor
    _keep_freed_memory()
    madvise = _madvise()
    if madvise is not None:
        begin = -(-tensor.data_ptr() // _PAGE) * _PAGE
        end = (tensor.data_ptr() + size) // _PAGE * _PAGE
        madvise(begin, end - begin, _MADV_HUGEPAGE)
    return tensor
