"""What caches would do with a trace: the decisions of `Residency`, the cache that runs, over no storage.

Hits, misses, saves and stalls are those of a run whose batches come in the trace's order, equal to the last row. Tables
are simulated one by one: where a prefetch finds no room in one table of a group, a run has those of the others wait for
it, and their slots are held a little longer than here.

Letters: U distinct rows of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

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
        max_slots: up to so many they grow where a batch alone needs more; None does not grow.
        policy: by name, or a function, as `Tier`.
        half_life: of "aged_lfu", in batches.
        ahead: batches whose rows are known before they come, W.
        prefetch: batches whose rows come while earlier ones are held; 0 is a plain loop.
    """

    rows: int
    slots: int
    max_slots: int | None = None
    policy: str | Policy = "aged_lfu"
    half_life: int = 64
    ahead: int = 0
    prefetch: int = 0

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
    """A cache over no storage, fed batch by batch; it holds `ahead` batches that it was told of and has not come to."""

    def __init__(self, setting: CacheSetting) -> None:
        self.setting = setting
        policy = policy_named(setting.policy, setting.half_life)
        slots = min(setting.slots, setting.rows)
        self.residency = Residency([Span("table", 0, setting.rows, 0, slots)], policy)
        self.counts = Simulated(slots)
        self._coming: deque[tuple[Tensor, Announced | None]] = deque()
        self._leases: deque[Lease] = deque()

    def add(self, rows: Tensor) -> None:
        """The next batch of the trace."""
        announced = self.residency.announce(rows) if self.setting.ahead else None
        self._coming.append((rows, announced))
        if len(self._coming) > self.setting.ahead:
            self._come()

    def finish(self) -> Simulated:
        """The counts, once all batches that were added have come."""
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
        counts = self.counts
        ((hits, missed, fresh, saved),) = lease.counts.tolist()
        counts.wanted += rows.numel()
        counts.hits += hits
        counts.fresh += fresh
        counts.saves += saved
        counts.by_batch.append((rows.numel(), missed, saved))
        if not self.setting.prefetch:
            self._release()

    def _release(self) -> None:
        self.residency.release(self._leases.popleft(), changed=True)

    def _want(self, rows: Tensor, announced: Announced | None) -> Lease:
        """A lease; where there is no room the batches before it are updated first, and then slots grow."""
        stalled = False
        while True:
            try:
                return self.residency.want(rows, announced)
            except TooFewSlots as error:
                if self._leases:
                    # one prefetch, however long it waits
                    self.counts.stalls += not stalled
                    stalled = True
                    self._release()
                    continue
                self._grow(error.needed[0])

    def _grow(self, needed: int) -> None:
        setting, slots = self.setting, self.counts.slots
        most = slots if setting.max_slots is None else min(setting.max_slots, setting.rows)
        if needed > most:
            raise ValueError(f"a batch wants {needed:,} distinct rows, and there may be {most:,} slots")
        grown = grown_slots(needed, most)
        self.residency.grow({0: grown})
        self.counts.slots, self.counts.grown = grown, self.counts.grown + 1


def rows_of_shard(rows: Tensor, begin: int, end: int) -> Tensor:
    """Those of a batch's rows, ascending, that lie in the rows [begin, end) of a shard, counted from its first."""
    first, beyond = (int(n) for n in torch.searchsorted(rows, torch.tensor([begin, end])))
    return rows[first:beyond] - begin


def record_bytes(dim: int, dtype: torch.dtype, rule: str | None) -> int:
    """Bytes of a row of `dim` columns as it lies below the device, with the states of an optimizer's rule."""
    kinds = () if rule is None else rule_named(rule).kinds
    states = [(dim,) if kind == "element" else () for kind in kinds]
    return record_layout([(dim,), *states], [dtype, *[torch.float32] * len(states)]).nbytes
