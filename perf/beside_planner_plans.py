"""Plans of TorchRec's planner and of ours for sets of tables, under TorchRec's estimates and rated by TorchRec.

For each set and shape: TorchRec's planner with each of its proposers, then our search over exactly the options that
TorchRec enumerates, over those and 32-wide column shards, and our planner by itself with `cost="torchrec"`. A plan of
ours is rated by torchrec's `NoopPerfModel` on torchrec's own `ShardingOption`s, whose memory is added up as well. What
was computed is kept as JSON, a file for each set and shape, and is not computed again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.planner.cost_torchrec import TorchRecCost
from shardwise.planner.errors import PlannerError
from shardwise.planner.files import read_tables
from shardwise.planner.options import placed_options, problem_of
from shardwise.planner.planning import plan_tables
from shardwise.planner.problem import DoesNotFitError
from shardwise.planner.solve import solve
from shardwise.planner.tables import Table
from shardwise.planner.topology import Topology

GIB = 1024**3
NARROW = 32
# of TorchRec's planner, which stops a proposer after this many
TIMEOUT_SECONDS = 500
PROPOSERS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("GreedyProposer", {}),
    "greedy, sum of shards": ("GreedyProposer", {"use_depth": False}),
    "uniform": ("UniformProposer", {}),
    "grid search": ("GridSearchProposer", {}),
    "dynamic programming": ("DynamicProgrammingProposer", {}),
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
    """Compares all sets in a folder; status 1 if a plan of ours is worse than the best of TorchRec's.

    Args:
        results: folder of what was computed.
        only, shapes: sets and shapes whose text has these in it.
        largest: most tables x ranks that TorchRec is given.
        again: ours are computed anew.
    """
    results.mkdir(parents=True, exist_ok=True)
    worse = 0
    for file in sorted(tables.glob("*.json")) if tables else ():
        if file.stem == "INDEX" or only not in file.stem:
            continue
        found = read_tables(file)
        for shape in SHAPES:
            if shapes in str(shape) and len(found) * shape.ranks <= largest:
                worse += _compare(file.stem, found, shape, results, again)
    return int(worse > 0)


def _compare(name: str, tables: Sequence[Table], shape: Shape, results: Path, again: bool) -> bool:
    """Fills in what a file of results lacks, and prints it."""
    file = results / f"{name}-{shape}.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    side = _TorchRec(tables, shape)
    known["set"], known["tables"], known["shape"] = name, len(tables), asdict(shape)
    known["settings"] = {
        "topology": str(side.ours), "reservation": "none", "optimizer": "none",
        "enumerator": "TorchRec's, all types and kernels that it offers on a GPU, its estimators",
    }  # fmt: skip
    runs: dict[str, dict[str, Any]] = known.setdefault("runs", {})
    for label, run in side.runs():
        if label not in runs or (again and label.startswith("ours")):
            runs[label] = _timed(run)
            file.write_text(json.dumps(known, indent=1))
    return _show(known)


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
            yield label, lambda label=label: self._theirs(label)  # type: ignore[misc]
        yield SAME, lambda: self._searched(None)
        yield NARROWER, lambda: self._searched(NARROW)
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
            proposer=getattr(import_module("torchrec.distributed.planner.proposers"), proposer)(**arguments),
            stats=[],
            debug=False,
            timeout_seconds=TIMEOUT_SECONDS,
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
            found = solve(problem)
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
            found = plan_tables(self.tables, self.ours, self.shape.batch_size, cost=cost).solution
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


def _show(known: dict[str, Any]) -> bool:
    """Prints a set; is a plan of ours worse than the best of TorchRec's, or a bound above a plan?"""
    runs, shape = known["runs"], Shape(**known["shape"])
    print(f"\n{known['set']}: {known['tables']} tables, batch {shape.batch_size}, {known['settings']['topology']}")
    print("; ".join(f"{what}: {said}" for what, said in known["settings"].items() if what != "topology"))
    best = min((runs[one]["rating_ms"] for one in PROPOSERS if runs[one]["rating_ms"] is not None), default=None)
    faults = []
    for label, run in runs.items():
        rating = run["rating_ms"]
        told = f"{rating:12.6f} ms" if rating is not None else f"no plan: {run['why']}"
        if "bound_ms" in run:
            told += f", bound {run['bound_ms']:.6f}" + (" (optimal)" if run["proven"] else "")
        spent = f"{run['cpu_s']:.2f} s CPU, {run['wall_s']:.2f} s wall"
        if "enumeration_cpu_s" in run:
            spent += f", {run['enumeration_cpu_s']:.2f} s CPU of it TorchRec's enumerator"
        print(f"  {label:28} {told}  [{spent}]")
        if label.startswith("ours") and best is not None and (rating is None or rating > best * (1 + 1e-9)):
            faults.append(label)
    same = runs.get(SAME, {})
    if best is not None and same.get("bound_ms", 0) > best * (1 + 1e-6):
        faults.append("the bound is above a plan of TorchRec's")
    if best is not None and same.get("rating_ms") is not None:
        print(f"  best of TorchRec's over ours, its options: {best / same['rating_ms']:.4f}")
    if faults:
        print(f"  WORSE: {', '.join(faults)}")
    return bool(faults)
