"""One buffer of several tables as FBGEMM's state dicts have it: table after table, without room between them.

A `TableGroup` lets tables of equal dim lie side by side and begins each dim on a boundary, so where dims differ its
buffers are laid out otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parts:
    """Where each table's part begins in a buffer, and how many elements it has."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def packed_starts(self) -> list[int]:
        """Where each would begin if they lay one after another."""
        return [0, *accumulate(self.sizes)][:-1]

    @property
    def elements(self) -> int:
        """Of all of them together."""
        return sum(self.sizes)

    def is_packed(self, buffer: Tensor) -> bool:
        """Whether they lie one after another, and fill the buffer."""
        return list(self.starts) == self.packed_starts and buffer.numel() == self.elements

    def pack(self, buffer: Tensor) -> Tensor:
        """One after another, flat: the buffer itself where they lie so already, else a copy."""
        if self.is_packed(buffer):
            return buffer
        flat = buffer.reshape(-1)
        return torch.cat([flat[start : start + size] for start, size in zip(self.starts, self.sizes, strict=True)])

    def fill(self, buffer: Tensor, packed: Tensor) -> None:
        """Write what `pack` gives into a buffer, in place."""
        flat, given = buffer.view(-1), packed.reshape(-1)
        for start, size, before in zip(self.starts, self.sizes, self.packed_starts, strict=True):
            flat[start : start + size].copy_(given[before : before + size])
