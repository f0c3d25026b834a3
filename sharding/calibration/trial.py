"""A training step of some tables under a plan, on this machine: what calibration measures.

Batches are drawn as the tables say: lengths 0 to twice the mean, ids by the table's skew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise.embeddings import (
    LAMB,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.jagged import KeyedJaggedTensor
from shardwise.planner.cost.ways import Way
from shardwise.planner.layout import Shard
from shardwise.planner.plan.planned import shards_of
from shardwise.planner.tables import Skew, Table

from ..comms.env import ShardingEnv
from ..dmp.dmp import DistributedModelParallel
from ..engine.collection import ShardedCollection
from ..modules.generators import placement
from ..plan.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

# those that a trial knows, by the names that tables have
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "RowWiseAdagrad": RowWiseAdagrad,
    "Adam": torch.optim.Adam, "LAMB": LAMB,
}  # fmt: skip
_META = torch.device("meta")
# paths of the collection that is pooled, and of the other
_COLLECTIONS = ("pooled", "rows")
# batches that a measurement goes around: more than the caches remember
_BATCHES = 4


@dataclass(frozen=True)
class Placed:
    """A table, a way to cut it, and the first rank of each block."""

    table: Table
    way: Way
    starts: tuple[int, ...]

    def shards(self, world_size: int) -> list[Shard]:
        """The shards of the table."""
        name, way, columns = self.table.name, self.way, (0, self.table.embedding_dim)
        if way.replica:
            return [Shard(name, rank, (0, way.rows[0]), columns, replica=True) for rank in range(world_size)]
        left, low = (list(accumulate(sizes, initial=0)) for sizes in (way.widths, way.rows))
        return shards_of(name, left, low, self.starts)

    def parameter_sharding(self, env: ShardingEnv, device_type: str) -> ParameterSharding:
        """The same as plans have it."""
        kind, kernel = self.way.sharding_type, self.way.compute_kernel
        shards = self.shards(env.world_size)
        if self.way.replica:
            return ParameterSharding(kind, kernel, [shard.rank for shard in shards])
        cuts = [
            ShardMetadata(
                shard_offsets=[shard.rows[0], shard.cols[0]],
                shard_sizes=[shard.rows[1] - shard.rows[0], shard.cols[1] - shard.cols[0]],
                placement=placement(device_type, shard.rank, env.local_world_size or env.world_size),
            )
            for shard in shards
        ]
        ranks = [shard.rank for shard in shards]
        # a checker that follows no links sees one class by two paths
        tier: Any = self.way.tier
        return ParameterSharding(kind, kernel, ranks, EnumerableShardingSpec(cuts), tier=tier)


class Net(nn.Module):
    """A model of nothing but tables: a collection of those that are pooled, another of those that are not."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        pooled, rows = [t for t in tables if t.pooled], [t for t in tables if not t.pooled]
        if pooled:
            self.pooled = EmbeddingBagCollection(
                [EmbeddingBagConfig(**_config(table)) for table in pooled], pooled[0].weighted, device=_META
            )
        if rows:
            self.rows = EmbeddingCollection([EmbeddingConfig(**_config(table)) for table in rows], device=_META)
        for collection, members in self.collections(pooled, rows):
            for table, parameter in zip(members, collection.parameters(), strict=True):
                if table.optimizer is not None:
                    apply_optimizer_in_backward(OPTIMIZERS[table.optimizer], [parameter], {"lr": 0.01})

    def collections(self, *tables: list[Table]) -> list[tuple[nn.Module, list[Table]]]:
        """Each collection that there is, and its tables, given those that are pooled and those that are not."""
        named = zip(_COLLECTIONS, tables, strict=True)
        return [(getattr(self, name), members) for name, members in named if members]

    def forward(self, batches: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
        """Outputs to be differentiated."""
        left, outputs = list(batches), list[Tensor]()
        # both are on their way before either is waited for
        pooled = self.pooled(left.pop(0)) if hasattr(self, "pooled") else None
        rows = self.rows(left.pop(0)) if hasattr(self, "rows") else None
        if pooled is not None:
            outputs.append(pooled.values())
        if rows is not None:
            outputs += [output.values() for output in dict(rows).values()]
        return outputs


def _config(table: Table) -> dict[str, Any]:
    return {
        "name": table.name, "num_embeddings": table.num_embeddings, "embedding_dim": table.embedding_dim,
        "data_type": table.data_type, "feature_names": [feature.name for feature in table.features],
    }  # fmt: skip


def model_of(placed: Sequence[Placed], env: ShardingEnv, device: torch.device) -> DistributedModelParallel:
    """The model under its plan; all ranks call this together."""
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for item in placed:
        path = _COLLECTIONS[not item.table.pooled]
        where = plan.setdefault(path, EmbeddingModuleShardingPlan())
        where[item.table.name] = item.parameter_sharding(env, device.type)
    return DistributedModelParallel(
        Net([item.table for item in placed]), env=env, device=device, plan=ShardingPlan(plan)
    )


def batches_of(
    tables: Sequence[Table], batch_size: int, rank: int, device: torch.device, count: int = _BATCHES
) -> list[KeyedJaggedTensor]:
    """Batches of one rank, different on each."""
    batches = []
    for number in range(count):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        keys, values, lengths = [], [], []
        for table in tables:
            for feature in table.features:
                most = int(2 * feature.pooling_factor)
                # whole numbers about the mean, their spread as that of real bags
                bag_sizes = torch.randint(0, most + 1, (batch_size,), generator=generator)
                if feature.pooling_factor == 1:
                    bag_sizes = torch.ones(batch_size, dtype=torch.int64)
                keys.append(feature.name)
                lengths.append(bag_sizes)
                values.append(draw(table.num_embeddings, int(bag_sizes.sum()), table.skew, generator))
        weights = torch.ones(sum(map(len, values))) if tables[0].weighted else None
        kjt = KeyedJaggedTensor(keys, torch.cat(values), weights, torch.cat(lengths))
        batches.append(kjt.to(device))
    return batches


def draw(rows: int, count: int, skew: Skew, generator: torch.Generator) -> Tensor:
    """Ids [count] by a power law; those that are not sorted by frequency are spread over the rows."""
    if skew.alpha == 0:
        return torch.randint(0, rows, (count,), generator=generator)
    mass = (torch.arange(1, rows + 1, dtype=torch.float64) + skew.shift).pow(-skew.alpha).cumsum(0)
    uniform = torch.rand(count, dtype=torch.float64, generator=generator) * mass[-1]
    ids = torch.searchsorted(mass, uniform).clamp(max=rows - 1)
    if skew.sorted_ids:
        return ids
    return torch.randperm(rows, generator=torch.Generator().manual_seed(rows))[ids]


class Step:
    """A training step of this rank, over batches in turn; all ranks take it together."""

    def __init__(
        self, placed: Sequence[Placed], batch_size: int, env: ShardingEnv, device: torch.device, count: int = _BATCHES
    ) -> None:
        tables = [item.table for item in placed]
        self.model = model_of(placed, env, device)
        parts = [part for pooled in (True, False) if (part := [t for t in tables if t.pooled == pooled])]
        made = [batches_of(part, batch_size, env.rank, device, count) for part in parts]
        self.batches = list(zip(*made, strict=True))
        self._count = 0
        self._gradients = [[torch.randn_like(part) for part in self.model(batch)] for batch in self.batches]
        dense = {item.table.name for item in placed if item.way.replica and item.table.optimizer is None}
        self._dense = [p for name, p in self.model.named_parameters() if name.split(".")[-2] in dense]

    def collections(self) -> list[ShardedCollection]:
        """The sharded collections of the model."""
        return [module for module in self.model.module.children() if isinstance(module, ShardedCollection)]

    def _next(self) -> int:
        self._count += 1
        return self._count % len(self.batches)

    def __call__(self) -> None:
        """The next step."""
        number = self._next()
        torch.autograd.backward(self.model(self.batches[number]), self._gradients[number])
        for parameter in self._dense:
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None

    def alone(self, device: torch.device) -> tuple[float, float]:
        """Milliseconds of this rank's lookup, and of its update, in a step that does not use their results."""
        (batch,) = self.batches[self._next()]
        (collection,) = self.collections()
        step = collection.begin(batch)
        looked_up = timed(lambda: collection.look_up(step), device)
        step.rows.wait()
        wire, shards = collection.wire, collection.shards
        gradients = wire.unpack_gradients(step, torch.randn(sum(wire.gradient_sizes(step)), device=device))
        with torch.no_grad():
            updated = timed(lambda: shards.update(step, gradients, weight_gradients=False), device)
        return looked_up, updated


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    _finish(device)
    begin = time.perf_counter()
    call()
    _finish(device)
    return (time.perf_counter() - begin) * 1e3


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
