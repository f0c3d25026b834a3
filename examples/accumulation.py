"""Large batches in small parts: micro-batches that are one step, for dense layers and for tables.

python examples/accumulation.py
torchrun --standalone --nproc_per_node=2 examples/accumulation.py
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
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ShardingEnv,
    TrainPipelineSparseDist,
    accumulate,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)

PARTS = 4
Sample = tuple[KeyedJaggedTensor, Tensor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(50, 8, "item", feature_names=["item"])])
        self.over = nn.Linear(8, 1)
        apply_optimizer_in_backward(torch.optim.Adagrad, self.ebc.parameters(), {"lr": 0.1})

    def forward(self, batch: Sample) -> Tensor:
        ids, label = batch
        return nn.functional.mse_loss(self.over(self.ebc(ids).values()).squeeze(1), label)


def main() -> None:
    env = start()
    batches = [samples(env.rank, seed) for seed in range(PARTS)]

    # A plain loop: all micro-batches but the last only add gradients up. Tables stay as they are until `step`.
    model, optimizer = build(env)
    before = losses(model, batches)
    for _ in range(20):
        optimizer.zero_grad()
        for batch in batches[:-1]:
            with accumulate(model):
                (model(batch) / PARTS).backward()
        (model(batches[-1]) / PARTS).backward()
        optimizer.step()
    say(env, f"loop: loss {before:.3f} -> {losses(model, batches):.3f}")

    # The same in a pipeline, whose steps become micro-batches.
    model, optimizer = build(env)
    config = GradientAccumulationConfig(num_steps=PARTS)
    inner = TrainPipelineSparseDist(model, optimizer, model.device, custom_model_fwd=partial(forward, model))
    pipeline = GradientAccumulationWrapper(inner, optimizer, model, config)
    stream = iter(batches * 20)
    for _ in range(len(batches) * 20):
        pipeline.progress(stream)
    say(env, f"pipeline: loss {before:.3f} -> {losses(model, batches):.3f}")

    # Clipping by the norm of all gradients, those of tables on all ranks among them. It waits for `step` by itself.
    model, optimizer = build(env)
    clipped = GradientClippingOptimizer(optimizer, GradientClipping.NORM, max_gradient=0.1)
    clipped.zero_grad()
    for batch in batches:
        (model(batch) / PARTS).backward()
    clipped.step()
    assert clipped.last_total_grad_norm is not None
    say(env, f"norm before it was cut to 0.1: {clipped.last_total_grad_norm.item():.3f}")


def build(env: ShardingEnv) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """A model over all ranks, and one optimizer for its tables and its dense layers."""
    model = DistributedModelParallel(Model(), env)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.1))]
    )


def forward(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    """What a pipeline asks of a model: the loss that it differentiates, and the output of the step."""
    loss: Tensor = model(batch)
    return loss / PARTS, loss.detach()


def samples(rank: int, seed: int) -> Sample:
    """Eight samples of two ids; their label says whether the first is even."""
    ids = torch.randint(0, 50, (8, 2), generator=torch.Generator().manual_seed(10 * seed + rank))
    return KeyedJaggedTensor(["item"], ids.flatten(), lengths=torch.full((8,), 2)), (ids[:, 0] % 2).float()


@torch.no_grad()
def losses(model: nn.Module, batches: list[Sample]) -> float:
    """The mean loss of this rank's samples."""
    return sum(float(model(batch)) for batch in batches) / len(batches)


def start() -> ShardingEnv:
    """Several ranks under torchrun, else this process alone."""
    if "RANK" not in os.environ:
        return ShardingEnv.from_local(1, 0)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    return ShardingEnv.from_process_group(dist.group.WORLD)


def say(env: ShardingEnv, text: str) -> None:
    if env.rank == 0:
        print(text)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
