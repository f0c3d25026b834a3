"""TorchRec's planner beside ours under TorchRec's own formulas, part by part; docs/evidence/beside_torchrec_planner.md
tells it.

Many random options: our Perf and Storage against torchrec's. Models and topologies: our enumerator's options against
torchrec's. Our proposers, partitioners, ratings and stats against TorchRec's over the same options: these come from
random instances with many ties and, for models, from TorchRec's enumerator; both sides get the very same objects, so
that proposals can be compared by identity. TorchRec's rates and places for both in the search; then each partitioner
places all proposals on its own.

TorchRec's enumerator goes through sets of types and kernels, so the order of options differs from process to process,
and with it what wins a tie; within a process both sides see one order. Not as it has to be: a number differs, or
something else that `ON_PURPOSE` does not name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import optim

from shardwise.perf.evidence.planner_cases import (
    PARTITIONERS,
    PROPOSERS,
    Instance,
    estimate,
    instance,
    random_cases,
)
from shardwise.perf.evidence.report import Report
from shardwise.perf.suite import libraries
from shardwise.perf.suite.libraries import PLANNER, torchrec
from shardwise.perf.suite.options import Options
from shardwise.planner.torchrec import enumerators
from shardwise.sharding import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

ON_PURPOSE = {
    "tiers": "ranks of a tier of memory: TorchRec numbers them among those that are left",
    "cut": "generated plans: TorchRec fails, or leaves columns or ranks out",
    "refused": "generated plans: columns that do not divide are refused",
    "fused_params": "generated plans: TorchRec passes fused_params of the sharder over",
}
# proposals of one proposer, and of those the ones that are placed
MOST_PROPOSALS, MOST_PLACED = 400, 12
GOLDEN_SEEDS = (0, 3, 5, 8, 11, 21)
GOLDEN_PROPOSALS, GOLDEN_PLACED = 8, 3
# of the numbers that tests have
GOLDEN_ESTIMATES = 24
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "4 ranks": {"world_size": 4, "compute_device": "cuda"},
    "2 hosts of 8": {"world_size": 16, "compute_device": "cuda", "local_world_size": 8},
    "pods of 2 hosts": {"world_size": 8, "compute_device": "cuda", "local_world_size": 2, "pod_size": 2},
    "uneven memory": {"world_size": 3, "compute_device": "cuda", "custom": {"hbm_cap": [10, 20, 40]}},
    "CPU": {"world_size": 4, "compute_device": "cpu"},
}
CONSTRAINTS: dict[str, dict[str, dict[str, Any]]] = {
    "no constraints": {},
    "constraints": {
        "t3": {
            "sharding_types": ["column_wise", "grid_shard", "table_wise"], "min_partition": 32,
            "pooling_factors": [7.5], "compute_kernels": ["fused", "key_value"],
        },
        "s1": {"compute_kernels": ["fused_uvm_caching"]},
    },
}  # fmt: skip


def golden_estimates() -> str:
    """For each of the first random cases, how many shards there are and what the first costs, as JSON."""
    lines = []
    for case in random_cases(GOLDEN_ESTIMATES):
        _, perfs, storages = estimate(case, torchrec(PLANNER))
        lines.append(json.dumps([len(perfs), [float(f"{ms:.14g}") for ms in perfs[0]], storages[0]]))
    return "[\n " + ",\n ".join(lines) + "\n]\n"


def formulas(count: int) -> tuple[str, bool]:
    """Compares estimates of many random options."""
    own, peer = libraries.ours(PLANNER), torchrec(PLANNER)
    shards, unequal, worst = 0, 0, 0.0
    for case in random_cases(count, seed=1):
        _, perfs, storages = estimate(case, peer)
        _, own_perfs, own_storages = estimate(case, own)
        shards += len(perfs)
        unequal += sum(a != b for a, b in zip(storages, own_storages, strict=True))
        for peer_ms, own_ms in zip(perfs, own_perfs, strict=True):
            for a, b in zip(peer_ms, own_ms, strict=True):
                worst = max(worst, abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0)
    line = (
        f"{count} options, {shards} shards: largest relative difference of a time {worst:g}, {unequal} storages differ"
    )
    return line, worst <= 1e-12 and not unequal


class _Bags(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return enumerators.sharding_types(True, compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return enumerators.compute_kernels(sharding_type, compute_device_type)


class _Rows(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return enumerators.sharding_types(False, compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return enumerators.compute_kernels(sharding_type, compute_device_type)


def compare_options() -> Iterator[tuple[str, int, int, bool]]:
    """What is enumerated, how many options ours and TorchRec's are, and whether they are the same."""
    peer, own = torchrec(PLANNER), libraries.ours(PLANNER)
    for machines, topology in TOPOLOGIES.items():
        for asked, constraints in CONSTRAINTS.items():
            if topology["compute_device"] == "cpu" and constraints:
                continue
            listed = _enumerator(peer, topology, constraints).enumerate(_model(peer), peer.get_default_sharders())
            own_options = _enumerator(own, topology, constraints).enumerate(_model(own), [_Bags(), _Rows()])
            same = sorted(map(_described, own_options)) == sorted(map(_described, listed))
            # tables come in the same order; TorchRec's order of a table's types depends on the process
            order = [list(dict.fromkeys(o.fqn for o in options)) for options in (own_options, listed)]
            yield f"{machines}, {asked}", len(own_options), len(listed), same and order[0] == order[1]


def _enumerator(library: Any, topology: dict[str, Any], constraints: dict[str, dict[str, Any]]) -> Any:
    arguments = dict(topology)
    custom = arguments.pop("custom", None)
    if custom:
        arguments["custom_topology_data"] = library.CustomTopologyData(custom, topology["world_size"])
    asked = {name: library.ParameterConstraints(**settings) for name, settings in constraints.items()}
    return library.EmbeddingEnumerator(library.Topology(**arguments), 512, asked or None)


def _model(library: Any) -> nn.Module:
    bags = [
        library.EmbeddingBagConfig(
            name=f"t{i}", embedding_dim=dim, num_embeddings=1000 + 37 * i, feature_names=[f"f{i}"]
        )
        for i, dim in enumerate((8, 128, 256, 384, 512))
    ]
    rows = [
        library.EmbeddingConfig(name=f"s{i}", embedding_dim=256, num_embeddings=2000 + i, feature_names=[f"g{i}"])
        for i in range(2)
    ]
    made = nn.Module()
    made.bags = library.EmbeddingBagCollection(device=torch.device("meta"), tables=bags)
    made.inner = nn.Module()
    made.inner.rows = library.EmbeddingCollection(device=torch.device("meta"), tables=rows)
    return made


def _described(option: Any) -> tuple[Any, ...]:
    shards = tuple(
        (*shard.size, *shard.offset, shard.storage.hbm, shard.storage.ddr, shard.storage.ssd, shard.perf.total,
         shard.perf.input_dist_comms)
        for shard in option.shards
    )  # fmt: skip
    kind = option.sharding_type, option.compute_kernel, option.partition_by
    return option.fqn, *kind, shards, option.is_pooled, option.is_weighted, tuple(option.input_lengths)


class Tally:
    """Counts agreements, and keeps the text of everything that differs."""

    def __init__(self) -> None:
        self.agreed: Counter[str] = Counter()
        self.on_purpose: Counter[str] = Counter()
        self.different: list[str] = []

    def compare(self, subject: str, where: str, theirs: object, ours: object) -> None:
        """Count one comparison."""
        if theirs == ours:
            self.agreed[subject] += 1
        else:
            self.different.append(f"{subject}, {where}:\n  theirs {str(theirs)[:300]}\n  ours   {str(ours)[:300]}")


def sequence(lib: Any, proposer: Any, problem: Instance, **load: Any) -> tuple[list[list[Any]], float]:
    """What a proposer proposes with TorchRec's feedback, and CPU seconds that it took itself."""
    rating, partitioner = lib.NoopPerfModel(problem.topology), lib.GreedyPerfPartitioner()
    begin = time.process_time()
    proposer.load(list(problem.options), **load)
    seconds = time.process_time() - begin
    proposals: list[list[Any]] = []
    while len(proposals) < MOST_PROPOSALS and (proposal := proposer.propose()):
        lib.reset_shard_rank(proposal)
        rated = None
        with contextlib.suppress(lib.PlannerError):
            rated = rating.rate(partitioner.partition(proposal, problem.topology))
        proposals.append(list(proposal))
        begin = time.process_time()
        proposer.feedback(rated is not None, proposal, rated, problem.topology)
        seconds += time.process_time() - begin
    return proposals, seconds


def placed(lib: Any, partitioner: Any, proposal: Sequence[Any], topology: Any) -> tuple[object, float]:
    """Ranks of all shards, or the kind of error with its text where TorchRec's is kept; and CPU seconds."""
    lib.reset_shard_rank(proposal)
    begin = time.process_time()
    try:
        partitioner.partition(list(proposal), topology)
    except Exception as error:
        seconds = time.process_time() - begin
        text = str(error)
        return (type(error).__name__, text if text.startswith("Device partition failed") else ""), seconds
    seconds = time.process_time() - begin
    return [shard.rank for option in proposal for shard in option.shards], seconds


def compare_parts(lib: Any, problem: Instance, where: str, tally: Tally, seconds: defaultdict[str, float]) -> None:
    """Both sides' sequences of proposals and, for the first of each proposer, their placements and ratings."""
    number = {id(option): k for k, option in enumerate(problem.options)}
    proposals: dict[tuple[int, ...], list[Any]] = {}
    own_lib = libraries.ours(PLANNER)
    sides = (lib, own_lib)
    for name, make in PROPOSERS.items():
        peer_proposals, peer_seconds = sequence(lib, make(lib), problem)
        own_proposals, own_seconds = sequence(lib, make(own_lib), problem)
        numbered = [
            [[number[id(option)] for option in proposed] for proposed in side]
            for side in (peer_proposals, own_proposals)
        ]
        tally.compare(f"proposals, {name}", where, *numbered)
        seconds[f"theirs, {name}"] += peer_seconds
        seconds[f"ours, {name}"] += own_seconds
        for proposed in peer_proposals[:MOST_PLACED]:
            proposals.setdefault(tuple(number[id(option)] for option in proposed), proposed)
    for proposal in proposals.values():
        for name, make in PARTITIONERS.items():
            peer_ranks, peer_seconds = placed(lib, make(lib), proposal, problem.topology)
            own_ranks, own_seconds = placed(lib, make(own_lib), proposal, problem.topology)
            tally.compare(f"ranks, {name}", where, peer_ranks, own_ranks)
            seconds[f"theirs, {name}"] += peer_seconds
            seconds[f"ours, {name}"] += own_seconds
            if isinstance(own_ranks, list):
                for model in ("NoopPerfModel", "NoopStorageModel"):
                    rates = [getattr(side, model)(problem.topology).rate(proposal) for side in sides]
                    tally.compare(f"rating, {model}", where, *rates)


def model_instance(lib: Any, tables: int, hosts: int, *, cached: bool = False) -> tuple[Instance, Any]:
    """The options that TorchRec's enumerator finds for tables on hosts of eight ranks, and the enumerator.

    `cached`: tables are kept on the host with caches that have statistics, else every type and two kernels are allowed.
    """
    configs = [
        lib.EmbeddingBagConfig(
            name=f"table_{k}",
            num_embeddings=1000 * (1 + 7 * k % 23) ** 3,
            embedding_dim=(64, 128, 256)[k % 3],
            feature_names=[f"feature_{k}"],
        )
        for k in range(tables)
    ]

    def statistics(k: int, config: Any) -> Any:
        hits = torch.tensor([1000 // (k % 5 + bin_ + 1) for bin_ in range(20)])
        return lib.EmbeddingOffloadStats(0.1 + 0.05 * (k % 7), 500 * (k + 1), hits, config.num_embeddings)

    constraints = {}
    for k, config in enumerate(configs):
        kernels, params = ["fused", "fused_uvm"], None
        if cached:
            kernels = ["fused_uvm_caching"] if k % 6 else ["fused"]
            params = lib.CacheParams(load_factor=0.1 + 0.02 * (k % 9), stats=statistics(k, config) if k % 4 else None)
        constraints[config.name] = lib.ParameterConstraints(
            sharding_types=["table_wise", "row_wise"] if cached else None,
            compute_kernels=kernels,
            pooling_factors=[float(1 + k % 10)],
            cache_params=params,
        )
    topology = lib.Topology(world_size=8 * hosts, local_world_size=8, compute_device="cuda", hbm_cap=24 * 2**30)
    enumerator = lib.EmbeddingEnumerator(topology, batch_size=512, constraints=constraints)
    model = torch.nn.Module()
    model.sparse = lib.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    return Instance(enumerator.enumerate(model, [lib.EmbeddingBagCollectionSharder()]), topology), enumerator


def compare_offload(lib: Any, tally: Tally) -> None:
    """Kernels and load factors of every proposal, which go through the enumerator's estimates again."""
    for tables in (6, 24):
        problem, enumerator = model_instance(lib, tables, 1, cached=True)
        sides = []
        for side in (lib, libraries.ours(PLANNER)):
            proposals, _ = sequence(lib, side.EmbeddingOffloadScaleupProposer(), problem, enumerator=enumerator)
            sides.append([[(o.fqn, o.compute_kernel, o.cache_load_factor) for o in proposal] for proposal in proposals])
        tally.compare(f"proposals, offload ({len(sides[0])})", f"{tables} cached tables", *sides)


def compare_stats(lib: Any, tally: Tally) -> None:
    """Every line of both texts, but for layout and for how ranks are written."""
    reservation = lib.InferenceStorageReservation(0.15)
    for tables, hosts, cached in ((26, 1, False), (40, 2, False), (12, 1, True)):
        problem, enumerator = model_instance(lib, tables, hosts, cached=cached)
        constraints = enumerator._constraints
        topology = lib.Topology(8 * hosts, "cuda", hbm_cap=2**39, ddr_cap=2**42, local_world_size=8)
        for options in range(3):
            by_table: dict[str, list[Any]] = {}
            for option in problem.options:
                by_table.setdefault(option.fqn, []).append(option)
            plan = [same_table[options * k % len(same_table)] for k, same_table in enumerate(by_table.values())]
            lib.GreedyPerfPartitioner().partition(plan, topology)
            reservation._dense_storage, reservation._kjt_storage = plan[0].total_storage, plan[-1].total_storage
            sharding_plan = lib.to_sharding_plan(plan, topology)
            arguments = (sharding_plan, topology, 512, reservation, 7, 3, 1.25, plan, constraints, None, enumerator)
            stats = lib.EmbeddingStats()
            stats.log(*arguments)
            sides = (stats._stats_table, libraries.ours(PLANNER).EmbeddingStats().render(*arguments).splitlines())
            texts = [[line for row in side if (line := _bare(row))] for side in sides]
            for line, other in zip_longest(*texts):
                if line != other and line and other and line.startswith("Top Tier"):
                    tally.on_purpose["tiers"] += 1
                else:
                    tally.compare("lines of stats", f"{tables} tables", line, other)


def _bare(line: str) -> str:
    """A line without its frame, its rules and runs of blanks, each rank by itself."""
    text = " ".join(line.strip().strip("#").split()).replace("[", "").replace("]", "").replace(", ", ",")
    text = re.sub(r"(ranks? )(\d+)-(\d+)$", _each, text).replace("on no rank", "on rank").removesuffix(" ")
    return text if text.strip("- ") else ""


def _each(run: re.Match[str]) -> str:
    return run[1] + ",".join(map(str, range(int(run[2]), int(run[3]) + 1)))


def golden(lib: Any, path: Path) -> None:
    """Write what TorchRec proposes and where it places, for tests without TorchRec."""
    cases = {}
    for seed in GOLDEN_SEEDS:
        problem = instance(seed, lib)
        number = {id(option): k for k, option in enumerate(problem.options)}
        sequences = {}
        for name, make in PROPOSERS.items():
            proposals, _ = sequence(lib, make(lib), problem)
            sequences[name] = [[number[id(option)] for option in proposal] for proposal in proposals[:GOLDEN_PROPOSALS]]
        ranks = {
            name: [
                placed(lib, make(lib), [problem.options[k] for k in proposal], problem.topology)[0]
                for proposal in sequences["greedy"][:GOLDEN_PLACED]
            ]
            for name, make in PARTITIONERS.items()
        }
        cases[seed] = {"proposals": sequences, "ranks": ranks}
    lines = [f" {json.dumps(str(seed))}: {json.dumps(case)}" for seed, case in cases.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def parts(lib: Any, instances: int) -> tuple[list[str], bool]:
    """Counts of agreements, all differences, and CPU seconds of both."""
    tally, seconds = Tally(), defaultdict[str, float](float)
    for seed in range(instances):
        compare_parts(lib, instance(seed, lib), f"instance {seed}", tally, defaultdict(float))
    for tables, hosts in ((5, 1), (26, 1), (40, 2)):
        problem, _ = model_instance(lib, tables, hosts)
        compare_parts(lib, problem, f"model of {tables} tables on {8 * hosts} ranks", tally, seconds)
    compare_offload(lib, tally)
    compare_stats(lib, tally)
    compare_generators(40 * instances, tally)
    compare_hashes(5 * instances, tally)
    lines = [f"{count:7d} agree: {subject}" for subject, count in sorted(tally.agreed.items())]
    lines += [f"{count:7d} differ on purpose: {ON_PURPOSE[why]}" for why, count in tally.on_purpose.items()]
    lines += [f"{len(tally.different):7d} differ", *tally.different, "CPU seconds for the models, theirs and ours:"]
    lines += [
        f"  {name}: {seconds[f'theirs, {name}']:.3f} {seconds[f'ours, {name}']:.3f}"
        for name in (*PROPOSERS, *PARTITIONERS)
    ]
    return lines, not tally.different


def compare_generators(calls: int, tally: Tally) -> None:
    """Random calls of generators on both: the type, kernel, ranks, cuts and placements that they make of a table."""
    draw = random.Random(7)
    for number in range(calls):
        local = draw.choice([1, 2, 4])
        world = local * draw.choice([1, 2, 4])
        kernel: dict[str, Any] = draw.choice([{}, {}, {"compute_kernel": "dense"}, {"compute_kernel": "fused"}])
        hosts = draw.sample(range(world // local), draw.randint(1, world // local))
        ranks = draw.sample(range(world), draw.randint(1, min(world, 4)))
        name, arguments = draw.choice(
            [
                ("data_parallel", {}), ("table_wise", {"rank": ranks[0], **kernel}), ("row_wise", kernel),
                ("column_wise", {"ranks": ranks, **kernel}), ("table_row_wise", {"host_index": hosts[0]}),
                ("grid_shard", {"host_indexes": hosts}),
            ]
        )  # fmt: skip
        case = _Generated(
            name, arguments, draw.choice([7, 16, 40, 100]), draw.choice([4, 10, 64, 128, 256, 384, 512]),
            draw.choice(["no", "an optimizer", "the attribute"]), draw.random() < 0.2, (local, world),
            draw.choice(["cpu", "cuda"]),
        )  # fmt: skip
        peer, own = case.made(torchrec(PLANNER)), case.made(libraries.ours(PLANNER))
        if peer is None or own is None:
            # columns that do not divide, or hosts that its 128-wide columns are not as many as
            tally.on_purpose["cut" if peer is None else "refused"] += peer != own
        elif case.fused_params and peer[1] == "dense" and own == (peer[0], "fused", *peer[2:]):
            tally.on_purpose["fused_params"] += 1
        else:
            tally.compare(f"plans of {name}()", f"call {number}, {case}", peer, own)


@dataclass(frozen=True)
class _Generated:
    """A call of a generator, and the table, mark and machines that it is for."""

    name: str
    arguments: dict[str, Any]
    rows: int
    dim: int
    mark: str
    fused_params: bool
    ranks: tuple[int, int]
    device: str

    def made(self, lib: Any) -> tuple[Any, ...] | None:
        """The plan of the table; None where it cannot be made, or leaves cells or ranks out."""
        config = lib.EmbeddingBagConfig(name="t", num_embeddings=self.rows, embedding_dim=self.dim, feature_names=["f"])
        module = lib.EmbeddingBagCollection(device=torch.device("meta"), tables=[config])
        (param,) = module.parameters()
        if self.mark == "an optimizer":
            optim._apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.1})  # type: ignore[attr-defined]
        elif self.mark == "the attribute":
            param._in_backward_optimizers = []
        sharder = lib.EmbeddingBagCollectionSharder({"learning_rate": 0.1} if self.fused_params else None)
        try:
            everywhere = lib.apply_to_all(module, getattr(lib, self.name)(**self.arguments), sharder)
            made = lib.construct_module_sharding_plan(module, everywhere, sharder, *self.ranks, self.device)["t"]
        except (ValueError, IndexError):
            return None
        cuts = [] if made.sharding_spec is None else made.sharding_spec.shards
        cells, asked = sum(math.prod(cut.shard_sizes) for cut in cuts), self.arguments.get("ranks", made.ranks)
        if (cuts and cells != self.rows * self.dim) or list(made.ranks) != list(asked):
            return None
        shards = [(list(cut.shard_offsets), list(cut.shard_sizes), str(cut.placement)) for cut in cuts]
        return made.sharding_type, made.compute_kernel, list(made.ranks), shards


def compare_hashes(count: int, tally: Tally) -> None:
    """Hashes of random constraints and topologies, and of what planners were given, on both."""
    draw, libs = random.Random(8), (torchrec(PLANNER), libraries.ours(PLANNER))
    for number in range(count):
        settings = {name: draw.choice(values) for name, values in SETTINGS.items()}
        machines = {
            "world_size": draw.choice([2, 8, 16]), "compute_device": draw.choice(["cpu", "cuda", "mtia"]),
            "hbm_cap": draw.choice([None, 80 * 1024**3]), "local_world_size": 2, "pod_size": draw.choice([None, 2]),
        }  # fmt: skip
        constraints = [lib.ParameterConstraints(**settings) for lib in libs]
        tally.compare("hashes of constraints", str(settings), *[asked.__hash__() for asked in constraints])
        tally.compare("hashes of topologies", str(machines), *[lib.Topology(**machines)._hash() for lib in libs])
        if number % 50 == 0:
            # of one type and kernel, so that TorchRec's order is that of the tables
            way = {"sharding_types": [draw.choice(["row_wise", "table_wise"])], "compute_kernels": ["fused"]}
            tally.compare("contexts", f"{machines}, {way}", *[_context(lib, machines, way) for lib in libs])


SETTINGS: dict[str, list[Any]] = {
    "sharding_types": [None, [], ["row_wise"], ["table_wise", "row_wise"]], "compute_kernels": [None, ["fused"]],
    "min_partition": [None, 4, 64], "pooling_factors": [[1.0], [2.5, 3.0]], "num_poolings": [None, [1.0, 2.0]],
    "batch_sizes": [None, [4, 8]], "is_weighted": [False, True], "enforce_hbm": [None, True, False],
    "stochastic_rounding": [None, False], "feature_names": [None, ["a", "b"]], "device_group": [None, "cuda"],
    "use_virtual_table": [False, True],
}  # fmt: skip


def _context(lib: Any, machines: dict[str, Any], way: dict[str, Any]) -> str:
    names = (*(f"t{i}" for i in range(5)), *(f"s{i}" for i in range(2)))
    topology, asked = lib.Topology(**machines), {name: lib.ParameterConstraints(**way) for name in names}
    module, sharders = _model(lib), lib.get_default_sharders()
    enumerator, reservation = lib.EmbeddingEnumerator(topology, 512, asked), lib.HeuristicalStorageReservation(0.1)
    enumerator.enumerate(module, sharders)
    reservation.reserve(topology, 512, module, sharders, asked)
    text: str = lib.hash_planner_context_inputs_str(topology, 512, enumerator, reservation, asked)
    return text


OPTIONS: Options = {
    "--count": {"type": int, "default": 5000, "help": "random options"},
    "--instances": {"type": int, "default": 100, "help": "random planning problems"},
    "--golden": {
        "type": Path,
        "help": "write what TorchRec proposes, and print its estimates, as tests/support/golden has them",
    },
}


def run(options: argparse.Namespace) -> Report:
    """Compare and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    lib = torchrec(PLANNER)
    if options.golden:
        golden(lib, options.golden)
        return Report(golden_estimates(), True)
    line, good = formulas(options.count)
    lines = [line]
    for name, own_count, peer_count, same in compare_options():
        lines.append(
            f"{name}: {peer_count} options of torchrec, {own_count} of ours, {'the same' if same else 'DIFFERENT'}"
        )
        good = good and same
    of_parts, same = parts(lib, options.instances)
    return Report("\n".join([*lines, *of_parts]) + "\n", good and same)
