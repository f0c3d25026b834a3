"""Two tables of a TorchRec program on shardwise for a while: TorchRec and FBGEMM are installed, and stay in charge.

    python examples/canary.py
    torchrun --nproc_per_node=2 examples/canary.py

Where TorchRec is not installed it says so, and what shardwise says without it.
"""

# TorchRec is not among the libraries that shardwise is checked with
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import canary

TABLES, ROWS, DIM, SAMPLES = ["item", "shop", "user"], 1000, 16, 64


class Model(nn.Module):
    """A TorchRec collection and a layer over it."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.sparse, self.layer = collection, nn.Linear(DIM * len(TABLES), 1)

    def forward(self, features: Any) -> Tensor:
        logits: Tensor = self.layer(self.sparse(features).values())
        return nn.functional.softplus(-logits).mean()


def sharded() -> Any:
    """The model in TorchRec's DMP: none of this is new to a TorchRec program."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name]) for name in TABLES
    ]
    model = Model(EmbeddingBagCollection(tables=configs, device=torch.device("cpu")))
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse.parameters(), {"lr": 0.1})
    fused = {name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"]) for name in TABLES}
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=fused)
    plan = planner.collective_plan(model, [EmbeddingBagCollectionSharder()], dist.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)


def train(model: Any, steps: int) -> float:
    """The loss of the last of some steps."""
    from torchrec import KeyedJaggedTensor

    loss = torch.tensor(0.0)
    dense = torch.optim.SGD(model.module.layer.parameters(), lr=0.1)
    for _ in range(steps):
        ids, lengths = torch.randint(ROWS, (3 * SAMPLES * 2,)), torch.full((3 * SAMPLES,), 2)
        dense.zero_grad()
        loss = model(KeyedJaggedTensor(keys=TABLES, values=ids, lengths=lengths))
        loss.backward()
        dense.step()
    return loss.item()


def main() -> None:
    if importlib.util.find_spec("torchrec") is None:
        print("torchrec is not installed: docs/evidence/beside_torchrec.md makes an environment that has it")
        try:
            canary(nn.Linear(1, 1), tables=["item"])
        except ImportError as error:
            print(error)
        return
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = sharded()
    print(f"FBGEMM alone: loss {train(model, 20):.3f}")
    # beside FBGEMM first, which goes on answering: every step of ours is compared
    with canary(model, tables=["item", "user"], shadow=True) as trial:
        print(f"beside it: loss {train(model, 20):.3f}\n{trial.report()}")
    # then in its place
    with canary(model, tables=["item", "user"]) as trial:
        print(f"in its place: loss {train(model, 20):.3f}\n{trial.report()}")
    print(f"FBGEMM again: loss {train(model, 20):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
