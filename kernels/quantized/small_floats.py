"""Numbers as smaller floats: bf16, 8-bit floats without a scale, floats whose neighbours share an exponent.

Shapes: X [...] fp32, Y [...] of bf16, of 8-bit floats (uint8) or of fp32 again. An 8-bit float has a sign, EBITS bits
of exponent with a bias, and 7 - EBITS of mantissa; it has neither infinity nor NaN.
Bytes moved: every number is read once and written once: 6 a number to bf16, 5 to and from 8-bit floats, and 8 where
neighbours share an exponent, whose second reading comes from the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._op import INTERPRETED, next_power_of_2, register, runs_kernel, tl, triton
from .row_numbers import UNFUSED

# a number for each thread: what is read and written one after another then uses its sectors (perf/compile/sectors.py)
_BLOCK = 64 if INTERPRETED else 128
# numbers of a tile where neighbours share an exponent, and at most of a box at a time
_TILE = 64 if INTERPRETED else 1024


def float_to_bfloat16_ref(x: Tensor) -> Tensor:
    """fp32 numbers in bf16, of two that are as near the one farther from zero."""
    rounded = ((x.view(torch.int32) + (1 << 15)) >> 16).to(torch.int16).view(torch.bfloat16)
    # a carry would make infinity or zero of a NaN
    return torch.where(x.isnan(), x.to(torch.bfloat16), rounded)


def to_float8_ref(x: Tensor, ebits: int, bias: int, max_pos: float) -> Tensor:
    """Codes of fp32 numbers, to nearest even; what is beyond `max_pos`, and NaN, becomes it."""
    mbits = 7 - ebits
    magnitude = x.abs()
    magnitude = torch.where(magnitude < max_pos, magnitude, max_pos)
    # a sum that leaves no room for what goes rounds to nearest even
    room = ((magnitude.view(torch.int32) & 0x7F800000) + ((23 - mbits) << 23)).view(torch.float32)
    rounded = ((magnitude + room) - room).view(torch.int32)
    normal = (rounded - ((127 - bias) << 23)) >> (23 - mbits)
    # below the smallest normal number a code is a number of steps
    few = (magnitude + 2.0 ** (24 - bias - mbits)).view(torch.int32)
    code = torch.where(magnitude >= 2.0 ** (1 - bias), normal, few) & 0x7F
    return (code | ((x.view(torch.int32) >> 24) & 0x80)).to(torch.uint8)


def from_float8_ref(codes: Tensor, ebits: int, bias: int) -> Tensor:
    """The fp32 values of 8-bit floats."""
    # sign, exponent and mantissa are moved to where fp32 has them, between them copies of the sign that go
    bits = codes.view(torch.int8).to(torch.int32).bitwise_left_shift_(16 + ebits)
    bits.bitwise_and_((0x7F << (16 + ebits)) - (1 << 31))
    return bits.view(torch.float32).mul_(2.0 ** (127 - bias))


def share_exponents_ref(x: Tensor, box: int, mbits: int, bias: int, max_pos: float) -> Tensor:
    """Rows [R, D] fp32 rounded to steps of 2**(e - mbits), e the largest exponent of a box, at least 1 - bias."""
    rows, dim = x.shape
    # the last box of a row may be shorter
    padded = torch.nn.functional.pad(x, (0, -dim % box)).view(rows, -(-dim // box), box).double()
    exponents = torch.where(padded == 0, -127, padded.abs().frexp().exponent - 1).clamp(min=-127)
    # NaN and infinity have fp32's largest exponent
    exponents = torch.where(padded.isfinite(), exponents, 128)
    shared = exponents.amax(2, keepdim=True) if padded.numel() else exponents
    # a bit lost for each that a number lies below the largest of its box, and below the smallest normal number
    lost = (1 - bias - exponents).clamp(min=0) + (shared - exponents).clamp(min=0)
    step = torch.ldexp(torch.ones_like(padded), exponents - mbits + lost)
    magnitude = (padded.abs() / step).round() * step
    magnitude = torch.where(magnitude < torch.tensor(max_pos, dtype=torch.float32).double(), magnitude, max_pos)
    return torch.copysign(magnitude.flatten(1)[:, :dim].float(), x)


@triton.jit
def float8_codes(magnitude, EBITS: tl.constexpr, BIAS: tl.constexpr, STEPS: tl.constexpr, NORMAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes, without a sign, of fp32 numbers that are not negative and have one. NORMAL is the smallest normal number,
    STEPS what leaves room for the numbers below it alone."""
    MBITS: tl.constexpr = 7 - EBITS  # pyright: ignore[reportInvalidTypeForm]
    bits = magnitude.to(tl.int32, bitcast=True)
    room = ((bits & 0x7F800000) + ((23 - MBITS) << 23)).to(tl.float32, bitcast=True)
    rounded = ((magnitude + room) - room).to(tl.int32, bitcast=True)
    normal = (rounded - ((127 - BIAS) << 23)) >> (23 - MBITS)
    few = (magnitude + STEPS).to(tl.int32, bitcast=True)
    return tl.where(magnitude >= NORMAL, normal, few) & 0x7F


@triton.jit
def float8_values(codes, EBITS: tl.constexpr, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 values of codes; FACTOR is 2**(127 - bias)."""
    bits = codes.to(tl.int8, bitcast=True).to(tl.int32) << (16 + EBITS)
    bits = bits & ((0x7F << (16 + EBITS)) - 0x80000000)
    return bits.to(tl.float32, bitcast=True) * FACTOR


def float8_constants(ebits: int, bias: int) -> tuple[int, int, float, float]:
    """The last arguments of `float8_codes`."""
    return ebits, bias, 2.0 ** (17 + ebits - bias), 2.0 ** (1 - bias)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["X"])
def _to_bfloat16_kernel(X, Y, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < N, other=0.0)
    rounded = (x.to(tl.int32, bitcast=True) + 0x8000) >> 16
    tl.store(Y + i, tl.where(x != x, 0x7FC0, rounded).to(tl.int16), mask=i < N)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["X"])
def _to_float8_kernel(  # type: ignore[no-untyped-def]
    X,
    Y,
    N,
    max_pos,
    EBITS: tl.constexpr,
    BIAS: tl.constexpr,
    STEPS: tl.constexpr,
    NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < N, other=0.0)
    magnitude = tl.where(tl.abs(x) < max_pos, tl.abs(x), max_pos)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    tl.store(Y + i, (float8_codes(magnitude, EBITS, BIAS, STEPS, NORMAL) | sign).to(tl.uint8), mask=i < N)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["Q"])
def _from_float8_kernel(Q, Y, N, EBITS: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, float8_values(tl.load(Q + i, mask=i < N, other=0), EBITS, FACTOR), mask=i < N)


@triton.jit(do_not_specialize=["B"], do_not_specialize_on_alignment=["X"])
def _share_exponents_kernel(  # type: ignore[no-untyped-def]
    X,
    Y,
    B,
    D,
    BOX,
    boxes,
    MBITS,
    LEAST,
    max_pos,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    begin = b // boxes * D + b % boxes * BOX
    size = tl.where(b < B, tl.minimum(BOX, D - b % boxes * BOX), 0)
    shared = tl.zeros((BLOCK_B,), tl.int32)
    for first in range(0, BOX, BLOCK_D):
        i = first + tl.arange(0, BLOCK_D)
        x = tl.load(X + begin[:, None] + i[None, :], mask=i[None, :] < size[:, None], other=0.0)
        shared = tl.maximum(shared, tl.max((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> 23, 1))
    for first in range(0, BOX, BLOCK_D):
        i = first + tl.arange(0, BLOCK_D)
        inside = i[None, :] < size[:, None]
        x = tl.load(X + begin[:, None] + i[None, :], mask=inside, other=0.0)
        magnitude = tl.abs(x)
        large = (magnitude.to(tl.int32, bitcast=True) >> 23) >= 127
        # in the middle of fp32's range nothing overflows: by 2**32 towards it, and back
        moved = magnitude * tl.where(large, 2.3283064365386963e-10, 4294967296.0)
        field = moved.to(tl.int32, bitcast=True) >> 23
        exponent = field - 127 + tl.where(large, 32, -32)
        dropped = 23 - MBITS + tl.maximum(LEAST - exponent, 0) + tl.maximum(shared[:, None] - 127 - exponent, 0)
        # a sum that leaves no room for what goes rounds to nearest even
        room = (tl.minimum(dropped + field, 254) << 23).to(tl.float32, bitcast=True)
        rounded = ((moved + room) - room) * tl.where(large, 4294967296.0, 2.3283064365386963e-10)
        rounded = tl.where(rounded < max_pos, rounded, max_pos).to(tl.int32, bitcast=True)
        sign = x.to(tl.int32, bitcast=True) & -0x80000000
        tl.store(Y + begin[:, None] + i[None, :], (rounded | sign).to(tl.float32, bitcast=True), mask=inside)


def float_to_bfloat16(x: Tensor) -> Tensor:
    """fp32 numbers of any shape in bf16, of two that are as near the one farther from zero."""
    return torch.ops.shardwise.float_to_bfloat16(x) if runs_kernel(x) else float_to_bfloat16_ref(x)


def to_float8(x: Tensor, ebits: int, bias: int, max_pos: float) -> Tensor:
    """fp32 numbers of any shape as 8-bit floats, to nearest even; what is beyond `max_pos`, and NaN, becomes it."""
    if runs_kernel(x):
        return torch.ops.shardwise.to_float8(x, ebits, bias, max_pos)  # type: ignore[no-any-return]
    return to_float8_ref(x, ebits, bias, max_pos)


def from_float8(codes: Tensor, ebits: int, bias: int) -> Tensor:
    """The fp32 values of 8-bit floats of any shape."""
    if runs_kernel(codes):
        return torch.ops.shardwise.from_float8(codes, ebits, bias)  # type: ignore[no-any-return]
    return from_float8_ref(codes, ebits, bias)


def _float_to_bfloat16(x: Tensor) -> Tensor:
    if not runs_kernel(x):
        return float_to_bfloat16_ref(x)
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if n := x.numel():
        _to_bfloat16_kernel[(triton.cdiv(n, _BLOCK),)](x.contiguous(), out.view(torch.int16), n, _BLOCK)
    return out


def _to_float8(x: Tensor, ebits: int, bias: int, max_pos: float) -> Tensor:
    if not runs_kernel(x):
        return to_float8_ref(x, ebits, bias, max_pos)
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if n := x.numel():
        _to_float8_kernel[(triton.cdiv(n, _BLOCK),)](
            x.contiguous(), out, n, max_pos, *float8_constants(ebits, bias), _BLOCK
        )
    return out


def _from_float8(codes: Tensor, ebits: int, bias: int) -> Tensor:
    if not runs_kernel(codes):
        return from_float8_ref(codes, ebits, bias)
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    if n := codes.numel():
        _from_float8_kernel[(triton.cdiv(n, _BLOCK),)](codes.contiguous(), out, n, ebits, 2.0 ** (127 - bias), _BLOCK)
    return out


def _share_exponents(x: Tensor, box: int, mbits: int, bias: int, max_pos: float) -> Tensor:
    if not runs_kernel(x):
        return share_exponents_ref(x, box, mbits, bias, max_pos)
    rows, dim = x.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not x.numel():
        return out
    box = min(box, dim)
    boxes = triton.cdiv(dim, box)
    block_d = min(next_power_of_2(box), _TILE)
    block_b = _TILE // block_d
    _share_exponents_kernel[(triton.cdiv(rows * boxes, block_b),)](
        x.contiguous(), out, rows * boxes, dim, box, boxes, mbits, 1 - bias, max_pos, block_b, block_d, **UNFUSED
    )
    return out


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


register("float_to_bfloat16(Tensor x) -> Tensor", _float_to_bfloat16, lambda x: _like(x, torch.bfloat16))
register(
    "to_float8(Tensor x, int ebits, int bias, float max_pos) -> Tensor",
    _to_float8,
    lambda x, ebits, bias, max_pos: _like(x, torch.uint8),
)
register(
    "from_float8(Tensor codes, int ebits, int bias) -> Tensor",
    _from_float8,
    lambda codes, ebits, bias: _like(codes, torch.float32),
)
register(
    "share_exponents(Tensor x, int box, int mbits, int bias, float max_pos) -> Tensor",
    _share_exponents,
    lambda x, box, mbits, bias, max_pos: _like(x, torch.float32),
)
