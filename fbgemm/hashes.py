"""Hashes of ids as FBGEMM computes them, on int64 tensors that hold the bits of unsigned numbers.

Multiplications and sums of int64 wrap around as those of unsigned numbers do; what differs are shifts to the right and
remainders, which stand here.
"""

from __future__ import annotations

from torch import Tensor

# MurmurHash3's constants: of its body, and of the mixes at its end
_BODY = 0x87C37B91114253D5 - (1 << 64), 0x4CF5AD432745937F
_MIX64 = 0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)
_MIX32 = 0x85EBCA6B, 0xC2B2AE35
_LENGTH = 16
_WORD = 0xFFFFFFFF


def murmur_hash(x: Tensor, y: int = 0, seed: int = 0) -> Tensor:
    """MurmurHash3 of the 16 bytes x, y: one half of its 128 bits xor the other, int64 in the shape of x."""
    seed = _signed(seed)
    first = _rotated(x.long() * _BODY[0], 31) * _BODY[1] ^ seed  # [...]
    h1 = (_rotated(first, 27) + seed) * 5 + 0x52DCE729
    second = _rotated_number(_signed(y) * _BODY[1], 33) * _BODY[0]
    h2 = (h1 + _rotated_number(second ^ seed, 31)) * 5 + 0x38495AB5
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


def _shifted(h: Tensor, bits: int) -> Tensor:
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def _rotated(h: Tensor, bits: int) -> Tensor:
    return (h << bits) | _shifted(h, 64 - bits)


def _rotated_number(h: int, bits: int) -> int:
    h &= (1 << 64) - 1
    return _signed((h << bits) | (h >> (64 - bits)))


def _signed(h: int) -> int:
    h &= (1 << 64) - 1
    return h - (1 << 64) if h >> 63 else h
