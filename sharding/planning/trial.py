"""A training step of some tables under a plan, on this machine: what calibration measures.

Batches are drawn as the tables say: lengths 0 to twice the mean, ids by the table's skew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings import (
    LAMB,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.jagged import KeyedJaggedTensor
from shardwise.planner.tables import Skew, Table
from shardwise.planner.ways import Way
from shardwise.sharding.collection import ShardedCollection
from shardwise.sharding.env import ShardingEnv
from shardwise.sharding.exchange import Exchange
from shardwise.sharding.layout import Shard
from shardwise.sharding.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "RowWiseAdagrad": RowWiseAdagrad,
    "Adam": torch.optim.Adam, "LAMB": LAMB,
}  # fmt: skip
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
        found, left = [], 0
        for width, start in zip(way.widths, self.starts, strict=True):
            low = 0
            for place, rows in enumerate(way.rows):
                found.append(Shard(name, start + place, (low, low + rows), (left, left + width)))
                low += rows
            left += width
        return found


def collection_of(tables: Sequence[Table]) -> EmbeddingBagCollection | EmbeddingCollection:
    """The collection of tables that are all pooled or all not, with their optimizers in the backward, on meta."""
    meta, kinds = torch.device("meta"), [dict[str, Any]() for _ in tables]
    for table, kind in zip(tables, kinds, strict=True):
        kind.update(
            name=table.name, num_embeddings=table.num_embeddings, embedding_dim=table.embedding_dim,
            data_type=DataType(table.data_type), feature_names=[feature.name for feature in table.features],
        )  # fmt: skip
    made: EmbeddingBagCollection | EmbeddingCollection
    if tables[0].pooled:
        weighted = tables[0].weighted
        made = EmbeddingBagCollection([EmbeddingBagConfig(**kind) for kind in kinds], weighted, device=meta)
    else:
        made = EmbeddingCollection([EmbeddingConfig(**kind) for kind in kinds], device=meta)
    for table, parameter in zip(tables, made.parameters(), strict=True):
        if table.optimizer is not None:
            apply_optimizer_in_backward(_OPTIMIZERS[table.optimizer], [parameter], {"lr": 0.01})
    return made


def sharded_of(placed: Sequence[Placed], env: ShardingEnv, device: torch.device) -> ShardedCollection:
    """The sharded collection; all ranks call this together."""
    tables = [one.table for one in placed]
    shards = [shard for one in placed for shard in one.shards(env.world_size)]
    kind: Any = ShardedEmbeddingBagCollection if tables[0].pooled else ShardedEmbeddingCollection
    made: ShardedCollection = kind(collection_of(tables), shards, env, device, default_optimizer=(torch.optim.SGD, {}))
    return made


def batches_of(tables: Sequence[Table], batch_size: int, rank: int, device: torch.device) -> list[KeyedJaggedTensor]:
    """Batches of one rank, different on each."""
    found = []
    for number in range(_BATCHES):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        keys, values, lengths = [], [], []
        for table in tables:
            for feature in table.features:
                most = int(2 * feature.pooling_factor)
                # whole numbers about the mean, their spread as that of real bags
                mine = torch.randint(0, most + 1, (batch_size,), generator=generator)
                if feature.pooling_factor == 1:
                    mine = torch.ones(batch_size, dtype=torch.int64)
                keys.append(feature.name)
                lengths.append(mine)
                values.append(draw(table.num_embeddings, int(mine.sum()), table.skew, generator))
        weights = torch.ones(sum(map(len, values))) if tables[0].weighted else None
        kjt = KeyedJaggedTensor(keys, torch.cat(values), weights, torch.cat(lengths))
        found.append(kjt.to(device))
    return found


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

    def __init__(self, placed: Sequence[Placed], batch_size: int, env: ShardingEnv, device: torch.device) -> None:
        tables = [one.table for one in placed]
        self.collection = sharded_of(placed, env, device)
        self._batches = batches_of(tables, batch_size, env.rank, device)
        self._pooled, self._count = tables[0].pooled, 0
        self._exchange = Exchange(env.process_group)
        self._gradients = [[torch.randn_like(part) for part in self._outputs(batch)] for batch in self._batches]
        self._dense = [
            parameter
            for one, parameter in zip(placed, self.collection.parameters(), strict=True)
            if one.way.replica and one.table.optimizer is None
        ]

    def _outputs(self, batch: KeyedJaggedTensor) -> list[Tensor]:
        found: Any = self.collection(batch)
        return [found.values()] if self._pooled else [one.values() for one in dict(found).values()]

    def _next(self) -> int:
        self._count += 1
        return self._count % len(self._batches)

    def __call__(self) -> None:
        """The next step."""
        number = self._next()
        torch.autograd.backward(self._outputs(self._batches[number]), self._gradients[number])
        gradients = [parameter.grad for parameter in self._dense if parameter.grad is not None]
        self._exchange.mean(gradients)
        for parameter in self._dense:
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=0.01)
            parameter.grad = None

    def alone(self, device: torch.device) -> tuple[float, float]:
        """Milliseconds of this rank's lookup, and of its update, in a step that does not use their results."""
        collection, number = self.collection, self._next()
        flight = collection.begin(self._batches[number])
        looked_up = timed(lambda: collection.look_up(flight), device)
        assert flight.pending is not None
        flight.pending.wait()
        owner = collection._owner
        came = torch.randn(sum(owner.gradient_sizes(flight)), device=device)
        with torch.no_grad():
            updated = timed(lambda: owner.update(flight, came, weight_gradients=False), device)
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
