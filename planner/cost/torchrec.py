"""TorchRec's own cost model for our search: `cost="torchrec"`.

A choice takes as long as TorchRec's `Perf.total` says of its shards and as many bytes as its `Storage`. TorchRec counts
no time for distributing input, so the part "input_comms" is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..constants import KV_CACHING_RATIO, UVM_CACHING_RATIO, kernel_bw_lookup, tier_bw_lookup
from ..constraints import ParameterConstraints
from ..search.problem import PARTS, Choice
from ..tables import Feature, Table
from ..topology import Perf, Topology
from ..torchrec.enumerators import (
    allowed_kernels,
    allowed_types,
    compute_kernels,
    cuts,
    row_shares,
    sharding_types,
    tiered,
)
from ..torchrec.evaluators import TRAINING_EVALUATORS
from ..torchrec.hardware import EmbeddingPerfEstimatorConfig
from ..torchrec.shard_context import ShardPerfContext
from ..torchrec.sharding_option import PipelineType
from ..torchrec.storage_estimators import (
    Keeping,
    Lookups,
    l1_bytes,
    lookups_of_batch,
    shard_storage,
)
from ..torchrec.utils import element_bytes
from .ways import Way

# for every machine the same formulas
_AS_TORCHREC = EmbeddingPerfEstimatorConfig()
_FIELDS = {
    "prefetch": "prefetch_compute",
    "fwd_compute": "fwd_compute",
    "fwd_comms": "fwd_comms",
    "bwd_compute": "bwd_compute",
    "bwd_comms": "bwd_comms",
}


class TorchRecCost:
    """Prices ways as TorchRec's estimators price sharding options.

    Args:
        topology: its bandwidths count.
        batch_size: samples of one rank.
        constraints: by table name, the same that the planner is given; caches, virtual tables and output types are read
            here, the rest by `ways`.
        column_widths: fewest columns of a column shard; TorchRec knows one number, more give more ways. A constraint's
            `min_partition` goes first.
        pipeline: decides how many batches are in memory at once.
    """

    name = "torchrec"

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        *,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        column_widths: Sequence[int] = (128,),
        pipeline: PipelineType = PipelineType.NONE,
    ) -> None:
        self._topology = topology
        self._batch_size = batch_size
        self._constraints = dict(constraints or {})
        self._column_widths = tuple(column_widths)
        self._pipeline = pipeline

    def at(self, topology: Topology, batch_size: int) -> TorchRecCost:
        """The same model for other machines or another batch size."""
        return TorchRecCost(
            topology, batch_size, constraints=self._constraints, column_widths=self._column_widths,
            pipeline=self._pipeline,
        )  # fmt: skip

    def base_ms(self, tables: Sequence[Table]) -> float:
        """TorchRec counts nothing beside tables."""
        return 0.0

    def ways(self, table: Table, constraint: ParameterConstraints | None = None) -> list[Way]:
        """TorchRec's types and kernels that the constraint allows, also those that our engine does not run."""
        machine, asked = self._topology, constraint or ParameterConstraints()
        device = machine.compute_device
        has_ssd = any(hardware.storage.ssd > 0 for hardware in machine.devices)
        narrowest = (asked.min_partition,) if asked.min_partition else self._column_widths
        ways: dict[Way, None] = {}
        for kind in allowed_types(sharding_types(table.pooled, device), asked.sharding_types):
            offered = [*compute_kernels(kind, device)]
            if asked.sharding_types and asked.compute_kernels and "dense" not in offered:
                # of a sharder that offers it for cut tables
                offered.append("dense")
            # TorchRec has them on a GPU alone
            offered += [kernel for kernel in tiered(kind, asked) if kernel not in offered]
            for kernel in allowed_kernels(offered, asked.compute_kernels, has_ssd):
                for width in narrowest:
                    widths, rows, copies = cuts(
                        kind, table.num_embeddings, table.embedding_dim, machine.world_size, machine.intra_group_size,
                        min_partition=width, shares=row_shares(machine),
                    )  # fmt: skip
                    one_host = kind == "table_column_wise"
                    ways[Way(kind, kernel, tuple(widths), tuple(rows) * copies, one_host, copies > 1)] = None
        return list(ways)

    def price(self, table: Table, way: Way) -> Choice:
        """Milliseconds and bytes of the shards of a way.

        Raises:
            ValueError: the device has no such kernel.
        """
        machine, constraint = self._topology, self._constraints.get(table.name)
        cache = constraint.cache_params if constraint else None
        speed = kernel_bw_lookup(
            machine.compute_device, way.compute_kernel, machine.hbm_mem_bw, machine.ddr_mem_bw,
            machine.hbm_to_ddr_mem_bw, cache.load_factor if cache else None,
            bool(cache and cache.prefetch_pipeline), machine.ssd_mem_bw,
        )  # fmt: skip
        speed = speed or tier_bw_lookup(
            machine.compute_device, way.compute_kernel, machine.ddr_mem_bw, machine.ssd_mem_bw
        )
        if speed is None:
            raise ValueError(
                f"table {table.name!r}: kernel {way.compute_kernel!r} has no known bandwidth on"
                f" {machine.compute_device}"
            )
        lookups, kept = self._lookups(table, constraint), _keeping(table, way, constraint)
        context, evaluator = self._context(table, way, speed), TRAINING_EVALUATORS[way.sharding_type]
        shape = len(way.widths), way.span
        parts, hbm, ddr = np.zeros((len(PARTS), *shape)), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        # shards of one size cost the same
        for width in dict.fromkeys(way.widths):
            blocks = np.array(way.widths) == width
            for rows in dict.fromkeys(way.rows):
                where = np.ix_(blocks, np.array(way.rows) == rows)
                context.hash_size, context.emb_dim = rows, width
                perf = evaluator.compute_perf(context, _AS_TORCHREC)
                parts[(slice(None), *where)] = _parts(perf)[:, None, None]
                storage = shard_storage(
                    way.sharding_type, machine.compute_device, machine.world_size, machine.intra_group_size, lookups,
                    kept, rows, width, pipeline=self._pipeline,
                )  # fmt: skip
                hbm[where], ddr[where] = storage.hbm, storage.ddr
        return Choice(way.sharding_type, way.compute_kernel, way.widths, parts, hbm, ddr, way.one_host)

    def _lookups(self, table: Table, constraint: ParameterConstraints | None) -> Lookups:
        ids, outputs = lookups_of_batch(*self._of_features(table), table.pooled)
        own = table.element_bytes
        output = element_bytes(constraint.output_dtype) if constraint and constraint.output_dtype else own
        return Lookups(ids, outputs, table.pooled, own, output)

    def _of_features(self, table: Table) -> tuple[list[float], list[float], list[int]]:
        """Pooling factors, numbers of poolings and batch sizes."""
        # TorchRec takes a table of which nothing is known for one with one id a sample
        features = table.features or (Feature(table.name),)
        return (
            [f.pooling_factor for f in features],
            [f.num_poolings for f in features],
            [f.batch_size or self._batch_size for f in features],
        )

    def _context(self, table: Table, way: Way, speed: float) -> ShardPerfContext:
        machine, constraint = self._topology, self._constraints.get(table.name)
        cache = constraint.cache_params if constraint else None
        stats, ratio = (cache.stats, cache.load_factor) if cache else (None, None)
        is_cached = stats is not None and ratio is not None
        pooling_factors, num_poolings, batch_sizes = self._of_features(table)
        own = table.element_bytes
        return ShardPerfContext(
            sharding_type=way.sharding_type,
            compute_kernel=way.compute_kernel,
            batch_sizes=batch_sizes,
            num_poolings=num_poolings,
            input_lengths=pooling_factors,
            world_size=machine.world_size,
            local_world_size=machine.local_world_size,
            intra_group_size=machine.intra_group_size,
            table_data_type_size=own,
            fwd_a2a_comm_data_type_size=own,
            bwd_a2a_comm_data_type_size=own,
            fwd_sr_comm_data_type_size=own,
            bwd_sr_comm_data_type_size=own,
            device_bw=speed,
            hbm_to_ddr_mem_bw=machine.hbm_to_ddr_mem_bw,
            comms_bandwidths=machine.comms_bandwidths,
            is_weighted=table.weighted,
            is_pooled=table.pooled,
            bwd_compute_multiplier=machine.bwd_compute_multiplier,
            weighted_feature_bwd_compute_multiplier=machine.weighted_feature_bwd_compute_multiplier,
            caching_ratio=ratio,
            table_name=table.name,
            cache_stats_expected_lookups=stats.expected_lookups if is_cached and stats else None,
            expected_miss_rate=stats.expected_miss_rate(ratio) if is_cached and stats and ratio is not None else None,
        )


def _keeping(table: Table, way: Way, constraint: ParameterConstraints | None) -> Keeping:
    cache = constraint.cache_params if constraint else None
    passes = cache.multipass_prefetch_config if cache else None
    return Keeping(
        table.num_embeddings,
        table.embedding_dim,
        way.compute_kernel,
        optimizer=table.optimizer,
        caching_ratio=(cache and cache.load_factor) or UVM_CACHING_RATIO,
        kv_l1_bytes=l1_bytes(constraint.key_value_params if constraint else None),
        kv_caching_ratio=KV_CACHING_RATIO,
        virtual=bool(constraint and constraint.use_virtual_table),
        prefetch_passes=passes.num_passes if passes else None,
    )


def _parts(perf: Perf) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([getattr(perf, _FIELDS[part]) if part in _FIELDS else 0.0 for part in PARTS])
