"""Bandwidths of memory, measured: copies, rows gathered at random places as lookups do, and copies to and from GPUs.

Medians of some calls with their tenth and ninetieth percentile, in GB/s (1e9 bytes). A copy counts its reads and its
writes, a gather the rows that it reads and writes, a copy between devices the bytes that cross.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ..suite import machine
from ..suite.timing import four_digits, times_us
from .findings import NOTE, OK, UNTESTED, Finding

MIB = 1 << 20
# beyond the caches of most machines; and a table whose rows are 256 bytes
COPY_BYTES, TABLE_BYTES, DIM = 128 * MIB, 256 * MIB, 64
# ids of a gather, 51 MB of rows
IDS = 200_000
CROSSING_BYTES = 64 * MIB
# calls of a measurement at most, and seconds after which it makes no more
REPEATS, SECONDS = 15, 1.0


def bandwidths(devices: Sequence[str]) -> Iterator[Finding]:
    """Of the CPU, then of each GPU among the devices."""
    for device in devices:
        if device == "cpu":
            yield from _of_memory("CPU", "cpu")
        else:
            here = torch.device(device)
            with torch.cuda.device(here):
                yield from _of_memory(f"GPU {here.index}", device)
                yield from _crossings(f"GPU {here.index}", here)


def _of_memory(name: str, device: str) -> Iterator[Finding]:
    """A copy and a gather within the memory of a device."""
    free = machine.memory_bytes("cpu" if device == "cpu" else "cuda")
    least = 4 * COPY_BYTES + 2 * TABLE_BYTES
    if free is not None and free < 2 * least:
        text = f"{free // MIB} MiB are free, and it takes {2 * least // MIB}"
        yield Finding(UNTESTED, f"{name}, memory", text, "end what else uses the memory, and run it again")
        return
    pairs = [[torch.ones(COPY_BYTES // 4, device=device) for _ in range(2)] for _ in range(2)]
    copies = [partial(to.copy_, source) for to, source in pairs]
    threads = torch.get_num_threads()
    by = f" by {threads} thread{'s' * (threads != 1)}" if device == "cpu" else ""
    yield _finding(f"{name}, copy", 2 * COPY_BYTES, _times(copies, device), f"{COPY_BYTES // MIB} MiB{by}")
    del pairs, copies
    table = torch.ones(TABLE_BYTES // 4 // DIM, DIM, device=device)
    ids = [torch.randint(len(table), (IDS,), device=device) for _ in range(3)]
    out = torch.empty(IDS, DIM, device=device)
    gathers = [partial(torch.index_select, table, 0, index, out=out) for index in ids]
    details = f"{IDS:,} rows of {4 * DIM} bytes at random, of {TABLE_BYTES // MIB} MiB"
    yield _finding(f"{name}, gather", 2 * out.nbytes, _times(gathers, device), details)


def _crossings(name: str, device: torch.device) -> Iterator[Finding]:
    """Copies between the host's memory and a GPU's."""
    there = torch.empty(CROSSING_BYTES, dtype=torch.uint8, device=device)
    pinned = torch.empty(CROSSING_BYTES, dtype=torch.uint8, pin_memory=True)
    paged = torch.ones(CROSSING_BYTES, dtype=torch.uint8)
    for direction, to, source in (
        ("host to GPU, pinned", there, pinned), ("GPU to host, pinned", pinned, there),
        ("host to GPU, not pinned", there, paged),
    ):  # fmt: skip
        times = _times([partial(to.copy_, source, non_blocking=True)], str(device))
        yield _finding(f"{name}, {direction}", CROSSING_BYTES, times, f"{CROSSING_BYTES // MIB} MiB")


def _times(calls: Sequence[Callable[[], object]], device: str) -> list[float]:
    """Microseconds of each call, of as many as fit the time."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < REPEATS and (not times or time.perf_counter() - begin < SECONDS):
        # each round warms up by a call of each
        times += times_us(calls, device, 5)
    return times


def _finding(subject: str, nbytes: int, times: Sequence[float], details: str) -> Finding:
    rates = sorted(nbytes / us / 1e3 for us in times)
    low, mid, high = (four_digits(rates[round(q * (len(rates) - 1))]) for q in (0.1, 0.5, 0.9))
    text = f"{mid:.3g} GB/s ({low:.3g} to {high:.3g}); {details}"
    data = {"gb_per_s": mid, "p10": low, "p90": high, "calls": len(rates), "bytes": nbytes}
    if high > 2 * low:
        text += ". It varies: something else runs here"
        return Finding(NOTE, subject, text, "run it again when nothing else runs, before numbers are compared", data)
    return Finding(OK, subject, text, data=data)
