"""Quantize rows and back: fp32, fp16 or bf16 rows to the payload and scales of a format of row_formats.py.

Shapes: W [R, D] rows, Q [R, row_bytes] uint8 payload, S [R, parts] scales (fp16 or fp32).
Bytes moved: R * (D * itemsize(W) + row_bytes + parts * itemsize(S)); W is read a second time from the cache.

Integer formats: bias is the row's minimum, scale its range / levels, both in the dtype of S before numbers are made
from them, number = round((value - bias) / scale) to nearest even, cut to [0, levels]. A constant row has scale 1. These
are the steps of FBGEMM's N-bit rows, whose bits come out with fp16 scales; int8 with fp32 scales gives the bits of its
fused 8-bit rows, where a constant row has scale 0. fp8 is e4m3 with scale = max|row| / 448, and scale 1 where that is
less than 2**-140, too few bits for numbers of at most 448.

A row of int8 that fp16 scales rounded to nearest would cut by more than half a step at an end has its bias rounded down
and its scale up, so that the levels reach from end to end: a row of values within 1e-4 lost up to 11 steps, one around
10 with a spread of 0.01 up to 39, as FBGEMM's do; so they lose half a step, and 0.63 of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    direct,
    launch_options,
    next_power_of_2,
    register,
    runs_kernel,
    tl,
    triton,
)
from ..cpu import quantized_lookup as cpu_quantized
from ..row_formats import (
    DTYPES,
    RowFormat,
    dequantize_rows_ref,
    row_format,
)
from .row_numbers import UNFUSED, paired, row_scales, row_values

# the largest number of e4m3
FP8_MAX = 448.0
# what FBGEMM adds to the range of a fused 8-bit row before it divides by it
_EPSILON = 1e-8
# elements of a tile
_TILE = 256 if INTERPRETED else 1024
# elements that the torch path makes fp32 at a time
_BLOCK_ELEMENTS = 1 << 18


def quantize_rows_ref(weights: Tensor, format: str, scale_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Q and S of W; see the module's docstring."""
    kind = row_format(format)
    dtype = scale_dtype or kind.scale_dtype
    rows = weights.float()
    if not kind.parts:
        packed = weights.to(DTYPES[format], copy=True, memory_format=torch.contiguous_format).view(torch.uint8)
        return packed, rows.new_empty(rows.shape[0], 0, dtype=dtype)
    if kind.parts == 1:
        scale = (rows.abs().amax(1, keepdim=True) / FP8_MAX).to(dtype)
        scale = torch.where(scale < 2.0**-140, 1, scale)
        return (rows / scale.float()).to(torch.float8_e4m3fn).view(torch.uint8), scale
    low, high = rows.aminmax(dim=1, keepdim=True)
    scale, bias, inverse = _scales_of(low, high, kind, dtype)
    numbers = torch.round((rows - bias.float()) * inverse)
    if not _is_fused(kind, dtype):
        numbers = numbers.clamp(0, kind.levels)
    return _pack(numbers.to(torch.uint8), kind), torch.cat([scale, bias], 1)


def _is_fused(kind: RowFormat, dtype: torch.dtype) -> bool:
    """Whether rows are FBGEMM's fused 8-bit rows."""
    return kind.bits == 8 and dtype == torch.float32


def _scales_of(low: Tensor, high: Tensor, kind: RowFormat, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and bias in `dtype`, and the inverse, of rows of integers from `low` to `high`, all [R, 1]."""
    if _is_fused(kind, dtype):
        span = high - low + _EPSILON
        # a number over a tensor would be the number times the reciprocal: rounded twice
        return (high - low) / 255, low, torch.full_like(span, 255.0) / span
    bias = low.to(dtype)
    scale = ((high - bias.float()) / kind.levels).to(dtype)
    if dtype == torch.float16 and kind.bits == 8:
        reaches = (low >= bias.float() - 0.5 * scale.float()) & (
            high <= bias.float() + (kind.levels + 0.5) * scale.float()
        )
        bias = torch.where(reaches, bias, _half_towards(low, -1))
        scale = torch.where(reaches, scale, _half_towards((high - bias.float()) / kind.levels, 1))
    inverse = 1 / scale.float()
    degenerate = (scale == 0) | inverse.isinf()
    scale = torch.where(degenerate, torch.ones_like(scale), scale)
    return scale, bias, torch.where(degenerate, torch.ones_like(inverse), inverse)


def _half_towards(x: Tensor, sign: int) -> Tensor:
    """The fp16 number next to x that is not below it (sign 1), or not above it (-1)."""
    half = x.to(torch.float16)
    bits = half.view(torch.int16)
    # bits of a negative number are negative, and grow with its magnitude
    following = (bits + torch.where(bits < 0, -sign, sign).to(torch.int16)).view(torch.float16)
    return torch.where((x - half.float()) * sign > 0, following, half)


def _pack(numbers: Tensor, kind: RowFormat) -> Tensor:
    """Numbers [R, D] uint8 as [R, row_bytes], the first column in the lowest bits of its byte."""
    per_byte = 8 // kind.bits
    if per_byte == 1:
        return numbers
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per_byte))
    packed = torch.zeros(padded.shape[0], padded.shape[1] // per_byte, dtype=torch.uint8, device=numbers.device)
    for place in range(per_byte):
        packed |= padded[:, place::per_byte] << (place * kind.bits)
    return packed


@triton.jit
def _half_below(x):  # type: ignore[no-untyped-def]
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True)
    lower = tl.where(bits < 0, bits + 1, bits - 1).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where(half.to(tl.float32) > x, lower, half)


@triton.jit
def _e4m3(x):  # type: ignore[no-untyped-def]
    """Codes of fp32 numbers of at most 448, to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # the 20 bits that go decide by a sum; the exponent then counts from 120 less
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6 a code is a number of steps of 2**-9, which 2**14 has room for
    few = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, few, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit(do_not_specialize=["R"])
def _quantize_rows_kernel(  # type: ignore[no-untyped-def]
    W,
    Q,
    S,
    R,
    D,
    row_bytes,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    FP8_MAX: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    LEVELS: tl.constexpr = (1 << BITS) - 1  # pyright: ignore[reportInvalidTypeForm]
    HALF: tl.constexpr = S.dtype.element_ty == tl.float16  # pyright: ignore[reportInvalidTypeForm]
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = r < R
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
    inverse = ones
    if PARTS == 1:
        bias = ones * 0.0
        scale = tl.div_rn(tl.where(broken != 0, float("nan"), tl.maximum(high, -low)), ones * FP8_MAX)
        # 2**-140
        scale = tl.where(scale < 7.174648137343064e-43, 1.0, scale)
        tl.store(S + r, scale, mask=here)
    elif BITS == 8 and not HALF:
        bias = low
        scale = tl.div_rn(high - low, ones * 255.0)
        inverse = tl.div_rn(ones * 255.0, high - low + EPSILON)
    else:
        bias = low.to(S.dtype.element_ty).to(tl.float32)
        scale = tl.div_rn(high - bias, ones * LEVELS).to(S.dtype.element_ty).to(tl.float32)
        if HALF and BITS == 8:
            reaches = (low >= bias - 0.5 * scale) & (high <= bias + (LEVELS + 0.5) * scale)
            bias = tl.where(reaches, bias, _half_below(low).to(tl.float32))
            up = -_half_below(-tl.div_rn(high - bias, ones * LEVELS))
            scale = tl.where(reaches, scale, up.to(tl.float32))
        # 2**-128: inverses of such scales are infinite
        scale = tl.where(tl.abs(scale) <= 2.938735877055719e-39, 1.0, scale)
        inverse = tl.div_rn(ones, scale)
    if PARTS == 2:
        tl.store(S + r * 2, scale.to(S.dtype.element_ty), mask=here)
        tl.store(S + r * 2 + 1, bias.to(S.dtype.element_ty), mask=here)
    for begin in range(0, row_bytes, BLOCK_Q):
        q = begin + tl.arange(0, BLOCK_Q)
        packed = tl.zeros((BLOCK_R, BLOCK_Q), tl.int32)
        for place in tl.static_range(8 // BITS):
            d = q * (8 // BITS) + place
            mask = here[:, None] & (d < D)[None, :]
            w = tl.load(W + (r * D)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
            if PARTS == 1:
                packed = _e4m3(tl.div_rn(w, scale[:, None] + tl.zeros_like(w)))
            else:
                n = tl.minimum(tl.maximum((w - bias[:, None]) * inverse[:, None], 0.0), LEVELS)
                # a sum that leaves no room for a fraction rounds to nearest even
                n = ((n + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000) << (place * BITS)
                packed |= tl.where(mask, n, 0)
        tl.store(
            Q + (r * row_bytes)[:, None] + q[None, :],
            packed.to(tl.uint8),
            mask=here[:, None] & (q < row_bytes)[None, :],
        )


@triton.jit(do_not_specialize=["R"])
def _dequantize_rows_kernel(  # type: ignore[no-untyped-def]
    Q,
    S,
    W,
    R,
    D,
    row_bytes,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (r < R)[:, None] & (d < D)[None, :]
    scale, bias = row_scales(S, r, r < R, PARTS)
    q = tl.load(Q + (r * row_bytes)[:, None] + (d // (8 // BITS))[None, :], mask=mask, other=0)
    w = row_values(q, scale, bias, (d % (8 // BITS) * BITS)[None, :], BITS, PARTS)
    tl.store(W + (r * D)[:, None] + d[None, :], w.to(W.dtype.element_ty), mask=mask)


def quantize_rows(weights: Tensor, format: str, scale_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows.

    Shapes: weights [R, D] fp32, fp16 or bf16; returns payload uint8 [R, row_bytes] and scales [R, parts].

    Raises:
        ValueError: an unknown format, scales of a dtype that the format does not have, or a row that is not finite or
            that the format cannot hold. Rows are not looked at while the call is traced.
    """
    kind = row_format(format)
    dtype = scale_dtype or kind.scale_dtype
    if kind.parts and dtype not in kind.scale_dtypes:
        raise ValueError(f"scales of {format} rows are {' or '.join(map(str, kind.scale_dtypes))}, not {dtype}")
    if weights.dim() != 2 or not weights.is_floating_point():
        raise ValueError(f"rows to quantize are floats [R, D], got {weights.dtype} {list(weights.shape)}")
    if direct(weights):
        payload, scales, finite = _made(weights, kind, dtype)
    else:
        payload, scales = torch.ops.shardwise.quantize_rows(weights, format, dtype)
        finite = _is_traced(weights)
    if not finite:
        _require_rows(weights, payload if not kind.parts else scales, kind, dtype)
    return payload, scales


def _is_traced(tensor: Tensor) -> bool:
    """Whether the tensor stands for values that there will be."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack()) or tensor.is_meta


def _require_rows(weights: Tensor, made: Tensor, kind: RowFormat, dtype: torch.dtype) -> None:
    """ValueError for the first row that was no row of finite numbers, or came to be none: `made` shows it."""
    shown = made if kind.parts else made.view(DTYPES[kind.name])
    # one host sync: a minimum and a maximum, which hand on NaN
    if not shown.numel() or bool(torch.stack(shown.aminmax()).isfinite().all()):
        return
    row = int((~shown.isfinite()).any(1).nonzero()[0])
    values = weights[row].float()
    if bool(values.isfinite().all()):
        limit = f"{float(values.min()):g} to {float(values.max()):g}"
        if kind.parts and dtype == torch.float16:
            raise ValueError(f"row {row} reaches from {limit}, more than fp16 scales hold: scale_dtype=torch.float32")
        raise ValueError(f"row {row} reaches from {limit}, more than {kind.name} rows hold: take bf16 or fp32 rows")
    column = int((~values.isfinite()).nonzero()[0])
    raise ValueError(f"row {row} is not finite, {float(values[column])} in column {column}: mend it before quantizing")


def dequantize_rows(
    payload: Tensor, scales: Tensor, dim: int, format: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of quantized rows, [R, dim] in `dtype`, computed in fp32.

    Shapes: payload uint8 [R, row_bytes], scales [R, parts], as `quantize_rows` gives them.

    Raises:
        ValueError: payload or scales do not have the shape that `dim` and `format` ask for.
    """
    kind, shape = row_format(format), payload.shape
    rows, width = shape[0], kind.row_bytes(dim)
    # a shape is equal to a tuple
    if shape != (rows, width) or scales.shape != (rows, kind.parts):
        raise ValueError(
            f"{format} rows of dim {dim} have payload {[rows, width]} and scales {[rows, kind.parts]},"
            f" got {list(shape)} and {list(scales.shape)}"
        )
    if direct(payload, scales):
        return _dequantize_rows(payload, scales, dim, format, dtype)
    return torch.ops.shardwise.dequantize_rows(payload, scales, dim, format, dtype)  # type: ignore[no-any-return]


def _made(weights: Tensor, kind: RowFormat, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, bool]:
    """Payload and scales, and whether all are known to be finite."""
    rows, dim = weights.shape
    payload = torch.empty(rows, kind.row_bytes(dim), dtype=torch.uint8, device=weights.device)
    scales = torch.empty(rows, kind.parts, dtype=scale_dtype, device=weights.device)
    if not kind.parts:
        payload.view(DTYPES[kind.name]).copy_(weights)
    elif not runs_kernel(weights):
        finite = None if weights.is_cuda else cpu_quantized.quantize(weights, kind, payload, scales)
        if finite is not None:
            return payload, scales, finite
        by_torch = _quantize_block if weights.is_cpu and kind.parts == 2 and dim else _quantize_block_ref
        for block in _blocks(rows, dim):
            by_torch(weights[block], kind, payload[block], scales[block])
    elif rows:
        block_d, block_q = (min(next_power_of_2(n), _TILE) for n in (dim, kind.row_bytes(dim)))
        block_r = max(1, _TILE // block_d)
        _quantize_rows_kernel[(triton.cdiv(rows, block_r),)](
            weights.contiguous(), payload, scales, rows, dim, kind.row_bytes(dim),
            kind.bits, kind.parts, FP8_MAX, _EPSILON, block_r, block_d, block_q, **launch_options(4, 96), **UNFUSED,
        )  # fmt: skip
    return payload, scales, False


def _quantize_block_ref(weights: Tensor, kind: RowFormat, payload: Tensor, scales: Tensor) -> None:
    quantized = quantize_rows_ref(weights, kind.name, scales.dtype)
    payload.copy_(quantized[0])
    scales.copy_(quantized[1])


def _quantize_block(weights: Tensor, kind: RowFormat, payload: Tensor, scales: Tensor) -> None:
    """`quantize_rows_ref` of a few rows on the CPU in less time: `aminmax` along rows is no vector loop."""
    rows = weights.float()
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    zero = low == 0
    if bool(zero.any()):
        # of zeros with both signs the first one counts
        at = zero[:, 0].nonzero()[:, 0]
        low[at], high[at] = rows[at].aminmax(dim=1, keepdim=True)
    scale, bias, inverse = _scales_of(low, high, kind, scales.dtype)
    scales[:, :1], scales[:, 1:] = scale, bias
    numbers = (rows - bias.float()).mul_(inverse).round_()
    if not _is_fused(kind, scales.dtype):
        numbers.clamp_(0, kind.levels)
    payload.copy_(numbers if kind.bits == 8 else _pack(numbers.to(torch.uint8), kind))


def _quantize_rows(weights: Tensor, format: str, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _made(weights, row_format(format), scale_dtype)[:2]


def _fake_quantize(weights: Tensor, format: str, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kind, (rows, dim) = row_format(format), weights.shape
    payload = weights.new_empty(rows, kind.row_bytes(dim), dtype=torch.uint8)
    return payload, weights.new_empty(rows, kind.parts, dtype=scale_dtype)


def _dequantize_rows(payload: Tensor, scales: Tensor, dim: int, format: str, dtype: torch.dtype) -> Tensor:
    kind, rows = row_format(format), payload.shape[0]
    weights = torch.empty(rows, dim, dtype=dtype, device=payload.device)
    if not kind.parts or not runs_kernel(payload):
        if payload.is_cuda or not cpu_quantized.dequantize(payload, scales, kind, weights):
            for block in _blocks(rows, dim):
                weights[block] = dequantize_rows_ref(payload[block], scales[block], dim, format, dtype)
    elif rows:
        block_d = min(next_power_of_2(dim), _TILE)
        block_r = max(1, _TILE // block_d)
        _dequantize_rows_kernel[(triton.cdiv(rows, block_r), triton.cdiv(dim, block_d))](
            payload.contiguous(), paired(scales.contiguous()), weights, rows, dim, kind.row_bytes(dim),
            kind.bits, kind.parts, block_r, block_d, **UNFUSED,
        )  # fmt: skip
    return weights


def _fake_dequantize(payload: Tensor, scales: Tensor, dim: int, format: str, dtype: torch.dtype) -> Tensor:
    return payload.new_empty(payload.shape[0], dim, dtype=dtype)


def _blocks(rows: int, dim: int) -> list[slice]:
    """Rows that the torch path does at a time: what it makes of them then stays in a core's cache."""
    step = max(1, _BLOCK_ELEMENTS // max(dim, 1))
    return [slice(row, row + step) for row in range(0, rows, step)]


register(
    "quantize_rows(Tensor weights, str format, ScalarType scale_dtype) -> (Tensor, Tensor)",
    _quantize_rows,
    _fake_quantize,
)
register(
    "dequantize_rows(Tensor payload, Tensor scales, int dim, str format, ScalarType dtype) -> Tensor",
    _dequantize_rows,
    _fake_dequantize,
)
