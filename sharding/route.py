"""Who serves which lookup, and the way of a batch's ids to those ranks.

A lookup is one feature in one table. Its ids travel to the rank that holds the table; the ids of a replicated table
travel to every rank, because every replica applies the same update. Order: a rank keeps (lookup, global sample,
position), global samples being rank 0's batch, then rank 1's, and so on; so gradients reach a row in the order of one
process that saw the whole batch.

Letters: W ranks, L lookups, B samples of one rank, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.embeddings import OptimizerSpec, pick_features
from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import require_ids

from .exchange import packed_size
from .layout import Shard


@dataclass(frozen=True)
class Table:
    """What all ranks know of a table."""

    name: str
    rows: int
    dim: int
    dtype: torch.dtype
    optimizer: OptimizerSpec | None
    features: tuple[str, ...]
    mean: bool = False


@dataclass(frozen=True)
class Group:
    """Tables that share a flat buffer on one rank; `lookups` are their lookup numbers, table by table."""

    tables: tuple[int, ...]
    lookups: tuple[int, ...]
    replica: bool


@dataclass(frozen=True)
class Routes:
    """The static part of routing, equal on all ranks: lookups in output order, and which rank serves which."""

    tables: tuple[Table, ...]
    lookups: tuple[tuple[str, int], ...]
    groups: tuple[tuple[Group, ...], ...]
    # replicated tables without an optimizer: looked up at home, trained through their gradient
    dense: tuple[Group, ...]

    @property
    def features(self) -> list[str]:
        """Feature of each lookup."""
        return [feature for feature, _ in self.lookups]

    def dims(self, lookups: Sequence[int]) -> list[int]:
        """Output columns of these lookups."""
        return [self.tables[self.lookups[number][1]].dim for number in lookups]

    def served(self, rank: int, replicas: bool) -> list[int]:
        """Lookups whose ids `rank` gets: those of its own tables, then (for an update) those of replicated ones."""
        return [n for group in self.groups[rank] if replicas or not group.replica for n in group.lookups]

    @property
    def id_dtype(self) -> torch.dtype:
        """Ids travel as int32 where every row number fits: half the bytes."""
        return torch.int32 if all(table.rows < 2**31 for table in self.tables) else torch.int64


def plan_routes(tables: Sequence[Table], shards: Sequence[Shard], world_size: int) -> Routes:
    """Routes of whole-table shards.

    Raises:
        ValueError: a shard is a part of its table, which this engine cannot route yet.
    """
    number_of = {table.name: number for number, table in enumerate(tables)}
    lookups = [(feature, number) for number, table in enumerate(tables) for feature in table.features]
    owned: list[list[int]] = [[] for _ in range(world_size)]
    replicated: set[int] = set()
    for shard in shards:
        table = tables[number_of[shard.table]]
        if shard.rows != (0, table.rows) or shard.cols != (0, table.dim):
            raise ValueError(f"table {table.name!r}: only whole tables are routed, got rows {shard.rows}")
        if shard.replica:
            replicated.add(number_of[shard.table])
        else:
            owned[shard.rank].append(number_of[shard.table])
    fused = [number for number in sorted(replicated) if tables[number].optimizer is not None]
    dense = [number for number in sorted(replicated) if tables[number].optimizer is None]
    replicas = _groups(fused, tables, lookups, replica=True)
    groups = tuple((*_groups(sorted(mine), tables, lookups, replica=False), *replicas) for mine in owned)
    return Routes(tuple(tables), tuple(lookups), groups, _groups(dense, tables, lookups, replica=True))


def _groups(
    numbers: Sequence[int], tables: Sequence[Table], lookups: Sequence[tuple[str, int]], replica: bool
) -> tuple[Group, ...]:
    members: dict[tuple[torch.dtype, OptimizerSpec | None], list[int]] = {}
    for number in numbers:
        members.setdefault((tables[number].dtype, tables[number].optimizer), []).append(number)
    return tuple(
        Group(tuple(mine), tuple(n for t in mine for n, (_, table) in enumerate(lookups) if table == t), replica)
        for mine in members.values()
    )


@dataclass
class Outbound:
    """A rank's own batch, ready to leave: what goes to each rank, and what the rank looks up at home."""

    batch: int
    # per lookup in output order
    kjt: KeyedJaggedTensor
    # [W] ids to each rank whose rows come back
    rows_from: list[int]
    # [W][groups] ids to each group of each rank
    ids_to_groups: list[list[int]]
    blocks: list[list[Tensor]]


def route(features: KeyedJaggedTensor, routes: Routes, *, weighted: bool, update: bool) -> Outbound:
    """Pick every lookup's feature and line its ids up for the ranks that serve it; all have one batch size.

    Raises:
        KeyError: a feature is missing.
        TypeError: ids are not int32 or int64.
    """
    require_ids("feature ids", features.values())
    kjt = pick_features(features, routes.features) if routes.lookups else features
    batch = features.stride()
    # host sync on CUDA: the sizes that leave, read once
    counts = kjt.length_per_key() if routes.lookups else []
    values = kjt.values()
    if routes.id_dtype == torch.int32 and values.dtype == torch.int64:
        # an id that no table has stays one: narrowing must not turn it into another row
        values = values.clamp(-1, torch.iinfo(torch.int32).max)
    values = values.to(routes.id_dtype)
    starts = kjt.offset_per_key() if routes.lookups else []
    lengths = kjt.lengths().to(torch.int32)
    weights = kjt.weights().float() if weighted else None
    blocks, rows_from, ids_to_groups = [], [], []
    for rank in range(len(routes.groups)):
        served = routes.served(rank, update)
        ids = [values[starts[n] : starts[n + 1]] for n in served]
        block = [_cat(ids, values), _cat([lengths[n * batch : (n + 1) * batch] for n in served], lengths)]
        if weights is not None:
            block.append(_cat([weights[starts[n] : starts[n + 1]] for n in served], weights))
        blocks.append(block)
        per_group = [
            sum(counts[n] for n in group.lookups) if update or not group.replica else 0 for group in routes.groups[rank]
        ]
        ids_to_groups.append(per_group)
        owned = zip(per_group, routes.groups[rank], strict=True)
        rows_from.append(sum(count for count, group in owned if not group.replica))
    return Outbound(batch, kjt, rows_from, ids_to_groups, blocks)


def block_layout(
    lookups: int, batch: int, ids: int, id_dtype: torch.dtype, weighted: bool
) -> tuple[list[int], list[torch.dtype], int]:
    """Elements, dtypes and bytes of one packed block: ids, lengths and, if weighted, weights."""
    elements, dtypes = [ids, lookups * batch], [id_dtype, torch.int32]
    if weighted:
        elements.append(ids)
        dtypes.append(torch.float32)
    return elements, dtypes, packed_size(elements, dtypes)


@dataclass
class Inbound:
    """What a rank serves in this step: ids of all ranks, (lookup, global sample, position) order."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    # [W] samples of each rank
    batches: list[int]
    # [groups] ids of each group of this rank
    group_ids: list[int]
    # ids in global order <- ids in order of arrival (rank, lookup, sample), and back
    arrival: Tensor | None


def arrange(
    blocks: Sequence[Sequence[Tensor]], batches: list[int], lookups: int, group_ids: list[int], *, keep_arrival: bool
) -> Inbound:
    """Bring the blocks of all ranks, each [lookup][sample], into the order [lookup][global sample]."""
    by_rank = [block[1].view(lookups, batch).long() for block, batch in zip(blocks, batches, strict=True)]
    lengths = torch.cat(by_rank, dim=1).flatten()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    ids = torch.cat([block[0] for block in blocks])
    weights = torch.cat([block[2] for block in blocks]) if len(blocks[0]) > 2 else None
    if len(blocks) == 1:
        # one rank's order of arrival is the global order
        return Inbound(ids, offsets, weights, batches, group_ids, None)
    # runs of ids, one per (rank, lookup), become runs per (lookup, rank)
    runs = torch.stack([rank_lengths.sum(1) for rank_lengths in by_rank])  # [W, L]
    begins = runs.flatten().cumsum(0).view_as(runs) - runs
    runs, begins = runs.t().flatten(), begins.t().flatten()
    shift = (begins - (runs.cumsum(0) - runs)).repeat_interleave(runs, output_size=ids.shape[0])
    arrival = torch.arange(ids.shape[0], device=ids.device) + shift
    weights = None if weights is None else weights[arrival]
    return Inbound(ids[arrival], offsets, weights, batches, group_ids, arrival if keep_arrival else None)


def _cat(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(pieces) if pieces else like.new_empty(0)
