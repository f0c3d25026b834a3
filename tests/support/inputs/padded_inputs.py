"""Jagged values for the tests of padded tensors: as nested lists, and as the ops take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Nested = list[Any]


@dataclass(frozen=True)
class Case:
    """Lengths of the bags of each jagged dim, extents of the dense, what is in a value, and values in no bag."""

    name: str
    lengths: tuple[tuple[int, ...], ...]
    extents: tuple[int, ...]
    row: tuple[int, ...] = (3,)
    past: int = 0
    ends: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float32

    @property
    def total(self) -> int:
        return sum(self.lengths[-1]) + self.past

    def offsets(self, device: torch.device | str = "cpu") -> list[Tensor]:
        return [offsets_of(lengths, self.ends).to(device) for lengths in self.lengths]

    def values(self, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
        return self._draw((self.total, *self.row), seed).to(device)

    def dense(self, device: torch.device | str = "cpu", seed: int = 1) -> Tensor:
        return self._draw((len(self.lengths[0]), *self.extents, *self.row), seed).to(device)

    def _draw(self, shape: Sequence[int], seed: int) -> Tensor:
        # small whole numbers: each sum and product of two is exact in every dtype
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-9, 10, list(shape), generator=generator).to(self.dtype)


CASES = [
    Case("cut and filled", ((3, 0, 2, 5),), (4,)),
    Case("none cut", ((3, 0, 2, 5),), (6,)),
    Case("numbers", ((3, 0, 2, 5),), (4,), row=()),
    Case("numbers, none cut", ((3, 1, 2),), (3,), row=()),
    Case("past the last offset", ((3, 0, 2),), (2,), past=3),
    Case("numbers past the last offset", ((3, 0, 2),), (2,), row=(), past=2),
    Case("int32 offsets", ((1, 4, 2),), (3,), row=(4,), ends=torch.int32),
    Case("no bags", ((),), (3,)),
    Case("empty bags", ((0, 0),), (3,)),
    Case("extent 0", ((2, 1),), (0,)),
    Case("dim 0", ((2, 1),), (2,), row=(0,)),
    Case("two dims in a value", ((2, 1),), (2,), row=(2, 3)),
    Case("dim 128", ((2, 1),), (2,), row=(128,)),
    Case("2 jagged dims", ((2, 0, 3), (1, 2, 0, 3, 1)), (2, 2)),
    Case("2 jagged dims of numbers", ((2, 0, 3), (1, 2, 0, 3, 1)), (2, 2), row=(), past=1),
    Case("2 jagged dims, none cut", ((2, 1), (1, 2, 3)), (2, 3), row=(4,)),
    Case("2 jagged dims, no inner bags", ((0, 0), ()), (2, 2)),
    Case("inner extent 0", ((2, 1), (1, 1, 1)), (0, 2)),
    Case("3 jagged dims", ((2, 1), (1, 2, 1), (2, 1, 0, 3)), (2, 2, 2), row=(2,), ends=torch.int32),
    Case("5 jagged dims", ((2, 1), (1, 2, 1), (1, 1, 1, 1), (1, 0, 2, 1), (2, 1, 0, 3)), (2, 2, 1, 2, 2), row=(2,)),
    Case("fp64", ((3, 1),), (2,), dtype=torch.float64),
    Case("fp16", ((3, 1),), (2,), row=(6,), dtype=torch.float16),
    Case("bf16", ((3, 1),), (2,), row=(8,), dtype=torch.bfloat16),
    Case("int64", ((3, 1),), (2,), row=(), dtype=torch.int64),
    Case("int32", ((3, 1),), (2,), dtype=torch.int32),
    Case("int8", ((3, 1),), (2,), dtype=torch.int8),
]


def offsets_of(lengths: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(dtype)


def nested(values: Sequence[Any], lengths: Sequence[Sequence[int]]) -> Nested:
    """Values as lists in lists: a list for each bag of each jagged dim."""
    things = list(values)
    for counts in reversed(lengths):
        rest = iter(things)
        things = [[next(rest) for _ in range(count)] for count in counts]
    return things


def padded(bags: Nested, extents: Sequence[int], filling: Any) -> Nested:
    """Lists of equal length: each bag cut, or filled up."""
    if not extents:
        return bags
    most, *inner = extents

    def empty(sizes: Sequence[int]) -> Any:
        return [empty(sizes[1:]) for _ in range(sizes[0])] if sizes else filling

    return [
        [padded([thing], inner, filling)[0] for thing in bag[:most]] + [empty(inner)] * max(0, most - len(bag))
        for bag in bags
    ]


def held(dense: Any, bags: Any, levels: int, nothing: Any) -> list[Any]:
    """What nested lists of equal length hold for each value of the bags, in order; `nothing` for what they do not."""
    if levels == 0:
        return [nothing if dense is None else dense]
    inside = [] if dense is None else dense
    found: list[Any] = []
    for i, bag in enumerate(bags):
        found += held(inside[i] if i < len(inside) else None, bag, levels - 1, nothing)
    return found
