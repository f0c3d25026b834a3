"""TorchRec's proposers: what to try, one proposal after the other, for planners that place and rate each.

A proposal is one option for each table. A planner asks `propose()`, tries to place what it gets, tells `feedback(...)`,
and asks again until there is nothing left; until `feedback` the same proposal is repeated. Options of a table are tried
from fast to slow, in the order of the search space where they are equally fast. The default planner does not use them,
it searches (`search/solve.py`); they are here for code that drives a planner itself.

Letters: M tables, N options of a table, B bins of memory, T tables with caches; a load factor is the share of a table's
rows that its cache holds.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..topology import Topology
from .sharding_option import ShardingOption
from .types import Enumerator, Proposer
from .utils import LuusJaakolaSearch, bytes_to_gb

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
    """An option's rating: the time of its slowest shard, or with `use_depth=False` the sum of its shards."""
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
        storages = [shard.storage for shard in options[number].shards if shard.storage is not None]
        hbm, ddr = [storage.hbm for storage in storages], [storage.ddr for storage in storages]
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


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


# `perf [M, B]` is the least total time of the first tables with their memory in bin b, and `used` that memory, in bins
# and not rounded, so that rounding errors do not add up
class DynamicProgrammingProposer(Proposer):
    """First the options that take least device memory, then for each total of it, largest first, the fastest options.

    A total that fits all devices together need not fit each of them, which is why smaller totals follow. Time is summed
    over tables and shards: a plan's slowest rank is not known before it is placed.

    Args:
        hbm_bins_per_device: totals are told apart to this part of a device's memory; at least 1.
    """

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._bins_per_device = max(hbm_bins_per_device, 1)
        self._tables: list[list[ShardingOption]] = []
        self._steps: list[tuple[Ints, Ints]] | None = None
        # the totals that are still to be proposed, the next one last
        self._totals: list[int] = []

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Begin again with these options."""
        by_memory = sorted(search_space, key=lambda option: option.total_storage.hbm)
        self._tables = list(options_by_table(by_memory).values())
        self._steps, self._totals = None, []

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal, tables in order of the least memory that they can take; None when there are no more."""
        if self._steps is None:
            return [options[0] for options in self._tables]
        if not self._totals:
            return None
        bin_, chosen = self._totals[-1], []
        for options, (option, from_bin) in zip(reversed(self._tables), reversed(self._steps), strict=True):
            chosen.append(options[option[bin_]])
            bin_ = int(from_bin[bin_])
        return chosen[::-1]

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Solve the knapsack for the memory of these devices, at the first call; on to the next total at the others.

        Raises:
            ValueError: the first call has no `storage_constraint`.
        """
        if self._steps is not None:
            del self._totals[-1:]
            return
        if storage_constraint is None:
            raise ValueError("DynamicProgrammingProposer: the first feedback must bring storage_constraint, a Topology")
        memory = float(sum(device.storage.hbm for device in storage_constraint.devices))
        bins = self._bins_per_device * len(storage_constraint.devices)
        self._steps = _knapsack(self._tables, bins, memory / bins)
        if self._steps:
            # option -1 marks a total that nothing reaches
            self._totals = np.flatnonzero(self._steps[-1][0] >= 0).tolist()


def _knapsack(tables: list[list[ShardingOption]], bins: int, bin_bytes: float) -> list[tuple[Ints, Ints]]:
    """For every table [B], the option that leads to each total of memory, -1 if none, and the bin that it came from."""
    steps = []  # (option_of, bin_of), each [bins]
    perf, used = np.zeros(1), np.zeros(1)
    for options in tables:
        here, best, total = np.flatnonzero(perf < np.inf), np.full(bins, np.inf), np.zeros(bins)
        option_of, bin_of = np.full(bins, -1, np.int32), np.full(bins, -1, np.int32)
        for number, option in enumerate(options):
            hbm = option.total_storage.hbm
            # devices without memory of their own have one bin, in which options without such memory lie
            more = hbm / bin_bytes if bin_bytes else (np.inf if hbm else 0.0)
            sums = used[here] + more  # [bins that are reached]
            fits = sums < bins
            source, sums = here[fits], sums[fits]
            times, target = perf[source] + option.total_perf, sums.astype(np.int64)
            first = np.flatnonzero(np.diff(target, prepend=-1))  # the first entry of each bin
            # bins hold increasing totals less than two bins apart, so that at most two neighbours meet in a bin
            second = np.minimum(first + 1, len(target) - 1)
            take = np.where((target[second] == target[first]) & (times[second] < times[first]), second, first)
            take = take[times[take] < best[target[take]]]
            at = target[take]
            best[at], total[at], option_of[at], bin_of[at] = times[take], sums[take], number, source[take]
        perf, used = best, total
        steps.append((option_of, bin_of))
    return steps


logger = logging.getLogger(__name__)

CACHED, ON_DEVICE = "fused_uvm_caching", "fused"

# probes of the search over the bytes to spend
MAX_ITERATIONS = 16
# rounds in which bytes that a full cache cannot take go to the others
MAX_ROUNDS = 128
# a cache this full is a whole table, up to the rounding of float32
WHOLE = 0.9999


class EmbeddingOffloadScaleupProposer(Proposer):
    """Sizes the caches of tables that are kept on the host, by what the plans of earlier sizes were rated.

    It begins with the fastest cached option of every table and asks how much of the free device memory caches should
    have: too little and ids are missed, too much and tables no longer spread evenly. A search over one number, the
    bytes to spend, answers that from the ratings that come back. Bytes are spent where a byte helps most: in proportion
    to cacheability (area under the curve of misses) times expected lookups. A cache as large as its table becomes a
    table on the device.

    Only tables with `cache_params` that have a load factor and statistics are sized; all others stay as they are. It
    needs the enumerator, whose estimates it asks for again at every size; without it only the first proposal is made.

    Args:
        use_depth: as in `GreedyProposer`.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self.use_depth = use_depth
        self.enumerator: Enumerator | None = None
        self.starting_proposal: list[ShardingOption] = []
        self.proposal: list[ShardingOption] | None = None
        self.search: LuusJaakolaSearch | None = None
        self.best_perf_rating = math.inf

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Begin again with these options; `enumerator` must be the one they came from."""
        self.enumerator, self.search, self.best_perf_rating = enumerator, None, math.inf
        chosen = [_begin_with(options, self.use_depth) for options in options_by_table(search_space).values()]
        self.starting_proposal = _copies(chosen)
        self.promote_high_prefetch_overheaad_table_to_hbm(enumerator, self.starting_proposal)
        self.proposal = _copies(self.starting_proposal)

    def propose(self) -> list[ShardingOption] | None:
        """The current proposal; None when there are no more."""
        return self.proposal

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Choose the next size of caches; a plan that could not be placed makes smaller ones likelier."""
        proposed, self.proposal = self.proposal, None
        if self.enumerator is None or plan is None or proposed is None:
            return
        used = _hbm(plan)
        logger.info("offload: %.2f GB on devices rated %s", bytes_to_gb(used), perf_rating)
        if perf_rating is not None:
            self.best_perf_rating = min(self.best_perf_rating, perf_rating)
        if self.search is None:
            if not partitionable or storage_constraint is None:
                return
            most = self.get_hbm_ceiling(plan, self.enumerator) - used
            budget = min(self.get_budget(plan, storage_constraint), most)
            if budget <= 0:
                return
            self.search = LuusJaakolaSearch(0, budget, max_iterations=MAX_ITERATIONS, left_cost=perf_rating)
        if not partitionable:
            # sizes above this one would not be placed either
            budget = used - _hbm(self.starting_proposal)
            if budget <= 0:
                return
            self.search.shrink_right(budget)
        spend = self.search.next(perf_rating or 1e99)
        if spend is not None:
            self.proposal = self.next_plan(self.starting_proposal, int(spend), self.enumerator)

    @staticmethod
    def promote_high_prefetch_overheaad_table_to_hbm(
        enumerator: Enumerator | None, proposal: list[ShardingOption]
    ) -> None:
        """Put tables on the device whose cache would take more memory than they do, in place; estimates are renewed."""
        if enumerator is None:
            return
        cached = [option for option in proposal if option.compute_kernel == CACHED]
        on_device = _copies(cached)
        for option in on_device:
            _put_on_device(option)
        enumerator.populate_estimates(on_device)
        for option, instead in zip(cached, on_device, strict=True):
            if instead.total_storage.hbm < option.total_storage.hbm:
                _put_on_device(option)
        enumerator.populate_estimates(cached)

    @staticmethod
    def get_hbm_ceiling(starting_proposal: list[ShardingOption], enumerator: Enumerator) -> int:
        """Bytes of device memory with all tables that could be sized on the device."""
        proposal = _copies(starting_proposal)
        cached = EmbeddingOffloadScaleupProposer.get_scalable_sharding_options(proposal)
        for option in cached:
            _put_on_device(option)
        enumerator.populate_estimates(cached)
        return _hbm(proposal)

    @staticmethod
    def get_budget(proposal: list[ShardingOption], storage_constraint: Topology) -> int:
        """Bytes of device memory that a proposal leaves free, on all devices together."""
        return sum(device.storage.hbm for device in storage_constraint.devices) - _hbm(proposal)

    @staticmethod
    def get_scalable_sharding_options(proposal: list[ShardingOption]) -> list[ShardingOption]:
        """The options whose caches can be sized."""
        return [
            option
            for option in proposal
            if option.compute_kernel == CACHED and _priority(option) * (option.cache_load_factor or 0.0) > 0
        ]

    @staticmethod
    def next_plan(
        starting_proposal: list[ShardingOption], budget: int | None, enumerator: Enumerator | None
    ) -> list[ShardingOption] | None:
        """A copy of a proposal whose caches are `budget` bytes larger; None where nothing can be sized."""
        if budget is None or enumerator is None:
            return None
        proposal = _copies(starting_proposal)
        cached = EmbeddingOffloadScaleupProposer.get_scalable_sharding_options(proposal)
        if not cached:
            return None
        model, on_device = EmbeddingOffloadScaleupProposer.build_affine_storage_model(cached, enumerator)
        load_factors = EmbeddingOffloadScaleupProposer.allocate_budget(
            model=model,
            fused_hbm_ceiling=on_device,
            clfs=np.array([option.cache_load_factor for option in cached], np.float32),
            budget=budget,
            allocation_priority=np.array([_priority(option) for option in cached], np.float32),
        )
        for option, load_factor in zip(cached, load_factors.tolist(), strict=True):
            _set_load_factor(option, load_factor)
            if load_factor > WHOLE:
                _put_on_device(option)
        enumerator.populate_estimates(cached)
        return proposal

    @staticmethod
    def get_cacheability(sharding_option: ShardingOption) -> float | None:
        """Area under the curve of misses; None without statistics."""
        stats = _statistics(sharding_option)
        return None if stats is None else float(stats.cacheability)

    @staticmethod
    def get_expected_lookups(sharding_option: ShardingOption) -> float | None:
        """Ids looked up in a step, each counted once; None without statistics."""
        stats = _statistics(sharding_option)
        return None if stats is None else float(stats.expected_lookups)

    @staticmethod
    def build_affine_storage_model(
        uvm_caching_sharding_options: list[ShardingOption], enumerator: Enumerator
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Device bytes of each table as `slope * load_factor + base` [T, 2], and with the table on the device [T]."""
        options = _copies(uvm_caching_sharding_options)

        def measured() -> npt.NDArray[np.int64]:
            enumerator.populate_estimates(options)
            return np.array([option.total_storage.hbm for option in options], np.int64)

        low, high = 0.1, 0.9
        sizes = []
        for load_factor in (low, high):
            for option in options:
                _set_load_factor(option, load_factor)
            sizes.append(measured())
        for option in options:
            _put_on_device(option)
        # float32, as TorchRec has it, so that load factors agree to the last bit
        slope = (sizes[1] - sizes[0]).astype(np.float32) / np.float32(high - low)
        base = sizes[0].astype(np.float32) - slope * np.float32(low)
        return np.stack((slope, base), axis=1), measured()

    @staticmethod
    def clf_to_bytes(model: npt.ArrayLike, clfs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Device bytes at these load factors by a model of `build_affine_storage_model` [T]."""
        slope, base = np.asarray(model, np.float32).T
        return np.asarray(slope * np.asarray(clfs, np.float32) + base, np.float64)

    @staticmethod
    def allocate_budget(
        model: npt.ArrayLike,
        fused_hbm_ceiling: npt.ArrayLike,
        clfs: npt.ArrayLike,
        budget: int,
        allocation_priority: npt.ArrayLike,
    ) -> npt.NDArray[np.float32]:
        """Load factors [T] with `budget` bytes more in all caches together, spent in proportion to priority.

        No cache shrinks. What a cache cannot take, because it holds its whole table, goes to the others; so does what
        is saved where a table takes less on the device than its cache does.
        """
        least = EmbeddingOffloadScaleupProposer.clf_to_bytes(model, 0)
        most = EmbeddingOffloadScaleupProposer.clf_to_bytes(model, 1)
        cache = EmbeddingOffloadScaleupProposer.clf_to_bytes(model, clfs) - least
        ceiling, priority = np.asarray(fused_hbm_ceiling), np.asarray(allocation_priority, np.float64)
        whole, left = most - least, float(budget)
        for _ in range(MAX_ROUNDS):
            growing = least + cache < most
            weights = growing * priority
            if left <= 1 or not weights.any():
                break
            grown = np.minimum(cache + left * (weights / weights.sum()), whole)
            left -= float((grown - cache).sum())
            cache = grown
            promoted = growing & (least + cache > ceiling)
            left += float((least + cache - ceiling)[promoted].sum())
            cache[promoted] = whole[promoted]
        # a table whose cache takes no device memory keeps its load factor
        return np.divide(cache, whole, out=np.array(clfs, np.float64), where=whole > 0).astype(np.float32)


def _begin_with(options: Sequence[ShardingOption], use_depth: bool) -> ShardingOption:
    """The fastest cached option of a table, else its fastest."""
    by_time = sorted(options, key=lambda option: milliseconds(option, use_depth))
    if len(by_time) > 1:
        logger.warning("offload: %s has %d options, of which one is used", by_time[0].name, len(by_time))
    chosen = next((option for option in by_time if option.compute_kernel == CACHED), by_time[0])
    algorithm = None if chosen.cache_params is None else chosen.cache_params.algorithm
    if algorithm is not None and algorithm.name != "LRU":
        logger.warning("offload: statistics are those of an LRU cache, %s has %s", chosen.name, algorithm)
    return chosen


def _copies(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Options of their own, not placed, whose kernel, load factor and estimates can be changed."""
    copies = [copy.copy(option) for option in options]
    for option in copies:
        option.shards = [replace(shard, rank=None) for shard in option.shards]
    return copies


def _put_on_device(option: ShardingOption) -> None:
    _set_load_factor(option, None)
    option.compute_kernel = ON_DEVICE


def _set_load_factor(option: ShardingOption, load_factor: float | None) -> None:
    if option.cache_params is not None:
        # the user's object stays as it is
        option.cache_params = replace(option.cache_params, load_factor=load_factor)


def _hbm(options: Sequence[ShardingOption]) -> int:
    return sum(option.total_storage.hbm for option in options)


def _statistics(option: ShardingOption) -> Any:
    return None if option.cache_params is None else option.cache_params.stats


def _priority(option: ShardingOption) -> float:
    """How much a byte of cache helps this table; 0 without statistics."""
    cacheability = EmbeddingOffloadScaleupProposer.get_cacheability(option) or 0.0
    return cacheability * (EmbeddingOffloadScaleupProposer.get_expected_lookups(option) or 0.0)


__all__ = [
    "MAX_PROPOSALS",
    "DynamicProgrammingProposer",
    "EmbeddingOffloadScaleupProposer",
    "GreedyProposer",
    "GridSearchProposer",
    "UniformProposer",
    "proposers_to_proposals_list",
]


def proposers_to_proposals_list(
    proposers_list: Sequence[Proposer], search_space: list[ShardingOption]
) -> list[list[ShardingOption]]:
    """All proposals of some proposers, each once, in order; for proposers whose path no feedback changes."""
    for proposer in proposers_list:
        proposer.load(search_space=search_space)
    proposals: dict[tuple[int, ...], list[ShardingOption]] = {}
    for proposer in proposers_list:
        while proposal := proposer.propose():
            proposals.setdefault(tuple(sorted(map(hash, proposal))), proposal)
            proposer.feedback(partitionable=True)
    return list(proposals.values())
