"""How fast rows come from a file that the page cache does not hold, beside what its disk can do.

The disk's own rate are reads of 4 KB at random places past the page cache (O_DIRECT), by 1, 4, 16 and 64 threads. Then
come records of several sizes through `FileRecords`, one thread: cold, after all of the file was dropped from the page
cache; warm; and read without asking the disk ahead. 1 of 400 rows of the file are taken, at most. Cold reads are
compared with the disk in pages of 4 KB, of which a record may touch two: one of 1,536 bytes lies on 1.25 on average.
Two neighbouring pages can come by one request, and so by more than the disk's rate. Less than 70 % of that are not as
it has to be. Needs Linux, numba and `--gib` of space in `--folder`.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.embeddings.tiers import FileRecords, files
from shardwise.kernels import read_file_rows
from shardwise.perf.evidence.report import Report, grid, versions
from shardwise.perf.suite.options import Options

BOUND, PAGE, THREADS = 0.7, 4096, (1, 4, 16, 64)
SIZES = (512, 1536, 4096)


def disk_rates(folder: Path, nbytes: int, reads: int) -> dict[int, float]:
    """Reads of 4 KB a second that the disk gives so many threads."""
    with tempfile.NamedTemporaryFile(dir=folder) as named:
        piece = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8).numpy().tobytes()
        for _ in range(nbytes >> 24):
            os.write(named.fileno(), piece)
        os.fsync(named.fileno())
        file = os.open(named.name, os.O_RDONLY | os.O_DIRECT)
        # memory of whole pages, as O_DIRECT asks
        out = torch.frombuffer(mmap.mmap(-1, reads * PAGE), dtype=torch.uint8).view(reads, PAGE)
        rates = {}
        for threads in THREADS:
            rows = some_rows(nbytes // PAGE, reads)
            parts = [*zip(rows.chunk(threads), out.chunk(threads), strict=True)]
            with ThreadPoolExecutor(threads) as pool:

                def read(part: tuple[Tensor, Tensor]) -> None:
                    assert read_file_rows(file, *part) == part[0].numel()

                seconds = seconds_of(lambda: [*pool.map(read, parts)])  # noqa: B023
            rates[threads] = reads / seconds
        os.close(file)
    return rates


def record_rates(folder: Path, nbytes: int, size: int, calls: int, turns: int) -> dict[str, float]:
    """Rows a second of `FileRecords`: medians of the turns."""
    rows = nbytes // size
    n = min(calls, rows // 400)
    records = FileRecords(rows, size, folder, name="evidence")
    for part in torch.split(torch.arange(rows), (1 << 26) // size):
        records.write(part, torch.randint(0, 256, (part.numel(), size), dtype=torch.uint8))
    out = torch.zeros(n, size, dtype=torch.uint8)
    rates: dict[str, list[float]] = {}

    def measure(what: str, move: Callable[[Tensor, Tensor], None], *, cold: bool) -> None:
        taken = some_rows(rows, n)
        if cold:
            file = records._file.fileno()
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            move(taken, out)
        rates.setdefault(what, []).append(n / seconds_of(lambda: move(taken, out)))

    for _ in range(turns):
        measure("read, cold", records.read, cold=True)
        with patch.object(files, "ask_file_rows", lambda *args, **kwargs: None):
            measure("read, cold, not asked ahead", records.read, cold=True)
        measure("read, warm", records.read, cold=False)
        measure("write, cold", records.write, cold=True)
        measure("write, warm", records.write, cold=False)
    records.close()
    return {what: statistics.median(of_turns) for what, of_turns in rates.items()}


def pages_of(size: int) -> float:
    """Pages of 4 KB that a record of so many bytes lies on, the mean over a file of them."""
    # after so many records they begin at the same places of a page again
    begins = torch.arange(PAGE) * size % PAGE
    return 1 + float(((begins + size - 1) // PAGE).double().mean())


def some_rows(rows: int, n: int) -> Tensor:
    """Distinct rows at random, ascending."""
    distinct: Tensor = torch.unique(torch.randint(0, rows, (2 * n,)))
    return distinct[torch.randperm(distinct.numel())[:n]].sort().values


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


OPTIONS: Options = {
    "--folder": {"type": Path, "default": Path("."), "help": "on the disk that is measured"},
    "--gib": {"type": int, "default": 4, "help": "of the file"},
    "--rows": {"type": int, "default": 20_000, "help": "of a call"},
    "--turns": {"type": int, "default": 5},
}


def run(options: argparse.Namespace) -> Report:
    """Measure and print."""
    torch.manual_seed(0)
    nbytes = options.gib << 30
    disk = disk_rates(options.folder, nbytes, options.rows)
    best = max(disk.values())
    measured = {size: record_rates(options.folder, nbytes, size, options.rows, options.turns) for size in SIZES}
    share = {size: pages_of(size) * rates["read, cold"] / best for size, rates in measured.items()}
    lines = [
        f"{versions()}, load {os.getloadavg()[0]:.1f}; a file of {options.gib} GiB, calls of {options.rows:,} rows",
        "",
        *grid(["threads", *map(str, THREADS)], [["reads of 4 KB past the page cache, k/s", *map(_k, disk.values())]]),
        "",
        *grid(
            ["k rows/s, one thread", *(f"{size} B" for size in SIZES)],
            [
                *([what, *(_k(measured[size][what]) for size in SIZES)] for what in measured[SIZES[0]]),
                ["pages of 4 KB that a record lies on", *(f"{pages_of(size):.3f}" for size in SIZES)],
                ["pages of cold reads, share of the disk's best", *(f"{share[size]:.0%}" for size in SIZES)],
            ],
        ),
    ]
    return Report("\n".join(lines) + "\n", min(share.values()) >= BOUND)


def _k(rate: float) -> str:
    return f"{rate / 1e3:.1f}"
