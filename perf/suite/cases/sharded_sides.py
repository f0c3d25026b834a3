"""One training step of a sharded EmbeddingBagCollection, by TorchRec's names, so that TorchRec and shardwise run it.

Shapes: T tables of R rows x D columns, B samples of one rank, L ids a bag; outputs [B, T * D] fp32.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.perf.suite.libraries import Library

STRATEGIES = ("table_wise", "column_wise", "table_column_wise", "data_parallel")
# batches that turns go through, so that no side finds its rows in the cache because it just had them
BATCHES = 4
MIXED = ("table_wise", "row_wise", "column_wise", "data_parallel")
CYCLES = {"mixed": MIXED, "cut": MIXED[:3]}


class Shape(NamedTuple):
    """T tables of R rows x D columns, B samples of one rank, L ids a bag."""

    T: int
    R: int
    D: int
    B: int
    L: int

    def __str__(self) -> str:
        return f"{self.T} tables of {self.R} x {self.D}, batch {self.B}, {self.L} id{'s' * (self.L > 1)} a bag"


def keys_of(shape: Shape) -> list[str]:
    """A feature for each table."""
    return [f"f{t}" for t in range(shape.T)]


def weights_of(shape: Shape, table: int) -> Tensor:
    """A table, equal on every rank and side."""
    generator = torch.Generator().manual_seed(table)
    return torch.rand(shape.R, shape.D, generator=generator).sub_(0.5).mul_(0.1)


def batch_of(shape: Shape, rank: int, step: int, *, vary: bool = False) -> tuple[Tensor, Tensor]:
    """Ids and lengths [T * B] of a rank's batch: L ids in each bag, or 0 to 2 L with `vary`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.full((shape.T * shape.B,), shape.L)
    if vary:
        lengths = torch.randint(0, 2 * shape.L + 1, (shape.T * shape.B,), generator=generator)
    return torch.randint(0, shape.R, (int(lengths.sum()),), generator=generator), lengths


def collection_of(side: Library, shape: Shape, optimizer: str | None, lr: float) -> Any:
    """The unsharded collection; `optimizer` runs in its backward."""
    configs = [
        side.EmbeddingBagConfig(name=f"t{t}", num_embeddings=shape.R, embedding_dim=shape.D, feature_names=[key])
        for t, key in enumerate(keys_of(shape))
    ]
    made = side.EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
    with torch.no_grad():
        for t, parameter in enumerate(made.parameters()):
            parameter.copy_(weights_of(shape, t))
    if optimizer is not None:
        kinds = {"rowwise_adagrad": side.RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}
        kind, more = kinds[optimizer], {} if optimizer == "sgd" else {"eps": 1e-8}
        side.apply_optimizer_in_backward(kind, made.parameters(), {"lr": lr, **more})
    return made


def plan_of(side: Library, collection: Any, shape: Shape, strategy: str, world: int, *, first: int = 0) -> Any:
    """The plan of a collection: tables go around the ranks from `first` on, and columns lie half on each of two.

    "mixed" takes one strategy after the other, "cut" those without replicas; "planned" is what the planner finds.
    """
    sharder = side.EmbeddingBagCollectionSharder()
    if strategy == "planned":
        topology = side.Topology(world_size=world, compute_device="cpu")
        planner = side.EmbeddingShardingPlanner(topology=topology, batch_size=shape.B, debug=False)
        return planner.plan(collection, [sharder]).plan[""]
    made: dict[str, Any] = {}
    for t in range(first, first + shape.T):
        cycle = CYCLES.get(strategy, [strategy])
        kind = cycle[t % len(cycle)]
        if kind == "table_wise":
            generator = side.table_wise(rank=t % world)
        elif kind == "row_wise":
            generator = side.row_wise()
        elif kind == "data_parallel":
            generator = side.data_parallel()
        elif kind in ("column_wise", "table_column_wise"):
            generator = side.column_wise(ranks=[t % world, (t + 1) % world])
        else:
            raise ValueError(f"no table is sharded {strategy!r}")
        made[f"t{t - first}"] = generator
    plan = side.construct_module_sharding_plan(
        collection, made, sharder, local_size=world, world_size=world, device_type="cpu"
    )
    for of_table in plan.values() if strategy == "table_column_wise" else ():
        # TorchRec has no generator of these, and all ranks are one host
        of_table.sharding_type = strategy
    return plan


@torch.no_grad()
def fill(module: nn.Module, shape: Shape) -> None:
    """Give TorchRec's sharded tables their values: on the CPU it drops those of the module that it shards."""
    for name, value in module.state_dict().items():
        table = re.fullmatch(r"(?:.*\.)?embedding_bags\.t(\d+)\.weight", name)
        if table is None:
            continue
        whole = weights_of(shape, int(table[1]))
        for part in value.local_shards() if hasattr(value, "local_shards") else []:
            (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
            part.tensor.copy_(whole[row : row + rows, column : column + columns])
        if not hasattr(value, "local_shards"):
            value.copy_(whole)


def sharded_of(side: Library, shape: Shape, strategy: str, optimizer: str, lr: float = 0.01) -> nn.Module:
    """A sharded collection without anything around it, over the default process group."""
    collection = collection_of(side, shape, optimizer, lr)
    plan = plan_of(side, collection, shape, strategy, dist.get_world_size())
    env = side.ShardingEnv.from_process_group(dist.group.WORLD)
    made: nn.Module = side.EmbeddingBagCollectionSharder().shard(collection, plan, env, torch.device("cpu"))
    if side.peer:
        fill(made, shape)
    return made


def forward_of(side: Library, model: nn.Module, shape: Shape, ids: Tensor, lengths: Tensor) -> Callable[[], Tensor]:
    """A lookup of a new batch and what it gives, [B, T * D]; what a data loader makes is made here."""
    batch = side.KeyedJaggedTensor(keys=keys_of(shape), values=ids, lengths=lengths)

    def forward() -> Tensor:
        values: Tensor = model(batch).values()
        return values

    return forward


class Model(nn.Module):
    """A collection `sparse`, and a small head over its output and dense inputs [B, 4]: logits [B]."""

    def __init__(self, sparse: Any, shape: Shape) -> None:
        super().__init__()
        self.sparse = sparse
        self.head = nn.Sequential(nn.Linear(shape.T * shape.D + 4, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        # by name: TorchRec's output has the tables of rank 0 first
        pooled = self.sparse(features)
        logits: Tensor = self.head(torch.cat([dense, *(pooled[key] for key in list(features.keys()))], dim=1))
        return logits.squeeze(1)


def losses(side: Library, shape: Shape, strategy: str, optimizer: str, steps: int, lr: float = 0.05) -> list[float]:
    """This rank's loss in each of `steps` steps of a model in DistributedModelParallel.

    Tables have their optimizer in the backward; replicated ones share a dense optimizer with the head.
    """
    fused = strategy != "data_parallel"
    made = model_of(side, shape, strategy, optimizer if fused else None, lr)
    dense = [p for name, p in made.named_parameters() if not fused or not name.startswith("sparse.")]
    own: Any = torch.optim.SGD(dense, lr=lr) if optimizer == "sgd" else torch.optim.Adagrad(dense, lr=lr)
    return train(side, shape, made, own, range(steps))


def model_of(
    side: Library, shape: Shape, strategy: str, optimizer: str | None, lr: float = 0.05, *, first: int = 0
) -> nn.Module:
    """A model in DistributedModelParallel; `optimizer` runs in the backward of its tables."""
    collection = collection_of(side, shape, optimizer, lr)
    torch.manual_seed(1)
    model = Model(collection, shape)
    of_tables = plan_of(side, collection, shape, strategy, dist.get_world_size(), first=first)
    env = side.ShardingEnv.from_process_group(dist.group.WORLD)
    plan = side.ShardingPlan(plan={"sparse": of_tables})
    made: nn.Module = side.DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan)
    if side.peer:
        fill(made, shape)
    return made


def train(side: Library, shape: Shape, model: nn.Module, optimizer: Any, steps: Sequence[int]) -> list[float]:
    """This rank's loss in each of these steps."""
    losses, rank = [], dist.get_rank()
    for step in steps:
        ids, lengths = batch_of(shape, rank, step, vary=True)
        generator = torch.Generator().manual_seed(7000 + 10 * step + rank)
        inputs = torch.randn(shape.B, 4, generator=generator)
        labels = torch.randint(0, 2, (shape.B,), generator=generator).float()
        features = side.KeyedJaggedTensor(keys=keys_of(shape), values=ids, lengths=lengths)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs, features), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss))
    return losses


def worst_difference(losses: Sequence[Sequence[float]], other_losses: Sequence[Sequence[float]]) -> float:
    """Largest difference between the losses of all ranks and steps."""
    return max(abs(a - b) for x, y in zip(losses, other_losses, strict=True) for a, b in zip(x, y, strict=True))


class Stepper:
    """One side's sharded collection, and a step of it at a time."""

    def __init__(self, side: Library, shape: Shape, strategy: str, optimizer: str) -> None:
        self.side, self.shape = side, shape
        self.model: nn.Module = sharded_of(side, shape, strategy, optimizer)
        self._batches = [batch_of(shape, dist.get_rank(), n) for n in range(BATCHES)]
        self._grad = torch.randn(shape.B, shape.T * shape.D, generator=torch.Generator().manual_seed(5))

    def forward(self, turn: int) -> Callable[[], Tensor]:
        """The forward of a turn's batch, which is new to the library."""
        return forward_of(self.side, self.model, self.shape, *self._batches[turn % BATCHES])

    def step(self, turn: int) -> tuple[float, float]:
        """Seconds of the forward and of the whole step, from when all ranks begin; and the CPU's for this process."""
        forward = self.forward(turn)
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        values = forward()
        torch.autograd.backward(values, self._grad)
        return time.perf_counter() - begin, time.process_time() - cpu


def turns(steppers: Sequence[Stepper], count: int, warm_up: int = 3) -> dict[str, list[tuple[float, float]]]:
    """Seconds (clock, CPU) of each side in each of `count` turns, in which every side has a step, in changing order."""
    seconds_of: dict[str, list[tuple[float, float]]] = {stepper.side.label: [] for stepper in steppers}
    for turn in range(count + warm_up):
        for stepper in steppers if turn % 2 else reversed(steppers):
            seconds = stepper.step(turn)
            if turn >= warm_up:
                seconds_of[stepper.side.label].append(seconds)
    return seconds_of
