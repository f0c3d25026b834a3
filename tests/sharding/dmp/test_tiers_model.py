"""Models whose tables have tiers: replicas are averaged, rows are written, maps renew them, plans change.

Takes half a minute: each claim trains two models on up to four processes.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from ranks import error_of, run_ranks
from sharding_steps import expect_equal, misses, small_chunks
from torch import Tensor, nn

from shardwise import (
    DataType,
    DistributedModelParallel,
    DMPCollection,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    apply_optimizer_in_backward,
    checkpoint,
    construct_module_sharding_plan,
)
from shardwise.embeddings.managed_collision import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    MCHManagedCollisionModule,
)
from shardwise.inference import quantize_inference_model
from shardwise.planner.layout import Tier
from shardwise.sharding import ShardingStrategy, column_wise, data_parallel, row_wise, table_wise

pytestmark = pytest.mark.ranks

ROWS = {"a": 23, "b": 17, "c": 9, "d": 11}
RAM = Tier(6, max_slots=1.0)


class Net(nn.Module):
    """Four tables, one of fp16, in one collection."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [
            EmbeddingBagConfig(
                rows, 8, f"t{name}", DataType.FP16 if name == "c" else DataType.FP32, feature_names=[name],
                enable_embedding_update=name != "d",
            )
            for name, rows in ROWS.items()
        ]  # fmt: skip
        self.ebc = EmbeddingBagCollection(tables, device=device)
        kwargs = {"lr": 0.1, "stochastic_rounding": False}
        apply_optimizer_in_backward(torch.optim.Adagrad, self.ebc.parameters(), kwargs)
        self.over = nn.Linear(32, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values().float()).square().mean()  # type: ignore[no-any-return]


def plan_of(model: Net, world: int, tier: Tier | None) -> ShardingPlan:
    ways = {
        "ta": row_wise(tier=tier), "tb": column_wise([0, world - 1], tier=tier), "tc": table_wise(world - 1, tier=tier),
        "td": data_parallel(tier=tier),
    }  # fmt: skip
    size: Any = {"world_size": world, "local_size": world, "device_type": "cpu"}
    return ShardingPlan({"ebc": construct_module_sharding_plan(model.ebc, ways, **size)})


def batch_of(step: int) -> KeyedJaggedTensor:
    return random_kjt(ROWS, 4, seed=step + 10 * dist.get_rank())


# ---- 2D


def replicated(tier: Tier | None, *, meta: bool = False, **more: Any) -> DMPCollection:
    model = Net("meta" if meta else "cpu")
    # replicas begin as the first
    torch.manual_seed(5 + dist.get_rank())
    if not meta:
        for param in model.ebc.parameters():
            nn.init.normal_(param)
    assert dist.group.WORLD is not None
    world = dist.get_world_size()
    return DMPCollection(model, "cpu", plan_of(model, 2, tier), world, 2, global_pg=dist.group.WORLD, **more)


def averaged(states: bool) -> int:
    cached, resident = replicated(RAM), replicated(None)
    expect_equal(resident.module.ebc, cached.module.ebc)
    for step in range(4):
        losses = []
        for model in (resident, cached):
            model(batch_of(step)).backward()
            with small_chunks():
                model.sync(include_optimizer_state=states)
            losses.append(model(batch_of(step + 50)).detach())
        assert torch.equal(*losses)
        expect_equal(resident.module.ebc, cached.module.ebc)
    return misses(cached.module.ebc)


@pytest.mark.parametrize("states", [True, False])
def test_replicas_are_averaged_row_by_row(states: bool) -> None:
    """Their rows lie in other slots, as each replica has batches of its own."""
    assert all(run_ranks(4, averaged, states))


def first_of_replicas(folder: Path) -> tuple[dict[str, Tensor], int]:
    model: Any = replicated(RAM, meta=True)
    stored = sum(int((store.residency.slot_of != -2).sum()) for store in model.module.ebc._tables.stores())
    return checkpoint.full_state_dict(model), stored


def test_replicas_begin_with_the_same_rows_and_store_none(tmp_path: Path) -> None:
    (first, _), *others = run_ranks(4, first_of_replicas, tmp_path)
    for rows, stored in others:
        assert stored == 0
        for name, value in rows.items():
            # dense layers were made by each rank's own seed, and averaged by nobody
            assert torch.equal(value, first[name]) or "over" in name


def fully_sharded() -> str:
    return error_of(replicated, RAM, sharding_strategy=ShardingStrategy.FULLY_SHARDED)


def test_tables_in_parts_have_no_tier() -> None:
    for said in run_ranks(4, fully_sharded):
        assert "sharding_strategy FULLY_SHARDED: tables ['ta', 'tb', 'tc', 'td'] have tiers" in said


# ---- rows from outside


def written() -> None:
    models = []
    for tier in (None, Tier(6, "ram", max_slots=1.0)):
        model = Net()
        models.append(DistributedModelParallel(model, plan=plan_of(model, dist.get_world_size(), tier)))
    rank = dist.get_rank()
    for step in range(3):
        ids = torch.tensor([1, 5, 5, 8, 0, rank])
        rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(step + 7 * rank))
        update = KeyedJaggedTensor(["a", "b", "c"], ids, rows, lengths=torch.tensor([2, 2, 2]))
        for model in models:
            model.write(update)
        expect_equal(*(model.module.ebc for model in models))
        losses = [model(batch_of(step)) for model in models]
        assert torch.equal(losses[0], losses[1])
        for loss in losses:
            loss.backward()
        expect_equal(*(model.module.ebc for model in models))


@pytest.mark.parametrize("world", [1, 2])
def test_rows_are_written_on_the_device_and_below_it(world: int) -> None:
    run_ranks(world, written)


# ---- maps


class Mapped(nn.Module):
    """A table behind a map that gives its rows to other ids all the time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [EmbeddingBagConfig(14, 8, "a", feature_names=["f"])]
        collection = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": 0.1})
        module = MCHManagedCollisionModule(14, torch.device("cpu"), LRU_EvictionPolicy(), 1, 1000, name="a")
        self.mc = ManagedCollisionEmbeddingBagCollection(collection, ManagedCollisionCollection({"a": module}, tables))

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        output, _ = self.mc(features)
        return output["f"]  # type: ignore[no-any-return]


def renewed(cut: str, folder: Path, below: str) -> int:
    tier = Tier(3, below, str(folder) if below == "file" else None, max_slots=1.0)
    models = []
    for given in (None, tier):
        model = Mapped()
        way: Any = row_wise(tier=given) if cut == "rows" else column_wise([0, dist.get_world_size() - 1], tier=given)
        world = dist.get_world_size()
        plan = construct_module_sharding_plan(model.mc, {"a": way}, world_size=world, device_type="cpu")
        models.append(DistributedModelParallel(model, plan=ShardingPlan({"mc": plan}), init_data_parallel=False))
    whole, cached = (model.module.mc._embedding_module for model in models)
    for step in range(8):
        ids = torch.randint(0, 6, (9,), generator=torch.Generator().manual_seed(step)) * 71 + 90 * (step % 5)
        features = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([3, 3, 3]))
        outputs = [model(features) for model in models]
        assert torch.equal(outputs[0], outputs[1])
        for output in outputs:
            output.backward(torch.ones_like(output) * (step + 1))
        expect_equal(whole, cached)
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    return misses(cached)


@pytest.mark.parametrize(("world", "cut", "below"), [(1, "rows", "ram"), (2, "rows", "file"), (2, "columns", "ram")])
def test_rows_that_a_map_gives_to_other_ids_begin_anew(world: int, cut: str, below: str, tmp_path: Path) -> None:
    assert sum(run_ranks(world, renewed, cut, tmp_path, below)) > 0


# ---- for serving


def quantized(folder: Path) -> None:
    states = []
    for tier in (None, RAM):
        model = Net()
        sharded = DistributedModelParallel(model, plan=plan_of(model, dist.get_world_size(), tier))
        for step in range(3):
            sharded(batch_of(step)).backward()
        path = checkpoint.save(folder / str(tier is None), sharded, step=1).path
        dist.barrier()
        # two ways to what is served: from the ranks, and from a checkpoint
        whole, from_files = Net(), Net()
        whole.load_state_dict(checkpoint.full_state_dict(sharded))
        from_files.load_state_dict(checkpoint.full_state_dict(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            states += [quantize_inference_model(one).state_dict() for one in (whole, from_files)]
        said = error_of(quantize_inference_model, sharded)
        assert "load shardwise.checkpoint.full_state_dict(model) into the unsharded model" in said
    for state in states[1:]:
        assert state.keys() == states[0].keys()
        assert all(torch.equal(value, states[0][name]) for name, value in state.items() if isinstance(value, Tensor))


def test_what_is_quantized_from_tables_with_tiers_is_what_others_give(tmp_path: Path) -> None:
    run_ranks(2, quantized, tmp_path)


def plans_of_models(folder: Path) -> None:
    """`DistributedModelParallel.reshard` by plans: a kernel without a tier has all rows on the device."""
    world = dist.get_world_size()
    model, other = Net(), Net()
    cached: Any = DistributedModelParallel(model, plan=plan_of(model, world, RAM))
    whole = DistributedModelParallel(other, plan=plan_of(other, world, None))
    for step, tier in enumerate((None, Tier(4, "file", str(folder), max_slots=1.0), replace(RAM, policy="lru"))):
        for dmp in (cached, whole):
            dmp(batch_of(step)).backward()
        expect_equal(whole.module.ebc, cached.module.ebc)
        stays: Any = {"tc": table_wise(0), "td": table_wise(0)}
        ways = {"ta": table_wise(0, tier=tier), "tb": row_wise(tier=tier), **stays}
        plan = construct_module_sharding_plan(Net().ebc, ways, world_size=world, device_type="cpu")
        changes = {name: plan[name] for name in ("ta", "tb")}
        cached.reshard(changes, "ebc")
        whole.reshard({name: replace(change, tier=None) for name, change in changes.items()}, "ebc")
        assert cached.module.ebc.shards.is_away("tb") == (tier is not None)
        expect_equal(whole.module.ebc, cached.module.ebc)
        assert not any(parameter.isnan().any() for parameter in whole.parameters())


def test_a_model_is_resharded_to_other_tiers_by_plans(tmp_path: Path) -> None:
    run_ranks(2, plans_of_models, tmp_path)
