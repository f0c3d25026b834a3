"""The loops of reuse.py, compiled by numba: which of the times is the last one of a row, a bit each, and their sums.

Times come in blocks of 64, the bits of an int64. Entry k of the tree, a Fenwick tree from 1, holds how many bits are
set in the blocks (k - (k & -k), k]; it is 64 times smaller than one of times, and stays in the cache. Nothing here
checks an address.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import int64

from ..cpu.njit import compiled, i4, i8


@compiled()
def _set_bits(word: int) -> Any:
    """How many bits of an int64 are set."""
    x = np.uint64(word)
    x = x - ((x >> np.uint64(1)) & np.uint64(0x5555555555555555))
    x = (x & np.uint64(0x3333333333333333)) + ((x >> np.uint64(2)) & np.uint64(0x3333333333333333))
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled()
def _add(tree: Any, block: int, amount: int) -> None:
    k = block + 1
    while k < tree.shape[0]:
        tree[k] += amount
        k += k & -k


@compiled(int64(*[int64] * 9))
def touch(
    rows_at: int, last_at: int, bits_at: int, tree_at: int, depths_at: int, n: int, blocks: int, now: int, wanted: int
) -> int:
    """Depths of n rows, which are then last wanted at now, now + 1, ...; returns how many rows were ever wanted."""
    rows, depths, bits, tree = i8(rows_at, n), i8(depths_at, n), i8(bits_at, blocks), i4(tree_at, blocks + 1)
    most = 0
    for i in range(n):
        most = max(most, rows[i])
    last = i8(last_at, most + 1)
    for i in range(n):
        time = last[rows[i]]
        if time < 0:
            depths[i] = -1
            continue
        block = time >> 6
        older, k = _set_bits(bits[block] & ((int64(2) << (time & 63)) - 1)), block
        while k > 0:
            older += tree[k]
            k &= k - 1
        depths[i] = wanted - older
    # only now, as rows of a batch are wanted together
    for i in range(n):
        time = last[rows[i]]
        if time >= 0:
            bits[time >> 6] ^= int64(1) << (time & 63)
            _add(tree, time >> 6, -1)
        else:
            wanted += 1
        last[rows[i]] = now + i
    _stamp(bits, tree, now, now + n)
    return wanted


@compiled()
def _stamp(bits: Any, tree: Any, begin: int, end: int) -> None:
    """Set the bits of the times [begin, end)."""
    while begin < end:
        block = begin >> 6
        beyond = min(end, (block + 1) << 6)
        for time in range(begin, beyond):
            bits[block] |= int64(1) << (time & 63)
        _add(tree, block, beyond - begin)
        begin = beyond


@compiled(int64(*[int64] * 4))
def fill(bits_at: int, tree_at: int, blocks: int, n: int) -> int:
    """Bits and tree of zeros become those of n rows last wanted at the times 0 ... n - 1."""
    _stamp(i8(bits_at, blocks), i4(tree_at, blocks + 1), 0, n)
    return 0
