"""Feature-processed collections over ranks: values, gradients of position weights, and faults of one rank."""

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
    KeyedJaggedTensor,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from shardwise.sharding import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding.modules.nested import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)

pytestmark = pytest.mark.ranks

ROWS = {"a": 20, "b": 11, "c": 7, "d": 5}
SAMPLES, LONGEST, STEPS = 8, 4, 4


class Net(nn.Module):
    """A feature-processed collection, by a processor for each feature or one for all, and the mean of a loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = [EmbeddingBagConfig(rows, 8, f"t{name}", feature_names=[name]) for name, rows in ROWS.items()]
        processors: Any = (
            PositionWeightedModuleCollection(dict.fromkeys(ROWS, LONGEST))
            if kind == "collection"
            else {name: PositionWeightedModule(LONGEST) for name in ROWS}
        )
        self.fp = FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection(tables, is_weighted=True), processors)
        for name, param in self.named_parameters():
            if "embedding_bags" in name:
                apply_optimizer_in_backward(torch.optim.Adagrad, [param], {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.fp(features).values().sin().sum(1).mean()


def batch_of(step: int, begin: int = 0, end: int = SAMPLES, longest: int = LONGEST) -> KeyedJaggedTensor:
    """Samples [begin, end) of a batch, with a feature that nothing looks up."""
    generator = torch.Generator().manual_seed(step)
    keys = ["x", *reversed(ROWS)]
    lengths = torch.randint(0, longest + 1, (len(keys), SAMPLES), generator=generator)
    ids = [
        torch.randint(0, ROWS.get(key, 1000), (int(n),), generator=generator)
        for key, row in zip(keys, lengths, strict=True)
        for n in row
    ]
    mine = [ids[k * SAMPLES + sample] for k in range(len(keys)) for sample in range(begin, end)]
    return KeyedJaggedTensor(keys, torch.cat(mine), lengths=lengths[:, begin:end].flatten())


def share_of(step: int) -> KeyedJaggedTensor:
    each = SAMPLES // dist.get_world_size()
    return batch_of(step, dist.get_rank() * each, (dist.get_rank() + 1) * each)


def plan_for(model: Net) -> ShardingPlan:
    world = dist.get_world_size()
    where = {
        "ta": row_wise(), "tb": column_wise(list(range(min(world, 2)))), "tc": data_parallel(),
        "td": table_wise(world - 1),
    }  # fmt: skip
    return ShardingPlan({"fp": construct_module_sharding_plan(model.fp, where, world_size=world, device_type="cpu")})


def trained(model: nn.Module, batch: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the position weights after all of them."""
    positions = {name: param for name, param in model.named_parameters() if "position_weight" in name}
    optimizer, losses = torch.optim.SGD(positions.values(), lr=0.5), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: param.detach().clone() for name, param in positions.items()}


@cache
def alone(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    return trained(Net(kind), batch_of)


def sharded(kind: str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    model = Net(kind)
    dmp = DistributedModelParallel(model, plan=plan_for(model))
    assert isinstance(model.fp, ShardedFeatureProcessedEmbeddingBagCollection)
    return *trained(dmp, share_of), [name for name, _ in dmp.named_parameters()]


@pytest.mark.parametrize("kind", ["collection", "one each"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_position_weights_and_tables_train_as_in_one_process(world: int, kind: str) -> None:
    """The position weights' gradients come back through the exchange, so the second loss shows both."""
    wanted_losses, wanted = alone(kind)
    ranks = run_ranks(world, sharded, kind)
    for step, loss in enumerate(wanted_losses):
        assert abs(sum(losses[step] for losses, *_ in ranks) / world - loss) <= 1e-5
    names = [name for name, _ in Net(kind).named_parameters()]
    for _, positions, found in ranks:
        assert found == names
        assert positions.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (value - 1).abs().max() > 1e-3, "it was trained"
            assert (positions[name] - value).abs().max() <= 1e-5, name


def inner_plan() -> tuple[list[float], dict[str, Tensor], list[str]]:
    model = Net("one each")
    plan = ShardingPlan({"fp._embedding_bag_collection": plan_for(model).plan["fp"]})
    dmp = DistributedModelParallel(model, plan=plan)
    assert type(model.fp) is FeatureProcessedEmbeddingBagCollection
    return *trained(dmp, share_of), [name for name, _ in dmp.named_parameters()]


def test_a_plan_may_name_the_collection_inside() -> None:
    wanted_losses, wanted = alone("one each")
    ranks = run_ranks(2, inner_plan)
    for step, loss in enumerate(wanted_losses):
        assert abs(sum(losses[step] for losses, *_ in ranks) / 2 - loss) <= 1e-5
    for _, positions, _ in ranks:
        assert all((positions[name] - value).abs().max() <= 1e-5 for name, value in wanted.items())


def faults(kind: str) -> list[tuple[str, str]]:
    model = Net(kind)
    dmp, found = DistributedModelParallel(model, plan=plan_for(model)), []
    good = share_of(0)
    for bad in (batch_of(1, longest=LONGEST + 3), good.permute([0, 1])):
        try:
            dmp(bad if dist.get_rank() == 1 else good)
        except (IndexError, KeyError) as error:
            found.append((type(error).__name__, str(error.args[0])))
    dmp(good).backward()
    return found


@pytest.mark.parametrize("kind", ["collection", "one each"])
def test_what_a_processor_raises_on_one_rank_is_raised_on_all(kind: str) -> None:
    """A bag longer than the position weights raised on its rank alone, and the others waited for its ids."""
    for (first, long), (second, missing) in run_ranks(2, faults, kind):
        assert (first, second) == ("IndexError", "KeyError")
        assert re.search(r"^rank 1: feature '\w', sample \d: \d ids, but there are weights for 4 positions", long)
        assert re.search(r"^rank 1: features \['a', 'b', 'c'\] are not in the batch", missing)


def test_the_sharder_takes_the_one_of_the_collection_and_its_default_optimizer() -> None:
    module = Net("collection").fp
    sharder = FeatureProcessedEmbeddingBagCollectionSharder()
    assert list(sharder.shardable_parameters(module)) == ["ta", "tb", "tc", "td"]
    assert sharder.sharded_module_type is ShardedFeatureProcessedEmbeddingBagCollection
    with pytest.raises(ValueError, match="qcomm_codecs_registry: the ebc_sharder that is given has its own"):
        FeatureProcessedEmbeddingBagCollectionSharder(sharder._ebc_sharder, {"codecs": 1})
    with pytest.raises(TypeError, match="CollectionSharder shards FeatureProcessedEmbedding.*, got Linear"):
        sharder.shard(nn.Linear(2, 2), {}, None)  # type: ignore[arg-type]
