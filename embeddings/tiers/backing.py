"""Where the records of a table's rows lie below the device: in memory here, in files in `files.py`, or where users say.

Shapes: rows [n] int64, records [n, record_bytes] uint8, R the rows of the table.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...kernels.huge_pages import in_huge_pages
from ...kernels.memory import require_memory


@runtime_checkable
class Backing(Protocol):
    """Where the records of a table's rows lie below the device, row by row: [R, record_bytes] uint8.

    A store calls it from one thread at a time, which need not be the same each time. Bytes come back as they were
    written; a row that was never written is zeros. A call that raises may have moved some of its rows: the run has
    failed then, and goes on from its last checkpoint. What a backing holds is scratch: no other run reads it.
    """

    def read(self, rows: Tensor, out: Tensor) -> None:
        """Fill out [n, record_bytes] uint8, contiguous on the CPU, with the records of rows [n] int64 on the CPU, which
        are ascending and distinct.
        """
        ...

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Keep records [n, record_bytes] of rows [n], both as in `read`; they may be overwritten after the call."""
        ...

    def grow(self, rows: int) -> None:
        """Have so many rows from now on, no fewer than before; the added ones are zeros."""
        ...

    def close(self) -> None:
        """Give memory, files and locks back; closing again does nothing."""
        ...


class HostRecords:
    """Records in memory of this machine, in huge pages where the system has them; it is taken when it is written.

    With `pinned`, which needs CUDA, a GPU reads and writes them in place.

    Raises:
        ValueError: no rows or no bytes, or `pinned` without CUDA.
        MemoryError: there is less memory than [rows, record_bytes], or CUDA does not pin so much.
    """

    def __init__(self, rows: int, record_bytes: int, *, pinned: bool = False) -> None:
        require_shape(rows, record_bytes)
        self.pinned = pinned
        # whose memory this is a part of
        self._whole: HostRecords | None = None
        self._records, self._release = self._take(rows, record_bytes)

    def split(self, rows: Sequence[int]) -> list[HostRecords]:
        """Its memory dealt out to tables of so many rows each, side by side, in place of this: it goes with the last
        of them.
        """
        parts = []
        for records in torch.split(self._records, list(rows)):
            part = HostRecords.__new__(HostRecords)
            part.pinned, part._whole, part._records, part._release = self.pinned, self, records, partial(_unpin, None)
            parts.append(part)
        return parts

    def follows(self, other: HostRecords) -> bool:
        """Whether these records begin where the other ones end."""
        begin = other._records.storage_offset() + other._records.numel()
        return self._whole is not None and self._whole is other._whole and self._records.storage_offset() == begin

    @property
    def records(self) -> Tensor:
        """All of them, [R, record_bytes] uint8: what moves rows may do it here instead of by `read` and `write`."""
        return self._records

    def read(self, rows: Tensor, out: Tensor) -> None:
        """As `Backing` says."""
        require_rows(rows, out, self._records.shape)
        take_rows(self._records, rows, out)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """As `Backing` says."""
        require_rows(rows, records, self._records.shape)
        put_rows(self._records, rows, records)

    def grow(self, rows: int) -> None:
        """As `Backing` says. Copies what there is: both lie in memory meanwhile."""
        before, release = self._records, self._release
        require_growth(rows, before.shape[0])
        self._records, self._release = self._take(rows, before.shape[1])
        self._records[: before.shape[0]] = before
        self._whole = None
        release()

    def pin(self) -> None:
        """Have a GPU read and write them in place from now on.

        Raises:
            RuntimeError: CUDA does not lock so much memory, or there is none.
        """
        if self._whole is not None:
            self._whole.pin()
        elif not self.pinned:
            self._release = weakref.finalize(self, _unpin, _pin(self._records))
        self.pinned = True

    def close(self) -> None:
        """As `Backing` says."""
        self._records = torch.empty((0, self._records.shape[1]), dtype=torch.uint8, device="cpu")
        self._whole = None
        self._release()

    def __deepcopy__(self, memo: dict[int, object]) -> HostRecords:
        copied = HostRecords(*self._records.shape, pinned=self.pinned)
        copied._records.copy_(self._records)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"pinned": self.pinned, "records": self._records}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.pinned, self._whole = state["pinned"], None
        self._records, self._release = self._take(*state["records"].shape)
        self._records.copy_(state["records"])

    def _take(self, rows: int, record_bytes: int) -> tuple[Tensor, Callable[[], object]]:
        shape = (rows, record_bytes)
        require_memory(f"records of {rows:,} rows", shape, torch.uint8)
        nbytes = rows * record_bytes
        try:
            # torch.zeros would write all of it
            memory = mmap.mmap(-1, nbytes, **_PRIVATE)
        except (OSError, OverflowError) as error:
            text = f"records of {rows:,} rows: {nbytes:,} bytes, which the system does not give: is it too large?"
            raise MemoryError(text) from error
        records = in_huge_pages(torch.frombuffer(memory, dtype=torch.uint8)).view(shape)
        return records, weakref.finalize(self, _unpin, _pin(records) if self.pinned else None)


def side_by_side(makes: Callable[[int, int], Backing], rows: Sequence[int], record_bytes: int) -> list[Backing]:
    """What lies below tables of so many rows: in one memory where it is memory, or each by itself."""
    if len(rows) > 1 and (makes.func if isinstance(makes, partial) else makes) is HostRecords:
        whole = makes(sum(rows), record_bytes)
        assert isinstance(whole, HostRecords)
        return [*whole.split(rows)]
    return [makes(count, record_bytes) for count in rows]


def records_here(below: Backing) -> Tensor | None:
    """Records that are moved in place, not by calls; what a backing of a user names `records` is its own affair."""
    return below.records if isinstance(below, HostRecords) else None


# not shared with processes that are forked
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _pin(records: Tensor) -> int:
    """Lock the pages where a GPU finds them. torch's own allocator rounds up to a power of 2: 9 GiB would take 16.

    Raises:
        ValueError: there is no CUDA. MemoryError: it does not lock so much.
    """
    if not torch.cuda.is_available():
        raise ValueError("pinned records are for CUDA, and there is none here: pinned=False")
    status = int(_runtime().cudaHostRegister(records.data_ptr(), records.numel(), 0))
    if status:
        raise MemoryError(f"records of {records.numel():,} bytes: CUDA cannot pin so much (error {status})")
    return records.data_ptr()


def _unpin(address: int | None) -> None:
    # the memory itself goes with the last tensor of it
    if address is not None:
        _runtime().cudaHostUnregister(address)


def take_rows(source: Tensor, rows: Tensor, out: Tensor) -> None:
    """Copy rows of source [R, record_bytes] to out [n, record_bytes]."""
    source, out = _in_words(source, out)
    torch.index_select(source, 0, rows, out=out)


def put_rows(target: Tensor, rows: Tensor, records: Tensor) -> None:
    """Copy records [n, record_bytes] to rows of target [R, record_bytes]."""
    target, records = _in_words(target, records)
    target.index_copy_(0, rows, records)


def _in_words(*records: Tensor) -> tuple[Tensor, ...]:
    """Records as numbers of 8 bytes, which torch copies up to six times as fast, where they are made of them."""
    if any(tensor.shape[1] % 8 or tensor.storage_offset() % 8 for tensor in records):
        return records
    return tuple(tensor.view(torch.int64) for tensor in records)


def require_shape(rows: int, record_bytes: int) -> None:
    """Raise ValueError unless there is a row at least, and a byte in it."""
    if rows < 1 or record_bytes < 1:
        raise ValueError(f"a backing of {rows} rows and {record_bytes} bytes a row: both must be positive")


def require_growth(rows: int, before: int) -> None:
    """Raise ValueError where a backing would lose rows."""
    if rows < before:
        raise ValueError(f"a backing of {before:,} rows cannot shrink to {rows:,}")


def require_rows(rows: Tensor, records: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a call on a backing [R, record_bytes] has what `Backing.read` says; `rows` may be none.

    Raises:
        ValueError, IndexError: names what does not fit.
    """
    if records.dtype != torch.uint8 or not records.is_contiguous() or records.device.type != "cpu":
        raise ValueError(f"records must be uint8, contiguous and on the CPU, not {records.dtype} on {records.device}")
    if rows.dtype != torch.int64 or rows.device.type != "cpu" or tuple(records.shape) != (rows.numel(), shape[1]):
        raise ValueError(
            f"{rows.dtype} rows {list(rows.shape)} with records {list(records.shape)}: need int64 rows [n] on the CPU"
            f" and records [n, {shape[1]}]"
        )
    if not rows.numel():
        return
    if rows.numel() > 1 and not bool((rows[1:] > rows[:-1]).all()):
        raise ValueError("rows must be ascending and distinct")
    # the ends of what ascends
    first, last = int(rows[0]), int(rows[-1])
    if first < 0 or last >= shape[0]:
        raise IndexError(f"row {first if first < 0 else last} is outside [0, {shape[0]})")
