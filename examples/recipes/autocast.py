"""Dense layers in bf16 by torch.autocast, tables in fp32; and losses that are scaled, for fp16, with tables that wait.

python examples/recipes/autocast.py
torchrun --nproc_per_node=2 examples/recipes/autocast.py
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FusedOptimizer,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ShardingEnv,
    apply_optimizer_in_backward,
    checkpoint,
    in_backward_optimizer_filter,
)

STEPS, SCALE = 40, 2.0**10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(50, 8, "item", feature_names=["item"])])
        self.over = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(ids).values()).squeeze(1)


def build(env: ShardingEnv) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 10.0})
    sharded = DistributedModelParallel(model, env=env)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, CombinedOptimizer(
        [sharded.fused_optimizer, KeyedOptimizerWrapper(dense, partial(torch.optim.SGD, lr=0.5))]
    )


def batch_of(step: int) -> tuple[KeyedJaggedTensor, Tensor]:
    ids = (torch.arange(32) * 7 + step) % 50
    return KeyedJaggedTensor(["item"], ids, lengths=torch.ones(32, dtype=torch.int64)), (ids % 2).float()


def loss_of(model: nn.Module, step: int, dtype: torch.dtype | None) -> Tensor:
    """The loss, in fp32 whatever the layers compute in."""
    ids, labels = batch_of(step)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        logits = model(ids)
    return nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)


def train(model: nn.Module, optimizer: CombinedOptimizer, dtype: torch.dtype | None) -> tuple[float, float]:
    """The first loss and the last."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def train_scaled(model: DistributedModelParallel, optimizer: CombinedOptimizer, scale: float) -> int:
    """Trains with losses times `scale`; the number of steps that were left out as a gradient was not finite."""
    (fused,) = (part for part in model.fused_optimizer.inner_optimizers() if isinstance(part, FusedOptimizer))
    # without this backward updates the tables itself, by gradients that are `scale` times too large
    fused.accumulate_gradients()
    left_out = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        (scale * loss_of(model, step, torch.bfloat16)).backward()
        gradients = [param.grad for param in optimizer.params.values() if param.grad is not None]
        for gradient in [*gradients, *fused.gradient_sums()]:
            gradient /= scale
        # both are the same on all ranks: the norm of all tables' gradients, and dense gradients, which are averaged
        finite = [fused.gradient_norm().isfinite(), *(gradient.isfinite().all() for gradient in gradients)]
        if all(finite):
            optimizer.step()
        else:
            left_out += 1
    return left_out


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        env = ShardingEnv.from_process_group(dist.group.WORLD)
    else:
        env = ShardingEnv.from_local(world_size=1, rank=0)

    model, optimizer = build(env)
    inner: Any = model.module
    kinds: dict[str, torch.dtype] = {}
    for name, part in {"pooled": inner.ebc, "layers": inner.over}.items():
        part.register_forward_hook(
            lambda module, args, out, name=name: kinds.update({name: getattr(out, "dtype", None) or out.values().dtype})
        )
    first, last = train(model, optimizer, torch.bfloat16)
    kinds["table"] = checkpoint.full_state_dict(model)["ebc.embedding_bags.item.weight"].dtype
    if env.rank == 0:
        print(", ".join(f"{name}: {dtype}" for name, dtype in sorted(kinds.items())))
        print(f"bf16 layers: loss {first:.3f} -> {last:.3f}")
    first, last = train(*build(env), None)
    if env.rank == 0:
        print(f"fp32 layers: loss {first:.3f} -> {last:.3f}")

    model, optimizer = build(env)
    left_out = train_scaled(model, optimizer, SCALE)
    scaled = loss_of(model, STEPS - 1, None).item()
    if env.rank == 0:
        print(f"losses times {SCALE:.0f}: {left_out} steps left out, then loss {scaled:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
