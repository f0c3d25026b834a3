"""From tables to a plan: prices every way to cut each table, searches, and keeps what is known about the result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from .constraints import ParameterConstraints
from .cost_model import CostModel
from .planned import Planned
from .problem import Choice, Item, Problem
from .solve import solve
from .tables import Table
from .topology import Topology


def plan_tables(
    tables: Sequence[Table],
    topology: Topology,
    batch_size: int,
    *,
    cost: CostModel,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    seconds: float | None = None,
    settings: Mapping[str, str] | None = None,
) -> Planned:
    """The best plan that the search finds, the same for the same arguments.

    Args:
        topology: with the memory that tables may use.
        batch_size: samples of one rank.
        constraints: by table name.
        seconds: as `solve`.

    Raises:
        DoesNotFitError: no plan stays within memory, or none was found.
        ValueError: constraints leave a table no choice, or contradict each other.
    """
    begin = time.perf_counter()
    problem = build_problem(tables, topology, cost, constraints or {})
    solution = solve(problem, seconds=seconds)
    taken = time.perf_counter() - begin
    return Planned(tuple(tables), topology, batch_size, cost.name, problem, solution, dict(settings or {}), taken)


def build_problem(
    tables: Sequence[Table],
    topology: Topology,
    cost: CostModel,
    constraints: Mapping[str, ParameterConstraints],
) -> Problem:
    """The choices that constraints leave, priced.

    Raises:
        ValueError: as `plan_tables`.
    """
    items = []
    for table in tables:
        choices: list[Choice] = [cost.price(table, way) for way in cost.ways(table, constraints.get(table.name))]
        items.append(Item((table.path,), tuple(choices)))
    world = topology.world_size
    return Problem(
        tuple(items),
        topology.local_world_size,
        np.array(topology.hbm, np.int64),
        np.array(topology.ddr, np.int64),
        np.full(world, cost.base_ms(tables)),
    )
