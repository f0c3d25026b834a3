"""Rows of integers with scale and bias in the same row: made and turned back in one pass, without a copy of numbers.

Shapes: W [R, D] fp32, fp16 or bf16; Y uint8 [R, bytes of D numbers + 2 scales], 8 // BITS numbers to a byte, the first
column in the lowest bits; scale and bias are fp32 (`wide`) or fp16, behind the numbers or in front of them. Rows of
several tables side by side have theirs behind each table's.
Bytes moved: W once and Y once, one way and back; to make Y, W is read a second time from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._op import INTERPRETED, launch_options, next_power_of_2, register, runs_kernel, tl, triton
from .row_numbers import UNFUSED, row_numbers
from .rows import quantize_rows_ref

# what FBGEMM adds to the range of a fused 8-bit row before it divides by it
_EPSILON = 1e-8
# bytes of scale and bias
WIDE, NARROW = 8, 4
_TILE = 256 if INTERPRETED else 1024


def packed_rows(rows: Tensor, low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Bytes [R, D / per_byte] and fp16 scale and bias [R, 2] of rows [R, D], cut to low ... high [R, 1]."""
    levels, per_byte = (1 << bits) - 1, 8 // bits
    bias = low.half()
    span = high - bias.float()
    # on CUDA a tensor over a number would be the tensor times its reciprocal: rounded twice
    scale = (span / torch.full_like(span, levels)).half()
    scale = torch.where(scale == 0, 1, scale)
    numbers = torch.round((rows - bias.float()) * (1 / scale.float())).clamp(0, levels).to(torch.uint8)
    packed = numbers[:, ::per_byte]
    for place in range(1, per_byte):
        packed = packed | (numbers[:, place::per_byte] << (place * bits))
    return packed, torch.cat([scale, bias], 1)


def to_fused_rows_ref(rows: Tensor, bits: int, wide: bool, min_max: Tensor | None) -> Tensor:
    """Y of W; numbers lie between `min_max` [R, 2], or the row's own."""
    if wide:
        packed, scales = quantize_rows_ref(rows, "int8", torch.float32)
    else:
        values = rows.float()
        low, high = values.aminmax(dim=1, keepdim=True)
        if min_max is not None:
            low, high = min_max[:, :1].float(), min_max[:, 1:].float()
        packed, scales = packed_rows(values, low, high, bits)
    return torch.cat([packed, scales.contiguous().view(torch.uint8)], 1)


def from_fused_rows_ref(rows: Tensor, bits: int, wide: bool, last: bool, dtype: torch.dtype) -> Tensor:
    """The values of Y."""
    tail = WIDE if wide else NARROW
    packed, scales = (rows[:, :-tail], rows[:, -tail:]) if last else (rows[:, tail:], rows[:, :tail])
    both = scales.clone(memory_format=torch.contiguous_format).view(torch.float32 if wide else torch.float16).float()
    places = [(packed >> (place * bits)) & ((1 << bits) - 1) for place in range(8 // bits)]
    return (torch.stack(places, 2).flatten(1).float() * both[:, :1] + both[:, 1:]).to(dtype)


def from_fused_tables_ref(rows: Tensor, offsets: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The values [R, columns] of 8-bit rows of tables side by side, each with wide scales behind its numbers."""
    ends = offsets.tolist()
    parts = [from_fused_rows_ref(rows[:, a:b], 8, True, True, dtype) for a, b in zip(ends, ends[1:], strict=False)]
    return torch.cat(parts, 1)[:, :columns]


@triton.jit
def _store_bytes(Y, at, word, mask, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]
    # rows begin at any address, so scales do
    for place in tl.static_range(BYTES):
        tl.store(Y + at + place, ((word >> (8 * place)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _load_scale(Q, at, mask, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The fp32 or fp16 number whose bytes begin at `at`."""
    low = tl.load(Q + at, mask=mask, other=0).to(tl.int32) | (tl.load(Q + at + 1, mask=mask, other=0).to(tl.int32) << 8)
    if not WIDE:
        return low.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = tl.load(Q + at + 2, mask=mask, other=0).to(tl.int32)
    high |= tl.load(Q + at + 3, mask=mask, other=0).to(tl.int32) << 8
    return (low | (high << 16)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["R"])
def _to_fused_rows_kernel(  # type: ignore[no-untyped-def]
    W,
    M,
    Y,
    R,
    D,
    row_bytes,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    GIVEN: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    LEVELS: tl.constexpr = (1 << BITS) - 1  # pyright: ignore[reportInvalidTypeForm]
    TAIL: tl.constexpr = 8 if WIDE else 4  # pyright: ignore[reportInvalidTypeForm]
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = r < R
    if GIVEN:
        low = tl.load(M + r * 2, mask=here, other=0.0).to(tl.float32)
        high = tl.load(M + r * 2 + 1, mask=here, other=0.0).to(tl.float32)
    else:
        low = tl.full((BLOCK_R,), float("inf"), tl.float32)
        high = tl.full((BLOCK_R,), float("-inf"), tl.float32)
        broken = tl.zeros((BLOCK_R,), tl.int32)
        for begin in range(0, D, BLOCK_D):
            d = begin + tl.arange(0, BLOCK_D)
            mask = here[:, None] & (d < D)[None, :]
            w = tl.load(W + (r * D)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(mask, w, float("inf")), 1))
            high = tl.maximum(high, tl.max(tl.where(mask, w, float("-inf")), 1))
            broken = tl.maximum(broken, tl.max((w != w).to(tl.int32), 1))
        # minima pass over a NaN; it shall be seen in the scales
        low = tl.where(broken != 0, float("nan"), low)
    ones = tl.full((BLOCK_R,), 1.0, tl.float32)
    row = r * (row_bytes + TAIL)
    if WIDE:
        bias = low
        scale = tl.div_rn(high - low, ones * 255.0)
        inverse = tl.div_rn(ones * 255.0, high - low + EPSILON)
        _store_bytes(Y, row + row_bytes, scale.to(tl.int32, bitcast=True), here, 4)
        _store_bytes(Y, row + row_bytes + 4, bias.to(tl.int32, bitcast=True), here, 4)
    else:
        half = low.to(tl.float16)
        bias = half.to(tl.float32)
        scale = tl.div_rn(high - bias, ones * LEVELS).to(tl.float16)
        scale = tl.where(scale == 0.0, ones.to(tl.float16), scale)
        inverse = tl.div_rn(ones, scale.to(tl.float32))
        _store_bytes(Y, row + row_bytes, scale.to(tl.int16, bitcast=True), here, 2)
        _store_bytes(Y, row + row_bytes + 2, half.to(tl.int16, bitcast=True), here, 2)
    for begin in range(0, row_bytes, BLOCK_Q):
        q = begin + tl.arange(0, BLOCK_Q)
        packed = tl.zeros((BLOCK_R, BLOCK_Q), tl.int32)
        for place in tl.static_range(8 // BITS):
            d = q * (8 // BITS) + place
            mask = here[:, None] & (d < D)[None, :]
            w = tl.load(W + (r * D)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
            n = tl.minimum(tl.maximum((w - bias[:, None]) * inverse[:, None], 0.0), LEVELS)
            # a sum that leaves no room for a fraction rounds to nearest even
            n = ((n + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000) << (place * BITS)
            packed |= tl.where(mask, n, 0)
        tl.store(Y + row[:, None] + q[None, :], packed.to(tl.uint8), mask=here[:, None] & (q < row_bytes)[None, :])


@triton.jit(do_not_specialize=["R"])
def _from_fused_rows_kernel(  # type: ignore[no-untyped-def]
    Q,
    W,
    R,
    D,
    row_bytes,
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    TAIL: tl.constexpr = 8 if WIDE else 4  # pyright: ignore[reportInvalidTypeForm]
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (r < R)[:, None] & (d < D)[None, :]
    row = r * (row_bytes + TAIL)
    numbers = row if LAST else row + TAIL
    at = row + row_bytes if LAST else row
    scale = _load_scale(Q, at, r < R, WIDE)
    bias = _load_scale(Q, at + TAIL // 2, r < R, WIDE)
    q = tl.load(Q + numbers[:, None] + (d // (8 // BITS))[None, :], mask=mask, other=0)
    w = row_numbers(q, (d % (8 // BITS) * BITS)[None, :], BITS, False) * scale[:, None] + bias[:, None]
    tl.store(W + (r * D)[:, None] + d[None, :], w.to(W.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def _from_fused_tables_kernel(  # type: ignore[no-untyped-def]
    Q,
    O,
    W,
    R,
    D,
    T,
    steps,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = r * (D + 8 * T)
    # the table of a column: the last that begins at or before it, not counting the scales of those before
    low = d * 0
    high = low + T
    for _ in range(0, steps):
        middle = (low + high) // 2
        begins = tl.load(O + middle, mask=middle < T, other=0) - 8 * middle
        right = (begins <= d) & (middle < high)
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
    end = tl.load(O + low + 1, mask=d < D, other=8).to(tl.int64)
    mask = (r < R)[:, None] & ((d < D) & (end >= 8) & (end <= D + 8 * T))[None, :]
    at = row[:, None] + (end - 8)[None, :]
    scale = _load_scale(Q, at, mask, True)
    bias = _load_scale(Q, at + 4, mask, True)
    q = tl.load(Q + row[:, None] + (d + 8 * low)[None, :], mask=mask, other=0)
    w = row_numbers(q, d[None, :] * 0, 8, False) * scale + bias
    tl.store(W + (r * D)[:, None] + d[None, :], w.to(W.dtype.element_ty), mask=(r < R)[:, None] & (d < D)[None, :])


def _to_fused_rows(rows: Tensor, bits: int, wide: bool, min_max: Tensor | None) -> Tensor:
    if not runs_kernel(rows):
        return to_fused_rows_ref(rows, bits, wide, min_max)
    out = _fake_to(rows, bits, wide, min_max)
    count, dim = rows.shape
    if count:
        row_bytes = dim // (8 // bits)
        block_d, block_q = (min(next_power_of_2(n), _TILE) for n in (dim, row_bytes))
        block_r = max(1, _TILE // block_d)
        rows = rows.contiguous()
        _to_fused_rows_kernel[(triton.cdiv(count, block_r),)](
            rows, rows if min_max is None else min_max.contiguous(), out, count, dim, row_bytes, bits, wide,
            min_max is not None, _EPSILON, block_r, block_d, block_q, **launch_options(4, 96), **UNFUSED,
        )  # fmt: skip
    return out


def _from_fused_rows(rows: Tensor, bits: int, wide: bool, last: bool, dtype: torch.dtype) -> Tensor:
    if not runs_kernel(rows):
        return from_fused_rows_ref(rows, bits, wide, last, dtype)
    out = _fake_from(rows, bits, wide, last, dtype)
    count, dim = out.shape
    if count and dim:
        block_d = min(next_power_of_2(dim), _TILE)
        block_r = max(1, _TILE // block_d)
        _from_fused_rows_kernel[(triton.cdiv(count, block_r), triton.cdiv(dim, block_d))](
            rows.contiguous(), out, count, dim, dim // (8 // bits), bits, wide, last, block_r, block_d, **UNFUSED
        )
    return out


def _from_fused_tables(rows: Tensor, offsets: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    if not runs_kernel(rows):
        return from_fused_tables_ref(rows, offsets, columns, dtype)
    out, tables = rows.new_empty(rows.shape[0], columns, dtype=dtype), offsets.shape[0] - 1
    if out.numel():
        block_d = min(next_power_of_2(columns), _TILE)
        block_r = max(1, _TILE // block_d)
        _from_fused_tables_kernel[(triton.cdiv(rows.shape[0], block_r), triton.cdiv(columns, block_d))](
            rows.contiguous(), offsets.contiguous(), out, rows.shape[0], columns, tables, tables.bit_length() + 1,
            block_r, block_d, **launch_options(4, 96), **UNFUSED,
        )  # fmt: skip
    return out


def _fake_to(rows: Tensor, bits: int, wide: bool, min_max: Tensor | None) -> Tensor:
    row_bytes = rows.shape[1] // (8 // bits)
    return rows.new_empty(rows.shape[0], row_bytes + (WIDE if wide else NARROW), dtype=torch.uint8)


def _fake_from(rows: Tensor, bits: int, wide: bool, last: bool, dtype: torch.dtype) -> Tensor:
    row_bytes = rows.shape[1] - (WIDE if wide else NARROW)
    return rows.new_empty(rows.shape[0], row_bytes * (8 // bits), dtype=dtype)


register(
    "to_fused_rows(Tensor rows, int bits, bool wide, Tensor? min_max) -> Tensor",
    _to_fused_rows,
    _fake_to,
)
register(
    "from_fused_rows(Tensor rows, int bits, bool wide, bool last, ScalarType dtype) -> Tensor",
    _from_fused_rows,
    _fake_from,
)
register(
    "from_fused_tables(Tensor rows, Tensor offsets, SymInt columns, ScalarType dtype) -> Tensor",
    _from_fused_tables,
    lambda rows, offsets, columns, dtype: rows.new_empty(rows.shape[0], columns, dtype=dtype),
)
