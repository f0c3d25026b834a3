"""Loops over rows of a file, compiled by numba when this file is imported (rows.py, at the first call).

Tensors come as addresses of contiguous memory; rows are ascending. Neighbours are one system call. Loops release the
GIL and never raise: a row that the system does not move in one go ends a loop, and whoever called learns why.
"""

from __future__ import annotations

from typing import Any

from numba import int32, int64
from numba.core import types as numba_types

from ..cpu.njit import compiled, i8

types: Any = numba_types

_pread = types.ExternalFunction("pread", int64(int32, int64, int64, int64))
_pwrite = types.ExternalFunction("pwrite", int64(int32, int64, int64, int64))
_posix_fadvise = types.ExternalFunction("posix_fadvise", int32(int32, int64, int64, int32))

# POSIX_FADV_WILLNEED of Linux, and of FreeBSD
_WILL_NEED = 3
# bytes of the smallest page
_PAGE = 1 << 12
# bytes that are moved at once: Linux moves less than 2 GiB
_MOST = 1 << 30


@compiled(inline=True)
def _run(row: Any, begin: int, n: int, most: int) -> int:
    """Where the run of neighbours ends that begins at row[begin], at most so many of them."""
    end = begin + 1
    while end < n and end - begin < most and row[end] == row[end - 1] + 1:
        end += 1
    return end


@compiled(int64(*[int64] * 5))
def read_file_rows(file: int, rows: int, n: int, records: int, step: int) -> int:
    """Rows that were read before one that was not."""
    row, most, begin = i8(rows, n), max(1, _MOST // step), 0
    while begin < n:
        end = _run(row, begin, n, most)
        nbytes = (end - begin) * step
        if _pread(int32(file), records + begin * step, nbytes, row[begin] * step) != nbytes:
            break
        begin = end
    return begin


@compiled(int64(*[int64] * 5))
def write_file_rows(file: int, rows: int, n: int, records: int, step: int) -> int:
    """Rows that were written before one that was not."""
    row, most, begin = i8(rows, n), max(1, _MOST // step), 0
    while begin < n:
        end = _run(row, begin, n, most)
        nbytes = (end - begin) * step
        if _pwrite(int32(file), records + begin * step, nbytes, row[begin] * step) != nbytes:
            break
        begin = end
    return begin


@compiled(int64(*[int64] * 5))
def ask_file_rows(file: int, rows: int, n: int, step: int, edges: int) -> int:
    """Have reads of all these rows begin, or with `edges` of the pages that a run has a part of; a page that is there
    already costs a look. Gives n."""
    row, most, begin = i8(rows, n), max(1, _MOST // step), 0
    while begin < n:
        end = _run(row, begin, n, most)
        first, last = row[begin] * step, (row[begin] + end - begin) * step
        if not edges:
            _posix_fadvise(int32(file), first, last - first, int32(_WILL_NEED))
        else:
            if first % _PAGE:
                _posix_fadvise(int32(file), first, 1, int32(_WILL_NEED))
            if last % _PAGE and (first % _PAGE == 0 or last // _PAGE > first // _PAGE):
                _posix_fadvise(int32(file), last - 1, 1, int32(_WILL_NEED))
        begin = end
    return begin
