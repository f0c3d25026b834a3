"""Configs of hardware as programs of TorchRec define them, and the milliseconds that shards take by them.

Run by a Python with TorchRec 1.8.0 and the argument `torchrec` it prints golden/torchrec_hardware_configs.json.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

TYPES = (
    "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel",
)  # fmt: skip


def configs(estimator: Any) -> dict[str, Any]:
    """Configs as programs define them, by what they set; `estimator` has the names of TorchRec's package."""
    a, types = estimator.annotations, estimator.types
    coefficient = types.PerfCoefficient

    @a.device_bw(3.5e9)
    @a.device_bw(2.5e9, device="cuda", compute_kernel=["fused", "fused_uvm"])
    @a.hbm_to_ddr_mem_bw(7e6)
    @a.input_data_type_size(4.0)
    class Numbers(types.HardwarePerfConfig):  # type: ignore[misc]
        _bwd_compute_multiplier = 2.5
        _weighted_feature_bwd_compute_multiplier = 1.5

    @a.use_block_usage_penalty(True)
    @a.use_min_dim_for_lookup(False)
    @a.use_bytes_for_input_read_size(False)
    class Coefficients(types.HardwarePerfConfig):  # type: ignore[misc]
        @a.fwd_coefficient(sharding_type=["table_wise", "row_wise"])
        def forward(self) -> Any:
            return coefficient(100.0, 2.0, 3.0, 4.5)

        @a.bwd_coefficient()
        def backward(self) -> Any:
            return coefficient(600.0, 3.0, 2.0, 9.0)

        @a.prefetch_coefficient()
        def ahead(self) -> Any:
            return types.PrefetchCoefficients(4e-7, 1e-5, 1e-7)

    class Formulas(types.HardwarePerfConfig):  # type: ignore[misc]
        @a.forward_compute(sharding_type="row_wise")
        def lookup_of_rows(self, context: Any) -> float:
            return float(context.batch_inputs * context.emb_dim / context.device_bw)

        @a.backward_compute
        def lookup_back(self, context: Any) -> float:
            return float(context.hash_size * 1e-3 + context.num_hosts)

        @a.fwd_comms(["table_wise", "grid_shard"])
        def sent(self, context: Any) -> float:
            return float(context.batch_outputs * 1e-2)

        @a.bwd_comms("table_row_wise")
        def sent_back(self, context: Any) -> float:
            return float(context.num_twrw_groups * 7)

        @a.input_dist_comms
        def ids(self, context: Any) -> float:
            return float(context.world_size * 0.25)

        @a.output_write_size(sharding_type=["column_wise", "data_parallel"])
        def written(self, context: Any, is_fwd: bool) -> float:
            return 1e9 if is_fwd else 1.0

        @a.prefetch_compute
        def ahead(self, context: Any) -> float:
            return float(context.cache_stats_expected_lookups or -1)

    class Kernels(types.HardwarePerfConfig):  # type: ignore[misc]
        coefficients = types.PerfCoefficientConfig(
            row_wise=types.EstimatorPerfCoefficients(coefficient(1.0, 5.0, 1.0, 1.0)),
            by_kernel={
                ("table_wise", "fused"): types.EstimatorPerfCoefficients(coefficient(2.0), coefficient(3.0, 3.0)),
            },
            default=types.EstimatorPerfCoefficients(coefficient(7.0)),
            weighted_kernel_multiplier=2.0,
        )

    usual = estimator.config.EmbeddingPerfEstimatorConfig
    return {"usual": usual, "numbers": Numbers, "coefficients": Coefficients, "formulas": Formulas, "kernels": Kernels}


CASES = {
    "pooled": {"compute_kernel": "fused", "emb_dim": 24, "is_weighted": True},
    "rows": {"compute_kernel": "fused", "emb_dim": 64, "is_pooled": False},
    "cached": {
        "compute_kernel": "fused_uvm_caching", "emb_dim": 128, "caching_ratio": 0.25, "expected_miss_rate": 0.125,
        "cache_stats_expected_lookups": 3333, "hash_size_for_clamping": 3000, "is_weighted": True,
    },
}  # fmt: skip


def computed(root: str) -> dict[str, list[float]]:
    """Milliseconds of a shard by "config case sharding type", of the six parts of a step."""
    names = ("annotations", "types", "config", "estimator")
    estimator = SimpleNamespace(
        **{name: import_module(f"{root}.distributed.planner.estimator.{name}") for name in names}
    )
    topology = import_module(f"{root}.distributed.planner.types").Topology(
        world_size=8, compute_device="cuda", local_world_size=2, pod_size=2
    )
    numbers = {}
    for config_name, kind in configs(estimator).items():
        config = kind()
        for case, given in CASES.items():
            for sharding_type in TYPES:
                context = estimator.types.ShardPerfContext(
                    sharding_type=sharding_type,
                    hash_size=1000,
                    batch_sizes=[64, 32],
                    num_poolings=[1.0, 2.0],
                    input_lengths=[3.7, 0.4],
                    world_size=8,
                    local_world_size=2,
                    intra_group_size=4,
                    table_data_type_size=4.0,
                    fwd_a2a_comm_data_type_size=2.0,
                    bwd_sr_comm_data_type_size=1.0,
                    hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
                    input_data_type_size=getattr(config, "_input_data_type_size", 8),
                    device_bw=config.get_device_bw(
                        "cuda", given["compute_kernel"], topology.hbm_mem_bw, topology.ddr_mem_bw, topology.ssd_mem_bw,
                        topology.hbm_to_ddr_mem_bw, given.get("caching_ratio"),
                    ),
                    comms_bandwidths=topology.comms_bandwidths,
                    use_linear_regression_prefetch_estimate=config_name == "coefficients",
                    use_batch_inputs_for_expected_cache_fetches=config_name == "numbers",
                    **given,
                )  # fmt: skip
                for serves in (False, True) if config_name in ("usual", "formulas") else (False,):
                    evaluator = estimator.estimator.get_embedding_perf_sharding_evaluator(sharding_type, serves)
                    perf = evaluator.compute_perf(context, config)
                    parts = (
                        perf.fwd_compute, perf.fwd_comms, perf.bwd_compute, perf.bwd_comms, perf.prefetch_compute,
                        perf.input_dist_comms,
                    )  # fmt: skip
                    numbers[f"{config_name} {case} {sharding_type}{' serving' if serves else ''}"] = list(parts)
    return numbers


if __name__ == "__main__":
    lines = [f"{json.dumps(key)}: {json.dumps(parts)}" for key, parts in computed(sys.argv[1]).items()]
    print("{", ",\n".join(lines), "}", sep="\n")
