"""What a placed plan comes to, as numbers: balance, critical path, bytes in and out, what was reserved.

The definitions are TorchRec's, so that the numbers can be compared. Letters: W ranks, p the share [W] of each.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .formulas import Lookups, lookups_of_batch
from .memory import batch_bytes, optimizer_multiplier, optimizer_name
from .types import CriticalPathEstimate, ParameterConstraints, Perf, ShardingOption, Storage, Topology
from .utils import bytes_to_mb, get_num_poolings

Floats = npt.NDArray[np.float64]


def total_variation(p: Floats) -> float:
    """How far the share of a rank is from the mean at most."""
    return float(np.abs(p - 1 / p.size).max())


def total_distance(p: Floats) -> float:
    """How far the shares of all ranks are from the mean, added up."""
    return float(np.abs(p - 1 / p.size).sum())


def chi_divergence(p: Floats) -> float:
    """Chi-square divergence from equal shares: 0 to 1, where one rank has everything."""
    return float(((p - 1 / p.size) ** 2).sum() * p.size / (p.size - 1)) if p.size > 1 else 0.0


def kl_divergence(p: Floats) -> float:
    """Kullback-Leibler divergence from equal shares: 0 to 1, where one rank has everything."""
    some = p[p > 0]
    return float((some * np.log(p.size * some)).sum() / math.log(p.size)) if p.size > 1 else 0.0


IMBALANCE_MEASURES: dict[str, Callable[[Floats], float]] = {
    "Total Variation": total_variation,
    "Total Distance": total_distance,
    "Chi Divergence": chi_divergence,
    "KL Divergence": kl_divergence,
}


def imbalance(values: Sequence[float]) -> dict[str, float]:
    """All measures of how unevenly `values` [W] are spread; their sum is above 0."""
    shares = np.array(values, np.float64) / sum(values)
    return {name: measure(shares) for name, measure in IMBALANCE_MEASURES.items()}


def critical_path(plan: Sequence[ShardingOption]) -> CriticalPathEstimate:
    """Milliseconds of a step if ranks wait for each other between its phases.

    They wait after the exchanges of each module and sharding type, forward and backward, and after the computations of
    each direction; each time for the slowest.
    """
    comms: dict[tuple[str, str, str], defaultdict[int, float]] = {}
    computations: dict[str, defaultdict[int, float]] = {}
    for option in plan:
        for shard in option.shards:
            assert shard.rank is not None and shard.perf is not None
            for direction, exchange, compute in (
                ("fwd", shard.perf.fwd_comms, shard.perf.fwd_compute),
                ("bwd", shard.perf.bwd_comms, shard.perf.bwd_compute),
            ):
                phase = (option.path, option.sharding_type, direction)
                comms.setdefault(phase, defaultdict(float))[shard.rank] += exchange
                computations.setdefault(direction, defaultdict(float))[shard.rank] += compute
    return CriticalPathEstimate(
        sum(max(ranks.values()) for ranks in comms.values()),
        sum(max(ranks.values()) for ranks in computations.values()),
    )


@dataclass(frozen=True)
class Reserved:
    """What a storage reservation kept back: a share of device memory, and bytes of a rank for two purposes."""

    share: float
    dense: Storage
    kjt: Storage


def reserved(reservation: Any, topology: Topology) -> Reserved:
    """What `reservation` kept back of the devices of `topology`; zeros where it does not say."""
    total = topology.devices[0].storage.hbm
    kept = getattr(reservation, "_hbm_reserved_bytes", None)
    share = kept / total if kept and total else getattr(reservation, "_percentage", 0.0)
    dense, kjt = getattr(reservation, "_dense_storage", None), getattr(reservation, "_kjt_storage", None)
    return Reserved(share, dense or Storage(0, 0, 0), kjt or Storage(0, 0, 0))


def shard_io_bytes(
    option: ShardingOption, topology: Topology, batch_sizes: Sequence[int], num_poolings: Sequence[float]
) -> list[tuple[int, int]]:
    """Bytes of ids that come in and of embeddings that go out in a step, for each shard."""
    ids, outputs = lookups_of_batch(option.input_lengths, num_poolings, batch_sizes, option.is_pooled)
    element = float(option.tensor.element_size())
    # what is exchanged counts in the table's own type here, whatever a codec makes of it
    lookups = Lookups(ids, outputs, option.is_pooled, False, element, (element, element), (element, element), element)
    return [
        batch_bytes(
            option.sharding_type, topology.world_size, topology.intra_group_size, lookups, shard.size[0], shard.size[1]
        )
        for shard in option.shards
    ]


def optimizer_bytes(option: ShardingOption) -> int:
    """Bytes of optimizer state of the whole table, by the optimizer that it was given."""
    multiplier = optimizer_multiplier(optimizer_name(option.tensor), option.tensor.shape[-1])
    return math.ceil(weight_bytes(option) * multiplier)


def weight_bytes(option: ShardingOption) -> int:
    """Bytes of the whole table."""
    rows, columns = option.tensor.shape
    return int(rows * columns * option.tensor.element_size())


@dataclass(frozen=True, eq=False)
class RankTotals:
    """What every rank holds and does [W].

    Args:
        tables_hbm: device bytes of tables alone; `hbm` and `ddr` have what was reserved for dense parts and ids too.
        perf: milliseconds by kind.
        input_mb, output_mb: ids that come in and embeddings that go out, in a step.
        shards: how many of each sharding type.
    """

    tables_hbm: list[int]
    hbm: list[int]
    ddr: list[int]
    perf: list[Perf]
    input_mb: list[float]
    output_mb: list[float]
    shards: list[Counter[str]]


def rank_totals(
    sharding_plan: Any,
    topology: Topology,
    best_plan: Sequence[ShardingOption],
    constraints: Mapping[str, ParameterConstraints] | None,
    kept: Reserved,
) -> RankTotals:
    """Sums over the shards of each rank; tables that `sharding_plan` does not name count no shards, in or out."""
    named = {f"{module}.{name}" for module, parameters in sharding_plan.plan.items() for name in parameters}
    ranks = range(topology.world_size)
    totals = RankTotals(
        [0 for _ in ranks],
        [kept.dense.hbm + kept.kjt.hbm for _ in ranks],
        [kept.dense.ddr + kept.kjt.ddr for _ in ranks],
        [Perf(0, 0, 0, 0) for _ in ranks],
        [0.0 for _ in ranks],
        [0.0 for _ in ranks],
        [Counter[str]() for _ in ranks],
    )
    for option in best_plan:
        constraint = (constraints or {}).get(option.name)
        batch_sizes = (constraint and constraint.batch_sizes) or [option.batch_size] * option.num_inputs
        io_bytes = shard_io_bytes(option, topology, batch_sizes, get_num_poolings(constraints, option))
        for shard, (incoming, outgoing) in zip(option.shards, io_bytes, strict=True):
            rank = shard.rank
            assert rank is not None and shard.storage is not None and shard.perf is not None
            totals.tables_hbm[rank] += shard.storage.hbm
            totals.hbm[rank] += shard.storage.hbm
            totals.ddr[rank] += shard.storage.ddr
            totals.perf[rank] += shard.perf
            if option.fqn in named:
                totals.input_mb[rank] += bytes_to_mb(incoming)
                totals.output_mb[rank] += bytes_to_mb(outgoing)
                totals.shards[rank][option.sharding_type] += 1
    return totals
