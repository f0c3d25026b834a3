"""The sections of `EmbeddingStats`, each a list of lines."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from .stats_totals import RankTotals, Reserved, critical_path, imbalance, optimizer_bytes, weight_bytes
from .types import ParameterConstraints, Perf, SharderDataMap, ShardingOption, Storage, Topology
from .utils import _find_imbalance_tables, bytes_to_gb, bytes_to_mb, get_num_poolings

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
# ranks within a megabyte of each other are told together
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
        data = sharder_data.get(option.module_type_key)
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
            _storage(option.total_storage),
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
        held = sum((option.total_storage for option in options), Storage(0, 0, 0))
        return f"HBM: {_gb(held.hbm)} GB, DDR: {_gb(held.ddr)} GB, SSD: {_gb(held.ssd)} GB"

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
    """What was reserved on each rank and for what."""
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


def _storage(storage: Storage) -> str:
    return f"({_gb(storage.hbm)} GB, {_gb(storage.ddr)} GB, {_gb(storage.ssd)} GB)"


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
