"""Cost models by name, as `cost="..."` says them, and as the file of a plan says them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .constants_measured import CARDS, Constants
from .cost import ShardwiseCost
from .cost_model import CostModel
from .topology import Topology

COSTS = ("shardwise", "torchrec")


def cost_model(
    cost: str | CostModel, topology: Topology, batch_size: int, *, constants: Constants | None = None
) -> CostModel:
    """The cost model of this name for these machines and samples of one rank; a model is returned as it is.

    Args:
        constants: measured on the user's machine; by default what is known of the topology's card.

    Raises:
        ValueError: there is no such name.
    """
    if not isinstance(cost, str):
        return cost
    if cost not in COSTS:
        raise ValueError(f"cost {cost!r} is not one of {', '.join(COSTS)}; a cost model of your own is fine too")
    if cost == "torchrec":
        from .cost_torchrec import TorchRecCost

        made: CostModel = TorchRecCost(topology, batch_size)
        return made
    return ShardwiseCost(topology, batch_size, constants or constants_of(topology.card))


def cost_from(name: str, topology: Topology, batch_size: int, constants: Mapping[str, Any] | None) -> CostModel:
    """The cost model that a plan was made with, from what its file says. Raises as `cost_model`."""
    return cost_model(name, topology, batch_size, constants=None if constants is None else Constants(**constants))


def constants_of(card: str | None) -> Constants | None:
    """What is known of a card; None for one of which nobody said how fast it is."""
    found = None if card is None else CARDS.get(card)
    return None if found is None else found.constants
