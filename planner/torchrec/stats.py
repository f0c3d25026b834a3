"""What the planner tells of a plan in TorchRec's terms, as text, written to the log at level info.

The sections, their names and their order are TorchRec's; `print(plan)` and `shardwise plan explain` tell more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .stats_sections import (
    imbalance_section,
    kernel_sections,
    parameter_section,
    peak_sections,
    rank_section,
    reservation_section,
    round_to_one_sigfig,
    top_tables_section,
)
from .stats_totals import rank_totals, reserved
from .types import Enumerator, ParameterConstraints, PlanDebugStats, ShardingOption, Stats, StorageReservation, Topology
from .utils import build_sharder_data_map, sharder_name

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
            debug: tell of each table, of balance and of the reservation too.
        """
        planned = bool(sharding_plan.plan)
        kept = reserved(storage_reservation, topology)
        totals = rank_totals(sharding_plan, topology, best_plan, constraints, kept) if planned else None
        found = f"Evaluated {num_proposals} proposal(s), found {num_plans} possible plan(s)"
        sections = [["--- Planner Statistics ---", f"--- {found}, ran for {run_time:.2f}s ---"]]
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
