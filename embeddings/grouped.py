"""Lookups of a collection whose tables lie in groups: pick and check each group's features, put the outputs in order.

Shapes: per group a KJT of its features, B samples each, and what it found: pooled [B, sum of the group's dims], or rows
[N, dim]. Outputs follow the order of the tables, feature by feature, whatever groups they lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

from .table_layout import LookupFeature
from .variable_batch import expand_bags, inverse_of, own_lengths


class Group(Protocol):
    """Tables that one call looks up: those of a `TableGroup`, or `QuantizedTables`."""

    lookups: list[LookupFeature]
    dims: list[int]

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        ...

    def check(self, ids: Tensor, offsets: Tensor, *, padded: bool = False) -> None:
        """Raise for bad ids or offsets."""


GroupT = TypeVar("GroupT", bound=Group)
Found = list[tuple[KeyedJaggedTensor, Tensor]]


def look_up_groups(
    groups: Sequence[GroupT], features: KeyedJaggedTensor, look_up: Callable[[GroupT, KeyedJaggedTensor], Tensor]
) -> Found:
    """Pick, check and look up the features of each group, of a batch of one batch size.

    Raises:
        KeyError: features are missing.
        ValueError: ids are on another device than the tables.
    """
    found = []
    for group in groups:
        picked = pick_features(features, [f.name for f in group.lookups])
        if picked.device() != group.device:
            raise ValueError(f"ids are on {picked.device()}, the tables on {group.device}")
        group.check(picked.values(), picked.offsets(), padded=picked.capacity() is not None)
        found.append((picked, look_up(group, picked)))
    return found


def pick_features(features: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    """The named features in that order, a name as often as it is listed.

    Raises:
        KeyError: names the features that are missing.
    """
    keys = features.keys()
    if list(names) == list(keys):
        return features
    place = {key: number for number, key in enumerate(keys)}
    # a feature of several tables is listed for each of them
    missing = [name for name in dict.fromkeys(names) if name not in place]
    if missing:
        raise KeyError(f"features {missing} are not in the batch, which has {list(keys)}")
    return features.permute([place[name] for name in names])


def columns_in_table_order(
    found: Found, groups: Sequence[Group], members: Sequence[Sequence[int]], names_by_table: Sequence[Sequence[str]]
) -> Tensor:
    """The groups' pooled outputs side by side, [B, sum of dims]; `members` are the tables of each group."""
    if len(found) == 1:
        return found[0][1]
    blocks: dict[int, list[Tensor]] = {}
    for (_, pooled), group, tables in zip(found, groups, members, strict=True):
        pieces = iter(torch.split(pooled, group.dims, dim=1))
        for t in tables:
            blocks[t] = [next(pieces) for _ in names_by_table[t]]
    return torch.cat([block for t in sorted(blocks) for block in blocks[t]], dim=1)


def rows_by_name(
    features: KeyedJaggedTensor,
    found: Found,
    members: Sequence[Sequence[int]],
    names_by_table: Sequence[Sequence[str]],
    *,
    need_indices: bool,
) -> dict[str, JaggedTensor]:
    """The groups' rows as a JaggedTensor per feature, with the ids as weights if `need_indices`.

    `features` is the whole batch as it was given; with inverse indices each feature comes out as the full batch.
    """
    by_name: dict[str, JaggedTensor] = {}
    for (picked, rows), tables in zip(found, members, strict=True):
        per_id = [rows, picked.values()] if need_indices else [rows]
        if features.inverse_indices_or_none() is None:
            lengths, sizes = own_lengths(features, picked), picked.length_per_key()
        else:
            per_id, lengths, sizes = expand_bags(picked, per_id, inverse_of(features, picked.keys()))
        if picked.capacity() is not None:
            # what is past the last bag is nobody's
            sizes = [*sizes, per_id[0].shape[0] - sum(sizes)]
        # not slices: torch.export cannot tell that sizes it does not know lie within the tensor; nor views of one
        # tensor to autograd, which lets nobody change one of several in place
        split = [torch.unsafe_split_with_sizes(tensor, sizes) for tensor in per_id]
        for number, name in enumerate(name for t in tables for name in names_by_table[t]):
            values, *ids = [pieces[number] for pieces in split]
            by_name[name] = JaggedTensor(values, weights=ids[0] if ids else None, lengths=lengths[number])
    return {name: by_name[name] for names in names_by_table for name in names}
