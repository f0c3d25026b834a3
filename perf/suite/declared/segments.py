"""The bytes that segments.py, permute.py and jagged.py declare; letters as there, `sector` as in lookup.py."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from .lookup import Traffic, _in_sectors


def move_segments_bytes(values: Sequence[Tensor], moved: int, *, sector: int = 1) -> Traffic:
    """Of `move_segments`, by V0, V1, ... and Y0, Y1, ...: every moved value once each way; the search is left out.

    Rows also have 8 bytes each way that say where they lie.
    """
    each = [moved * _row(v, sector) for v in values]
    at = 8 * moved * sum(v.dim() > 1 for v in values)
    reads, writes = ({f"{letter}{i}": n for i, n in enumerate(each)} for letter in "VY")
    return Traffic({**reads, "at": at}, {**writes, "at": at})


def collect_segments_bytes(grad: Tensor, size: int, *, sector: int = 1) -> Traffic:
    """Of `collect_segments`: the gradient of every moved value, their sums, and 8 bytes a value for its segment."""
    row = _row(grad, sector)
    return Traffic({"G": grad.shape[0] * row, "segment": 8 * size}, {"Q": size * row, "segment": 8 * size})


def segment_sum_bytes(offsets: Tensor, values: Tensor, *, sector: int = 1) -> Traffic:
    """Of `segment_sum` where every value is in a segment: the values and the offsets, and a row for each segment."""
    row = _row(values, sector)
    return Traffic({"V": values.shape[0] * row, "O": offsets.nbytes}, {"Y": (offsets.shape[0] - 1) * row})


def segment_spread_bytes(sums: Tensor, size: int, *, sector: int = 1) -> Traffic:
    """Of the gradient of `segment_sum`: a row read and written for each value, and 8 bytes that say which."""
    row = size * _row(sums, sector)
    return Traffic({"G": row, "at": 8 * size}, {"Y": row, "at": 8 * size})


def complete_cumsum_bytes(lengths: Tensor) -> Traffic:
    """Of `complete_cumsum`: read once, written once and a 0 for each row."""
    rows = prod(lengths.shape[:-1])
    return Traffic({"L": lengths.nbytes}, {"O": lengths.nbytes + rows * lengths.itemsize})


def invert_permute_bytes(permute: Tensor) -> Traffic:
    """Of `invert_permute`: read once, written once; filled before by torch."""
    return Traffic({"P": permute.nbytes}, {"Q": permute.nbytes})


def offsets_range_bytes(offsets: Tensor, size: int) -> Traffic:
    """Of `offsets_range`, and of `expand_into_jagged_permute`: written once; the search is left out."""
    return Traffic({}, {"at": size * offsets.itemsize})


def _row(values: Tensor, sector: int) -> int:
    """Bytes of a row; of one value where they lie side by side, which share their sectors."""
    nbytes = values.itemsize * prod(values.shape[1:])
    return nbytes if values.dim() == 1 else _in_sectors(nbytes, sector, nbytes)
