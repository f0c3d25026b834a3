"""Tables of a plan of which some rows lie below the device: what their store is made of, and what collections do."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from operator import add
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from shardwise.embeddings import BaseEmbeddingConfig, NoFreeSlots, TableGroup, TableShape
from shardwise.embeddings.tiers import (
    Backing,
    CachedRows,
    CacheSpec,
    FileRecords,
    HostRecords,
    Moves,
    RamOverFile,
    TooManyRows,
    metrics_of,
    policy_named,
)
from shardwise.kernels import initial_rows
from shardwise.kernels.rows import make_rows

from ...planner.layout import Shard, Tier
from ..comms.exchange import Exchange
from ..plan.caches import shared_folder
from .routes import Routes, Table
from .stages import StagedModule, StepContext
from .step import Step

if TYPE_CHECKING:
    from .shards import LocalShards
    from .tables import LocalTables

# files of this process so far
_files = count()
# slots of a table of which no number is given, at first
_FIRST_SLOTS = 1024
# one for all tables, of which several may lie in one memory then
_IN_RAM = {pinned: partial(HostRecords, pinned=pinned) for pinned in (False, True)}


def slots_of(tier: Tier, shard: Shard, table: Table) -> tuple[int, int]:
    """Slots of a shard at first, and how many they may become."""
    rows = shard.rows[1] - shard.rows[0]
    share = rows / table.rows
    slots = Tier.rows_of(tier.slots, rows, share)
    most = Tier.rows_of(tier.max_slots, rows, share)
    if slots is None:
        most = rows if most is None else most
        return min(_FIRST_SLOTS, most), most
    return slots, max(slots, most or 0)


def cached_rows(
    tables: Sequence[Table], shards: Sequence[Shard], shapes: Sequence[TableShape], rank: int, device: torch.device
) -> CachedRows:
    """The store of a group of shards, whose `shapes` have slots; `tables` are those of the shards."""
    specs = []
    for table, shard, shape in zip(tables, shards, shapes, strict=True):
        tier = table.options.tier
        assert tier is not None
        below = _below(tier, shard, table.rows, rank, pinned=device.type == "cuda")
        share = (shard.rows[1] - shard.rows[0]) / table.rows
        specs.append(CacheSpec(shape.resident, slots_of(tier, shard, table)[1], below, share=share))
    tier = tables[0].options.tier
    assert tier is not None
    return CachedRows(specs, policy_named(tier.policy, tier.half_life))


def _below(tier: Tier, shard: Shard, rows: int, rank: int, *, pinned: bool) -> Callable[[int, int], Backing]:
    if callable(tier.below):
        return partial(tier.below, shard.table)
    if tier.below == "ram":
        return _IN_RAM[pinned]
    ram_rows = Tier.rows_of(tier.ram_rows, shard.rows[1] - shard.rows[0], (shard.rows[1] - shard.rows[0]) / rows)

    def over_file(rows: int, record_bytes: int) -> Backing:
        # ranks of one host have files of their own, and so have the tables of a rank; another job in this folder not,
        # but in one that nobody chose
        name = f"{shard.table}.{rank}.{next(_files)}"
        if tier.folder == shared_folder():
            name = f"{name}.{os.getpid()}"
        file = FileRecords(rows, record_bytes, str(tier.folder), name=name)
        return file if ram_rows is None else RamOverFile(file, rows, record_bytes, ram_rows=ram_rows, pinned=pinned)

    return over_file


def require_tiers(
    tables: Sequence[Table], trained_outside: Sequence[str], device: torch.device, *, fully_sharded: bool
) -> None:
    """Refuse tiers of tables that cannot have one; `trained_outside` are those whose gradient leaves the backward.

    Raises:
        ValueError: names the tables, and what would do.
    """
    tiered = [table.name for table in tables if table.options.tier is not None]
    if dense := [name for name in tiered if name in trained_outside]:
        raise ValueError(
            f"tables {dense}: what trains by its gradient has all rows on the device, no tier: give it an optimizer in"
            " its backward (apply_optimizer_in_backward)"
        )
    if tiered and fully_sharded:
        raise ValueError(
            f"sharding_strategy FULLY_SHARDED: tables {tiered} have tiers, which cannot be kept in parts, as replicas"
            " have other rows in their slots: give their module DEFAULT by a DMPCollectionConfig"
        )
    if tiered and device.type == "meta":
        raise ValueError(
            f"tables {tiered}: rows below a device cannot be on meta: shard the module on the device where it trains;"
            " its own tables may be on meta"
        )


def facts_of_tiers(
    tables: Sequence[Table], configs: Sequence[BaseEmbeddingConfig], params: Sequence[nn.Parameter]
) -> dict[str, str]:
    """What ranks must share of tables with a tier."""
    given = zip(tables, configs, params, strict=True)
    lazy = [t.name for t, config, param in given if t.options.tier is not None and is_lazy(config, param)]
    return {"tables whose rows are made when they are needed": str(lazy)}


@dataclass(frozen=True)
class UniformRows:
    """First values of a shard's rows, uniform in [low, high), by seed, row and column of the table alone.

    So they are the same in every plan and tier, and need not be kept.
    """

    seed: int
    first_row: int
    first_column: int
    columns: int
    low: float
    high: float
    dtype: torch.dtype

    def __call__(self, rows: Tensor) -> Tensor:
        """Of rows [n], counted from the first of the shard: [n, columns]."""
        seed = torch.tensor([self.seed], dtype=torch.int64, device=rows.device)
        return initial_rows(
            rows.long() + self.first_row, seed, self.first_column, self.columns, self._kind, self.low, self.high,
            self.dtype,
        )  # fmt: skip

    def make(
        self, parts: Sequence[Tensor], moves: Moves, first_slot: int, first_row: int, starts: Sequence[float]
    ) -> None:
        """As `MakesRows.make`."""
        make_rows(
            parts, moves.slots, moves.loads, moves.fresh, first_slot, self.first_row - first_row, self.seed,
            self.first_column, self._kind, self.low, self.high, starts,
        )  # fmt: skip

    @property
    def _kind(self) -> str:
        return "uniform" if self.low < self.high else "constant"


def _uniform_bounds(config: BaseEmbeddingConfig) -> tuple[float, float] | None:
    """The bounds of a config without an `init_fn` of its own."""
    fn = config.init_fn
    if isinstance(fn, partial) and fn.func is nn.init.uniform_ and not fn.args and set(fn.keywords) == {"a", "b"}:
        return float(fn.keywords["a"]), float(fn.keywords["b"])
    return None


def is_lazy(config: BaseEmbeddingConfig, weight: Tensor) -> bool:
    """Whether rows of a table with a tier are made when they are first needed: its weight is on meta, and its config
    has no `init_fn` of its own, which would see tables and not rows.
    """
    return weight.is_meta and _uniform_bounds(config) is not None


def begin_lazily(
    store: CachedRows, number: int, shard: Shard, config: BaseEmbeddingConfig, dtype: torch.dtype, seed: int
) -> None:
    """Have the rows of a table be those of `UniformRows`, made when they are first needed."""
    bounds = _uniform_bounds(config)
    assert bounds is not None
    fresh = UniformRows(seed, shard.rows[0], shard.cols[0], shard.cols[1] - shard.cols[0], *bounds, dtype)
    store.specs[number] = replace(store.specs[number], fresh=fresh)


@torch.no_grad()
def fill_below(
    store: CachedRows, number: int, weight: Tensor, shard: Shard, init_fn: Callable[[Tensor], Any] | None
) -> None:
    """Give a table its rows: those of the unsharded weight, or where that is on meta what `init_fn` makes of them.

    `init_fn` is called with some rows at a time, [n, columns] on the CPU.
    """
    states = store.initial_states(number)
    for begin, end in store.chunks(number):
        if weight.is_meta:
            rows = torch.empty(end - begin, shard.cols[1] - shard.cols[0], dtype=weight.dtype, device="cpu")
            if init_fn is not None:
                init_fn(rows)
        else:
            rows = weight[shard.rows[0] + begin : shard.rows[0] + end, slice(*shard.cols)]
        store.write(number, begin, [rows, *(state.expand(end - begin, *state.shape[1:]) for state in states)])


def share_first_rows(store: CachedRows, number: int, exchange: Exchange) -> None:
    """Make the first rows of a table those of rank 0: chunk by chunk, or by their seed where they are not made yet."""
    spec = store.specs[number]
    if isinstance(spec.fresh, UniformRows):
        seed = torch.tensor([spec.fresh.seed], dtype=torch.int64, device="cpu").to(store.residency.device)
        exchange.broadcast(seed)
        # host sync on CUDA: once
        store.specs[number] = replace(spec, fresh=replace(spec.fresh, seed=int(seed)))
        return
    for begin, end in store.chunks(number):
        rows = store.read(number, begin, end)[0].contiguous().to(store.residency.device)
        exchange.broadcast(rows)
        store.write(number, begin, [rows, *[None] * (len(store.layouts[number].widths) - 1)])


def groups_that_may_lack(routes: Routes) -> list[tuple[int, int]]:
    """Rank and number of each group that is asked for rows and has, at most, fewer slots than rows of some table."""
    tables = {table.name: table for table in routes.tables}

    def may_lack(shard: Shard) -> bool:
        table, rows = tables[shard.table], shard.rows[1] - shard.rows[0]
        return table.options.tier is not None and slots_of(table.options.tier, shard, table)[1] < rows

    return [
        (rank, g)
        for rank, serving in enumerate(routes.serving)
        for g, part in enumerate(serving.groups)
        if part.slots and any(map(may_lack, part.shards))
    ]


def _reserved_groups(routes: Routes) -> list[tuple[int, int]]:
    """Groups of which ranks tell each other the room that they have, rank after rank.

    None where replicas may lack slots too: each rank looks its own batch up there besides.
    """
    groups = groups_that_may_lack(routes)
    return [] if any(routes.serving[rank].groups[g].is_replica for rank, g in groups) else groups


def reserved_numbers(routes: Routes) -> int:
    """Numbers more in a header by which ranks know which batches fit."""
    groups = _reserved_groups(routes)
    return 1 + len(groups) + max(Counter(rank for rank, _ in groups).values()) if groups else 0


@dataclass(eq=False)
class Reservation:
    """A batch under way, as all ranks know it.

    Attributes:
        number: which of its collection's batches it is, in the order in which they begin.
        step: this rank's part, None once it is dropped or nobody has it.
        wanted: ids of all ranks for each group that may lack slots, once they are known.
        fits: whether they find slots for sure; it may be true no more before the lookup.
        since: batches that had begun when that was last taken back; their headers say nothing of it.
    """

    among: Reservations
    number: int
    step: Callable[[], Step | None]
    wanted: Sequence[int] | None = None
    fits: bool = False
    since: int = 0


class Reservations:
    """Which batches find slots for all their rows for sure, on every rank, so that none has to tell the others.

    With the header of a batch each rank says how many ids it has for each group that may lack slots, of all ranks; and
    for each such group of its own how many ids find room beside rows that are held for an update. So all ranks know
    which of the batches under way fit beside each other, in the order in which they began. Rows that were brought ahead
    count as ids do: they make room where a lookup needs it. A batch that is looked up before its turn takes slots that
    others counted on, which are sure of them no more until a later header.

    All ranks begin, receive and look up batches in one order, as each of these is a collective. When a batch is let go
    depends on each rank alone, so headers say which is the first that this rank still has.
    """

    def __init__(self, routes: Routes, rank: int, groups: Sequence[TableGroup]) -> None:
        self._groups, self._reserved = groups, _reserved_groups(routes)
        self._own = [g for r, g in self._reserved if r == rank]
        # numbers in front of a header: its first batch, room, ids
        self.width = reserved_numbers(routes)
        self._ids_at = self.width - len(self._reserved)
        # where the room of each group stands: rank, and place in its header
        counted = Counter[int]()
        self._room_at: list[tuple[int, int]] = []
        for r, _ in self._reserved:
            counted[r] += 1
            self._room_at.append((r, counted[r]))
        self._begun = 0
        # those that were not looked up, and by the number of a batch those among them when it began, up to itself
        self._open: list[Reservation] = []
        self._before: dict[int, list[Reservation]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # batches that are under way are none of a copy's
        return {**self.__dict__, "_open": [], "_before": {}}

    def _here(self) -> list[tuple[int, Step]]:
        """Number and step of batches that this rank may look up."""
        return [(one.number, step) for one in self._open if (step := one.step()) is not None]

    def _room(self, g: int) -> int:
        """Ids of batches under way for which group `g` has slots."""
        store = self._groups[g].store
        ahead = [step.leases[g][1] for _, step in self._here() if g in step.leases]
        return store.room(ahead) if isinstance(store, CachedRows) else 0

    def pack(self, step: Step, sizes: list[list[int]]) -> list[list[int]]:
        """What the header of a batch that begins tells each rank, with `sizes`."""
        rooms = [self._room(g) for g in self._own]
        first = min((number for number, _ in self._here()), default=self._begun + 1)
        ids = [step.ids_to_groups[r][g] for r, g in self._reserved]
        front = [first, *rooms, *[0] * (self._ids_at - 1 - len(rooms)), *ids]
        return [[*front, *row] for row in sizes]

    def begin(self, step: Step) -> None:
        """A batch whose header has left, also one that is bad on this rank."""
        self._begun += 1
        step.reservation = Reservation(self, self._begun, ref(step))
        self._open.append(step.reservation)
        self._before[self._begun] = [*self._open]

    def receive(self, step: Step) -> list[list[int]]:
        """The sizes that all ranks sent with the header of a batch: [W]. Raises as `PendingHeader.receive`."""
        assert step.reservation is not None
        number = step.reservation.number
        before = self._before.pop(number, [])
        try:
            rows = step.header.receive()
        except BaseException:
            # no rank looks it up
            step.reservation.wanted = [0] * len(self._reserved)
            self._open = [one for one in self._open if one is not step.reservation]
            raise
        step.reservation.wanted = [
            sum(ids) for ids in zip(*(row[self._ids_at : self.width] for row in rows), strict=True)
        ]
        first, rooms = min(row[0] for row in rows), [rows[rank][place] for rank, place in self._room_at]
        self._open = [one for one in self._open if one.number >= first]
        self._before = {of: batches for of, batches in self._before.items() if of >= first}
        total = [0] * len(rooms)
        for one in before:
            if one.number < first:
                continue
            if one.wanted is None:
                # nobody knows yet what it takes from those after it
                break
            total = list(map(add, total, one.wanted))
            fits = all(not ids or taken <= room for ids, taken, room in zip(one.wanted, total, rooms, strict=True))
            one.fits = one.fits or (fits and number > one.since)
        return [row[self.width :] for row in rows]

    def look_up(self, step: Step) -> None:
        """A batch that is looked up now."""
        assert step.reservation is not None
        self._open = [one for one in self._open if one is not step.reservation]
        for one in self._open:
            if one.number < step.reservation.number:
                one.fits, one.since = False, self._begun

    def leave(self, step: Step) -> None:
        """A batch that this rank will not look up."""
        assert step.reservation is not None
        step.reservation.step = lambda: None


class TieredTables(StagedModule[Step]):
    """What a sharded collection has for tables whose rows come and go."""

    shards: LocalShards
    _tables: LocalTables

    def cached_stores(self) -> list[CachedRows]:
        """Of this rank's tables that have a `Tier`, by groups of tables."""
        return [group.store for group in self._tables.all_groups() if isinstance(group.store, CachedRows)]

    def extra_repr(self) -> str:
        """A line for each table of which rows of this rank lie below the device."""
        return "\n".join(f"{table}: {metrics}" for table, metrics in metrics_of(self.cached_stores()).items())

    def prefetch(
        self, dist_input: Step, forward_stream: torch.Stream | None = None, ctx: StepContext | None = None
    ) -> bool:
        """Bring the rows that the batch asks for into the slots of their stores, before the lookup.

        Updates of the batches before may still come: rows are read by the lookup. False where a store has no room as
        long as the leases of those batches last; a later call, or the lookup, asks once more. On CUDA it may run on a
        stream of its own, that of the lookup being `forward_stream`.
        """
        return self.shards.prefetch(dist_input, forward_stream)

    def announce(self, dist_input: Step) -> None:
        """Tell row stores that the batch will come, after those of which they were told before."""
        self.shards.announce(dist_input)

    def _look_up_replicas(self, step: Step) -> None:
        """Rows of this rank's own batch in tables that every rank holds and trains in its backward."""
        try:
            with torch.no_grad():
                step.replicated_rows = self.shards.look_up_replicated(step, dense=False)
        except (NoFreeSlots, TooManyRows) as error:
            self.shards.note_lack(step, error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for name, param in self._tables.parameters.items():
            if self.shards.is_away(name) and not self.shards.fully_sharded and id(param) not in memo:
                # as they are: a copy of NaNs that are one number in memory would be as large as the table
                memo[id(param)] = nn.Parameter(param.detach()[:], requires_grad=param.requires_grad)
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(vars(self), memo))
        return copied
