"""Quantized tables of one format in two flat buffers: where each lies, views of it, and its lookups.

Shapes: payload flat uint8, scales flat [all rows * parts]; table t is payload [R_t, row_bytes] and scales [R_t, parts],
views of the two. I [N] ids, O [F*B + 1] offsets, features in the order given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.embeddings.table_layout import LookupFeature
from shardwise.kernels import (
    BoundsCheckMode,
    Feature,
    check_ids,
    new_guard,
    pack_features,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
    row_format,
)

# every table begins on a boundary that serves the widest load
_BOUNDARY = 64


@dataclass(frozen=True)
class QuantizedTable:
    """A table of `rows` x `dim` values as `format` (row_formats.py) stores them."""

    name: str
    rows: int
    dim: int
    format: str

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's payload."""
        return row_format(self.format).row_bytes(self.dim)


class QuantizedTables:
    """Storage and lookups of tables of one format; knows nothing of modules or devices other than its own.

    Zeros until it is filled through `payload_of` and `scales_of`.
    """

    def __init__(
        self,
        tables: Sequence[QuantizedTable],
        features: Sequence[LookupFeature],
        *,
        scale_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        bounds_check: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> None:
        self.tables, self.lookups = list(tables), list(features)
        self.format = row_format(tables[0].format)
        self.bounds_check = bounds_check
        self.dims = [tables[f.table].dim for f in features]
        self.names = [f"feature {f.name!r} (table {tables[f.table].name!r})" for f in features]
        self._bases: list[int] = []
        self._first_rows: list[int] = []
        byte = row = 0
        for table in tables:
            self._bases.append(byte)
            self._first_rows.append(row)
            byte += -(-table.rows * table.row_bytes // _BOUNDARY) * _BOUNDARY
            row += table.rows
        dtype = scale_dtype or self.format.scale_dtype
        self.payload = torch.zeros(byte, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(row * self.format.parts, dtype=dtype, device=device)
        self._place()

    def _place(self) -> None:
        self.features = pack_features(
            [
                Feature(
                    self._bases[f.table],
                    self.tables[f.table].rows,
                    self.tables[f.table].dim,
                    self._first_rows[f.table],
                    f.mean,
                )
                for f in self.lookups
            ],
            self.payload.device,
        )

    def payload_of(self, table: int) -> Tensor:
        """The payload of a table, uint8 [rows, row_bytes], a view."""
        base, shape = self._bases[table], self.tables[table]
        return self.payload[base : base + shape.rows * shape.row_bytes].view(shape.rows, shape.row_bytes)

    def scales_of(self, table: int) -> Tensor:
        """The scales of a table, [rows, parts], a view."""
        first, rows, parts = self._first_rows[table], self.tables[table].rows, self.format.parts
        return self.scales[first * parts : (first + rows) * parts].view(rows, parts)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a move to another device; payload and scales keep their dtypes."""
        self.payload = fn(self.payload)
        scales = fn(self.scales)
        self.scales = scales.to(self.scales.dtype)
        self._place()

    def check(self, ids: Tensor, offsets: Tensor, *, padded: bool = False) -> None:
        """Raise for bad ids or offsets as `shardwise.kernels.check_ids` does, unless the mode says otherwise."""
        if self.lookups and self.bounds_check is not BoundsCheckMode.IGNORE:
            fatal = self.bounds_check is BoundsCheckMode.FATAL
            guard = new_guard(ids.device)
            check_ids(ids, offsets, self.features, guard, names=self.names, fatal=fatal, padded=padded)

    def pooled(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[B, sum of dims]: rows added or averaged per bag."""
        return quantized_pooled_lookup(
            self.payload, self.scales, ids, offsets, per_id_weights, self.features, self.dims, self.format.name, dtype
        )

    def sequence(self, ids: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, dim]: the row of each id."""
        return quantized_sequence_lookup(
            self.payload, self.scales, ids, offsets, self.features, self.dims[0], self.format.name, dtype
        )
