"""What the planner's search and bounds are checked against: every assignment of a small problem, and small problems.

The oracle knows nothing of symmetry or bounds: it lists the places of every block of every choice, adds up the ranks
and takes the best. Letters: N assignments so far, W ranks.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from shardwise.planner.search.problem import (
    PARTS,
    Choice,
    Floats,
    Item,
    Problem,
)

# sums of doubles in another order differ by less than this share
SLACK = 1e-9


def best_time_ms(problem: Problem) -> float | None:
    """The time of the best assignment, None if none fits in memory."""
    world = problem.world_size
    sums = np.concatenate([problem.base_ms, np.zeros(2 * world)])[None]
    limits = np.concatenate([problem.hbm, problem.ddr])
    for item in problem.items:
        sums = (sums[:, None] + _placements(problem, item)[None]).reshape(-1, 3 * world)
        sums = sums[(sums[:, world:] <= limits).all(axis=1)]
        # assignments that load every rank alike have the same future
        sums = np.unique(sums, axis=0)
    return float(sums[:, :world].max(axis=1).min()) if len(sums) else None


def _placements(problem: Problem, item: Item) -> Floats:
    """Milliseconds, hbm and ddr of every rank [N, 3 W] for every way to place one item."""
    world, local = problem.world_size, problem.local_size
    allowed = set(range(world) if item.ranks is None else item.ranks)
    rows = [np.zeros((0, 3 * world))]
    for choice in item.choices:
        begins = [s for s in range(0, world, choice.span) if allowed.issuperset(range(s, s + choice.span))]
        for starts in product(begins, repeat=choice.blocks):
            if choice.one_host and len({start // local for start in starts}) > 1:
                continue
            row = np.zeros((3, world))
            for block, start in enumerate(starts):
                where = slice(start, start + choice.span)
                row[0, where] += choice.time_ms[block]
                row[1, where] += choice.hbm[block]
                row[2, where] += choice.ddr[block]
            rows.append(row.reshape(1, -1))
    return np.concatenate(rows)


def choice(times: Floats, hbm: int = 0, ddr: int = 0, *, kind: str = "table_wise", one_host: bool = False) -> Choice:
    """A choice with blocks that take `times` [K, S] and hold `hbm` and `ddr` bytes at every place."""
    parts = np.zeros((len(PARTS), *times.shape))
    parts[PARTS.index("fwd_compute")] = times
    sizes = [np.full(times.shape, amount, np.int64) for amount in (hbm, ddr)]
    return Choice(kind, "fused", (1,) * len(times), parts, sizes[0], sizes[1], one_host)


def whole(*times: float, world: int, hbm: int = 1000, base: float = 0.0) -> Problem:
    """Tables that cannot be cut, of given times, on ranks that are alike."""
    items = tuple(Item((f"t{i}",), (choice(np.array([[time]])),)) for i, time in enumerate(times))
    return Problem(items, world, np.full(world, hbm), np.full(world, hbm), np.full(world, base))


# name: items, ranks, ranks of a host, strategies
KINDS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "all strategies": (4, 3, 3, ("table", "columns", "rows", "replica")),
    "table-wise": (6, 3, 3, ("table",)),
    "two hosts": (3, 4, 2, ("table", "columns", "host columns", "host rows", "rows")),
    "one rank hosts": (4, 3, 1, ("table", "host rows", "host columns", "replica")),
    "grid": (3, 4, 2, ("table", "grid", "rows")),
}


def random_problem(kind: str, seed: int) -> Problem:
    """A small problem of a kind; seeds differ in limits of memory, in what ranks do anyway, in ranks that are allowed.

    Times are whole numbers every other time, so that ties and exact fits occur.
    """
    items, world, local, strategies = KINDS[kind]
    rng = np.random.default_rng([list(KINDS).index(kind), seed])
    whole_numbers, memory = bool(rng.integers(2)), int(rng.integers(4))
    made = []
    for i in range(items):
        time, size = float(rng.integers(1, 12)), int(rng.integers(1, 30)) * 4
        count = int(rng.integers(1, len(strategies) + 1))
        chosen = [strategies[n] for n in sorted(rng.permutation(len(strategies))[:count])]
        choices = [_random_choice(strategy, time, size, world, local, rng, whole_numbers) for strategy in chosen]
        if memory == 3:
            # a slower copy in the memory of the host
            choices += [
                Choice(c.sharding_type, "fused_uvm", c.widths, c.parts_ms * 3, c.ddr, c.hbm, c.one_host)
                for c in choices
            ]
        spread = local if any(c.span > 1 for c in choices) else 1
        ranks = None
        if not any(c.span == world for c in choices) and rng.random() < 0.2:
            first = int(rng.integers(world // spread)) * spread
            ranks = tuple(r for r in range(world) if not first <= r < first + spread) or None
        made.append(Item((f"t{i}",), tuple(choices), ranks))
    held = sum(float(item.choices[0].hbm.sum()) for item in made)
    hbm = np.full(world, 10**6) if memory == 0 else np.full(world, int(held / world * rng.uniform(0.7, 1.6)))
    if memory == 2:
        hbm = (hbm * rng.choice([0.5, 1.0, 1.5], world)).astype(np.int64)
    base = np.zeros(world) if rng.random() < 0.6 else rng.choice([0.0, 1.0, 2.5], world)
    return Problem(tuple(made), local, hbm, np.full(world, int(held / world) + 1), base)


def _random_choice(
    strategy: str, time: float, size: int, world: int, local: int, rng: np.random.Generator, whole_numbers: bool
) -> Choice:
    """One way to place a table; cutting it costs something."""
    blocks, span = {
        "table": (1, 1), "columns": (2, 1), "host columns": (2, 1), "rows": (1, world), "replica": (1, world),
        "host rows": (1, local), "grid": (2, local),
    }[strategy]  # fmt: skip
    times = np.full((blocks, span), time / (blocks * span)) * rng.uniform(1.0, 1.5)
    if rng.random() < 0.3:
        # rows do not divide evenly
        times = times * rng.uniform(0.6, 1.0, (1, span))
    if whole_numbers:
        times = np.ceil(times)
    share = size if strategy == "replica" else -(-size // (blocks * span))
    return choice(times, share, kind=strategy, one_host=strategy == "host columns")
