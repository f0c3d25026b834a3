"""Work of compiled loops divided among threads: those of torch itself wherever torch runs on OpenMP.

torch's threads stay awake for some milliseconds after each operator and keep their cores busy: threads of our own would
share these cores with them and wait. Where there is no OpenMP threads of our own do the work.

A forked process has none of its parent's threads, but GNU's OpenMP waits for those that the forking thread had: any
operator of torch that is divided among threads would stop for ever in the child, ours and torch's alike. So before a
fork OpenMP ends the threads of the one that forks; parent and child start others when they need them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

_WORK: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# "omp_pause_hard" of OpenMP 5.0
_PAUSE_HARD = 2
# whether this is a forked process in which OpenMP may wait for threads of its parent
_forked = False
# whether OpenMP still had its threads when this process forked last
_kept = True


def _before_fork() -> None:
    global _kept
    _kept = _forked or not _end_threads()


def _after_fork() -> None:
    global _forked
    _forked = _kept
    if _kept and _is_gnu():
        # torch's own operators would wait: they do without other threads
        torch.set_num_threads(1)


def _end_threads() -> bool:
    """Have OpenMP end the threads that work for this one; False where it cannot. They start again at the next use."""
    # the OpenMP of LLVM and Intel forgets its threads in a forked process by itself
    pause = getattr(_openmp(), "omp_pause_resource_all", None) if _is_gnu() else None
    return pause is not None and pause(_PAUSE_HARD) == 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


@cache
def _openmp() -> Any:
    """The library of torch through which the functions of its OpenMP are found; None where it was linked with none."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
            # whoever has OpenMP has this
            _ = library.omp_get_max_threads
        except (OSError, AttributeError):
            continue
        return library
    return None


def _is_gnu() -> bool:
    return _openmp() is not None and not hasattr(_openmp(), "__kmpc_fork_call")


@cache
def _parallel() -> Any:
    """`GOMP_parallel` of the OpenMP that torch was linked with (other OpenMPs have it too); None where there is none.

    It calls a C function of one pointer on each of so many threads, this one among them, and waits for all.
    """
    parallel = getattr(_openmp(), "GOMP_parallel", None)
    if parallel is not None:
        parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


def call(work: int, data: int) -> None:
    """Call the C function at the address `work` with the pointer `data`, without the GIL."""
    _function(work)(data)


@cache
def _function(work: int) -> Callable[[int], None]:
    return _WORK(work)  # type: ignore[no-any-return]


def spread(work: int, data: int) -> None:
    """Have torch's threads call the C function at the address `work` with the pointer `data`, each once at most.

    They divide the work among themselves while they do it: whoever comes first must be able to do all of it.
    """
    if not _in_torchs(work, data):
        _in_pool(partial(call, work, data), torch.get_num_threads())


def _in_torchs(work: Any, data: int | None) -> bool:
    """Have torch's threads call a C function; False where they cannot be had, and nothing was called."""
    # as many as torch's operators take: with another number OpenMP would end threads and start them again
    threads = torch.get_num_threads()
    parallel = None if _forked or threads == 1 else _parallel()
    if parallel is None:
        return False
    parallel(work, data, threads, 0)
    return True


def run(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of all tasks, done by this thread and by others that are free; an exception comes back to the caller.

    Tasks are Python: they take turns, but for what they do without the GIL.
    """
    results: list[Any] = [None] * len(tasks)
    numbers, raised = count(), list[BaseException]()

    def work(_: object = None) -> None:
        # next() on one counter gives each task to one thread
        try:
            while (number := next(numbers)) < len(tasks):
                results[number] = tasks[number]()
        except BaseException as error:
            # C would swallow it
            raised.append(error)

    called = _WORK(work)
    if len(tasks) == 1 or not _in_torchs(ctypes.cast(called, ctypes.c_void_p), None):
        _in_pool(work, min(torch.get_num_threads(), len(tasks)))
    if raised:
        raise raised[0]
    return results


def _in_pool(work: Callable[[], None], threads: int) -> None:
    """Do `work` in this thread and in others of our own, as long as there is any left."""
    others = _others(threads - 1, work)
    try:
        work()
    finally:
        # those that have not begun are not needed any more
        begun = [other for other in others if not other.cancel()]
        for other in begun:
            other.exception()
    for other in begun:
        other.result()


def _others(threads: int, work: Callable[[], None]) -> list[Future[None]]:
    if threads < 1:
        return []
    others: list[Future[None]] = []
    try:
        pool = _pool(threads, os.getpid())
        for _ in range(threads):
            # whoever begins late finds no task left, and whoever is cancelled none at all
            others.append(pool.submit(work))
    except RuntimeError:
        # the interpreter is about to end, or the system starts no more threads
        pass
    return others


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: those of a parent do not live on in its fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="shardwise")
