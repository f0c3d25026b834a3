"""Training that ends when the test NE gets no better, on all ranks in the same epoch, with the best weights.

python examples/recipes/early_stopping.py
torchrun --nproc_per_node=2 examples/recipes/early_stopping.py
"""

from __future__ import annotations

import os
from functools import partial

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
    ShardingEnv,
    StreamingNE,
    apply_optimizer_in_backward,
    checkpoint,
    in_backward_optimizer_filter,
    reduce_metrics,
)

ROWS, BATCH_SIZE, PATIENCE = 500, 50, 2


class Model(nn.Module):
    """Learns its few training samples by heart, which the others suffer from."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 4, "user", feature_names=["user"])])
        self.over = nn.Linear(4, 1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(ids).values()).squeeze(1)


def samples(seed: int, number: int) -> list[tuple[KeyedJaggedTensor, Tensor]]:
    """Batches of one user each; how likely a user clicks is his own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (number, BATCH_SIZE), generator=generator)
    clicks = (torch.rand(number, BATCH_SIZE, generator=generator) < 0.2 + 0.6 * (ids % 7 > 3)).float()
    ones = torch.ones(BATCH_SIZE, dtype=torch.int64)
    return [(KeyedJaggedTensor(["user"], row, lengths=ones), labels) for row, labels in zip(ids, clicks, strict=True)]


@torch.no_grad()
def ne_of(model: nn.Module, batches: list[tuple[KeyedJaggedTensor, Tensor]], env: ShardingEnv) -> float:
    """NE over all ranks' batches, the same bits on every rank."""
    metric = StreamingNE()
    for ids, labels in batches:
        metric.update(model(ids), labels)
    (metric,) = reduce_metrics((metric,), env)
    return metric.compute()


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        env = ShardingEnv.from_process_group(dist.group.WORLD)
    else:
        env = ShardingEnv.from_local(world_size=1, rank=0)
    unsharded = Model()
    apply_optimizer_in_backward(torch.optim.SGD, unsharded.ebc.parameters(), {"lr": 20.0})
    model = DistributedModelParallel(unsharded, env=env)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, partial(torch.optim.SGD, lr=0.5))]
    )
    train, test = samples(1, 24)[env.rank :: env.world_size], samples(2, 24)[env.rank :: env.world_size]

    best, best_epoch, weights = float("inf"), 0, {}
    epoch, ne = 0, best
    for epoch in range(1, 101):
        for ids, labels in train:
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(ids), labels).backward()
            optimizer.step()
        ne = ne_of(model, test, env)
        if ne < best:
            best, best_epoch, weights = ne, epoch, checkpoint.full_state_dict(model)
        elif epoch - best_epoch >= PATIENCE:
            break
    print(f"rank {env.rank}: ended after epoch {epoch}, {PATIENCE} after the best")

    # for exporting; `checkpoint.load` of the best epoch's folder puts them back into the sharded model
    whole = Model()
    whole.load_state_dict(weights)
    restored = ne_of(whole, samples(2, 24), ShardingEnv.from_local(1, 0))
    if env.rank == 0:
        print(f"the last NE is worse: {ne > best}; the best weights are back: {abs(restored - best) < 1e-6}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
