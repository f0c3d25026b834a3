"""Reuse distances: how many other rows were wanted since a row was last wanted, for all rows of a batch at once.

The rows that were ever wanted form a stack, the latest on top; the rows of one batch come onto it in their order. A row
that lies at depth d (0 is the top) before a batch is a hit of every LRU cache of more than d slots that can hold the
batch, and a miss of all smaller ones: one pass over a trace gives the hits of caches of all sizes (Mattson et al.,
Evaluation techniques for storage hierarchies, 1970). Rows of a batch are wanted together: none pushes another down.

With numba (the extra `cpu`) depths are counted by a Fenwick tree over the times of last use, in some 0.1 us a row;
without it the stack is made anew for each batch, in time proportional to the rows ever wanted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import numba_loops

# times that there is room for at least, so that small tables do not renumber all the time
_LEAST = 1 << 12


class ReuseStack:
    """The rows of a table by when they were last wanted.

    Args:
        rows: R, of the table.

    Raises:
        ValueError: R is not positive.
    """

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise ValueError(f"ReuseStack: rows must be positive, got {rows}")
        self.rows, self.wanted = rows, 0
        self._loops = numba_loops.loops("reuse_loops", "rows")
        if self._loops is None:
            # rows from the bottom of the stack to its top, and the place of each [R], -1 outside it
            self._stack = torch.zeros(0, dtype=torch.int64)
            self._place = torch.full((rows,), -1, dtype=torch.int64)
        else:
            self._last = torch.full((rows,), -1, dtype=torch.int64)
            self._now, self._bits = 0, torch.zeros(0, dtype=torch.int64)
            self._renumber(0)

    def touch(self, rows: Tensor) -> Tensor:
        """The depth of each row [N] int64 before this batch, -1 of one that was never wanted; then they lie on top.

        Args:
            rows: [N] int64 on the CPU, distinct, in the table.

        Raises:
            ValueError: they are of another type or shape, or leave the table.
        """
        if rows.dtype != torch.int64 or rows.dim() != 1 or rows.is_cuda:
            raise ValueError(f"ReuseStack: rows must be [N] int64 on the CPU, got {[*rows.shape]} {rows.dtype}")
        if not rows.numel():
            return torch.zeros(0, dtype=torch.int64)
        low, high = (int(edge) for edge in torch.aminmax(rows))
        if low < 0 or high >= self.rows:
            raise ValueError(f"ReuseStack: row {low if low < 0 else high} is not one of the table's {self.rows}")
        return self._touch_by_stack(rows) if self._loops is None else self._touch_by_tree(rows.contiguous())

    def _touch_by_stack(self, rows: Tensor) -> Tensor:
        place = self._place[rows]
        depths = torch.where(place >= 0, self.wanted - 1 - place, -1)
        keep = torch.ones(self.wanted, dtype=torch.bool)
        keep[place[place >= 0]] = False
        self._stack = torch.cat([self._stack[keep], rows])
        self.wanted = self._stack.numel()
        self._place[self._stack] = torch.arange(self.wanted)
        return depths

    def _touch_by_tree(self, rows: Tensor) -> Tensor:
        count = rows.numel()
        if self._now + count > 64 * self._bits.numel():
            self._renumber(count)
        depths = torch.empty_like(rows)
        tensors = (rows, self._last, self._bits, self._tree, depths)
        self.wanted = self._loops.touch(
            *(tensor.data_ptr() for tensor in tensors), count, self._bits.numel(), self._now, self.wanted
        )
        self._now += count
        return depths

    def _renumber(self, coming: int) -> None:
        """Give the rows of the stack the times 0, 1, ... in their order, and room for twice as many more."""
        held = torch.nonzero(self._last >= 0).flatten()
        by_time = torch.full((64 * self._bits.numel(),), -1, dtype=torch.int64)
        by_time[self._last[held]] = held
        held = by_time[by_time >= 0]
        self._now = held.numel()
        self._last[held] = torch.arange(self._now)
        blocks = -(-max(_LEAST, 3 * self._now + 2 * coming) // 64)
        self._bits = torch.zeros(blocks, dtype=torch.int64)
        self._tree = torch.zeros(blocks + 1, dtype=torch.int32)
        self._loops.fill(self._bits.data_ptr(), self._tree.data_ptr(), blocks, self._now)
