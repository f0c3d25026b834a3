"""What turns the ids that a table is asked for into its rows, on the rank that holds it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class IdMap(Protocol):
    """Rows of ids that may be any numbers from 0 on: hashing with admission and eviction, say.

    Without one an id is its row. Every rank that holds columns of the table has the map; ids come to it after the
    exchange, so that each map sees all ids of the table, in the same order on each of these ranks, and no others.
    """

    def translate(self, table: str, ids: Tensor, step: Tensor) -> Tensor:
        """The row [n] of each of `ids` [n] int64; `step` [1] int64 counts the updates so far."""
        ...
