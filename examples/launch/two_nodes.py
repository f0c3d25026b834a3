"""Tables cut over several nodes train, and go on from their last checkpoint after a node was lost.

    torchrun --standalone --nproc_per_node=2 examples/launch/two_nodes.py
    examples/launch/torchrun.sh 0 2 10.0.0.1 examples/launch/two_nodes.py --checkpoint-dir /shared/run  # on node 0
    examples/launch/torchrun.sh 1 2 10.0.0.1 examples/launch/two_nodes.py --checkpoint-dir /shared/run  # on node 1

Three tables have a strategy each that knows of nodes: `table_row_wise`, `table_column_wise` and `grid_shard`. The
planner finds how many ranks a node has where torchrun says it, in LOCAL_WORLD_SIZE. Every step has the same samples
whatever the number of ranks, so losses can be compared between runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ParameterConstraints,
    RankFailure,
    apply_optimizer_in_backward,
    checkpoint,
    in_backward_optimizer_filter,
)
from shardwise.sharding.planning.machines import topology_here

# table, which is its feature too -> rows, columns and strategy
TABLES = {
    "user": (2000, 64, "table_row_wise"),
    "item": (1000, 64, "table_column_wise"),
    "seen": (3000, 64, "grid_shard"),
}
SAMPLES = 48


class Clicks(nn.Module):
    """Tables and a layer that says how likely a click is."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(rows, columns, name, feature_names=[name])
                for name, (rows, columns, _) in TABLES.items()
            ]
        )
        apply_optimizer_in_backward(torch.optim.Adagrad, self.tables.parameters(), {"lr": 0.1})
        self.over = nn.Linear(sum(columns for _, columns, _ in TABLES.values()), 1)

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        logits = self.over(self.tables(features).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def batch_of(step: int, rank: int, world_size: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """This rank's share of the samples of a step, 0 to 3 ids [N] a feature, and their labels [B]."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(TABLES), SAMPLES), generator=draw)
    ids = [
        torch.randint(0, rows, (int(count.sum()),), generator=draw).split(count.tolist())
        for count, (rows, _, _) in zip(lengths, TABLES.values(), strict=True)
    ]
    # whoever has seen ids with a small sum clicks
    labels = torch.tensor([float(sum(of[sample].sum() for of in ids) % 3 == 0) for sample in range(SAMPLES)])
    own = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    values = torch.cat([part for of in ids for part in of[own]])
    return KeyedJaggedTensor([*TABLES], values, lengths=lengths[:, own].flatten()), labels[own]


def build(node_ranks: int | None, timeout_s: float) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The sharded model and its optimizers; all ranks call this together."""
    torch.manual_seed(0)
    model = Clicks()
    topology = topology_here("cpu", local_world_size=node_ranks)
    several = topology.local_world_size < topology.world_size
    strategies = {
        # one node has no other to share columns with
        name: ParameterConstraints(sharding_types=[kind if several or kind != "grid_shard" else "table_row_wise"])
        for name, (_, _, kind) in TABLES.items()
    }
    planner = EmbeddingShardingPlanner(topology, SAMPLES // topology.world_size, constraints=strategies)
    plan = planner.collective_plan(model)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, timeout_s=timeout_s)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), partial(torch.optim.Adagrad, lr=0.1)
    )
    return sharded, CombinedOptimizer([sharded.fused_optimizer, dense])


def train(args: argparse.Namespace) -> list[float]:
    """Trains to the last step and returns the losses from where it began; rank 0 says them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(args.node_ranks, args.timeout_s)
    begin, losses = 0, []
    newest = None if args.checkpoint_dir is None else checkpoint.latest(args.checkpoint_dir)
    if newest is not None:
        begin = checkpoint.load(newest, model, optimizer).extra["step"]
    if rank == 0:
        write(args, {"begin": begin, "ranks": world_size, "of": placed(model), "pid": os.getpid()})
    for step in range(begin + 1, args.steps + 1):
        features, labels = batch_of(step, rank, world_size)
        with model.watched():
            loss = model(features, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().double()
            dist.all_reduce(total)
        losses.append(total.item() / world_size)
        if rank == 0:
            write(args, {"step": step, "loss": losses[-1]})
        if args.checkpoint_dir is not None and step % args.checkpoint_every == 0:
            checkpoint.save(args.checkpoint_dir, model, optimizer, step=step, extra={"step": step}, keep_last=3)
        time.sleep(args.pause)
    return losses


def placed(model: DistributedModelParallel) -> dict[str, list[int]]:
    """Table -> the ranks that hold a part of it."""
    tables = model.plan.plan["tables"]
    return {name: sorted({*(of.ranks or [])}) for name, of in tables.items()}


def write(args: argparse.Namespace, line: dict[str, object]) -> None:
    """A line of JSON on stdout, and at the end of `--losses`."""
    text = json.dumps(line)
    print(text, flush=True)
    if args.losses is not None:
        with args.losses.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--checkpoint-dir", help="a folder that all nodes see, or s3://...; it goes on from the last")
    parser.add_argument("--checkpoint-every", type=int, default=5, help="steps")
    parser.add_argument("--losses", type=Path, help="rank 0 adds what it prints to this file")
    parser.add_argument("--timeout-s", type=float, default=20.0, help="how long a rank waits for others in an exchange")
    parser.add_argument("--node-ranks", type=int, help="ranks of a node, instead of LOCAL_WORLD_SIZE")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to see what happens")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[float]:
    args = parse(argv)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return train(args)
    except RankFailure as failure:
        # torchrun starts all ranks anew
        sys.exit(f"rank {dist.get_rank()}: {failure}")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
