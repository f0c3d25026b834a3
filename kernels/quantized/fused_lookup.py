"""Lookups of fused rows: rows that hold their scales themselves, in tables of any formats and dims in one buffer.

Shapes: W flat uint8 buffer of all tables, I [N] row ids, O [F*B + 1] bag offsets, P [N] per-id weights, FT [F, 8] of
`FusedTables`, Y [B, sum of dims] or [N, D]. A row is its scale and its bias in fp16 if the format has them, then its
numbers as in row_formats.py, then what fills it up to the stride of its table. This is how FBGEMM's inference tables
keep rows.
Bytes moved: as in pooled_lookup.py and sequence_lookup.py, with 4 bytes of scales. On CUDA a pooled lookup first writes
the rows of its ids as fp32, N * D * 4 bytes more each way, and reads these as a table of their own.

The id -1 stands for a row that was pruned and counts as none. So does any other id outside its table on CUDA; on the
CPU that raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from shardwise.errors import RefusedIndexError

from .._op import runs_kernel
from ..cpu.quantized_lookup import fused_loops, in_parts
from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    HEAD,
    KIND,
    ROWS,
    STRIDE,
    Feature,
    batch_size,
    column_offsets,
    pack_features,
    same_length,
)
from ..row_formats import dequantize_rows_ref, row_format
from .pooled_lookup import quantized_pooled_lookup
from .sequence_lookup import gather_values

# bytes of a scale and a bias
SCALES = 4
MINIFLOAT = "minifloat"
"""The format of 8-bit floats without scales, whose exponent is as the caller says."""
# numbers of the formats, as the loops know them
_KINDS = {"int8": 0, "int4": 1, "int2": 2, "fp16": 4, "fp32": 6, MINIFLOAT: 7}
_ELSEWHERE = 8


@dataclass(frozen=True)
class FusedTable:
    """A feature's table: rows of `stride` bytes from byte `base` on. Without a base it is in another buffer."""

    format: str
    rows: int
    dim: int
    stride: int
    base: int | None = 0

    @property
    def head(self) -> int:
        """Bytes of scales in front of a row's numbers."""
        return 0 if self.format == MINIFLOAT or not row_format(self.format).parts else SCALES

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, without what fills it up."""
        return self.head + (self.dim if self.format == MINIFLOAT else row_format(self.format).row_bytes(self.dim))


@dataclass(frozen=True)
class FusedTables:
    """The tables of F features in one buffer. `minifloat` are bits of the exponent and its bias."""

    tables: tuple[FusedTable, ...]
    minifloat: tuple[int, int] = (4, 7)

    @cached_property
    def dims(self) -> list[int]:
        """[F]"""
        return [table.dim for table in self.tables]

    @cached_property
    def features(self) -> Tensor:
        """int64 [F, 8] on the CPU, as the loops read it."""
        columns, rows = column_offsets(self.dims), torch.zeros(len(self.tables), FIELDS, dtype=torch.int64)
        for f, table in enumerate(self.tables):
            numbers = {BASE: table.base or 0, ROWS: table.rows, DIM: table.dim, COLUMN: columns[f]}
            numbers |= {STRIDE: table.stride, HEAD: table.head}
            numbers[KIND] = _ELSEWHERE if table.base is None else _KINDS[table.format]
            for column, number in numbers.items():
                rows[f, column] = number
        return rows

    @cached_property
    def minifloats(self) -> Tensor:
        """fp32 [256] on the CPU."""
        return minifloat_values(*self.minifloat)

    @cached_property
    def groups(self) -> list[tuple[str, int]]:
        """Formats and dims that there are."""
        return sorted({(table.format, table.dim) for table in self.tables if table.base is not None})

    @cached_property
    def aligned(self) -> bool:
        """Whether Triton can load scales, and values of float formats, where they are."""
        for table in self.tables:
            width = SCALES if table.head or table.format == MINIFLOAT else row_format(table.format).bits // 8
            if table.format != MINIFLOAT and ((table.base or 0) % width or table.stride % width):
                return False
        return True

    def on(self, device: torch.device) -> _OnDevice:
        """What kernels read, on that device."""
        return _on_device(self, device)


def minifloat_values(exponent_bits: int, exponent_bias: int) -> Tensor:
    """fp32 [256]: the values of 8-bit floats of that many bits of exponent and that bias, none of them infinite."""
    codes = torch.arange(256, dtype=torch.int32)
    magnitude = ((codes & 0x7F) << (16 + exponent_bits)).view(torch.float32)
    # the exponent of fp32 counts from 127
    scale = torch.tensor((254 - exponent_bias) << 23, dtype=torch.int32).view(torch.float32)
    return torch.where(codes >= 128, -1.0, 1.0) * (magnitude * scale)


def fused_pooled_lookup(
    fused: Tensor,
    tables: FusedTables,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None = None,
    *,
    mean: bool = False,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Look ids up in tables of fused rows and pool them per bag: [B, sum of dims], accumulated in fp32.

    Shapes: fused flat uint8, indices [N], offsets [F*B + 1], per_id_weights [N] or None. A mean is over all ids of a
    bag, those of pruned rows too. Columns of tables of another buffer are zeros.

    Raises:
        IndexError: an id is neither -1 nor in its table (CPU).
        ValueError: offsets do not divide among the features, or there are more or fewer weights than ids.
    """
    batch = batch_size(offsets, len(tables.tables))
    same_length(per_id_weights, indices)
    weights = None if per_id_weights is None else per_id_weights.float().contiguous()
    if not batch:
        return torch.zeros(0, sum(tables.dims), dtype=output_dtype, device=fused.device)
    if runs_kernel(fused) and tables.aligned:
        return _pooled_by_kernels(fused, tables, indices, offsets, weights, mean, output_dtype)
    loops = None if fused.is_cuda else fused_loops()
    out = torch.empty(batch, sum(tables.dims), dtype=torch.float32, device=fused.device)
    if loops is None:
        _pool_by_torch(out, fused, tables, (indices, offsets, weights), mean)
        return out.to(output_dtype)
    fused, indices, offsets = fused.contiguous(), indices.contiguous(), offsets.contiguous()
    loop = partial(
        loops.pool_fused, fused.data_ptr(), indices.data_ptr(), indices.itemsize, indices.shape[0], offsets.data_ptr(),
        offsets.itemsize, 0 if weights is None else weights.data_ptr(), tables.features.data_ptr(),
        tables.minifloats.data_ptr(), batch, out.data_ptr(), out.shape[1], int(mean),
    )  # fmt: skip
    bags = batch * len(tables.tables)
    _raise_for(in_parts(loop, bags, indices.shape[0] * max(tables.dims) + out.numel()), indices, offsets, tables)
    return out.to(output_dtype)


def fused_sequence_lookup(
    fused: Tensor,
    tables: FusedTables,
    indices: Tensor,
    offsets: Tensor,
    *,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The row of each id from tables of fused rows of one dim: [N, D]; zeros for ids that count as none.

    Shapes and errors as in `fused_pooled_lookup`; rows past the last offset are zeros.
    """
    dim, batch = _one_dim(tables), batch_size(offsets, len(tables.tables))
    if not batch or not indices.shape[0]:
        return torch.zeros(indices.shape[0], dim, dtype=output_dtype, device=fused.device)
    if runs_kernel(fused) and tables.aligned:
        return _sequence_by_kernels(fused, tables, indices, offsets, output_dtype)
    loops = None if fused.is_cuda else fused_loops()
    if loops is None:
        out = torch.zeros(indices.shape[0], dim, device=fused.device)
        _gather_by_torch(out, fused, tables, indices, offsets)
        return out.to(output_dtype)
    out = torch.empty(indices.shape[0], dim, device=fused.device)
    fused, indices, offsets = fused.contiguous(), indices.contiguous(), offsets.contiguous()
    loop = partial(
        loops.gather_fused, fused.data_ptr(), indices.data_ptr(), indices.itemsize, indices.shape[0],
        offsets.data_ptr(), offsets.itemsize, tables.features.data_ptr(), len(tables.tables),
        tables.minifloats.data_ptr(), batch, out.data_ptr(), dim,
    )  # fmt: skip
    _raise_for(in_parts(loop, indices.shape[0], out.numel()), indices, offsets, tables)
    return out.to(output_dtype)


def fused_rows(fused: Tensor, tables: FusedTables, indices: Tensor, offsets: Tensor) -> Tensor:
    """The rows themselves, scales in front and not filled up: uint8 [N, row_bytes]; zeros for ids that count as none.

    All tables have one format and one dim.

    Raises:
        ValueError: they do not.
    """
    widths = sorted({table.row_bytes for table in tables.tables})
    if len(widths) != 1:
        raise ValueError(f"rows have to be equally long to be copied, got rows of {widths} bytes")
    if not indices.shape[0] or not batch_size(offsets, len(tables.tables)):
        return torch.zeros(indices.shape[0], widths[0], dtype=torch.uint8, device=fused.device)
    where = _Where(tables.on(fused.device), indices, offsets)
    if not fused.is_cuda:
        where.require_good(indices, offsets, tables)
    return _bytes_at(fused, where.begins, where.valid, widths[0])


def _one_dim(tables: FusedTables) -> int:
    if len(set(tables.dims)) != 1:
        raise ValueError(f"tables of a sequence have one dim, got {tables.dims}")
    return tables.dims[0]


def _raise_for(bad: Sequence[int], indices: Tensor, offsets: Tensor, tables: FusedTables) -> None:
    """IndexError for the first of these positions of bad ids, which are -1 where there is none."""
    positions = [position for position in bad if position >= 0]
    if not positions:
        return
    position = min(positions)
    batch = batch_size(offsets, len(tables.tables))
    feature, sample = divmod(int(torch.searchsorted(offsets[1:].contiguous(), position, right=True)), batch)
    rows = tables.tables[feature].rows
    raise RefusedIndexError(
        f"feature {feature}, sample {sample}: id {int(indices[position])} is outside [0, {rows}) and not -1, the id of"
        " a pruned row"
    )


class _OnDevice:
    """Features and values on a device."""

    def __init__(self, tables: FusedTables, device: torch.device) -> None:
        self.features = tables.features.to(device)
        self.minifloats = tables.minifloats.to(device)
        group = {each: g for g, each in enumerate(tables.groups)}
        groups = [-1 if t.base is None else group[t.format, t.dim] for t in tables.tables]
        # group of each feature, and columns of the groups before it
        self.groups = torch.tensor(groups).to(device)
        before = column_offsets([dim for _, dim in tables.groups])
        self.columns_before = torch.tensor([before[max(g, 0)] for g in groups]).to(device)
        # rows of values, one for each id: bases and rows depend on the batch
        values = [Feature(0, 0, dim, 0) for dim in tables.dims]
        self.values, self.means = (
            pack_features([each._replace(mean=mean) for each in values], device) for mean in (False, True)
        )


@lru_cache(maxsize=64)
def _on_device(tables: FusedTables, device: torch.device) -> _OnDevice:
    return _OnDevice(tables, device)


class _Where:
    """Of each position: its feature, whether its id is in the feature's table, and the byte where its row begins."""

    def __init__(self, device: _OnDevice, indices: Tensor, offsets: Tensor) -> None:
        count = device.features.shape[0]
        batch = batch_size(offsets, count)
        self.positions = torch.arange(indices.shape[0], device=indices.device)
        ends = offsets[batch::batch].long().contiguous()  # [F]
        feature = torch.searchsorted(ends, self.positions, right=True)
        # past the last offset, before the first, or in another buffer
        self.live = (feature < count) & (self.positions >= offsets[0])
        self.feature = feature.clamp(max=count - 1)
        self.live &= device.features[self.feature, KIND] != _ELSEWHERE
        self.ids = indices.long()
        self.valid = self.live & (self.ids >= 0) & (self.ids < device.features[self.feature, ROWS])
        own = device.features[self.feature]
        self.begins = torch.where(self.valid, own[:, BASE] + self.ids * own[:, STRIDE], -1)

    def require_good(self, indices: Tensor, offsets: Tensor, tables: FusedTables) -> None:
        """Raise for the first bad id; reads on the host."""
        bad = self.live & ~self.valid & (self.ids != -1)
        _raise_for(self.positions[bad][:1].tolist(), indices, offsets, tables)


def _bytes_at(fused: Tensor, begins: Tensor, valid: Tensor, width: int) -> Tensor:
    """[N, width] bytes from each beginning on; zeros where there is none."""
    at = begins.clamp(min=0)[:, None] + torch.arange(width, device=fused.device)
    if not fused.shape[0]:
        return torch.zeros(begins.shape[0], width, dtype=torch.uint8, device=fused.device)
    # a row that is not valid is read at the buffer's beginning
    rows = fused[at.clamp(max=fused.shape[0] - 1)]
    return torch.where(valid[:, None], rows, 0)


def _group_values(fused: Tensor, tables: FusedTables, where: _Where, group: int, output_dtype: torch.dtype) -> Tensor:
    """Values [N, dim] of the positions of a group; zeros for all others."""
    format, dim = tables.groups[group]
    device = tables.on(fused.device)
    here = where.valid & (device.groups[where.feature] == group)
    if format == MINIFLOAT:
        codes = _bytes_at(fused, where.begins, here, dim)
        return torch.where(here[:, None], device.minifloats[codes.long()], 0).to(output_dtype)
    kind = row_format(format)
    head, unit = (SCALES, 1) if kind.parts else (0, kind.bits // 8)
    strides = [t.stride | (t.base or 0) for t in tables.tables if (t.format, t.dim) == (format, dim)]
    begins = torch.where(here, (where.begins + head) // unit, -1)
    # scales count in pairs
    pairs = torch.where(here, where.begins // SCALES, 0)
    alignment = min((number & -number for number in strides if number), default=16)
    return gather_values(fused, begins, pairs, dim, format, min(alignment, head or 16), output_dtype)


def _pooled_by_kernels(
    fused: Tensor,
    tables: FusedTables,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    mean: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    """Rows as values in tables of their own, one for each format and dim, then a lookup of these; waits for nothing."""
    # tables begin on 16 bytes
    rows = -(-max(indices.shape[0], 1) // 4) * 4
    widths = [dim for _, dim in tables.groups]
    values = torch.empty(rows * max(sum(widths), 1), dtype=torch.float32, device=fused.device)
    where = _Where(tables.on(fused.device), indices, offsets)
    for group, (dim, before) in enumerate(zip(widths, column_offsets(widths), strict=False)):
        part = values[rows * before : rows * (before + dim)].view(rows, dim)
        part[: indices.shape[0]] = _group_values(fused, tables, where, group, torch.float32)
    device = tables.on(fused.device)
    features = (device.means if mean else device.values).clone()
    features[:, BASE] = device.columns_before * (rows * 4)
    features[:, ROWS] = rows
    ids = torch.where(where.valid, where.positions, -1)
    scales = values.new_empty(0, dtype=torch.float16)
    payload = values.view(torch.uint8)
    return quantized_pooled_lookup(payload, scales, ids, offsets, weights, features, tables.dims, "fp32", output_dtype)


def _sequence_by_kernels(
    fused: Tensor, tables: FusedTables, indices: Tensor, offsets: Tensor, output_dtype: torch.dtype
) -> Tensor:
    device = tables.on(fused.device)
    where = _Where(device, indices, offsets)
    out = torch.zeros(indices.shape[0], _one_dim(tables), dtype=output_dtype, device=fused.device)
    for group in range(len(tables.groups)):
        values = _group_values(fused, tables, where, group, output_dtype)
        # a group's rows are zeros where another group has its own
        out = torch.where(device.groups[where.feature, None] == group, values, out) if group else values
    return out


def _values_of(fused: Tensor, tables: FusedTables, table: FusedTable, ids: Tensor) -> Tensor:
    """Values [n, dim] of a table's rows."""
    begin = table.base or 0
    rows = fused[begin : begin + table.rows * table.stride].view(table.rows, table.stride).index_select(0, ids)
    payload = rows[:, table.head : table.row_bytes].contiguous()
    if table.format == MINIFLOAT:
        return tables.on(fused.device).minifloats[payload.long()]
    # copies, as a view of another dtype begins at a multiple of its size
    scales = rows[:, : table.head].clone(memory_format=torch.contiguous_format).flatten().view(torch.float16)
    return dequantize_rows_ref(payload, scales.view(len(ids), row_format(table.format).parts), table.dim, table.format)


def _good_ids(
    indices: Tensor, offsets: Tensor, tables: FusedTables, f: int, begin: int, end: int
) -> tuple[Tensor, Tensor]:
    """Ids of a feature's positions, and which of them are in its table."""
    ids = indices[begin:end].long()
    valid = (ids >= 0) & (ids < tables.tables[f].rows)
    if not indices.is_cuda:
        bad = (~valid & (ids != -1)).nonzero()[:1, 0]
        _raise_for((bad + begin).tolist(), indices, offsets, tables)
    return ids, valid


def _pool_by_torch(
    out: Tensor, fused: Tensor, tables: FusedTables, batch: tuple[Tensor, Tensor, Tensor | None], mean: bool
) -> None:
    """Fill Y, a feature at a time."""
    indices, offsets, weights = batch
    samples = out.shape[0]
    ends = offsets.long().clamp(0, indices.shape[0])
    for f, (table, column) in enumerate(zip(tables.tables, column_offsets(tables.dims), strict=False)):
        bags = ends[f * samples : (f + 1) * samples + 1]
        pooled = torch.zeros(samples, table.dim, device=fused.device)
        if table.base is not None:
            # the torch path waits for a device
            begin, end = int(bags[0]), int(bags[-1])
            ids, valid = _good_ids(indices, offsets, tables, f, begin, end)
            bag = torch.repeat_interleave(torch.arange(samples, device=ids.device), bags.diff().clamp(min=0))
            picked = _values_of(fused, tables, table, ids[valid])
            if weights is not None:
                picked = picked * weights[begin:end][valid][:, None]
            pooled.index_add_(0, bag[valid], picked)
            if mean:
                pooled = pooled / bags.diff().clamp(min=1)[:, None]
        out[:, column : column + table.dim] = pooled


def _gather_by_torch(out: Tensor, fused: Tensor, tables: FusedTables, indices: Tensor, offsets: Tensor) -> None:
    """Fill Y of a sequence, a feature at a time."""
    batch = batch_size(offsets, len(tables.tables))
    # the torch path waits for a device
    ends = offsets[::batch].clamp(0, indices.shape[0]).tolist()
    for f, table in enumerate(tables.tables):
        if table.base is None:
            continue
        ids, valid = _good_ids(indices, offsets, tables, f, ends[f], ends[f + 1])
        out[ends[f] : ends[f + 1]][valid] = _values_of(fused, tables, table, ids[valid])
