"""What a cost model is: the time and memory of one way to cut one table.

`shardwise.py` has ours, `torchrec.py` TorchRec's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..constraints import ParameterConstraints
from ..search.problem import Choice
from ..tables import Table
from .ways import Way


class CostModel(Protocol):
    """Prices ways; an instance knows the topology and the batch size (of one rank)."""

    @property
    def name(self) -> str:
        """As in `cost="..."`."""
        ...

    def ways(self, table: Table, constraint: ParameterConstraints | None = None) -> Sequence[Way]:
        """The ways to cut a table that this model knows and the constraint allows."""
        ...

    def price(self, table: Table, way: Way) -> Choice:
        """Time and bytes of one of them."""
        ...

    def base_ms(self, tables: Sequence[Table]) -> float:
        """Milliseconds that every rank spends in a step for these tables whatever the plan."""
        ...
