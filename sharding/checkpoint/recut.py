"""`reshard`: a checkpoint cut anew, into another number of files or by another plan, by one process in bounded memory.

Loading needs none of this: it fits any plan. It is for what reads files as they lie, and for moving small parts.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.planner.layout import (
    Shard,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
    validate,
)
from shardwise.sharding.plan.plan import ShardingPlan, shards_of

from .manifest import TABLE, Manifest, Stored, TableFacts
from .offline import Source, file_of, write_offline
from .places import locate, resolved

# what can be asked for by name
STRATEGIES = ("table_wise", "row_wise", "column_wise", "data_parallel")
Cut = str | Sequence[Shard]


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    world_size: int | None = None,
    plan: ShardingPlan | Mapping[str, Cut] | str | None = None,
    resplit: str | None = None,
) -> Path | Any:
    """Write a checkpoint once more, cut for `world_size` ranks; its step folder in the folder `target`.

    Args:
        source: a step folder, or a folder of them, of which the newest good one is taken.
        target: a folder of checkpoints, another than the one that `source` lies in.
        world_size: ranks, each with at most one file; by default as many as before.
        plan: where tables go: a plan, a strategy for all of them (one of `STRATEGIES`), or parameter name -> strategy
            or shards. Tables that it leaves out, all by default, keep their cut, dealt to the ranks by size.
        resplit: as for `load`: what becomes of numbers per row where columns are cut anew.

    Raises:
        ValueError: a plan does not fit the tables or the ranks, numbers per row would have to be split without
            `resplit`, or `target` is where the source lies.
        CheckpointDamaged, FileNotFoundError, OSError: as `load` and `save`.
    """
    if resplit not in (None, "mean"):
        raise ValueError(f"resplit must be 'mean' or None, got {resplit!r}")
    with Source(source) as old:
        if resolved(locate(target)) == resolved(old.path.parent):
            raise ValueError(f"{target} has the checkpoint itself: give another folder, where the new one is made")
        ranks = old.manifest.world_size if world_size is None else world_size
        manifest = recut(old.manifest, ranks, plan, resplit=resplit)
        return write_offline(target, manifest, old.blocks)


def recut(
    manifest: Manifest, world_size: int, plan: ShardingPlan | Mapping[str, Cut] | str | None, *, resplit: str | None
) -> Manifest:
    """The manifest of the same tensors cut by another plan; it has no files yet. Raises as `reshard`."""
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    cuts = _cuts(manifest, world_size, plan)
    tables = {name: replace(facts, shards=tuple(cuts[name])) for name, facts in manifest.tables.items()}
    tensors = []
    for number, ((kind, name, state), pieces) in enumerate(manifest.by_address.items()):
        if kind == TABLE:
            tensors += _pieces(tables[name], name, state, pieces, number % world_size, resplit)
        else:
            tensors.append(replace(pieces[0], file=file_of(number % world_size)))
    return replace(manifest, world_size=world_size, tables=tables, tensors=tuple(tensors), files=())


def _cuts(
    manifest: Manifest, world_size: int, plan: ShardingPlan | Mapping[str, Cut] | str | None
) -> dict[str, list[Shard]]:
    """The shards of every table, empty ones left out."""
    asked = _asked(manifest, world_size, plan)
    dealt = _Dealer(world_size)
    cuts = {}
    # the largest first, so that loads come out even
    for name, facts in sorted(manifest.tables.items(), key=lambda item: -item[1].rows * item[1].dim):
        cut = asked.get(name)
        if isinstance(cut, str):
            shards = _by_strategy(facts, cut, world_size, dealt)
        elif cut is not None:
            shards = list(cut)
        elif facts.shards[0].replica:
            shards = data_parallel(facts.table, facts.rows, facts.dim, world_size)
        elif world_size == manifest.world_size:
            shards = list(facts.shards)
        else:
            shards = [replace(shard, rank=dealt.next(_cells(shard))) for shard in facts.shards]
        validate([replace(shard, table=name) for shard in shards], {name: (facts.rows, facts.dim)}, world_size)
        kept = [shard for shard in shards if _cells(shard)]
        cuts[name] = sorted(kept, key=lambda shard: (shard.cols, shard.rows, shard.rank))
    return cuts


def _asked(
    manifest: Manifest, world_size: int, plan: ShardingPlan | Mapping[str, Cut] | str | None
) -> Mapping[str, Cut]:
    """The cut of each parameter that the plan names."""
    if isinstance(plan, ShardingPlan):
        return {
            name: cut for name, facts in manifest.tables.items() if (cut := _in_plan(name, facts, plan, world_size))
        }
    asked = dict.fromkeys(manifest.tables, plan) if isinstance(plan, str) else dict(plan or {})
    unknown = sorted(set(asked) - set(manifest.tables))
    if unknown:
        raise ValueError(f"the plan places {unknown}, the checkpoint has {sorted(manifest.tables)}")
    strange = sorted({cut for cut in asked.values() if isinstance(cut, str)} - set(STRATEGIES))
    if strange:
        raise ValueError(f"strategies {strange} are none of {list(STRATEGIES)}")
    return asked


def _in_plan(name: str, facts: TableFacts, plan: ShardingPlan, world_size: int) -> list[Shard]:
    """The shards of a parameter by the plan of the innermost module that has it; none if there is no such plan."""
    paths = [path for path, tables in plan.plan.items() if facts.table in tables and f".{name}".startswith(f".{path}")]
    if not paths:
        return []
    parameter_sharding = plan.plan[max(paths, key=len)][facts.table]
    return shards_of(facts.table, parameter_sharding, facts.rows, facts.dim, world_size)


def _by_strategy(facts: TableFacts, strategy: str, world_size: int, dealt: _Dealer) -> list[Shard]:
    size = facts.table, facts.rows, facts.dim
    ranks = range(world_size)
    if strategy == "table_wise":
        return table_wise(*size, dealt.next(facts.rows * facts.dim))
    if strategy == "row_wise":
        return row_wise(*size, ranks)
    if strategy == "column_wise":
        return column_wise(*size, ranks)
    return data_parallel(*size, world_size)


class _Dealer:
    """Gives each piece to the rank that has least."""

    def __init__(self, ranks: int) -> None:
        self._loads = [(0, rank) for rank in range(ranks)]

    def next(self, size: int) -> int:
        """The rank of a piece of this size."""
        load, rank = heapq.heappop(self._loads)
        heapq.heappush(self._loads, (load + size, rank))
        return rank


def _pieces(
    facts: TableFacts, name: str, state: str, old: Sequence[Stored], home: int, resplit: str | None
) -> list[Stored]:
    """A table's rows or a state of them in the pieces of the new cut; of replicas the one of rank `home`."""
    shards = [shard for shard in facts.shards if not shard.replica or shard.rank == home]
    per_row = len(old[0].shape) == 1
    have = {piece.cells[1] for piece in old}
    if per_row and facts.row_state == "table" and have == {(0, facts.dim)}:
        # the first column block keeps what all of them share
        first = {min(shard.cols for shard in shards)}
        shards = [replace(shard, cols=(0, facts.dim)) for shard in shards if shard.cols in first]
    elif per_row and resplit is None:
        lost = sorted({shard.cols for shard in shards} - have)
        if lost:
            raise ValueError(
                f"{name}: {state} is a number a row of each of the column blocks {sorted(have)}, the plan makes {lost}:"
                " resplit='mean' gives these the mean over their columns"
            )
    return [
        Stored(
            TABLE, name, state, _shape(shard, per_row), old[0].dtype, shard.rows, shard.cols, file_of(shard.rank)
        )
        for shard in shards
    ]  # fmt: skip


def _shape(shard: Shard, per_row: bool) -> tuple[int, ...]:
    height, width = shard.rows[1] - shard.rows[0], shard.cols[1] - shard.cols[0]
    return (height,) if per_row else (height, width)


def _cells(shard: Shard) -> int:
    return (shard.rows[1] - shard.rows[0]) * (shard.cols[1] - shard.cols[0])
