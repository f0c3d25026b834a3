"""Rows of a file, many in one call without the GIL: the loops of rows_loops.py, where numba and POSIX are.

Shapes: rows [n] int64, ascending and distinct, records [n, record_bytes] uint8, contiguous; both on the CPU.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import Tensor

from .. import numba_loops


def read_file_rows(file: int, rows: Tensor, records: Tensor) -> int | None:
    """Read rows [n] of a file into records [n, record_bytes] uint8; gives how many of them, which is n unless the
    system did not give the next one in one go. None where nothing was done, because there are no loops here.
    """
    loops = _loops()
    return None if loops is None else int(loops.read_file_rows(file, *_addresses(rows, records)))


def write_file_rows(file: int, rows: Tensor, records: Tensor) -> int | None:
    """Write records [n, record_bytes] uint8 to rows [n] of a file; the result as that of `read_file_rows`."""
    loops = _loops()
    return None if loops is None else int(loops.write_file_rows(file, *_addresses(rows, records)))


def ask_file_rows(file: int, rows: Tensor, record_bytes: int, *, edges: bool = False) -> None:
    """Have the disk begin to read rows [n] into the page cache, all at once; where it cannot be asked, nothing happens.

    With `edges` only pages of which rows have a part, which the system reads when they are written.
    """
    loops = _loops()
    if loops is not None and hasattr(os, "posix_fadvise"):
        loops.ask_file_rows(file, rows.data_ptr(), rows.shape[0], record_bytes, int(edges))


def _loops() -> Any:
    # the file works on the C library's functions
    return None if sys.platform == "win32" else numba_loops.loops("rows_loops", "files")


def _addresses(rows: Tensor, records: Tensor) -> tuple[int, int, int, int]:
    return rows.data_ptr(), rows.shape[0], records.data_ptr(), records.shape[1]
