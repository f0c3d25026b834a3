"""Checks of the ops that say where rows lie: moves between slots and records, victims, first values.

`ROWS` is the table of them, from which compilers and the executor of compiled kernels take calls, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from shardwise.kernels.rows import initial_rows, lowest, move_rows

from .check import Check, check, random
from .served_checks import Served

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# columns and dtype of each part of a row; no columns: one number a row
Parts = Sequence[tuple[int | None, torch.dtype]]
_F32, _NUMBER = torch.float32, (None, torch.float32)
PARTS: dict[str, Parts] = {
    "D=128 fp32": ((128, _F32),),
    "D=128 fp32 rowwise": ((128, _F32), _NUMBER),
    "D=128 fp32 adam": ((128, _F32),) * 3,
    "D=128 bf16 rowwise": ((128, torch.bfloat16), _NUMBER),
    "D=3 fp16 adam": ((3, torch.float16), (3, _F32), (3, _F32)),
    "D=4 fp32 two states": ((4, _F32), _NUMBER, (4, _F32)),
    "D=1 fp32": ((1, _F32),),
    "D=1023 fp32 rowwise": ((1023, _F32), _NUMBER),
    "D=4096 fp32": ((4096, _F32),),
}


def moves(parts: Parts, slots: int = 12, records: int = 40, count: int = 11) -> list[Any]:
    """Arguments of `move_rows`: random bits, and some moves without a slot, a save or a load."""
    generator = random(1)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(0, 120, shape, dtype=torch.uint8, generator=generator)

    tensors = [
        bits(slots * (columns or 1) * dtype.itemsize).view(dtype).view(slots, *([] if columns is None else [columns]))
        for columns, dtype in parts
    ]
    places = torch.randperm(records, generator=generator)
    numbers = [torch.randperm(slots, generator=generator)[:count], places[:count], places[count : 2 * count]]
    for each, every in zip(numbers, (5, 3, 4), strict=True):
        each[2::every] = -1
    return [tensors, bits(records, move_rows.layout_of(tensors).nbytes), *numbers]


def victims(sizes: Sequence[int], top: int) -> list[Any]:
    """Arguments of `lowest`: keys below `top`, every fifth slot held; a third of each table, of the last too many."""
    borders = torch.tensor([0, *sizes]).cumsum(0)
    keys = torch.randint(0, top, (int(borders[-1]) + 1,), generator=random(2), dtype=torch.int32)
    counts = torch.tensor([size // 3 for size in sizes[:-1]] + [sizes[-1] + 2])
    return [keys, (torch.arange(len(keys)) % 5 == 0).int(), borders, counts, int(counts.sum()) + 1]


def _rows(kind: str, dtype: torch.dtype, columns: int) -> list[Any]:
    rows = torch.randint(-(2**62), 2**62, (9,), generator=random(3))
    return [rows, torch.tensor([12345]), 2, columns, kind, -0.5, 0.25, dtype]


def _table() -> Iterator[Served]:
    for words, parts in PARTS.items():
        yield Served(
            "move_rows", words, move_rows.move_rows_ref, partial(moves, parts), "rows.move_rows.move_rows",
            writes=(0, 1),
        )  # fmt: skip
    for sizes, top in (((300,), 2**31 - 1), ((20, 0, 7), 40), ((5,) * 20, 9)):
        yield Served(
            "lowest", f"{len(sizes)} tables keys below {top}", lowest.lowest_ref, partial(victims, sizes, top),
            "rows.lowest.count_digits rows.lowest.count_picked rows.lowest.pick",
        )  # fmt: skip
    for kind, dtype, columns in (
        ("uniform", torch.float32, 128), ("normal", torch.float32, 128), ("uniform", torch.bfloat16, 20),
        ("normal", torch.float16, 3), ("normal", torch.bfloat16, 1023),
    ):  # fmt: skip
        yield Served(
            "initial_rows", f"{kind} D={columns} {_TYPES[dtype]}", initial_rows.initial_rows_ref,
            partial(_rows, kind, dtype, columns), "rows.initial_rows.initial_rows",
        )  # fmt: skip


ROWS: tuple[Served, ...] = tuple(_table())


def checks() -> Iterator[Check]:
    """Every call of the table."""
    for each in ROWS:
        yield check(
            "rows of tables larger than the device", f"{each.op}, {each.words}", each.op, each.call,
            each.call_reference, each.inputs,
        )  # fmt: skip
