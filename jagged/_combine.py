"""Batches made of batches: all keys of several, and the pieces that `KeyedJaggedTensor` itself makes.

torch.fx records the functions by name; nothing is checked but what several batches cannot have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.errors import RefusedValueError

from ._check import names
from ._keys import Keys, Order, Strides
from ._segments import join_tensors, join_weights

if TYPE_CHECKING:
    from .keyed_jagged_tensor import KeyedJaggedTensor

InverseIndices = tuple[list[str], Tensor]


def like(
    whole: KeyedJaggedTensor | type[KeyedJaggedTensor],
    strides: Strides,
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    length_per_key: list[int] | None,
    checked: bool,
    inverse: InverseIndices | None,
) -> KeyedJaggedTensor:
    """A batch of the same type, without a check."""
    piece: KeyedJaggedTensor = object.__new__(whole if isinstance(whole, type) else type(whole))
    piece._strides = strides
    piece._values = values
    piece._weights = weights
    piece._lengths = lengths
    piece._length_per_key = length_per_key
    piece._checked = checked
    piece._inverse = inverse
    return piece


def inverse_of(inverse: InverseIndices, order: Order) -> InverseIndices:
    """The rows of inverse indices that the keys of an order have; what is left of repeated keys is one row."""
    at = {key: row for row, key in enumerate(inverse[0])}
    picked = list(dict.fromkeys(order.keys.names))
    rows = torch.tensor([at[key] for key in picked], dtype=torch.int64, device="cpu")  # [picked]
    return picked, inverse[1][rows.to(inverse[1].device, non_blocking=True)]


@torch.fx.wrap
def concat(members: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    if not members:
        raise ValueError("Can't concat empty KJT list: concat needs at least one KeyedJaggedTensor")
    members = [kjt for kjt in members if kjt._strides.keys.names] or members[:1]
    strides = Strides.join([kjt._strides for kjt in members])

    def label(i: int) -> str:
        return names(members[i]._strides.keys.names)

    # one pass over the members: with few of them this is as long as the copies take
    values: list[Tensor] = []
    weights: list[Tensor | None] = []
    lengths: list[Tensor] = []
    known: list[list[int] | None] = []
    checked, weighted, inverse = True, False, False
    for kjt in members:
        of_member, its_weights = (kjt._values, kjt._weights) if kjt._capacity is None else kjt._in_bags()
        values.append(of_member)
        weights.append(its_weights)
        lengths.append(kjt.lengths() if kjt._lengths is None else kjt._lengths)
        known.append(kjt._length_per_key)
        checked = checked and kjt._checked
        weighted = weighted or its_weights is not None
        inverse = inverse or kjt._inverse is not None
    joined_values = join_tensors("values", label, values)
    joined_weights = join_weights([kjt._strides.keys.names for kjt in members], weights) if weighted else None
    sizes = None if None in known else list(chain.from_iterable(n or () for n in known))
    joined_inverse = _join_inverse(members) if inverse else None
    return like(members[0], strides, joined_values, joined_weights, torch.cat(lengths), sizes, checked, joined_inverse)


def _join_inverse(members: Sequence[KeyedJaggedTensor]) -> InverseIndices | None:
    inverse = [kjt._inverse for kjt in members if kjt._inverse is not None]
    if not inverse:
        return None
    if len(inverse) != len(members):
        lacking = [name for kjt in members if kjt._inverse is None for name in kjt._strides.keys.names]
        raise RefusedValueError(
            f"inverse indices must be consistent for all KJTs, either all have them or none: {names(lacking)} have not"
        )
    batches = sorted({rows.shape[1] for _, rows in inverse})
    if len(batches) > 1:
        raise ValueError(f"cannot join inverse indices of full batches of {batches}")
    return [key for keys, _ in inverse for key in keys], torch.cat([rows for _, rows in inverse])


@torch.fx.wrap
def empty_like(kjt: KeyedJaggedTensor, device: torch.device | str | None) -> KeyedJaggedTensor:
    if device is not None:
        return kjt._map(lambda tensor: torch.empty_like(tensor, device=device))
    nothing = Strides(Keys([]), kjt._strides.stride)
    weights = None if kjt._weights is None else kjt._weights.new_empty(0)
    inverse: InverseIndices | None = None if kjt._inverse is None else ([], kjt._inverse[1][:0])
    return like(kjt, nothing, kjt._values.new_empty(0), weights, kjt.lengths().new_empty(0), [], True, inverse)
