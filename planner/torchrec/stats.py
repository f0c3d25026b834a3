"""A plan's statistics in TorchRec's terms, as text, written to the log at level info.

The sections, their names and their order are TorchRec's, and so are the definitions of balance, critical path, bytes in
and out, and what was reserved, so that the numbers can be compared; `print(plan)` and `shardwise plan explain` tell
more.

Letters: W ranks, p the share [W] of each.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from ..constraints import ParameterConstraints
from ..topology import Perf, Storage, Topology
from .sharding_option import SharderDataMap, ShardingOption
from .storage_estimators import (
    Lookups,
    batch_bytes,
    lookups_of_batch,
    optimizer_multiplier,
    optimizer_name,
)
from .types import CriticalPathEstimate, Enumerator, PlanDebugStats, Stats, StorageReservation
from .utils import (
    _find_imbalance_tables,
    build_sharder_data_map,
    bytes_to_gb,
    bytes_to_mb,
    get_num_poolings,
    sharder_name,
)

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
    """The memory that a reservation kept back: a share of the device's, and bytes of a rank for two purposes."""

    share: float
    dense: Storage
    kjt: Storage


def reserved(reservation: Any, topology: Topology) -> Reserved:
    """The memory that `reservation` kept back of `topology`'s devices; zeros where it does not say."""
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
    lookups = Lookups(ids, outputs, option.is_pooled, element, element)
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
    """Every rank's storage and time [W].

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


ABBREVIATIONS = {
    "data_parallel": "DP",
    "table_wise": "TW",
    "column_wise": "CW",
    "row_wise": "RW",
    "table_row_wise": "TWRW",
    "table_column_wise": "TWCW",
    "grid_shard": "GS",
}
# what the time of a rank is made of: the field and its name
KINDS = {
    "fwd_compute": "Forward Compute",
    "fwd_comms": "Forward Comms",
    "bwd_compute": "Backward Compute",
    "bwd_comms": "Backward Comms",
    "prefetch_compute": "Prefetch Compute",
}
LEGEND = (
    "",
    "Perf: Total perf (Forward compute, Forward comms, Backward compute, Backward comms, Prefetch compute)",
    "Input: MB/iteration, Output: MB/iteration, Shards: number of tables",
    "HBM: estimated peak memory usage for shards, dense tensors, and features (KJT)",
)
PARAMETER_COLUMNS = (
    "FQN", "Sharding", "Compute Kernel", "Perf (ms)", "Storage (HBM, DDR, SSD)", "Cache Load Factor",
    "Sum Pooling Factor", "Sum Num Poolings", "Num Indices", "Output", "Weighted", "Sharder", "Features",
    "Emb Dim (CW Dim)", "Hash Size", "Ranks",
)  # fmt: skip
# ranks within a megabyte of each other share a line
SAME_MB = 1.0
TOP = 5


def rank_section(totals: RankTotals, topology: Topology, kept: Reserved) -> list[str]:
    """A table of ranks."""
    rows: list[Sequence[object]] = [
        ("Rank", "HBM (GB)", "DDR (GB)", "Perf (ms)", "Input (MB)", "Output (MB)", "Shards")
    ]
    types = sorted(set().union(*totals.shards), key=_abbreviation)
    for rank, device in enumerate(topology.devices):
        hbm = 0.0 if topology.compute_device == "cpu" else (1 - kept.share) * device.storage.hbm
        rows.append(
            (
                rank,
                f"{_gb(totals.hbm[rank])} ({_share(totals.hbm[rank], hbm)})",
                f"{_gb(totals.ddr[rank])} ({_share(totals.ddr[rank], device.storage.ddr)})",
                _perf(totals.perf[rank]),
                round(totals.input_mb[rank], 2),
                round(totals.output_mb[rank], 2),
                " ".join(f"{_abbreviation(kind)}: {totals.shards[rank][kind]}" for kind in types),
            )
        )
    return [*_table(rows), *LEGEND]


def parameter_section(
    best_plan: Sequence[ShardingOption],
    constraints: Mapping[str, ParameterConstraints] | None,
    sharder_data: SharderDataMap,
    planned: bool,
) -> list[str]:
    """A table of tables; batch sizes only where a constraint has some."""
    batch_sizes = {name: constraint.batch_sizes for name, constraint in (constraints or {}).items()}
    any_sizes = any(batch_sizes.get(option.name) for option in best_plan)
    rows: list[Sequence[object]] = [(*PARAMETER_COLUMNS, "Batch Sizes") if any_sizes else PARAMETER_COLUMNS]
    for option in best_plan:
        poolings = get_num_poolings(constraints, option)
        indices = sum(length * times for length, times in zip(option.input_lengths, poolings, strict=True))
        data, storage = sharder_data.get(option.module_type_key), option.total_storage
        load_factor = None
        if option.compute_kernel == "fused_uvm_caching":
            load_factor = option.cache_load_factor
            if load_factor is None and data is not None:
                load_factor = data.fused_params.get("cache_load_factor")
        by_column = option.sharding_type in ("column_wise", "table_column_wise", "grid_shard")
        row: list[object] = [
            option.fqn,
            _abbreviation(option.sharding_type),
            option.compute_kernel,
            _perf(sum((shard.perf for shard in option.shards if shard.perf), Perf(0, 0, 0, 0))),
            "({} GB, {} GB, {} GB)".format(*(_gb(size) for size in (storage.hbm, storage.ddr, storage.ssd))),
            load_factor,
            round(sum(option.input_lengths), 3),
            round(sum(poolings), 3),
            round(indices, 3),
            "pooled" if option.is_pooled else "sequence",
            "weighted" if option.is_weighted else "unweighted",
            f"{option.module_type_key.rsplit('.', 1)[-1]}Sharder" if data else None,
            option.num_inputs,
            f"{option.tensor.shape[1]} ({option.shards[0].size[1]})" if by_column else option.tensor.shape[1],
            option.tensor.shape[0],
            _ranks(sorted(shard.rank for shard in option.shards if shard.rank is not None)) if planned else None,
        ]
        if any_sizes:
            row.append(_runs(batch_sizes.get(option.name) or ()) or "n/a")
        rows.append(row)
    return ["Parameter Info:", *_table(rows)]


def kernel_sections(
    best_plan: Sequence[ShardingOption], constraints: Mapping[str, ParameterConstraints] | None
) -> list[list[str]]:
    """Tables and bytes by kernel, and how many kernels a constraint decided."""
    kernels: dict[str, list[ShardingOption]] = {}
    for option in sorted(best_plan, key=lambda option: option.compute_kernel):
        kernels.setdefault(option.compute_kernel, []).append(option)

    def each(title: str, value: Callable[[list[ShardingOption]], str]) -> list[str]:
        return [f"{title}:", *(f"   {kernel}: {value(options)}" for kernel, options in kernels.items())]

    def memory(options: list[ShardingOption]) -> str:
        total = sum((option.total_storage for option in options), Storage(0, 0, 0))
        return f"HBM: {_gb(total.hbm)} GB, DDR: {_gb(total.ddr)} GB, SSD: {_gb(total.ssd)} GB"

    decided = [o for o in best_plan if (c := (constraints or {}).get(o.name)) is not None and c.compute_kernels]
    by_kernel = Counter(option.compute_kernel for option in decided)
    return [
        each("Compute Kernels Count", lambda options: str(len(options))),
        each("Compute Kernels Embedding Weights", lambda options: f"{_gb(sum(map(weight_bytes, options)))} GB"),
        each("Compute Kernels Optimizer State", lambda options: f"{_gb(sum(map(optimizer_bytes, options)))} GB"),
        each("Compute Kernels Total Estimated Memory (weights + optimizer + IO + pipeline)", memory),
        [
            "Compute Kernel Constraints:",
            f"   Hardcoded: {len(decided)}, Auto-selected: {len(best_plan) - len(decided)}",
            *(f"   Hardcoded {kernel}: {by_kernel[kernel]}" for kernel in sorted(by_kernel)),
        ],
    ]


def imbalance_section(totals: RankTotals) -> list[list[str]]:
    """How unevenly time and memory are spread, by every measure."""
    spread: dict[str, Sequence[float]] = {
        "Total Perf": [perf.total for perf in totals.perf],
        "HBM": totals.hbm,
        "DDR": totals.ddr,
    }
    sections = [
        [f"{what} Imbalance Statistics", *(f"{name}: {value:.3f}" for name, value in imbalance(values).items())]
        for what, values in spread.items()
        if sum(values) > 0
    ]
    if sections:
        sections.append(["Imbalance stats range 0-1, higher means more imbalanced"])
    return sections


def peak_sections(totals: RankTotals, best_plan: Sequence[ShardingOption]) -> list[list[str]]:
    """The slowest and the fullest ranks, and the critical path."""
    times = [perf.total for perf in totals.perf]
    kinds = {name: [float(getattr(perf, kind)) for perf in totals.perf] for kind, name in KINDS.items()}
    path = critical_path(best_plan)
    hbm = totals.hbm
    return [
        [
            f"Maximum of Total Perf: {_slowest(times)}",
            f"Mean Total Perf: {round(statistics.mean(times), 3)} ms",
            f"Max Total Perf is {_above_mean(times):.3g}% greater than the mean",
            *(f"Maximum of {name}: {_slowest(values)}" for name, values in kinds.items()),
            f"Sum of Maxima: {round(sum(map(max, kinds.values())), 3)} ms",
        ],
        [
            "Estimated Sharding Distribution",
            f"Sparse only Max HBM: {_held(totals.tables_hbm, max(totals.tables_hbm))}",
            f"Sparse only Min HBM: {_held(totals.tables_hbm, min(totals.tables_hbm))}",
            f"Max HBM: {_held(hbm, max(hbm))}",
            f"Min HBM: {_held(hbm, min(hbm))}",
            f"Mean HBM: {_held(hbm, round(statistics.mean(hbm)))}",
            f"Low Median HBM: {_held(hbm, statistics.median_low(hbm))}",
            f"High Median HBM: {_held(hbm, statistics.median_high(hbm))}",
            f"Critical Path (comms): {round(path.comms_estimate, 3)}",
            f"Critical Path (compute): {round(path.comp_estimate, 3)}",
            f"Critical Path (comms + compute): {round(path.total(), 3)}",
            f"Max HBM is {_above_mean(hbm):.3g}% greater than the mean",
        ],
        [
            f"Top HBM Memory Usage Estimation: {_gb(max(hbm))} GB",
            *(
                f"Top Tier #{tier} Estimated Peak HBM Pressure: {_gb(size)} GB on {_on(ranks)}"
                for tier, size, ranks in reversed(_tiers(hbm))
            ),
        ],
    ]


def reservation_section(topology: Topology, kept: Reserved) -> list[list[str]]:
    """The memory reserved on each rank, by purpose."""
    device = topology.devices[0].storage
    return [
        [
            "Reserved Memory:",
            f"   HBM: {_gb(int(kept.share * device.hbm))} GB",
            f"   Percent of Total HBM: {kept.share:.0%}",
            "Planning Memory:",
            f"   HBM: {_gb(int((1 - kept.share) * device.hbm))} GB, DDR: {_gb(device.ddr)} GB",
            f"   Percent of Total HBM: {1 - kept.share:.0%}",
        ],
        ["Dense Storage (per rank):", f"   HBM: {_gb(kept.dense.hbm)} GB, DDR: {_gb(kept.dense.ddr)} GB"],
        ["KJT Storage (per rank):", f"   HBM: {_gb(kept.kjt.hbm)} GB, DDR: {_gb(kept.kjt.ddr)} GB"],
    ]


def top_tables_section(best_plan: Sequence[ShardingOption]) -> list[str]:
    """The tables to move if the slowest or the fullest ranks are to be relieved."""
    lines = ["Top 5 Tables Causing Max Perf:"]
    lines += [f"   {option.name}" for option in _find_imbalance_tables(best_plan)[:TOP]]
    lines.append("Top 5 Tables Causing Max HBM:")
    for option in _find_imbalance_tables(best_plan, target_imbalance="hbm")[:TOP]:
        storage = option.shards[0].storage
        assert storage is not None
        ranks = [shard.rank for shard in option.shards if shard.rank is not None]
        lines.append(f"   {option.name}: {_gb(storage.hbm)} GB on {_on(ranks)}")
    return lines


def round_to_one_sigfig(x: float) -> str:
    """0.0123 as "0.01"."""
    return f"{float(f'{x:.1g}'):g}"


def _table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows of cells, the first the names of the columns, set to the right."""
    widths = [max(len(str(row[k])) for row in rows) for k in range(len(rows[0]))]
    lines = ["   ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [lines[0], "   ".join("-" * width for width in widths), *lines[1:]]


def _abbreviation(sharding_type: str) -> str:
    return ABBREVIATIONS.get(sharding_type, sharding_type)


def _gb(size: float) -> float:
    return round(bytes_to_gb(int(size)), 3)


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0:.0%}"


def _perf(perf: Perf) -> str:
    parts = (float(getattr(perf, kind)) for kind in KINDS)
    return f"{round(perf.total, 3)} ({','.join(str(round(x)) if x >= 1 else round_to_one_sigfig(x) for x in parts)})"


def _ranks(ranks: Sequence[int]) -> str:
    """ "0-7" for a run of at least two, else every rank."""
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _on(ranks: Sequence[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {_ranks(ranks)}" if ranks else "no rank"


def _slowest(times: Sequence[float]) -> str:
    most = max(times)
    return f"{round(most, 3)} ms on {_on([rank for rank, time in enumerate(times) if time == most])}"


def _above_mean(values: Sequence[float]) -> float:
    """By how many percent the largest is above the mean."""
    mean = statistics.mean(values)
    return (max(values) - mean) / mean * 100 if mean > 0 else 0.0


def _same(size: float, other: float) -> bool:
    return math.isclose(bytes_to_mb(size), bytes_to_mb(other), abs_tol=SAME_MB)


def _held(sizes: Sequence[int], size: int) -> str:
    return f"{_gb(size)} GB on {_on([rank for rank, held in enumerate(sizes) if _same(held, size)])}"


def _tiers(sizes: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """The fullest ranks: number of the tier, its bytes, its ranks; ranks with about the same bytes are one tier."""
    tiers: list[tuple[int, int, list[int]]] = []
    left = list(range(len(sizes)))
    while left and len(tiers) < TOP:
        most = max(sizes[rank] for rank in left)
        tier = [rank for rank in left if _same(sizes[rank], most)]
        tiers.append((len(tiers) + 1, most, tier))
        left = [rank for rank in left if rank not in tier]
    return tiers


def _runs(values: Sequence[int]) -> str:
    """ "512 * 2, 256" for 512, 512, 256."""
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return ", ".join(f"{value} * {count}" if count > 1 else str(value) for value, count in runs)


__all__ = ["EmbeddingStats", "NoopEmbeddingStats", "round_to_one_sigfig"]

logger = logging.getLogger(__name__)


class EmbeddingStats(Stats):
    """Tells of a plan: what each rank holds and does, each table, memory by kernel, balance, what was reserved."""

    def log(
        self,
        sharding_plan: Any,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        sharders: list[Any] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = True,
        debug_stats: PlanDebugStats | None = None,
    ) -> None:
        """Write `render` of the same arguments to the log, a line at a time, at level info."""
        text = self.render(
            sharding_plan,
            topology,
            batch_size,
            storage_reservation,
            num_proposals,
            num_plans,
            run_time,
            best_plan,
            constraints,
            sharders,
            enumerator,
            debug,
        )
        for line in text.splitlines():
            logger.info("%s", line)

    def render(
        self,
        sharding_plan: Any,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: Mapping[str, ParameterConstraints] | None = None,
        sharders: Sequence[Any] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = True,
    ) -> str:
        """The whole text.

        Args:
            sharding_plan: TorchRec's or ours; empty means that there is no plan, only options.
            topology: with all the storage of the devices, nothing reserved.
            batch_size: samples of one rank.
            storage_reservation: that made the storage that the plan had to stay within.
            num_proposals, num_plans: proposals made, and those that could be placed.
            run_time: seconds of the search.
            best_plan: the option of each table, with estimates and, if there is a plan, ranks.
            constraints: by table name.
            sharders, enumerator: where defaults of cached tables stand.
            debug: each table, balance and the reservation too.
        """
        planned = bool(sharding_plan.plan)
        kept = reserved(storage_reservation, topology)
        totals = rank_totals(sharding_plan, topology, best_plan, constraints, kept) if planned else None
        summary = f"Evaluated {num_proposals} proposal(s), found {num_plans} possible plan(s)"
        sections = [["--- Planner Statistics ---", f"--- {summary}, ran for {run_time:.2f}s ---"]]
        if totals:
            sections.append(rank_section(totals, topology, kept))
        if debug:
            sharder_data = getattr(enumerator, "_sharder_data_map", None)
            if sharder_data is None:
                sharder_data = build_sharder_data_map({sharder_name(s.module_type): s for s in sharders or ()})
            sections.append(parameter_section(best_plan, constraints, sharder_data, planned))
        sections.append([f"Batch Size: {batch_size}"])
        if not planned:
            sections.append([f"World Size: {topology.world_size}"])
        sections += kernel_sections(best_plan, constraints)
        if debug:
            if totals:
                sections += imbalance_section(totals) + peak_sections(totals, best_plan)
            sections += reservation_section(topology, kept)
            if totals:
                sections.append(top_tables_section(best_plan))
        return "\n\n".join("\n".join(section) for section in sections) + "\n"


class NoopEmbeddingStats(Stats):
    """Tells nothing."""

    def log(
        self,
        sharding_plan: Any,
        topology: Topology,
        batch_size: int,
        storage_reservation: StorageReservation,
        num_proposals: int,
        num_plans: int,
        run_time: float,
        best_plan: list[ShardingOption],
        constraints: dict[str, ParameterConstraints] | None = None,
        sharders: list[Any] | None = None,
        enumerator: Enumerator | None = None,
        debug: bool = True,
        debug_stats: PlanDebugStats | None = None,
    ) -> None:
        """Nothing."""
