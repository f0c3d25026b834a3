"""TorchRec 1.8.0's formulas for the time of a shard: the one place where they stand; `torchrec_memory` has its bytes.

`shard_estimators` applies them to sharding options, `cost_torchrec` to tables and ways. Floating point is done in
TorchRec's order: sizes are rounded up, where an error of the last bit would become a byte.

Letters: W ranks, G ranks that a fast link joins, D columns and H rows of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..hardware import CollectiveType, Perf
from ..topology import Topology
from .constants import (
    BATCHED_COPY_PERF_FACTOR,
    BIGINT_DTYPE,
    DP_ELEMENTWISE_KERNELS_PERF_FACTOR,
    FULL_BLOCK_EMB_DIM,
    HALF_BLOCK_PENALTY,
    QUARTER_BLOCK_PENALTY,
    WEIGHTED_KERNEL_MULTIPLIER,
)


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


def lookups_of_batch(
    pooling_factors: Sequence[float], num_poolings: Sequence[float], batch_sizes: Sequence[int], pooled: bool
) -> tuple[float, float]:
    """Ids that a rank's batch brings to a table, and rows that it gets back."""
    features = list(zip(pooling_factors, num_poolings, batch_sizes, strict=True))
    ids = sum(length * count * samples for length, count, samples in features)
    return ids, sum(min(1.0, length) * count * samples for length, count, samples in features) if pooled else ids


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
