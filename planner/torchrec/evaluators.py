"""TorchRec's performance formulas: milliseconds of one shard, from its context and a hardware config.

TorchRec 1.8.0's formulas stand here and nowhere else. Floating point is done in TorchRec's order, so that estimates are
its numbers to the last bit. A config's coefficients count in lookups; its decorated methods stand for whole formulas.

Letters: W ranks, G ranks that a fast link joins, D columns and H rows of a shard.
"""

from __future__ import annotations

import math

from ..constants import (
    BATCHED_COPY_PERF_FACTOR,
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    FULL_BLOCK_EMB_DIM,
    HALF_BLOCK_PENALTY,
    QUARTER_BLOCK_PENALTY,
)
from ..topology import CollectiveType, Perf
from .annotations import formula_of
from .hardware import HardwarePerfConfig, PerfCoefficient
from .shard_context import ShardPerfContext


def compute_block_usage_penalty(embedding_dim: int) -> float:
    """How much slower a lookup of rows this narrow is."""
    if embedding_dim >= FULL_BLOCK_EMB_DIM:
        return 1.0
    return HALF_BLOCK_PENALTY if embedding_dim >= FULL_BLOCK_EMB_DIM // 2 else QUARTER_BLOCK_PENALTY


class EmbeddingShardingPerfEvaluator:
    """The formulas of one sharding type; those of whole rows, from which the other types differ.

    Args:
        is_inference: there is no backward.
    """

    # narrow rows cost more, and are read as if they had 32 columns
    _blocks = True

    def __init__(self, is_inference: bool = False) -> None:
        self.is_inference = is_inference

    def compute_perf(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> Perf:
        """Milliseconds of a shard in all parts of a step."""
        return Perf(
            fwd_compute=self.compute_fwd_comp(ctx, config),
            fwd_comms=self.compute_fwd_comms(ctx, config),
            bwd_compute=self.compute_bwd_comp(ctx, config),
            bwd_comms=self.compute_bwd_comms(ctx, config),
            prefetch_compute=self.compute_prefetch_comp(ctx, config),
            input_dist_comms=self.compute_input_dist_comms(ctx, config),
        )

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        """Ranks that a batch's ids are divided among."""
        return 1

    def get_batch_inputs(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Ids that a rank's batch brings to the shard."""
        return ctx.batch_inputs / self.get_batch_inputs_divisor(ctx)

    def get_prefetch_divisor(self, ctx: ShardPerfContext) -> int:
        """Ranks that cached rows are divided among."""
        return self.get_batch_inputs_divisor(ctx)

    def get_expected_lookups_for_prefetch(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Lookups of a global batch as the coefficients of a prefetch count them; of shards cut by rows in bytes."""
        return float(math.ceil(ctx.batch_inputs * ctx.world_size)) * (2 if ctx.is_weighted else 1)

    def use_min_dim_for_lookup(self, config: HardwarePerfConfig) -> bool:
        """Does a lookup forward read at least 32 columns of a row?"""
        return bool(getattr(config, "_use_min_dim_for_lookup", self._blocks))

    def use_block_usage_penalty(self, config: HardwarePerfConfig) -> bool:
        """Do narrow rows cost more?"""
        return bool(getattr(config, "_use_block_usage_penalty", self._blocks))

    def use_bytes_for_input_read_size(self, config: HardwarePerfConfig) -> bool:
        """Are ids counted in bytes, or one by one?"""
        return bool(getattr(config, "_use_bytes_for_input_read_size", True))

    def compute_fwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Of a lookup forward."""
        own = formula_of(config, "forward_compute", ctx.sharding_type)
        if own:
            return float(own(ctx))
        coefficients = config.get_coefficients_for_sharding(ctx.sharding_type, ctx.compute_kernel).fwd
        return self._lookup_forward(ctx, config, coefficients)

    def compute_bwd_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Of a lookup backward; the usual formula starts from the usual forward, whatever a config has for that."""
        if self.is_inference:
            return 0.0
        own = formula_of(config, "backward_compute", ctx.sharding_type)
        if own:
            return float(own(ctx))
        both = config.get_coefficients_for_sharding(ctx.sharding_type, ctx.compute_kernel)
        forward, coefficients = self._lookup_forward(ctx, config, both.fwd), both.bwd
        if coefficients is None:
            backward = forward * config.get_bwd_compute_multiplier(ctx.bwd_compute_multiplier)
        else:
            backward = self._size(ctx, config, coefficients, ctx.emb_dim, is_fwd=False) / ctx.device_bw
        if not ctx.is_weighted:
            return backward
        weighted = config.get_weighted_feature_bwd_compute_multiplier(ctx.weighted_feature_bwd_compute_multiplier)
        return backward * weighted + forward * config.coefficients.weighted_kernel_multiplier

    def compute_fwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Of sending rows back."""
        own = formula_of(config, "fwd_comms", ctx.sharding_type)
        return float(own(ctx)) if own else self._sent_forward(ctx)

    def compute_bwd_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Of sending gradients."""
        if self.is_inference:
            return 0.0
        own = formula_of(config, "bwd_comms", ctx.sharding_type)
        return float(own(ctx)) if own else self._sent_backward(ctx)

    def compute_input_dist_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Of sending ids: those of whole batches, whatever they are divided among."""
        own = formula_of(config, "input_dist_comms", ctx.sharding_type)
        if own:
            return float(own(ctx))
        size = math.ceil(ctx.batch_inputs * ctx.world_size * ctx.input_data_type_size)
        return size / _speed(ctx, CollectiveType.ALL_TO_ALL)

    def compute_prefetch_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Of fetching the rows that a cache misses.

        Raises:
            ValueError: `use_linear_regression_prefetch_estimate` is set, and the config has no coefficients for it.
        """
        own = formula_of(config, "prefetch_compute")
        if own:
            return float(own(ctx))
        coefficients = None
        if ctx.use_linear_regression_prefetch_estimate:
            method = formula_of(config, "prefetch_coefficient")
            coefficients = method() if method else config.coefficients.prefetch
            if coefficients is None:
                raise ValueError(
                    f"{type(config).__name__} has no coefficients for use_linear_regression_prefetch_estimate: give a"
                    " method with @prefetch_coefficient(), or leave the argument out"
                )
        lookups, missed = ctx.cache_stats_expected_lookups, ctx.expected_miss_rate
        if not ctx.is_uvm_caching or ctx.caching_ratio is None or lookups is None or missed is None:
            return 0.0
        ids, among = math.ceil(ctx.world_size * ctx.batch_inputs), self.get_prefetch_divisor(ctx)
        if coefficients is not None:
            lookups = min(lookups, ids, ctx.hash_size_for_clamping)
        fetches = missed * (ids if ctx.use_batch_inputs_for_expected_cache_fetches else lookups) / among
        if coefficients is not None:
            count = self.get_expected_lookups_for_prefetch(ctx, config) / among
            return float(
                coefficients.expected_num_lookups_coefficient * count
                + coefficients.expected_num_unique_lookups_coefficient * (lookups / among)
                + coefficients.expected_size_cache_fetches_coefficient * (fetches * ctx.emb_dim)
            )
        speed = ctx.hbm_to_ddr_mem_bw if config.hbm_to_ddr_mem_bw is None else config.hbm_to_ddr_mem_bw
        return fetches * ctx.emb_dim * ctx.table_data_type_size / speed

    def _lookup_forward(
        self, ctx: ShardPerfContext, config: HardwarePerfConfig, coefficients: PerfCoefficient
    ) -> float:
        penalty = compute_block_usage_penalty(ctx.emb_dim) if self.use_block_usage_penalty(config) else 1.0
        columns = max(ctx.emb_dim, 32) if self.use_min_dim_for_lookup(config) else ctx.emb_dim
        return self._size(ctx, config, coefficients, columns, is_fwd=True) * penalty / ctx.device_bw

    def _size(
        self, ctx: ShardPerfContext, config: HardwarePerfConfig, count: PerfCoefficient, columns: int, *, is_fwd: bool
    ) -> float:
        """Bytes that a lookup reads and writes, by what they count; ids and weights have one size."""
        ids = self.get_batch_inputs(ctx, config) * self._batches(ctx)
        id_size = math.ceil(ids * (ctx.input_data_type_size if self._counts_bytes(config) else 1))
        own = formula_of(config, "output_write_size", ctx.sharding_type)
        return (
            count.input_read_size_multiplier * (id_size * 2 if ctx.is_weighted else id_size)
            + count.lookup_size_multiplier * (ids * columns * ctx.table_data_type_size)
            + count.embedding_output_multiplier * (own(ctx, is_fwd=is_fwd) if own else self._output(ctx, is_fwd))
            + count.hash_size_multiplier * ctx.hash_size
        )

    def _counts_bytes(self, config: HardwarePerfConfig) -> bool:
        return self.use_bytes_for_input_read_size(config)

    def _batches(self, ctx: ShardPerfContext) -> int:
        """Ranks whose batches the shard serves."""
        return ctx.world_size

    def _output(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        """Bytes of rows that go back, or of their gradients."""
        rows = ctx.batch_outputs if ctx.is_pooled else ctx.batch_outputs / self.get_batch_inputs_divisor(ctx)
        return rows * self._batches(ctx) * ctx.emb_dim * self._element_size(ctx, is_fwd)

    def _element_size(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        return ctx.fwd_a2a_comm_data_type_size if is_fwd else ctx.bwd_a2a_comm_data_type_size

    def _sent_forward(self, ctx: ShardPerfContext) -> float:
        return self._output(ctx, True) / _speed(ctx, CollectiveType.ALL_TO_ALL)

    def _sent_backward(self, ctx: ShardPerfContext) -> float:
        return self._output(ctx, False) / _speed(ctx, CollectiveType.ALL_TO_ALL)


class TableWiseEvaluator(EmbeddingShardingPerfEvaluator):
    """Whole tables."""


class ColumnWiseEvaluator(TableWiseEvaluator):
    """Columns of all rows."""


class TableColumnWiseEvaluator(TableWiseEvaluator):
    """Columns of all rows, on one host."""


class RowWiseEvaluator(EmbeddingShardingPerfEvaluator):
    """Rows over all ranks: pooled rows are partial sums, which a reduce-scatter adds."""

    _blocks = False

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        return ctx.world_size

    def get_expected_lookups_for_prefetch(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        return float(math.ceil(ctx.batch_inputs * ctx.input_data_type_size)) * (2 if ctx.is_weighted else 1)

    def use_min_dim_for_lookup(self, config: HardwarePerfConfig) -> bool:
        return False

    def _counts_bytes(self, config: HardwarePerfConfig) -> bool:
        return True

    def _element_size(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        if not ctx.is_pooled:
            return super()._element_size(ctx, is_fwd)
        return ctx.fwd_sr_comm_data_type_size if is_fwd else ctx.bwd_sr_comm_data_type_size

    def _sent_forward(self, ctx: ShardPerfContext) -> float:
        return self._output(ctx, True) / _speed(ctx, CollectiveType.REDUCE_SCATTER)

    def _sent_backward(self, ctx: ShardPerfContext) -> float:
        sent = self._output(ctx, False)
        return sent / _speed(ctx, CollectiveType.ALL_GATHER) + _copies(ctx, sent)


class TableRowWiseEvaluator(RowWiseEvaluator):
    """Rows within a group: sums within it, then an all-to-all between groups; the way back the other way round."""

    def get_batch_inputs_divisor(self, ctx: ShardPerfContext) -> int:
        return ctx.intra_group_size

    def get_expected_lookups_for_prefetch(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        ids = ctx.batch_inputs / ctx.intra_group_size * ctx.world_size
        return float(math.ceil(ids * ctx.input_data_type_size)) * (2 if ctx.is_weighted else 1)

    def _element_size(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        return ctx.fwd_sr_comm_data_type_size if is_fwd else ctx.bwd_sr_comm_data_type_size

    def _sent_forward(self, ctx: ShardPerfContext) -> float:
        scatter = self._within(ctx, self._output(ctx, True), CollectiveType.REDUCE_SCATTER)
        return scatter + self._between(ctx, ctx.fwd_a2a_comm_data_type_size)

    def _sent_backward(self, ctx: ShardPerfContext) -> float:
        sent = self._output(ctx, False)
        gather = self._within(ctx, sent, CollectiveType.ALL_GATHER)
        return self._between(ctx, ctx.bwd_a2a_comm_data_type_size) + gather + _copies(ctx, sent)

    @staticmethod
    def _within(ctx: ShardPerfContext, size: float, kind: CollectiveType) -> float:
        group = ctx.intra_group_size
        return size / _speed(ctx, kind, world_size=group, local_world_size=min(group, ctx.local_world_size))

    @staticmethod
    def _between(ctx: ShardPerfContext, element_size: float) -> float:
        groups = ctx.num_twrw_groups
        if groups == 1:
            return 0.0
        speed = _speed(ctx, CollectiveType.ALL_TO_ALL, world_size=groups, local_world_size=1)
        return ctx.batch_outputs * groups * ctx.emb_dim * element_size / speed


class GridShardEvaluator(TableRowWiseEvaluator):
    """Columns, each cut into the rows of a group."""


class DataParallelEvaluator(EmbeddingShardingPerfEvaluator):
    """Replicas: an all-reduce of the gradients of all rows, looked up or not, and an optimizer over them."""

    _blocks = False

    def use_min_dim_for_lookup(self, config: HardwarePerfConfig) -> bool:
        return False

    def _counts_bytes(self, config: HardwarePerfConfig) -> bool:
        return True

    def _batches(self, ctx: ShardPerfContext) -> int:
        return 1

    def _element_size(self, ctx: ShardPerfContext, is_fwd: bool) -> float:
        return ctx.table_data_type_size

    def compute_input_dist_comms(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Nothing: ids stay where they are."""
        return 0.0

    def compute_prefetch_comp(self, ctx: ShardPerfContext, config: HardwarePerfConfig) -> float:
        """Nothing: there is no cache."""
        return 0.0

    def _sent_forward(self, ctx: ShardPerfContext) -> float:
        return 0.0

    def _sent_backward(self, ctx: ShardPerfContext) -> float:
        table = ctx.hash_size * ctx.emb_dim * ctx.table_data_type_size
        nodes = min(ctx.world_size / ctx.local_world_size, 2)
        reduce = table * (2 * nodes - 1) / nodes / _speed(ctx, CollectiveType.ALL_REDUCE)
        if ctx.world_size > 2 * ctx.local_world_size:
            reduce *= 2
        return reduce + table * DP_ELEMENTWISE_KERNELS_PERF_FACTOR / ctx.device_bw


def _copies(ctx: ShardPerfContext, size: float) -> float:
    return size * BATCHED_COPY_PERF_FACTOR / ctx.device_bw


def _speed(
    ctx: ShardPerfContext, kind: CollectiveType, *, world_size: int | None = None, local_world_size: int | None = None
) -> float:
    """Of an exchange, by default between all ranks; bytes per millisecond."""
    if ctx.comms_bandwidths is None:
        raise ValueError(f"comms_bandwidths of the context of table {ctx.table_name!r} is None: give the topology's")
    return ctx.comms_bandwidths.get_bw(
        local_world_size=ctx.local_world_size if local_world_size is None else local_world_size,
        world_size=ctx.world_size if world_size is None else world_size,
        collective_type=kind,
    )


_BY_TYPE = {
    "table_wise": TableWiseEvaluator,
    "row_wise": RowWiseEvaluator,
    "table_row_wise": TableRowWiseEvaluator,
    "column_wise": ColumnWiseEvaluator,
    "data_parallel": DataParallelEvaluator,
    "table_column_wise": TableColumnWiseEvaluator,
    "grid_shard": GridShardEvaluator,
}
TRAINING_EVALUATORS = {kind: evaluator() for kind, evaluator in _BY_TYPE.items()}
INFERENCE_EVALUATORS = {kind: evaluator(is_inference=True) for kind, evaluator in _BY_TYPE.items()}


def get_embedding_perf_sharding_evaluator(
    sharding_type: str, is_inference: bool = False
) -> EmbeddingShardingPerfEvaluator:
    """The formulas of a sharding type, by value.

    Raises:
        ValueError: there is no such type.
    """
    evaluators = INFERENCE_EVALUATORS if is_inference else TRAINING_EVALUATORS
    if sharding_type not in evaluators:
        raise ValueError(f"sharding type {sharding_type!r} is not one of {', '.join(evaluators)}")
    return evaluators[sharding_type]
