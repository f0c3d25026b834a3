"""Train DLRM on generated clicks in TorchRec, then in shardwise, then in TorchRec again, thousands of steps each.

What changes sides is a checkpoint with optimizer states; shardwise has another plan, and another number of ranks. All
losses are held to those of a TorchRec that was never interrupted. docs/evidence/beside_torchrec_round_trips.md keeps
what was printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint import from_dcp_trusted, load, save, to_dcp
from shardwise.perf.evidence.compare_checkpoint import load_theirs, save_theirs
from shardwise.perf.evidence.report import Report, Section, grid, report_of
from shardwise.perf.suite import libraries
from shardwise.perf.suite.options import Options
from shardwise.perf.suite.ranks import on_ranks

from .model import HEAD_LR, LR, SHAPE, Clicks, Run, dlrm, quiet, train

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


def leg(theirs: bool, how: Run, part: int, steps: int, source: Path, target: Path | None = None) -> Tensor:
    """Losses of the steps of a part, from the checkpoint `source` on; ours are saved in `target`, if there is one."""
    quiet()
    side = libraries.torchrec() if theirs else libraries.ours()
    # other numbers and a step of them, so that nothing is right by itself
    model, optimizer = dlrm(side, how, seed=7)
    losses_of(side, model, optimizer, range(-1, 0))
    if theirs:
        load_theirs(model, optimizer, source)
    else:
        load(source, model, optimizer)
    losses = losses_of(side, model, optimizer, range(part * steps, (part + 1) * steps))
    if target is not None:
        save(target, model, optimizer, step=(part + 1) * steps)
    return losses


def unbroken(how: Run, steps: int, target: Path) -> Tensor:
    """Losses of TorchRec in three parts without a break, saved after the first."""
    quiet()
    side = libraries.torchrec()
    model, optimizer = dlrm(side, how)
    first = losses_of(side, model, optimizer, range(steps))
    save_theirs(model, optimizer, target)
    return torch.cat([first, losses_of(side, model, optimizer, range(steps, 3 * steps))])


def there_and_back(case: Case, steps: int, place: Path) -> list[Tensor]:
    """Losses of TorchRec without a break, of shardwise in the second part, and of TorchRec after it."""
    home, abroad = (Run(plan, case.optimizer, smooth=True) for plan in (case.theirs, case.ours))
    whole = on_ranks(RANKS, unbroken, home, steps, place / "theirs")
    source = from_dcp_trusted(place / "theirs", place / "converted", step=steps)
    second = on_ranks(case.ranks, leg, False, abroad, 1, steps, source, place / "ours")
    back = to_dcp(place / "ours", place / "back", names="torchrec")
    return [whole, second, on_ranks(RANKS, leg, True, home, 2, steps, back)]


def section(folder: Path, steps: int) -> Section:
    """All cases in turn."""
    lines = [
        "## There and back", "",
        f"{SHAPE.T} tables of {SHAPE.R} x {SHAPE.D}, {SHAPE.B} samples a step, tables at {LR}, the rest SGD at"
        f" {HEAD_LR}. TorchRec trains {steps} steps on two ranks and saves; shardwise loads that under another plan on"
        f" other ranks, trains {steps}, saves, and TorchRec trains {steps} more from that. Largest differences of a"
        f" step's loss to a TorchRec without a break; bound {BOUND:g}.", "",
    ]  # fmt: skip
    cells, bad = [], []
    for number, case in enumerate(CASES):
        name = " ".join(map(str, case))
        whole, *parts = there_and_back(case, steps, folder / str(number))
        off = [float((part - whole[n * steps : (n + 1) * steps]).abs().max()) for n, part in enumerate(parts, 1)]
        tenth = max(1, steps // 10)
        first, last = (float(part.mean()) for part in (whole[:tenth], whole[-tenth:]))
        cells.append([*case, f"{first:.4f}, {last:.4f}", *(f"{value:.1e}" for value in off)])
        print(*cells[-1], file=sys.stderr, flush=True)
        if not max(off) <= BOUND:
            bad.append(f"{name}: losses differ by {off[0]:.1e} and {off[1]:.1e}")
        if not last < first:
            bad.append(f"{name}: nothing was learned")
    header = ["plan of TorchRec", "of shardwise", "its ranks", "optimizer", "mean loss of the first and last tenth",
              "shardwise", "TorchRec after it"]  # fmt: skip
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
