"""TorchRec's estimators: they write the time and the storage of every shard into sharding options.

The formulas are in `torchrec_formulas` and `torchrec_memory`; here is what they are told about an option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..constraints import ParameterConstraints
from ..hardware import Perf, Storage
from ..tables import ELEMENT_BYTES
from ..topology import Topology
from .components import ShardEstimator
from .constants import KV_CACHING_RATIO, UVM_CACHING_RATIO, kernel_bw_lookup
from .formulas import Lookups, lookups_of_batch, shard_perf
from .memory import (
    Keeping,
    calculate_pipeline_io_cost,
    optimizer_name,
    shard_storage,
)
from .sharding_option import CacheStatistics, PipelineType, SharderData, SharderDataMap, ShardingOption
from .utils import extract_comm_data_type_size, get_num_poolings, is_prefetch_pipelined

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
            perfs: dict[tuple[int, int], Perf] = {}
            for shard in option.shards:
                size = (shard.size[0], shard.size[1])
                if size not in perfs:
                    perfs[size] = shard_perf(
                        self._topology, option.sharding_type, lookups, speed, *size, self._is_inference
                    )
                shard.perf = dataclasses.replace(perfs[size])

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
            found: dict[tuple[int, int], Storage] = {}
            for shard in option.shards:
                size = (shard.size[0], shard.size[1])
                if size not in found:
                    found[size] = shard_storage(
                        option.sharding_type,
                        self._topology.compute_device,
                        self._topology.world_size,
                        self._topology.intra_group_size,
                        lookups,
                        kept,
                        *size,
                        pipeline=self._pipeline_type,
                        at_peak=self._at_peak,
                        is_inference=self._is_inference,
                    )
                shard.storage = dataclasses.replace(found[size])


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
    said = option.is_weighted
    if said is None:
        said = constraint is not None and constraint.is_weighted
    return said or option.has_feature_processor


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
        found: npt.NDArray[np.float32] = curve[np.searchsorted(np.asarray(bins), sizes - np.float32(1), "right") - 1]
        return found


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
