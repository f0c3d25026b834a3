"""What a formula of TorchRec's performance estimator may read of one shard: its size, its lookups, its machine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..constants import (
    BIGINT_DTYPE,
    BWD_COMPUTE_MULTIPLIER,
    HBM_MEM_BW,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
)
from ..constraints import ParameterConstraints
from ..topology import GeneralizedCommsBandwidth, Topology
from .hardware import HardwarePerfConfig
from .sharding_option import SharderData, ShardingOption
from .utils import (
    caching_ratio_of,
    element_bytes,
    extract_comm_data_type_size,
    get_num_poolings,
    is_prefetch_pipelined,
    is_weighted,
)


@dataclass
class ShardPerfContext:
    """A shard of a table, as formulas read it; sizes of types are bytes, bandwidths bytes per millisecond.

    Args:
        sharding_type, compute_kernel: by value.
        hash_size, emb_dim: rows and columns of the shard.
        batch_sizes, num_poolings, input_lengths: of each feature: samples of a rank, lookups of a sample, ids of a
            lookup.
        world_size, local_world_size, intra_group_size: ranks, those of a host, those that a fast link joins.
        input_data_type_size, table_data_type_size, output_data_type_size: of an id, and of an element in the table and
            in the output.
        fwd_a2a_comm_data_type_size, bwd_a2a_comm_data_type_size: of an element in an all-to-all.
        fwd_sr_comm_data_type_size, bwd_sr_comm_data_type_size: of an element in a reduce-scatter.
        device_bw: at which the kernel reads rows.
        hbm_to_ddr_mem_bw, intra_host_bw, inter_host_bw, comms_bandwidths: the topology's.
        is_inference, is_weighted, is_pooled, has_feature_processor: as their names say; a feature processor counts as
            weights.
        bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier: the topology's.
        use_linear_regression_prefetch_estimate, use_batch_inputs_for_expected_cache_fetches: the estimator's.
        caching_ratio: share of the rows that a cache holds, if that is known.
        table_name: of the table.
        hash_size_for_clamping: rows of the whole table.
        cache_stats_expected_lookups, expected_miss_rate: different ids of a global batch, and share of lookups that
            miss the cache, where statistics were given.
    """

    sharding_type: str = ""
    compute_kernel: str = ""
    hash_size: int = 0
    emb_dim: int = 0
    batch_sizes: list[int] = field(default_factory=list)
    num_poolings: list[float] = field(default_factory=list)
    input_lengths: list[float] = field(default_factory=list)
    world_size: int = 1
    local_world_size: int = 1
    intra_group_size: int = 1
    input_data_type_size: float = BIGINT_DTYPE
    table_data_type_size: float = 4.0
    output_data_type_size: float = 4.0
    fwd_a2a_comm_data_type_size: float = 4.0
    bwd_a2a_comm_data_type_size: float = 4.0
    fwd_sr_comm_data_type_size: float = 4.0
    bwd_sr_comm_data_type_size: float = 4.0
    device_bw: float = HBM_MEM_BW
    hbm_to_ddr_mem_bw: float = HBM_MEM_BW
    intra_host_bw: float = 0.0
    inter_host_bw: float = 0.0
    comms_bandwidths: GeneralizedCommsBandwidth | None = None
    is_inference: bool = False
    is_weighted: bool = False
    is_pooled: bool = True
    has_feature_processor: bool = False
    bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
    use_linear_regression_prefetch_estimate: bool = False
    use_batch_inputs_for_expected_cache_fetches: bool = False
    caching_ratio: float | None = None
    table_name: str = ""
    hash_size_for_clamping: int = 0
    cache_stats_expected_lookups: float | None = None
    expected_miss_rate: float | None = None

    @classmethod
    def build_shard_perf_contexts(
        cls,
        config: HardwarePerfConfig,
        shard_sizes: list[list[int]],
        sharding_option: ShardingOption,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
        sharder_data: SharderData,
        is_inference: bool = False,
        use_batch_inputs_for_expected_cache_fetches: bool = False,
        use_linear_regression_prefetch_estimate: bool = False,
    ) -> list[ShardPerfContext]:
        """One for each size [rows, columns] of an option's shards.

        Raises:
            ValueError: the device has no such kernel, or numbers of features differ.
        """
        option, data = sharding_option, sharder_data
        constraint = (constraints or {}).get(option.name)
        num_poolings = get_num_poolings(constraints, option)
        batch_sizes = (constraint and constraint.batch_sizes) or [option.batch_size] * option.num_inputs
        if not len(option.input_lengths) == len(num_poolings) == len(batch_sizes):
            raise ValueError(
                f"table {option.name!r}: pooling_factors, num_poolings and batch_sizes must have one number for each"
                f" feature, got {len(option.input_lengths)}, {len(num_poolings)} and {len(batch_sizes)}"
            )
        ratio = caching_ratio_of(option, data)
        try:
            device_bw = config.get_device_bw(
                topology.compute_device, option.compute_kernel, topology.hbm_mem_bw, topology.ddr_mem_bw,
                topology.ssd_mem_bw, topology.hbm_to_ddr_mem_bw, ratio, is_prefetch_pipelined(option, data),
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"table {option.name!r}: {error}") from error
        stats = option.cache_params.stats if option.cache_params else None
        is_cached = option.compute_kernel == "fused_uvm_caching" and stats is not None and ratio is not None
        own = float(option.tensor.element_size())
        usual_output = own if config._default_output_data_type_size is None else config._default_output_data_type_size
        fwd_a2a, bwd_a2a, fwd_sr, bwd_sr = extract_comm_data_type_size(option, data)
        of_table = cls(
            sharding_type=option.sharding_type,
            compute_kernel=option.compute_kernel,
            batch_sizes=list(batch_sizes),
            num_poolings=num_poolings,
            input_lengths=option.input_lengths,
            world_size=topology.world_size,
            local_world_size=topology.local_world_size,
            intra_group_size=topology.intra_group_size,
            input_data_type_size=getattr(config, "_input_data_type_size", BIGINT_DTYPE),
            table_data_type_size=own,
            output_data_type_size=element_bytes(option.output_dtype) if option.output_dtype else usual_output,
            fwd_a2a_comm_data_type_size=fwd_a2a,
            bwd_a2a_comm_data_type_size=bwd_a2a,
            fwd_sr_comm_data_type_size=fwd_sr,
            bwd_sr_comm_data_type_size=bwd_sr,
            device_bw=device_bw,
            hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
            intra_host_bw=topology.intra_host_bw,
            inter_host_bw=topology.inter_host_bw,
            comms_bandwidths=topology.comms_bandwidths,
            is_inference=is_inference,
            is_weighted=is_weighted(option, constraint),
            is_pooled=option.is_pooled,
            has_feature_processor=option.has_feature_processor,
            bwd_compute_multiplier=topology.bwd_compute_multiplier,
            weighted_feature_bwd_compute_multiplier=topology.weighted_feature_bwd_compute_multiplier,
            use_linear_regression_prefetch_estimate=use_linear_regression_prefetch_estimate,
            use_batch_inputs_for_expected_cache_fetches=use_batch_inputs_for_expected_cache_fetches,
            caching_ratio=ratio,
            table_name=option.name,
            hash_size_for_clamping=option.tensor.shape[0],
            cache_stats_expected_lookups=stats.expected_lookups if is_cached and stats else None,
            expected_miss_rate=stats.expected_miss_rate(ratio) if is_cached and stats and ratio is not None else None,
        )
        return [replace(of_table, hash_size=rows, emb_dim=columns) for rows, columns in shard_sizes]

    @property
    def num_hosts(self) -> int:
        """Hosts, at least 1."""
        return max(1, self.world_size // self.local_world_size)

    @property
    def num_twrw_groups(self) -> int:
        """Groups of ranks that a fast link joins, at least 1."""
        return max(1, self.world_size // self.intra_group_size)

    @property
    def batch_inputs(self) -> float:
        """Ids that a rank's batch brings to the table."""
        features = zip(self.input_lengths, self.num_poolings, self.batch_sizes, strict=True)
        return sum(length * count * samples for length, count, samples in features)

    @property
    def batch_outputs(self) -> float:
        """Rows that a rank's batch gets back."""
        if not self.is_pooled:
            return self.batch_inputs
        features = zip(self.input_lengths, self.num_poolings, self.batch_sizes, strict=True)
        return sum(min(1.0, length) * count * samples for length, count, samples in features)

    @property
    def is_uvm_caching(self) -> bool:
        """Is a part of its rows in a cache on the device, the rest in host memory?"""
        return self.compute_kernel == "fused_uvm_caching"
