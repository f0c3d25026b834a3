"""The weights of a cached table, or one of its optimizer states, for those who read or write all of it: in chunks.

Nobody needs room for the rows of such a table to save, load or move it: a chunk is as large as `CachedRows.chunks` say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from .cached_rows import CachedRows

if TYPE_CHECKING:
    from ..tables.table_group import TableGroup

# [low, high) of each dimension
Box: TypeAlias = tuple[tuple[int, int], ...]


class RowPart:
    """Part number `part` of the rows of a table of a store, [R, w] or [R]: 0 are the weights, then states.

    It has what a tensor says of itself, and rows as they are when they are asked for.
    """

    def __init__(self, store: CachedRows, table: int, part: int) -> None:
        self.store, self.table, self.part = store, table, part
        layout, group = store.layouts[table], store.group
        assert group is not None
        width = layout.widths[part]
        rows = group.tables[table].rows
        self.shape: tuple[int, ...] = (rows,) if width is None else (rows, width)
        self.dtype = layout.types[part]
        # where `blocks` are
        self.device = torch.device("cpu")

    def dim(self) -> int:
        """As `Tensor.dim`."""
        return len(self.shape)

    def numel(self) -> int:
        """As `Tensor.numel`."""
        return torch.Size(self.shape).numel()

    def blocks(self) -> Iterator[Tensor]:
        """The rows as they are now, chunk by chunk, on the CPU."""
        for begin, end in self.store.chunks(self.table):
            yield self.read(begin, end)

    def read(self, begin: int, end: int) -> Tensor:
        """Rows [begin, end) on the CPU, no more than a chunk has."""
        return self.store.read(self.table, begin, end)[self.part]

    def whole(self) -> Tensor:
        """All rows, in memory of their own on the CPU."""
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        for (begin, end), rows in zip(self.store.chunks(self.table), self.blocks(), strict=True):
            out[begin:end] = rows
        return out

    @torch.no_grad()
    def put(self, box: Box, values: Tensor) -> None:
        """Replace the cells of a box by `values` of its shape, from any device."""
        (first, last), *columns = box
        whole_rows = [(0, n) for n in self.shape[1:]] == columns
        for begin, end in chunks_of(self.store, self.table, first, last):
            rows = values[begin - first : end - first]
            if not whole_rows:
                given, rows = rows, self.read(begin, end)
                rows[:, slice(*columns[0])] = given
            self.store.write(self.table, begin, self._alone(rows))

    def _alone(self, rows: Tensor) -> list[Tensor | None]:
        parts: list[Tensor | None] = [None] * len(self.store.layouts[self.table].widths)
        parts[self.part] = rows
        return parts


def chunks_of(store: CachedRows, table: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Row ranges [begin, end) that cover rows [first, last) of a table, none larger than a chunk."""
    for begin, end in store.chunks(table):
        low, high = max(begin, first), min(end, last)
        if low < high:
            yield low, high


def parts_of(group: TableGroup, table: int) -> Sequence[Tensor | RowPart]:
    """Weights [R, D] and optimizer states, [R] or [R, D], of a table: views where all rows are on the device."""
    if group.is_away and isinstance(group.store, CachedRows):
        return [RowPart(group.store, table, part) for part in range(len(group.store.layouts[table].widths))]
    states = [view for name, view in group.state_views(table).items() if name != "step"]
    return [group.view(table), *states]
