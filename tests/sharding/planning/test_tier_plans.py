"""From a constraint over a plan to a model with rows below its device: the bits of one that lies there whole."""

from __future__ import annotations

import pickle
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ModuleSharder,
    ParameterConstraints,
    PlannerError,
    PrefetchTrainPipelineSparseDist,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    Topology,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    get_default_sharders,
)
from shardwise.embeddings.optim.fbgemm_types import CacheAlgorithm
from shardwise.planner import EmbeddingEnumerator, GreedyProposer, plan_tables
from shardwise.planner.layout import TIERED_KERNELS, Tier
from shardwise.planner.tables import Feature, Table
from shardwise.sharding import CacheParams, column_wise, data_parallel, row_wise, table_row_wise, table_wise
from shardwise.sharding.plan.caches import KeyValueParams
from shardwise.sharding.testing.one_way_sharders import SharderType, create_test_sharder

pytestmark = pytest.mark.ranks

ROWS, DIM, NAMES = 40, 8, ("a", "b", "c")
LFU, LRU = CacheAlgorithm.LFU, CacheAlgorithm.LRU


def constraints(folder: str) -> dict[str, ParameterConstraints]:
    """A table of each kernel with rows below the device."""
    few = KeyValueParams(ssd_storage_directory=folder, max_l1_cache_size=1, l2_cache_size=1)
    return {
        "a": ParameterConstraints(["row_wise"], ["fused_uvm"]),
        "b": ParameterConstraints(
            ["column_wise"], ["fused_uvm_caching"], min_partition=4, cache_params=CacheParams(LFU, 0.25)
        ),
        "c": ParameterConstraints(["table_wise"], ["key_value"], key_value_params=few),
    }


def own_tiers(folder: str) -> dict[str, ParameterConstraints]:
    """The same by our own word for them; the planner chooses types."""
    return {
        "a": ParameterConstraints(tier=Tier(policy=keep_all)),
        "b": ParameterConstraints(tier=Tier(0.25, max_slots=1.0)),
        "c": ParameterConstraints(tier=Tier(10, "file", folder, max_slots=ROWS, ram_rows=0.5, policy="lru")),
    }


def keep_all(scores: Tensor, batch: int) -> Tensor:
    """A policy of the user's."""
    return scores + 1


def collection(sequence: bool) -> Any:
    torch.manual_seed(0)
    config, kind = (EmbeddingConfig, EmbeddingCollection) if sequence else (EmbeddingBagConfig, EmbeddingBagCollection)
    tables = [config(ROWS, DIM, name, feature_names=[f"f{name}"]) for name in NAMES]  # type: ignore[operator]
    module = kind(tables, device=torch.device("cpu"))  # type: ignore[operator]
    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.3})
    return module


def batches() -> list[KeyedJaggedTensor]:
    """Each rank has its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    made = torch.Generator().manual_seed(1 + rank)
    lengths = torch.full((len(NAMES) * 3,), 2)
    keys = [f"f{name}" for name in NAMES]
    return [
        KeyedJaggedTensor(keys, torch.randint(ROWS, (len(lengths) * 2,), generator=made), lengths=lengths)
        for _ in range(8)
    ]


def env() -> ShardingEnv:
    group = dist.group.WORLD
    return ShardingEnv.from_local(1, 0) if group is None else ShardingEnv.from_process_group(group)


def values_of(output: Any) -> Tensor:
    """The output of a batch as one tensor."""
    return output.values() if hasattr(output, "offset_per_key") else torch.cat([output[k].values() for k in output])


def run(module: Any, plan: ShardingPlan | None) -> tuple[list[Tensor], dict[str, Tensor], Any]:
    """Outputs of each step and all rows at the end, and the model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no effect")
        model: Any = DistributedModelParallel(module, env(), torch.device("cpu"), plan, init_data_parallel=False)
    outputs = []
    for features in batches():
        values = values_of(model(features))
        outputs.append(values.detach().clone())
        (values * 0.37).sum().backward()
    with model.module.shards.whole():
        rows = {name: param.detach().clone() for name, param in model.named_parameters()}
    return outputs, rows, model


def planned_and_trained(sequence: bool, ours: bool, folder: str) -> dict[str, str]:
    rules = own_tiers(folder) if ours else constraints(folder)
    sharders, world = get_default_sharders(), env().world_size
    planner = EmbeddingShardingPlanner(Topology(world, "cpu"), batch_size=64, constraints=rules)
    plan = planner.collective_plan(collection(sequence), sharders) if world > 1 else planner.plan(
        collection(sequence), sharders
    )  # fmt: skip
    outputs, rows, model = run(collection(sequence), plan)
    for sharding in plan.plan[""].values():
        sharding.compute_kernel = sharding.compute_kernel if sharding.sharding_spec is None else "fused"
        sharding.tier = sharding.cache_params = sharding.key_value_params = None
    whole_outputs, whole_rows, _ = run(collection(sequence), plan)
    assert all(torch.equal(a, b) for a, b in zip(outputs, whole_outputs, strict=True))
    assert rows.keys() == whole_rows.keys() and all(torch.equal(rows[name], whole_rows[name]) for name in rows)
    tables = model.module.states.tables
    # the address of a function is each rank's own
    return {name: repr(tables[name].options.tier).partition(" at 0x")[0] for name in NAMES}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
def test_torchrecs_constraints_train_to_the_bits_of_resident_tables(world: int, sequence: bool, tmp_path: Path) -> None:
    work = partial(planned_and_trained, sequence, False, str(tmp_path))
    found = [work()] if world == 1 else run_ranks(world, planned_and_trained, sequence, False, str(tmp_path))
    stored = Tier(0.2, "file", str(tmp_path), max_slots=1.0, ram_rows=ROWS)
    for tiers in found:
        assert tiers == {
            "a": repr(Tier()), "b": repr(Tier(0.25, max_slots=1.0, policy="lfu")), "c": repr(stored),
        }  # fmt: skip


@pytest.mark.parametrize("world", [1, 2])
def test_our_constraints_train_to_the_bits_of_resident_tables(world: int, tmp_path: Path) -> None:
    """Functions of a tier do not travel from the rank that plans: each rank has its own."""
    folder = str(tmp_path)
    found = [planned_and_trained(False, True, folder)] if world == 1 else run_ranks(
        world, planned_and_trained, False, True, folder
    )  # fmt: skip
    for tiers in found:
        assert tiers == found[0]
        # where a tier says no number of slots, the planner does
        assert re.match(r"Tier\(slots=\d+, below='ram', .*policy=<function keep_all", tiers["a"])
        assert [tiers[name] for name in "bc"] == [repr(own_tiers(folder)[name].tier) for name in "bc"]


class WithLoss(nn.Module):
    """A model as pipelines take it: (loss, outputs) of a batch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        values = values_of(self.module(features))
        return (values * 0.37).sum(), values.detach()


@pytest.mark.parametrize("kind", [TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist])
def test_pipelines_train_what_torchrecs_constraints_put_below_the_device(kind: Any, tmp_path: Path) -> None:
    model = WithLoss(collection(False))
    rules = constraints(str(tmp_path))
    rules["b"].cache_params.prefetch_pipeline = True
    plan = EmbeddingShardingPlanner(Topology(1, "cpu"), 64, constraints=rules).plan(model, get_default_sharders())
    sharded: Any = DistributedModelParallel(model, env(), torch.device("cpu"), plan, init_data_parallel=False)
    pipeline, loader = kind(sharded, torch.optim.SGD([torch.zeros(1)]), torch.device("cpu")), iter(batches())
    outputs = [pipeline.progress(loader) for _ in batches()]
    expected, rows, _ = run(collection(False), ShardingPlan({"": construct_module_sharding_plan(
        collection(False), dict.fromkeys(NAMES, table_wise(0)), world_size=1, device_type="cpu")}))  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    with sharded.module.module.shards.whole():
        found = {name.removeprefix("module."): param.detach().clone() for name, param in sharded.named_parameters()}
    assert found.keys() == rows.keys() and all(torch.equal(found[name], rows[name]) for name in rows)
    misses = [c.misses for group in sharded.module.module._tables.all_groups() for c in group.store.counts]
    assert len(misses) == len(NAMES) and sum(misses) > 0


def test_a_plan_made_by_hand_is_trained_from_its_file(tmp_path: Path) -> None:
    generators = {
        "a": row_wise(tier=Tier(0.5)), "b": column_wise([0, 0], compute_kernel="fused_uvm"),
        "c": data_parallel(tier=Tier(30)),
    }  # fmt: skip
    of_module = construct_module_sharding_plan(collection(False), generators, world_size=1, device_type="cpu")
    plan, file = ShardingPlan({"": of_module}), tmp_path / "plan.json"
    plan.save(file, world_size=1, local_world_size=1)
    loaded = pickle.loads(pickle.dumps(ShardingPlan.load(file)))
    outputs, rows, model = run(collection(False), loaded)
    assert [model.module.states.tables[name].options.tier for name in NAMES] == [Tier(0.5), Tier(), Tier(30)]
    resident = {"a": row_wise(), "b": column_wise([0, 0]), "c": data_parallel()}
    of_module = construct_module_sharding_plan(collection(False), resident, world_size=1, device_type="cpu")
    whole_outputs, whole_rows, _ = run(collection(False), ShardingPlan({"": of_module}))
    assert all(torch.equal(a, b) for a, b in zip(outputs, whole_outputs, strict=True))
    assert all(torch.equal(rows[name], whole_rows[name]) for name in whole_rows)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("kernel", TIERED_KERNELS)
@pytest.mark.parametrize("of", [SharderType.EMBEDDING_BAG_COLLECTION, SharderType.EMBEDDING_BAG])
def test_a_sharder_that_offers_one_kernel_gets_it_without_a_constraint(kernel: str, kind: str, of: SharderType) -> None:
    """TorchRec's own tests ask for a cache so: by sharders whose compute_kernels is it alone."""
    torch.manual_seed(0)
    model = nn.Sequential(
        collection(False) if of is SharderType.EMBEDDING_BAG_COLLECTION else nn.EmbeddingBag(ROWS, DIM, mode="sum")
    )
    sharder = create_test_sharder(of.value, kind, kernel, {"learning_rate": 0.1, "cache_load_factor": 0.5}, None)
    assert isinstance(sharder, ModuleSharder)
    plan = EmbeddingShardingPlanner(Topology(1, "cpu"), 64).plan(model, [sharder])
    sharded: Any = DistributedModelParallel(model, env(), torch.device("cpu"), plan, [sharder])
    (module,) = sharded.module
    states = getattr(module, "states", None) or module._collection.states
    tiers = {table.options.tier for table in states.tables.values()}
    assert {one.compute_kernel for one in plan.plan["0"].values()} == {kernel}
    assert len(tiers) == 1 and None not in tiers
    (tier,) = tiers
    assert tier.slots == (None if kernel == "fused_uvm" else 0.5) and tier.below == (
        "file" if kernel == "key_value" else "ram"
    )


def test_a_table_with_a_tier_and_no_optimizer_gets_that_of_its_sharder() -> None:
    module = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])])
    for generator in (
        table_wise(0, tier=Tier(3)),
        table_row_wise(0, tier=Tier(3)),
        row_wise(compute_kernel="fused_uvm"),
    ):
        plan = construct_module_sharding_plan(module, {"t": generator}, world_size=1, local_size=1, device_type="cpu")
        assert plan["t"].compute_kernel in ("fused", "fused_uvm")


def test_no_plan_has_rows_below_the_device_unless_somebody_asks() -> None:
    """TorchRec's search on a GPU takes host memory where tables do not fit; plans here stay as they were."""
    tables = [EmbeddingBagConfig(10**6, 64, name, feature_names=[f"f{name}"]) for name in NAMES]
    module = EmbeddingBagCollection(tables, device=torch.device("meta"))
    small = Topology(2, "cuda", hbm_cap=2**28, local_world_size=2)
    for settings in ({}, {"cost": "torchrec"}, {"proposer": GreedyProposer()}):
        with pytest.raises(PlannerError):
            EmbeddingShardingPlanner(small, 64, **settings).plan(module, get_default_sharders())  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kernel", TIERED_KERNELS)
def test_every_search_takes_the_kernel_that_a_constraint_names(device: str, kernel: str) -> None:
    disk = Topology(2, device, local_world_size=2, ssd_cap=2**40)
    rules = {name: ParameterConstraints(["table_wise", "row_wise"], [kernel], tier=None) for name in NAMES}
    rules["b"] = ParameterConstraints(["table_wise"], ["fused"], tier=Tier(7))
    model, searches = collection(False), {
        "ours": {}, "torchrec's prices": {"cost": "torchrec"}, "torchrec's search": {"proposer": GreedyProposer()},
        "its options": {"enumerator": EmbeddingEnumerator(disk, 64, rules)},
    }  # fmt: skip
    for settings in searches.values():
        plan = EmbeddingShardingPlanner(disk, 64, constraints=rules, **settings).plan(model, get_default_sharders())  # type: ignore[arg-type]
        of_module = plan.plan[""]
        assert [of_module[name].compute_kernel for name in NAMES] == [kernel, "fused", kernel]
        assert [of_module[name].tier for name in NAMES] == [None, Tier(7), None]
    tables = [Table(name, ROWS, DIM, features=(Feature(name),)) for name in NAMES]
    with warnings.catch_warnings():
        # nothing is planned for comparison alone
        warnings.simplefilter("error")
        plan_tables(tables, disk, 64, cost="torchrec", constraints=rules)
