"""Ids of any range in tables of a few rows: managed collision, trained, sharded and quantized.

python examples/managed_collision.py
torchrun --standalone --nproc_per_node=2 examples/managed_collision.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.embeddings.managed_collision import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    MCHManagedCollisionModule,
)
from shardwise.inference import quantize_inference_model
from shardwise.sharding import table_wise

# rows of the table, and users of whom a batch has some: new ones come, old ones stay away
ROWS, USERS, SAMPLES = 12, 8, 16


def build() -> ManagedCollisionEmbeddingBagCollection:
    """A table whose rows go to the users that come often and came lately; decided anew every two batches."""
    torch.manual_seed(0)
    table = EmbeddingBagConfig(ROWS, 8, "user", feature_names=["user"])
    ebc = EmbeddingBagCollection([table])
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.5})
    users = MCHManagedCollisionModule(ROWS, "cpu", DistanceLFU_EvictionPolicy(), eviction_interval=2, name="user")
    return ManagedCollisionEmbeddingBagCollection(ebc, ManagedCollisionCollection({"user": users}, [table]))


def batch_of(day: int) -> KeyedJaggedTensor:
    """A user for each sample; their ids are hashes of 62 bits, and their number grows with the days."""
    draw = torch.Generator().manual_seed(day)
    users = torch.randint(0, USERS, (SAMPLES,), generator=draw) + day // 4
    return KeyedJaggedTensor(["user"], hash_of(users), lengths=torch.ones(SAMPLES, dtype=torch.int64))


def hash_of(users: torch.Tensor) -> torch.Tensor:
    """Distinct large numbers."""
    return (users * 0x9E3779B97F4A7C15) & (2**62 - 1)


def main() -> None:
    env = start()
    module = build()
    plan = construct_module_sharding_plan(module, {"user": table_wise(rank=0)}, world_size=env.world_size)
    model = DistributedModelParallel(module, env=env, plan=ShardingPlan({"": plan}))
    losses = []
    for day in range(40):
        batch = batch_of(day)
        # a user's label is a bit of the hash
        label = ((batch.values() >> 7) & 1).float()
        # always a pair: rows, and the slots if they were asked for
        pooled, _ = model(batch)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(pooled["user"].sum(1), label)
        loss.backward()
        losses.append(loss.item())

    whole = build()
    if env.world_size == 1:
        whole.load_state_dict(model.state_dict())
        users = whole._managed_collision_collection.modules_by_table()["user"]
        known = hash_of(torch.arange(9, 9 + USERS))
        served = quantize_inference_model(whole)
        pooled, slots = served(KeyedJaggedTensor(["user"], known, lengths=torch.ones(USERS, dtype=torch.int64)))
        print("rows that nobody has:", int(users.open_slots()))
        print("users of the last days with a row of their own:", int((slots.values() < ROWS - 1).sum()), "of", USERS)
        right = (pooled["user"].sum(1) > 0) == ((known >> 7) & 1).bool()
        print("quantized, their labels are right:", bool(right.all()))
    if env.rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()


def start() -> ShardingEnv:
    """The ranks that torchrun started, or this process alone."""
    if "RANK" not in os.environ:
        return ShardingEnv.from_local(world_size=1, rank=0)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    return ShardingEnv.from_process_group(dist.group.WORLD)


if __name__ == "__main__":
    main()
