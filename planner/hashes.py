"""Numbers and texts that stand for what went into a plan, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .torchrec.constants import HUNDRED_GB

if TYPE_CHECKING:
    from .constraints import ParameterConstraints
    from .topology import Topology
    from .torchrec.components import Enumerator, StorageReservation


def hash_sha256_str(hashable_list: Sequence[Any]) -> str:
    """SHA-256 of a list as it prints, in hexadecimal digits."""
    return hashlib.sha256(str(list(hashable_list)).encode()).hexdigest()


def hash_sha256_to_int(hashable_list: Sequence[Any]) -> int:
    """SHA-256 of a list as it prints."""
    return int(hash_sha256_str(hashable_list), 16)


def round_to_nearest(x: int, unit: int) -> int:
    """The multiple of `unit` next to `x`."""
    return round(x / unit) * unit


def hash_planner_context_inputs(
    topology: Topology,
    batch_size: int,
    enumerator: Enumerator,
    storage_reservation: StorageReservation,
    constraints: Mapping[str, ParameterConstraints] | None,
    hash_function: Callable[[list[Any]], int] = hash_sha256_to_int,
) -> int:
    """A number that stands for all that a planner was given; storage counts to the nearest 100 GiB.

    Raises:
        ValueError: nothing was enumerated or reserved yet.
    """
    return hash_function(_context(topology, batch_size, enumerator, storage_reservation, constraints))


def hash_planner_context_inputs_str(
    topology: Topology,
    batch_size: int,
    enumerator: Enumerator,
    storage_reservation: StorageReservation,
    constraints: Mapping[str, ParameterConstraints] | None,
    hash_function: Callable[[list[Any]], str] = hash_sha256_str,
) -> str:
    """As `hash_planner_context_inputs`, as text."""
    return hash_function(_context(topology, batch_size, enumerator, storage_reservation, constraints))


def _context(
    topology: Topology,
    batch_size: int,
    enumerator: Enumerator,
    storage_reservation: StorageReservation,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> list[Any]:
    options = getattr(enumerator, "last_stored_search_space", None)
    if options is None:
        raise ValueError("there is nothing to hash before the enumerator has enumerated a module")
    reserved = storage_reservation.last_reserved_topology
    if reserved is None:
        raise ValueError("there is nothing to hash before the storage reservation has reserved")
    return [
        _machines(topology),
        batch_size,
        [
            (option.fqn, option.sharding_type, option.compute_kernel, [_shard(s) for s in option.shards],
             repr(option.cache_params))
            for option in options
        ],
        type(storage_reservation).__name__,
        _machines(reserved),
        sorted((name, repr(one)) for name, one in (constraints or {}).items()),
    ]  # fmt: skip


def _machines(topology: Topology) -> list[Any]:
    def rounded(size: int) -> int:
        return round_to_nearest(size, HUNDRED_GB)

    devices = [
        (d.rank, rounded(d.storage.hbm), rounded(d.storage.ddr), rounded(d.storage.ssd)) for d in topology.devices
    ]
    return [*topology._said(), devices]


def _shard(shard: Any) -> tuple[Any, ...]:
    storage = shard.storage and (shard.storage.hbm, shard.storage.ddr, shard.storage.ssd)
    return tuple(shard.size), tuple(shard.offset), shard.rank, storage
