"""The TorchRec model that canaries are tried in: pooled tables, tables of rows and a head, on two gloo ranks.

Every call gives the same numbers, so that runs with and without a canary can be compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.perf.suite.libraries import torchrec

# pooled tables and tables of rows by id; a third of them is ours
POOLED, ROWS = [f"t{n}" for n in range(6)], [f"s{n}" for n in range(3)]
OURS = ["t1", "t4", "s1"]
LR = 0.05


class Size(NamedTuple):
    """Rows of a table, samples of a rank's batch, and the most ids of a bag."""

    rows: int
    batch: int
    ids: int


SMALL, LARGE = Size(200, 16, 6), Size(100_000, 1024, 20)


class Case(NamedTuple):
    """How pooled tables are sharded, the optimizer of all tables, and whether TorchRec's pipeline runs the steps."""

    strategy: str
    optimizer: str
    pipelined: bool


class Model(nn.Module):
    """Pooled tables, tables of rows, and a head over both: the loss and logits [B], as TorchRec's pipelines want."""

    def __init__(self, pooled: Any, rows: Any, width: int) -> None:
        super().__init__()
        self.pooled, self.rows = pooled, rows
        self.head = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        pooled, rows = self.pooled(batch.sparse_features), self.rows(batch.sparse_features)
        # by name: TorchRec's output has the tables of rank 0 first
        parts = [batch.dense_features, *(pooled[key] for key in pooled_keys())]
        parts += [rows[f"g{n}"].to_padded_dense(4).sum(1) for n in range(len(ROWS))]
        logits = self.head(torch.cat(parts, dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def pooled_keys() -> list[str]:
    """A feature for each pooled table, and a second one of table t1."""
    return [*(f"f{n}" for n in range(len(POOLED))), "again"]


def dims_of(size: Size) -> list[int]:
    """Of the pooled tables."""
    return [64] * len(POOLED) if size is LARGE else [8, 8, 8, 16, 16, 16]


def unsharded(case: Case, size: Size) -> Model:
    """The model as a TorchRec program makes it."""
    side, dims = torchrec(), dims_of(size)
    features = [[f"f{n}", "again"] if n == 1 else [f"f{n}"] for n in range(len(POOLED))]
    bags = [
        side.EmbeddingBagConfig(
            name=name, num_embeddings=size.rows, embedding_dim=dim, feature_names=keys,
            pooling=side.PoolingType.MEAN if name in ("t2", "t4") else side.PoolingType.SUM,
        )
        for name, dim, keys in zip(POOLED, dims, features, strict=True)
    ]  # fmt: skip
    of_rows = [
        side.EmbeddingConfig(name=name, num_embeddings=size.rows, embedding_dim=dims[0], feature_names=[f"g{n}"])
        for n, name in enumerate(ROWS)
    ]
    device = torch.device("cpu")
    pooled = side.EmbeddingBagCollection(tables=bags, device=device)
    rows = side.EmbeddingCollection(tables=of_rows, device=device)
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": side.RowWiseAdagrad}
    for collection in (pooled, rows):
        side.apply_optimizer_in_backward(kinds[case.optimizer], collection.parameters(), {"lr": LR})
    torch.manual_seed(1)
    return Model(pooled, rows, 4 + sum(dims) + dims[1] + len(ROWS) * dims[0])


def sharded(case: Case, model: Model) -> nn.Module:
    """The model in TorchRec's DMP, with the same numbers in all tables at each call."""
    side, world = torchrec(), dist.get_world_size()
    plans = {}
    for path, names, sharder in (
        ("pooled", POOLED, side.EmbeddingBagCollectionSharder()),
        ("rows", ROWS, of_torchrec("distributed.embedding", "EmbeddingCollectionSharder")()),
    ):
        generators = {}
        for n, name in enumerate(names):
            cut_columns = case.strategy == "column_wise" and path == "pooled"
            generators[name] = (
                side.column_wise(ranks=[n % world, (n + 1) % world])
                if cut_columns
                else side.table_wise(rank=n % world, compute_kernel="fused")
            )
        plans[path] = side.construct_module_sharding_plan(
            getattr(model, path), generators, sharder, local_size=world, world_size=world, device_type="cpu"
        )
        for of_table in plans[path].values():
            of_table.compute_kernel = "fused"
    made: nn.Module = side.DistributedModelParallel(
        model, env=side.ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"),
        plan=side.ShardingPlan(plan=plans),
    )  # fmt: skip
    fill(made)
    return made


def of_torchrec(module: str, name: str) -> Any:
    """A name of one of TorchRec's modules."""
    return getattr(importlib.import_module(f"torchrec.{module}"), name)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Numbers for TorchRec's tables, of which it drops those of the unsharded module on a CPU."""
    for number, (_, value) in enumerate(sorted(model.state_dict().items())):
        if not hasattr(value, "local_shards"):
            continue
        for part in value.local_shards():
            (row, column), (rows, columns) = part.metadata.shard_offsets, part.metadata.shard_sizes
            generator = torch.Generator().manual_seed(number)
            whole = torch.rand(*value.size(), generator=generator).sub_(0.5).mul_(0.1)
            part.tensor.copy_(whole[row : row + rows, column : column + columns])


def batch_of(size: Size, step: int) -> Any:
    """A rank's batch of a step, as TorchRec's `Batch`."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    keys = [*pooled_keys(), *(f"g{n}" for n in range(len(ROWS)))]
    lengths = torch.randint(0, size.ids + 1, (len(keys) * size.batch,), generator=generator)
    ids = torch.randint(0, size.rows, (int(lengths.sum()),), generator=generator)
    features = torchrec().KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths)
    labels = torch.randint(0, 2, (size.batch,), generator=generator).float()
    return of_torchrec("datasets.utils", "Batch")(torch.randn(size.batch, 4, generator=generator), features, labels)


def head_optimizer(model: nn.Module) -> Any:
    """The optimizer of all of it: the tables' own, and SGD for the head."""
    side = torchrec()
    head = dict(side.in_backward_optimizer_filter(model.named_parameters()))
    sgd = side.KeyedOptimizerWrapper(head, partial(torch.optim.SGD, lr=LR))
    return side.CombinedOptimizer([model.fused_optimizer, sgd])


def train(
    model: nn.Module, optimizer: Any, steps: Sequence[int], *, size: Size = SMALL, pipelined: bool
) -> list[float]:
    """This rank's loss in each of these steps."""
    batches, losses = (batch_of(size, step) for step in steps), []
    if pipelined:
        made = of_torchrec("distributed.train_pipeline", "TrainPipelineSparseDist")
        pipeline = made(model, optimizer, torch.device("cpu"))
        # it gives what comes after the loss: of each batch the logits
        for step in steps:
            logits = pipeline.progress(batches)
            labels = batch_of(size, step).labels
            losses.append(float(nn.functional.binary_cross_entropy_with_logits(logits.detach(), labels)))
        return losses
    for batch in batches:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses
