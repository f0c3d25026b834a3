"""Jobs of a queue are done in order by one thread, and no failure is lost and no end hangs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
from checkout import ROOT

from shardwise.embeddings.tiers import IoQueue


def test_jobs_are_done_in_order_by_one_thread() -> None:
    queue, done = IoQueue("user"), list[tuple[int, int]]()

    def note(n: int) -> None:
        done.append((n, threading.get_ident()))

    jobs = [queue.submit(partial(note, n)) for n in range(100)]
    jobs[-1].wait()
    assert [n for n, _ in done] == list(range(100)) and all(job.done for job in jobs)
    assert len({thread for _, thread in done} - {threading.get_ident()}) == 1
    queue.close()
    queue.close()


def test_after_a_job_that_failed_all_fail_with_its_error() -> None:
    queue, done = IoQueue("user"), list[str]()

    def fail() -> None:
        raise OSError("disk full")

    jobs = [queue.submit(work) for work in (lambda: done.append("before"), fail, lambda: done.append("after"))]
    jobs[0].wait()
    for job in (*jobs[1:], queue.submit(lambda: done.append("later"))):
        with pytest.raises(OSError, match="disk full"):
            job.wait()
    assert done == ["before"]
    queue.close()


def test_closing_waits_or_cancels() -> None:
    done = list[int]()
    for cancel in (False, True):
        queue, free, begun = IoQueue("user"), threading.Event(), threading.Event()
        jobs = [
            queue.submit(lambda begun=begun, free=free: (begun.set(), free.wait())),
            *(queue.submit(partial(done.append, n)) for n in range(3)),
        ]
        # what has not begun is cancelled
        assert begun.wait(60)
        threading.Timer(0.1, free.set).start()
        queue.close(cancel=cancel)
        assert all(job.done for job in jobs)
        jobs[0].wait()
    assert done == [0, 1, 2]
    with pytest.raises(RuntimeError, match="user: cancelled"):
        jobs[1].wait()
    with pytest.raises(RuntimeError, match="user: closed"):
        queue.submit(list)


def test_waiting_ends_when_the_time_is_over() -> None:
    queue, free = IoQueue("user"), threading.Event()
    job = queue.submit(free.wait)
    with pytest.raises(TimeoutError):
        job.wait(timeout_s=0.05)
    assert not job.done
    free.set()
    job.wait(timeout_s=10)
    queue.close()


def test_a_queue_that_is_dropped_ends_its_thread() -> None:
    queue = IoQueue("dropped")
    queue.submit(list).wait()
    gone = weakref.ref(queue)
    del queue
    gc.collect()
    end = time.monotonic() + 10
    while any(thread.name == "shardwise dropped" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert gone() is None


def test_memory_of_a_job_is_free_when_it_is_done() -> None:
    class Record:
        pass

    queue, record = IoQueue("user"), Record()
    freed = weakref.ref(record)
    job = queue.submit(partial(id, record))
    del record
    job.wait()
    queue.submit(list).wait()
    gc.collect()
    assert freed() is None
    queue.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_that_it_has_no_thread() -> None:
    queue = IoQueue("user")
    queue.submit(list).wait()
    child = os.fork()
    if not child:
        status = 1
        try:
            queue.submit(list)
        except RuntimeError:
            queue.close()
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    queue.submit(list).wait()
    queue.close()


def test_a_process_ends_while_its_queue_has_work() -> None:
    code = """
import time
from shardwise.embeddings.tiers import IoQueue
queue = IoQueue("user")
for _ in range(1000):
    queue.submit(lambda: time.sleep(0.1))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0
