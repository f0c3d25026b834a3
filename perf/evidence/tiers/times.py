"""What a step of a cached table takes, beside what the constants of this machine and a simulated cache predict.

One rank, one table, rows below in memory, a plain loop. Constants are measured as the planner's calibration fits them:
steps of resident tables (`fit`), and what the same tables take more behind a cache (`fit_links`). Three other shapes,
of other rows, widths, batches, slots and optimizers, are predicted: rows wanted and missed by `Simulation` over their
batches, times by the cost model, as `shardwise cache simulate` adds them. Steps of all shapes take turns; a time is the
median, of the thread's CPU time, as other jobs share the machine.

Not as it has to be: a prediction is more than 10 % from what was measured. `--write` keeps the result in
`perf/results/tier_times.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardwise import ShardingEnv
from shardwise.embeddings.tiers import CacheSetting
from shardwise.embeddings.tiers.simulate import simulate
from shardwise.perf.evidence.report import ROOT, Report, Section, grid, report_of, versions
from shardwise.perf.suite.options import Options
from shardwise.planner.constants_measured import Constants
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.cache import Links, record_bytes
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.layout import Tier
from shardwise.planner.tables import Feature, Skew, Table
from shardwise.planner.topology import Topology
from shardwise.sharding.calibration.calibrate import Brought, Case, Measured, fit, fit_links, rank_ms
from shardwise.sharding.calibration.trial import Placed, Step

RESULT = ROOT / "perf" / "results" / "tier_times.json"
BOUND = 0.1
# batches that come again and again; steps of a turn, and those before them that are left out
POOL, STEPS, SKIPPED = 12, 5, 1
CPU, TOPOLOGY = torch.device("cpu"), Topology(1, "cpu")


@dataclass(frozen=True)
class Shape:
    """A table of R rows and D columns, batches of B samples with L ids each, and the share of its rows with slots."""

    name: str
    R: int
    D: int
    B: int
    L: int
    rule: str
    slots: float
    alpha: float = 1.05

    @property
    def table(self) -> Table:
        return Table("t", self.R, self.D, features=(Feature("f", self.L),), optimizer=self.rule, skew=Skew(self.alpha))

    def placed(self, cached: bool) -> list[Placed]:
        tier = Tier(self.slots) if cached else None
        rule = ParameterConstraints(["table_wise"], tier=tier)
        (way,) = ShardwiseCost(TOPOLOGY, self.B).ways(self.table, rule)
        return [Placed(self.table, way, (0,))]

    @property
    def record_bytes(self) -> int:
        return record_bytes(self.table, self.D)


CALIBRATED = [
    Shape("wide", 200_000, 128, 512, 10, "RowWiseAdagrad", 0.08),
    Shape("middle", 200_000, 64, 1024, 10, "RowWiseAdagrad", 0.12),
    Shape("narrow", 300_000, 8, 2048, 10, "RowWiseAdagrad", 0.15),
    Shape("Adam", 150_000, 32, 1024, 8, "Adam", 0.08),
    Shape("Adam, wide", 60_000, 96, 512, 12, "Adam", 0.2),
    Shape("Adagrad", 200_000, 64, 512, 16, "Adagrad", 0.1),
    Shape("SGD", 100_000, 48, 2048, 4, "SGD", 0.2),
    Shape("uniform", 100_000, 32, 512, 8, "RowWiseAdagrad", 0.2, 0.0),
    Shape("few ids", 100_000, 64, 128, 4, "RowWiseAdagrad", 0.1),
    Shape("nearly whole", 50_000, 64, 1024, 8, "RowWiseAdagrad", 0.9),
]
HELD_OUT = [
    Shape("A", 250_000, 80, 768, 12, "RowWiseAdagrad", 0.1),
    Shape("B", 120_000, 48, 1536, 6, "Adam", 0.08),
    Shape("C", 400_000, 24, 1024, 14, "Adagrad", 0.08),
]


class Trial:
    """A shape that trains, cached or with all rows on the device."""

    def __init__(self, shape: Shape, cached: bool) -> None:
        self.shape, self.cached = shape, cached
        self.step = Step(shape.placed(cached), shape.B, ShardingEnv.from_local(1, 0), CPU, POOL)
        self.ms: list[float] = []

    def turn(self) -> None:
        """Some steps, most of them timed."""
        for number in range(STEPS + SKIPPED):
            begin = time.thread_time()
            self.step()
            if number >= SKIPPED:
                self.ms.append(1e3 * (time.thread_time() - begin))

    def moved(self) -> tuple[float, float]:
        """Rows that a batch wants and misses once its cache is warm, by the simulation of it."""
        shape = self.shape
        batches = [torch.unique(kjt.values()) for (kjt,) in self.step.batches] * 4
        slots = -(-shape.R * shape.slots // 1)
        done = simulate(batches, CacheSetting(shape.R, int(slots), int(slots))).after(3 * POOL)
        return done.wanted / POOL, done.misses / POOL


def times_of(shapes: list[Shape], turns: int) -> dict[str, list[Trial]]:
    """Of each shape the resident and the cached trial, measured in turns."""
    trials = {shape.name: [Trial(shape, cached) for cached in (False, True)] for shape in shapes}
    for pair in trials.values():
        for trial in pair:
            for _ in range(2 * POOL):
                trial.step()
    for _ in range(turns):
        for pair in trials.values():
            for trial in pair:
                trial.turn()
    return trials


def calibrated(trials: dict[str, list[Trial]]) -> tuple[Constants, Links, list[Brought]]:
    """What steps of these shapes say of the machine."""
    cases = [Case(name, pair[0].shape.B, ((pair[0].shape.table, "table_wise"),)) for name, pair in trials.items()]
    steps = [Measured("step", name, statistics.median(pair[0].ms)) for name, pair in trials.items()]
    brought = []
    for whole, cached in trials.values():
        wanted, missed = cached.moved()
        of_step = statistics.median(cached.ms)
        more = of_step - statistics.median(whole.ms)
        brought.append(Brought(wanted, missed, cached.shape.record_bytes, more, more / of_step))
    return fit(steps, TOPOLOGY, "1 cpu rank of 1 thread", cases), fit_links(brought), brought


def predicted(shape: Shape, moved: tuple[float, float], constants: Constants, links: Links) -> tuple[float, float]:
    """Milliseconds of a step beside bringing rows, and of that."""
    rest = float(rank_ms(shape.placed(False), ShardwiseCost(TOPOLOGY, shape.B, constants)).sum())
    return rest, links.prefetch_ms(moved[1], moved[0], shape.record_bytes)


OPTIONS: Options = {"--turns": {"type": int, "default": 60, "help": "of steps of each shape (default 60)"}}


def run(options: argparse.Namespace) -> Report:
    """Calibrate, predict, measure."""
    torch.set_num_threads(1)
    trials = times_of([*CALIBRATED, *HELD_OUT], options.turns)
    constants, links, brought = calibrated({shape.name: trials[shape.name] for shape in CALIBRATED})
    entries = []
    for shape in (*CALIBRATED, *HELD_OUT):
        whole, cached = trials[shape.name]
        moved = cached.moved()
        rest, prefetch = predicted(shape, moved, constants, links)
        ms, whole_ms = (statistics.median(trial.ms) for trial in (cached, whole))
        entries.append({
            "shape": asdict(shape), "held_out": shape in HELD_OUT, "wanted": moved[0], "missed": moved[1],
            "predicted_rest_ms": rest, "measured_whole_ms": whole_ms, "predicted_prefetch_ms": prefetch,
            "predicted_ms": rest + prefetch, "measured_ms": ms, "ratio": (rest + prefetch) / ms,
            "quartiles_ms": statistics.quantiles(cached.ms, n=4),
        })  # fmt: skip
    section = section_of(entries, links)
    if options.write:
        kept = {
            "versions": versions(), "turns": options.turns, "constants": constants.to_json(), "links": asdict(links),
            "shapes": entries, "table": section.lines, "bad": section.bad,
        }  # fmt: skip
        RESULT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return report_of([section])


def section_of(entries: list[dict[str, Any]], links: Links) -> Section:
    """Predictions beside what was measured, and those that are too far from it."""
    rows, bad = [], []
    for entry in entries:
        shape, ratio = entry["shape"], entry["ratio"]
        what = "{R:,} x {D}, B {B}, L {L}, {rule}, slots {slots:.0%}".format(**shape)
        low, _, high = entry["quartiles_ms"]
        rows.append([
            f"{shape['name']}{', held out' * entry['held_out']}", what,
            f"{entry['missed']:,.0f} of {entry['wanted']:,.0f}",
            f"{entry['predicted_rest_ms']:.2f} ({entry['measured_whole_ms']:.2f})",
            f"{entry['predicted_prefetch_ms']:.2f}", f"{entry['predicted_ms']:.2f}",
            f"{entry['measured_ms']:.2f} ({low:.2f} to {high:.2f})", f"{ratio:.2f}",
        ])  # fmt: skip
        if entry["held_out"] and abs(ratio - 1) > BOUND:
            bad.append(f"shape {shape['name']}: predicted {ratio:.2f} of what was measured, more than {BOUND:.0%} off")
    header = ["", "shape", "missed", "rest (resident), ms", "bringing rows, ms", "predicted, ms", "measured", "ratio"]
    speeds = (
        f"Links: {links.link_gb_s:.3g} GB/s, {links.find_ns:.3g} ns a wanted row, {links.miss_ns:.3g} ns a missing one,"
        f" {links.batch_us:.3g} us a batch."
    )
    return Section([*grid(header, rows), "", speeds, ""], bad)
