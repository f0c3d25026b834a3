"""Plans as people read and write them: `ShardingPlan` and its parts by TorchRec's names, and how they become shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from .layout import Shard
from .layout import data_parallel as data_parallel_shards


class ShardingType(Enum):
    """How a table is cut over ranks."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"


class EmbeddingComputeKernel(Enum):
    """How a table is trained: by the optimizer in the backward, or through a dense gradient."""

    DENSE = "dense"
    FUSED = "fused"


# spellings that older plans and tutorials use
_KERNEL_ALIASES = {"batched_fused": "fused", "batched_dense": "dense"}


@dataclass
class ParameterSharding:
    """Where one table goes: its sharding type and kernel by value, its ranks, and the exact cut.

    Raises:
        ValueError: the type or the kernel is unknown, or a cut table has no `sharding_spec`.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: EnumerableShardingSpec | None = None

    def __post_init__(self) -> None:
        self.compute_kernel = _KERNEL_ALIASES.get(self.compute_kernel, self.compute_kernel)
        for what, value, known in (
            ("sharding_type", self.sharding_type, ShardingType),
            ("compute_kernel", self.compute_kernel, EmbeddingComputeKernel),
        ):
            if value not in {member.value for member in known}:
                raise ValueError(f"{what} {value!r} is not one of {[member.value for member in known]}")
        if self.sharding_spec is None and self.sharding_type != ShardingType.DATA_PARALLEL.value:
            raise ValueError(f"a {self.sharding_type} table needs a sharding_spec")


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """Table name -> `ParameterSharding`; prints as two tables."""

    def __str__(self) -> str:
        where = [(name, one.sharding_type, one.compute_kernel, str(one.ranks)) for name, one in self.items()]
        cuts = [
            (name, str(shard.shard_offsets), str(shard.shard_sizes), str(shard.placement))
            for name, one in self.items()
            for shard in (one.sharding_spec.shards if one.sharding_spec else ())
        ]
        tables = _columns(("param", "sharding type", "compute kernel", "ranks"), where)
        return f"\n\n{tables}\n\n{_columns(('param', 'shard offsets', 'shard sizes', 'placement'), cuts)}"


@dataclass
class ShardingPlan:
    """Module path -> plan of that module's tables; the root module's path is ''."""

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """The plan of the module at this path, or None."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        return "\n\n".join(f"module: {path}{plan}" for path, plan in self.plan.items())


ParameterShardingGenerator = Callable[[int, int, int, str], ParameterSharding]


def table_wise(rank: int, device: str | None = None, compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """A generator that puts a table whole on `rank`.

    Raises (from the generator):
        ValueError: there is no such rank.
    """

    def generate(rows: int, dim: int, world_size: int, device_type: str) -> ParameterSharding:
        if not 0 <= rank < world_size:
            raise ValueError(f"table_wise: rank {rank} is not one of {world_size}")
        kind = device or device_type
        # local device numbers follow ranks; hosts come with the hierarchical strategies
        placement = f"rank:{rank}/{kind}" if kind == "cpu" else f"rank:{rank}/{kind}:{rank}"
        spec = EnumerableShardingSpec([ShardMetadata([0, 0], [rows, dim], placement)])
        return ParameterSharding(ShardingType.TABLE_WISE.value, compute_kernel or "fused", [rank], spec)

    return generate


def data_parallel() -> ParameterShardingGenerator:
    """A generator that puts a table whole on every rank.

    A table with an optimizer in its backward keeps it: every replica applies the same update. Without one its gradient
    is averaged with those of the dense layers.
    """

    def generate(rows: int, dim: int, world_size: int, device_type: str) -> ParameterSharding:
        return ParameterSharding(ShardingType.DATA_PARALLEL.value, "dense", list(range(world_size)))

    return generate


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: dict[str, ParameterShardingGenerator],
    *,
    world_size: int | None = None,
    device_type: str = "cpu",
) -> EmbeddingModuleShardingPlan:
    """The plan of one collection from a generator per table; `world_size` is that of the default process group.

    Raises:
        ValueError: the names do not match the module's tables, or `world_size` is missing without a process group.
    """
    if world_size is None:
        if not dist.is_initialized():
            raise ValueError("world_size is missing: there is no process group to take it from")
        world_size = dist.get_world_size()
    sizes = {config.name: (config.num_embeddings, config.embedding_dim) for config in tables_of(module)}
    if set(sizes) != set(per_param_sharding):
        missing, unknown = set(sizes) - set(per_param_sharding), set(per_param_sharding) - set(sizes)
        raise ValueError(f"the plan misses tables {sorted(missing)} and names unknown tables {sorted(unknown)}")
    return EmbeddingModuleShardingPlan(
        {name: per_param_sharding[name](*size, world_size, device_type) for name, size in sizes.items()}
    )


def tables_of(module: nn.Module) -> Sequence[EmbeddingBagConfig | EmbeddingConfig]:
    """The table configs of a collection.

    Raises:
        TypeError: the module is no collection.
    """
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    if isinstance(module, EmbeddingCollection):
        return module.embedding_configs()
    raise TypeError(f"{type(module).__name__} holds no tables: expected a collection")


def shards_of(name: str, one: ParameterSharding, rows: int, dim: int, world_size: int) -> list[Shard]:
    """The shards that a `ParameterSharding` describes.

    Raises:
        ValueError: a placement names no rank, or a table that is not replicated asks for the dense kernel.
    """
    if one.sharding_spec is None:
        return data_parallel_shards(name, rows, dim, world_size)
    if one.compute_kernel == EmbeddingComputeKernel.DENSE.value:
        raise ValueError(
            f"table {name!r}: only data_parallel tables have a dense gradient; a {one.sharding_type} table trains by"
            " the optimizer in its backward, so its compute_kernel is 'fused'"
        )
    shards = []
    for cut in one.sharding_spec.shards:
        (row, col), (height, width) = cut.shard_offsets, cut.shard_sizes
        placement = cut.placement
        rank = placement.rank() if placement is not None and not isinstance(placement, str) else None
        if rank is None:
            raise ValueError(f"table {name!r}: a shard's placement names no rank: {placement}")
        shards.append(Shard(name, rank, (row, row + height), (col, col + width)))
    placed = sorted({shard.rank for shard in shards})
    if one.ranks is not None and sorted(set(one.ranks)) != placed:
        raise ValueError(f"table {name!r}: the plan says ranks {one.ranks}, its shards are on {placed}")
    return shards


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns below their names: TorchRec's text to the last space, that of no rows included."""
    if not rows:
        return "\n"
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    title = " | ".join(name.center(width) for name, width in zip(names, widths, strict=True))
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, " | ".join("-" * width for width in widths), *lines])
