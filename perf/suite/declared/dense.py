"""The bytes that kernels/jagged/padded.py and kernels/jagged/elementwise.py declare, as functions of a call; `sector` as in
lookup.py. Letters as in padded.py. Searches and offsets of inner dims are left out: caches serve them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from torch import Tensor

from shardwise.kernels.jagged.padded import (
    ADD,
    MOVE,
    MULTIPLY,
    places_ref,
)

from .lookup import Traffic


def to_padded_bytes(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], mode: int = MOVE, *, sector: int = 1
) -> Traffic:
    """Of `jagged_to_padded_dense`, and of the sum or the product that is dense."""
    kept = int((places_ref(offsets, max_lengths, values.shape[0]) >= 0).sum())
    row = _row_bytes(values, sector)
    bags = offsets[0].shape[0] - 1
    out = bags * prod(max_lengths) * row
    other = {MOVE: 0, ADD: out, MULTIPLY: kept * row}[mode]
    ends = 2 * bags * prod(max_lengths[:-1]) * offsets[-1].itemsize
    return Traffic({"V": kept * row, "OTHER": other, "O": ends}, {"Y": out})


def to_jagged_bytes(
    dense: Tensor, offsets: Sequence[Tensor], total_length: int, mode: int = MOVE, *, sector: int = 1
) -> Traffic:
    """Of `padded_dense_to_jagged`, and of the sum or the product that is jagged; the search is left out."""
    n = len(offsets)
    kept = int((places_ref(offsets, dense.shape[1 : n + 1], total_length) >= 0).sum())
    row = _row_bytes(dense.flatten(0, n), sector)
    other = {MOVE: 0, ADD: total_length * row, MULTIPLY: kept * row}[mode]
    return Traffic(
        {"X": kept * row, "at": 8 * total_length, "OTHER": other}, {"at": 8 * total_length, "Y": total_length * row}
    )


def _row_bytes(rows: Tensor, sector: int) -> int:
    """Of a row, in whole sectors at the worst of the addresses that it may have."""
    nbytes = prod(rows.shape[1:]) * rows.itemsize
    return -(-(nbytes + sector - gcd(sector, nbytes)) // sector) * sector
