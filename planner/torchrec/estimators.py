"""TorchRec's estimators: they write the time and the storage of every shard into sharding options.

TorchRec 1.8.0's formulas stand here and nowhere else; `cost_torchrec` applies them to tables and ways. A shard has its
part of the rows, of the optimizer's states and of the cache, and the batches that are there at once. Floating point is
done in TorchRec's order: sizes are rounded up, where an error of the last bit would become a byte.

Letters: W ranks, G ranks that a fast link joins, D columns and H rows of a shard.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..constants import (
    BATCHED_COPY_PERF_FACTOR,
    BIGINT_DTYPE,
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    FULL_BLOCK_EMB_DIM,
    HALF_BLOCK_PENALTY,
    KV_CACHING_RATIO,
    QUARTER_BLOCK_PENALTY,
    UVM_CACHING_RATIO,
    WEIGHTED_KERNEL_MULTIPLIER,
    kernel_bw_lookup,
)
from ..constraints import ParameterConstraints
from ..tables import ELEMENT_BYTES
from ..topology import (
    CollectiveType,
    Perf,
    Storage,
    Topology,
)
from .sharding_option import (
    CacheStatistics,
    PipelineType,
    SharderData,
    SharderDataMap,
    ShardingOption,
    StorageUsageType,
)
from .types import ShardEstimator
from .utils import extract_comm_data_type_size, get_num_poolings, is_prefetch_pipelined


@dataclass(frozen=True)
class Lookups:
    """The lookups of one rank's batch in a table, and the bytes of their numbers.

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


def lookups_of_batch(
    pooling_factors: Sequence[float], num_poolings: Sequence[float], batch_sizes: Sequence[int], pooled: bool
) -> tuple[float, float]:
    """Ids that a rank's batch brings to a table, and rows that it gets back."""
    features = list(zip(pooling_factors, num_poolings, batch_sizes, strict=True))
    ids = sum(length * count * samples for length, count, samples in features)
    return ids, sum(min(1.0, length) * count * samples for length, count, samples in features) if pooled else ids


@dataclass(frozen=True)
class _Sent:
    """Bytes that a shard of `rows` by `columns`, read at `bandwidth`, sends forward and gets backward."""

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


_WHOLE_ROWS = _Path(_one, _world, blocks=True, scatters=lambda pooled: False, comms=_all_to_all)
_ROWS_OF_A_GROUP = _Path(
    lambda topology: topology.intra_group_size, _world, blocks=False, scatters=lambda pooled: True,
    comms=_scatter_in_group,
)  # fmt: skip
PATHS = {
    "table_wise": _WHOLE_ROWS,
    "column_wise": _WHOLE_ROWS,
    "table_column_wise": _WHOLE_ROWS,
    "row_wise": _Path(_world, _world, blocks=False, scatters=lambda pooled: pooled, comms=_scatter_over_all),
    "table_row_wise": _ROWS_OF_A_GROUP,
    "grid_shard": _ROWS_OF_A_GROUP,
    "data_parallel": _Path(_one, _one, blocks=False, scatters=lambda pooled: False, comms=_gradients),
}


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
        shard_bytes = table_bytes if whole else math.ceil(table_bytes * (rows * columns) / (kept.rows * kept.columns))
        if is_inference:
            return shard_bytes
        states = math.ceil(shard_bytes * optimizer_multiplier(kept.optimizer, kept.columns))
        return shard_bytes + states + (0 if cache is None else math.ceil(rows * (4 + cache * 16)))

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


_MIB = 1024**2


class EmbeddingPerfEstimator(ShardEstimator):
    """Writes the milliseconds of every shard, as TorchRec estimates them.

    Args:
        topology: its bandwidths and multipliers count.
        constraints: by table name; `num_poolings`, `batch_sizes` and `is_weighted` are read.
        is_inference: there is no backward.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
    ) -> None:
        self._topology = topology
        self._constraints = constraints or {}
        self._is_inference = is_inference

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Writes `perf` into the shards.

        Raises:
            ValueError: the device has no such kernel, or numbers of features differ.
        """
        for option in sharding_options:
            data = sharder_data_map[option.module_type_key]
            constraint = self._constraints.get(option.name)
            option.is_weighted = _is_weighted(option, constraint)
            lookups = _lookups(option, constraint, data)
            speed = self._bandwidth(option, data)
            # shards of one size cost the same
            of_size = cache(partial(shard_perf, self._topology, option.sharding_type, lookups, speed))
            for shard in option.shards:
                shard.perf = dataclasses.replace(of_size(*shard.size, self._is_inference))

    def _bandwidth(self, option: ShardingOption, data: SharderData) -> float:
        machine = self._topology
        speed = kernel_bw_lookup(
            machine.compute_device,
            option.compute_kernel,
            machine.hbm_mem_bw,
            machine.ddr_mem_bw,
            machine.hbm_to_ddr_mem_bw,
            _caching_ratio(option, data),
            is_prefetch_pipelined(option, data),
            machine.ssd_mem_bw,
        )
        if speed is None:
            raise ValueError(
                f"table {option.name!r}: compute_kernel {option.compute_kernel!r} has no known bandwidth on"
                f" {machine.compute_device}"
            )
        return speed


class EmbeddingStorageEstimator(ShardEstimator):
    """Writes the bytes of every shard, as TorchRec estimates them.

    Args:
        topology: its device and ranks count.
        constraints: by table name; `num_poolings`, `batch_sizes`, `key_value_params` and `use_virtual_table` are read.
        pipeline_type: decides how many batches are in memory at once.
        run_embedding_at_peak_memory: outputs count too, with a pipeline.
        is_inference: there are neither optimizers nor batches.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
        run_embedding_at_peak_memory: bool = False,
        is_inference: bool = False,
    ) -> None:
        self._topology = topology
        self._constraints = constraints or {}
        self._pipeline_type = pipeline_type
        self._at_peak = run_embedding_at_peak_memory
        self._is_inference = is_inference

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap) -> None:
        """Writes `storage` into the shards.

        Raises:
            ValueError: numbers of features differ.
        """
        for option in sharding_options:
            data = sharder_data_map[option.module_type_key]
            constraint = self._constraints.get(option.name)
            lookups, kept = _lookups(option, constraint, data), _keeping(option, constraint, data)
            of_size = cache(
                partial(
                    shard_storage,
                    option.sharding_type,
                    self._topology.compute_device,
                    self._topology.world_size,
                    self._topology.intra_group_size,
                    lookups,
                    kept,
                    pipeline=self._pipeline_type,
                    at_peak=self._at_peak,
                    is_inference=self._is_inference,
                )
            )
            for shard in option.shards:
                shard.storage = dataclasses.replace(of_size(*shard.size))


def calculate_shard_storages(
    sharder_data: SharderData,
    sharding_type: str,
    tensor: Any,
    compute_device: str,
    compute_kernel: str,
    shard_sizes: Sequence[Sequence[int]],
    batch_sizes: Sequence[int],
    world_size: int,
    local_world_size: int,
    input_lengths: Sequence[float],
    num_poolings: Sequence[float],
    caching_ratio: float,
    is_pooled: bool,
    input_data_type_size: float,
    output_data_type_size: float,
    pipeline_type: PipelineType = PipelineType.NONE,
    count_ephemeral_storage_cost: bool = False,
    is_inference: bool = False,
    multipass_prefetch_max_pass: int | None = None,
    key_value_params: Any = None,
    kv_cache_load_factor: float = KV_CACHING_RATIO,
    use_virtual_table: bool = False,
) -> list[Storage]:
    """Bytes of each shard of a table, from numbers alone. `local_world_size` is that of the group of fast links.

    Raises:
        ValueError: ids are not of 8 bytes.
    """
    if input_data_type_size != 8:
        raise ValueError(f"ids are of 8 bytes when they are looked up, got input_data_type_size={input_data_type_size}")
    own = float(tensor.element_size())
    ids, outputs = lookups_of_batch(input_lengths, num_poolings, batch_sizes, is_pooled)
    lookups = Lookups(ids, outputs, is_pooled, False, own, (own, own), (own, own), output_data_type_size)
    kept = Keeping(
        tensor.shape[0],
        tensor.shape[1],
        compute_kernel,
        sharder_data.storage_usage_type,
        optimizer_name(tensor),
        caching_ratio,
        l1_bytes(key_value_params),
        kv_cache_load_factor,
        use_virtual_table,
        multipass_prefetch_max_pass,
    )
    return [
        shard_storage(
            sharding_type, compute_device, world_size, local_world_size, lookups, kept, rows, columns,
            pipeline=pipeline_type, at_peak=count_ephemeral_storage_cost, is_inference=is_inference,
        )
        for rows, columns in shard_sizes
    ]  # fmt: skip


def _lookups(option: ShardingOption, constraint: ParameterConstraints | None, data: SharderData) -> Lookups:
    num_poolings = get_num_poolings({option.name: constraint} if constraint else None, option)
    batch_sizes = (constraint and constraint.batch_sizes) or [option.batch_size] * option.num_inputs
    if not len(option.input_lengths) == len(num_poolings) == len(batch_sizes):
        raise ValueError(
            f"table {option.name!r}: pooling_factors, num_poolings and batch_sizes must have one number for each"
            f" feature, got {len(option.input_lengths)}, {len(num_poolings)} and {len(batch_sizes)}"
        )
    forward, backward, scatter_forward, scatter_backward = extract_comm_data_type_size(option, data)
    ids, outputs = lookups_of_batch(option.input_lengths, num_poolings, batch_sizes, option.is_pooled)
    own = float(option.tensor.element_size())
    return Lookups(
        ids,
        outputs,
        option.is_pooled,
        bool(option.is_weighted),
        own,
        (forward, backward),
        (scatter_forward, scatter_backward),
        element_bytes(option.output_dtype) if option.output_dtype else own,
        _missed(option, data),
    )


def _keeping(option: ShardingOption, constraint: ParameterConstraints | None, data: SharderData) -> Keeping:
    passes = option.cache_params.multipass_prefetch_config if option.cache_params else None
    passes = passes or data.fused_params.get("multipass_prefetch_config")
    return Keeping(
        option.tensor.shape[0],
        option.tensor.shape[1],
        option.compute_kernel,
        data.storage_usage_type,
        optimizer_name(option.tensor),
        _caching_ratio(option, data) or UVM_CACHING_RATIO,
        l1_bytes(constraint and constraint.key_value_params),
        data.fused_params.get("cache_load_factor", KV_CACHING_RATIO),
        bool(constraint and constraint.use_virtual_table),
        passes.num_passes if passes else None,
    )


def element_bytes(data_type: Any) -> float:
    """Bytes of an element of a `DataType`, ours or TorchRec's."""
    return {known.value: size for known, size in ELEMENT_BYTES.items()}[data_type.value]


def _is_weighted(option: ShardingOption, constraint: ParameterConstraints | None) -> bool:
    weighted = option.is_weighted
    if weighted is None:
        weighted = constraint is not None and constraint.is_weighted
    return weighted or option.has_feature_processor


def _caching_ratio(option: ShardingOption, data: SharderData) -> float | None:
    own = option.cache_load_factor
    return own if own is not None else data.fused_params.get("cache_load_factor")


def _missed(option: ShardingOption, data: SharderData) -> float:
    stats, ratio = option.cache_params and option.cache_params.stats, _caching_ratio(option, data)
    if option.compute_kernel != "fused_uvm_caching" or stats is None or ratio is None:
        return 0.0
    return float(stats.expected_miss_rate(ratio) * stats.expected_lookups)


def l1_bytes(key_value_params: Any) -> int:
    """Most bytes of the cache of a table on disk, as its `KeyValueParams` say."""
    return int((key_value_params.max_l1_cache_size or 0) * _MIB) if key_value_params else 0


class EmbeddingOffloadStats(CacheStatistics):
    """Cache statistics from a measured histogram.

    Args:
        cacheability: area under the curve of misses over cache sizes.
        expected_lookups: different ids of a global batch.
        mrc_hist_counts: lookups [N] that hit a cache of at least that size; entry k stands for k / N of the rows.
        height: rows of the table.

    Raises:
        ValueError: the histogram is empty or not of one dimension.
    """

    def __init__(self, cacheability: float, expected_lookups: int, mrc_hist_counts: Any, height: int) -> None:
        counts = np.asarray(mrc_hist_counts)
        if counts.ndim != 1:
            raise ValueError(f"mrc_hist_counts must be of one dimension, got {counts.ndim}")
        if not counts.size:
            raise ValueError("mrc_hist_counts is empty")
        self._cacheability, self._expected_lookups = cacheability, expected_lookups
        self.height = height
        self.hist = counts
        self.bins = _edges(height, counts.size)

    @property
    def expected_lookups(self) -> int:
        """Different ids of a global batch."""
        return self._expected_lookups

    @property
    def cacheability(self) -> float:
        """As given."""
        return self._cacheability

    def expected_miss_rate(self, clf: float) -> float:
        """Share of lookups that miss a cache of a share `clf` of the rows."""
        return float(self.estimate_cache_miss_rate(np.float32(clf * self.height), self.hist, self.bins))

    @staticmethod
    def estimate_cache_miss_rate(cache_sizes: Any, hist: Any, bins: Any) -> npt.NDArray[np.float32]:
        """Share of lookups that miss caches of these numbers of rows, by a histogram with these edges; all float32."""
        sizes = np.asarray(cache_sizes, np.float32)
        hits = np.cumsum(np.asarray(hist))
        if hits[-1] == 0:
            return np.zeros(sizes.shape, np.float32)
        misses = np.float32(1) - hits.astype(np.float32) / np.float32(hits[-1])
        # a cache of k rows hits up to a distance of k - 1; beyond the last bin nothing misses, before the first all
        curve = np.concatenate([misses, np.array([0, 1], np.float32)]).astype(np.float32)
        rates: npt.NDArray[np.float32] = curve[np.searchsorted(np.asarray(bins), sizes - np.float32(1), "right") - 1]
        return rates


def _edges(height: int, bins: int) -> npt.NDArray[np.float32]:
    """bins + 1 numbers from 0 to `height`, rounded as torch rounds them: counted from the nearer end."""
    step = np.float32(height) / np.float32(bins)
    count = np.arange(bins + 1)
    below = count < (bins + 1) // 2
    edges: npt.NDArray[np.float32] = np.where(
        below, step * count.astype(np.float32), np.float32(height) - step * (bins - count).astype(np.float32)
    )
    return edges


__all__ = [
    "EmbeddingOffloadStats",
    "EmbeddingPerfEstimator",
    "EmbeddingStorageEstimator",
    "calculate_pipeline_io_cost",
    "calculate_shard_storages",
]
