"""Which options TorchRec 1.8.0 offers for a table: its types, kernels and cuts, whether our engine runs them or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from ..topology import Topology
from .constants import MIN_CW_DIM
from .sharding_option import PartitionByType

_TYPES = (
    "data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard",
)  # fmt: skip
_PLAIN_TYPES = ("data_parallel", "table_wise", "column_wise", "row_wise")
# kernels that nobody gets without asking
GUARDED_KERNELS = ("key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table")
# types that a table with a feature processor gets only if a constraint asks
GUARDED_TYPES_OF_PROCESSED = ("row_wise", "table_row_wise", "grid_shard")
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
        return [one for one in offered if one in asked]
    guarded = ("grid_shard", *(GUARDED_TYPES_OF_PROCESSED if processed else ()))
    return [one for one in offered if one not in guarded]


def allowed_kernels(offered: Sequence[str], asked: Sequence[str] | None, has_ssd: bool) -> list[str]:
    """The offered kernels that a constraint leaves; "dense" not beside "fused", "key_value" not without a disk."""
    found = [one for one in offered if (one in asked if asked else one not in GUARDED_KERNELS)]
    unwanted = [*(() if has_ssd else ("key_value",)), *(("dense",) if "fused" in found else ())]
    return [one for one in found if one not in unwanted]


def partition_by(sharding_type: str) -> PartitionByType:
    """What a partitioner gives to options of a type.

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
