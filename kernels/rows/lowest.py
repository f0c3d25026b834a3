"""The slots of lowest keys of each table that nobody holds: those whose rows go when others come.

Shapes: keys, held [S] int32, borders [T+1], counts [T] int64; returns [capacity] int64.
Bytes moved: keys and held, 8 a slot, once for each digit of a key that is counted and twice to pick.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from .. import numba_loops
from .._op import direct, register

# the CPU's compiled loops; None where numba is missing or does not work
loops = partial(numba_loops.loops, "rows_loops")
# values of a digit of a key, of 16 bits, which the loop counts
_BINS = 1 << 16


def lowest_ref(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, capacity: int) -> Tensor:
    """For each table a stable sort of the keys of its slots that nobody holds."""
    picked = []
    for (begin, end), count in zip(pairwise(borders.tolist()), counts.tolist(), strict=True):
        free = begin + (held[begin:end] <= 0).nonzero().flatten()
        slots = free[torch.sort(keys[free], stable=True).indices[:count]].sort().values
        picked += [slots, slots.new_full((count - slots.shape[0],), -1)]
    flat = torch.cat([borders[:0], *picked])[:capacity]
    return torch.cat([flat, flat.new_full((capacity - flat.shape[0],), -1)])


def lowest(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, capacity: int) -> Tensor:
    """The counts[t] slots of table t with the lowest (key, slot) that nobody holds, in the order of slots.

    Table t has slots borders[t] ... borders[t + 1] - 1; a slot with held > 0 is held. Nothing waits for a device.

    Shapes: keys [S] int32, not negative, held [S] int32, borders [T+1] int64, ascending, counts [T] int64, not
    negative, with a sum of at most `capacity`; all on one device.

    Returns:
        [capacity] int64: table after table, each counts[t] places; -1 at the end of a table's places where it has too
        few slots, and past the last table's. On CUDA what does not fit is left out.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on the CPU also borders that fall or leave the
            slots, negative counts, and counts that sum to more than `capacity`.
    """
    _check(keys, held, borders, counts, capacity)
    if direct(keys, held, borders, counts):
        return _lowest(keys, held, borders, counts, capacity)
    return torch.ops.shardwise.lowest(keys, held, borders, counts, capacity)  # type: ignore[no-any-return]


def _check(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, capacity: int) -> None:
    for name, numbers, dtype in (
        ("keys", keys, torch.int32),
        ("held", held, torch.int32),
        ("borders", borders, torch.int64),
        ("counts", counts, torch.int64),
    ):
        if numbers.dtype != dtype:
            raise TypeError(f"lowest: {name} must be {dtype}, got {numbers.dtype}")
        if numbers.dim() != 1:
            raise ValueError(f"lowest: {name} must have one dimension, got shape {[*numbers.shape]}")
        if numbers.device != keys.device:
            raise ValueError(f"lowest: {name} must be on {keys.device} as keys are, got {numbers.device}")
    if held.shape != keys.shape:
        raise ValueError(f"lowest: {keys.shape[0]} keys, but held has {held.shape[0]}")
    if borders.shape[0] != counts.shape[0] + 1:
        raise ValueError(f"lowest: {counts.shape[0]} counts, so borders must have one more, got {borders.shape[0]}")
    if capacity < 0:
        raise ValueError(f"lowest: capacity must not be negative, got {capacity}")


def _check_values(slots: int, borders: Tensor, counts: Tensor, capacity: int) -> None:
    ends, wanted = borders.tolist(), counts.tolist()
    if sorted(ends) != ends or ends[0] < 0 or ends[-1] > slots:
        raise ValueError(f"lowest: borders must ascend from 0 to at most {slots} slots, got {ends[:20]}")
    if min(wanted, default=0) < 0 or sum(wanted) > capacity:
        raise ValueError(f"lowest: counts must be >= 0 and sum to at most {capacity} (capacity), got {wanted[:20]}")


def _lowest(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, capacity: int) -> Tensor:
    if keys.is_cpu:
        _check_values(keys.shape[0], borders, counts, capacity)
        if (compiled := loops()) is not None:
            out = torch.empty(capacity, dtype=torch.int64, device="cpu")
            bins = torch.empty(_BINS, dtype=torch.int64, device="cpu")
            keys, held, borders, counts = (x.contiguous() for x in (keys, held, borders, counts))
            compiled.lowest(
                keys.data_ptr(), held.data_ptr(), borders.data_ptr(), counts.data_ptr(), counts.shape[0],
                bins.data_ptr(), out.data_ptr(), capacity,
            )  # fmt: skip
            return out
    return lowest_ref(keys, held, borders, counts, capacity)


register(
    "lowest(Tensor keys, Tensor held, Tensor borders, Tensor counts, SymInt capacity) -> Tensor",
    _lowest,
    lambda keys, held, borders, counts, capacity: borders.new_empty(capacity),
)
