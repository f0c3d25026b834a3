"""The model of the golden checkpoints and how it is cut: tables of two dtypes, two rules, a tier, managed collision.

Must stay as it is: files of earlier releases are loaded into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    DataType,
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
from shardwise.embeddings.managed_collision import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    MCHManagedCollisionModule,
)
from shardwise.planner.layout import Tier
from shardwise.sharding import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise

DIM, SAMPLES = 8, 6
# table: rows, dtype
ADAGRAD = {"a": (24, DataType.FP32), "b": (10, DataType.FP16), "tiered": (40, DataType.FP32)}
ADAM = {"c": (12, DataType.FP32), "d": (9, DataType.FP32)}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "mixed": {
        "a": row_wise,
        "b": partial(table_wise, 1),
        "tiered": row_wise,
        "c": partial(column_wise, [0, 1]),
        "d": data_parallel,
    },
    "rows": dict.fromkeys("abcd", row_wise) | {"tiered": row_wise},
    "alone": dict.fromkeys("abcd", partial(table_wise, 0)) | {"tiered": partial(table_wise, 0)},
}  # fmt: skip


def collection(tables: Mapping[str, tuple[int, DataType]]) -> EmbeddingBagCollection:
    """A table for each entry, which reads the feature of its name."""
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, DIM, t, dtype, feature_names=[t]) for t, (rows, dtype) in tables.items()]
    )


class GoldenNet(nn.Module):
    """Two collections with a rule each, and a layer over both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.adagrad, self.adam = collection(ADAGRAD), collection(ADAM)
        self.over = nn.Linear((len(ADAGRAD) + len(ADAM)) * DIM, 1)
        apply_optimizer_in_backward(RowWiseAdagrad, self.adagrad.parameters(), {"lr": 0.1})
        apply_optimizer_in_backward(torch.optim.Adam, self.adam.parameters(), {"lr": 0.05})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = [self.adagrad(features).values().float(), self.adam(features).values()]
        return self.over(torch.cat(pooled, 1)).square().mean()  # type: ignore[no-any-return]


def batch(step: int) -> KeyedJaggedTensor:
    """Two ids of each feature and sample, by arithmetic: no generator of random numbers decides."""
    names = {**ADAGRAD, **ADAM}
    ids = [(torch.arange(2 * SAMPLES) * (3 + n) + 5 * step + n) % rows for n, (rows, _) in enumerate(names.values())]
    lengths = torch.full((len(names) * SAMPLES,), 2)
    return KeyedJaggedTensor([*names], torch.cat(ids), lengths=lengths)


def net(plan: str) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model by a plan, over the ranks of the process group or in this process, and the optimizer of all of it."""
    module = GoldenNet()
    alone = not dist.is_initialized()
    world = 1 if alone else dist.get_world_size()
    cuts = {}
    for name, tables in (("adagrad", ADAGRAD), ("adam", ADAM)):
        cuts[name] = construct_module_sharding_plan(
            getattr(module, name),
            {table: PLANS["alone" if world == 1 else plan][table]() for table in tables},
            local_size=world, world_size=world, device_type="cpu",
        )  # fmt: skip
    if plan == "mixed" and world > 1:
        cuts["adagrad"]["tiered"].tier = Tier(slots=30)
    group: Any = dist.group.WORLD
    env = ShardingEnv.from_local(1, 0) if alone else ShardingEnv.from_process_group(group)
    model = DistributedModelParallel(module, env, "cpu", ShardingPlan(cuts))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, partial(torch.optim.Adam, lr=0.01))
    return model, CombinedOptimizer([model.fused_optimizer, wrapped])


def train(model: nn.Module, optimizer: CombinedOptimizer, steps: range) -> None:
    """Steps on the batches of those numbers, the same on every rank."""
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()


def collisions() -> ManagedCollisionEmbeddingBagCollection:
    """A collection whose ids of any range get rows, the most frequent first; every second batch decides."""
    torch.manual_seed(12)
    tables = collection({"m": (7, DataType.FP32)})
    module = MCHManagedCollisionModule(
        zch_size=7, device=torch.device("cpu"), eviction_interval=2, eviction_policy=LFU_EvictionPolicy()
    )
    return ManagedCollisionEmbeddingBagCollection(
        tables, ManagedCollisionCollection({"m": module}, tables.embedding_bag_configs())
    )


def far_ids(step: int) -> KeyedJaggedTensor:
    """Ids far beyond the rows that there are."""
    return KeyedJaggedTensor(["m"], (torch.arange(8) % 5 + step) * 1_000_003, lengths=torch.full((4,), 2))
