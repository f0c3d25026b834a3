"""Matrices of 8 x 8 in shared memory and registers, and products of small matrices: ldmatrix, stmatrix, mma, wgmma.

The tensor cores' own rounding of sums is not specified: here a product is the float64 sum, rounded once to float32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .cta import Cta, NoValue
from .ptx import Instruction, elements
from .rounding import Array, from_fp8, widen_bf16
from .shared import BASE
from .warp import require_whole

if TYPE_CHECKING:
    from .decode import Decoder, Read, Step

# how bits of a type become numbers, and its bytes
_NUMBERS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "f16": (2, lambda bits: bits.view(np.float16)),
    "bf16": (2, lambda bits: widen_bf16(bits.view(np.uint16))),
    # the lower bits are not looked at
    "tf32": (4, lambda bits: (bits.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)),
    "s8": (1, lambda bits: bits.view(np.int8)),
    "u8": (1, lambda bits: bits.view(np.uint8)),
    "e4m3": (1, lambda bits: from_fp8(bits.view(np.uint8), "e4m3")),
    "e5m2": (1, lambda bits: from_fp8(bits.view(np.uint8), "e5m2")),
}
_RESULTS: dict[str, type[Any]] = {"f32": np.float32, "s32": np.int32}


def step(decoder: Decoder, instruction: Instruction) -> Step | None:
    """The step of such an instruction, or None where it is another."""
    parts = instruction.parts
    make = _FAMILIES.get(parts[0]) or _FAMILIES.get(".".join(parts[:2]))
    return make(decoder, parts, instruction.operands) if make else None


def _matrices(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    """ldmatrix, stmatrix: lane 8 j + i has the address of row i of matrix j."""
    if "m8n8" not in parts or parts[-1] != "b16":
        raise ValueError("only matrices m8n8 of b16")
    loads, transposed = parts[0] == "ldmatrix", "trans" in parts
    names, where = (elements(operands[0]), operands[1]) if loads else (elements(operands[1]), operands[0])
    address = decoder.address(where)
    puts = [decoder.write(name, "b32") for name in names] if loads else []
    reads = [] if loads else [decoder.read(name, "b32") for name in names]

    def run(cta: Cta, live: Array | None) -> None:
        require_whole(cta, live)
        warps = np.unique(cta.running(live) // 32)
        rows = np.arange(8 * len(names))
        lanes = (warps[:, None] * 32 + rows).reshape(-1)
        addresses = address(cta)[lanes]
        offsets = cta.shared_offsets(lanes, addresses, 16)
        owners, places = _parts_of_rows(warps, offsets.reshape(len(warps), len(names), 8), transposed)
        report = cta.shared_report(owners, places)
        if loads:
            cta.shared.note_read(owners, places, 2, report)
            data = cta.shared.bytes[offsets[:, None] + np.arange(16)].view(np.uint16)
            data = data.reshape(len(warps), len(names), 8, 8)
            data = data.transpose(0, 1, 3, 2) if transposed else data
            words = np.ascontiguousarray(data).view(np.uint32).reshape(len(warps), len(names), 32)
            for i, put in enumerate(puts):
                values = np.zeros((cta.size // 32, 32), np.uint32)
                values[warps] = words[:, i]
                put(cta, values.reshape(-1), live)
        else:
            words = np.stack([read(cta).reshape(-1, 32)[warps] for read in reads], axis=1)
            data = np.ascontiguousarray(words).view(np.uint16).reshape(len(warps), len(names), 8, 8)
            data = np.ascontiguousarray(data.transpose(0, 1, 3, 2) if transposed else data)
            cta.shared.note_write(owners, places, 2, report)
            cta.shared.bytes[offsets[:, None] + np.arange(16)] = data.view(np.uint8).reshape(len(lanes), 16)

    return run


def _parts_of_rows(warps: Array, offsets: Array, transposed: bool) -> tuple[Array, Array]:
    """Threads, and where the 2 bytes lie that each reads or writes of rows at `offsets` [warps, matrices, 8].

    The lanes of the addresses are others: a lane has the elements 2 (lane % 4) and the next of row lane / 4, or of
    that column.
    """
    across = (_LANE % 4 * 2)[:, None] + np.arange(2)
    along = np.broadcast_to((_LANE // 4)[:, None], across.shape)
    row, column = (across, along) if transposed else (along, across)
    places = offsets[:, :, row] + 2 * column
    owners = np.broadcast_to((warps[:, None] * 32 + _LANE)[:, None, :, None], places.shape)
    return owners.reshape(-1), places.reshape(-1)


def _shape(parts: tuple[str, ...]) -> tuple[int, int, int]:
    for part in parts:
        if match := re.fullmatch(r"m(\d+)n(\d+)k(\d+)", part):
            return int(match[1]), int(match[2]), int(match[3])
    raise ValueError("no shape")


_LANE = np.arange(32)


def _fragment(words: Array, kind: str, columns: int, upper_first: bool) -> Array:
    """[warps, 8 or 16, columns] from [registers, warps, 32]: rows of A, or columns of B.

    A lane holds a word of row lane / 4 at word lane % 4; the registers go on 8 rows below for A (`upper_first`), then
    4 words to the right.
    """
    size, number = _NUMBERS[kind]
    each = 4 // size
    count, warps, _ = words.shape
    values = number(np.ascontiguousarray(words)[..., None].view(np.uint8).reshape(count, warps, 32, 4)).reshape(
        count, warps, 32, each
    )
    rows = 16 if upper_first else 8
    tile = np.zeros((warps, rows, columns), values.dtype)
    for r in range(count):
        below, right = (r % 2, r // 2) if upper_first else (0, r)
        for i in range(each):
            tile[:, _LANE // 4 + 8 * below, (_LANE % 4 + 4 * right) * each + i] = values[r, :, :, i]
    return tile


def _mma(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    m, n, k = _shape(parts)
    result, a_kind, b_kind, _ = parts[-4:]
    if (m, n) != (16, 8) or result not in _RESULTS or not {a_kind, b_kind} <= set(_NUMBERS) or "sp" in parts:
        raise ValueError("only m16n8 of dense matrices with sums of f32 or s32")
    puts = [decoder.write(name, "b32") for name in elements(operands[0])]
    a, b, c = ([decoder.read(name, "b32") for name in elements(operand)] for operand in operands[1:4])
    dtype = _RESULTS[result]

    def words(cta: Cta, reads: list[Read]) -> Array:
        return np.stack([read(cta).reshape(-1, 32) for read in reads])

    def mma(cta: Cta, live: Array | None) -> None:
        require_whole(cta, live)
        first = _fragment(words(cta, a), a_kind, k, True)
        second = _fragment(words(cta, b), b_kind, k, False)
        start = words(cta, c).view(dtype)
        total = _products(first, second, dtype)
        for i, put in enumerate(puts):
            value = total[:, _LANE // 4 + 8 * (i // 2), _LANE % 4 * 2 + i % 2]
            put(cta, _added(start[i], value, dtype).reshape(-1), live)

    return mma


def _products(a: Array, b: Array, dtype: type[Any]) -> Array:
    wide = np.int64 if dtype is np.int32 else np.float64
    product: Array = a.astype(wide) @ b.astype(wide).swapaxes(-1, -2)
    return product


def _added(start: Array, product: Array, dtype: type[Any]) -> Array:
    return np.ascontiguousarray((start.astype(product.dtype) + product).astype(dtype))


# --- wgmma: products by four warps, of operands in shared memory, that go on while the threads do
@dataclass
class _Product:
    """A product that was not waited for: registers, their values to be, and the operands' bytes at its start."""

    group: int
    slots: list[int]
    values: dict[int, Array]
    live: Array | None
    operands: list[tuple[Array, Array]]


def _wgmma(decoder: Decoder, parts: tuple[str, ...], operands: tuple[str, ...]) -> Step:
    m, n, k = _shape(parts)
    result, a_kind, b_kind = parts[-3:]
    if m != 64 or result not in _RESULTS or not {a_kind, b_kind} <= set(_NUMBERS) or "sp" in parts:
        raise ValueError("only dense m64 with sums of f32 or s32")
    names = elements(operands[0])
    slots = [decoder.slots[name] for name in names]
    in_registers = operands[1].startswith("{")
    a_words = [decoder.read(name, "b32") for name in elements(operands[1])] if in_registers else []
    a_place = None if in_registers else decoder.read(operands[1], "b64")
    b_place, scale = decoder.read(operands[2], "b64"), decoder.read(operands[3], "pred")
    flags = [int(operand, 0) for operand in operands[4:]]
    negate = [flag == -1 for flag in flags[:2]]
    # of operands in registers there is no transposition
    transposed = [bool(flag) for flag in flags[2:]]
    a_transposed, b_transposed = ([False] * 2 + transposed)[-2:] if not in_registers else [False, bool(sum(transposed))]
    dtype = _RESULTS[result]
    lane = np.arange(128)

    def operand(
        cta: Cta, threads: Array, place: Array, rows: int, kind: str, columns_first: bool
    ) -> tuple[Array, tuple[Array, Array]]:
        size, number = _NUMBERS[kind]
        offsets = _tile(int(place[0]), rows, k, size, columns_first).reshape(-1) - BASE
        data = _read_tile(cta, threads, offsets, size)
        return number(data).reshape(rows, k), (offsets, data)

    def run(cta: Cta, live: Array | None) -> None:
        require_whole(cta, live)
        running = cta.running(live)
        values = {slot: np.zeros(cta.size, np.uint32) for slot in slots}
        used = []
        for group in np.unique(running // 128).tolist():
            own = slice(group * 128, group * 128 + 128)
            threads = cta.threads[own]
            second, noted = operand(cta, threads, b_place(cta)[own], n, b_kind, b_transposed)
            used.append(noted)
            if a_place is not None:
                first, noted = operand(cta, threads, a_place(cta)[own], m, a_kind, a_transposed)
                used.append(noted)
            else:
                words = np.stack([read(cta)[own].reshape(4, 32) for read in a_words])
                first = _fragment(words, a_kind, k, True).reshape(m, k)
            total = _products(first, second, dtype)
            total = -total if sum(negate) == 1 else total
            for i, slot in enumerate(slots):
                row = lane // 32 * 16 + lane % 32 // 4 + 8 * (i % 4 // 2)
                column = 8 * (i // 4) + lane % 4 * 2 + i % 2
                kept = scale(cta)[own]
                # sums that begin anew need no value
                before = _accumulator(cta, slot)[own].view(dtype) if kept.any() else dtype(0)
                start = np.where(kept, before, dtype(0))
                values[slot][own] = _added(start, total[row, column], dtype).view(np.uint32)
        cta.products.append(_Product(cta.products_committed, slots, values, live, used))
        for slot in slots:
            cta.registers[slot] = NoValue("in flight", "a sum of wgmma is read before it was waited for")

    return run


def _accumulator(cta: Cta, slot: int) -> Array:
    """A sum as the products under way leave it: those go on one after another."""
    for product in reversed(cta.products):
        if slot in product.values:
            value: Array = product.values[slot]
            return value
    register: Array = cta.registers[slot].view(np.uint32)
    return register


def _tile(descriptor: int, rows: int, k: int, size: int, columns_first: bool) -> Array:
    """[rows, k] addresses of the elements of an operand that a matrix descriptor tells of.

    Rows are those of A or the columns of B. Pieces of 16 bytes lie along k, or along the rows (`columns_first`), in
    the order that the swizzle gives them.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    # pieces of 16 bytes in a line of the swizzle
    line = {0: 1, 1: 8, 2: 4, 3: 2}[descriptor >> 62 & 3]
    each = 16 // size
    row, column = np.arange(rows)[:, None], np.arange(k)[None, :]
    if columns_first:
        piece, within = row // each, row % each
        if line == 1:
            place = piece * stride + column % 8 * 16 + column // 8 * leading
        else:
            place = piece % line * 16 + piece // line * leading + column % 8 * line * 16 + column // 8 * stride
    else:
        piece, within = column // each, column % each
        between = piece * leading if line == 1 else piece * 16
        place = row % 8 * line * 16 + row // 8 * stride + between
    address = start + place
    address = address ^ ((address >> 7) % line << 4)
    return np.asarray(address + within * size)


def _read_tile(cta: Cta, threads: Array, offsets: Array, size: int) -> Array:
    """[elements, bytes] of an operand, read for four warps, with the checks of a read by the asynchronous proxy."""
    pieces = np.unique(offsets // 16 * 16)
    # a read by each of the four warps: whoever writes has to wait for all of them
    for warp in range(0, 128, 32):
        owner = np.full(len(pieces), threads[warp])
        cta.shared_offsets(owner, pieces + BASE, 16)
        cta.shared.note_read(owner, pieces, 16, cta.shared_report(owner, pieces))
    unfenced = cta.shared.unfenced[pieces // cta.shared.piece]
    if unfenced.any():
        place = int(pieces[unfenced.argmax()]) + BASE
        cta.report("unfenced", "no fence.proxy.async between a write and wgmma", address=place)
    return _bytes(cta, offsets, size)


def _bytes(cta: Cta, offsets: Array, size: int) -> Array:
    data: Array = cta.shared.bytes[offsets[:, None] + np.arange(size)]
    return data


def _commit(cta: Cta, live: Array | None) -> None:
    cta.products_committed += 1


def _wait(cta: Cta, live: Array | None, newest: int) -> None:
    left = []
    for product in cta.products:
        if product.group >= cta.products_committed - newest:
            left.append(product)
            continue
        for offsets, data in product.operands:
            if (_bytes(cta, offsets, data.shape[1]) != data).any():
                cta.report("in flight", "an operand of wgmma was written before the product was waited for")
        for slot, value in product.values.items():
            cta.registers[slot] = value
    cta.products = left
    # what later products of the same registers will leave is not there yet
    for product in left:
        for slot in product.slots:
            cta.registers[slot] = NoValue("in flight", "a sum of wgmma is read before it was waited for")


_FAMILIES: dict[str, Callable[[Decoder, tuple[str, ...], tuple[str, ...]], Step]] = {
    "ldmatrix": _matrices, "stmatrix": _matrices, "mma.sync": _mma, "wgmma.mma_async": _wgmma,
    "wgmma.fence": lambda decoder, parts, operands: require_whole,
    "wgmma.commit_group": lambda decoder, parts, operands: _commit,
    "wgmma.wait_group": lambda decoder, parts, operands: partial(_wait, newest=int(operands[0], 0)),
}  # fmt: skip
