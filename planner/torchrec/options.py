"""Sharding options, ours or TorchRec's own objects, as a problem for our search, and what it found as options again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..search.problem import (
    PARTS,
    Assignment,
    Choice,
    Floats,
    Item,
    Problem,
)
from .sharding_option import PartitionByType

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
