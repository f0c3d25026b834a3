"""A machine as TorchRec's performance estimator knows it: coefficients of its formulas, and formulas of its own.

A formula is a sum of sizes, each times a coefficient, over a bandwidth. A config says what is otherwise on a machine by
the decorators of `annotations`, by attributes, or by methods that are overridden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..constants import (
    BWD_COMPUTE_MULTIPLIER,
    DDR_MEM_BW,
    HBM_MEM_BW,
    SSD_MEM_BW,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
    WEIGHTED_KERNEL_MULTIPLIER,
    kernel_bw_lookup,
    tier_bw_lookup,
)
from ..topology import Perf
from .annotations import decorated_names, get_bwd_coefficient, get_fwd_coefficient, get_prefetch_coefficient


@dataclass(frozen=True)
class PerfCoefficient:
    """What the sizes of a lookup count, in one direction.

    Args:
        input_read_size_multiplier: of the bytes of ids.
        lookup_size_multiplier: of the bytes of rows.
        embedding_output_multiplier: of the bytes of outputs.
        hash_size_multiplier: of the rows of a shard.
    """

    input_read_size_multiplier: float = 1.0
    lookup_size_multiplier: float = 1.0
    embedding_output_multiplier: float = 1.0
    hash_size_multiplier: float = 0.0


@dataclass(frozen=True)
class EstimatorPerfCoefficients:
    """Of both directions; without `bwd` backward is forward times `bwd_compute_multiplier`."""

    fwd: PerfCoefficient = field(default_factory=PerfCoefficient)
    bwd: PerfCoefficient | None = None


@dataclass(frozen=True)
class PrefetchCoefficients:
    """Milliseconds for each lookup, for each different one, and for each element that is fetched."""

    expected_num_lookups_coefficient: float = 0.0
    expected_num_unique_lookups_coefficient: float = 0.0
    expected_size_cache_fetches_coefficient: float = 0.0


@dataclass
class PerfCoefficientConfig:
    """Coefficients of each sharding type, and what is the same for all.

    Args:
        table_wise, row_wise, table_row_wise, data_parallel, column_wise: those of one sharding type. Those of
            `column_wise` are for "table_column_wise" too, those of `table_row_wise` for "grid_shard".
        by_kernel: (sharding type, kernel) -> coefficients, which go first.
        default: where nothing else is given.
        bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier: kept; the topology has those that count.
        weighted_kernel_multiplier: milliseconds of the gradient of weights over those of the lookup.
        prefetch: for estimators that are made with `use_linear_regression_prefetch_estimate`.
    """

    table_wise: EstimatorPerfCoefficients | None = None
    row_wise: EstimatorPerfCoefficients | None = None
    table_row_wise: EstimatorPerfCoefficients | None = None
    data_parallel: EstimatorPerfCoefficients | None = None
    column_wise: EstimatorPerfCoefficients | None = None
    by_kernel: dict[tuple[str, str], EstimatorPerfCoefficients] = field(default_factory=dict)
    default: EstimatorPerfCoefficients = field(default_factory=EstimatorPerfCoefficients)
    bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER
    weighted_kernel_multiplier: float = WEIGHTED_KERNEL_MULTIPLIER
    weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
    prefetch: PrefetchCoefficients | None = None

    def get_coefficients(self, sharding_type: str, compute_kernel: str | None = None) -> EstimatorPerfCoefficients:
        """Those of a sharding type and a kernel, by value: `by_kernel`, else of the type, else `default`."""
        kind = sharding_type.lower()
        if compute_kernel and (kind, compute_kernel.lower()) in self.by_kernel:
            return self.by_kernel[kind, compute_kernel.lower()]
        attribute = {"table_column_wise": "column_wise", "grid_shard": "table_row_wise"}.get(kind, kind)
        own: EstimatorPerfCoefficients | None = getattr(self, attribute, None) if attribute in _BY_TYPE else None
        return self.default if own is None else own


_BY_TYPE = ("table_wise", "row_wise", "table_row_wise", "data_parallel", "column_wise")


class HardwarePerfConfig:
    """A machine for `EmbeddingPerfEstimator`; derive from it and decorate, or set attributes.

    As it is it estimates what TorchRec estimates for every machine. Attributes of bandwidths, bytes per millisecond:

    Attributes:
        name: for people.
        coefficients: of the formulas.
        device_bw, kernel_device_bandwidths: at which kernels read rows, for all and by (device, kernel); where there
            is neither, `kernel_bw_lookup` says it of the topology.
        hbm_to_ddr_mem_bw: at which cached rows are fetched ahead; None takes the topology's.
        hbm_mem_bw, ddr_mem_bw, ssd_mem_bw, intra_host_bw, inter_host_bw: for formulas of a subclass. Others read the
            topology's, as in TorchRec 1.8.
    """

    name: str = "default"
    hbm_mem_bw: float = HBM_MEM_BW
    ddr_mem_bw: float = DDR_MEM_BW
    ssd_mem_bw: float = SSD_MEM_BW
    device_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None
    kernel_device_bandwidths: Mapping[tuple[str, str], float] = {}

    _coefficients: PerfCoefficientConfig | None = None
    _supported_sharding_types: frozenset[str] | None = None
    _default_output_data_type_size: float | None = None
    _bwd_compute_multiplier: float | None = None
    _weighted_feature_bwd_compute_multiplier: float | None = None

    @property
    def coefficients(self) -> PerfCoefficientConfig:
        """Those that were set, else those of decorated methods."""
        if self._coefficients is None:
            self._coefficients = PerfCoefficientConfig(prefetch=get_prefetch_coefficient(self))
            for kind in _BY_TYPE:
                setattr(self._coefficients, kind, self._decorated(kind))
        return self._coefficients

    @coefficients.setter
    def coefficients(self, given: PerfCoefficientConfig) -> None:
        self._coefficients = given

    def _decorated(self, sharding_type: str) -> EstimatorPerfCoefficients | None:
        if not decorated_names(self):
            return None
        forward, backward = get_fwd_coefficient(self, sharding_type), get_bwd_coefficient(self, sharding_type)
        if forward is None and backward is None:
            return None
        return EstimatorPerfCoefficients(PerfCoefficient() if forward is None else forward, backward)

    def get_coefficients_for_sharding(
        self, sharding_type: str, compute_kernel: str | None = None
    ) -> EstimatorPerfCoefficients:
        """Of decorated methods for this sharding type, else `coefficients`."""
        return self._decorated(sharding_type) or self.coefficients.get_coefficients(sharding_type, compute_kernel)

    def get_bwd_compute_multiplier(self, ctx_multiplier: float) -> float:
        """Backward over forward: the config's own, else `ctx_multiplier`, the topology's."""
        own = self._bwd_compute_multiplier
        return ctx_multiplier if own is None else own

    def get_weighted_feature_bwd_compute_multiplier(self, ctx_multiplier: float) -> float:
        """Backward of weighted tables over others: the config's own, else `ctx_multiplier`, the topology's."""
        own = self._weighted_feature_bwd_compute_multiplier
        return ctx_multiplier if own is None else own

    def is_sharding_type_supported(self, sharding_type: str) -> bool:
        """May a table be estimated under this sharding type?"""
        return self._supported_sharding_types is None or sharding_type.lower() in self._supported_sharding_types

    def validate_sharding_type(self, sharding_type: str) -> None:
        """Refuse a sharding type that `supported_sharding_types` left out.

        Raises:
            ValueError: it did.
        """
        if not self.is_sharding_type_supported(sharding_type):
            raise ValueError(
                f"{type(self).__name__} estimates {', '.join(sorted(self._supported_sharding_types or ()))}, not"
                f" {sharding_type!r}: name the others in ParameterConstraints(sharding_types=...), or add it to"
                " @supported_sharding_types"
            )

    def post_process_perfs(
        self,
        shard_perfs: list[Perf],
        shard_sizes: list[list[int]],
        sharding_type: str,
        uneven_sharding_perf_multiplier: float = 1.0,
    ) -> list[Perf]:
        """Milliseconds of the shards of an option as they are kept; override it to change them together."""
        return shard_perfs

    def get_device_bw(
        self,
        compute_device: str,
        compute_kernel: str,
        hbm_mem_bw: float,
        ddr_mem_bw: float,
        ssd_mem_bw: float,
        hbm_to_ddr_mem_bw: float,
        caching_ratio: float | None = None,
        prefetch_pipeline: bool = False,
    ) -> float:
        """At which a kernel reads rows, bytes per millisecond; the bandwidths given are the topology's.

        Raises:
            ValueError: the device has no such kernel.
        """
        device, kernel = compute_device.lower(), compute_kernel.lower()
        ahead = prefetch_pipeline and device == "cuda" and kernel == "fused_uvm_caching"
        own = self.kernel_device_bandwidths.get((device, "fused" if ahead else kernel), self.device_bw)
        if own is not None:
            return own
        usual = kernel_bw_lookup(
            compute_device, compute_kernel, hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw, caching_ratio,
            prefetch_pipeline, ssd_mem_bw,
        )  # fmt: skip
        usual = usual or tier_bw_lookup(device, kernel, ddr_mem_bw, ssd_mem_bw)
        if usual is None:
            raise ValueError(f"compute_kernel {compute_kernel!r} has no known bandwidth on {compute_device}")
        return usual


class EmbeddingPerfEstimatorConfig(HardwarePerfConfig):
    """What `EmbeddingPerfEstimator` estimates with where nothing else is registered as "default_estimator"."""
