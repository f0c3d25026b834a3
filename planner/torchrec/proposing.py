"""TorchRec's search: proposers choose an option for each table, a partitioner gives them ranks, a model rates the plan.

It runs where a user brings a proposer, a partitioner or a performance model; `search/solve.py` has our own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import PlannerError, PlannerErrorType
from ..hardware import Storage
from ..topology import Topology
from .components import Enumerator, Partitioner, PerfModel, Proposer, StorageReservation
from .sharding_option import ShardingOption
from .utils import bytes_to_gb, reset_shard_rank, storage_repr_in_gb


@dataclass
class Proposed:
    """What came of it.

    Args:
        best: the plan with the least rating, None if no proposal could be placed.
        rating: of it.
        proposals: that were tried, each once.
        plans: of them that could be placed.
        smallest: storage of the smallest proposal that could not.
        error, last: of the last proposal that could not be placed.
    """

    best: list[ShardingOption] | None = None
    rating: float = float("inf")
    proposals: int = 0
    plans: int = 0
    smallest: Storage | None = None
    error: PlannerError | None = None
    last: list[ShardingOption] | None = None


def propose_plans(
    search_space: list[ShardingOption],
    enumerator: Enumerator,
    storage_constraint: Topology,
    proposers: Sequence[Proposer],
    partitioner: Partitioner,
    perf_model: PerfModel,
    *,
    timeout_seconds: float | None = None,
) -> Proposed:
    """Ask one proposer after the other until all are done, or `timeout_seconds` are over.

    What was proposed before is not tried again, its proposer hears what came of it then.
    """
    found = Proposed()
    # options of a proposal -> plan (or what could not be placed) and rating
    known: dict[tuple[int, ...], tuple[list[ShardingOption], float | None]] = {}
    for proposer in proposers:
        proposer.load(search_space=search_space, enumerator=enumerator)
    begin = time.monotonic()
    for proposer in proposers:
        while proposal := proposer.propose():
            if timeout_seconds is not None and time.monotonic() - begin > timeout_seconds:
                break
            key = tuple(sorted(map(hash, proposal)))
            fresh = key not in known
            if fresh:
                known[key] = _try(proposal, found, storage_constraint, partitioner, perf_model)
            plan, rating = known[key]
            proposer.feedback(
                partitionable=rating is not None,
                plan=plan,
                perf_rating=rating,
                storage_constraint=storage_constraint,
            )
            if fresh:
                # options are shared between proposals
                reset_shard_rank(proposal)
    return found


def _try(
    proposal: list[ShardingOption],
    found: Proposed,
    storage_constraint: Topology,
    partitioner: Partitioner,
    perf_model: PerfModel,
) -> tuple[list[ShardingOption], float | None]:
    found.proposals += 1
    try:
        plan = partitioner.partition(proposal=proposal, storage_constraint=storage_constraint)
        rating = perf_model.rate(plan=plan)
    except PlannerError as error:
        found.error, found.last = error, copy.copy(proposal)
        storage = sum((option.total_storage for option in proposal), Storage(0, 0, 0))
        if found.smallest is None or storage < found.smallest:
            found.smallest = storage
        return proposal, None
    found.plans += 1
    if rating < found.rating:
        found.rating, found.best = rating, copy.deepcopy(plan)
    return plan, rating


def no_plan_error(
    found: Proposed, topology: Topology, storage_constraint: Topology, reservation: StorageReservation, batch_size: int
) -> PlannerError:
    """That no proposal could be placed, why, and what might help."""
    whole, left = _total(topology), _total(storage_constraint)
    short = found.smallest is not None and not found.smallest.fits_in(left)
    why = "insufficient storage" if short else "the strict constraints"
    kept = str(reservation) if type(reservation).__str__ is not object.__str__ else type(reservation).__name__
    text = "\n".join(
        [
            f"Unable to find a plan for this model because of {why}. ",
            f"Planner evaluated {found.proposals} proposals.",
            "Possible solutions:",
            f"  1) Increase the number of devices ({topology.world_size})",
            "  2) Reduce the model size (",
            f"\t  Global storage: {round(bytes_to_gb(whole.hbm), 3)} GB, ",
            f"\t  Per rank hardware memory: {storage_repr_in_gb(topology.devices[0].storage)}, ",
            f"\t  Storage reservation: {kept}, ",
            f"\t  Global storage available for model parallel: {storage_repr_in_gb(left)}, ",
            f"\t  Global storage requirement for model parallel: {storage_repr_in_gb(found.smallest)})",
            f"  3) Reduce local batch size ({batch_size})",
            "  4) Remove planner constraints that might be reducing search space or available storage",
            f" Last planner error: \n\t{found.error}\n",
        ]
    )
    kind = PlannerErrorType.INSUFFICIENT_STORAGE if short else PlannerErrorType.STRICT_CONSTRAINTS
    return PlannerError(text, kind)


def _total(topology: Topology) -> Storage:
    return sum((device.storage for device in topology.devices), Storage(0, 0, 0))
