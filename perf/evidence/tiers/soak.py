"""A model with tiers trains for hours beside the same with resident tables: are memory, files, threads, bits steady?

Two tables, rowwise Adagrad with its rows in memory over a file, and Adam with its rows in a file, train behind
`PrefetchTrainPipelineSparseDist(ahead=8, prefetch=2)`; a hundredth of their hot ids is exchanged in each step. A round
is a pipeline: begun anew, and ended by a loader that is exhausted or left with batches under way, in turns. After it
both models evaluate; every few rounds one is copied, evaluated and dropped, or saved and loaded. A sample of each round
has memory, open files and threads: what is allocated, and what is resident and no page cache, once the allocator gave
back what it can.

Not as it has to be: the medians of memory just after the warm-up (a fifth of the time) and at the end are further apart
than 1 %; open files or threads become more after it; a loss, an evaluation, a weight or a state has not the bits of the
resident tables. `--write` keeps the result in `perf/results/tier_soak.json`.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
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
    checkpoint,
    in_backward_optimizer_filter,
    tiered,
)
from shardwise.perf.evidence.report import ROOT, Report, Section, grid, report_of, versions
from shardwise.perf.suite.options import Options

RESULT = ROOT / "perf" / "results" / "tier_soak.json"
# rows and columns of each table, and ids of a sample
TABLES = {"item": (200_000, 32, 4), "user": (100_000, 16, 2)}
SLOTS, RAM_ROWS, HOT, CHURNED_IN, BATCH = 6_000, 20_000, 20_000, 100, 256
STEPS_A_ROUND, COPIED_EVERY, SAVED_EVERY = 100, 3, 5
AHEAD, PREFETCH = 8, 2
WARM_UP, BOUND = 0.2, 0.01
# of the two stretches that are compared, of all samples after the warm-up
STRETCH = 0.2


@dataclass(frozen=True)
class Sample:
    """What the process has after a round."""

    seconds: float
    steps: int
    anonymous_mib: float
    allocated_mib: float
    open_files: int
    threads: int


class Model(nn.Module):
    """Two tables and a layer that has to say a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(rows, dim, name, feature_names=[name]) for name, (rows, dim, _) in TABLES.items()]
        )
        for name, rule in (("item", RowWiseAdagrad), ("user", torch.optim.Adam)):
            apply_optimizer_in_backward(
                rule, [self.tables.get_parameter(f"embedding_bags.{name}.weight")], {"lr": 0.01}
            )
        self.over = nn.Linear(sum(dim for _, dim, _ in TABLES.values()), 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """How far it is from a number for each sample, and what it says."""
        said = self.over(self.tables(features).values()).squeeze(1)
        return (said - torch.linspace(-1, 1, said.shape[0])).square().mean(), said.detach()


def hot_ids(places: Tensor, step: int, rows: int) -> Tensor:
    """The ids at these places of the hot ones: another after CHURNED_IN steps, when it is the turn of a place."""
    return (places * 2_654_435_761 + (step + places) // CHURNED_IN * 40_503_001) % 4_294_967_291 % rows


def batch_of(step: int) -> KeyedJaggedTensor:
    """Ids by a power law over the hot ones of this step, of which each lasts for CHURNED_IN steps."""
    draw = torch.Generator().manual_seed(step)
    parts = []
    for rows, _, ids in TABLES.values():
        place = (HOT * torch.rand(BATCH * ids, generator=draw, dtype=torch.float64) ** 3).long()
        parts.append(hot_ids(place, step, rows))
    lengths = [torch.full((BATCH,), ids) for _, _, ids in TABLES.values()]
    return KeyedJaggedTensor([*TABLES], torch.cat(parts), lengths=torch.cat(lengths))


class Soak:
    """Both models, and what was seen of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.rounds = folder, 0, 0
        self.samples: list[Sample] = []
        self.differs: list[str] = []
        self.done = {"copies": 0, "checkpoints": 0, "evaluations": 0}
        tiers = {
            "item": Tier(SLOTS, "file", str(folder / "rows"), ram_rows=RAM_ROWS),
            "user": Tier(SLOTS, "file", str(folder / "rows")),
        }
        self.whole, self.cached = Model(), tiered(Model(), tiers, device="cpu")
        self.dense = [self._dense_of(model) for model in (self.whole, self.cached)]
        self._begin = time.monotonic()

    def _dense_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.01)

    def run(self, seconds: float) -> None:
        """Rounds until the time is over."""
        while not self.samples or self.samples[-1].seconds < seconds:
            self.round()
        self.compare_saved()

    def round(self) -> None:
        """Train the same steps both ways, and look at what came of it."""
        losses = [[*self._pipelined()], [*self._plain()]]
        self.step += STEPS_A_ROUND
        self.rounds += 1
        self._expect_equal("losses", *map(torch.stack, losses))
        self._expect_equal("evaluation", self._evaluated(self.cached), self._evaluated(self.whole))
        if self.rounds % COPIED_EVERY == 0:
            other = copy.deepcopy(self.cached)
            self._expect_equal("evaluation of a copy", self._evaluated(other), self._evaluated(self.whole))
            del other
            self.done["copies"] += 1
        if self.rounds % SAVED_EVERY == 0:
            checkpoint.load(self._saved("cached", self.cached, 1), self.cached, self.dense[1])
            self.done["checkpoints"] += 1
        self.samples.append(sample(time.monotonic() - self._begin, self.step))

    def _pipelined(self) -> Iterator[Tensor]:
        pipeline: Any = PrefetchTrainPipelineSparseDist(
            self.cached, self.dense[1], "cpu", ahead=AHEAD, prefetch=PREFETCH
        )
        batches: Iterator[KeyedJaggedTensor] = map(batch_of, count(self.step))
        if self.rounds % 2:
            batches = islice(batches, STEPS_A_ROUND)
        for _ in range(STEPS_A_ROUND):
            yield pipeline.progress(batches)
        if self.rounds % 2 and next(batches, None) is not None:
            self.differs.append(f"round {self.rounds}: a pipeline left batches of its loader")

    def _plain(self) -> Iterator[Tensor]:
        for step in range(self.step, self.step + STEPS_A_ROUND):
            self.dense[0].zero_grad()
            loss, said = self.whole(batch_of(step))
            loss.backward()
            self.dense[0].step()
            yield said

    @torch.no_grad()
    def _evaluated(self, model: nn.Module) -> Tensor:
        model.eval()
        said = [model(batch_of(self.step + 1000 + n))[1] for n in range(2)]
        model.train()
        self.done["evaluations"] += 1
        return torch.cat(said)

    def _expect_equal(self, what: str, ours: Tensor, theirs: Tensor) -> None:
        if not torch.equal(ours, theirs):
            self.differs.append(f"round {self.rounds}: {what}")

    def _saved(self, name: str, model: nn.Module, dense: int) -> Path:
        return checkpoint.save(self.folder / name, model, self.dense[dense], step=self.step, keep_last=1).path

    def compare_saved(self) -> None:
        """Weights and states, by the checkpoints of both."""
        found = checkpoint.diff(self._saved("cached", self.cached, 1), self._saved("whole", self.whole, 0))
        if not found.same_content:
            self.differs += [f"checkpoints: {line}" for line in found.lines()]


class _Mallinfo(ctypes.Structure):
    """glibc's `mallinfo2`: `uordblks` bytes that are in use in arenas, `hblkhd` those of blocks of their own."""

    _fields_ = [  # noqa: RUF012
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    ]


def sample(seconds: float, steps: int) -> Sample:
    """Of this process, now; what waits to be collected, or to be given back to the system, does not count."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    libc.mallinfo2.restype = _Mallinfo
    allocated = libc.mallinfo2()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    files = len(os.listdir("/proc/self/fd"))
    return Sample(
        seconds, steps, int(lines["RssAnon"].split()[0]) / 1024, (allocated.uordblks + allocated.hblkhd) / 2**20, files,
        int(lines["Threads"]),
    )  # fmt: skip


OPTIONS: Options = {
    "--minutes": {"type": float, "default": 120.0, "help": "of training (default 120)"},
    "--folder": {"type": Path, "help": "of files and checkpoints (default: the system's for such files)"},
}


def run(options: argparse.Namespace) -> Report:
    """Train for the minutes, and say what became more."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        soak = Soak(Path(folder))
        soak.run(60 * options.minutes)
    metrics = cache_metrics(soak.cached)
    rates = {name: round(table.hit_rate, 4) for name, table in metrics.items()}
    section = section_of(soak.samples, soak.differs, soak.done, rates)
    if options.write:
        kept = {
            "versions": versions(), "minutes": options.minutes, "steps": soak.step, **soak.done, "hit_rates": rates,
            "table": section.lines, "bad": section.bad, "samples": [asdict(s) for s in thinned(soak.samples)],
        }  # fmt: skip
        RESULT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return report_of([section])


def thinned(samples: list[Sample], most: int = 60) -> list[Sample]:
    """Some of them, the last one too."""
    every = -(-len(samples) // most)
    return samples[::-1][::every][::-1]


def section_of(samples: list[Sample], differs: list[str], done: dict[str, int], rates: dict[str, float]) -> Section:
    """The samples as a table, and what of them is not as it has to be."""
    warm = [s for s in samples if s.seconds > WARM_UP * samples[-1].seconds]
    stretch = max(1, int(STRETCH * len(warm)))
    first, last = warm[:stretch], warm[-stretch:]
    memory = {
        what: [statistics.median(getattr(s, field) for s in some) for some in (first, last)]
        for what, field in (("allocated memory", "allocated_mib"), ("anonymous memory", "anonymous_mib"))
    }
    more = {
        what: (max(getattr(s, field) for s in first), max(getattr(s, field) for s in last))
        for what, field in (("open files", "open_files"), ("threads", "threads"))
    }
    counts = ", ".join(f"{number:,} {what}" for what, number in done.items())
    rows = [
        [
            "trained",
            f"{samples[-1].steps:,} steps in {samples[-1].seconds / 60:.1f} minutes, {len(samples):,} pipelines",
        ],
        ["beside it", counts],
        ["hit rates", ", ".join(f"{name} {rate:.1%}" for name, rate in rates.items())],
        *(
            [what, f"{before:.1f} MiB after the warm-up, {after:.1f} at the end: {after / before - 1:+.2%}"]
            for what, (before, after) in memory.items()
        ),
        *([what, f"{before}, then {after}"] for what, (before, after) in more.items()),
        ["not the bits of resident tables", f"{len(differs)}"],
    ]
    bad = [*differs[:10]]
    bad += [
        f"{what} changed by {after / before - 1:+.2%} after the warm-up, more than {BOUND:.0%}"
        for what, (before, after) in memory.items()
        if abs(after / before - 1) > BOUND
    ]
    bad += [
        f"{what}: {before} after the warm-up, {after} later" for what, (before, after) in more.items() if after > before
    ]
    return Section([*grid(["what", "measured"], rows), ""], bad)
