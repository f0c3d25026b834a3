"""One rank that trains random mixes of sharded tables and writes down the SHA-256 of every tensor that it leaves.

A program of its own, which compare.py starts in two trees: its mixes are of public names, which both have.

    PYTHONPATH=TREE python worker.py --tree TREE --rank R --world W --store FILE --mixes N --out FILE
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

import shardwise
from shardwise import (
    FTRL,
    LAMB,
    Batch,
    BoundsCheckMode,
    CommType,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    EmbeddingModuleShardingPlan,
    GradientCheckMode,
    KeyedJaggedTensor,
    LarsSGD,
    LookupPolicy,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    PoolingType,
    QCommsConfig,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    TrainPipelineSparseDist,
    accumulate,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    get_qcomm_codecs_registry,
    in_backward_optimizer_filter,
)
from shardwise.kernels._op import HAS_TRITON
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda
from shardwise.sharding import (
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)

STEPS, MOST_RANKS, MOST_IDS = 4, 4, 12
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum_sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
    "partial_rowwise_adam": (PartialRowWiseAdam, {"lr": 0.05}),
    "lamb": (LAMB, {"lr": 0.05}),
    "partial_rowwise_lamb": (PartialRowWiseLAMB, {"lr": 0.05}),
    "lars_sgd": (LarsSGD, {"lr": 0.5, "momentum": 0.5}),
    "ftrl": (FTRL, {"lr": 0.1, "l1": 0.01}),
}
STRATEGIES = ("data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid")
CUT_BY_ROWS, CUT_BY_COLUMNS = ("row_wise", "table_row_wise", "grid"), ("column_wise", "table_column_wise", "grid")
CODECS = (("fp16", "fp32"), ("bf16", "bf16"), ("int8", "fp32"), ("fp16", "bf16"), ("int8", "fp16"))
WIDTH = 4  # columns of the narrowest shard


@dataclass(frozen=True)
class TableMix:
    """A table, how it is cut and trained."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    strategy: str
    optimizer: str
    mean: bool
    dtype: str
    reduction: str | None
    row_state: str | None
    # what the strategy draws its ranks and cuts from
    seed: int


@dataclass(frozen=True)
class Mix:
    """Tables of one collection, and how batches come and travel.

    Attributes:
        batches: samples of each of up to MOST_RANKS ranks.
        way: "plain", "accumulated" (two micro-batches a step) or "pipelined".
        clipped: gradients are cut where they are large.
        checked: a gradient that is not finite would raise.
        on_cuda: by the path of CUDA, on tensors that say they are there, where triton is installed.
        local_size: ranks of a host, where that divides the ranks.
    """

    seed: int
    pooled: bool
    weighted: bool
    tables: tuple[TableMix, ...]
    batches: tuple[int, ...]
    empty_features: tuple[str, ...]
    outside: bool
    variable: bool
    dedup: bool
    codecs: tuple[str, str] | None
    way: str
    local_size: int
    clipped: bool
    checked: bool
    on_cuda: bool

    @property
    def features(self) -> list[str]:
        """In the order of the batch, which is not that of the tables."""
        return sorted({feature for table in self.tables for feature in table.features}, reverse=True)

    def __str__(self) -> str:
        tables = [
            "/".join(dict.fromkeys(getattr(table, field) for table in self.tables))
            for field in ("strategy", "optimizer", "dtype")
        ]
        flags = {
            "weighted": self.weighted,
            "mean": any(table.mean for table in self.tables),
            "ordered": any(table.reduction == "ordered" for table in self.tables),
            "row_state=table": any(table.row_state == "table" for table in self.tables),
            "ids outside": self.outside,
            "variable batch": self.variable,
            "dedup": self.dedup,
            f"codecs {'/'.join(self.codecs or ())}": self.codecs is not None,
            self.way: self.way != "plain",
            "clipped": self.clipped,
            "checked": self.checked,
            "path of CUDA": self.on_cuda,
        }
        return ", ".join(["EBC" if self.pooled else "EC", *tables, *(flag for flag, on in flags.items() if on)])


def mix_of(seed: int) -> Mix:
    """A random mix."""
    rng = random.Random(seed)
    names = [f"f{n}" for n in range(rng.randint(2, 5))]
    pooled = rng.random() < 0.6
    # rows of ids have one width in all tables
    dims = [4, 8, 12] if pooled else [rng.choice([4, 8, 12])]
    variable = rng.random() < 0.25
    rules = rng.sample(sorted(OPTIMIZERS), 2)
    tables = []
    for n in range(rng.randint(3, 6)):
        strategy = rng.choice(STRATEGIES)
        tables.append(
            TableMix(
                f"t{n}",
                rows=rng.choice([1, 3, 20, 41, 60, 90]),
                dim=rng.choice(dims),
                features=tuple(rng.sample(names, rng.randint(1, 2))),
                strategy=strategy,
                optimizer=rng.choice(rules),
                mean=pooled and rng.random() < 0.4,
                dtype=rng.choice(["fp32", "fp32", "fp16", "bf16"]),
                reduction=rng.choice(["partial", "ordered"]) if strategy in CUT_BY_ROWS else None,
                row_state=rng.choice(["shard", "table"]) if strategy in CUT_BY_COLUMNS else None,
                seed=rng.randrange(1000),
            )
        )
    # a feature with samples of its own keeps at least one
    sizes = [1, 2, 4, 5] if variable else rng.choice([[0, 1, 2, 5], [3], [4, 0]])
    way = rng.choice(["plain", "plain", "accumulated", "pipelined"])
    return Mix(
        seed,
        pooled,
        weighted=pooled and rng.random() < 0.5,
        tables=tuple(tables),
        batches=tuple(rng.choice(sizes) for _ in range(MOST_RANKS)),
        empty_features=tuple(name for name in names if rng.random() < 0.1),
        outside=rng.random() < 0.2,
        variable=variable,
        dedup=not pooled and rng.random() < 0.5,
        codecs=(*CODECS, *[None] * len(CODECS))[seed % (2 * len(CODECS))],
        way=way,
        local_size=(1, 2, 4)[seed % 3],
        clipped=seed % 4 == 3,
        checked=seed % 5 == 4,
        # there a pipeline needs streams, and the ids of sums and of cut columns would have to be known
        on_cuda=HAS_TRITON and way == "plain" and all(table.row_state != "table" for table in tables),
    )


class Net(nn.Module):
    """A collection below one dense parameter; the loss is the distance of its rows from fixed numbers."""

    def __init__(self, mix: Mix, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(mix.seed)
        self.tables = collection_of(mix, device)
        # DistributedDataParallel takes no tensors that only say where they are
        self.scale = nn.Parameter(torch.ones((), device=device), requires_grad=not mix.on_cuda)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss; it again and what was looked up, in one row, without gradients."""
        output = self.tables(batch.sparse_features)
        parts = [jagged.values() for jagged in output.values()] if isinstance(output, dict) else [output.values()]
        rows = torch.cat([part.flatten() for part in parts])
        target = torch.arange(len(rows)).sin().to(rows.device)
        loss = 0.5 * (self.scale * rows - target).square().sum()
        return loss, (loss.detach(), rows.detach())


def collection_of(mix: Mix, device: torch.device) -> nn.Module:
    """The unsharded collection with its optimizers."""
    policy = LookupPolicy(
        BoundsCheckMode.IGNORE if mix.outside else BoundsCheckMode.FATAL,
        GradientCheckMode.RAISE if mix.checked else GradientCheckMode.IGNORE,
    )
    configs: list[Any] = []
    for table in mix.tables:
        arguments = (table.rows, table.dim, table.name, DataType[table.dtype.upper()], list(table.features))
        pooling = PoolingType.MEAN if table.mean else PoolingType.SUM
        configs.append(EmbeddingBagConfig(*arguments, pooling=pooling) if mix.pooled else EmbeddingConfig(*arguments))
    module: Any
    if mix.pooled:
        module = EmbeddingBagCollection(configs, is_weighted=mix.weighted, policy=policy, device=device)
    else:
        module = EmbeddingCollection(configs, policy=policy, device=device)
    children = module.embedding_bags if mix.pooled else module.embeddings
    for table in mix.tables:
        rule, settings = OPTIMIZERS[table.optimizer]
        clipping = {"gradient_clipping": True, "max_gradient": 0.1} if mix.clipped else {}
        apply_optimizer_in_backward(rule, children[table.name].parameters(), {**settings, **clipping})
    return module  # type: ignore[no-any-return]


def generator_of(table: TableMix, world: int, local: int) -> Any:
    """What cuts the table for so many ranks, `local` of them a host."""
    rng, hosts = random.Random(table.seed), list(range(world // local))
    widths = [WIDTH] * (table.dim // WIDTH)
    by_rows: Any = {"reduction": table.reduction}
    by_columns: Any = {"row_state": table.row_state}
    if table.strategy == "row_wise":
        # uneven blocks, now and then
        ends = sorted(rng.randint(0, table.rows) for _ in range(world - 1))
        sizes = [b - a for a, b in zip([0, *ends], [*ends, table.rows], strict=True)]
        uneven: Any = {"sizes_placement": (sizes, "cpu"), "compute_kernel": "fused"} if rng.random() < 0.5 else {}
        return row_wise(**uneven, **by_rows)
    if table.strategy == "grid":
        # every host has columns of it
        usable = hosts if table.dim % len(hosts) == 0 else hosts[:1]
        return grid_shard(usable, **by_rows, **by_columns)
    made = {
        "data_parallel": lambda: data_parallel(),
        "table_wise": lambda: table_wise(rank=rng.randrange(world)),
        "column_wise": lambda: column_wise([rng.randrange(world) for _ in widths], widths, **by_columns),
        "table_row_wise": lambda: table_row_wise(rng.choice(hosts), **by_rows),
        "table_column_wise": lambda: table_column_wise(rng.choice(hosts), widths, **by_columns),
    }
    return made[table.strategy]()


def model_of(mix: Mix, world: int, device: torch.device, tier: Any = None) -> DistributedModelParallel:
    """The sharded model of this rank; with a `tier` rows of all tables lie below the device."""
    local = mix.local_size if world % mix.local_size == 0 else 1
    net = Net(mix, device)
    ways = {table.name: generator_of(table, world, local) for table in mix.tables}
    codecs = None
    if mix.codecs is not None:
        forward, backward = (CommType(name) for name in mix.codecs)
        codecs = get_qcomm_codecs_registry(QCommsConfig(forward, backward))
    sharder: Any
    if mix.pooled:
        sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    else:
        sharder = EmbeddingCollectionSharder(qcomm_codecs_registry=codecs, use_index_dedup=mix.dedup)
    plan = construct_module_sharding_plan(net.tables, ways, sharder, local, world, device.type)
    if tier is not None:
        # earlier commits, which this program trains too, know none
        plan = EmbeddingModuleShardingPlan({name: replace(of_table, tier=tier) for name, of_table in plan.items()})
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD, local_world_size=local)
    return DistributedModelParallel(net, env, device=device, plan=ShardingPlan({"tables": plan}), sharders=[sharder])


def batch_of(mix: Mix, turn: int, rank: int, world: int, *, learned: bool) -> Batch:
    """Samples of one rank; with `learned` per-id weights want a gradient."""
    generator = torch.Generator().manual_seed(1000 * mix.seed + 10 * turn + rank)
    # fewer ranks have the samples of those that are not there
    samples, features = sum(mix.batches[rank::world]), mix.features
    ids, lengths, strides, inverse = [], [], [], []
    for feature in features:
        stride = int(torch.randint(1, samples + 1, (), generator=generator)) if mix.variable else samples
        # enough ids for three and more ranks to have some of a bag: else sums have no order
        of_feature = torch.randint(0, MOST_IDS + 1, (stride,), generator=generator)
        if feature in mix.empty_features:
            of_feature.zero_()
        rows = min(table.rows for table in mix.tables if feature in table.features)
        given = torch.randint(0, rows, (int(of_feature.sum()),), generator=generator)
        if mix.outside:
            wrong = torch.tensor([0, 0, 0, 0, max(table.rows for table in mix.tables), -1, 2**32])
            given += wrong[torch.randint(0, len(wrong), given.shape, generator=generator)]
        ids.append(given)
        lengths.append(of_feature)
        strides.append([stride])
        inverse.append(torch.randint(0, stride, (samples,), generator=generator) if mix.variable else of_feature)
    values = torch.cat(ids)
    weights = torch.rand(values.shape, generator=generator).requires_grad_(learned) if mix.weighted else None
    more: dict[str, Any] = {}
    if mix.variable:
        more = {"stride_per_key_per_rank": strides, "inverse_indices": (features, torch.stack(inverse))}
    kjt = KeyedJaggedTensor(features, values, weights, torch.cat(lengths), **more)
    return Batch(torch.zeros(samples, 1), kjt, torch.zeros(samples))


def train(mix: Mix, rank: int, world: int, *, plant: bool = False) -> dict[str, str]:
    """SHA-256 by name, in the order in which they came: losses and outputs, then weights and states."""
    with use_fake_cuda(Counted()) if mix.on_cuda else nullcontext():
        return _train(mix, rank, world, CUDA if mix.on_cuda else torch.device("cpu"), plant)


def _train(mix: Mix, rank: int, world: int, device: torch.device, plant: bool) -> dict[str, str]:
    model = model_of(mix, world, device)
    trained = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = torch.optim.SGD([param for param in trained.values() if param.requires_grad] or [torch.zeros(1)], lr=0.01)
    digests: dict[str, str] = {}
    for step, (loss, rows, gradient) in enumerate(_steps(mix, model, dense, rank, world)):
        if not loss.isfinite():
            # not a number is the same bits as another
            raise FloatingPointError(f"step {step}: the loss is {loss}")
        digests |= {f"loss of step {step}": digest(loss), f"output of step {step}": digest(rows)}
        if gradient is not None:
            digests[f"gradient of per-id weights of step {step}"] = digest(gradient)
        if plant and step == 0:
            _flip_a_bit(model)
    with torch.no_grad():
        _, (loss, rows) = model(batch_of(mix, STEPS, rank, world, learned=False).to(device))
    digests |= {"loss of evaluation": digest(loss), "output of evaluation": digest(rows)}
    for name, value in model.state_dict().items():
        digests |= {f"weight {name}{where}": digest(part) for where, part in _parts(value)}
    states = model.fused_optimizer.state_dict()["state"]
    for name, of_table in states.items():
        for key, value in of_table.items():
            digests |= {f"state {name}: {key}{where}": digest(part) for where, part in _parts(value)}
    return digests


def _steps(
    mix: Mix, model: DistributedModelParallel, dense: torch.optim.Optimizer, rank: int, world: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Loss, output and gradient of per-id weights of each step, or micro-batch."""
    if mix.way == "pipelined":
        pipeline: Any = TrainPipelineSparseDist(model, dense, torch.device("cpu"), execute_all_batches=True)
        # weights that want a gradient are no matter of a pipeline, which moves its batches
        batches = iter([batch_of(mix, turn, rank, world, learned=False) for turn in range(STEPS)])
        for _ in range(STEPS):
            yield *pipeline.progress(batches), None
        return
    for turn in range(STEPS):
        waits = mix.way == "accumulated" and turn % 2 == 0
        batch = batch_of(mix, turn, rank, world, learned=mix.weighted)
        given = batch.to(model.device)
        with accumulate(model) if waits else nullcontext():
            loss, (value, rows) = model(given)
            loss.backward()
        if not waits:
            dense.step()
            dense.zero_grad()
            if mix.way == "accumulated":
                model.fused_optimizer.step()
        yield value, rows, batch.sparse_features.weights().grad if mix.weighted else None


def _parts(value: Any) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of a weight or a state: where it lies, and its values."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield f" {shard.metadata.shard_offsets} {shard.metadata.shard_sizes}", shard.tensor
    else:
        yield "", value if isinstance(value, Tensor) else torch.tensor(value)


def _flip_a_bit(model: DistributedModelParallel) -> None:
    """The lowest bit of the first number of every row that this rank holds."""
    for value in model.state_dict().values():
        for _, part in _parts(value):
            if part.dim() == 2 and part.numel():
                number = part.detach()[:, :1]
                kind = torch.int32 if part.dtype == torch.float32 else torch.int16
                number.copy_((number.contiguous().view(kind) ^ 1).view(part.dtype))


def digest(value: Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes."""
    plain = value.detach().cpu().contiguous().reshape(-1)
    text = f"{value.dtype} {list(value.shape)} ".encode()
    return hashlib.sha256(text + plain.view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of the mixes of compare.py.")
    parser.add_argument("--tree", type=Path, required=True, help="What shardwise has to come from.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True, help="The file by which the ranks meet.")
    parser.add_argument("--mixes", type=int, required=True, help="How many: seeds 0 to this.")
    parser.add_argument("--plant", type=int, help="The mix in which a bit is flipped after the first step.")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    # where its links lead, too
    if not Path(shardwise.__file__).is_relative_to(given.tree):
        raise SystemExit(f"shardwise comes from {shardwise.__file__}, not from {given.tree}: set PYTHONPATH to that")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{given.store}", rank=given.rank, world_size=given.world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    digests: dict[str, dict[str, str]] = {}
    for seed in range(given.mixes):
        mix = mix_of(seed)
        try:
            digests[str(seed)] = train(mix, given.rank, given.world, plant=given.plant == seed)
        except Exception as error:
            raise RuntimeError(f"mix {seed}: {asdict(mix)}") from error
    given.out.write_text(json.dumps(digests))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
