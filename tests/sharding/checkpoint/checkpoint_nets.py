"""A small model with two tables and a dense layer, how it goes over the ranks there are, trains and is saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.checkpoint import load, save
from shardwise.sharding import column_wise, construct_module_sharding_plan, row_wise, table_wise

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad, "adam": torch.optim.Adam,
}  # fmt: skip


A, B = "ebc.embedding_bags.a.weight", "ebc.embedding_bags.b.weight"
EXTRA = {"epoch": 3, "names": ["x", None]}


class Net(nn.Module):
    """Tables a of 9 x 8 and b of 6 x 8, and a layer over both."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [EmbeddingBagConfig(rows, 8, name, feature_names=[name]) for name, rows in (("a", 9), ("b", 6))]
        self.ebc = EmbeddingBagCollection(tables)
        self.over = nn.Linear(16, 1)
        apply_optimizer_in_backward(KINDS[optimizer], self.ebc.parameters(), {"lr": 0.1})

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(kjt).values()).square().mean()  # type: ignore[no-any-return]


def net(optimizer: str, plan: str = "first") -> tuple[Any, CombinedOptimizer]:
    """The model by a plan over the ranks of the process group, or in this process; and the optimizer of all of it."""
    model = Net(optimizer)
    alone = not dist.is_initialized()
    world = 1 if alone else dist.get_world_size()
    group: Any = dist.group.WORLD
    env = ShardingEnv.from_local(1, 0) if alone else ShardingEnv.from_process_group(group)
    cut = {"rows": row_wise(), "columns": column_wise([0, world - 1]), "first": table_wise(0)}[plan]
    tables = construct_module_sharding_plan(model.ebc, {"a": cut, "b": table_wise(world - 1)}, world_size=world)
    sharded = DistributedModelParallel(model, env=env, plan=ShardingPlan({"ebc": tables}))
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, partial(torch.optim.Adam, lr=0.01))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, wrapped])


def train(model: Any, optimizer: CombinedOptimizer, steps: range) -> list[float]:
    """The loss of each of these steps."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 6, (12,), generator=generator)
        optimizer.zero_grad()
        loss = model(KeyedJaggedTensor(["a", "b"], ids, lengths=torch.full((6,), 2)))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(optimizer: str, plan: str = "first", steps: range = range(2)) -> tuple[Any, CombinedOptimizer]:
    """The model and its optimizer after these steps."""
    model, optimizers = net(optimizer, plan)
    train(model, optimizers, steps)
    return model, optimizers


def saved(folder: Path, optimizer: str = "adam", plan: str = "first", *, step: int = 5) -> Path:
    """The checkpoint of a model that was trained."""
    return save(folder, *trained(optimizer, plan), step=step, extra=EXTRA).path


def loaded(path: Path | str, optimizer: str, plan: str = "first") -> tuple[Any, CombinedOptimizer]:
    """A model that had learned something else, and its optimizer, as they were saved."""
    model, optimizers = trained(optimizer, plan, range(90, 92))
    load(path, model, optimizers)
    return model, optimizers
