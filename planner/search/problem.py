"""The search's problem as plain arrays: a choice for each item, and ranks for the blocks of that choice.

An item is a table, or several that must stay together. A choice cuts it into blocks; each block lies on `span`
consecutive ranks: one rank (table-wise, column-wise), the ranks of a host (table-row-wise, grid), or all (row-wise,
data-parallel). What a block costs does not depend on which ranks those are, only on the place within the span. A rank's
time and memory are sums over what lies on it; the plan is as slow as its slowest rank.

Letters: W ranks, L ranks of a host, K blocks of a choice, S span, P parts of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# what the time of a rank is made of; a cost model fills all of them, with zeros where it has no such part
PARTS = ("input_comms", "prefetch", "fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "overhead")


@dataclass(frozen=True)
class Cached:
    """The cache of a choice whose rows lie below the device, of a whole step.

    Args:
        slots: rows of the table on the device.
        wanted, misses: distinct rows of a step, and those of them that come from below.
        slot_bytes: of a row on the device, all columns.
        chosen: the search chose the slots; otherwise they were asked for.
        source: where the misses are from, in words.
    """

    slots: int
    wanted: float
    misses: float
    slot_bytes: float
    chosen: bool
    source: str

    @property
    def hit_rate(self) -> float:
        """Of the rows wanted; 1 where none are."""
        return 1 - self.misses / self.wanted if self.wanted else 1.0


@dataclass(frozen=True, eq=False)
class Choice:
    """One way to place an item.

    Args:
        sharding_type, compute_kernel: by value, as in plans.
        widths: columns of each block [K].
        parts_ms: time by `PARTS` [P, K, S], milliseconds a step.
        hbm, ddr: bytes [K, S] in the memory of the device and of the host.
        one_host: all blocks lie on ranks of one host (table-column-wise).
        cached: how many rows are on the device; None if all are.
        reach: of a choice that is one of many sizes of a cache, the least milliseconds and bytes (hbm, ddr), [K, S]
            each, of sizes between its neighbours': a mix of two sizes stands for those between them.
    """

    sharding_type: str
    compute_kernel: str
    widths: tuple[int, ...]
    parts_ms: Floats
    hbm: Ints
    ddr: Ints
    one_host: bool = False
    cached: Cached | None = None
    reach: tuple[Floats, Ints, Ints] | None = None

    def __post_init__(self) -> None:
        blocks, span = self.hbm.shape
        assert self.parts_ms.shape == (len(PARTS), blocks, span) and self.ddr.shape == (blocks, span)
        assert blocks == len(self.widths)

    @property
    def blocks(self) -> int:
        """K."""
        return int(self.hbm.shape[0])

    @property
    def span(self) -> int:
        """S."""
        return int(self.hbm.shape[1])

    @cached_property
    def time_ms(self) -> Floats:
        """Milliseconds [K, S]."""
        total: Floats = self.parts_ms.sum(axis=0)
        return total

    @cached_property
    def work_ms(self) -> float:
        """Milliseconds of all ranks together."""
        return float(self.time_ms.sum())


@dataclass(frozen=True, eq=False)
class Item:
    """A table, or tables that must share a rank, and the ways to place it; `ranks` are those it may use, None all.

    `names` are the tables, in the order in which `choices` speak of them.
    """

    names: tuple[str, ...]
    choices: tuple[Choice, ...]
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    """Items to place on W ranks, L to a host.

    Args:
        hbm, ddr: bytes [W] that tables may use.
        base_ms: milliseconds [W] that each rank spends whatever the plan.
    """

    items: tuple[Item, ...]
    local_size: int
    hbm: Ints
    ddr: Ints
    base_ms: Floats = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        if not self.base_ms.size:
            object.__setattr__(self, "base_ms", np.zeros(self.hbm.size))
        assert self.hbm.shape == self.ddr.shape == self.base_ms.shape
        assert self.local_size > 0 and self.hbm.size % self.local_size == 0

    @property
    def world_size(self) -> int:
        """W."""
        return int(self.hbm.size)


@dataclass(frozen=True)
class Assignment:
    """Number of the choice of each item, and the first rank of each of its blocks."""

    choices: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Solution:
    """The best assignment found and what is known about it.

    Args:
        time_ms: of the slowest rank.
        bound_ms: no assignment within the limits is faster than this.
        bound_from: how the bound was proven, in words.
        proven: `assignment` is optimal, up to a relative 1e-6 and the tolerance of floating point.
        steps: units of work that the search spent, a number that does not depend on the machine.
        certified: the dearer bounds were asked too; `solve.certify` does. The bound holds in any case.
    """

    assignment: Assignment
    time_ms: float
    bound_ms: float
    bound_from: str
    proven: bool
    steps: int = 0
    certified: bool = True

    @property
    def gap(self) -> float:
        """How much slower than the bound, as a share of the bound; 0 where both are 0."""
        return self.time_ms / self.bound_ms - 1 if self.bound_ms > 0 else 0.0


class DoesNotFitError(ValueError):
    """No assignment stays within the memory of the ranks, or none was found; `proven` says which.

    `over` are the bytes (hbm, ddr) over the limit on each rank of `nearest`, the assignment that comes nearest.
    """

    def __init__(self, message: str, nearest: Assignment | None, over: tuple[Ints, Ints] | None, proven: bool) -> None:
        super().__init__(message)
        self.nearest, self.over, self.proven = nearest, over, proven


@dataclass(frozen=True, eq=False)
class Loads:
    """Time by `PARTS` [P, W] and bytes [W] of every rank."""

    parts_ms: Floats
    hbm: Ints
    ddr: Ints

    @cached_property
    def time_ms(self) -> Floats:
        """Milliseconds [W], what every rank spends anyway included."""
        total: Floats = self.parts_ms.sum(axis=0)
        return total


def chosen(problem: Problem, assignment: Assignment) -> Iterator[tuple[Item, Choice, tuple[int, ...]]]:
    """Every item, its choice and the first rank of each block."""
    for item, number, starts in zip(problem.items, assignment.choices, assignment.starts, strict=True):
        yield item, item.choices[number], starts


def loads(problem: Problem, assignment: Assignment) -> Loads:
    """Every rank's time and bytes under an assignment: the specification that the search is checked against."""
    ranks = problem.world_size
    parts, hbm, ddr = np.zeros((len(PARTS), ranks)), np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    parts[PARTS.index("overhead")] += problem.base_ms
    for _, choice, starts in chosen(problem, assignment):
        for block, start in enumerate(starts):
            where = slice(start, start + choice.span)
            parts[:, where] += choice.parts_ms[:, block]
            hbm[where] += choice.hbm[block]
            ddr[where] += choice.ddr[block]
    return Loads(parts, hbm, ddr)


def faults(problem: Problem, assignment: Assignment) -> list[str]:
    """Faults of an assignment, limits of memory included; empty if it may be used."""
    texts = []
    for item, choice, starts in chosen(problem, assignment):
        name = ", ".join(item.names)
        allowed = set(range(problem.world_size)) if item.ranks is None else set(item.ranks)
        if len(starts) != choice.blocks:
            texts.append(f"{name}: {len(starts)} places for {choice.blocks} blocks")
        for start in starts:
            if start % choice.span or not 0 <= start <= problem.world_size - choice.span:
                texts.append(f"{name}: a block of {choice.span} ranks cannot begin at rank {start}")
            elif not allowed.issuperset(range(start, start + choice.span)):
                texts.append(f"{name}: ranks {start} to {start + choice.span - 1} are not allowed")
        if choice.one_host and len({start // problem.local_size for start in starts}) > 1:
            texts.append(f"{name}: its blocks are on more than one host")
    if not texts:
        totals = loads(problem, assignment)
        for what, used, limit in (("hbm", totals.hbm, problem.hbm), ("ddr", totals.ddr, problem.ddr)):
            texts += [f"rank {r}: {used[r]} of {limit[r]} bytes of {what}" for r in np.flatnonzero(used > limit)]
    return texts


def blocks_of(choice: Choice, problem: Problem) -> Sequence[int]:
    """The ranks at which a block of this choice may begin."""
    return range(0, problem.world_size, choice.span)
