"""What calibration measures: small workloads that differ in one thing at a time, each cut in several ways.

Letters: F features of a table, R rows, D columns, L mean length, B samples of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.ways import Way, ways_of
from shardwise.planner.tables import Feature, Skew, Table
from shardwise.planner.topology import Topology

from .trial import Placed

_UNIFORM, _HOT = Skew(), Skew(1.05)


@dataclass(frozen=True)
class Case:
    """A batch size, and tables with the type that each is cut by; whole tables begin at rank `first` and go around."""

    name: str
    batch_size: int
    tables: tuple[tuple[Table, str], ...]
    # the rank of whole tables; None spreads them
    first: int | None = None

    @property
    def is_apart(self) -> bool:
        """Whether a rank's lookup and update are all that the model counts as its computing."""
        return self.first is None and {kind for _, kind in self.tables} <= {"table_wise", "column_wise"}

    def placed(self, topology: Topology) -> list[Placed]:
        """The tables, cut and placed."""
        found = []
        for number, (table, kind) in enumerate(self.tables):
            way = way_of(table, kind, topology)
            here = (number % topology.world_size) if self.first is None else self.first
            if way.span > 1:
                starts: tuple[int, ...] = (0,) * len(way.widths)
            else:
                starts = tuple((here + block) % topology.world_size for block in range(len(way.widths)))
            found.append(Placed(table, way, starts))
        return found


def way_of(table: Table, kind: str, topology: Topology) -> Way:
    """The way of this type that has the most blocks."""
    asked = ParameterConstraints(sharding_types=[kind], min_partition=4)
    return ways_of(table, topology, asked)[-1]


def _tables(
    count: int,
    R: int = 20_000,
    D: int = 64,
    L: float = 4,
    F: int = 1,
    *,
    optimizer: str | None = "RowWiseAdagrad",
    pooled: bool = True,
    skew: Skew = _UNIFORM,
) -> list[Table]:
    return [
        Table(
            f"t{t}", R, D, features=tuple(Feature(f"t{t}f{f}", L) for f in range(F)), pooled=pooled,
            optimizer=optimizer, skew=skew,
        )
        for t in range(count)
    ]  # fmt: skip


def _all(tables: Sequence[Table], kind: str) -> tuple[tuple[Table, str], ...]:
    return tuple((table, kind) for table in tables)


# the case that is next to no work
NOTHING = "nothing"
_CUTS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def cases() -> list[Case]:
    """All of them."""
    found = [Case(NOTHING, 1, _all(_tables(1, R=100, D=4, L=1), "table_wise"))]
    shapes: dict[str, tuple[int, list[Table]]] = {
        "one id": (1024, _tables(8, L=1)),
        "bags": (1024, _tables(4, L=20)),
        "narrow": (1024, _tables(8, D=8, L=10)),
        "wide": (512, _tables(2, D=256, L=10)),
        "few rows": (1024, _tables(4, R=500, L=20)),
        "many rows": (2048, _tables(2, R=300_000, D=32, L=10)),
        "hot": (1024, _tables(4, L=20, skew=_HOT)),
        "sequences": (256, _tables(4, L=20, pooled=False)),
    }
    for name, (batch, tables) in shapes.items():
        found += [Case(f"{name}, {kind}", batch, _all(tables, kind)) for kind in _CUTS]
        found.append(Case(f"{name}, on rank 0", batch, _all(tables, "table_wise"), first=0))
    found += [Case(f"many features, {kind}", 16, _all(_tables(40, R=1000, D=8, L=1), kind)) for kind in _CUTS]
    found += [
        Case("many features of a table", 16, _all(_tables(4, R=1000, D=8, L=1, F=10), "table_wise")),
        Case("Adam", 1024, _all(_tables(4, L=10, optimizer="Adam"), "table_wise")),
        Case("dense gradients", 512, _all(_tables(4, R=5000, L=4, optimizer=None), "data_parallel")),
    ]
    return found
