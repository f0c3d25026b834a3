"""TorchRec's proposers: what to try, one proposal after the other, for planners that place and rate each.

The default planner does not use them, it searches (`search/solve.py`); they are here for code that drives a planner itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from .proposers_knapsack import DynamicProgrammingProposer
from .proposers_offload import EmbeddingOffloadScaleupProposer
from .proposers_static import MAX_PROPOSALS, GreedyProposer, GridSearchProposer, UniformProposer
from .types import Proposer, ShardingOption

__all__ = [
    "MAX_PROPOSALS",
    "DynamicProgrammingProposer",
    "EmbeddingOffloadScaleupProposer",
    "GreedyProposer",
    "GridSearchProposer",
    "UniformProposer",
    "proposers_to_proposals_list",
]


def proposers_to_proposals_list(
    proposers_list: Sequence[Proposer], search_space: list[ShardingOption]
) -> list[list[ShardingOption]]:
    """All proposals of some proposers, each once, in order; for proposers whose path no feedback changes."""
    for proposer in proposers_list:
        proposer.load(search_space=search_space)
    proposals: dict[tuple[int, ...], list[ShardingOption]] = {}
    for proposer in proposers_list:
        while proposal := proposer.propose():
            proposals.setdefault(tuple(sorted(map(hash, proposal))), proposal)
            proposer.feedback(partitionable=True)
    return list(proposals.values())
