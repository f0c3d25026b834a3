"""Rows of 8-bit floats with their scales behind them, and rows in parts of which each has a scale of its own.

Shapes: X [R, D] fp32, fp16 or bf16; Y uint8 [R, parts * (part + 8)]: `part` codes (a multiple of 4), an fp32 scale, and
an int32 mark. Codes have 1-4-3 bits with bias 15 (`forward`) or 1-5-2 with bias 31; a scale makes a part's largest
number 0.9375 or 0.875. The mark of a row's last part is how many codes it has too many, that of others is below 0.
Bytes moved: X once and Y once, one way and back; to make Y, X is read a second time from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._op import INTERPRETED, next_power_of_2, register, runs_kernel, tl, triton
from ..features import segment_of_position
from .small_floats import float8_codes, float8_constants, float8_values, from_float8_ref

FORWARD = (4, 15, 0.9375, torch.float8_e4m3fn, 2.0**8)
"""Of forward: bits of exponent, bias, largest number of a scaled row, torch's dtype of the same bits, and by how
many times its numbers are larger."""
BACKWARD = (5, 31, 0.875, torch.float8_e5m2, 2.0**16)
"""The same of backward."""
# what FBGEMM adds to a row's largest number before it divides by it
EPSILON = 1e-20
EXTRA = 8
"""Bytes behind a part of a row, its scale first."""
_TILE = 256 if INTERPRETED else 1024


def scaled_codes(rows: Tensor, least: float, forward: bool) -> tuple[Tensor, Tensor]:
    """Codes [R, D] and scales [R, 1] of rows [R, D]; a row's largest number counts as `least` at least."""
    _, _, most, dtype, times = FORWARD if forward else BACKWARD
    values = rows.float()
    largest = values.abs().amax(1, keepdim=True).clamp(min=least) + EPSILON
    # a number over a tensor would be the number times the reciprocal: rounded twice
    scale = torch.full_like(largest, most) / largest
    return (values * (scale * times)).to(dtype).view(torch.uint8), scale


def to_fp8_parts_ref(x: Tensor, part: int, least: float, mark: int, surplus: int, forward: bool) -> Tensor:
    """Y of X: the last part of a row has the mark `surplus`, part p of the others p - `mark`.

    Where nothing counts as at least `least` (0), what parts have too many are codes of 0.
    """
    rows, dim = x.shape
    parts = (dim + part - 1) // part
    codes, scale = scaled_codes(pad(x, (0, parts * part - dim)).view(-1, part), least, forward)
    if least > 0:
        codes = pad(codes.view(rows, parts * part)[:, :dim], (0, parts * part - dim)).view(-1, part)
    marks = torch.arange(parts, dtype=torch.int32, device=x.device) - mark
    marks[-1] = surplus
    tail = torch.stack([scale.view(torch.int32).view(rows, parts), marks.expand(rows, parts)], 2)
    return torch.cat([codes, tail.view(-1, 2).view(torch.uint8)], 1).view(rows, parts * (part + EXTRA))


def fp8_part_ends_ref(rows: Tensor, part: int) -> Tensor:
    """How many numbers the parts before each have, and all of them: [parts + 1] int64, as the first row says."""
    marks = rows[0].view(-1, part + EXTRA)[:, part + 4 :].clone(memory_format=torch.contiguous_format)
    numbers = part - marks.view(torch.int32)[:, 0].clamp(0, part)
    return pad(numbers.cumsum(0), (1, 0))


def from_fp8_parts_ref(
    rows: Tensor, ends: Tensor | None, columns: int, part: int, forward: bool, dtype: torch.dtype
) -> Tensor:
    """The values [R, columns] of rows in parts; 0 past the last part. Without `ends` parts have none too many."""
    ebits, bias = (FORWARD if forward else BACKWARD)[:2]
    parts = rows.shape[1] // (part + EXTRA)
    split = rows.reshape(rows.shape[0], parts, part + EXTRA)
    scale = split[:, :, part : part + 4].clone(memory_format=torch.contiguous_format).view(torch.float32)
    values = (from_float8_ref(split[:, :, :part], ebits, bias) / scale).to(dtype)
    if ends is None:
        ends = torch.arange(parts + 1, device=rows.device) * part
    column = torch.arange(columns, device=rows.device)
    at = torch.searchsorted(ends, column, right=True) - 1
    known = at < parts
    place = torch.where(known, at * part + column - ends[at], 0)
    return torch.where(known, values.flatten(1)[:, place], 0)


@triton.jit(do_not_specialize=["P"], do_not_specialize_on_alignment=["X"])
def _to_fp8_parts_kernel(  # type: ignore[no-untyped-def]
    X,
    Y,
    P,
    D,
    PARTS,
    PART,
    mark,
    surplus,
    least,
    MOST: tl.constexpr,
    TIMES: tl.constexpr,
    EPSILON: tl.constexpr,
    ZEROS: tl.constexpr,
    EBITS: tl.constexpr,
    BIAS: tl.constexpr,
    STEPS: tl.constexpr,
    NORMAL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    here = p < P
    begin = (p % PARTS * PART).to(tl.int32)
    row = p // PARTS * D
    largest = tl.zeros((BLOCK_P,), tl.float32)
    broken = tl.zeros((BLOCK_P,), tl.int32)
    for first in range(0, PART, BLOCK_D):
        i = first + tl.arange(0, BLOCK_D)
        inside = here[:, None] & (i < PART)[None, :] & (begin[:, None] + i[None, :] < D)
        x = tl.load(X + (row + begin)[:, None] + i[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
        broken = tl.maximum(broken, tl.max((x != x).to(tl.int32), 1))
    # maxima pass over a NaN; it shall be seen in the scale
    largest = tl.where(broken != 0, float("nan"), tl.maximum(largest, least) + EPSILON)
    scale = tl.div_rn(tl.full((BLOCK_P,), MOST, tl.float32), largest)
    codes = p * (PART + 8)
    tail = Y.to(tl.pointer_type(tl.int32)) + (codes + PART) // 4
    last = p % PARTS == PARTS - 1
    tl.store(tail, scale.to(tl.int32, bitcast=True), mask=here)
    tl.store(tail + 1, tl.where(last, surplus, p % PARTS - mark).to(tl.int32), mask=here)
    for first in range(0, PART, BLOCK_D):
        i = first + tl.arange(0, BLOCK_D)
        inside = here[:, None] & (i < PART)[None, :]
        known = inside & (begin[:, None] + i[None, :] < D)
        x = tl.load(X + (row + begin)[:, None] + i[None, :], mask=known, other=0.0).to(tl.float32)
        x = x * (scale * TIMES)[:, None]
        code = float8_codes(tl.abs(x), EBITS, BIAS, STEPS, NORMAL)
        code = tl.where(x != x, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        if ZEROS:
            code = tl.where(known, code, 0)
        tl.store(Y + codes[:, None] + i[None, :], code.to(tl.uint8), mask=inside)


@triton.jit
def _fp8_part_ends_kernel(Q, E, PARTS, PART, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    marks = Q.to(tl.pointer_type(tl.int32)) + PART // 4 + 1
    total = tl.zeros((), tl.int64)
    tl.store(E, total)
    for begin in range(0, PARTS, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        surplus = tl.load(marks + i * (PART // 4 + 2), mask=i < PARTS, other=0)
        numbers = PART - tl.minimum(tl.maximum(surplus, 0), PART)
        numbers = tl.where(i < PARTS, numbers, 0).to(tl.int64)
        tl.store(E + i + 1, total + tl.cumsum(numbers, 0), mask=i < PARTS)
        total += tl.sum(numbers, 0)


@triton.jit(do_not_specialize=["R"])
def _from_fp8_parts_kernel(  # type: ignore[no-untyped-def]
    Q,
    E,
    Y,
    R,
    D,
    PARTS,
    PART,
    steps,
    EBITS: tl.constexpr,
    FACTOR: tl.constexpr,
    SEARCH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (r < R)[:, None] & (d < D)[None, :]
    row = r * PARTS * (PART + 8)
    scales = Q.to(tl.pointer_type(tl.int32))
    if SEARCH:
        at = segment_of_position(E, d, PARTS + 1, steps)
        known = at < PARTS
        begin = at * (PART + 8)
        place = begin + d - tl.load(E + at, mask=d < D, other=0)
        live = inside & known[None, :]
        scale = tl.load(scales + (row[:, None] + begin[None, :] + PART) // 4, mask=live, other=0x3F800000)
    else:
        place = d
        live = inside
        scale = tl.load(scales + (row + PART) // 4, mask=r < R, other=0x3F800000)[:, None]
    q = tl.load(Q + row[:, None] + place[None, :], mask=live, other=0)
    scale = scale.to(tl.float32, bitcast=True) + tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    value = tl.div_rn(float8_values(q, EBITS, FACTOR), scale)
    value = tl.where(live, value, 0.0)
    tl.store(Y + (r * D)[:, None] + d[None, :], value.to(Y.dtype.element_ty), mask=inside)


def to_fp8_rows(x: Tensor, width: int, forward: bool) -> Tensor:
    """Rows [R, D] as [R, width + 8], `width` at least D: codes and zeros, scale and 0."""
    if runs_kernel(x):
        return torch.ops.shardwise.to_fp8_parts(x, width, EPSILON, 0, 0, forward)  # type: ignore[no-any-return]
    codes, scale = scaled_codes(x, EPSILON, forward)
    return torch.cat([pad(codes, (0, width - x.shape[1])), pad(scale, (0, 1)).view(torch.uint8)], 1)


def _to_fp8_parts(x: Tensor, part: int, least: float, mark: int, surplus: int, forward: bool) -> Tensor:
    if not runs_kernel(x):
        return to_fp8_parts_ref(x, part, least, mark, surplus, forward)
    rows, dim = x.shape
    parts = triton.cdiv(dim, part)
    out = torch.empty(rows, parts * (part + EXTRA), dtype=torch.uint8, device=x.device)
    if not out.numel():
        return out
    ebits, bias, most, _, times = FORWARD if forward else BACKWARD
    block_d = min(next_power_of_2(part), _TILE)
    block_p = max(1, _TILE // block_d)
    # numbers are made `times` as large, of another bias then
    constants = float8_constants(ebits, bias - int(times).bit_length() + 1)
    _to_fp8_parts_kernel[(triton.cdiv(rows * parts, block_p),)](
        x.contiguous(), out, rows * parts, dim, parts, part, mark, surplus, least, most, times, EPSILON, least > 0,
        *constants, block_p, block_d,
    )  # fmt: skip
    return out


def _aligned(rows: Tensor) -> Tensor:
    """Contiguous bytes that begin where an int32 may."""
    rows = rows.contiguous()
    return rows if rows.data_ptr() % 4 == 0 else rows.clone()


def _fp8_part_ends(rows: Tensor, part: int) -> Tensor:
    if not runs_kernel(rows):
        return fp8_part_ends_ref(rows, part)
    parts = rows.shape[1] // (part + EXTRA)
    ends = torch.empty(parts + 1, dtype=torch.int64, device=rows.device)
    _fp8_part_ends_kernel[(1,)](_aligned(rows[:1]), ends, parts, part, min(next_power_of_2(parts), _TILE))
    return ends


def _from_fp8_parts(
    rows: Tensor, ends: Tensor | None, columns: int, part: int, forward: bool, dtype: torch.dtype
) -> Tensor:
    if not runs_kernel(rows):
        return from_fp8_parts_ref(rows, ends, columns, part, forward, dtype)
    out = torch.empty(rows.shape[0], columns, dtype=dtype, device=rows.device)
    if not out.numel():
        return out
    ebits, bias = (FORWARD if forward else BACKWARD)[:2]
    parts = rows.shape[1] // (part + EXTRA)
    block_d = min(next_power_of_2(columns), _TILE)
    block_r = max(1, _TILE // block_d)
    rows = _aligned(rows)
    _from_fp8_parts_kernel[(triton.cdiv(rows.shape[0], block_r), triton.cdiv(columns, block_d))](
        rows, rows if ends is None else ends, out, rows.shape[0], columns, parts, part, (parts + 1).bit_length() + 1,
        ebits, 2.0 ** (127 - bias), ends is not None, block_r, block_d,
    )  # fmt: skip
    return out


def _fake_to_parts(x: Tensor, part: int, least: float, mark: int, surplus: int, forward: bool) -> Tensor:
    rows, dim = x.shape
    return x.new_empty(rows, (dim + part - 1) // part * (part + EXTRA), dtype=torch.uint8)


register(
    "to_fp8_parts(Tensor x, int part, float least, int mark, int surplus, bool forward) -> Tensor",
    _to_fp8_parts,
    _fake_to_parts,
)
register(
    "fp8_part_ends(Tensor rows, int part) -> Tensor",
    _fp8_part_ends,
    lambda rows, part: rows.new_empty(rows.shape[1] // (part + EXTRA) + 1, dtype=torch.int64),
)
register(
    "from_fp8_parts(Tensor rows, Tensor? ends, SymInt columns, int part, bool forward, ScalarType dtype) -> Tensor",
    _from_fp8_parts,
    lambda rows, ends, columns, part, forward, dtype: rows.new_empty(rows.shape[0], columns, dtype=dtype),
)
