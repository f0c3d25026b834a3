"""Quantized tables of one format in two flat buffers: where each lies, views of it, and its lookups.

Shapes: payload flat uint8, scales flat [all rows * parts]; table t is payload [R_t, row_bytes] and scales [R_t, parts],
views of the two. I [N] ids, O [F*B + 1] offsets, features in the order given. Pruned tables have an index remapping,
int32 [ids of t]: the row of each id, or -1 for an id whose row was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shardwise.embeddings.policy import DEFAULT_POLICY, LookupPolicy
from shardwise.embeddings.tables.id_check import IdCheck
from shardwise.embeddings.tables.table_layout import LookupFeature
from shardwise.kernels import (
    Feature,
    pack_features,
    quantize_rows,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
    row_format,
)
from shardwise.kernels.features import FIRST_ROW, locate_ids
from shardwise.kernels.memory import MANY, require_memory
from shardwise.kernels.row_formats import TABLE_BOUNDARY

# every table begins on a boundary that serves the widest load
_BOUNDARY = 64


@dataclass(frozen=True)
class QuantizedTable:
    """A table of `rows` x `dim` values as `format` (row_formats.py) stores them.

    A pruned table takes more `ids` than it has rows; else ids are rows.
    """

    name: str
    rows: int
    dim: int
    format: str
    ids: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's payload."""
        return row_format(self.format).row_bytes(self.dim)


class QuantizedTables:
    """Storage and lookups of tables of one format; knows nothing of modules or devices other than its own.

    Zeros until it is filled through `payload_of` and `scales_of`; the remapping of a pruned table keeps its first rows
    until `remapping_of` is given another. Either all tables are pruned or none.
    """

    def __init__(
        self,
        tables: Sequence[QuantizedTable],
        features: Sequence[LookupFeature],
        *,
        scale_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        policy: LookupPolicy = DEFAULT_POLICY,
    ) -> None:
        self.tables, self.lookups = list(tables), list(features)
        self.format = row_format(tables[0].format)
        self.policy = policy
        self.keys = [f.name for f in features]
        self.dims = [tables[f.table].dim for f in features]
        self.names = [f"feature {f.name!r} (table {tables[f.table].name!r})" for f in features]
        spaces = [-(-table.rows * table.row_bytes // _BOUNDARY) * _BOUNDARY for table in tables]
        *self._bases, payload_bytes = accumulate(spaces, initial=0)
        *self._first_rows, rows = accumulate((table.rows for table in tables), initial=0)
        *self._first_ids, ids = accumulate((table.ids or 0 for table in tables), initial=0)
        dtype = scale_dtype or self.format.scale_dtype
        if payload_bytes > MANY:
            largest = max(self.tables, key=lambda table: table.rows * table.dim)
            what = f"{len(tables)} quantized tables, the largest of which is {largest.name!r} of {largest.rows} rows"
            require_memory(what, (payload_bytes,), torch.uint8, device)
        self.payload = torch.zeros(payload_bytes, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(rows * self.format.parts, dtype=dtype, device=device)
        self.remapping = torch.empty(ids, dtype=torch.int32, device=device) if self.is_pruned else None
        self._keep_first_rows()
        self._place()

    @property
    def is_pruned(self) -> bool:
        """Whether ids are remapped to rows."""
        return any(table.ids is not None for table in self.tables)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.payload.device

    def _keep_first_rows(self) -> None:
        for t, table in enumerate(self.tables if self.is_pruned else ()):
            row = torch.arange(self.remapping_of(t).shape[0], dtype=torch.int32, device=self.device)
            self.remapping_of(t).copy_(torch.where(row < table.rows, row, -1))

    def _place(self) -> None:
        """What lookups need beside the tables, on their device."""
        spec = [
            Feature(
                self._bases[f.table],
                self.tables[f.table].rows,
                self.tables[f.table].dim,
                self._first_rows[f.table],
                f.mean,
            )
            for f in self.lookups
        ]
        self.features = pack_features(spec, self.device, boundary=TABLE_BOUNDARY)
        # ids are checked, and remapped, by their own numbers
        by_ids = [
            one._replace(rows=self.tables[f.table].ids or 0, first_row=self._first_ids[f.table])
            for one, f in zip(spec, self.lookups, strict=True)
        ]
        checked = pack_features(by_ids, self.device) if self.is_pruned else self.features
        # called with the ids and offsets of every batch before its lookup
        self.check = IdCheck(self.names, checked, self.policy)

    def payload_of(self, table: int) -> Tensor:
        """The payload of a table, uint8 [rows, row_bytes], a view."""
        base, shape = self._bases[table], self.tables[table]
        return self.payload[base : base + shape.rows * shape.row_bytes].view(shape.rows, shape.row_bytes)

    def scales_of(self, table: int) -> Tensor:
        """The scales of a table, [rows, parts], a view."""
        first, rows, parts = self._first_rows[table], self.tables[table].rows, self.format.parts
        return self.scales[first * parts : (first + rows) * parts].view(rows, parts)

    def remapping_of(self, table: int) -> Tensor:
        """The row of each id of a pruned table, int32 [ids], a view."""
        assert self.remapping is not None
        return self.remapping[self._first_ids[table] :][: self.tables[table].ids]

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a move to another device, `nn.Module._apply`'s say; payload and scales keep their dtypes.

        Raises:
            TypeError: the move changes the dtype of integers too, as `module.type(dtype)` does.
        """
        planes = [self.payload, self.scales, *([] if self.remapping is None else [self.remapping])]
        # scales go as bytes: `.half()` and its like are about tensors that are trained
        moved = [fn(plane.view(torch.uint8)) for plane in planes]
        if any(plane.dtype != torch.uint8 for plane in moved):
            raise TypeError(f"quantized tables stay {self.format.name}: quantize the float tables to another dtype")
        payload, scales, *remapping = [new.view(old.dtype) for new, old in zip(moved, planes, strict=True)]
        comes_to_life = self.payload.is_meta and not payload.is_meta
        self.payload, self.scales, self.remapping = payload, scales, remapping[0] if remapping else None
        if comes_to_life:
            self._keep_first_rows()
        self._place()

    def pooled(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """[B, sum of dims]: rows added or averaged per bag."""
        weights = None if per_id_weights is None else per_id_weights.detach()
        return quantized_pooled_lookup(
            self.payload, self.scales, self._rows_of(ids, offsets), offsets, weights,
            self.features, self.dims, self.format.name, dtype,
        )  # fmt: skip

    def sequence(self, ids: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, dim]: the row of each id."""
        return quantized_sequence_lookup(
            self.payload, self.scales, self._rows_of(ids, offsets), offsets,
            self.features, self.dims[0], self.format.name, dtype,
        )  # fmt: skip

    def _rows_of(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """The row of each id: itself, or what the remapping says, -1 where there is none."""
        if self.remapping is None:
            return ids
        _, feature, is_known = locate_ids(ids, offsets, self.check.features)
        at = torch.where(is_known, ids + self.check.features[feature, FIRST_ROW], 0)
        return torch.where(is_known, self.remapping[at], -1)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "check" not in state:
            # pickled before checks were objects
            self.check = IdCheck(self.names, state["checked"], self.policy)


TableWeights: TypeAlias = tuple[Tensor, Tensor | None]
"""Payload, uint8 [R, row bytes], and scales, or None of a format that has none."""


def quantized_rows(
    name: str, rows: Tensor, format: str, scale_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Payload uint8 [R, row_bytes] and scales [R, parts] of a table's float rows [R, D]; on meta as empty as those.

    Raises:
        ValueError: a row is not finite, or the format cannot hold it; names the table and the row.
    """
    try:
        return quantize_rows(rows.detach(), format, scale_dtype)
    except ValueError as error:
        raise ValueError(f"table {name!r}: {error}") from None


def scales_as(scales: Tensor | None, table: QuantizedTable, dtype: torch.dtype) -> Tensor:
    """Given scales as [rows, parts] of `dtype`; they may be bytes, uint8 [rows, parts * itemsize], or None for 0 parts.

    Raises:
        ValueError: shape or dtype are not the table's; names it.
    """
    parts = row_format(table.format).parts
    if scales is None and parts == 0:
        return torch.empty(table.rows, 0, dtype=dtype)
    if scales is not None:
        found = scales.contiguous().view(dtype) if scales.dtype == torch.uint8 else scales
        if found.dtype == dtype and found.shape == (table.rows, parts):
            return found
    got = "None" if scales is None else f"{scales.dtype} {list(scales.shape)}"
    raise ValueError(
        f"table {table.name!r}: the scales of {table.format} rows are {dtype} [{table.rows}, {parts}], got {got}"
    )
