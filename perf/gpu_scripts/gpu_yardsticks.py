"""Yardsticks of a GPU: bandwidth of copies, reads and gathers of rows, and the latency of a load by where it hits.

A copy is the wrong roof for a gather: `gather` reads rows of 512 bytes at uniform ids out of a table of gigabytes, as
a lookup does, misses of the TLB included. `chase` is a chain of loads, each at the address that the one before gave.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels._op import runs_kernel, tl, triton
from shardwise.perf.gpu_scripts.gpu_sizes import Sizes
from shardwise.perf.suite.timing import (
    copy_bandwidth,
    four_digits,
    gb_per_s,
    graphs_of,
    spread,
    times_us,
)

ROW_BYTES = 512
# int64 from one link of a chain to the next: a line of 128 bytes
LINE = 16
KIB, GIB = 1 << 10, 1 << 30


@triton.jit(do_not_specialize=["steps"])
def _chase_kernel(links, at, steps):  # type: ignore[no-untyped-def]
    place = tl.load(at)
    for _ in range(0, steps):
        place = tl.load(links + place)
    tl.store(at, place)


def chase_ref(links: Tensor, start: int, steps: int) -> int:
    """Where a chain of so many links ends."""
    host = links.tolist()
    for _ in range(steps):
        start = host[start]
    return start


def chase(links: Tensor, at: Tensor, steps: int) -> None:
    """Follow `steps` links from place `at` [1], in place; links [n] int64, element i says where to go from i."""
    if runs_kernel(links):
        _chase_kernel[(1,)](links, at, steps, num_warps=1)
    else:
        at.fill_(chase_ref(links, int(at), steps))


def chain(nbytes: int, device: str) -> Tensor:
    """A chain through all lines of so many bytes in random order, which ends where it begins."""
    lines = max(2, nbytes // (8 * LINE))
    order = torch.randperm(lines, device=device, generator=torch.Generator(device).manual_seed(0)) * LINE
    links = torch.zeros(lines * LINE, dtype=torch.int64, device=device)
    links[order] = order.roll(-1)
    return links


def latency_ns(nbytes: int, device: str, steps: int, repeats: int) -> float:
    """Of a load of a chain through so many bytes: what three times the links take longer, over twice the links."""
    links, at = chain(nbytes, device), torch.zeros(1, dtype=torch.int64, device=device)
    # the first round brings what fits into the caches
    chase(links, at, min(links.numel() // LINE, 4 * steps))
    few, many = (
        spread(times_us([partial(chase, links, at, count)], device, repeats))["median"] for count in (steps, 3 * steps)
    )
    return four_digits(max(many - few, 0.0) * 1e3 / (2 * steps))


def _reads(device: str, nbytes: int, repeats: int) -> dict[str, Any]:
    buffers = [torch.ones(nbytes // 4, device=device) for _ in range(2)]
    us = spread(times_us([buffer.sum for buffer in buffers], device, repeats))
    return {"bytes": nbytes, "us": us, "gb_per_s": gb_per_s(nbytes, us["median"])}


def _gather(device: str, table_bytes: int, rows: int, repeats: int) -> dict[str, Any]:
    """Rows at uniform ids, each read and written once; bandwidth of both, and of the ids."""
    count = max(1, table_bytes // ROW_BYTES)
    table = torch.ones(count, ROW_BYTES // 4, device=device)
    generator = torch.Generator(device).manual_seed(0)
    ids = [torch.randint(0, count, (rows,), device=device, generator=generator) for _ in range(3)]
    out = torch.empty(rows, ROW_BYTES // 4, device=device)
    us = spread(times_us([partial(torch.index_select, table, 0, each, out=out) for each in ids], device, repeats))
    moved = rows * (2 * ROW_BYTES + 8)
    return {"table_bytes": count * ROW_BYTES, "bytes": moved, "us": us, "gb_per_s": gb_per_s(moved, us["median"])}


def _launch_us(device: str, repeats: int) -> dict[str, Any]:
    """Of a kernel that does nothing to speak of: launched, and as a node of a graph of 100 of them."""
    element = torch.zeros(1, device=device)

    def hundred() -> None:
        for _ in range(100):
            element.add_(1.0)

    eager = spread(times_us([hundred], device, repeats))["median"] / 100
    graph = spread(times_us(graphs_of([hundred]), device, repeats))["median"] / 100 if device == "cuda" else None
    return {"eager": four_digits(eager), "graph": graph if graph is None else four_digits(graph)}


def yardsticks(device: str, sizes: Sizes) -> dict[str, Any]:
    """Bandwidth in GB/s, latency of a load in ns by how much the chain goes through, launches in us."""
    large, repeats = sizes.copy_bytes, sizes.repeats
    if device == "cuda":
        # a table that no TLB covers, and a card of any size has
        table = min(16 * GIB, int(torch.cuda.mem_get_info()[0]) // 3)
        properties = torch.cuda.get_device_properties(0)
        cache = int(getattr(properties, "L2_cache_size", 50 << 20))
        chains = {"L1": 64 * KIB, "L2": min(8 << 20, cache // 4), "DRAM": min(4 * GIB, table)}
        steps = 20_000
    else:
        table, cache, chains, steps = large, 0, {"L1": 1 * KIB, "L2": 2 * KIB, "DRAM": 4 * KIB}, 50
    links, at = chain(chains["L1"], device), torch.zeros(1, dtype=torch.int64, device=device)
    chase(links, at, 101)
    expected = chase_ref(links, 0, 101)
    assert int(at) == expected, f"the chain ends at {int(at)}, not at {expected}"
    return {
        "copy": copy_bandwidth(device, large, repeats),
        "read": _reads(device, large, repeats),
        "gather": _gather(device, table, max(1, large // ROW_BYTES), repeats),
        "gather_in_l2": _gather(device, max(cache // 4, ROW_BYTES), max(1, large // ROW_BYTES), repeats),
        "latency_ns": {name: latency_ns(size, device, steps, 5) for name, size in chains.items()},
        "chain_bytes": chains,
        "launch_us": _launch_us(device, repeats),
    }
