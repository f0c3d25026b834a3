"""Records in a scratch file on a disk: `FileRecords`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from .backing import require_growth, require_rows, require_shape
from .scratch import ScratchFile


class FileRecords:
    """Records in one file of `folder`, as large as all rows; reads and writes go through the system's page cache.

    `name` is the table's, and the shard's where a table has several: errors name it, and two processes cannot have the
    same name in one folder.

    Raises:
        BlockingIOError: another process has this name in this folder.
        OSError: the folder cannot be written, or its disk has less room than all rows need.
    """

    def __init__(self, rows: int, record_bytes: int, folder: str | os.PathLike[str], *, name: str) -> None:
        require_shape(rows, record_bytes)
        self._shape = (rows, record_bytes)
        self._file = ScratchFile(folder, name=name, nbytes=rows * record_bytes)

    def read(self, rows: Tensor, out: Tensor) -> None:
        """As `Backing` says.

        Raises:
            OSError: the disk fails, or the file is shorter than it was; names table, folder and way out.
        """
        require_rows(rows, out, self._shape)
        file, buffer = self._file.fileno(), _bytes_of(out)
        for start, end, first in self._runs(rows):
            self._read_run(file, buffer[start:end], first)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """As `Backing` says.

        Raises:
            OSError: the disk is full or fails; names table, folder and way out. Some of the rows may be written.
        """
        require_rows(rows, records, self._shape)
        file, buffer = self._file.fileno(), _bytes_of(records)
        for start, end, first in self._runs(rows):
            self._write_run(file, buffer[start:end], first)

    def grow(self, rows: int) -> None:
        """As `Backing` says.

        Raises:
            OSError: the disk has no room for them.
        """
        require_growth(rows, self._shape[0])
        self._file.grow(rows * self._shape[1])
        self._shape = (rows, self._shape[1])

    def close(self) -> None:
        """As `Backing` says."""
        self._file.close()

    def _runs(self, rows: Tensor) -> list[tuple[int, int, int]]:
        """Rows that follow each other: where they begin and end in the buffer, and in the file, in bytes."""
        if not rows.numel():
            return []
        step = self._shape[1]
        starts = [0, *(torch.nonzero(rows.diff() != 1)[:, 0] + 1).tolist()]
        ends = [*starts[1:], rows.numel()]
        firsts = rows[torch.tensor(starts)].tolist()
        return [(s * step, e * step, row * step) for s, e, row in zip(starts, ends, firsts, strict=True)]

    def _read_run(self, file: int, part: memoryview, first: int) -> None:
        # the system moves no more than 2 GiB at once
        while part:
            try:
                moved = os.preadv(file, [part], first)
            except OSError as error:
                self._file.fail(error, "its rows cannot be read")
            if not moved:
                self._file.fail_short()
            part, first = part[moved:], first + moved

    def _write_run(self, file: int, part: memoryview, first: int) -> None:
        while part:
            try:
                moved = os.pwrite(file, part, first)
            except OSError as error:
                self._file.fail(error, "its rows cannot be written")
            part, first = part[moved:], first + moved


def _bytes_of(records: Tensor) -> memoryview:
    array: Any = records.view(-1).numpy()
    return memoryview(array)
