"""A row of a table and its optimizer states as one record of bytes, as they lie below the device.

Shapes: records [n, B] uint8; the parts of a record side by side: the row [w] in its type, element states [w] fp32, then
states of the row, one fp32 each. B is a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels.rows import layout_of


@dataclass(frozen=True)
class RecordLayout:
    """Where the parts of a record are: `widths` are columns, None of a state per row."""

    widths: tuple[int | None, ...]
    types: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    bytes: int

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> RecordLayout:
        """The layout of the rows of these parts: [S, w] or [S] each."""
        widths = tuple(part.shape[1] if part.dim() == 2 else None for part in parts)
        types = tuple(part.dtype for part in parts)
        layout = layout_of(parts)
        return cls(widths, types, layout.offsets, layout.nbytes)

    def views(self, records: Tensor) -> list[Tensor]:
        """The parts of records [n, B]: [n, w] or [n] each, in the memory of the records."""
        views = []
        for width, kind, offset in zip(self.widths, self.types, self.offsets, strict=True):
            part = records[:, offset : offset + (width or 1) * kind.itemsize].view(kind)
            views.append(part.squeeze(1) if width is None else part)
        return views

    def empty(self, count: int, *, pinned: bool = False) -> Tensor:
        """Memory for so many records, uint8 [count, bytes], whose unused bytes are zeros."""
        return torch.zeros(count, self.bytes, dtype=torch.uint8, pin_memory=pinned)
