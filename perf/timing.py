"""Time calls on a GPU by CUDA events (or on a CPU), eager and as CUDA graphs, and turn times into bandwidth.

Bandwidth is the bytes that an op's module declares over the median time, and its percent of a copy measured in the
same process. Callers rotate through distinct inputs, so that caches do not flatter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch


def times_us(calls: Sequence[Callable[[], object]], device: str, repeats: int) -> list[float]:
    """Time of each of `repeats` calls, taken in turn from `calls` after a warm-up of each."""
    for call in calls:
        call()
    if device == "cpu":
        taken = []
        for call in islice(cycle(calls), repeats):
            start = time.perf_counter()
            call()
            taken.append((time.perf_counter() - start) * 1e6)
        return taken
    torch.cuda.synchronize()
    cuda: Any = torch.cuda
    events = [[cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for call, (begins, ends) in zip(cycle(calls), events, strict=False):
        begins.record()
        call()
        ends.record()
    cuda.synchronize()
    return [begins.elapsed_time(ends) * 1e3 for begins, ends in events]


def graphs_of(calls: Sequence[Callable[[], object]]) -> list[Callable[[], object]]:
    """Each call as the replay of a CUDA graph."""
    cuda: Any = torch.cuda
    replays: list[Callable[[], object]] = []
    for call in calls:
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            call()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            call()
        replays.append(graph.replay)
    return replays


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile."""
    ordered = sorted(times)
    at = {"median": 0.5, "p10": 0.1, "p90": 0.9}
    return {name: round(ordered[round(q * (len(ordered) - 1))], 2) for name, q in at.items()}


def four_digits(number: float) -> float:
    """As precise as a time is."""
    return float(f"{number:.4g}")


def gb_per_s(bytes_moved: float, us: float) -> float:
    """Bandwidth in GB/s (1e9 bytes)."""
    return four_digits(bytes_moved / us / 1e3)


def measure(
    calls: Sequence[Callable[[], object]], bytes_moved: float, device: str, repeats: int, copy_gb_s: float
) -> dict[str, Any]:
    """Times of eager calls and of graph replays, and the bandwidth of the better median."""
    record: dict[str, Any] = {"bytes": int(bytes_moved), "eager_us": spread(times_us(calls, device, repeats))}
    best = record["eager_us"]["median"]
    if device == "cuda":
        try:
            record["graph_us"] = spread(times_us(graphs_of(calls), device, repeats))
            best = min(best, record["graph_us"]["median"])
        except Exception as error:
            record["graph_error"] = repr(error)[:500]
            torch.cuda.synchronize()
    record["gb_per_s"] = gb_per_s(bytes_moved, best)
    record["percent_of_copy"] = four_digits(100 * record["gb_per_s"] / copy_gb_s)
    return record


def copy_bandwidth(device: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """Read plus write of a copy between two buffers, larger than any cache."""
    pairs = [[torch.zeros(nbytes // 4, device=device) for _ in range(2)] for _ in range(2)]
    times = times_us([partial(p[0].copy_, p[1]) for p in pairs], device, repeats)
    return {
        "bytes": 2 * nbytes,
        "us": spread(times),
        "gb_per_s": gb_per_s(2 * nbytes, spread(times)["median"]),
    }
