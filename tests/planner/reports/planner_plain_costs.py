"""A cost model small enough to check by hand, tables for it, and plans made with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.ways import Way
from shardwise.planner.plan.planned import Planned
from shardwise.planner.plan.planning import build_problem
from shardwise.planner.search.problem import (
    PARTS,
    Assignment,
    Choice,
    Problem,
    Solution,
    loads,
)
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import GIB, Topology


@dataclass(frozen=True)
class PlainCosts:
    """Bytes read at 1 GiB a ms, bytes sent at 0.25 GiB a ms, twice that backward, and 0.01 ms for every block."""

    topology: Topology
    batch_size: int
    name: str = "plain"

    def ways(self, table: Table, constraint: ParameterConstraints | None = None) -> Sequence[Way]:
        world, local = self.topology.world_size, self.topology.local_world_size
        rows, dim = table.num_embeddings, table.embedding_dim
        half = (dim // 2, dim // 2)
        ways = [
            Way("table_wise", "fused", (dim,), (rows,)),
            Way("row_wise", "fused", (dim,), (-(-rows // world),) * world),
            Way("data_parallel", "dense", (dim,), (rows,) * world, replica=True),
            Way("column_wise", "fused", half, (rows,)),
            Way("column_wise", "fused", (dim - dim // 4, dim // 4), (rows,)),
            Way("table_column_wise", "fused", half, (rows,), one_host=True),
            Way("table_row_wise", "fused", (dim,), (-(-rows // local),) * local),
            Way("grid_shard", "fused", half, (-(-rows // local),) * local),
        ]
        allowed = constraint.sharding_types if constraint else None
        return [way for way in ways if allowed is None or way.sharding_type in allowed]

    def price(self, table: Table, way: Way) -> Choice:
        blocks, span = len(way.widths), way.span
        width = np.array(way.widths, np.float64)[:, None]
        rows = np.array(way.rows, np.float64)[None, :]
        ids = table.ids(self.batch_size) * (1 if way.replica else self.topology.world_size) / span
        read = np.repeat(ids * width * 4 / GIB, span, axis=1)
        sent = np.zeros_like(read) if way.replica else read * 4
        parts = {
            "input_comms": sent / 8,
            "fwd_compute": read,
            "fwd_comms": sent,
            "bwd_compute": 2 * read,
            "bwd_comms": sent + (8 * rows * width * 4 / GIB if way.replica else 0),
            "overhead": np.full((blocks, span), 0.01),
        }
        stacked = np.stack([parts.get(part, np.zeros((blocks, span))) for part in PARTS])
        hbm = np.ceil(rows * width * 4).astype(np.int64)
        return Choice(way.sharding_type, way.compute_kernel, way.widths, stacked, hbm, np.zeros_like(hbm), way.one_host)

    def base_ms(self, tables: Sequence[Table]) -> float:
        return 0.25


def some_tables(count: int, seed: int = 0) -> list[Table]:
    """Tables of a few sizes, widths and lengths of bags."""
    draw = random.Random(seed)
    return [
        Table(
            f"t{n}",
            int(10 ** draw.uniform(3, 7.3)),
            draw.choice([32, 64, 128]),
            features=(Feature(f"f{n}", draw.choice([1.0, 3.0, 20.0])),),
            optimizer="RowWiseAdagrad",
        )
        for n in range(count)
    ]


def some_plan(
    tables: Sequence[Table],
    world_size: int,
    *,
    local_size: int | None = None,
    hbm_gib: float = 16,
    batch_size: int = 512,
    seed: int = 0,
    constraints: dict[str, ParameterConstraints] | None = None,
) -> Planned:
    """A plan within memory that takes any choice at any place: no search has made it better."""
    topology = Topology(world_size, "cuda", int(hbm_gib * GIB), local_world_size=local_size)
    problem = build_problem(tables, topology, PlainCosts(topology, batch_size), constraints or {})
    solution = any_solution(problem, seed)
    settings = {"reservation": "none", "enumerator": "every way that PlainCosts knows"}
    return Planned(tuple(tables), topology, batch_size, "plain", problem, solution, settings, 0.5)


def any_solution(problem: Problem, seed: int = 0) -> Solution:
    """Each item by a choice and at places drawn until memory allows them."""
    draw = random.Random(seed)
    hbm = np.zeros_like(problem.hbm)
    numbers, places = [], []
    for item in problem.items:
        for _ in range(1000):
            number = draw.randrange(len(item.choices))
            choice = item.choices[number]
            starts = [draw.randrange(0, problem.world_size, choice.span) for _ in range(choice.blocks)]
            if choice.one_host:
                first = starts[0] // problem.local_size * problem.local_size
                starts = [draw.randrange(first, first + problem.local_size) for _ in starts]
            held = hbm.copy()
            for block, start in enumerate(starts):
                held[start : start + choice.span] += choice.hbm[block]
            if (held <= problem.hbm).all():
                break
        else:
            raise AssertionError(f"{item.names} does not fit")
        hbm = held
        numbers.append(number)
        places.append(tuple(starts))
    made = Assignment(tuple(numbers), tuple(places))
    time_ms = loads(problem, made).time_ms
    best = problem.base_ms.sum() + sum(min(c.work_ms for c in item.choices) for item in problem.items)
    return Solution(made, float(time_ms.max()), float(best / problem.world_size), "mean of all ranks", False)


def choice_of(planned: Planned, item: int, strategy: str) -> int:
    """The number of the first choice of an item that is of this strategy."""
    return next(n for n, c in enumerate(planned.problem.items[item].choices) if c.sharding_type == strategy)


def moved(planned: Planned, item: int, number: int, starts: tuple[int, ...]) -> Planned:
    """The plan with one item by another choice at other places."""
    now = planned.solution.assignment
    choices, places = list(now.choices), list(now.starts)
    choices[item], places[item] = number, starts
    made = Assignment(tuple(choices), tuple(places))
    time = float(loads(planned.problem, made).time_ms.max())
    return replace(planned, solution=replace(planned.solution, assignment=made, time_ms=time))
