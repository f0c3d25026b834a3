"""A plan of where the tables of a model go: machines, what tables may do, why it is so, and a file of it.

python examples/planning.py
torchrun --standalone --nproc_per_node=2 examples/planning.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    PlannerError,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    Topology,
    apply_optimizer_in_backward,
    get_default_sharders,
)

# name -> rows; on meta, so that a model of any size can be planned anywhere
ROWS = {"user": 40_000_000, "item": 10_000_000, "query": 2_000_000, "shop": 300_000, "tag": 5_000, "country": 200}


def tables(device: str, rows: dict[str, int]) -> EmbeddingBagCollection:
    """A table for each name, looked up by a feature of that name, with its optimizer in the backward."""
    collection = EmbeddingBagCollection(
        [EmbeddingBagConfig(size, 64, name, feature_names=[name]) for name, size in rows.items()], device=device
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.1})
    return collection


def plan_for_a_cluster() -> None:
    """Two hosts of four 80 GiB GPUs, which need not be here."""
    machines = Topology(world_size=8, compute_device="cuda", local_world_size=4, card="h100")
    constraints = {
        # ids of a sample
        "item": ParameterConstraints(pooling_factors=[50.0]),
        "query": ParameterConstraints(pooling_factors=[8.0], sharding_types=["table_wise", "row_wise"]),
        "shop": ParameterConstraints(not_on=[0]),
    }
    planner = EmbeddingShardingPlanner(machines, batch_size=4096, constraints=constraints)
    plan = planner.plan(nn.ModuleDict({"sparse": tables("meta", ROWS)}), get_default_sharders())
    print(plan)
    try:
        small = Topology(world_size=2, compute_device="cuda", hbm_cap=4 * 2**30)
        EmbeddingShardingPlanner(small).plan(tables("meta", ROWS), get_default_sharders())
    except PlannerError as error:
        print(f"\n{error.error_type.name}: {error}")


def plan_here(env: ShardingEnv, folder: Path) -> None:
    """For the processes that run this: rank 0 plans for all."""
    model = tables("cpu", {name: min(rows, 1000) for name, rows in ROWS.items()})
    planner = EmbeddingShardingPlanner(Topology(env.world_size, "cpu"), batch_size=4)
    if env.process_group is None:
        plan = planner.plan(model, get_default_sharders())
    else:
        plan = planner.collective_plan(model, get_default_sharders(), env.process_group)
    file = folder / f"plan{env.rank}.json"
    plan.save(file)
    sharded = DistributedModelParallel(model, env, plan=ShardingPlan.load(file))
    batch = KeyedJaggedTensor(list(ROWS), torch.arange(24) % 200, lengths=torch.ones(24, dtype=torch.int64))
    pooled = sharded(batch).values()
    pooled.sum().backward()
    if env.rank == 0:
        print(f"\ntrained a step by {file.name}: pooled {tuple(pooled.shape)}")


def main() -> None:
    """Plan for machines that are not here, then for these processes."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    everyone = dist.group.WORLD
    env = ShardingEnv.from_local(1, 0) if everyone is None else ShardingEnv.from_process_group(everyone)
    if env.rank == 0:
        plan_for_a_cluster()
    with tempfile.TemporaryDirectory() as folder:
        plan_here(env, Path(folder))
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
