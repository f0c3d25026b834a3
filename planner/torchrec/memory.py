"""TorchRec 1.8.0's formulas for the bytes of a shard: the one place where they stand; `torchrec_formulas` has its time.

A shard has its part of the rows, of the optimizer's states and of the cache, and the batches that are there at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..hardware import Storage
from .constants import BIGINT_DTYPE, KV_CACHING_RATIO, UVM_CACHING_RATIO
from .formulas import Lookups
from .sharding_option import PipelineType, StorageUsageType

# kernels whose rows are on disk or made on demand, and all of which a cache in HBM has a part
_ON_DEMAND = ("key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table")
_CACHED = ("fused_uvm_caching", "quant_uvm_caching", *_ON_DEMAND)
_CUT_BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")


@dataclass(frozen=True)
class Keeping:
    """How a table is kept in memory.

    Args:
        rows, columns: of the whole table.
        kernel: by value.
        usage: where the tables of its sharder lie.
        optimizer: class name of the optimizer in its backward, None without one.
        caching_ratio: share of the rows that a cache holds.
        kv_l1_bytes, kv_caching_ratio: the most that the cache of a table on disk takes, and its share of the rows.
        virtual: rows are made on demand.
        prefetch_passes: of a pipeline that fetches cached rows ahead.
    """

    rows: int
    columns: int
    kernel: str
    usage: StorageUsageType = StorageUsageType.BASE
    optimizer: str | None = None
    caching_ratio: float = UVM_CACHING_RATIO
    kv_l1_bytes: int = 0
    kv_caching_ratio: float = KV_CACHING_RATIO
    virtual: bool = False
    prefetch_passes: int | None = None


def shard_storage(
    sharding_type: str, compute_device: str, world_size: int, group: int, lookups: Lookups, kept: Keeping,
    rows: int, columns: int, *,
    pipeline: PipelineType = PipelineType.NONE, at_peak: bool = False, is_inference: bool = False,
) -> Storage:  # fmt: skip
    """Bytes of a shard of `rows` by `columns`: rows, optimizer, cache, and the batches that are there at once."""

    def rows_and_states(table_bytes: int, cache: float | None = None) -> int:
        whole = sharding_type == "data_parallel"
        mine = table_bytes if whole else math.ceil(table_bytes * (rows * columns) / (kept.rows * kept.columns))
        if is_inference:
            return mine
        states = math.ceil(mine * optimizer_multiplier(kept.optimizer, kept.columns))
        return mine + states + (0 if cache is None else math.ceil(rows * (4 + cache * 16)))

    on_device, on_host = _table_bytes(compute_device, lookups.element_bytes, kept)
    cached = kept.kernel in _CACHED
    ratio = kept.caching_ratio if cached else None
    hbm = rows_and_states(round(on_host * kept.caching_ratio) if cached else on_device, ratio)
    ddr = rows_and_states(on_host)
    ssd = rows_and_states(on_device, ratio) + ddr if kept.kernel == "key_value" else 0
    if kept.kernel in _ON_DEMAND or kept.virtual:
        rows_in_cache = kept.rows * kept.kv_caching_ratio * lookups.element_bytes * kept.columns
        hbm, ddr = min(kept.kv_l1_bytes, math.ceil(rows_in_cache)), 0

    batch = batch_bytes(sharding_type, world_size, group, lookups, rows, columns)
    if compute_device == "cpu":
        return Storage(0, ddr + (0 if is_inference else sum(batch)), ssd)
    fetched = batch[0] if cached else 0
    at_once = calculate_pipeline_io_cost(*batch, fetched, pipeline, kept.prefetch_passes, at_peak, is_inference)
    return Storage(hbm + at_once, ddr, ssd)


def batch_bytes(
    sharding_type: str, world_size: int, group: int, lookups: Lookups, rows: int, columns: int
) -> tuple[int, int]:
    """Ids and rows of a batch."""
    if sharding_type in _CUT_BY_ROWS and not rows * columns:
        return 0, 0
    among = {"row_wise": world_size, "table_row_wise": group, "grid_shard": group}.get(sharding_type, 1)
    batches = 1 if sharding_type == "data_parallel" else world_size
    outputs = lookups.outputs if lookups.pooled else lookups.outputs / among
    return (
        math.ceil(lookups.ids / among * batches * BIGINT_DTYPE),
        math.ceil(outputs * batches * columns * lookups.output_bytes),
    )


def calculate_pipeline_io_cost(
    input_size: int,
    output_size: int,
    prefetch_size: int,
    pipeline_type: PipelineType,
    multipass_prefetch_max_pass: int | None,
    count_ephemeral_storage_cost: bool = False,
    is_inference: bool = False,
) -> int:
    """Bytes of the batches that a pipeline has in memory at once, from those of one: its ids, its rows, and its ids
    again where they are fetched ahead."""
    if is_inference:
        return 0
    rows = output_size if count_ephemeral_storage_cost else 0
    # by value: TorchRec's own enum is another
    if pipeline_type.value == PipelineType.TRAIN_SPARSE_DIST.value:
        return 2 * input_size + rows
    if pipeline_type.value == PipelineType.TRAIN_PREFETCH_SPARSE_DIST.value:
        return 3 * input_size + int((1 + 6 / (multipass_prefetch_max_pass or 1)) * prefetch_size) + rows
    return input_size + output_size


def _table_bytes(compute_device: str, element_bytes: float, kept: Keeping) -> tuple[int, int]:
    """Bytes of the whole table in the memory of the device and of the host."""
    size = int(kept.rows * kept.columns * element_bytes)
    host = compute_device == "cpu"
    if kept.usage == StorageUsageType.BASE_QUANT:
        size += kept.rows * 4
        host = host or compute_device == "mtia" or kept.kernel in ("quant_uvm", "quant_uvm_caching")
    elif kept.usage == StorageUsageType.BASE:
        host = host or kept.kernel in ("fused_uvm", "fused_uvm_caching")
    return (0, size) if host else (size, 0)


def optimizer_multiplier(optimizer: str | None, columns: int) -> float:
    """Bytes of its states over those of the rows. TorchRec knows three; any other has one number for each element."""
    if optimizer is None:
        return 0
    return {"SGD": 0, "Adam": 2, "RowWiseAdagrad": 1 / columns}.get(optimizer, 1)


def optimizer_name(tensor: Any) -> str | None:
    """Class name of the optimizer in a table's backward, None without one."""
    kind = getattr(tensor, "_optimizer_classes", [None])[0]
    return None if kind is None else kind.__name__
