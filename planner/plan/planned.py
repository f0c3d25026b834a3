"""A plan with all that is known about it: where tables go, why, what each rank does and holds, how far from optimal.

`Request` is all that decides a plan, kept together so that it can be asked again with a change (whatif.py has the
changes). `Planned` is what the search returns; `sharding` makes TorchRec's `ShardingPlan` of it, `explain` and `report`
show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from shardwise.planner.layout import Shard

from ..constraints import ParameterConstraints
from ..cost.model import CostModel
from ..search.problem import (
    Choice,
    Loads,
    Problem,
    Solution,
    chosen,
    loads,
)
from ..search.solve import certify
from ..tables import Table
from ..topology import Topology
from .explanation import explain


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `plan_tables`.

    Args:
        topology: with the memory that tables may use.
        batch_size: of one rank.
        reserved: bytes of device memory [W] that are kept from tables and gone from `topology`; () for none.
        settings: what else decided the result, in words.
    """

    tables: tuple[Table, ...]
    topology: Topology
    batch_size: int
    cost: CostModel
    constraints: Mapping[str, ParameterConstraints] = field(default_factory=dict)
    reserved: tuple[int, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)


def shards_of(table: str, columns: Sequence[int], rows: Sequence[int], starts: Sequence[int]) -> list[Shard]:
    """The shards of a table between these borders of columns and rows; block k begins at rank `starts[k]`."""
    return [
        Shard(table, start + place, (rows[place], rows[place + 1]), (columns[k], columns[k + 1]))
        for k, start in enumerate(starts)
        for place in range(len(rows) - 1)
    ]


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan for `tables`, which stand in the order of the model.

    `solution` has the bound that the search knew; `certified` is the same plan with the best bound, which takes longer
    than the plan did and is computed when it is first asked for.

    Args:
        topology: with what storage is left after the reservation.
        batch_size: of one rank.
        cost: name of the cost model that priced the choices.
        settings: what else decided the result, in words: reservation, enumerator, constraints.
        seconds: that planning took.
        request: what was asked, to ask again with a change.
    """

    tables: tuple[Table, ...]
    topology: Topology
    batch_size: int
    cost: str
    problem: Problem
    solution: Solution
    settings: dict[str, str]
    seconds: float
    request: Request | None = None

    @cached_property
    def certified(self) -> Solution:
        """`solution` with all bounds: explanations, reports and files go by it."""
        return certify(self.problem, self.solution)

    @property
    def loads(self) -> Loads:
        """Time and memory of every rank."""
        return loads(self.problem, self.solution.assignment)

    def __str__(self) -> str:
        return explain(self)

    def placed(self) -> Iterator[tuple[Table, Choice, tuple[int, ...]]]:
        """Every table, its choice and the first rank of each block. Tables that share a rank share their choice."""
        where = {}
        for item, choice, starts in chosen(self.problem, self.solution.assignment):
            where.update(dict.fromkeys(item.names, (choice, starts)))
        for table in self.tables:
            yield table, *where[table.path]

    def shards(self, table: Table, choice: Choice, starts: tuple[int, ...]) -> list[Shard]:
        """The shards of a table that is placed so."""
        world, rows = self.topology.world_size, table.num_embeddings
        if choice.sharding_type == "data_parallel":
            whole = (0, table.embedding_dim)
            return [Shard(table.name, rank, (0, rows), whole, replica=True) for rank in range(world)]
        block = -(-rows // choice.span)
        edges = [min(rows, block * place) for place in range(choice.span + 1)]
        # a choice for several tables that share a rank has one block: all columns of each
        widths = choice.widths if choice.blocks > 1 else (table.embedding_dim,)
        return shards_of(table.name, list(accumulate(widths, initial=0)), edges, starts)
