"""How tables lie in the flat buffer of a group: what a group is told of them, and where each begins.

Tables of equal dim lie side by side, so that one launch and one sort key serve them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.kernels import Segment, origin_of
from shardwise.kernels.memory import MANY, require_memory

# 64 bytes of fp16: every segment begins on a boundary that serves the widest load
_BOUNDARY = 32


@dataclass(frozen=True)
class TableShape:
    """A table of `rows` x `dim`, of which `slots` rows are on the device at a time (all of them if None).

    It may be a part of a larger one, in which its first element is at row and column `begin`.
    """

    name: str
    rows: int
    dim: int
    slots: int | None = None
    begin: tuple[int, int] = (0, 0)

    @property
    def origin(self) -> int:
        """`begin` as kernels read it."""
        return origin_of(*self.begin)

    @property
    def resident(self) -> int:
        """Rows on the device."""
        return self.rows if self.slots is None else self.slots


@dataclass(frozen=True)
class LookupFeature:
    """A feature of a group: which of its tables it looks up, and whether its bags are averaged."""

    name: str
    table: int
    mean: bool = False


def lay_out(tables: Sequence[TableShape]) -> tuple[list[int], list[int], list[Segment], int]:
    """Base element and first row of each table, the segments of equal dim, and the elements of the flat buffer."""
    bases, first_rows = [0] * len(tables), [0] * len(tables)
    segments: list[Segment] = []
    element = row = 0
    for t in sorted(range(len(tables)), key=lambda t: tables[t].dim):
        if not segments or segments[-1].dim != tables[t].dim:
            element = -(-element // _BOUNDARY) * _BOUNDARY
            segments.append(Segment(tables[t].dim, row, row, element))
        bases[t], first_rows[t] = element, row
        element += tables[t].resident * tables[t].dim
        row += tables[t].resident
        segments[-1] = segments[-1]._replace(end_row=row)
    return bases, first_rows, segments, element


def cuts_of(tables: Sequence[TableShape], segments: Sequence[Segment]) -> list[tuple[Segment, list[int], list[int]]]:
    """Each segment, the tables in the order in which they lie there, and the rows of each."""
    members = [[t for t, table in enumerate(tables) if table.dim == segment.dim] for segment in segments]
    return [(segment, ts, [tables[t].resident for t in ts]) for segment, ts in zip(segments, members, strict=True)]


def require_tables(
    tables: Sequence[TableShape], elements: int, dtype: torch.dtype, device: torch.device, part: str = ""
) -> None:
    """Raise where tables, or a part of them, are larger than the memory of their device.

    Raises:
        MemoryError: on the CPU. torch.OutOfMemoryError: on CUDA.
    """
    if elements > MANY:
        largest = max(tables, key=lambda table: table.resident * table.dim)
        among = f"{len(tables)} tables, the largest of which is " if len(tables) > 1 else ""
        what = f"{part}{among}table {largest.name!r} of {largest.resident} rows x {largest.dim}"
        require_memory(what, (elements,), dtype, device)
