"""Models on ranks whose weights came from outside: made on meta, replaced before or after they are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from model_zoo import give_memory
from ranks import run_ranks
from sharding_steps import local_tensors
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.sharding import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)

pytestmark = pytest.mark.ranks

ROWS, SAMPLES = {"a": 20, "b": 12, "c": 9, "d": 7}, 4


class Model(nn.Module):
    """Tables with an optimizer in their backward, and a dense layer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = [EmbeddingBagConfig(rows, 64, name, feature_names=[name]) for name, rows in ROWS.items()]
        self.bags = EmbeddingBagCollection(tables, device=device)
        self.over = nn.Linear(64 * len(ROWS), 1, device=device)
        apply_optimizer_in_backward(RowWiseAdagrad, self.bags.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.bags(features).values())  # type: ignore[no-any-return]


def plan_of(model: Model) -> ShardingPlan:
    world = dist.get_world_size()
    kinds: Any = {
        "a": row_wise(), "b": column_wise(list(range(world))), "c": table_wise(world - 1), "d": data_parallel(),
    }  # fmt: skip
    cut = construct_module_sharding_plan(model.bags, kinds, world_size=world, device_type="cpu")
    return ShardingPlan({"bags": cut})


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    share = range(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    outputs = []
    for step in range(steps):
        output = model(random_kjt(ROWS, SAMPLES, seed=step, of=share))
        output.square().sum().backward()
        outputs.append(output.detach().clone())
    return outputs


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in local_tensors(model.state_dict()).items()}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b)


def sharded(model: Model, **more: Any) -> DistributedModelParallel:
    return DistributedModelParallel(model, plan=plan_of(model), **more)


def replaced_before() -> bool:
    source, made = Model("cpu"), Model("meta")
    made.apply(give_memory)
    made.load_state_dict(source.state_dict())
    # on each table the optimizer that was applied on meta
    plain, model = sharded(source), sharded(made)
    return equal(train(plain), train(model)) and equal(weights_of(plain), weights_of(model))


def replaced_after() -> bool:
    plain, model = sharded(Model("cpu")), sharded(Model("cpu"))
    train(plain, 1)
    train(model, 1)
    bags: Any = model.module.bags
    held = {name: (param, param.detach().clone()) for name, param in bags.named_parameters()}
    for name, (param, _) in held.items():
        path, _, leaf = name.rpartition(".")
        bags.get_submodule(path)._parameters[leaf] = nn.Parameter(param.detach() + 1.0)
    with torch.no_grad():
        for param in plain.get_submodule("module.bags").parameters():
            param += 1.0
    same = equal(train(plain), train(model)) and equal(weights_of(plain), weights_of(model))
    # what programs hold of before is not written to
    return same and all(torch.equal(param, rows) for param, rows in held.values())


def from_meta() -> bool:
    source, on_meta = sharded(Model("cpu")), Model("meta")
    train(source)
    model = sharded(on_meta, device="meta", init_data_parallel=False)
    state, wanted = model.state_dict(), source.state_dict()
    assert all(tensor.is_meta for tensor in local_tensors(state).values() if tensor.numel())
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert state[name].shape == value.shape
        if hasattr(value, "local_shards"):
            pieces = [[s.shard_sizes for s in each.metadata().shards_metadata] for each in (value, state[name])]
            assert pieces[0] == pieces[1]
    # nothing to keep it in
    model.load_state_dict(wanted)
    with pytest.raises(ValueError, match=r"model is on meta: call to_empty\(device=...\)"):
        model(random_kjt(ROWS, SAMPLES, seed=0))
    model.to_empty(device="cpu").load_state_dict(wanted)
    model.fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())
    model.init_data_parallel()
    assert model.device == torch.device("cpu")
    return equal(train(source), train(model)) and equal(weights_of(source), weights_of(model))


def given_memory_on_meta() -> bool:
    source, model = sharded(Model("cpu")), sharded(Model("meta"), device="meta", init_data_parallel=False)
    model.apply(give_memory)
    model.load_state_dict(source.state_dict())
    model.to("cpu")
    model.init_data_parallel()
    return equal(train(source), train(model)) and equal(weights_of(source), weights_of(model))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("run", [replaced_before, replaced_after, from_meta, given_memory_on_meta])
def test_weights_from_outside_are_sharded_and_train_as_any_other(run: Any, ranks: int) -> None:
    assert run_ranks(ranks, run) == [True] * ranks
