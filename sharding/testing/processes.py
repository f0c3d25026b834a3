"""Functions on ranks of this host, a process each, for unit tests and benchmarks, by TorchRec's names.

A rank that fails ends the others: the test fails at once, with the traceback of each rank that failed of itself.
TorchRec's run on until a collective times out. A rank's process has the parent's environment and `sys.path` as they are
at the call, under any start method, and what stands in for torchrec in the parent does so in it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from shardwise._installed import STAND_INS

from ..comms.exchange import part
from .environment import get_free_port, init_distributed_single_host, seed_and_log

# how long the other ranks may take to fail by themselves after the first failure
_GRACE_SECONDS = 1.0
# of torchrun: where ranks meet, and which of them a process is
REQUIRED_ENV_VARS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RanksFailed(RuntimeError):
    """Says of each rank that failed by itself what it printed last."""


class MultiProcessContext:
    """A rank's device and process group, while the block runs: `rank`, `world_size`, `device` and `pg`.

    The device is cuda:rank where there are that many, else the CPU. torch's algorithms are deterministic inside, unless
    `use_deterministic_algorithms` is False; `disable_cuda_tf_32` has products of fp32 on CUDA exact.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        local_size: int | None = None,
        use_deterministic_algorithms: bool = True,
        disable_cuda_tf_32: bool = True,
    ) -> None:
        self.rank, self.world_size, self.backend, self.local_size = rank, world_size, backend, local_size
        self.disable_cuda_tf_32 = disable_cuda_tf_32
        self._tf32 = (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
        self.device = torch.device("cpu")
        if torch.cuda.is_available() and world_size <= torch.cuda.device_count():
            self.device = torch.device(f"cuda:{rank}")
            torch.cuda.set_device(self.device)
        if disable_cuda_tf_32 or use_deterministic_algorithms:
            _set_tf32(False)
        if use_deterministic_algorithms:
            torch.use_deterministic_algorithms(True)
        self.pg: dist.ProcessGroup | None = None

    def __enter__(self) -> MultiProcessContext:
        self.pg = init_distributed_single_host(self.rank, self.world_size, self.backend, self.local_size)
        return self

    def __exit__(self, *error: object) -> None:
        _leave_groups(self.pg, error)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = self._tf32


class SingleProcessContext:
    """The rank that torchrun's variables make of this process, while the block runs, with a process group.

    `backend` is nccl with CUDA and gloo without, unless given. `rank`, `world_size`, `local_rank`, `device` and `pg`
    as in `MultiProcessContext`; the device is cuda:local_rank.
    """

    def __init__(self, backend: str | None = None, disable_cuda_tf_32: bool = True) -> None:
        self.rank, self.world_size, self.local_rank = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        )
        self.backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self.disable_cuda_tf_32 = disable_cuda_tf_32
        self._tf32 = (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device(f"cuda:{self.local_rank}")
            torch.cuda.set_device(self.device)
        if disable_cuda_tf_32:
            _set_tf32(False)
        self.pg: dist.ProcessGroup | None = None

    def __enter__(self) -> SingleProcessContext:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(backend=self.backend)
        self.pg = dist.group.WORLD
        return self

    def __exit__(self, *error: object) -> None:
        _leave_groups(self.pg, error)
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = self._tf32


class MultiProcessTestBase(unittest.TestCase):
    """A test case whose tests call functions on ranks: `self._run_multi_process_test(callable=..., world_size=2)`.

    `mp_init_mode` is how processes start; "spawn" in its stead with CUDA from 12.8 on, with ROCm, and from Python 3.14
    on. Every test has a port of its own and a new seed, which is printed.
    """

    def __init__(self, methodName: str = "runTest", mp_init_mode: str = "forkserver") -> None:
        super().__init__(methodName)
        cuda = [int(part) for part in (torch.version.cuda or "0.0").split(".")[:2]]
        spawns = cuda >= [12, 8] or torch.version.hip is not None or sys.version_info >= (3, 14)
        self._mp_init_mode = "spawn" if spawns else mp_init_mode

    @seed_and_log
    def setUp(self) -> None:
        """A place to meet for the ranks, and algorithms that are deterministic."""
        _set_meeting_place()
        os.environ["NCCL_DEBUG"] = "WARN"
        _set_deterministic(True)

    def tearDown(self) -> None:
        """As before `setUp`."""
        torch.use_deterministic_algorithms(False)
        for name in ("GLOO_DEVICE_TRANSPORT", "NCCL_SOCKET_IFNAME", "CUBLAS_WORKSPACE_CONFIG"):
            os.environ.pop(name, None)
        super().tearDown()

    def _run_multi_process_test(self, *, callable: Callable[..., None], world_size: int = 2, **kwargs: Any) -> None:
        """Call `callable(rank=rank, world_size=world_size, **kwargs)` on every rank; fails if one of them does."""
        self._run_multi_process_test_per_rank(
            callable=callable, world_size=world_size, kwargs_per_rank=[kwargs] * world_size
        )

    def _run_multi_process_test_per_rank(
        self, *, callable: Callable[..., None], world_size: int, kwargs_per_rank: list[dict[str, Any]]
    ) -> None:
        """The same with arguments of each rank's own."""
        calls = [
            (callable, {**kwargs, "rank": rank, "world_size": world_size})
            for rank, kwargs in enumerate(kwargs_per_rank[:world_size])
        ]
        try:
            _call_on_ranks(calls, self._mp_init_mode)
        except RanksFailed as failed:
            message = f"Detected at least one unsuccessful run, example errors are: \n{failed}"
            raise self.failureException(message) from None


def run_multi_process_func(
    func: Callable[..., Any],
    multiprocessing_method: str = "spawn",
    use_deterministic_algorithms: bool = True,
    world_size: int = 2,
    **kwargs: Any,
) -> list[Any]:
    """What `func(rank=rank, world_size=world_size, **kwargs)` returns on each rank; a single rank is this process.

    Raises:
        RanksFailed: a rank failed; its message has the tracebacks.
    """
    _set_meeting_place()
    _set_deterministic(use_deterministic_algorithms)
    if world_size == 1:
        return [func(**kwargs, rank=0, world_size=1)]
    calls = [(func, {**kwargs, "rank": rank, "world_size": world_size}) for rank in range(world_size)]
    return _call_on_ranks(calls, multiprocessing_method, deterministic=use_deterministic_algorithms)


def run_single_process_func(
    func: Callable[..., Any],
    *,
    backend: str | None = None,
    use_deterministic_algorithms: bool = False,
    disable_cuda_tf_32: bool = True,
    **kwargs: Any,
) -> Any:
    """What `func(ctx=..., rank=..., world_size=..., **kwargs)` returns on the rank that torchrun made this process.

    `ctx` is the `SingleProcessContext`, whose process group is ready.

    Raises:
        RuntimeError: variables of torchrun are missing; names them.
    """
    check_required_env_vars()
    _set_deterministic(use_deterministic_algorithms)
    try:
        with SingleProcessContext(backend, disable_cuda_tf_32) as ctx:
            return func(**kwargs, ctx=ctx, rank=ctx.rank, world_size=ctx.world_size)
    finally:
        torch.use_deterministic_algorithms(False)


def run_local_multi_process_func(
    func: Callable[..., Any],
    *,
    world_size: int = 2,
    backend: str | None = None,
    use_deterministic_algorithms: bool = False,
    multiprocessing_method: str = "spawn",
    **kwargs: Any,
) -> list[Any]:
    """`run_single_process_func` on ranks of this host, as torchrun would start them; a single rank is this process.

    Raises:
        RanksFailed: a rank failed; its message has the tracebacks.
    """
    _set_meeting_place()
    more = {"backend": backend, "use_deterministic_algorithms": use_deterministic_algorithms, **kwargs}
    calls = [
        (_as_torchrun, {"func": func, "rank": rank, "world_size": world_size, **more}) for rank in range(world_size)
    ]
    if world_size == 1:
        [(call, arguments)] = calls
        return [call(**arguments)]
    return _call_on_ranks(calls, multiprocessing_method)


def _leave_groups(pg: dist.ProcessGroup | None, error: tuple[object, ...]) -> None:
    """Destroy all groups, those of hosts too, once every rank is done with them.

    The first rank serves the store by which another one may still be making a group. A rank that failed waits for
    nobody; those that wait for it go on when its connections close.
    """
    if error[0] is None:
        part(pg)
    dist.destroy_process_group()


def check_required_env_vars() -> None:
    """RuntimeError unless this process has the variables of torchrun; names those that are missing."""
    if missing := [name for name in REQUIRED_ENV_VARS if name not in os.environ]:
        raise RuntimeError(
            f"torchrun's variables are missing: {missing}. Start this process by torchrun, or call"
            " run_local_multi_process_func, which starts ranks itself"
        )


def _as_torchrun(func: Callable[..., Any], rank: int, world_size: int, **more: Any) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    return run_single_process_func(func, **more)


def _set_meeting_place() -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(get_free_port()))
    os.environ.update(GLOO_DEVICE_TRANSPORT="TCP", NCCL_SOCKET_IFNAME="lo")


def _set_deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on)
    if on and torch.cuda.is_available():
        _set_tf32(False)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def _set_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed


def _call_on_ranks(
    calls: Sequence[tuple[Callable[..., Any], dict[str, Any]]], start_method: str, *, deterministic: bool = False
) -> list[Any]:
    """What each call returns, in a process of its own; RanksFailed soon after the first one fails."""
    context: Any = multiprocessing.get_context(start_method)
    # a torchrec that is ours is so for the children, whatever they unpickle
    ours = "+shardwise" in str(getattr(sys.modules.get("torchrec"), "__version__", ""))
    path = [*([str(STAND_INS)] if ours else []), *sys.path]
    ends: list[Connection] = []
    processes = []
    try:
        for call in calls:
            end, theirs = context.Pipe(duplex=False)
            arguments = (theirs, dict(os.environ), path, pickle.dumps(call), deterministic)
            processes.append(context.Process(target=_answer, args=arguments))
            ends.append(end)
            processes[-1].start()
            theirs.close()
        return _collect(ends, processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join()


def _collect(ends: Sequence[Connection], processes: Sequence[Any]) -> list[Any]:
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline: float | None = None
    while len(values) + len(failures) < len(ends):
        pending: dict[Any, int] = {
            end: rank for rank, end in enumerate(ends) if rank not in values and rank not in failures
        }
        ready = wait(list(pending), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in (pending[end] for end in ready):
            try:
                succeeded, reply = ends[rank].recv()
            except (EOFError, ConnectionError):
                processes[rank].join()
                succeeded, reply = False, f"its process ended with exit code {processes[rank].exitcode}"
            (values if succeeded else failures)[rank] = reply
            if not succeeded and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
    if failures:
        parts = [f"rank {rank} of {len(ends)}:\n{failures[rank]}" for rank in sorted(failures)]
        if stopped := [rank for rank in range(len(ends)) if rank not in values and rank not in failures]:
            parts.append(f"ranks {stopped} were still running and have been ended")
        raise RanksFailed("\n".join(parts))
    return [values[rank] for rank in range(len(ends))]


def _answer(end: Connection, environment: dict[str, str], path: list[str], call: bytes, deterministic: bool) -> None:
    """What a rank's process does."""
    # a fork server's children have the environment of its start
    os.environ.update(environment)
    sys.path[:] = path
    try:
        if deterministic:
            _set_deterministic(True)
        func, kwargs = pickle.loads(call)
        reply = pickle.dumps((True, func(**kwargs)))
    except BaseException as error:
        text = traceback.format_exc()
        reply = pickle.dumps((False, f"Worker raised {type(error).__name__}: {error}\n{text}"))
    # the parent may have given up on this rank
    with suppress(BrokenPipeError):
        end.send_bytes(reply)
