"""Where the cells of tables live, as plain data: no tensors, no processes.

A plan is a list of shards. A strategy is a function from a table to its shards and nothing else: routing, exchange and
assembly read shards, never strategies. Row shards add, column shards sit side by side, replicas hold the same cells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """Rows [lo, hi) and columns [lo, hi) of a table on one rank; `replica` if every rank holds these same cells."""

    table: str
    rank: int
    rows: Span
    cols: Span
    replica: bool = False


def table_wise(table: str, rows: int, dim: int, rank: int) -> list[Shard]:
    """The whole table on one rank."""
    return [Shard(table, rank, (0, rows), (0, dim))]


def data_parallel(table: str, rows: int, dim: int, world_size: int) -> list[Shard]:
    """The whole table on every rank."""
    return [Shard(table, rank, (0, rows), (0, dim), replica=True) for rank in range(world_size)]


def validate(shards: Iterable[Shard], sizes: Mapping[str, tuple[int, int]], world_size: int) -> None:
    """Check that the shards cover each table of `sizes` (name -> (rows, dim)) exactly.

    Raises:
        ValueError: a shard names an unknown table or rank or leaves its table; cells are missing or held twice.
    """
    by_table: dict[str, list[Shard]] = {name: [] for name in sizes}
    for shard in shards:
        if shard.table not in by_table:
            raise ValueError(f"the plan places table {shard.table!r}, the module has {sorted(by_table)}")
        rows, dim = sizes[shard.table]
        if not 0 <= shard.rank < world_size:
            raise ValueError(f"table {shard.table!r}: rank {shard.rank} is not one of {world_size}")
        for what, (low, high), size in (("rows", shard.rows, rows), ("columns", shard.cols, dim)):
            if not 0 <= low <= high <= size:
                raise ValueError(f"table {shard.table!r}: {what} [{low}, {high}) leave the table's {size}")
        by_table[shard.table].append(shard)
    for name, mine in by_table.items():
        rows, dim = sizes[name]
        replicas = [shard for shard in mine if shard.replica]
        if replicas:
            ranks = sorted(shard.rank for shard in replicas if (shard.rows, shard.cols) == ((0, rows), (0, dim)))
            if len(replicas) != len(mine) or ranks != list(range(world_size)):
                raise ValueError(
                    f"table {name!r}: a replicated table needs one whole replica on each of {world_size} ranks"
                )
            continue
        cells = sum((s.rows[1] - s.rows[0]) * (s.cols[1] - s.cols[0]) for s in mine)
        overlap = any(_overlap(a, b) for i, a in enumerate(mine) for b in mine[:i])
        if overlap or cells != rows * dim:
            raise ValueError(f"table {name!r}: shards hold {cells} of {rows * dim} cells{', some twice' * overlap}")


def fingerprint(shards: Iterable[Shard], tables: Iterable[object]) -> int:
    """A number that is equal on two ranks only if they hold the same plan for the same tables (63 bits, stable)."""
    text = repr((sorted(map(repr, shards)), list(map(repr, tables))))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _overlap(a: Shard, b: Shard) -> bool:
    return all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in ((a.rows, b.rows), (a.cols, b.cols)))
