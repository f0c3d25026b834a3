"""What turns the ids that a table is asked for into its rows, on the rank that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


class IdMap(Protocol):
    """Rows of ids that may be any numbers from 0 on: hashing with admission and eviction, say.

    Without one an id is its row. Every rank that holds columns of the table has the map; ids come to it after the
    exchange, those of all features of the table at once, so that each map sees all ids of the table, in the same order
    on each of these ranks, and no others.
    """

    def translate(self, table: str, ids: Tensor, step: Tensor) -> Tensor:
        """The row [n] of each of `ids` [n] int64; `step` [1] int64 counts the updates so far."""
        ...


@runtime_checkable
class RangedIdMap(IdMap, Protocol):
    """A map whose table may be cut by rows: each row shard serves an equal part of the ids [0, `id_range`).

    A shard's map sees ids counted from the first of its part, and gives out rows counted from the first of the shard.
    """

    @property
    def id_range(self) -> int:
        """The same on all ranks."""
        ...


@dataclass(frozen=True)
class Renewal:
    """Rows [n] of a row shard that belong to other ids now, and the values [n, D] that they begin anew with."""

    rows: Tensor
    values: Tensor


@runtime_checkable
class RenewingIdMap(IdMap, Protocol):
    """A map that gives rows to other ids."""

    def renewal(self) -> Renewal | None:
        """What the last translation did so; it takes effect before its batch is looked up."""
        ...


@runtime_checkable
class SteppedIdMap(IdMap, Protocol):
    """A map that changes with the steps, whatever their ids: it translates at every one, if only no ids."""

    def begin_step(self) -> None:
        """Called on all ranks before the ids of a step are translated, also on those without rows of the table."""
        ...


def id_ranges(id_maps: Mapping[str, IdMap]) -> dict[str, int | None]:
    """The ids of each mapped table that row shards divide; None where its rows must be on one rank."""
    return {name: id_map.id_range if isinstance(id_map, RangedIdMap) else None for name, id_map in id_maps.items()}
