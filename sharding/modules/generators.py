"""Generators of plans by TorchRec's names: one call says how a table is cut, `construct_module_sharding_plan` cuts it.

A generator is a strategy of `layout` and the placement of its shards. Rank r of hosts of `local_size` ranks computes on
device r % local_size of its host. Where nobody says another kernel, a table in cut shards has "fused" if it has an
optimizer in its backward, or if its sharder's `fused_params` give it one; else "dense": its gradient reaches its
parameter, for an optimizer of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise.embeddings import optimizer_of

from ...planner import layout
from ...planner.layout import Shard, Tier
from ..comms.env import get_local_size
from ..plan.module_sharder import ModuleSharder
from ..plan.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingType
from .default_sharders import get_default_sharders, require_sharder
from .fused_params import name_an_optimizer

# (parameter, local_size, world_size, device_type, sharder) -> its place
ParameterShardingGenerator = Callable[[nn.Parameter, int, int, str, ModuleSharder[Any]], ParameterSharding]
# ranks of each host
Hosts = Sequence[Sequence[int]]


def data_parallel(*, tier: Tier | None = None) -> ParameterShardingGenerator:
    """A generator that puts a table whole on every rank.

    A table with an optimizer in its backward keeps it: every replica applies the same update. Without one its gradient
    is averaged with those of the dense layers. With a `tier` (as `TableOptions`), every rank has a cache of its own.
    """

    def generate(
        param: nn.Parameter, local_size: int, world_size: int, device_type: str, sharder: ModuleSharder[Any]
    ) -> ParameterSharding:
        kernel = _quantized(sharder, ShardingType.DATA_PARALLEL, device_type) or "dense"
        return ParameterSharding(ShardingType.DATA_PARALLEL.value, kernel, list(range(world_size)), tier=tier)

    return generate


def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None, *, tier: Tier | None = None
) -> ParameterShardingGenerator:
    """A generator that puts a table whole on `rank`, on a device of type `device` if that is not the plan's.

    `tier` is as in `TableOptions`.

    Raises (from the generator):
        ValueError: there is no such rank.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> where = {"item": table_wise(rank=1)}
        >>> plan = construct_module_sharding_plan(tables, where, local_size=2, world_size=2, device_type="cpu")
        >>> plan["item"].sharding_type, plan["item"].ranks
        ('table_wise', [1])
    """

    def cut(rows: int, dim: int, hosts: Hosts) -> list[Shard]:
        return layout.table_wise("", rows, dim, rank)

    devices = None if device is None else [device]
    placements = None if device is None else [placement_helper(device, rank, rank)]
    return _generator(ShardingType.TABLE_WISE, cut, compute_kernel, devices, placements, tier=tier)


def row_wise(
    sizes_placement: tuple[list[int], str | list[str]] | None = None,
    compute_kernel: str | None = None,
    num_buckets: int | None = None,
    *,
    reduction: str | None = None,
    tier: Tier | None = None,
) -> ParameterShardingGenerator:
    """A generator that puts a block of rows on every rank.

    Args:
        sizes_placement: rows of each rank, and the device type of all or of each. What is over the table's rows is cut
            off. As in TorchRec this is for quantized tables (kernel "quant") unless `compute_kernel` says otherwise.
        compute_kernel: of the table; by default as the head of this module says.
        num_buckets: cut between buckets of rows / num_buckets rows, as many buckets on each rank, the first ranks one
            more.
        reduction, tier: as `TableOptions`.

    Raises:
        ValueError: there are sizes and buckets, or device types that are not as many as sizes; from the generator: the
            sizes do not hold the table, or the buckets do not divide it or are fewer than the ranks.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> where = {"item": row_wise()}
        >>> plan = construct_module_sharding_plan(tables, where, local_size=2, world_size=2, device_type="cpu")
        >>> [(shard.shard_offsets, shard.shard_sizes) for shard in plan["item"].sharding_spec.shards]
        [([0, 0], [5, 4]), ([5, 0], [5, 4])]
    """
    kind = ShardingType.ROW_WISE
    if sizes_placement is None:

        def cut_evenly(rows: int, dim: int, hosts: Hosts) -> list[Shard]:
            ranks = [rank for host in hosts for rank in host]
            heights = None if num_buckets is None else _buckets(rows, len(ranks), num_buckets)
            return layout.row_wise("", rows, dim, ranks, heights)

        return _generator(kind, cut_evenly, compute_kernel, reduction=reduction, tier=tier)
    if num_buckets is not None:
        raise ValueError("row_wise: sizes_placement and num_buckets both say where to cut: give one of them")
    sizes, asked = sizes_placement
    devices = [asked] * len(sizes) if isinstance(asked, str) else list(asked)
    if len(devices) != len(sizes):
        raise ValueError(f"row_wise: {len(sizes)} sizes need as many device types, got {len(devices)}")
    # one process serves the shards of quantized tables: its GPUs are numbered
    placements = [placement_helper(one, devices[:n].count("cuda"), n) for n, one in enumerate(devices)]

    def cut(rows: int, dim: int, hosts: Hosts) -> list[Shard]:
        heights = _fitted(rows, sizes, "row_wise: sizes_placement", "rows")
        return layout.row_wise("", rows, dim, range(len(sizes)), heights)

    return _generator(kind, cut, compute_kernel or "quant", devices, placements, reduction=reduction, tier=tier)


def column_wise(
    ranks: list[int] | None = None,
    size_per_rank: list[int] | None = None,
    compute_kernel: str | None = None,
    device_types: list[str] | None = None,
    *,
    row_state: str | None = None,
    tier: Tier | None = None,
) -> ParameterShardingGenerator:
    """A generator that puts a block of columns on each of `ranks`, which may repeat.

    Args:
        ranks: one for each shard; default 0, 1, ... of `size_per_rank`.
        size_per_rank: columns of each shard, the last cut to what is left; default the same number for each.
        compute_kernel: of the table; by default as the head of this module says.
        device_types: of each shard, if not the plan's.
        row_state, tier: as `TableOptions`.

    Raises:
        ValueError: neither ranks nor sizes are given, or their numbers differ; from the generator: the columns do not
            divide, the sizes do not hold the table, or there is no such rank.
    """
    if ranks is None and size_per_rank is None:
        raise ValueError("column_wise: give ranks, size_per_rank or both")
    places = list(range(len(size_per_rank or []))) if ranks is None else list(ranks)
    for what, given in (("size_per_rank", size_per_rank), ("device_types", device_types)):
        if given is not None and len(given) != len(places):
            raise ValueError(f"column_wise: {len(places)} ranks need as many {what}, got {len(given)}")
    placements = None
    if device_types is not None:
        numbers = [n - device_types[:n].count("cpu") for n in range(len(device_types))]
        placements = [placement_helper(kind, n, n) for kind, n in zip(device_types, numbers, strict=True)]

    def cut(rows: int, dim: int, hosts: Hosts) -> list[Shard]:
        widths = None if size_per_rank is None else _fitted(dim, size_per_rank, "column_wise: size_per_rank", "columns")
        return layout.column_wise("", rows, dim, places, widths)

    kind = ShardingType.COLUMN_WISE
    return _generator(kind, cut, compute_kernel, device_types, placements, row_state=row_state, tier=tier)


def table_row_wise(
    host_index: int, *, reduction: str | None = None, tier: Tier | None = None
) -> ParameterShardingGenerator:
    """A generator that puts a block of rows on each rank of one host; `reduction`, `tier` as `TableOptions`.

    Raises (from the generator):
        ValueError: there is no such host.
    """

    def cut(rows: int, dim: int, hosts: Hosts) -> list[Shard]:
        return layout.table_row_wise("", rows, dim, _host(hosts, host_index))

    return _generator(ShardingType.TABLE_ROW_WISE, cut, reduction=reduction, tier=tier)


def table_column_wise(
    host_index: int, size_per_rank: list[int] | None = None, *, row_state: str | None = None, tier: Tier | None = None
) -> ParameterShardingGenerator:
    """A generator that puts a block of columns on each rank of one host. TorchRec has the type but no generator.

    `size_per_rank` are the columns of each shard (default the same number for each rank); when there are more than
    ranks, the first ranks have more than one.

    Raises (from the generator):
        ValueError: there is no such host, the columns do not divide, or the sizes do not hold the table.
    """

    def cut(rows: int, dim: int, hosts: Hosts) -> list[Shard]:
        ranks = _host(hosts, host_index)
        if size_per_rank is None:
            return layout.table_column_wise("", rows, dim, ranks)
        widths = _fitted(dim, size_per_rank, "table_column_wise: size_per_rank", "columns")
        return layout.table_column_wise("", rows, dim, [ranks[n % len(ranks)] for n in range(len(widths))], widths)

    return _generator(ShardingType.TABLE_COLUMN_WISE, cut, row_state=row_state, tier=tier)


def grid_shard(
    host_indexes: list[int], *, reduction: str | None = None, row_state: str | None = None, tier: Tier | None = None
) -> ParameterShardingGenerator:
    """A generator that puts a block of columns on each host, and of it a block of rows on each rank.

    Raises (from the generator):
        ValueError: there is no such host, or the columns do not divide.
    """

    def cut(rows: int, dim: int, hosts: Hosts) -> list[Shard]:
        return layout.grid("", rows, dim, [_host(hosts, index) for index in host_indexes])

    return _generator(ShardingType.GRID_SHARD, cut, reduction=reduction, row_state=row_state, tier=tier)


_GENERATORS: dict[ShardingType, Callable[..., ParameterShardingGenerator]] = {
    ShardingType.DATA_PARALLEL: data_parallel,
    ShardingType.TABLE_WISE: table_wise,
    ShardingType.ROW_WISE: row_wise,
    ShardingType.COLUMN_WISE: column_wise,
    ShardingType.TABLE_ROW_WISE: table_row_wise,
    ShardingType.TABLE_COLUMN_WISE: table_column_wise,
    ShardingType.GRID_SHARD: grid_shard,
}


def get_sharding_constructor_from_type(sharding_type: ShardingType) -> Callable[..., ParameterShardingGenerator]:
    """The function of this module that makes generators of this type."""
    return _GENERATORS[sharding_type]


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[Any]]:
    """The default sharder of each class of module that has one."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: ModuleSharder[Any] | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """The same generator for every table of a collection, as `construct_module_sharding_plan` takes them.

    Raises:
        TypeError: the module has no sharder, or another one than `sharder`.
    """
    found = require_sharder(module, sharder)
    return dict.fromkeys(found.shardable_parameters(module), parameter_sharding_generator)


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: ModuleSharder[Any] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one collection from a generator for each of its tables.

    Args:
        module: the collection.
        per_param_sharding: table name -> generator, in the order in which the plan lists them.
        sharder: what will shard the module; default that of `get_default_sharders` for its class.
        local_size: ranks of a host; default `get_local_size(world_size)`.
        world_size: default that of the default process group.
        device_type: "cpu" or "cuda"; default "cuda" where there is one.

    Raises:
        ValueError: the names do not match the module's tables, `world_size` is missing without a process group, or a
            generator cannot cut its table.
        TypeError: the module has no sharder, or another one than `sharder`.

    Example:
        >>> configs = [EmbeddingBagConfig(10, 4, name, feature_names=[name]) for name in ("item", "user")]
        >>> where = {"item": row_wise(), "user": table_wise(rank=1)}
        >>> tables = EmbeddingBagCollection(configs)
        >>> plan = construct_module_sharding_plan(tables, where, local_size=2, world_size=2, device_type="cpu")
        >>> {name: (table.sharding_type, table.ranks) for name, table in plan.items()}
        {'item': ('row_wise', [0, 1]), 'user': ('table_wise', [1])}
    """
    if world_size is None:
        if not dist.is_initialized():
            raise ValueError("world_size is missing: there is no process group to take it from")
        world_size = dist.get_world_size()
    if local_size is None:
        local_size = get_local_size(world_size)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    found = require_sharder(module, sharder)
    params = found.shardable_parameters(module)
    if set(params) != set(per_param_sharding):
        missing, unknown = set(params) - set(per_param_sharding), set(per_param_sharding) - set(params)
        raise ValueError(f"the plan misses tables {sorted(missing)} and names unknown tables {sorted(unknown)}")
    plan = EmbeddingModuleShardingPlan()
    for name, generate in per_param_sharding.items():
        try:
            plan[name] = generate(params[name], local_size, world_size, device_type, found)
        except ValueError as error:
            # a generator does not know its table's name
            unnamed = str(error).removeprefix("table '': ")
            raise ValueError(f"table {name!r}: {unnamed}") from error
    return plan


def calculate_shard_sizes_and_offsets(
    tensor: Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
    device_memory_sizes: Sequence[int] | None = None,
    num_buckets: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes [rows, columns] and offsets [row, column] of each shard of a table, as a planner enumerates them.

    Column shards are as `layout.split_columns` cuts them, at least `col_wise_shard_dim` wide (default 32; TorchRec's is
    128). With `device_memory_sizes` rows go to ranks by these shares, what is left to the last.

    Raises:
        ValueError: the sharding type is unknown, or the buckets do not divide the rows or are fewer than the ranks.
    """
    if sharding_type not in {kind.value for kind in ShardingType}:
        raise ValueError(f"sharding_type {sharding_type!r} is not one of {[kind.value for kind in ShardingType]}")
    rows, dim = tensor.shape
    kind = ShardingType(sharding_type)
    if kind is ShardingType.DATA_PARALLEL:
        return [[rows, dim]] * world_size, [[0, 0]] * world_size
    heights, widths = [rows], [dim]
    if kind is ShardingType.ROW_WISE:
        heights = layout.split_rows(rows, world_size)
        if device_memory_sizes:
            heights = _by_shares(rows, device_memory_sizes, num_buckets)
        elif num_buckets:
            heights = _buckets(rows, world_size, num_buckets)
    elif kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        heights = layout.split_rows(rows, local_world_size)
    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD):
        widths = layout.split_columns(dim, col_wise_shard_dim or layout.MIN_COLUMNS)
    sizes = [[height, width] for width in widths for height in heights]
    offsets = [[sum(heights[:r]), sum(widths[:c])] for c in range(len(widths)) for r in range(len(heights))]
    return sizes, offsets


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Where a rank computes: "rank:3/cuda:1" is rank 3, the second of a host of two."""
    number = "" if compute_device == "cpu" else f":{rank % local_size}"
    return f"rank:{rank}/{compute_device}{number}"


def placement_helper(device_type: str, index: int = 0, rank: int = 0) -> str:
    """A device by its number, for inference in one process: the CPU is rank 0's whatever the rank."""
    return "rank:0/cpu" if device_type == "cpu" else f"rank:{rank}/{device_type}:{index}"


def _generator(
    kind: ShardingType,
    cut: Callable[[int, int, Hosts], list[Shard]],
    kernel: str | None = None,
    devices: Sequence[str] | None = None,
    placements: Sequence[str] | None = None,
    *,
    reduction: str | None = None,
    row_state: str | None = None,
    tier: Tier | None = None,
) -> ParameterShardingGenerator:
    """The generator of a cut: (rows, dim, hosts) -> shards.

    `devices` are the shards' device types where they are not the plan's, `placements` those of a quantized table.
    """
    quantized = kernel is not None and kernel.startswith("quant")

    def generate(
        param: nn.Parameter, local_size: int, world_size: int, device_type: str, sharder: ModuleSharder[Any]
    ) -> ParameterSharding:
        if local_size < 1 or world_size % local_size:
            raise ValueError(f"hosts of local_size {local_size} do not make up a world_size of {world_size}")
        rows, dim = param.shape
        shards = cut(rows, dim, [layout.ranks_of(host, local_size) for host in range(world_size // local_size)])
        for shard in shards:
            if not (0 <= shard.rank < world_size or quantized):
                raise ValueError(f"{kind.value}: rank {shard.rank} is not one of {world_size}")
        types = devices or [device_type] * len(shards)
        where = [placement(one, shard.rank, local_size) for one, shard in zip(types, shards, strict=True)]
        cuts = [
            ShardMetadata([s.rows[0], s.cols[0]], [s.rows[1] - s.rows[0], s.cols[1] - s.cols[0]], at)
            for s, at in zip(shards, placements if placements and quantized else where, strict=True)
        ]
        ranks, spec = [shard.rank for shard in shards], EnumerableShardingSpec(cuts)
        chosen = kernel or _quantized(sharder, kind, device_type) or _trained(sharder, param, tier)
        return ParameterSharding(kind.value, chosen, ranks, spec, reduction=reduction, row_state=row_state, tier=tier)

    return generate


def _quantized(sharder: ModuleSharder[Any], kind: ShardingType, device_type: str) -> str | None:
    """The kernel that the sharder of quantized tables offers first; None of one for tables that train."""
    offered = sharder.compute_kernels(kind.value, device_type)
    return next((kernel for kernel in offered if kernel.startswith("quant")), None)


def _trained(sharder: ModuleSharder[Any], param: nn.Parameter, tier: Tier | None) -> str:
    """The kernel of a cut table that trains: "fused" with a tier or an optimizer for its backward, else "dense"."""
    marked = tier is not None or hasattr(param, "_in_backward_optimizers") or optimizer_of(param) is not None
    return "fused" if marked or name_an_optimizer(getattr(sharder, "fused_params", None)) else "dense"


def _host(hosts: Hosts, index: int) -> Sequence[int]:
    if not 0 <= index < len(hosts):
        raise ValueError(f"host {index} is not one of {len(hosts)} of {len(hosts[0])} ranks each")
    return hosts[index]


def _fitted(size: int, asked: Sequence[int], who: str, what: str) -> list[int]:
    """Sizes cut off where the table ends."""
    if sum(asked) < size:
        raise ValueError(f"{who} {list(asked)} hold {sum(asked)} of {size} {what}")
    found: list[int] = []
    for one in asked:
        found.append(min(one, size - sum(found)))
    return found


def _buckets(rows: int, ranks: int, buckets: int) -> list[int]:
    _require_buckets(rows, buckets)
    if buckets < ranks:
        raise ValueError(f"row_wise: {buckets} buckets are fewer than {ranks} ranks: a bucket stays on one rank")
    each, more = divmod(buckets, ranks)
    return [rows // buckets * (each + (rank < more)) for rank in range(ranks)]


def _by_shares(rows: int, shares: Sequence[int], buckets: int | None) -> list[int]:
    buckets = rows if buckets is None else buckets
    _require_buckets(rows, buckets)
    found = [int(buckets * (share / sum(shares))) * (rows // buckets) for share in shares[:-1]]
    return [*found, rows - sum(found)]


def _require_buckets(rows: int, buckets: int) -> None:
    if buckets < 1 or rows % buckets:
        raise ValueError(f"row_wise: {buckets} buckets do not divide {rows} rows")
