"""The models of the tests: tables by rows of features, a net of sharded collections beside data-parallel layers.

`MAKERS` has every kind of collection on any device, `give_memory` how programs give one of meta its memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from ranks import world_group
from torch import Tensor, nn

from shardwise import (
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.embeddings import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from shardwise.embeddings.managed_collision import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.embeddings.tiers import CachedRows
from shardwise.planner.layout import Tier
from shardwise.sharding import column_wise, data_parallel, row_wise, table_wise

DIM, ROWS = 8, 40
FEATURES = {f"f{n}": ROWS for n in range(4)}
Module = TypeVar("Module", bound=nn.Module)


def bag_tables(rows: Mapping[str, int], dim: int = DIM, **fields: Any) -> list[EmbeddingBagConfig]:
    """A table "t<name>" for every feature; `fields` are the same in all."""
    return [EmbeddingBagConfig(count, dim, f"t{name}", feature_names=[name], **fields) for name, count in rows.items()]


def row_tables(rows: Mapping[str, int], dim: int = DIM, **fields: Any) -> list[EmbeddingConfig]:
    """A table "t<name>" of sequences for every feature; `fields` are the same in all."""
    return [EmbeddingConfig(count, dim, f"t{name}", feature_names=[name], **fields) for name, count in rows.items()]


def fused(module: Module, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **kwargs: Any) -> Module:
    """The module, its tables updated in backward; `lr` is 0.1 unless given."""
    tables = [
        param for name, param in module.named_parameters() if re.search(r"embedding(_bag)?s\.[^.]+\.weight$", name)
    ]
    apply_optimizer_in_backward(optimizer, tables, {"lr": 0.1, **kwargs})
    return module


@dataclass
class Batch:
    """What a model of this file takes."""

    dense: Tensor
    pooled: KeyedJaggedTensor
    weighted: KeyedJaggedTensor
    lists: dict[str, KeyedJaggedTensor]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        lists = {key: value.to(device, non_blocking=non_blocking) for key, value in self.lists.items()}
        return Batch(self.dense.to(device), self.pooled.to(device), self.weighted.to(device), lists)


class Net(nn.Module):
    """Collections named by `parts`, and a dense layer on what they give."""

    def __init__(self, parts: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.parts = parts
        tables: Any = [EmbeddingBagConfig(ROWS, DIM, f"t{n}", feature_names=[f"f{n}"]) for n in range(4)]
        if "p" in parts:
            self.pooled = EmbeddingBagCollection(tables)
        if "w" in parts:
            self.weighted = EmbeddingBagCollection(tables[:3], is_weighted=True)
        if "s" in parts:
            rows = [EmbeddingConfig(ROWS, DIM, f"t{n}", feature_names=[f"f{n}"]) for n in range(3)]
            self.sequence = EmbeddingCollection(rows)
        self.dense = nn.Linear(4, DIM)
        self.over = nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.dense(batch.dense)
        if "p" in self.parts:
            found = found + self.pooled(batch.pooled).values().view(-1, 4, DIM).sum(1)
        if "w" in self.parts:
            found = found + self.weighted(batch.weighted).values().view(-1, 3, DIM).sum(1)
        if "s" in self.parts:
            for jagged in self.sequence(batch.lists["history"]).values():
                sums = torch.zeros(len(jagged.lengths()), DIM)
                samples = torch.repeat_interleave(jagged.lengths())
                found = found + sums.index_add(0, samples, jagged.values())
        out = self.over(found.tanh()).squeeze(1)
        return (out * out).sum() / 8, out


def compressed(kjt: KeyedJaggedTensor, generator: torch.Generator) -> KeyedJaggedTensor:
    """Some samples of each feature, and which of them each of twice as many samples is."""
    keys = kjt.keys()
    strides = [kjt.stride() if n % 2 else max(1, kjt.stride() // 2) for n in range(len(keys))]
    lengths = [kjt[key].lengths()[:stride] for key, stride in zip(keys, strides, strict=True)]
    ids = [kjt[key].values()[: int(own.sum())] for key, own in zip(keys, lengths, strict=True)]
    inverse = [torch.randint(0, stride, (2 * kjt.stride(),), generator=generator) for stride in strides]
    return KeyedJaggedTensor(
        keys, torch.cat(ids), None, torch.cat(lengths), stride_per_key_per_rank=[[s] for s in strides],
        inverse_indices=(keys, torch.stack(inverse)),
    )  # fmt: skip


def batch_of(step: int, *, vbe: bool = False, rank: int | None = None) -> Batch:
    """The batch of this rank: of another size on every rank, sometimes empty."""
    rank = dist.get_rank() if rank is None else rank
    seed = 1000 * rank + step
    generator = torch.Generator().manual_seed(seed)
    samples = (step * 3 + rank * 5) % 7 + int(vbe)
    # in some steps no rank has an id
    pooled = random_kjt(FEATURES, samples, seed=seed, longest=0 if step % 11 == 3 else 3)
    if vbe:
        pooled, samples = compressed(pooled, generator), 2 * samples
    three = {name: FEATURES[name] for name in list(FEATURES)[:3]}
    weighted = random_kjt(three, samples, seed=seed + 1, weighted=True)
    lists = {"history": random_kjt(three, samples, seed=seed + 2)}
    return Batch(torch.randn(samples, 4, generator=generator), pooled, weighted, lists)


# of a net's collections
RULES: dict[str, type[torch.optim.Optimizer]] = {
    "pooled": RowWiseAdagrad, "weighted": torch.optim.Adam, "sequence": torch.optim.SGD,
}  # fmt: skip


def sharded(
    parts: str,
    module: nn.Module | None = None,
    *,
    tier: Tier | None = None,
    rule_settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> DistributedModelParallel:
    """A model of these parts, its tables cut every way there is, and with a `tier` below the device."""
    module = module or Net(parts)
    world, plan = dist.get_world_size(), ShardingPlan()
    for number, (name, rule) in enumerate(RULES.items()):
        if not hasattr(module, name):
            continue
        collection = module.get_submodule(name)
        apply_optimizer_in_backward(rule, collection.parameters(), {"lr": 0.1, **(rule_settings or {})})
        cut = {"t0": table_wise(rank=number % world), "t1": row_wise(), "t2": data_parallel()}
        if name == "pooled":
            cut["t3"] = column_wise(ranks=[0, world - 1])
        plan.plan[name] = construct_module_sharding_plan(
            collection, cut, local_size=world, world_size=world, device_type="cpu"
        )
        for sharding in plan.plan[name].values():
            sharding.tier = tier
    env = ShardingEnv.from_process_group(world_group())
    return DistributedModelParallel(module, env, "cpu", plan, **more)


def stores_of(model: DistributedModelParallel) -> list[CachedRows]:
    """What caches the rows of this rank, where its tables have tiers."""
    groups = [group for one in model._sharded.values() for group in one._tables.all_groups()]
    return [group.store for group in groups if isinstance(group.store, CachedRows)]


def state_of(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Every number that training changes on this rank, as copies; also of rows that lie below the device."""
    with ExitStack() as stack:
        for one in model._sharded.values():
            stack.enter_context(one.shards.whole())
        return _state_here(model)


def _state_here(model: DistributedModelParallel) -> dict[str, Tensor]:
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for path, one in model._sharded.items():
        for g, group in enumerate(one._tables.all_groups()):
            found[f"{path}/{g}"] = group.flat.clone()
            found.update({f"{path}/{g}/{n}": state.clone() for n, state in enumerate(group.states)})
    return found


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Adagrad on the layers that are not sharded."""
    params = [p for name, p in model.named_parameters() if name.startswith(("dense", "over")) or "position" in name]
    return torch.optim.Adagrad(params, lr=0.05)


def plain_loop(model: nn.Module, batches: Iterator[Batch]) -> list[Tensor]:
    """Outputs of a loop without a pipeline."""
    optimizer, outputs = dense_optimizer(model), []
    for batch in batches:
        optimizer.zero_grad()
        losses, output = model(batch)
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        outputs.append(output.detach().clone())
    return outputs


def drain(progress: Callable[[Iterator[Any]], Tensor], batches: Iterator[Any]) -> list[Tensor]:
    """Outputs of a pipeline until it stops."""
    outputs = []
    with suppress(StopIteration):
        while True:
            outputs.append(progress(batches).detach().clone())
    return outputs


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether these are the same bits."""
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


BAGS = {"f": [[1, 2], [], [4]], "g": [[0], [3, 3], [1]]}


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(5, 4, "a", feature_names=["f"]),
        EmbeddingBagConfig(6, 4, "b", feature_names=["g"]),
        EmbeddingBagConfig(7, 3, "c", feature_names=["f"], data_type=DataType.FP16),
    ]


def row_configs() -> list[EmbeddingConfig]:
    return [EmbeddingConfig(5, 4, "a", feature_names=["f"]), EmbeddingConfig(6, 4, "b", feature_names=["g"])]


def bags(device: str = "cpu", **more: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(configs(), device=device, **more)


def fused_bags(device: str = "cpu") -> FusedEmbeddingBagCollection:
    return FusedEmbeddingBagCollection(configs(), RowWiseAdagrad, {"lr": 0.1}, device=device)


def behind_maps(kind: Any, collection: Any, tables: Any, device: str) -> nn.Module:
    maps = {t.name: MCHManagedCollisionModule(t.num_embeddings, device, LFU_EvictionPolicy(), 2) for t in tables}
    return kind(collection(tables, device=device), ManagedCollisionCollection(maps, tables))  # type: ignore[no-any-return]


class Model(nn.Module):
    """A collection, rows of another and a dense layer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.bags, self.rows = bags(device), EmbeddingCollection(row_configs(), device=device)
        self.over = nn.Linear(11, 2, device=device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        rows = torch.cat([jt.values() for jt in self.rows(features).values()])
        return self.over(self.bags(features).values()) * rows.sum()  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[str], nn.Module]] = {
    "bags": bags,
    "rows": lambda device: EmbeddingCollection(row_configs(), device=device),
    "fused bags": fused_bags,
    "fused rows": lambda device: FusedEmbeddingCollection(row_configs(), torch.optim.Adam, {"lr": 0.1}, device=device),
    "bags behind maps": lambda device: behind_maps(
        ManagedCollisionEmbeddingBagCollection, EmbeddingBagCollection, configs(), device
    ),
    "rows behind maps": lambda device: behind_maps(
        ManagedCollisionEmbeddingCollection, EmbeddingCollection, row_configs(), device
    ),
    "feature processors": lambda device: FeatureProcessedEmbeddingBagCollection(
        bags(device, is_weighted=True), {name: PositionWeightedModule(3, device) for name in BAGS}
    ),
    "collection of feature processors": lambda device: FeatureProcessedEmbeddingBagCollection(
        bags(device, is_weighted=True), PositionWeightedModuleCollection(dict.fromkeys(BAGS, 3), device)
    ),
    "towers": lambda device: EmbeddingTowerCollection([EmbeddingTower(bags(device), Values())]),
    "model": Model,
}


class Values(nn.Module):
    """What is looked up, as a tensor."""

    def forward(self, looked_up: Any) -> Tensor:
        return looked_up.values()  # type: ignore[no-any-return]


def give_memory(module: nn.Module) -> None:
    """How programs give a model that was made on meta its memory: for `module.apply`."""
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            module._parameters[name] = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()


def values_of(output: Any) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    if isinstance(output, dict):
        return torch.cat([jt.values() for jt in output.values()])
    return output if isinstance(output, Tensor) else output.values()  # type: ignore[no-any-return]
