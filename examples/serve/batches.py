"""Requests that wait at the same time are answered as one batch, by one worker thread.

A request's instances stay together. A batch begins with the request that waited longest and takes those after it until
it is full; it runs when it is full or its first request has waited `max_wait_ms`, and not before the batch ahead of it
is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class QueueFull(RuntimeError):
    """As many instances wait as may wait; try again later."""


class Closed(RuntimeError):
    """The server is going down and takes no more requests."""


class ModelFailed(RuntimeError):
    """The model raised on the batch that had this request in it."""


@dataclass(frozen=True)
class Limits:
    """Instances in a batch, milliseconds that a request waits for others, and instances that may wait."""

    max_batch: int = 256
    max_wait_ms: float = 2.0
    max_queue: int = 4096

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.max_wait_ms < float("inf"):
            raise ValueError(f"max_wait_ms must not be negative, got {self.max_wait_ms}")


@dataclass(eq=False)
class _Waiting(Generic[T]):
    instances: Sequence[T]
    answer: asyncio.Future[list[Any]]
    arrived: float
    # until it is in a batch, or nobody wants its answer
    counted: bool = True


@dataclass
class Batcher(Generic[T]):
    """Runs `model(instances)`, which returns one answer for each, on batches of what `submit` is given.

    `ran(instances)` is called after each batch with how many it had. Call `start` on the event loop, and `drain` at
    the end.
    """

    model: Callable[[list[T]], Sequence[Any]]
    worker: ThreadPoolExecutor
    limits: Limits
    ran: Callable[[int], None] = lambda _: None
    waiting: int = field(default=0, init=False)
    most_waiting: int = field(default=0, init=False)
    _queue: deque[_Waiting[T]] = field(default_factory=deque, init=False)
    _arrival: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _loop_task: asyncio.Task[None] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def start(self) -> None:
        self._loop_task = asyncio.get_running_loop().create_task(self._run_batches())

    async def submit(self, instances: Sequence[T]) -> list[Any]:
        """An answer for each of `instances`, at most `max_batch`. Cancelling it takes them out of the queue.

        Raises:
            QueueFull: there is no room for them.
            Closed: `drain` was called.
            ModelFailed: the model raised.
        """
        if len(instances) > self.limits.max_batch:
            raise ValueError(f"{len(instances)} instances do not fit into a batch of {self.limits.max_batch}")
        if self._closed:
            raise Closed("the server is going down")
        if self.waiting + len(instances) > self.limits.max_queue:
            raise QueueFull(f"{self.waiting} instances wait, of at most {self.limits.max_queue}")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(instances, loop.create_future(), loop.time())
        self._queue.append(waiting)
        self.waiting += len(instances)
        self.most_waiting = max(self.most_waiting, self.waiting)
        self._arrival.set()
        try:
            return await waiting.answer
        except asyncio.CancelledError:
            self._uncount(waiting)
            raise

    async def drain(self) -> None:
        """Answer what waits, take no more, and stop."""
        self._closed = True
        self._arrival.set()
        if self._loop_task is not None:
            await self._loop_task

    async def _run_batches(self) -> None:
        while await self._is_due():
            batch = self._take()
            if not batch:
                continue
            instances = [instance for request in batch for instance in request.instances]
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self.worker, self.model, instances)
                if len(answers) != len(instances):
                    raise RuntimeError(f"the model gave {len(answers)} answers to {len(instances)} instances")
            except Exception as error:
                _fail(batch, error)
            else:
                _give(batch, answers)
            self.ran(len(instances))

    async def _is_due(self) -> bool:
        """Wait until a batch should run; False when there will be none."""
        loop = asyncio.get_running_loop()
        while True:
            self._arrival.clear()
            if self._closed or self.waiting >= self.limits.max_batch:
                return bool(self._queue)
            left = None
            if self._queue:
                left = self._queue[0].arrived + self.limits.max_wait_ms / 1000 - loop.time()
                if left <= 0:
                    return True
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except asyncio.TimeoutError:
                continue

    def _take(self) -> list[_Waiting[T]]:
        """The requests of the next batch, off the queue."""
        batch: list[_Waiting[T]] = []
        size = 0
        while self._queue and size + len(self._queue[0].instances) <= self.limits.max_batch:
            request = self._queue.popleft()
            self._uncount(request)
            # what was cancelled stays in the queue until here
            if not request.answer.done():
                batch.append(request)
                size += len(request.instances)
        return batch

    def _uncount(self, request: _Waiting[T]) -> None:
        self.waiting -= len(request.instances) if request.counted else 0
        request.counted = False


def _give(batch: Sequence[_Waiting[T]], answers: Sequence[Any]) -> None:
    begin = 0
    for request in batch:
        end = begin + len(request.instances)
        if not request.answer.done():
            request.answer.set_result(list(answers[begin:end]))
        begin = end


def _fail(batch: Sequence[_Waiting[T]], error: Exception) -> None:
    for request in batch:
        if not request.answer.done():
            failed = ModelFailed(f"{type(error).__name__}: {error}")
            failed.__cause__ = error
            request.answer.set_exception(failed)
