"""Trains a sharded model, saves it in the background, and goes on from the files under another plan.

python examples/checkpoint.py
torchrun --nproc_per_node=2 examples/checkpoint.py
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

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
    ShardingPlan,
    apply_optimizer_in_backward,
    checkpoint,
    construct_module_sharding_plan,
    in_backward_optimizer_filter,
)
from shardwise.sharding import row_wise, table_wise


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(1000, 32, "item", feature_names=["clicked"])])
        self.over = nn.Linear(32, 1)
        apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values()).squeeze(1)  # type: ignore[no-any-return]


def sharded(by_rows: bool) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = Model()
    cut = row_wise() if by_rows else table_wise(0)
    plan = construct_module_sharding_plan(model.ebc, {"item": cut}, world_size=dist.get_world_size())
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"ebc": plan}))
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, partial(torch.optim.Adam, lr=0.01))
    return dmp, CombinedOptimizer([dmp.fused_optimizer, wrapped])


def train(model: nn.Module, optimizer: CombinedOptimizer, steps: range) -> float:
    loss = torch.zeros(())
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 1000, (64,), generator=generator)
        optimizer.zero_grad()
        loss = (model(KeyedJaggedTensor(["clicked"], ids, lengths=torch.full((32,), 2))) - 1).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    say = print if dist.get_rank() == 0 else (lambda *_: None)
    places = [tempfile.mkdtemp()]
    dist.broadcast_object_list(places)
    folder = Path(places[0])

    model, optimizer = sharded(by_rows=True)
    train(model, optimizer, range(10))
    saving = checkpoint.save(folder, model, optimizer, step=10, extra={"epoch": 1}, asynchronous=True)
    loss = train(model, optimizer, range(10, 20))
    saving.wait()

    path = checkpoint.latest(folder)
    assert path is not None
    other, other_optimizer = sharded(by_rows=False)
    loaded = checkpoint.load(path, other, other_optimizer)
    again = train(other, other_optimizer, range(loaded.step, 20))
    say(f"loaded step {loaded.step}, epoch {loaded.extra['epoch']}, problems: {checkpoint.verify(path)}")
    say(f"goes on as if nothing had happened: {abs(loss - again) < 1e-5}")

    rows = checkpoint.full_state_dict(path)["ebc.embedding_bags.item.weight"]
    bag = nn.EmbeddingBag.from_pretrained(rows)
    say(f"a plain bag: {list(bag(torch.tensor([[1, 2]])).shape)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
