"""Check sharded training on the ranks of a process group: several GPUs over NCCL, one GPU alone, or gloo without one.

`perf/nccl_check.sh` starts a process for each GPU with torchrun; `one_card(device)` checks a process that has no group,
whose collectives run although it is the only rank. A section that fails is recorded and the others go on, each in a
process group of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.perf.counts.calls import collectives
from shardwise.perf.gpu_scripts.nccl_sections import (
    SECTIONS,
    SMALL,
    STUCK_S,
    Ranks,
    Sizes,
)
from shardwise.perf.suite import machine
from shardwise.perf.suite.options import FLAG, Options, parser_of
from shardwise.sharding.comms.env import collectives_at_one_rank, new_group

FORMAT = 1


def run(
    device: torch.device, sizes: Sizes, sections: Sequence[str], write: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Each section on all ranks of the default group; `write` gets what is known after each.

    Results are of rank 0, a failure of any.
    """
    world = dist.get_world_size()
    backend = "nccl" if device.type == "cuda" else "gloo"
    # what ranks tell each other about sections needs no GPU
    control = new_group(list(range(world)), "gloo")
    results: dict[str, Any] = {
        "format": FORMAT, "backend": backend, "ranks": world, "sizes": asdict(sizes), "sections": {},
        "machine": machine.described(device.type, torch.get_num_threads()),
    }  # fmt: skip
    for name in sections:
        group = new_group(list(range(world)), backend)
        ranks = Ranks(device, sizes, group, world // 2 if world % 2 == 0 else world)
        begin = time.perf_counter()
        record: dict[str, Any] = {"status": "ok", "result": None, "error": None}
        with collectives() as called:
            try:
                record["result"] = SECTIONS[name](ranks)
            except Exception:
                record |= {"status": "failed", "error": traceback.format_exc()[-4000:]}
        record |= {"seconds": round(time.perf_counter() - begin, 2), "collectives": called.total()}
        records: list[Any] = [None] * world
        dist.all_gather_object(records, record, group=control)
        bad = {f"rank {rank}": of_rank["error"] for rank, of_rank in enumerate(records) if of_rank["status"] != "ok"}
        results["sections"][name] = {**records[0], "status": "failed" if bad else "ok", "error": bad or None}
        results["ok"] = all(section["status"] == "ok" for section in results["sections"].values())
        if write is not None and dist.get_rank() == 0:
            write(results)
        # models hold the group
        gc.collect()
    return results


def one_card(device: torch.device | str, sizes: Sizes | None = None) -> dict[str, Any]:
    """All sections in this process alone, the only rank of a group that this makes and ends; see `run` for the result.

    Raises:
        RuntimeError: the process has a group already.
    """
    device = torch.device(device)
    if dist.is_initialized():
        raise RuntimeError("one_card makes a process group of its own: destroy_process_group() first")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder, collectives_at_one_rank():
        c10d: Any = dist
        dist.init_process_group("gloo", store=c10d.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            return run(device, sizes or (Sizes() if device.type == "cuda" else SMALL), list(SECTIONS))
        finally:
            dist.destroy_process_group()


OPTIONS: Options = {
    "--device": {"default": "cuda", "choices": ["cuda", "cpu"]},
    "--small": {**FLAG, "help": "small tables and messages"},
    "--sections": {"nargs": "+", "default": list(SECTIONS), "choices": list(SECTIONS)},
    "--out": {"type": Path, "default": Path("runs/nccl_check/nccl_check.json")},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: one process of `torchrun`."""
    given = parser_of(OPTIONS, None, "Check sharded training on the ranks that torchrun started.").parse_args(arguments)
    device = torch.device(given.device)
    if given.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * STUCK_S))

    def write(results: dict[str, Any]) -> None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(results, indent=1) + "\n")
        name, last = list(results["sections"].items())[-1]
        print(f"{name}: {last['status']}, {last['seconds']} s", flush=True)

    results = run(device, SMALL if given.small else Sizes(), given.sections, write)
    if dist.get_rank() == 0:
        for name, record in results["sections"].items():
            for rank, error in (record["error"] or {}).items():
                print(f"{name}, {rank}:\n{error}", file=sys.stderr)
    dist.destroy_process_group()
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
