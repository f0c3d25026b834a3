"""The proposer that solves a knapsack: for every amount of device memory, the options with the least total time.

Letters: M tables, N options of a table, B bins of memory. `perf [M, B]` is the least total time of the first tables
with their memory in bin b, and `held` that memory, in bins and not rounded, so that rounding errors do not add up.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .proposers_static import options_by_table
from .types import Enumerator, Proposer, ShardingOption, Topology

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


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
    steps = []
    perf, held = np.zeros(1), np.zeros(1)
    for options in tables:
        here, best, total = np.flatnonzero(perf < np.inf), np.full(bins, np.inf), np.zeros(bins)
        option_of, bin_of = np.full(bins, -1, np.int32), np.full(bins, -1, np.int32)
        for number, option in enumerate(options):
            hbm = option.total_storage.hbm
            # devices without memory of their own have one bin, in which options without such memory lie
            more = hbm / bin_bytes if bin_bytes else (np.inf if hbm else 0.0)
            sums = held[here] + more
            fits = sums < bins
            source, sums = here[fits], sums[fits]
            times, target = perf[source] + option.total_perf, sums.astype(np.int64)
            first = np.flatnonzero(np.diff(target, prepend=-1))
            # bins hold increasing totals less than two bins apart, so that at most two neighbours meet in a bin
            second = np.minimum(first + 1, len(target) - 1)
            take = np.where((target[second] == target[first]) & (times[second] < times[first]), second, first)
            take = take[times[take] < best[target[take]]]
            at = target[take]
            best[at], total[at], option_of[at], bin_of[at] = times[take], sums[take], number, source[take]
        perf, held = best, total
        steps.append((option_of, bin_of))
    return steps
