"""Which columns of a pooled output each rank fills, and which columns of its gradient each rank wants: made once.

An output column has one source for each range of rows that holds it: a matrix of sums from each rank, or through it
from a host, whose columns lie slot by slot; a lookup that is pooled here; a replicated table. Sources are added in the
order of the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from .routes import HOST, POOLED, REPLICA, ROWS, Routes, Serving

# a matrix of columns: sums of a rank, or of a host through it; rows pooled here, or replicated tables, by lookup
Key = tuple[str, int]


class Run(NamedTuple):
    """Columns [low, high) of the output are columns from `first` on of the matrix `key`."""

    low: int
    high: int
    key: Key
    first: int


class Wanted(NamedTuple):
    """Columns [low, high) of the gradient that a rank wants, run after run, and how many they are."""

    runs: list[tuple[int, int]]
    width: int


class OutputColumns:
    """Where the output columns of a pooled lookup come from, on one rank, and where their gradient goes."""

    def __init__(self, routes: Routes, rank: int) -> None:
        # tables trained by their gradient are looked up apart from all this
        widths = [0 if n in routes.dense_lookups else dim for n, dim in enumerate(routes.dims)]
        # [L + 1] where the columns of each lookup begin
        self.starts = list(accumulate(widths, initial=0))
        sources: dict[tuple[int, int], list[Run]] = {}
        for key, columns in _matrices(routes, rank):
            at = 0
            for lookup, low, high in columns:
                begin, end = self.starts[lookup] + low, self.starts[lookup] + high
                sources.setdefault((begin, end), []).append(Run(begin, end, key, at))
                at += high - low
        # the first source of every column, then the second of those that have one, ...
        depth = max(map(len, sources.values()), default=0)
        by_layer = [[runs[n] for _, runs in sorted(sources.items()) if n < len(runs)] for n in range(depth)]
        self.layers = [list(_merged(runs)) for runs in by_layer]
        first_cut = {cut.lookup: number for number, cut in reversed(list(enumerate(routes.cuts)))}
        # lookups that are pooled here, and averaged ones whose sums are divided here; and one of their cuts
        self.ordered = {n: cut for n, cut in first_cut.items() if routes.is_ordered(n)}
        self.divided = {n: cut for n, cut in first_cut.items() if routes.table_of(n).mean and n not in self.ordered}
        # what the gradients of the divided are cut to, if they are
        specs = {n: routes.table_of(n).optimizer for n in self.divided}
        self.max_gradient = {n: spec.max_gradient for n, spec in specs.items() if spec is not None}
        # [W] of the rank itself, and of its host through it
        near = [routes.are_counterparts(other, rank) for other in range(routes.world_size)]
        self.wanted = [self._wanted(serving, POOLED, ROWS, REPLICA) for serving in routes.serving]
        self.wanted_by_host = [
            self._wanted(serving, *([HOST] if is_near else []))
            for serving, is_near in zip(routes.serving, near, strict=True)
        ]

    def _wanted(self, serving: Serving, *kinds: str) -> Wanted:
        """Columns that slots of these kinds want the gradient of, in the order of the slots."""
        runs, at = [], 0
        for group in serving.groups:
            for slot in group.slots if group.kind in kinds else ():
                runs.append(Run(at, at + slot.width, (POOLED, 0), self.starts[slot.lookup] + slot.columns[0]))
                at += slot.width
        return Wanted([(run.first, run.first + run.high - run.low) for run in _merged(runs)], at)

    def of_lookup(self, values: Tensor, lookup: int) -> Tensor:
        """A lookup's columns of `values` [B, columns], as a view."""
        return values[:, self.starts[lookup] : self.starts[lookup + 1]]


def _matrices(routes: Routes, rank: int) -> Iterator[tuple[Key, list[tuple[int, int, int]]]]:
    """Each matrix and its columns as (lookup, first and last column of it), in the order in which they are added."""
    for other, serving in enumerate(routes.serving):
        for kind in (POOLED, HOST) if routes.are_counterparts(other, rank) else (POOLED,):
            slots = [slot for group in serving.groups if group.kind == kind for slot in group.slots]
            yield (kind, other), [(slot.lookup, *slot.columns) for slot in slots]
    for lookup in sorted({cut.lookup for cut in routes.cuts if routes.is_ordered(cut.lookup)}):
        yield (ROWS, lookup), [(lookup, 0, routes.table_of(lookup).dim)]
    for group in routes.replicas:
        for slot in group.slots:
            yield (REPLICA, slot.lookup), [(slot.lookup, *slot.columns)]


def _merged(runs: Sequence[Run]) -> Iterator[Run]:
    """Neighbours on both sides as one."""
    last: Run | None = None
    for run in runs:
        if last is None:
            last = run
        elif (last.key, last.high, last.first + last.high - last.low) == (run.key, run.low, run.first):
            last = last._replace(high=run.high)
        else:
            yield last
            last = run
    if last is not None:
        yield last
