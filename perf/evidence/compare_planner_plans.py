"""Plans of TorchRec's planner and of ours for sets of tables, under TorchRec's estimates and rated by TorchRec.

For each set and shape: TorchRec's planner with each of its proposers and as it is, then our search over exactly the
options that TorchRec enumerates, over those and 32-wide column shards, and our planner by itself with
`cost="torchrec"`. A plan of ours is rated by torchrec's `NoopPerfModel` on torchrec's own `ShardingOption`s, whose
memory is added up as well. What was computed is kept as JSON, a file for each set and shape, and is not computed again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.perf.evidence.report import ROOT, Report, grid
from shardwise.perf.suite.cases.planner import OPTIMIZER, generated
from shardwise.perf.suite.libraries import PLANNER, torchrec
from shardwise.perf.suite.options import FLAG, Options
from shardwise.planner.cost.model import constants_of
from shardwise.planner.cost.torchrec import TorchRecCost
from shardwise.planner.errors import PlannerError
from shardwise.planner.plan.explanation import facts
from shardwise.planner.plan.files import read_tables
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.search.problem import DoesNotFitError
from shardwise.planner.search.solve import certify, solve
from shardwise.planner.tables import Table
from shardwise.planner.topology import GIB, Topology
from shardwise.planner.torchrec.options import placed_options, problem_of

NARROW = 32
LOCAL = 8
# of what a card has, kept free for dense layers, activations and the allocator
RESERVED = 0.15
# set -> (ranks, card, GiB of it, samples of a rank's batch)
CLUSTERS: dict[str, tuple[tuple[int, str, int, int], ...]] = {
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
GENERATED_CLUSTERS = ((850, 16, 256), (850, 128, 512))
# tables of generated sets
GENERATED = (50, 200)
PROPOSERS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("GreedyProposer", {}),
    "greedy, sum of shards": ("GreedyProposer", {"use_depth": False}),
    "uniform": ("UniformProposer", {}),
    "grid search": ("GridSearchProposer", {}),
    "dynamic programming": ("DynamicProgrammingProposer", {}),
    # grid search, both greedy ones and uniform, one after the other
    "as it is": ("", {}),
}
SAME, NARROWER, BY_ITSELF = "ours, its options", f"ours, and {NARROW}-wide columns", "ours, plan_tables"


@dataclass(frozen=True)
class Shape:
    """Ranks on hosts, and samples of a rank's batch."""

    ranks: int
    hosts: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.ranks}x{self.hosts}-{self.batch_size}"


SHAPES = tuple(Shape(ranks, hosts, batch) for ranks, hosts in ((8, 1), (16, 2), (64, 8)) for batch in (8192, 512))


def plans(
    tables: Path | None, results: Path, *, only: str = "", shapes: str = "", largest: int = 2000, again: bool = False
) -> bool:
    """Compares all sets in a folder and generated ones; whether no plan of ours is worse than TorchRec's best.

    Args:
        results: folder of what was computed.
        only, shapes: sets and shapes whose text has these in it.
        largest: most tables x ranks that TorchRec is given.
        again: ours are computed anew.
    """
    results.mkdir(parents=True, exist_ok=True)
    shown = []
    for name, read in _sets(tables):
        if only in name:
            of_set = read()
            for shape in SHAPES:
                if shapes in str(shape) and len(of_set) * shape.ranks <= largest:
                    shown.append(_compare(name, of_set, shape, results, again))
                    _show(shown[-1])
    print("\n".join(_summary(shown)))
    return not any(_faults(known) for known in shown)


def times(tables: Path | None, *, only: str = "", laps: int = 3) -> None:
    """CPU seconds of planning sets of 26 tables for 8 ranks: TorchRec's planner, ours under our costs, our bound."""
    print("| set | batch | ours, the plan | the best bound | TorchRec | ours / torchrec |\n|---|---|---|---|---|---|")
    for name, read in _sets(tables):
        of_set = read() if only in name else []
        for shape in SHAPES[:2] if len(of_set) == 26 else ():
            side = _TorchRec(of_set, shape)
            rows = []
            for _ in range(laps):
                begin = time.process_time()
                side._planned_by_torchrec("as it is")
                peer_end = time.process_time()
                planned = plan_tables(of_set, side.ours, shape.batch_size)
                own_end = time.process_time()
                planned.certified  # noqa: B018 - computed when asked
                rows.append((own_end - peer_end, time.process_time() - own_end, peer_end - begin))
            own_s, bound, peer_s = (statistics.median(column) for column in zip(*rows, strict=True))
            print(
                f"| {name} | {shape.batch_size} | {own_s:.2f} | {bound:.2f} | {peer_s:.2f} | {own_s / peer_s:.2f}x |",
                flush=True,
            )


def _sets(folder: Path | None) -> Iterator[tuple[str, Callable[[], Sequence[Table]]]]:
    """Names of sets, and how to get their tables."""
    for file in sorted(folder.glob("*.json")) if folder else ():
        if file.stem != "INDEX":
            yield file.stem, partial(read_tables, file)
    for count in GENERATED:
        yield f"generated_{count}", partial(generated, count)


def _compare(name: str, tables: Sequence[Table], shape: Shape, results: Path, again: bool) -> dict[str, Any]:
    """What is known of a set and shape, after what the file lacks was computed."""
    file = results / f"{name}-{shape}.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    side = _TorchRec(tables, shape)
    known["set"], known["tables"], known["shape"] = name, len(tables), asdict(shape)
    known["settings"] = {
        "topology": str(side.ours), "reservation": "none", "optimizer": "none",
        "enumerator": "TorchRec's, all types and kernels that it offers on a GPU, its estimators",
    }  # fmt: skip
    before: dict[str, dict[str, Any]] = known.get("runs", {})
    runs = known["runs"] = dict(before)
    for label, run in side.runs():
        if label not in before or (again and label.startswith("ours")):
            runs[label] = _timed(run)
            file.write_text(json.dumps(known, indent=1) + "\n")
    known["runs"] = {label: runs[label] for label, _ in side.runs()}
    return known


def _timed(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return {**result, "wall_s": round(time.perf_counter() - wall, 3), "cpu_s": round(time.process_time() - cpu, 3)}


class _TorchRec:
    """A set of tables as TorchRec's planner wants it."""

    def __init__(self, tables: Sequence[Table], shape: Shape) -> None:
        self.tables, self.shape = tables, shape
        self.library = torchrec(PLANNER)
        local = shape.ranks // shape.hosts
        self.topology = self.library.Topology(shape.ranks, "cuda", hbm_cap=80 * GIB, local_world_size=local)
        self.ours = Topology(shape.ranks, "cuda", hbm_cap=80 * GIB, local_world_size=local)
        self.model = _model(tables)

    def runs(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """What is computed, by name."""
        for label in PROPOSERS:
            yield label, partial(self._planned_by_torchrec, label)
        yield SAME, partial(self._searched, None)
        yield NARROWER, partial(self._searched, NARROW)
        yield BY_ITSELF, self._by_itself

    def _enumerated(self, min_partition: int | None = None) -> list[Any]:
        enumerator = self.library.EmbeddingEnumerator(
            self.topology, self.shape.batch_size, self._constraints(min_partition)
        )
        listed: list[Any] = enumerator.enumerate(self.model, self.library.get_default_sharders())
        return listed

    def _constraints(self, min_partition: int | None = None) -> dict[str, Any]:
        return {
            table.name: self.library.ParameterConstraints(
                pooling_factors=[feature.pooling_factor for feature in table.features],
                num_poolings=[feature.num_poolings for feature in table.features],
                batch_sizes=[feature.batch_size or self.shape.batch_size for feature in table.features],
                min_partition=min_partition,
            )
            for table in self.tables
        }

    def _planned_by_torchrec(self, label: str) -> dict[str, Any]:
        proposer, arguments = PROPOSERS[label]
        planner = self.library.EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.shape.batch_size,
            constraints=self._constraints(),
            storage_reservation=self.library.FixedPercentageStorageReservation(0.0),
            proposer=getattr(self.library, proposer)(**arguments) if proposer else None,
            stats=[],
            debug=False,
        )
        try:
            planner.plan(self.model, self.library.get_default_sharders())
        except self.library.PlannerError as error:
            return {"rating_ms": None, "why": str(error).strip().splitlines()[0][:100]}
        return {"rating_ms": self._rated(planner._best_plan)}

    def _searched(self, narrow: int | None) -> dict[str, Any]:
        begin = time.process_time()
        options = self._enumerated()
        if narrow:
            known = {(o.fqn, o.sharding_type, o.num_shards) for o in options}
            options += [o for o in self._enumerated(narrow) if (o.fqn, o.sharding_type, o.num_shards) not in known]
        listed = time.process_time()
        problem, choices = problem_of(options, self.topology)
        try:
            certificate = certify(problem, solve(problem))
        except DoesNotFitError as error:
            return {"rating_ms": None, "why": str(error).splitlines()[0][:100]}
        return {
            "rating_ms": self._rated(placed_options(problem, choices, certificate.assignment)),
            "bound_ms": certificate.bound_ms,
            "bound_from": certificate.bound_from,
            "proven": certificate.proven,
            "enumeration_cpu_s": round(listed - begin, 3),
        }

    def _by_itself(self) -> dict[str, Any]:
        cost = TorchRecCost(self.ours, self.shape.batch_size)
        try:
            certificate = plan_tables(self.tables, self.ours, self.shape.batch_size, cost=cost).certified
        except PlannerError as error:
            return {"rating_ms": None, "why": str(error).splitlines()[0][:100]}
        return {"rating_ms": certificate.time_ms, "bound_ms": certificate.bound_ms, "proven": certificate.proven}

    def _rated(self, plan: list[Any]) -> float:
        """By torchrec's model.

        Raises:
            ValueError: a rank would hold more than it can.
        """
        left = [[device.storage.hbm, device.storage.ddr] for device in self.topology.devices]
        for option in plan:
            for shard in option.shards:
                left[shard.rank][0] -= shard.storage.hbm
                left[shard.rank][1] -= shard.storage.ddr
        if min(map(min, left)) < 0:
            raise ValueError(f"a rank is {-min(map(min, left))} bytes over its memory")
        return float(self.library.NoopPerfModel(self.topology).rate(plan))


def _model(tables: Sequence[Table]) -> nn.Module:
    """TorchRec's collections of these tables: of bags with weights and without, of rows for each width."""
    library = torchrec(PLANNER)
    made, meta = nn.Module(), torch.device("meta")

    def configs(kind: Any, some: Sequence[Table]) -> list[Any]:
        return [
            kind(
                name=table.name, num_embeddings=table.num_embeddings, embedding_dim=table.embedding_dim,
                feature_names=[f"{table.name}.{feature.name}" for feature in table.features],
                data_type=library.DataType[table.data_type.value],
            )
            for table in some
        ]  # fmt: skip

    for weighted in (False, True):
        bags = configs(
            library.EmbeddingBagConfig, [table for table in tables if table.pooled and table.weighted == weighted]
        )
        if bags:
            collection = library.EmbeddingBagCollection(device=meta, tables=bags, is_weighted=weighted)
            made.add_module("weighted_bags" if weighted else "bags", collection)
    for dim in sorted({table.embedding_dim for table in tables if not table.pooled}):
        rows = [table for table in tables if not table.pooled and table.embedding_dim == dim]
        collection = library.EmbeddingCollection(device=meta, tables=configs(library.EmbeddingConfig, rows))
        made.add_module(f"rows_{dim}", collection)
    return made


def _show(known: dict[str, Any]) -> None:
    """Prints all that was run for a set and shape, with the settings."""
    print(f"\n{known['set']}: {known['tables']} tables, batch {known['shape']['batch_size']}")
    print("\n".join(f"  {setting}: {value}" for setting, value in known["settings"].items()))
    for label, run in known["runs"].items():
        rating = run["rating_ms"]
        line = f"{rating:12.6f} ms" if rating is not None else f"no plan: {run['why']}"
        if "bound_ms" in run:
            line += f", bound {run['bound_ms']:.6f}" + (" (optimal)" if run["proven"] else "")
        spent = f"{run['cpu_s']:.2f} s CPU, {run['wall_s']:.2f} s wall"
        if "enumeration_cpu_s" in run:
            spent += f", {run['enumeration_cpu_s']:.2f} s CPU of it TorchRec's enumerator"
        print(f"  {label:28} {line}  [{spent}]")
    print("".join(f"  WRONG: {fault}\n" for fault in _faults(known)), end="", flush=True)


def _best(known: dict[str, Any]) -> tuple[float, str] | None:
    """The best rating of TorchRec's plans, and whose it is."""
    ratings = [(known["runs"][label]["rating_ms"], label) for label in PROPOSERS]
    return min(((rating, label) for rating, label in ratings if rating is not None), default=None)


def _faults(known: dict[str, Any]) -> list[str]:
    """Plans of ours that are worse than the best of TorchRec's, and bounds above a plan."""
    best, faults = _best(known), []
    if best is None:
        return []
    for label in (SAME, NARROWER, BY_ITSELF):
        run = known["runs"][label]
        if run["rating_ms"] is None or run["rating_ms"] > best[0] * (1 + 1e-9):
            faults.append(f"{label} is worse than {best[1]}")
        if run.get("bound_ms", 0) > best[0] * (1 + 1e-6):
            faults.append(f"the bound of {label} is above the plan of {best[1]}")
    return faults


def _summary(shown: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row for each set and shape that both or one can plan."""
    yield (
        "\n| set | tables | ranks x hosts | batch | TorchRec's best, ms | by | ours | bound | with 32-wide columns |"
        " TorchRec's CPU s, as it is | ours |"
    )
    yield "| --- |" + " ---: |" * 4 + " --- |" + " ---: |" * 5
    for known in shown:
        best, runs, shape = _best(known), known["runs"], Shape(**known["shape"])
        same, narrower = runs[SAME], runs[NARROWER]
        if best is None and same["rating_ms"] is None:
            continue
        best_row = "none | " if best is None else f"{best[0]:.4f} | {best[1]}"
        ratings = [result["rating_ms"] for result in (same, narrower)]
        cells = ["none" if rating is None else f"{rating:.4f}" for rating in ratings]
        bound = f"{same['bound_ms']:.4f}" + (" (optimal)" if same["proven"] else "") if "bound_ms" in same else ""
        yield (
            f"| {known['set']} | {known['tables']} | {shape.ranks} x {shape.hosts} | {shape.batch_size} | {best_row} |"
            f" {cells[0]} | {bound} | {cells[1]} | {runs['as it is']['cpu_s']:.2f} | {runs[BY_ITSELF]['cpu_s']:.2f} |"
        )


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


def machines(ranks: int, card: str, gib: int) -> Topology:
    """Hosts of 8 cards with what the reservation leaves of each."""
    return Topology(
        ranks, "cuda", hbm_cap=int(gib * GIB * (1 - RESERVED)), local_world_size=min(LOCAL, ranks), card=card
    )


def planned(name: str, tables: Sequence[Table], topology: Topology, batch_size: int, cost: str) -> Row:
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
    plan = plan_tables(tables, topology, batch_size, cost=cost, settings=settings)
    taken = time.process_time() - begin
    proof, base = plan.certified, float(plan.problem.base_ms.max())
    machine = facts(plan)["topology"]
    beyond = (proof.time_ms - proof.bound_ms) / (proof.bound_ms - base) if proof.bound_ms > base else 0.0
    return Row(
        name, len(tables), topology.world_size, machine, batch_size, cost, plan.settings, proof.time_ms,
        proof.bound_ms, proof.gap, base, beyond, proof.proven, proof.bound_from, plan.seconds, taken,
    )  # fmt: skip


def cases(folder: Path | None, only: str) -> Iterator[tuple[str, list[Table], Topology, int]]:
    """Name, tables, machines and batch size of all that is planned."""
    for name, shapes in CLUSTERS.items():
        file = None if folder is None else folder / f"{name}.json"
        if only in name and file is not None and file.is_file():
            tables = [replace(table, optimizer=OPTIMIZER) for table in read_tables(file)]
            for ranks, card, gib, batch_size in shapes:
                yield name, tables, machines(ranks, card, gib), batch_size
    for count, ranks, batch_size in GENERATED_CLUSTERS:
        name = f"generated_{count}"
        if only in name:
            yield name, generated(count), machines(ranks, "h100", 80), batch_size


def scaling(cost: str) -> list[tuple[int, int, float]]:
    """Tables, ranks and CPU seconds of generated sets."""
    points = []
    for count in (25, 50, 100, 200, 400, 800, 1600):
        for ranks in (8, 32, 128):
            try:
                row = planned("", generated(count), machines(ranks, "h100", 80), 512, cost)
            except PlannerError as error:
                print(f"{count} tables x {ranks} ranks: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            points.append((count, ranks, row.cpu_seconds))
            print(f"{count} tables x {ranks} ranks: {row.cpu_seconds:.2f} s of CPU, gap {row.gap:.2%}", flush=True)
    return points


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

    def line(x1: float, y1: float, x2: float, y2: float, style: str = "") -> str:
        look = f' style="{style}"' if style else ""
        return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"{look}/>'

    def text(at_x: float, at_y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}">{words}</text>'

    ends, foot, limit = width - 20, height - bottom, y(5.0)
    colours = dict(zip(sorted({r for _, r, _ in points}), ("#0969da", "#bc4c00", "#1a7f37", "#8250df"), strict=False))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text{font:12px sans-serif;fill:#1f2328}line{stroke:#d1d9e0}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *(
            line(left, y(10.0**power), ends, y(10.0**power))
            + text(left - 8, y(10.0**power) + 4, f"{10.0**power:g} s", "end")
            for power in range(low_y, high_y + 1)
        ),
        *(
            line(x(10.0**power), 20, x(10.0**power), foot) + text(x(10.0**power), foot + 18, f"{10**power:,}")
            for power in range(math.ceil(low_x), math.floor(high_x) + 1)
        ),
        text(width / 2, height - 8, "tables x ranks"),
        line(left, limit, ends, limit, "stroke:#cf222e"), text(width - 24, limit - 5, "5 s", "end"),
        *(
            f'<circle cx="{x(tables * ranks):.1f}" cy="{y(second):.1f}" r="4" fill="{colours[ranks]}">'
            f"<title>{tables} tables, {ranks} ranks: {second:.2f} s</title></circle>"
            for tables, ranks, second in points
        ),
        *(
            f'<circle cx="{width - 110}" cy="{foot - 60 + 18 * n}" r="4" fill="{colour}"/>'
            + text(width - 100, foot - 56 + 18 * n, f"{ranks} ranks", "start")
            for n, (ranks, colour) in enumerate(colours.items())
        ),
        "</svg>", "",
    ])  # fmt: skip


def sets(tables: Path | None, *, only: str, cost: str, result: Path | None) -> None:
    """Plan every set that fits on several clusters and print a row for each; `result` keeps the numbers as JSON.

    The gap beyond base is the gap as a share of what a plan can change: the bound less what every rank spends whatever
    the plan. Seconds are of pricing, search, bound and gap; imports are not in it.
    """
    rows = []
    for name, of_set, topology, batch_size in cases(tables, only):
        try:
            rows.append(planned(name, of_set, topology, batch_size, cost))
        except PlannerError as error:
            print(f"{name} on {topology.world_size}: {str(error).splitlines()[0]}", file=sys.stderr)
    print("\n".join(grid(HEADER, map(_cells, rows))))
    if result:
        result.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print("\nTables are those of the file of that name, or generated by this script. Settings:")
    for setting, value in dict.fromkeys(pair for row in rows for pair in row.settings.items()):
        print(f"- {setting}: {value}")
    for line in dict.fromkeys(row.topology for row in rows):
        print(f"- {line}")


HEADER = (
    "set", "tables", "ranks", "batch", "step ms", "bound ms", "gap", "beyond base", "proven", "seconds", "bound from",
)  # fmt: skip


def _cells(row: Row) -> list[object]:
    return [
        row.set, row.tables, row.ranks, row.batch_size, f"{row.step_ms:.4g}", f"{row.bound_ms:.4g}", f"{row.gap:.2%}",
        f"{row.gap_beyond_base:.2%}", "yes" if row.proven else "no", f"{row.seconds:.2f}", row.bound_from,
    ]  # fmt: skip


OPTIONS: Options = {
    "what": {"choices": ("plans", "times", "sets"), "help": "plans and times need TorchRec"},
    "--tables": {"type": Path, "help": "folder of the sets; without it only generated ones are planned"},
    "--only": {"default": "", "help": "sets whose name has this in it"},
    "--shapes": {"default": "", "help": "plans: shapes whose text has this in it, '8x1' say"},
    "--results": {"type": Path, "default": ROOT / "perf" / "results" / "planner", "help": "of plans"},
    "--largest": {"type": int, "default": 2000, "help": "plans: most tables x ranks for TorchRec"},
    "--again": {**FLAG, "help": "plans: ours anew, TorchRec's as stored"},
    "--cost": {"default": "shardwise", "choices": ["shardwise", "torchrec"], "help": "sets: the cost model"},
    "--json": {"type": Path, "help": "sets: keep the numbers"},
    "--plot": {"type": Path, "help": "sets: only draw seconds over tables x ranks of generated ones (SVG)"},
}


def run(options: argparse.Namespace) -> Report:
    """Plan, and print as it goes.

    Raises:
        ImportError: TorchRec is not installed, and is asked for.
    """
    good = True
    if options.what != "sets":
        torchrec(PLANNER)
    if options.what == "times":
        times(options.tables, only=options.only)
    elif options.what == "plans":
        good = plans(options.tables, options.results, only=options.only, shapes=options.shapes,
                     largest=options.largest, again=options.again)  # fmt: skip
    elif options.plot:
        options.plot.write_text(drawn(scaling(options.cost)))
    else:
        sets(options.tables, only=options.only, cost=options.cost, result=options.json)
    return Report("", good)
