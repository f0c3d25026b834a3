"""Plans of TorchRec's planner and of ours for sets of tables, under TorchRec's estimates and rated by TorchRec.

For each set and shape: TorchRec's planner with each of its proposers and as it is, then our search over exactly the
options that TorchRec enumerates, over those and 32-wide column shards, and our planner by itself with
`cost="torchrec"`. A plan of ours is rated by torchrec's `NoopPerfModel` on torchrec's own `ShardingOption`s, whose
memory is added up as well. What was computed is kept as JSON, a file for each set and shape, and is not computed again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.planner.cost.torchrec import TorchRecCost
from shardwise.planner.errors import PlannerError
from shardwise.planner.plan.files import read_tables
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.search.problem import DoesNotFitError
from shardwise.planner.search.solve import certify, solve
from shardwise.planner.tables import Table
from shardwise.planner.topology import Topology
from shardwise.planner.torchrec.options import placed_options, problem_of

from .planner_sets import generated

GIB = 1024**3
NARROW = 32
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
) -> int:
    """Compares all sets in a folder and generated ones; status 1 if a plan of ours is worse than TorchRec's best.

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
            found = read()
            for shape in SHAPES:
                if shapes in str(shape) and len(found) * shape.ranks <= largest:
                    shown.append(_compare(name, found, shape, results, again))
                    _show(shown[-1])
    print("\n".join(_summary(shown)))
    return int(any(_faults(known) for known in shown))


def times(tables: Path | None, *, only: str = "", laps: int = 3) -> int:
    """CPU seconds of planning sets of 26 tables for 8 ranks: TorchRec's planner, ours under our costs, our bound."""
    print("| set | batch | ours, the plan | the best bound | TorchRec | ours / torchrec |\n|---|---|---|---|---|---|")
    for name, read in _sets(tables):
        found = read() if only in name else []
        for shape in SHAPES[:2] if len(found) == 26 else ():
            side = _TorchRec(found, shape)
            rows = []
            for _ in range(laps):
                begin = time.process_time()
                side._theirs("as it is")
                theirs = time.process_time()
                planned = plan_tables(found, side.ours, shape.batch_size)
                ours = time.process_time()
                planned.certified  # noqa: B018 - computed when asked
                rows.append((ours - theirs, time.process_time() - ours, theirs - begin))
            mine, bound, their = (statistics.median(column) for column in zip(*rows, strict=True))
            print(
                f"| {name} | {shape.batch_size} | {mine:.2f} | {bound:.2f} | {their:.2f} | {mine / their:.2f}x |",
                flush=True,
            )
    return 0


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
    said = run()
    return {**said, "wall_s": round(time.perf_counter() - wall, 3), "cpu_s": round(time.process_time() - cpu, 3)}


class _TorchRec:
    """A set of tables as TorchRec's planner wants it."""

    def __init__(self, tables: Sequence[Table], shape: Shape) -> None:
        self.tables, self.shape = tables, shape
        self.planner = import_module("torchrec.distributed.planner")
        self.types = import_module("torchrec.distributed.planner.types")
        local = shape.ranks // shape.hosts
        self.topology = self.types.Topology(shape.ranks, "cuda", hbm_cap=80 * GIB, local_world_size=local)
        self.ours = Topology(shape.ranks, "cuda", hbm_cap=80 * GIB, local_world_size=local)
        self.model = _model(tables)

    def runs(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """What is computed, by name."""
        for label in PROPOSERS:
            yield label, partial(self._theirs, label)
        yield SAME, partial(self._searched, None)
        yield NARROWER, partial(self._searched, NARROW)
        yield BY_ITSELF, self._by_itself

    def _enumerated(self, min_partition: int | None = None) -> list[Any]:
        enumerator = import_module("torchrec.distributed.planner.enumerators").EmbeddingEnumerator
        sharders = import_module("torchrec.distributed.sharding_plan").get_default_sharders()
        listed: list[Any] = enumerator(
            self.topology, self.shape.batch_size, self._constraints(min_partition)
        ).enumerate(self.model, sharders)
        return listed

    def _constraints(self, min_partition: int | None = None) -> dict[str, Any]:
        return {
            table.name: self.types.ParameterConstraints(
                pooling_factors=[feature.pooling_factor for feature in table.features],
                num_poolings=[feature.num_poolings for feature in table.features],
                batch_sizes=[feature.batch_size or self.shape.batch_size for feature in table.features],
                min_partition=min_partition,
            )
            for table in self.tables
        }

    def _theirs(self, label: str) -> dict[str, Any]:
        proposer, arguments = PROPOSERS[label]
        planner = self.planner.EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.shape.batch_size,
            constraints=self._constraints(),
            storage_reservation=import_module(
                "torchrec.distributed.planner.storage_reservations"
            ).FixedPercentageStorageReservation(0.0),
            proposer=getattr(import_module("torchrec.distributed.planner.proposers"), proposer)(**arguments)
            if proposer
            else None,
            stats=[],
            debug=False,
        )
        try:
            planner.plan(self.model, import_module("torchrec.distributed.sharding_plan").get_default_sharders())
        except self.types.PlannerError as error:
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
            found = certify(problem, solve(problem))
        except DoesNotFitError as error:
            return {"rating_ms": None, "why": str(error).splitlines()[0][:100]}
        return {
            "rating_ms": self._rated(placed_options(problem, choices, found.assignment)),
            "bound_ms": found.bound_ms,
            "bound_from": found.bound_from,
            "proven": found.proven,
            "enumeration_cpu_s": round(listed - begin, 3),
        }

    def _by_itself(self) -> dict[str, Any]:
        cost = TorchRecCost(self.ours, self.shape.batch_size)
        try:
            found = plan_tables(self.tables, self.ours, self.shape.batch_size, cost=cost).certified
        except PlannerError as error:
            return {"rating_ms": None, "why": str(error).splitlines()[0][:100]}
        return {"rating_ms": found.time_ms, "bound_ms": found.bound_ms, "proven": found.proven}

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
        model = import_module("torchrec.distributed.planner.perf_models").NoopPerfModel(self.topology)
        return float(model.rate(plan))


def _model(tables: Sequence[Table]) -> nn.Module:
    """TorchRec's collections of these tables: of bags with weights and without, of rows for each width."""
    torchrec = import_module("torchrec")
    types = import_module("torchrec.modules.embedding_configs").DataType
    made, meta = nn.Module(), torch.device("meta")

    def configs(kind: Any, some: Sequence[Table]) -> list[Any]:
        return [
            kind(
                name=table.name, num_embeddings=table.num_embeddings, embedding_dim=table.embedding_dim,
                feature_names=[f"{table.name}.{feature.name}" for feature in table.features],
                data_type=types[table.data_type.value],
            )
            for table in some
        ]  # fmt: skip

    for weighted in (False, True):
        bags = configs(
            torchrec.EmbeddingBagConfig, [table for table in tables if table.pooled and table.weighted == weighted]
        )
        if bags:
            collection = torchrec.EmbeddingBagCollection(device=meta, tables=bags, is_weighted=weighted)
            made.add_module("weighted_bags" if weighted else "bags", collection)
    for dim in sorted({table.embedding_dim for table in tables if not table.pooled}):
        rows = [table for table in tables if not table.pooled and table.embedding_dim == dim]
        collection = torchrec.EmbeddingCollection(device=meta, tables=configs(torchrec.EmbeddingConfig, rows))
        made.add_module(f"rows_{dim}", collection)
    return made


def _show(known: dict[str, Any]) -> None:
    """Prints all that was run for a set and shape, with the settings."""
    print(f"\n{known['set']}: {known['tables']} tables, batch {known['shape']['batch_size']}")
    print("\n".join(f"  {what}: {said}" for what, said in known["settings"].items()))
    for label, run in known["runs"].items():
        rating = run["rating_ms"]
        told = f"{rating:12.6f} ms" if rating is not None else f"no plan: {run['why']}"
        if "bound_ms" in run:
            told += f", bound {run['bound_ms']:.6f}" + (" (optimal)" if run["proven"] else "")
        spent = f"{run['cpu_s']:.2f} s CPU, {run['wall_s']:.2f} s wall"
        if "enumeration_cpu_s" in run:
            spent += f", {run['enumeration_cpu_s']:.2f} s CPU of it TorchRec's enumerator"
        print(f"  {label:28} {told}  [{spent}]")
    print("".join(f"  WRONG: {fault}\n" for fault in _faults(known)), end="", flush=True)


def _best(known: dict[str, Any]) -> tuple[float, str] | None:
    """The best rating of TorchRec's plans, and whose it is."""
    ratings = [(known["runs"][label]["rating_ms"], label) for label in PROPOSERS]
    return min(((rating, label) for rating, label in ratings if rating is not None), default=None)


def _faults(known: dict[str, Any]) -> list[str]:
    """Plans of ours that are worse than the best of TorchRec's, and bounds above a plan."""
    best, found = _best(known), []
    if best is None:
        return []
    for label in (SAME, NARROWER, BY_ITSELF):
        run = known["runs"][label]
        if run["rating_ms"] is None or run["rating_ms"] > best[0] * (1 + 1e-9):
            found.append(f"{label} is worse than {best[1]}")
        if run.get("bound_ms", 0) > best[0] * (1 + 1e-6):
            found.append(f"the bound of {label} is above the plan of {best[1]}")
    return found


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
        theirs = "none | " if best is None else f"{best[0]:.4f} | {best[1]}"
        ours = [one["rating_ms"] for one in (same, narrower)]
        told = ["none" if rating is None else f"{rating:.4f}" for rating in ours]
        bound = f"{same['bound_ms']:.4f}" + (" (optimal)" if same["proven"] else "") if "bound_ms" in same else ""
        yield (
            f"| {known['set']} | {known['tables']} | {shape.ranks} x {shape.hosts} | {shape.batch_size} | {theirs} |"
            f" {told[0]} | {bound} | {told[1]} | {runs['as it is']['cpu_s']:.2f} | {runs[BY_ITSELF]['cpu_s']:.2f} |"
        )
