"""A run in a few lines: its plan in three, its epochs as a table, what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.embeddings.tiers import CacheMetrics
from shardwise.planner.plan.explanation import counted, headline, ms, share, size
from shardwise.planner.plan.planned import Planned

# tables of a rank that are told by name
NAMED = 8


def plan_in_short(planned: Planned) -> str:
    """The plan in three lines: for what, how fast and how far from the best, and which tables are where."""
    solution, loads = planned.certified, planned.loads
    ids = sum(feature.pooling_factor for table in planned.tables for feature in table.features)
    first = f"plan: {headline(planned)}, for {planned.batch_size:,} samples a rank with {ids:.3g} ids each"
    second = f"  a step takes {ms(float(loads.time_ms.max()))} ms by prediction"
    if solution.proven:
        second += "; no other plan is faster"
    elif solution.bound_ms > 0:
        second += f"; no plan can be faster by more than {share(solution.gap)}"
    bytes_of = [int(hbm + ddr) for hbm, ddr in zip(loads.hbm.tolist(), loads.ddr.tolist(), strict=True)]
    tables: dict[int, list[str]] = {rank: [] for rank in range(planned.topology.world_size)}
    for table, choice, starts in planned.placed():
        ranks = (
            range(len(tables))
            if choice.sharding_type == "data_parallel"
            else {(start + place) for start in starts for place in range(choice.span)}
        )
        for rank in ranks:
            tables[rank].append(table.name.removeprefix("t_"))
    on_ranks = [
        f"rank {rank}: {', '.join(names) if len(names) <= NAMED else counted(len(names), 'table')}"
        f" ({size(bytes_of[rank])})"
        for rank, names in list(tables.items())[:4]
    ]
    more = "" if len(tables) <= len(on_ranks) else f"; {counted(len(tables) - len(on_ranks), 'rank')} more"
    return "\n".join([first, second, f"  {'; '.join(on_ranks)}{more}"])


def epochs_table(epochs: Sequence[Mapping[str, float]], chosen: int) -> list[str]:
    """A line for each epoch, the best one marked; `chosen` is its number from 0 on."""
    lines = ["  ".join(f"{name:>13}" for name in epochs[0])]
    for number, epoch in enumerate(epochs):
        cells = [f"{value:13d}" if isinstance(value, int) else f"{value:13.4f}" for value in epoch.values()]
        lines.append("  ".join(cells) + ("  best, by test NE" if number == chosen else ""))
    return lines


def closing(result: Mapping[str, Any]) -> list[str]:
    """The result in sentences."""
    best, int8 = result["epochs"][result["best_epoch"] - 1], result["int8"]
    lines = [f"best epoch: {best['epoch']}, test AUC {best['test_auc']:.4f}, NE {best['test_ne']:.4f}"]
    if "ceiling_auc" in result:
        ceiling = result["ceiling_auc"]
        lines.append(f"the labels are noisy by design: a perfect model would score a test AUC of {ceiling:.4f}")
    lines.append(
        f"int8 tables: test AUC {int8['test_auc']:.4f} (fp32 {best['test_auc']:.4f}),"
        f" {int8['fp32_table_bytes'] / 1e6:.2f} MB become {int8['table_bytes'] / 1e6:.2f} MB,"
        f" {int8['ratio']:.2f}x smaller"
    )
    return lines


def hit_rate(metrics: Mapping[str, CacheMetrics]) -> float:
    """Of all tables together."""
    wanted = sum(table.wanted for table in metrics.values())
    return sum(table.hits for table in metrics.values()) / max(wanted, 1)


def caches(metrics: Mapping[str, CacheMetrics]) -> list[str]:
    """A line for each table of rank 0 of which rows lie below the device; nothing where there is none."""
    lines = [
        f"  {name.removeprefix('t_')}: {table}, {table.bytes_moved / 1e6:.1f} MB moved"
        for name, table in metrics.items()
    ]
    return ["", "rows below the device, on rank 0:", *lines] if lines else []
