"""Tables and batches of ids for checks of lookups and updates, small, seeded, with what is odd in them.

Letters: W flat tables, F features, B bags of each, R rows, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwise.kernels import Feature, Segment, flatten_segments, pack_features


@dataclass(frozen=True)
class Batch:
    """Tables (rows, dim), features (table, averaged) over them, and bags of `lengths` (fewest, most) ids.

    `hot` is the part of the ids that are row 0, `shifted` tables begin 1 element past 16 bytes, and `last` makes every
    id the last row of its table. Gradients are multiples of 1/8, and so are per-id weights: their sums are exact.
    """

    tables: tuple[tuple[int, int], ...] = ((9, 128), (7, 128))
    features: tuple[tuple[int, bool], ...] = ((0, False), (1, False))
    bags: int = 5
    lengths: tuple[int, int] = (0, 6)
    dtype: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    ids: torch.dtype = torch.int64
    offsets: torch.dtype = torch.int64
    weighted: bool = False
    shifted: bool = False
    hot: float = 0.0
    last: bool = False
    seed: int = 0

    def random(self, seed: int) -> torch.Generator:
        """A source of numbers of this batch's own."""
        return torch.Generator().manual_seed(1000 * self.seed + seed)

    @cached_property
    def places(self) -> tuple[list[int], list[int], list[Segment], int]:
        """Bases and first rows of the tables, the segments of equal dim, and elements in all."""
        bases, first_rows = [0] * len(self.tables), [0] * len(self.tables)
        segments, element, row = [], 0, 0
        for dim in sorted({dim for _, dim in self.tables}):
            element = -(-element // 8) * 8
            begin, first = element, row
            for t, (rows, columns) in enumerate(self.tables):
                if columns == dim:
                    bases[t], first_rows[t] = element, row
                    element, row = element + rows * dim, row + rows
            segments.append(Segment(dim, first, row, begin))
        return bases, first_rows, segments, element

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(rows for rows, _ in self.tables)

    @property
    def dims(self) -> list[int]:
        """Columns of each feature."""
        return [self.tables[t][1] for t, _ in self.features]

    @property
    def pooling(self) -> str:
        """As ops take it."""
        return "mean" if any(mean for _, mean in self.features) else "sum"

    @property
    def segments(self) -> list[int]:
        """As ops take them."""
        return flatten_segments(self.places[2])

    @property
    def table_features(self) -> Tensor:
        """The features [F, 8]."""
        bases, first_rows, _, _ = self.places
        listed = [Feature(bases[t], *self.tables[t], first_rows[t], mean) for t, mean in self.features]
        return pack_features(listed)

    def weights(self) -> Tensor:
        """The flat tables, new each time; what is between them is NaN."""
        _, _, segments, elements = self.places
        whole = torch.full((elements + 9,), float("nan"))
        flat = whole[1 : elements + 1] if self.shifted else whole[:elements]
        for segment in segments:
            part = flat[segment.base : segment.base + (segment.end_row - segment.first_row) * segment.dim]
            part.copy_(torch.randn(len(part), generator=self.random(1)))
        made = whole.to(self.dtype)
        return made[1 : elements + 1] if self.shifted else made[:elements]

    def bag_ids(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids [N], offsets [F * B + 1] and per-id weights [N] or None."""
        generator = self.random(2)
        low, high = self.lengths
        lengths = torch.randint(low, high + 1, (len(self.features), self.bags), generator=generator)
        parts = []
        for f, (t, _) in enumerate(self.features):
            rows, count = self.tables[t][0], int(lengths[f].sum())
            ids = torch.randint(0, rows, (count,), generator=generator)
            ids[torch.rand(count, generator=generator) < self.hot] = 0
            parts.append(torch.full_like(ids, rows - 1) if self.last else ids)
        ids = torch.cat(parts)
        offsets = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)])
        weights = torch.randint(1, 9, (len(ids),), generator=generator) / 8 if self.weighted else None
        return ids.to(self.ids), offsets.to(self.offsets), weights

    def gradient(self) -> Tensor:
        """Of the pooled output [B, sum of dims], or with one feature a row for each id."""
        return self._eighths(self.bags, sum(self.dims))

    def row_gradient(self) -> Tensor:
        """Of the rows of a sequence lookup [N, D]."""
        return self._eighths(len(self.bag_ids()[0]), self.dims[0])

    def _eighths(self, *shape: int) -> Tensor:
        return (torch.randint(-16, 17, shape, generator=self.random(3)) / 8).to(self.output)
