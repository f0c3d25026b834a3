"""What-if requests: another world, card, memory, dtype, batch size or optimizer, or a laxer constraint.

Each function takes a `Request` and returns another; nothing is planned here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from shardwise.embeddings.config import DataType

from ..constants_measured import meant_card
from ..constraints import ParameterConstraints, constraint_of, nearest
from ..cost.model import CostModel, constants_of, cost_model
from ..cost.shardwise import ShardwiseCost
from ..errors import PlannerError, PlannerErrorType
from ..tables import Table
from ..topology import (
    CARD_HBM_GIB,
    GIB,
    CustomTopologyData,
    Topology,
)
from .planned import Request


def with_data_type(request: Request, data_type: DataType, *, names: Collection[str] | None = None) -> Request:
    """Tables (all, or those of `names`) with elements of another type.

    Raises:
        PlannerError: there is no such table.
    """
    return _with_tables(request, names, lambda table: replace(table, data_type=data_type))


def with_optimizer(request: Request, optimizer: str | None, *, names: Collection[str] | None = None) -> Request:
    """Tables (all, or those of `names`) trained by another optimizer, given as its class's name. Raises as above."""
    return _with_tables(request, names, lambda table: replace(table, optimizer=optimizer))


def with_batch_size(request: Request, batch_size: int) -> Request:
    """Another batch a rank; features with their own batch size keep it."""
    return replace(request, batch_size=batch_size, cost=at(request.cost, request.topology, batch_size))


def with_world(request: Request, world_size: int, *, local_world_size: int | None = None) -> Request:
    """More or fewer ranks; those that are new have what the last one had.

    Args:
        local_world_size: ranks of a host; by default as many as before where that divides them, or all.
    """
    old = request.topology
    if local_world_size is None:
        keeps = old.world_size > old.local_world_size and world_size % old.local_world_size == 0
        local_world_size = old.local_world_size if keeps else world_size
    resized = resized_topology(
        old,
        world_size=world_size,
        local_world_size=local_world_size,
        hbm=_stretched(old.hbm, world_size),
        ddr=_stretched(old.ddr, world_size),
    )
    reserved = tuple(_stretched(request.reserved, world_size)) if request.reserved else ()
    return _on(replace(request, reserved=reserved), resized)


def with_hbm(request: Request, hbm_bytes: int, *, card: str | None = None) -> Request:
    """Ranks with so much device memory, of which as large a share is reserved as before."""
    old = request.topology
    reserved = request.reserved or (0,) * old.world_size
    shares = [kept / (left + kept) if left + kept else 0.0 for left, kept in zip(old.hbm, reserved, strict=True)]
    kept = tuple(round(hbm_bytes * share) for share in shares)
    resized = resized_topology(old, hbm=[hbm_bytes - reserve for reserve in kept], card=card or old.card)
    return _on(replace(request, reserved=kept if any(kept) else ()), resized)


def with_ddr(request: Request, ddr_bytes: int) -> Request:
    """Ranks with so much host memory."""
    old = request.topology
    return _on(request, resized_topology(old, ddr=[ddr_bytes] * old.world_size))


def with_card(request: Request, card: str) -> Request:
    """Ranks on another card, with its memory.

    Raises:
        PlannerError: the card is not known.
    """
    if card not in CARD_HBM_GIB:
        raise PlannerError(f"card {card!r} is unknown{meant_card(card)}", PlannerErrorType.INPUT_VALIDATION)
    changed = with_hbm(request, CARD_HBM_GIB[card] * GIB, card=card)
    if not isinstance(changed.cost, ShardwiseCost):
        return changed
    # what is known of the old card says nothing of the new one
    cost = cost_model("shardwise", changed.topology, changed.batch_size, constants=constants_of(card))
    assert isinstance(cost, ShardwiseCost)
    return replace(changed, cost=replace(cost, caches=changed.cost.caches))


def with_reserved(request: Request, share: float) -> Request:
    """Ranks that keep this share of what they reserve."""
    old = request.topology
    kept = tuple(round(reserve * share) for reserve in request.reserved)
    freed = [before - after for before, after in zip(request.reserved, kept, strict=True)]
    resized = resized_topology(old, hbm=[left + more for left, more in zip(old.hbm, freed, strict=True)])
    return _on(replace(request, reserved=kept if any(kept) else ()), resized)


def with_constraint(request: Request, name: str, **changes: Any) -> Request:
    """Other fields in the constraint of a table."""
    old = constraint_of(request.constraints, name) or ParameterConstraints()
    return replace(request, constraints={**request.constraints, name: replace(old, **changes)})


def without_constraints(request: Request) -> Request:
    """The same tables without a word on where they may go; what constraints say of their ids stays."""
    free: Mapping[str, Any] = {
        "sharding_types": None, "compute_kernels": None, "min_partition": None, "ranks": None, "not_on": None,
        "same_rank": None,
    }  # fmt: skip
    return replace(
        request, constraints={name: replace(constraint, **free) for name, constraint in request.constraints.items()}
    )


def resized_topology(
    old: Topology,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    hbm: Sequence[int] | None = None,
    ddr: Sequence[int] | None = None,
    card: str | None = None,
) -> Topology:
    """A topology with some things changed and all others kept; `hbm` and `ddr` are bytes of each rank."""
    world = world_size or old.world_size
    memory = {
        "hbm_cap": list(old.hbm if hbm is None else hbm),
        "ddr_cap": list(old.ddr if ddr is None else ddr),
        "ssd_cap": _stretched([device.storage.ssd for device in old.devices], world),
    }
    pods = old.intra_group_size // old.local_world_size
    return Topology(
        world,
        old.compute_device,
        local_world_size=local_world_size or old.local_world_size,
        pod_size=pods if pods > 1 else None,
        hbm_mem_bw=old.hbm_mem_bw,
        ddr_mem_bw=old.ddr_mem_bw,
        ssd_mem_bw=old.ssd_mem_bw,
        hbm_to_ddr_mem_bw=old.hbm_to_ddr_mem_bw,
        bwd_compute_multiplier=old.bwd_compute_multiplier,
        weighted_feature_bwd_compute_multiplier=old.weighted_feature_bwd_compute_multiplier,
        uneven_sharding_perf_multiplier=old.uneven_sharding_perf_multiplier,
        custom_topology_data=CustomTopologyData(memory, world),
        generalized_comms_bandwidths=old.comms_bandwidths,
        card=card or old.card,
    )


def at(cost: CostModel, topology: Topology, batch_size: int) -> CostModel:
    """The same cost model for another topology or batch size: by its method `at`, or its fields of these names.

    Raises:
        PlannerError: the model has neither.
    """
    moved = getattr(cost, "at", None)
    made: Any = None
    if moved is not None:
        made = moved(topology, batch_size)
    elif is_dataclass(cost) and {"topology", "batch_size"} <= {field.name for field in fields(cost)}:
        made = replace(cost, topology=topology, batch_size=batch_size)
    else:
        raise PlannerError(
            f"cost model {cost.name!r} is for one topology and batch size: give it a method at(topology, batch_size)"
        )
    changed: CostModel = made
    return changed


def _with_tables(request: Request, names: Collection[str] | None, change: Callable[[Table], Table]) -> Request:
    every = [table.name for table in request.tables]
    for name in names or ():
        if name not in every:
            raise PlannerError(f"there is no table {name!r}{nearest(name, every)}", PlannerErrorType.INPUT_VALIDATION)
    tables = tuple(change(table) if names is None or table.name in names else table for table in request.tables)
    return replace(request, tables=tables)


def _on(request: Request, topology: Topology) -> Request:
    return replace(request, topology=topology, cost=at(request.cost, topology, request.batch_size))


def _stretched(values: Sequence[int], count: int) -> list[int]:
    return [*values[:count], *[values[-1]] * (count - len(values))]
