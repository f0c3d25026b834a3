"""Real gloo processes for tests: `run_ranks(2, worker, arg)` returns the list of what `worker(arg)` returned per rank.

`worker` is a top-level function of a test file; inside it the default process group is ready (`dist.get_rank()`), and
RANK, WORLD_SIZE, LOCAL_RANK are set. The processes come from a fork server that imported torch once, and live as long
as the pytest process; every call gets a fresh process group. After any failure all of them are killed, and the next
call starts others. A collective that has not ended when a call is over is a failure of that call, not of a later one.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from poison import poisoned

T = TypeVar("T")

START_SECONDS = 120.0
# how long the other ranks may take to report after the first failure
GRACE_SECONDS = 0.2
# how long the backend may keep tensors after a call
SETTLE_SECONDS = 3.0

# worlds, processes that were started for them, and seconds, since tests/durations.py last asked
counted: Counter[str] = Counter()

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["rank_imports"])


def start_fork_server() -> None:
    """Start it where it finds `rank_imports`: before Python 3.13 it has no path but that of its environment."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(path)):
        forkserver.ensure_running()


class RankTraceback(Exception):
    """The cause of an exception raised by `run_ranks`: what the failing ranks printed."""


class RankEnded(RuntimeError):
    """The process of a rank ended by itself: a crash, or `os._exit`."""


def run_ranks(world_size: int, fn: Callable[..., T], *args: Any, timeout: float = 180.0) -> list[T]:
    """Call `fn(*args)` on `world_size` gloo ranks and return each rank's value, in rank order.

    Raises what the first failing rank raised; TimeoutError with the stacks of the unfinished ranks after `timeout`
    seconds; RankEnded when a rank's process ends; RuntimeError when collectives are left that do not end.
    """
    start = time.monotonic()
    try:
        return _pool.run(world_size, fn, args, timeout)
    finally:
        count(time.monotonic() - start)


def error_of(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """What a call raises, as "Type: message", or "": for a rank to tell its test."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error.args[0] if error.args else ''}"
    return ""


def world_group() -> dist.ProcessGroup:
    """The default group of a rank."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def count(seconds: float, processes: int = 0) -> None:
    """Add to `counted`: a world of ranks, or only the processes that one needed."""
    counted.update(worlds=int(seconds > 0), processes=processes)
    counted["seconds"] += seconds  # type: ignore[assignment]


@dataclass(frozen=True)
class _Call:
    rank: int
    world_size: int
    store: str
    timeout: float
    path: list[str]
    # fn and args, unpickled after `path` is in force
    payload: bytes


@dataclass(frozen=True)
class _Failure:
    error: BaseException
    text: str


@dataclass(frozen=True)
class _Process:
    process: ForkServerProcess
    conn: Connection
    stacks: Path


class RankPool:
    """Processes that wait for calls; grows to the largest world size asked for."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = 0

    def run(self, world_size: int, fn: Callable[..., T], args: tuple[Any, ...], timeout: float) -> list[T]:
        """See `run_ranks`."""
        payload = pickle.dumps((fn, args))
        try:
            ranks = self._start(world_size)
            assert self._folder is not None
            self._calls += 1
            store = f"{self._folder.name}/store{self._calls}"
            for rank, process in enumerate(ranks):
                process.conn.send_bytes(pickle.dumps(_Call(rank, world_size, store, timeout, sys.path, payload)))
            values = self._collect(ranks, timeout)
            # a rank that left its group early would break the collectives its peers are still in
            for process in ranks:
                process.conn.send_bytes(b"")
            left = {rank: shapes for rank, shapes in enumerate(self._collect(ranks, timeout)) if shapes}
            if left:
                raise RuntimeError(f"collectives keep tensors after the call; their shapes by rank: {left}")
        except BaseException:
            self.close()
            raise
        return values

    def close(self) -> None:
        """Kill every process."""
        for entry in self._processes:
            entry.process.kill()
        for entry in self._processes:
            entry.process.join()
            entry.conn.close()
        self._processes.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self, world_size: int) -> list[_Process]:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        start_fork_server()
        fresh = []
        while len(self._processes) < world_size:
            ours, theirs = context.Pipe()
            stacks = Path(self._folder.name) / f"stacks{len(self._processes)}"
            # a daemon could not start data loader workers; `close` runs at exit instead
            process = context.Process(target=_serve, args=(theirs, str(stacks)), daemon=False)
            process.start()
            theirs.close()
            fresh.append(_Process(process, ours, stacks))
            self._processes.append(fresh[-1])
        count(0.0, len(fresh))
        for entry in fresh:
            if not entry.conn.poll(START_SECONDS):
                raise TimeoutError(f"a rank's process did not start within {START_SECONDS:.0f} s")
            entry.conn.recv_bytes()
        return self._processes[:world_size]

    def _collect(self, ranks: list[_Process], timeout: float) -> list[Any]:
        values: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        deadline = time.monotonic() + timeout
        while len(values) + len(failures) < len(ranks):
            pending: dict[Any, int] = {
                e.conn: rank for rank, e in enumerate(ranks) if rank not in values and rank not in failures
            }
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (pending[conn] for conn in ready):
                reply = _receive(ranks[rank])
                if isinstance(reply, _Failure):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                (failures if isinstance(reply, _Failure) else values)[rank] = reply
        if failures:
            text = "\n".join(f"rank {rank} of {len(ranks)}:\n{failures[rank].text}" for rank in sorted(failures))
            # a dead process explains the errors of its peers, never the other way round
            first = min(failures.values(), key=lambda failure: not isinstance(failure.error, RankEnded))
            raise first.error from RankTraceback(f"\n{text}")
        if len(values) < len(ranks):
            late = [rank for rank in range(len(ranks)) if rank not in values]
            raise TimeoutError(f"ranks {late} of {len(ranks)} did not finish in {timeout} s\n{_stacks(ranks, late)}")
        return [values[rank] for rank in range(len(ranks))]


def _receive(entry: _Process) -> Any:
    try:
        return pickle.loads(entry.conn.recv_bytes())
    except (EOFError, ConnectionError):
        entry.process.join(5.0)
        message = f"the process of a rank ended with exit code {entry.process.exitcode}"
        return _Failure(RankEnded(message), message)


def _stacks(ranks: list[_Process], late: list[int]) -> str:
    for rank in late:
        os.kill(ranks[rank].process.pid or 0, signal.SIGUSR1)
    time.sleep(GRACE_SECONDS)
    return "\n".join(f"rank {rank}:\n{ranks[rank].stacks.read_text()}" for rank in late)


def _serve(conn: Connection, stacks: str) -> None:
    """What a rank's process does: answer calls until the pytest process is gone."""
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        use_own_host()
        conn.send_bytes(b"")
        while True:
            try:
                call: _Call = pickle.loads(conn.recv_bytes())
                conn.send_bytes(_answer(call))
                conn.recv_bytes()
            except (EOFError, ConnectionError):
                return
            if dist.is_initialized():
                dist.destroy_process_group()
            conn.send_bytes(pickle.dumps(_left_in_collectives()))


def _left_in_collectives() -> list[tuple[int, ...]]:
    """Shapes of the tensors that the backend has not let go of."""
    exchange = sys.modules.get("shardwise.sharding.comms.exchange")
    if exchange is None or exchange.settle(SETTLE_SECONDS):
        return []
    return [tuple(tensor.shape) for tensor in exchange.in_use()]


def use_own_host() -> None:
    """All ranks are on this host, whatever its name resolves to, and each has a thread."""
    torch.set_num_threads(1)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _answer(call: _Call) -> bytes:
    try:
        sys.path[:] = call.path
        rank, world_size = str(call.rank), str(call.world_size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
        store = dist.FileStore(call.store, call.world_size)
        # later than the timeout of the call, whose report says more
        limit = timedelta(seconds=call.timeout + 30.0)
        dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.world_size, timeout=limit)
        random.seed(0)
        torch.manual_seed(0)
        fn, args = pickle.loads(call.payload)
        with poisoned():
            value = fn(*args)
        return pickle.dumps(value)
    except BaseException as error:
        text = traceback.format_exc()
        try:
            # some exceptions pickle but do not unpickle
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps(_Failure(error, text))


_pool = RankPool()
atexit.register(_pool.close)
