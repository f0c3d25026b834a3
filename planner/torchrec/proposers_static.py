"""Proposers that walk a fixed path through the options of every table, by TorchRec's names.

A proposal is one option for each table. A planner asks `propose()`, tries to place what it gets, tells `feedback(...)`,
and asks again until there is nothing left; until `feedback` the same proposal is repeated. Options of a table are tried
from fast to slow, in the order of the search space where they are equally fast.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from collections.abc import Iterator, Sequence

from .types import Enumerator, Proposer, ShardingOption, Topology

logger = logging.getLogger(__name__)

# grid search gives up beyond this many combinations
MAX_PROPOSALS = 10_000


def options_by_table(search_space: Sequence[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """The options of every table by its full name, both in the order of the search space."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in search_space:
        tables.setdefault(option.fqn, []).append(option)
    return tables


def milliseconds(option: ShardingOption, use_depth: bool = True) -> float:
    """What an option is judged by: its slowest shard, or with `use_depth=False` the sum of its shards."""
    times = (shard.perf.total for shard in option.shards if shard.perf is not None)
    return max(times) if use_depth else sum(times)


class GreedyProposer(Proposer):
    """Begins with the fastest option of every table, then moves the table that takes most memory to its next option.

    Memory is compared by the largest shard and then the sum of shards, on devices first and then on hosts. A table at
    its last option stays there, and one that takes no memory never moves.

    Args:
        use_depth: an option is as slow as its slowest shard; False adds its shards up.
        threshold: stop after more than this many proposals in a row that were no faster than the best; None or 0 never
            stops early. Proposals that could not be placed do not count.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth = use_depth
        self._threshold = threshold
        self._tables: list[list[ShardingOption]] = []
        # number of each table's option in the current proposal; None when there are no more
        self._current: list[int] | None = None
        # tables that can still move, the one that takes most memory on top
        self._movable: list[tuple[int, ...]] = []
        self._best_rating = math.inf
        self._slower_in_a_row = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Begin again with these options."""
        self._tables = [
            sorted(options, key=lambda option: milliseconds(option, self._use_depth))
            for options in options_by_table(search_space).values()
        ]
        self._current = [0] * len(self._tables) or None
        self._best_rating, self._slower_in_a_row = math.inf, 0
        self._movable = []
        for table in range(len(self._tables)):
            self._offer(table)

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None when there are no more."""
        if self._current is None:
            return None
        return [options[number] for options, number in zip(self._tables, self._current, strict=True)]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Move one table on, whether the proposal could be placed or not; only `perf_rating` may end the search."""
        if self._current is None:
            return
        if self._threshold and perf_rating:
            self._slower_in_a_row += 1
            if perf_rating < self._best_rating:
                self._best_rating, self._slower_in_a_row = perf_rating, 0
            if self._slower_in_a_row > self._threshold:
                self._current = None
                return
        if not self._movable:
            self._current = None
            return
        table = heapq.heappop(self._movable)[-1]
        self._current[table] += 1
        self._offer(table)

    def _offer(self, table: int) -> None:
        assert self._current is not None
        options, number = self._tables[table], self._current[table]
        if number + 1 == len(options):
            return
        held = [shard.storage for shard in options[number].shards if shard.storage is not None]
        hbm, ddr = [storage.hbm for storage in held], [storage.ddr for storage in held]
        taken = (max(hbm), sum(hbm), max(ddr), sum(ddr))
        if taken > (0, 0, 0, 0):
            # the least of these tuples is the table that takes most; of equal ones, the first
            heapq.heappush(self._movable, (*(-size for size in taken), table))


class UniformProposer(Proposer):
    """One sharding type for all tables, in the order in which types appear; types that some table lacks are left out.

    Of a table's options of that type the fastest is taken, whatever its kernel.

    Args:
        use_depth: as in `GreedyProposer`.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth
        self._proposals: list[list[ShardingOption]] = []
        self._number = 0

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Begin again with these options."""
        by_type: dict[str, list[ShardingOption]] = {}
        for option in search_space:
            by_type.setdefault(option.sharding_type, []).append(option)
        all_tables = options_by_table(search_space).keys()
        self._number = 0
        self._proposals = [
            [min(options, key=lambda option: milliseconds(option, self._use_depth)) for options in tables.values()]
            for tables in map(options_by_table, by_type.values())
            if tables.keys() == all_tables
        ]

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None when there are no more."""
        return self._proposals[self._number] if self._number < len(self._proposals) else None

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """On to the next type."""
        self._number += 1


class GridSearchProposer(Proposer):
    """All combinations, the last table's option changing fastest; none at all where there are too many.

    Args:
        max_proposals: with more combinations than this, nothing is proposed.
    """

    def __init__(self, max_proposals: int = MAX_PROPOSALS) -> None:
        self._max_proposals = max_proposals
        self._combinations: Iterator[tuple[ShardingOption, ...]] = iter(())
        self._current: tuple[ShardingOption, ...] | None = None

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Begin again with these options."""
        tables = [sorted(options, key=milliseconds) for options in options_by_table(search_space).values()]
        combinations = math.prod(map(len, tables))
        if combinations > self._max_proposals:
            logger.info("no grid search: %s combinations, at most %s allowed", combinations, self._max_proposals)
            tables = [[]]
        self._combinations = itertools.product(*tables)
        self._current = next(self._combinations, None)

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None when there are no more."""
        return None if self._current is None else list(self._current)

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """On to the next combination."""
        self._current = next(self._combinations, None)
