"""Stochastic rounding of fp32 rows to fp16 or bf16: up or down with the odds that keep the mean.

The random numbers are a hash of (row and column of the whole table, salt), so a step repeats bit for bit whatever
tables, launches or tiles are around it, and whatever part of the table it sees. The salt is made of the seed and the
step count.
Letters: w [U, D] fp32, place [U] int64 the row's number plus 2**32 times its first column (`features.origin_of`), salt
[1] int64 on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._op import tl, triton

_MASK = 0xFFFFFFFF
# odd constants of Murmur3's finalizer and of the golden ratio
_MIX1 = 0x85EBCA6B
_MIX2 = 0xC2B2AE35
_GOLDEN = 0x9E3779B1


def salt_of(seed: Tensor, step: Tensor) -> Tensor:
    """Seed [1] and step count [1] as one number below 2**32, on their device."""
    return (seed + step * _GOLDEN) & _MASK


def round_stochastically(w: Tensor, dtype: torch.dtype, place: Tensor, salt: Tensor) -> Tensor:
    """w [U, D] fp32 rounded to values of `dtype` (fp16 or bf16); infinities and NaN stay. The twin of the kernel's."""
    column = (torch.arange(w.shape[1], device=w.device) * _MIX1) + ((place >> 32) * _MIX1)[:, None]
    random = _mix(_mix(((place & _MASK) * _GOLDEN + salt) & _MASK)[:, None] ^ (column & _MASK))
    bits = w.view(torch.int32)
    kept = 16 if dtype == torch.bfloat16 else 13
    low = (1 << kept) - 1
    up = ((bits + (random & low).to(torch.int32)) & ~low).view(torch.float32)
    if dtype == torch.float16:
        # below 2**-14 the steps of fp16 are all 2**-24
        fine = (w * 2.0**24 + (random & 0xFFFFFF).float() * 2.0**-24).floor() * 2.0**-24
        up = torch.where(w.abs() < 2.0**-14, fine, up)
    return torch.where(w.isfinite(), up, w)


def _mix(x: Tensor) -> Tensor:
    """Murmur3's 32-bit finalizer on int64 that holds 32 bits."""
    x = ((x ^ (x >> 16)) * _MIX1) & _MASK
    x = ((x ^ (x >> 13)) * _MIX2) & _MASK
    return x ^ (x >> 16)


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def salt_in_kernel(seed, step):  # type: ignore[no-untyped-def]
    # of which 32 bits are used
    return tl.load(seed) + tl.load(step) * 0x9E3779B1


@triton.jit
def rounded_stochastically(w, place, d, salt, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    # w [C, D] fp32, place [C] int64, d [D]; HALF: fp16, else bf16
    seeds = _mixed((place * 0x9E3779B1 + salt).to(tl.uint32))
    column = (place >> 32).to(tl.uint32)[:, None] + d.to(tl.uint32)[None, :]
    random = _mixed(seeds[:, None] ^ (column * 0x85EBCA6B))
    bits = w.to(tl.uint32, bitcast=True)
    if HALF:
        up = ((bits + (random & 0x1FFF)) & 0xFFFFE000).to(tl.float32, bitcast=True)
        fine = tl.floor(w * 16777216.0 + (random & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08)
        up = tl.where(tl.abs(w) < 6.103515625e-05, fine * 5.9604644775390625e-08, up)
    else:
        up = ((bits + (random & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(w) < float("inf"), up, w)


def rounds(dtype: torch.dtype, seed: Any) -> int:
    """How a kernel rounds rows of this dtype: 0 to nearest, 1 to bf16 and 2 to fp16 stochastically."""
    if seed is None or dtype == torch.float32:
        return 0
    return 2 if dtype == torch.float16 else 1
