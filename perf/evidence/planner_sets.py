"""Plans every set of tables that fits on several clusters: `python -m shardwise.perf.evidence.planner_sets --tables DIR`.

Prints a row for each: what was planned, the predicted step of the slowest rank, the proven bound, the gap, the gap as a
share of what a plan can change (the bound less what every rank spends whatever the plan), how the bound was proven, and
seconds (pricing, search, bound and gap; imports are not in it). `--json FILE` keeps the numbers, `--plot FILE` draws
seconds over tables x ranks of generated sets (SVG).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from shardwise.planner.cost.costs import constants_of
from shardwise.planner.errors import PlannerError
from shardwise.planner.plan.files import read_tables
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.report.explanation import facts
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import GIB, Topology

LOCAL = 8
# of what a card has, kept free for dense layers, activations and the allocator
RESERVED = 0.15
OPTIMIZER = "RowWiseAdagrad"
# set -> (ranks, card, GiB of it, samples of a rank's batch)
SHAPES: dict[str, tuple[tuple[int, str, int, int], ...]] = {
    "criteo_kaggle_dlrm": ((8, "h100", 80, 2048),),
    "criteo_1tb_cap10m_dlrm": ((8, "h100", 80, 2048),),
    "criteo_1tb_cap40m_mlperf_v1": ((8, "h100", 80, 8192), (16, "h100", 80, 4096)),
    "criteo_1tb_uncapped_torchrec": ((8, "h100", 80, 8192),),
    "mlperf_dlrm_dcnv2_multihot": ((8, "h100", 80, 8192), (16, "h100", 80, 4096), (64, "h100", 80, 1024)),
    "criteo_kaggle_x4_min10": ((8, "h100", 80, 2048),),
    "avazu_x4_min2": ((8, "h100", 80, 2048),),
    "taobao_ad_x1_bars": ((8, "h100", 80, 2048),),
    "taobao_ad_tzrec_din": ((8, "h100", 80, 2048),),
    "kuaivideo_x1_bars": ((8, "h100", 80, 2048),),
    "amazonelectronics_x1_bars": ((8, "h100", 80, 2048),),
    "microvideo1.7m_x1_bars": ((8, "h100", 80, 2048),),
    "ali_ccp_tzrec_dbmtl": ((8, "h100", 80, 2048),),
    "kuairand_tzrec_dlrm_hstu": ((8, "h100", 80, 2048),),
    "dlrm_v3_kuairand": ((8, "h100", 80, 2048),),
    "dlrm_v3_streaming": ((32, "h100", 80, 512),),
    "dlrm_v3_movielens_13b": ((32, "h100", 80, 512),),
    "hugectr_7table_470B_hotness20": ((32, "h100", 80, 2048),),
    "ml_latest_small_measured": ((8, "h100", 80, 2048),),
    "kuairand_pure_measured": ((8, "h100", 80, 2048),),
    "nv_synthetic_tiny_v3": ((8, "h100", 80, 8192), (16, "h100", 80, 4096)),
    "nv_synthetic_small_v3": ((8, "h100", 80, 8192), (16, "h100", 80, 4096), (32, "h100", 80, 2048)),
    "nv_synthetic_large_v3": ((16, "h100", 80, 4096), (64, "h100", 80, 1024), (128, "h100", 80, 512)),
    "nv_synthetic_jumbo_v3": ((64, "h100", 80, 1024), (128, "h100", 80, 512), (256, "h100", 80, 256)),
    "nv_synthetic_colossal_v3": ((256, "h200", 141, 256),),
}
GENERATED = ((850, 16, 256), (850, 128, 512))


@dataclass(frozen=True)
class Row:
    """What one plan came to."""

    set: str
    tables: int
    ranks: int
    topology: str
    batch_size: int
    cost: str
    settings: dict[str, str]
    step_ms: float
    bound_ms: float
    gap: float
    base_ms: float
    gap_beyond_base: float
    proven: bool
    bound_from: str
    seconds: float
    cpu_seconds: float


def generated(count: int, seed: int = 0) -> list[Table]:
    """`count` tables as production models have them: many small ones, a few huge, lengths from 1 to some hundreds."""
    draw = np.random.default_rng(seed)
    rows = np.exp(draw.normal(11.5, 2.6, count)).clip(4, 2e8).astype(int)
    dims = draw.choice([16, 32, 64, 96, 128, 192, 256], count, p=[0.1, 0.15, 0.3, 0.1, 0.25, 0.05, 0.05])
    lengths = np.exp(draw.normal(1.2, 1.4, count)).clip(1, 500).round(1)
    return [
        Table(
            f"table_{n}", int(rows[n]), int(dims[n]), features=(Feature(f"feature_{n}", float(lengths[n])),),
            optimizer=OPTIMIZER,
        )
        for n in range(count)
    ]  # fmt: skip


def machines(ranks: int, card: str, gib: int) -> Topology:
    """Hosts of 8 cards with what the reservation leaves of each."""
    return Topology(
        ranks, "cuda", hbm_cap=int(gib * GIB * (1 - RESERVED)), local_world_size=min(LOCAL, ranks), card=card
    )


def run(name: str, tables: Sequence[Table], topology: Topology, batch_size: int, cost: str) -> Row:
    """Plan and say what came out."""
    gc.collect()
    begin = time.process_time()
    constants = constants_of(topology.card) if cost == "shardwise" else None
    settings = {
        "reservation": f"{RESERVED:.0%} of HBM",
        "optimizer": OPTIMIZER,
        "enumerator": "all ways that the engine runs" if constants else "TorchRec's ways and kernels",
        "constants": constants.source if constants else "TorchRec's bandwidths",
    }
    planned = plan_tables(tables, topology, batch_size, cost=cost, settings=settings)
    taken = time.process_time() - begin
    found, base = planned.certified, float(planned.problem.base_ms.max())
    machine = facts(planned)["topology"]
    beyond = (found.time_ms - found.bound_ms) / (found.bound_ms - base) if found.bound_ms > base else 0.0
    return Row(
        name, len(tables), topology.world_size, machine, batch_size, cost, planned.settings, found.time_ms,
        found.bound_ms, found.gap, base, beyond, found.proven, found.bound_from, planned.seconds, taken,
    )  # fmt: skip


def cases(folder: Path | None, only: str) -> Iterator[tuple[str, list[Table], Topology, int]]:
    """Name, tables, machines and batch size of all that is planned."""
    for name, shapes in SHAPES.items():
        file = None if folder is None else folder / f"{name}.json"
        if only in name and file is not None and file.is_file():
            tables = [replace(table, optimizer=OPTIMIZER) for table in read_tables(file)]
            for ranks, card, gib, batch_size in shapes:
                yield name, tables, machines(ranks, card, gib), batch_size
    for count, ranks, batch_size in GENERATED:
        name = f"generated_{count}"
        if only in name:
            yield name, generated(count), machines(ranks, "h100", 80), batch_size


def scaling(cost: str) -> list[tuple[int, int, float]]:
    """Tables, ranks and CPU seconds of generated sets."""
    found = []
    for count in (25, 50, 100, 200, 400, 800, 1600):
        for ranks in (8, 32, 128):
            try:
                row = run("", generated(count), machines(ranks, "h100", 80), 512, cost)
            except PlannerError as error:
                print(f"{count} tables x {ranks} ranks: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            found.append((count, ranks, row.cpu_seconds))
            print(f"{count} tables x {ranks} ranks: {row.cpu_seconds:.2f} s of CPU, gap {row.gap:.2%}", flush=True)
    return found


def drawn(points: Sequence[tuple[int, int, float]]) -> str:
    """Seconds over tables x ranks as SVG, both axes logarithmic; a colour is a number of ranks."""
    width, height, left, bottom = 640, 360, 60, 46
    sizes, seconds = [t * r for t, r, _ in points], [s for _, _, s in points]
    low_x, high_x = math.log10(min(sizes)) - 0.1, math.log10(max(sizes)) + 0.1
    low_y, high_y = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(max(seconds), 5)))

    def x(size: float) -> float:
        return left + (math.log10(size) - low_x) / (high_x - low_x) * (width - left - 20)

    def y(second: float) -> float:
        return height - bottom - (math.log10(second) - low_y) / (high_y - low_y) * (height - bottom - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text{font:12px sans-serif;fill:#1f2328}line{stroke:#d1d9e0}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for power in range(low_y, high_y + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    for power in range(math.ceil(low_x), math.floor(high_x) + 1):
        at = x(10.0**power)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="20" y2="{height - bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - bottom + 18}" text-anchor="middle">{10**power:,}</text>')
    parts.append(f'<text x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">tables x ranks</text>')
    limit = y(5.0)
    parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{limit:.1f}" y2="{limit:.1f}" style="stroke:#cf222e"/>')
    parts.append(f'<text x="{width - 24}" y="{limit - 5:.1f}" text-anchor="end">5 s</text>')
    colours = dict(zip(sorted({r for _, r, _ in points}), ("#0969da", "#bc4c00", "#1a7f37", "#8250df"), strict=False))
    for tables, ranks, second in points:
        title = f"<title>{tables} tables, {ranks} ranks: {second:.2f} s</title>"
        place = f'cx="{x(tables * ranks):.1f}" cy="{y(second):.1f}"'
        parts.append(f'<circle {place} r="4" fill="{colours[ranks]}">{title}</circle>')
    for n, (ranks, colour) in enumerate(colours.items()):
        at = height - bottom - 60 + 18 * n
        parts.append(f'<circle cx="{width - 110}" cy="{at}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{width - 100}" y="{at + 4}">{ranks} ranks</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=Path, help="folder of sets; without it only generated ones are planned")
    parser.add_argument("--only", default="", metavar="TEXT", help="sets with this in their name")
    parser.add_argument("--cost", default="shardwise", choices=["shardwise", "torchrec"])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    rows = []
    if not options.plot:
        print(
            "| set | tables | ranks | batch | step ms | bound ms | gap | beyond base | proven | seconds | bound from |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|---|")
    else:
        options.plot.write_text(drawn(scaling(options.cost)))
        return 0
    for name, tables, topology, batch_size in cases(options.tables, options.only):
        try:
            row = run(name, tables, topology, batch_size, options.cost)
        except PlannerError as error:
            print(f"{name} on {topology.world_size}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        rows.append(row)
        print(
            f"| {row.set} | {row.tables} | {row.ranks} | {row.batch_size} | {row.step_ms:.4g} | {row.bound_ms:.4g} |"
            f" {row.gap:.2%} | {row.gap_beyond_base:.2%} | {'yes' if row.proven else 'no'} | {row.seconds:.2f} |"
            f" {row.bound_from} |",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if rows:
        print()
        print("Tables are those of the file of that name, or generated by this script. Settings:")
        for what, value in dict.fromkeys(pair for row in rows for pair in row.settings.items()):
            print(f"- {what}: {value}")
        for line in dict.fromkeys(row.topology for row in rows):
            print(f"- {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
