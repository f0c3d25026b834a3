"""TorchRec's estimator of storage, which it writes into the shards of sharding options.

TorchRec 1.8.0's formulas stand here and nowhere else; `cost.torchrec` applies them to tables and ways. A shard has its
part of the rows, of the optimizer's states and of the cache, and the batches that are there at once. Floating point is
done in TorchRec's order: sizes are rounded up, where an error of the last bit would become a byte.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..constants import BIGINT_DTYPE, KV_CACHING_RATIO, UVM_CACHING_RATIO
from ..constraints import ParameterConstraints
from ..topology import Storage, Topology
from .sharding_option import (
    CacheStatistics,
    PipelineType,
    SharderData,
    SharderDataMap,
    ShardingOption,
    StorageUsageType,
)
from .types import ShardEstimator
from .utils import caching_ratio_of, element_bytes, get_num_poolings


@dataclass(frozen=True)
class Lookups:
    """The lookups of one rank's batch in a table, and the bytes of their numbers.

    Args:
        ids: ids that it brings.
        outputs: rows that it gets back, before TorchRec divides them among ranks.
        pooled: as `Table`.
        element_bytes: of the table.
        output_bytes: of an element of the output, in memory.
    """

    ids: float
    outputs: float
    pooled: bool
    element_bytes: float
    output_bytes: float


def lookups_of_batch(
    pooling_factors: Sequence[float], num_poolings: Sequence[float], batch_sizes: Sequence[int], pooled: bool
) -> tuple[float, float]:
    """Ids that a rank's batch brings to a table, and rows that it gets back."""
    features = list(zip(pooling_factors, num_poolings, batch_sizes, strict=True))
    ids = sum(length * count * samples for length, count, samples in features)
    return ids, sum(min(1.0, length) * count * samples for length, count, samples in features) if pooled else ids


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
            lookups, kept = _lookups(option, constraint), _keeping(option, constraint, data)
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
    lookups = Lookups(ids, outputs, is_pooled, own, output_data_type_size)
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


def _lookups(option: ShardingOption, constraint: ParameterConstraints | None) -> Lookups:
    num_poolings = get_num_poolings({option.name: constraint} if constraint else None, option)
    batch_sizes = (constraint and constraint.batch_sizes) or [option.batch_size] * option.num_inputs
    if not len(option.input_lengths) == len(num_poolings) == len(batch_sizes):
        raise ValueError(
            f"table {option.name!r}: pooling_factors, num_poolings and batch_sizes must have one number for each"
            f" feature, got {len(option.input_lengths)}, {len(num_poolings)} and {len(batch_sizes)}"
        )
    ids, outputs = lookups_of_batch(option.input_lengths, num_poolings, batch_sizes, option.is_pooled)
    own = float(option.tensor.element_size())
    output = element_bytes(option.output_dtype) if option.output_dtype else own
    return Lookups(ids, outputs, option.is_pooled, own, output)


def _keeping(option: ShardingOption, constraint: ParameterConstraints | None, data: SharderData) -> Keeping:
    passes = option.cache_params.multipass_prefetch_config if option.cache_params else None
    passes = passes or data.fused_params.get("multipass_prefetch_config")
    return Keeping(
        option.tensor.shape[0],
        option.tensor.shape[1],
        option.compute_kernel,
        data.storage_usage_type,
        optimizer_name(option.tensor),
        caching_ratio_of(option, data) or UVM_CACHING_RATIO,
        l1_bytes(constraint and constraint.key_value_params),
        data.fused_params.get("cache_load_factor", KV_CACHING_RATIO),
        bool(constraint and constraint.use_virtual_table),
        passes.num_passes if passes else None,
    )


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
    "EmbeddingStorageEstimator",
    "calculate_pipeline_io_cost",
    "calculate_shard_storages",
]
