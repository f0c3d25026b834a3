"""TorchRec 1.8.0's formulas for the time and memory of a shard: the one place where they stand.

`shard_estimators` applies them to sharding options, `cost_torchrec` to tables and ways. Floating point is done in
TorchRec's order: sizes are rounded up, where an error of the last bit would become a byte.

Letters: W ranks, G ranks that a fast link joins, D columns and H rows of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .constants import (
    BATCHED_COPY_PERF_FACTOR,
    BIGINT_DTYPE,
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    FULL_BLOCK_EMB_DIM,
    HALF_BLOCK_PENALTY,
    KV_CACHING_RATIO,
    QUARTER_BLOCK_PENALTY,
    UVM_CACHING_RATIO,
    WEIGHTED_KERNEL_MULTIPLIER,
)
from .hardware import CollectiveType, Perf, Storage
from .sharding_option import PipelineType, StorageUsageType
from .topology import Topology

# kernels whose rows a cache in HBM holds a part of, and those of them whose rows are not on the host
_ON_DEMAND = ("key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table")
_CACHED = ("fused_uvm_caching", "quant_uvm_caching", *_ON_DEMAND)
_CUT_BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")


@dataclass(frozen=True)
class Lookups:
    """What a batch of one rank asks of a table, and in which numbers of bytes.

    Args:
        ids: ids that it brings.
        outputs: rows that it gets back, before TorchRec divides them among ranks.
        pooled, weighted: as `Table`; a feature processor counts as weights.
        element_bytes: of the table.
        all_to_all, reduce_scatter: bytes of an element exchanged, forward and backward.
        output_bytes: of an element of the output, in memory.
        missed: lookups of a global batch that miss the cache, where that is known.
    """

    ids: float
    outputs: float
    pooled: bool
    weighted: bool
    element_bytes: float
    all_to_all: tuple[float, float]
    reduce_scatter: tuple[float, float]
    output_bytes: float
    missed: float = 0.0


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


def lookups_of_batch(
    pooling_factors: Sequence[float], num_poolings: Sequence[float], batch_sizes: Sequence[int], pooled: bool
) -> tuple[float, float]:
    """Ids that a rank's batch brings to a table, and rows that it gets back."""
    features = list(zip(pooling_factors, num_poolings, batch_sizes, strict=True))
    ids = sum(length * count * samples for length, count, samples in features)
    return ids, sum(min(1.0, length) * count * samples for length, count, samples in features) if pooled else ids


# ---- time


@dataclass(frozen=True)
class _Sent:
    """What a shard of `rows` by `columns`, read at `bandwidth`, sends forward and gets backward, in bytes."""

    rows: int
    columns: int
    bandwidth: float
    forward: float
    backward: float


@dataclass(frozen=True)
class _Path:
    """How ids reach a shard and how rows come back.

    Args:
        among: ranks that a batch's ids are divided among.
        batches: ranks whose batches it serves.
        blocks: narrow rows cost more.
        scatters: does it send back partial sums, whose elements have a size of their own? (of pooled rows or not)
        comms: milliseconds forward and backward.
    """

    among: Callable[[Topology], int]
    batches: Callable[[Topology], int]
    blocks: bool
    scatters: Callable[[bool], bool]
    comms: Callable[[Topology, Lookups, _Sent], tuple[float, float]]


def shard_perf(
    topology: Topology, sharding_type: str, lookups: Lookups, bandwidth: float, rows: int, columns: int,
    is_inference: bool = False,
) -> Perf:  # fmt: skip
    """Milliseconds of a shard of `rows` by `columns`, which its kernel reads at `bandwidth` bytes per millisecond."""
    path = PATHS[sharding_type]
    among, batches = path.among(topology), path.batches(topology)
    replicated = sharding_type == "data_parallel"

    id_bytes = math.ceil(lookups.ids / among * batches * BIGINT_DTYPE)
    row_bytes = lookups.ids / among * batches * (max(columns, 32) if path.blocks else columns) * lookups.element_bytes
    outputs = lookups.outputs if lookups.pooled else lookups.outputs / among
    elements = outputs * batches * columns
    sizes = lookups.reduce_scatter if path.scatters(lookups.pooled) else lookups.all_to_all
    forward, backward = (elements * (lookups.element_bytes if replicated else size) for size in sizes)

    penalty = block_penalty(columns) if path.blocks else 1.0
    read = id_bytes * 2 if lookups.weighted else id_bytes
    fwd_compute = (read + row_bytes + forward) * penalty / bandwidth
    bwd_compute = fwd_compute * topology.bwd_compute_multiplier
    if lookups.weighted:
        bwd_compute *= topology.weighted_feature_bwd_compute_multiplier
        bwd_compute += fwd_compute * WEIGHTED_KERNEL_MULTIPLIER
    fwd_comms, bwd_comms = path.comms(topology, lookups, _Sent(rows, columns, bandwidth, forward, backward))
    prefetch = 0.0 if replicated else lookups.missed / among * columns * lookups.element_bytes
    # the whole batch's ids, whatever they are divided among
    sent_bytes = 0 if replicated else math.ceil(lookups.ids * batches * BIGINT_DTYPE)
    return Perf(
        fwd_compute=fwd_compute,
        fwd_comms=fwd_comms,
        bwd_compute=0.0 if is_inference else bwd_compute,
        bwd_comms=0.0 if is_inference else bwd_comms,
        input_dist_comms=sent_bytes / _speed(topology, CollectiveType.ALL_TO_ALL),
        prefetch_compute=prefetch / topology.hbm_to_ddr_mem_bw,
    )


def block_penalty(columns: int) -> float:
    """How much slower a lookup of rows this narrow is."""
    if columns >= FULL_BLOCK_EMB_DIM:
        return 1.0
    return HALF_BLOCK_PENALTY if columns >= FULL_BLOCK_EMB_DIM // 2 else QUARTER_BLOCK_PENALTY


def _speed(topology: Topology, kind: CollectiveType) -> float:
    return topology.comms_bandwidths.get_bw(
        local_world_size=topology.local_world_size, world_size=topology.world_size, collective_type=kind
    )


def _all_to_all(topology: Topology, lookups: Lookups, sent: _Sent) -> tuple[float, float]:
    speed = _speed(topology, CollectiveType.ALL_TO_ALL)
    return sent.forward / speed, sent.backward / speed


def _scatter_over_all(topology: Topology, lookups: Lookups, sent: _Sent) -> tuple[float, float]:
    gather = sent.backward / _speed(topology, CollectiveType.ALL_GATHER)
    return sent.forward / _speed(topology, CollectiveType.REDUCE_SCATTER), gather + _copies(sent)


def _scatter_in_group(topology: Topology, lookups: Lookups, sent: _Sent) -> tuple[float, float]:
    """Sums within the group, then an all-to-all between groups; the way back the other way round."""
    links, group = topology.comms_bandwidths, topology.intra_group_size
    within = {"local_world_size": min(group, topology.local_world_size), "world_size": group}
    scatter = sent.forward / links.get_bw(**within, collective_type=CollectiveType.REDUCE_SCATTER)
    gather = sent.backward / links.get_bw(**within, collective_type=CollectiveType.ALL_GATHER)
    groups = max(1, topology.world_size // group)
    between = [0.0, 0.0]
    if groups > 1:
        speed = links.get_bw(local_world_size=1, world_size=groups, collective_type=CollectiveType.ALL_TO_ALL)
        between = [lookups.outputs * groups * sent.columns * size / speed for size in lookups.all_to_all]
    return scatter + between[0], between[1] + gather + _copies(sent)


def _gradients(topology: Topology, lookups: Lookups, sent: _Sent) -> tuple[float, float]:
    """An all-reduce of the gradients of all rows, whether they were looked up or not, and an optimizer over them."""
    table = sent.rows * sent.columns * lookups.element_bytes
    nodes = min(topology.world_size / topology.local_world_size, 2)
    reduce = table * (2 * nodes - 1) / nodes / _speed(topology, CollectiveType.ALL_REDUCE)
    if topology.world_size > 2 * topology.local_world_size:
        reduce *= 2
    return 0.0, reduce + table * DP_ELEMENTWISE_KERNELS_PERF_FACTOR / sent.bandwidth


def _copies(sent: _Sent) -> float:
    return sent.backward * BATCHED_COPY_PERF_FACTOR / sent.bandwidth


def _one(topology: Topology) -> int:
    return 1


def _world(topology: Topology) -> int:
    return topology.world_size


def _group(topology: Topology) -> int:
    return topology.intra_group_size


_WHOLE_ROWS = _Path(_one, _world, blocks=True, scatters=lambda pooled: False, comms=_all_to_all)
_ROWS_OF_A_GROUP = _Path(_group, _world, blocks=False, scatters=lambda pooled: True, comms=_scatter_in_group)
PATHS = {
    "table_wise": _WHOLE_ROWS,
    "column_wise": _WHOLE_ROWS,
    "table_column_wise": _WHOLE_ROWS,
    "row_wise": _Path(_world, _world, blocks=False, scatters=lambda pooled: pooled, comms=_scatter_over_all),
    "table_row_wise": _ROWS_OF_A_GROUP,
    "grid_shard": _ROWS_OF_A_GROUP,
    "data_parallel": _Path(_one, _one, blocks=False, scatters=lambda pooled: False, comms=_gradients),
}


# ---- memory


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
        states = math.ceil(mine * _optimizer_multiplier(kept.optimizer, kept.columns))
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

    batch = _batch_bytes(sharding_type, world_size, group, lookups, rows, columns)
    if compute_device == "cpu":
        return Storage(0, ddr + (0 if is_inference else sum(batch)), ssd)
    at_once = 0 if is_inference else _batches_at_once(batch, cached, pipeline, kept.prefetch_passes, at_peak)
    return Storage(hbm + at_once, ddr, ssd)


def _batch_bytes(
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


def _batches_at_once(
    batch: tuple[int, int], cached: bool, pipeline: PipelineType, passes: int | None, at_peak: bool
) -> int:
    ids, rows = batch
    # by value: TorchRec's own enum is another
    if pipeline.value == PipelineType.TRAIN_SPARSE_DIST.value:
        return 2 * ids + (rows if at_peak else 0)
    if pipeline.value == PipelineType.TRAIN_PREFETCH_SPARSE_DIST.value:
        burst = int((1 + 6 / (passes or 1)) * (ids if cached else 0))
        return 3 * ids + burst + (rows if at_peak else 0)
    return ids + rows


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


def _optimizer_multiplier(optimizer: str | None, columns: int) -> float:
    """Bytes of its states over those of the rows. TorchRec knows three; any other has one number for each element."""
    if optimizer is None:
        return 0
    return {"SGD": 0, "Adam": 2, "RowWiseAdagrad": 1 / columns}.get(optimizer, 1)


def optimizer_name(tensor: Any) -> str | None:
    """Class name of the optimizer in a table's backward, None without one."""
    kind = getattr(tensor, "_optimizer_classes", [None])[0]
    return None if kind is None else kind.__name__
