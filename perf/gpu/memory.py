"""Global memory of a launch: buffers far apart, and what the requests of warps ask of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .rounding import Array

# addresses of a buffer begin at a multiple of this: an index that is off by less reaches no other buffer
SPACING_BITS = 36
SECTOR = 32
_DTYPES: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(eq=False)
class Buffer:
    """`size` bytes at `base`. `bytes` begins at the address `origin`, a multiple of 512 at or before the base."""

    name: str
    base: int
    size: int
    origin: int
    bytes: Array
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    # per byte whether it has a value; None where all have
    written: Array | None = None
    views: dict[int, Array] = field(default_factory=dict)

    def view(self, size: int) -> Array:
        """The bytes as unsigned integers of `size` bytes."""
        if size not in self.views:
            self.views[size] = self.bytes.view(_DTYPES[size])
        return self.views[size]

    def content(self) -> Array:
        begin = self.base - self.origin
        return self.bytes[begin : begin + self.size].view(self.dtype).reshape(self.shape)


class Memory:
    """The buffers of a launch, or of several one after another."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def put(self, array: Array, name: str, shift: int = 0, *, initialised: bool | Array = True) -> int:
        """A copy of the array on the device, `shift` bytes past a multiple of 512; gives its address.

        Where not `initialised`, a mask a byte or False for all of it, a read before a write is reported.
        """
        data = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        origin = (len(self.buffers) + 1) << SPACING_BITS
        size = -(-(shift + len(data)) // 64) * 64 + 64
        content = np.zeros(size, np.uint8)
        content[shift : shift + len(data)] = data
        written: Array | None = None
        if initialised is not True:
            written = np.zeros(size, np.bool_)
            written[shift : shift + len(data)] = initialised
        self.buffers.append(Buffer(name, origin + shift, len(data), origin, content, array.dtype, array.shape, written))
        return origin + shift

    def get(self, address: int) -> Array:
        """The array of the buffer that begins at an address, as it is now."""
        return self._at(address).content()

    def written(self, address: int) -> Array:
        """Of each byte of that buffer whether it has a value."""
        buffer = self._at(address)
        begin = buffer.base - buffer.origin
        if buffer.written is None:
            return np.ones(buffer.size, np.bool_)
        return buffer.written[begin : begin + buffer.size]

    def _at(self, address: int) -> Buffer:
        for buffer in self.buffers:
            if buffer.base == address:
                return buffer
        raise KeyError(f"no buffer begins at {address:#x}")

    def find(self, address: int) -> Buffer | None:
        """The buffer in whose part of the addresses this one lies."""
        number = (address >> SPACING_BITS) - 1
        return self.buffers[number] if 0 <= number < len(self.buffers) else None


def requests(addresses: Array, warps: Array, size: int) -> tuple[int, int, int]:
    """Requests, bytes and sectors of one access of `size` bytes by each of these threads.

    Each warp makes a request. Bytes that several of its threads ask for count once, as do the 32-byte sectors.
    """
    keys = addresses | (warps.astype(np.int64) << 48)
    keys.sort()
    changes = keys[1:] ^ keys[:-1]
    count = int(np.count_nonzero(changes)) + 1
    sectors = int(np.count_nonzero(changes >> 5)) + 1 if size <= SECTOR else count * size // SECTOR
    return int(np.count_nonzero(changes >> 48)) + 1, count * size, sectors


class Sharing:
    """Which CTA read, wrote or changed atomically each piece of a buffer in one launch; 0 none, -1 several."""

    def __init__(self, buffer: Buffer, piece: int) -> None:
        count = len(buffer.bytes) // piece
        self.piece = piece
        self.reader, self.writer, self.atomic = (np.zeros(count, np.int32) for _ in range(3))

    def note(self, access: str, offsets: Array, size: int, cta: int) -> Array | None:
        """Note a "read", "write" or "atomic" by a CTA; gives the accesses that another CTA's collide with."""
        places = offsets // self.piece
        if size > self.piece:
            places = places[:, None] + np.arange(size // self.piece)
        collides = np.zeros(len(offsets), np.bool_)
        for other in {"read": "wa", "write": "rwa", "atomic": "rw"}[access]:
            marks = {"r": self.reader, "w": self.writer, "a": self.atomic}[other][places]
            clash = (marks != 0) & (marks != cta)
            if clash.any():
                collides |= clash if clash.ndim == 1 else clash.any(axis=1)
        own = {"read": self.reader, "write": self.writer, "atomic": self.atomic}[access]
        before = own[places]
        own[places] = np.where((before == 0) | (before == cta), np.int32(cta), np.int32(-1))
        return collides if collides.any() else None
