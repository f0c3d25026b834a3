"""A table of 16 GiB, its rows in a file, trains under a memory limit of 2 GiB; how fast, and how near to its disk.

The table is made on meta: a row has its first values when it is first wanted, and nothing is written at the start. A
process of its own under the limit trains it, rowwise Adagrad on 128 columns, three ways:

- filling: batches of neighbouring rows until all were wanted (`--fill-gib`), so that the file is written;
- random rows of those, of which the page cache holds none: it is dropped every few steps, off the clock;
- the same batches again and again, whose rows stay in their slots: what a step takes without a disk.

Random rows are trained by a plain loop, whose step is compute and disk one after the other, and by
`PrefetchTrainPipelineSparseDist(prefetch=2)`, which overlaps them. Not as it has to be: the process is killed; cold
rows come at less than 70 % of what the disk gives (O_DIRECT, the best of 1 to 64 threads); a step with prefetch takes
more than 1.1 x max(compute, disk).

The limit is of a memory cgroup where `--cgroup` names a folder (v1 or v2) in which this user may make one: page cache
counts. Else it is RLIMIT_DATA: memory that the process allocates. `--write` keeps the result in
`perf/results/tier_larger.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PrefetchTrainPipelineSparseDist,
    RowWiseAdagrad,
    Tier,
    apply_optimizer_in_backward,
    cache_metrics,
    tiered,
)
from shardwise.embeddings.tiers import CachedRows, FileRecords
from shardwise.perf.evidence.report import ROOT, Report, Section, grid, report_of, versions
from shardwise.perf.evidence.tiers.file_rows import disk_rates
from shardwise.perf.suite.options import Options

RESULT = ROOT / "perf" / "results" / "tier_larger.json"
# a record: 128 columns of fp32 and one number of the optimizer, in multiples of 64 bytes
DIM, RECORD_BYTES = 128, 576
BATCH, POOLED, FILLED_AT_ONCE, SLOTS = 1024, 4, 65_536, 262_144
# steps between drops of the page cache
DROPPED_EVERY, STEPS_A_TURN, LAYERS = 10, 20, 1024
COLD_BOUND, OVERLAP_BOUND = 0.7, 1.1


class Model(nn.Module):
    """A table, and layers that take about as long as its rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        config = EmbeddingBagConfig(rows, DIM, "item", feature_names=["item"])
        self.tables = EmbeddingBagCollection([config], device="meta")
        apply_optimizer_in_backward(RowWiseAdagrad, self.tables.parameters(), {"lr": 0.01})
        self.over = nn.Sequential(
            nn.Linear(DIM, LAYERS), nn.ReLU(), nn.Linear(LAYERS, LAYERS), nn.ReLU(), nn.Linear(LAYERS, 1)
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """The mean square, twice."""
        loss = self.over(self.tables(features).values()).square().mean()
        return loss, loss.detach()


class Run:
    """Training in the process under the limit."""

    def __init__(self, rows: int, filled: int, folder: Path) -> None:
        # those that were wanted once
        self.filled = filled
        tier = Tier(SLOTS, "file", str(folder))
        self.model = tiered(Model(rows), {"item": tier}, device="cpu")
        self.dense = torch.optim.SGD(self.model.get_submodule("over").parameters(), lr=0.01)

    def fill(self) -> dict[str, float]:
        """Have these rows written: what does not fit into the slots goes to the file."""
        begin = time.monotonic()
        for rows in torch.split(torch.arange(self.filled), FILLED_AT_ONCE):
            # one bag: the layers have next to nothing to do
            self._train(batch_of(rows, 1))
        saves = cache_metrics(self.model)["item"].saves
        return {"seconds": time.monotonic() - begin, "rows_written": saves}

    def steps(self, count: int, batches: Iterator[KeyedJaggedTensor], *, prefetch: int) -> dict[str, float]:
        """Milliseconds of a step, the median, with `prefetch` 0 of a plain loop; and the rows that came from below."""
        step: Callable[[], object] = lambda: self._train(next(batches))  # noqa: E731
        if prefetch:
            pipeline: Any = PrefetchTrainPipelineSparseDist(self.model, self.dense, "cpu", prefetch=prefetch)
            step = lambda: pipeline.progress(batches)  # noqa: E731
        before, times = cache_metrics(self.model), []
        for number in range(count):
            if number % DROPPED_EVERY == 0:
                self._drop()
            begin = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - begin))
        metrics = cache_metrics(self.model, since=before)["item"]
        return {
            "step_ms": statistics.median(times),
            "mean_ms": statistics.fmean(times),
            "loads": metrics.loads / count,
            "saves": metrics.saves / count,
        }

    def _train(self, batch: KeyedJaggedTensor) -> None:
        self.dense.zero_grad()
        loss, _ = self.model(batch)
        loss.backward()
        self.dense.step()

    def _drop(self) -> None:
        """Have the page cache hold nothing of the file."""
        for store in self.model.get_submodule("tables").cached_stores():  # type: ignore[operator]
            assert isinstance(store, CachedRows)
            for below in store.below:
                assert isinstance(below, FileRecords)
                file = below._file.fileno()
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def batch_of(ids: Tensor, samples: int) -> KeyedJaggedTensor:
    """Bags of as many ids each."""
    return KeyedJaggedTensor(["item"], ids, lengths=torch.full((samples,), len(ids) // samples))


def random_batches(rows: int, seed: int) -> Iterator[KeyedJaggedTensor]:
    """Any of so many rows, all alike: a cache has next to none of them."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield batch_of(torch.randint(0, rows, (BATCH * POOLED,), generator=draw), BATCH)


def cold_rate(run: Run, reads: int) -> float:
    """Rows a second that come from the file alone, one thread, none of them in the page cache."""
    (store,) = run.model.get_submodule("tables").cached_stores()  # type: ignore[operator]
    (below,) = store.below
    rates: list[float] = []
    for seed in range(3):
        drawn = torch.randint(0, run.filled, (reads,), generator=torch.Generator().manual_seed(seed))
        rows: Tensor = torch.unique(drawn)
        out = torch.zeros(rows.numel(), RECORD_BYTES, dtype=torch.uint8)
        run._drop()
        begin = time.perf_counter()
        below.read(rows, out)
        rates.append(rows.numel() / (time.perf_counter() - begin))
    return statistics.median(rates)


def child(given: argparse.Namespace) -> None:
    """What runs under the limit."""
    if given.limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (given.limit_bytes, given.limit_bytes))
    torch.set_num_threads(1)
    run = Run(given.rows, given.filled, given.folder)
    result: dict[str, Any] = {"start": memory_gib()}
    same = next(random_batches(given.filled, 0))
    result["fill"] = run.fill()
    # in turns, as other jobs of the machine come and go
    rounds: dict[str, list[dict[str, float]]] = {"hits": [], "plain": [], "prefetch": []}
    for turn in range(max(1, given.steps // STEPS_A_TURN)):
        rounds["hits"].append(run.steps(STEPS_A_TURN // 4, repeat(same), prefetch=0))
        rounds["plain"].append(run.steps(STEPS_A_TURN // 2, random_batches(given.filled, 2 * turn), prefetch=0))
        ahead = islice(random_batches(given.filled, 2 * turn + 1), STEPS_A_TURN)
        rounds["prefetch"].append(run.steps(STEPS_A_TURN, ahead, prefetch=2))
    for what, turns in rounds.items():
        result[what] = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    result["cold_rows_a_second"] = cold_rate(run, 16_384)
    result["end"] = memory_gib()
    given.out.write_text(json.dumps(result))


def memory_gib() -> dict[str, float]:
    """Of this process: allocated data, the most that was resident, and what of that is no file, GiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {name: int(lines[name].split()[0]) / 2**20 for name in ("VmData", "VmHWM", "RssAnon")}


def in_cgroup(parent: Path, limit_bytes: int, command: list[str]) -> int:
    """The status of a command in a memory cgroup of its own below `parent`."""
    group = parent / f"shardwise.{os.getpid()}"
    group.mkdir()
    try:
        is_v2 = (group / "memory.max").exists()
        (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        # the shell goes in, and becomes the command
        enter = f'echo $$ > {group / "cgroup.procs"} && exec "$@"'
        return subprocess.call(["sh", "-c", enter, "sh", *command], cwd=ROOT)
    finally:
        group.rmdir()


OPTIONS: Options = {
    "--gib": {"type": float, "default": 16.0, "help": "of the table's records (default 16)"},
    "--fill-gib": {"type": float, "help": "of these that are written before (default: all)"},
    "--limit-gib": {"type": float, "default": 2.0, "help": "of memory (default 2)"},
    "--steps": {"type": int, "default": 200, "help": "with prefetch (default 200)"},
    "--folder": {"type": Path, "help": "of the file, on the disk that is meant (default: the system's for such files)"},
    "--cgroup": {"type": Path, "help": "a folder of memory cgroups in which one may be made; else RLIMIT_DATA"},
}


def run(options: argparse.Namespace) -> Report:
    """Train under the limit, and say how it went."""
    rows, limit = int(options.gib * 2**30) // RECORD_BYTES, int(options.limit_gib * 2**30)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        out = Path(folder, "out.json")
        command = [
            *(sys.executable, "-m", "shardwise.perf.evidence.tiers.larger", "--rows", str(rows)),
            *("--filled", str(min(rows, int((options.fill_gib or options.gib) * 2**30) // RECORD_BYTES))),
            *("--steps", str(options.steps), "--folder", f"{folder}/rows", "--out", str(out)),
            *("--limit-bytes", "0" if options.cgroup else str(limit)),
        ]
        how = "RLIMIT_DATA" if options.cgroup is None else "a memory cgroup"
        status = in_cgroup(options.cgroup, limit, command) if options.cgroup else subprocess.call(command, cwd=ROOT)
        if status:
            return report_of([Section([], [f"under {how} of {options.limit_gib} GiB it ended with status {status}"])])
        result = json.loads(out.read_text())
        result["disk_iops"] = max(disk_rates(Path(folder), 1 << 30, 16_384).values())
    section = section_of(result, options, how)
    report = report_of([section])
    if options.write:
        asked = {"gib": options.gib, "fill_gib": options.fill_gib, "limit_gib": options.limit_gib}
        kept = {"versions": versions(), "limit": how, **asked, **result}
        RESULT.write_text(json.dumps({**kept, "table": section.lines, "bad": section.bad}, indent=1) + "\n")
    return report


def section_of(result: dict[str, Any], options: argparse.Namespace, how: str) -> Section:
    """The result as a table, and what of it is not as it has to be."""
    plain, ahead, hits = result["plain"], result["prefetch"], result["hits"]
    disk_ms = plain["step_ms"] - hits["step_ms"]
    ratio = ahead["step_ms"] / max(hits["step_ms"], disk_ms)
    share = result["cold_rows_a_second"] / result["disk_iops"]

    def moved(run: dict[str, float]) -> str:
        return f"{run['step_ms']:.1f} ms; {run['loads']:.0f} rows read, {run['saves']:.0f} saved"

    rows = [
        ["memory limit", f"{options.limit_gib:g} GiB by {how}"],
        ["most that was resident", f"{result['end']['VmHWM']:.2f} GiB"],
        ["table", f"{options.gib:g} GiB of records in a file"],
        ["filling", f"{result['fill']['rows_written']:,} rows written, {result['fill']['seconds']:.0f} s"],
        ["step, all rows in slots", f"{hits['step_ms']:.1f} ms"],
        ["step, plain loop, cold", moved(plain)],
        ["step, prefetch=2, cold", moved(ahead)],
        ["that over max(compute, disk)", f"{ratio:.2f} (max({hits['step_ms']:.1f}, {disk_ms:.1f}) ms)"],
        ["cold rows from the file", f"{result['cold_rows_a_second']:,.0f} a second, {share:.0%} of the disk's"],
        ["reads of 4 KB that the disk gives", f"{result['disk_iops']:,.0f} a second"],
    ]  # fmt: skip
    bad = []
    if share < COLD_BOUND:
        bad.append(f"cold rows come at {share:.0%} of the disk's rate, less than {COLD_BOUND:.0%}")
    if ratio > OVERLAP_BOUND:
        bad.append(f"a step with prefetch takes {ratio:.2f} x max(compute, disk), more than {OVERLAP_BOUND}")
    return Section([*grid(["what", "measured"], rows), ""], bad)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The process under the limit.")
    for name, kind in (
        ("rows", int),
        ("filled", int),
        ("steps", int),
        ("limit-bytes", int),
        ("folder", Path),
        ("out", Path),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    child(parser.parse_args())
