"""Time calls on a GPU by CUDA events (or on a CPU), eager and as CUDA graphs, and turn times into bandwidth.

Bandwidth is the bytes that an op's module declares over the median time, and its percent of a copy measured in the
same process. Callers rotate through distinct inputs, so that caches do not flatter.

`turn` and `CudaTurns` are one side's turn in a round of the suite (perf/suite/measure.py). A turn on a CPU also tells
whether the system took a core away from it: with two threads and one other process that wants to run, a call of 0.2 ms
takes 8, which says nothing about the call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch

# involuntary switches that a turn may see for each so many seconds; a core that others want too brings one in 4 ms
SWITCH_S = 0.02


class Turn(NamedTuple):
    """Seconds of a call, the mean of those of the turn, and what the whole turn cost this thread and all of them."""

    seconds: float
    calls: int
    # how often a thread lost a core that it still wanted, and seconds on cores
    own_switches: int
    all_switches: int
    own_cpu_s: float
    all_cpu_s: float


def turn(calls: Sequence[Callable[[], object]]) -> Turn:
    """Make the calls, at least one, one after the other."""
    own_cpu, all_cpu = time.thread_time(), time.process_time()
    own, everyone = _switches()
    start = time.perf_counter()
    for call in calls:
        call()
    taken = time.perf_counter() - start
    own_after, everyone_after = _switches()
    return Turn(
        taken / len(calls), len(calls), own_after - own, everyone_after - everyone,
        time.thread_time() - own_cpu, time.process_time() - all_cpu,
    )  # fmt: skip


def disturbed(turns: Sequence[Turn | None]) -> list[int]:
    """Places of the turns of one side that lost a core.

    If its work is this thread's alone, what other threads lose does not matter: a pool of threads spins for a while
    after its work, and is often stopped then.
    """
    made = [turn for turn in turns if turn is not None]
    alone = sum(turn.all_cpu_s for turn in made) < 1.1 * sum(turn.own_cpu_s for turn in made)
    places = []
    for place, turn in enumerate(turns):
        if turn is not None:
            switches = turn.own_switches if alone else turn.all_switches
            if switches > turn.seconds * turn.calls / SWITCH_S:
                places.append(place)
    return places


def _switches() -> tuple[int, int]:
    """How often this thread, and all threads of the process, lost a core; zeros where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0, 0
    everyone = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    thread = getattr(resource, "RUSAGE_THREAD", None)
    return (resource.getrusage(thread).ru_nivcsw if thread is not None else everyone), everyone


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage is collected in between."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class CudaTurns:
    """Turns on a GPU, by events around one call each.

    A buffer of four times the cache is read before each: written, its lines would have to leave the cache at the
    expense of the call. An eager call begins on an idle GPU, so its launches count; the replay of a graph is queued
    behind the read, so the GPU's time alone counts.
    """

    def __init__(self) -> None:
        cuda: Any = torch.cuda
        cache = getattr(cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
        self._flush = torch.zeros(max(4 * cache, 256 << 20) // 4, device="cuda")
        self._read = torch.zeros((), device="cuda")
        self._pending: list[tuple[Any, Any]] = []

    def begin(self, call: Callable[[], object], eager: bool) -> None:
        """Queue a turn."""
        cuda: Any = torch.cuda
        begins, ends = (cuda.Event(enable_timing=True) for _ in range(2))
        torch.sum(self._flush, dim=0, out=self._read)
        if eager:
            cuda.synchronize()
        begins.record()
        call()
        ends.record()
        self._pending.append((begins, ends))

    def finish(self) -> list[float]:
        """Seconds of all turns since the last finish, in order."""
        torch.cuda.synchronize()
        taken = [begins.elapsed_time(ends) / 1e3 for begins, ends in self._pending]
        self._pending.clear()
        return taken


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


def graphs_of(calls: Sequence[Callable[[], object]], pool: Any = None) -> list[Callable[[], object]]:
    """Each call as the replay of a CUDA graph; graphs of one `pool` share memory, and none may read another's."""
    cuda: Any = torch.cuda
    replays: list[Callable[[], object]] = []
    for call in calls:
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            call()
        cuda.current_stream().wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=pool):
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


def copy_bandwidth(device: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """Read plus write of a copy between two buffers, larger than any cache."""
    pairs = [[torch.zeros(nbytes // 4, device=device) for _ in range(2)] for _ in range(2)]
    times = times_us([partial(p[0].copy_, p[1]) for p in pairs], device, repeats)
    return {
        "bytes": 2 * nbytes,
        "us": spread(times),
        "gb_per_s": gb_per_s(2 * nbytes, spread(times)["median"]),
    }
