"""Cost models, which price one way to cut one table in time and memory; and the models by name, for `cost="..."`.

`shardwise.py` has ours, `torchrec.py` TorchRec's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ..constants_measured import CARDS, COSTS, Constants
from ..constraints import ParameterConstraints
from ..search.problem import Choice
from ..tables import Table
from ..topology import Topology
from .cache import Caches, MissCurve, caches_from
from .shardwise import ShardwiseCost
from .torchrec import TorchRecCost
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


def cost_model(
    cost: str | CostModel,
    topology: Topology,
    batch_size: int,
    *,
    constants: Constants | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    curves: Mapping[str, MissCurve] | None = None,
) -> CostModel:
    """The cost model of this name for these machines and samples of one rank; a model is returned as it is.

    Args:
        constants: for "shardwise", measured on the user's machine; by default what is known of the topology's card.
        constraints: of "torchrec", which reads caches and output types there; "shardwise" reads cache statistics.
        curves: for "shardwise", misses of tables' caches by name of table, of a step of all ranks.

    Raises:
        ValueError: there is no such name.
    """
    if not isinstance(cost, str):
        return cost
    if cost not in COSTS:
        raise ValueError(f"cost {cost!r} is not one of {', '.join(COSTS)}; a cost model of your own is fine too")
    if cost == "torchrec":
        return TorchRecCost(topology, batch_size, constraints=constraints)
    known = constants or constants_of(topology.card)
    statistics = {name: stats for name, rule in (constraints or {}).items() if (stats := _statistics(rule)) is not None}
    caches = Caches(dict(curves or {}), statistics)
    if known is None:
        return ShardwiseCost(topology, batch_size, caches=caches)
    return ShardwiseCost(topology, batch_size, known, caches)


def _statistics(constraint: ParameterConstraints) -> Any:
    return getattr(constraint.cache_params, "stats", None)


def cost_from(
    name: str,
    topology: Topology,
    batch_size: int,
    constants: Mapping[str, Any] | None,
    caches: Mapping[str, Any] | None = None,
) -> CostModel:
    """The cost model that a plan was made with, from what its file says. Raises as `cost_model`."""
    known = None if constants is None else Constants(**constants)
    model = cost_model(name, topology, batch_size, constants=known)
    return replace(model, caches=caches_from(caches)) if caches and isinstance(model, ShardwiseCost) else model


def constants_of(card: str | None) -> Constants | None:
    """A card's constants; None for one whose speed nobody gave."""
    known = None if card is None else CARDS.get(card)
    return None if known is None else known.constants
