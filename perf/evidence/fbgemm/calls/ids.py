"""Calls of checking ids and of hashing them to rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .draw import Call, Draw, calls

_WORD = (1 << 64) - 1
_OTHER_KERNEL = (4, 5, 6)


@calls("bounds_check_indices")
def _bounds_check(draw: Draw) -> Call:
    tables, batch = draw.between(1, 3), draw.below(4)
    counts = [draw.below(4) if draw.coin(0.8) else batch for _ in range(tables)]
    variable = draw.coin(0.3)
    bags = sum(counts) if variable else tables * batch
    mode = draw.choice((0, 0, 1, 1, 1, 2, 2, 3, *_OTHER_KERNEL[: draw.below(4)]))
    lengths = draw.lengths(bags, dtype=draw.index_dtype())
    size = int(lengths.sum())
    rows = draw.ints(tables, 1, 9)
    clean = draw.coin(0.6 if mode == 0 else 0.3) or mode == 6
    indices = draw.ints(size, -1 if clean else -3, 0 if clean else 12, draw.index_dtype())
    offsets = draw.offsets(lengths)
    moved = not clean and mode != 3 and draw.coin(0.4)
    if moved:
        for _ in range(draw.between(1, 3)):
            offsets[draw.below(bags + 1)] = draw.between(-3, size + 3)
    difference = ""
    if mode in _OTHER_KERNEL:
        difference = "modes of the other kernel in bounds_check_indices"
    elif moved and offsets.dtype != indices.dtype and mode != 0:
        difference = "offsets that bounds_check_indices corrects are of another dtype than indices"
    args: list[Any] = [draw.layout(rows), draw.layout(indices), draw.layout(offsets), mode, torch.tensor([7])]
    args.append(draw.floats(size) if draw.coin(0.3) else None)
    if variable:
        ends = draw.offsets(torch.tensor(counts, dtype=torch.int32))
        args += [draw.layout(ends), max(counts)]
    elif draw.coin(0.3):
        args += [None, -1, None, -1, -1, 2]
    return Call(args, f"mode {mode}", difference, packed=True)


@calls("murmur_hash3")
def _murmur_hash(draw: Draw) -> Call:
    numbers = [draw.choice((draw.below(100), draw.between(-(2**62), 2**62), -1)) for _ in range(3)]
    y, seed = (0, 0) if draw.coin() else numbers[1:]
    hashed = hash_of_words(numbers[0], y, seed)
    args = [torch.tensor(numbers[:1]), y, seed]
    if hashed >> 63:
        # FBGEMM raises where the number does not fit the signed one that it returns
        return Call(args, "high bit", expected=lambda: [torch.tensor(hashed - (1 << 64))])
    return Call(args)


@calls("create_zch_buffer")
def _create_buffer(draw: Draw) -> Call:
    args = [draw.below(6), draw.coin(), draw.choice((None, torch.device("cpu"))), draw.coin()]
    return Call(args[: draw.between(1, 4)])


@calls("zero_collision_hash")
def _zero_collision_hash(draw: Draw) -> Call:
    size, slots = draw.below(9), draw.between(1, 40)
    dtype = draw.index_dtype()
    kept = torch.int32 if dtype == torch.int32 else draw.index_dtype()
    most = draw.choice((9, 50, 2**31 - 1))
    table = draw.ints(slots, -1, most, kept)
    ids = draw.ints(size, -2, most, dtype)
    if dtype != kept and draw.coin() and size:
        ids[0] += 2**31 - 1
    for place in range(size):
        # most ids have a slot near to where they are looked for
        if draw.coin(0.6):
            number = int(ids[place])
            near = (hash_of_words(number, 0, 0) % slots + draw.choice((0, 0, 1, 2, 18))) % slots
            table[near] = number if dtype == kept else number % (2**31 - 1)
    args: list[Any] = [draw.layout(ids), draw.layout(table.view(-1, 1)), draw.below(slots + 4), True, -1, True]
    args += [None, None, None, False, draw.coin(0.3)]
    reserved = draw.between(1, slots - 1) if slots > 1 and draw.coin(0.3) else -1
    if draw.coin(0.4):
        least = max(reserved, 0) + 1
        sizes = [draw.between(least, slots) for _ in range(size)]
        begins = [draw.between(0, slots - each) for each in sizes]
        args[6:8] = [_longs(draw, sizes), _longs(draw, begins)]
    if reserved > 0:
        args += [False, None, -1, 0, draw.between(1, 100), reserved]
    return Call(args, packed=True)


def _longs(draw: Draw, numbers: list[int]) -> Tensor:
    return draw.layout(torch.tensor(numbers, dtype=torch.int64))


def hash_of_words(x: int, y: int, seed: int) -> int:
    """MurmurHash3 of two 64-bit words in plain Python, its halves xor one another."""
    h1 = h2 = seed & _WORD
    h1 ^= _rotated(x * 0x87C37B91114253D5, 31) * 0x4CF5AD432745937F & _WORD
    h1 = ((_rotated(h1, 27) + h2) * 5 + 0x52DCE729) & _WORD
    h2 ^= _rotated(y * 0x4CF5AD432745937F, 33) * 0x87C37B91114253D5 & _WORD
    h2 = ((_rotated(h2, 31) + h1) * 5 + 0x38495AB5) & _WORD
    h1, h2 = h1 ^ 16, h2 ^ 16
    h1 = (h1 + h2) & _WORD
    h2 = (h2 + h1) & _WORD
    h1, h2 = _mixed(h1), _mixed(h2)
    h1 = (h1 + h2) & _WORD
    return h1 ^ ((h2 + h1) & _WORD)


def _mixed(h: int) -> int:
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD & _WORD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53 & _WORD
    return h ^ (h >> 33)


def _rotated(h: int, bits: int) -> int:
    h &= _WORD
    return ((h << bits) | (h >> (64 - bits))) & _WORD
