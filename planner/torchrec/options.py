"""Two searches over sharding options, ours or TorchRec's own objects.

Ours (`search/solve.py`) takes them as a `Problem`, and what it found becomes options again. TorchRec's runs where a
user brings a proposer, a partitioner or a performance model: proposers choose an option for each table, a partitioner
gives them ranks, a model rates the plan.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PlannerError, PlannerErrorType
from ..search.problem import (
    PARTS,
    Assignment,
    Choice,
    Floats,
    Item,
    Problem,
)
from ..topology import Storage, Topology
from .sharding_option import PartitionByType, ShardingOption
from .types import Enumerator, Partitioner, PerfModel, Proposer, StorageReservation
from .utils import bytes_to_gb, reset_shard_rank, storage_repr_in_gb

_FIELDS = ("", "prefetch_compute", "fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "")


def problem_of(options: Sequence[Any], topology: Any) -> tuple[Problem, list[list[Any]]]:
    """The problem that these options leave on these machines, and the options of each of its items.

    Hosts are what fast links join (`intra_group_size`), as for TorchRec's partitioner. What needs several hosts takes
    any of them, one more than once if need be. Disks are not counted.

    Args:
        options: with estimates. Those of one `fqn` are one item, in the order in which they stand.
        topology: ours or TorchRec's; a rank may use the storage that its device has.

    Raises:
        ValueError: an option has no estimates, as many shards as cannot be placed, or must be placed with another.
    """
    world, group = topology.world_size, topology.intra_group_size
    tables: dict[str, list[Any]] = {}
    for option in options:
        tables.setdefault(option.fqn, []).append(option)
    items = [
        Item((name,), tuple(_choice(option, world, group) for option in choices)) for name, choices in tables.items()
    ]
    hbm, ddr = (np.array([getattr(d.storage, kind) for d in topology.devices], np.int64) for kind in ("hbm", "ddr"))
    return Problem(tuple(items), group, hbm, ddr), list(tables.values())


def placed_options(problem: Problem, options: Sequence[Sequence[Any]], assignment: Assignment) -> list[Any]:
    """Copies of the options that an assignment chose, with the ranks of their shards."""
    made = []
    for item, choices, number, starts in zip(
        problem.items, options, assignment.choices, assignment.starts, strict=True
    ):
        option, span = copy.deepcopy(choices[number]), item.choices[number].span
        for place, shard in enumerate(option.shards):
            shard.rank = starts[place // span] + place % span
        made.append(option)
    return made


def _choice(option: Any, world: int, group: int) -> Choice:
    """Shards stand block by block: those of a block on consecutive ranks."""
    if option.dependency:
        raise ValueError(f"{option.fqn} must share a host with the rest of {option.dependency!r}: not supported here")
    span = _span(option, world, group)
    count = len(option.shards)
    if count % span:
        raise ValueError(f"{option.fqn}: {count} shards of a {option.sharding_type} table do not fill {span} ranks")
    shape = count // span, span
    if any(shard.perf is None or shard.storage is None for shard in option.shards):
        raise ValueError(f"{option.fqn}: a {option.sharding_type} option has no estimates: run its enumerator's")
    parts: Floats = np.zeros((len(PARTS), count))
    for row, name in enumerate(_FIELDS):
        if name:
            parts[row] = [getattr(shard.perf, name) for shard in option.shards]
    return Choice(
        option.sharding_type,
        option.compute_kernel,
        tuple(shard.size[1] for shard in option.shards[::span]),
        parts.reshape(len(PARTS), *shape),
        np.array([shard.storage.hbm for shard in option.shards], np.int64).reshape(shape),
        np.array([shard.storage.ddr for shard in option.shards], np.int64).reshape(shape),
        one_host=option.sharding_type == "table_column_wise",
    )


def _span(option: Any, world: int, group: int) -> int:
    """Ranks of a block."""
    by = PartitionByType(option.partition_by)
    if by == PartitionByType.UNIFORM:
        return world
    if by == PartitionByType.MULTI_HOST or option.sharding_type == "table_row_wise":
        return group
    return 1


@dataclass
class Proposed:
    """The result of a search.

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

    A proposal made before is not tried again: its proposer gets the feedback of that time.
    """
    proposed = Proposed()
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
                known[key] = _try(proposal, proposed, storage_constraint, partitioner, perf_model)
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
    return proposed


def _try(
    proposal: list[ShardingOption],
    proposed: Proposed,
    storage_constraint: Topology,
    partitioner: Partitioner,
    perf_model: PerfModel,
) -> tuple[list[ShardingOption], float | None]:
    proposed.proposals += 1
    try:
        plan = partitioner.partition(proposal=proposal, storage_constraint=storage_constraint)
        rating = perf_model.rate(plan=plan)
    except PlannerError as error:
        proposed.error, proposed.last = error, copy.copy(proposal)
        storage = sum((option.total_storage for option in proposal), Storage(0, 0, 0))
        if proposed.smallest is None or storage < proposed.smallest:
            proposed.smallest = storage
        return proposal, None
    proposed.plans += 1
    if rating < proposed.rating:
        proposed.rating, proposed.best = rating, copy.deepcopy(plan)
    return plan, rating


def no_plan_error(
    proposed: Proposed,
    topology: Topology,
    storage_constraint: Topology,
    reservation: StorageReservation,
    batch_size: int,
) -> PlannerError:
    """That no proposal could be placed, why, and what might help."""
    whole, left = _total(topology), _total(storage_constraint)
    short = proposed.smallest is not None and not proposed.smallest.fits_in(left)
    why = "insufficient storage" if short else "the strict constraints"
    kept = str(reservation) if type(reservation).__str__ is not object.__str__ else type(reservation).__name__
    text = "\n".join(
        [
            f"Unable to find a plan for this model because of {why}. ",
            f"Planner evaluated {proposed.proposals} proposals.",
            "Possible solutions:",
            f"  1) Increase the number of devices ({topology.world_size})",
            "  2) Reduce the model size (",
            f"\t  Global storage: {round(bytes_to_gb(whole.hbm), 3)} GB, ",
            f"\t  Per rank hardware memory: {storage_repr_in_gb(topology.devices[0].storage)}, ",
            f"\t  Storage reservation: {kept}, ",
            f"\t  Global storage available for model parallel: {storage_repr_in_gb(left)}, ",
            f"\t  Global storage requirement for model parallel: {storage_repr_in_gb(proposed.smallest)})",
            f"  3) Reduce local batch size ({batch_size})",
            "  4) Remove planner constraints that might be reducing search space or available storage",
            f" Last planner error: \n\t{proposed.error}\n",
        ]
    )
    kind = PlannerErrorType.INSUFFICIENT_STORAGE if short else PlannerErrorType.STRICT_CONSTRAINTS
    return PlannerError(text, kind)


def _total(topology: Topology) -> Storage:
    return sum((device.storage for device in topology.devices), Storage(0, 0, 0))
