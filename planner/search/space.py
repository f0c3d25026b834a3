"""A problem as the search reads it: arrays over the choices of an item, so that one pass of numpy weighs all places.

A resource is time (first) or a kind of memory that some choice uses; time is in milliseconds, memory in bytes, both
as float64, which holds every sum of bytes below 2**53 exactly.

Letters: N items, C choices of an item, K blocks, S span, W ranks, R resources, Q choices of one span, n slots of a
span (the places where a block of S ranks may begin: W // S).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .problem import Floats, Ints, Item, Problem

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Group:
    """The choices of an item whose blocks span the same number of ranks.

    Args:
        numbers: of the choices [Q].
        use: of a mean block of each [R, Q, S]; times blocks / counts where there are more blocks than slots.
        counts: slots that the blocks of each take [Q], at most those open.
        closed: slots that the item may not use [n]; None where it may use all.
        one_host: the rows whose blocks lie on one host.
    """

    span: int
    numbers: Ints
    use: Floats
    counts: Ints
    closed: Bools | None
    one_host: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Space:
    """Choices that fit somewhere, and what they use.

    Args:
        memories: "hbm" and "ddr", those that a choice uses [R - 1].
        limits: of memory [R, W]; the first row, of time, holds minus `base_ms`.
        blocks: [N][C] of arrays [R, K, S]; None for a choice that fits nowhere.
        groups: [N].
        work: milliseconds of all blocks [N, C]; infinite for a choice that fits nowhere.
        memory: bytes of all blocks [R - 1, N, C].
        biggest: the most that a block uses on a rank [R, N, C].
    """

    problem: Problem
    memories: tuple[str, ...]
    limits: Floats
    blocks: list[list[Floats | None]]
    groups: list[tuple[Group, ...]]
    work: Floats
    memory: Floats
    biggest: Floats

    @property
    def ranks(self) -> int:
        """W."""
        return self.problem.world_size

    def of(self, i: int, number: int) -> Floats:
        """The resources that the blocks of a choice use [R, K, S]."""
        blocks = self.blocks[i][number]
        assert blocks is not None, "a choice that fits nowhere"
        return blocks


def read(problem: Problem, *, limited: bool = True) -> Space:
    """The arrays of a problem; with choices that fit nowhere unless `limited`."""
    items = problem.items
    memories = [m for m in ("hbm", "ddr") if any(getattr(c, m).any() for item in items for c in item.choices)]
    limits = np.stack([-problem.base_ms, *(getattr(problem, m).astype(np.float64) for m in memories)])  # [R, W]
    shape = (len(items), max((len(item.choices) for item in items), default=0))  # N, C
    work = np.full(shape, np.inf)
    memory, biggest = np.zeros((len(memories), *shape)), np.zeros((len(limits), *shape))
    blocks: list[list[Floats | None]] = [[None] * len(item.choices) for item in items]
    # choices of the same shape are read together, since thousands of small arrays are slow one by one
    alike: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for i, item in enumerate(items):
        for number, choice in enumerate(item.choices):
            alike[choice.blocks, choice.span].append((i, number))
    means = np.empty((len(items),), dtype=object)
    for i, item in enumerate(items):
        means[i] = [None] * len(item.choices)
    for pairs in alike.values():
        chosen = [items[i].choices[number] for i, number in pairs]
        use = np.stack(
            [
                np.stack([c.parts_ms for c in chosen]).sum(axis=1),
                *(np.stack([getattr(c, m) for c in chosen]).astype(np.float64) for m in memories),
            ],
            axis=1,
        )
        whose = [(items[i], c.one_host) for (i, _), c in zip(pairs, chosen, strict=True)]  # of each row
        fits = _fits(use, limits if limited else np.full_like(limits, np.inf), whose, problem)
        at = tuple(np.array(pairs).T)
        totals = use.sum(axis=(2, 3))  # [rows, R]
        work[at] = np.where(fits, totals[:, 0], np.inf)
        biggest[(slice(None), *at)] = use.max(axis=(2, 3)).T
        memory[(slice(None), *at)] = totals[:, 1:].T
        mean = use.mean(axis=2)  # [rows, R, S]
        for row, (i, number) in enumerate(pairs):
            if fits[row]:
                blocks[i][number] = use[row]
                means[i][number] = mean[row]
    closed = {item.ranks: _closed(item, problem) for item in items}
    groups = [_groups(item, means[i], closed[item.ranks], problem) for i, item in enumerate(items)]
    return Space(problem, tuple(memories), limits, blocks, groups, work, memory, biggest)


def slots(span: int, problem: Problem) -> int:
    """Places where a block of `span` ranks may begin."""
    return problem.world_size // span


def hosts(span: int, problem: Problem) -> Ints:
    """The host of each slot, by its first rank [n]."""
    return np.arange(slots(span, problem)) * span // problem.local_size


def _closed(item: Item, problem: Problem) -> Bools | None:
    """Ranks that an item may not use [W], None where it may use all."""
    if item.ranks is None:
        return None
    closed = np.ones(problem.world_size, bool)
    closed[[r for r in item.ranks if 0 <= r < problem.world_size]] = False
    return closed


def _closed_slots(closed: Bools | None, span: int, problem: Problem) -> Bools | None:
    """Slots of which a rank is closed [n]."""
    if closed is None:
        return None
    n = slots(span, problem)
    return np.array(closed[: n * span].reshape(n, span).any(axis=1), bool)


def _fits(use: Floats, limits: Floats, whose: list[tuple[Item, bool]], problem: Problem) -> Bools:
    """Whether every block of the choices `use` [rows, R, K, S] has a slot that could hold it alone."""
    span = use.shape[-1]
    n = slots(span, problem)
    if not n:
        return np.zeros(len(use), bool)
    room = limits[1:, : n * span].reshape(-1, n, span)  # [R - 1, n, S]
    easy = np.array(np.all(use[:, 1:].max(axis=2, initial=0) <= room.min(axis=1), axis=(1, 2)), bool)
    for row, (item, one_host) in enumerate(whose):
        if easy[row] and item.ranks is None:
            continue
        holds: Bools = np.all(use[row, 1:, :, None, :] <= room[:, None], axis=(0, 3))
        closed = _closed_slots(_closed(item, problem), span, problem)
        if closed is not None:
            holds &= ~closed
        host = hosts(span, problem) if one_host else np.zeros(n, np.int64)
        easy[row] = any(holds[:, host == h].any(axis=1).all() for h in range(int(host[-1]) + 1))
    return easy


def _groups(item: Item, means: list[Floats | None], closed: Bools | None, problem: Problem) -> tuple[Group, ...]:
    spans: dict[int, list[int]] = defaultdict(list)
    for number, mean in enumerate(means):
        if mean is not None:
            spans[item.choices[number].span].append(number)
    made = []
    for span, numbers in spans.items():
        shut = _closed_slots(closed, span, problem)
        n = slots(span, problem)
        host = np.bincount(hosts(span, problem) if shut is None else hosts(span, problem)[~shut]).max()
        free = n if shut is None else int((~shut).sum())
        one_host = tuple(row for row, number in enumerate(numbers) if item.choices[number].one_host)
        counts = np.array([item.choices[number].blocks for number in numbers], np.int64)
        most = np.full(len(numbers), free)
        most[list(one_host)] = host
        use = np.stack([mean for mean in (means[number] for number in numbers) if mean is not None], axis=1)
        if (counts > most).any():
            use *= (np.maximum(counts, most) / most)[:, None]
            counts = np.minimum(counts, most)
        made.append(Group(span, np.array(numbers, np.int64), use, counts, shut, one_host))
    return tuple(made)
