"""Random plans: tables, how each is cut, batches; and the same training in one process and over ranks.

Outputs and upstream gradients are lists, lookup by lookup (one feature in one table, in the order of the tables):
sums of bags [B, dim], or rows of ids [n, dim] where nothing is pooled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import oracle
import torch
import torch.distributed as dist
from jagged_batches import tables_of
from torch import Tensor

from shardwise import (
    FTRL,
    LAMB,
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    LarsSGD,
    LookupPolicy,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    PoolingType,
    RowWiseAdagrad,
    ShardingEnv,
    apply_optimizer_in_backward,
)
from shardwise.planner import layout
from shardwise.planner.layout import Shard, TableOptions
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
}
# every fused rule
RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **OPTIMIZERS,
    "momentum_sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "partial_rowwise_adam": (PartialRowWiseAdam, {"lr": 0.05}),
    "lamb": (LAMB, {"lr": 0.05}),
    "partial_rowwise_lamb": (PartialRowWiseLAMB, {"lr": 0.05}),
    "lars_sgd": (LarsSGD, {"lr": 0.5, "momentum": 0.5}),
    "ftrl": (FTRL, {"lr": 0.1, "l1": 0.01}),
}
# of the float64 model
HYPER = {
    "sgd": {"lr": 0.1},
    "adagrad": {"lr": 0.1, "eps": 1e-10},
    "rowwise_adagrad": {"lr": 0.1, "eps": 1e-8},
    "adam": {"lr": 0.05, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
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
    # whether some ids lie outside their tables, and what the policy does with them
    outside: bool = False
    bounds_check: BoundsCheckMode = BoundsCheckMode.FATAL
    # of the optimizer, besides those of its entry in RULES
    settings: tuple[tuple[str, Any], ...] = (("stochastic_rounding", False),)

    @property
    def features(self) -> list[str]:
        """All features, in the order of the batch: not that of the tables."""
        return sorted({feature for table in self.tables for feature in table.features}, reverse=True)

    @property
    def lookups(self) -> list[tuple[TableCase, str]]:
        """One feature in one table, in the order of the output."""
        return [(table, feature) for table in self.tables for feature in table.features]

    @property
    def samples(self) -> int:
        """Samples of all ranks together, however many those are."""
        return sum(self.batches)


@dataclass
class Run:
    """What a run of training leaves: outputs of each step by lookup, weights and states by name, gradients of weights.

    In one process names are those of tables; over ranks a rank has those of its shards, `held` says how.
    """

    outputs: list[list[Tensor]]
    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    weight_gradients: list[Tensor]
    # of each step, over ranks
    collectives: list[int] = field(default_factory=list)


def mix_of(seed: int, *, pooled: bool, row_states: Sequence[str] = ("shard", "table")) -> Mix:
    """A random mix of all strategies."""
    rng = random.Random(seed)
    names = [f"f{n}" for n in range(rng.randint(2, 5))]
    weighted, dim = pooled and rng.random() < 0.4, rng.choice([4, 8, 12])
    tables = []
    for n in range(rng.randint(2, 5)):
        options = TableOptions(rng.choice(["partial", "partial", "ordered"]), rng.choice(row_states))
        tables.append(
            TableCase(
                f"t{n}", rng.choice([1, 2, 3, 7, 20, 41]), rng.choice([4, 8, 12]) if pooled else dim,
                tuple(rng.sample(names, rng.randint(1, min(2, len(names))))), rng.choice(STRATEGIES),
                pooled and rng.random() < 0.4, rng.choice([DataType.FP32] * 4 + [DataType.FP16, DataType.BF16]),
                options, rng.randrange(1000),
            )
        )  # fmt: skip
    batches = tuple(rng.choice([0, 1, 2, 3, 5]) for _ in range(4)) if rng.random() < 0.4 else (3, 3, 3, 3)
    empty = tuple(name for name in names if rng.random() < 0.1)
    return Mix(tuple(tables), pooled, weighted, batches, empty)


def mix_for(strategy: str, *, pooled: bool, **more: Any) -> Mix:
    """Three tables cut by one strategy: summed, averaged with rows that are added in order, of another dtype."""
    dims = (8, 12, 8) if pooled else (8, 8, 8)
    return Mix(
        (
            TableCase("t0", 23, dims[0], ("f0", "f1"), strategy, seed=1),
            TableCase("t1", 41, dims[1], ("f2",), strategy, pooled, options=TableOptions("ordered", "table"), seed=2),
            TableCase("t2", 17, dims[2], ("f1",), strategy, pooled, DataType.BF16, seed=4),
        ),
        pooled,
        **more,
    )


def shards_of(table: TableCase, world: int, local: int) -> list[Shard]:
    """The table's shards by its strategy over `world` ranks, `local` of them a host."""
    rng, name, rows, dim = random.Random(table.seed), table.name, table.rows, table.dim
    hosts = [list(range(host, host + local)) for host in range(0, world, local)]
    host = rng.choice(hosts)
    if table.strategy == "row_wise":
        ranks, sizes = list(range(world)), None
        if rng.random() < 0.5:
            # uneven blocks on ranks in any order
            rng.shuffle(ranks)
            ends = sorted(rng.randint(0, rows) for _ in range(world - 1))
            sizes = [b - a for a, b in pairwise([0, *ends, rows])]
        return layout.row_wise(name, rows, dim, ranks, sizes)
    widths = [4] * (dim // 4)
    ways: dict[str, Callable[[], list[Shard]]] = {
        "data_parallel": lambda: layout.data_parallel(name, rows, dim, world),
        "table_wise": lambda: layout.table_wise(name, rows, dim, rng.randrange(world)),
        "column_wise": lambda: layout.column_wise(name, rows, dim, [rng.randrange(world) for _ in widths], widths),
        "table_row_wise": lambda: layout.table_row_wise(name, rows, dim, host),
        "table_column_wise": lambda: layout.table_column_wise(
            name, rows, dim, [rng.choice(host) for _ in widths], widths
        ),
        "grid": lambda: layout.grid(name, rows, dim, hosts, [dim // len(hosts)] * len(hosts)),
    }
    return ways[table.strategy]()


def build(mix: Mix, optimizer: str) -> Any:
    """The unsharded collection."""
    torch.manual_seed(3)
    tables: list[Any] = []
    for t in mix.tables:
        args = (t.rows, t.dim, t.name, t.dtype, list(t.features))
        pooling = PoolingType.MEAN if t.mean else PoolingType.SUM
        tables.append(EmbeddingBagConfig(*args, pooling=pooling) if mix.pooled else EmbeddingConfig(*args))
    policy = LookupPolicy(mix.bounds_check)
    kind: Any = EmbeddingBagCollection if mix.pooled else EmbeddingCollection
    module = kind(tables, is_weighted=mix.weighted, policy=policy) if mix.pooled else kind(tables, policy=policy)
    rule, kwargs = RULES[optimizer]
    apply_optimizer_in_backward(rule, module.parameters(), {**kwargs, **dict(mix.settings)})
    return module


def batch_of(mix: Mix, step: int) -> KeyedJaggedTensor:
    """Samples of the whole world at one step."""
    generator = torch.Generator().manual_seed(100 + step)
    features = mix.features
    lengths = torch.randint(0, 4, (len(features), mix.samples), generator=generator)
    values = []
    for k, feature in enumerate(features):
        if feature in mix.empty_features:
            lengths[k] = 0
        rows = min(t.rows for t in mix.tables if feature in t.features)
        ids = torch.randint(0, rows, (int(lengths[k].sum()),), generator=generator)
        if mix.outside:
            # beyond this table, below it, and what int32 would wrap into it
            wrong = torch.tensor([0, 0, 0, 0, max(t.rows for t in mix.tables), -1, 2**32, -(2**40) - 1])
            ids += wrong[torch.randint(0, len(wrong), ids.shape, generator=generator)]
        values.append(ids)
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


def dressed(kjt: KeyedJaggedTensor, rank: int, *, padded: bool = True) -> KeyedJaggedTensor:
    """The same samples with keys in an order of the rank's own, one that nobody asks for, and room for more ids."""
    samples = kjt.stride()
    weights = None if kjt.weights_or_none() is None else torch.full((2 * samples,), float("nan"))
    extra = KeyedJaggedTensor(
        ["nobody"], torch.full((2 * samples,), 2**50), weights, torch.full((samples,), 2, dtype=torch.int64)
    )
    whole = KeyedJaggedTensor.concat([kjt, extra])
    order = list(range(len(whole.keys())))
    random.Random(rank).shuffle(order)
    mixed, spare = whole.permute(order), 3 + rank
    if not padded:
        return mixed
    ids = torch.cat([mixed.values(), mixed.values().new_full((spare,), -5)])
    factors = mixed.weights_or_none()
    if factors is not None:
        factors = torch.cat([factors, factors.new_full((spare,), float("nan"))])
    return KeyedJaggedTensor(mixed.keys(), ids, factors, mixed.lengths(), capacity=len(ids))


def by_lookup(mix: Mix, output: Any) -> list[Tensor]:
    """An output, lookup by lookup."""
    if isinstance(output, dict):
        return [jagged.values() for jagged in output.values()]
    return list(torch.split(output.values(), [table.dim for table, _ in mix.lookups], dim=1))


def upstream_of(mix: Mix, batch: KeyedJaggedTensor, step: int) -> list[Tensor]:
    """A gradient for every row of the whole world's output."""
    generator = torch.Generator().manual_seed(step)
    counts = dict(zip(batch.keys(), batch.length_per_key(), strict=True))
    return [
        torch.randn(mix.samples if mix.pooled else counts[feature], table.dim, generator=generator)
        for table, feature in mix.lookups
    ]


def rows_of_rank(mix: Mix, batch: KeyedJaggedTensor, values: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
    """The rows of `values`, lookup by lookup, that belong to samples [begin, end) of the whole world's batch."""
    found = []
    for (_, feature), mine in zip(mix.lookups, values, strict=True):
        low, high = begin, end
        if not mix.pooled:
            offsets = list(accumulate(batch[feature].lengths().tolist(), initial=0))
            low, high = offsets[begin], offsets[end]
        found.append(mine[low:high])
    return found


def backward(outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
    """Of the outputs that have a gradient."""
    pairs = [(mine, given) for mine, given in zip(outputs, upstream, strict=True) if mine.requires_grad]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)


def train_alone(mix: Mix, optimizer: str, steps: int, *, learned: bool = False) -> Run:
    """One process on the batches of all ranks."""
    module = build(mix, optimizer)
    run = train(mix, module, batches_of_rank(mix, range(steps), 0, 1), learned)
    run.weights, run.states = tables_of(module), states_of(module)
    return run


def train_strips(mix: Mix, optimizer: str, steps: int, table: TableCase, cuts: Sequence[tuple[int, int]]) -> Run:
    """One table cut into tables of its own by columns, in one process: outputs, weights and states side by side."""
    before = build(mix, optimizer).state_dict()
    places = [n for n, (one, _) in enumerate(mix.lookups) if one == table]
    strips = []
    for low, high in cuts:
        strip = TableCase(table.name, table.rows, high - low, table.features, "table_wise", table.mean, table.dtype)
        alone = replace(mix, tables=(strip,))
        module = build(alone, optimizer)
        name = f"{module._children_name}.{table.name}.weight"
        module.load_state_dict({name: before[name][:, low:high]})
        batches = []
        for step in range(steps):
            batch = batch_of(mix, step)
            upstream = upstream_of(mix, batch, step)
            batches.append((batch, [upstream[n][:, low:high].contiguous() for n in places]))
        run = train(alone, module, batches, False)
        run.weights, run.states = {table.name: module.state_dict()[name].clone()}, states_of(module)
        strips.append(run)
    whole = strips[0]
    whole.outputs = [
        [torch.cat(pieces, dim=1) for pieces in zip(*step, strict=True)]
        for step in zip(*[strip.outputs for strip in strips], strict=True)
    ]
    whole.weights = {table.name: torch.cat([strip.weights[table.name] for strip in strips], dim=1)}
    # one number a row and strip: [R, strips]
    whole.states = {name: torch.stack([strip.states[name] for strip in strips], dim=1) for name in whole.states}
    return whole


def modelled(
    mix: Mix,
    rule: str,
    batches: Sequence[tuple[KeyedJaggedTensor, Sequence[Tensor]]],
    table: TableCase,
    cuts: Sequence[tuple[int, int]],
    *,
    most: float = math.inf,
    decay: str = "none",
    **hyper: float,
) -> Run:
    """One table by the float64 model, each of its strips of columns with states of its own.

    Upstream gradients are cut at `most` first.
    """
    weight = tables_of(build(mix, rule))[table.name]
    places = [n for n, (one, _) in enumerate(mix.lookups) if one == table]
    dense = [oracle.Dense(weight[:, low:high], rule, {**HYPER[rule], **hyper}, decay) for low, high in cuts]
    asked = [(0, table.mean)] * len(places)
    run = Run([], {}, {}, [])
    for batch, upstream in batches:
        jagged = [batch[feature] for feature in table.features]
        sizes = [one.lengths().tolist() for one in jagged]
        bags = [[bag.tolist() for bag in one.values().split(n)] for one, n in zip(jagged, sizes, strict=True)]
        scales = None
        if mix.weighted:
            scales = [[bag.tolist() for bag in one.weights().split(n)] for one, n in zip(jagged, sizes, strict=True)]
        pieces = [oracle.pooled([one.table], asked, bags, scales) for one in dense]
        each = [torch.split(piece, high - low, dim=1) for piece, (low, high) in zip(pieces, cuts, strict=True)]
        run.outputs.append([torch.cat(columns, dim=1) for columns in zip(*each, strict=True)])
        for one, (low, high) in zip(dense, cuts, strict=True):
            given = torch.cat([upstream[n][:, low:high] for n in places], dim=1).clamp(-most, most)
            (gradient,), (touched,) = oracle.gradients([one.table], asked, bags, given, scales)
            one.step(gradient, touched)
    run.weights = {table.name: torch.cat([one.table for one in dense], dim=1)}
    for number, name in enumerate(dense[0].states, start=1):
        run.states[f"{table.name}/momentum{number}"] = torch.cat([one.states[name] for one in dense], dim=1)
    return run


def train(
    mix: Mix,
    module: Any,
    batches: Sequence[tuple[KeyedJaggedTensor, Sequence[Tensor]]],
    learned: bool,
    count: Callable[[], int] = int,
) -> Run:
    """Train on batches with their upstream gradients; weights and states are left to the caller."""
    run = Run([], {}, {}, [])
    for batch, upstream in batches:
        if learned:
            batch.weights().requires_grad_()
        before = count()
        outputs = by_lookup(mix, module(batch))
        run.outputs.append([mine.detach().clone() for mine in outputs])
        backward(outputs, upstream)
        run.collectives.append(count() - before)
        if learned:
            gradient = batch.weights().grad
            run.weight_gradients.append(torch.zeros_like(batch.weights()) if gradient is None else gradient)
    return run


def states_of(module: Any) -> dict[str, Tensor]:
    """Optimizer states of an unsharded collection, by `table/name`."""
    found = {}
    for of_table in module.fused_optimizer().state_dict()["state"].values():
        found.update({key.replace(".", "/"): value.clone() for key, value in of_table.items()})
    return found


def environment(local: int | None = None) -> ShardingEnv:
    """The default group, `local` ranks a host: two, where there are several."""
    assert dist.group.WORLD is not None
    local = local or min(2, dist.get_world_size())
    return ShardingEnv.from_process_group(dist.group.WORLD, local_world_size=local)


def shard(mix: Mix, module: Any, env: ShardingEnv, device: torch.device | str = "cpu", **more: Any) -> Any:
    """The collection sharded as its tables say."""
    shards = [shard for table in mix.tables for shard in shards_of(table, env.world_size, env.local_world_size)]
    kind: Any = ShardedEmbeddingBagCollection if mix.pooled else ShardedEmbeddingCollection
    options = {table.name: table.options for table in mix.tables}
    default = (torch.optim.SGD, {"lr": 0.01})
    return kind(module, shards, env, torch.device(device), default_optimizer=default, options=options, **more)


def span_of(mix: Mix, rank: int, world: int) -> tuple[int, int]:
    """First and last sample of a rank; all ranks together have those of the mix."""
    ends = list(accumulate((sum(mix.batches[r::world]) for r in range(world)), initial=0))
    return ends[rank], ends[rank + 1]


def batches_of_rank(
    mix: Mix, steps: Iterable[int], rank: int | None = None, world: int | None = None
) -> list[tuple[KeyedJaggedTensor, list[Tensor]]]:
    """A rank's samples of each step, and its rows of the upstream gradients of one process, times the ranks."""
    rank, world = dist.get_rank() if rank is None else rank, world or dist.get_world_size()
    begin, end = span_of(mix, rank, world)
    found = []
    for step in steps:
        whole = batch_of(mix, step)
        upstream = rows_of_rank(mix, whole, upstream_of(mix, whole, step), begin, end)
        found.append((samples_of(whole, begin, end), [given * world for given in upstream]))
    return found


def train_sharded(
    mix: Mix, optimizer: str, steps: int, env: ShardingEnv, *, learned: bool = False, dress: bool = False, **more: Any
) -> Run:
    """One rank of several: its upstream gradients are its rows of those of `train_alone`, times the ranks."""
    model = shard(mix, build(mix, optimizer), env, **more)
    batches = batches_of_rank(mix, range(steps))
    if dress:
        batches = [(dressed(mine, env.rank), upstream) for mine, upstream in batches]
    run = train(mix, model, batches, learned, lambda: model.collectives)
    run.weight_gradients = [gradient / env.world_size for gradient in run.weight_gradients]
    run.weights, run.states = held(model)
    return run


def held(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What this rank holds: weights and states by `table|rows|cols` of each shard."""
    weights, states = {}, {}
    for group, part in zip(model._tables.all_groups(), model._tables.members, strict=True):
        for number, one in enumerate(part.shards):
            key = f"{one.table}|{one.rows[0]}:{one.rows[1]}|{one.cols[0]}:{one.cols[1]}"
            weights[key] = group.view(number).clone()
            states.update({f"{key}/{name}": value.clone() for name, value in group.state_views(number).items()})
    return weights, states


def address(key: str) -> tuple[str, slice, slice]:
    """Table, rows and columns of a key of `held`."""
    table, rows, cols = key.split("|")
    return table, slice(*map(int, rows.split(":"))), slice(*map(int, cols.split(":")))


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether these are the same names with the same bits."""
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def expect_same_runs(one: Run, other: Run) -> None:
    """Two runs of a rank gave the same bits everywhere."""
    for mine, theirs in zip(
        [*one.outputs, one.weight_gradients], [*other.outputs, other.weight_gradients], strict=True
    ):
        assert len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
    assert same_tensors(one.weights, other.weights)
    assert same_tensors(one.states, other.states)
