"""The slots of lowest keys of each table that nobody holds: those whose rows go when others come.

Shapes: keys, held [S] int32, borders [T+1], counts [T] int64; returns [capacity] int64.
Bytes moved: keys and held, 8 a slot, once for each of a key's digits and once to pick: 40 on a GPU, 8 to 16 on a CPU.

A radix selection: of all keys on a GPU, on a CPU of those that a sample says are about as low as wanted. Each pass
counts a digit of the keys that equal, in all digits before, the last key that is picked, and so finds that key's next
digit; the last pass keeps what it counted by chunk. Then slots of lower keys, and the first ones of that key, are
written in order.
On a GPU digits have 8 bits: 256 counts fit a program's registers, which adds them to the table's once. Of 16 bits, all
of a batch would be added one after another at one address, because high digits of ages and counts are alike.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from .. import numba_loops
from .._op import INTERPRETED, direct, next_power_of_2, register, runs_kernel, tl, triton

# the CPU's compiled loops; None where numba is missing or does not work
loops = partial(numba_loops.loops, "rows_loops")
# numbers that the loop keeps beside a key and a number of each slot, twice so many
_ROOM = 4096
# on a GPU: slots of a program, all of one table, and of a tile
_CHUNK, _BLOCK = (64, 64) if INTERPRETED else (8192, 1024)
# values of a digit, digits of a key, chunks that are added up at once, one for each thread
_VALUES, _DIGITS, _CHUNKS = 256, 4, 128


def lowest_ref(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, capacity: int) -> Tensor:
    """For each table a stable sort of the keys of its slots that nobody holds."""
    picked = []
    for (begin, end), count in zip(pairwise(borders.tolist()), counts.tolist(), strict=True):
        free = begin + (held[begin:end] <= 0).nonzero().flatten()
        slots = free[torch.sort(keys[free], stable=True).indices[:count]].sort().values
        picked += [slots, slots.new_full((count - slots.shape[0],), -1)]
    flat = torch.cat([borders[:0], *picked])[:capacity]
    return torch.cat([flat, flat.new_full((capacity - flat.shape[0],), -1)])


@triton.jit
def _chunk_of(borders, T, S, BLOCK_T: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's table, T or more for none, its slots [begin, end), and its table's first program."""
    program = tl.program_id(0)
    t = tl.arange(0, BLOCK_T)
    low = tl.maximum(tl.load(borders + t, mask=t < T, other=0), 0)
    high = tl.minimum(tl.load(borders + t + 1, mask=t < T, other=0), S)
    chunks = tl.cdiv(tl.maximum(high - low, 0), CHUNK).to(tl.int32)
    table = tl.sum((tl.cumsum(chunks, 0) <= program).to(tl.int32), 0)
    first = tl.sum(tl.where(t < table, chunks, 0), 0)
    begin = tl.sum(tl.where(t == table, low, 0), 0).to(tl.int32) + (program - first) * CHUNK
    end = tl.sum(tl.where(t == table, high, 0), 0).to(tl.int32)
    return table, begin, tl.minimum(begin + CHUNK, end), first


@triton.jit
def _last_key(bins, counts, table, T, S, DIGITS: tl.constexpr, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first digits of the last key that is picked, and how many are picked that have these digits."""
    value = tl.arange(0, VALUES)
    # as many as there are slots are all of them
    rest = tl.minimum(tl.maximum(tl.load(counts + table), 0), S).to(tl.int32)
    prefix = rest * 0
    for digit in tl.static_range(DIGITS):
        bin = tl.load(bins + (digit * T + table) * VALUES + value)
        here = tl.minimum(tl.sum((tl.cumsum(bin, 0) < rest).to(tl.int32), 0), _values_of(digit, VALUES) - 1)
        rest -= tl.sum(tl.where(value < here, bin, 0), 0)
        prefix = prefix * _values_of(digit, VALUES) + here
    return prefix, rest


@triton.jit
def _values_of(DIGIT: tl.constexpr, VALUES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of a digit: the last one has what is left of 31 bits."""
    return VALUES // 2 if DIGIT == 3 else VALUES


@triton.jit
def _free_keys(keys, held, s, end):  # type: ignore[no-untyped-def]
    """Keys of slots, and whether each is one that nobody holds."""
    live = s < end
    free = live & (tl.load(held + s, mask=live, other=1) <= 0)
    return tl.load(keys + s, mask=live, other=0), free


@triton.jit(do_not_specialize=["T", "S"], do_not_specialize_on_alignment=["borders", "counts"])
def _count_digits_kernel(  # type: ignore[no-untyped-def]
    keys,
    held,
    borders,
    counts,
    bins,
    below,
    T,
    S,
    DIGIT: tl.constexpr,
    DIGITS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # bits of a key below this digit, and below the one before
    SHIFT: tl.constexpr = 23 - 8 * DIGIT if DIGIT < 3 else 0
    ABOVE: tl.constexpr = 31 - 8 * DIGIT
    table, begin, end, first = _chunk_of(borders, T, S, BLOCK_T, CHUNK)
    if table < T:
        prefix, rest = _last_key(bins, counts, table, T, S, DIGIT, VALUES)
        # tables that want nothing, or of whose keys no more are to be told apart
        if rest > 0:
            total = tl.zeros((VALUES,), tl.int32)
            lower = tl.zeros((BLOCK,), tl.int32)
            for at in range(begin, end, BLOCK):
                key, free = _free_keys(keys, held, at + tl.arange(0, BLOCK), end)
                if DIGIT == DIGITS - 1:
                    lower += (free & ((key >> ABOVE) < prefix)).to(tl.int32)
                if DIGIT > 0:
                    free = free & ((key >> ABOVE) == prefix)
                digit = (key >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
                total += tl.histogram(digit, VALUES, mask=free)
            value = tl.arange(0, VALUES)
            tl.atomic_add(bins + (DIGIT * T + table) * VALUES + value, total, mask=total > 0)
            if DIGIT == DIGITS - 1:
                # how many keys of the chunk are lower than the one that ends in each digit, and in none
                before = tl.sum(lower, 0) + tl.cumsum(total, 0) - total
                tl.store(below + tl.program_id(0).to(tl.int64) * VALUES + value, before)


@triton.jit(do_not_specialize=["T", "S", "capacity"], do_not_specialize_on_alignment=["borders", "counts", "picked"])
def _pick_kernel(  # type: ignore[no-untyped-def]
    keys,
    held,
    borders,
    counts,
    bins,
    below,
    picked,
    T,
    S,
    capacity,
    DIGITS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    table, begin, end, first = _chunk_of(borders, T, S, BLOCK_T, CHUNK)
    if table < T:
        last, rest = _last_key(bins, counts, table, T, S, DIGITS, VALUES)
        if rest > 0:
            # of the chunks before this, the keys that are lower than the last one that is picked, and that equal it
            digit = last % _values_of(DIGITS - 1, VALUES)
            lower = tl.zeros((CHUNKS,), tl.int32)
            equal = tl.zeros((CHUNKS,), tl.int32)
            for at in range(first, tl.program_id(0), CHUNKS):
                c = at + tl.arange(0, CHUNKS)
                before = c < tl.program_id(0)
                here = below + c.to(tl.int64) * VALUES + digit
                lowers_here = tl.load(here, mask=before, other=0)
                lower += lowers_here
                equal += tl.load(here + 1, mask=before, other=0) - lowers_here
            lowers = tl.sum(lower, 0)
            equals = tl.sum(equal, 0)
            t = tl.arange(0, BLOCK_T)
            wanted = tl.maximum(tl.load(counts + t, mask=t < table, other=0), 0)
            base = tl.sum(wanted, 0)
            for at in range(begin, end, BLOCK):
                s = at + tl.arange(0, BLOCK)
                key, free = _free_keys(keys, held, s, end)
                is_lower = (free & (key < last)).to(tl.int32)
                is_equal = (free & (key == last)).to(tl.int32)
                # of the table: lower and equal ones before this
                lowers_before = lowers + tl.cumsum(is_lower, 0) - is_lower
                equals_before = equals + tl.cumsum(is_equal, 0) - is_equal
                place = base + lowers_before + tl.minimum(equals_before, rest)
                kept = (is_lower > 0) | ((is_equal > 0) & (equals_before < rest))
                tl.store(picked + place, s.to(tl.int64), mask=kept & (place < capacity))
                lowers += tl.sum(is_lower, 0)
                equals += tl.sum(is_equal, 0)


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
    if keys.shape[0] >= 2**31:
        raise ValueError(f"lowest: at most 2 ** 31 - 1 slots, got {keys.shape[0]}")
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
    if runs_kernel(keys):
        return _launch(keys.contiguous(), held.contiguous(), borders.contiguous(), counts.contiguous(), capacity)
    if keys.is_cpu:
        _check_values(keys.shape[0], borders, counts, capacity)
        if (compiled := loops()) is not None:
            out = torch.empty(capacity, dtype=torch.int64, device="cpu")
            # of which the loop touches what it needs
            room = torch.empty(2 * (keys.shape[0] + _ROOM), dtype=torch.int32, device="cpu")
            keys, held, borders, counts = (x.contiguous() for x in (keys, held, borders, counts))
            compiled.lowest(
                keys.data_ptr(), held.data_ptr(), borders.data_ptr(), counts.data_ptr(), counts.shape[0],
                room.data_ptr(), keys.shape[0], out.data_ptr(), capacity,
            )  # fmt: skip
            return out
    return lowest_ref(keys, held, borders, counts, capacity)


def bin_count(tables: int) -> int:
    """Counts that `pick_lowest` adds up."""
    return _DIGITS * tables * _VALUES


def _launch(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, capacity: int) -> Tensor:
    picked = torch.full((capacity,), -1, dtype=torch.int64, device=keys.device)
    bins = torch.zeros(bin_count(counts.shape[0]), dtype=torch.int32, device=keys.device)
    _launch_into(keys, held, borders, counts, bins, picked)
    return picked


def _launch_into(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, bins: Tensor, picked: Tensor) -> None:
    slots, tables, capacity = keys.shape[0], counts.shape[0], picked.shape[0]
    if not slots or not tables or not capacity:
        return
    chunks = triton.cdiv(slots, _CHUNK) + tables
    below = torch.empty(chunks * _VALUES, dtype=torch.int32, device=keys.device)
    given, shape = (keys, held, borders, counts, bins, below), (next_power_of_2(tables), _CHUNK, _BLOCK)
    for digit in range(_DIGITS):
        _count_digits_kernel[(chunks,)](*given, tables, slots, digit, _DIGITS, _VALUES, *shape)
    _pick_kernel[(chunks,)](*given, picked, tables, slots, capacity, _DIGITS, _VALUES, _CHUNKS, *shape)


def pick_lowest(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, bins: Tensor, picked: Tensor) -> None:
    """`lowest`, into memory that is there and says so already: `picked` [capacity] is -1, bins [`bin_count`] are 0.

    What they are afterwards is no one's concern but `picked`'s, which has the slots. Shapes of others as there, bins
    int32; nothing is checked.
    """
    torch.ops.shardwise.pick_lowest(keys, held, borders, counts, bins, picked)


def pick_lowest_ref(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, bins: Tensor, picked: Tensor) -> None:
    """`lowest_ref`'s."""
    picked.copy_(lowest_ref(keys, held, borders, counts, picked.shape[0]))


def _pick_lowest(keys: Tensor, held: Tensor, borders: Tensor, counts: Tensor, bins: Tensor, picked: Tensor) -> None:
    (_launch_into if runs_kernel(keys) else pick_lowest_ref)(keys, held, borders, counts, bins, picked)


register(
    "lowest(Tensor keys, Tensor held, Tensor borders, Tensor counts, SymInt capacity) -> Tensor",
    _lowest,
    lambda keys, held, borders, counts, capacity: borders.new_empty(capacity),
)
register(
    "pick_lowest(Tensor keys, Tensor held, Tensor borders, Tensor counts, Tensor(a!) bins, Tensor(b!) picked) -> ()",
    _pick_lowest,
    lambda keys, held, borders, counts, bins, picked: None,
)
