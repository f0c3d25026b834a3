"""The loops that numba compiles for this processor, before training, so that no step is timed that waits for them.

Compiled loops are kept on disk, in `__pycache__` beside the sources or in `$NUMBA_CACHE_DIR`, so each machine waits for
them once. Ranks of a machine share the work: each compiles other loops, and then loads those of the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from arguments import Options
from model import OPTIMIZERS, build_dlrm

from shardwise import KeyedJaggedTensor, apply_optimizer_in_backward
from shardwise._version import how_to_install
from shardwise.inference import quantize_inference_model
from shardwise.kernels import numba_loops, permute_2d

CPU = torch.device("cpu")
FEATURES = {"one": 8, "other": 8}


def compile_loops(args: Options, device: torch.device) -> str:
    """Have every loop that the run needs; all ranks call this together. What was done, in a sentence."""
    if not numba_loops.compiles():
        return f"loops: none, torch does the work; numba makes it faster: {how_to_install('cpu')}"
    from numba.core import event

    works: list[Callable[[], None]] = [_quantize]
    if device.type == "cpu":
        works = [partial(_train, args), _quantize, _move]
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    begin = time.perf_counter()
    # has an entry for each function that is compiled, and none for what is loaded
    with event.install_recorder("numba:compile") as compiled:
        for number, work in enumerate(works):
            if _owner(number, ranks) == local:
                work()
        dist.barrier()
        # those of the other ranks are loaded; where nothing can be kept they are compiled here after all
        for work in works:
            work()
    count = torch.tensor([len(compiled.buffer)], device=device)
    dist.all_reduce(count)
    seconds = time.perf_counter() - begin
    if int(count):
        return f"loops: compiled for this processor in {seconds:.0f} s, and kept for the next run"
    return f"loops: an earlier run compiled them, loaded in {seconds:.1f} s"


def _owner(number: int, ranks: int) -> int:
    """There and back again, since the longest work comes first: 0 1 1 0 of two ranks."""
    place = number % (2 * ranks)
    return min(place, 2 * ranks - 1 - place)


def _batch() -> KeyedJaggedTensor:
    ids, lengths = torch.arange(12) % 8, torch.tensor([2, 0, 4, 1, 2, 3])
    return KeyedJaggedTensor(list(FEATURES), ids, lengths=lengths)


def _train(args: Options) -> None:
    """Lookups, their backward, and the update by the run's optimizer, on two small tables."""
    tables = build_dlrm(FEATURES, 2, args.dim, CPU).model.sparse_arch.embedding_bag_collection
    apply_optimizer_in_backward(OPTIMIZERS[args.optimizer][0], tables.parameters(), {"lr": args.lr})
    tables(_batch()).values().sum().backward()


def _quantize() -> None:
    """int8 tables, and lookups of them."""
    model = build_dlrm(FEATURES, 2, 8, CPU)
    quantize_inference_model(model)
    with torch.no_grad():
        model.model(torch.zeros(3, 2), _batch())


def _move() -> None:
    """How batches are cut and put together on their way between ranks."""
    batch = _batch()
    permute_2d(torch.tensor([1, 0]), batch.lengths().view(2, 3), batch.values())
