"""Random plans: tables, how each is cut, batches; and the same training in one process and over ranks.

Used by test_sharding_mixes.py and by scripts that compare with peers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    ShardingEnv,
    apply_optimizer_in_backward,
)
from shardwise.sharding import layout
from shardwise.sharding.layout import Shard, TableOptions
from shardwise.sharding.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
}
STRATEGIES = ("data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid")


@dataclass(frozen=True)
class TableCase:
    """A table, the strategy that cuts it, and what its shards promise."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    strategy: str
    mean: bool = False
    dtype: DataType = DataType.FP32
    options: TableOptions = TableOptions()
    # what the strategy draws its ranks, cuts and widths from
    seed: int = 0


@dataclass(frozen=True)
class Mix:
    """Some tables, and batches of so many samples on each of up to four ranks."""

    tables: tuple[TableCase, ...]
    pooled: bool = True
    weighted: bool = False
    batches: tuple[int, ...] = (3, 2, 4, 3)
    empty_features: tuple[str, ...] = field(default=())

    @property
    def features(self) -> list[str]:
        """All features, in the order of the batch: not that of the tables."""
        return sorted({feature for table in self.tables for feature in table.features}, reverse=True)


def mix_of(seed: int, *, pooled: bool, strategies: tuple[str, ...] = STRATEGIES, exact: bool = False) -> Mix:
    """A random mix; `exact` draws options under which it has the bits of one process for every optimizer."""
    rng = random.Random(seed)
    names = [f"f{n}" for n in range(rng.randint(2, 5))]
    weighted, dim = pooled and rng.random() < 0.4, rng.choice([4, 8, 12])
    tables = []
    for n in range(rng.randint(2, 5)):
        options = TableOptions(
            reduction="ordered" if exact or rng.random() < 0.3 else "partial", row_state="table" if exact else "shard"
        )
        tables.append(
            TableCase(
                f"t{n}", rng.choice([1, 2, 3, 7, 20, 41]), rng.choice([4, 8, 12]) if pooled else dim,
                tuple(rng.sample(names, rng.randint(1, min(2, len(names))))), rng.choice(strategies),
                pooled and rng.random() < 0.4, rng.choice([DataType.FP32] * 4 + [DataType.FP16, DataType.BF16]),
                options, rng.randrange(1000),
            )
        )  # fmt: skip
    batches = tuple(rng.choice([0, 1, 2, 3, 5]) for _ in range(4)) if rng.random() < 0.4 else (3, 3, 3, 3)
    empty = tuple(name for name in names if rng.random() < 0.1)
    return Mix(tuple(tables), pooled, weighted, batches, empty)


def shards_of(table: TableCase, world: int, local: int) -> list[Shard]:
    """The table's shards by its strategy over `world` ranks, `local` of them a host."""
    rng, name, rows, dim = random.Random(table.seed), table.name, table.rows, table.dim
    hosts = [list(range(host, host + local)) for host in range(0, world, local)]
    host = rng.choice(hosts)
    if table.strategy == "data_parallel":
        return layout.data_parallel(name, rows, dim, world)
    if table.strategy == "table_wise":
        return layout.table_wise(name, rows, dim, rng.randrange(world))
    if table.strategy == "row_wise":
        ranks = list(range(world))
        if rng.random() < 0.5:
            # uneven blocks on ranks in any order
            rng.shuffle(ranks)
            ends = sorted(rng.randint(0, rows) for _ in range(world - 1))
            return layout.row_wise(name, rows, dim, ranks, [b - a for a, b in pairwise([0, *ends, rows])])
        return layout.row_wise(name, rows, dim, ranks)
    if table.strategy == "column_wise":
        return layout.column_wise(name, rows, dim, [rng.randrange(world) for _ in range(dim // 4)], [4] * (dim // 4))
    if table.strategy == "table_row_wise":
        return layout.table_row_wise(name, rows, dim, host)
    if table.strategy == "table_column_wise":
        return layout.table_column_wise(name, rows, dim, [rng.choice(host) for _ in range(dim // 4)], [4] * (dim // 4))
    return layout.grid(name, rows, dim, hosts, [dim // len(hosts)] * len(hosts))


def build(mix: Mix, optimizer: str) -> Any:
    """The unsharded collection."""
    torch.manual_seed(3)
    tables: list[Any] = []
    for t in mix.tables:
        args = (t.rows, t.dim, t.name, t.dtype, list(t.features))
        pooling = PoolingType.MEAN if t.mean else PoolingType.SUM
        tables.append(EmbeddingBagConfig(*args, pooling=pooling) if mix.pooled else EmbeddingConfig(*args))
    module = EmbeddingBagCollection(tables, mix.weighted) if mix.pooled else EmbeddingCollection(tables)
    kind, kwargs = OPTIMIZERS[optimizer]
    # the same random numbers whatever the shard would take shards that know their place in the table
    apply_optimizer_in_backward(kind, module.parameters(), {**kwargs, "stochastic_rounding": False})
    return module


def batch_of(mix: Mix, samples: int, step: int) -> KeyedJaggedTensor:
    """Samples of the whole world at one step."""
    generator = torch.Generator().manual_seed(100 + step)
    features = mix.features
    lengths = torch.randint(0, 4, (len(features), samples), generator=generator)
    values = []
    for k, feature in enumerate(features):
        if feature in mix.empty_features:
            lengths[k] = 0
        rows = min(t.rows for t in mix.tables if feature in t.features)
        values.append(torch.randint(0, rows, (int(lengths[k].sum()),), generator=generator))
    ids = torch.cat(values)
    weights = torch.rand(len(ids), generator=generator) if mix.weighted else None
    return KeyedJaggedTensor(features, ids, weights, lengths.flatten())


def samples_of(kjt: KeyedJaggedTensor, begin: int, end: int) -> KeyedJaggedTensor:
    """Samples [begin, end) of a batch."""
    ids, weights, lengths = [], [], []
    for key in list(kjt.keys()):
        one = kjt[key]
        given = one.weights_or_none()
        offsets = one.offsets().tolist() if kjt.stride() else [0]
        ids.append(one.values()[offsets[begin] : offsets[end]])
        weights.append(None if given is None else given[offsets[begin] : offsets[end]])
        lengths.append(one.lengths()[begin:end])
    learned = None if weights[0] is None else torch.cat(weights)  # type: ignore[arg-type]
    return KeyedJaggedTensor(kjt.keys(), torch.cat(ids), learned, torch.cat(lengths))


def flat(output: Any) -> Tensor:
    """Pooled output as it is; sequence output as one matrix of rows, lookup by lookup."""
    if isinstance(output, dict):
        return torch.cat([jagged.values() for jagged in output.values()])
    return output.values()


def upstream_of(whole: Tensor, step: int) -> Tensor:
    """A gradient for every row of the whole world's output."""
    return torch.randn(whole.shape, generator=torch.Generator().manual_seed(step))


def rows_of_rank(whole: Any, begin: int, end: int, values: Tensor) -> Tensor:
    """The rows of `values` (laid out like `flat(whole)`) that belong to samples [begin, end)."""
    if not isinstance(whole, dict):
        return values[begin:end]
    pieces, at = [], 0
    for jagged in whole.values():
        offsets = jagged.offsets().tolist()
        first, last = (offsets[begin], offsets[end]) if len(offsets) > end else (0, 0)
        pieces.append(values[at + first : at + last])
        at += jagged.values().shape[0]
    return torch.cat(pieces)


@dataclass
class Run:
    """What a run of training leaves: outputs of each step, weights and states by name, gradients of weights."""

    outputs: list[Tensor]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    weight_gradients: list[Tensor]


def train_alone(mix: Mix, optimizer: str, steps: int, *, learned: bool = False) -> tuple[Run, list[Any]]:
    """One process on the batches of all ranks, and its outputs as they are."""
    module = build(mix, optimizer)
    total, outputs, raw, gradients = sum(mix.batches), [], [], []
    for step in range(steps):
        batch = batch_of(mix, total, step)
        if learned:
            batch.weights().requires_grad_()
        output = module(batch)
        raw.append(output)
        values = flat(output)
        outputs.append(values.detach().clone())
        if values.requires_grad:
            (values * upstream_of(values, step)).sum().backward()
        if learned:
            gradients.append(batch.weights().grad)  # type: ignore[arg-type]
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    states = {}
    for name, of_table in module.fused_optimizer().state_dict()["state"].items():
        states.update({f"{name}/{key}": value.clone() for key, value in of_table.items()})
    return Run(outputs, weights, states, gradients), raw


def shard(mix: Mix, module: Any, *, local: int | None = None, **more: Any) -> Any:
    """The collection sharded as its tables say, over the default group."""
    world = dist.get_world_size()
    local = local or min(2, world)
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD, local_world_size=local)
    shards = [shard for table in mix.tables for shard in shards_of(table, world, local)]
    kind: Any = ShardedEmbeddingBagCollection if mix.pooled else ShardedEmbeddingCollection
    options = {table.name: table.options for table in mix.tables}
    default = (torch.optim.SGD, {"lr": 0.01})
    return kind(module, shards, env, torch.device("cpu"), default_optimizer=default, options=options, **more)


def batches_of(mix: Mix, world: int) -> list[int]:
    """Samples of each of `world` ranks; all ranks together have those of the mix."""
    return [sum(mix.batches[rank::world]) for rank in range(world)]


def train_sharded(mix: Mix, optimizer: str, steps: int, learned: bool = False) -> tuple[Run, int]:
    """One rank of several: its upstream gradients are its rows of those of `train_alone`, times the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = shard(mix, build(mix, optimizer))
    alone = build(replace(mix), optimizer)
    batches = batches_of(mix, world)
    begin, total = sum(batches[:rank]), sum(batches)
    end = begin + batches[rank]
    outputs, gradients = [], []
    before = model.collectives
    for step in range(steps):
        whole = batch_of(mix, total, step)
        mine = samples_of(whole, begin, end)
        if learned:
            mine.weights().requires_grad_()
        output = model(mine)
        values = flat(output)
        outputs.append(values.detach().clone())
        with torch.no_grad():
            shape = alone(whole)
        upstream = rows_of_rank(shape, begin, end, upstream_of(flat(shape), step))
        (values * upstream * world).sum().backward()
        if learned:
            gradients.append(mine.weights().grad / world)  # type: ignore[operator]
    return Run(outputs, *held(model), gradients), model.collectives - before


def held(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What this rank holds: weights and states by `table rows cols` of each shard."""
    weights, states = {}, {}
    for group, part in zip(model._held.all_groups(), model._held.members, strict=True):
        for number, one in enumerate(part.shards):
            key = f"{one.table} {one.rows} {one.cols}"
            weights[key] = group.view(number).clone()
            states.update({f"{key}/{name}": value.clone() for name, value in group.state_views(number).items()})
    return weights, states
