"""A training step in one graph of torch.compile: how many graphs are made, when another is, and the eager step's bits.

    python examples/recipes/compile_step.py
    torchrun --nproc_per_node=2 examples/recipes/compile_step.py

`--backend inductor` makes faster code, in half a minute, and needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ShardingEnv,
    apply_optimizer_in_backward,
    checkpoint,
    in_backward_optimizer_filter,
)
from shardwise.jagged.compiled.batches import kjt_for_pt2_tracing

Batch = tuple[KeyedJaggedTensor, Tensor]


class Model(nn.Module):
    """The loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        self.over = nn.Linear(8, 1)

    def forward(self, ids: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        logits = self.over(self.ebc(ids).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def build(env: ShardingEnv) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1})
    sharded = DistributedModelParallel(model, env=env)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, CombinedOptimizer(
        [sharded.fused_optimizer, KeyedOptimizerWrapper(dense, partial(torch.optim.SGD, lr=0.1))]
    )


def batch_of(seed: int, batch_size: int) -> Batch:
    """0 to 3 ids a sample."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (batch_size,), generator=generator)
    ids = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["item"], ids, lengths=lengths), (lengths > 1).float()


def train(
    model: Callable[..., Tensor], optimizer: CombinedOptimizer, batches: list[Batch], mark: bool = False
) -> float:
    """The last loss; `mark` has the first graph serve any number of ids."""
    loss = torch.empty(0)
    for ids, labels in batches:
        optimizer.zero_grad()
        loss = model(kjt_for_pt2_tracing(ids) if mark else ids, labels)
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="aot_eager")
    backend = parser.parse_args().backend
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        env = ShardingEnv.from_process_group(dist.group.WORLD)
    else:
        env = ShardingEnv.from_local(world_size=1, rank=0)

    alike = [batch_of(10 * step + env.rank, 16) for step in range(6)]
    eager, optimizer = build(env)
    train(eager, optimizer, alike)
    wanted = checkpoint.full_state_dict(eager)

    said = []
    sizes = [batch_of(10 * step + env.rank, 16 + step) for step in range(6)]
    for name, batches, mark in (
        ("as they come", alike, False),
        ("marked", alike, True),
        ("marked, of many sizes", sizes, True),
    ):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        model, optimizer = build(env)
        train(torch.compile(model, backend=counter, fullgraph=True), optimizer, batches, mark)
        weights = checkpoint.full_state_dict(model)
        same = all(torch.equal(weights[key], tensor) for key, tensor in wanted.items())
        bits = "" if batches is sizes else f", the eager step's bits: {same}"
        said.append(f"6 batches {name}: {counter.frame_count} graphs{bits}")
    if env.rank == 0:
        print("\n".join(said))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
