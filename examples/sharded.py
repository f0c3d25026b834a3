"""Tables over several processes: plans, sharded collections, DLRM, and both kinds of optimizer.

python examples/sharded.py
torchrun --standalone --nproc_per_node=2 examples/sharded.py
"""

from __future__ import annotations

import os
from functools import partial

import torch
import torch.distributed as dist

from shardwise import (
    DLRM,
    Batch,
    CombinedOptimizer,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingComputeKernel,
    EmbeddingConfig,
    EmbeddingModuleShardingPlan,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedJaggedTensor,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    ParameterSharding,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    in_backward_optimizer_filter,
)
from shardwise.sharding import data_parallel, table_wise


def main() -> None:
    env = start()
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(num_embeddings=1000, embedding_dim=16, name="item", feature_names=["item"]),
            EmbeddingBagConfig(num_embeddings=20, embedding_dim=16, name="country", feature_names=["country"]),
        ]
    )
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.05})

    # Where each table goes: the big one whole on the last rank, the small one on every rank. Without a plan,
    # DistributedModelParallel balances whole tables over the ranks.
    tables: EmbeddingModuleShardingPlan = construct_module_sharding_plan(
        ebc, {"item": table_wise(rank=env.world_size - 1), "country": data_parallel()}, world_size=env.world_size
    )
    country: ParameterSharding = tables["country"]
    assert country.sharding_type == ShardingType.DATA_PARALLEL.value
    assert tables["item"].compute_kernel == EmbeddingComputeKernel.FUSED.value
    plan = ShardingPlan({"model.sparse_arch.embedding_bag_collection": tables})

    dlrm = DLRM(ebc, dense_in_features=4, dense_arch_layer_sizes=[8, 16], over_arch_layer_sizes=[8, 1])
    wrapper = DefaultDataParallelWrapper(bucket_cap_mb=10)
    model = DistributedModelParallel(DLRMTrain(dlrm), env=env, plan=plan, data_parallel_wrapper=wrapper)
    dense: KeyedOptimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), partial(torch.optim.Adagrad, lr=0.05)
    )
    # A rate for tables and layers alike, and the gradients of both cut by their norm.
    both = CombinedOptimizer([model.fused_optimizer, dense])
    stages = [
        WarmupStage(WarmupPolicy.LINEAR, max_iters=3, value=0.5),
        WarmupStage(WarmupPolicy.CONSTANT, max_iters=100),
    ]
    optimizer = GradientClippingOptimizer(
        WarmupOptimizer(both, stages, lr=0.05), GradientClipping.NORM, max_gradient=10.0
    )

    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss, _ = model(batch_of(env.rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    # The halves of a forward are public: ids leave in begin, rows arrive in finish.
    sharded = model.module.get_submodule("model.sparse_arch.embedding_bag_collection")
    assert isinstance(sharded, ShardedEmbeddingBagCollection)
    in_flight = sharded.begin(batch_of(env.rank).sparse_features)
    pooled = sharded.finish(in_flight)

    sequence = EmbeddingCollection([EmbeddingConfig(1000, 16, "item")])
    apply_optimizer_in_backward(torch.optim.Adam, sequence.parameters(), {"lr": 0.05})
    alone = DistributedModelParallel(sequence, env=env)
    assert isinstance(alone.module, ShardedEmbeddingCollection)
    rows = alone(batch_of(env.rank).sparse_features)["item"]

    if env.rank == 0:
        print(model.plan)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; pooled {tuple(pooled.values().shape)}")
        print("rows of each sample:", rows.lengths().tolist())
    if dist.is_initialized():
        dist.destroy_process_group()


def start() -> ShardingEnv:
    """The ranks that torchrun started, or this process alone."""
    if "RANK" not in os.environ:
        return ShardingEnv.from_local(world_size=1, rank=0)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    return ShardingEnv.from_process_group(dist.group.WORLD)


def batch_of(rank: int) -> Batch:
    """Eight samples; whether one is a click depends on its country."""
    generator = torch.Generator().manual_seed(rank)
    items = torch.randint(0, 1000, (16,), generator=generator)
    countries = torch.randint(0, 20, (8,), generator=generator)
    ids = KeyedJaggedTensor(["item", "country"], torch.cat([items, countries]), lengths=torch.tensor([2] * 8 + [1] * 8))
    return Batch(torch.rand(8, 4, generator=generator), ids, (countries % 2).float())


if __name__ == "__main__":
    main()
