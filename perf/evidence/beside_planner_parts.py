"""Hold our proposers, partitioners, ratings and stats to TorchRec's, over the same options.

Run as `python -m shardwise.perf.evidence.beside_planner_parts [--instances 200] [--golden FILE.json]` where
TorchRec 1.8.0 is installed; docs/beside_torchrec.md tells how. Options come from random instances with many ties and,
for models, from TorchRec's enumerator; both sides get the very same objects, so that proposals can be compared by
identity. TorchRec's rates and places for both in the search; then each partitioner places all proposals on its own.

TorchRec's enumerator goes through sets of types and kernels, so the order of options differs from process to process,
and with it what wins a tie; within a process both sides see one order. Exit status 1: something differs that
`ON_PURPOSE` does not name; 2: no TorchRec.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from shardwise.planner.torchrec import partitioners, perf_models, proposers
from shardwise.planner.torchrec.stats import EmbeddingStats

from .planner_instances import Instance, instance

PARTS = (
    "types", "proposers", "partitioners", "perf_models", "enumerators", "shard_estimators", "utils", "stats",
    "storage_reservations", "planners",
)  # fmt: skip
ON_PURPOSE = {
    "tiers": "ranks of a tier of memory: TorchRec numbers them among those that are left",
}
# proposals of one proposer, and of those the ones that are placed
MOST_PROPOSALS, MOST_PLACED = 400, 12
GOLDEN_SEEDS = (0, 3, 5, 8, 11, 21)
GOLDEN_PROPOSALS, GOLDEN_PLACED = 8, 3

PROPOSERS: dict[str, Callable[[Any], Any]] = {
    "greedy": lambda lib: lib.GreedyProposer(),
    "greedy by sum": lambda lib: lib.GreedyProposer(use_depth=False),
    "greedy, threshold 2": lambda lib: lib.GreedyProposer(threshold=2),
    "uniform": lambda lib: lib.UniformProposer(),
    "uniform by sum": lambda lib: lib.UniformProposer(use_depth=False),
    "grid": lambda lib: lib.GridSearchProposer(),
    "grid, at most 100": lambda lib: lib.GridSearchProposer(max_proposals=100),
    "dynamic": lambda lib: lib.DynamicProgrammingProposer(),
    "dynamic, 3 bins": lambda lib: lib.DynamicProgrammingProposer(hbm_bins_per_device=3),
}
PARTITIONERS: dict[str, Callable[[Any], Any]] = {
    "storage": lambda lib: lib.GreedyPerfPartitioner(),
    "perf": lambda lib: lib.GreedyPerfPartitioner(sort_by=lib.SortBy.PERF),
    "modules": lambda lib: lib.GreedyPerfPartitioner(balance_modules=True),
    "memory": lambda lib: lib.MemoryBalancedPartitioner(),
    "memory, loose": lambda lib: lib.MemoryBalancedPartitioner(max_search_count=3, tolerance=0.3, balance_modules=True),
}


def torchrec() -> SimpleNamespace:
    """What is used of TorchRec's planner, under the names of our modules."""
    try:
        parts = {name: importlib.import_module(f"torchrec.distributed.planner.{name}") for name in PARTS}
        return SimpleNamespace(root=importlib.import_module("torchrec"), **parts)
    except ImportError as error:
        print(f"no TorchRec: {error}", file=sys.stderr)
        raise SystemExit(2) from None


class Tally:
    """Counts agreements, and keeps the text of everything that differs."""

    def __init__(self) -> None:
        self.agreed: Counter[str] = Counter()
        self.on_purpose: Counter[str] = Counter()
        self.different: list[str] = []

    def compare(self, what: str, where: str, theirs: object, ours: object) -> None:
        """Count one comparison."""
        if theirs == ours:
            self.agreed[what] += 1
        else:
            self.different.append(f"{what}, {where}:\n  theirs {str(theirs)[:300]}\n  ours   {str(ours)[:300]}")


def sequence(lib: Any, proposer: Any, problem: Instance, **load: Any) -> tuple[list[list[Any]], float]:
    """What a proposer proposes with TorchRec's feedback, and CPU seconds that it took itself."""
    rating, partitioner = lib.perf_models.NoopPerfModel(problem.topology), lib.partitioners.GreedyPerfPartitioner()
    begin = time.process_time()
    proposer.load(list(problem.options), **load)
    seconds = time.process_time() - begin
    found: list[list[Any]] = []
    while len(found) < MOST_PROPOSALS and (proposal := proposer.propose()):
        lib.utils.reset_shard_rank(proposal)
        rated = None
        with contextlib.suppress(lib.types.PlannerError):
            rated = rating.rate(partitioner.partition(proposal, problem.topology))
        found.append(list(proposal))
        begin = time.process_time()
        proposer.feedback(rated is not None, proposal, rated, problem.topology)
        seconds += time.process_time() - begin
    return found, seconds


def placed(lib: Any, partitioner: Any, proposal: Sequence[Any], topology: Any) -> tuple[object, float]:
    """Ranks of all shards, or the kind of error with its text where TorchRec's is kept; and CPU seconds."""
    lib.utils.reset_shard_rank(proposal)
    begin = time.process_time()
    try:
        partitioner.partition(list(proposal), topology)
    except Exception as error:
        seconds = time.process_time() - begin
        text = str(error)
        return (type(error).__name__, text if text.startswith("Device partition failed") else ""), seconds
    seconds = time.process_time() - begin
    return [shard.rank for option in proposal for shard in option.shards], seconds


def compare(lib: Any, problem: Instance, where: str, tally: Tally, seconds: defaultdict[str, float]) -> None:
    """Both sides' sequences of proposals and, for the first of each proposer, their placements and ratings."""
    number = {id(option): k for k, option in enumerate(problem.options)}
    proposals: dict[tuple[int, ...], list[Any]] = {}
    sides = (lib.perf_models, perf_models)
    for name, make in PROPOSERS.items():
        theirs, their_seconds = sequence(lib, make(lib.proposers), problem)
        ours, our_seconds = sequence(lib, make(proposers), problem)
        told = [[[number[id(option)] for option in one] for one in side] for side in (theirs, ours)]
        tally.compare(f"proposals, {name}", where, *told)
        seconds[f"theirs, {name}"] += their_seconds
        seconds[f"ours, {name}"] += our_seconds
        for one in theirs[:MOST_PLACED]:
            proposals.setdefault(tuple(number[id(option)] for option in one), one)
    for proposal in proposals.values():
        for name, make in PARTITIONERS.items():
            theirs_at, their_seconds = placed(lib, make(lib.partitioners), proposal, problem.topology)
            ours_at, our_seconds = placed(lib, make(partitioners), proposal, problem.topology)
            tally.compare(f"ranks, {name}", where, theirs_at, ours_at)
            seconds[f"theirs, {name}"] += their_seconds
            seconds[f"ours, {name}"] += our_seconds
            if isinstance(ours_at, list):
                for model in ("NoopPerfModel", "NoopStorageModel"):
                    rates = [getattr(side, model)(problem.topology).rate(proposal) for side in sides]
                    tally.compare(f"rating, {model}", where, *rates)


def model_instance(lib: Any, tables: int, hosts: int, *, cached: bool = False) -> tuple[Instance, Any]:
    """The options that TorchRec's enumerator finds for tables on hosts of eight ranks, and the enumerator.

    `cached`: tables are kept on the host with caches that have statistics, else every type and two kernels are allowed.
    """
    types, modules = lib.types, lib.root.modules.embedding_configs
    configs = [
        modules.EmbeddingBagConfig(
            name=f"table_{k}",
            num_embeddings=1000 * (1 + 7 * k % 23) ** 3,
            embedding_dim=(64, 128, 256)[k % 3],
            feature_names=[f"feature_{k}"],
        )
        for k in range(tables)
    ]
    cache_params = importlib.import_module("torchrec.distributed.types").CacheParams

    def statistics(k: int, config: Any) -> Any:
        hits = torch.tensor([1000 // (k % 5 + bin_ + 1) for bin_ in range(20)])
        return lib.shard_estimators.EmbeddingOffloadStats(
            0.1 + 0.05 * (k % 7), 500 * (k + 1), hits, config.num_embeddings
        )

    constraints = {}
    for k, config in enumerate(configs):
        kernels, params = ["fused", "fused_uvm"], None
        if cached:
            kernels = ["fused_uvm_caching"] if k % 6 else ["fused"]
            params = cache_params(load_factor=0.1 + 0.02 * (k % 9), stats=statistics(k, config) if k % 4 else None)
        constraints[config.name] = types.ParameterConstraints(
            sharding_types=["table_wise", "row_wise"] if cached else None,
            compute_kernels=kernels,
            pooling_factors=[float(1 + k % 10)],
            cache_params=params,
        )
    topology = types.Topology(world_size=8 * hosts, local_world_size=8, compute_device="cuda", hbm_cap=24 * 2**30)
    enumerator = lib.enumerators.EmbeddingEnumerator(topology, batch_size=512, constraints=constraints)
    model = torch.nn.Module()
    model.sparse = lib.root.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    sharder = importlib.import_module("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder()
    return Instance(enumerator.enumerate(model, [sharder]), topology), enumerator


def compare_offload(lib: Any, tally: Tally) -> None:
    """Kernels and load factors of every proposal, which go through the enumerator's estimates again."""
    for tables in (6, 24):
        problem, enumerator = model_instance(lib, tables, 1, cached=True)
        sides = []
        for side in (lib.proposers, proposers):
            found, _ = sequence(lib, side.EmbeddingOffloadScaleupProposer(), problem, enumerator=enumerator)
            sides.append([[(o.fqn, o.compute_kernel, o.cache_load_factor) for o in one] for one in found])
        tally.compare(f"proposals, offload ({len(sides[0])})", f"{tables} cached tables", *sides)


def compare_stats(lib: Any, tally: Tally) -> None:
    """Every line of both texts, but for layout and for how ranks are written."""
    reservation = lib.storage_reservations.InferenceStorageReservation(0.15)
    for tables, hosts, cached in ((26, 1, False), (40, 2, False), (12, 1, True)):
        problem, enumerator = model_instance(lib, tables, hosts, cached=cached)
        constraints = enumerator._constraints
        topology = lib.types.Topology(8 * hosts, "cuda", hbm_cap=2**39, ddr_cap=2**42, local_world_size=8)
        for options in range(3):
            by_table: dict[str, list[Any]] = {}
            for option in problem.options:
                by_table.setdefault(option.fqn, []).append(option)
            plan = [found[options * k % len(found)] for k, found in enumerate(by_table.values())]
            lib.partitioners.GreedyPerfPartitioner().partition(plan, topology)
            reservation._dense_storage, reservation._kjt_storage = plan[0].total_storage, plan[-1].total_storage
            sharding_plan = lib.planners.to_sharding_plan(plan, topology)
            arguments = (sharding_plan, topology, 512, reservation, 7, 3, 1.25, plan, constraints, None, enumerator)
            theirs = lib.stats.EmbeddingStats()
            theirs.log(*arguments)
            sides = (theirs._stats_table, EmbeddingStats().render(*arguments).splitlines())
            told = [[line for one in side if (line := _told(one))] for side in sides]
            for line, other in zip_longest(*told):
                if line != other and line and other and line.startswith("Top Tier"):
                    tally.on_purpose["tiers"] += 1
                else:
                    tally.compare("lines of stats", f"{tables} tables", line, other)


def _told(line: str) -> str:
    """A line without its frame, its rules and runs of blanks, each rank by itself."""
    words = " ".join(line.strip().strip("#").split()).replace("[", "").replace("]", "").replace(", ", ",")
    words = re.sub(r"(ranks? )(\d+)-(\d+)$", _each, words).replace("on no rank", "on rank").removesuffix(" ")
    return words if words.strip("- ") else ""


def _each(run: re.Match[str]) -> str:
    return run[1] + ",".join(map(str, range(int(run[2]), int(run[3]) + 1)))


def golden(lib: Any, path: Path) -> None:
    """Write what TorchRec proposes and where it places, for tests without TorchRec."""
    cases = {}
    for seed in GOLDEN_SEEDS:
        problem = instance(seed, lib.types)
        number = {id(option): k for k, option in enumerate(problem.options)}
        sequences = {}
        for name, make in PROPOSERS.items():
            found, _ = sequence(lib, make(lib.proposers), problem)
            sequences[name] = [[number[id(option)] for option in one] for one in found[:GOLDEN_PROPOSALS]]
        ranks = {
            name: [
                placed(lib, make(lib.partitioners), [problem.options[k] for k in one], problem.topology)[0]
                for one in sequences["greedy"][:GOLDEN_PLACED]
            ]
            for name, make in PARTITIONERS.items()
        }
        cases[seed] = {"proposals": sequences, "ranks": ranks}
    lines = [f" {json.dumps(str(seed))}: {json.dumps(case)}" for seed, case in cases.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Print counts of agreements, all differences, and CPU seconds of both."""
    parser = argparse.ArgumentParser(description="Our proposers, partitioners and stats beside TorchRec's.")
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--golden", type=Path)
    arguments = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    lib, tally, seconds = torchrec(), Tally(), defaultdict[str, float](float)
    if arguments.golden:
        golden(lib, arguments.golden)
        return 0
    for seed in range(arguments.instances):
        compare(lib, instance(seed, lib.types), f"instance {seed}", tally, defaultdict(float))
    for tables, hosts in ((5, 1), (26, 1), (40, 2)):
        problem, _ = model_instance(lib, tables, hosts)
        compare(lib, problem, f"model of {tables} tables on {8 * hosts} ranks", tally, seconds)
    compare_offload(lib, tally)
    compare_stats(lib, tally)
    for what, count in sorted(tally.agreed.items()):
        print(f"{count:7d} agree: {what}")
    for why, count in tally.on_purpose.items():
        print(f"{count:7d} differ on purpose: {ON_PURPOSE[why]}")
    print(f"{len(tally.different):7d} differ")
    for text in tally.different:
        print(text)
    print("CPU seconds for the models, theirs and ours:")
    for name in (*PROPOSERS, *PARTITIONERS):
        print(f"  {name}: {seconds[f'theirs, {name}']:.3f} {seconds[f'ours, {name}']:.3f}")
    return 1 if tally.different else 0


if __name__ == "__main__":
    raise SystemExit(main())
