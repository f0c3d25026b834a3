"""Ranks that may fail one by one, for tests of failures: each is a process of its own and says what became of it.

`lone_ranks(4, worker, arg)` calls `worker(arg)` on four gloo ranks, each in a process that ends afterwards, and returns
what each said: a value, an exception, or nothing where it was killed. Nobody is ended because another failed; what
still runs after `deadline` seconds has said `hung` and is killed.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from ranks import context, count, start_fork_server, use_own_host

from shardwise.sharding.testing.environment import get_free_port


@dataclass(frozen=True)
class Said:
    """What a rank said: `value`, or the `error` (its type's name) with its `text` and the `ranks` that it names."""

    value: Any = None
    error: str = ""
    text: str = ""
    ranks: tuple[int, ...] = ()
    hung: bool = False

    @property
    def killed(self) -> bool:
        """Whether its process ended before it could say anything."""
        return self.error == "killed"


@dataclass
class LoneWorld:
    """Ranks that are under way: processes and where each answers, until the monotonic time `end`."""

    processes: list[ForkServerProcess]
    answers: list[Connection]
    stopped: int | None
    end: float
    _said: list[Said] | None = None

    def said(self) -> list[Said]:
        """What each rank said, in rank order; waits for them at the first call, and no process is left after it."""
        if self._said is None:
            self._said = [self._receive(rank) for rank in range(len(self.answers))]
            for process, said in zip(self.processes, self._said, strict=True):
                # one that is stopped does not end by itself
                process.join(0.0 if said.hung else 10.0)
                process.kill()
                process.join()
        return self._said

    def _receive(self, rank: int) -> Said:
        wait = 0.0 if rank == self.stopped else max(0.0, self.end - time.monotonic())
        try:
            if self.answers[rank].poll(wait):
                said: Said = pickle.loads(self.answers[rank].recv_bytes())
                return said
        except EOFError:
            return Said(error="killed")
        return Said(hung=True)


def start_lone_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    store: str = "file",
    stopped: int | None = None,
    deadline: float = 60.0,
) -> LoneWorld:
    """Ranks that begin now, for tests that wait more than they compute: several worlds may be under way at once.

    The ranks meet in a "file", or a "tcp" store that rank 0 keeps. Rank `stopped` is not waited for.
    """
    port = get_free_port()
    start_fork_server()
    meet = f"tcp://127.0.0.1:{port}" if store == "tcp" else f"file://{_fresh_file()}"
    world = LoneWorld([], [], stopped, time.monotonic() + deadline)
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        world.processes.append(context.Process(target=_be, args=(theirs, rank, world_size, meet, sys.path, fn, args)))
        world.processes[-1].start()
        theirs.close()
        world.answers.append(ours)
    count(0.0, world_size)
    return world


def lone_ranks(world_size: int, fn: Callable[..., Any], *args: Any, **settings: Any) -> list[Said]:
    """What each rank said, in rank order: `start_lone_ranks` and its answers."""
    start = time.monotonic()
    said = start_lone_ranks(world_size, fn, *args, **settings).said()
    count(time.monotonic() - start)
    return said


def kill_me() -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop_me() -> None:
    """Stop this process, as a debugger or a lost machine does: it lives, and answers nobody."""
    os.kill(os.getpid(), signal.SIGSTOP)


def _fresh_file() -> str:
    handle, path = tempfile.mkstemp(prefix="lone_ranks")
    os.close(handle)
    os.unlink(path)
    return path


def _be(
    conn: Connection, rank: int, world_size: int, meet: str, path: list[str], fn: Callable[..., Any], args: Any
) -> None:
    sys.path[:] = path
    # tests that run in the background begin with Ctrl-C ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    use_own_host()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    try:
        said = Said(value=fn(*args))
    except BaseException as error:
        said = Said(error=type(error).__name__, text=str(error), ranks=getattr(error, "ranks", ()))
    # tensors by value: this process will be gone
    conn.send_bytes(pickle.dumps(said))
    conn.close()
