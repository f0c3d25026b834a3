"""One thread that reads and writes for a table while its step computes: `IoQueue`."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

# that a process which ends waits for the job that is being done; a disk that hangs must not hold it longer
_LAST_SECONDS = 10.0


class Job:
    """Work that an `IoQueue` does, has done or has failed to do."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._ended = threading.Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not; `wait` says which."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, at most `timeout_s` seconds.

        Raises:
            TimeoutError: it has not after so many seconds.
            Exception: what it raised, or a job before it; RuntimeError: it was cancelled.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"no end after {timeout_s} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> BaseException | None:
        try:
            assert self._work is not None
            self._work()
        except BaseException as error:
            # all of them: a thread that dies silently would be waited for for ever
            self._end(error)
            return error
        self._end(None)
        return None

    def _end(self, error: BaseException | None) -> None:
        # tensors that the work holds may go
        self._error, self._work = error, None
        self._ended.set()


class IoQueue:
    """A thread that does jobs in the order in which they were submitted, so that a row which is written before it is
    read comes back as it was written. After one that failed all fail with its error: what they build on is not there.
    """

    def __init__(self, name: str) -> None:
        self._jobs = _Jobs(name)
        self._stop = weakref.finalize(self, _Jobs.stop, self._jobs, cancel=True, timeout_s=_LAST_SECONDS)

    def submit(self, work: Callable[[], object]) -> Job:
        """Have the thread call `work` when all that was submitted before is done.

        Raises:
            RuntimeError: the queue is closed, or another process's, from which this one was forked.
        """
        return self._jobs.add(Job(work))

    def close(self, *, cancel: bool = False) -> None:
        """Wait until all jobs have ended; with `cancel` those that have not begun never do, and fail. Again: nothing.

        Errors of jobs are not raised here: whoever waits for a job gets its error.
        """
        self._jobs.stop(cancel=cancel, timeout_s=None)
        self._stop.detach()


class _Jobs:
    """What a queue shares with its thread, which must not keep the queue itself alive."""

    def __init__(self, name: str) -> None:
        self.name, self.process = name, os.getpid()
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closed = False
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def add(self, job: Job) -> Job:
        if os.getpid() != self.process:
            raise RuntimeError(f"{self.name}: its thread is in the process from which this one was forked")
        with self.changed:
            if self.closed:
                raise RuntimeError(f"{self.name}: closed")
            if self.thread is None:
                # a daemon: the interpreter does not wait for a disk that hangs
                self.thread = threading.Thread(target=self.work, name=f"shardwise {self.name}", daemon=True)
                self.thread.start()
            self.waiting.append(job)
            self.changed.notify()
        return job

    def work(self) -> None:
        while True:
            with self.changed:
                while not self.waiting:
                    if self.closed:
                        return
                    self.changed.wait()
                job = self.waiting.popleft()
            if self.error is not None:
                job._end(self.error)
            else:
                self.error = job._run()
            # whatever it holds must not stay until the next one comes
            del job

    def stop(self, *, cancel: bool, timeout_s: float | None) -> None:
        if os.getpid() != self.process:
            return
        with self.changed:
            self.closed = True
            if cancel:
                for job in self.waiting:
                    job._end(RuntimeError(f"{self.name}: cancelled"))
                self.waiting.clear()
            self.changed.notify()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout_s)
