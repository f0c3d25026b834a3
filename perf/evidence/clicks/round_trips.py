"""Train DLRM on generated clicks in TorchRec, then in shardwise, then in TorchRec again, thousands of steps each.

What changes sides is a checkpoint with optimizer states; shardwise has another plan, and another number of ranks. All
losses are held to those of a TorchRec that was never interrupted. docs/beside_torchrec_round_trips.md keeps what was
printed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import from_dcp_trusted, latest, load, save, to_dcp
from shardwise.perf.evidence.compare_checkpoint import load_theirs, save_theirs
from shardwise.perf.evidence.report import Report, Section, grid, report_of
from shardwise.perf.suite import libraries
from shardwise.perf.suite.options import Options
from shardwise.perf.suite.ranks import on_ranks

from .model import HEAD_LR, LR, SHAPE, Clicks, Run, dlrm, train

RANKS, STEPS, BOUND = 2, 2000, 1e-6


class Case(NamedTuple):
    """TorchRec's plan on two ranks, shardwise's on `ranks`, and the optimizer of the tables."""

    theirs: str
    ours: str
    ranks: int
    optimizer: str


# sums of rowwise Adagrad are one for each block of columns: a plan that keeps these blocks takes them
CASES = [
    Case("table_wise", "row_wise", 4, "rowwise_adagrad"),
    Case("row_wise", "table_wise", 1, "rowwise_adagrad"),
    Case("cut", "row_wise", 1, "sgd"),
]


def losses_of(side: Any, model: Any, optimizer: Any, steps: range) -> Tensor:
    """Loss of the whole batch in each of these steps."""
    losses = train(side, model, optimizer, Clicks(0), steps)
    dist.all_reduce(losses)
    return losses / dist.get_world_size()


def quiet() -> None:
    """Without what torch is about to drop, on this rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def unbroken(case: Case, folder: Path, steps: int) -> Tensor:
    """Losses of TorchRec in `3 * steps` steps, saved after the first `steps` and after as many more."""
    quiet()
    side = libraries.torchrec()
    model, optimizer = dlrm(side, Run(case.theirs, case.optimizer))
    losses = []
    for part, name in enumerate(("theirs", "theirs later", "")):
        losses.append(losses_of(side, model, optimizer, range(part * steps, (part + 1) * steps)))
        if name:
            save_theirs(model, optimizer, folder / name)
    return torch.cat(losses)


def on_ours(case: Case, folder: Path, steps: int) -> Tensor:
    """Losses of shardwise in the `steps` after TorchRec's first, saved then."""
    quiet()
    side = libraries.ours()
    # other numbers, so that nothing is right by itself
    model, optimizer = dlrm(side, Run(case.ours, case.optimizer), seed=7)
    losses_of(side, model, optimizer, range(-1, 0))
    newest = latest(folder / "converted")
    assert newest is not None
    load(newest, model, optimizer)
    losses = losses_of(side, model, optimizer, range(steps, 2 * steps))
    save(folder / "ours", model, optimizer, step=2 * steps)
    return losses


def back(case: Case, folder: Path, steps: int, *, ulps: bool = False) -> Tensor:
    """Losses of a TorchRec that goes on from a checkpoint; with `ulps` its tables are off by their last bit."""
    quiet()
    side = libraries.torchrec()
    model, optimizer = dlrm(side, Run(case.theirs, case.optimizer), seed=9)
    losses_of(side, model, optimizer, range(-1, 0))
    load_theirs(model, optimizer, folder)
    if ulps:
        for value in model.state_dict().values():
            for part in value.local_shards() if hasattr(value, "local_shards") else ():
                part.tensor.copy_(part.tensor.nextafter(torch.tensor(torch.inf)))
    return losses_of(side, model, optimizer, range(2 * steps, 3 * steps))


def section(folder: Path, steps: int) -> Section:
    """All cases in turn."""
    lines = [
        "## There and back", "",
        f"{SHAPE.T} tables of {SHAPE.R} x {SHAPE.D}, {SHAPE.B} samples a step, tables at {LR}, the rest SGD at"
        f" {HEAD_LR}. TorchRec trains {steps} steps on two ranks and saves; shardwise loads that under another plan on"
        f" other ranks, trains {steps}, saves, and TorchRec trains {steps} more from that. Largest differences of a"
        f" step's loss to a TorchRec without a break. What rounding alone does is in the last column: TorchRec goes on"
        f" from its own checkpoint, its tables off by their last bit. Bound {BOUND:g}, or four times that.", "",
    ]  # fmt: skip
    cells, bad = [], []
    for number, case in enumerate(CASES):
        place = folder / str(number)
        whole = on_ranks(RANKS, unbroken, case, place, steps)
        from_dcp_trusted(place / "theirs", place / "converted", step=steps)
        own = on_ranks(case.ranks, on_ours, case, place, steps)
        newest = latest(place / "ours")
        assert newest is not None
        to_dcp(newest, place / "back", names="torchrec")
        again = on_ranks(RANKS, back, case, place / "back", steps)
        itself = on_ranks(RANKS, partial(back, ulps=True), case, place / "theirs later", steps)
        parts = (own, 1), (again, 2), (itself, 2)
        off = [float((losses - whole[n * steps : (n + 1) * steps]).abs().max()) for losses, n in parts]
        tenth = max(1, steps // 10)
        ends = ", ".join(f"{float(part.mean()):.4f}" for part in (whole[:tenth], whole[-tenth:]))
        cells.append([case.theirs, case.ours, case.ranks, case.optimizer, ends, *(f"{value:.1e}" for value in off)])
        print(*cells[-1], file=sys.stderr, flush=True)
        if not max(off[:2]) <= max(BOUND, 4 * off[2]):
            bad.append(f"{' '.join(map(str, case))}: losses differ by {off[0]:.1e} and {off[1]:.1e}")
        if not float(whole[-tenth:].mean()) < float(whole[:tenth].mean()):
            bad.append(f"{' '.join(map(str, case))}: nothing was learned")
    header = ["plan of TorchRec", "of shardwise", "its ranks", "optimizer", "mean loss of the first and last tenth",
              "shardwise", "TorchRec again", "TorchRec, a bit off"]  # fmt: skip
    return Section([*lines, *grid(header, cells), ""], bad)


OPTIONS: Options = {"--steps": {"type": int, "default": STEPS, "help": "of each of the three"}}


def run(options: argparse.Namespace) -> Report:
    """Go there and back with all cases, and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    libraries.torchrec()
    with tempfile.TemporaryDirectory() as folder:
        return report_of([section(Path(folder), options.steps)], "ranks x 1 thread over gloo")
