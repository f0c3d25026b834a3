"""What the launches of the jagged ops ask of the compiler; launched.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch

from . import index_add, index_select, regrouping
from .regroup_plan import plan_pieces

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (index_add, index_select, regrouping)

# a run, its label, and what rows it reads where the order of a sum over a row is promised ("" where it is not)
Launch = tuple[Callable[[], None], str, str]


def launches() -> Iterator[Launch]:
    """Runs of every jagged op."""
    yield from _segments()
    yield from _buckets()
    yield from _dense()
    yield from _select()


def _segments() -> Iterator[Launch]:
    yield from ()


def _buckets() -> Iterator[Launch]:
    yield from ()


def _dense() -> Iterator[Launch]:
    yield from ()


def _select() -> Iterator[Launch]:
    wide, halves = (1, 3, 4, 20, 64, 128, 1023), (torch.float16, torch.bfloat16)
    for dim, dtype in [*((dim, torch.float32) for dim in wide), *((128, dtype) for dtype in halves), (6, halves[1])]:
        label = f"D={dim} {_name(dtype)}"
        yield partial(_select_bags, (8, dim), dtype), f"select {label}", ""
        # an element is a sum of its own, whatever the tile
        yield partial(_add_bags, (8, dim), dtype), label, ""
    yield partial(_select_bags, (8, 128), torch.float32, torch.int32), "select D=128 fp32 i32 ids", ""
    for dtype in (torch.int32, torch.int64, torch.float32, *halves):
        for weighted in (False, True):
            words = f"{_name(dtype)}{' weighted' * weighted}"
            yield partial(_select_bags, (8,), dtype, torch.int64, weighted), f"select {words}", ""
    yield partial(_select_bags, (8,), torch.int64, torch.int32), "select i64 i32 ids", ""
    yield partial(_add_bags, (8,), torch.float64), "D=1 fp64", ""
    for dtype, unit, inputs, outputs, repeats in (
        *((torch.float32, unit, 2, 2, 1) for unit in (1, 2, 4)),
        *((dtype, unit, 2, 2, 1) for dtype in halves for unit in (1, 2, 8)),
        *((dtype, unit, 2, 2, 3) for dtype in (torch.float32, *halves) for unit in (1, 8)),
        *((torch.float32, 4, *tensors, 1) for tensors in ((1, 1), (10, 2), (2, 10), (16, 16))),
    ):
        label = f"{_name(dtype)} by {unit} from {inputs} to {outputs}{f' {repeats} times' * (repeats > 1)}"
        yield partial(_regroup, dtype, unit, inputs, outputs, repeats), label, ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp").replace("int", "i")


def _select_bags(
    shape: tuple[int, ...], dtype: torch.dtype, ids: torch.dtype = torch.int64, weighted: bool = False
) -> None:
    """Eight bags of one value, each selected once."""
    ends = torch.arange(shape[0] + 1, dtype=ids)
    weights = torch.ones(shape[0]) if weighted else None
    index_select._select(torch.zeros(shape, dtype=dtype), weights, ends, ends[:-1], shape[0], ids, shape[0])


def _add_bags(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ends = torch.arange(shape[0] + 1)
    index_add._add(torch.zeros(shape, dtype=dtype), ends, ends[:-1], ends, shape[0], shape[0])


def _regroup(dtype: torch.dtype, unit: int, inputs: int, outputs: int, repeats: int) -> None:
    """Every input in every output; with `repeats` the gradient of a column that is in so many places."""
    width = 128 + unit if unit < 8 else 128
    every = [(tensor, 0, width) for tensor in reversed(range(inputs))]
    runs = plan_pieces([width] * inputs, [every] * outputs).runs
    if repeats > 1:
        flat = [number for row in runs.rows() for number in (*row, *row[3:] * (repeats - 1))]
        runs = runs._replace(flat=tuple(flat), repeats=repeats)
    tensors = [torch.zeros(8, width, dtype=dtype) for _ in range(inputs)]
    regrouping._regroup_columns(tensors, list(runs.flat), runs.repeats, list(runs.widths))
