"""Rows moved between slots on the device and records elsewhere, both ways in one launch.

Shapes: parts are what a row has on the device, each contiguous: weights and element states [S, w], row states [S];
records [R, B] uint8 hold all parts of a row side by side, as `record_layout` says; slots, saves, loads [M] int64.
Bytes moved: a row's bytes are read once and written once for each save, and for each load; 24 a move for its numbers.
On CUDA records may be in pinned host memory: then half of each move crosses the bus, in either direction at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache, partial
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from .. import numba_loops
from .._op import INTERPRETED, direct, in_graph, next_power_of_2, register, runs_kernel, tl, triton
from ..persistent_grid import PERSISTENT_PROGRAMS, persistent_programs

# bytes on which parts of elements begin, and of which a record has a multiple
_PART, _RECORD = 16, 64
# units of a row in a tile at most, units of a tile, rows of a tile at least and at most, and its warps
_COLUMNS, _TILE, _ROWS, _WARPS = 256, 1024, (1, 8) if INTERPRETED else (8, 128), 4
# threads of a warp at most, those of AMD's
_MOST_LANES = 64
# programs that move rows over the bus: enough to fill it, and the multiprocessors are left to the step beside it
_BUS_PROGRAMS = 64
# the CPU's compiled loops; None where numba is missing or does not work
loops = partial(numba_loops.loops, "rows_loops")


class RecordLayout(NamedTuple):
    """Where in a record each part of a row begins, and the bytes of a record, padding included."""

    offsets: tuple[int, ...]
    nbytes: int


def record_layout(rows: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> RecordLayout:
    """The record of a row whose parts have these shapes, (w,) or (), and dtypes.

    Parts of elements come first, in their order, each on 16 bytes; then one number after another of those that have one
    a row. A record is padded to a multiple of 64 bytes.
    """
    # a compiler would trace what is kept, and warn
    layout = _record_layout.__wrapped__ if in_graph() else _record_layout
    return layout(tuple(tuple(row) for row in rows), tuple(dtypes))


@lru_cache(maxsize=256)
def _record_layout(rows: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> RecordLayout:
    offsets, end = [0] * len(rows), 0
    # stable: elements before numbers of a row
    for i in sorted(range(len(rows)), key=lambda i: not rows[i]):
        align = _PART if rows[i] else dtypes[i].itemsize
        offsets[i] = -(-end // align) * align
        end = offsets[i] + prod(rows[i]) * dtypes[i].itemsize
    return RecordLayout(tuple(offsets), -(-end // _RECORD) * _RECORD)


def layout_of(parts: Sequence[Tensor]) -> RecordLayout:
    """The record of a row of these parts, [R, ...] each."""
    return record_layout([part.shape[1:] for part in parts], [part.dtype for part in parts])


def move_rows_ref(
    parts: Sequence[Tensor], records: Tensor, slots: Tensor, saves: Tensor, loads: Tensor,
    first_slot: int | None = None, first_row: int = 0,
) -> None:  # fmt: skip
    """All saves, then all loads: the same, because no record is loaded that is saved in the same call."""
    if first_slot is not None:
        slots, saves, loads = _own(parts[0].shape[0], records.shape[0], slots, saves, loads, first_slot, first_row)
    live = slots >= 0
    saved, loaded = live & (saves >= 0), live & (loads >= 0)
    assert not torch.isin(loads[loaded], saves[saved]).any(), "a record is both saved and loaded"
    for part, offset in zip(parts, layout_of(parts).offsets, strict=True):
        nbytes = prod(part.shape[1:]) * part.itemsize
        if nbytes == 0:
            continue
        rows = part.view(part.shape[0], -1).view(torch.uint8)  # [S, nbytes]
        column = records[:, offset : offset + nbytes]
        column.index_copy_(0, saves[saved].to(records.device), rows[slots[saved]].to(records.device))
        rows.index_copy_(0, slots[loaded], column[loads[loaded].to(records.device)].to(rows.device))


def _own(
    slot_count: int, record_count: int, slots: Tensor, saves: Tensor, loads: Tensor, first_slot: int, first_row: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers that count over several tables as those of one, and -1 in place of the others'."""
    numbers = ((slots - first_slot, slot_count), (saves - first_row, record_count), (loads - first_row, record_count))
    own = [torch.where((some >= 0) & (some < end), some, -1) for some, end in numbers]
    return own[0], own[1], own[2]


@triton.jit
def _exchange(  # type: ignore[no-untyped-def]
    part,
    records,
    slot,
    save,
    load,
    saved,
    loaded,
    RECORD: tl.constexpr,
    OFFSET: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHARED: tl.constexpr,
):
    """One part of some slots' rows out to their records and in from theirs, as integers of UNIT bytes."""
    BITS: tl.constexpr = tl.int32 if UNIT == 4 else (tl.int16 if UNIT == 2 else tl.int8)
    here = tl.multiple_of(part.to(tl.pointer_type(BITS)), ALIGN)
    there = tl.multiple_of(records.to(tl.pointer_type(BITS)), ALIGN)
    for begin in range(0, UNITS, BLOCK_D):
        d = begin + tl.arange(0, BLOCK_D)
        inside = (d < UNITS)[None, :]
        row = here + (slot * UNITS)[:, None] + d[None, :]
        out = saved[:, None] & inside
        into = loaded[:, None] & inside
        at = OFFSET // UNIT + d[None, :]
        # no record that is loaded is saved here: both are asked for before either is written
        old = tl.load(row, mask=out, other=0)
        new = tl.load(there + (load * (RECORD // UNIT))[:, None] + at, mask=into, other=0)
        if SHARED:
            # several threads have each element: none may write before all have read
            tl.debug_barrier()
        tl.store(there + (save * (RECORD // UNIT))[:, None] + at, old, mask=out)
        tl.store(row, new, mask=into)


@triton.jit(
    do_not_specialize=["M", "S", "R", "first_slot", "first_row", "programs"],
    do_not_specialize_on_alignment=["slots", "saves", "loads"],
)
def _move_rows_kernel(  # type: ignore[no-untyped-def]
    parts,
    records,
    slots,
    saves,
    loads,
    M,
    S,
    R,
    first_slot,
    first_row,
    programs,
    RECORD: tl.constexpr,
    OFFSETS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    THREADS: tl.constexpr,
):
    for begin in range(tl.program_id(0) * BLOCK_M, M, programs * BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        slot = tl.load(slots + m, mask=m < M, other=-1) - first_slot
        live = (slot >= 0) & (slot < S)
        save = tl.load(saves + m, mask=live, other=-1) - first_row
        load = tl.load(loads + m, mask=live, other=-1) - first_row
        saved = (save >= 0) & (save < R)
        loaded = (load >= 0) & (load < R)
        # a batch that misses less than there was room for ends in moves of nothing
        if tl.max((saved | loaded).to(tl.int32), 0) > 0:
            for i in tl.static_range(len(UNITS)):
                _exchange(
                    parts[i], records, slot, save, load, saved, loaded, RECORD, OFFSETS[i], UNITS[i], UNIT[i],
                    ALIGNS[i], BLOCKS[i], BLOCK_M * BLOCKS[i] < THREADS,
                )  # fmt: skip


def move_rows(
    parts: Sequence[Tensor], records: Tensor, slots: Tensor, saves: Tensor, loads: Tensor,
    first_slot: int | None = None, first_row: int = 0,
) -> None:  # fmt: skip
    """Save the rows of some slots in records, and load others' records into them, in place and bit by bit.

    For each m the row of slots[m] goes to record saves[m], then record loads[m] comes into the slot. A negative slot
    moves nothing, a negative save or load not in that direction. No slot may come twice, nor a record, be it saved or
    loaded. A record's padding is left as it is. With `first_slot`, slots and records are counted over several tables:
    those of this one begin there and at `first_row`, and numbers of others move nothing.

    Shapes: parts [S, w] or [S] of any dtypes, contiguous, each perhaps the beginning of more; records [R, B] uint8,
    contiguous, B as `record_layout` says; slots, saves, loads [M] int64, on the parts' device.

    Raises:
        ValueError, TypeError: shapes, dtypes, strides or devices do not fit.
        IndexError: on the CPU, a slot or record that does not exist; nothing has moved then. On CUDA it is left out.
    """
    _check(parts, records, slots, saves, loads)
    if direct(*parts, records, slots, saves, loads):
        _move_rows(parts, records, slots, saves, loads, first_slot, first_row)
    else:
        torch.ops.shardwise.move_rows(list(parts), records, slots, saves, loads, first_slot, first_row)


def _check(parts: Sequence[Tensor], records: Tensor, slots: Tensor, saves: Tensor, loads: Tensor) -> None:
    if not parts:
        raise ValueError("move_rows: a row needs at least one part, got none")
    first = parts[0]
    for i, part in enumerate(parts):
        if part.dim() not in (1, 2) or part.shape[0] != first.shape[0]:
            raise ValueError(f"move_rows: parts[{i}] must be [S, w] or [S], S = {first.shape[0]}, got {[*part.shape]}")
        if not part.is_contiguous():
            raise ValueError(f"move_rows: parts[{i}] must be contiguous, got strides {part.stride()}")
        if part.device != first.device:
            raise ValueError(f"move_rows: parts[{i}] is on {part.device}, parts[0] on {first.device}")
    for name, numbers in (("slots", slots), ("saves", saves), ("loads", loads)):
        if numbers.dtype != torch.int64:
            raise TypeError(f"move_rows: {name} must be int64, got {numbers.dtype}")
        if numbers.dim() != 1 or numbers.shape != slots.shape:
            raise ValueError(f"move_rows: {name} must be [{slots.shape[0]}] as slots are, got {[*numbers.shape]}")
        if numbers.device != first.device:
            raise ValueError(f"move_rows: {name} must be on {first.device} as the parts are, got {numbers.device}")
    nbytes = layout_of(parts).nbytes
    if records.dtype != torch.uint8:
        raise TypeError(f"move_rows: records must be uint8, got {records.dtype}")
    if records.dim() != 2 or records.shape[1] != nbytes or not records.is_contiguous():
        raise ValueError(f"move_rows: records must be contiguous [R, {nbytes}] for these parts, got {[*records.shape]}")
    # a pinned tensor has an address that kernels can read
    if records.device != first.device and not (first.is_cuda and records.is_cpu and records.is_pinned()):
        raise ValueError(f"move_rows: records must be on {first.device} or pinned, got {records.device}")


def _move_rows(
    parts: Sequence[Tensor], records: Tensor, slots: Tensor, saves: Tensor, loads: Tensor,
    first_slot: int | None = None, first_row: int = 0,
) -> None:  # fmt: skip
    if slots.shape[0] == 0:
        return
    slots, saves, loads = slots.contiguous(), saves.contiguous(), loads.contiguous()
    if runs_kernel(parts[0]):
        _launch(parts, records, slots, saves, loads, first_slot or 0, first_row)
        return
    if first_slot is not None:
        slots, saves, loads = _own(parts[0].shape[0], records.shape[0], slots, saves, loads, first_slot, first_row)
    if parts[0].is_cpu:
        _require_inside(parts[0].shape[0], records.shape[0], slots, saves, loads)
        if (compiled := loops()) is not None:
            table = array("q")
            for part, offset in _with_columns(parts):
                table.extend((part.data_ptr(), prod(part.shape[1:]) * part.itemsize, offset))
            compiled.move(
                table.buffer_info()[0], len(table) // 3, records.data_ptr(), records.shape[1], slots.data_ptr(),
                saves.data_ptr(), loads.data_ptr(), slots.shape[0],
            )  # fmt: skip
            return
    move_rows_ref(parts, records, slots, saves, loads)


def _with_columns(parts: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Parts that have bytes, and where they begin in a record."""
    offsets = layout_of(parts).offsets
    return [(part, offset) for part, offset in zip(parts, offsets, strict=True) if prod(part.shape[1:])]


def _launch(
    parts: Sequence[Tensor], records: Tensor, slots: Tensor, saves: Tensor, loads: Tensor, first_slot: int,
    first_row: int,
) -> None:  # fmt: skip
    moved = _with_columns(parts)
    count, record = slots.shape[0], records.shape[1]
    if not moved or not records.shape[0]:
        return
    units, unit, aligns = [], [], []
    for part, offset in moved:
        nbytes = prod(part.shape[1:]) * part.itemsize
        # of both sides, or what a thread has loaded would have to go to another one to be stored
        align = gcd(16, nbytes, part.data_ptr(), records.data_ptr(), offset)
        unit.append(min(align, 4))
        units.append(nbytes // unit[-1])
        aligns.append(align)
    # a thread that moves single units has an address for each
    blocks = [
        min(next_power_of_2(n), _COLUMNS if align == 16 else _COLUMNS // 2)
        for n, align in zip(units, aligns, strict=True)
    ]
    block = max(_ROWS[0], min(_ROWS[1], _TILE // max(blocks)))
    most = _BUS_PROGRAMS if records.device != parts[0].device else persistent_programs(parts[0].device)
    programs = min(triton.cdiv(count, block), PERSISTENT_PROGRAMS or most)
    _move_rows_kernel[(programs,)](
        tuple(part for part, _ in moved), records, slots, saves, loads, count, parts[0].shape[0], records.shape[0],
        first_slot, first_row, programs, record, tuple(offset for _, offset in moved), tuple(units), tuple(unit),
        tuple(aligns), tuple(blocks), block, _MOST_LANES * _WARPS, num_warps=_WARPS,
    )  # fmt: skip


def _require_inside(slot_count: int, record_count: int, slots: Tensor, saves: Tensor, loads: Tensor) -> None:
    for name, numbers, end in (
        ("slots", slots, slot_count),
        ("saves", saves, record_count),
        ("loads", loads, record_count),
    ):
        # of a slot that is none nothing else is looked at
        numbers = numbers if numbers is slots else torch.where(slots >= 0, numbers, -1)
        most, at = numbers.max(0)
        if int(most) >= end:
            raise IndexError(f"move_rows: {name}[{int(at)}] is {int(most)}, there are {end}")


register(
    "move_rows(Tensor(a!)[] parts, Tensor(b!) records, Tensor slots, Tensor saves, Tensor loads,"
    " SymInt? first_slot=None, SymInt first_row=0) -> ()",
    _move_rows,
    lambda parts, records, slots, saves, loads, first_slot=None, first_row=0: None,
)
