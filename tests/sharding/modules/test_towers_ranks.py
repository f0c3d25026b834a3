"""Towers over ranks: values and gradients against one process, names, and faults of one rank."""

from __future__ import annotations

import re
from functools import cache
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
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from shardwise.sharding import (
    apply_to_all,
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.modules.nested import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
    ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection,
)

pytestmark = pytest.mark.ranks

ROWS = {"a": 20, "b": 11, "c": 7, "d": 5}
DIM, SAMPLES, STEPS = 8, 8, 4


class Interact(nn.Module):
    """Any of the collections' outputs to [B, 3]."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.dense = nn.Linear(columns, 3)

    def forward(self, found: KeyedTensor | dict[str, JaggedTensor]) -> Tensor:
        if isinstance(found, dict):
            return self.dense(torch.cat([jagged.to_padded_dense(2).flatten(1) for jagged in found.values()], dim=1))
        return self.dense(found.values()).tanh()


def bags(*names: str, weighted: bool = False) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(ROWS[name], DIM, f"t{name}", feature_names=[name]) for name in names]
    return EmbeddingBagCollection(tables, weighted)


def towers() -> EmbeddingTowerCollection:
    """One of each kind of embedding module."""
    torch.manual_seed(5)
    processed = FeatureProcessedEmbeddingBagCollection(
        bags("d", weighted=True), PositionWeightedModuleCollection({"d": 3})
    )
    sequences = EmbeddingCollection([EmbeddingConfig(ROWS["c"], DIM, "tc", feature_names=["c"])])
    found = EmbeddingTowerCollection([
        EmbeddingTower(bags("a"), Interact(DIM)),
        EmbeddingTower(bags("b", weighted=True), Interact(DIM)),
        EmbeddingTower(sequences, Interact(2 * DIM)),
        EmbeddingTower(processed, Interact(DIM)),
    ])  # fmt: skip
    for name, param in found.named_parameters():
        if "embedding" in name.split(".")[-3]:
            apply_optimizer_in_backward(torch.optim.Adagrad, [param], {"lr": 0.1})
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.towers = towers()

    def forward(self, batch: tuple[KeyedJaggedTensor, KeyedJaggedTensor]) -> Tensor:
        return self.towers(*batch).sin().sum(1).mean()


def batch_of(step: int, begin: int = 0, end: int = SAMPLES) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """Samples [begin, end) of features without weights, and of those with weights."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for keys in (["d", "a", "c"], ["b"]):
        lengths = torch.randint(0, 3, (len(keys), SAMPLES), generator=generator)
        ids = [
            torch.randint(0, ROWS[key], (int(n),), generator=generator)
            for key, row in zip(keys, lengths, strict=True)
            for n in row
        ]
        mine = torch.cat([ids[k * SAMPLES + sample] for k in range(len(keys)) for sample in range(begin, end)])
        weights = mine * 0.1 + 0.3 if keys == ["b"] else None
        found.append(KeyedJaggedTensor(keys, mine, weights, lengths[:, begin:end].flatten()))
    return found[0], found[1]


def share_of(step: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    each = SAMPLES // dist.get_world_size()
    return batch_of(step, dist.get_rank() * each, (dist.get_rank() + 1) * each)


def plan_for(module: nn.Module) -> ShardingPlan:
    world = dist.get_world_size()
    where = {"ta": table_row_wise(0), "tb": table_column_wise(0), "tc": row_wise(), "td": table_wise(world - 1)}
    made = construct_module_sharding_plan(
        module, where, EmbeddingTowerCollectionSharder(), world_size=world, device_type="cpu"
    )
    return ShardingPlan({"towers": made})


def trained(model: nn.Module, batch: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the interactions' weights after all of them."""
    dense = {name: param for name, param in model.named_parameters() if "dense" in name or "position" in name}
    optimizer, losses = torch.optim.SGD(dense.values(), lr=0.2), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: param.detach().clone() for name, param in dense.items()}


@cache
def alone() -> tuple[list[float], dict[str, Tensor]]:
    return trained(Net(), batch_of)


def sharded() -> tuple[list[float], dict[str, Tensor], list[str]]:
    model = Net()
    dmp = DistributedModelParallel(
        model, plan=plan_for(model.towers), sharders=[*get_default_sharders(), EmbeddingTowerCollectionSharder()]
    )
    assert isinstance(model.towers, ShardedEmbeddingTowerCollection)
    return *trained(dmp, share_of), [name for name, _ in dmp.named_parameters()]


def by_default() -> tuple[list[float], dict[str, Tensor], list[str]]:
    dmp = DistributedModelParallel(Net())
    assert "towers.towers.0.embedding" in dmp.plan.plan
    return *trained(dmp, share_of), [name for name, _ in dmp.named_parameters()]


@pytest.mark.parametrize(("world", "run"), [(1, sharded), (2, sharded), (4, sharded), (2, by_default)])
def test_towers_train_as_in_one_process(world: int, run: Any) -> None:
    """With the default sharders the collections inside are sharded one by one, and that comes to the same."""
    wanted_losses, wanted = alone()
    ranks = run_ranks(world, run)
    for step, loss in enumerate(wanted_losses):
        assert abs(sum(losses[step] for losses, *_ in ranks) / world - loss) <= 1e-5
    names = [name for name, _ in Net().named_parameters()]
    for _, dense, found in ranks:
        assert found == names
        for name, value in wanted.items():
            assert (dense[name] - value).abs().max() <= 1e-5, name


def missing_features() -> list[str]:
    model, found = Net(), []
    dmp = DistributedModelParallel(model, plan=plan_for(model.towers), sharders=[EmbeddingTowerCollectionSharder()])
    features, weighted = share_of(0)
    for batch in ((features, None), (None, weighted)):
        try:
            dmp(batch if dist.get_rank() == 1 else (features, weighted))
        except ValueError as error:
            found.append(str(error))
    dmp((features, weighted)).backward()
    return found


def test_features_that_are_missing_on_one_rank_raise_on_all() -> None:
    for found in run_ranks(2, missing_features):
        assert found == ["rank 1: tower 1 takes weighted_features: give them to forward",
                         "rank 1: tower 0 takes features: give them to forward"]  # fmt: skip


def one_tower() -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    tower, sharder = EmbeddingTower(bags("a", "b"), Interact(2 * DIM)), EmbeddingTowerSharder({"learning_rate": 0.5})
    plan = construct_module_sharding_plan(
        tower, apply_to_all(tower, data_parallel(), sharder), sharder, world_size=2, device_type="cpu"
    )
    dmp = DistributedModelParallel(tower, plan=ShardingPlan({"": plan}), sharders=[sharder])
    assert type(dmp.module) is ShardedEmbeddingTower
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    return dmp(kjt).detach(), {name: param.detach().clone() for name, param in dmp.named_parameters()}


def test_a_tower_can_be_the_model() -> None:
    torch.manual_seed(5)
    tower = EmbeddingTower(bags("a", "b"), Interact(2 * DIM))
    wanted = tower(KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1])))
    for output, state in run_ranks(2, one_tower):
        assert torch.allclose(output, wanted)
        assert state.keys() == tower.state_dict().keys()


def test_what_cannot_be_sharded_in_a_tower_is_refused() -> None:
    sharder = EmbeddingTowerCollectionSharder()
    with pytest.raises(TypeError, match="EmbeddingTowerSharder: a Linear inside cannot be sharded"):
        sharder.shardable_parameters(EmbeddingTowerCollection([EmbeddingTower(nn.Linear(2, 2), nn.Identity())]))
    twins = EmbeddingTowerCollection([EmbeddingTower(bags("a"), nn.Identity()) for _ in range(2)])
    with pytest.raises(ValueError, match="tower 1: another tower has a table 'ta'"):
        sharder.shardable_parameters(twins)
    with pytest.raises(TypeError, match=re.escape("EmbeddingTowerSharder shards EmbeddingTower, got Linear")):
        EmbeddingTowerSharder().shard(nn.Linear(2, 2), {}, None)  # type: ignore[arg-type]
