"""First values of rows as a function of (seed, row, column): the same bits on every device, in every order and shard.

Shapes: rows [n] int64, seed [1] int64; returns [n, columns].
Bytes moved: 8 a row, and the result once.

A row and the seed make 64 bits by Murmur's mix, of which there is one for each row; these and the column make 32 by
its mix for 32 bits, twice. Uniform values are 24 of these as a fraction. Normal ones are the inverse of the normal
distribution, linear between 64 places of each octave of the probability (Lee, Cheung, Villasenor, Luk: a hardware
Gaussian noise generator using the inversion method with hierarchical segmentation, 2006), in integers of 2 ** -28: at
most 1.3e-5 deviations from the true inverse, and none beyond 6.34. Products and sums of fp32 are rounded one by one.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from .. import numba_loops
from .._op import direct, gather_tile, register, runs_kernel, tl, triton
from ..features import row_alignment
from ..hashes import mix32, mix64, mixed64

# the CPU's compiled loops; None where numba is missing or does not work
loops = partial(numba_loops.loops, "rows_loops")
KINDS = ("constant", "uniform", "normal")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# 2 ** 64 over the golden ratio, signed, and Murmur3's factor of a column
SEED, COLUMN = 0x9E3779B97F4A7C15 - (1 << 64), 0x85EBCA6B
# places of an octave, octaves, and what a normal value is a multiple of
SEGMENT_BITS, OCTAVES, UNIT = 6, 32, 2.0**-28
# bits of an fp32 number below those that choose a place, and those of 1.0
REST_BITS, ONE = 23 - SEGMENT_BITS, 127 << 23


class Scale(NamedTuple):
    """How numbers become values: first + number * step, all fp32, no less than `least`, no more than `most`."""

    first: float
    step: float
    least: float
    most: float


@lru_cache(maxsize=256)
def scale_of(kind: str, low: float, high: float, dtype: torch.dtype) -> Scale:
    """The scale of a kind of values in a dtype.

    Raises:
        ValueError: no such kind, or no number of the dtype lies in the interval of uniform values.
    """
    if kind not in KINDS:
        raise ValueError(f"initial_rows: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if dtype not in _DTYPES:
        raise TypeError(f"initial_rows: dtype must be float32, float16 or bfloat16, got {dtype}")
    first, last = _fp32(low), _fp32(high)
    infinity = float("inf")
    if kind != "uniform":
        return Scale(first, last if kind == "normal" else 0.0, -infinity, infinity)
    least, most = _nearest(low, dtype, up=True), -_nearest(-high, dtype, up=True)
    if most == high:
        most = -_nearest(-high, dtype, up=True, beyond=True)
    if not least <= most:
        raise ValueError(
            f"initial_rows: uniform values need low < high, a number of {dtype} between, got {low}, {high}"
        )
    return Scale(first, _fp32(last - first), least, most)


def _fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64, device="cpu").float())


def _nearest(x: float, dtype: torch.dtype, *, up: bool, beyond: bool = False) -> float:
    """The least number of a dtype that is at least x, or that is more than x."""
    near = torch.tensor(x, dtype=torch.float64, device="cpu").to(dtype)
    if float(near) > x or (float(near) == x and not beyond):
        return float(near)
    bits = near.view(torch.int32 if dtype == torch.float32 else torch.int16)
    if float(near) == 0:
        return float(torch.ones_like(bits).view(dtype))
    return float((bits + (1 if float(near) > 0 else -1)).view(dtype))


@cache
def normal_table() -> Tensor:
    """Where the normal distribution's upper tail is f * 2 ** -33, for f = (1 + s / 64) * 2 ** octave: [2050] int32.

    The last two are that of 1/2. A value is at least 1e-12 from where rounding changes, a thousand times the error of
    `inv_cdf`: every machine has the same integers.
    """
    segments = 1 << SEGMENT_BITS
    tails = [2.0 ** (octave - 33) * (1 + s / segments) for octave in range(OCTAVES) for s in range(segments)]
    values = [round(-NormalDist().inv_cdf(tail) / UNIT) for tail in [*tails, 0.5, 0.5]]
    return torch.tensor(values, dtype=torch.int32, device="cpu")


@cache
def table_on(device: torch.device) -> Tensor:
    """`normal_table`, which comes to each device once."""
    return normal_table().to(device)


def initial_rows_ref(
    rows: Tensor,
    seed: Tensor,
    first_column: int,
    columns: int,
    kind: str,
    low: float,
    high: float,
    dtype: torch.dtype,
) -> Tensor:
    """One value after another by the hash of its place."""
    scale = scale_of(kind, low, high, dtype)
    if kind == "constant":
        return torch.full((rows.shape[0], columns), low, dtype=dtype, device=rows.device)
    state = mix64(rows + mix64(seed + SEED))[:, None]  # [n, 1]
    column = torch.arange(first_column, first_column + columns, device=rows.device)  # [columns]
    random = mix32(mix32(column * COLUMN + state) ^ (state >> 32))  # [n, columns] 32 bits
    number = (random >> 8).float() * 2.0**-24 if kind == "uniform" else _normal(random)
    return (number * scale.step + scale.first).clamp(scale.least, scale.most).to(dtype)


def _normal(random: Tensor) -> Tensor:
    """Normal values, fp32, of 32 random bits: the highest is the sign."""
    table = table_on(random.device)
    bits = ((random & 0x7FFFFFFF) * 2 + 1).float().view(torch.int32).long() - ONE
    place, rest = bits >> REST_BITS, bits & ((1 << REST_BITS) - 1)
    here, following = table[place].long(), table[place + 1].long()
    value = here + ((following - here) * rest >> REST_BITS)
    return torch.where(random >> 31 == 1, -value, value).float() * UNIT


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """`mix32` of uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def first_values(  # type: ignore[no-untyped-def]
    row, seed, column, table, first, step, least, most, NORMAL: tl.constexpr, REST: tl.constexpr, BF16: tl.constexpr
):
    """Values [n, d] of rows [n] int64 and columns [d], fp32; those of bf16 are rounded to it."""
    base = mixed64(seed.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15)
    state = mixed64(row.to(tl.uint64, bitcast=True) + base)
    place_of_column = column.to(tl.uint32) * 0x85EBCA6B
    random = _mixed(place_of_column[None, :] + state.to(tl.uint32)[:, None])
    random = _mixed(random ^ (state >> 32).to(tl.uint32)[:, None])
    if NORMAL:
        bits = ((random & 0x7FFFFFFF) * 2 + 1).to(tl.float32).to(tl.int32, bitcast=True) - 0x3F800000
        place = bits >> REST
        here = tl.load(table + place)
        following = tl.load(table + place + 1)
        between = (following - here).to(tl.int64) * (bits & ((1 << REST) - 1)) >> REST
        x = here + between.to(tl.int32)
        number = tl.where((random >> 31) > 0, -x, x).to(tl.float32) * 3.725290298461914e-09
    else:
        number = (random >> 8).to(tl.int32).to(tl.float32) * 5.960464477539063e-08
    y = number * step + first
    if not NORMAL:
        y = tl.minimum(tl.maximum(y, least), most)
    if BF16:
        # to nearest, ties to even, by its bits: the interpreter would cut them off
        bits = y.to(tl.uint32, bitcast=True)
        y = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return y


@triton.jit(
    do_not_specialize=["N", "first_column", "first", "step", "least", "most"], do_not_specialize_on_alignment=["rows"]
)
def _initial_rows_kernel(  # type: ignore[no-untyped-def]
    rows,
    seed,
    table,
    Y,
    N,
    D,
    first_column,
    first,
    step,
    least,
    most,
    NORMAL: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(rows + n, mask=n < N, other=0)
    y = first_values(
        row, tl.load(seed), first_column + d, table, first, step, least, most, NORMAL, REST,
        Y.dtype.element_ty == tl.bfloat16,
    )  # fmt: skip
    tl.store(Y + (n * D)[:, None] + d[None, :], y.to(Y.dtype.element_ty), mask=(n < N)[:, None] & (d < D)[None, :])


def initial_rows(
    rows: Tensor,
    seed: Tensor,
    first_column: int,
    columns: int,
    kind: str,
    low: float,
    high: float,
    dtype: torch.dtype,
) -> Tensor:
    """Values of rows' columns first_column ... first_column + columns - 1, each of (seed, row, column) alone.

    Kinds: "uniform" in [low, high), also after rounding to dtype; "normal" of mean low and deviation high; "constant"
    low. Rows may be any int64, such as ids.

    Shapes: rows [n] int64, seed [1] int64 on their device; returns [n, columns] of dtype.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit, no such kind, or no number in [low, high).
    """
    for name, numbers in (("rows", rows), ("seed", seed)):
        if numbers.dtype != torch.int64:
            raise TypeError(f"initial_rows: {name} must be int64, got {numbers.dtype}")
        if numbers.dim() != 1 or numbers.device != rows.device:
            raise ValueError(
                f"initial_rows: {name} must be 1-D on {rows.device}, got {[*numbers.shape]} on {numbers.device}"
            )
    if seed.shape[0] != 1:
        raise ValueError(f"initial_rows: seed must have one number, got {seed.shape[0]}")
    if first_column < 0 or columns < 0:
        raise ValueError(f"initial_rows: columns must not be negative, got {columns} from {first_column}")
    if direct(rows, seed):
        return _initial_rows(rows, seed, first_column, columns, kind, low, high, dtype)
    return torch.ops.shardwise.initial_rows(rows, seed, first_column, columns, kind, low, high, dtype)  # type: ignore[no-any-return]


def _initial_rows(
    rows: Tensor,
    seed: Tensor,
    first_column: int,
    columns: int,
    kind: str,
    low: float,
    high: float,
    dtype: torch.dtype,
) -> Tensor:
    scale = scale_of(kind, low, high, dtype)
    if kind != "constant" and runs_kernel(rows):
        rows, table = rows.contiguous(), table_on(rows.device)
        out = torch.empty((rows.shape[0], columns), dtype=dtype, device=rows.device)
        if out.numel():
            block_n, block_d, warps = gather_tile(columns, dtype.itemsize, row_alignment(columns, dtype.itemsize))
            grid = (triton.cdiv(rows.shape[0], block_n), triton.cdiv(columns, block_d))
            _initial_rows_kernel[grid](
                rows, seed, table, out, rows.shape[0], columns, first_column, *scale, kind == "normal", REST_BITS,
                block_n, block_d, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
        return out
    if kind != "constant" and rows.is_cpu and (compiled := loops()) is not None:
        rows, table = rows.contiguous(), normal_table()
        out = torch.empty((rows.shape[0], columns), dtype=torch.float32, device="cpu")
        loop = compiled.uniform if kind == "uniform" else compiled.normal
        loop(rows.data_ptr(), rows.shape[0], int(seed), first_column, columns, *scale, table.data_ptr(), out.data_ptr())
        return out.to(dtype)
    return initial_rows_ref(rows, seed, first_column, columns, kind, low, high, dtype)


register(
    "initial_rows(Tensor rows, Tensor seed, SymInt first_column, SymInt columns, str kind, float low, float high,"
    " ScalarType dtype) -> Tensor",
    _initial_rows,
    lambda rows, seed, first_column, columns, kind, low, high, dtype: rows.new_empty(
        (rows.shape[0], columns), dtype=dtype
    ),
)
