"""Records on their way between slots and what lies below, where a thread reads and writes: `Transfers`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .backing import Backing
from .io_queue import IoQueue, Job

# writes that may wait for a disk; each holds the records of a batch
_MOST_WRITES = 8


@dataclass(eq=False)
class Load:
    """Records [n] of a table that a batch wants, and the slots [n] that they go to, counted over all tables."""

    batch: int
    table: int
    records: Tensor
    slots: Tensor
    job: Job


class Transfers:
    """What a store has below written and read by a thread, in the order in which it asks.

    So a row that is saved and wanted again comes back as it was saved. Loads are taken up in the same order, all of a
    batch and of those before it at a time: a batch may find a row in a slot that an earlier one is still waiting for.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # made when something moves: a store in memory needs no thread
        self._queue: IoQueue | None = None
        self._loads: deque[Load] = deque()
        self._writes: deque[Job] = deque()
        # records that a kernel on a GPU may still read, and when it is done
        self._kept: deque[tuple[Any, Tensor]] = deque()

    def save(self, table: str, below: Backing, rows: Tensor, records: Tensor) -> None:
        """Have records [n] of rows [n] written below. On CUDA they are those once the current stream has come here.

        Raises:
            Exception: a write or a read before it failed.
        """
        filled = _event(records)

        def write() -> None:
            if filled is not None:
                filled.synchronize()
            _named(table, "written", below.write, rows, records)

        self._check_writes(_MOST_WRITES)
        self._writes.append(self._submit(write))

    def load(
        self, batch: int, number: int, table: str, below: Backing, rows: Tensor, records: Tensor, slots: Tensor
    ) -> None:
        """Have records [n] of rows [n] read, after all that was asked for before; `loaded` gives them."""
        job = self._submit(lambda: _named(table, "read", below.read, rows, records))
        self._loads.append(Load(batch, number, records, slots, job))

    def loaded(self, batch: int | None = None) -> Iterator[Load]:
        """What was read for the batches up to this one, or for all; waits for it, and each comes once.

        Raises:
            Exception: what a write or a read before raised; names the table. So does every call after that.
        """
        self._check_writes(None)
        while self._loads and (batch is None or self._loads[0].batch <= batch):
            self._loads[0].job.wait()
            load = self._loads.popleft()
            yield load
            self._keep(load.records)

    def finish_writes(self) -> None:
        """Wait until all that was to be written is. Raises as `loaded`."""
        self._check_writes(0)

    def close(self) -> None:
        """Let go what has not begun."""
        if self._queue is not None:
            self._queue.close(cancel=True)

    def _submit(self, work: Callable[[], object]) -> Job:
        if self._queue is None:
            self._queue = IoQueue(self._name)
        return self._queue.submit(work)

    def _check_writes(self, most: int | None) -> None:
        """Wait until no more than `most` writes are left, None: for none; raise what one of them raised."""
        while self._writes and (self._writes[0].done or (most is not None and len(self._writes) > most)):
            self._writes[0].wait()
            self._writes.popleft()

    def _keep(self, records: Tensor) -> None:
        """Hold pinned memory until the kernel that was just given it has read it: no allocator knows of that."""
        event = _event(records)
        if event is None:
            return
        self._kept.append((event, records))
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()


def _event(records: Tensor) -> Any:
    """The end of what the current stream was given; None where memory is that of a CPU alone."""
    return torch.cuda.current_stream().record_event() if records.is_pinned() else None


def _named(table: str, what: str, move: Callable[[Tensor, Tensor], None], rows: Tensor, records: Tensor) -> None:
    try:
        move(rows, records)
    except Exception as error:
        # as our files do, which have a name for each shard
        if f"table '{table}'" in str(error) or f"table '{table}." in str(error):
            raise
        text = f"table {table!r}: its rows could not be {what} below: {type(error).__name__}: {error}"
        raise RuntimeError(f"{text}. They are lost: start again from the last checkpoint") from error
