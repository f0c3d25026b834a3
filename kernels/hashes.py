"""Hashes of ids as FBGEMM computes them, and their remainders, on int64 tensors that hold the bits of unsigned numbers.

Multiplications and sums of int64 wrap around as those of unsigned numbers do; what differs are shifts to the right and
remainders, which stand here. Bytes moved by `murmur_hash`: ids once and hashes once, 16 an id of int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._op import INTERPRETED, register, runs_kernel, tl, triton

# MurmurHash3's constants: of its body, and of the mixes at its end
_BODY = 0x87C37B91114253D5 - (1 << 64), 0x4CF5AD432745937F
_MIX64 = 0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)
_MIX32 = 0x85EBCA6B, 0xC2B2AE35
_LENGTH = 16
_WORD = 0xFFFFFFFF
_BLOCK = 64 if INTERPRETED else 128


def murmur_hash_ref(x: Tensor, y: int = 0, seed: int = 0) -> Tensor:
    """MurmurHash3 of the 16 bytes x, y: one half of its 128 bits xor the other, int64 in the shape of x."""
    seed = signed(seed)
    first = _rotated(x.long() * _BODY[0], 31) * _BODY[1] ^ seed  # [...]
    h1 = (_rotated(first, 27) + seed) * 5 + 0x52DCE729
    h2 = (h1 + second_of(y, seed)) * 5 + 0x38495AB5
    h1, h2 = h1 ^ _LENGTH, h2 ^ _LENGTH
    h1 = h1 + h2
    h2 = h2 + h1
    h1, h2 = mix64(h1), mix64(h2)
    h1 = h1 + h2
    return h1 ^ (h2 + h1)


def mix64(h: Tensor) -> Tensor:
    """The mix at the end of MurmurHash3 for 64 bits, of int64."""
    h = (h ^ _shifted(h, 33)) * _MIX64[0]
    h = (h ^ _shifted(h, 33)) * _MIX64[1]
    return h ^ _shifted(h, 33)


def mix32(h: Tensor) -> Tensor:
    """The mix for 32 bits, of int64 whose high halves are not looked at: 0 ... 2 ** 32 - 1."""
    h = h & _WORD
    h = (h ^ (h >> 16)) * _MIX32[0] & _WORD
    h = (h ^ (h >> 13)) * _MIX32[1] & _WORD
    return h ^ (h >> 16)


def unsigned_remainder(h: Tensor, divisor: Tensor | int) -> Tensor:
    """The remainder of h as an unsigned number; divisors are 1 ... 2 ** 62."""
    # half of an unsigned number is a signed one
    return ((_shifted(h, 1) % divisor) * 2 + (h & 1)) % divisor


def second_of(y: int, seed: int) -> int:
    """What the second half of the hashed bytes adds to the first one's hash."""
    return _rotated_number(_rotated_number(signed(y) * _BODY[1], 33) * _BODY[0] ^ seed, 31)


def _shifted(h: Tensor, bits: int) -> Tensor:
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def _rotated(h: Tensor, bits: int) -> Tensor:
    return (h << bits) | _shifted(h, 64 - bits)


def _rotated_number(h: int, bits: int) -> int:
    h &= (1 << 64) - 1
    return signed((h << bits) | (h >> (64 - bits)))


def signed(h: int) -> int:
    """The int64 with the last 64 bits of a number."""
    h &= (1 << 64) - 1
    return h - (1 << 64) if h >> 63 else h


@triton.jit
def _rotate(h, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    return (h << BITS) | (h >> (64 - BITS))


@triton.jit
def mixed64(h):  # type: ignore[no-untyped-def]
    """`mix64` of uint64."""
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)


@triton.jit
def mixed32(h):  # type: ignore[no-untyped-def]
    """`mix32` of uint64."""
    h = h & 0xFFFFFFFF
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


@triton.jit
def murmured(x, second, seed):  # type: ignore[no-untyped-def]
    """`murmur_hash` of int64, as uint64; `second` and `seed` are int64."""
    seed = seed.to(tl.int64).to(tl.uint64, bitcast=True)
    second = second.to(tl.int64).to(tl.uint64, bitcast=True)
    first = _rotate(x.to(tl.uint64, bitcast=True) * 0x87C37B91114253D5, 31) * 0x4CF5AD432745937F ^ seed
    h1 = (_rotate(first, 27) + seed) * 5 + 0x52DCE729
    h2 = (h1 + second) * 5 + 0x38495AB5
    h1 = h1 ^ 16
    h2 = h2 ^ 16
    h1 = h1 + h2
    h2 = h2 + h1
    h1 = mixed64(h1)
    h2 = mixed64(h2)
    h1 = h1 + h2
    return h1 ^ (h2 + h1)


@triton.jit(do_not_specialize=["N", "second", "seed"], do_not_specialize_on_alignment=["X"])
def _murmur_hash_kernel(X, Y, N, second, seed, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < N, other=0).to(tl.int64)
    tl.store(Y + i, murmured(x, second, seed).to(tl.int64, bitcast=True), mask=i < N)


def murmur_hash(x: Tensor, y: int = 0, seed: int = 0) -> Tensor:
    """MurmurHash3 of the 16 bytes x, y: one half of its 128 bits xor the other.

    Shapes: x [...] int32 or int64; returns int64 in its shape.
    """
    if runs_kernel(x):
        return torch.ops.shardwise.murmur_hash(x, signed(y), signed(seed))  # type: ignore[no-any-return]
    return murmur_hash_ref(x, y, seed)


def _murmur_hash(x: Tensor, y: int, seed: int) -> Tensor:
    if not runs_kernel(x):
        return murmur_hash_ref(x, y, seed)
    out = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    if n := x.numel():
        _murmur_hash_kernel[(triton.cdiv(n, _BLOCK),)](x.contiguous(), out, n, second_of(y, seed), seed, _BLOCK)
    return out


register(
    "murmur_hash(Tensor x, int y, int seed) -> Tensor",
    _murmur_hash,
    lambda x, y, seed: x.new_empty(x.shape, dtype=torch.int64),
)
