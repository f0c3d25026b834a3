"""What a plan sets of a table's lookups: the type of what they answer, and what an id outside the table does.

Letters: L lookups, B samples, D columns of a lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from shardwise.embeddings import DataType
from shardwise.embeddings.config import data_type_to_dtype
from shardwise.kernels import BoundsCheckMode, Feature, pack_features

from .routes import Routes


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of one of the planner's TRAINED_TYPES."""
    return data_type_to_dtype(DataType[name])


def output_dtypes(routes: Routes, default: torch.dtype, arrives_as: torch.dtype | None) -> list[torch.dtype]:
    """The type [L] of what each lookup answers.

    That is the table's own, or the collection's `default`; `arrives_as`, where an exchange gives rows a type, is that
    of all rows that travel.
    """
    stays = {slot.lookup for group in (*routes.replicas, *routes.dense) for slot in group.slots}
    dtypes = []
    for lookup in range(len(routes.lookups)):
        own = routes.table_of(lookup).options.output_dtype
        dtype = default if own is None else dtype_named(own)
        dtypes.append(dtype if arrives_as is None or lookup in stays else arrives_as)
    return dtypes


def cast_sums(values: Tensor, dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> Tensor:
    """The sums [B, sum of dims] of lookups rounded to their types, in the narrowest that holds them all.

    Differentiable.
    """
    joined = reduce(torch.promote_types, dtypes)
    pieces = values.split_with_sizes(list(dims), dim=1)
    return torch.cat([piece.to(dtype).to(joined) for piece, dtype in zip(pieces, dtypes, strict=True)], dim=1)


@dataclass(frozen=True)
class IdCheck:
    """What the ids of some of a batch's keys are checked against, and what a bad one does.

    Args:
        mode: raise, warn, or nothing at all.
        keys: which of the keys that are looked up; None is all of them, in their order.
        features: rows of each, as `pack_features` lays them out.
        names: of each, for messages.
    """

    mode: BoundsCheckMode
    keys: list[int] | None
    features: Tensor
    names: list[str]


def id_checks(
    routes: Routes,
    keys: Sequence[str],
    places: Sequence[int],
    rows: Sequence[int],
    default: BoundsCheckMode,
    device: torch.device,
) -> list[IdCheck]:
    """The checks of the keys that are looked up, one for each mode that their tables have.

    A key that is looked up in several tables of one mode is checked against the smallest.

    Args:
        routes: of the collection.
        keys: of the batch; one may stand there several times.
        places: [L] which of the keys each lookup reads.
        rows: of each of the routes' tables.
        default: the mode of a table of which the plan says nothing.
        device: where ids are checked.
    """
    asked = [table.options.bounds_check_mode for table in routes.tables]
    modes = [default if name is None else BoundsCheckMode[name] for name in asked]
    smallest: dict[BoundsCheckMode, dict[int, int]] = {}
    for place, (_, table) in zip(places, routes.lookups, strict=True):
        of_mode = smallest.setdefault(modes[table], {})
        before = of_mode.get(place, table)
        of_mode[place] = min(before, table, key=lambda number: (rows[number], number))
    used, checks = sorted(set(places)), []
    for mode in sorted(smallest):
        tables = [(number, keys[k], smallest[mode][k]) for number, k in enumerate(used) if k in smallest[mode]]
        names = [f"feature {key!r} (table {routes.tables[table].name!r})" for _, key, table in tables]
        spec = [Feature(0, rows[table], 1, 0) for _, _, table in tables]
        numbers = None if len(tables) == len(used) else [number for number, _, _ in tables]
        checks.append(IdCheck(mode, numbers, pack_features(spec, device), names))
    return checks
