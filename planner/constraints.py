"""What a user allows for a table: `ParameterConstraints` by TorchRec's name and fields, and ours behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shardwise.embeddings.config import DataType

from .tables import Skew

# by value, as `sharding.plan.plan` has them
SHARDING_TYPES = (
    "data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard",
)  # fmt: skip
COMPUTE_KERNELS = (
    "dense", "fused", "fused_uvm", "fused_uvm_caching", "quant", "quant_uvm", "quant_uvm_caching", "key_value",
    "customized_kernel", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table", "fused_triton",
)  # fmt: skip


@dataclass
class ParameterConstraints:
    """What may be done with a table and what is known of its ids; keyed by table name, in every module alike.

    Args:
        sharding_types, compute_kernels: those allowed, by value; None allows all.
        min_partition: fewest columns of a column shard.
        pooling_factors, num_poolings, batch_sizes: for each feature of the table: ids of a lookup, lookups of a sample,
            samples of a rank's batch.
        is_weighted: ids have weights.
        ranks, not_on: the only ranks that may hold a part of the table; ranks that may not.
        same_rank: tables with the same text here lie whole on one rank together.
        skew: how ids are drawn.

    The others are TorchRec's and pass into the plan.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [1.0])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: Any = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: list[str] | None = None
    output_dtype: DataType | None = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False
    ranks: list[int] | None = field(default=None, kw_only=True)
    not_on: list[int] | None = field(default=None, kw_only=True)
    same_rank: str | None = field(default=None, kw_only=True)
    skew: Skew | None = field(default=None, kw_only=True)
