"""A learning rate that warms up and falls along a cosine, for tables and dense layers alike, and is resumed.

python examples/recipes/schedules.py
torchrun --nproc_per_node=2 examples/recipes/schedules.py
"""

from __future__ import annotations

import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ShardingEnv,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    checkpoint,
    in_backward_optimizer_filter,
)

STEPS, WARM_UP = 12, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(20, 4, "item", feature_names=["item"])])
        self.over = nn.Linear(4, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(ids).values()).squeeze(1)


def build(env: ShardingEnv) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Tables at a rate of 0.4, dense layers at 0.1: a schedule multiplies both."""
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.4})
    sharded = DistributedModelParallel(model, env=env)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, CombinedOptimizer(
        [sharded.fused_optimizer, KeyedOptimizerWrapper(dense, partial(torch.optim.SGD, lr=0.1))]
    )


def schedule(optimizer: CombinedOptimizer) -> LRScheduler:
    """From a tenth of the rate up in WARM_UP steps, then down along a cosine."""
    up = LinearLR(optimizer, start_factor=0.1, total_iters=WARM_UP)
    return SequentialLR(optimizer, [up, CosineAnnealingLR(optimizer, STEPS - WARM_UP)], [WARM_UP])


def batch_of(step: int) -> tuple[KeyedJaggedTensor, Tensor]:
    ids = (torch.arange(8) * 7 + step) % 20
    return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(8, dtype=torch.int64)), (ids % 2).float()


def train(model: nn.Module, optimizer: CombinedOptimizer, rates: LRScheduler, steps: range) -> list[list[float]]:
    """The rates of each step: of the tables and of the dense layers."""
    used = []
    for step in steps:
        # passes the rates on to the tables, whose update is part of backward: after `rates.step()`, before backward
        optimizer.zero_grad()
        ids, labels = batch_of(step)
        nn.functional.mse_loss(model(ids), labels).backward()
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        rates.step()
    return used


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        env = ShardingEnv.from_process_group(dist.group.WORLD)
    else:
        env = ShardingEnv.from_local(world_size=1, rank=0)

    model, optimizer = build(env)
    rates = schedule(optimizer)
    used = train(model, optimizer, rates, range(STEPS))
    if env.rank == 0:
        for step in (0, 2, 4, 8, 11):
            print(f"step {step}: tables {used[step][0]:.4f}, dense layers {used[step][1]:.4f}")

    # stopped in the middle of the cosine, saved and resumed: the schedule's place goes along
    begun, steps = build(env), range(6)
    its_rates = schedule(begun[1])
    train(*begun, its_rates, steps)
    folder = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    checkpoint.save(folder[0], begun[0], begun[1], extra={"rates": its_rates.state_dict()}, step=6)
    resumed, optimizer = build(env)
    its_rates = schedule(optimizer)
    path = checkpoint.latest(folder[0])
    assert path is not None
    loaded = checkpoint.load(path, resumed, optimizer)
    its_rates.load_state_dict(loaded.extra["rates"])
    used_after = train(resumed, optimizer, its_rates, range(6, STEPS))
    weights, resumed_weights = checkpoint.full_state_dict(model), checkpoint.full_state_dict(resumed)
    if env.rank == 0:
        same = all(torch.equal(tensor, resumed_weights[name]) for name, tensor in weights.items())
        print(f"resumed: same rates {used_after == used[6:]}, same weights {same}")

    # the same warm-up as an optimizer, as TorchRec has it: its place is part of the optimizer's state
    _, optimizer = build(env)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=WARM_UP, value=0.1)]
    warm_up = WarmupOptimizer(optimizer, stages, lr=0.4)
    if env.rank == 0:
        print(f"WarmupOptimizer: one rate for all groups, {[round(group['lr'], 4) for group in warm_up.param_groups]}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
