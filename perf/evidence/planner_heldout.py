"""How well the planner's cost model orders plans that it was not calibrated on.

Two gloo processes of one thread each measure the
constants (`calibrate`), then real training steps of DistributedModelParallel under 20 plans of other workloads: what
the planner chose for each of them and four others, picked by prediction alone to be as far apart as they come. Plans
take turns; a time is the median of 15 steps, of the slower rank. Printed: predicted and measured, Spearman's
correlation with a bootstrap interval, pairs that are predicted more than 1.5 x apart and came out the other way round,
and the regret of the planner's choice among the plans of its workload. `--write` keeps all times as JSON and the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise import ShardingEnv, __version__
from shardwise.perf.evidence.report import ROOT, Report
from shardwise.perf.suite.options import Options
from shardwise.perf.suite.ranks import of_ranks, on_ranks
from shardwise.planner.constants_measured import Constants
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.tables import Feature, Skew, Table
from shardwise.planner.topology import Topology
from shardwise.sharding.calibration.calibrate import (
    fit,
    measure,
    rank_ms,
    way_of,
)
from shardwise.sharding.calibration.trial import Placed, Step, timed

WORLD, PLANS_EACH, ROUNDS, WARM_UP, APART = 2, 5, 15, 3, 1.5
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Workload:
    """Tables, and the samples of one rank's batch."""

    name: str
    batch_size: int
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Plan:
    """A plan of a workload and the time that the model predicts for it."""

    workload: Workload
    name: str
    placed: tuple[Placed, ...]
    predicted_ms: float


def _table(
    name: str, rows: int, dim: int, lengths: Sequence[float], optimizer: str = "RowWiseAdagrad", **more: Any
) -> Table:
    features = tuple(Feature(f"{name}_{n}", length) for n, length in enumerate(lengths))
    return Table(name, rows, dim, features=features, optimizer=optimizer, **more)


def workloads() -> list[Workload]:
    """None of them is one of `calibrate.cases`, nor are their rows, widths or lengths."""
    clicks = [_table(f"c{n}", int(60 * 1.9**n), 48, [1]) for n in range(13)]
    bags = [_table(f"b{n}", 9000 * (n + 1), 40, [3 + 5 * n], "Adagrad") for n in range(6)]
    both = [_table(f"p{n}", 35_000, 80, [6, 2]) for n in range(3)]
    rows = [_table(f"s{n}", 12_000 * (n + 1), 24, [14], pooled=False, module="rows") for n in range(4)]
    hot = [_table(f"h{n}", 70_000, 96, [8 + 9 * n], skew=Skew(1.2)) for n in range(5)]
    return [
        Workload("13 tables of clicks", 768, tuple(clicks)),
        Workload("6 tables of bags, Adagrad", 1536, tuple(bags)),
        Workload("3 tables of bags, 4 of sequences", 320, (*both, *rows)),
        Workload("5 skewed tables", 2560, tuple(hot)),
    ]


def plans_of(workload: Workload, constants: Constants) -> list[Plan]:
    """The planner's plan first, then four others by prediction: the slowest, and those between at even distances."""
    topology = Topology(WORLD, "cpu")
    cost = ShardwiseCost(topology, workload.batch_size, constants)
    chosen = _chosen(workload, topology, cost)
    candidates = {name: _placed(workload, kinds, topology) for name, kinds in _KINDS.items()}
    candidates["all on rank 0"] = _on_rank_0(workload, len(workload.tables), topology)
    candidates["two thirds on rank 0"] = _on_rank_0(workload, -(-2 * len(workload.tables) // 3), topology)
    plans = [Plan(workload, name, placed, _predicted(placed, cost)) for name, placed in candidates.items()]
    best = Plan(workload, "the planner's", chosen, _predicted(chosen, cost))
    others = sorted((plan for plan in plans if plan.placed != chosen), key=lambda plan: plan.predicted_ms)
    wanted = np.linspace(0, len(others) - 1, PLANS_EACH - 1).round().astype(int).tolist()
    return [best, *(others[n] for n in wanted)]


_KINDS = {
    "table-wise in turn": ("table_wise",),
    "row-wise": ("row_wise",),
    "column-wise": ("column_wise",),
    "data-parallel": ("data_parallel",),
    "one of each": ("table_wise", "row_wise", "column_wise", "data_parallel"),
    "row-wise and replicated": ("row_wise", "data_parallel"),
}


def _placed(workload: Workload, kinds: Sequence[str], topology: Topology) -> tuple[Placed, ...]:
    """The tables cut by these types in turn; whole ones go around the ranks."""
    placed = []
    for number, table in enumerate(workload.tables):
        way = way_of(table, kinds[number % len(kinds)], topology)
        starts = [0] if way.span > 1 else [(number + block) % WORLD for block in range(len(way.widths))]
        placed.append(Placed(table, way, tuple(starts)))
    return tuple(placed)


def _on_rank_0(workload: Workload, count: int, topology: Topology) -> tuple[Placed, ...]:
    """The first `count` tables whole on rank 0, the others on rank 1."""
    ways = [way_of(table, "table_wise", topology) for table in workload.tables]
    return tuple(
        Placed(table, way, (int(n >= count),)) for n, (table, way) in enumerate(zip(workload.tables, ways, strict=True))
    )


def _chosen(workload: Workload, topology: Topology, cost: ShardwiseCost) -> tuple[Placed, ...]:
    """What the planner makes of it."""
    planned = plan_tables(workload.tables, topology, workload.batch_size, cost=cost)
    placed = []
    for table, choice, starts in planned.placed():
        same = (choice.sharding_type, choice.compute_kernel, choice.widths)
        way = next(w for w in cost.ways(table) if (w.sharding_type, w.compute_kernel, w.widths) == same)
        placed.append(Placed(table, way, tuple(starts)))
    return tuple(placed)


def _predicted(placed: Sequence[Placed], cost: ShardwiseCost) -> float:
    return float(rank_ms(placed, cost).sum(axis=0).max())


def times_of(plans: Sequence[Plan], env: ShardingEnv) -> list[list[float]]:
    """Milliseconds [plans, rounds] of this rank, plans in turn."""
    steps = [Step(plan.placed, plan.workload.batch_size, env, _CPU) for plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    for turn in range(WARM_UP + ROUNDS):
        for step, of_plan in zip(steps, times, strict=True):
            dist.barrier()
            ms = timed(step, _CPU)
            if turn >= WARM_UP:
                of_plan.append(ms)
    return times


def measured(seconds: float) -> dict[str, Any]:
    """What all ranks do together: calibrate, and measure the plans."""
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    calibration = measure(env, _CPU, seconds=seconds)
    constants = fit(calibration, Topology(WORLD, "cpu"), f"{WORLD} cpu ranks of 1 thread")
    plans = [plan for workload in workloads() for plan in plans_of(workload, constants)]
    times = of_ranks(times_of(plans, env))
    return {
        "constants": constants.to_json(),
        "calibration": [asdict(entry) for entry in calibration],
        "plans": [
            {
                "workload": plan.workload.name,
                "batch_size": plan.workload.batch_size,
                "plan": plan.name,
                "tables": [
                    f"{placed.table.name}: {placed.way.sharding_type} {list(placed.starts)}" for placed in plan.placed
                ],
                "predicted_ms": plan.predicted_ms,
                "rounds_ms": np.max([of_rank[n] for of_rank in times], axis=0).round(3).tolist(),
            }
            for n, plan in enumerate(plans)
        ],
    }


def judged(plans: Sequence[dict[str, Any]], seed: int = 7) -> dict[str, Any]:
    """What the measurement says of the predictions."""
    predicted = np.array([plan["predicted_ms"] for plan in plans])
    measured = np.array([median(plan["rounds_ms"]) for plan in plans])
    generator = np.random.default_rng(seed)
    draws = [generator.integers(0, len(plans), len(plans)) for _ in range(5000)]
    # a draw of nothing but one plan says nothing
    correlations = [_spearman(predicted[d], measured[d]) for d in draws if np.ptp(predicted[d]) and np.ptp(measured[d])]
    low, high = np.quantile(correlations, (0.025, 0.975))
    apart, wrong = 0, []
    for a, b in combinations(range(len(plans)), 2):
        fast, slow = (a, b) if predicted[a] < predicted[b] else (b, a)
        if predicted[slow] > APART * predicted[fast]:
            apart += 1
            if measured[slow] <= measured[fast]:
                wrong.append([fast, slow])
    regret = {}
    for name in dict.fromkeys(plan["workload"] for plan in plans):
        numbers = [n for n, plan in enumerate(plans) if plan["workload"] == name]
        regret[name] = float(measured[numbers[0]] / measured[numbers].min() - 1)
    ratio = measured / predicted
    return {
        "spearman": _spearman(predicted, measured), "spearman_interval_95": [float(low), float(high)],
        "predictions_span": float(predicted.max() / predicted.min()), "pairs_apart": apart, "pairs_wrong": wrong,
        "regret": regret, "measured_over_predicted": np.quantile(ratio, (0, 0.5, 1)).tolist(),
    }  # fmt: skip


def _spearman(a: Any, b: Any) -> float:
    """Correlation of ranks, ties sharing theirs."""
    ranks = [np.searchsorted(np.sort(x), x) + np.searchsorted(np.sort(x), x, side="right") for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def page(facts: dict[str, Any]) -> str:
    """The result as Markdown."""
    plans, accuracy = facts["plans"], facts["judged"]
    low, high = accuracy["spearman_interval_95"]
    least, middle, most = accuracy["measured_over_predicted"]
    lines = [
        "# The cost model against plans that it was not calibrated on",
        "",
        f"Made by `make evidence NAME=planner_heldout` in {facts['seconds']} s, on {facts['machine']}, shardwise"
        f" {facts['shardwise']}, torch {facts['torch']}: {WORLD} gloo ranks of one thread each on {facts['cpus']} cores"
        f" (load average {facts['load'][0]:.1f} before, {facts['load'][1]:.1f} after). Times are medians of {ROUNDS}"
        " steps of the slower rank, plans taking turns. Constants were measured just before, on the workloads of"
        " `sharding/calibration/calibrate.py`; the plans below are of other tables, widths, lengths and batches.",
        "",
        f"- Predictions span {accuracy['predictions_span']:.1f} x; Spearman's correlation is {accuracy['spearman']:.3f}"
        f" (95 % bootstrap interval {low:.3f} to {high:.3f}).",
        f"- {accuracy['pairs_apart']} pairs are predicted more than {APART} x apart;"
        f" {len(accuracy['pairs_wrong'])} of them came out the other way round.",
        f"- Measured over predicted: {least:.2f} to {most:.2f}, median {middle:.2f}.",
        "- Regret of the planner's plan among the five of its workload: "
        + ", ".join(f"{name} {100 * regret:.0f} %" for name, regret in accuracy["regret"].items())
        + ".",
        "",
        "| workload, samples of a rank | plan | predicted ms | measured ms | fastest and slowest step |",
        "|---|---|---|---|---|",
    ]
    for plan in plans:
        ordered = sorted(plan["rounds_ms"])
        lines.append(
            f"| {plan['workload']}, {plan['batch_size']} | {plan['plan']} | {plan['predicted_ms']:.1f} |"
            f" {median(ordered):.1f} | {ordered[0]:.1f} to {ordered[-1]:.1f} |"
        )
    numbers = [(name, value) for name, value in facts["constants"].items() if isinstance(value, float)]
    lines += ["", "Constants that were measured: " + ", ".join(f"{n} {v:.4g}" for n, v in numbers) + "."]
    return "\n".join(lines) + "\n"


OPTIONS: Options = {
    "--seconds": {"type": float, "default": 60.0, "help": "of calibration"},
}


def run(options: argparse.Namespace) -> Report:
    """Measure, print and, if asked to, keep."""
    before, begin = os.getloadavg()[0], time.time()
    os.environ["OMP_NUM_THREADS"] = "1"
    result = on_ranks(WORLD, measured, options.seconds)
    result = {
        "machine": platform.machine(), "cpus": os.cpu_count(), "torch": torch.__version__, "shardwise": __version__,
        "load": [before, os.getloadavg()[0]], "seconds": round(time.time() - begin),
        "judged": judged(result["plans"]), **result,
    }  # fmt: skip
    if options.write:
        (ROOT / "perf/results/cpu/planner_heldout.json").write_text(json.dumps(result) + "\n")
        (ROOT / "docs/evidence/planner_heldout.md").write_text(page(result))
    return Report(page(result), True)
