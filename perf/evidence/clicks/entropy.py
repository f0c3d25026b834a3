"""Train DLRM on generated clicks in TorchRec and in shardwise, and compare the normalized entropy that they end with.

Two gloo ranks, tables cut one way for each seed, rowwise Adagrad; with fp32 between the ranks, with sums in fp16 and
gradients in bf16, and with fp32 and tanh in place of ReLU. Takes two hours: with `--keep FOLDER` a run that was broken
off goes on. docs/evidence/beside_torchrec_entropy.md keeps what was printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from shardwise.perf.evidence.report import Report, Section, grid, report_of
from shardwise.perf.suite import libraries
from shardwise.perf.suite.options import Options
from shardwise.perf.suite.ranks import on_ranks

from .model import HEAD_LR, LR, SHAPE, Clicks, Run, dlrm, entropy, quiet, train

RANKS, STEPS, SEEDS, HELD_OUT = 2, 20_000, (0, 1, 2, 3, 4), 1000
# most of the mean difference of seeds where there are ReLUs, and of the difference of a seed where there are none
BOUND, SMOOTH_BOUND = 1e-4, 1e-6


class Way(NamedTuple):
    """Types of sums and gradients between ranks, and whether tanh stands where DLRM has ReLU."""

    exchange: tuple[str, str]
    smooth: bool = False


WAYS = {
    "fp32": Way(("fp32", "fp32")),
    "fp16 and bf16": Way(("fp16", "bf16")),
    "fp32, tanh": Way(("fp32", "fp32"), smooth=True),
}


def plan_of_seed(seed: int) -> str:
    """Each seed has one strategy for all tables."""
    return ("table_wise", "row_wise", "column_wise")[seed % 3]


def ends_with(theirs: bool, way: Way, seed: int, steps: int) -> tuple[float, float]:
    """Normalized entropy of a run on held-out clicks, and its mean loss over the last tenth of its steps."""
    quiet()
    side, clicks = libraries.torchrec() if theirs else libraries.ours(), Clicks(seed)
    model, optimizer = dlrm(side, Run(plan_of_seed(seed), "rowwise_adagrad", *way), seed=seed)
    losses = train(side, model, optimizer, clicks, range(steps))
    return entropy(side, model, clicks, HELD_OUT)[0], float(losses[-max(1, steps // 10) :].mean())


def runs(folder: Path, seeds: Sequence[int], steps: int) -> dict[tuple[bool, str, int], float]:
    """Normalized entropy of all runs; those that the folder has are not run again."""
    found = {}
    for seed in seeds:
        for name, way in WAYS.items():
            for theirs in (True, False):
                kept = folder / f"{seed} {name} {'torchrec' if theirs else 'shardwise'} {steps}.json"
                if not kept.exists():
                    kept.write_text(json.dumps(on_ranks(RANKS, ends_with, theirs, way, seed, steps)))
                entropy_of_run, loss = json.loads(kept.read_text())
                print(f"{kept.stem}: {entropy_of_run:.7f}, loss {loss:.7f}", file=sys.stderr, flush=True)
                found[theirs, name, seed] = entropy_of_run
    return found


def section(found: dict[tuple[bool, str, int], float], seeds: Sequence[int], steps: int) -> Section:
    """The table of all runs, and what in it is not as it has to be."""
    lines = [
        "## Normalized entropy", "",
        f"{SHAPE.T} tables of {SHAPE.R} x {SHAPE.D}, rowwise Adagrad at {LR}; the rest of the"
        f" model SGD at {HEAD_LR}; {steps} steps of {SHAPE.B} samples on two ranks. Mean log loss on"
        f" {HELD_OUT * SHAPE.B} samples that no step saw, over that of the share of clicks alone. The mean difference"
        f" of the seeds may be {BOUND:g}; with tanh each seed's may be {SMOOTH_BOUND:g}.", "",
    ]  # fmt: skip
    off = {name: [found[False, name, seed] - found[True, name, seed] for seed in seeds] for name in WAYS}
    cells: list[list[object]] = []
    for n, seed in enumerate(seeds):
        row: list[object] = [seed, plan_of_seed(seed)]
        for name, differences in off.items():
            theirs, own = (found[side, name, seed] for side in (True, False))
            row += [f"{theirs:.6f}", f"{own:.6f}", f"{differences[n]:+.1e}"]
        cells.append(row)
    cells.append(["mean", "", *(cell for values in off.values() for cell in ("", "", f"{mean(values):+.1e}"))])
    header = [
        "seed",
        "plan",
        *(f"{what}, {name}" for name in WAYS for what in ("TorchRec", "shardwise", "difference")),
    ]
    bad = [f"{name}: normalized entropy differs by {mean(values):.1e} in the mean"
           for name, values in off.items() if not abs(mean(values)) <= BOUND]  # fmt: skip
    bad += [f"seed {seed}, {name}: normalized entropy differs by {value:.1e}"
            for name, values in off.items() if WAYS[name].smooth
            for seed, value in zip(seeds, values, strict=True) if not abs(value) <= SMOOTH_BOUND]  # fmt: skip
    bad += [f"seed {seed}, {name}: {value} was not learned from"
            for (_, name, seed), value in found.items() if not (math.isfinite(value) and value < 1)]  # fmt: skip
    return Section([*lines, *grid(header, cells), ""], bad)


OPTIONS: Options = {
    "--steps": {"type": int, "default": STEPS, "help": "of each run"},
    "--seeds": {"type": int, "nargs": "+", "default": SEEDS, "help": "of clicks and models"},
    "--keep": {"type": Path, "default": None, "help": "folder that keeps what each run ended with"},
}


def run(options: argparse.Namespace) -> Report:
    """Train all, and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    libraries.torchrec()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as passing:
        folder = options.keep or Path(passing)
        folder.mkdir(parents=True, exist_ok=True)
        found = runs(folder, options.seeds, options.steps)
    return report_of([section(found, options.seeds, options.steps)], f"{RANKS} ranks x 1 thread over gloo")
