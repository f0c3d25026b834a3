"""Records in a scratch file on a disk: `FileRecords`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from ...kernels import ask_file_rows, read_file_rows, write_file_rows
from .backing import put_rows, require_growth, require_rows, require_shape, take_rows
from .scratch import ScratchFile

# rows whose reads are under way while those before them are copied: as many as a disk has any use for
_AHEAD = 1024
# that a copy of a file moves at once
_COPIED_BYTES = 1 << 24


class FileRecords:
    """Records in one file of `folder`, as large as all rows; the system's page cache lies between it and the disk.

    `name` is the table's, and the shard's where a table has several: errors name it, and two processes cannot have the
    same name in one folder. `how` is "pread", calls of the system, a run of neighbours each: what is not in the page
    cache is asked for ahead, so one thread keeps the disk busy. Or it is "mmap", the file as memory: less work for the
    processor where the page cache holds all of the file, but a disk that fails then ends the process (SIGBUS) instead
    of raising an error. None: "pread", except on Windows, which has none.

    Raises:
        BlockingIOError: another process has this name in this folder.
        OSError: the folder cannot be written, or its disk has less room than all rows need.
        ValueError: another `how`.
    """

    def __init__(
        self,
        rows: int,
        record_bytes: int,
        folder: str | os.PathLike[str],
        *,
        name: str,
        how: Literal["pread", "mmap"] | None = None,
    ) -> None:
        require_shape(rows, record_bytes)
        if how not in (None, "pread", "mmap"):
            raise ValueError(f"how must be 'pread', 'mmap' or None, got {how!r}")
        self._shape = (rows, record_bytes)
        self._file = ScratchFile(folder, name=name, nbytes=rows * record_bytes)
        self._mapped = how == "mmap" or (how is None and not hasattr(os, "pread"))
        self._memory = self._map() if self._mapped else None
        if hasattr(os, "posix_fadvise"):
            # nothing around the rows that are asked for
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, rows: Tensor, out: Tensor) -> None:
        """As `Backing` says: rows [n] into out [n, record_bytes] uint8.

        Raises:
            OSError: the disk fails, or the file is shorter than it was; names table, folder and way out.
        """
        require_rows(rows, out, self._shape)
        file = self._file.fileno()
        if self._memory is not None:
            take_rows(self._memory, rows, out)
        else:
            self._move(file, rows, out, read_file_rows, self._read_run, edges=False)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """As `Backing` says: records [n, record_bytes] uint8 of rows [n].

        Raises:
            OSError: the disk is full or fails; names table, folder and way out. Some of the rows may be written.
        """
        require_rows(rows, records, self._shape)
        file = self._file.fileno()
        if self._memory is not None:
            put_rows(self._memory, rows, records)
        else:
            self._move(file, rows, records, write_file_rows, self._write_run, edges=True)

    def grow(self, rows: int) -> None:
        """As `Backing` says.

        Raises:
            OSError: the disk has no room for them.
        """
        require_growth(rows, self._shape[0])
        self._file.grow(rows * self._shape[1])
        self._shape = (rows, self._shape[1])
        self._memory = self._map() if self._mapped else None

    def __deepcopy__(self, memo: dict[int, object]) -> FileRecords:
        """The same records in a file of its own, in the same folder."""
        copied = FileRecords(
            *self._shape, self._file.folder, name=self._file.name, how="mmap" if self._mapped else "pread"
        )
        step = max(1, _COPIED_BYTES // self._shape[1])
        for begin in range(0, self._shape[0], step):
            rows = torch.arange(begin, min(begin + step, self._shape[0]), device="cpu")
            records = torch.empty((rows.numel(), self._shape[1]), dtype=torch.uint8, device="cpu")
            self.read(rows, records)
            copied.write(rows, records)
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"table {self._file.name!r}: its rows are in a scratch file, which is of this process alone and cannot be"
            " pickled: save a checkpoint, or copy the model with copy.deepcopy"
        )

    def close(self) -> None:
        """As `Backing` says."""
        self._memory = None
        self._file.close()

    def _map(self) -> Tensor:
        try:
            memory = mmap.mmap(self._file.fileno(), self._file.nbytes)
        except OSError as error:
            self._file.fail(error, "its scratch file cannot be mapped")
        if hasattr(mmap, "MADV_RANDOM"):
            # otherwise each page that is touched brings megabytes around it
            memory.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(memory, dtype=torch.uint8).view(self._shape)

    def _move(
        self,
        file: int,
        rows: Tensor,
        records: Tensor,
        move: Callable[[int, Tensor, Tensor], int | None],
        move_run: Callable[[int, memoryview, int], None],
        *,
        edges: bool,
    ) -> None:
        """Move rows by the compiled loop `move`, and what it leaves by calls of our own, which say what is wrong."""
        n, step = rows.numel(), self._shape[1]
        windows = [(begin, min(n, begin + _AHEAD)) for begin in range(0, n, _AHEAD)]
        for i, (begin, end) in enumerate(windows):
            for first, last in windows[i : i + 2] if i == 0 else windows[i + 1 : i + 2]:
                ask_file_rows(file, rows[first:last], step, edges=edges)
            while begin < end:
                moved = move(file, rows[begin:end], records[begin:end])
                begin += moved or 0
                if begin < end:
                    # without loops all of them, otherwise the one that ended the loop
                    most = end if moved is None else begin + 1
                    buffer = _bytes_of(records[begin:most])
                    for start, stop, offset in _runs(rows[begin:most], step):
                        move_run(file, buffer[start:stop], offset)
                    begin = most

    def _read_run(self, file: int, part: memoryview, offset: int) -> None:
        while part:
            try:
                moved = os.preadv(file, [part], offset)
            except OSError as error:
                self._file.fail(error, "its rows cannot be read")
            if not moved:
                self._file.fail_short()
            part, offset = part[moved:], offset + moved

    def _write_run(self, file: int, part: memoryview, offset: int) -> None:
        while part:
            try:
                moved = os.pwrite(file, part, offset)
            except OSError as error:
                self._file.fail(error, "its rows cannot be written")
            part, offset = part[moved:], offset + moved


def _runs(rows: Tensor, step: int) -> list[tuple[int, int, int]]:
    """Rows that follow each other: where they begin and end in the buffer, and where in the file, in bytes."""
    starts = [0, *(torch.nonzero(rows.diff() != 1)[:, 0] + 1).tolist()]
    firsts = rows[torch.tensor(starts)].tolist()
    ends = [*starts[1:], rows.numel()]
    return [(start * step, end * step, row * step) for start, end, row in zip(starts, ends, firsts, strict=True)]


def _bytes_of(records: Tensor) -> memoryview:
    array: Any = records.view(-1).numpy()
    return memoryview(array)
