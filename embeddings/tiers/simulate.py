"""What caches would do with a trace: the decisions of `Residency`, the cache that runs, over no storage.

Hits, misses, saves and stalls are those of a run whose batches come in the trace's order, equal to the last row. Tables
of one group (one dim, dtype and optimizer on a rank) are simulated together: where a prefetch finds no room in one of
them, those of the others wait for it. One by one, as `shardwise cache` has them, they hold slots a little shorter then.

Letters: U distinct rows of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from shardwise.kernels import record_layout, rule_named

from .counts import RowCounts
from .policies import Policy, policy_named
from .residency import Announced, Lease, Residency, Span, TooFewSlots, grown_slots


@dataclass(frozen=True)
class CacheSetting:
    """How a table is cached.

    Args:
        rows: of the table.
        slots: rows on the device at first.
        max_slots: up to so many they grow where a batch needs more beside those that are held; None does not grow.
        alone: they grow only where a batch alone needs more, which a run without `max_slots` refuses.
        policy: by name, or a function, as `Tier`.
        half_life: of "aged_lfu", in batches.
        ahead: batches whose rows are known before they come, W.
        prefetch: batches whose rows come while earlier ones are held; 0 is a plain loop.

    Raises:
        ValueError: a number is out of its range; names it.
    """

    rows: int
    slots: int
    max_slots: int | None = None
    policy: str | Policy = "aged_lfu"
    half_life: int = 64
    ahead: int = 0
    prefetch: int = 0
    alone: bool = False

    def __post_init__(self) -> None:
        for what, least in (("rows", 1), ("slots", 1), ("ahead", 0), ("prefetch", 0)):
            if getattr(self, what) < least:
                raise ValueError(f"CacheSetting: {what} must be {least} or more, got {getattr(self, what)}")


@dataclass
class Simulated(RowCounts):
    """What a cache did, in rows.

    Args:
        slots: that there were in the end.
        wanted, hits, fresh, saves: of all batches; `fresh` are misses that were wanted for the first time.
        stalls: prefetches that had no room.
        grown: how often the slots became more.
        by_batch: rows wanted, missed and saved by each batch.
    """

    slots: int
    wanted: int = 0
    hits: int = 0
    fresh: int = 0
    saves: int = 0
    stalls: int = 0
    grown: int = 0
    by_batch: list[tuple[int, int, int]] = field(default_factory=list)

    def after(self, first: int) -> Simulated:
        """The counts of the batches from `first` on; those that are not kept by batch are of all."""
        kept = self.by_batch[first:]
        wanted, missed, saves = (sum(counts[n] for counts in kept) for n in range(3))
        return Simulated(self.slots, wanted, wanted - missed, self.fresh, saves, self.stalls, self.grown, kept)


def simulate(batches: Iterable[Tensor], setting: CacheSetting) -> Simulated:
    """Run a cache over the batches of one table: distinct rows [U] int64 each, ascending.

    Raises:
        ValueError: a batch alone wants more rows than there may be slots; names both.
    """
    done = Simulation(setting)
    for rows in batches:
        done.add(rows)
    return done.finish()


class Simulation:
    """A cache over no storage, fed batch by batch; it holds `ahead` batches that it was told of and has not come to.

    Args:
        setting: of a table.
        others: of the tables of its group, which have its policy, `ahead` and `prefetch`.

    Attributes:
        counts: of the table.
        tables: of each table, in the order of the settings.

    Raises:
        ValueError: tables of a group have other policies or pipelines.
    """

    def __init__(self, setting: CacheSetting, *others: CacheSetting) -> None:
        self.settings, self.setting = [setting, *others], setting
        common = [(s.policy, s.half_life, s.ahead, s.prefetch) for s in self.settings]
        if any(each != common[0] for each in common):
            raise ValueError(f"Simulation: tables of a group have one policy, half_life, ahead and prefetch: {common}")
        slots = [min(each.slots, each.rows) for each in self.settings]
        # rows and slots of all tables are numbered one after another
        first, begin = ([*accumulate(n, initial=0)] for n in ([each.rows for each in self.settings], slots))
        spans = [Span(f"table {t}", first[t], each.rows, begin[t], slots[t]) for t, each in enumerate(self.settings)]
        self.residency = Residency(spans, policy_named(setting.policy, setting.half_life))
        self.tables = [Simulated(count) for count in slots]
        self.counts = self.tables[0]
        self._coming: deque[tuple[Tensor, Announced | None]] = deque()
        self._leases: deque[Lease] = deque()

    def add(self, rows: Tensor, *others: Tensor) -> None:
        """The next batch of the trace: distinct rows [n] of each table, ascending."""
        every = [r + span.first_row for r, span in zip((rows, *others), self.residency.tables, strict=True)]
        together = torch.cat(every) if others else rows
        announced = self.residency.announce(together) if self.setting.ahead else None
        self._coming.append((together, announced))
        if len(self._coming) > self.setting.ahead:
            self._come()

    def finish(self) -> Simulated:
        """The counts of the first table, once all batches that were added have come."""
        while self._coming:
            self._come()
        while self._leases:
            self._release()
        return self.counts

    def _come(self) -> None:
        """The next batch takes its slots; while it is looked up, those after it do, if they find room."""
        rows, announced = self._coming.popleft()
        while len(self._leases) > self.setting.prefetch:
            self._release()
        lease = self._want(rows, announced)
        self._leases.append(lease)
        for counts, (hits, missed, fresh, saved) in zip(self.tables, lease.counts.tolist(), strict=True):
            counts.wanted += hits + missed
            counts.hits += hits
            counts.fresh += fresh
            counts.saves += saved
            counts.by_batch.append((hits + missed, missed, saved))
        if not self.setting.prefetch:
            self._release()

    def _release(self) -> None:
        self.residency.release(self._leases.popleft(), changed=True)

    def _want(self, rows: Tensor, announced: Announced | None) -> Lease:
        """A lease; where slots may not grow and there is no room the batches before it are updated first."""
        stalled = False
        while True:
            try:
                return self.residency.want(rows, announced)
            except TooFewSlots as error:
                waits = bool(self._leases)
                full = next(
                    (t for t, n in error.needed.items() if n > self._most(t) or (waits and self.settings[t].alone)),
                    None,
                )
                if full is None:
                    self._grow(error.needed)
                    continue
                if not self._leases:
                    raise ValueError(
                        f"a batch wants {error.needed[full]:,} distinct rows, and there may be"
                        f" {self._most(full):,} slots"
                    ) from None
                # one prefetch, however long it waits
                self.tables[full].stalls += not stalled
                stalled = True
                self._release()

    def _most(self, table: int) -> int:
        setting = self.settings[table]
        return min(setting.rows, setting.slots if setting.max_slots is None else setting.max_slots)

    def _grow(self, needed: Mapping[int, int]) -> None:
        grown = {t: grown_slots(slots, self._most(t)) for t, slots in needed.items()}
        self.residency.grow(grown)
        for t, slots in grown.items():
            self.tables[t].slots, self.tables[t].grown = slots, self.tables[t].grown + 1


def rows_of_shard(rows: Tensor, begin: int, end: int) -> Tensor:
    """Those [m] of a batch's rows [n], ascending, that are `begin` to `end` of a shard, counted from its first."""
    first, beyond = (int(n) for n in torch.searchsorted(rows, torch.tensor([begin, end])))
    return rows[first:beyond] - begin


def record_bytes(dim: int, dtype: torch.dtype, rule: str | None) -> int:
    """Bytes of a row of `dim` columns as it lies below the device, with the states of an optimizer's rule."""
    kinds = () if rule is None else rule_named(rule).kinds
    states = [(dim,) if kind == "element" else () for kind in kinds]
    return record_layout([(dim,), *states], [dtype, *[torch.float32] * len(states)]).nbytes
