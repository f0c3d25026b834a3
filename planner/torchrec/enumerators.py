"""TorchRec's enumerator: the sharding options of every table of a module.

Which options TorchRec 1.8.0 offers for a table is here too: its types, kernels and cuts, whether our engine runs them
or not.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from ..constants import MIN_CW_DIM, POOLING_FACTOR
from ..constraints import ParameterConstraints
from ..layout import TIERED_KERNELS
from ..topology import Topology
from .perf_estimators import EmbeddingPerfEstimator
from .sharding_option import PartitionByType, Shard, SharderDataMap, ShardingOption
from .storage_estimators import EmbeddingStorageEstimator
from .types import Enumerator, ShardEstimator
from .utils import build_sharder_data_map, sharder_name

_TYPES = (
    "data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard",
)  # fmt: skip
_PLAIN_TYPES = ("data_parallel", "table_wise", "column_wise", "row_wise")
# kernels that nobody gets without asking
GUARDED_KERNELS = ("key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table")
# types that a table with a feature processor gets only if a constraint asks
GUARDED_TYPES_OF_PROCESSED = frozenset({"row_wise", "table_row_wise", "grid_shard"})
_PARTITION_BY = {
    "table_wise": PartitionByType.DEVICE,
    "column_wise": PartitionByType.DEVICE,
    "table_row_wise": PartitionByType.HOST,
    "table_column_wise": PartitionByType.HOST,
    "row_wise": PartitionByType.UNIFORM,
    "data_parallel": PartitionByType.UNIFORM,
    "grid_shard": PartitionByType.MULTI_HOST,
}
# kernels of all tables but replicated ones, on a GPU; elsewhere there is the first alone
_KERNELS = ("fused", "fused_uvm", "fused_uvm_caching", *GUARDED_KERNELS)


def sharding_types(pooled: bool, compute_device: str) -> list[str]:
    """Those that TorchRec's sharders of bag collections (`pooled`) and of sequence collections offer."""
    if not pooled:
        return list(_PLAIN_TYPES)
    if compute_device == "mtia":
        return list(_TYPES[1:])
    return list(_TYPES if compute_device == "cuda" else _TYPES[:4])


def compute_kernels(sharding_type: str, compute_device: str) -> list[str]:
    """Those that TorchRec's sharders offer for a type."""
    if sharding_type == "data_parallel":
        return ["dense"]
    return list(_KERNELS if compute_device == "cuda" else _KERNELS[:1])


def allowed_types(offered: Sequence[str], asked: Sequence[str] | None, processed: bool = False) -> list[str]:
    """The offered types that a constraint leaves: all but the guarded ones where it says nothing."""
    if asked:
        return [kind for kind in offered if kind in asked]
    guarded = ("grid_shard", *(GUARDED_TYPES_OF_PROCESSED if processed else ()))
    return [kind for kind in offered if kind not in guarded]


def allowed_kernels(offered: Sequence[str], asked: Sequence[str] | None, has_ssd: bool) -> list[str]:
    """The offered kernels that a constraint leaves; "dense" not beside "fused", "key_value" not without a disk."""
    kernels = [kernel for kernel in offered if (kernel in asked if asked else kernel not in GUARDED_KERNELS)]
    unwanted = [*(() if has_ssd else ("key_value",)), *(("dense",) if "fused" in kernels else ())]
    return [kernel for kernel in kernels if kernel not in unwanted]


def tiered(sharding_type: str, asked: ParameterConstraints) -> list[str]:
    """The kernels with rows below the device that a constraint names: ours run them on a CPU too, for cut tables."""
    return [
        kernel
        for kernel in TIERED_KERNELS
        if sharding_type != "data_parallel" and kernel in (asked.compute_kernels or ())
    ]


def partition_by(sharding_type: str) -> PartitionByType:
    """The unit in which a partitioner places options of a type.

    Raises:
        ValueError: the type is unknown.
    """
    if sharding_type not in _PARTITION_BY:
        raise ValueError(f"sharding type {sharding_type!r} is not one of {', '.join(_PARTITION_BY)}")
    return _PARTITION_BY[sharding_type]


def cuts(
    sharding_type: str, rows: int, columns: int, world_size: int, group: int, *,
    min_partition: int | None = None, shares: Sequence[int] | None = None, buckets: int | None = None,
) -> tuple[list[int], list[int], int]:  # fmt: skip
    """Widths of the blocks of columns, rows of the shards of each block, and how many copies there are.

    Args:
        group: ranks of a host, or of what fast links join.
        shares: of the rows of a row-wise table, one for each rank; equal by default.
        buckets: rows are cut into that many, and none is divided.
    """
    partition_by(sharding_type)
    widths, heights = [columns], [rows]
    if sharding_type in ("column_wise", "table_column_wise", "grid_shard"):
        width = column_width(columns, min_partition)
        widths = [width] * (columns // width)
    if sharding_type == "row_wise":
        heights = row_cuts(rows, world_size, shares, buckets)
    elif sharding_type in ("table_row_wise", "grid_shard"):
        heights = row_cuts(rows, group)
    return widths, heights, world_size if sharding_type == "data_parallel" else 1


def rectangles(
    widths: Sequence[int], heights: Sequence[int], copies: int = 1
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Sizes and offsets, in rows and columns, of the shards of `cuts`: block by block, in each from the top."""
    tops, lefts = list(accumulate(heights, initial=0)), list(accumulate(widths, initial=0))
    return [
        ((height, width), (top, left))
        for left, width in zip(lefts, widths, strict=False)
        for top, height in zip(tops, heights, strict=False)
    ] * copies


def row_shares(topology: Topology) -> list[int] | None:
    """By which ranks get rows of row-wise tables where their memory differs, None where it does not."""
    memory, given = ("ddr_cap" if topology.compute_device == "cpu" else "hbm_cap"), topology.custom_topology_data
    return given.get_data(memory) if given and given.has_data(memory) else None


def column_width(columns: int, min_partition: int | None = None) -> int:
    """Columns of a column shard: the fewest of at least `min_partition` that divide the table and by 4, or all."""
    fits = (width for width in range(min_partition or MIN_CW_DIM, columns) if columns % width == 0 and width % 4 == 0)
    return next(fits, columns)


def row_cuts(rows: int, parts: int, shares: Sequence[int] | None = None, buckets: int | None = None) -> list[int]:
    """Rows of each part: equal but for the last ones, or by shares; in whole buckets where there are buckets.

    Raises:
        ValueError: the rows do not divide into the buckets, or there are fewer buckets than parts.
    """
    if buckets and (rows % buckets or buckets < parts):
        raise ValueError(f"{rows} rows in {buckets} buckets cannot be cut into {parts} parts of whole buckets")
    size = rows // buckets if buckets else 1
    if shares:
        total = sum(shares)
        first = [int((buckets or rows) * (share / total)) * size for share in shares[:-1]]
        return [*first, rows - sum(first)]
    if buckets:
        each, more = divmod(buckets, parts)
        return [size * (each + (part < more)) for part in range(parts)]
    block = math.ceil(rows / parts)
    return [max(0, min(block, rows - block * part)) for part in range(parts)]


class EmbeddingEnumerator(Enumerator):
    """Lists, for every table of the modules that a sharder knows, each type and kernel that is offered and allowed.

    Args:
        topology: machines.
        batch_size: of one rank.
        constraints: by table name.
        estimator: one or several that write costs; by default TorchRec's of time and of storage.
        use_exact_enumerate_order: modules in the order in which they stand; by default the last child comes first.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._constraints = constraints or {}
        self._in_order = bool(use_exact_enumerate_order)
        if estimator is None:
            estimator = [
                EmbeddingPerfEstimator(topology, constraints),
                EmbeddingStorageEstimator(topology, constraints),
            ]
        self._estimators = estimator if isinstance(estimator, list) else [estimator]
        self._shares = row_shares(topology)
        self._has_ssd = any(device.storage.ssd > 0 for device in topology.devices)
        self._sharder_map: dict[str, Any] = {}
        self._sharder_data_map: SharderDataMap = {}
        self._last: tuple[Any, list[Any], list[ShardingOption]] | None = None

    @property
    def sharder_map(self) -> dict[str, Any]:
        """The sharders given last, by their modules' class as `utils.sharder_name` spells it."""
        return self._sharder_map

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The options listed last."""
        return None if self._last is None else self._last[2]

    def enumerate(self, module: Any, sharders: list[Any]) -> list[ShardingOption]:
        """The options of every table, with their estimates; always in the same order.

        Raises:
            RuntimeError: constraints leave a table none.
        """
        if self._last is not None and self._last[0] is module and self._last[1] == sharders:
            return copy.deepcopy(self._last[2])
        self._sharder_map = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        self._sharder_data_map = build_sharder_data_map(self._sharder_map)
        options = [
            option
            for path, part, sharder in self._shardable(module)
            for name, tensor in sharder.shardable_parameters(part).items()
            for option in self._options_of(name, tensor, path, part, sharder)
        ]
        self.populate_estimates(options)
        self._last = (module, list(sharders), copy.deepcopy(options))
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Writes estimates into the options."""
        for estimator in self._estimators:
            estimator.estimate(sharding_options, self._sharder_data_map)

    def _shardable(self, module: Any) -> Iterator[tuple[str, Any, Any]]:
        """Path, module and sharder of the modules that sharders know; what is within them is theirs."""
        waiting = [("", module)]
        while waiting:
            path, part = waiting.pop(0 if self._in_order else -1)
            sharder = self._sharder_map.get(sharder_name(type(part)))
            if sharder is not None:
                yield path, part, sharder
            else:
                waiting += [(f"{path}.{name}" if path else name, child) for name, child in part.named_children()]

    def _options_of(self, name: str, tensor: Any, path: str, module: Any, sharder: Any) -> list[ShardingOption]:
        constraint, device = self._constraints.get(name), self._topology.compute_device
        asked = constraint or ParameterConstraints(pooling_factors=[POOLING_FACTOR])
        if asked.device_group and asked.device_group != device:
            return []
        processed = "FeatureProcessedEmbeddingBagCollection" in sharder_name(type(module))
        types = allowed_types(sharder.sharding_types(device), asked.sharding_types, processed)
        pairs = [
            (kind, kernel)
            for kind in types
            for kernel in allowed_kernels(_offered(sharder, kind, device, asked), asked.compute_kernels, self._has_ssd)
        ]
        if not pairs:
            kinds = sharder.sharding_types(device)
            offer = ", ".join(f"{kind}: {sharder.compute_kernels(kind, device)}" for kind in kinds)
            raise RuntimeError(
                f"No available sharding type and compute kernel combination for {name!r}: on {device},"
                f" {type(sharder).__name__} offers {offer}; the constraint allows"
                f" sharding_types={asked.sharding_types}, compute_kernels={asked.compute_kernels}"
            )
        pooled, buckets = ShardingOption.module_pooled(module, path), _buckets(name, module)
        rows, columns = tensor.shape
        world, group = self._topology.world_size, self._topology.intra_group_size
        made = []
        for kind, kernel in pairs:
            cut = cuts(
                kind, rows, columns, world, group,
                min_partition=asked.min_partition, shares=self._shares, buckets=buckets,
            )  # fmt: skip
            option = ShardingOption(
                name=name,
                tensor=tensor,
                module=(path, module),
                input_lengths=asked.pooling_factors,
                batch_size=self._batch_size,
                sharding_type=kind,
                partition_by=partition_by(kind).value,
                compute_kernel=kernel,
                shards=[Shard(list(size), list(offset)) for size, offset in rectangles(*cut)],
                cache_params=copy.deepcopy(asked.cache_params),
                enforce_hbm=asked.enforce_hbm,
                stochastic_rounding=asked.stochastic_rounding,
                bounds_check_mode=asked.bounds_check_mode,
                dependency=_tower(name, path, module),
                is_pooled=pooled,
                feature_names=asked.feature_names,
                output_dtype=asked.output_dtype,
                key_value_params=copy.deepcopy(asked.key_value_params),
                tier=asked.tier,
            )
            made.append(option)
        return made


def get_partition_by_type(sharding_type: str) -> str:
    """The value of `PartitionByType` of a sharding type.

    Raises:
        ValueError: the type is unknown.
    """
    return partition_by(sharding_type).value


def _offered(sharder: Any, kind: str, device: str, asked: ParameterConstraints) -> list[str]:
    """The kernels of a sharder: one that offers "fused" runs it with rows below the device as well."""
    offered = list(sharder.compute_kernels(kind, device))
    return [*offered, *(k for k in tiered(kind, asked) if "fused" in offered and k not in offered)]


def _buckets(name: str, module: Any) -> int | None:
    """Buckets of the rows of a virtual table."""
    configs = getattr(module, "embedding_bag_configs", None) or getattr(module, "embedding_configs", None)
    for config in configs() if configs else ():
        if config.name == name and getattr(config, "use_virtual_table", False):
            return getattr(config, "total_num_buckets", None)
    return None


def _tower(name: str, path: str, module: Any) -> str | None:
    """The label that the tables of a tower share: they are placed on one host."""
    kind = type(module).__name__
    if kind == "EmbeddingTower":
        return path
    if kind != "EmbeddingTowerCollection":
        return None
    for number, tower in enumerate(module.towers):
        if any(name in parameter.split(".") for parameter, _ in tower.named_parameters()):
            return f"{path}.tower_{number}"
    raise RuntimeError(f"table {name!r} is in none of the towers of {path!r}")
