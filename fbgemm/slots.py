"""Slots of a hash table for ids that come one after another, found for all of them at once."""

from __future__ import annotations

import torch
from torch import Tensor

FREE = -1


def slots_in_turn(wanted: Tensor, begin: Tensor, slots: Tensor, home: Tensor, keys: Tensor, most: Tensor) -> Tensor:
    """The slot [N] of each key of `wanted` [N], as it takes the first one that is free or holds that key already.

    Key n looks at begin[n] + (home[n] + i) % slots[n] for i = 0 ... most[n] - 1; -1 where it finds none. `keys` are the
    table's before, -1 where a slot is free; they are not changed.

    All ask at once for the first slot of their own. The earliest keeps it, even from one that had it already, and the
    others ask for the next one. An earlier key never gives way to a later one: this ends as one after another does.
    """
    count = wanted.shape[0]
    order = torch.arange(count, device=wanted.device)
    # who has a slot: a key that was there before comes before all, and nobody after all
    holder = torch.where(keys == FREE, count, -1)
    probe = torch.zeros_like(order)
    at = begin + home
    lost = most <= 0
    asks = ~lost
    # how often keys have to ask is known to the table alone
    while bool(asks.any()):
        holder.scatter_reduce_(0, at[asks], order[asks], "amin")
        has = holder[at]
        held = torch.where(has < 0, keys[at], wanted[has.clamp(0, count - 1)])
        asks = (has != order) & (held != wanted) & ~lost
        probe = probe + asks
        lost = lost | (asks & (probe >= most))
        asks = asks & ~lost
        at = torch.where(asks, begin + (home + probe) % slots, at)
    return at.masked_fill(lost, -1)
