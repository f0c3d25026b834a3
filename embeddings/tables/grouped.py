"""Lookups of a collection whose tables lie in groups: pick and check each group's features, put the outputs in order.

Shapes: per group a KJT of its features, B samples each, and its output: pooled [B, sum of the group's dims], or rows
[N, dim]. Outputs follow the order of the tables, feature by feature, whatever groups they lie in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, repeat
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor
from shardwise.jagged.tracing import is_transformed
from shardwise.kernels import RegroupPlan, plan_regroup

from .variable_batch import expand_bags, inverse_of, own_lengths


class Check(Protocol):
    """An `IdCheck`, or a `GuardedIdCheck`."""

    def __call__(self, ids: Tensor, offsets: Tensor, *, padded: bool = False) -> None:
        """Raise for bad ids or offsets."""


class Group(Protocol):
    """Tables that one call looks up: those of a `TableGroup`, or `QuantizedTables`."""

    # of each feature, in the group's order
    keys: list[str]
    dims: list[int]

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        ...

    @property
    def check(self) -> Check:
        """Called before a lookup, it raises for bad ids or offsets."""
        ...


GroupT = TypeVar("GroupT", bound=Group)
Found = list[tuple[KeyedJaggedTensor, Tensor]]
# orders of keys that are kept: more than the collections of a process have groups
_PICKS = 512


class SharedFeatures(NamedTuple):
    """All features of a collection, table by table, of which several tables share some; and which are each group's."""

    names: list[str]
    groups: list[list[int]]

    def picks(self, keys: Sequence[str]) -> list[list[int]] | None:
        """Of each group, where in a batch its features are; None where no key is there more than once."""
        if len(set(keys)) == len(keys):
            return None
        places = places_of(keys, self.names)
        return [[places[n] for n in of_group] for of_group in self.groups]


def shared_features(
    members: Sequence[Sequence[int]], features_by_table: Sequence[Sequence[str]]
) -> SharedFeatures | None:
    """The features of a collection whose groups have these tables; None if no two groups can share one."""
    names = [name for features in features_by_table for name in features]
    if len(members) < 2 or len(set(names)) == len(names):
        return None
    begin = list(accumulate(map(len, features_by_table), initial=0))
    return SharedFeatures(names, [[n for t in tables for n in range(begin[t], begin[t + 1])] for tables in members])


def look_up_groups(
    groups: Sequence[GroupT],
    features: KeyedJaggedTensor,
    look_up: Callable[[GroupT, KeyedJaggedTensor], Tensor],
    shared: SharedFeatures | None = None,
) -> Found:
    """Pick, check and look up the features of each group, of a batch of one batch size.

    A batch may have a feature of several tables once, or, as managed collision makes it, once for each of them in their
    order; `shared` tells these apart.

    Raises:
        KeyError: features are missing.
        ValueError: ids are on another device than the tables.
    """
    outputs = []
    picks = None if shared is None else shared.picks(features.keys())
    for number, group in enumerate(groups):
        picked = pick_features(features, group.keys) if picks is None else features.permute(picks[number])
        if picked.device() != group.device:
            raise ValueError(f"ids are on {picked.device()}, the tables on {group.device}")
        # torch's lookups check ids themselves; tensors of a transform have no memory for ours to read
        if not is_transformed():
            group.check(picked.values(), picked.offsets(), padded=picked.capacity() is not None)
        outputs.append((picked, look_up(group, picked)))
    return outputs


def pick_features(features: KeyedJaggedTensor, names: Sequence[str]) -> KeyedJaggedTensor:
    """The named features in that order, a name as often as it is listed, from as many of a batch that has it so often.

    Raises:
        KeyError: names the features that are missing.
    """
    keys = features.keys()
    if list(names) == keys:
        return features
    # a compiler would trace what is kept, and warn
    places_of = _places_of.__wrapped__ if torch.compiler.is_compiling() else _places_of
    return features.permute(places_of(tuple(keys), tuple(names)))


@lru_cache(maxsize=_PICKS)
def _places_of(keys: tuple[str, ...], names: tuple[str, ...]) -> list[int]:
    """As `places_of`. The list is shared."""
    return places_of(keys, names)


def places_of(keys: Sequence[str], names: Sequence[str]) -> list[int]:
    """Where each name is among the keys: a key that is there as often as it is named is taken one after another.

    Raises:
        KeyError: names those that are not there.
    """
    # a feature of several tables is listed for each of them
    place = {key: number for number, key in enumerate(keys)}
    missing = [name for name in dict.fromkeys(names) if name not in place]
    if missing:
        raise KeyError(f"features {missing} are not in the batch, which has {list(keys)}")
    if len(place) == len(keys):
        return [place[name] for name in names]
    every = {name: [number for number, key in enumerate(keys) if key == name] for name in place}
    after = {name: iter(numbers) for name, numbers in every.items() if len(numbers) == names.count(name)}
    return [next(after[name]) if name in after else place[name] for name in names]


def plan_columns(
    groups: Sequence[Group], members: Sequence[Sequence[int]], names_by_table: Sequence[Sequence[str]]
) -> RegroupPlan | None:
    """How the groups' pooled outputs move to the order of the tables, whose `members` each group has; None of one."""
    if len(groups) < 2:
        return None
    keys = [[name for t in tables for name in names_by_table[t]] for tables in members]
    return plan_regroup(keys, [group.dims for group in groups], [[name for names in names_by_table for name in names]])


def columns_in_table_order(outputs: Found, plan: RegroupPlan | None) -> Tensor:
    """The groups' pooled outputs side by side, [B, sum of dims], by the plan of `plan_columns`."""
    if plan is None:
        return outputs[0][1]
    # not by the op of `regroup`, into which no compiler sees: neighbours of one group move in one piece
    parts: list[Tensor] = []
    for (_, pooled), sizes in zip(outputs, plan.sizes, strict=True):
        parts += pooled.split_with_sizes(sizes, 1)
    return torch.cat([parts[i] for i in plan.parts[0]], dim=1)


def rows_by_name(
    features: KeyedJaggedTensor,
    outputs: Found,
    members: Sequence[Sequence[int]],
    names_by_table: Sequence[Sequence[str]],
    *,
    need_indices: bool,
) -> dict[str, JaggedTensor]:
    """The groups' rows as a JaggedTensor per feature, with the ids as weights if `need_indices`.

    `features` is the whole batch as it was given; with inverse indices each feature comes out as the full batch.
    """
    by_name: dict[str, JaggedTensor] = {}
    for (picked, rows), tables in zip(outputs, members, strict=True):
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
        cut = torch.split if is_transformed() else torch.unsafe_split_with_sizes
        split = [cut(tensor, sizes) for tensor in per_id]
        # what is cut from one tensor along known sizes needs no check of its own
        made = map(JaggedTensor._of, split[0], split[1] if need_indices else repeat(None), lengths)
        by_name.update(zip([name for t in tables for name in names_by_table[t]], made, strict=True))
    # tables of one group are in their order
    return by_name if len(outputs) == 1 else {name: by_name[name] for names in names_by_table for name in names}
