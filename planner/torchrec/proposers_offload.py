"""The proposer that sizes caches: tables kept on the host get caches on the device, as large as memory allows.

It begins with the fastest cached option of every table and asks how much of the free device memory caches should have:
too little and ids are missed, too much and tables no longer spread evenly. A search over one number, the bytes to
spend, answers that from the ratings that come back. Bytes are spent where a byte helps most: in proportion to
cacheability (area under the curve of misses) times expected lookups. A cache as large as its table becomes a table on
the device.

Letters: T tables with caches; a load factor is the share of a table's rows that its cache holds.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .proposers_static import milliseconds, options_by_table
from .types import Enumerator, Proposer, ShardingOption, Topology
from .utils import LuusJaakolaSearch, bytes_to_gb

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
