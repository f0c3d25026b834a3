"""Gloo processes on this machine that run one function together."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def join_group(rank: int, ranks: int, store: str, *, stuck_seconds: float = 1800.0) -> None:
    """Make this process a rank of a gloo group; it gives up a peer that is silent for `stuck_seconds`."""
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in sizes.items()})
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=stuck_seconds)
    )


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any, threads: int | None = 1) -> Any:
    """The result of `work(*args)`, a top-level function, on rank 0 of so many processes that all call it."""
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = mp
        processes.spawn(_rank, (ranks, folder, threads, work, args), nprocs=ranks)
        return pickle.loads(Path(folder, "answer").read_bytes())


def _rank(rank: int, ranks: int, folder: str, threads: int | None, work: Callable[..., Any], args: Any) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    join_group(rank, ranks, f"{folder}/store")
    answer = work(*args)
    if rank == 0:
        Path(folder, "answer").write_bytes(pickle.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def of_ranks(value: Any) -> list[Any]:
    """The value of each rank; all call it together."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
