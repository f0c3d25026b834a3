"""`EmbeddingShardingPlanner` in one process: what it reads of a model, what it plans, and TorchRec's parts in it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from checkout import ROOT
from ranks import run_ranks
from torch import nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    FeatureProcessedEmbeddingBagCollection,
    FusedEmbeddingBagCollection,
    ParameterConstraints,
    PlannerError,
    PositionWeightedModuleCollection,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    Topology,
    apply_optimizer_in_backward,
    get_default_sharders,
)
from shardwise.embeddings import DataType
from shardwise.planner import (
    EmbeddingEnumerator,
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    FixedPercentageStorageReservation,
    GreedyPerfPartitioner,
    GreedyProposer,
    NoopPerfModel,
    PlanLoader,
    PlannerErrorType,
    ShardingOption,
    Stats,
)
from shardwise.sharding import CacheParams, extract_plan
from shardwise.sharding.planning.machines import card_of, host_bytes, topology_here
from shardwise.sharding.planning.tables import tables_of_model

GIB = 1024**3
CPUS = Topology(4, "cpu", local_world_size=2)


def bags(count: int = 4, prefix: str = "t", *, optimizer: Any = torch.optim.SGD, **more: Any) -> EmbeddingBagCollection:
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(2000 * (n + 1), 64, f"{prefix}{n}", feature_names=[f"{prefix}{n}_{k}" for k in (0, 1)])
            for n in range(count)
        ],
        device="meta", **more,
    )  # fmt: skip
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.1})
    return collection


def plan(model: nn.Module, **more: Any) -> ShardingPlan:
    return EmbeddingShardingPlanner(CPUS, **more).plan(model, get_default_sharders())


def test_tables_are_read_as_they_are_sharded() -> None:
    model: Any = nn.ModuleDict()
    model["bags"] = bags(2, "b", optimizer=RowWiseAdagrad, is_weighted=True)
    model["plain"] = bags(1, "p", optimizer=None)
    model["again"] = model["bags"]
    model["rows"] = EmbeddingCollection([EmbeddingConfig(9, 8, "r", DataType.FP16, feature_names=["r"])], device="meta")
    model["rows"].embeddings["r"].weight.requires_grad_(False)
    model["fused"] = FusedEmbeddingBagCollection(
        [EmbeddingBagConfig(5, 4, "f", feature_names=["f"])], torch.optim.Adam, {"lr": 0.1}, device="meta"
    )
    model["processed"] = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection([EmbeddingBagConfig(7, 4, "w", feature_names=["w"])], is_weighted=True),
        PositionWeightedModuleCollection({"w": 3}),
    )
    tables = tables_of_model(model, get_default_sharders(), "cpu")
    assert not tables.replicated
    read = {t.path: (t.pooled, t.weighted, t.optimizer, t.data_type.value, len(t.features)) for t in tables.tables}
    assert read == {
        "bags.b0": (True, True, "RowWiseAdagrad", "FP32", 2), "bags.b1": (True, True, "RowWiseAdagrad", "FP32", 2),
        "plain.p0": (True, False, "SGD", "FP32", 2), "rows.r": (False, False, None, "FP16", 1),
        "fused.f": (True, False, "Adam", "FP32", 1), "processed.w": (True, True, "SGD", "FP32", 1),
    }  # fmt: skip
    assert [t.num_embeddings for t in tables.tables] == [2000, 4000, 2000, 9, 5, 7]
    assert [tables.parameters[t.path].shape[1] for t in tables.tables] == [64, 64, 64, 8, 4, 4]


def test_a_table_is_replicated_only_where_it_trains_as_it_would_otherwise() -> None:
    """Replicas without an optimizer leave their gradient to the dense layers' one; a planner must not decide that."""
    sharders = [EmbeddingBagCollectionSharder({"optimizer": "ADAM"})]
    for optimizer, constraints, may in ((None, [], False), (None, ["t0"], True), (torch.optim.SGD, [], True)):
        (table,) = tables_of_model(bags(1, optimizer=optimizer), sharders, "cpu", constraints).tables
        assert ("data_parallel" in dict(table.ways)) is may
    tiny = EmbeddingBagCollection([EmbeddingBagConfig(2, 4, "t0", feature_names=["f"])])
    constraints = {"t0": ParameterConstraints(sharding_types=["data_parallel"])}
    assert plan(tiny).plan[""]["t0"].sharding_type != "data_parallel"
    assert plan(tiny, constraints=constraints).plan[""]["t0"].sharding_type == "data_parallel"


def test_a_plan_says_how_good_it_is_and_is_the_same_twice() -> None:
    model = nn.ModuleDict({"ebc": bags(6)})
    planner = EmbeddingShardingPlanner(CPUS, constraints={"t1": ParameterConstraints(pooling_factors=[9.0, 1.0])})
    first = planner.plan(model, get_default_sharders())
    planned = planner.last_plan
    assert planned is not None and planned.solution.bound_ms <= planned.solution.time_ms
    assert [f.pooling_factor for f in planned.tables[1].features] == [9.0, 1.0]
    text = str(first)
    assert text.startswith("module: ebc\n\nparam | sharding type") and "slowest rank" in text
    assert "512 is the default" in text and "15% of the memory of a rank" in text
    second = EmbeddingShardingPlanner(CPUS, constraints={"t1": ParameterConstraints(pooling_factors=[9.0, 1.0])})
    assert second.plan(model, get_default_sharders()) == first
    assert "default" not in str(plan(model, batch_size=64).explanation)


def test_constraints_pass_into_the_plan() -> None:
    constraints = {
        "t0": ParameterConstraints(
            sharding_types=["row_wise"], cache_params=CacheParams(load_factor=0.5), enforce_hbm=True,
            stochastic_rounding=True, key_value_params={"any": 1},
        ),
        "t1": ParameterConstraints(same_rank="pair"), "t2": ParameterConstraints(same_rank="pair", not_on=[0, 1]),
        "t3": ParameterConstraints(device_group="cuda"),
    }  # fmt: skip
    with pytest.warns(UserWarning) as caught:
        module_plan = plan(bags(), constraints=constraints).plan[""]
    assert [str(warning.message).partition(":")[0] for warning in caught] == [
        "the constraint cache_params of tables 't0' has no effect",
        "the constraint key_value_params of tables 't0' has no effect",
        "the constraint device_group of tables 't3' leaves them out",
    ]
    sharding = module_plan["t0"]
    assert (sharding.sharding_type, sharding.ranks) == ("row_wise", [0, 1, 2, 3])
    assert sharding.cache_params is constraints["t0"].cache_params and sharding.key_value_params == {"any": 1}
    assert (sharding.enforce_hbm, sharding.stochastic_rounding, sharding.output_dtype) == (True, True, None)
    assert module_plan["t1"].ranks == module_plan["t2"].ranks and set(module_plan["t1"].ranks or ()) <= {2, 3}
    assert "t3" not in module_plan


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"t0": ParameterConstraints(pooling_factors=[1.0, 2.0, 3.0])}, "one number for each of its 2 features"),
        ({"t0": ParameterConstraints(sharding_types=["by_magic"])}, "sharding_types has 'by_magic'"),
        ({"t0": ParameterConstraints(compute_kernels=["ssd_virtual_table"])}, "leaves no way to place it"),
        (
            {"t0": ParameterConstraints(compute_kernels=["key_value"], cache_params=CacheParams(load_factor=2.0))},
            "cache_params.load_factor must be a share of the rows",
        ),
        ({"t0": ParameterConstraints(not_on=[0, 1, 2, 3])}, "leave no rank"),
    ],
)
def test_constraints_that_cannot_be_met_are_named(constraints: dict[str, ParameterConstraints], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        plan(bags(), constraints=constraints)


def test_a_constraint_for_a_table_of_another_model_is_told_and_changes_nothing() -> None:
    with pytest.warns(UserWarning, match="does not have: 't9': did you mean"):
        sharding_plan = plan(bags(), constraints={"t9": ParameterConstraints(sharding_types=["row_wise"])})
    assert sharding_plan == plan(bags())


def test_a_model_without_tables_has_an_empty_plan() -> None:
    assert plan(nn.Linear(2, 2)).plan == {}
    assert plan(EmbeddingBagCollection([])).plan == {"": {}}


def test_torchrecs_parts_run_torchrecs_search() -> None:
    model, calls = bags(), []

    class Counts(Stats):
        def log(self, **statistics: Any) -> None:  # type: ignore[override]
            calls.append(statistics)

    planner = EmbeddingShardingPlanner(
        CPUS, 64, proposer=GreedyProposer(), partitioner=GreedyPerfPartitioner(), stats=Counts(),
        performance_model=NoopPerfModel(CPUS), storage_reservation=FixedPercentageStorageReservation(0.1),
        timeout_seconds=60,
    )  # fmt: skip
    sharding_plan = planner.plan(model, get_default_sharders())
    assert set(sharding_plan.plan[""]) == {"t0", "t1", "t2", "t3"} and planner.last_plan is None
    (statistics,) = calls
    assert statistics["num_proposals"] >= statistics["num_plans"] >= 1 and len(statistics["best_plan"]) == 4
    assert statistics["sharding_plan"] is sharding_plan and statistics["debug_stats"].timeout_seconds == 60
    # the best of its proposals, so never better than our search over the same options
    rating = NoopPerfModel(CPUS).rate(statistics["best_plan"])
    second = EmbeddingShardingPlanner(CPUS, 64, EmbeddingEnumerator(CPUS, 64), FixedPercentageStorageReservation(0.1))
    assert "by its estimates" in str(second.plan(model, get_default_sharders()))
    assert NoopPerfModel(CPUS).rate(second._best_plan or []) <= rating * (1 + 1e-9)


def test_torchrecs_search_says_why_there_is_no_plan() -> None:
    small = Topology(2, "cpu", ddr_cap=2**20)
    for proposer in (GreedyProposer(), None):
        planner = EmbeddingShardingPlanner(
            small, proposer=proposer, enumerator=EmbeddingEnumerator(small, 512),
            storage_reservation=FixedPercentageStorageReservation(0),
        )  # fmt: skip
        with pytest.raises(PlannerError) as raised:
            planner.plan(bags(), get_default_sharders())
        assert raised.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    with pytest.raises(PlannerError, match="nearest plan is .* over on rank 0.*\n.*\nHeaviest: 't3'"):
        EmbeddingShardingPlanner(small).plan(bags(), get_default_sharders())


def test_a_callback_changes_the_plan() -> None:
    def to_the_last_rank(options: list[ShardingOption]) -> list[ShardingOption]:
        for option in options:
            for shard in option.shards:
                shard.rank = 3
        return options

    whole = {f"t{n}": ParameterConstraints(sharding_types=["table_wise"]) for n in range(4)}
    moved = plan(bags(), constraints=whole, callbacks=[to_the_last_rank])
    assert {tuple(entry.ranks or ()) for entry in moved.plan[""].values()} == {(3,)} and moved.explanation is None

    def beyond(options: list[ShardingOption]) -> list[ShardingOption]:
        options[0].shards[0].rank = 4
        return options

    with pytest.raises(PlannerError, match="a shard is on rank 4; there are 4") as raised:
        plan(bags(), constraints=whole, callbacks=[beyond])
    assert raised.value.error_type is PlannerErrorType.INVALID_RANK_ASSIGNMENT


class Loader(PlanLoader):
    """Has a plan, and what it was made for."""

    def __init__(self, options: list[ShardingOption] | None, context: str | None) -> None:
        self.options, self.context = options, context

    def load(self) -> dict[int, ShardingOption] | None:
        return None if self.options is None else {option.storage_hash(): option for option in self.options}

    def plan_context_hash(self) -> str | None:
        return self.context


def test_a_loaded_plan_is_taken_if_it_was_made_for_the_same() -> None:
    model, sharders = bags(), get_default_sharders()
    first = EmbeddingShardingPlanner(CPUS, 64, EmbeddingEnumerator(CPUS, 64))
    wanted = first.plan(model, sharders)
    context = first.hash_planner_context_inputs_str()
    second = EmbeddingShardingPlanner(CPUS, 64, plan_loader=Loader(first._best_plan, context))
    assert second.plan(model, sharders) == wanted
    assert second.hash_planner_context_inputs_str() == context
    other = EmbeddingShardingPlanner(CPUS, 32, plan_loader=Loader(first._best_plan, context))
    with pytest.raises(PlannerError, match="made for other tables, machines or settings") as raised:
        other.plan(model, sharders)
    assert raised.value.error_type is PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH
    # nothing was saved: it plans
    none = EmbeddingShardingPlanner(CPUS, 64, plan_loader=Loader(None, None)).plan(model, sharders)
    assert "slowest rank" in str(none)
    with pytest.raises(PlannerError, match="0 of them are in the search space"):
        extract_plan([], Loader(first._best_plan, None).load() or {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"cost": "torchrec", "proposer": GreedyProposer()}, "cost='torchrec' has no effect"),
        (
            {"constraints": {"t": ParameterConstraints(same_rank="a")}, "proposer": GreedyProposer()},
            "table 't': the constraint same_rank='a' has no effect",
        ),
        ({"batch_size": 0}, "batch_size must be positive, got 0"),
        ({"cost": "cheap"}, "cost 'cheap' is not one of"),
    ],
)
def test_what_would_have_no_effect_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(bags(), **given)


def test_without_anybody_to_say_how_many_ranks_there_is_no_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match=r"init_process_group first, or give topology=Topology\(world_size"):
        EmbeddingShardingPlanner()
    with pytest.raises(RuntimeError, match=r"or plan\(module, sharders\) in one process"):
        EmbeddingShardingPlanner(CPUS).collective_plan(bags())


def test_the_topology_of_these_processes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    topology = topology_here("cpu")
    assert (topology.world_size, topology.local_world_size, topology.compute_device) == (8, 4, "cpu")
    assert topology.ddr == [host_bytes() // 4] * 8 and topology.hbm == [0] * 8
    assert 2**28 < host_bytes() < 2**50


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"), ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"), ("NVIDIA A100 80GB PCIe", 79.3, "a100-80-pcie"),
        ("NVIDIA B200", 178.4, "b200"), ("NVIDIA L40S", 44.4, "l40s"), ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA A10", 22.1, "a10"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"), ("AMD Instinct MI355X", 287.9, "mi355x"),
        ("NVIDIA GeForce GTX 1080", 8, None),
    ],
)  # fmt: skip
def test_a_card_is_known_by_its_name(name: str, gib: float, card: str | None) -> None:
    assert card_of(name, int(gib * GIB)) == card


def test_torchrec_planning_code_runs_after_the_import_changes() -> None:
    """In a fresh process, under TorchRec's own import paths."""
    code = """
import shardwise.torchrec
shardwise.torchrec.install()
import torch, torchrec
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, SortBy
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
ebc = torchrec.EmbeddingBagCollection(device="meta", tables=[
    torchrec.EmbeddingBagConfig(name=f"t{n}", embedding_dim=64, num_embeddings=4096, feature_names=[f"f{n}"],
                                pooling=torchrec.PoolingType.SUM) for n in range(4)])
topology = Topology(world_size=2, compute_device="cuda")
constraints = {f"t{n}": ParameterConstraints(sharding_types=["table_wise"]) for n in range(4)}
enumerator = EmbeddingEnumerator(topology=topology, batch_size=512, constraints=constraints,
    estimator=[EmbeddingPerfEstimator(topology, constraints), EmbeddingStorageEstimator(topology, constraints)])
planner = EmbeddingShardingPlanner(topology=topology, batch_size=512, enumerator=enumerator,
    storage_reservation=HeuristicalStorageReservation(percentage=0.15), proposer=[GreedyProposer(), UniformProposer()],
    partitioner=GreedyPerfPartitioner(sort_by=SortBy.PERF), stats=EmbeddingStats(), constraints=constraints)
plan = planner.plan(ebc, [EmbeddingBagCollectionSharder()])
print(sorted(one.ranks[0] for one in plan.plan[""].values()), plan.plan[""]["t0"].sharding_spec.shards[0].placement)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["[0,", "0,", "1,", "1]", "rank:0/cuda:0"]


def differing() -> str:
    """Rank 0 brings a plan, rank 1 none."""
    model = bags()
    sharding_plan = ShardingPlan({"": EmbeddingShardingPlanner(CPUS).plan(model, get_default_sharders()).plan[""]})
    with pytest.raises(RuntimeError) as raised:
        DistributedModelParallel(model, plan=sharding_plan if int(os.environ["RANK"]) == 0 else None)
    return str(raised.value)


@pytest.mark.ranks
def test_ranks_that_differ_in_having_a_plan_are_told() -> None:
    for error in run_ranks(2, differing):
        assert "plan: rank 0 has given, rank 1 has none" in error


def test_estimators_are_what_an_enumerator_prices_with() -> None:
    """A custom enumerator's own estimators decide the plan: only they know that t0 is slow."""

    class Slow(EmbeddingPerfEstimator):
        def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
            super().estimate(sharding_options, sharder_data_map)
            for option in sharding_options:
                for shard in option.shards:
                    assert shard.perf is not None
                    shard.perf.fwd_compute = 100.0 if option.name == "t0" else 1.0

    whole = {f"t{n}": ParameterConstraints(sharding_types=["table_wise"]) for n in range(4)}
    enumerator = EmbeddingEnumerator(CPUS, 64, whole, [Slow(CPUS), EmbeddingStorageEstimator(CPUS)])
    module_plan = plan(bags(), enumerator=enumerator, constraints=whole).plan[""]
    assert [name for name, sharding in module_plan.items() if sharding.ranks == module_plan["t0"].ranks] == ["t0"]
    with pytest.warns(UserWarning, match="no optimizer"):
        alone = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["f"])])
        DistributedModelParallel(alone, ShardingEnv.from_local(1, 0))
