"""A thread that loads and copies batches while the main thread trains."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from shardwise.sharding.comms.consensus import STEP_ERRORS

from .streams import current, new_stream, on, record_stream, to_device

In = TypeVar("In")

# how often a thread that waits for room looks whether it is to stop
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class _Loaded:
    """A batch, what failed in its place, or neither at the end."""

    batch: Any = None
    error: Exception | None = None
    copied: Any = None


class DataLoadingThread(Thread, Generic[In]):
    """Loads the next batch and copies it to a device; itself an iterator, which a pipeline takes as any other.

    What its iterator raises is raised where the batch is asked for, and names this rank; loading then goes on.

    Args:
        device: where batches go.
        dataloader_iter: gives batches.
        to_device_non_blocking: whether copies from pinned memory may be under way when a batch is given out.
        memcpy_stream_priority: of the stream that is made for copies where there is no `memcpy_stream`.
        memcpy_stream: where copies are made.
    """

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[In],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: torch.Stream | None = None,
    ) -> None:
        # a daemon: a program that is over does not wait for its loader
        super().__init__(name="DataLoadingThread", daemon=True)
        self._to, self._batches, self._non_blocking = torch.device(device), dataloader_iter, to_device_non_blocking
        self._copies = memcpy_stream or new_stream(self._to, memcpy_stream_priority)
        self._loaded: queue.Queue[_Loaded] = queue.Queue(maxsize=1)
        self._stopped, self._is_over = Event(), False

    def run(self) -> None:
        """Load batches until there are no more, or `stop` is called."""
        if self._to.type != "cpu":
            torch.get_device_module(self._to).set_device(self._to)
        while not self._stopped.is_set():
            loaded = self._load()
            self._give(loaded)
            if loaded.batch is None and loaded.error is None:
                return

    def stop(self) -> None:
        """Load no more; a batch that was loaded is given up."""
        self._stopped.set()

    def get_next_batch(self, none_throws: bool = False) -> In | None:
        """The next batch; None after the last one, or StopIteration with `none_throws`. Starts the thread if need be.

        Raises:
            Exception: the iterator raised, or the batch could not be copied. Of the iterator's type where other ranks
                could raise it too, else a RuntimeError; with the number of this rank.
        """
        try:
            return next(self)
        except StopIteration:
            if none_throws:
                raise
            return None
        except Exception as error:
            raise STEP_ERRORS.of_rank(error, dist.get_rank() if dist.is_initialized() else 0) from error

    def __iter__(self) -> Iterator[In]:
        return self

    def __next__(self) -> In:
        loaded = self._take()
        if loaded.error is not None:
            raise loaded.error
        if loaded.batch is None:
            self._is_over = True
            raise StopIteration
        here = current(self._copies)
        if here is not None:
            here.wait_event(loaded.copied)
            record_stream(loaded.batch, here)
        return loaded.batch  # type: ignore[no-any-return]

    def _load(self) -> _Loaded:
        try:
            batch = next(self._batches, None)
            with on(self._copies):
                batch = to_device(batch, self._to, self._non_blocking)
                return _Loaded(batch, None, None if self._copies is None else self._copies.record_event())
        except Exception as error:
            return _Loaded(error=error)

    def _give(self, loaded: _Loaded) -> None:
        while not self._stopped.is_set():
            try:
                self._loaded.put(loaded, timeout=_LOOK_SECONDS)
                return
            except queue.Full:
                continue

    def _take(self) -> _Loaded:
        if self.ident is None:
            self.start()
        while not (self._stopped.is_set() or self._is_over):
            try:
                return self._loaded.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
        return _Loaded()
