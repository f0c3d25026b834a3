"""The optimizer of a sharded collection as users see it, and the state dict of its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.embeddings import FusedOptimizer

from .held import Held
from .state import States, publish, take

if TYPE_CHECKING:
    from .collection import ShardedCollection


class ShardedFusedOptimizer(FusedOptimizer):
    """The optimizer that the tables of a sharded collection run in their backward.

    All ranks have the same parameters, names and groups of them: one group for all tables with equal settings. States
    are of the tables with rows on this rank, as `States.states` cuts them.

    Attributes:
        resplit: "mean" lets states per row of a whole table be loaded where columns are cut and each block of them has
            numbers of its own: each gets that of the row. None refuses.
    """

    def __init__(self, held: Held, states: States, prefix: str) -> None:
        self._prefix, self.resplit = prefix, None
        self.follow_plan(held, states)

    def follow_plan(self, held: Held, states: States) -> None:
        """Be the optimizer of these tables from now on; learning rates stay."""
        self._values, self._held = states, held
        specs = {table.optimizer: [] for table in states.tables.values() if table.optimizer is not None}
