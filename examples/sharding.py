"""Every way to shard tables, on any number of CPU processes; with four, two of them make a host.

python examples/sharding.py
torchrun --standalone --nproc_per_node=4 examples/sharding.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import (
    CommType,
    DistributedModelParallel,
    DMPCollection,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    EmbeddingTower,
    EmbeddingTowerCollection,
    EmbeddingTowerCollectionSharder,
    FeatureProcessedEmbeddingBagCollection,
    KeyedJaggedTensor,
    KeyedTensor,
    LazyAwaitable,
    ModuleSharder,
    PositionWeightedModuleCollection,
    QCommsConfig,
    RowWiseAdagrad,
    ShardedEmbeddingBagCollection,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    get_default_sharders,
    get_qcomm_codecs_registry,
    shard,
    shard_modules,
)
from shardwise.sharding import (
    Shard,
    ShardingStrategy,
    apply_to_all,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)

ROWS = {"user": 1000, "item": 500, "query": 300, "shop": 200, "tag": 100, "brand": 60, "country": 8}
SAMPLES = 8


def main() -> None:
    env = start()
    last, hosts = env.world_size - 1, env.world_size // env.local_world_size
    every_rank = list(range(env.world_size))

    # One table for each strategy. A generator says how a table is cut; the rest follows from its size and the ranks.
    where = {
        "user": row_wise(reduction="ordered"),  # rows over all ranks, pooled in the order of one process
        "item": column_wise(every_rank, row_state="table"),  # columns over all ranks, one optimizer state a row
        "query": table_row_wise(host_index=hosts - 1),  # rows over the ranks of a host, added there first
        "shop": table_column_wise(host_index=0, row_state="table"),  # columns over the ranks of a host
        "tag": grid_shard(list(range(hosts)), row_state="table"),  # columns over hosts, rows over the ranks of each
        "brand": table_wise(rank=last),  # whole
        "country": data_parallel(),  # on every rank, with its optimizer
    }
    model = tables()
    made = construct_module_sharding_plan(
        model, where, local_size=env.local_world_size, world_size=env.world_size, device_type="cpu"
    )
    plan = ShardingPlan({"": made})
    sharded = DistributedModelParallel(model, env=env, plan=plan)
    if env.rank == 0:
        print(sharded.plan)

    # The same training in one process that sees the batches of all ranks.
    alone = tables()
    for step in range(3):
        pooled = sharded(batch_of(step, env.rank))
        assert isinstance(pooled, KeyedTensor) and isinstance(pooled, LazyAwaitable)  # it waits when it is first used
        whole = alone(all_batches(step, env.world_size)).values()
        share = whole[env.rank * SAMPLES : (env.rank + 1) * SAMPLES]
        close = torch.allclose(pooled.values(), share, atol=1e-5)
        # gradients of a sharded model are divided by the number of ranks
        (pooled.values().square().sum() * env.world_size).backward()
        whole.square().sum().backward()
        if env.rank == 0:
            print(f"step {step}: as in one process: {close}")

    # Another plan in place: weights and optimizer states move.
    collection = sharded.module
    assert isinstance(collection, ShardedEmbeddingBagCollection)
    names = enumerate(ROWS)
    collection.reshard([Shard(name, n % env.world_size, (0, ROWS[name]), (0, 32)) for n, name in names])
    again = sharded(batch_of(3, env.rank)).values()
    share = alone(all_batches(3, env.world_size)).values()[env.rank * SAMPLES : (env.rank + 1) * SAMPLES]
    say(env, f"resharded: as in one process: {torch.allclose(again, share, atol=1e-5)}")

    # Rows travel as fp16, their gradients as bf16.
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.BF16))
    sharder: ModuleSharder[EmbeddingBagCollection] = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    plans = apply_to_all(tables(), row_wise(), sharder)
    compressed = shard(tables(), plans, env=env, device="cpu", sharder=sharder)
    error = (compressed(batch_of(0, env.rank)).values() - tables()(batch_of(0, env.rank)).values()).abs().max()
    say(env, f"compressed: off by less than 1e-3: {bool(error < 1e-3)}")

    # Sequences, each id once in the exchange.
    sequence = EmbeddingCollection([EmbeddingConfig(ROWS["user"], 8, "user")])
    apply_optimizer_in_backward(torch.optim.Adam, sequence.parameters(), {"lr": 0.05})
    once = shard(sequence, row_wise(), env=env, device="cpu", sharder=EmbeddingCollectionSharder(use_index_dedup=True))
    say(env, f"sequences: {[tuple(rows.values().shape) for rows in once(batch_of(0, env.rank)).values()]}")

    # The stages of a forward one by one, as a pipeline of your own calls them for several batches at a time.
    assert isinstance(once, ShardedModule)
    ctx = once.create_context()
    arrived = once.input_dist(ctx, batch_of(0, env.rank)).wait().wait()  # ids of all ranks
    say(env, f"stages: {[tuple(rows.values().shape) for rows in once.compute_and_output_dist(ctx, arrived).values()]}")

    # Modules around a collection: learned weights by position, and towers.
    towers = EmbeddingTowerCollection([EmbeddingTower(positions(), Interaction())])
    sharders = [EmbeddingTowerCollectionSharder(), *get_default_sharders()]
    inside = shard_modules(towers, env=env, device="cpu", sharders=sharders)
    say(env, f"tower: {tuple(inside(batch_of(0, env.rank), batch_of(0, env.rank)).shape)}")

    # Replicas of all tables over halves of the ranks, averaged now and then.
    if env.process_group is not None and env.world_size % 2 == 0:
        half = env.world_size // 2
        whole_tables = {name: table_wise(number % half) for number, name in enumerate(ROWS)}
        made = construct_module_sharding_plan(
            tables(), whole_tables, world_size=half, local_size=half, device_type="cpu"
        )
        both = DMPCollection(tables(), "cpu", ShardingPlan({"": made}), env.world_size, half, env.process_group)
        both(batch_of(0, env.rank)).values().sum().backward()
        both.sync()
        say(env, f"{env.world_size // half} replicas of {half} ranks: averaged")
        # the same, each replica with a part of the tables between steps
        parts = DMPCollection(
            tables(), "cpu", ShardingPlan({"": made}), env.world_size, half, env.process_group,
            sharding_strategy=ShardingStrategy.FULLY_SHARDED,
        )  # fmt: skip
        parts(batch_of(0, env.rank)).values().sum().backward()
        with parts.whole_tables():
            pairs = zip(both.parameters(), parts.parameters(), strict=True)
            say(env, f"fully sharded: as averaged: {all(torch.equal(one, other) for one, other in pairs)}")
    if dist.is_initialized():
        dist.destroy_process_group()


def start() -> ShardingEnv:
    """The ranks that torchrun started, two of them a host where there are four; or this process alone."""
    if "RANK" not in os.environ:
        return ShardingEnv.from_local(world_size=1, rank=0)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    world_size = dist.get_world_size()
    return ShardingEnv.from_process_group(dist.group.WORLD, local_world_size=2 if world_size == 4 else world_size)


def tables() -> EmbeddingBagCollection:
    """A table for each feature, the same every time."""
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(rows, 32, name) for name, rows in ROWS.items()])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.05})
    return ebc


def positions() -> FeatureProcessedEmbeddingBagCollection:
    """A collection whose rows are weighted by their place in the bag."""
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(ROWS["item"], 8, "item")], is_weighted=True)
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.05})
    return FeatureProcessedEmbeddingBagCollection(ebc, PositionWeightedModuleCollection({"item": 3}))


class Interaction(nn.Module):
    """A layer over what a tower looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(8, 4)

    def forward(self, looked_up: KeyedTensor) -> Tensor:
        """[B, 4]"""
        logits: Tensor = self.over(looked_up.values())
        return logits


def batch_of(step: int, rank: int) -> KeyedJaggedTensor:
    """Eight samples of one rank, two or three ids a bag."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(2, 4, (len(ROWS) * SAMPLES,), generator=generator)
    bags = lengths.view(len(ROWS), SAMPLES).sum(1).tolist()
    ids = [torch.randint(0, rows, (n,), generator=generator) for rows, n in zip(ROWS.values(), bags, strict=True)]
    return KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=lengths)


def all_batches(step: int, world_size: int) -> KeyedJaggedTensor:
    """The samples of all ranks, one after another."""
    batches = [batch_of(step, rank) for rank in range(world_size)]
    ids = [batch[name].values() for name in ROWS for batch in batches]
    lengths = [batch[name].lengths() for name in ROWS for batch in batches]
    return KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=torch.cat(lengths))


def say(env: ShardingEnv, text: str) -> None:
    """Print on one rank."""
    if env.rank == 0:
        print(text)


if __name__ == "__main__":
    main()
