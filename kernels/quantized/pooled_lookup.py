"""Pooled lookup of quantized tables: gather rows, turn them into values and add (or average) them per bag.

Shapes: Q flat uint8 payload of many tables, S flat scales [all rows, parts], I [N] row ids, O [F*B + 1] bag offsets,
P [N] per-id weights, FT [F, 8] features (features.py; BASE counts bytes of Q, FIRST_ROW rows of S), Y [B, sum of dims].
Bytes moved: N * (row_bytes + parts * itemsize(S)) + N * itemsize(I) + (F*B + 1) * itemsize(O) + itemsize(Y) of the
output, and N * 4 for per-id weights. Rows are read in blocks as in lookup/pooled.py, of 1024 columns.

Every path rounds each product, each sum and the division of a mean by itself and adds rows in their order, so the
reference, the kernel and the loops of the CPU give the same bits, whatever lies beside a row and wherever it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .. import configs
from .._op import (
    gather_tile,
    launch_options,
    multiple,
    next_power_of_2,
    no_gradient,
    register,
    runs_kernel,
    tl,
    triton,
)
from ..cpu.quantized_lookup import quantized_pooled_lookup_cpu
from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    FIRST_ROW,
    MEAN,
    ORDER,
    ROWS,
    batch_size,
    row_alignment as alignment,
)
from ..launch_plans import PLANS, Plan, plan_launches
from ..row_formats import (
    DTYPES,
    RowFormat,
    dequantize_rows_ref,
    row_format,
)
from .row_numbers import UNFUSED, paired, row_scales, row_values

# of a thread; with fewer, ptxas loads a row where it is added and not while others are on their way
_REGISTERS = 80
# where a byte holds four numbers: with 80 it spills up to 48 bytes (triton 3.9.0, sm_90), and where each has its weight
# 96 (sm_100), with 96 still 16
_REGISTERS_OF_INT2 = 104


def quantized_pooled_lookup_ref(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    format: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Y[b, f] = sum (or mean) over i in bag (f, b) of P[i] * W_f[I[i]], accumulated in fp32. Bad ids count as none."""
    batch = batch_size(offsets, len(dims))
    columns = []
    for f, dim in enumerate(dims):
        bags = offsets[f * batch : (f + 1) * batch + 1].long()
        ids = indices[bags[0] : bags[-1]].long()
        bag = torch.repeat_interleave(torch.arange(batch, device=ids.device), bags.diff())  # [N_f]
        valid = (ids >= 0) & (ids < features[f, ROWS])
        picked = table_values(payload, scales, ids[valid], features[f], dim, format)  # [valid ids, D]
        if per_id_weights is not None:
            picked = picked * per_id_weights[bags[0] : bags[-1]][valid].float()[:, None]
        pooled = torch.zeros(batch, dim, device=ids.device).index_add_(0, bag[valid], picked)
        if features[f, MEAN]:
            pooled = pooled / bags.diff().clamp(min=1)[:, None]
        columns.append(pooled)
    return torch.cat(columns, dim=1).to(output_dtype)


def table_values(payload: Tensor, scales: Tensor, ids: Tensor, feature: Tensor, dim: int, format: str) -> Tensor:
    """Values [n, dim] of a feature's table at row ids [n]."""
    kind = row_format(format)
    width, base, rows, first = kind.row_bytes(dim), int(feature[BASE]), int(feature[ROWS]), int(feature[FIRST_ROW])
    table = payload[base : base + rows * width].view(rows, width)
    parts = scales.view(-1, kind.parts) if kind.parts else scales.new_empty(first + rows, 0)
    return dequantize_rows_ref(table[ids], parts[first : first + rows][ids], dim, format)


@triton.jit
def _ids(I, position, live, rows):  # type: ignore[no-untyped-def]
    row = tl.load(I + position, mask=live, other=-1).to(tl.int64)
    # an id outside the table counts as none; positions past the bag were loaded as -1
    return row, (row >= 0) & (row < rows)


@triton.jit
def _payload(table, row, units, u, live, in_row):  # type: ignore[no-untyped-def]
    return tl.load(table + (row * units)[:, None] + u[None, :], mask=live[:, None] & in_row[None, :], other=0)


@triton.jit
def _weighted(value, P, position, live, HAS_P: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_P:
        value = value * tl.load(P + position, mask=live, other=0.0).to(tl.float32)[:, None]
    return value


@triton.jit(do_not_specialize=["N", "B", "first"], do_not_specialize_on_alignment=["I", "O", "P"])
def _quantized_pooled_lookup_kernel(  # type: ignore[no-untyped-def]
    Q,
    S,
    I,
    O,
    P,
    FT,
    Y,
    N,
    B,
    y_stride,
    first,
    BASE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMN: tl.constexpr,
    MEAN: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    ORDER: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_P: tl.constexpr,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_U: tl.constexpr,
    ALIGN: tl.constexpr,
    DIM_ALIGN: tl.constexpr,
    OUT_ALIGN: tl.constexpr,
):
    # a unit of a row is what one load of it gives: a byte of numbers, or a value
    PER: tl.constexpr = 8 // BITS if BITS < 8 else 1  # pyright: ignore[reportInvalidTypeForm]
    UNIT: tl.constexpr = BITS // 8 if BITS > 8 else 1  # pyright: ignore[reportInvalidTypeForm]
    f = tl.load(FT + (first + tl.program_id(1)).to(tl.int64) * FIELDS + ORDER)
    feature = FT + f * FIELDS
    rows = tl.load(feature + ROWS)
    D = tl.multiple_of(tl.load(feature + DIM), DIM_ALIGN)
    units = multiple((D + (PER - 1)) // PER, ALIGN)
    column = tl.multiple_of(tl.load(feature + COLUMN), OUT_ALIGN)
    table = Q + multiple(tl.load(feature + BASE) // UNIT, ALIGN)
    scales = tl.load(feature + FIRST_ROW)
    b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = b < B  # [BLOCK_B]
    begin = tl.load(O + f * B + b, mask=in_batch, other=0).to(tl.int64)
    end = tl.load(O + f * B + b + 1, mask=in_batch, other=0).to(tl.int64)
    # offsets out of order raise through the guard; here they only must not be followed outside I
    length = tl.maximum(tl.minimum(end, N) - tl.maximum(begin, 0), 0).to(tl.int32)
    begin = tl.maximum(begin, 0)
    u = tl.program_id(2) * BLOCK_U + tl.arange(0, BLOCK_U)
    in_row = u < units
    # sums of the first number of each byte, of the second, ...: brought together after the loop
    y0 = tl.zeros((BLOCK_B, BLOCK_U), tl.float32)
    y1 = y0
    y2 = y0
    y3 = y0
    # four loads of ids, then four gathers of rows and scales, all in flight before the first sum
    for i in range(0, tl.max(length, 0), 4):
        p0 = begin + i
        p1 = begin + i + 1
        p2 = begin + i + 2
        p3 = begin + i + 3
        r0, m0 = _ids(I, p0, i < length, rows)
        r1, m1 = _ids(I, p1, i + 1 < length, rows)
        r2, m2 = _ids(I, p2, i + 2 < length, rows)
        r3, m3 = _ids(I, p3, i + 3 < length, rows)
        q0 = _payload(table, r0, units, u, m0, in_row)  # [BLOCK_B, BLOCK_U] bytes
        q1 = _payload(table, r1, units, u, m1, in_row)
        q2 = _payload(table, r2, units, u, m2, in_row)
        q3 = _payload(table, r3, units, u, m3, in_row)
        s0, b0 = row_scales(S, scales + r0, m0, PARTS)  # scales and biases [BLOCK_B]
        s1, b1 = row_scales(S, scales + r1, m1, PARTS)
        s2, b2 = row_scales(S, scales + r2, m2, PARTS)
        s3, b3 = row_scales(S, scales + r3, m3, PARTS)
        for place in tl.static_range(PER):
            v0 = _weighted(row_values(q0, s0, b0, place * BITS, BITS, PARTS), P, p0, m0, HAS_P)
            v1 = _weighted(row_values(q1, s1, b1, place * BITS, BITS, PARTS), P, p1, m1, HAS_P)
            v2 = _weighted(row_values(q2, s2, b2, place * BITS, BITS, PARTS), P, p2, m2, HAS_P)
            v3 = _weighted(row_values(q3, s3, b3, place * BITS, BITS, PARTS), P, p3, m3, HAS_P)
            if place == 0:
                y0 = (((y0 + v0) + v1) + v2) + v3
            elif place == 1:
                y1 = (((y1 + v0) + v1) + v2) + v3
            elif place == 2:
                y2 = (((y2 + v0) + v1) + v2) + v3
            else:
                y3 = (((y3 + v0) + v1) + v2) + v3
    if PER == 4:
        pooled = tl.join(tl.join(y0, y2), tl.join(y1, y3)).reshape(BLOCK_B, BLOCK_U * 4)
    elif PER == 2:
        pooled = tl.join(y0, y1).reshape(BLOCK_B, BLOCK_U * 2)
    else:
        pooled = y0
    if tl.load(feature + MEAN) != 0:
        pooled = tl.div_rn(pooled, tl.maximum(length, 1).to(tl.float32)[:, None] + tl.zeros_like(pooled))
    d = tl.program_id(2) * (BLOCK_U * PER) + tl.arange(0, BLOCK_U * PER)
    out = Y + (b * multiple(y_stride, OUT_ALIGN))[:, None] + column + d[None, :]
    tl.store(out, pooled.to(Y.dtype.element_ty), mask=in_batch[:, None] & (d < D)[None, :])


def quantized_pooled_lookup(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    format: str,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Look ids up in many quantized tables of one format and pool them per bag.

    Shapes: payload flat uint8, scales flat (rows times parts), indices [N], offsets [F*B + 1], per_id_weights [N] or
    None, features [F, 8] with BASE in bytes of payload and FIRST_ROW in rows of scales, dims one int per feature.
    Tables begin on 16 bytes: `pack_features` with `boundary=TABLE_BOUNDARY` refuses others.

    Returns:
        [B, sum(dims)] in `output_dtype` (fp32, fp16 or bf16), accumulated in fp32; zeros for an empty bag.

    Ids outside a table count as none: run `check_ids` first to raise for them instead. There is no gradient: a backward
    to per-id weights raises RuntimeError.
    """
    trained = isinstance(per_id_weights, Tensor) and per_id_weights.requires_grad and torch.is_grad_enabled()
    if trained and not torch.compiler.is_compiling():
        with torch.no_grad():
            pooled = quantized_pooled_lookup(
                payload, scales, indices, offsets, per_id_weights, features, dims, format, output_dtype
            )
        text = "quantized_pooled_lookup has no gradient by per-id weights: detach them, or look up in float tables"
        return no_gradient(text, pooled)
    return torch.ops.shardwise.quantized_pooled_lookup(  # type: ignore[no-any-return]
        payload, scales, indices, offsets, per_id_weights, features, list(dims), format, output_dtype
    )


def _pooled(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: list[int],
    format: str,
    output_dtype: torch.dtype,
) -> Tensor:
    kind = row_format(format)
    if not runs_kernel(payload):
        path = quantized_pooled_lookup_ref if payload.is_cuda else quantized_pooled_lookup_cpu
        return path(payload, scales, indices, offsets, per_id_weights, features, dims, format, output_dtype)
    batch, plan = batch_size(offsets, len(dims)), quantized_plan(tuple(dims), format, output_dtype.itemsize)
    out = torch.empty(batch, plan.columns, dtype=output_dtype, device=payload.device)
    if batch == 0:
        return out
    # kernels read what lies one after another
    indices, offsets = indices.contiguous(), offsets.contiguous()
    per_id_weights = None if per_id_weights is None else per_id_weights.contiguous()
    payload, scales = payload.contiguous(), paired(scales.contiguous())
    units = row_units(payload, kind)
    length = configs.length_class(indices.shape[0], offsets.shape[0] - 1)
    registers = _REGISTERS_OF_INT2 if kind.bits == 2 else _REGISTERS
    aligned = payload.data_ptr() % 16 == 0
    for first, count, width, align, out_align, dim_align in plan.launches:
        align = align if aligned else 1
        block_b, block_u, warps = tuned_tile("quantized_pooled_lookup", units, width, kind, align, length)
        grid = (triton.cdiv(batch, block_b), count, triton.cdiv(width, block_u))
        _quantized_pooled_lookup_kernel[grid](
            units, scales, indices, offsets, per_id_weights if per_id_weights is not None else indices, features, out,
            indices.shape[0], batch, plan.columns, first,
            BASE, ROWS, DIM, COLUMN, MEAN, FIRST_ROW, ORDER, FIELDS, per_id_weights is not None,
            kind.bits, kind.parts, block_b, block_u, align, dim_align, out_align,
            **launch_options(warps, registers), **UNFUSED,
        )  # fmt: skip
    return out


@lru_cache(maxsize=PLANS)
def quantized_plan(dims: tuple[int, ...], format: str, out_itemsize: int) -> Plan:
    """Launches of a pooled lookup of one format: one for each class of a row's units."""
    kind = row_format(format)
    return plan_launches(
        dims, lambda f: next_power_of_2(unit_count(dims[f], kind)), lambda f: unit_alignment(dims[f], kind),
        out_itemsize,
    )  # fmt: skip


def tile(width: int, kind: RowFormat, align: int) -> tuple[int, int, int]:
    """Rows, units and warps of a tile in which every thread holds 16 columns of numbers, or 16 bytes of values.

    Of rows that move by few bytes at a time it holds less, which takes as many loads and registers.
    """
    per_byte = max(1, 8 // kind.bits)
    units = min(16 // max(kind.bits // 8, per_byte), max(4 // per_byte, 2 * align))
    return gather_tile(width, 16 // units, align)


def tuned_tile(
    kernel: str, units: Tensor, width: int, kind: RowFormat, align: int, length: int = 1
) -> tuple[int, int, int]:
    """The tile of a config, or of the heuristic."""
    classed = next_power_of_2(width)
    heuristic, whole = tile(width, kind, align), align == min(classed, 16 // units.itemsize)
    return configs.tile(kernel, heuristic, kind.name, classed, length, units.device) if whole else heuristic


def row_units(payload: Tensor, kind: RowFormat) -> Tensor:
    """The payload as what kernels load: bytes of numbers, or values of a float format."""
    return payload if kind.parts else payload.view(DTYPES[kind.name])


def unit_count(dim: int, kind: RowFormat) -> int:
    """Units of a row."""
    return kind.row_bytes(dim) if kind.parts else dim


def unit_alignment(dim: int, kind: RowFormat) -> int:
    """Units to which rows are aligned in tables that begin on 16 bytes."""
    return alignment(unit_count(dim, kind), 1 if kind.parts else kind.bits // 8)


def _fake_pooled(
    payload: Tensor,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: list[int],
    format: str,
    output_dtype: torch.dtype,
) -> Tensor:
    return payload.new_empty((offsets.shape[0] - 1) // len(dims), sum(dims), dtype=output_dtype)


register(
    "quantized_pooled_lookup(Tensor payload, Tensor scales, Tensor indices, Tensor offsets, Tensor? per_id_weights,"
    " Tensor features, int[] dims, str format, ScalarType output_dtype) -> Tensor",
    _pooled,
    _fake_pooled,
)
