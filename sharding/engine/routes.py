"""Who serves which lookup: the static part of routing, made once from the shards and equal on all ranks.

A lookup is one feature in one table. A stream is what travels for it to one rank: all its ids, or those of a range of
rows. A slot is a stream looked up in one shard: column shards that share a rank share the stream. A cut is a lookup
whose ids are divided among row ranges ("buckets").

Letters: W ranks, L lookups, B samples of one rank, S streams of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from shardwise.embeddings import OptimizerSpec

from ...planner.layout import Shard, TableOptions

# what becomes of a shard's rows: sums of bags travel back, or are first added inside the host; rows of ids travel back;
# nothing travels, since every rank holds the shard
POOLED, HOST, ROWS, REPLICA = "pooled", "host", "rows", "replica"
_KINDS = (POOLED, HOST, ROWS, REPLICA)


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
    options: TableOptions = TableOptions()
    # whether the owner turns ids into rows (`IdMap`), so that any number may come
    mapped: bool = False
    # ids of a mapped table that its row shards divide evenly, [0, id_range)
    id_range: int | None = None


@dataclass(frozen=True)
class Cut:
    """A lookup whose bucket k has the rows (of a table with an id map the ids) [borders[k], borders[k + 1])."""

    lookup: int
    borders: tuple[int, ...]


@dataclass(frozen=True)
class Stream:
    """The ids of a lookup, or of bucket `bucket` of cut number `cut`."""

    lookup: int
    cut: int | None = None
    bucket: int = 0


@dataclass(frozen=True)
class Slot:
    """Stream number `stream` of a rank, looked up in shard number `shard` of its group; `columns` of the output."""

    stream: int
    lookup: int
    shard: int
    columns: tuple[int, int]

    @cached_property
    def width(self) -> int:
        """Columns of the shard."""
        return self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Group:
    """Shards of one rank that share a flat buffer, and their slots, shard by shard."""

    kind: str
    shards: tuple[Shard, ...]
    slots: tuple[Slot, ...]

    @cached_property
    def is_replica(self) -> bool:
        """Whether every rank holds it."""
        return self.kind == REPLICA

    @cached_property
    def width(self) -> int:
        """Columns of all slots together."""
        return sum(slot.width for slot in self.slots)

    @cached_property
    def row_width(self) -> int:
        """Columns of each row, where rows travel: then all slots have the same."""
        return self.slots[0].width if self.slots else 0


@dataclass(frozen=True)
class Serving:
    """What one rank serves. Groups stand in the order of `_KINDS`; streams of replicas come last."""

    groups: tuple[Group, ...]
    streams: tuple[Stream, ...]
    # streams whose results travel back
    returned: int

    def streams_for(self, update: bool) -> tuple[Stream, ...]:
        """Those that ids are sent for: replicas want them for an update alone."""
        return self.streams if update else self.streams[: self.returned]

    @cached_property
    def first_slot(self) -> list[int]:
        """[groups + 1] where the slots of each group begin."""
        return list(accumulate((len(group.slots) for group in self.groups), initial=0))

    @cached_property
    def sums(self) -> int:
        """Columns of sums that travel back from here."""
        return self._width(POOLED)

    @cached_property
    def host_sums(self) -> int:
        """Columns of sums that are added inside the host first."""
        return self._width(HOST)

    @cached_property
    def gradient_columns(self) -> int:
        """Columns of a pooled gradient that this rank wants, besides those of `host_sums`."""
        return self._width(POOLED, ROWS, REPLICA)

    @cached_property
    def row_groups(self) -> list[tuple[int, int]]:
        """Groups whose rows travel back, and the columns of each."""
        return [(g, group.row_width) for g, group in enumerate(self.groups) if group.kind == ROWS]

    def _width(self, *kinds: str) -> int:
        return sum(group.width for group in self.groups if group.kind in kinds)


@dataclass(frozen=True)
class Routes:
    """Lookups in output order, and what each rank serves of them."""

    pooled: bool
    weighted: bool
    tables: tuple[Table, ...]
    lookups: tuple[tuple[str, int], ...]
    cuts: tuple[Cut, ...]
    serving: tuple[Serving, ...]
    # replicated tables, looked up at home: those with an optimizer, whose replicas all apply the same update, ...
    replicas: tuple[Group, ...]
    # ... and those without one, trained through their gradient
    dense: tuple[Group, ...]
    local_size: int

    @cached_property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.serving)

    @cached_property
    def features(self) -> list[str]:
        """Feature of each lookup."""
        return [feature for feature, _ in self.lookups]

    @cached_property
    def dims(self) -> list[int]:
        """Output columns of each lookup."""
        return [self.tables[table].dim for _, table in self.lookups]

    @cached_property
    def dense_cuts(self) -> tuple[Table, ...]:
        """Cut tables that are trained through their gradient, in the order of the module."""
        return tuple(table for table in self.tables if table.options.dense)

    @cached_property
    def dense_lookups(self) -> frozenset[int]:
        """Lookups in tables that are trained through their gradient."""
        return frozenset(slot.lookup for group in self.dense for slot in group.slots)

    @cached_property
    def id_dtype(self) -> torch.dtype:
        """Ids travel as int32 where every row number fits: half the bytes."""
        small = all(table.rows < 2**31 and not table.mapped for table in self.tables)
        return torch.int32 if small else torch.int64

    def are_counterparts(self, rank: int, other: int) -> bool:
        """Whether two ranks have the same number on their hosts."""
        return (rank - other) % self.local_size == 0

    def table_of(self, lookup: int) -> Table:
        """The table that a lookup looks up."""
        return self.tables[self.lookups[lookup][1]]

    def is_ordered(self, lookup: int) -> bool:
        """Whether rows travel for this lookup and are pooled at their source, in the order of one process."""
        return self.pooled and self.table_of(lookup).options.reduction == "ordered"

    @cached_property
    def scaled(self) -> bool:
        """Whether a factor for each id travels with it: its weight, or what averages it where its bag is divided."""
        ordered_mean = any(self.is_ordered(cut.lookup) and self.table_of(cut.lookup).mean for cut in self.cuts)
        return self.weighted or ordered_mean

    @cached_property
    def has_host_sums(self) -> bool:
        """Whether some sums are added inside a host before they travel on."""
        return any(group.kind == HOST for serving in self.serving for group in serving.groups)


def plan_routes(
    tables: Sequence[Table],
    shards: Sequence[Shard],
    world_size: int,
    *,
    pooled: bool = True,
    weighted: bool = False,
    local_size: int | None = None,
) -> Routes:
    """Routes of valid shards (`layout.validate`); `local_size` consecutive ranks are a host, by default all of them.

    Raises:
        ValueError: columns are cut differently for different rows, or a table with an id map is cut by rows or
            replicated.
    """
    local_size = local_size or world_size
    lookups = [(feature, number) for number, table in enumerate(tables) for feature in table.features]
    lookups_of = [[n for n, (_, t) in enumerate(lookups) if t == number] for number in range(len(tables))]
    by_table: dict[str, list[Shard]] = {table.name: [] for table in tables}
    for shard in shards:
        by_table[shard.table].append(shard)
    cuts: dict[Cut, int] = {}
    placed: list[list[_Placed]] = [[] for _ in range(world_size)]
    dense: list[_Placed] = []
    for number, table in enumerate(tables):
        shards_of_table = by_table[table.name]
        if table.mapped:
            _require_one_domain(table, shards_of_table)
        if shards_of_table and shards_of_table[0].replica:
            whole = [_Placed(REPLICA, table, shards_of_table[0], tuple(Stream(n) for n in lookups_of[number]))]
            if table.optimizer is None:
                dense += whole
            else:
                for rank in range(world_size):
                    placed[rank] += whole
            continue
        strips = _strips(table, shards_of_table)
        kind = _kind_of(table, strips, pooled, local_size, world_size)
        for strip in strips:
            if len(strip) == 1 and not (pooled and kind == ROWS):
                streams = [[Stream(n) for n in lookups_of[number]]]
            else:
                # where the ids of one row shard end and those of the next begin
                borders = (0, *(shard.rows[1] for shard in strip))
                if table.id_range is not None:
                    block = -(-table.id_range // len(strip))
                    borders = tuple(min(block * k, table.id_range) for k in range(len(strip) + 1))
                # strips that are cut alike share what travels
                numbers = {n: cuts.setdefault(Cut(n, borders), len(cuts)) for n in lookups_of[number]}
                streams = [[Stream(n, cut, k) for n, cut in numbers.items()] for k in range(len(strip))]
            for shard, streams_of_shard in zip(strip, streams, strict=True):
                # nobody asks for a shard without rows; inside a host its zeros are added as any others
                asked = kind == HOST or shard.rows[0] < shard.rows[1]
                placed[shard.rank].append(_Placed(kind, table, shard, tuple(streams_of_shard) if asked else ()))
    serving = tuple(_serving(shards_of_table, pooled) for shards_of_table in placed)
    replicas = tuple(group for group in serving[0].groups if group.kind == REPLICA)
    return Routes(
        pooled, weighted, tuple(tables), tuple(lookups), tuple(cuts), serving, replicas, _serving(dense, pooled).groups,
        local_size,
    )  # fmt: skip


@dataclass(frozen=True)
class _Placed:
    """A shard on its rank, and the streams that look it up."""

    kind: str
    table: Table
    shard: Shard
    streams: tuple[Stream, ...]


def _require_one_domain(table: Table, shards: Sequence[Shard]) -> None:
    """Ids of a mapped table say nothing of rows, so no range of rows can be asked for, nor looked up at home.

    Where shards divide its ids, each must have rows to give out.
    """
    how = "every rank holds them" if any(shard.replica for shard in shards) else None
    if how is None and any(shard.rows != (0, table.rows) for shard in shards):
        if table.id_range is None:
            how = "the plan cuts them over several"
        elif any(shard.rows[0] >= shard.rows[1] for shard in shards):
            raise ValueError(
                f"table {table.name!r}: its {table.rows} rows leave a row shard without any, and ids of each need some;"
                " cut it over fewer ranks"
            )
    if how is not None:
        raise ValueError(
            f"table {table.name!r}: an id map gives out rows of one rank, but {how}; cut the table by columns or leave"
            " it whole"
        )


def _strips(table: Table, shards: Sequence[Shard]) -> list[list[Shard]]:
    """Shards by their columns, each strip from its first row to its last.

    Raises:
        ValueError: columns are cut differently for different rows.
    """
    strips: dict[tuple[int, int], list[Shard]] = {}
    for shard in sorted(shards, key=lambda s: (s.cols, s.rows, s.rank)):
        strips.setdefault(shard.cols, []).append(shard)
    for cols, strip in strips.items():
        ends = [(0, 0), *(shard.rows for shard in strip), (table.rows, table.rows)]
        if any(before[1] != after[0] for before, after in pairwise(ends)):
            raise ValueError(
                f"table {table.name!r}: columns {cols} are held for some rows only, other rows are cut at"
                " other columns; cut the table into columns first, and those into rows"
            )
    return list(strips.values())


def _kind_of(table: Table, strips: Sequence[Sequence[Shard]], pooled: bool, local_size: int, world_size: int) -> str:
    if not pooled or (table.options.reduction == "ordered" and any(len(strip) > 1 for strip in strips)):
        return ROWS
    # each strip's row ranges lie one on each rank of one host
    ranks = [sorted(shard.rank for shard in strip) for strip in strips]
    whole_hosts = [list(range(first // local_size * local_size, first + local_size)) for first, *_ in ranks]
    return HOST if 1 < local_size < world_size and ranks == whole_hosts else POOLED


def _serving(placed: Sequence[_Placed], pooled: bool) -> Serving:
    members: dict[tuple[object, ...], list[_Placed]] = {}
    for placement in sorted(placed, key=lambda placement: _KINDS.index(placement.kind)):
        members.setdefault(_group_key(placement, pooled), []).append(placement)
    streams: dict[Stream, int] = {}
    returned = 0
    groups = []
    for members_of_group in members.values():
        slots = []
        for s, placement in enumerate(members_of_group):
            for stream in placement.streams:
                number = streams.setdefault(stream, len(streams))
                slots.append(Slot(number, stream.lookup, s, placement.shard.cols))
        groups.append(
            Group(members_of_group[0].kind, tuple(placement.shard for placement in members_of_group), tuple(slots))
        )
        if members_of_group[0].kind != REPLICA:
            returned = len(streams)
    return Serving(tuple(groups), tuple(streams), returned)


def _group_key(placement: _Placed, pooled: bool) -> tuple[object, ...]:
    # rows of ids lie one after another, so all have one width; an averaged bag that is divided has factors of its own
    rows = placement.kind == ROWS or not pooled
    width = placement.shard.cols[1] - placement.shard.cols[0] if rows else None
    scaled = placement.kind == ROWS and pooled and placement.table.mean
    apart = placement.table.name if placement.table.options.row_state == "table" else None
    # one policy says which rows of a store go first
    tier = placement.table.options.tier
    store = None if tier is None else (tier.policy, tier.half_life)
    return placement.kind, placement.table.dtype, placement.table.optimizer, width, scaled, apart, store


def is_even(borders: Sequence[int]) -> bool:
    """Whether buckets are blocks of one size, but for the last ones, which the table's end may cut short."""
    block, end = borders[1] - borders[0], borders[-1]
    return all(high == min(low + block, end) for low, high in pairwise(borders))
