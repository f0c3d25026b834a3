"""Whether this tree and an earlier commit train to the same bits: random mixes of sharded tables on 1, 2 and 4 ranks.

The commit is laid out beside this tree in a temporary folder. In both the same program (worker.py) trains the
same mixes over gloo, one thread a rank, each in processes of its own, and the SHA-256 of losses, outputs, gradients of
per-id weights, weights and optimizer states are compared rank by rank. Bits depend on the machine, so both run here.
Needs git and no peer. Not as it has to be: a digest differs, which is named, the first of a rank; or a tree fails.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.perf.evidence.report import ROOT, Report, Section, grid, report_of
from shardwise.perf.evidence.same_bits.ranks import results_of
from shardwise.perf.evidence.same_bits.worker import mix_of
from shardwise.perf.suite.options import FLAG, Options

# the last commit before the engine of sharded collections was taken apart
BASE = "1f6f237"
WORLDS, MIXES, LIMIT_S = (1, 2, 4), 20, 600
WORKER = Path(__file__).with_name("worker.py")

# digests of a rank by mix and name, in the order in which they came
Digests = Mapping[str, Mapping[str, str]]


class Job(NamedTuple):
    """What a tree trains: the first `mixes` on `world` ranks; in `plant`, if given, a bit is flipped."""

    world: int
    mixes: int
    plant: int | None = None


class Difference(NamedTuple):
    """The first digest of a mix that a rank does not have alike in both trees."""

    world: int
    mix: str
    rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.world} rank{'s' if self.world > 1 else ''}, mix {self.mix}, rank {self.rank}: {self.name}"


def trained(tree: Path, job: Job) -> list[Digests]:
    """Digests of each rank of a job in a tree.

    Raises:
        RuntimeError: a rank failed, or all took longer than LIMIT_S.
    """
    with tempfile.TemporaryDirectory() as folder:
        # beside nothing of this tree: Python looks for modules beside its program first
        worker = Path(shutil.copy(WORKER, folder))
        program = [str(worker), "--tree", str(tree), "--mixes", str(job.mixes)]
        if job.plant is not None:
            program += ["--plant", str(job.plant)]
        try:
            return results_of(program, job.world, path=tree, limit_s=LIMIT_S)
        except RuntimeError as error:
            raise RuntimeError(f"{tree}: {error}") from None


def lay_out(commit: str, folder: Path) -> Path:
    """The files of a commit in a folder.

    Raises:
        ValueError: this clone has no such commit.
    """
    archive, tree = folder / "base.tar", folder / "base"
    command = ["git", "archive", "--format=tar", f"--output={archive}", commit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"this clone has no commit {commit} (git fetch --unshallow brings it): {done.stderr.strip()}")
    shutil.unpack_archive(archive, tree)
    return tree.resolve()


def first_differences(world: int, before: Sequence[Digests], now: Sequence[Digests]) -> list[Difference]:
    """Of each mix and rank the first digest that differs, in the order in which they came, or that one side lacks."""
    differences = []
    for mix in before[0]:
        for rank, (old, new) in enumerate(zip(before, now, strict=True)):
            names = [*old[mix], *(name for name in new[mix] if name not in old[mix])]
            differs = (name for name in names if old[mix].get(name) != new[mix].get(name))
            if (name := next(differs, None)) is not None:
                differences.append(Difference(world, mix, rank, name))
    return differences


def section_of(results: Mapping[int, tuple[Sequence[Digests], Sequence[Digests]]]) -> Section:
    """A row for each mix: how many digests of all ranks are the same by number of ranks, or the first that differs."""
    differences = [
        difference for world, (before, now) in results.items() for difference in first_differences(world, before, now)
    ]
    cells: dict[str, list[str]] = {}
    for world, (before, _) in results.items():
        for mix in before[0]:
            of_mix = [
                f"rank {difference.rank}: {difference.name}"
                for difference in differences
                if (difference.world, difference.mix) == (world, mix)
            ]
            same = f"{sum(len(rank[mix]) for rank in before)} the same"
            cells.setdefault(mix, []).append(of_mix[0] if of_mix else same)
    header = ["mix", "what it has", *(f"{world} {'rank' if world == 1 else 'ranks'}" for world in results)]
    table = grid(header, [[mix, mix_of(int(mix)), *of_worlds] for mix, of_worlds in cells.items()])
    return Section([*table, ""] if cells else [], [str(difference) for difference in differences])


OPTIONS: Options = {
    "--base": {"default": BASE, "help": f"the commit before (default {BASE})"},
    "--mixes": {"type": int, "default": MIXES, "help": f"how many (default {MIXES})"},
    "--worlds": {"type": int, "nargs": "+", "default": WORLDS, "help": "numbers of ranks (default 1 2 4)"},
    "--plant": {**FLAG, "help": "flip a bit of this tree's tables after the first step of mix 0: has to be told"},
}


def run(options: argparse.Namespace) -> Report:
    """Train in both trees and compare."""
    begin, failed = time.monotonic(), []
    results: dict[int, tuple[Sequence[Digests], Sequence[Digests]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = lay_out(options.base, Path(folder))
        for world in options.worlds:
            try:
                before = trained(base, Job(world, options.mixes))
                results[world] = before, trained(ROOT, Job(world, options.mixes, 0 if options.plant else None))
            except RuntimeError as error:
                failed.append(str(error))
    took = f"this tree beside {options.base}, {options.mixes} mixes, {time.monotonic() - begin:.0f} s"
    return report_of([section_of(results), Section([], failed)], took)
